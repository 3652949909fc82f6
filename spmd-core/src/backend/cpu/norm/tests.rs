//! RMSNorm against a plain reference, and its gradients.

use super::*;
use crate::DType::{self, Bf16, F32};
use crate::backend::cpu::testing::{U, U16, buffer, normal, same_on_threads, slope, wide};

const SHAPES: [(usize, usize); 6] = [(1, 1), (5, 17), (700, 48), (3, 100), (9, 4096), (0, 48)];
const EPS: f32 = 1e-5;

/// Output and rstd of a forward on any number of threads.
fn run_forward(dtype: DType, t: usize, x: &[f32], gain: &[f32]) -> (Vec<f32>, Vec<f32>) {
    let (x, gain) = (buffer(dtype, x), buffer(dtype, gain));
    same_on_threads(|threads| {
        let (mut out, mut rstd) = (buffer(dtype, &vec![9.0; x.len()]), vec![9.0; t]);
        let args = RmsNormForward { x: x.view(), gain: gain.view(), eps: EPS, out: out.view_mut(), rstd: &mut rstd };
        rms_norm_forward(threads, args).unwrap();
        (out.view().to_f32(), rstd)
    })
}

/// Rounded inputs of a shape: x, gain, d_out, and a gradient already in d_x.
fn inputs(dtype: DType, t: usize, d: usize) -> [Vec<f32>; 4] {
    let make = |name: &str, n| normal(name, n).into_iter().map(|x| dtype.round(x)).collect();
    [make("x", t * d), make("gain", d), make("d_out", t * d), make("d_x", t * d)]
}

fn mean_square(x: &[f64]) -> f64 {
    x.iter().map(|x| x * x).sum::<f64>() / x.len() as f64
}

#[test]
fn forward_is_exact_after_rstd_and_rstd_is_near() {
    for dtype in [F32, Bf16] {
        for (t, d) in SHAPES {
            let [x, gain, ..] = inputs(dtype, t, d);
            let (out, rstd) = run_forward(dtype, t, &x, &gain);
            for row in 0..t {
                let x = &x[row * d..][..d];
                let exact = 1.0 / (mean_square(&wide(x)) + EPS as f64).sqrt();
                // The sum of positive numbers: one rounding for each square, one for each of d/32 additions in a lane
                // and five between lanes; two more for the mean and eps. The root halves that and, like the division,
                // adds one.
                let bound = ((d.div_ceil(32) + 8) as f64 / 2.0 + 2.0) * U;
                assert!((rstd[row] as f64 / exact - 1.0).abs() <= bound, "{dtype} {t}x{d} row {row}");
                for k in 0..d {
                    let expected = dtype.round(gain[k] * dtype.round(x[k] * rstd[row]));
                    assert_eq!(out[row * d + k].to_bits(), expected.to_bits(), "{dtype} {t}x{d} [{row},{k}]");
                }
            }
        }
    }
}

/// d_x and d_gain of a backward on any number of threads.
fn run_backward(dtype: DType, rstd: &[f32], inputs: &[Vec<f32>; 4]) -> (Vec<f32>, Vec<f32>) {
    let [x, gain, d_out, d_x] = [0, 1, 2, 3].map(|i| buffer(dtype, &inputs[i]));
    same_on_threads(|threads| {
        let (mut d_x, mut d_gain) = (buffer(dtype, &d_x.view().to_f32()), vec![9.0; gain.len()]);
        let args = RmsNormBackward {
            x: x.view(),
            gain: gain.view(),
            rstd,
            d_out: d_out.view(),
            d_x: d_x.view_mut(),
            d_gain: &mut d_gain,
        };
        rms_norm_backward(threads, args).unwrap();
        (d_x.view().to_f32(), d_gain)
    })
}

#[test]
fn backward_is_the_formula_within_its_roundings() {
    for dtype in [F32, Bf16] {
        for (t, d) in SHAPES {
            let all = inputs(dtype, t, d);
            let (_, rstd) = run_forward(dtype, t, &all[0], &all[1]);
            let (d_x, d_gain) = run_backward(dtype, &rstd, &all);
            let [x, gain, d_out, before] = all;
            let mut gains = vec![(0.0f64, 0.0f64); d];
            for (row, rstd) in rstd.iter().enumerate() {
                let (r, at) = (*rstd as f64, row * d);
                let g = |k: usize| d_out[at + k] as f64 * gain[k] as f64;
                let sum = (0..d).map(|k| g(k) * x[at + k] as f64).sum::<f64>() / d as f64;
                let size = (0..d).map(|k| (g(k) * x[at + k] as f64).abs()).sum::<f64>() / d as f64;
                for k in 0..d {
                    let xk = x[at + k] as f64;
                    let exact = before[at + k] as f64 + r * (g(k) - xk * r * r * sum);
                    // The dot product's d/32 + 7 roundings and five more touch at most these magnitudes; storing in
                    // bf16 adds its own.
                    let fp32 = (d.div_ceil(32) + 12) as f64 * U;
                    let magnitude = before[at + k].abs() as f64 + r * (g(k).abs() + xk.abs() * r * r * size);
                    let stored = if dtype == Bf16 { U16 * exact.abs() } else { 0.0 };
                    let error = (d_x[at + k] as f64 - exact).abs();
                    assert!(error <= 1.01 * (fp32 * magnitude + stored), "{dtype} {t}x{d} [{row},{k}]: {error}");
                    let term = d_out[at + k] as f64 * dtype.round(x[at + k] * rstd) as f64;
                    gains[k] = (gains[k].0 + term, gains[k].1 + term.abs());
                }
            }
            for (k, (exact, size)) in gains.into_iter().enumerate() {
                // A product and at most t additions round.
                assert!((d_gain[k] as f64 - exact).abs() <= (t + 1) as f64 * U * size, "{dtype} {t}x{d} gain {k}");
            }
        }
    }
}

#[test]
fn backward_is_the_slope_of_the_forward() {
    let (t, d) = (2, 48);
    let [x, gain, d_out, _] = inputs(F32, t, d);
    let (_, rstd) = run_forward(F32, t, &x, &gain);
    let zeros = vec![0.0; t * d];
    let (d_x, d_gain) = run_backward(F32, &rstd, &[x.clone(), gain.clone(), d_out.clone(), zeros]);
    let loss = |x: &[f64], gain: &[f64]| -> f64 {
        let row = |t: usize| {
            let x = &x[t * d..][..d];
            let r = 1.0 / (mean_square(x) + EPS as f64).sqrt();
            (0..d).map(|k| d_out[t * d + k] as f64 * gain[k] * x[k] * r).sum::<f64>()
        };
        (0..t).map(row).sum()
    };
    let (x, gain) = (wide(&x), wide(&gain));
    // Some 20 fp32 roundings of numbers below 32, and a difference quotient good to 1e-8 (h² = 1e-10 times a third
    // derivative of at most a hundred).
    let bound = 20.0 * 32.0 * U + 1e-8;
    for (i, d_x) in d_x.iter().enumerate() {
        assert!((*d_x as f64 - slope(&x, i, |x| loss(x, &gain))).abs() < bound);
    }
    for (k, d_gain) in d_gain.iter().enumerate() {
        assert!((*d_gain as f64 - slope(&gain, k, |gain| loss(&x, gain))).abs() < bound);
    }
}

#[test]
fn mixed_dtypes_are_refused() {
    let (x, gain) = (buffer(F32, &[1.0]), buffer(Bf16, &[1.0]));
    let (mut out, mut rstd) = (buffer(Bf16, &[0.0]), [0.0]);
    let args = RmsNormForward { x: x.view(), gain: gain.view(), eps: EPS, out: out.view_mut(), rstd: &mut rstd };
    assert!(rms_norm_forward(&Threads::new(1).unwrap(), args).is_err());
}
