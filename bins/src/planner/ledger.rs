//! The dtype of every class of numbers in every phase, and who decided it.

use crate::plan::{Origin, RunPlan};
use optim::Footprint;
use spmd_core::{DType, UnitSpec};

/// One class of numbers in one phase.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(super) struct Line {
    /// `at rest`, `gathered`, `forward`, `gradient`, `wire`, `reduced`, `accumulated`, `optimizer`, `saved`.
    pub(super) phase: &'static str,
    /// What it is.
    pub(super) what: &'static str,
    /// Its dtype, in words where it is more than one.
    pub(super) dtype: String,
    /// Bytes of the largest rank, where it is held rather than passing by.
    pub(super) bytes: Option<u64>,
    /// Who decided it.
    pub(super) by: String,
}

/// Every line, in the order of a step.
pub(super) fn lines(plan: &RunPlan, units: &[UnitSpec], cost: &Footprint) -> Vec<Line> {
    let p = plan.precision();
    let own = |name: &str| match plan.files.sources.get(name) {
        Some(source) => source.to_string(),
        None if plan.origin(name) == Some(Origin::Flag) => format!("--{}", name.replace('_', "-")),
        None => policy(plan),
    };
    let always = || "always".to_owned();
    let line = |phase, what, dtype: String, bytes: Option<usize>, by: String| Line {
        phase,
        what,
        dtype,
        bytes: bytes.map(|n| n as u64),
        by,
    };
    let weights: usize = units.iter().map(UnitSpec::len).sum();
    let per_weight = p.shadow.size() + 2 * p.moments.size();
    let state = |dtype: DType| cost.state / per_weight * dtype.size();
    vec![
        line(
            "at rest",
            "shadow: the weights the optimizer steps",
            name(p.shadow),
            Some(state(p.shadow)),
            own("policy"),
        ),
        line("at rest", "moments (exp_avg, exp_avg_sq)", name(p.moments), Some(2 * state(p.moments)), own("policy")),
        line("gathered", "weights of the units at work", name(p.compute), Some(cost.gathered), own("policy")),
        line("forward", "activations, operands of matrix products", name(p.compute), None, own("policy")),
        line("forward", "sums of products, RoPE, norms, softmax, loss", name(DType::F32), None, always()),
        line("gradient", "a weight's gradient as it leaves backward", name(p.grad), Some(cost.full), own("policy")),
        line("wire", "a lane's contribution to the sum", name(p.wire), Some(cost.exchange), own("wire")),
        line("wire", "sums within a lane tree", name(DType::F32), Some(cost.partials), always()),
        line("reduced", "the finished sum over lanes", name(p.reduced), None, own("reduced")),
        line(
            "accumulated",
            "gradient shard over micro-batches",
            name(p.accumulate),
            Some(cost.gradients),
            own("accumulate"),
        ),
        line("optimizer", "gradient norm and losses", "f64".to_owned(), None, always()),
        line("optimizer", "arithmetic", plan.optimizer_in_words(), None, own("optimizer_form")),
        line("optimizer", "rounding on store", format!("{:?}", p.rounding).to_lowercase(), None, own("policy")),
        line("saved", "model/ and model*.safetensors", "as loaded".to_owned(), Some(2 * weights), always()),
        line(
            "saved",
            "shadow and moments of a checkpoint",
            saved(p.shadow, p.moments),
            Some(per_weight * weights),
            own("policy"),
        ),
    ]
}

/// The policy and where it was set.
fn policy(plan: &RunPlan) -> String {
    match plan.files.sources.get("policy") {
        Some(source) => source.to_string(),
        None if plan.origin("policy") == Some(Origin::Flag) => format!("--policy {}", plan.policy),
        None => format!("policy {} (default)", plan.policy),
    }
}

fn name(dtype: DType) -> String {
    dtype.to_string()
}

fn saved(shadow: DType, moments: DType) -> String {
    if shadow == moments { name(shadow) } else { format!("{shadow}, {moments}") }
}
