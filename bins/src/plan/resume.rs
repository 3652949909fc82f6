//! What may change between a checkpoint and the run that goes on from it.

use super::{ModelSource, Origin, RunPlan};
use crate::cli::TrainArgs;
use crate::nearest::nearest;
use crate::{Failure, Result};
use serde_json::Value;
use std::fmt;
use std::path::Path;

/// Settings that never alter the result. `data`, `seq_len` and `truncate` do, but only through the rows they make, which
/// are compared by their hash.
const FREE: [&str; 21] = [
    "threads",
    "log_every",
    "tensorboard",
    "dump",
    "out",
    "resume",
    "world",
    "stage",
    "shard_group",
    "different_bits",
    "recompute",
    "reshard_after_forward",
    "save_every",
    "keep",
    "save_failure",
    "checkpoint_files",
    "hash_every",
    "overrides",
    "data",
    "seq_len",
    "truncate",
];

/// Whether a setting never alters the result.
pub(crate) fn is_free(name: &str) -> bool {
    FREE.contains(&name)
}

/// Settings whose defaults follow another setting, which is compared itself: while nobody sets them, a change of theirs
/// is a consequence and not one more change.
const FOLLOWING: [&str; 5] = ["wire", "reduced", "accumulate", "clip_form", "optimizer_form"];

/// A checkpoint's place in the data counts steps of this many rows, so it cannot change.
const STEP_ROWS: &str = "global_batch";

/// A setting that alters the result and is not what it was.
#[derive(Debug, Clone, PartialEq)]
pub struct Change {
    /// Its name in run.json.
    pub name: String,
    /// Its value in the checkpoint.
    pub old: Value,
    /// Its value now.
    pub new: Value,
}

impl fmt::Display for Change {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {} then, {} now", self.name, self.old, self.new)
    }
}

/// The settings that alter the result and differ between `old`, the `settings` of an earlier [`RunPlan::to_json`], and
/// `new`, in the order of run.json. A setting that the earlier version did not have is left out: there is nothing to
/// compare it with.
pub fn changes(old: &Value, new: &RunPlan) -> Vec<Change> {
    let new = new.to_json();
    let settings = new["settings"].as_object().into_iter().flatten();
    let altering = settings.filter(|(name, _)| !FREE.contains(&name.as_str()));
    let follows = |name: &str, old: &Value, new: &Value| {
        FOLLOWING.contains(&name) && [old, new].iter().all(|setting| setting["from"] == "default")
    };
    altering
        .filter_map(|(name, setting)| Some((name, old.get(name)?, setting)))
        .filter(|(name, old, new)| !follows(name, old, new))
        .filter_map(|(name, old, new)| Some((name, old.get("value")?, &new["value"])))
        .filter(|(name, old, new)| old != new && !(*name == "model" && same_model(old, new)))
        .map(|(name, old, new)| Change { name: name.clone(), old: old.clone(), new: new.clone() })
        .collect()
}

/// Whether two spellings name one folder.
fn same_model(old: &Value, new: &Value) -> bool {
    let folder = |model: &Value| {
        let Ok(ModelSource::Folder(dir)) = serde_json::from_value(model.clone()) else { return None };
        dir.canonicalize().ok()
    };
    folder(old).is_some_and(|dir| folder(new).as_ref() == Some(&dir))
}

/// Allows the changes that `overrides` names and returns them, to be announced. `checkpoint` is the folder that the run
/// goes on from.
///
/// # Errors
/// A usage failure (exit 2) that lists every other change, old and new. A changed number of rows of a step stays one
/// even if it is named: the checkpoint's place in the data counts steps of the old size.
pub fn check(changes: Vec<Change>, overrides: &[String], checkpoint: &Path) -> Result<Vec<Change>> {
    let allowed = |change: &Change| change.name != STEP_ROWS && overrides.contains(&change.name);
    let (allowed, refused): (Vec<Change>, Vec<Change>) = changes.into_iter().partition(allowed);
    if refused.is_empty() {
        return Ok(allowed);
    }
    let place = checkpoint.display();
    let (expected, hint) = match refused.iter().find(|change| change.name == STEP_ROWS) {
        Some(rows) => (
            "as many rows a step as before: the checkpoint's place in the data counts such steps",
            format!("--global-batch {}, or a new run from its weights: --model {place} and another --out", rows.old),
        ),
        None => {
            let names: Vec<&str> = refused.iter().map(|change| change.name.as_str()).collect();
            ("the settings that the checkpoint was made with", format!("--override {}", names.join(" ")))
        }
    };
    let found: Vec<String> = refused.iter().map(ToString::to_string).collect();
    Err(Failure::usage("settings that alter the result are not those of the checkpoint")
        .at(place)
        .expected(expected)
        .found(found.join("\n"))
        .hint(hint))
}

/// The names of settings that `--override` gives, as run.json spells them. A flag's name stands for what it sets, with or
/// without its leading dashes.
///
/// # Errors
/// A usage failure naming the nearest setting if there is none of that name.
pub(super) fn overrides(written: &[String], settings: &[(&'static str, Origin)]) -> Result<Vec<String>> {
    let mut names = Vec::new();
    for text in written {
        let name = setting_of(text);
        if name != "world" && !settings.iter().any(|(known, _)| *known == name) {
            return Err(unknown(text, &name, settings));
        }
        if !names.contains(&name) {
            names.push(name);
        }
    }
    Ok(names)
}

/// The name in run.json of what a flag sets: `--learning-rate`, `learning-rate` and `learning_rate` set `lr`; what is no
/// flag keeps its name.
pub(crate) fn setting_of(text: &str) -> String {
    let flag = text.trim_start_matches('-').replace('_', "-");
    let field = TrainArgs::field_of(&flag).unwrap_or_else(|| flag.replace('-', "_"));
    match field.as_str() {
        "steps" | "epochs" => "length".to_owned(),
        "warmup_steps" | "warmup_ratio" => "warmup".to_owned(),
        "no_shuffle" => "shuffle".to_owned(),
        "allow_different_bits" => "different_bits".to_owned(),
        _ => field,
    }
}

fn unknown(text: &str, name: &str, settings: &[(&'static str, Origin)]) -> Failure {
    let altering = || settings.iter().map(|(known, _)| *known).filter(|known| !FREE.contains(known));
    let slip = nearest(name, altering());
    let mut names: Vec<&str> = altering().filter(|known| *known != STEP_ROWS).collect();
    names.sort_unstable();
    let hint = match slip {
        Some(known) => format!("did you mean --override {known}?"),
        None => "run.json of the run has every setting by name".to_owned(),
    };
    Failure::usage(format!("--override {text}: there is no such setting"))
        .at("--override")
        .expected(format!("one of {}", names.join(", ")))
        .found(text)
        .hint(hint)
}

#[cfg(test)]
mod tests;
