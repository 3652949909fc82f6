//! `umbra checkpoint`: what is in one, whether it is whole, whether two are the same, and a model folder out of one.

mod diff;
mod export;
mod find;
mod inspect;
mod meter;
mod verified;

#[cfg(test)]
mod tests;

use crate::Result;
use crate::cli::{Checkpoint, CheckpointArgs};
use crate::host::{answer, note};
use crate::table::number;
use serde_json::Value;

/// Runs the command on this process alone and prints what it finds. `threads` compute the hashes of `diff`.
///
/// # Errors
/// Exit 3: no checkpoint, a damaged one, or for `diff` two that are not the same state. Exit 6: a weight the dtype of an
/// export cannot hold. Exit 7: an export that the disk refuses, or standard output that cannot be written.
pub fn run(args: &CheckpointArgs, threads: usize) -> Result<()> {
    match &args.what {
        Checkpoint::Inspect(args) => {
            let found = inspect::Inspected::read(&find::newest(&args.dir)?)?;
            answer(&if args.json { found.json() } else { found.text(args.tensors) }).map(drop)
        }
        Checkpoint::Verify(args) => verified::verify_all(&find::all(&args.dir)?, &mut |text| answer(text).map(drop)),
        Checkpoint::Diff(args) => {
            let compared = diff::compare(&find::newest(&args.a)?, &find::newest(&args.b)?, threads)?;
            answer(&compared.text())?;
            compared.verdict()
        }
        Checkpoint::Export(args) => {
            let dir = find::newest(&args.dir)?;
            note(export::export(&dir, &args.out, args.dtype)?);
            answer(&format!("{}\n", args.out.display())).map(drop)
        }
    }
}

/// A setting's value on one line: strings without quotes, small numbers short.
fn plain(value: &Value) -> String {
    match value {
        Value::String(text) => text.clone(),
        Value::Number(n) if n.is_f64() => n.as_f64().map_or_else(|| n.to_string(), number),
        other => other.to_string(),
    }
}
