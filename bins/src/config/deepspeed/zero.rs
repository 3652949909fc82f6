//! `zero_optimization`: the stage, groups and offload (`deepspeed/runtime/zero/config.py`, `offload_config.py`).

use super::Auto;
use super::keys::{Any, Bool, Count, Number, Quiet, Text, has_content, must_be_off, quiet, refused, switch, written};
use crate::config::Layer;
use crate::config::node::Value;
use crate::config::section::{Field, Section, contradiction};
use crate::{Failure, Result};

/// What the other sections depend on.
pub(super) struct Zero<'a> {
    /// The stage.
    pub(super) stage: u64,
    /// The stage's key, if it is written.
    pub(super) field: Option<Field<'a>>,
    /// The key that puts the optimizer on the host.
    pub(super) offload: Option<Field<'a>>,
    /// Whether gradients are reduce-scattered, which is DeepSpeed's default.
    pub(super) reduce_scatter: bool,
}

const KEY: &str = "zero_optimization";
const UNITS: &str = "Umbra gathers and reduces unit by unit (embedding, each block, head), whatever their size";
const OVERLAP: &str = "Umbra gathers the next unit while one computes; the bits are the same";
const KEPT: &str = "every weight is sharded, small ones too; no number changes";
const LIVE: &str = "one unit and the next are gathered at a time";
const UNIFIED: &str = "gradients of every stage are reduced in one way, with the same bits";
const LAYOUT: &str = "checkpoints fit any number of ranks";
const MODULES: &str = "there are no hooks on modules: units are fixed";
const HOST: &str = "on this device all state lies in host memory";
const NVME: &str = "the state lies in host memory, not in files, and has to fit there; the arithmetic is the same";

const TUNING: &[Quiet] = &[
    ("contiguous_gradients", Bool, "a unit's gradients are one buffer"),
    ("reduce_bucket_size", Count, UNITS),
    ("allgather_partitions", Bool, UNITS),
    ("allgather_bucket_size", Count, UNITS),
    ("overlap_comm", Bool, OVERLAP),
    ("use_multi_rank_bucket_allreduce", Bool, UNIFIED),
    ("round_robin_gradients", Bool, UNIFIED),
    ("load_from_fp32_weights", Bool, "a checkpoint holds the fp32 shadow, and a run goes on from that"),
    ("elastic_checkpoint", Bool, LAYOUT),
    ("pipeline_loading_checkpoint", Bool, LAYOUT),
    (
        "sub_group_size",
        Count,
        "the optimizer steps unit by unit; norms are summed in blocks that depend on no size set here",
    ),
    ("stage3_prefetch_bucket_size", Count, OVERLAP),
    ("prefetch_bucket_size", Count, OVERLAP),
    ("stage3_param_persistence_threshold", Count, KEPT),
    ("param_persistence_threshold", Count, KEPT),
    ("stage3_model_persistence_threshold", Count, KEPT),
    ("model_persistence_threshold", Count, KEPT),
    ("stage3_max_live_parameters", Count, LIVE),
    ("max_live_parameters", Count, LIVE),
    ("stage3_max_reuse_distance", Count, LIVE),
    ("max_reuse_distance", Count, LIVE),
    ("stage3_module_granularity_threshold", Count, UNITS),
    ("module_granularity_threshold", Count, UNITS),
    ("stage3_use_all_reduce_for_fetch_params", Bool, UNITS),
    ("use_all_reduce_for_fetch_params", Bool, UNITS),
    ("stage3_allgather_sequential", Bool, UNITS),
    ("allgather_sequential", Bool, UNITS),
    ("ignore_unused_parameters", Bool, "every weight of this model has a gradient in every step"),
    ("zeropp_loco_param", Any, "it belongs to zero_quantized_gradients, which is off"),
    ("mics_hierarchical_params_gather", Bool, "it is the way a gather takes, not what is gathered"),
    ("memory_efficient_linear", Bool, "the backward pass is written out and keeps no copy of a weight"),
    ("legacy_stage1", Bool, "there is one implementation of each stage"),
    ("override_module_apply", Bool, MODULES),
    ("leaf_module", Any, MODULES),
    ("log_trace_cache_warnings", Bool, "there is no trace of modules"),
    ("enable_sanity_checks", Bool, "ranks compare a header before every collective in any case"),
    ("save_muon_momentum_buffer_in_memory", Bool, "Muon is not built"),
    ("cpu_offload_use_pin_memory", Bool, HOST),
];

const OFFLOAD: &[Quiet] = &[
    ("nvme_path", Text, "nothing is offloaded to files"),
    ("buffer_count", Count, HOST),
    ("buffer_size", Count, HOST),
    ("max_in_cpu", Count, HOST),
    ("pin_memory", Bool, HOST),
    ("pipeline_read", Bool, "nothing is offloaded to files"),
    ("pipeline_write", Bool, "nothing is offloaded to files"),
    ("fast_init", Bool, "nothing is offloaded to files"),
    ("cpuadam_cores_perc", Number, "--threads says how many cores work, and no number of them changes a bit"),
];

/// The section as flags.
///
/// # Errors
/// Exit 2: what Umbra does not do, contradictions, wrong types and unknown keys.
pub(super) fn read<'a>(layer: &mut Layer, top: &mut Section<'a>, auto: Auto) -> Result<Zero<'a>> {
    let none = Zero { stage: 0, field: None, offload: None, reduce_scatter: true };
    let Some(field) = written(top, KEY) else {
        if auto.is_accelerate() {
            return Err(Failure::usage("the DeepSpeed file has no zero_optimization")
                .at(layer.file.display())
                .expected("\"zero_optimization\": {\"stage\": ...}, which Accelerate asks for")
                .found("none"));
        }
        layer.imply("stage", 0, "DeepSpeed without zero_optimization shards nothing");
        return Ok(none);
    };
    // The form of the first releases: true is stage 1.
    if let Value::Bool(on) = field.node.value {
        let stage = u64::from(on);
        layer.set("stage", stage, &field);
        layer.same(&field, format!("the oldest form of the section: it means stage {stage}"));
        return Ok(Zero { stage, field: Some(field), ..none });
    }
    let mut zero = field.section()?;
    let (stage, field) = stage(layer, &mut zero)?;
    unlike_zero(layer, &mut zero)?;
    groups(layer, &mut zero, stage)?;
    let reduce_scatter = reduce_scatter(layer, &mut zero)?;
    let offload = offloads(layer, &mut zero)?;
    let save = [
        "stage3_gather_16bit_weights_on_model_save",
        "gather_16bit_weights_on_model_save",
        "stage3_gather_fp16_weights_on_model_save",
    ];
    if let Some(field) = zero.take_one(&save)?.filter(|field| !field.is_null()) {
        switch(&field)?;
        layer.same(&field, "model/ is always written whole, as a Hugging Face folder");
    }
    quiet(layer, &mut zero, TUNING)?;
    zero.finish()?;
    Ok(Zero { stage, field, offload, reduce_scatter })
}

/// Says where DeepSpeed adds micro-batches up in another order; called when the batch is known.
pub(super) fn when_reduced(layer: &mut Layer, zero: &Zero<'_>) {
    let alone = |s: &crate::config::Setting| s.flag == "accum" && s.values == ["1"];
    if let Some(field) = zero.field.as_ref().filter(|_| zero.stage < 2)
        && !layer.settings.iter().any(alone)
    {
        layer.differs(
            field,
            "with several micro-batches DeepSpeed adds them up on each rank and reduces once below stage 2; Umbra reduces \
             each micro-batch at every stage, as DeepSpeed does from stage 2 on. With one micro-batch there is no difference",
        );
    }
}

fn stage<'a>(layer: &mut Layer, zero: &mut Section<'a>) -> Result<(u64, Option<Field<'a>>)> {
    let Some(field) = written(zero, "stage") else {
        layer.imply("stage", 0, "DeepSpeed without zero_optimization.stage shards nothing");
        return Ok((0, None));
    };
    let stage = field.count().ok().filter(|stage| *stage <= 3);
    let stage = stage.ok_or_else(|| field.bad("a whole number from 0 to 3"))?;
    layer.set("stage", stage, &field);
    Ok((stage, Some(field)))
}

/// What would train something else.
fn unlike_zero(layer: &mut Layer, zero: &mut Section<'_>) -> Result<()> {
    let exact = "leave it out: weights and gradients travel in the dtypes of --policy";
    let rounds = "it sends block-quantised numbers";
    must_be_off(layer, zero, "zero_quantized_weights", rounds, exact)?;
    must_be_off(layer, zero, "zero_quantized_nontrainable_weights", rounds, exact)?;
    must_be_off(layer, zero, "zero_quantized_gradients", rounds, exact)?;
    if let Some(field) = written(zero, "zenflow") {
        if has_content(&field) {
            return Err(refused(&field, "ZenFlow steps part of the weights late", "leave it out"));
        }
        layer.same(&field, "off");
    }
    Ok(())
}

fn groups(layer: &mut Layer, zero: &mut Section<'_>, stage: u64) -> Result<()> {
    let mics = written(zero, "mics_shard_size").filter(|field| !field.is_auto());
    let hpz = written(zero, "zero_hpz_partition_size").filter(|field| !field.is_auto());
    let mut set: Option<(u64, Field<'_>)> = None;
    if let Some(field) = mics {
        // -1, the default, is off.
        if field.number()? <= 0.0 {
            layer.same(&field, "no groups: one copy of the state over all ranks");
        } else {
            let n = field.positive()?;
            group(layer, &field, n, stage);
            set = Some((n, field));
        }
    }
    let Some(field) = hpz else { return Ok(()) };
    let n = field.count()?;
    match set {
        _ if n <= 1 => layer.same(&field, "no second partition of the weights"),
        Some((size, first)) if size != n => return Err(contradiction(&first, &field)),
        Some(_) => layer.same(&field, "the group that mics_shard_size sets"),
        None => {
            group(layer, &field, n, stage);
            if stage == 3 {
                layer.differs(
                    &field,
                    "DeepSpeed keeps gradients and optimizer state spread over all ranks and only a second copy of the \
                     weights in each group; here all of the state is spread within the group: more memory, the same bits",
                );
            }
        }
    }
    Ok(())
}

fn group(layer: &mut Layer, field: &Field<'_>, ranks: u64, stage: u64) {
    if stage == 3 {
        layer.set("shard-group", ranks, field);
    } else {
        layer.no_effect(field, format!("it belongs to stage 3, and this is stage {stage}"));
    }
}

fn reduce_scatter(layer: &mut Layer, zero: &mut Section<'_>) -> Result<bool> {
    let Some(field) = written(zero, "reduce_scatter").filter(|field| !field.is_auto()) else { return Ok(true) };
    let on = field.bool()?;
    if on {
        layer.same(&field, "each rank receives its own part of the sum");
    } else {
        layer.differs(
            &field,
            "DeepSpeed all-reduces whole gradients and keeps its part: the same mean, in another order of sums. Umbra \
             adds contributions in the order of the lanes at every stage and sends each rank its own part",
        );
    }
    Ok(on)
}

/// What an offload section says.
#[derive(Default)]
struct Offload<'a> {
    /// The device and its key.
    device: Option<(&'static str, Field<'a>)>,
    /// The share of the weights that is stepped there.
    ratio: Option<Field<'a>>,
}

/// The key that puts the optimizer's state on the host, if it does.
fn offloads<'a>(layer: &mut Layer, zero: &mut Section<'a>) -> Result<Option<Field<'a>>> {
    let param = offload(layer, zero, "offload_param")?;
    let optimizer = offload(layer, zero, "offload_optimizer")?;
    let old_param = zero.take_one(&["cpu_offload_param", "cpu_offload_params"])?;
    deprecated(layer, old_param, &param, "offload_param")?;
    let old = zero.take("cpu_offload");
    let old = deprecated(layer, old, &optimizer, "offload_optimizer")?;
    let on_host = optimizer.device.filter(|(device, _)| *device != "none").map(|(_, field)| field).or(old);
    if let Some(ratio) = optimizer.ratio {
        let share = ratio.number()?;
        if !(0.0..=1.0).contains(&share) {
            return Err(ratio.bad("a share from 0 to 1"));
        }
        if share < 1.0 && on_host.is_some() {
            let why = "DeepSpeed steps this share with CPUAdam and the rest with torch's AdamW; here all of it has \
                       CPUAdam's arithmetic";
            layer.differs(&ratio, why);
        } else {
            layer.no_effect(&ratio, HOST);
        }
    }
    Ok(on_host)
}

fn offload<'a>(layer: &mut Layer, zero: &mut Section<'a>, key: &'static str) -> Result<Offload<'a>> {
    let Some(field) = written(zero, key) else { return Ok(Offload::default()) };
    let mut section = field.section()?;
    let device = match written(&mut section, "device").filter(|device| !device.is_auto()) {
        Some(device) => Some((device.choice(&["none", "cpu", "nvme"])?, device)),
        None => None,
    };
    match &device {
        Some(("nvme", device)) => layer.differs(device, NVME),
        Some(("cpu", device)) => layer.no_effect(device, HOST),
        Some((_, device)) => layer.same(device, "nothing is offloaded"),
        None => layer.same(&field, "no device is named, so nothing is offloaded"),
    }
    must_be_off(layer, &mut section, "super_offload", "SuperOffload steps before norms are known", "leave it out")?;
    let ratio = written(&mut section, "ratio").filter(|ratio| !ratio.is_auto());
    quiet(layer, &mut section, OFFLOAD)?;
    section.finish()?;
    Ok(Offload { device, ratio })
}

/// A key from before there were sections: true is `"device": "cpu"`.
fn deprecated<'a>(
    layer: &mut Layer,
    old: Option<Field<'a>>,
    new: &Offload<'a>,
    section: &str,
) -> Result<Option<Field<'a>>> {
    let Some(old) = old.filter(|field| !field.is_null() && !field.is_auto()) else { return Ok(None) };
    let on = old.bool()?;
    if let Some((device, field)) = &new.device
        && on != (*device != "none")
    {
        return Err(contradiction(field, &old));
    }
    if on {
        layer.no_effect(&old, format!("the old form of {section}.device \"cpu\": {HOST}"));
    } else {
        layer.same(&old, "nothing is offloaded");
    }
    Ok(on.then_some(old))
}
