//! What bf16 weights would swallow at this learning rate, from the weights themselves.
//!
//! Adam's update is about as large as the learning rate where the gradient keeps its sign, and exactly so in its first step
//! (m/√v is then the sign of the gradient). A weight w held in bf16 keeps its value under an update Δ if
//! R16(R16(w) + Δ) = R16(w), R16 being rounding to nearest even: the same formula as the metric `swallowed`.

use crate::Result;
use crate::plan::{Length, ModelSource, RunPlan};
use crate::source::Source;
use spmd_core::dtype::round_bf16;
use spmd_core::precision::{Arithmetic, Rounding};
use spmd_core::{DType, Policy, UnitSpec};

/// Weights that are looked at, spread evenly over the tensors.
const LOOKED_AT: usize = 1 << 20;
/// Weights read in one piece.
const PIECE: usize = 1 << 12;

/// The shares.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Swallowed {
    /// Size of the update: the peak learning rate.
    pub(super) update: f64,
    /// Weights that were looked at.
    pub(super) looked_at: usize,
    /// Share of updates of that size that round away.
    pub(super) share: f64,
    /// The same at other learning rates, for comparison.
    pub(super) at_other_rates: Vec<(f64, f64)>,
    /// By policy: the share that is lost for good.
    pub(super) lost: Vec<(Policy, f64)>,
}

/// Looks at the weights of the model; none if it has none, or if nothing is to move.
///
/// # Errors
/// Exit 3: weights that cannot be read.
pub(super) fn of(plan: &RunPlan, units: &[UnitSpec]) -> Result<Option<Swallowed>> {
    let peak = peak(plan);
    if peak == 0.0 || !has_weights(&plan.model) {
        return Ok(None);
    }
    let source = Source::open(&plan.model, plan.seed)?;
    let weights = sample(&source, units)?;
    let share = |update: f64| swallowed(&weights, update as f32);
    let own = share(peak);
    // Only a bf16 shadow rounded to nearest loses them: an fp32 one adds them up, and stochastic rounding keeps their mean.
    let lost = |policy: Policy| {
        let p = policy.precision();
        let loses = p.shadow == DType::Bf16 && p.rounding == Rounding::Nearest;
        debug_assert!(loses || p.arithmetic != Arithmetic::Bf16PerOp);
        (policy, if loses { own } else { 0.0 })
    };
    Ok(Some(Swallowed {
        update: peak,
        looked_at: weights.len(),
        share: own,
        at_other_rates: [0.25, 4.0, 10.0, 100.0].map(|by| (peak * by, share(peak * by))).to_vec(),
        lost: Policy::ALL.map(lost).to_vec(),
    }))
}

/// The largest learning rate of the run: an engine's schedule may set it and not `--lr`.
fn peak(plan: &RunPlan) -> f64 {
    let steps = match plan.length {
        Length::Steps(steps) => steps.min(LOOKED_AT as u64),
        Length::Epochs(_) => 1000,
    };
    let Ok(schedule) = plan.schedule(steps) else { return plan.lr };
    (0..steps).map(|step| schedule.at(step)).fold(0.0, f64::max)
}

fn has_weights(model: &ModelSource) -> bool {
    match model {
        ModelSource::Tiny => true,
        ModelSource::Folder(dir) => {
            let files = ["model.safetensors", "model.safetensors.index.json", crate::checkpoint::STATE_FILE];
            files.iter().any(|file| dir.join(file).exists())
        }
    }
}

/// Pieces at even distances of every tensor, as many of each as it has weights.
fn sample(source: &Source, units: &[UnitSpec]) -> Result<Vec<f32>> {
    let all: usize = units.iter().map(UnitSpec::len).sum();
    let mut out = Vec::with_capacity(LOOKED_AT.min(all) + PIECE);
    for param in units.iter().flat_map(|unit| &unit.params) {
        let len = param.len();
        let wanted = ((len as f64 / all as f64 * LOOKED_AT as f64).ceil() as usize).min(len);
        let pieces = wanted.div_ceil(PIECE);
        for i in 0..pieces {
            let piece = PIECE.min(wanted - i * PIECE);
            let start = (len - piece) * i / pieces.max(2).saturating_sub(1).max(1);
            let at = out.len();
            out.resize(at + piece, 0.0);
            source.fill(param, start.min(len - piece), &mut out[at..])?;
        }
    }
    Ok(out)
}

/// Share of weights that an update of this size, up or down, leaves where they are.
fn swallowed(weights: &[f32], update: f32) -> f64 {
    let stays = |w: f32, delta: f32| usize::from(round_bf16(round_bf16(w) + delta) == round_bf16(w));
    let stayed: usize = weights.iter().map(|w| stays(*w, update) + stays(*w, -update)).sum();
    stayed as f64 / (2 * weights.len()).max(1) as f64
}

#[cfg(test)]
mod tests {
    use super::*;

    /// 0.02 lies in [2^-6, 2^-5), where bf16 has steps of 2^-13: half of one is 6.1e-5.
    #[test]
    fn an_update_below_half_a_step_is_swallowed() {
        assert_eq!(swallowed(&[0.02], 6.0e-5), 1.0);
        assert_eq!(swallowed(&[0.02], 6.3e-5), 0.0);
        // At a power of two the steps below are half as wide as those above.
        assert_eq!(swallowed(&[0.015_625], 4.0e-5), 0.5);
        assert_eq!(swallowed(&[0.0], 1e-30), 0.0);
        assert_eq!(swallowed(&[], 1.0), 0.0);
    }
}
