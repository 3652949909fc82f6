//! The flags of `umbra config`.

use clap::{Args, Subcommand};
use std::path::PathBuf;

/// `umbra config`.
#[derive(Debug, Args)]
#[command(after_help = "\
Examples:
  umbra config diff ds_config.json fsdp.yaml --lanes 4
      Whether two files are the same run, whichever engine each was written for.
  umbra config diff a.json b.json --prove
      The same, and both are run for a few steps on the embedded model.
  umbra config diff ds.json ds.json --assume deepspeed=0.14 --assume-b deepspeed=0.19.6
      What a new release makes of an old file.
  umbra config convert ds_config.json --to umbra > run.toml
      A file in another format, with a list of what that format cannot say.")]
pub struct ConfigArgs {
    /// What to do.
    #[command(subcommand)]
    pub what: ConfigCommand,
}

/// What `umbra config` does.
#[derive(Debug, Subcommand)]
pub enum ConfigCommand {
    /// Tell whether two files are the same run, and which keys and defaults make the difference (exit 3: different)
    Diff(ConfigDiffArgs),
    /// Write a file as DeepSpeed JSON, Accelerate YAML or Umbra TOML
    Convert(ConvertArgs),
}

/// `umbra config diff`.
#[derive(Debug, Args)]
pub struct ConfigDiffArgs {
    /// DeepSpeed JSON, Accelerate YAML or Umbra TOML
    #[arg(value_name = "A")]
    pub a: PathBuf,
    /// Another one, of any of the three formats
    #[arg(value_name = "B")]
    pub b: PathBuf,
    /// Canonical ranks, where the files do not say how many [default: what the other file says, else 4]
    #[arg(long, value_name = "N")]
    pub lanes: Option<usize>,
    /// The model, whose config.json says in which dtype weights are loaded [default: tiny]
    #[arg(long, value_name = "DIR|tiny")]
    pub model: Option<PathBuf>,
    /// The program the files were written for: deepspeed=0.14, accelerate=0.28, load=bf16 [default: the newest]
    #[arg(long, value_name = "NAME=VALUE", num_args = 1..)]
    pub assume: Vec<String>,
    /// The same for B alone
    #[arg(long, value_name = "NAME=VALUE", num_args = 1..)]
    pub assume_b: Vec<String>,
    /// Run both on the embedded model and compare the hash of the whole state after every step
    #[arg(long)]
    pub prove: bool,
    /// Steps of --prove
    #[arg(long, value_name = "N", default_value_t = 5)]
    pub steps: u64,
    /// Print the answer as one JSON object
    #[arg(long)]
    pub json: bool,
}

/// The three formats.
#[derive(Debug, Clone, Copy, PartialEq, Eq, clap::ValueEnum)]
pub enum Target {
    /// DeepSpeed JSON
    #[value(name = "deepspeed")]
    DeepSpeed,
    /// Accelerate YAML
    Accelerate,
    /// Umbra TOML
    Umbra,
}

/// `umbra config convert`.
#[derive(Debug, Args)]
pub struct ConvertArgs {
    /// The file, or several that belong together
    #[arg(value_name = "FILE", required = true)]
    pub files: Vec<PathBuf>,
    /// The format to write
    #[arg(long, value_name = "deepspeed|accelerate|umbra", hide_possible_values = true)]
    pub to: Target,
    /// Where to [default: standard output]
    #[arg(long, value_name = "FILE")]
    pub out: Option<PathBuf>,
    /// Canonical ranks, where the files do not say how many [default: 4]
    #[arg(long, value_name = "N")]
    pub lanes: Option<usize>,
    /// The model, whose config.json says in which dtype weights are loaded [default: tiny]
    #[arg(long, value_name = "DIR|tiny")]
    pub model: Option<PathBuf>,
    /// The program the files were written for
    #[arg(long, value_name = "NAME=VALUE", num_args = 1..)]
    pub assume: Vec<String>,
}
