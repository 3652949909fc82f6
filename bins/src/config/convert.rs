//! A plan written in each of the three formats. What a format cannot say is found by reading the result back.

use super::assume::Assume;
use crate::cli::{OptimizerForm, OptimizerKind, ScheduleKind, Target};
use crate::plan::RunPlan;
use serde_json::{Map, Value, json};
use spmd_core::{DType, Policy};
use std::fmt::Write;

/// The text of `plan` in the target's format.
pub(super) fn write(plan: &RunPlan, to: Target) -> String {
    match to {
        Target::Umbra => toml(plan),
        Target::DeepSpeed => format!("{:#}\n", deepspeed(plan)),
        Target::Accelerate => accelerate(plan),
    }
}

/// Every setting that files have made, as the flag it stands for, and the releases they were read as.
fn toml(plan: &RunPlan) -> String {
    let mut out = String::new();
    let settings = plan.files.layers.iter().flat_map(|layer| &layer.settings);
    // Of two files that say the same, the one that counts.
    for setting in settings.filter(|s| plan.files.sources.values().any(|source| *source == s.source)) {
        if out.lines().any(|line| line.starts_with(&format!("{} = ", setting.flag))) {
            continue;
        }
        let name = &setting.flag;
        let value = match setting.values.as_slice() {
            [] => "true".to_owned(),
            [one] if !LISTS.contains(&name.as_str()) => plain(one),
            many => format!("[{}]", many.iter().map(|v| plain(v)).collect::<Vec<_>>().join(", ")),
        };
        // Writing to a string cannot fail.
        let _ = writeln!(out, "{name} = {value}  # {}", setting.source.says);
    }
    if plan.assume != Assume::default() && !out.contains("assume = ") {
        let words: Vec<String> = plan.assume.words().iter().map(|word| plain(word)).collect();
        let _ = writeln!(out, "assume = [{}]", words.join(", "));
    }
    out
}

/// Flags of several values, which stay lists even where there is one.
const LISTS: [&str; 4] = ["data", "eval-data", "schedule-params", "assume"];

/// A number as it is, anything else in quotes.
fn plain(value: &str) -> String {
    let number = value.parse::<f64>().is_ok_and(f64::is_finite) && value.starts_with(|c: char| c.is_ascii_digit());
    // TOML wants digits on both sides of a point, and JSON's escapes are TOML's.
    if number && !value.contains('.') || value.split_once('.').is_some_and(|(a, b)| digits(a) && digits(b)) {
        return value.to_owned();
    }
    Value::from(value).to_string()
}

fn digits(text: &str) -> bool {
    !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit())
}

fn is_set(plan: &RunPlan, name: &str) -> bool {
    plan.origin(name).is_some_and(|origin| origin != crate::plan::Origin::Default)
}

/// DeepSpeed JSON. Policies it does not have become the nearest one it has.
fn deepspeed(plan: &RunPlan) -> Value {
    let mut out = Map::new();
    let mut put = |key: &str, value: Value| {
        out.insert(key.to_owned(), value);
    };
    let or_auto = |name: &str, n: usize| if is_set(plan, name) { json!(n) } else { json!("auto") };
    if is_set(plan, "global_batch") {
        put("train_batch_size", json!(plan.global_batch));
    }
    put("train_micro_batch_size_per_gpu", or_auto("micro_batch", plan.micro_batch));
    put("gradient_accumulation_steps", or_auto("accum", plan.accum));
    put("gradient_clipping", json!(plan.clip));
    let p = plan.precision();
    let name = |dtype| if dtype == DType::Bf16 { "bf16" } else { "fp32" };
    if p.compute == DType::Bf16 {
        put("bf16", json!({ "enabled": true }));
        put("communication_data_type", json!(name(p.wire)));
        put("data_types", json!({ "grad_accum_dtype": name(p.accumulate) }));
    }
    let said = ["optimizer", "lr", "beta1", "beta2", "eps", "weight_decay", "momentum"];
    if said.iter().any(|name| is_set(plan, name)) {
        put("optimizer", optimizer(plan));
    }
    if let Some(scheduler) = scheduler(plan) {
        put("scheduler", scheduler);
    }
    let mut zero = json!({ "stage": plan.stage });
    if plan.stage > 0 && plan.shard_group < plan.world {
        zero["mics_shard_size"] = json!(plan.shard_group);
    }
    if plan.optimizer_form == OptimizerForm::Cpu {
        zero["offload_optimizer"] = json!({ "device": "cpu" });
    }
    put("zero_optimization", zero);
    Value::Object(out)
}

fn optimizer(plan: &RunPlan) -> Value {
    if plan.optimizer == OptimizerKind::Sgd {
        let params = json!({ "lr": plan.lr, "momentum": plan.momentum, "weight_decay": plan.weight_decay });
        return json!({ "type": "SGD", "params": params });
    }
    let mut params = json!({
        "lr": plan.lr,
        "betas": [plan.beta1, plan.beta2],
        "eps": plan.eps,
        "weight_decay": plan.weight_decay,
    });
    if plan.optimizer == OptimizerKind::Adam {
        params["adam_w_mode"] = json!(false);
    }
    if plan.optimizer_form == OptimizerForm::Torch {
        params["torch_adam"] = json!(true);
    }
    json!({ "type": if plan.optimizer == OptimizerKind::Adam { "Adam" } else { "AdamW" }, "params": params })
}

fn scheduler(plan: &RunPlan) -> Option<Value> {
    let name = match plan.schedule {
        ScheduleKind::WarmupLr => "WarmupLR",
        ScheduleKind::WarmupDecayLr => "WarmupDecayLR",
        ScheduleKind::WarmupCosineLr => "WarmupCosineLR",
        ScheduleKind::OneCycle => "OneCycle",
        ScheduleKind::LrRangeTest => "LRRangeTest",
        _ => return None,
    };
    Some(json!({ "type": name, "params": plan.schedule_params }))
}

/// Accelerate YAML: FSDP 2 for the policies it has, DEEPSPEED for DeepSpeed's. Rate, schedule and rows are the script's.
fn accelerate(plan: &RunPlan) -> String {
    let p = plan.precision();
    let deepspeed = p == Policy::DeepSpeed.precision() || plan.policy == Policy::DeepSpeed;
    let mixed = if p.compute == DType::Bf16 && p.shadow == DType::F32 { "bf16" } else { "no" };
    let mut out = format!("compute_environment: LOCAL_MACHINE\nmixed_precision: '{mixed}'\n");
    if plan.stage == 0 {
        let kind = if plan.lanes == 1 { "'NO'" } else { "MULTI_CPU" };
        out += &format!("distributed_type: {kind}\n");
    } else if deepspeed {
        out += &format!(
            "distributed_type: DEEPSPEED\ndeepspeed_config:\n  zero_stage: {}\n  gradient_accumulation_steps: {}\n  gradient_clipping: {}\n",
            plan.stage, plan.accum, plan.clip
        );
    } else {
        out += "distributed_type: FSDP\nfsdp_config:\n  fsdp_version: 2\n  fsdp_auto_wrap_policy: TRANSFORMER_BASED_WRAP\n";
        out += &format!("  fsdp_reshard_after_forward: {}\n", plan.stage == 3 && plan.reshard_after_forward);
        out += &format!("  fsdp_activation_checkpointing: {}\n", plan.recompute);
    }
    out += &format!("num_machines: 1\nnum_processes: {}\n", plan.lanes);
    out
}

/// Whether the plan says a setting itself rather than leaving it at its default.
pub(super) fn says(plan: &RunPlan, name: &str) -> bool {
    is_set(plan, name)
}
