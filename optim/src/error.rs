//! The error of the training step.

/// Why a step could not be made.
#[derive(Debug, Clone, PartialEq, thiserror::Error)]
pub enum Error {
    /// A kernel or a buffer failed.
    #[error(transparent)]
    Core(#[from] spmd_core::Error),
    /// The ranks could not exchange what they had to.
    #[error(transparent)]
    Comm(#[from] collectives::Error),
    /// The loss or the gradient is not finite. No weight was changed.
    #[error("{what} is {value} on rank {rank}")]
    NotFinite {
        /// `the loss of micro-batch 2`, `the gradient of model.norm.weight`.
        what: String,
        /// The value found.
        value: f64,
        /// The rank that computed the loss, or that holds the gradient.
        rank: usize,
    },
    /// Copies of the state that should be the same are not.
    #[error("the copies of the state have drifted apart: their hashes are {}", hex(.hashes))]
    Drift {
        /// One hash a copy, in rank order.
        hashes: Vec<u64>,
    },
}

fn hex(hashes: &[u64]) -> String {
    hashes.iter().map(|h| format!("{h:016x}")).collect::<Vec<_>>().join(", ")
}

/// Result with this crate's [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;
