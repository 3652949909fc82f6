//! The folder of checkpoints: which are complete, which are removed, and how one gets its name.
//!
//! `step-NNNNNN` is complete; `step-NNNNNN.partial` is being written; `step-NNNNNN.removed` is being removed. A folder in
//! which something else lies than a checkpoint's own files is never removed.

use super::format::STATE_FILE;
use crate::hf::save::{COMPANIONS, disk_failure};
use crate::hf::shortened;
use crate::{Failure, Result};
use std::fs::{self, File};
use std::io::{self, ErrorKind};
use std::path::{Path, PathBuf};

/// The end of an unfinished checkpoint's name.
const PARTIAL: &str = ".partial";
/// The end of the name of one that is being removed.
const REMOVED: &str = ".removed";
/// Digits of a step in a name, at least.
const DIGITS: usize = 6;

/// The folder of checkpoints in a run's output folder.
fn checkpoints(out_dir: &Path) -> PathBuf {
    out_dir.join("checkpoints")
}

/// The folder of the complete checkpoint after `step` steps.
pub(crate) fn complete(out_dir: &Path, step: u64) -> PathBuf {
    checkpoints(out_dir).join(format!("step-{step:0DIGITS$}"))
}

/// The folder in which it is written.
pub(super) fn partial(out_dir: &Path, step: u64) -> PathBuf {
    with_end(&complete(out_dir, step), PARTIAL)
}

fn with_end(dir: &Path, end: &str) -> PathBuf {
    let mut name = dir.as_os_str().to_owned();
    name.push(end);
    PathBuf::from(name)
}

/// The step of a name `step-NNNNNN`, as it is spelled by this program.
fn step_of(name: &str) -> Option<u64> {
    let digits = name.strip_prefix("step-")?;
    let step = digits.parse().ok()?;
    (digits == format!("{step:0DIGITS$}")).then_some(step)
}

/// Whether `dir` is a checkpoint: the file that says so is there.
pub fn is_checkpoint(dir: &Path) -> bool {
    dir.join(STATE_FILE).is_file()
}

/// The complete checkpoints of a run, newest first, with their steps. Nothing is read of them.
///
/// # Errors
/// Exit 7: the folder is there and cannot be listed.
pub fn list(out_dir: &Path) -> Result<Vec<(u64, PathBuf)>> {
    let mut found: Vec<(u64, PathBuf)> =
        folders(out_dir)?.into_iter().filter_map(|(name, path)| Some((step_of(&name)?, path))).collect();
    found.sort_unstable_by(|a, b| b.cmp(a));
    Ok(found)
}

/// Name and path of every folder among the checkpoints.
fn folders(out_dir: &Path) -> Result<Vec<(String, PathBuf)>> {
    let dir = checkpoints(out_dir);
    let failed = |e: io::Error| disk_failure("the folder of checkpoints cannot be read", &dir, &e);
    let entries = match fs::read_dir(&dir) {
        Err(e) if e.kind() == ErrorKind::NotFound => return Ok(Vec::new()),
        entries => entries.map_err(failed)?,
    };
    let mut found = Vec::new();
    for entry in entries {
        let entry = entry.map_err(failed)?;
        if entry.file_type().map_err(failed)?.is_dir() {
            found.push((entry.file_name().to_string_lossy().into_owned(), entry.path()));
        }
    }
    Ok(found)
}

/// Rank 0: removes the oldest complete checkpoints of which there are more than `n`, and returns those it removed. The
/// newest stays in any case, and so do `in_use` (the one a run was resumed from) and one that holds files that are not a
/// checkpoint's: it is somebody's by now. They are not counted.
///
/// # Errors
/// Exit 7: the disk refuses. What is half removed has another name and is no checkpoint any more.
pub fn keep(out_dir: &Path, n: usize, in_use: Option<&Path>) -> Result<Vec<PathBuf>> {
    let in_use = in_use.and_then(|dir| fs::canonicalize(dir).ok());
    let is_used = |dir: &Path| in_use.is_some() && fs::canonicalize(dir).ok() == in_use;
    let complete = list(out_dir)?;
    let mut ours = Vec::new();
    for (_, dir) in &complete {
        if !is_used(dir) && foreign(dir)?.is_empty() {
            ours.push(dir);
        }
    }
    let newest = complete.first().map(|(_, dir)| dir);
    let mut removed = Vec::new();
    for dir in ours.into_iter().skip(n).filter(|dir| Some(*dir) != newest) {
        remove(dir)?;
        removed.push(dir.clone());
    }
    Ok(removed)
}

/// Rank 0: removes what unfinished saves and removals have left, and returns what it removed.
///
/// # Errors
/// Exit 7: the disk refuses.
pub fn clean(out_dir: &Path) -> Result<Vec<PathBuf>> {
    let mut removed = Vec::new();
    for (name, dir) in folders(out_dir)? {
        let ended = [PARTIAL, REMOVED].into_iter().find_map(|end| name.strip_suffix(end));
        if ended.and_then(step_of).is_some() && foreign(&dir)?.is_empty() {
            remove_all(&dir)?;
            removed.push(dir);
        }
    }
    Ok(removed)
}

/// Rank 0, when a run goes on after `step` steps: gives the complete checkpoints of later steps, which will be made again,
/// another name, and returns the new ones. They are not removed: whoever chose to go back may want them.
///
/// # Errors
/// Exit 7: the disk refuses.
pub fn set_aside(out_dir: &Path, step: u64) -> Result<Vec<PathBuf>> {
    let mut aside = Vec::new();
    for (_, dir) in list(out_dir)?.into_iter().filter(|(later, _)| *later > step) {
        let mut names = (1..).map(|n| with_end(&dir, &format!(".aside-{n}")));
        // An endless range has a number that is not taken.
        let Some(name) = names.find(|name| !name.exists()) else { continue };
        fs::rename(&dir, &name).map_err(|e| disk_failure("a later checkpoint cannot be set aside", &dir, &e))?;
        aside.push(name);
    }
    Ok(aside)
}

/// The names in `dir` that no file of a checkpoint has.
fn foreign(dir: &Path) -> Result<Vec<String>> {
    let failed = |e: io::Error| disk_failure("a checkpoint's folder cannot be read", dir, &e);
    let mut found = Vec::new();
    for entry in fs::read_dir(dir).map_err(failed)? {
        let entry = entry.map_err(failed)?;
        let name = entry.file_name().to_string_lossy().into_owned();
        if !(is_ours(&name) && entry.file_type().map_err(failed)?.is_file()) {
            found.push(name);
        }
    }
    found.sort();
    Ok(found)
}

fn is_ours(name: &str) -> bool {
    let tensors = || {
        let stem = name.strip_suffix(".safetensors").or_else(|| name.strip_suffix(".safetensors.index.json"));
        let digits = |part: &str| part.len() >= 5 && part.bytes().all(|b| b.is_ascii_digit());
        let of = |part: &str| part.split_once("-of-").is_some_and(|(i, n)| digits(i) && digits(n));
        stem.is_some_and(|stem| {
            ["model", "shadow", "exp_avg", "exp_avg_sq", "rank"].into_iter().any(|role| {
                stem.strip_prefix(role).is_some_and(|end| end.is_empty() || end.strip_prefix('-').is_some_and(of))
            })
        })
    };
    name == STATE_FILE || name == "config.json" || COMPANIONS.contains(&name) || tensors()
}

/// Removes a complete checkpoint. It loses its name first and for good, so that a half-removed one is never taken for it.
fn remove(dir: &Path) -> Result<()> {
    let removed = with_end(dir, REMOVED);
    remove_partial(&removed)?;
    fs::rename(dir, &removed)
        .and_then(|()| sync_parent(dir))
        .map_err(|e| disk_failure("an old checkpoint cannot be renamed to be removed", dir, &e))?;
    remove_all(&removed)
}

/// Removes an unfinished checkpoint, if it is there.
pub(super) fn remove_partial(dir: &Path) -> Result<()> {
    if !dir.exists() {
        return Ok(());
    }
    let foreign = foreign(dir)?;
    if foreign.is_empty() {
        return remove_all(dir);
    }
    Err(Failure::disk("an unfinished checkpoint holds something else, so it is not removed")
        .at(dir.display())
        .expected("files of a checkpoint and nothing else")
        .found(shortened(&foreign))
        .hint("move these files away, or choose another folder with --out"))
}

fn remove_all(dir: &Path) -> Result<()> {
    fs::remove_dir_all(dir).map_err(|e| disk_failure("a folder among the checkpoints cannot be removed", dir, &e))
}

/// Renames the finished `partial` to `dir` and makes that durable. A checkpoint of the same step, of a history that was
/// left behind, makes room first.
pub(super) fn put_in_place(partial: &Path, dir: &Path) -> io::Result<()> {
    let old = with_end(dir, REMOVED);
    let replaces = dir.exists();
    if replaces {
        // A removal that was interrupted may have left one of that name; one that holds more stops the renaming.
        if old.exists() && foreign(&old).is_ok_and(|names| names.is_empty()) {
            fs::remove_dir_all(&old)?;
        }
        fs::rename(dir, &old)?;
    }
    fs::rename(partial, dir)?;
    sync_parent(dir)?;
    if replaces {
        // The new one stands; what is left of the old one bears a name that `clean` knows.
        let _ = foreign(&old).is_ok_and(|names| names.is_empty()).then(|| fs::remove_dir_all(&old));
    }
    Ok(())
}

/// Makes the list of names of a folder durable.
pub(super) fn sync(dir: &Path) -> io::Result<()> {
    // The empty path is the working folder; it only cannot be opened by that name.
    let dir = if dir.as_os_str().is_empty() { Path::new(".") } else { dir };
    File::open(dir)?.sync_all()
}

fn sync_parent(dir: &Path) -> io::Result<()> {
    dir.parent().map_or(Ok(()), sync)
}

/// Bytes that this user can still write on the file system of `path`, which need not exist yet.
///
/// # Errors
/// What the operating system says.
pub fn free_bytes(path: &Path) -> io::Result<u64> {
    let there = path.ancestors().find(|p| p.exists()).filter(|p| !p.as_os_str().is_empty());
    let stat = rustix::fs::statvfs(there.unwrap_or(Path::new(".")))?;
    Ok(stat.f_bavail.saturating_mul(stat.f_frsize))
}
