//! Settings resolved, and contradictions refused.

use super::*;
use crate::Failure;
use crate::cli::{Command, parse};

pub(super) fn args(line: &str) -> TrainArgs {
    match parse(format!("umbra train {line}").split_whitespace())
        .unwrap_or_else(|e| panic!("{line}: {}", e.text()))
        .command
    {
        Command::Train(args) => *args,
        other => panic!("{other:?}"),
    }
}

pub(super) fn plan(line: &str) -> RunPlan {
    plan_of(line, 1)
}

pub(super) fn plan_of(line: &str, world: usize) -> RunPlan {
    RunPlan::resolve(&args(line), world, 2, None).unwrap_or_else(|e| panic!("{line}: {e}"))
}

/// The failure of a line, which always is one of usage.
pub(super) fn refused(line: &str, world: usize) -> Failure {
    let Err(failure) = RunPlan::resolve(&args(line), world, 2, None) else { panic!("`{line}` was accepted") };
    assert_eq!(failure.exit, crate::Exit::Usage, "{line}");
    failure
}

#[test]
fn with_a_model_the_defaults_of_the_contract_hold() {
    let p = plan("--model DIR");
    assert_eq!((p.model.clone(), p.data.len()), (ModelSource::Folder("DIR".into()), 0));
    assert_eq!((p.policy, p.length, p.lr, p.min_lr), (Policy::Shadow, Length::Epochs(1.0), 1e-5, 0.0));
    assert_eq!((p.schedule, p.warmup, p.decay_steps), (ScheduleKind::Constant, Warmup::Steps(0), None));
    assert_eq!((p.micro_batch, p.accum, p.global_batch, p.seq_len), (1, 1, 1, None));
    assert_eq!((p.clip, p.weight_decay, p.decay_norms), (1.0, 0.0, false));
    assert_eq!((p.beta1, p.beta2, p.eps, p.seed), (0.9, 0.999, 1e-8, 0));
    assert_eq!((p.threads, p.shuffle, p.log_every, p.dump.clone()), (2, true, 1, None));
    assert_eq!((p.out.clone(), p.resume.clone()), ("umbra-out".into(), Resume::Auto { told: false }));
    assert_eq!((p.world, p.lanes, p.stage, p.preset), (1, 1, 3, false));
    assert_eq!((p.shard_group, p.different_bits, p.recompute, p.reshard_after_forward), (1, false, false, true));
    assert_eq!((p.save_every, p.keep, p.hash_every, p.overrides.len()), (None, 2, None, 0));
    assert_eq!((p.save_failure, p.checkpoint_files), (SaveFailure::Stop, CheckpointFiles::Shared));
    assert!(p.origins.iter().all(|(name, origin)| (*origin == Origin::Flag) == (*name == "model")), "{:?}", p.origins);
}

#[test]
fn without_model_and_data_the_preset_fills_in_and_flags_still_win() {
    let p = plan("");
    assert!(p.preset);
    assert_eq!(p.model, ModelSource::Tiny);
    assert_eq!(p.length, Length::Steps(preset::STEPS));
    assert_eq!((p.lr, p.micro_batch, p.seq_len), (preset::LR, preset::MICRO_BATCH, Some(preset::SEQ_LEN)));
    assert_eq!(p.warmup_steps(200).unwrap(), 10);
    for name in ["model", "data", "length", "lr", "micro_batch", "seq_len", "warmup"] {
        assert_eq!(p.origin(name), Some(Origin::Preset), "{name}");
    }
    assert_eq!(p.origin("clip"), Some(Origin::Default));

    let p = plan("--steps 5 --lr 0 --policy fsdp-low --warmup-steps 1");
    assert_eq!((p.length, p.lr, p.policy, p.warmup), (Length::Steps(5), 0.0, Policy::FsdpLow, Warmup::Steps(1)));
    assert_eq!(
        (p.origin("lr"), p.origin("length"), p.origin("warmup")),
        (Some(Origin::Flag), Some(Origin::Flag), Some(Origin::Flag))
    );
    assert_eq!(plan("--epochs 2").length, Length::Epochs(2.0));
    // Either of model and data ends the preset.
    assert!(!plan("--model tiny").preset && plan("--model tiny").model == ModelSource::Tiny);
    let p = plan("--data a.txt");
    assert_eq!((p.preset, p.model, p.lr), (false, ModelSource::Tiny, defaults::LR));
    assert_eq!(plan("--model ./tiny").model, ModelSource::Folder("./tiny".into()));
}

#[test]
fn every_field_has_an_origin_or_is_the_launchs() {
    let json = plan_of("--model DIR --lr 3e-4 --policy low-sr", 4).to_json();
    let settings = json["settings"].as_object().unwrap();
    assert_eq!(settings["lr"], json!({ "value": 3e-4, "from": "flag" }));
    assert_eq!(settings["policy"], json!({ "value": "low-sr", "from": "flag" }));
    assert_eq!(settings["model"], json!({ "value": { "folder": "DIR" }, "from": "flag" }));
    assert_eq!(settings["length"], json!({ "value": { "epochs": 1.0 }, "from": "default" }));
    assert_eq!(settings["schedule"]["value"], "constant");
    assert_eq!(settings["world"], json!({ "value": 4, "from": "launch" }));
    let launch: Vec<_> =
        settings.iter().filter(|(_, s)| s["from"] == "launch").map(|(name, _)| name.as_str()).collect();
    assert_eq!(launch, ["world"]);
    assert_eq!(json["preset"], false);
    assert_eq!(plan("").to_json()["preset"], true);
    assert_eq!(plan("").to_json()["settings"]["lr"]["from"], "preset");
}

#[test]
fn global_batch_sets_accumulation() {
    let p = plan_of("--model m --global-batch 24 --micro-batch 2", 3);
    assert_eq!((p.accum, p.global_batch), (4, 24));
    assert_eq!((p.origin("accum"), p.origin("global_batch")), (Some(Origin::Flag), Some(Origin::Flag)));
    let p = plan_of("--model m --global-batch 24 --micro-batch 2 --accum 4", 3);
    assert_eq!(p.accum, 4);
    let p = plan_of("--model m --micro-batch 2 --accum 5", 3);
    assert_eq!((p.accum, p.global_batch), (5, 30));
    // Rows are dealt to lanes, however many ranks compute them.
    let p = plan_of("--model m --global-batch 24 --micro-batch 2 --lanes 6", 3);
    assert_eq!((p.accum, p.global_batch), (2, 24));
    assert_eq!(plan_of("--model m --micro-batch 2 --accum 5 --lanes 6", 3).global_batch, 60);
    // The preset's micro-batch counts as well.
    assert_eq!(plan_of("--global-batch 16", 2).accum, 2);

    let f = refused("--model m --global-batch 25 --micro-batch 2", 3);
    assert_eq!((f.place.as_deref(), f.found.as_deref()), (Some("--global-batch"), Some("25")));
    assert!(f.expected.unwrap().contains("multiple of 6") && f.hint.unwrap().contains("--global-batch 24"));
    let f = refused("--model m --global-batch 24 --micro-batch 2 --accum 3", 3);
    assert!(f.what.contains("--accum 3") && f.what.contains("--global-batch 24"), "{f}");
    assert!(f.expected.unwrap().starts_with("--accum 4"));
    assert!(refused("--model m --global-batch 2", 3).hint.unwrap().contains("--global-batch 3"));
    refused("--model m --micro-batch 9223372036854775807 --accum 3", 1);
}

#[test]
fn what_comes_later_is_refused_by_name() {
    let cases = [
        ("--device cuda", "--device cuda"),
        ("--eval-data e.jsonl", "--eval-data"),
        ("--eval-every 5", "--eval-every"),
        ("--pack on", "--pack on"),
    ];
    for (line, name) in cases {
        // It comes before any other mistake.
        let f = refused(&format!("{line} --accum 0"), 2);
        assert!(f.what.starts_with(name) && f.what.contains("later version"), "{}", f.what);
        assert!(name.starts_with(f.place.as_deref().unwrap()) && f.hint.is_some(), "{line}");
    }
    plan("--device cpu --pack off");
}

#[test]
fn checkpoints_and_resuming_are_settings() {
    let p = plan("--save-every 50 --keep 3 --save-failure continue --checkpoint-files per-rank --hash-every 6");
    assert_eq!((p.save_every, p.keep, p.hash_every), (Some(50), 3, Some(6)));
    assert_eq!((p.save_failure, p.checkpoint_files), (SaveFailure::Continue, CheckpointFiles::PerRank));
    let json = p.to_json();
    for (name, value) in [
        ("save_every", json!(50)),
        ("keep", json!(3)),
        ("save_failure", json!("continue")),
        ("checkpoint_files", json!("per-rank")),
        ("hash_every", json!(6)),
    ] {
        assert_eq!(json["settings"][name], json!({ "value": value, "from": "flag" }), "{name}");
    }
    assert_eq!(plan("--keep 0").keep, 0);
    assert!(plan("--recompute block").recompute && !plan("--recompute none").recompute);

    let cases = [
        ("", Resume::Auto { told: false }, "auto"),
        ("--resume auto", Resume::Auto { told: true }, "auto"),
        ("--resume never", Resume::Never, "never"),
        ("--resume a/step-000005", Resume::From("a/step-000005".into()), "a/step-000005"),
    ];
    for (line, resume, text) in cases {
        let p = plan(line);
        assert_eq!(p.to_json()["settings"]["resume"]["value"], text);
        assert_eq!(p.resume, resume);
    }
}

#[test]
fn values_that_mean_nothing_are_refused_by_flag() {
    let cases = [
        "--accum 0",
        "--micro-batch 0",
        "--global-batch 0",
        "--steps 0",
        "--threads 0",
        "--log-every 0",
        "--decay-steps 0",
        "--save-every 0",
        "--hash-every 0",
        "--lanes 0",
        "--shard-group 0",
        "--stage 4",
        "--seq-len 1",
        "--lr -1e-5",
        "--lr nan",
        "--lr inf",
        "--min-lr -1",
        "--beta1 1",
        "--beta1 -0.1",
        "--beta2 1.5",
        "--beta2 nan",
        "--eps 0",
        "--eps -1e-8",
        "--clip -1",
        "--clip nan",
        "--weight-decay -0.1",
        "--epochs 0",
        "--epochs nan",
        "--warmup-ratio 1.1",
        "--warmup-ratio -0.1",
    ];
    for line in cases {
        let f = refused(line, 1);
        assert_eq!(f.place.as_deref(), line.split(' ').next(), "{line}");
        assert!(f.expected.is_some() && f.found.is_some(), "{line}");
    }
    for line in ["--lr 0", "--clip 0", "--beta1 0", "--beta2 0", "--seq-len 2", "--warmup-ratio 0", "--warmup-ratio 1"]
    {
        plan(line);
    }
    let empty = TrainArgs { resume: Some(ResumeArg::Dir(PathBuf::new())), ..TrainArgs::default() };
    assert_eq!(RunPlan::resolve(&empty, 1, 1, None).unwrap_err().place.as_deref(), Some("--resume"));
    let empty = TrainArgs { out: Some(PathBuf::new()), ..TrainArgs::default() };
    assert_eq!(RunPlan::resolve(&empty, 1, 1, None).unwrap_err().place.as_deref(), Some("--out"));
}

#[test]
fn contradictions_name_both_sides() {
    let cases = [
        ("--steps 5 --epochs 2", "--steps 5", "--epochs 2"),
        ("--warmup-steps 3 --warmup-ratio 0.1", "--warmup-steps 3", "--warmup-ratio 0.1"),
        ("--decay-steps 3", "--decay-steps 3", "--schedule constant"),
        ("--decay-steps 3 --schedule cosine", "--decay-steps 3", "--schedule cosine"),
        ("--model m --min-lr 1e-4", "--min-lr", "--lr"),
        ("--save-every 5 --keep 0", "--save-every 5", "--keep 0"),
    ];
    for (line, a, b) in cases {
        let f = refused(line, 1);
        assert!(f.what.contains(a) && f.what.contains(b), "{}", f.what);
    }
    assert_eq!(plan("--lr 1e-4 --min-lr 1e-4").min_lr, 1e-4);
}

#[test]
fn warm_up_and_decay_fit_the_run() {
    let p = plan("--steps 10 --warmup-steps 10");
    assert_eq!(p.warmup_steps(10).unwrap(), 10);
    let f = refused("--steps 10 --warmup-steps 11", 1);
    assert_eq!((f.place.as_deref(), f.found.as_deref()), (Some("--warmup-steps"), Some("11")));
    // With epochs the length is known later: the same check then.
    let p = plan("--model m --epochs 1 --warmup-steps 11");
    assert!(p.warmup_steps(10).is_err() && p.warmup_steps(11).is_ok());

    // Shares are rounded up.
    let p = plan("--warmup-ratio 0.1");
    assert_eq!([1, 10, 11, 60].map(|total| p.warmup_steps(total).unwrap()), [1, 1, 2, 6]);

    // wsd: the last 20 % rounded up, and never into the warm-up.
    let p = plan("--model m --schedule wsd --warmup-steps 4");
    assert_eq!([4, 5, 10, 11, 100].map(|total| p.decay_steps(total).unwrap()), [0, 1, 2, 3, 20]);
    let p = plan("--model m --schedule wsd --steps 10 --warmup-steps 4 --decay-steps 6");
    assert_eq!(p.decay_steps(10).unwrap(), 6);
    let f = refused("--model m --schedule wsd --steps 10 --warmup-steps 4 --decay-steps 7", 1);
    assert_eq!((f.place.as_deref(), f.found.as_deref()), (Some("--decay-steps"), Some("7")));
}
