//! Accelerate's YAML as flags. Keys, values and defaults are those of `accelerate/commands/config/config_args.py`,
//! `commands/launch.py` and `utils/dataclasses.py`; which release's arithmetic applies is [`super::Assume`].
//!
//! Inside `fsdp_config` and `deepspeed_config` Accelerate passes over names it does not know; here they are errors, as all
//! unknown names are. A key that is `null` or left empty is not written, as for Accelerate.

mod deepspeed;
mod fsdp;
mod keys;
mod named;
mod parallel;
mod precision;
mod processes;

use super::node::{Node, Value};
use super::section::{Field, Section};
use super::{Dialect, Facts, Layer};
use crate::{Failure, Result};
use keys::{Any, Bool, Count, Quiet, QuietSection, Text, has_content, quiet, quiet_section, written};
use std::path::PathBuf;
use std::sync::Arc;

/// What distributes the training.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
enum Engine {
    /// Nothing: one process.
    Alone,
    /// torch's DistributedDataParallel.
    DataParallel,
    /// torch's FSDP, either version.
    Fsdp,
    /// DeepSpeed.
    DeepSpeed,
}

const TYPE: &str = "distributed_type";

/// The values of `distributed_type` (`accelerate/utils/dataclasses.py: DistributedType`), `TPU` being the older `XLA`.
const TYPES: [&str; 15] = [
    "NO",
    "FSDP",
    "DEEPSPEED",
    "MULTI_GPU",
    "MULTI_CPU",
    "MULTI_NPU",
    "MULTI_MLU",
    "MULTI_SDAA",
    "MULTI_MUSA",
    "MULTI_XPU",
    "MULTI_HPU",
    "MULTI_NEURON",
    "XLA",
    "TPU",
    "MEGATRON_LM",
];

const STARTED: &str = "mpirun or Slurm starts the ranks and tells them where the others are";
const TPU: &str = "it is for TPUs only";

/// Top-level keys that set nothing.
const QUIET: &[Quiet] = &[
    ("machine_rank", Count, STARTED),
    ("main_process_ip", Text, STARTED),
    ("main_process_port", Count, STARTED),
    ("rdzv_backend", Text, STARTED),
    ("same_network", Bool, STARTED),
    ("gpu_ids", Any, "each rank takes the device that its launcher gives it"),
    ("main_training_function", Text, "there is no script: `umbra train` is the training function"),
    ("debug", Bool, "it only makes Accelerate compare shapes before collectives"),
    ("enable_cpu_affinity", Bool, "mpirun or Slurm binds ranks to cores"),
    ("downcast_bf16", Text, TPU),
    ("tpu_name", Text, TPU),
    ("tpu_zone", Text, TPU),
    ("tpu_use_cluster", Bool, TPU),
    ("tpu_use_sudo", Bool, TPU),
    ("tpu_vm", Any, TPU),
    ("tpu_env", Any, TPU),
    ("command_file", Any, TPU),
    ("commands", Any, TPU),
    ("dynamo_backend", Text, COMPILED),
];

const COMPILED: &str = "torch.compile's: Umbra's kernels are compiled already";

/// Sections of which every key sets nothing.
const QUIET_SECTIONS: &[QuietSection] = &[
    (
        "dynamo_config",
        &[
            ("dynamo_backend", Text),
            ("dynamo_mode", Text),
            ("dynamo_use_dynamic", Bool),
            ("dynamo_use_fullgraph", Bool),
            ("dynamo_use_regional_compilation", Bool),
        ],
        COMPILED,
    ),
    ("mpirun_config", &[("mpirun_hostfile", Text), ("mpirun_ccl", Any)], STARTED),
    ("ipex_config", &[("ipex", Bool), ("use_xpu", Bool)], "Umbra's kernels are its own"),
];

/// Keys of a section that people write at the top, where Accelerate has no such key, and where they belong.
const MISPLACED: &[(&str, &str)] = &[
    ("gradient_accumulation_steps", "write it in deepspeed_config, or give --accum"),
    ("gradient_clipping", "write it in deepspeed_config, or give --clip"),
    ("max_grad_norm", "gradient_clipping in deepspeed_config, or --clip"),
    ("zero_stage", "write it in deepspeed_config, or give --stage"),
    ("deepspeed_config_file", "write it in deepspeed_config"),
    ("fsdp_version", "write it in fsdp_config"),
    ("fsdp_sharding_strategy", "write it in fsdp_config, or give --stage"),
    ("fsdp_reshard_after_forward", "write it in fsdp_config, or give --reshard-after-forward"),
    ("fsdp_activation_checkpointing", "write it in fsdp_config, or give --recompute"),
];

/// The flags of a file.
///
/// # Errors
/// Exit 2: what cannot be honoured, contradicts itself, has a wrong type or is no key at all.
pub(super) fn layer(file: &Arc<PathBuf>, node: &Node, facts: &Facts) -> Result<Layer> {
    let mut layer = Layer::new(file.clone(), Dialect::Accelerate);
    let mut top = Section::new(file, "", node)?;
    environment(&mut layer, &mut top)?;
    let Some(kind) = written(&mut top, TYPE) else { return Err(untyped(file, top)) };
    let engine = engine(&kind)?;
    let processes = processes::read(&mut layer, &mut top, engine, &kind, facts)?;
    let mixed = precision::read(&mut layer, &mut top)?;
    let mut version = 0;
    match engine {
        Engine::Fsdp => version = fsdp::read(&mut layer, &mut top, &mixed, &processes, facts)?,
        Engine::DeepSpeed => deepspeed::read(&mut layer, &mut top, &mixed, &processes, facts)?,
        Engine::Alone | Engine::DataParallel => {
            layer.set("stage", 0, &kind);
            precision::data_parallel(&mut layer, &mixed, facts);
        }
    }
    parallel::read(&mut layer, &mut top, version)?;
    unused(&mut layer, &mut top, engine, &kind)?;
    device(&mut layer, &mut top)?;
    quiet(&mut layer, &mut top, QUIET)?;
    for section in QUIET_SECTIONS {
        quiet_section(&mut layer, &mut top, section)?;
    }
    misplaced(&mut top)?;
    top.finish()?;
    Ok(layer)
}

fn environment(layer: &mut Layer, top: &mut Section<'_>) -> Result<()> {
    let Some(field) = written(top, "compute_environment") else { return Ok(()) };
    match field.choice(&["LOCAL_MACHINE", "AMAZON_SAGEMAKER"])? {
        "LOCAL_MACHINE" => layer.no_effect(&field, STARTED),
        _ => {
            let instead = "compute_environment: LOCAL_MACHINE, and start the ranks with mpirun or Slurm";
            return Err(field.refused("SageMaker's jobs are started by its own service", instead));
        }
    }
    Ok(())
}

fn engine(kind: &Field<'_>) -> Result<Engine> {
    // An unquoted NO is false for older YAML readers and may have been written back as that.
    if kind.node.value == Value::Bool(false) {
        return Ok(Engine::Alone);
    }
    match kind.choice(&TYPES)? {
        "NO" => Ok(Engine::Alone),
        "FSDP" => Ok(Engine::Fsdp),
        "DEEPSPEED" => Ok(Engine::DeepSpeed),
        "XLA" | "TPU" => Err(kind.refused("there is no backend for TPUs", "distributed_type: FSDP or MULTI_CPU")),
        "MEGATRON_LM" => Err(kind.refused(
            "tensor and pipeline parallelism are not built",
            "distributed_type: FSDP, which shards the same weights over data-parallel ranks",
        )),
        _ => Ok(Engine::DataParallel),
    }
}

/// The file does not say what distributes the training, or misspells the key.
fn untyped(file: &Arc<PathBuf>, mut top: Section<'_>) -> Failure {
    let read_later =
        ["num_processes", "num_machines", "mixed_precision", "fp16", "use_cpu", "fsdp_config", "deepspeed_config"];
    let sections = ["parallelism_config", "tp_config", "megatron_lm_config", "fp8_config"];
    let quiet = QUIET.iter().map(|(key, ..)| *key).chain(QUIET_SECTIONS.iter().map(|(key, ..)| *key));
    for key in quiet.chain(read_later).chain(sections) {
        top.take(key);
    }
    let missing = || {
        Failure::usage("distributed_type is missing")
            .at(file.display())
            .expected(format!("distributed_type: one of {}", TYPES.join(", ")))
            .found("no such key")
            .hint(
                "distributed_type: FSDP for sharded weights, MULTI_GPU for plain data parallelism, NO for one process",
            )
    };
    top.finish().err().unwrap_or_else(missing)
}

/// Sections that another `distributed_type` or precision would read.
fn unused(layer: &mut Layer, top: &mut Section<'_>, engine: Engine, kind: &Field<'_>) -> Result<()> {
    let of_another = |needed: &str| format!("Accelerate reads it under {TYPE} {needed}, and this is {}", kind.node);
    for (key, engine_of, needed) in [
        ("fsdp_config", Some(Engine::Fsdp), "FSDP"),
        ("deepspeed_config", Some(Engine::DeepSpeed), "DEEPSPEED"),
        ("megatron_lm_config", None, "MEGATRON_LM"),
    ] {
        // What the engine reads itself has been taken there.
        if engine_of != Some(engine) {
            unused_section(layer, top, key, &of_another(needed))?;
        }
    }
    unused_section(layer, top, "fp8_config", "Accelerate reads it under mixed_precision fp8 only")
}

fn unused_section(layer: &mut Layer, top: &mut Section<'_>, key: &'static str, why: &str) -> Result<()> {
    let Some(field) = written(top, key) else { return Ok(()) };
    field.section()?;
    if has_content(&field) {
        layer.no_effect(&field, why);
    }
    Ok(())
}

fn device(layer: &mut Layer, top: &mut Section<'_>) -> Result<()> {
    let Some(field) = written(top, "use_cpu") else { return Ok(()) };
    match field.bool()? {
        true => layer.same(&field, "Umbra computes on processors unless --device says otherwise"),
        false => layer.no_effect(&field, "--device says what computes"),
    }
    Ok(())
}

fn misplaced(top: &mut Section<'_>) -> Result<()> {
    for (key, instead) in MISPLACED {
        if let Some(field) = written(top, key) {
            return Err(field.refused("Accelerate has no such key at this level", instead));
        }
    }
    Ok(())
}

#[cfg(test)]
mod tests;
