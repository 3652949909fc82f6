//! How many processes the file asks for. Umbra's lanes are these processes: a run that was 8 processes gives the bits of 8
//! on any number of ranks.

use super::keys::written;
use super::{Engine, STARTED};
use crate::config::section::{Field, Section};
use crate::config::{Facts, Layer};
use crate::{Failure, Result};

/// The numbers that other keys depend on.
pub(super) struct Processes<'a> {
    /// `num_processes`, over all machines; none if it is left to the command line.
    pub(super) number: Option<(u64, Field<'a>)>,
    /// `num_machines`.
    machines: Option<(u64, Field<'a>)>,
}

/// Reads both and sets the lanes.
///
/// # Errors
/// Exit 2: no number, or more than one process without anything that distributes the training.
pub(super) fn read<'a>(
    layer: &mut Layer,
    top: &mut Section<'a>,
    engine: Engine,
    kind: &Field<'_>,
    facts: &Facts,
) -> Result<Processes<'a>> {
    let number = number(layer, top)?;
    if let (Engine::Alone, Some((n @ 2.., field))) = (engine, &number) {
        return Err(Failure::usage(format!("num_processes {n} contradicts distributed_type NO"))
            .at(field.place())
            .expected(format!("1, or no such key: distributed_type is {} at {}", kind.node, kind.place()))
            .found(n)
            .hint("distributed_type: FSDP or MULTI_GPU for several processes"));
    }
    match (&number, facts.lanes_written) {
        (Some((_, field)), true) => layer.no_effect(field, "--lanes is written, and a flag beats a file"),
        (Some((n, field)), false) => layer.set("lanes", n, field),
        (None, false) if engine == Engine::Alone => layer.set("lanes", 1, kind),
        (None, _) => {}
    }
    let machines = match written(top, "num_machines") {
        Some(field) => {
            layer.no_effect(&field, STARTED);
            Some((field.positive()?, field))
        }
        None => None,
    };
    Ok(Processes { number, machines })
}

fn number<'a>(layer: &mut Layer, top: &mut Section<'a>) -> Result<Option<(u64, Field<'a>)>> {
    let Some(field) = written(top, "num_processes") else { return Ok(None) };
    if field.number().is_ok_and(|n| n == -1.0) {
        layer.no_effect(&field, "it leaves the number to whoever starts the run: the ranks, or --lanes");
        return Ok(None);
    }
    Ok(Some((field.positive()?, field)))
}

/// The ranks of a node, which share one copy of the state under hybrid sharding.
pub(super) enum Group {
    /// All ranks are on one machine.
    World,
    /// So many, and how that follows.
    Size(u64, String),
    /// The file does not say how many processes there are.
    Unknown,
}

impl Processes<'_> {
    /// What a hybrid sharding strategy calls a node.
    ///
    /// # Errors
    /// Exit 2: the processes cannot be spread evenly over the machines.
    pub(super) fn group(&self) -> Result<Group> {
        let Some((machines, at)) = self.machines.as_ref().filter(|(n, _)| *n > 1) else { return Ok(Group::World) };
        let Some((number, field)) = &self.number else { return Ok(Group::Unknown) };
        if number % machines != 0 {
            return Err(Failure::usage(format!("{number} processes cannot be spread evenly over {machines} machines"))
                .at(field.place())
                .expected(format!("a multiple of num_machines {machines} ({})", at.place()))
                .found(number)
                .hint("num_processes counts the processes of all machines together"));
        }
        Ok(Group::Size(number / machines, format!("num_processes {number} / num_machines {machines}")))
    }
}
