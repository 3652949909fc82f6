//! What would make a run fit, the cheapest first.

use crate::Result;
use crate::plan::RunPlan;
use crate::run::prepare::segments;
use models::Config;
use optim::Sharding;
use spmd_core::{Policy, UnitSpec};

/// A change and the memory it leads to.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Remedy {
    /// The flags.
    pub(super) flags: String,
    /// What it costs.
    pub(super) costs: &'static str,
    /// Bytes of the largest rank then.
    pub(super) bytes: u64,
}

/// Changes that make the run fit, in the order of what they cost: nothing in the result first. If none does alone, all that
/// it takes together. Empty if it fits, if nothing helps, or if nobody knows what there is.
///
/// # Errors
/// A layout that cannot be, which the plan itself would have refused.
pub(super) fn remedies(
    plan: &RunPlan,
    config: &Config,
    units: &[UnitSpec],
    seq_len: usize,
    needed: u64,
    available: Option<u64>,
) -> Result<Vec<Remedy>> {
    let Some(available) = available.filter(|available| needed > *available) else { return Ok(Vec::new()) };
    let bytes = |plan: &RunPlan| -> Result<u64> {
        Ok(segments(plan, config, units, seq_len, plan.sharding())?.iter().map(|(_, n)| n).sum())
    };
    // A change made as often as it can be, until the run fits; the last flag says it all.
    let made = |plan: &mut RunPlan, change: Change| -> Result<Option<Remedy>> {
        let mut last = None;
        while bytes(plan)? > available
            && let Some((flags, costs)) = change(plan)
        {
            last = Some(Remedy { flags, costs, bytes: bytes(plan)? });
        }
        Ok(last)
    };
    let mut found = Vec::new();
    for change in CHANGES {
        found.extend(made(&mut plan.clone(), change)?.filter(|remedy| remedy.bytes <= available));
    }
    if !found.is_empty() {
        return Ok(found);
    }
    // None is enough alone: one after the other.
    let (mut together, mut flags) = (plan.clone(), Vec::new());
    for change in CHANGES {
        let Some(Remedy { flags: flag, costs, bytes }) = made(&mut together, change)? else { continue };
        flags.push(flag);
        if bytes <= available {
            return Ok(vec![Remedy { flags: flags.join(" "), costs, bytes }]);
        }
    }
    Ok(Vec::new())
}

/// A change to a plan: the flag it is and what it costs, or nothing if it cannot be made.
type Change = fn(&mut RunPlan) -> Option<(String, &'static str)>;

const CHANGES: [Change; 5] = [whole_sharding, recompute, smaller_micro_batch, more_ranks, small_state];

fn whole_sharding(plan: &mut RunPlan) -> Option<(String, &'static str)> {
    let own = plan.sharding();
    let most = Sharding { stage: 3, group: plan.world, reshard_after_forward: true, ..own };
    if own == most || plan.world == 1 {
        return None;
    }
    (plan.stage, plan.shard_group, plan.reshard_after_forward) = (3, plan.world, true);
    Some(("--stage 3".to_owned(), "the same bits, more traffic"))
}

fn recompute(plan: &mut RunPlan) -> Option<(String, &'static str)> {
    if plan.recompute {
        return None;
    }
    plan.recompute = true;
    Some(("--recompute block".to_owned(), "the same bits, a third more arithmetic"))
}

fn smaller_micro_batch(plan: &mut RunPlan) -> Option<(String, &'static str)> {
    if !plan.micro_batch.is_multiple_of(2) {
        return None;
    }
    (plan.micro_batch, plan.accum) = (plan.micro_batch / 2, plan.accum * 2);
    let flags = format!("--micro-batch {} --accum {}", plan.micro_batch, plan.accum);
    Some((flags, "the same rows a step, added in another order"))
}

fn more_ranks(plan: &mut RunPlan) -> Option<(String, &'static str)> {
    if plan.world >= 1 << 16 || plan.stage == 0 {
        return None;
    }
    let whole = plan.shard_group == plan.world;
    plan.world *= 2;
    plan.lanes = plan.lanes.max(plan.world);
    if whole {
        plan.shard_group = plan.world;
    }
    Some((format!("--ranks {}", plan.world), "more machines"))
}

fn small_state(plan: &mut RunPlan) -> Option<(String, &'static str)> {
    if plan.precision().shadow != spmd_core::DType::F32 {
        return None;
    }
    *plan = plan.with_policy(Policy::LowSr);
    Some(("--policy low-sr".to_owned(), "other arithmetic: bf16 weights and moments with stochastic rounding"))
}
