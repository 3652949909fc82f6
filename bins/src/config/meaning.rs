//! What a plan means for the result, free of how it was written, so that two plans can be compared.
//!
//! Settings that cannot matter beside the others are left at one value: without clipping the form of its factor, at one
//! micro-batch the dtype in which micro-batches are added, and so on.

use super::assume::LoadDType;
use super::read::Dialect;
use crate::cli::OptimizerKind;
use crate::plan::{Length, ModelSource, Origin, RunPlan};
use serde_json::Value;
use spmd_core::DType;
use spmd_core::precision::Arithmetic;
use std::fmt;

/// How much a difference changes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Weight {
    /// Speed or memory, never a bit.
    Cost,
    /// The result's last bits: equal in exact arithmetic.
    Rounding,
    /// The mathematics.
    Mathematics,
}

/// A setting that is not the same in two plans.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Difference {
    /// Its name: of a setting in run.json, or of a role of numbers.
    pub name: String,
    /// What it changes.
    pub weight: Weight,
    /// Its value and origin in the first plan.
    pub a: (String, String),
    /// Its value and origin in the second plan.
    pub b: (String, String),
}

/// What two plans are to each other.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Verdict {
    /// Equal bits at equal cost.
    SameRun,
    /// Equal bits; speed or memory differ.
    SameBits,
    /// Equal in exact arithmetic; last bits differ.
    RoundingOnly,
    /// Other mathematics.
    Different,
}

impl fmt::Display for Verdict {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Verdict::SameRun => "the same run: equal bits, equal memory and traffic",
            Verdict::SameBits => "the same mathematics, bit for bit, at another speed or memory",
            Verdict::RoundingOnly => "different: the same in exact arithmetic, rounded differently",
            Verdict::Different => "different",
        })
    }
}

/// What the differences come to.
pub(super) fn verdict(differences: &[Difference]) -> Verdict {
    match differences.iter().map(|d| d.weight).max() {
        None => Verdict::SameRun,
        Some(Weight::Cost) => Verdict::SameBits,
        Some(Weight::Rounding) => Verdict::RoundingOnly,
        Some(Weight::Mathematics) => Verdict::Different,
    }
}

/// Settings that change speed or memory alone.
const COST: [&str; 4] = ["stage", "shard_group", "recompute", "reshard_after_forward"];

/// Settings that are said by their effect below, or belong to the place and not to the run.
const NOT_COMPARED: [&str; 8] =
    ["policy", "wire", "reduced", "accumulate", "optimizer_form", "clip_form", "assume", "schedule_params"];

/// Settings of the rows and the model, which a run that goes on finds out by looking at them.
const ROWS: [&str; 4] = ["model", "data", "seq_len", "truncate"];

/// Differences between two plans of the same model and rows, the weightiest first.
pub(super) fn differences(a: &RunPlan, b: &RunPlan) -> Vec<Difference> {
    let (of_a, of_b) = (facts(a), facts(b));
    let same_course = same_course(a, b);
    // Otherwise the same rows a step, dealt to other lanes or micro-batches, are added in another order.
    let same_rows = a.global_batch == b.global_batch;
    let mut found: Vec<Difference> = course_difference(a, b).into_iter().collect();
    for fact in &of_a {
        let Some(other) = of_b.iter().find(|other| other.name == fact.name) else { continue };
        // What is off on one side is said by the setting that turns it off.
        let off = fact.weight == Weight::Rounding && (fact.value == "-" || other.value == "-");
        if fact.value == other.value || off || (same_course && COURSE.contains(&fact.name.as_str())) {
            continue;
        }
        let dealt = same_rows && ["lanes", "micro_batch", "accum"].contains(&fact.name.as_str());
        let weight = if dealt { Weight::Rounding } else { fact.weight };
        let (a, b) = ((fact.value.clone(), fact.origin.clone()), (other.value.clone(), other.origin.clone()));
        found.push(Difference { name: fact.name.clone(), weight, a, b });
    }
    found.sort_by_key(|d| std::cmp::Reverse(d.weight));
    found
}

/// The flags that would give `plan` what the files of `other` say and its own leave to the command line.
pub(super) fn left_out(plan: &RunPlan, other: &RunPlan) -> Vec<String> {
    let open = |name: &str| {
        plan.origin(name) == Some(Origin::Default) && !FOLLOWS.contains(&name) && !says_by_silence(plan, name)
    };
    let settings = other.files.layers.iter().flat_map(|layer| &layer.settings);
    let left = settings.filter(|setting| open(&crate::plan::setting_of(&setting.flag)));
    left.map(|s| format!("--{} {}", s.flag, s.values.join(" ")).trim_end().to_owned()).collect()
}

/// Whether a format gives a setting a value by not naming it: Umbra's own always, DeepSpeed's the parameters of an optimizer
/// that it names.
fn says_by_silence(plan: &RunPlan, name: &str) -> bool {
    let of_optimizer = ["lr", "beta1", "beta2", "eps", "weight_decay", "momentum", "optimizer_form"];
    let own = plan.files.layers.iter().any(|layer| layer.dialect == Dialect::Umbra);
    own || (of_optimizer.contains(&name) && plan.files.sources.contains_key("optimizer"))
}

/// Settings whose defaults follow from others: what one file says of them the other need not.
const FOLLOWS: [&str; 9] =
    ["policy", "wire", "reduced", "accumulate", "optimizer_form", "clip_form", "global_batch", "lanes", "shard_group"];

/// Settings that are there for the learning rate and the momenta of each step alone.
const COURSE: [&str; 9] =
    ["lr", "min_lr", "schedule", "warmup", "decay_steps", "schedule_params", "schedule_stepping", "beta1", "beta2"];

/// Steps that are compared where the files do not say how many there are.
const STEPS: u64 = 1000;

/// Whether two plans have the same learning rate and momenta in every step, however that is said.
fn same_course(a: &RunPlan, b: &RunPlan) -> bool {
    matches!((course(a), course(b)), (Some(a), Some(b)) if a == b)
}

/// Learning rate and momenta of every step.
fn course(plan: &RunPlan) -> Option<Vec<[f64; 3]>> {
    let steps = match plan.length {
        Length::Steps(steps) => steps,
        Length::Epochs(_) => STEPS,
    };
    let schedule = plan.schedule(steps).ok()?;
    let at = |step: u64| {
        let hyper = plan.hyper(&schedule, step);
        [hyper.lr, hyper.beta1, hyper.beta2]
    };
    Some((0..steps).map(at).collect())
}

/// The first step whose learning rate is not the same: releases of an engine differ there with equal settings.
fn course_difference(a: &RunPlan, b: &RunPlan) -> Option<Difference> {
    let (of_a, of_b) = (course(a)?, course(b)?);
    let step = of_a.iter().zip(&of_b).position(|(a, b)| a[0] != b[0])?;
    let side = |rates: &[[f64; 3]], plan: &RunPlan| {
        (crate::table::number(rates[step][0]), format!("{}, DeepSpeed {}", plan.schedule, plan.assume.deepspeed))
    };
    let name = format!("learning rate of step {step}");
    Some(Difference { name, weight: Weight::Mathematics, a: side(&of_a, a), b: side(&of_b, b) })
}

/// One thing that is compared.
struct Fact {
    name: String,
    weight: Weight,
    value: String,
    origin: String,
}

fn facts(plan: &RunPlan) -> Vec<Fact> {
    let json = plan.to_json();
    let settings = json["settings"].as_object().into_iter().flatten();
    let mut facts = Vec::new();
    for (name, setting) in settings {
        let name = name.as_str();
        let cost = COST.contains(&name);
        let placed = crate::plan::resume::is_free(name) && !ROWS.contains(&name);
        if !cost && (NOT_COMPARED.contains(&name) || placed) {
            continue;
        }
        let value = if matters(plan, name) { text(&setting["value"]) } else { "-".to_owned() };
        let weight = if cost { Weight::Cost } else { Weight::Mathematics };
        facts.push(Fact { name: name.to_owned(), weight, value, origin: origin(plan, name) });
    }
    let origin_of = origin(plan, "schedule_params");
    facts.push(Fact {
        name: "schedule_params".to_owned(),
        weight: Weight::Mathematics,
        value: plan.schedule_params.to_string(),
        origin: origin_of,
    });
    facts.extend(roles(plan));
    facts
}

/// Whether a setting can change anything beside the others.
fn matters(plan: &RunPlan, name: &str) -> bool {
    let sgd = plan.optimizer == OptimizerKind::Sgd;
    match name {
        "beta1" | "beta2" | "eps" => !sgd,
        // Without decay Adam and AdamW are one.
        "decay_norms" => plan.weight_decay > 0.0,
        "min_lr" | "warmup" | "decay_steps" | "schedule_stepping" => plan.lr > 0.0,
        _ => true,
    }
}

/// The dtype of every role and the forms of the arithmetic, as they come out of the policy and what is set beside it.
fn roles(plan: &RunPlan) -> Vec<Fact> {
    let p = plan.precision();
    // What is bf16 already stays what it is where there is one of it to add up.
    let accumulate = if plan.accum == 1 && p.reduced == DType::Bf16 { p.reduced } else { p.accumulate };
    let clip = if plan.clip > 0.0 { format!("{:?}'s form", p.clip) } else { "-".to_owned() };
    // Weights that are bf16 in the file, or in the shadow, are rounded anyway.
    let rounded = p.round_loaded || p.shadow == DType::Bf16 || loaded(plan) == LoadDType::Bf16;
    let role = |name: &str, value: String, key: &str| Fact {
        name: name.to_owned(),
        weight: Weight::Rounding,
        value,
        origin: if plan.files.sources.contains_key(key) { origin(plan, key) } else { origin(plan, "policy") },
    };
    vec![
        role("shadow (the optimizer's weights)", p.shadow.to_string(), "policy"),
        role("compute", p.compute.to_string(), "policy"),
        role("grad", p.grad.to_string(), "policy"),
        role("wire", p.wire.to_string(), "wire"),
        role("reduced", p.reduced.to_string(), "reduced"),
        role("accumulate", accumulate.to_string(), "accumulate"),
        role("moments", p.moments.to_string(), "policy"),
        role("optimizer arithmetic", arithmetic(p.arithmetic).to_owned(), "optimizer_form"),
        role("rounding on store", format!("{:?}", p.rounding).to_lowercase(), "policy"),
        role("clip factor", clip, "clip_form"),
        role("start weights rounded to bf16", rounded.to_string(), "policy"),
    ]
}

fn arithmetic(arithmetic: Arithmetic) -> &'static str {
    match arithmetic {
        Arithmetic::Fp32Torch => "torch's, fp32",
        Arithmetic::Fp32Fused => "FusedAdam's, fp32",
        Arithmetic::Fp32Cpu => "CPUAdam's, fp32",
        Arithmetic::Bf16PerOp => "torch's, bf16 after every operation",
    }
}

/// The dtype in which the weights are loaded.
fn loaded(plan: &RunPlan) -> LoadDType {
    let folder = match &plan.model {
        ModelSource::Tiny => None,
        ModelSource::Folder(dir) => Some(dir.as_path()),
    };
    plan.assume.load.unwrap_or_else(|| super::merge::loaded_in(folder))
}

fn origin(plan: &RunPlan, name: &str) -> String {
    match plan.files.sources.get(name) {
        Some(source) => source.to_string(),
        None => match plan.origin(name) {
            Some(origin) => format!("{origin:?}").to_lowercase(),
            None => "follows from the rest".to_owned(),
        },
    }
}

fn text(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        Value::Null => "none".to_owned(),
        Value::Object(map) if map.len() == 1 => {
            map.iter().map(|(name, value)| format!("{name} {}", text(value))).collect()
        }
        other => other.to_string(),
    }
}
