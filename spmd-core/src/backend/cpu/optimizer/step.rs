//! The arithmetic of a step on one tile, and what it says about itself.

use crate::dtype::round_bf16;
use crate::ops::{BlockStats, Rule, StepScalars};
use crate::precision::Arithmetic;
use multiversion::multiversion;

/// Positions of a tile.
pub(super) const TILE: usize = 256;

/// Lanes of the statistics' sums: position `i` of a block is added to lane `i % LANES`.
pub(super) const LANES: usize = 8;

/// The scalars of a step as the arithmetic takes them: computed in f64 and rounded to fp32, as torch does; DeepSpeed's
/// kernels receive fp32 scalars, subtract their β from one in fp32, and correct the bias with powers of the fp32 β.
#[derive(Debug, Clone, Copy)]
pub(super) struct Factors {
    rule: Rule,
    arithmetic: Arithmetic,
    clip: f32,
    beta1: f32,
    beta2: f32,
    one_minus_beta1: f32,
    one_minus_beta2: f32,
    bc1: f32,
    bc2: f32,
    sqrt_bc2: f32,
    /// 1/√bc2.
    inverse_sqrt_bc2: f32,
    lr: f32,
    eps: f32,
    /// lr/bc1.
    step_size: f32,
    weight_decay: f32,
    /// lr·wd.
    decay: f32,
    /// 1 − lr·wd.
    keep: f32,
    momentum: f32,
}

impl Factors {
    pub(super) fn new(s: &StepScalars, rule: Rule, arithmetic: Arithmetic) -> Self {
        let t = s.t as f64;
        let (beta1, beta2) = match arithmetic {
            Arithmetic::Fp32Fused | Arithmetic::Fp32Cpu => (s.beta1 as f32 as f64, s.beta2 as f32 as f64),
            Arithmetic::Fp32Torch | Arithmetic::Bf16PerOp => (s.beta1, s.beta2),
        };
        let (bc1, bc2) = (1.0 - beta1.powf(t), 1.0 - beta2.powf(t));
        let factors = Factors {
            rule,
            arithmetic,
            clip: s.clip_coef,
            beta1: beta1 as f32,
            beta2: beta2 as f32,
            // The difference of one and an fp32 β is the same rounded from f64 as computed in fp32.
            one_minus_beta1: (1.0 - beta1) as f32,
            one_minus_beta2: (1.0 - beta2) as f32,
            bc1: bc1 as f32,
            bc2: bc2 as f32,
            sqrt_bc2: bc2.sqrt() as f32,
            inverse_sqrt_bc2: (1.0 / bc2.sqrt()) as f32,
            lr: s.lr as f32,
            eps: s.eps as f32,
            step_size: (s.lr / bc1) as f32,
            weight_decay: s.weight_decay as f32,
            decay: (s.lr * s.weight_decay) as f32,
            keep: (1.0 - s.lr * s.weight_decay) as f32,
            momentum: s.momentum as f32,
        };
        if arithmetic == Arithmetic::Fp32Cpu { factors.in_fp32(s.t) } else { factors }
    }

    /// The scalars of DeepSpeed's csrc/includes/cpu_adam.h, which are computed in fp32.
    fn in_fp32(self, t: u64) -> Self {
        let (bc1, bc2) = (1.0 - running_power(self.beta1, t), 1.0 - running_power(self.beta2, t));
        Factors {
            inverse_sqrt_bc2: 1.0 / bc2.sqrt(),
            step_size: self.lr / bc1,
            decay: self.lr * self.weight_decay,
            ..self
        }
    }

    /// Without weight decay: multiplying by one and adding zero change nothing.
    fn without_decay(self) -> Self {
        Factors { weight_decay: 0.0, decay: 0.0, keep: 1.0, ..self }
    }
}

/// β^t as the engine has it after t steps: one, multiplied by β t times, each product rounded. What is below 2^-25 makes
/// no difference to 1 − β^t, so the loop is short for any t. The engine recomputes the power where it resumes or β moves;
/// here a step depends on nothing but its own scalars.
pub(super) fn running_power(beta: f32, t: u64) -> f32 {
    let mut power = 1.0f32;
    for _ in 0..t {
        if power < f32::EPSILON / 4.0 {
            break;
        }
        power *= beta;
    }
    power
}

/// Numbers of [`TILE`] consecutive positions.
pub(super) struct Tile {
    /// Weights.
    pub(super) p: [f32; TILE],
    /// First moments.
    pub(super) m: [f32; TILE],
    /// Second moments.
    pub(super) v: [f32; TILE],
    /// Gradients.
    pub(super) g: [f32; TILE],
    /// The update each weight was asked to make.
    delta: [f32; TILE],
}

impl Tile {
    /// Weights that nothing is asked of: with a second moment of one the quotient is 0/1 even if eps is zero.
    pub(super) fn zeros() -> Self {
        Tile { p: [0.0; TILE], m: [0.0; TILE], v: [1.0; TILE], g: [0.0; TILE], delta: [0.0; TILE] }
    }

    /// One step on every position.
    pub(super) fn step(&mut self, factors: &Factors, decay: bool) {
        let per_op = factors.arithmetic == Arithmetic::Bf16PerOp;
        let mut f = if decay && factors.rule == Rule::AdamW { *factors } else { factors.without_decay() };
        if decay && factors.rule != Rule::AdamW && factors.weight_decay != 0.0 {
            match per_op {
                false => add_decay::<false>(self, *factors),
                true => add_decay::<true>(self, *factors),
            }
            // The gradient is clipped now.
            f.clip = 1.0;
        }
        match (f.rule, f.arithmetic) {
            (Rule::Sgd, _) => match (per_op, f.momentum != 0.0) {
                (false, false) => descend::<false, false>(self, f),
                (false, true) => descend::<false, true>(self, f),
                (true, false) => descend::<true, false>(self, f),
                (true, true) => descend::<true, true>(self, f),
            },
            (_, Arithmetic::Fp32Torch) => step_torch(self, f),
            (_, Arithmetic::Fp32Fused) => step_fused(self, f),
            (_, Arithmetic::Fp32Cpu) => step_cpu(self, f),
            (_, Arithmetic::Bf16PerOp) => step_per_op(self, f),
        }
    }
}

/// A result of an operation: rounded to bf16 if every one is.
#[inline(always)]
fn rounded<const PER_OP: bool>(x: f32) -> f32 {
    if PER_OP { round_bf16(x) } else { x }
}

/// L2 decay: clips the gradient and adds wd·p to it. Every form of Adam and SGD begins with it, as `grad.add(param,
/// alpha=wd)` in torch, which on a GPU keeps alpha in fp32 and rounds the sum once.
#[multiversion(targets("x86_64+avx512f+avx512bw+avx512dq+avx512vl+fma", "x86_64+avx2+fma"))]
fn add_decay<const PER_OP: bool>(tile: &mut Tile, f: Factors) {
    let Tile { p, g, .. } = tile;
    for i in 0..TILE {
        g[i] = rounded::<PER_OP>(rounded::<PER_OP>(g[i] * f.clip) + f.weight_decay * p[i]);
    }
}

/// torch/optim/sgd.py, `_single_tensor_sgd`, without dampening and Nesterov's form.
#[multiversion(targets("x86_64+avx512f+avx512bw+avx512dq+avx512vl+fma", "x86_64+avx2+fma"))]
fn descend<const PER_OP: bool, const MOMENTUM: bool>(tile: &mut Tile, f: Factors) {
    let Tile { p, m, g, delta, .. } = tile;
    for i in 0..TILE {
        let mut step = rounded::<PER_OP>(g[i] * f.clip);
        if MOMENTUM {
            step = rounded::<PER_OP>(rounded::<PER_OP>(m[i] * f.momentum) + step);
            m[i] = step;
        }
        delta[i] = -(f.lr * step);
        p[i] = rounded::<PER_OP>(p[i] - f.lr * step);
    }
}

/// torch/optim/adam.py, `_single_tensor_adam`. Its kernels read `addcdiv(p, m, d, −s)` as `p + (−s·m)/d`, `addcmul(v,
/// g, g, w)` as `v + (w·g)·g`, divide by a scalar (no reciprocal), and, where the processor has them, may fuse the
/// last product and sum of `lerp` and `addcmul`; here nothing is fused, which is what torch computes without AVX2.
#[multiversion(targets("x86_64+avx512f+avx512bw+avx512dq+avx512vl+fma", "x86_64+avx2+fma"))]
fn step_torch(tile: &mut Tile, f: Factors) {
    let Tile { p, m, v, g, delta } = tile;
    for i in 0..TILE {
        let g = g[i] * f.clip;
        m[i] += f.one_minus_beta1 * (g - m[i]);
        v[i] = v[i] * f.beta2 + f.one_minus_beta2 * g * g;
        let d = v[i].sqrt() / f.sqrt_bc2 + f.eps;
        let u = f.step_size * m[i] / d;
        delta[i] = -(f.decay * p[i]) - u;
        p[i] = p[i] * f.keep - u;
    }
}

/// DeepSpeed's csrc/adam/multi_tensor_adam.cu, `ADAM_MODE_1` (decoupled decay). Its Δ is −lr·u.
#[multiversion(targets("x86_64+avx512f+avx512bw+avx512dq+avx512vl+fma", "x86_64+avx2+fma"))]
fn step_fused(tile: &mut Tile, f: Factors) {
    let Tile { p, m, v, g, delta } = tile;
    for i in 0..TILE {
        let g = g[i] * f.clip;
        m[i] = f.beta1 * m[i] + f.one_minus_beta1 * g;
        v[i] = f.beta2 * v[i] + f.one_minus_beta2 * g * g;
        let d = (v[i] / f.bc2).sqrt() + f.eps;
        let u = m[i] / f.bc1 / d + f.weight_decay * p[i];
        delta[i] = -(f.lr * u);
        p[i] -= f.lr * u;
    }
}

/// DeepSpeed's csrc/adam/cpu_adam_impl.cpp, `Step_1`. Its Δ is (−lr·wd)·p + (m/d)·(−lr/bc1).
#[multiversion(targets("x86_64+avx512f+avx512bw+avx512dq+avx512vl+fma", "x86_64+avx2+fma"))]
fn step_cpu(tile: &mut Tile, f: Factors) {
    let Tile { p, m, v, g, delta } = tile;
    for i in 0..TILE {
        let g = g[i] * f.clip;
        m[i] = m[i] * f.beta1 + g * f.one_minus_beta1;
        v[i] = v[i] * f.beta2 + g * g * f.one_minus_beta2;
        let d = v[i].sqrt() * f.inverse_sqrt_bc2 + f.eps;
        let (decay, u) = (f.decay * p[i], m[i] / d * f.step_size);
        delta[i] = -decay - u;
        p[i] = p[i] - decay - u;
    }
}

/// The torch order on bf16 tensors: each operation reads bf16, computes in fp32 and rounds its result to bf16. The
/// clipped gradient is rounded as well. Δ is fp32, from the rounded moments.
#[multiversion(targets("x86_64+avx512f+avx512bw+avx512dq+avx512vl+fma", "x86_64+avx2+fma"))]
fn step_per_op(tile: &mut Tile, f: Factors) {
    let Tile { p, m, v, g, delta } = tile;
    for i in 0..TILE {
        let g = round_bf16(g[i] * f.clip);
        m[i] = round_bf16(m[i] + f.one_minus_beta1 * (g - m[i]));
        v[i] = round_bf16(round_bf16(v[i] * f.beta2) + f.one_minus_beta2 * g * g);
        let root = v[i].sqrt();
        let s = f.step_size * m[i];
        delta[i] = -(f.decay * p[i]) - s / (root / f.sqrt_bc2 + f.eps);
        let d = round_bf16(round_bf16(round_bf16(root) / f.sqrt_bc2) + f.eps);
        p[i] = round_bf16(round_bf16(p[i] * f.keep) - s / d);
    }
}

/// [`BlockStats`] while they are being summed.
#[derive(Debug, Default)]
pub(super) struct Asked {
    asked: u64,
    swallowed: u64,
    applied_dot: [f64; LANES],
    asked_sq: [f64; LANES],
}

impl Asked {
    /// Adds a tile whose `p` holds the weights as they were stored.
    pub(super) fn count(&mut self, before: &[f32; TILE], tile: &Tile) {
        count(self, before, &tile.p, &tile.delta);
    }

    /// Lanes are added in order.
    pub(super) fn total(&self) -> BlockStats {
        BlockStats {
            asked: self.asked,
            swallowed: self.swallowed,
            applied_dot: self.applied_dot.iter().sum(),
            asked_sq: self.asked_sq.iter().sum(),
        }
    }
}

#[multiversion(targets("x86_64+avx512f+avx512bw+avx512dq+avx512vl+fma", "x86_64+avx2+fma"))]
fn count(sums: &mut Asked, before: &[f32; TILE], after: &[f32; TILE], delta: &[f32; TILE]) {
    let (mut asked, mut swallowed) = (0u32, 0u32);
    for i in 0..TILE {
        let w = round_bf16(before[i]);
        let asks = delta[i] != 0.0;
        asked += asks as u32;
        swallowed += (asks & (round_bf16(w + delta[i]) == w)) as u32;
    }
    sums.asked += asked as u64;
    sums.swallowed += swallowed as u64;
    let (mut dot, mut sq) = (sums.applied_dot, sums.asked_sq);
    for i in (0..TILE).step_by(LANES) {
        for l in 0..LANES {
            let d = delta[i + l] as f64;
            // Both weights are fp32, so neither the difference nor the product of two such loses anything that matters
            // beside the sum's own f64 rounding.
            dot[l] += (after[i + l] as f64 - before[i + l] as f64) * d;
            sq[l] += d * d;
        }
    }
    (sums.applied_dot, sums.asked_sq) = (dot, sq);
}
