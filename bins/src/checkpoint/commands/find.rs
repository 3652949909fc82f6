//! Which checkpoint a path means, and what lies there if it means none.

use crate::checkpoint::{STATE_FILE, is_checkpoint, list};
use crate::hf::shortened;
use crate::host::note;
use crate::{Failure, Result};
use std::path::{Path, PathBuf};

/// `dir` itself if it is a checkpoint; of a run's output folder, or the folder of its checkpoints, every complete one,
/// newest first. Never empty.
///
/// # Errors
/// Exit 3: there is none, and what is there instead. Exit 7: a folder that cannot be listed.
pub(super) fn all(dir: &Path) -> Result<Vec<PathBuf>> {
    if is_checkpoint(dir) {
        return Ok(vec![dir.to_owned()]);
    }
    if !dir.is_dir() {
        return Err(not_a_checkpoint(dir));
    }
    let mut found = list(dir)?;
    if found.is_empty() && dir.file_name().is_some_and(|name| name == "checkpoints") {
        found = dir.parent().map_or(Ok(found), list)?;
    }
    if found.is_empty() {
        return Err(not_a_checkpoint(dir));
    }
    Ok(found.into_iter().map(|(_, path)| path).collect())
}

/// The first of [`all`]; says which if it is not `dir` itself.
///
/// # Errors
/// As [`all`].
pub(super) fn newest(dir: &Path) -> Result<PathBuf> {
    // `all` returns no empty list.
    let newest = all(dir)?.into_iter().next().unwrap_or_else(|| dir.to_owned());
    if newest != dir {
        note(format_args!("{}: the newest complete checkpoint is {}", dir.display(), newest.display()));
    }
    Ok(newest)
}

fn not_a_checkpoint(dir: &Path) -> Failure {
    let (found, hint) = instead(dir);
    Failure::input("this is not a checkpoint")
        .at(dir.display())
        .expected("checkpoints/step-NNNNNN of a run, or the output folder of a run that has one")
        .found(found)
        .hint(hint)
}

/// What `dir` is, and what to do about it.
fn instead(dir: &Path) -> (String, &'static str) {
    if !dir.is_dir() {
        return match dir.exists() {
            true => ("a file".to_owned(), "give the folder of the checkpoint"),
            false => ("nothing".to_owned(), "check the path; a run keeps its checkpoints in checkpoints/ of --out"),
        };
    }
    let names = names(dir);
    let has = |name: &str| names.iter().any(|n| n == name);
    let weights = |start: &str| names.iter().any(|n| n.starts_with(start) && n.ends_with(".safetensors"));
    let name = dir.file_name().map_or_else(String::new, |name| name.to_string_lossy().into_owned());
    if name.ends_with(".partial") || name.ends_with(".removed") {
        let what = if name.ends_with(".partial") { "an unfinished checkpoint" } else { "a checkpoint being removed" };
        let hint = "use a complete one: `umbra checkpoint inspect` of the run's output folder takes the newest";
        return (format!("{what}, without {STATE_FILE}"), hint);
    }
    if has("run.json") || has("checkpoints") {
        let begun = names_ending(&dir.join("checkpoints"), ".partial");
        let begun = if begun.is_empty() { String::new() } else { format!(": only {}", shortened(&begun)) };
        let hint = "a run saves one at its end, and with --save-every N on the way; with --keep 0 it keeps none";
        return (format!("the folder of a run without a complete checkpoint{begun}"), hint);
    }
    if ["shadow", "exp_avg", "rank-"].into_iter().any(weights) {
        return (format!("tensors of a checkpoint without {STATE_FILE}"), crate::checkpoint::format::DAMAGED);
    }
    if has("config.json") && weights("model") {
        let hint = "it is what export makes; checkpoints are in the checkpoints/ folder of a run's output";
        return ("a model folder: weights without the optimizer's state".to_owned(), hint);
    }
    match names.is_empty() {
        true => ("an empty folder".to_owned(), "check the path"),
        false => (format!("a folder with {}", shortened(&names)), "check the path"),
    }
}

/// The sorted names in a folder, as far as it can be listed.
fn names(dir: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(dir).into_iter().flatten().flatten();
    let mut names: Vec<String> = entries.map(|e| e.file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    names
}

fn names_ending(dir: &Path, end: &str) -> Vec<String> {
    names(dir).into_iter().filter(|name| name.ends_with(end)).collect()
}
