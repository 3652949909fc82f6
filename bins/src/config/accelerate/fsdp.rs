//! `fsdp_config`: FSDP 1 and 2 (`accelerate/utils/dataclasses.py: FullyShardedDataParallelPlugin`). Every name may lack its
//! `fsdp_`, which Accelerate adds.

use super::keys::{Any, Bool, Count, Kind, either, has_content, written};
use super::precision::{self, Mixed};
use super::processes::{Group, Processes};
use crate::Result;
use crate::config::node::{Node, Spot, Value};
use crate::config::section::{Field, Section, contradiction};
use crate::config::{Facts, Layer};

const KEY: &str = "fsdp_config";
const PREFIX: &str = "fsdp_";

/// torch's ShardingStrategy, in the order of its numbers, which begin at 1.
const STRATEGIES: [&str; 5] = ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "HYBRID_SHARD_ZERO2"];

const UNITS: &str = "units are fixed: the embedding, each block and the head";
const PREFETCH: &str = "Umbra gathers the next unit while one computes, in both directions; the bits are the same";
const LOADING: &str = "each rank reads its own part of the weights from the files";
const FILES: &str = "checkpoints and model/ are written in one form, which fits any number of ranks";

/// Keys that set nothing, and whether FSDP 2 has them no more.
const QUIET: &[(&str, Kind, bool, &str)] = &[
    ("fsdp_min_num_params", Count, false, UNITS),
    (
        "fsdp_backward_prefetch_policy",
        Any,
        true,
        "an old spelling of fsdp_backward_prefetch, which Accelerate passes over",
    ),
    ("fsdp_use_orig_params", Bool, true, "weights keep their names and shapes"),
    ("fsdp_sync_module_states", Bool, true, LOADING),
    ("fsdp_cpu_ram_efficient_loading", Bool, false, LOADING),
    ("fsdp_offload_params", Bool, false, "on this device all state lies in host memory"),
    ("fsdp_limit_all_gathers", Bool, true, "one unit and the next are gathered at a time"),
];

/// The flags of the section; returns the version of FSDP.
///
/// # Errors
/// Exit 2: what cannot be honoured, contradicts itself, has a wrong type or is no key.
pub(super) fn read(
    layer: &mut Layer,
    top: &mut Section<'_>,
    mixed: &Mixed<'_>,
    processes: &Processes<'_>,
    facts: &Facts,
) -> Result<u64> {
    let empty = Node { value: Value::Map(Vec::new()), spot: Spot { line: 1, column: 1 } };
    let node = written(top, KEY).map_or(&empty, |field| field.node);
    let mut section = Section::new(&layer.file.clone(), KEY, node)?;
    let field = either(&mut section, "fsdp_version", PREFIX)?;
    let version = match &field {
        None => 1,
        Some(field) => match field.count() {
            Ok(version @ 1..=2) => version,
            _ => return Err(field.bad("1 or 2")),
        },
    };
    if let Some(field) = &field {
        layer.no_effect(field, "Umbra has one way of sharding; the version decides what the other keys mean");
    }
    precision::fsdp(layer, mixed, version, field.as_ref(), facts)?;
    if version == 1 {
        sharding_1(layer, &mut section, processes)?;
    } else {
        sharding_2(layer, &mut section)?;
    }
    recompute(layer, &mut section)?;
    wrapping(layer, &mut section)?;
    prefetch(layer, &mut section, version)?;
    state_dict(layer, &mut section, version)?;
    if let Some(field) = either(&mut section, "fsdp_ignored_modules", PREFIX)?.filter(has_content) {
        return Err(field.refused("every weight is sharded", "leave it out: no number changes"));
    }
    for &(key, kind, obsolete, why) in QUIET {
        if let Some(field) = either(&mut section, key, PREFIX)? {
            kind.check(&field)?;
            no_effect(layer, &field, obsolete && version == 2, why);
        }
    }
    section.finish()?;
    Ok(version)
}

fn no_effect(layer: &mut Layer, field: &Field<'_>, obsolete: bool, why: &str) {
    match obsolete {
        true => layer.no_effect(field, format!("obsolete under FSDP 2; {why}")),
        false => layer.no_effect(field, why),
    }
}

/// One of [`STRATEGIES`], by its name or its number.
fn strategy(field: &Field<'_>) -> Result<&'static str> {
    let number = field.count().ok().and_then(|n| usize::try_from(n).ok());
    match number.and_then(|n| n.checked_sub(1)).and_then(|i| STRATEGIES.get(i)) {
        Some(name) => Ok(name),
        None => field.choice(&STRATEGIES),
    }
}

/// Whether weights are released between forward and backward, as Accelerate's converter to FSDP 2 has it
/// (`accelerate/commands/to_fsdp2.py`).
fn reshards(strategy: &str) -> bool {
    matches!(strategy, "FULL_SHARD" | "HYBRID_SHARD")
}

/// Whether it is a truth value: FSDP 1's numbers are strategies.
fn is_bool(field: &Field<'_>) -> bool {
    !matches!(field.node.value, Value::Number(_)) && field.bool().is_ok()
}

/// FSDP 1: a strategy, under its old name or under the newer `fsdp_reshard_after_forward`, where true and false mean the
/// two strategies over all ranks.
fn sharding_1(layer: &mut Layer, section: &mut Section<'_>, processes: &Processes<'_>) -> Result<()> {
    let old = either(section, "fsdp_sharding_strategy", PREFIX)?;
    let new = either(section, "fsdp_reshard_after_forward", PREFIX)?;
    let named = |field: &Field<'_>| match is_bool(field) {
        true => field.bool().map(|on| if on { "FULL_SHARD" } else { "SHARD_GRAD_OP" }),
        false => strategy(field),
    };
    let (name, field) = match (&old, &new) {
        (None, None) => {
            layer.imply("stage", 3, "Accelerate without fsdp_sharding_strategy: FULL_SHARD");
            return Ok(());
        }
        (Some(old), None) => (strategy(old)?, old),
        (None, Some(new)) => (named(new)?, new),
        (Some(old), Some(new)) => {
            let name = strategy(old)?;
            let agree = if is_bool(new) { new.bool()? == reshards(name) } else { strategy(new)? == name };
            if !agree {
                return Err(contradiction(old, new));
            }
            layer.same(new, format!("it says what {} says", old.path));
            (name, old)
        }
    };
    let stage = match name {
        "NO_SHARD" => 0,
        "SHARD_GRAD_OP" | "HYBRID_SHARD_ZERO2" => 2,
        _ => 3,
    };
    layer.set("stage", stage, field);
    if name.starts_with("HYBRID") { hybrid(layer, processes, name, field) } else { Ok(()) }
}

/// Groups that share one copy of the state: the ranks of a machine.
fn hybrid(layer: &mut Layer, processes: &Processes<'_>, name: &str, field: &Field<'_>) -> Result<()> {
    match processes.group()? {
        Group::Size(size, how) => layer.imply("shard-group", size, format!("{name} at {}: {how}", field.place())),
        Group::World => layer.same(field, "on one machine all ranks share one copy of the state"),
        Group::Unknown => {
            let why = "the file does not say how many ranks a machine has, so all share one copy of the state";
            layer.differs(field, format!("{why}; --shard-group sets the ranks of a group"));
        }
    }
    Ok(())
}

/// FSDP 2: weights are always sharded; `fsdp_reshard_after_forward` says whether they are released between forward and
/// backward. False is stage 3 with that off, not stage 2: at rest every rank then holds its part only, as under FSDP 2. The
/// bits are those of every stage.
fn sharding_2(layer: &mut Layer, section: &mut Section<'_>) -> Result<()> {
    let old = either(section, "fsdp_sharding_strategy", PREFIX)?;
    let new = either(section, "fsdp_reshard_after_forward", PREFIX)?;
    let on = match &new {
        None => true,
        Some(new) => new.bool().map_err(|failure| match strategy(new) {
            Ok(name) => failure.hint(format!("{name} of FSDP 1 is {} under FSDP 2", reshards(name))),
            Err(_) => failure,
        })?,
    };
    if let Some(old) = &old {
        let name = strategy(old)?;
        match &new {
            Some(new) if reshards(name) != on => return Err(contradiction(new, old)),
            _ => layer
                .no_effect(old, "obsolete under FSDP 2, which reads fsdp_reshard_after_forward (true unless written)"),
        }
    }
    match &new {
        Some(new) => layer.set("stage", 3, new),
        None => layer.imply("stage", 3, "FSDP 2 shards weights, gradients and state"),
    }
    if let Some(new) = new.as_ref().filter(|_| !on) {
        layer.set("reshard-after-forward", "off", new);
    }
    Ok(())
}

fn recompute(layer: &mut Layer, section: &mut Section<'_>) -> Result<()> {
    if let Some(field) = either(section, "fsdp_activation_checkpointing", PREFIX)? {
        layer.set("recompute", if field.bool()? { "block" } else { "none" }, &field);
    }
    Ok(())
}

fn wrapping(layer: &mut Layer, section: &mut Section<'_>) -> Result<()> {
    if let Some(field) = either(section, "fsdp_auto_wrap_policy", PREFIX)? {
        match field.choice(&["TRANSFORMER_BASED_WRAP", "SIZE_BASED_WRAP", "NO_WRAP"])? {
            "TRANSFORMER_BASED_WRAP" => layer.same(&field, UNITS),
            _ => layer.no_effect(&field, UNITS),
        }
    }
    let Some(field) = either(section, "fsdp_transformer_layer_cls_to_wrap", PREFIX)? else { return Ok(()) };
    let classes = match &field.node.value {
        Value::List(items) => items.iter().map(|item| item.to_string().replace('"', "")).collect::<Vec<_>>().join(","),
        _ => field.text()?,
    };
    let own = |name: &str| matches!(name.trim(), "MistralDecoderLayer" | "LlamaDecoderLayer");
    match classes.split(',').all(own) {
        true => layer.same(&field, UNITS),
        false => layer.no_effect(&field, UNITS),
    }
    Ok(())
}

fn prefetch(layer: &mut Layer, section: &mut Section<'_>, version: u64) -> Result<()> {
    if let Some(field) = either(section, "fsdp_backward_prefetch", PREFIX)? {
        if !matches!(field.count(), Ok(1..=3)) {
            field.choice(&["BACKWARD_PRE", "BACKWARD_POST", "NO_PREFETCH"])?;
        }
        no_effect(layer, &field, version == 2, PREFETCH);
    }
    if let Some(field) = either(section, "fsdp_forward_prefetch", PREFIX)? {
        // Accelerate's plugin refuses any value; its launcher, which reads files, passes none on.
        match (field.bool()?, version) {
            (true, 2) => {
                return Err(
                    field.refused("FSDP 2 has no forward prefetch yet", "leave it out; Umbra prefetches anyway")
                );
            }
            (false, 2) => layer.no_effect(&field, format!("obsolete under FSDP 2; {PREFETCH}")),
            _ => layer.no_effect(&field, PREFETCH),
        }
    }
    Ok(())
}

fn state_dict(layer: &mut Layer, section: &mut Section<'_>, version: u64) -> Result<()> {
    let Some(field) = either(section, "fsdp_state_dict_type", PREFIX)? else { return Ok(()) };
    let kind = field.choice(&["FULL_STATE_DICT", "LOCAL_STATE_DICT", "SHARDED_STATE_DICT"])?;
    if kind == "LOCAL_STATE_DICT" && version == 2 {
        return Err(field.refused("FSDP 2 has no such form", "fsdp_state_dict_type: SHARDED_STATE_DICT"));
    }
    layer.no_effect(&field, FILES);
    Ok(())
}
