//! The closed sets a flag's value comes from.

use clap::builder::{PossibleValue, PossibleValuesParser, TypedValueParser};
use serde::Serialize;
use spmd_core::Policy;
use std::path::PathBuf;

/// The learning rate's course after warm-up.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum, Serialize)]
#[serde(rename_all = "kebab-case")]
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
    /// transformers' constant with its warm-up, j/N at step j: the first step is made at 0
    HfConstant,
    /// transformers' linear
    HfLinear,
    /// transformers' cosine
    HfCosine,
    /// DeepSpeed's WarmupLR (parameters: --schedule-params)
    WarmupLr,
    /// DeepSpeed's WarmupDecayLR
    WarmupDecayLr,
    /// DeepSpeed's WarmupCosineLR
    WarmupCosineLr,
    /// DeepSpeed's OneCycle
    OneCycle,
    /// DeepSpeed's LRRangeTest
    LrRangeTest,
}

impl ScheduleKind {
    /// The name on the command line.
    pub const fn name(self) -> &'static str {
        match self {
            ScheduleKind::Constant => "constant",
            ScheduleKind::Linear => "linear",
            ScheduleKind::Cosine => "cosine",
            ScheduleKind::Wsd => "wsd",
            ScheduleKind::HfConstant => "hf-constant",
            ScheduleKind::HfLinear => "hf-linear",
            ScheduleKind::HfCosine => "hf-cosine",
            ScheduleKind::WarmupLr => "warmup-lr",
            ScheduleKind::WarmupDecayLr => "warmup-decay-lr",
            ScheduleKind::WarmupCosineLr => "warmup-cosine-lr",
            ScheduleKind::OneCycle => "one-cycle",
            ScheduleKind::LrRangeTest => "lr-range-test",
        }
    }
}

impl std::fmt::Display for ScheduleKind {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(self.name())
    }
}

/// How often a schedule of transformers is stepped for each optimizer step.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum, Serialize)]
#[serde(rename_all = "kebab-case")]
pub enum ScheduleStepping {
    /// Once, as transformers' Trainer does
    Once,
    /// Once for each lane, as Accelerate's wrapper does without split_batches
    PerLane,
}

/// What steps the weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum OptimizerKind {
    /// Adam with decoupled weight decay
    #[value(name = "adamw")]
    AdamW,
    /// Adam with the decay added to the gradient (L2)
    Adam,
    /// Gradient descent with momentum
    Sgd,
}

/// Whose arithmetic the optimizer has.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum OptimizerForm {
    /// torch's, one operation after the other
    Torch,
    /// DeepSpeed's FusedAdam
    Fused,
    /// DeepSpeed's CPUAdam
    Cpu,
}

/// Whose form the clipping factor has.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum ClipFormArg {
    /// min(1, c / (n + 1e-6))
    Torch,
    /// 1 / max(1, (n + 1e-6) / c)
    #[value(name = "deepspeed")]
    DeepSpeed,
}

/// A dtype of a gradient on its way.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum, Serialize)]
#[serde(rename_all = "lowercase")]
pub enum DTypeArg {
    /// bfloat16
    Bf16,
    /// float32
    Fp32,
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
