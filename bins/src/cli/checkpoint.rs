//! The flags of `umbra checkpoint`.

use crate::hf::FileDType;
use clap::{Args, Subcommand};
use std::path::PathBuf;

/// `umbra checkpoint`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  umbra checkpoint inspect umbra-out
      What the newest checkpoint of a run holds.
  umbra checkpoint verify umbra-out
      Whether every byte of every checkpoint of the run is as it was written.
  umbra checkpoint diff run-a run-b
      Whether two runs arrived at the same state, and where they part.
  umbra checkpoint export umbra-out --out model-fp32 --dtype fp32
      A Hugging Face folder made from the weights the optimizer holds.

Where a checkpoint is asked for, the output folder of a run means its newest one.")]
pub struct CheckpointArgs {
    /// What to do with it.
    #[command(subcommand)]
    pub what: Checkpoint,
}

/// What `umbra checkpoint` does.
#[derive(Debug, Subcommand)]
pub enum Checkpoint {
    /// Show what a checkpoint holds: step, layout, settings, dtypes, files
    Inspect(InspectArgs),
    /// Compare every byte with the checksums it was written with
    Verify(VerifyArgs),
    /// Tell whether two checkpoints are the same state, bit for bit, and where they differ
    Diff(DiffArgs),
    /// Write the weights as a plain Hugging Face model folder
    Export(ExportArgs),
}

/// `umbra checkpoint inspect`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  umbra checkpoint inspect umbra-out
  umbra checkpoint inspect umbra-out/checkpoints/step-000100 --tensors
  umbra checkpoint inspect umbra-out --json | jq .step

Only the state file is read, so it takes no time; `verify` reads the numbers.")]
pub struct InspectArgs {
    /// A checkpoint, or the output folder of a run for its newest one
    #[arg(value_name = "DIR")]
    pub dir: PathBuf,
    /// Also list every tensor with its shape and dtypes
    #[arg(long)]
    pub tensors: bool,
    /// Print everything, tensors included, as one JSON object
    #[arg(long)]
    pub json: bool,
}

/// `umbra checkpoint verify`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  umbra checkpoint verify umbra-out/checkpoints/step-000100
  umbra checkpoint verify umbra-out
      All complete checkpoints of the run.

Exit codes: 0 all bytes are right; 3 they are not, and each fault is printed with file,
tensor and bytes.")]
pub struct VerifyArgs {
    /// A checkpoint, or the output folder of a run for all of its complete ones
    #[arg(value_name = "DIR")]
    pub dir: PathBuf,
}

/// `umbra checkpoint diff`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  umbra checkpoint diff umbra-out/checkpoints/step-000100 copy-of-it
  umbra checkpoint diff on-2-ranks on-8-ranks
      The newest checkpoint of each run. Worlds, stages and files may differ: only the
      step and the numbers count.

The hashes it prints are those that --hash-every puts into metrics.jsonl.
Exit codes: 0 the same state, 3 not.")]
pub struct DiffArgs {
    /// A checkpoint, or the output folder of a run for its newest one
    #[arg(value_name = "A")]
    pub a: PathBuf,
    /// The one to compare with it
    #[arg(value_name = "B")]
    pub b: PathBuf,
}

/// `umbra checkpoint export`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  umbra checkpoint export umbra-out --out my-model
  umbra checkpoint export umbra-out/checkpoints/step-000100 --out my-model --dtype fp32

The weights are those the optimizer holds (the shadow), read a block at a time, each
checked against its checksum. The folder loads in transformers and in `umbra generate`.")]
pub struct ExportArgs {
    /// A checkpoint, or the output folder of a run for its newest one
    #[arg(value_name = "DIR")]
    pub dir: PathBuf,
    /// The model folder to make: one that is not there yet, or empty
    #[arg(long, value_name = "FOLDER")]
    pub out: PathBuf,
    /// The dtype of its weights
    #[arg(long, value_name = "DTYPE", default_value = "bf16")]
    pub dtype: ExportDType,
}

/// The dtype of an exported model's weights.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum ExportDType {
    /// All in bf16, rounded to nearest even
    #[value(alias = "bfloat16")]
    Bf16,
    /// All in fp32: every bit of the shadow
    #[value(alias = "float32")]
    Fp32,
    /// Each as the model the run began with stores it, like the run's own final model
    Source,
}

impl ExportDType {
    /// The dtype of a tensor that the source stores in `source`.
    pub const fn of(self, source: FileDType) -> FileDType {
        match self {
            ExportDType::Bf16 => FileDType::Bf16,
            ExportDType::Fp32 => FileDType::F32,
            ExportDType::Source => source,
        }
    }
}
