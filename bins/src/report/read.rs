//! A run folder, read.

use crate::metrics::median;
use crate::{Failure, Result};
use serde::{Deserialize, Deserializer};
use serde_json::Value;
use std::fmt::Display;
use std::fs;
use std::io::ErrorKind;
use std::path::Path;

/// Steps at the end of a run whose mean stands for where it arrived: one step's loss depends on its rows.
pub(super) const LAST: usize = 10;

/// What the report needs of a line of `metrics.jsonl`. The writer says null for what is not finite or not there.
#[derive(Debug, Clone, Copy, Default, PartialEq, Deserialize)]
pub(super) struct Step {
    pub(super) step: u64,
    // With a function of its own a field may be null but not missing.
    #[serde(deserialize_with = "nullable")]
    pub(super) loss: Option<f64>,
    pub(super) grad_norm: Option<f64>,
    pub(super) lr: Option<f64>,
    pub(super) swallowed: Option<f64>,
    pub(super) arrived: Option<f64>,
    pub(super) tps: Option<f64>,
    pub(super) mem_gib: Option<f64>,
    pub(super) mem_plan_gib: Option<f64>,
}

fn nullable<'de, D: Deserializer<'de>>(value: D) -> Result<Option<f64>, D::Error> {
    Option::deserialize(value)
}

/// One run folder, read.
#[derive(Debug, Clone)]
pub(super) struct Run {
    /// The folder as it was written.
    pub(super) name: String,
    /// `run.json` as it is.
    pub(super) facts: Value,
    pub(super) policy: String,
    pub(super) lr: f64,
    /// The length that was asked for.
    pub(super) planned: u64,
    pub(super) finished: bool,
    pub(super) steps: Vec<Step>,
}

/// A run in numbers, as far as it says anything. Loss, swallowed and arrived are means of the last [`LAST`] steps.
#[derive(Debug, Clone, Copy, PartialEq)]
pub(super) struct Summary {
    pub(super) first_loss: Option<f64>,
    pub(super) final_loss: Option<f64>,
    pub(super) swallowed: Option<f64>,
    pub(super) arrived: Option<f64>,
    /// The median.
    pub(super) tps: Option<f64>,
    /// The largest.
    pub(super) memory: Option<f64>,
}

impl Run {
    pub(super) fn read(dir: &Path) -> Result<Run> {
        if !dir.is_dir() {
            return Err(Failure::input("there is no such run folder")
                .at(dir.display())
                .expected("the folder that a run was given with --out")
                .found(if dir.exists() { "a file" } else { "nothing" })
                .hint("the folder that holds run.json and metrics.jsonl"));
        }
        let path = dir.join("run.json");
        let facts: Value = serde_json::from_str(&read(&path)?).map_err(|e| damaged(&path, e))?;
        let setting = |name: &str| &facts["settings"][name]["value"];
        let (Some(policy), Some(lr), Some(planned)) =
            (setting("policy").as_str(), setting("lr").as_f64(), facts["steps"].as_u64())
        else {
            return Err(damaged(&path, "no policy, learning rate or number of steps"));
        };
        let (policy, name) = (policy.to_owned(), dir.display().to_string());
        let finished = facts["finished"] == Value::Bool(true);
        let steps = read_steps(&dir.join("metrics.jsonl"))?;
        Ok(Run { name, policy, lr, planned, finished, steps, facts })
    }

    /// The steps that were made, of those that were asked for if they are others.
    pub(super) fn progress(&self) -> String {
        let done = self.steps.len() as u64;
        if done == self.planned { done.to_string() } else { format!("{done}/{}", self.planned) }
    }

    /// How it ended, and where it was gone on with.
    pub(super) fn state(&self) -> String {
        let mut state = if self.finished { "finished" } else { "unfinished" }.to_owned();
        let resumed = self.facts["resumed"].as_array().into_iter().flatten();
        let steps: Vec<String> = resumed.filter_map(|r| r["step"].as_u64()).map(|step| step.to_string()).collect();
        if !steps.is_empty() {
            state += &format!(", resumed at {}", steps.join(", "));
        }
        state
    }

    pub(super) fn summary(&self) -> Summary {
        let speeds: Vec<f64> = self.steps.iter().filter_map(|s| s.tps).collect();
        Summary {
            first_loss: self.steps.first().and_then(|s| s.loss),
            final_loss: self.mean_at_end(|s| s.loss),
            swallowed: self.mean_at_end(|s| s.swallowed),
            arrived: self.mean_at_end(|s| s.arrived),
            tps: median(&speeds),
            memory: self.steps.iter().filter_map(|s| s.mem_gib).reduce(f64::max),
        }
    }

    /// The mean of what `value` says about the last steps.
    fn mean_at_end(&self, value: impl Fn(&Step) -> Option<f64>) -> Option<f64> {
        let values = self.steps.iter().rev().take(LAST).filter_map(value);
        let (sum, n) = values.fold((0.0, 0_u32), |(sum, n), x| (sum + x, n + 1));
        (n > 0).then(|| sum / f64::from(n))
    }
}

/// What the runs are called: the last part of each folder's name, unless two have the same.
pub(super) fn names(runs: &[Run]) -> Vec<String> {
    let own = |run: &Run| Path::new(&run.name).file_name().map(|n| n.to_string_lossy().into_owned());
    let names: Vec<String> = runs.iter().map(|run| own(run).unwrap_or_else(|| run.name.clone())).collect();
    let unique = |name: &String| names.iter().filter(|other| *other == name).count() == 1;
    runs.iter().zip(&names).map(|(run, name)| if unique(name) { name } else { &run.name }.clone()).collect()
}

fn read(path: &Path) -> Result<String> {
    fs::read_to_string(path).map_err(|e| {
        let missing = e.kind() == ErrorKind::NotFound;
        Failure::input(if missing { "the folder holds no run" } else { "a file of the run cannot be read" })
            .at(path.display())
            .expected("a file that `umbra train` has written")
            .found(if missing { "nothing".to_owned() } else { e.to_string() })
            .hint("the folder that a run was given with --out; a run that failed before its first step leaves none")
    })
}

fn damaged(path: &Path, found: impl Display) -> Failure {
    Failure::input("run.json of this run is damaged")
        .at(path.display())
        .expected("the settings of a run, as `umbra train` writes them")
        .found(found)
        .hint("run it again into another folder")
}

fn read_steps(path: &Path) -> Result<Vec<Step>> {
    let text = read(path)?;
    let mut steps = Vec::new();
    for (line, n) in text.split_inclusive('\n').zip(1..) {
        match serde_json::from_str(line) {
            Ok(step) => steps.push(step),
            // The last line of a run that writes it just now, or was stopped while it did.
            Err(_) if !line.ends_with('\n') => {}
            Err(e) => {
                return Err(Failure::input("a line of the metrics is broken")
                    .at(format_args!("{}:{n}", path.display()))
                    .expected("one JSON object with at least step and loss")
                    .found(e)
                    .hint("remove that line, or run it again"));
            }
        }
    }
    if steps.is_empty() {
        return Err(Failure::input("the run has no metrics yet")
            .at(path.display())
            .expected("a line for every step")
            .found("an empty file")
            .hint("wait for its first step"));
    }
    Ok(steps)
}
