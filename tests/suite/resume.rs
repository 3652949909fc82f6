//! A run that was stopped and is started again makes the bits of one that never stopped, at whatever place it stopped and on
//! whatever ranks and in whatever layout it goes on.

use std::path::Path;
use umbra_tests::cases::uneven_rows;
use umbra_tests::runs::{Recipe, assert_same_end, assert_whole, checkpoint, names, run_json, steps};
use umbra_tests::{folder, model};

/// 40 rows in steps of six, two lanes of three micro-batches: seven steps an epoch, the last of four rows. Two models of
/// odd sizes in turn would show no more than one does: shapes do not depend on where a run stops.
fn recipe(flags: &str) -> Recipe {
    let flags = format!(
        "--lanes 2 --micro-batch 1 --accum 3 --lr 1e-3 --weight-decay 0.1 --schedule cosine --warmup-steps 5 --hash-every 1 \
         {flags}"
    );
    Recipe::new(&model("mistral-odd-tied"), uneven_rows(40), &flags)
}

/// The run goes on in its folder and ends as the uninterrupted one did; what its stops have left is gone.
#[track_caller]
fn ends_like(whole: &Path, recipe: &Recipe, ranks: usize, out: &Path, flags: &str, from: u64, what: &str) {
    let said = recipe.run(ranks, out, flags).stderr;
    assert!(said.contains(&format!("step-{from:06}: {from} steps made")), "{what}: goes on from step {from}:\n{said}");
    assert_same_end(whole, out, what);
    let names = names(out);
    assert!(names.iter().all(|name| !name.contains('.')), "{what}: unfinished folders in {names:?}");
    assert_eq!(run_json(out)["finished"], true, "{what}");
}

/// (policy, ranks before and after, step): the middle of the warm-up, of an epoch, of a decay; before, at and after the end
/// of an epoch. Every policy, so every dtype that state is kept in, and stochastic rounding among them.
#[test]
fn a_run_that_was_killed_goes_on_with_the_bits_of_one_that_was_not() {
    let cases = [
        ("shadow", 2, 2, 3),
        ("low-sr", 1, 1, 5),
        ("fsdp-low", 2, 1, 6),
        ("deepspeed", 1, 2, 8),
        ("fp32", 1, 1, 7),
        ("fsdp-mixed", 1, 1, 1),
    ];
    for (policy, before, after, step) in cases {
        let recipe = recipe(&format!("--steps 11 --policy {policy}"));
        let what = format!("{policy}, {before} then {after} rank(s), stopped at step {step}");
        let dir = folder();
        let (whole, out) = (dir.path().join("whole"), dir.path().join("out"));
        recipe.run(1, &whole, "");
        let every = format!("--save-every {step}");
        recipe.stopped_at(step, before, &out, &every);
        ends_like(&whole, &recipe, after, &out, &every, step, &what);
    }
}

/// Each time at the end of an epoch: the order of the next one is its own, whatever the number of starts.
#[test]
fn a_run_that_is_killed_again_and_again_goes_on_each_time() {
    let recipe = recipe("--steps 24 --policy low-sr --save-every 7");
    let dir = folder();
    let (whole, out) = (dir.path().join("whole"), dir.path().join("out"));
    recipe.run(1, &whole, "");
    for step in [7, 14, 21] {
        recipe.stopped_at(step, 1, &out, "");
    }
    ends_like(&whole, &recipe, 1, &out, "", 21, "after three stops");
    let resumed: Vec<_> = run_json(&out)["resumed"].as_array().unwrap().iter().map(|r| r["step"].clone()).collect();
    assert_eq!(resumed, [7, 14, 21]);
    assert_eq!(steps(&out), [21, 24], "two are kept");
}

/// The world that goes on need not be the world that stopped, as long as both fit the lanes: 8 → 4 → 1, and 2 → 8.
#[test]
fn a_run_goes_on_with_the_same_bits_on_more_and_on_fewer_ranks() {
    // One row a lane: eight rows a step, five steps an epoch.
    let recipe = Recipe { flags: recipe("").flags.replace("--lanes 2", "").replace("--accum 3", ""), ..recipe("") };
    let recipe = Recipe { flags: format!("{} --steps 9 --save-every 3", recipe.flags), ..recipe };
    let dir = folder();
    let (whole, fewer, more) = (dir.path().join("whole"), dir.path().join("fewer"), dir.path().join("more"));
    recipe.run(1, &whole, "--lanes 8");
    recipe.stopped_at(3, 8, &fewer, "");
    recipe.stopped_at(6, 4, &fewer, "");
    // The lanes are the checkpoint's unless the command says otherwise.
    ends_like(&whole, &recipe, 1, &fewer, "", 6, "8, 4, then 1 rank(s)");
    assert_eq!(run_json(&fewer)["settings"]["lanes"]["value"], 8);
    recipe.stopped_at(3, 2, &more, "--lanes 8");
    ends_like(&whole, &recipe, 8, &more, "--lanes 8", 3, "2, then 8 ranks");
}

/// What only says who holds what, who computes what, and in which files it is kept, may change at every start.
#[test]
fn a_run_goes_on_with_the_same_bits_in_another_layout() {
    let recipe = recipe("--steps 11 --policy fsdp-low --save-every 4");
    let recipe = Recipe { flags: recipe.flags.replace("--lanes 2", "--lanes 4"), ..recipe };
    let dir = folder();
    let (whole, out) = (dir.path().join("whole"), dir.path().join("out"));
    recipe.run(1, &whole, "");
    recipe.stopped_at(4, 4, &out, "--stage 3 --shard-group 2 --checkpoint-files per-rank");
    recipe.stopped_at(8, 2, &out, "--stage 1 --recompute block --threads 2");
    ends_like(&whole, &recipe, 4, &out, "--stage 0 --checkpoint-files per-rank", 8, "stage 3 in groups, 1, then 0");
    let branch = dir.path().join("branch");
    let from = format!("--stage 2 --reshard-after-forward off --resume {}", checkpoint(&out, 8).display());
    ends_like(&whole, &recipe, 1, &branch, &from, 8, "a branch in a folder of its own");
}

/// More ranks than a layer's norm has blocks to share: most own nothing of most units, and all of it comes back.
#[test]
fn ranks_that_own_nothing_save_and_load_too() {
    for (ranks, files) in [(9, "per-rank"), (33, "shared")] {
        let flags = format!("--lanes {ranks} --lr 1e-3 --hash-every 1 --checkpoint-files {files}");
        let recipe = Recipe::new(&model("mistral-odd-tied"), uneven_rows(70), &flags);
        let dir = folder();
        let (whole, out) = (dir.path().join("whole"), dir.path().join("out"));
        recipe.run(1, &whole, "--steps 4");
        // Two steps on many ranks, and two more on one.
        recipe.run(ranks, &out, "--steps 2");
        assert_whole(&out);
        ends_like(&whole, &recipe, 1, &out, "--steps 4 --override steps", 2, &format!("{ranks} ranks, then one"));
        assert_whole(&out);
    }
}
