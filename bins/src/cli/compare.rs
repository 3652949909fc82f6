//! The flags of `umbra compare`: those of `umbra train`, and what is varied.

use super::{TrainArgs, values};
use clap::Args;
use spmd_core::Policy;
use std::path::PathBuf;

const GRID: &str = "Grid";

/// `umbra compare`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  umbra compare --policies shadow,fsdp-low --lrs 1e-6,4e-6 --steps 60 --out two-engines
      Four runs of the embedded model, one after the other, and one report of all.
  mpirun -n 2 umbra compare --configs ds.json fsdp.yaml --model DIR --data train.jsonl --steps 100
      Each file as it is, on the same rows.

Every run has a folder of its own in --out. The same command goes on where it was stopped;
what is finished is not run again.")]
pub struct CompareArgs {
    /// Policies to compare, with commas between them
    #[arg(long, value_name = "NAME,...", value_delimiter = ',', value_parser = values::policy(), help_heading = GRID)]
    pub policies: Vec<Policy>,
    /// Learning rates to compare, with commas between them
    #[arg(long, value_name = "X,...", value_delimiter = ',', help_heading = GRID)]
    pub lrs: Vec<f64>,
    /// Configuration files to compare; --config names what all of them have in common
    #[arg(long, value_name = "FILE", num_args = 1.., help_heading = GRID)]
    pub configs: Vec<PathBuf>,
    /// The runs.
    #[command(flatten)]
    pub train: TrainArgs,
}
