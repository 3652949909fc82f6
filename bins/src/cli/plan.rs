//! The flags of `umbra plan`: those of `umbra train`, and the machine it is planned for.

use super::TrainArgs;
use clap::Args;

const MACHINE: &str = "Machine";

/// `umbra plan`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  umbra plan --config ds_config.json --ranks 8
      What a file means on 8 ranks: every setting and where it comes from, every dtype and
      who decided it, memory, traffic.
  umbra plan --model mistral-7b --ranks 64 --gpu h200 --network 400Gb --steps 10000
      Whether it fits and about how long it takes. Of the model only config.json is needed;
      with its weights there too, the share of updates that bf16 weights would swallow at
      this learning rate.
  umbra plan --model DIR --ranks 4 --json | jq .memory

Nothing is started or written, and no row of data is read: rows are taken to be as long as
--seq-len.")]
pub struct PlanArgs {
    /// Ranks to plan for [default: those of this launch]
    #[arg(long, value_name = "N", help_heading = MACHINE)]
    pub ranks: Option<usize>,
    /// The GPU of each rank: a100, h100, h200, b200, l40s, rtx4090; without it the processor of this machine
    #[arg(long, value_name = "NAME", help_heading = MACHINE)]
    pub gpu: Option<String>,
    /// What each rank can send, in bits or bytes a second: 400Gb, 100Gb, 25GB
    #[arg(long, value_name = "SPEED", help_heading = MACHINE)]
    pub network: Option<String>,
    /// Memory of each rank, in place of the GPU's or this machine's: 80GB, 24GiB
    #[arg(long, value_name = "SIZE", help_heading = MACHINE)]
    pub memory: Option<String>,
    /// Print the plan as one JSON object
    #[arg(long, help_heading = MACHINE)]
    pub json: bool,
    /// The run.
    #[command(flatten)]
    pub train: TrainArgs,
}
