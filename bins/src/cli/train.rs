//! The flags of `umbra train`.
//!
//! Every value is optional here, so that [`crate::plan`] can tell a flag from a default; defaults live there, and a test
//! holds the figures in these help texts to them.

use super::values::{
    self, CheckpointFiles, ClipFormArg, DTypeArg, DeviceArg, OptimizerForm, OptimizerKind, Recompute, ResumeArg,
    SaveFailure, ScheduleKind, ScheduleStepping, Switch,
};
use crate::config::Files;
use clap::Args;
use spmd_core::Policy;
use std::path::PathBuf;

const MODEL: &str = "Model and data";
const BATCH: &str = "Batch and length";
const OPTIMIZER: &str = "Optimizer";
const SCHEDULE: &str = "Schedule";
const PRECISION: &str = "Precision";
const LAYOUT: &str = "Layout";
const OUTPUT: &str = "Output";
const SAVING: &str = "Checkpoints";

/// `umbra train`, as written.
#[derive(Debug, Clone, Default, Args)]
#[command(
    allow_negative_numbers = true,
    after_help = "\
Examples:
  umbra train
      Alone: the embedded tiny model learns the embedded text in under a minute.
      Results go to umbra-out/.
  mpirun -n 4 umbra train --policy low-sr --steps 100 --out try-low-sr
      Four ranks share the weights, gradients and optimizer state (ZeRO-3);
      each reads rows of its own.
  mpirun -n 2 umbra train --model DIR --data train.jsonl --lr 1e-5 --epochs 1
      Fine-tune a Hugging Face folder; umbra-out/model is a Hugging Face folder again.
  mpirun -n 2 umbra train --data train.jsonl --steps 1000 --lanes 8 --save-every 100
      Two ranks compute what eight would, bit for bit, and keep checkpoints. The same
      command goes on from the newest one, on 1, 2, 4 or 8 ranks.
  umbra train --data train.jsonl --steps 1000 --resume umbra-out/checkpoints/step-000100 \\
      --out branch --lr 1e-6 --override lr
      Go on from one checkpoint in a folder of its own, with another learning rate.

The learning rate is never scaled by the number of ranks. If the loss does not move,
look at `swallowed`: the share of weight updates that rounding threw away."
)]
pub struct TrainArgs {
    /// A Hugging Face model folder, or `tiny` for the embedded one [default: tiny]
    #[arg(long, value_name = "DIR|tiny", visible_alias = "model-name-or-path", help_heading = MODEL)]
    pub model: Option<PathBuf>,
    /// Rows to train on: JSONL with input_ids or text, or plain text [default: the embedded text]
    #[arg(long, value_name = "FILE", num_args = 1.., visible_alias = "train-file", help_heading = MODEL)]
    pub data: Vec<PathBuf>,
    /// Read rows in the order of the files
    #[arg(long, help_heading = MODEL)]
    pub no_shuffle: bool,
    /// Cut rows longer than --seq-len instead of refusing them
    #[arg(long, help_heading = MODEL)]
    pub truncate: bool,
    /// Put several rows into one sequence [default: off]
    #[arg(long, value_name = "on|off", help_heading = MODEL, hide_possible_values = true)]
    pub pack: Option<Switch>,
    /// Rows to evaluate on (not built yet)
    #[arg(long, value_name = "FILE", num_args = 1.., help_heading = MODEL)]
    pub eval_data: Vec<PathBuf>,
    /// Evaluate every N steps (not built yet)
    #[arg(long, value_name = "N", visible_alias = "eval-steps", help_heading = MODEL)]
    pub eval_every: Option<u64>,
    /// DeepSpeed JSON, Accelerate YAML or Umbra TOML, told apart by content; flags beat files
    #[arg(long, value_name = "FILE", num_args = 1.., help_heading = MODEL)]
    pub config: Vec<PathBuf>,
    /// What a file cannot say of the program it was written for: deepspeed=0.14, accelerate=0.28, load=bf16
    /// [default: the newest releases; weights loaded in config.json's dtype]
    #[arg(long, value_name = "NAME=VALUE", num_args = 1.., help_heading = MODEL)]
    pub assume: Vec<String>,

    /// Rows of a micro-batch, per lane [default: 1]
    #[arg(long, value_name = "N", visible_alias = "per-device-train-batch-size", help_heading = BATCH)]
    pub micro_batch: Option<usize>,
    /// Micro-batches added up before each optimizer step [default: 1]
    #[arg(long, value_name = "N", visible_alias = "gradient-accumulation-steps", help_heading = BATCH)]
    pub accum: Option<usize>,
    /// Rows of a step over all lanes; sets --accum
    #[arg(long, value_name = "N", help_heading = BATCH)]
    pub global_batch: Option<usize>,
    /// Tokens of the longest row [default: 512, or the model's limit if smaller]
    #[arg(long, value_name = "N", visible_alias = "max-length", alias = "max-seq-length", help_heading = BATCH)]
    pub seq_len: Option<usize>,
    /// Optimizer steps to take
    #[arg(long, value_name = "N", visible_alias = "max-steps", help_heading = BATCH)]
    pub steps: Option<u64>,
    /// Passes over the data, when --steps is not given [default: 1]
    #[arg(long, value_name = "X", visible_alias = "num-train-epochs", help_heading = BATCH, allow_hyphen_values = true)]
    pub epochs: Option<f64>,
    /// Seed of the shuffle, fresh weights and stochastic rounding [default: 0]
    #[arg(long, value_name = "N", help_heading = BATCH)]
    pub seed: Option<u64>,

    /// The rate after warm-up; 0 is a valid run [default: 1e-5]
    #[arg(long, value_name = "X", visible_alias = "learning-rate", help_heading = OPTIMIZER, allow_hyphen_values = true)]
    pub lr: Option<f64>,
    /// Adam's decay of the running mean of gradients [default: 0.9]
    #[arg(long, value_name = "X", visible_alias = "adam-beta1", help_heading = OPTIMIZER, allow_hyphen_values = true)]
    pub beta1: Option<f64>,
    /// Adam's decay of the running mean of squared gradients [default: 0.999]
    #[arg(long, value_name = "X", visible_alias = "adam-beta2", help_heading = OPTIMIZER, allow_hyphen_values = true)]
    pub beta2: Option<f64>,
    /// Added to Adam's denominator [default: 1e-8]
    #[arg(long, value_name = "X", visible_alias = "adam-epsilon", help_heading = OPTIMIZER, allow_hyphen_values = true)]
    pub eps: Option<f64>,
    /// Weight decay, on matrices: decoupled under adamw, else added to the gradient [default: 0]
    #[arg(long, value_name = "X", help_heading = OPTIMIZER, allow_hyphen_values = true)]
    pub weight_decay: Option<f64>,
    /// Decay the gains of the norms too
    #[arg(long, help_heading = OPTIMIZER)]
    pub decay_norms: bool,
    /// What steps: adamw, adam (decay added to the gradient) or sgd [default: adamw]
    #[arg(long, value_name = "NAME", visible_alias = "optim", help_heading = OPTIMIZER, hide_possible_values = true)]
    pub optimizer: Option<OptimizerKind>,
    /// Whose arithmetic the optimizer has: torch's, DeepSpeed's FusedAdam (fused) or its CPUAdam (cpu)
    /// [default: the policy's]
    #[arg(long, value_name = "torch|fused|cpu", help_heading = OPTIMIZER, hide_possible_values = true)]
    pub optimizer_form: Option<OptimizerForm>,
    /// SGD's momentum [default: 0]
    #[arg(long, value_name = "X", help_heading = OPTIMIZER, allow_hyphen_values = true)]
    pub momentum: Option<f64>,
    /// Whose form the clipping factor has: torch or deepspeed, equal but for rounding [default: the policy's]
    #[arg(long, value_name = "torch|deepspeed", help_heading = OPTIMIZER, hide_possible_values = true)]
    pub clip_form: Option<ClipFormArg>,
    /// Scale the gradient down to this norm if it is longer; 0 is off [default: 1]
    #[arg(long, value_name = "X", visible_alias = "max-grad-norm", help_heading = OPTIMIZER, allow_hyphen_values = true)]
    pub clip: Option<f64>,

    /// The rate's course after warm-up [default: constant]
    #[arg(long, value_name = "NAME", visible_alias = "lr-scheduler-type", help_heading = SCHEDULE)]
    pub schedule: Option<ScheduleKind>,
    /// Where linear, cosine and wsd end [default: 0]
    #[arg(long, value_name = "X", help_heading = SCHEDULE, allow_hyphen_values = true)]
    pub min_lr: Option<f64>,
    /// Steps of linear warm-up; step s uses lr·min(1, (s+1)/N) [default: 0]
    #[arg(long, value_name = "N", help_heading = SCHEDULE)]
    pub warmup_steps: Option<u64>,
    /// The same as a share of the run
    #[arg(long, value_name = "X", help_heading = SCHEDULE, allow_hyphen_values = true)]
    pub warmup_ratio: Option<f64>,
    /// Steps over which wsd decays [default: the last 20 % of the run]
    #[arg(long, value_name = "N", help_heading = SCHEDULE)]
    pub decay_steps: Option<u64>,
    /// Parameters of an engine's schedule, by the engine's names: warmup_num_steps=100 total_num_steps=auto
    #[arg(long, value_name = "NAME=VALUE", num_args = 1.., help_heading = SCHEDULE)]
    pub schedule_params: Vec<String>,
    /// How often a schedule of transformers is stepped for each optimizer step: once, or per-lane as Accelerate does
    /// [default: once]
    #[arg(long, value_name = "once|per-lane", help_heading = SCHEDULE, hide_possible_values = true)]
    pub schedule_stepping: Option<ScheduleStepping>,

    /// Which dtype each number is kept in [default: shadow]
    #[arg(long, value_name = "NAME", value_parser = values::policy(), help_heading = PRECISION)]
    pub policy: Option<Policy>,
    /// The dtype a gradient is rounded to before it is summed over lanes [default: the policy's]
    #[arg(long, value_name = "bf16|fp32", help_heading = PRECISION, hide_possible_values = true)]
    pub wire: Option<DTypeArg>,
    /// The dtype the finished sum over lanes is rounded to [default: the policy's]
    #[arg(long, value_name = "bf16|fp32", help_heading = PRECISION, hide_possible_values = true)]
    pub reduced: Option<DTypeArg>,
    /// The dtype gradients are added up in over micro-batches [default: the policy's]
    #[arg(long, value_name = "bf16|fp32", help_heading = PRECISION, hide_possible_values = true)]
    pub accumulate: Option<DTypeArg>,

    /// ZeRO stage: 0 shards nothing, 1 the optimizer state, 2 gradients too, 3 weights too [default: 3]
    #[arg(long, value_name = "0..3", help_heading = LAYOUT)]
    pub stage: Option<u8>,
    /// Ranks that share one copy of the state; other groups hold copies [default: all, or 1 at stage 0]
    #[arg(long, value_name = "N", help_heading = LAYOUT)]
    pub shard_group: Option<usize>,
    /// Canonical ranks, which fix the order of every sum, however many ranks there are
    /// [default: the number of ranks, or the checkpoint's]
    #[arg(long, value_name = "N", help_heading = LAYOUT)]
    pub lanes: Option<usize>,
    /// Go on with ranks or groups that do not fit the lanes: sums are added in another order
    #[arg(long, help_heading = LAYOUT)]
    pub allow_different_bits: bool,
    /// Whose activations the backward pass computes again: less memory, more time [default: none]
    #[arg(long, value_name = "none|block", help_heading = LAYOUT, hide_possible_values = true)]
    pub recompute: Option<Recompute>,
    /// Release gathered weights between forward and backward [default: on at stage 3, else off]
    #[arg(long, value_name = "on|off", help_heading = LAYOUT, hide_possible_values = true)]
    pub reshard_after_forward: Option<Switch>,
    /// Threads of this rank [default: the cores it may use]
    #[arg(long, value_name = "N", help_heading = LAYOUT)]
    pub threads: Option<usize>,
    /// What computes [default: cpu] (cuda is not built yet)
    #[arg(long, value_name = "cpu|cuda", help_heading = LAYOUT, hide_possible_values = true)]
    pub device: Option<DeviceArg>,

    /// Folder for run.json, metrics.jsonl and model/ [default: umbra-out]
    #[arg(long, value_name = "DIR", visible_alias = "output-dir", help_heading = OUTPUT)]
    pub out: Option<PathBuf>,
    /// Show progress every N steps; metrics.jsonl has every step [default: 1]
    #[arg(long, value_name = "N", visible_alias = "logging-steps", help_heading = OUTPUT)]
    pub log_every: Option<u64>,
    /// Write logits and every gradient of the first step here, as safetensors
    #[arg(long, value_name = "DIR", help_heading = OUTPUT)]
    pub dump: Option<PathBuf>,
    /// Also write the metrics as TensorBoard event files, into OUT/tensorboard
    #[arg(long, help_heading = OUTPUT)]
    pub tensorboard: bool,

    /// Save a checkpoint every N steps [default: at the end only]
    #[arg(long, value_name = "N", visible_alias = "save-steps", help_heading = SAVING)]
    pub save_every: Option<u64>,
    /// Newest checkpoints kept; 0 writes none at all [default: 2]
    #[arg(long, value_name = "N", visible_alias = "save-total-limit", help_heading = SAVING)]
    pub keep: Option<u64>,
    /// When a checkpoint cannot be written: stop, or train on without it [default: stop]
    #[arg(long, value_name = "stop|continue", help_heading = SAVING, hide_possible_values = true)]
    pub save_failure: Option<SaveFailure>,
    /// Files of a checkpoint: shared, or per-rank where the file system handles parallel writers badly
    /// [default: shared]
    #[arg(long, value_name = "shared|per-rank", help_heading = SAVING, hide_possible_values = true)]
    pub checkpoint_files: Option<CheckpointFiles>,
    /// Hash the whole state every N steps, into metrics.jsonl
    #[arg(long, value_name = "N", help_heading = SAVING)]
    pub hash_every: Option<u64>,
    /// Go on from: auto (the newest checkpoint of --out; if auto is written and that is damaged, the one before),
    /// never, or this checkpoint [default: auto]
    #[arg(long, value_name = "auto|never|DIR", visible_alias = "resume-from-checkpoint", help_heading = SAVING)]
    pub resume: Option<ResumeArg>,
    /// Settings that may differ from those of the checkpoint a run goes on from
    #[arg(long = "override", value_name = "NAME", num_args = 1.., help_heading = SAVING)]
    pub overrides: Vec<String>,

    /// What was written, so that files can be put below it.
    #[arg(skip)]
    pub matches: clap::ArgMatches,
    /// Flags that come after those, written by `umbra compare` for each of its runs.
    #[arg(skip)]
    pub later: Vec<String>,
    /// What the files of --config have set.
    #[arg(skip)]
    pub files: Files,
}

/// A flag as configuration files spell it.
#[derive(Debug, Clone)]
pub(crate) struct Flag {
    /// The long name.
    pub(crate) name: String,
    /// The long name and its aliases.
    pub(crate) spellings: Vec<String>,
    /// Whether a value follows it.
    pub(crate) takes_value: bool,
}

impl TrainArgs {
    /// Every flag.
    pub(crate) fn flags() -> Vec<Flag> {
        let command = TrainArgs::augment_args(clap::Command::new("train"));
        let flag = |arg: &clap::Arg| {
            let name = arg.get_long()?.to_owned();
            let aliases = arg.get_all_aliases().unwrap_or_default();
            let spellings = std::iter::once(name.as_str()).chain(aliases).map(str::to_owned).collect();
            Some(Flag { spellings, takes_value: arg.get_action().takes_values(), name })
        };
        command.get_arguments().filter_map(flag).collect()
    }

    /// The field that a long flag sets, whichever of its spellings is given: `learning-rate` sets `lr`.
    pub(crate) fn field_of(flag: &str) -> Option<String> {
        let command = TrainArgs::augment_args(clap::Command::new("train"));
        let arg = command.get_arguments().find(|arg| {
            arg.get_long() == Some(flag) || arg.get_all_aliases().is_some_and(|aliases| aliases.contains(&flag))
        });
        arg.map(|arg| arg.get_id().to_string())
    }
}
