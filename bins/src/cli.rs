//! The command line: what may be written. What it means is decided by [`crate::plan`].
//!
//! Every flag of the contract parses. A subcommand that this version does not have parses too and is refused by name
//! ([`Command::not_built`]), so that a script written against the contract gets a sentence and not a syntax error.

mod checkpoint;
mod compare;
mod config;
mod plan;
mod train;
mod values;

pub use checkpoint::{Checkpoint, CheckpointArgs, DiffArgs, ExportArgs, ExportDType, InspectArgs, VerifyArgs};
pub use compare::CompareArgs;
pub use config::{ConfigArgs, ConfigCommand, ConfigDiffArgs, ConvertArgs, Target};
pub use plan::PlanArgs;
#[cfg(test)]
pub(crate) use train::Flag;
pub use train::TrainArgs;
pub use values::{
    CheckpointFiles, ClipFormArg, DTypeArg, DeviceArg, OptimizerForm, OptimizerKind, Recompute, ResumeArg, SaveFailure,
    ScheduleKind, ScheduleStepping, Switch,
};

use crate::Failure;
use clap::{Args, CommandFactory, FromArgMatches, Parser, Subcommand};
use spmd_core::Policy;
use std::ffi::OsString;
use std::path::PathBuf;

/// Trains and fine-tunes Mistral-family models with ZeRO-3 sharding and a precision policy you can see
#[derive(Debug, Parser)]
#[command(name = "umbra", version, propagate_version = true, max_term_width = 120)]
#[command(after_help = "\
Examples:
  umbra train
      The embedded tiny model and text, on this machine alone.
  mpirun -n 4 umbra train --policy fsdp-low
      The same on four ranks, with bf16 weights in the optimizer.
  mpirun -n 2 umbra train --model DIR --data FILE
      Fine-tune a Hugging Face folder.

Exit codes: 0 done, 1 a bug, 2 usage, 3 bad model or data, 4 memory, 5 a rank was lost,
6 loss not finite, 7 disk (75 is kept for interrupted and saved; this version does not save on a signal).")]
pub struct Cli {
    /// What to do.
    #[command(subcommand)]
    pub command: Command,
}

/// The subcommands of the contract.
#[derive(Debug, Subcommand)]
pub enum Command {
    /// Train or fine-tune: alone, under mpirun, under srun
    Train(Box<TrainArgs>),
    /// Continue a prompt with a model folder
    Generate(GenerateArgs),
    /// Put runs side by side: a table, a page of curves and settings, pictures
    Report(ReportArgs),
    /// Measure a training step, the kernels or the collectives
    Bench(BenchArgs),
    /// The run, resolved and not started: settings and their origin, dtypes, memory, traffic, time
    Plan(Box<PlanArgs>),
    /// The same data under several policies, learning rates and files: one report
    Compare(Box<CompareArgs>),
    /// Whether two configuration files are the same run; a file in another format
    Config(ConfigArgs),
    /// Check or show rows of data (not built yet)
    Data(Rest),
    /// Inspect, verify, compare or export checkpoints
    Checkpoint(CheckpointArgs),
    /// What this launch looks like and what is wrong with it (not built yet)
    Doctor(Rest),
}

/// Whatever follows a subcommand that is not built yet.
#[derive(Debug, Args)]
pub struct Rest {
    /// Arguments, kept unread.
    #[arg(trailing_var_arg = true, allow_hyphen_values = true, hide = true)]
    pub rest: Vec<OsString>,
}

/// `umbra generate`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  umbra generate --model umbra-out/model --prompt \"Once upon a time\"
  umbra generate --model DIR --temperature 0.8 --top-p 0.95 --seed 7 --prompt \"To be\"
  cat question.txt | umbra generate --model DIR --max-new-tokens 128")]
pub struct GenerateArgs {
    /// A Hugging Face model folder, or `tiny` for the embedded model (freshly initialised, so it writes noise)
    #[arg(long, value_name = "DIR|tiny", visible_alias = "model-name-or-path")]
    pub model: PathBuf,
    /// The text to continue; read from standard input when not given
    #[arg(long, value_name = "TEXT")]
    pub prompt: Option<String>,
    /// The most tokens to write; an end-of-text token stops earlier
    #[arg(long, value_name = "N", default_value_t = 64)]
    pub max_new_tokens: usize,
    /// Logits are divided by this before sampling; 0 always takes the likeliest token
    #[arg(long, value_name = "X", default_value_t = 0.0, allow_hyphen_values = true)]
    pub temperature: f64,
    /// Sample from the smallest set of tokens whose probabilities add up to this
    #[arg(long, value_name = "P", default_value_t = 1.0, allow_hyphen_values = true)]
    pub top_p: f64,
    /// Seed of the sampling
    #[arg(long, value_name = "N", default_value_t = 0)]
    pub seed: u64,
    /// Threads of this process [default: the cores it may use]
    #[arg(long, value_name = "N")]
    pub threads: Option<usize>,
}

impl GenerateArgs {
    /// Refuses values that mean nothing.
    ///
    /// # Errors
    /// A usage failure naming the flag.
    pub fn check(&self) -> crate::Result<()> {
        if !(self.temperature.is_finite() && self.temperature >= 0.0) {
            return Err(bad_value("--temperature", "a number that is 0 or more", self.temperature));
        }
        if !(self.top_p > 0.0 && self.top_p <= 1.0) {
            return Err(bad_value("--top-p", "a probability above 0 and up to 1", self.top_p));
        }
        sane_threads(self.threads)
    }
}

/// `umbra report`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  umbra report umbra-out
      A table, and umbra-out/report.html: curves and settings, in one file that any browser opens.
  umbra report out/shadow out/fsdp-low --out both.html
  umbra report try-shadow try-fsdp-low --svg loss.svg
  umbra report umbra-out --svg pictures/
      One SVG for each curve: loss, grad_norm, swallowed, arrived, lr, tokens_per_s, memory.")]
pub struct ReportArgs {
    /// Folders of runs, finished or not: what --out named
    #[arg(value_name = "RUN", required = true)]
    pub runs: Vec<PathBuf>,
    /// The page of curves and settings [default: report.html in the run's folder; of several runs, in the folder they
    /// all lie in, else here]
    #[arg(long, value_name = "FILE")]
    pub out: Option<PathBuf>,
    /// Also draw the loss curves into this SVG file, or every curve into a folder
    #[arg(long, value_name = "FILE|FOLDER/")]
    pub svg: Option<PathBuf>,
}

/// `umbra bench`.
#[derive(Debug, Args)]
pub struct BenchArgs {
    /// What to measure.
    #[command(subcommand)]
    pub what: Bench,
}

/// What `umbra bench` measures.
#[derive(Debug, Subcommand)]
pub enum Bench {
    /// A training step of the 32M model, beside its matrix products alone; under mpirun it runs on all ranks
    Step(BenchStepArgs),
    /// Single kernels (not built yet)
    Kernels(Rest),
    /// Gather and reduce-scatter by size (not built yet)
    Collectives(Rest),
}

/// `umbra bench step`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  umbra bench step
  mpirun -n 2 umbra bench step --policy fp32
  mpirun -n 2 umbra bench step --seq-len 256 --micro-batch 4 --steps 20
  mpirun -n 2 umbra bench step --lanes 8
      Four passes a step: what it costs to keep the bits of eight ranks.")]
pub struct BenchStepArgs {
    /// Steps measured, after the first ones, which warm up
    #[arg(long, value_name = "N", default_value_t = 10)]
    pub steps: u64,
    /// Tokens of a row
    #[arg(long, value_name = "N", default_value_t = 512)]
    pub seq_len: usize,
    /// Rows of a micro-batch, per rank
    #[arg(long, value_name = "N", default_value_t = 2)]
    pub micro_batch: usize,
    /// Precision policy
    #[arg(long, value_name = "NAME", value_parser = values::policy(), default_value = "shadow")]
    pub policy: Policy,
    /// Canonical ranks [default: the number of ranks]
    #[arg(long, value_name = "N")]
    pub lanes: Option<usize>,
    /// ZeRO stage [default: 3]
    #[arg(long, value_name = "0..3")]
    pub stage: Option<u8>,
    /// What the backward pass computes again [default: none]
    #[arg(long, value_name = "none|block", hide_possible_values = true)]
    pub recompute: Option<Recompute>,
    /// Threads of this rank [default: the cores it may use]
    #[arg(long, value_name = "N")]
    pub threads: Option<usize>,
}

impl BenchStepArgs {
    /// Refuses values that mean nothing.
    ///
    /// # Errors
    /// A usage failure naming the flag.
    pub fn check(&self) -> crate::Result<()> {
        at_least_one("--steps", Some(usize::try_from(self.steps).unwrap_or(usize::MAX)))?;
        at_least_one("--micro-batch", Some(self.micro_batch))?;
        sane_threads(self.threads)?;
        if self.seq_len < 2 {
            return Err(bad_value("--seq-len", "2 or more: a row of one token has nothing to predict", self.seq_len));
        }
        Ok(())
    }
}

/// A usage failure for a flag whose value means nothing.
pub(crate) fn bad_value(flag: &str, expected: &str, found: impl std::fmt::Display) -> Failure {
    Failure::usage(format!("{flag} cannot be {found}")).at(flag).expected(expected).found(found)
}

/// More threads than any machine has cores; each takes memory of its own.
const MAX_THREADS: usize = 1024;

/// Refuses a number of threads that means nothing.
pub(crate) fn sane_threads(threads: Option<usize>) -> crate::Result<()> {
    match threads {
        Some(n) if n > MAX_THREADS => Err(bad_value("--threads", &format!("at most {MAX_THREADS}"), n)),
        _ => at_least_one("--threads", threads),
    }
}

/// Refuses a count of zero.
pub(crate) fn at_least_one(flag: &str, value: Option<usize>) -> crate::Result<()> {
    match value {
        Some(0) => Err(bad_value(flag, "a whole number that is 1 or more", 0)),
        _ => Ok(()),
    }
}

impl Command {
    /// The failure to show if this version does not have the subcommand (exit 2).
    pub fn not_built(&self) -> Option<Failure> {
        let name = match self {
            Command::Train(_) | Command::Generate(_) | Command::Report(_) | Command::Checkpoint(_) => return None,
            Command::Plan(_) | Command::Config(_) | Command::Compare(_) => return None,
            Command::Bench(BenchArgs { what: Bench::Step(_) }) => return None,
            Command::Bench(BenchArgs { what: Bench::Kernels(_) }) => "bench kernels",
            Command::Bench(BenchArgs { what: Bench::Collectives(_) }) => "bench collectives",
            Command::Data(_) => "data",
            Command::Doctor(_) => "doctor",
        };
        Some(
            Failure::usage(format!("`umbra {name}` is not built yet"))
                .expected("train, plan, compare, config, generate, report, checkpoint or bench step")
                .hint("umbra --help lists what there is"),
        )
    }
}

/// What to show instead of running: help, the version, or a usage error. Only one rank should print it.
#[derive(Debug)]
pub struct ClapOutcome(clap::Error);

impl ClapOutcome {
    /// 0 for help and the version, 2 for everything else.
    pub fn exit_code(&self) -> i32 {
        if self.0.use_stderr() { 2 } else { 0 }
    }

    /// Prints it: help and version to standard output, errors to standard error, coloured on a terminal.
    pub fn print(&self) {
        // A closed pipe is the reader's choice; the exit code still says what happened.
        let _ = self.0.print();
    }

    /// The text without colours.
    pub fn text(&self) -> String {
        self.0.render().to_string()
    }
}

/// Reads a command line whose first element is the program's name. Flags may be spelled with `_` for `-`, as Hugging
/// Face scripts do (`--learning_rate`).
///
/// # Errors
/// Help, the version or a usage error, for the caller to print (nothing is printed here).
pub fn parse<I, T>(args: I) -> Result<Cli, ClapOutcome>
where
    I: IntoIterator<Item = T>,
    T: Into<OsString>,
{
    let line = with_dashes(args.into_iter().map(Into::into));
    let matches = Cli::command().try_get_matches_from(line).map_err(ClapOutcome)?;
    let mut cli = Cli::from_arg_matches(&matches).map_err(ClapOutcome)?;
    if let Some((_, written)) = matches.subcommand() {
        match &mut cli.command {
            Command::Train(args) => args.matches = written.clone(),
            Command::Plan(args) => args.train.matches = written.clone(),
            Command::Compare(args) => args.train.matches = written.clone(),
            _ => {}
        }
    }
    Ok(cli)
}

/// Replaces `_` by `-` in the names of long flags, up to a bare `--`.
fn with_dashes(args: impl Iterator<Item = OsString>) -> Vec<OsString> {
    let mut flags = true;
    args.map(|arg| {
        let Some(text) = arg.to_str() else { return arg };
        flags &= text != "--";
        if !flags || !text.starts_with("--") {
            return arg;
        }
        let (name, value) = text.split_at(text.find('=').unwrap_or(text.len()));
        OsString::from(name.replace('_', "-") + value)
    })
    .collect()
}

#[cfg(test)]
mod tests;
