//! The ordered sum of slices.

use super::*;
use crate::DType::{Bf16, F32};
use crate::backend::cpu::testing::{buffer, normal, same_on_threads};

/// The definition: halves while the count is even, a left fold of an odd block.
fn reference(x: &[f32]) -> f32 {
    match x.len() {
        0 => 0.0,
        n if n % 2 == 0 => reference(&x[..n / 2]) + reference(&x[n / 2..]),
        _ => x[1..].iter().fold(x[0], |sum, x| sum + x),
    }
}

#[test]
fn every_bit_is_the_trees() {
    for len in [0, 1, 17, 48, 1025, 40_000] {
        for n in [0, 1, 2, 3, 4, 5, 6, 7, 8, 12, 24, 64] {
            if n * len > 1_000_000 {
                continue;
            }
            for (from, to) in [(F32, F32), (F32, Bf16), (Bf16, F32), (Bf16, Bf16)] {
                let parts = buffer(from, &normal("parts", n * len));
                let got = same_on_threads(|threads| {
                    let mut out = buffer(to, &vec![9.0; len]);
                    ordered_sum(threads, OrderedSum { parts: parts.view(), out: out.view_mut() }).unwrap();
                    out.view().to_f32()
                });
                for (i, sum) in got.iter().enumerate() {
                    let x: Vec<f32> = (0..n).map(|p| parts.view().get(p * len + i)).collect();
                    assert_eq!(sum.to_bits(), to.round(reference(&x)).to_bits(), "{n} x {len}, {from} to {to}, at {i}");
                }
            }
        }
    }
}
