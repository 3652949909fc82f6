//! `umbra report`: runs side by side, as a table and as a picture of their loss curves.

use crate::cli::ReportArgs;
use crate::host::{answer, note};
use crate::metrics::median;
use crate::table::{Align, number, render};
use crate::{Failure, Result, svg};
use serde::{Deserialize, Deserializer};
use serde_json::Value;
use std::fs;
use std::io::ErrorKind;
use std::path::Path;

/// Steps at the end of a run whose mean stands for where it arrived: one step's loss depends on its rows.
const LAST: usize = 10;
/// A run is smoothed over about this share of its steps, which leaves the course visible and not the rows.
const SMOOTH_SHARE: usize = 30;

/// What the report needs of a line of `metrics.jsonl`. The writer says null for what is not finite or not there.
#[derive(Debug, Clone, Copy, PartialEq, Deserialize)]
struct Step {
    step: u64,
    // With a function of its own a field may be null but not missing.
    #[serde(deserialize_with = "nullable")]
    loss: Option<f64>,
    swallowed: Option<f64>,
    arrived: Option<f64>,
    tps: Option<f64>,
}

fn nullable<'de, D: Deserializer<'de>>(value: D) -> Result<Option<f64>, D::Error> {
    Option::deserialize(value)
}

/// One run folder, read.
#[derive(Debug)]
struct Run {
    /// The folder as it was written.
    name: String,
    policy: String,
    lr: f64,
    /// The length that was asked for.
    planned: u64,
    steps: Vec<Step>,
}

/// Prints the table of the runs and, if asked, draws their curves.
///
/// # Errors
/// A bad run folder (exit 3), or a picture or standard output that cannot be written (exit 7).
pub fn report(args: &ReportArgs) -> Result<()> {
    let runs = args.runs.iter().map(|dir| Run::read(dir)).collect::<Result<Vec<_>>>()?;
    answer(&table(&runs))?;
    let Some(path) = &args.svg else { return Ok(()) };
    draw(&runs, path)?;
    note(format_args!("loss curves: {}", path.display()));
    Ok(())
}

fn draw(runs: &[Run], path: &Path) -> Result<()> {
    let (title, curves) = curves(runs);
    svg::loss_curves(path, &title, &curves)
}

impl Run {
    fn read(dir: &Path) -> Result<Run> {
        if !dir.is_dir() {
            return Err(Failure::input("there is no such run folder")
                .at(dir.display())
                .expected("the folder that a run was given with --out")
                .found(if dir.exists() { "a file" } else { "nothing" })
                .hint("the folder that holds run.json and metrics.jsonl"));
        }
        let path = dir.join("run.json");
        let run: Value = serde_json::from_str(&read(&path)?).map_err(|e| damaged(&path, e))?;
        let setting = |name: &str| &run["settings"][name]["value"];
        let (Some(policy), Some(lr), Some(planned)) =
            (setting("policy").as_str(), setting("lr").as_f64(), run["steps"].as_u64())
        else {
            return Err(damaged(&path, "no policy, learning rate or number of steps"));
        };
        let (policy, name) = (policy.to_owned(), dir.display().to_string());
        Ok(Run { name, policy, lr, planned, steps: read_steps(&dir.join("metrics.jsonl"))? })
    }

    /// The mean of what `value` says about the last steps, as far as it says anything.
    fn mean_at_end(&self, value: impl Fn(&Step) -> Option<f64>) -> Option<f64> {
        mean(self.steps.iter().rev().take(LAST).filter_map(value))
    }

    fn row(&self) -> Vec<String> {
        let or_none = |x: Option<f64>, form: fn(f64) -> String| x.map_or("none".to_owned(), form);
        let done = self.steps.len() as u64;
        let speeds: Vec<f64> = self.steps.iter().filter_map(|s| s.tps).collect();
        vec![
            self.name.clone(),
            self.policy.clone(),
            number(self.lr),
            if done == self.planned { done.to_string() } else { format!("{done}/{}", self.planned) },
            or_none(self.steps.first().and_then(|s| s.loss), |x| format!("{x:.4}")),
            or_none(self.mean_at_end(|s| s.loss), |x| format!("{x:.4}")),
            or_none(self.mean_at_end(|s| s.swallowed), |x| format!("{:.1}%", x * 100.0)),
            or_none(self.mean_at_end(|s| s.arrived), |x| format!("{x:.3}")),
            or_none(median(&speeds), |x| format!("{x:.0}")),
        ]
    }
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

fn damaged(path: &Path, found: impl std::fmt::Display) -> Failure {
    Failure::input("run.json of this run is damaged")
        .at(path.display())
        .expected("the settings of a run, as `umbra train` writes them")
        .found(found)
        .hint("run it again into another folder")
}

fn read_steps(path: &Path) -> Result<Vec<Step>> {
    let text = read(path)?;
    let steps = text.lines().zip(1..).map(|(line, n)| {
        serde_json::from_str(line).map_err(|e| {
            Failure::input("a line of the metrics is broken")
                .at(format_args!("{}:{n}", path.display()))
                .expected("one JSON object with at least step and loss")
                .found(e)
                .hint("remove that line if the run was stopped while it wrote, or run it again")
        })
    });
    let steps = steps.collect::<Result<Vec<Step>>>()?;
    if steps.is_empty() {
        return Err(Failure::input("the run has no metrics yet")
            .at(path.display())
            .expected("a line for every step")
            .found("an empty file")
            .hint("wait for its first step"));
    }
    Ok(steps)
}

fn table(runs: &[Run]) -> String {
    let head = ["run", "policy", "lr", "steps", "first loss", "final loss", "swallowed", "arrived", "tokens/s"];
    let mut rows = vec![head.map(str::to_owned).to_vec()];
    rows.extend(runs.iter().map(Run::row));
    let aligns = [&[Align::Left; 2][..], &[Align::Right; 7]].concat();
    render(&aligns, &rows)
        + &format!("Final loss, swallowed and arrived are means of the last {LAST} steps, tokens/s is the median.\n")
}

/// The picture's title and a smoothed curve for each run.
fn curves(runs: &[Run]) -> (String, Vec<svg::Curve>) {
    let longest = runs.iter().map(|run| run.steps.len()).max().unwrap_or(0);
    let reach = longest / SMOOTH_SHARE / 2;
    let title = match reach {
        0 => "Training loss".to_owned(),
        _ => format!("Training loss, running mean over {} steps", 2 * reach + 1),
    };
    let own_name = |run: &Run| Path::new(&run.name).file_name().map(|n| n.to_string_lossy().into_owned());
    let names: Vec<String> = runs.iter().map(|run| own_name(run).unwrap_or_else(|| run.name.clone())).collect();
    let unique = |name: &String| names.iter().filter(|other| *other == name).count() == 1;
    let curve = |(run, name): (&Run, &String)| {
        let name = if unique(name) { name } else { &run.name };
        (name.clone(), smooth(&run.steps, reach))
    };
    (title, runs.iter().zip(&names).map(curve).collect())
}

/// Every step's loss, averaged over `reach` steps on both sides, at the beginning over fewer, so that a curve starts at the
/// first loss itself, and at the end over those there are. A loss that is not finite stays a gap.
fn smooth(steps: &[Step], reach: usize) -> Vec<(f64, f64)> {
    let at = |i: usize| {
        let reach = reach.min(i);
        let around = mean(steps[i - reach..steps.len().min(i + reach + 1)].iter().filter_map(|s| s.loss));
        (steps[i].step as f64, steps[i].loss.and(around).unwrap_or(f64::NAN))
    };
    (0..steps.len()).map(at).collect()
}

fn mean(values: impl Iterator<Item = f64>) -> Option<f64> {
    let (sum, n) = values.fold((0.0, 0_u32), |(sum, n), x| (sum + x, n + 1));
    (n > 0).then(|| sum / f64::from(n))
}

#[cfg(test)]
mod tests;
