//! How ranks agree on a failure, so that one message is shown once and every rank leaves with the same exit code.

use crate::{Exit, Failure, Result};
use collectives::{Comm, Error};

/// In front of every rank's report, so that it is not taken for bytes that belong to another step.
const TAG: &[u8] = b"umbra meets:";

/// Calls a rank may be behind the others when one of them fails: more than were ever in flight at once.
const BEHIND: usize = 64;

/// What a rank says whose call met another call of a rank that had already failed.
const PARTED: &str = "the ranks did not make the same call";

/// Every rank brings its result; if any failed, every rank gets the same failure back and nobody goes on alone.
///
/// Called by all ranks at the same places (after start-up, at the end). A rank that failed comes here early: the others
/// learn of it from a call that does not agree, fail and come too. Of several failures, the lowest rank's counts, but one
/// that only says that another rank is gone or elsewhere counts less than one that says why. The text names the rank
/// unless all ranks say the same. If ranks cannot meet any more, each keeps its own failure.
///
/// # Errors
/// The failure that all ranks agree on, or this rank's own (with [`Exit::Lost`] if it had none) if they cannot meet; in
/// that case rank 0 may be the one that is gone, so every rank should print it.
pub fn meet<T>(comm: &Comm, result: Result<T>) -> Result<T> {
    if comm.world() == 1 {
        return result;
    }
    let reports = match exchange(comm, result.as_ref().err()) {
        Ok(reports) => reports,
        Err(error) => return Err(result.err().unwrap_or_else(|| describe(error))),
    };
    match agreed(&reports) {
        None => result,
        Some(failure) => Err(failure),
    }
}

/// Everybody's failure or none, in rank order.
fn exchange(comm: &Comm, failure: Option<&Failure>) -> collectives::Result<Vec<Option<Failure>>> {
    let mut bytes = TAG.to_vec();
    // Strings and numbers always have a JSON form; were it not so, the empty report would read as a failure below.
    bytes.extend(serde_json::to_vec(&failure).unwrap_or_default());
    let mut behind = 0;
    loop {
        match comm.gather_bytes(&bytes) {
            Ok(all) => {
                if let Some(tagged) = all.iter().map(|b| b.strip_prefix(TAG)).collect::<Option<Vec<_>>>() {
                    return Ok(tagged.into_iter().map(read).collect());
                }
            }
            Err(Error::Mismatch { .. }) if behind < BEHIND => {}
            Err(error) => return Err(error),
        }
        // Some rank is still in a step's own call, which just failed for it: it will be here after a few more of them.
        behind += 1;
        if behind > BEHIND {
            return Err(Error::Mismatch { asked: Vec::new() });
        }
    }
}

fn read(report: &[u8]) -> Option<Failure> {
    serde_json::from_slice(report)
        .unwrap_or_else(|e| Some(Failure::new(Exit::Bug, "a rank's report could not be read").found(e)))
}

/// The failure that counts, if there is one.
fn agreed(reports: &[Option<Failure>]) -> Option<Failure> {
    let failures = || reports.iter().enumerate().filter_map(|(rank, f)| Some((rank, f.as_ref()?)));
    let (rank, failure) = failures().min_by_key(|(rank, f)| (is_consequence(f), *rank))?;
    let mut failure = failure.clone();
    if failures().count() < reports.len() || failures().any(|(_, other)| *other != failure) {
        failure.what = format!("on rank {rank}: {}", failure.what);
    }
    Some(failure)
}

/// Whether a failure only says that another rank is gone or elsewhere.
fn is_consequence(failure: &Failure) -> bool {
    failure.exit == Exit::Lost || failure.what == PARTED
}

/// What a failure between ranks means to the user.
pub fn describe(error: Error) -> Failure {
    let text = error.to_string();
    match error {
        Error::Core(core) => describe_core(core),
        Error::Launch { what, hint } => Failure::usage(what).hint(hint),
        Error::PeerDied { .. } => {
            Failure::new(Exit::Lost, text).hint("the first message above this one, or the other nodes' logs, say why")
        }
        Error::Timeout { .. } => Failure::new(Exit::Lost, text)
            .expected("every rank to come to the same call in time")
            .hint("a rank that hangs, swaps or reads from a slow disk; the missing ranks are named if known"),
        Error::Mpi { .. } => {
            Failure::new(Exit::Lost, text).hint("mpirun's own messages, and the network between nodes")
        }
        Error::Mismatch { .. } => Failure::new(Exit::Bug, PARTED)
            .found(text.trim_start_matches(PARTED).trim_start_matches(": "))
            .hint("the same command line and files on every rank"),
        Error::Shape { .. } | Error::DType { .. } | Error::Ended { .. } => bug(text),
    }
}

/// What a failure in a kernel, a buffer or a device means to the user.
pub fn describe_core(error: spmd_core::Error) -> Failure {
    let text = error.to_string();
    match error {
        spmd_core::Error::Memory { .. } => Failure::new(Exit::Memory, text)
            .hint("a smaller --micro-batch or --seq-len, or more ranks to share the state"),
        spmd_core::Error::TokenId { id, vocab, .. } => Failure::input("a token id is not in the model's vocabulary")
            .expected(format!("ids below {vocab}"))
            .found(id)
            .hint("rows made with this model's tokenizer"),
        spmd_core::Error::Device { .. } => Failure::usage(text).hint("--device cpu"),
        spmd_core::Error::Shape { .. } | spmd_core::Error::DType { .. } => bug(text),
    }
}

fn bug(text: String) -> Failure {
    Failure::new(Exit::Bug, text).hint("this is a fault of umbra's: please report it with the command line")
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        describe(error)
    }
}

impl From<spmd_core::Error> for Failure {
    fn from(error: spmd_core::Error) -> Self {
        describe_core(error)
    }
}

#[cfg(test)]
mod tests;
