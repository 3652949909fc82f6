//! Runs that are stopped and started again, and what they leave.

use crate::cases::Data;
use crate::job::{Job, all_gone, kill, using};
use crate::{Metrics, Output, Row, command, exclusive, run, umbra, weight_files};
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};

/// What a run computes. Where its output goes, on how many ranks and in which layout, is said at each start.
#[derive(Debug)]
pub struct Recipe {
    /// The model's folder.
    pub model: PathBuf,
    /// The rows.
    pub data: Data,
    /// Flags, cut at white space.
    pub flags: String,
}

impl Recipe {
    /// Of these.
    pub fn new(model: &Path, rows: Vec<Row>, flags: &str) -> Self {
        Recipe { model: model.to_owned(), data: Data::new(rows), flags: flags.to_owned() }
    }

    /// The command that starts it, with one thread a rank unless `flags` says otherwise.
    pub fn command(&self, ranks: usize, out: &Path, flags: &str) -> Command {
        let mut command = command(ranks);
        command.arg("train").arg("--model").arg(&self.model).arg("--data").arg(self.data.path()).arg("--out").arg(out);
        command.args(self.flags.split_whitespace()).args(flags.split_whitespace());
        if !flags.contains("--threads") {
            command.args(["--threads", "1"]);
        }
        command
    }

    /// Runs it, however it ends.
    pub fn attempt(&self, ranks: usize, out: &Path, flags: &str) -> Output {
        run(&mut self.command(ranks, out, flags))
    }

    /// Runs it to its good end.
    #[track_caller]
    pub fn run(&self, ranks: usize, out: &Path, flags: &str) -> Output {
        let output = self.attempt(ranks, out, flags);
        assert_eq!(output.code, Some(0), "{flags} on {ranks} rank(s):\n{}", output.stderr);
        output
    }

    /// Starts it with a pause of `ms` milliseconds after every block that a checkpoint writes.
    pub fn start(&self, ranks: usize, out: &Path, flags: &str, ms: u64) -> Job {
        let mut command = self.command(ranks, out, flags);
        Job::start(command.env("UMBRA_TEST_SLOW_SAVE_MS", ms.to_string()), Stdio::null())
    }

    /// Starts it and kills every process as soon as the checkpoint of `step` is there: while the next one is written, at
    /// the latest, because the state at the end is saved as well. Returns what it said.
    #[track_caller]
    pub fn stopped_at(&self, step: u64, ranks: usize, out: &Path, flags: &str) -> Output {
        let _machine = exclusive();
        // Some eighty blocks make that a third of a second to notice the checkpoint in.
        let mut job = self.start(ranks, out, flags, 4);
        let dir = checkpoint(out, step);
        job.wait_until(&format!("its checkpoint of step {step}"), || dir.exists());
        kill_job(&job, out);
        let output = job.wait();
        assert_eq!(output.code, None, "killed in the middle:\n{}", output.stderr);
        assert_eq!(steps(out).last(), Some(&step), "the newest checkpoint\n{}", output.stderr);
        assert_eq!(run_json(out)["finished"], false);
        output
    }
}

/// Kills a job's launcher and all of its ranks, which write to `out`, and waits until they are gone.
pub fn kill_job(job: &Job, out: &Path) {
    let mut ids = using(out);
    ids.push(job.id());
    kill(&ids);
    all_gone(&ids);
    // A rank that the launcher was just about to start.
    all_gone(&using(out));
}

/// The folder of a run's checkpoint.
pub fn checkpoint(out: &Path, step: u64) -> PathBuf {
    out.join(format!("checkpoints/step-{step:06}"))
}

/// The sorted names among a run's checkpoints; none where there is no such folder.
pub fn names(out: &Path) -> Vec<String> {
    let entries = fs::read_dir(out.join("checkpoints")).into_iter().flatten();
    let mut names: Vec<String> =
        entries.map(|entry| entry.expect("an entry").file_name().into_string().expect("UTF-8")).collect();
    names.sort();
    names
}

/// The steps of a run's complete checkpoints, in order.
pub fn steps(out: &Path) -> Vec<u64> {
    names(out).iter().filter_map(|name| name.strip_prefix("step-")?.parse().ok()).collect()
}

/// `run.json`.
pub fn run_json(out: &Path) -> Value {
    serde_json::from_slice(&fs::read(out.join("run.json")).expect("run.json")).expect("JSON")
}

/// Runs `umbra checkpoint` with `args`.
pub fn of_checkpoint(args: &[&Path]) -> Output {
    run(Command::new(umbra()).arg("checkpoint").args(args))
}

/// Every byte of every complete checkpoint of a run is as it was written, and there is one.
#[track_caller]
pub fn assert_whole(out: &Path) {
    let verified = of_checkpoint(&["verify".as_ref(), out]);
    assert_eq!(verified.code, Some(0), "{}\n{}", verified.stdout, verified.stderr);
    assert_eq!(verified.stdout.matches("ok: ").count(), steps(out).len(), "{}", verified.stdout);
}

/// Two finished runs have made the same: each step of `b` once, as `a` made it (those of a branch are the last ones), the
/// model's bytes, and the state in the last checkpoint.
#[track_caller]
pub fn assert_same_end(a: &Path, b: &Path, what: &str) {
    let (all, some) = (Metrics::read(a).results(), Metrics::read(b).results());
    assert!(!some.is_empty() && some.len() <= all.len(), "{what}: {} of {} steps", some.len(), all.len());
    for (a, b) in all[all.len() - some.len()..].iter().zip(&some) {
        assert_eq!(a, b, "{what}");
        assert!(!a.ends_with("state_hash null"), "{what}: the state is hashed at every step");
    }
    assert!(weight_files(a) == weight_files(b), "{what}: the bytes of model/");
    assert_same_state(a, b, what);
}

/// The (newest) checkpoints at `a` and `b` are the same state.
#[track_caller]
pub fn assert_same_state(a: &Path, b: &Path, what: &str) {
    let diff = of_checkpoint(&["diff".as_ref(), a, b]);
    assert_eq!(diff.code, Some(0), "{what}:\n{}\n{}", diff.stdout, diff.stderr);
}

/// A folder with everything that is in `from`.
pub fn copy(from: &Path, to: &Path) {
    fs::create_dir_all(to).expect("a folder");
    for entry in fs::read_dir(from).expect("a folder") {
        let entry = entry.expect("an entry");
        let (path, target) = (entry.path(), to.join(entry.file_name()));
        if path.is_dir() {
            copy(&path, &target);
        } else {
            fs::copy(&path, &target).expect("a file to be copied");
        }
    }
}
