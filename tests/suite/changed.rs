//! What may change when a run goes on: settings that alter the result only by name, weights and their place in the data by
//! what is asked for.

use crate::once::message;
use serde_json::{Value, json};
use std::fs;
use std::path::{Path, PathBuf};
use tempfile::TempDir;
use umbra_tests::broken::Copy;
use umbra_tests::cases::uneven_rows;
use umbra_tests::runs::{
    Recipe, assert_same_end, assert_same_state, checkpoint, copy, names, of_checkpoint, run_json, steps,
};
use umbra_tests::tensors::{Tensors, same_bits};
use umbra_tests::{Metrics, Output, folder, model};

/// The flags of a run of eight steps, of which the tests change some. 40 rows, six a step: an epoch is seven steps.
const FLAGS: [&str; 8] = [
    "--lr 1e-3",
    "--steps 8",
    "--policy shadow",
    "--accum 3",
    "--lanes 2",
    "--seed 1",
    "--clip 1",
    "--weight-decay 0.1 --hash-every 1",
];

/// Every step is kept.
const SAVED: &str = "--save-every 1 --keep 9";

/// A finished run with a checkpoint of every step, in `base`.
struct Base {
    dir: TempDir,
    /// Model and rows; the flags are given at each start.
    recipe: Recipe,
    flags: String,
}

impl Base {
    fn new(change: (&str, &str)) -> Self {
        let flags = FLAGS.join(" ").replace(change.0, change.1);
        let recipe = Recipe::new(&model("mistral-odd-tied"), uneven_rows(40), "");
        let dir = folder();
        recipe.run(1, &dir.path().join("base"), &format!("{flags} {SAVED}"));
        Base { dir, recipe, flags }
    }

    fn path(&self, name: &str) -> PathBuf {
        self.dir.path().join(name)
    }

    /// The flags that go on from the checkpoint of `step`.
    fn from(&self, step: u64) -> String {
        format!("{} --resume {}", self.flags, checkpoint(&self.path("base"), step).display())
    }

    /// Goes on from the checkpoint of `step` in the folder `out`, with one flag changed and `flags` besides.
    fn branch(&self, step: u64, out: &str, change: (&str, &str), flags: &str) -> Output {
        let flags = format!("{} {flags}", self.from(step).replace(change.0, change.1));
        self.recipe.attempt(1, &self.path(out), &flags)
    }
}

#[track_caller]
fn refused(output: &Output, says: &[&str]) {
    assert_eq!(output.code, Some(2), "{}", output.stderr);
    let said = message(output);
    for text in says {
        assert!(said.contains(text), "no `{text}` in {said}");
    }
}

#[track_caller]
fn goes_on(output: &Output, step: u64) {
    assert_eq!(output.code, Some(0), "{}", output.stderr);
    assert!(output.stderr.contains(&format!("{step} steps made")), "{}", output.stderr);
}

#[test]
fn a_setting_that_alters_the_result_is_refused_with_old_and_new() {
    let base = Base::new(("", ""));
    let cases = [
        ("--lr 1e-3", "--lr 2e-3", "lr: 0.001 then, 0.002 now", "lr"),
        ("--lr 1e-3", "--lr 1e-3 --schedule linear", "schedule: \"constant\" then, \"linear\" now", "schedule"),
        ("--lr 1e-3", "--lr 1e-3 --warmup-steps 6", "now", "warmup"),
        ("--lr 1e-3", "--lr 1e-3 --beta1 0.8", "beta1: 0.9 then, 0.8 now", "beta1"),
        ("--lr 1e-3", "--lr 1e-3 --beta2 0.99", "beta2: 0.999 then, 0.99 now", "beta2"),
        ("--lr 1e-3", "--lr 1e-3 --eps 1e-6", "eps: 1e-8 then, 1e-6 now", "eps"),
        ("--lr 1e-3", "--lr 1e-3 --decay-norms", "decay_norms: false then, true now", "decay_norms"),
        ("--lr 1e-3", "--lr 1e-3 --no-shuffle", "shuffle: true then, false now", "shuffle"),
        ("--steps 8", "--steps 12", "length: {\"steps\":8} then, {\"steps\":12} now", "length"),
        ("--policy shadow", "--policy low-sr", "policy: \"shadow\" then, \"low-sr\" now", "policy"),
        ("--seed 1", "--seed 2", "seed: 1 then, 2 now", "seed"),
        ("--clip 1", "--clip 0.5", "clip: 1.0 then, 0.5 now", "clip"),
        ("--weight-decay 0.1", "--weight-decay 0", "weight_decay: 0.1 then, 0.0 now", "weight_decay"),
        ("--accum 3 --lanes 2", "--accum 1 --lanes 6", "lanes: 2 then, 6 now", "accum lanes"),
    ];
    for (old, new, says, names) in cases {
        let output = base.branch(4, "out", (old, new), "");
        refused(&output, &[says, "step-000004"]);
        let hint =
            output.stderr.lines().find(|line| line.contains("--override")).unwrap_or_else(|| panic!("{new}: a hint"));
        assert!(names.split(' ').all(|name| hint.contains(name)), "{new}: {hint}");
        assert!(!base.path("out").exists(), "{new}: nothing is left");
    }
    // Whatever else is named in --override, this is not.
    refused(&base.branch(4, "out", ("--clip 1", "--clip 2"), "--override lr policy"), &["clip: 1.0 then, 2.0 now"]);
    refused(&base.branch(4, "out", ("", ""), "--override polcy"), &["polcy", "policy"]);
    // Another number of rows a step has no place in the data to go on from.
    let rows = base.branch(4, "out", ("--accum 3", "--accum 2"), "--override accum global_batch");
    refused(&rows, &["global_batch: 6 then, 4 now", "--global-batch 6"]);
    // The order of the sums changes with the lanes, the rows of a step do not.
    goes_on(&base.branch(4, "out", ("--accum 3 --lanes 2", "--accum 1 --lanes 6"), "--override accum lanes"), 4);
    let (base, out) = (Metrics::read(&base.path("base")), Metrics::read(&base.path("out")));
    assert_eq!(base.column("supervised")[4..], out.column("supervised"));
}

#[test]
fn an_overridden_setting_is_announced_and_recorded() {
    let base = Base::new(("", ""));
    let output = base.branch(5, "out", ("--lr 1e-3", "--lr 2e-3"), "--override lr");
    goes_on(&output, 5);
    assert!(output.stderr.contains("overridden  lr: 0.001 then, 0.002 now"), "{}", output.stderr);
    let resumed = &run_json(&base.path("out"))["resumed"];
    let (changes, step) = (&resumed[0]["changes"], &resumed[0]["step"]);
    assert_eq!(*changes, json!([{"name": "lr", "old": 0.001, "new": 0.002}]), "{resumed}");
    assert_eq!((resumed.as_array().map(Vec::len), step), (Some(1), &json!(5)));
    let (whole, out) = (Metrics::read(&base.path("base")), Metrics::read(&base.path("out")));
    assert_eq!(out.column("step"), [5.0, 6.0, 7.0]);
    assert_eq!(out.column("lr"), [0.002; 3]);
    // The first step sees the same weights and rows, and makes other weights of them.
    assert_eq!((&whole.0[5]["loss"], &whole.0[5]["grad_norm"]), (&out.0[0]["loss"], &out.0[0]["grad_norm"]));
    assert_ne!(whole.0[5]["state_hash"], out.0[0]["state_hash"]);
}

/// The weights of a checkpoint, as `umbra checkpoint export` writes them.
fn exported(from: &Path, dtype: &str) -> Tensors {
    let dir = folder();
    let out = dir.path().join("model");
    let output = of_checkpoint(&["export".as_ref(), from, "--out".as_ref(), &out, "--dtype".as_ref(), dtype.as_ref()]);
    assert_eq!(output.code, Some(0), "{}", output.stderr);
    Tensors::read(&out.join("model.safetensors"))
}

#[track_caller]
fn assert_same_weights(a: &Tensors, b: &Tensors) {
    assert!(a.0.keys().eq(b.0.keys()));
    for (name, values) in &a.0 {
        assert!(same_bits(values, b.get(name)), "{name}");
    }
}

/// From bf16 to fp32 nothing is lost, and from fp32 to bf16 each weight is rounded to the nearest. At learning rate 0 the
/// step that is made leaves them as they came.
#[test]
fn another_policy_takes_the_weights_over() {
    const STILL: &str = "--lr 0 --steps 9 --override policy lr length";
    for (before, after, dtype) in
        [("fsdp-low", "shadow", "fp32"), ("shadow", "fsdp-low", "bf16"), ("deepspeed", "fp32", "fp32")]
    {
        let base = Base::new(("--policy shadow", &format!("--policy {before}")));
        let newest = checkpoint(&base.path("base"), 8);
        let out = base.path("out");
        let flags = base.from(8).replace("--lr 1e-3", "").replace("--steps 8", "").replace(before, after);
        base.recipe.run(1, &out, &format!("{flags} {STILL}"));
        assert_same_weights(&exported(&newest, dtype), &exported(&checkpoint(&out, 9), "fp32"));
        let changes = run_json(&out)["resumed"][0]["changes"].clone();
        let policy = changes.as_array().unwrap().iter().find(|c| c["name"] == "policy").expect("recorded").clone();
        assert_eq!((&policy["old"], &policy["new"]), (&json!(before), &json!(after)));
    }
}

#[test]
fn other_rows_are_refused_and_the_same_rows_elsewhere_are_not() {
    let base = Base::new(("", ""));
    let (same, other, from) = (base.path("same"), base.path("other"), base.from(4));
    let mut rows = uneven_rows(40);
    Recipe::new(&base.recipe.model, rows.clone(), "").run(1, &same, &from);
    assert_same_end(&base.path("base"), &same, "the rows in another file");
    rows[39].0[0] = (rows[39].0[0] + 1) % 65;
    let changed = Recipe::new(&base.recipe.model, rows, "");
    refused(&changed.attempt(1, &other, &from), &["data: ", " then, ", "--override data"]);
    assert!(!other.exists());
    goes_on(&changed.attempt(1, &other, &format!("{from} --override data")), 4);
    assert_eq!(run_json(&other)["resumed"][0]["changes"][0]["name"], "data");
}

#[test]
fn another_model_is_refused_and_a_copy_may_be_meant() {
    let base = Base::new(("", ""));
    let copy = Copy::of("mistral-odd-tied");
    let (out, from) = (base.path("out"), base.from(4));
    let recipe = Recipe::new(copy.path(), uneven_rows(40), "");
    refused(&recipe.attempt(1, &out, &from), &["model: ", "mistral-odd-tied", "--override model"]);
    recipe.run(1, &out, &format!("{from} --override model"));
    assert_same_end(&base.path("base"), &out, "a copy of the model");
    let other = Recipe::new(&model("llama-scaled-rope"), uneven_rows(40), "");
    let exchanged = other.attempt(1, &base.path("other"), &format!("{from} --override model"));
    refused(&exchanged, &["cannot exchange the model", "Llama", "Mistral"]);
}

/// At a constant rate a run that is made longer is the longer run.
#[test]
fn a_finished_run_is_made_longer() {
    let base = Base::new(("", ""));
    let (whole, out, longer) = (base.path("whole"), base.path("base"), base.flags.replace("--steps 8", "--steps 12"));
    base.recipe.run(1, &whole, &longer);
    let unnamed = base.recipe.attempt(1, &out, &longer);
    refused(&unnamed, &["length: {\"steps\":8} then, {\"steps\":12} now", "--override length"]);
    base.recipe.run(1, &out, &format!("{longer} --override length"));
    assert_eq!(Metrics::read(&out).0.len(), 12);
    assert_same_end(&whole, &out, "8 and 4 steps");
}

/// A finished run has its model to write again, if somebody has removed it.
#[test]
fn a_removed_model_is_written_again() {
    let base = Base::new(("", ""));
    let (whole, out) = (base.path("base"), base.path("copy"));
    copy(&whole, &out);
    fs::remove_dir_all(out.join("model")).expect("the model removed");
    let output = base.recipe.run(1, &out, &base.flags);
    assert!(output.stderr.contains("8 steps made"), "{}", output.stderr);
    assert_same_end(&whole, &out, "a model written again");
    let again = base.recipe.run(1, &out, &base.flags);
    assert!(!again.stderr.contains("steps made"), "finished, and nothing to do: {}", again.stderr);
}

#[test]
fn resume_takes_a_folder_and_says_what_is_no_checkpoint() {
    let base = Base::new(("", ""));
    let (whole, branch, empty) = (base.path("base"), base.path("branch"), base.path("empty"));
    let start = |out: &Path, from: &Path| {
        base.recipe.attempt(1, out, &format!("{} {SAVED} --resume {}", base.flags, from.display()))
    };
    fs::create_dir(&empty).unwrap();
    for from in [&empty, Path::new("/no/such/folder"), &base.recipe.model] {
        let output = start(&branch, from);
        assert_eq!(output.code, Some(3), "{}", output.stderr);
        let said = message(&output);
        assert!(said.contains("no checkpoint") && said.contains(&from.display().to_string()), "{said}");
        assert!(!branch.exists());
    }
    // Going back within the folder of the run: what is made again does not destroy what was made.
    goes_on(&start(&whole, &checkpoint(&whole, 6)), 6);
    let found = names(&whole);
    assert_eq!(steps(&whole), [1, 2, 3, 4, 5, 6, 7, 8]);
    for step in [7, 8] {
        let aside = whole.join(format!("checkpoints/step-00000{step}.aside-1"));
        assert!(aside.exists(), "{found:?}");
        assert_same_state(&aside, &checkpoint(&whole, step), "what was made again");
    }
    assert_eq!(Metrics::read(&whole).column("step"), [0.0, 1.0, 2.0, 3.0, 4.0, 5.0, 6.0, 7.0]);
    // An output folder means its newest checkpoint.
    goes_on(&start(&branch, &whole), 8);
}

/// A new run from a checkpoint's weights sees them as the old one would have: rows in order, so that the second epoch begins
/// with the first one's rows.
#[test]
fn a_checkpoint_is_a_model_to_start_from() {
    let base = Base::new(("--seed 1", "--no-shuffle"));
    let (whole, out) = (base.path("base"), base.path("out"));
    Recipe { model: checkpoint(&whole, 7), ..base.recipe }.run(1, &out, &base.flags);
    let (whole, new) = (Metrics::read(&whole), Metrics::read(&out));
    assert_eq!(new.0[0]["step"], 0);
    for name in ["loss", "grad_norm", "supervised"] {
        assert_eq!(whole.0[7][name], new.0[0][name], "{name}");
    }
    // Its moments are new ones, so the step that it takes is another.
    assert_ne!(whole.0[7]["state_hash"], new.0[0]["state_hash"]);
    let config: Value = serde_json::from_slice(&fs::read(out.join("model/config.json")).unwrap()).unwrap();
    assert_eq!(config["dtype"], "bfloat16", "as the model that the first run began with");
}

#[test]
fn fewer_steps_than_were_made_are_refused() {
    let base = Base::new(("", ""));
    let shorter = base.branch(6, "out", ("--steps 8", "--steps 3"), "--override length");
    refused(&shorter, &["more steps than the run is to have", "at most 3 steps", "6 steps made"]);
}

#[test]
fn an_output_folder_inside_a_checkpoint_is_refused() {
    let base = Base::new(("", ""));
    let inside = checkpoint(&base.path("base"), 6);
    refused(&base.recipe.attempt(1, &inside, &base.flags), &["lies in a checkpoint"]);
    refused(&base.recipe.attempt(1, &inside.join("run"), &base.flags), &["lies in a checkpoint"]);
}

/// Once sums were made in another order, the state is no longer that of its lanes, and says so from then on.
#[test]
fn other_bits_stay_marked() {
    let base = Base::new(("", ""));
    let flags = base.flags.replace("--lanes 2", "--lanes 5");
    let (out, marked) = (base.path("five"), base.path("marked"));
    base.recipe.run(2, &out, &format!("{flags} {SAVED} --allow-different-bits"));
    let from = format!("{flags} --resume {}", checkpoint(&out, 4).display());
    let output = base.recipe.run(1, &marked, &from);
    assert!(output.stderr.contains("another order"), "{}", output.stderr);
    assert_eq!(run_json(&marked)["settings"]["different_bits"]["value"], true);
}
