//! SwiGLU against a plain reference, and its gradients.

use super::*;
use crate::DType::{self, Bf16, F32};
use crate::backend::cpu::testing::{U, U16, buffer, normal, same_on_threads, slope, wide};
use crate::bf16;
use crate::dtype::{from_bf16, to_bf16};

const SHAPES: [(usize, usize); 5] = [(1, 1), (3, 17), (900, 48), (2, 40_000), (0, 8)];

fn sigmoid(x: f64) -> f64 {
    1.0 / (1.0 + (-x).exp())
}

/// R16(silu(x)) from f64. Two roundings (f64 to fp32 to bf16) could differ from one only at a tie of bf16, which the
/// transcendental silu of a bf16 number does not meet.
fn silu_bf16(x: f32) -> f32 {
    from_bf16(to_bf16((x as f64 * sigmoid(x as f64)) as f32))
}

fn inputs(dtype: DType, t: usize, f: usize) -> [Vec<f32>; 2] {
    [("gate_up", 2 * t * f), ("d_out", t * f)]
        .map(|(name, n)| normal(name, n).iter().map(|x| dtype.round(3.0 * x)).collect())
}

fn run_forward(dtype: DType, width: usize, gate_up: &[f32]) -> Vec<f32> {
    let gate_up = buffer(dtype, gate_up);
    same_on_threads(|threads| {
        let mut out = buffer(dtype, &vec![9.0; gate_up.len() / 2]);
        swiglu_forward(threads, SwiGluForward { gate_up: gate_up.view(), out: out.view_mut(), width }).unwrap();
        out.view().to_f32()
    })
}

fn run_backward(dtype: DType, width: usize, gate_up: &[f32], d_out: &[f32]) -> Vec<f32> {
    let (gate_up, d_out) = (buffer(dtype, gate_up), buffer(dtype, d_out));
    same_on_threads(|threads| {
        let mut d = buffer(dtype, &vec![9.0; gate_up.len()]);
        let args = SwiGluBackward { gate_up: gate_up.view(), d_out: d_out.view(), d_gate_up: d.view_mut(), width };
        swiglu_backward(threads, args).unwrap();
        d.view().to_f32()
    })
}

#[test]
fn silu_of_every_bf16_is_correctly_rounded() {
    let gates: Vec<f32> = (0..=u16::MAX).map(|b| from_bf16(bf16::from_bits(b))).collect();
    let gate_up: Vec<f32> = gates.iter().copied().chain(gates.iter().map(|_| 1.0)).collect();
    // Not through `same_on_threads`, for which a NaN differs from itself.
    let (gate_up, mut out) = (buffer(Bf16, &gate_up), buffer(Bf16, &gates));
    let args = SwiGluForward { gate_up: gate_up.view(), out: out.view_mut(), width: gates.len() };
    swiglu_forward(&Threads::new(1).unwrap(), args).unwrap();
    let mut wrong = 0;
    for (x, y) in gates.into_iter().zip(out.view().to_f32()) {
        let exact = silu_bf16(x);
        if y.to_bits() != exact.to_bits() && !(y.is_nan() && exact.is_nan()) {
            println!("silu({x:?}) = {y:?}, exactly {exact:?}");
            wrong += 1;
        }
    }
    assert_eq!(wrong, 0);
}

#[test]
fn forward_rounds_silu_and_then_the_product() {
    for (t, f) in SHAPES {
        let [gate_up, _] = inputs(Bf16, t, f);
        let got = run_forward(Bf16, f, &gate_up);
        for (i, y) in got.iter().enumerate() {
            let at = i / f * 2 * f + i % f;
            let expected = Bf16.round(silu_bf16(gate_up[at]) * gate_up[at + f]);
            assert_eq!(y.to_bits(), expected.to_bits(), "{t}x{f} at {i}");
        }
        let [gate_up, _] = inputs(F32, t, f);
        for (i, y) in run_forward(F32, f, &gate_up).into_iter().enumerate() {
            let at = i / f * 2 * f + i % f;
            let (g, u) = (gate_up[at] as f64, gate_up[at + f] as f64);
            // e^−|x| is within two half units, 1 + z, two products and the quotient round once each.
            assert!((y as f64 - g * sigmoid(g) * u).abs() <= 6.0 * U * (g * sigmoid(g) * u).abs(), "{t}x{f} at {i}");
        }
    }
}

#[test]
fn backward_is_the_formula_within_its_roundings() {
    for dtype in [F32, Bf16] {
        for (t, f) in SHAPES {
            let [gate_up, d_out] = inputs(dtype, t, f);
            let got = run_backward(dtype, f, &gate_up, &d_out);
            for (i, d) in d_out.iter().enumerate() {
                let at = i / f * 2 * f + i % f;
                let (g, u, d) = (gate_up[at] as f64, gate_up[at + f] as f64, *d as f64);
                let s = sigmoid(g);
                let stored = if dtype == Bf16 { U16 } else { 0.0 };
                if dtype == Bf16 {
                    let expected = Bf16.round(d as f32 * silu_bf16(gate_up[at]));
                    assert_eq!(got[at + f].to_bits(), expected.to_bits(), "{t}x{f} d_up {i}");
                } else {
                    assert!((got[at + f] as f64 - d * g * s).abs() <= 6.0 * U * (d * g * s).abs(), "{t}x{f} d_up {i}");
                }
                let exact = d * u * s * (1.0 + g * (1.0 - s));
                // Ten roundings, each of a number no larger than this; then the stored one.
                let size = (d * u * s).abs() * (1.0 + (g * (1.0 - s)).abs());
                let error = (got[at] as f64 - exact).abs();
                assert!(
                    error <= 1.01 * (10.0 * U * size + stored * exact.abs()),
                    "{dtype} {t}x{f} d_gate {i}: {error}"
                );
            }
        }
    }
}

#[test]
fn backward_is_the_slope_of_the_forward() {
    let (t, f) = (2, 17);
    let [gate_up, d_out] = inputs(F32, t, f);
    let got = run_backward(F32, f, &gate_up, &d_out);
    let loss = |x: &[f64]| -> f64 {
        (0..t * f)
            .map(|i| {
                let at = i / f * 2 * f + i % f;
                d_out[i] as f64 * x[at] * sigmoid(x[at]) * x[at + f]
            })
            .sum()
    };
    let x = wide(&gate_up);
    for (i, d) in got.iter().enumerate() {
        // Ten roundings of numbers below 256, and a quotient good to 1e-7: h² = 1e-10 times a third derivative, of a
        // product below 256, of at most 1.
        assert!((*d as f64 - slope(&x, i, loss)).abs() < 10.0 * 256.0 * U + 1e-7, "{i}");
    }
}
