//! Checkpoints: the folder `checkpoints/step-NNNNNN`, written by all ranks at once and whole or absent.
//!
//! [`format`] is what the folder says of itself, [`plan`] where every byte goes before the first is written, [`write`] the
//! writing, [`read`] and [`verify`] the way back, [`folder`] which checkpoints there are and which are removed,
//! [`commands`] what a user can ask of them.

pub mod commands;
mod direct;
pub mod folder;
pub mod format;
pub mod plan;
pub mod read;
mod tiles;
pub mod verify;
pub mod write;

#[cfg(test)]
mod tests;

pub use folder::{clean, free_bytes, is_checkpoint, keep, list, set_aside};
pub use format::{CheckpointState, Chunk, PlainRange, Role, RoleDTypes, RunFacts, STATE_FILE, TensorEntry, Written};
pub use plan::{Files, Run, SavePlan, SaveSpec, SourceFacts};
pub use read::Reader;
pub use verify::{Fault, FaultKind, verify};
