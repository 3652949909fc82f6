//! The folder around the weights: what belongs in it, whether one that is there may be replaced, and putting it in place.

use super::disk_failure;
use crate::hf::shortened;
use crate::{Failure, Result};
use std::ffi::OsString;
use std::fs::File;
use std::path::{Path, PathBuf};

/// Files carried over from the source folder where it has them. `config.json` and the weights are written anew.
pub const COMPANIONS: [&str; 9] = [
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "added_tokens.json",
];

/// Whether folder `dir` may become the model folder: it is not there, or empty, or holds nothing but files of a model
/// folder that was written before.
///
/// # Errors
/// Exit 7 naming what else is in it.
pub fn check_target(dir: &Path) -> Result<()> {
    let entries = match std::fs::read_dir(dir) {
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(()),
        Err(e) => return Err(disk_failure("the model folder cannot be used", dir, &e)),
        Ok(entries) => entries,
    };
    let mut foreign = Vec::new();
    for entry in entries {
        let entry = entry.map_err(|e| disk_failure("the model folder cannot be used", dir, &e))?;
        let name = entry.file_name().to_string_lossy().into_owned();
        if !(is_ours(&name) && entry.file_type().is_ok_and(|t| t.is_file())) {
            foreign.push(name);
        }
    }
    if foreign.is_empty() {
        return Ok(());
    }
    foreign.sort();
    Err(Failure::disk("the model folder is there and holds something else")
        .at(dir.display())
        .expected("no such folder, an empty one, or a model folder to replace")
        .found(shortened(&foreign))
        .hint("choose another folder, or move these files away"))
}

fn is_ours(name: &str) -> bool {
    let shard = |middle: &str| {
        let digits = |part: &str| part.len() == 5 && part.bytes().all(|b| b.is_ascii_digit());
        middle.split_once("-of-").is_some_and(|(i, n)| digits(i) && digits(n))
    };
    ["config.json", "model.safetensors", "model.safetensors.index.json"].contains(&name)
        || COMPANIONS.contains(&name)
        || name.strip_prefix("model-").and_then(|n| n.strip_suffix(".safetensors")).is_some_and(shard)
}

/// `DIR.partial`: where the folder is written.
pub(super) fn partial(dir: &Path) -> PathBuf {
    beside(dir, ".partial")
}

fn beside(dir: &Path, end: &str) -> PathBuf {
    // A name that ends in `..` has no file name; nobody can be given a sibling then, and the suffix makes a new name in it.
    let mut name = dir.file_name().map_or_else(|| OsString::from("model"), OsString::from);
    name.push(end);
    dir.with_file_name(name)
}

/// Removes a folder that an earlier run left, if it holds only files of ours.
pub(super) fn remove_ours(dir: &Path) -> Result<()> {
    if !dir.exists() {
        return Ok(());
    }
    check_target(dir)?;
    std::fs::remove_dir_all(dir).map_err(|e| disk_failure("an unfinished model folder cannot be removed", dir, &e))
}

/// Name and content of the tokenizer and generation files of folder `source`; without one, of a model over bytes.
///
/// # Errors
/// Exit 3: one that is there and cannot be read.
pub(crate) fn companions(source: Option<&Path>) -> Result<Vec<(String, Vec<u8>)>> {
    let Some(source) = source else {
        let tokenizer = super::json_text(&crate::data::byte_tokenizer_json());
        return Ok(vec![("tokenizer.json".to_owned(), tokenizer.into_bytes())]);
    };
    let there = COMPANIONS.into_iter().filter(|name| source.join(name).is_file());
    there.map(|name| Ok((name.to_owned(), read(&source.join(name))?))).collect()
}

fn read(path: &Path) -> Result<Vec<u8>> {
    std::fs::read(path)
        .map_err(|e| Failure::input("a file of the source model cannot be read").at(path.display()).found(e))
}

/// A text file of the source model.
///
/// # Errors
/// Exit 3: it cannot be read, or is no text.
pub(crate) fn read_text(path: &Path) -> Result<String> {
    String::from_utf8(read(path)?).map_err(|e| {
        Failure::input("a file of the source model is no text").at(path.display()).expected("UTF-8").found(e)
    })
}

/// Makes every file of `dir`, and its list of names, durable.
pub(super) fn sync(dir: &Path) -> Result<()> {
    let failed = |e: std::io::Error| disk_failure("the model folder cannot be synced", dir, &e);
    for entry in std::fs::read_dir(dir).map_err(failed)? {
        let path = entry.map_err(failed)?.path();
        File::open(&path).and_then(|f| f.sync_all()).map_err(failed)?;
    }
    File::open(dir).and_then(|f| f.sync_all()).map_err(failed)
}

/// Renames `DIR.partial` to `DIR`. One that is there is set aside as `DIR.old` first and removed last, so at every moment
/// one whole folder exists under one of the names.
pub(super) fn put_in_place(dir: &Path) -> Result<()> {
    let failed = |e: std::io::Error| disk_failure("the model folder cannot be renamed into place", dir, &e);
    let old = beside(dir, ".old");
    let replaces = dir.exists();
    if replaces {
        check_target(dir)?;
        remove_ours(&old)?;
        std::fs::rename(dir, &old).map_err(failed)?;
    }
    std::fs::rename(partial(dir), dir).map_err(failed)?;
    let parent = dir.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    File::open(parent).and_then(|f| f.sync_all()).map_err(failed)?;
    if replaces {
        remove_ours(&old)?;
    }
    Ok(())
}
