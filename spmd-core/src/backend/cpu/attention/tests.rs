//! Attention against a plain reference, and its gradients.

use super::reference::{Reference, forward_value};
use super::*;
use crate::Buffer;
use crate::backend::cpu::bounds::{assert_within, exact, random, zeros};
use crate::ops::AttentionBackward;

fn shape(batch: usize, seq_len: usize, heads: [usize; 2], head_dim: usize, window: Option<usize>) -> AttentionShape {
    AttentionShape { batch, seq_len, heads: heads[0], kv_heads: heads[1], head_dim, window }
}

/// Odd lengths, one token, several query blocks, several key blocks, several sequences, all groupings, all windows.
fn shapes() -> Vec<AttentionShape> {
    let mut shapes = Vec::new();
    for (seq_len, head_dim) in [(1, 16), (7, 6), (65, 16), (65, 64)] {
        for heads in [[2, 2], [4, 2], [4, 1]] {
            for window in [None, Some(1), Some(8), Some(100)] {
                shapes.push(shape(2, seq_len, heads, head_dim, window));
            }
        }
    }
    for window in [None, Some(8), Some(530)] {
        shapes.push(shape(1, KEYS + 101, [2, 1], 6, window));
    }
    shapes.push(shape(1, 300, [1, 1], 8, Some(290)));
    shapes
}

struct Run {
    out: Buffer,
    lse: Vec<f32>,
    d_qkv: Buffer,
}

/// Forward and backward: `qkv` and `d_out` as given, results of dtype `to`.
fn run(threads: usize, shape: AttentionShape, qkv: &Buffer, d_out: &Buffer, to: DType) -> Run {
    let threads = Threads::new(threads).unwrap();
    // What is there before must not matter.
    let mut out = random(to, 90, d_out.len());
    let mut d_qkv = random(to, 91, qkv.len());
    let mut lse = vec![f32::NAN; shape.rows() * shape.heads];
    let args = Attention { shape, qkv: qkv.view(), out: out.view_mut(), lse: &mut lse };
    attention_forward(&threads, args).unwrap();
    let args = AttentionBackward {
        shape,
        qkv: qkv.view(),
        out: out.view(),
        lse: &lse,
        d_out: d_out.view(),
        d_qkv: d_qkv.view_mut(),
    };
    attention_backward(&threads, args).unwrap();
    Run { out, lse, d_qkv }
}

fn inputs(shape: &AttentionShape, dtype: DType) -> (Buffer, Buffer) {
    let width = shape.heads * shape.head_dim;
    (random(dtype, 20, shape.rows() * shape.row_len()), random(dtype, 21, shape.rows() * width))
}

#[test]
fn both_directions_are_within_their_rounding_of_f64() {
    for shape in shapes() {
        for (from, to) in [(DType::F32, DType::F32), (DType::Bf16, DType::Bf16), (DType::Bf16, DType::F32)] {
            let (qkv, d_out) = inputs(&shape, from);
            let found = run(1, shape, &qkv, &d_out, to);
            let expected = Reference::of(&shape, &exact(&qkv), &exact(&d_out));
            assert_within(&format!("{shape:?} {from} out"), &found.out, &expected.out.value, &expected.out.bound);
            let lse = Buffer::from_f32(DType::F32, &found.lse, "test").unwrap();
            assert_within(&format!("{shape:?} {from} lse"), &lse, &expected.lse.value, &expected.lse.bound);
            let d_qkv = &expected.d_qkv;
            assert_within(&format!("{shape:?} {from} d_qkv"), &found.d_qkv, &d_qkv.value, &d_qkv.bound);
        }
    }
}

/// The f64 gradient the kernels are held against is the central difference of the f64 forward.
#[test]
fn the_reference_gradient_is_the_central_difference() {
    for shape in [shape(2, 5, [4, 2], 3, None), shape(1, 7, [2, 1], 4, Some(3))] {
        let (qkv, d_out) = inputs(&shape, DType::F32);
        let (qkv, d_out) = (exact(&qkv), exact(&d_out));
        let analytic = Reference::of(&shape, &qkv, &d_out).d_qkv.value;
        let loss = |qkv: &[f64]| forward_value(&shape, qkv).iter().zip(&d_out).map(|(o, g)| o * g).sum::<f64>();
        let h = 1e-5;
        for (i, expected) in analytic.iter().enumerate() {
            let at = |step: f64| {
                let mut qkv = qkv.clone();
                qkv[i] += step;
                loss(&qkv)
            };
            let difference = (at(h) - at(-h)) / (2.0 * h);
            // Truncation is h²/6 times a third derivative (below 1e3 at these sizes), rounding 1e-14/h.
            assert!((difference - expected).abs() < 1e-7, "{shape:?}[{i}]: {difference} for {expected}");
        }
    }
}

#[test]
fn any_number_of_threads_gives_the_same_bits() {
    for shape in [shape(2, 150, [4, 2], 16, None), shape(1, 600, [2, 2], 8, Some(520))] {
        for dtype in [DType::F32, DType::Bf16] {
            let (qkv, d_out) = inputs(&shape, dtype);
            let bytes = |threads| {
                let r = run(threads, shape, &qkv, &d_out, dtype);
                (
                    r.out.bytes().to_vec(),
                    r.lse.iter().map(|x| x.to_bits()).collect::<Vec<_>>(),
                    r.d_qkv.bytes().to_vec(),
                )
            };
            let one = bytes(1);
            assert!(one == bytes(2) && one == bytes(3), "{shape:?} {dtype}");
        }
    }
}

/// Query i sees exactly the keys j with i − w < j ≤ i: changing key or value j changes those outputs and no other bit.
#[test]
fn a_query_sees_exactly_its_window() {
    let (seq_len, d) = (200, 8);
    for window in [None, Some(1), Some(8), Some(150)] {
        let shape = shape(1, seq_len, [2, 1], d, window);
        let (qkv, d_out) = inputs(&shape, DType::F32);
        let before = run(1, shape, &qkv, &d_out, DType::F32);
        for j in [0, 1, 63, 64, 100, 127, 128, 199] {
            let mut moved = qkv.view().to_f32();
            // The last 2·d columns of a row are its key and its value.
            moved[(j + 1) * shape.row_len() - 2 * d..(j + 1) * shape.row_len()].iter_mut().for_each(|x| *x += 4.0);
            let moved = Buffer::from_f32(DType::F32, &moved, "test").unwrap();
            let after = run(1, shape, &moved, &d_out, DType::F32);
            let width = shape.heads * d;
            for i in 0..seq_len {
                let row = |r: &Run| exact(&r.out)[i * width..(i + 1) * width].to_vec();
                let sees = j <= i && window.is_none_or(|w| i - j < w);
                assert_eq!(row(&before) != row(&after), sees, "query {i}, key {j}, window {window:?}");
            }
        }
    }
}

#[test]
fn scratch_is_what_the_kernels_carve() {
    let small = shape(1, 64, [2, 1], 16, None);
    assert_eq!(call_scratch(&small, DType::F32), 0);
    assert_eq!(call_scratch(&small, DType::Bf16), 64 * 2 * 16);
    // Backward of 64 queries of 2 heads: 128 rows of 2·KEYS probabilities, 3·16 vectors and a row term; 64 keys and values.
    assert_eq!(task_scratch(&small), 128 * (2 * KEYS + 3 * 16 + 1) + 2 * 64 * 16);
}

#[test]
fn no_rows_are_fine() {
    let empty = shape(0, 5, [2, 1], 4, None);
    let found = run(1, empty, &zeros(DType::F32, 0), &zeros(DType::F32, 0), DType::F32);
    assert_eq!((found.out.len(), found.d_qkv.len()), (0, 0));
}
