//! RoPE against a plain reference, and its gradient.

use super::*;
use crate::DType::{self, Bf16, F32};
use crate::backend::cpu::testing::{U, buffer, normal, same_on_threads, slope, wide};

/// Rows, row length, heads, head size, sequence length, first position.
const SHAPES: [[usize; 6]; 6] = [
    [1, 2, 1, 2, 1, 0],
    [7, 25, 3, 6, 3, 2],
    [900, 48, 2, 24, 450, 0],
    [4, 17, 1, 16, 4, 1],
    [3, 300, 1, 260, 2, 0],
    [0, 4, 1, 4, 5, 0],
];

struct Case {
    shape: [usize; 6],
    x: Vec<f32>,
    cos: Vec<f32>,
    sin: Vec<f32>,
}

fn case(dtype: DType, shape: [usize; 6]) -> Case {
    let [rows, row_len, _, head_dim, seq_len, first] = shape;
    let angles = |position: usize| (0..head_dim / 2).map(move |j| position as f32 * 0.3f32.powi(j as i32 + 1));
    let all: Vec<f32> = (0..first + seq_len).flat_map(angles).collect();
    Case {
        shape,
        x: normal("x", rows * row_len).into_iter().map(|x| dtype.round(x)).collect(),
        cos: all.iter().map(|a| a.cos()).collect(),
        sin: all.iter().map(|a| a.sin()).collect(),
    }
}

fn run(dtype: DType, case: &Case, x: &[f32], inverse: bool) -> Vec<f32> {
    let [_, row_len, heads, head_dim, seq_len, first_position] = case.shape;
    same_on_threads(|threads| {
        let mut x = buffer(dtype, x);
        let (cos, sin) = (&case.cos[..], &case.sin[..]);
        let args = Rope { x: x.view_mut(), row_len, heads, head_dim, seq_len, first_position, cos, sin, inverse };
        args.check().unwrap();
        rope(threads, args).unwrap();
        x.view().to_f32()
    })
}

/// The definition, in f64, each named point rounded by `round`.
fn reference(case: &Case, x: &[f64], inverse: bool, round: impl Fn(f64) -> f64) -> Vec<f64> {
    let [rows, row_len, heads, d, seq_len, first] = case.shape;
    let mut out = x.to_vec();
    for t in 0..rows {
        for head in 0..heads {
            let at = t * row_len + head * d;
            for j in 0..d {
                let angle = (first + t % seq_len) * d / 2 + j % (d / 2);
                let (c, s) = (round(case.cos[angle] as f64), round(case.sin[angle] as f64));
                let s = if inverse { -s } else { s };
                let turned = if j < d / 2 { -x[at + j + d / 2] } else { x[at + j - d / 2] };
                out[at + j] = round(round(x[at + j] * c) + round(turned * s));
            }
        }
    }
    out
}

#[test]
fn every_bit_is_the_definitions() {
    for dtype in [F32, Bf16] {
        for shape in SHAPES {
            let case = case(dtype, shape);
            for inverse in [false, true] {
                let got = run(dtype, &case, &case.x, inverse);
                // f64 holds a product of two fp32 numbers exactly and a sum to more than twice fp32's digits, so
                // rounding it to fp32 is what fp32 arithmetic gives.
                let expected = reference(&case, &wide(&case.x), inverse, |x| dtype.round(x as f32) as f64);
                for (i, (g, e)) in got.iter().zip(expected).enumerate() {
                    assert_eq!(g.to_bits(), (e as f32).to_bits(), "{dtype} {shape:?} inverse {inverse} at {i}");
                }
            }
        }
    }
}

#[test]
fn the_inverse_is_the_slope_of_the_forward() {
    let case = case(F32, [7, 25, 3, 6, 3, 2]);
    let d_out = normal("d_out", case.x.len());
    let d_x = run(F32, &case, &d_out, true);
    let loss =
        |x: &[f64]| -> f64 { reference(&case, x, false, |x| x).iter().zip(&d_out).map(|(y, d)| y * *d as f64).sum() };
    let x = wide(&case.x);
    for (i, d_x) in d_x.iter().enumerate() {
        // Three roundings of numbers below 8; the quotient of a linear function is off by f64 rounding over h alone.
        assert!((*d_x as f64 - slope(&x, i, loss)).abs() < 3.0 * 8.0 * U + 1e-8, "{i}");
    }
}
