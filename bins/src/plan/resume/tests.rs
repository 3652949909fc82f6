//! Which changes are found, which of them may be allowed, and how they are named.

use super::*;
use crate::plan::tests::{args, plan, plan_of, refused};
use crate::plan::{Kept, Length};
use serde_json::json;

/// The settings of a plan as a checkpoint gives them back: through text.
fn settings(plan: &RunPlan) -> Value {
    serde_json::from_str::<Value>(&plan.to_json().to_string()).unwrap()["settings"].take()
}

fn changed(old: &str, new: &str) -> Vec<String> {
    changes(&settings(&plan_of(old, 4)), &plan_of(new, 4)).into_iter().map(|change| change.name).collect()
}

#[test]
fn every_setting_either_alters_the_result_or_is_listed_as_free() {
    let altering = [
        "model",
        "policy",
        "wire",
        "reduced",
        "accumulate",
        "length",
        "lr",
        "min_lr",
        "schedule",
        "schedule_params",
        "schedule_stepping",
        "warmup",
        "decay_steps",
        "micro_batch",
        "accum",
        "global_batch",
        "clip",
        "clip_form",
        "optimizer",
        "optimizer_form",
        "momentum",
        "weight_decay",
        "decay_norms",
        "beta1",
        "beta2",
        "eps",
        "seed",
        "assume",
        "shuffle",
        "lanes",
    ];
    let all = settings(&plan(""));
    let mut all: Vec<&str> = all.as_object().unwrap().keys().map(String::as_str).collect();
    let mut known: Vec<&str> = altering.into_iter().chain(FREE).collect();
    all.sort_unstable();
    known.sort_unstable();
    assert_eq!(all, known);
}

#[test]
fn what_alters_the_result_is_found_and_nothing_else() {
    let old = "--model m --micro-batch 2 --accum 2 --lanes 4";
    let cases: [(&str, &[&str]); 16] = [
        ("--policy fsdp-low", &["policy"]),
        // What follows the policy is no change of its own, unless somebody sets it.
        ("--policy deepspeed --wire bf16 --clip-form torch", &["policy", "wire"]),
        ("--accumulate bf16 --reduced bf16", &["reduced", "accumulate"]),
        ("--optimizer sgd --momentum 0.9", &["optimizer", "momentum"]),
        ("--optimizer-form fused --assume deepspeed=0.14", &["optimizer_form", "assume"]),
        ("--schedule hf-linear --schedule-stepping per-lane", &["schedule", "schedule_stepping"]),
        ("--schedule warmup-lr --schedule-params warmup_num_steps=5", &["schedule", "schedule_params"]),
        ("--lr 2e-5", &["lr"]),
        ("--schedule cosine --min-lr 1e-6", &["min_lr", "schedule"]),
        ("--schedule wsd --decay-steps 3", &["schedule", "decay_steps"]),
        ("--warmup-steps 2 --steps 5", &["length", "warmup"]),
        ("--clip 0 --weight-decay 0.1 --decay-norms", &["clip", "weight_decay", "decay_norms"]),
        ("--beta1 0.8 --beta2 0.9 --eps 1e-6", &["beta1", "beta2", "eps"]),
        ("--seed 1 --no-shuffle", &["seed", "shuffle"]),
        ("--stage 0 --recompute block --hash-every 3 --save-every 5 --keep 7 --resume d", &[]),
        (
            "--threads 1 --log-every 9 --dump d --out o --resume never --stage 2 --shard-group 2 --save-failure continue \
             --checkpoint-files per-rank --allow-different-bits --override lr --seq-len 7 --truncate --data d",
            &[],
        ),
    ];
    for (flags, names) in cases {
        assert_eq!(changed(old, &format!("{old} {flags}")), names, "{flags}");
    }
    let cases: [(&str, &[&str]); 4] = [
        ("--micro-batch 3 --accum 2 --lanes 4", &["micro_batch", "global_batch"]),
        // As many rows a step, dealt otherwise.
        ("--micro-batch 1 --accum 4 --lanes 4", &["micro_batch", "accum"]),
        ("--micro-batch 1 --accum 2 --lanes 8", &["micro_batch", "lanes"]),
        ("--micro-batch 2 --global-batch 16 --lanes 8", &["accum", "lanes"]),
    ];
    for (flags, names) in cases {
        assert_eq!(changed(old, &format!("--model m {flags}")), names, "{flags}");
    }
}

#[test]
fn numbers_are_the_same_after_a_trip_through_text() {
    // A reader that multiplies the digits by a power of ten and rounds twice is one unit off at the last of these.
    for lr in [1e-5, 1.2345678901234567e-5, 0.3e-5_f64.next_up(), 7.038531e-26] {
        let mut p = plan("--model m");
        (p.lr, p.eps) = (lr, lr / 3.0);
        assert_eq!(changes(&settings(&p), &p), [], "{lr:e}");
    }
}

#[test]
fn two_spellings_of_a_models_folder_are_one() {
    let dir = tempfile::tempdir().unwrap();
    let (a, b) = (dir.path().join("a"), dir.path().join("b"));
    std::fs::create_dir(&a).unwrap();
    std::fs::create_dir(&b).unwrap();
    let with = |path: &Path| RunPlan { model: ModelSource::Folder(path.to_owned()), ..plan("--model m") };
    let old = settings(&with(&a));
    assert_eq!(changes(&old, &with(&b.join("../a"))), []);
    let other = changes(&old, &with(&b));
    assert_eq!(other.len(), 1);
    assert_eq!((other[0].name.as_str(), &other[0].new), ("model", &json!({ "folder": b })));
    // Folders that are not there are compared as written.
    let gone = settings(&with(Path::new("gone")));
    assert_eq!(changes(&gone, &with(Path::new("gone"))), []);
    assert_eq!(changes(&gone, &with(Path::new("./gone"))).len(), 1);
    assert_eq!(changes(&old, &plan("--model tiny")).len(), 1);
}

#[test]
fn a_setting_the_earlier_version_did_not_have_is_left_out() {
    let mut old = settings(&plan("--model m"));
    old.as_object_mut().unwrap().shift_remove("decay_norms");
    assert_eq!(changes(&old, &plan("--model m --decay-norms")), []);
}

#[test]
fn changes_are_listed_with_both_values_unless_they_are_named() {
    let place = Path::new("out/checkpoints/step-000005");
    let list = || {
        let old = settings(&plan("--model m --policy fsdp-low --lr 0.25 --steps 10"));
        changes(&old, &plan("--model m --lr 0.5 --steps 20"))
    };
    let named = |names: &[&str]| names.iter().map(|name| (*name).to_owned()).collect::<Vec<String>>();

    let f = check(list(), &[], place).unwrap_err();
    assert_eq!(f.exit, crate::Exit::Usage);
    assert_eq!(f.place.as_deref(), Some("out/checkpoints/step-000005"));
    assert_eq!(
        f.found.as_deref(),
        Some(
            "policy: \"fsdp-low\" then, \"shadow\" now\nlength: {\"steps\":10} then, {\"steps\":20} now\n\
             lr: 0.25 then, 0.5 now"
        )
    );
    assert_eq!(f.hint.as_deref(), Some("--override policy length lr"));

    let f = check(list(), &named(&["policy", "lr"]), place).unwrap_err();
    assert_eq!(f.found.as_deref(), Some("length: {\"steps\":10} then, {\"steps\":20} now"));
    assert_eq!(f.hint.as_deref(), Some("--override length"));

    // One that did not change is no mistake.
    let allowed = check(list(), &named(&["lr", "seed", "length", "policy"]), place).unwrap();
    assert_eq!(allowed.iter().map(|c| c.name.as_str()).collect::<Vec<_>>(), ["policy", "length", "lr"]);
    assert_eq!(check(Vec::new(), &named(&["seed"]), place), Ok(Vec::new()));
}

#[test]
fn rows_of_a_step_cannot_be_overridden() {
    let old = settings(&plan_of("--model m --micro-batch 2 --accum 3", 2));
    let place = Path::new("out/checkpoints/step-000005");
    let all = ["micro_batch", "accum", "lanes", "global_batch"].map(str::to_owned);
    let found = changes(&old, &plan_of("--model m --micro-batch 4 --accum 3", 2));
    let f = check(found, &all, place).unwrap_err();
    assert_eq!(f.found.as_deref(), Some("global_batch: 12 then, 24 now"));
    let hint = f.hint.unwrap();
    assert!(hint.contains("--global-batch 12") && hint.contains("--model out/checkpoints/step-000005"), "{hint}");

    // As many rows, dealt otherwise: possible if it is said.
    let dealt = || changes(&old, &plan_of("--model m --micro-batch 1 --accum 3 --lanes 4", 2));
    assert_eq!(check(dealt(), &all, place).unwrap().len(), 2);
    assert_eq!(check(dealt(), &[], place).unwrap_err().hint.as_deref(), Some("--override micro_batch lanes"));
    // A run that sets nothing of it takes the checkpoint's accumulation and lanes.
    let kept = Kept { lanes: 2, accum: 3 };
    let again = RunPlan::resolve(&args("--model m --micro-batch 2"), 1, 1, Some(&kept)).unwrap();
    assert_eq!((changes(&old, &again), again.length), (Vec::new(), Length::Epochs(1.0)));
}

#[test]
fn overrides_may_be_spelled_like_flags() {
    let p =
        plan("--override lr weight-decay --override=--learning_rate --override warmup-ratio epochs steps no-shuffle");
    assert_eq!(p.overrides, ["lr", "weight_decay", "warmup", "length", "shuffle"]);
    assert_eq!(p.origin("overrides"), Some(Origin::Flag));
    let p = plan("--override=--per-device-train-batch-size --override accum world data threads");
    assert_eq!(p.overrides, ["micro_batch", "accum", "world", "data", "threads"]);
    assert_eq!((plan("").overrides.len(), plan("").origin("overrides")), (0, Some(Origin::Default)));
    assert_eq!(plan("--override lr").to_json()["settings"]["overrides"], json!({ "value": ["lr"], "from": "flag" }));

    for (written, nearest) in [("polcy", "policy"), ("--lrr", "lr"), ("wait_decay", "weight_decay"), ("bets1", "beta1")]
    {
        let f = refused(&format!("--override={written}"), 1);
        assert_eq!((f.place.as_deref(), f.found.as_deref()), (Some("--override"), Some(written)));
        assert_eq!(f.hint.unwrap(), format!("did you mean --override {nearest}?"));
        let listed = f.expected.unwrap();
        assert!(f.what.contains(written) && listed.contains("schedule_stepping, seed, shuffle"), "{listed}");
    }
    for unlike in ["bf16.enabled", "config", "x"] {
        assert!(!refused(&format!("--override {unlike}"), 1).hint.unwrap().contains("did you mean"), "{unlike}");
    }
}
