//! Which worlds and groups fit, and that a refusal names those that do.

use super::*;
use crate::plan::RunPlan;
use crate::plan::tests::{args, plan_of, refused};

fn kept(line: &str, world: usize, kept: Kept) -> Result<RunPlan> {
    RunPlan::resolve(&args(line), world, 2, Some(&kept))
}

#[test]
fn worlds_are_halves_of_the_lanes_and_one() {
    let cases: [(usize, &[usize]); 6] =
        [(1, &[1]), (2, &[2, 1]), (3, &[3, 1]), (8, &[8, 4, 2, 1]), (12, &[12, 6, 3, 1]), (20, &[20, 10, 5, 1])];
    for (lanes, fits) in cases {
        assert_eq!(worlds(lanes), fits, "{lanes}");
        for world in 1..=lanes + 2 {
            let accepted = RunPlan::resolve(&args(&format!("--lanes {lanes}")), world, 1, None).is_ok();
            assert_eq!(accepted, fits.contains(&world), "{lanes} lanes on {world}");
        }
    }
}

#[test]
fn lanes_are_the_world_or_the_checkpoints_and_set_the_passes() {
    let p = plan_of("--model m", 6);
    assert_eq!((p.lanes, p.passes(), p.origin("lanes"), p.different_bits), (6, 1, Some(Origin::Default), false));
    let p = plan_of("--model m --lanes 12", 3);
    assert_eq!((p.lanes, p.passes(), p.origin("lanes")), (12, 4, Some(Origin::Flag)));

    let p = kept("--model m", 2, Kept { lanes: 8, accum: 3 }).unwrap();
    assert_eq!((p.lanes, p.passes(), p.accum, p.global_batch), (8, 4, 3, 24));
    assert_eq!((p.origin("lanes"), p.origin("accum")), (Some(Origin::Checkpoint), Some(Origin::Checkpoint)));
    assert_eq!(p.to_json()["settings"]["lanes"], serde_json::json!({ "value": 8, "from": "checkpoint" }));
    // What is written wins, and --global-batch sets the accumulation.
    let p = kept("--model m --lanes 4 --global-batch 24", 2, Kept { lanes: 8, accum: 3 }).unwrap();
    assert_eq!((p.lanes, p.accum, p.global_batch), (4, 6, 24));
    assert_eq!(kept("--model m --accum 5", 2, Kept { lanes: 8, accum: 3 }).unwrap().global_batch, 40);
}

#[test]
fn a_world_that_does_not_fit_is_told_which_ones_do() {
    let f = refused("--lanes 12", 4);
    assert_eq!((f.place.as_deref(), f.found.as_deref()), (Some("--lanes"), Some("4 rank(s)")));
    assert_eq!(f.expected.as_deref(), Some("12, 6, 3 or 1 rank(s) for 12 lane(s)"));
    assert!(f.hint.as_deref().unwrap().starts_with("3 rank(s), or --lanes 16; or --allow-different-bits"), "{f}");
    // The lanes named instead fit.
    let f = refused("--lanes 4", 3);
    assert!(f.hint.unwrap().starts_with("2 rank(s), or --lanes 6;"));
    assert_eq!(plan_of("--lanes 6", 3).passes(), 2);

    let f = refused("--lanes 4", 8);
    assert_eq!(f.expected.as_deref(), Some("4, 2 or 1 rank(s) for 4 lane(s)"));
    assert!(f.hint.unwrap().starts_with("start with the larger --lanes 8, or with 4 rank(s)"));

    let f = kept("", 8, Kept { lanes: 4, accum: 1 }).unwrap_err();
    assert!(f.what.contains("4 lane(s) of the checkpoint"), "{f}");
    assert!(f.hint.as_deref().unwrap().starts_with("4 rank(s)") && f.hint.unwrap().contains("--lanes 8"));
    let f = kept("", 4, Kept { lanes: 2, accum: 2 }).unwrap_err();
    assert!(f.hint.unwrap().contains("--lanes 4 --accum 1 --override lanes accum"));
    let f = kept("", 3, Kept { lanes: 4, accum: 1 }).unwrap_err();
    assert!(f.hint.unwrap().starts_with("2 rank(s);"));
}

#[test]
fn the_lanes_named_instead_fit() {
    for (lanes, world) in [(14, 4), (10, 3), (4, 3), (9, 2), (100, 6), (7, 6)] {
        let hint = refused(&format!("--lanes {lanes}"), world).hint.unwrap();
        let named = hint.split("--lanes ").nth(1).and_then(|rest| rest.split(';').next()).unwrap();
        assert!(named.parse::<usize>().unwrap() > lanes, "{hint}");
        plan_of(&format!("--lanes {named}"), world);
    }
}

#[test]
fn another_order_has_to_be_allowed_and_is_then_said() {
    for (line, world, different) in [
        ("--lanes 12", 4, true),
        ("--lanes 4", 8, true),
        ("--lanes 8", 4, false),
        ("--lanes 12 --shard-group 2", 6, true),
        ("--lanes 12 --shard-group 3", 6, false),
        ("--stage 0 --lanes 12", 6, false),
    ] {
        let p = plan_of(&format!("{line} --allow-different-bits"), world);
        assert_eq!((p.different_bits, p.origin("different_bits")), (different, Some(Origin::Flag)), "{line}");
    }
    assert_eq!(plan_of("--lanes 12 --allow-different-bits", 5).passes(), 3);
    assert_eq!(plan_of("--lanes 4 --allow-different-bits", 8).passes(), 1);
    assert_eq!(plan_of("", 2).origin("different_bits"), Some(Origin::Default));
}

#[test]
fn groups_split_the_world_into_a_power_of_two_of_parts_or_hold_everything() {
    for (world, fits) in
        [(1, vec![1]), (4, vec![1, 2, 4]), (6, vec![1, 3, 6]), (12, vec![1, 3, 6, 12]), (9, vec![1, 9])]
    {
        for group in 1..=world + 1 {
            let accepted = RunPlan::resolve(&args(&format!("--shard-group {group}")), world, 1, None).is_ok();
            assert_eq!(accepted, fits.contains(&group), "groups of {group} on {world}");
        }
    }
    let p = plan_of("--stage 2", 4);
    assert_eq!((p.stage, p.shard_group, p.origin("shard_group")), (2, 4, Some(Origin::Default)));

    let f = refused("--shard-group 4", 6);
    assert!(f.what.contains("does not split 6 rank(s)"), "{f}");
    assert_eq!((f.expected.as_deref(), f.found.as_deref()), (Some("1, 3 or 6 on 6 rank(s)"), Some("4")));
    let f = refused("--shard-group 2", 6);
    assert!(f.what.contains("3 groups") && f.hint.unwrap().contains("--allow-different-bits"));
    assert_eq!(f.expected.as_deref(), Some("1, 3 or 6 on 6 rank(s)"));
    // Groups that do not split the world are refused whatever is allowed, and then more of them fit.
    let f = refused("--shard-group 4 --allow-different-bits", 6);
    assert_eq!(f.expected.as_deref(), Some("1, 2, 3 or 6 on 6 rank(s)"));
    assert_eq!(refused("--shard-group 0", 2).place.as_deref(), Some("--shard-group"));
    assert_eq!(refused("--lanes 0", 2).place.as_deref(), Some("--lanes"));
}

#[test]
fn a_stage_decides_what_a_group_and_resharding_mean() {
    for stage in 0..=2 {
        let p = plan_of(&format!("--stage {stage} --reshard-after-forward off"), 2);
        assert_eq!((p.stage, p.reshard_after_forward), (stage, false));
        assert!(!plan_of(&format!("--stage {stage}"), 2).reshard_after_forward);
        let f = refused(&format!("--stage {stage} --reshard-after-forward on"), 2);
        assert!(f.what.contains("--reshard-after-forward on") && f.what.contains(&format!("--stage {stage}")), "{f}");
        assert!(f.expected.unwrap().starts_with("off") && f.hint.unwrap().contains("--stage 3"));
    }
    let p = plan_of("", 2);
    assert_eq!((p.stage, p.reshard_after_forward), (3, true));
    assert_eq!(p.origin("reshard_after_forward"), Some(Origin::Default));
    assert!(plan_of("--reshard-after-forward on", 2).reshard_after_forward);
    assert!(!plan_of("--reshard-after-forward off", 2).reshard_after_forward);

    assert_eq!(plan_of("--stage 0", 4).shard_group, 1);
    assert_eq!(plan_of("--stage 0 --shard-group 1", 4).shard_group, 1);
    let f = refused("--stage 0 --shard-group 4", 4);
    assert!(f.what.contains("--shard-group 4") && f.what.contains("--stage 0"), "{f}");
    assert!(f.expected.unwrap().starts_with("1: ") && f.found.as_deref() == Some("4"));
    assert_eq!(refused("--stage 4", 2).expected.as_deref(), Some("0, 1, 2 or 3"));
}
