//! The library behind the `umbra` binary: the only crate that reads files, the environment or the clock, parses, prints.

pub mod failure;

pub use failure::{Exit, Failure, Result};
