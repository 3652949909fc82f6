//! Every rule in every arithmetic, bit for bit.

use super::*;
use crate::DType::{self, Bf16, F32};
use crate::backend::cpu::testing::{U, buffer, normal, same_on_threads};
use crate::ops::Rule::{self, Adam, AdamW, Sgd};
use crate::precision::Arithmetic::{self, Bf16PerOp, Fp32Cpu, Fp32Fused, Fp32Torch};
use crate::precision::Rounding::{Nearest, Stochastic};
use crate::rng::tensor_key;

mod reference;
mod torch;

use reference::one;

const SCALARS: StepScalars = StepScalars {
    lr: 1e-3,
    beta1: 0.9,
    beta2: 0.999,
    eps: 1e-8,
    weight_decay: 0.1,
    momentum: 0.9,
    t: 3,
    clip_coef: 0.37,
    seed: 5,
};

/// Weights, moments and gradient of a shard, and the dtypes they are stored in.
#[derive(Clone)]
struct Shard {
    dtypes: [DType; 4],
    /// p, m, v, g.
    values: [Vec<f32>; 4],
}

impl Shard {
    fn new(dtypes: [DType; 4], n: usize) -> Self {
        let make = |i: usize, name: &str, f: fn(f32) -> f32| -> Vec<f32> {
            normal(name, n).into_iter().map(|x| dtypes[i].round(f(x))).collect()
        };
        let values = [
            make(0, "p", |x| 0.02 * x),
            make(1, "m", |x| 1e-3 * x),
            make(2, "v", |x| 1e-6 * x * x),
            make(3, "g", |x| 3e-3 * x),
        ];
        Shard { dtypes, values }
    }

    /// One step on any number of threads: p, m, v and the statistics.
    fn step(
        &self,
        pieces: &[Piece],
        scalars: StepScalars,
        rule: Rule,
        arithmetic: Arithmetic,
        rounding: Rounding,
    ) -> ([Vec<f32>; 3], Vec<BlockStats>) {
        let grad = buffer(self.dtypes[3], &self.values[3]);
        same_on_threads(|threads| {
            let [mut p, mut m, mut v] = [0, 1, 2].map(|i| buffer(self.dtypes[i], &self.values[i]));
            let mut stats = vec![BlockStats { asked: 99, ..BlockStats::default() }; p.len().div_ceil(BLOCK)];
            let args = OptimizerStep {
                shadow: p.view_mut(),
                exp_avg: m.view_mut(),
                exp_avg_sq: v.view_mut(),
                grad: grad.view(),
                pieces,
                scalars,
                rule,
                arithmetic,
                rounding,
                stats: &mut stats,
            };
            args.check().unwrap();
            optimizer_step(threads, args).unwrap();
            ([p, m, v].map(|b| b.view().to_f32()), stats)
        })
    }
}

fn piece(range: Range<usize>, tensor: &str, first_index: u64, decay: bool) -> Piece {
    Piece { range, tensor: tensor_key(tensor), first_index, decay }
}

/// Two and a half blocks, with padding at 5000..5003 and from 9990 on.
fn pieces() -> Vec<Piece> {
    vec![
        piece(0..100, "gain", 0, false),
        piece(100..4096, "a", 2, true),
        piece(4096..5000, "a", 3998, true),
        piece(5003..8192, "b", 17, true),
        piece(8192..9989, "b", 3206, true),
        piece(9989..9990, "c", 1, false),
    ]
}
const LEN: usize = 10_000;

/// Every rule and arithmetic with what tells their cases apart.
fn forms() -> Vec<(Rule, Arithmetic, StepScalars)> {
    let without_momentum = StepScalars { momentum: 0.0, ..SCALARS };
    let without_decay = StepScalars { weight_decay: 0.0, ..SCALARS };
    let mut forms = Vec::new();
    for arithmetic in [Fp32Torch, Fp32Fused, Fp32Cpu, Bf16PerOp] {
        forms.extend([AdamW, Adam].map(|rule| (rule, arithmetic, SCALARS)));
    }
    for arithmetic in [Fp32Torch, Bf16PerOp] {
        forms.extend([SCALARS, without_momentum, without_decay].map(|scalars| (Sgd, arithmetic, scalars)));
    }
    // Gradient descent has one fp32 form.
    forms.extend([(Sgd, Fp32Fused, SCALARS), (Sgd, Fp32Cpu, SCALARS), (Adam, Bf16PerOp, without_decay)]);
    forms
}

#[test]
fn every_form_dtype_and_rounding_is_the_definition() {
    for (rule, arithmetic, scalars) in forms() {
        for code in 0..16 {
            let dtypes = [0, 1, 2, 3].map(|i| if code >> i & 1 == 0 { F32 } else { Bf16 });
            for rounding in [Nearest, Stochastic] {
                is_the_definition(rule, arithmetic, scalars, Shard::new(dtypes, LEN), rounding);
            }
        }
    }
}

fn is_the_definition(rule: Rule, arithmetic: Arithmetic, s: StepScalars, shard: Shard, rounding: Rounding) {
    let purposes = [Purpose::RoundShadow, Purpose::RoundExpAvg, Purpose::RoundExpAvgSq];
    let dtypes = shard.dtypes;
    let (got, stats) = shard.step(&pieces(), s, rule, arithmetic, rounding);
    let mut expected: [Vec<f32>; 3] = [0, 1, 2].map(|i| shard.values[i].clone());
    let mut sums = vec![BlockStats::default(); stats.len()];
    for piece in pieces() {
        for i in piece.range.clone() {
            let old = [0, 1, 2, 3].map(|k| shard.values[k][i]);
            let new = one(&s, rule, arithmetic, piece.decay, old);
            let index = piece.first_index + (i - piece.range.start) as u64;
            for k in 0..3 {
                let random = Stream::new(s.seed, purposes[k], piece.tensor, s.t).u32(index);
                expected[k][i] = match (rounding, dtypes[k]) {
                    (Stochastic, Bf16) => stochastic_bf16(new[k], random),
                    _ => dtypes[k].round(new[k]),
                };
            }
            let (sum, delta, w) = (&mut sums[i / BLOCK], new[3], Bf16.round(old[0]));
            sum.asked += (delta != 0.0) as u64;
            sum.swallowed += (delta != 0.0 && Bf16.round(w + delta) == w) as u64;
            sum.applied_dot += (expected[0][i] as f64 - old[0] as f64) * delta as f64;
            sum.asked_sq += delta as f64 * delta as f64;
        }
    }
    let name = format!("{rule:?} {arithmetic:?} momentum {} {dtypes:?} {rounding:?}", s.momentum);
    for k in 0..3 {
        let wrong = (0..LEN).find(|i| got[k][*i].to_bits() != expected[k][*i].to_bits());
        assert_eq!(wrong, None, "{name}: {}", ["shadow", "exp_avg", "exp_avg_sq"][k]);
    }
    for (got, sum) in stats.iter().zip(&sums) {
        assert_eq!((got.asked, got.swallowed), (sum.asked, sum.swallowed), "{name}");
        // Two orders of adding at most 4096 f64 numbers; |applied·Δ| adds up to a few times Σ Δ².
        assert!((got.asked_sq - sum.asked_sq).abs() <= 1e-12 * sum.asked_sq, "{name}");
        assert!((got.applied_dot - sum.applied_dot).abs() <= 1e-10 * sum.asked_sq, "{name}");
    }
}

#[test]
fn fp32_forms_are_adamw_in_exact_arithmetic() {
    let shard = Shard::new([F32; 4], LEN);
    let s = SCALARS;
    let narrow = [s.beta1, s.beta2].map(|b| b as f32 as f64);
    // CPUAdam's bc2 is the difference of one and a running power near it, whose three roundings are a share of bc2
    // (2^-23/0.003, or 2·333 U) of which √ passes on half.
    for (arithmetic, [beta1, beta2], slack) in
        [(Fp32Torch, [s.beta1, s.beta2], 0.0), (Fp32Fused, narrow, 0.0), (Fp32Cpu, narrow, 500.0)]
    {
        let ([p, m, v], _) = shard.step(&pieces(), s, AdamW, arithmetic, Nearest);
        for piece in pieces() {
            for i in piece.range.clone() {
                let [p0, m0, v0, g] = [0, 1, 2, 3].map(|k| shard.values[k][i] as f64);
                let g = g * s.clip_coef as f64;
                let (m1, v1) = (beta1 * m0 + (1.0 - beta1) * g, beta2 * v0 + (1.0 - beta2) * g * g);
                let (bc1, bc2) = (1.0 - beta1.powi(3), 1.0 - beta2.powi(3));
                let decay = if piece.decay { s.lr * s.weight_decay } else { 0.0 };
                let step = s.lr * (m1 / bc1) / ((v1 / bc2).sqrt() + s.eps);
                // The scalars and some six operations round, each on numbers no larger than these; √ halves v's errors.
                let near = |got: f32, exact: f64, size: f64| (got as f64 - exact).abs() <= 8.0 * U * size;
                assert!(near(m[i], m1, m0.abs() + g.abs()), "{arithmetic:?} m {i}");
                assert!(near(v[i], v1, v1), "{arithmetic:?} v {i}");
                let m_error = s.lr / bc1 * (m0.abs() + g.abs()) / ((v1 / bc2).sqrt() + s.eps);
                let size = p0.abs() + (1.0 + slack) * step.abs() + m_error;
                assert!(near(p[i], p0 * (1.0 - decay) - step, size), "{arithmetic:?} p {i}");
            }
        }
    }
}

#[test]
fn fp32_l2_and_momentum_in_exact_arithmetic() {
    let shard = Shard::new([F32; 4], LEN);
    let s = SCALARS;
    let ([p, m, v], _) = shard.step(&pieces(), s, Adam, Fp32Torch, Nearest);
    let ([q, b, kept], _) = shard.step(&pieces(), s, Sgd, Fp32Torch, Nearest);
    let plain = StepScalars { momentum: 0.0, ..s };
    let ([r, untouched, _], _) = shard.step(&pieces(), plain, Sgd, Fp32Torch, Nearest);
    for piece in pieces() {
        for i in piece.range.clone() {
            let [p0, m0, v0, g] = [0, 1, 2, 3].map(|k| shard.values[k][i] as f64);
            let clipped = g * s.clip_coef as f64;
            let g = clipped + if piece.decay { s.weight_decay * p0 } else { 0.0 };
            let size = clipped.abs() + p0.abs();
            let near = |got: f32, exact: f64, size: f64| (got as f64 - exact).abs() <= 8.0 * U * size;
            let (m1, v1) = (s.beta1 * m0 + (1.0 - s.beta1) * g, s.beta2 * v0 + (1.0 - s.beta2) * g * g);
            assert!(near(m[i], m1, m0.abs() + size) && near(v[i], v1, v0 + size * size), "Adam's moments {i}");
            let (bc1, bc2) = (1.0 - s.beta1.powi(3), 1.0 - s.beta2.powi(3));
            let d = (v1 / bc2).sqrt() + s.eps;
            let error = s.lr / bc1 * (m0.abs() + size) / d * (1.0 + size * size / v1);
            assert!(near(p[i], p0 - s.lr / bc1 * m1 / d, p0.abs() + error), "Adam p {i}");
            let b1 = s.momentum * m0 + g;
            assert!(near(b[i], b1, m0.abs() + size) && near(q[i], p0 - s.lr * b1, p0.abs() + size), "SGD {i}");
            assert!(near(r[i], p0 - s.lr * g, p0.abs() + size), "SGD without momentum {i}");
        }
    }
    assert!(kept == shard.values[2] && untouched == shard.values[1], "SGD leaves alone what it does not use");
}

#[test]
fn powers_run_until_they_make_no_difference() {
    let long = |beta: f32, t: u64| (0..t).fold(1.0f32, |power, _| power * beta);
    for (beta, t) in [(0.9f32, 0), (0.9, 1), (0.999, 3), (0.999, 1000), (0.0, 5)] {
        assert_eq!(step::running_power(beta, t), long(beta, t), "{beta} {t}");
    }
    for (beta, t) in [(0.9f32, 1000), (0.999, 30_000), (0.0, u64::MAX), (0.999, u64::MAX)] {
        assert_eq!(1.0 - step::running_power(beta, t), 1.0, "{beta} {t}");
    }
}

#[test]
fn layout_changes_no_bit() {
    for dtypes in [[Bf16; 4], [F32; 4], [Bf16, Bf16, F32, F32]] {
        let shard = Shard::new(dtypes, LEN);
        for rounding in [Nearest, Stochastic] {
            let whole = shard.step(&pieces(), SCALARS, AdamW, Fp32Torch, rounding);
            let mut split = Vec::new();
            for p in pieces() {
                // Cuts at odd places: runs of 1, 2, 3 ... elements.
                let (mut at, mut run) = (p.range.start, 1);
                while at < p.range.end {
                    let end = p.range.end.min(at + run);
                    let first_index = p.first_index + (at - p.range.start) as u64;
                    split.push(Piece { range: at..end, first_index, ..p.clone() });
                    (at, run) = (end, run + 1);
                }
            }
            assert!(
                whole == shard.step(&split, SCALARS, AdamW, Fp32Torch, rounding),
                "{dtypes:?} {rounding:?}: pieces"
            );
            // The same parameter three elements further on in the shard.
            let from = 4096 - 3;
            let moved = Shard { dtypes, values: shard.values.clone().map(|v| v[100..4096 - 3].to_vec()) };
            let alone = vec![piece(0..from - 100, "a", 2, true)];
            let (moved, _) = moved.step(&alone, SCALARS, AdamW, Fp32Torch, rounding);
            for (moved, whole) in moved.iter().zip(&whole.0) {
                assert!(*moved == whole[100..from], "{dtypes:?} {rounding:?}: place");
            }
        }
    }
}

#[test]
fn a_small_update_is_swallowed_beside_a_large_weight() {
    // On the first step m̂/√v̂ = g/|g|, so Δ = −lr = −2^-10 for g = 1, and 0 for g = 0 without decay.
    let lr = 2f64.powi(-10);
    let scalars = StepScalars { lr, eps: 0.0, weight_decay: 0.0, t: 1, clip_coef: 1.0, ..SCALARS };
    // Below 1 bf16 numbers lie 2^-8 apart: 1 − 2^-10 is nearest to 1. Below 1/8 they lie 2^-11 apart: 1/8 − 2^-10 is
    // one. A weight of 1.001 counts as R16 of it, which is 1, whatever the shadow's dtype.
    let p = [1.0, 0.125, 1.0, 1.001];
    let g = [1.0, 1.0, 0.0, 1.0];
    let pieces = [piece(0..4, "w", 0, true)];
    for shadow in [F32, Bf16] {
        let values = [p.to_vec(), vec![0.0; 4], vec![0.0; 4], g.to_vec()];
        let mut shard = Shard { dtypes: [shadow, F32, F32, F32], values };
        shard.values[2][2] = 1.0; // 0/√1: nothing is asked of the third weight even with eps = 0.
        let ([got, ..], stats) = shard.step(&pieces, scalars, AdamW, Fp32Torch, Nearest);
        let stats = stats[0];
        assert_eq!((stats.asked, stats.swallowed), (3, 2));
        // Δ carries the rounding of some six fp32 operations.
        let near = |x: f64, exact: f64| (x / exact - 1.0).abs() < 2.0 * 8.0 * U;
        assert!(near(stats.asked_sq, 3.0 * lr * lr));
        match shadow {
            // All of Δ arrives, but for the rounding of weights near 1 to 2^-24, which is 2^-14 of it.
            F32 => assert!((stats.applied_dot / (3.0 * lr * lr) - 1.0).abs() < 2f64.powi(-14)),
            Bf16 => {
                assert_eq!(got, [1.0, 0.125 - lr as f32, 1.0, 1.0]);
                assert!(near(stats.applied_dot, lr * lr));
            }
        }
    }
}

#[test]
fn stochastic_rounding_lets_small_updates_arrive_on_average() {
    let n = BLOCK;
    let scalars = StepScalars { lr: 1e-5, eps: 0.0, weight_decay: 0.0, t: 1, clip_coef: 1.0, ..SCALARS };
    let values = [vec![0.75; n], vec![0.0; n], vec![0.0; n], vec![1.0; n]];
    let shard = Shard { dtypes: [Bf16, F32, F32, F32], values };
    let (mut moved, seeds) = (0.0, 30);
    for seed in 0..seeds {
        let ([p, ..], stats) =
            shard.step(&[piece(0..n, "w", 0, true)], StepScalars { seed, ..scalars }, AdamW, Fp32Torch, Stochastic);
        assert_eq!(stats[0].swallowed, n as u64, "nearest rounding would lose every one");
        moved += p.iter().map(|p| *p as f64 - 0.75).sum::<f64>();
    }
    // bf16 numbers around 0.75 lie 2^-8 apart: a step happens with probability q = lr·2^8. Four standard errors;
    // beside it fp32's grid of 2^-24 below 1 shifts the mean by at most half of that.
    let (gap, count) = (2f64.powi(-8), (n as u64 * seeds) as f64);
    let q = 1e-5 / gap;
    let bound = 4.0 * gap * (q * (1.0 - q) / count).sqrt() + 0.5 * 2f64.powi(-24);
    assert!((moved / count + 1e-5).abs() < bound, "mean {}", moved / count);
}

#[test]
fn squared_norm_is_the_tree() {
    for dtype in [F32, Bf16] {
        for n in [0, 1, 17, 2048, 2049, 4096, 4097, 10_000] {
            let x = buffer(dtype, &normal("x", n));
            let got = same_on_threads(|threads| {
                let mut sums = vec![9.0; n.div_ceil(BLOCK)];
                squared_norm(threads, SquaredNorm { x: x.view(), sums: &mut sums }).unwrap();
                sums
            });
            for (b, sum) in got.iter().enumerate() {
                let mut tree: Vec<f64> = (b * BLOCK..(b + 1) * BLOCK)
                    .map(|i| if i < n { (x.view().get(i) as f64).powi(2) } else { 0.0 })
                    .collect();
                while tree.len() > 1 {
                    let half = tree.len() / 2;
                    tree = (0..half).map(|i| tree[i] + tree[i + half]).collect();
                }
                assert_eq!(sum.to_bits(), tree[0].to_bits(), "{dtype} {n} block {b}");
            }
        }
    }
}
