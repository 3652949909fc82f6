//! DeepSpeed's JSON as flags. Keys, types and defaults are those of `deepspeed/runtime/config.py`,
//! `deepspeed/runtime/zero/config.py` and the files they read; which release's defaults apply is [`super::Assume`].

mod batch;
mod extras;
mod gradient;
mod keys;
mod optimizer;
mod precision;
mod scheduler;
mod zero;

use super::node::Node;
use super::section::Section;
use super::{Dialect, Facts, Layer};
use crate::Result;
use std::path::PathBuf;
use std::sync::Arc;

/// Who starts the run, and so fills in what the file leaves open and what it calls `"auto"`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Auto {
    /// A script, or transformers' Trainer.
    DeepSpeed,
    /// Accelerate (`accelerate/accelerator.py: _prepare_deepspeed`).
    Accelerate {
        /// Whether its own `mixed_precision` is bf16; none: it does not say.
        bf16: Option<bool>,
    },
}

impl Auto {
    fn is_accelerate(self) -> bool {
        matches!(self, Auto::Accelerate { .. })
    }
}

/// The flags of a file of its own.
///
/// # Errors
/// Exit 2: what cannot be honoured, contradicts itself, has a wrong type or is no key at all.
pub(super) fn layer(file: &Arc<PathBuf>, node: &Node, facts: &Facts) -> Result<Layer> {
    let mut layer = Layer::new(file.clone(), Dialect::DeepSpeed);
    fill(&mut layer, file, node, facts, Auto::DeepSpeed)?;
    Ok(layer)
}

/// Adds the flags of the DeepSpeed settings `node` of `file` to `layer`, which may be of another file that names this one.
///
/// # Errors
/// As [`layer`].
pub(super) fn fill(layer: &mut Layer, file: &Arc<PathBuf>, node: &Node, facts: &Facts, auto: Auto) -> Result<()> {
    // What is implied is implied by this file, not by the one that names it.
    let mut own = Layer::new(file.clone(), layer.dialect);
    let mut top = Section::new(file, "", node)?;
    let batch = batch::read(&mut own, &mut top, facts, auto);
    let zero = zero::read(&mut own, &mut top, auto)?;
    let mode = precision::read(&mut own, &mut top, facts, auto)?;
    gradient::read(&mut own, &mut top, facts, &mode, &zero)?;
    optimizer::read(&mut own, &mut top, &zero)?;
    scheduler::read(&mut own, &mut top, facts)?;
    extras::read(&mut own, &mut top, auto)?;
    top.finish()?;
    // A misspelt key may be why a size is missing, so it is said first.
    batch?;
    zero::when_reduced(&mut own, &zero);
    layer.settings.append(&mut own.settings);
    layer.remarks.append(&mut own.remarks);
    Ok(())
}

#[cfg(test)]
mod tests;
