//! The closed sets a flag's value comes from.

use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use serde::Serialize;
use spmd_core::Policy;
use std::path::PathBuf;

/// The learning rate's course after warm-up.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum ScheduleKind {
    /// The same all the way
    #[value(alias = "constant_with_warmup", alias = "constant-with-warmup")]
    Constant,
    /// A straight line down to --min-lr at the last step
    Linear,
    /// Half a cosine down to --min-lr at the last step
    Cosine,
    /// Warm-up, stable, decay: constant, then a straight line to --min-lr over --decay-steps
    #[value(alias = "warmup_stable_decay", alias = "warmup-stable-decay")]
    Wsd,
}

impl ScheduleKind {
    /// The name on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            ScheduleKind::Constant => "constant",
            ScheduleKind::Linear => "linear",
            ScheduleKind::Cosine => "cosine",
            ScheduleKind::Wsd => "wsd",
        }
    }
}

impl std::fmt::Display for ScheduleKind {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(self.name())
    }
}

/// `on` or `off`.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Switch {
    /// On
    #[value(alias = "true")]
    On,
    /// Off
    #[value(alias = "false")]
    Off,
}

/// What is computed again in the backward pass.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Recompute {
    /// Nothing: every activation the backward pass reads is kept
    None,
    /// Each block's activations
    Block,
}

/// What a run does when a checkpoint cannot be written.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum SaveFailure {
    /// It stops with exit code 7; earlier checkpoints stay as they are.
    Stop,
    /// It says so and trains on; earlier checkpoints stay as they are.
    Continue,
}

/// How ranks lay a checkpoint out in files.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum CheckpointFiles {
    /// All ranks write their byte ranges of the same files, which are a Hugging Face folder
    Shared,
    /// Each rank writes a file of its own, for file systems that handle parallel writers badly
    PerRank,
}

/// What computes.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum DeviceArg {
    /// The processor
    Cpu,
    /// An NVIDIA GPU
    Cuda,
}

/// Where a run continues from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum ResumeArg {
    /// The newest checkpoint of the output folder if there is one.
    Auto,
    /// Start at step 0; an output folder that was used is refused.
    Never,
    /// This checkpoint.
    Dir(PathBuf),
}

impl std::str::FromStr for ResumeArg {
    type Err = std::convert::Infallible;
    fn from_str(s: &str) -> Result<Self, Self::Err> {
        Ok(match s {
            "auto" => ResumeArg::Auto,
            "never" => ResumeArg::Never,
            dir => ResumeArg::Dir(PathBuf::from(dir)),
        })
    }
}

/// Reads a policy by name and lists them all, a line each, in `--help`.
pub(super) fn policy() -> impl TypedValueParser<Value = Policy> {
    PossibleValuesParser::new(Policy::ALL.map(|p| PossibleValue::new(p.name()).help(p.about())))
        .try_map(|name| name.parse::<Policy>())
}
