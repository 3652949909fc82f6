//! `umbra checkpoint verify`.

use super::meter::Meter;
use crate::checkpoint::read::read_state;
use crate::checkpoint::{STATE_FILE, verify};
use crate::table::bytes;
use crate::{Failure, Result};
use std::path::{Path, PathBuf};

/// Compares every byte of the checkpoints in `dirs` (newest first, as they are found) and says for each that it is right,
/// or every fault of it, oldest checkpoint first.
///
/// # Errors
/// Exit 3: at least one of them is damaged; all have been looked at then.
pub(super) fn verify_all(dirs: &[PathBuf], say: &mut dyn FnMut(&str) -> Result<()>) -> Result<()> {
    let (mut damaged, mut faults) = (Vec::new(), 0);
    for dir in dirs.iter().rev() {
        let shown = dir.display();
        match verify_one(dir) {
            Ok(Checked::Right(text)) if dirs.len() == 1 => say(&format!("ok: {text}\n"))?,
            Ok(Checked::Right(text)) => say(&format!("{shown}: ok: {text}\n"))?,
            // A run that goes on removes old checkpoints; one that is gone is not damaged.
            Ok(Checked::Wrong(_)) | Err(_) if dirs.len() > 1 && !dir.exists() => {
                say(&format!("{shown}: removed meanwhile\n"))?;
            }
            Ok(Checked::Wrong(found)) => {
                faults += found.len();
                damaged.push(shown.to_string());
                say(&found.iter().map(|fault| format!("{shown}: {fault}\n")).collect::<String>())?;
            }
            // One without a state leaves the others to be looked at.
            Err(failure) if dirs.len() > 1 => {
                faults += 1;
                damaged.push(shown.to_string());
                let found = failure.found.map_or(String::new(), |found| format!(": {found}"));
                say(&format!("{shown}: {STATE_FILE}: {}{found}\n", failure.what))?;
            }
            Err(failure) => return Err(failure),
        }
    }
    if damaged.is_empty() {
        return Ok(());
    }
    let what = if dirs.len() == 1 { "the checkpoint is damaged" } else { "checkpoints of the run are damaged" };
    Err(Failure::input(what)
        .at(damaged.join("\n"))
        .expected("every file and every byte as it was written")
        .found(format!("{faults} fault(s), in {} of {} checkpoint(s)", damaged.len(), dirs.len()))
        .hint("copy it again from where it is whole, or go on from an earlier one with --resume DIR"))
}

/// What came of one checkpoint.
enum Checked {
    /// Files, bytes and checksums.
    Right(String),
    /// Every fault.
    Wrong(Vec<String>),
}

fn verify_one(dir: &Path) -> Result<Checked> {
    let state = read_state(dir)?;
    let mut meter = Meter::new(format!("verifying {}", dir.display()));
    let faults = verify(dir, &mut |done, total| meter.at(done, total))?;
    drop(meter);
    if !faults.is_empty() {
        return Ok(Checked::Wrong(faults.iter().map(ToString::to_string).collect()));
    }
    let own = std::fs::metadata(dir.join(STATE_FILE)).map_or(0, |m| m.len());
    // The state file counts as one more of each: it has a checksum of its own.
    let (files, sums) = (state.files.len() + 1, state.chunks.len() + state.plain.len() + 1);
    Ok(Checked::Right(format!("{files} files, {}, {sums} checksums", bytes(state.bytes() + own))))
}
