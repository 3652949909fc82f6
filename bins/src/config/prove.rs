//! Two plans, run for some steps on the embedded model: the hash of the whole state after every step is the same or it is
//! not.

use crate::plan::RunPlan;
use crate::{Exit, Failure, Result};
use serde_json::{Value, json};
use std::path::Path;
use std::process::Command;

/// Hash of the state and loss after each step, of both.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct Proof {
    steps: Vec<[(String, f64); 2]>,
}

impl Proof {
    /// Whether every hash is the same.
    pub(super) fn same(&self) -> bool {
        self.steps.iter().all(|[a, b]| a.0 == b.0)
    }

    /// In a sentence; `expected` says whether the files should be the same run.
    pub(super) fn text(&self, expected: bool) -> String {
        let parted = self.steps.iter().position(|[a, b]| a.0 != b.0);
        let last = &self.steps[self.steps.len() - 1];
        match parted {
            None => {
                let how =
                    if expected { "proved on the embedded model" } else { "not to be seen on the embedded model" };
                format!("{how}: equal after each of {} steps, hash {}", self.steps.len(), last[0].0)
            }
            Some(step) => {
                let [a, b] = &self.steps[step];
                format!(
                    "tried on the embedded model: they part in step {step} (loss {} and {}, hash {} and {}); after {} steps the losses are {} and {}",
                    a.1,
                    b.1,
                    a.0,
                    b.0,
                    self.steps.len(),
                    last[0].1,
                    last[1].1
                )
            }
        }
    }

    pub(super) fn to_json(&self) -> Value {
        let step = |[a, b]: &[(String, f64); 2]| json!({ "hash": [a.0, b.0], "loss": [a.1, b.1] });
        json!({ "same": self.same(), "steps": self.steps.iter().map(step).collect::<Vec<_>>() })
    }
}

/// Runs both, each with the flags that its files leave to the command line, in processes of their own, alone: worlds change
/// no bits.
///
/// # Errors
/// A run that fails, with what it said.
pub(super) fn prove(a: (&RunPlan, &[String]), b: (&RunPlan, &[String]), steps: u64) -> Result<Proof> {
    let (a, b) = (hashes(a.0, a.1, steps)?, hashes(b.0, b.1, steps)?);
    Ok(Proof { steps: a.into_iter().zip(b).map(|(a, b)| [a, b]).collect() })
}

/// Flags that this run has its own of.
const PLACE: [&str; 7] =
    ["--stage", "--shard-group", "--reshard-after-forward", "--lanes", "--seq-len", "--steps", "--epochs"];

fn hashes(plan: &RunPlan, flags: &[String], steps: u64) -> Result<Vec<(String, f64)>> {
    let folder = tempfile::tempdir().map_err(|e| Failure::disk("no temporary folder can be made").found(e))?;
    let out = folder.path().join("run");
    let umbra =
        std::env::current_exe().map_err(|e| Failure::new(Exit::Bug, "this program's file is not found").found(e))?;
    let mut command = Command::new(umbra);
    command.args(["train", "--model", "tiny", "--seq-len", "64", "--keep", "0", "--hash-every", "1", "--stage", "3"]);
    command.arg("--lanes").arg(plan.lanes.to_string()).arg("--steps").arg(steps.to_string());
    command.arg("--out").arg(&out).arg("--config");
    command.args(plan.files.layers.iter().map(|layer| layer.file.as_path()));
    command.arg("--assume").args(plan.assume.words());
    let placed = |flag: &&String| !PLACE.contains(&flag.split(' ').next().unwrap_or_default());
    command.args(flags.iter().filter(placed).flat_map(|flag| flag.split(' ')));
    let output =
        command.output().map_err(|e| Failure::new(Exit::Bug, "this program cannot be started again").found(e))?;
    if !output.status.success() {
        let files: Vec<String> = plan.files.layers.iter().map(|layer| layer.file.display().to_string()).collect();
        return Err(Failure::usage("a run to prove it with has failed")
            .at(files.join(", "))
            .found(String::from_utf8_lossy(&output.stderr).trim()));
    }
    read(&out)
}

fn read(out: &Path) -> Result<Vec<(String, f64)>> {
    let path = out.join("metrics.jsonl");
    let text = std::fs::read_to_string(&path)
        .map_err(|e| Failure::disk("metrics cannot be read").at(path.display()).found(e))?;
    let step = |line: &str| {
        let metrics: Value = serde_json::from_str(line).ok()?;
        Some((metrics["state_hash"].as_str()?.to_owned(), metrics["loss"].as_f64().unwrap_or(f64::NAN)))
    };
    let steps: Option<Vec<_>> = text.lines().map(step).collect();
    steps
        .filter(|steps| !steps.is_empty())
        .ok_or_else(|| Failure::new(Exit::Bug, "a run without hashes").at(path.display()))
}
