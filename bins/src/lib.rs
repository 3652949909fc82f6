//! The library behind the `umbra` binary: the only crate that reads files, the environment or the clock, parses, prints.

pub mod bench;
pub mod checkpoint;
pub mod cli;
pub mod compare;
pub mod config;
pub mod data;
pub mod failure;
pub mod generate;
pub mod hf;
pub mod host;
pub mod launch;
pub mod memory;
pub mod metrics;
mod nearest;
pub mod plan;
pub mod planner;
pub mod progress;
pub mod report;
pub mod run;
pub mod source;
pub mod svg;
pub mod table;
pub mod tensorboard;
pub mod tiny;

pub use failure::{Exit, Failure, Result};
