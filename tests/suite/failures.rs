//! Ranks that die, fail alone or hang, full disks and losses that are not finite: the job is over within seconds, says why
//! once, and leaves no model folder.

use crate::once::message;
use serde_json::Value;
use std::fs;
use std::path::Path;
use std::process::Stdio;
use std::time::Instant;
use umbra_tests::disk::SmallDisk;
use umbra_tests::job::{Job, SOON, all_gone, signal};
use umbra_tests::{Metrics, Output, command, exclusive, fixtures, folder, model, mpirun, run, umbra};

/// Starts a long run of the embedded model.
fn start(ranks: usize, out: &Path) -> Job {
    let mut command = command(ranks);
    command.args(["train", "--steps", "100000", "--seq-len", "32", "--threads", "1", "--out"]).arg(out);
    Job::start(&mut command, Stdio::null())
}

/// Waits until some steps are recorded.
fn in_mid_training(job: &mut Job, out: &Path) {
    job.wait_until("its third step", || Metrics::lines(out) >= 3);
}

fn no_model(out: &Path) {
    for name in ["model", "model.partial"] {
        assert!(!out.join(name).exists(), "{name} was left behind");
    }
    let run: Value = serde_json::from_slice(&fs::read(out.join("run.json")).expect("run.json")).expect("JSON");
    assert_eq!(run["finished"], Value::Bool(false));
}

#[test]
fn a_killed_rank_ends_the_job() {
    for (ranks, victim) in [(3, 0), (4, 2)] {
        let _machine = exclusive();
        let dir = folder();
        let out = dir.path().join("out");
        let mut job = start(ranks, &out);
        in_mid_training(&mut job, &out);
        let ids = job.ranks();
        assert_eq!(ids.len(), ranks);
        let killed = Instant::now();
        signal("KILL", ids[victim]);
        let output = job.wait();
        assert!(killed.elapsed() < SOON, "took {:?}", killed.elapsed());
        // The launcher's code for a rank that a signal ended (128 + 9), or umbra's own for a lost rank.
        assert!(matches!(output.code, Some(137 | 5)), "{:?}\n{}", output.code, output.stderr);
        assert!(output.stderr.contains(&format!("rank {victim}")), "the rank is named:\n{}", output.stderr);
        all_gone(&ids);
        no_model(&out);
        // What was recorded is whole.
        let text = fs::read_to_string(out.join("metrics.jsonl")).expect("metrics");
        assert!(text.ends_with('\n') && text.lines().all(|l| serde_json::from_str::<Value>(l).is_ok()));
    }
}

#[test]
fn a_killed_run_of_one_rank_leaves_no_model_and_can_be_started_again() {
    let machine = exclusive();
    let dir = folder();
    let out = dir.path().join("out");
    let mut job = start(1, &out);
    in_mid_training(&mut job, &out);
    signal("KILL", job.id());
    assert_eq!(job.wait().code, None, "a signal ended it");
    no_model(&out);
    drop(machine);
    let again = run(command(1).args(["train", "--steps", "2", "--seq-len", "32", "--out"]).arg(&out));
    assert_eq!(again.code, Some(0), "{}", again.stderr);
    assert_eq!(Metrics::lines(&out), 2, "the steps of the run that was killed are not kept among those of the new one");
}

#[test]
fn a_killed_launcher_leaves_no_rank() {
    let _machine = exclusive();
    let dir = folder();
    let out = dir.path().join("out");
    let mut job = start(3, &out);
    in_mid_training(&mut job, &out);
    let ids = job.ranks();
    signal("KILL", job.id());
    job.wait();
    all_gone(&ids);
    no_model(&out);
}

#[test]
fn a_rank_that_hangs_goes_with_its_launcher() {
    let _machine = exclusive();
    let dir = folder();
    let out = dir.path().join("out");
    let mut job = start(3, &out);
    in_mid_training(&mut job, &out);
    let ids = job.ranks();
    signal("STOP", ids[1]);
    signal("KILL", job.id());
    assert_eq!(job.wait().code, None, "a signal ended it");
    all_gone(&ids);
    no_model(&out);
}

/// Runs three ranks of which rank 1 works in another folder, as if a disk were not shared. Names in `args` are relative.
fn rank_1_elsewhere(here: &Path, elsewhere: &Path, args: &[&str]) -> Output {
    let mut command = mpirun(3);
    let script = "test \"$OMPI_COMM_WORLD_RANK\" = 1 && cd \"$ELSEWHERE\"; exec \"$UMBRA\" \"$@\"";
    command.env("ELSEWHERE", elsewhere).env("UMBRA", umbra()).current_dir(here);
    run(command.args(["sh", "-c", script, "sh"]).args(args))
}

#[test]
fn a_rank_that_fails_alone_is_named_once() {
    let (here, elsewhere) = (folder(), folder());
    let rows = fs::read_to_string(fixtures().join("curves/rows128.jsonl")).expect("rows");
    fs::write(here.path().join("rows.jsonl"), &rows).expect("rows to be written");
    let model = model("mistral-tiny").display().to_string();
    let args = ["train", "--model", &model, "--data", "rows.jsonl", "--steps", "1", "--threads", "1", "--out", "out"];

    let missing = rank_1_elsewhere(here.path(), elsewhere.path(), &args);
    assert_eq!(missing.code, Some(3), "{}", missing.stderr);
    let said = message(&missing);
    assert!(said.contains("on rank 1: a data file cannot be read") && said.contains("rows.jsonl"), "{said}");

    let spoiled =
        rows.lines().enumerate().map(|(i, l)| if i == 4 { "{\"input_ids\": [1, 512]}\n" } else { l }.to_owned());
    fs::write(elsewhere.path().join("rows.jsonl"), spoiled.collect::<Vec<_>>().join("\n")).expect("rows to be written");
    let other = rank_1_elsewhere(here.path(), elsewhere.path(), &args);
    assert_eq!(other.code, Some(3), "{}", other.stderr);
    let said = message(&other);
    assert!(said.contains("on rank 1: a token id") && said.contains("rows.jsonl:5"), "{said}");
    assert!(missing.took < SOON && other.took < SOON);
    assert!(!here.path().join("out").exists() && !elsewhere.path().join("out").exists());
}

#[test]
fn an_output_folder_that_only_rank_0_sees_is_said_to_be_so() {
    let (here, elsewhere) = (folder(), folder());
    let output =
        rank_1_elsewhere(here.path(), elsewhere.path(), &["train", "--steps", "2", "--seq-len", "32", "--out", "out"]);
    assert_eq!(output.code, Some(7), "{}", output.stderr);
    assert!(output.stderr.contains("error: on rank 1: a file of the checkpoint cannot be opened"), "{}", output.stderr);
    assert_eq!(output.stderr.matches("error: ").count(), 1, "{}", output.stderr);
    assert!(output.took < SOON);
    no_model(&here.path().join("out"));
}

#[test]
fn a_checkpoint_that_only_rank_0_sees_is_said_to_be_so() {
    let (here, elsewhere) = (folder(), folder());
    let args = ["train", "--steps", "2", "--seq-len", "32", "--out", "out"];
    let first = run(command(3).args(args).current_dir(here.path()));
    assert_eq!(first.code, Some(0), "{}", first.stderr);
    let again = rank_1_elsewhere(here.path(), elsewhere.path(), &args);
    assert_eq!(again.code, Some(3), "{}", again.stderr);
    let said = message(&again);
    assert!(said.contains("on rank 1: ") && said.contains("out/checkpoints/step-000002"), "{said}");
    assert!(again.took < SOON);
}

#[test]
fn a_command_line_that_one_rank_cannot_read_ends_every_rank() {
    let mut command = mpirun(1);
    command.arg(umbra()).args(["train", "--steps", "1", ":", "-n", "1"]).arg(umbra()).args(["train", "--stepz", "1"]);
    let output = run(&mut command);
    assert_eq!(output.code, Some(2), "{}", output.stderr);
    assert!(message(&output).contains("--stepz") && output.took < SOON);
}

#[test]
fn a_loss_that_is_not_finite_stops_every_rank() {
    for ranks in [1, 3] {
        let dir = folder();
        let out = dir.path().join("out");
        let mut command = command(ranks);
        command.args(["train", "--steps", "5", "--lr", "1e20", "--clip", "0", "--policy", "fp32", "--threads", "1"]);
        command.arg("--model").arg(model("mistral-tiny")).arg("--data").arg(fixtures().join("curves/rows128.jsonl"));
        let output = run(command.arg("--out").arg(&out));
        assert_eq!(output.code, Some(6), "{}", output.stderr);
        assert_eq!(output.stderr.matches("error: ").count(), 1, "{}", output.stderr);
        let message = output.stderr.lines().find(|line| line.starts_with("error: ")).expect("a message");
        assert!(message.contains("step 1: ") && message.contains("rank "), "{message}");
        assert_eq!(Metrics::lines(&out), 1, "step 0 went well and stays recorded");
        no_model(&out);
    }
}

/// Trains on a disk of `size`, without checkpoints, until it is full.
fn on_a_disk_of(size: &str, ranks: usize, steps: &str, says: &[&str]) -> u64 {
    let dir = folder();
    let Some(disk) = SmallDisk::new(&dir.path().join("disk"), size) else { return 0 };
    let out = disk.path().join("out");
    let output =
        run(command(ranks).args(["train", "--seq-len", "32", "--keep", "0", "--steps", steps, "--out"]).arg(&out));
    assert_eq!(output.code, Some(7), "{}", output.stderr);
    assert_eq!(output.stderr.matches("error: ").count(), 1, "{}", output.stderr);
    for text in says {
        assert!(output.stderr.contains(text), "no `{text}` in {}", output.stderr);
    }
    assert!(output.took < SOON);
    no_model(&out);
    Metrics::lines(&out)
}

#[test]
fn a_disk_that_is_full_when_the_model_is_saved() {
    // The model takes 1.5 MB.
    for ranks in [1, 3] {
        on_a_disk_of("512k", ranks, "2", &["a weight file", "No space left", "--out"]);
    }
}

#[test]
fn a_disk_that_is_full_when_metrics_are_written() {
    // Seven pages of 4 KiB: folders take none of them, run.json takes one or two, a step takes about 400 bytes.
    for ranks in [1, 3] {
        let recorded = on_a_disk_of("28k", ranks, "300", &["metrics.jsonl", "step ", "No space left"]);
        assert!(recorded == 0 || (10..100).contains(&recorded), "{recorded} steps recorded");
    }
}
