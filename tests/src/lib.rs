//! What the end-to-end tests share: starting the released binary, alone or under mpirun, and reading what it leaves.
//!
//! Everything here panics with a message when it cannot do its work, because a test is all that calls it.

pub mod broken;
pub mod cases;
pub mod cover;
pub mod disk;
pub mod job;
pub mod layouts;
pub mod runs;
pub mod tensors;

use job::Job;
use serde_json::Value;
use std::fs;
use std::path::{Path, PathBuf};
use std::process::{Command, Stdio};
use std::sync::{Mutex, MutexGuard, PoisonError};
use std::time::Duration;
use tempfile::TempDir;

/// Nothing that is started here may take longer; the longest takes a few seconds.
const LIMIT: Duration = Duration::from_secs(180);

/// One run at a time: each uses every core.
static CORES: Mutex<()> = Mutex::new(());

/// Waits for the machine, and keeps other runs off it until the guard is dropped.
pub fn exclusive() -> MutexGuard<'static, ()> {
    // A test that failed while it held the lock has said so itself.
    CORES.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The release binary beside this test's own.
pub fn umbra() -> PathBuf {
    built("umbra")
}

fn built(name: &str) -> PathBuf {
    let test = std::env::current_exe().expect("the path of this test");
    let path = test.ancestors().nth(2).expect("target/release/deps/test").join(name);
    assert!(path.exists(), "{} is not there: run `make build`, or `make test` for both", path.display());
    path
}

/// `tests/fixtures`.
pub fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("fixtures")
}

/// A fixture model's folder.
pub fn model(name: &str) -> PathBuf {
    fixtures().join("models").join(name)
}

/// A folder that is removed when it is dropped.
pub fn folder() -> TempDir {
    tempfile::tempdir().expect("a temporary folder")
}

/// How a process ended and what it said.
#[derive(Debug)]
pub struct Output {
    /// Its exit code; `None` if a signal ended it.
    pub code: Option<i32>,
    /// What it printed.
    pub stdout: String,
    /// What it complained about.
    pub stderr: String,
    /// How long it took.
    pub took: Duration,
}

/// Runs `command` to its end, with the machine to itself; a process that takes longer than three minutes is killed.
pub fn run(command: &mut Command) -> Output {
    let _machine = exclusive();
    Job::start(command, Stdio::null()).wait()
}

/// `umbra` with `ranks` ranks: under mpirun, or on its own for one.
pub fn command(ranks: usize) -> Command {
    if ranks == 1 {
        return Command::new(umbra());
    }
    let mut command = mpirun(ranks);
    command.arg(umbra());
    command
}

/// The same with `ranks` ranks that are threads of one process; it can only train.
pub fn threads(ranks: usize) -> Command {
    let mut command = Command::new(built("umbra-threads"));
    command.arg(ranks.to_string());
    command
}

/// `mpirun -n ranks`; the program is still to be named.
pub fn mpirun(ranks: usize) -> Command {
    let mut command = Command::new("mpirun");
    command.arg("-n").arg(ranks.to_string());
    // More ranks than cores are wanted here, and mpirun ends the ranks itself before its own caller loses patience.
    command.args(["--oversubscribe", "--bind-to", "none", "--timeout", &(LIMIT.as_secs() - 20).to_string()]);
    // Open MPI runs as root (in a container) only when both say so.
    command.env("OMPI_ALLOW_RUN_AS_ROOT", "1").env("OMPI_ALLOW_RUN_AS_ROOT_CONFIRM", "1");
    command
}

/// A training run: rows in order, one thread a rank unless the flags say otherwise.
#[derive(Debug, Clone, Copy)]
pub struct Train<'a> {
    /// Ranks.
    pub ranks: usize,
    /// The model's folder.
    pub model: &'a Path,
    /// The rows.
    pub data: &'a Path,
    /// The run's folder.
    pub out: &'a Path,
}

impl Train<'_> {
    /// Runs it, with `flags` cut at white space, however it ends.
    pub fn attempt(self, flags: &str) -> Output {
        run(&mut self.command(command(self.ranks), flags))
    }

    /// Runs it to its good end and reads its metrics.
    pub fn run(self, flags: &str) -> Metrics {
        self.read(self.attempt(flags), flags)
    }

    /// [`Train::run`] with a variable of the environment set.
    pub fn run_with(self, variable: (&str, &str), flags: &str) -> Metrics {
        let output = run(self.command(command(self.ranks), flags).env(variable.0, variable.1));
        self.read(output, flags)
    }

    /// [`Train::attempt`] with ranks that are threads of one process.
    pub fn attempt_on_threads(self, flags: &str) -> Output {
        run(&mut self.command(threads(self.ranks), flags))
    }

    /// [`Train::run`] with ranks that are threads of one process.
    pub fn run_on_threads(self, flags: &str) -> Metrics {
        self.read(self.attempt_on_threads(flags), flags)
    }

    fn command(self, mut command: Command, flags: &str) -> Command {
        command.args(["train", "--no-shuffle"]);
        command.arg("--model").arg(self.model).arg("--data").arg(self.data).arg("--out").arg(self.out);
        if !flags.contains("--threads") {
            command.args(["--threads", "1"]);
        }
        command.args(flags.split_whitespace());
        command
    }

    fn read(self, output: Output, flags: &str) -> Metrics {
        assert_eq!(output.code, Some(0), "{self:?} {flags}:\n{}", output.stderr);
        Metrics::read(self.out)
    }
}

/// `metrics.jsonl` of a run, or a curve of the fixtures.
#[derive(Debug, Clone, PartialEq)]
pub struct Metrics(pub Vec<Value>);

impl Metrics {
    /// Of the run in `folder`.
    pub fn read(folder: &Path) -> Self {
        Metrics::read_file(&folder.join("metrics.jsonl"))
    }

    /// One JSON object a line.
    pub fn read_file(path: &Path) -> Self {
        let text = fs::read_to_string(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        Metrics(text.lines().map(|line| serde_json::from_str(line).expect("a line of JSON")).collect())
    }

    /// How many steps the run in `folder` has recorded so far.
    pub fn lines(folder: &Path) -> u64 {
        let text = fs::read(folder.join("metrics.jsonl")).unwrap_or_default();
        text.iter().filter(|byte| **byte == b'\n').count() as u64
    }

    /// One number of every step.
    pub fn column(&self, name: &str) -> Vec<f64> {
        self.0.iter().map(|step| step[name].as_f64().unwrap_or_else(|| panic!("{name} in {step}"))).collect()
    }

    /// Everything that does not depend on the clock or the machine, with numbers as they were written: shortest digits
    /// that read back to the same bits, so equal text is equal bits.
    pub fn results(&self) -> Vec<String> {
        const NAMES: [&str; 11] = [
            "step",
            "loss",
            "grad_norm",
            "clip_coef",
            "lr",
            "swallowed",
            "arrived",
            "tokens",
            "supervised",
            "epoch",
            "state_hash",
        ];
        self.0.iter().map(|step| NAMES.map(|name| format!("{name} {}", step[name])).join(", ")).collect()
    }
}

/// One row of a data file: tokens and labels.
pub type Row = (Vec<u32>, Vec<i64>);

/// Writes JSONL rows with `input_ids` and `labels`.
pub fn write_rows<'a>(path: &Path, rows: impl IntoIterator<Item = &'a Row>) {
    let line = |(ids, labels): &Row| serde_json::json!({ "input_ids": ids, "labels": labels }).to_string() + "\n";
    fs::write(path, rows.into_iter().map(line).collect::<String>()).expect("rows to be written");
}

/// The bytes of every file of weights in a run's `model/`, by name.
pub fn weight_files(run: &Path) -> Vec<(String, Vec<u8>)> {
    let entries = fs::read_dir(run.join("model")).expect("a model folder").map(|entry| entry.expect("an entry").path());
    let mut files: Vec<_> = entries.filter(|path| path.extension().is_some_and(|e| e == "safetensors")).collect();
    files.sort();
    assert!(!files.is_empty(), "no weights in {}", run.display());
    let name = |path: &Path| path.file_name().expect("a file").to_string_lossy().into_owned();
    files.iter().map(|path| (name(path), fs::read(path).expect("a file of weights"))).collect()
}
