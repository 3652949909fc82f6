//! `parallelism_config` and its forerunner `tp_config`: sizes of the device mesh (`accelerate/parallelism_config.py`).

use super::keys::{Any, Kind, Text, either, written};
use crate::Result;
use crate::config::Layer;
use crate::config::section::{Field, Section};

const PREFIX: &str = "parallelism_config_";

/// Kinds of parallelism that split the work of one row over ranks, which Umbra does not.
const REFUSED: [(&str, &str); 4] = [
    ("parallelism_config_tp_size", "tensor parallelism is not built"),
    ("parallelism_config_cp_size", "context parallelism is not built"),
    ("parallelism_config_sp_size", "sequence parallelism is not built"),
    ("parallelism_config_ep_size", "expert parallelism is not built"),
];
const INSTEAD: &str = "1: every rank computes whole rows; --recompute block saves memory on long ones";

const QUIET: [(&str, Kind); 6] = [
    ("parallelism_config_cp_comm_strategy", Text),
    ("parallelism_config_cp_backend", Text),
    ("parallelism_config_sp_backend", Text),
    ("parallelism_config_sp_seq_length", Any),
    ("parallelism_config_sp_seq_length_is_variable", Any),
    ("parallelism_config_sp_attn_implementation", Text),
];

/// The mesh; `version` is FSDP's, 0 without FSDP.
///
/// # Errors
/// Exit 2: parallelism that is not built, a value of another type, an unknown key.
pub(super) fn read(layer: &mut Layer, top: &mut Section<'_>, version: u64) -> Result<()> {
    if let Some(field) = written(top, "tp_config") {
        let mut section = field.section()?;
        if let Some(size) = written(&mut section, "tp_size") {
            only_one(layer, &size, REFUSED[0].1)?;
        }
        section.finish()?;
    }
    let Some(field) = written(top, "parallelism_config") else { return Ok(()) };
    let mut section = field.section()?;
    for (key, why) in REFUSED {
        if let Some(size) = either(&mut section, key, PREFIX)? {
            only_one(layer, &size, why)?;
        }
    }
    data_parallel(layer, &mut section, version)?;
    for (key, kind) in QUIET {
        if let Some(field) = either(&mut section, key, PREFIX)? {
            kind.check(&field)?;
            layer.no_effect(&field, "it belongs to a kind of parallelism that is off");
        }
    }
    section.finish()
}

fn only_one(layer: &mut Layer, size: &Field<'_>, why: &str) -> Result<()> {
    match size.positive()? {
        1 => layer.same(size, "off"),
        _ => return Err(size.refused(why, INSTEAD)),
    }
    Ok(())
}

/// Under FSDP 2 copies of the sharded state are made by the mesh: `dp_shard_size` ranks share one.
fn data_parallel(layer: &mut Layer, section: &mut Section<'_>, version: u64) -> Result<()> {
    let copies = either(section, "parallelism_config_dp_replicate_size", PREFIX)?;
    let share = either(section, "parallelism_config_dp_shard_size", PREFIX)?;
    let size = |field: &Option<Field<'_>>| field.as_ref().map_or(Ok(1), Field::positive);
    let hybrid = size(&copies)? > 1 && size(&share)? > 1 && version == 2;
    let why =
        if hybrid { "the number of groups follows from the ranks" } else { "all ranks share one copy of the state" };
    for field in copies.iter().chain(share.iter().filter(|_| !hybrid)) {
        layer.no_effect(field, why);
    }
    if let Some(share) = share.filter(|_| hybrid) {
        layer.set("shard-group", share.positive()?, &share);
    }
    Ok(())
}
