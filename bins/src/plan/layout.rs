//! How lanes and state lie on the ranks: which worlds and groups keep the result's bits, and what is refused.
//!
//! The lanes of a micro-batch are added as a tree of contiguous halves, an odd block from left to right. A world of W ranks
//! computes W lanes a pass, so these must be a subtree: W is the lanes halved some number of times, or 1. The groups that
//! share a copy of the state must be subtrees of a pass in the same way, so their number is a power of two; groups of one
//! rank hold everything and add all lanes of a pass themselves.

use super::{Kept, Origin, Settings, defaults};
use crate::cli::{Switch, TrainArgs, at_least_one, bad_value};
use crate::{Failure, Result};
use std::borrow::Cow;

/// The settings decided here.
#[derive(Debug)]
pub(super) struct Layout {
    pub(super) lanes: usize,
    pub(super) stage: u8,
    pub(super) shard_group: usize,
    pub(super) reshard_after_forward: bool,
    pub(super) different_bits: bool,
}

/// `args` as they are meant on `world` ranks: a file written for many of them may name groups larger than all there are
/// here, which makes these one group. Who writes the flag knows how many ranks it is for, so that stands and is refused.
pub(super) fn fitted(args: &TrainArgs, world: usize) -> Cow<'_, TrainArgs> {
    if args.shard_group.is_none_or(|group| group <= world) || !args.files.sources.contains_key("shard_group") {
        return Cow::Borrowed(args);
    }
    let mut args = args.clone();
    args.shard_group = None;
    args.files.give_way("shard_group", format!("the world: {world} rank(s) make one group at most"));
    Cow::Owned(args)
}

/// Decides the layout of `world` ranks.
///
/// # Errors
/// A usage failure naming the flag and the values that fit.
pub(super) fn resolve(args: &TrainArgs, world: usize, kept: Option<&Kept>, set: &mut Settings<'_>) -> Result<Layout> {
    at_least_one("--lanes", args.lanes)?;
    at_least_one("--shard-group", args.shard_group)?;
    if let Some(stage) = args.stage.filter(|stage| *stage > 3) {
        return Err(bad_value("--stage", "0, 1, 2 or 3", stage));
    }
    let stage = set.or("stage", args.stage, defaults::STAGE);
    let lanes = set.kept("lanes", args.lanes, kept.map(|kept| kept.lanes), world);
    let lanes_fit = worlds(lanes).contains(&world);
    if !lanes_fit && !args.allow_different_bits {
        let kept = kept.filter(|_| set.origin("lanes") == Some(Origin::Checkpoint));
        return Err(misfit(world, lanes, kept));
    }
    let shard_group = set.or("shard_group", args.shard_group, if stage == 0 { 1 } else { world });
    group(stage, shard_group, world, args.allow_different_bits)?;
    let reshard = args.reshard_after_forward.map(|switch| switch == Switch::On);
    if stage < 3 && reshard == Some(true) {
        return Err(Failure::usage(format!("--reshard-after-forward on has no meaning at --stage {stage}"))
            .at("--reshard-after-forward")
            .expected("off: below stage 3 every rank has the whole weights all the time")
            .found("on")
            .hint("leave it out, or --stage 3"));
    }
    let reshard_after_forward = set.or("reshard_after_forward", reshard, stage == 3);
    // Allowed is not done: a layout that fits keeps the bits anyway.
    let different = !(lanes_fit && keeps_bits(shard_group, world));
    let different_bits = set.or("different_bits", args.allow_different_bits.then_some(different), false);
    Ok(Layout { lanes, stage, shard_group, reshard_after_forward, different_bits })
}

/// The numbers of ranks that fit `lanes`, largest first: halves as long as the count is even, and 1.
fn worlds(lanes: usize) -> Vec<usize> {
    let halves = std::iter::successors(Some(lanes), |n| (n % 2 == 0).then_some(n / 2));
    halves.filter(|n| *n > 1).chain([1]).collect()
}

/// Whether groups of `group` ranks are subtrees of a pass over `world` lanes, or hold everything.
fn keeps_bits(group: usize, world: usize) -> bool {
    group == 1 || (world.is_multiple_of(group) && (world / group).is_power_of_two())
}

/// `kept` is what the checkpoint says, if it is what sets the lanes.
fn misfit(world: usize, lanes: usize, kept: Option<&Kept>) -> Failure {
    let fits = worlds(lanes);
    let from = if kept.is_some() { " of the checkpoint" } else { "" };
    let fewer = fits.iter().find(|n| **n < world).copied().unwrap_or(1);
    // The fewest lanes that are no fewer than these and fit this world.
    let mut doubled = std::iter::successors(Some(world), |n| n.checked_mul(2));
    let more = doubled.find(|n| *n >= lanes).unwrap_or(world);
    let hint = match kept {
        // As many rows a step, dealt to other lanes.
        Some(kept) if (kept.lanes * kept.accum).is_multiple_of(world) => {
            let accum = kept.lanes * kept.accum / world;
            format!(
                "{fewer} rank(s); or --lanes {world} --accum {accum} --override lanes accum: the same rows, added in another order"
            )
        }
        Some(_) => {
            format!("{fewer} rank(s); a run keeps its lanes, so one for {world} ranks has to start with --lanes {more}")
        }
        None if world > lanes => format!("start with the larger --lanes {more}, or with {fewer} rank(s)"),
        None => format!("{fewer} rank(s), or --lanes {more}"),
    };
    Failure::usage(format!("{world} rank(s) cannot compute {lanes} lane(s){from} and keep the result's bits"))
        .at("--lanes")
        .expected(format!("{} rank(s) for {lanes} lane(s)", list(&fits)))
        .found(format!("{world} rank(s)"))
        .hint(format!("{hint}; or --allow-different-bits, which adds in another order"))
}

/// Refuses groups that contradict the stage, do not split the world, or would change the bits.
fn group(stage: u8, group: usize, world: usize, any_bits: bool) -> Result<()> {
    if stage == 0 && group != 1 {
        return Err(Failure::usage(format!("--shard-group {group} contradicts --stage 0"))
            .at("--shard-group")
            .expected("1: at stage 0 every rank has the whole state")
            .found(group)
            .hint("leave one of the two out"));
    }
    let divides = world.is_multiple_of(group);
    if divides && (any_bits || keeps_bits(group, world)) {
        return Ok(());
    }
    let fits: Vec<usize> =
        (1..=world).filter(|n| world.is_multiple_of(*n) && (any_bits || keeps_bits(*n, world))).collect();
    let failure = if divides {
        let what = format!("--shard-group {group} makes {} groups, which is not a power of two", world / group);
        let hint = "one of these, or --allow-different-bits, which adds in another order";
        Failure::usage(what).hint(hint)
    } else {
        Failure::usage(format!("--shard-group {group} does not split {world} rank(s) evenly")).hint("one of these")
    };
    Err(failure.at("--shard-group").expected(format!("{} on {world} rank(s)", list(&fits))).found(group))
}

/// `8, 4, 2 or 1`.
fn list(numbers: &[usize]) -> String {
    let mut text = String::new();
    for (i, n) in numbers.iter().enumerate() {
        text += match i {
            0 => "",
            _ if i + 1 == numbers.len() => " or ",
            _ => ", ",
        };
        text += &n.to_string();
    }
    text
}

#[cfg(test)]
mod tests;
