//! `deepspeed_config`: a DeepSpeed file, or some of its settings by Accelerate's names
//! (`accelerate/utils/dataclasses.py: DeepSpeedPlugin`).

use super::STARTED;
use super::keys::{Any, Bool, Quiet, Text, quiet, written};
use super::named;
use super::precision::Mixed;
use super::processes::Processes;
use crate::config::node::{Node, Spot, Value};
use crate::config::section::{Field, Section};
use crate::config::{Facts, Layer};
use crate::{Failure, Result};
use std::path::PathBuf;
use std::sync::Arc;

const KEY: &str = "deepspeed_config";
const FILE: &str = "deepspeed_config_file";

/// Settings that Accelerate refuses beside a file, and where the file has them.
const INLINE: [(&str, &str); 8] = [
    ("zero_stage", "zero_optimization.stage"),
    ("gradient_accumulation_steps", "gradient_accumulation_steps"),
    ("gradient_clipping", "gradient_clipping"),
    ("offload_optimizer_device", "zero_optimization.offload_optimizer.device"),
    ("offload_optimizer_nvme_path", "zero_optimization.offload_optimizer.nvme_path"),
    ("offload_param_device", "zero_optimization.offload_param.device"),
    ("offload_param_nvme_path", "zero_optimization.offload_param.nvme_path"),
    ("zero3_save_16bit_model", "zero_optimization.stage3_gather_16bit_weights_on_model_save"),
];

const HOST: &str = "on this device all state lies in host memory";
const NVME: &str = "the state lies in host memory, not in files, and has to fit there; the arithmetic is the same";
const NO_NVME: &str = "nothing is offloaded to a disk";

/// Keys that set nothing, beside a file too.
const QUIET: &[Quiet] = &[
    ("zero3_init_flag", Bool, "each rank reads its own part of the weights from the files; none holds the whole model"),
    ("deepspeed_moe_layer_cls_names", Any, "units are fixed: the embedding, each block and the head"),
    ("deepspeed_multinode_launcher", Text, STARTED),
    ("deepspeed_hostfile", Any, STARTED),
    ("deepspeed_exclusion_filter", Any, STARTED),
    ("deepspeed_inclusion_filter", Any, STARTED),
];

/// The flags of the section.
///
/// # Errors
/// Exit 2: what cannot be honoured, contradicts itself, has a wrong type or is no key.
pub(super) fn read(
    layer: &mut Layer,
    top: &mut Section<'_>,
    mixed: &Mixed<'_>,
    processes: &Processes<'_>,
    facts: &Facts,
) -> Result<()> {
    let empty = Node { value: Value::Map(Vec::new()), spot: Spot { line: 1, column: 1 } };
    let node = written(top, KEY).map_or(&empty, |field| field.node);
    let mut section = Section::new(&layer.file.clone(), KEY, node)?;
    // Accelerate's environment spells an absent file `none`.
    let file = written(&mut section, FILE).filter(|field| field.node.value != Value::Text("none".to_owned()));
    match file {
        Some(field) => {
            alone(&mut section, &field, mixed)?;
            let (file, node) = named::settings(&layer.file, &field)?;
            let lanes = processes.number.as_ref().and_then(|(n, _)| usize::try_from(*n).ok());
            let lanes = lanes.filter(|_| !facts.lanes_written).unwrap_or(facts.lanes);
            engine_file(layer, &file, &node, &Facts { lanes, ..*facts })?;
            layer.same(&field, format!("its settings are read from {}", file.display()));
        }
        None => inline(layer, &mut section, mixed)?,
    }
    quiet(layer, &mut section, QUIET)?;
    section.finish()
}

/// Reads the DeepSpeed settings that the file names, as Accelerate would hand them on.
fn engine_file(layer: &mut Layer, file: &Arc<PathBuf>, node: &Node, facts: &Facts) -> Result<()> {
    // What `mixed_precision` says beside a file is refused, so the file says it all.
    crate::config::deepspeed::fill(layer, file, node, facts, crate::config::deepspeed::Auto::Accelerate { bf16: None })
}

/// Refuses settings beside a file, as Accelerate does, `mixed_precision` among them.
fn alone(section: &mut Section<'_>, file: &Field<'_>, mixed: &Mixed<'_>) -> Result<()> {
    let both = |field: &Field<'_>, instead: &str| {
        Failure::usage(format!("{} cannot be written beside {}", field.path, file.path))
            .at(field.place())
            .expected(format!("DeepSpeed's settings in one place, the file named at {}", file.place()))
            .found(format!("{}: {}", field.path, field.node))
            .hint(format!("remove it and write {instead} in that file"))
    };
    for (key, instead) in INLINE {
        if let Some(field) = written(section, key) {
            return Err(both(&field, instead));
        }
    }
    match &mixed.field {
        Some(field) => Err(both(field, if mixed.bf16 { "bf16.enabled: true" } else { "bf16.enabled: false" })),
        None => Ok(()),
    }
}

/// Settings by Accelerate's names.
fn inline(layer: &mut Layer, section: &mut Section<'_>, mixed: &Mixed<'_>) -> Result<()> {
    match written(section, "zero_stage") {
        Some(field) => match field.count() {
            Ok(stage @ 0..=3) => layer.set("stage", stage, &field),
            _ => return Err(field.bad("0, 1, 2 or 3")),
        },
        None => layer.imply("stage", 2, "Accelerate's DeepSpeed plugin without zero_stage"),
    }
    if let Some(field) = written(section, "gradient_accumulation_steps") {
        match field.is_auto() {
            true => layer.no_effect(&field, "the script's Accelerator fills it in: --accum, or 1"),
            false => layer.set("accum", field.positive()?, &field),
        }
    }
    clipping(layer, section)?;
    let cpu = offload(layer, section)?;
    match (&mixed.field, mixed.bf16) {
        (Some(field), true) => layer.set("policy", "deepspeed", field),
        _ => {
            let why = "DeepSpeed without bf16 keeps everything in fp32";
            layer.imply("policy", "fp32", format!("mixed_precision {}: {why}", mixed.name()));
            layer.imply("clip-form", "deepspeed", why);
        }
    }
    match cpu {
        Some(field) => layer.set("optimizer-form", "cpu", &field),
        None => layer.imply("optimizer-form", "torch", "the script makes the optimizer: as a rule torch.optim.AdamW"),
    }
    if let Some(field) = written(section, "zero3_save_16bit_model") {
        match field.bool()? {
            true => layer.same(&field, "model/ holds the weights in bf16"),
            false => layer.no_effect(&field, "model/ is written all the same"),
        }
    }
    Ok(())
}

fn clipping(layer: &mut Layer, section: &mut Section<'_>) -> Result<()> {
    const FILLED: &str = "Accelerate sets gradient_clipping to 1.0 where it is missing or \"auto\"";
    match written(section, "gradient_clipping") {
        None => layer.imply("clip", 1, FILLED),
        Some(field) if field.is_auto() => layer.imply("clip", 1, FILLED),
        Some(field) => match field.number() {
            Ok(norm) if norm >= 0.0 => layer.set("clip", norm, &field),
            _ => return Err(field.bad("a number that is 0 (off) or more, or auto")),
        },
    }
    Ok(())
}

/// Where state is offloaded to: returns the key that puts the optimizer on the processor, which changes its arithmetic.
fn offload<'a>(layer: &mut Layer, section: &mut Section<'a>) -> Result<Option<Field<'a>>> {
    let mut cpu = None;
    for key in ["offload_optimizer_device", "offload_param_device"] {
        let Some(field) = written(section, key) else { continue };
        match field.choice(&["none", "cpu", "nvme"])? {
            "none" => layer.same(&field, "nothing is offloaded"),
            device => {
                if device == "nvme" {
                    layer.differs(&field, NVME);
                } else if key == "offload_param_device" {
                    layer.no_effect(&field, HOST);
                }
                if key == "offload_optimizer_device" {
                    cpu = Some(field);
                }
            }
        }
    }
    let paths = [("offload_optimizer_nvme_path", Text, NO_NVME), ("offload_param_nvme_path", Text, NO_NVME)];
    quiet(layer, section, &paths)?;
    Ok(cpu)
}
