//! Flags over files, files beside files.

use super::*;
use crate::plan::{Origin, RunPlan};
use std::path::Path;

/// Writes `text` to a file of that name.
fn file(dir: &Path, name: &str, text: &str) -> String {
    let path = dir.join(name);
    std::fs::write(&path, text).unwrap();
    path.display().to_string()
}

fn merged(files: &[&str], line: &str) -> Result<TrainArgs> {
    let dir = tempfile::tempdir().unwrap();
    let paths: Vec<String> =
        files.iter().enumerate().map(|(i, text)| file(dir.path(), &format!("{i}.toml"), text)).collect();
    let config = std::iter::once("--config").chain(paths.iter().map(String::as_str)).filter(|_| !files.is_empty());
    merge(&TrainArgs::from_line(config.chain(line.split_whitespace()))?, Some(1))
}

#[test]
fn flags_beat_files_and_say_so() {
    let args = merged(&["lr = 1e-4\nsteps = 7\npolicy = \"fsdp-low\"\nno-shuffle = true"], "--lr 1e-3").unwrap();
    let plan = RunPlan::resolve(&args, 1, 1, None).unwrap();
    assert_eq!((plan.lr, plan.policy.name(), plan.shuffle), (1e-3, "fsdp-low", false));
    let origins = ["lr", "length", "policy", "shuffle", "seed"].map(|name| plan.origin(name).unwrap());
    assert_eq!(origins, [Origin::Flag, Origin::Config, Origin::Config, Origin::Config, Origin::Default]);
    let (setting, by) = &args.files.given_way[0];
    assert_eq!((setting.flag.as_str(), by.as_str()), ("lr", "--lr"));
    let at = plan.to_json()["settings"]["length"]["at"].as_str().unwrap().to_owned();
    assert!(at.ends_with("0.toml:2:1 (steps: 7)"), "{at}");
}

#[test]
fn a_files_group_gives_way_to_a_smaller_world() {
    let args = merged(&["stage = 3\nlanes = 8\nshard-group = 4"], "").unwrap();
    let fits = RunPlan::resolve(&args, 4, 1, None).unwrap();
    assert_eq!((fits.shard_group, fits.origin("shard_group")), (4, Some(Origin::Config)));
    assert!(fits.files.given_way.is_empty());
    let small = RunPlan::resolve(&args, 2, 1, None).unwrap();
    assert_eq!((small.shard_group, small.origin("shard_group")), (2, Some(Origin::Default)));
    assert!(small.to_json()["settings"]["shard_group"].get("at").is_none());
    let (setting, by) = &small.files.given_way[0];
    assert_eq!((setting.flag.as_str(), by.as_str()), ("shard-group", "the world: 2 rank(s) make one group at most"));
    // One that is written for these ranks, in a flag, is wrong.
    let args = merged(&["stage = 3\nlanes = 8\nshard-group = 4"], "--shard-group 8").unwrap();
    assert!(RunPlan::resolve(&args, 4, 1, None).unwrap_err().what.contains("--shard-group 8 does not split 4"));
}

/// Flags that set one thing exclude each other wherever they come from.
#[test]
fn a_flag_beats_whatever_sets_the_same() {
    let args = merged(&["epochs = 3\nwarmup-ratio = 0.1\nglobal-batch = 12\naccum = 3"], "--steps 5 --warmup-steps 2")
        .unwrap();
    assert_eq!((args.epochs, args.steps, args.warmup_ratio, args.warmup_steps), (None, Some(5), None, Some(2)));
    let args = merged(&["global-batch = 12\naccum = 3\nmicro-batch = 4"], "--micro-batch 2").unwrap();
    assert_eq!((args.micro_batch, args.accum, args.global_batch), (Some(2), None, Some(12)));
    let args = merged(&["global-batch = 12\naccum = 3\nmicro-batch = 4"], "--accum 2").unwrap();
    assert_eq!((args.micro_batch, args.accum, args.global_batch), (Some(4), Some(2), None));
    let args =
        merged(&["schedule = \"warmup-lr\"\nschedule-params = { warmup_num_steps = 3 }"], "--schedule linear").unwrap();
    assert!(args.schedule_params.is_empty());
}

#[test]
fn files_that_contradict_each_other_are_refused_with_both_places() {
    let args = merged(&["lr = 1e-4\nstage = 2", "lr = 1e-4"], "").unwrap();
    assert_eq!((args.lr, args.stage), (Some(1e-4), Some(2)));
    let failure = merged(&["lr = 1e-4", "\nlr = 1e-5"], "").unwrap_err();
    let place = failure.place.unwrap();
    assert!(place.contains("0.toml:1:1") && place.contains("1.toml:2:1"), "{place}");
    assert!(failure.what.contains("--lr") && failure.hint.unwrap().contains("flags beat files"));
    assert!(merged(&["lr = 1e-4", "lr = 1e-5"], "--lr 1").is_ok(), "decided by a flag");
    assert!(merged(&["steps = 4", "epochs = 1"], "").unwrap_err().what.contains("contradict"));
}

#[test]
fn values_are_checked_at_their_place() {
    let failure = merged(&["stage = 3\nlr = \"fast\""], "").unwrap_err();
    assert!(failure.place.as_deref().is_some_and(|p| p.contains("0.toml:2:1")), "{failure}");
    assert!(failure.what.contains("--lr"), "{failure}");
    assert!(merged(&["policy = \"shadw\""], "").unwrap_err().what.contains("shadw"));
    // What only shows when the whole is seen has the place of the file as well.
    let args = merged(&["global-batch = 5\nmicro-batch = 2"], "").unwrap();
    let failure = RunPlan::resolve(&args, 1, 1, None).unwrap_err();
    assert!(failure.place.as_deref().is_some_and(|p| p.contains("0.toml:1:1 (global-batch: 5)")), "{failure}");
}

/// Whatever flag there is, a file can set it, but for those that belong on the command line.
#[test]
fn every_flag_can_be_set_by_a_file() {
    let value = |flag: &crate::cli::Flag| {
        let words = [
            "load=bf16",
            "7",
            "0.5",
            "on",
            "shadow",
            "linear",
            "none",
            "cpu",
            "stop",
            "shared",
            "x",
            "adamw",
            "torch",
            "once",
            "bf16",
        ];
        let fits = |word: &&&str| {
            let text = format!("--{}={word}", flag.name);
            TrainArgs::from_line([text.as_str()]).is_ok()
        };
        words.iter().find(fits).map(|word| format!("\"{word}\""))
    };
    for flag in TrainArgs::flags() {
        if ["config", "override", "resume"].contains(&flag.name.as_str()) {
            continue;
        }
        let value = if flag.takes_value { value(&flag) } else { Some("true".to_owned()) };
        let value = value.unwrap_or_else(|| panic!("a value for --{}", flag.name));
        let args = merged(&[&format!("{} = {value}", flag.name)], "").unwrap_or_else(|e| panic!("{}: {e}", flag.name));
        let (mut with, mut without) = (args, TrainArgs::default());
        (with.files, with.config, with.matches) = Default::default();
        without.matches = Default::default();
        assert_ne!(format!("{with:?}"), format!("{without:?}"), "--{} reaches the arguments", flag.name);
    }
}
