//! The error every operation of this crate returns.

use spmd_core::DType;
use std::fmt;

/// What went wrong between ranks.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum Error {
    /// A length, rank or group that does not fit the operation, found before anything was sent.
    #[error("{op}: {what} is {found}, expected {expected}")]
    Shape {
        /// The operation that refused.
        op: &'static str,
        /// The argument at fault.
        what: &'static str,
        /// What it should have been.
        expected: String,
        /// What it was.
        found: String,
    },
    /// Send and receive buffers of different dtypes, found before anything was sent.
    #[error("{op}: the send buffer is {send} and the receive buffer {recv}; they must have one dtype")]
    DType {
        /// The operation that refused.
        op: &'static str,
        /// Dtype of the send buffer.
        send: DType,
        /// Dtype of the receive buffer.
        recv: DType,
    },
    /// The ranks are not in the same call: a different operation, group, dtype, length or root at the same place in the
    /// order.
    #[error("the ranks did not make the same call: {}", Grouped(asked))]
    Mismatch {
        /// What each rank asked for, in rank order.
        asked: Vec<String>,
    },
    /// A rank is gone, so nothing can be completed any more.
    #[error("rank {rank} died: {reason}")]
    PeerDied {
        /// The rank that is gone.
        rank: usize,
        /// What is known about it.
        reason: String,
    },
    /// An operation did not complete in time.
    #[error("{op} did not complete within {seconds} s{}", Missing(missing, *world))]
    Timeout {
        /// The operation waited for.
        op: String,
        /// The time limit.
        seconds: f64,
        /// Ranks that had not come to this call. Empty when that is not known, or when all came and data is stuck.
        missing: Vec<usize>,
        /// Number of ranks in the world.
        world: usize,
    },
    /// MPI returned an error.
    #[error("{call} failed with MPI error {code}: {message}")]
    Mpi {
        /// The MPI function.
        call: &'static str,
        /// Its return code.
        code: i32,
        /// MPI's own text for the code.
        message: String,
    },
    /// The process was not started as it has to be.
    #[error("{what}; {hint}")]
    Launch {
        /// What is wrong with the launch.
        what: String,
        /// What to do about it.
        hint: String,
    },
    /// The communicator was ended by [`crate::Comm::finish`].
    #[error("{op} after the communicator was finished")]
    Ended {
        /// The operation that came too late.
        op: String,
    },
    /// A kernel or a buffer failed.
    #[error(transparent)]
    Core(#[from] spmd_core::Error),
}

/// Result with this crate's [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Ranks that asked for the same thing share one entry, so that the message stays short in a large world.
struct Grouped<'a>(&'a [String]);

impl fmt::Display for Grouped<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut groups: Vec<(&str, Vec<usize>)> = Vec::new();
        for (rank, call) in self.0.iter().enumerate() {
            match groups.iter_mut().find(|(c, _)| c == call) {
                Some((_, ranks)) => ranks.push(rank),
                None => groups.push((call, vec![rank])),
            }
        }
        for (i, (call, ranks)) in groups.iter().enumerate() {
            write!(f, "{}{} in {call}", if i > 0 { "; " } else { "" }, Ranks(ranks))?;
        }
        Ok(())
    }
}

struct Missing<'a>(&'a [usize], usize);

impl fmt::Display for Missing<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self.0 {
            [] => Ok(()),
            missing => write!(f, ": {} of {} came, {} missing", self.1 - missing.len(), self.1, Ranks(missing)),
        }
    }
}

/// "rank 3", or "ranks 0, 1, 2" with at most eight of them named.
struct Ranks<'a>(&'a [usize]);

impl fmt::Display for Ranks<'_> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        const NAMED: usize = 8;
        f.write_str(if self.0.len() == 1 { "rank " } else { "ranks " })?;
        for (i, rank) in self.0.iter().take(NAMED).enumerate() {
            write!(f, "{}{rank}", if i > 0 { ", " } else { "" })?;
        }
        match self.0.len().saturating_sub(NAMED) {
            0 => Ok(()),
            more => write!(f, " and {more} more"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_mismatch_groups_ranks_that_asked_for_the_same() {
        let asked = ["barrier", "all_gather", "barrier"].map(str::to_owned).to_vec();
        let text = Error::Mismatch { asked }.to_string();
        assert_eq!(text, "the ranks did not make the same call: ranks 0, 2 in barrier; rank 1 in all_gather");
    }

    #[test]
    fn a_timeout_says_who_is_missing() {
        let error = |missing| Error::Timeout { op: "barrier".to_owned(), seconds: 2.0, missing, world: 4 };
        let text = "barrier did not complete within 2 s: 3 of 4 came, rank 1 missing";
        assert_eq!(error(vec![1]).to_string(), text);
        assert_eq!(error(vec![]).to_string(), "barrier did not complete within 2 s");
    }
}
