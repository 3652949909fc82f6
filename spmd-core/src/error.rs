//! The error every operation of this crate returns.

/// What went wrong in a kernel, a buffer or the unit contract.
#[derive(Debug, thiserror::Error, Clone, PartialEq)]
pub enum Error {
    /// A length, shape or range does not fit the operation.
    #[error("{op}: {what} has {found}, expected {expected}")]
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
    /// A dtype the operation does not take here.
    #[error("{op}: {what} is {found}, expected {expected}")]
    DType {
        /// The operation that refused.
        op: &'static str,
        /// The argument at fault.
        what: &'static str,
        /// What it should have been.
        expected: String,
        /// What it was.
        found: crate::DType,
    },
    /// A token id that the embedding table does not have.
    #[error("{op}: token id {id} at position {position} is not below the vocabulary size {vocab}")]
    TokenId {
        /// The operation that refused.
        op: &'static str,
        /// The token id.
        id: u32,
        /// Its place in the batch.
        position: usize,
        /// The vocabulary size.
        vocab: usize,
    },
    /// Memory could not be had.
    #[error("{bytes} bytes of memory for {what} could not be had: {reason}")]
    Memory {
        /// How much was asked for.
        bytes: usize,
        /// What it was for.
        what: &'static str,
        /// What the system said.
        reason: String,
    },
    /// A device that this build or machine does not have.
    #[error("device {name} is not available: {reason}")]
    Device {
        /// The device asked for.
        name: String,
        /// Why it cannot be had.
        reason: String,
    },
}

/// Result with this crate's [`Error`].
pub type Result<T, E = Error> = std::result::Result<T, E>;

/// Refuses a length that differs from the expected one.
pub(crate) fn expect_len(op: &'static str, what: &'static str, expected: usize, found: usize) -> Result<()> {
    if expected == found {
        return Ok(());
    }
    Err(Error::Shape { op, what, expected: format!("{expected} elements"), found: format!("{found} elements") })
}
