//! Cross-entropy against a plain reference, and its gradient.

use super::*;
use crate::backend::cpu::bounds::{assert_within, exact, random, zeros};
use crate::backend::cpu::testing::U;
use crate::{Buffer, DType};

const NONE: u32 = Batch::NO_TARGET;

fn run(threads: usize, logits: &mut Buffer, targets: &[u32], scale: f32, gradient: bool) -> f64 {
    let mut loss = 0.0;
    let args = CrossEntropy { logits: logits.view_mut(), targets, scale, gradient, loss: &mut loss };
    cross_entropy(&Threads::new(threads).unwrap(), args).unwrap();
    loss
}

/// Loss and softmax of a row in f64.
fn reference(z: &[f64], target: usize) -> (f64, Vec<f64>) {
    let max = z.iter().copied().fold(f64::NEG_INFINITY, f64::max);
    let sum: f64 = z.iter().map(|x| (x - max).exp()).sum();
    (sum.ln() + max - z[target], z.iter().map(|x| (x - max).exp() / sum).collect())
}

/// A row of V logits within ±z: e^(x−max) is off by 2z·u (the argument's rounding) + 2u (exp within an ulp), the sum by
/// SPAN/LANES + 1 further roundings, and two roundings follow.
fn relative(z: f64) -> f64 {
    (2.0 * (2.0 * z + 2.0) + (SPAN / LANES + 3) as f64) * U
}

#[test]
fn loss_and_gradient_agree_with_f64() {
    for (rows, vocab) in [(1, 1), (1, 2), (7, 17), (65, 259), (9, 5000)] {
        for dtype in [DType::F32, DType::Bf16] {
            let mut logits = random(dtype, 7, rows * vocab);
            let targets: Vec<u32> =
                (0..rows).map(|t| if t % 4 == 3 { NONE } else { (t * 31 % vocab) as u32 }).collect();
            let (z, scale) = (exact(&logits), 0.3f32);
            let (mut loss, mut gradient, mut bound) = (0.0, Vec::new(), Vec::new());
            let size = z.iter().fold(0.0f64, |m, x| m.max(x.abs()));
            for (z, target) in z.chunks(vocab).zip(&targets) {
                if *target == NONE {
                    gradient.extend(vec![0.0; vocab]);
                    bound.extend(vec![0.0; vocab]);
                    continue;
                }
                let (row_loss, p) = reference(z, *target as usize);
                loss += row_loss;
                for (v, p) in p.into_iter().enumerate() {
                    let hit = if v == *target as usize { 1.0 } else { 0.0 };
                    gradient.push((p - hit) * f64::from(scale));
                    // p's error, and the roundings of p − 1 and of the product.
                    bound.push((p * relative(size) + 2.0 * U * hit + U * p) * f64::from(scale) * 1.01);
                }
            }
            let untouched = logits.bytes().to_vec();
            let found = run(1, &mut logits, &targets, scale, false);
            // A row's loss is a logarithm: the relative error of the sum becomes an absolute one.
            assert!((found - loss).abs() <= rows as f64 * relative(size), "{found} for {loss}");
            assert_eq!(logits.bytes(), untouched, "without gradient the logits stay");
            assert_eq!(run(2, &mut logits, &targets, scale, true).to_bits(), found.to_bits());
            assert_within("dlogits", &logits, &gradient, &bound);
        }
    }
}

#[test]
fn the_gradient_is_the_central_difference_of_the_loss() {
    let mut logits = random(DType::F32, 8, 3 * 11);
    let (z, targets) = (exact(&logits), [4, NONE, 0]);
    let loss = |z: &[f64]| reference(&z[..11], 4).0 + reference(&z[22..], 0).0;
    let h = 1e-5;
    let expected: Vec<f64> = (0..33)
        .map(|i| {
            let at = |step: f64| {
                let mut z = z.clone();
                z[i] += step;
                loss(&z)
            };
            (at(h) - at(-h)) / (2.0 * h)
        })
        .collect();
    run(1, &mut logits, &targets, 1.0, true);
    // Truncation h²/6 (third derivatives of the loss are at most 1), f64 rounding 1e-15/h, and the kernel's own error.
    assert_within("dlogits", &logits, &expected, &[h * h + 1e-9 + relative(4.0); 33]);
}

#[test]
fn large_logits_stay_finite() {
    for dtype in [DType::F32, DType::Bf16] {
        let values = [1e4f32, -1e4, 0.0, 1e4, -1e4, -1e4, 1e4, -1e4];
        let mut logits = Buffer::from_f32(dtype, &values, "test").unwrap();
        let large = f64::from(dtype.round(1e4));
        let loss = run(1, &mut logits, &[0, 0], 1.0, true);
        // Row 0: two equal maxima, one of them the target: ln 2. Row 1: one maximum, far above the target.
        assert!((loss - (2f64.ln() + 2.0 * large)).abs() < 1e-9, "{loss}");
        assert_eq!(exact(&logits), [-0.5, 0.0, 0.0, 0.5, -1.0, 0.0, 1.0, 0.0]);
    }
}

#[test]
fn rows_without_target_lose_nothing_and_no_rows_are_fine() {
    for dtype in [DType::F32, DType::Bf16] {
        let mut logits = random(dtype, 9, 20);
        assert_eq!(run(1, &mut logits, &[NONE, NONE], 1.0, true), 0.0);
        assert!(exact(&logits).iter().all(|x| *x == 0.0));
        assert_eq!(run(1, &mut zeros(dtype, 0), &[], 1.0, true), 0.0);
    }
}

#[test]
fn any_number_of_threads_gives_the_same_bits() {
    let targets: Vec<u32> = (0..65).map(|t| (t * 7 % 130) as u32).collect();
    let result = |threads| {
        let mut logits = random(DType::F32, 10, 65 * 130);
        (run(threads, &mut logits, &targets, 0.1, true).to_bits(), logits.bytes().to_vec())
    };
    let one = result(1);
    assert!(one == result(2) && one == result(3));
}

#[test]
fn a_nan_is_seen() {
    let mut logits = Buffer::from_f32(DType::F32, &[0.0, f32::NAN, 1.0], "test").unwrap();
    assert!(run(1, &mut logits, &[0], 1.0, true).is_nan());
}
