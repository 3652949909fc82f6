//! The optimizer's kernels: squares for the norm, and one step on a shard.

use super::BLOCK;
use crate::error::expect_len;
use crate::precision::{Arithmetic, Rounding};
use crate::{Error, Result, View, ViewMut};
use std::ops::Range;

/// `sums[b] = Σ x²` over block `b` of [`BLOCK`] elements (the last may be short), in f64, as a fixed pairwise sum:
/// missing elements of a short block count as zeros, and 4096 values are halved down to one, value `i` of the lower
/// half taking value `i` of the upper half each time.
#[derive(Debug)]
pub struct SquaredNorm<'a> {
    /// A shard that starts on a block border.
    pub x: View<'a>,
    /// One sum a block, overwritten.
    pub sums: &'a mut [f64],
}

impl SquaredNorm<'_> {
    pub(crate) fn check(&self) -> Result<()> {
        expect_len("squared_norm", "sums", self.x.len().div_ceil(BLOCK), self.sums.len())
    }
}

/// A run of shard elements that belong to one parameter.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Piece {
    /// Where in the shard; for [`OptimizerStep`] it never crosses a block border.
    pub range: Range<usize>,
    /// Which parameter, as a key for randomness (from its name, so it does not depend on the layout).
    pub tensor: u64,
    /// Index of the first element within that parameter.
    pub first_index: u64,
    /// Whether weight decay applies.
    pub decay: bool,
}

/// What becomes of a gradient.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Rule {
    /// Adam with decoupled weight decay.
    AdamW,
    /// Adam with the weight decay added to the gradient (L2), so that the moments see it.
    Adam,
    /// Gradient descent with momentum and L2 decay. exp_avg holds the momentum buffer, and stays as it is without
    /// momentum; exp_avg_sq is never read or changed. Both are kept all the same, so that memory and checkpoints have
    /// one layout: two numbers a weight of the moments' dtype, of which momentum needs one and plain descent none.
    Sgd,
}

/// The scalars of one step, in f64 as the engines hold them.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct StepScalars {
    /// Learning rate of this step.
    pub lr: f64,
    /// β₁ of this step: a schedule may move it, and the bias correction is that of a run that always had it.
    pub beta1: f64,
    /// β₂ of this step.
    pub beta2: f64,
    /// Added after the bias-corrected square root.
    pub eps: f64,
    /// Weight decay, decoupled or L2 as the rule says.
    pub weight_decay: f64,
    /// Momentum of [`Rule::Sgd`].
    pub momentum: f64,
    /// t, from 1.
    pub t: u64,
    /// The factor gradients are multiplied by, in fp32; under [`Arithmetic::Bf16PerOp`] the product is rounded to bf16.
    pub clip_coef: f32,
    /// Seed of stochastic rounding.
    pub seed: u64,
}

/// What a step did to one block of weights.
#[derive(Debug, Clone, Copy, PartialEq, Default)]
pub struct BlockStats {
    /// Weights whose fp32 update Δ (decay included) is not zero.
    pub asked: u64,
    /// Of those, the ones with R16(R16(w) + Δ) = R16(w).
    pub swallowed: u64,
    /// Σ applied·Δ, applied = new stored − old stored.
    pub applied_dot: f64,
    /// Σ Δ².
    pub asked_sq: f64,
}

/// One optimizer step on a shard, per piece.
///
/// [`Rule::AdamW`], with `g` = clipped gradient, `bc1 = 1−β₁^t`, `bc2 = 1−β₂^t`:
/// * [`Arithmetic::Fp32Torch`] (torch/optim/adam.py, single tensor): `p ← p·(1−lr·wd)`, `m ← m + (1−β₁)(g−m)`,
///   `v ← v·β₂`, `v ← v + ((1−β₂)·g)·g`, `d ← √v/√bc2 + eps`, `p ← p − ((lr/bc1)·m)/d`, every operation fp32, scalars
///   computed in f64 and rounded to fp32; stored with one rounding.
/// * [`Arithmetic::Fp32Fused`] (DeepSpeed multi_tensor_adam.cu): `m = β₁m + (1−β₁)g`, `v = β₂v + (1−β₂)g·g`,
///   `u = (m/bc1)/(√(v/bc2)+eps) + wd·p`, `p ← p − lr·u`, scalars fp32: β itself is rounded to fp32 first, so that
///   `1−β₂` is 1.3e-5 smaller than torch's, and so is the bias correction that it meets.
/// * [`Arithmetic::Fp32Cpu`] (DeepSpeed csrc/adam/cpu_adam_impl.cpp): `m = m·β₁ + g·(1−β₁)`, `v = v·β₂ + (g·g)·(1−β₂)`,
///   `d = √v·(1/√bc2) + eps`, `p ← p + (−lr·wd)·p`, `p ← p + (m/d)·(−lr/bc1)`, scalars computed in fp32, β^t as the
///   product of t factors, each rounded to fp32.
/// * [`Arithmetic::Bf16PerOp`]: the torch order with a bf16 rounding after each operation listed above.
///
/// [`Rule::Adam`]: `g ← g + wd·p` first, then the same without decay. [`Rule::Sgd`] (torch/optim/sgd.py): `g ← g + wd·p`,
/// `b ← momentum·b + g` (b is zero before the first step, where torch copies g), `p ← p − lr·b`; without momentum
/// `p ← p − lr·g`; one fp32 form, and one with a bf16 rounding after each operation.
///
/// [`Rounding::Stochastic`] stores shadow, exp_avg and exp_avg_sq by [`crate::rng::stochastic_bf16`].
///
/// Statistics use Δ = −lr·wd·p − ((lr/bc1)·m)/d in fp32 from the new moments before their rounding to storage
/// (under `Bf16PerOp`, from the stored ones); under `Fp32Fused` and `Fp32Cpu` it is that form's own, the same in exact
/// arithmetic. Where the decay is L2 it is part of m, and of SGD's Δ = −lr·b.
#[derive(Debug)]
pub struct OptimizerStep<'a> {
    /// Weights of the shard, in and out.
    pub shadow: ViewMut<'a>,
    /// First moment, in and out.
    pub exp_avg: ViewMut<'a>,
    /// Second moment, in and out.
    pub exp_avg_sq: ViewMut<'a>,
    /// Accumulated gradient, not yet clipped.
    pub grad: View<'a>,
    /// The parts of the shard that hold weights (padding is in none), in order.
    pub pieces: &'a [Piece],
    /// Scalars of the step.
    pub scalars: StepScalars,
    /// What becomes of the gradient.
    pub rule: Rule,
    /// How arithmetic rounds.
    pub arithmetic: Arithmetic,
    /// How results are stored.
    pub rounding: Rounding,
    /// One entry a block of the shard, overwritten.
    pub stats: &'a mut [BlockStats],
}

impl OptimizerStep<'_> {
    pub(crate) fn check(&self) -> Result<()> {
        let (op, n) = ("optimizer_step", self.shadow.len());
        expect_len(op, "exp_avg", n, self.exp_avg.len())?;
        expect_len(op, "exp_avg_sq", n, self.exp_avg_sq.len())?;
        expect_len(op, "grad", n, self.grad.len())?;
        expect_len(op, "stats", n.div_ceil(BLOCK), self.stats.len())?;
        expect_ordered(op, self.pieces, n)?;
        let one_block = |p: &Piece| p.range.is_empty() || p.range.start / BLOCK == (p.range.end - 1) / BLOCK;
        match self.pieces.iter().find(|p| !one_block(p)) {
            Some(p) => Err(wrong_pieces(op, "ranges inside one block each".to_owned(), p)),
            None => Ok(()),
        }
    }
}

/// Refuses pieces that overlap, stand out of order or reach beyond `n` elements.
pub(super) fn expect_ordered(op: &'static str, pieces: &[Piece], n: usize) -> Result<()> {
    let mut at = 0;
    for p in pieces {
        if p.range.start < at || p.range.end < p.range.start || p.range.end > n {
            return Err(wrong_pieces(op, format!("ordered ranges below {n}"), p));
        }
        at = p.range.end;
    }
    Ok(())
}

fn wrong_pieces(op: &'static str, expected: String, found: &Piece) -> Error {
    Error::Shape { op, what: "pieces", expected, found: format!("{:?}", found.range) }
}
