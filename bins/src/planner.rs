//! `umbra plan`: the run, resolved and not started. Settings and where they come from, the dtype of every number and who
//! decided it, bytes held and sent, time, what would make it fit, and what bf16 weights would swallow.

mod fit;
mod ledger;
mod machine;
mod swallow;
mod text;

use crate::cli::PlanArgs;
use crate::config::merge;
use crate::host::answer;
use crate::plan::{Length, ModelSource, RunPlan, defaults};
use crate::run::prepare::{footprint, segments};
use crate::{Failure, Result, hf, memory, tiny};
use fit::Remedy;
use ledger::Line;
use machine::{Machine, Prediction};
use models::params;
use spmd_core::UnitSpec;
use swallow::Swallowed;

/// Everything that is said of a run.
#[derive(Debug)]
pub struct Planned {
    /// The settings.
    pub(crate) plan: RunPlan,
    units: Vec<UnitSpec>,
    /// Tokens of a row.
    seq_len: usize,
    /// Each class of numbers in each phase.
    ledger: Vec<Line>,
    /// Bytes of the largest rank, by segment, the process itself left out.
    segments: Vec<(String, u64)>,
    /// Bytes a rank sends in a step: weights gathered, gradients reduced.
    sent: [u64; 2],
    machine: Machine,
    prediction: Prediction,
    remedies: Vec<Remedy>,
    /// None without weights.
    swallowed: Option<Swallowed>,
}

/// Runs `umbra plan` for a launch of `world` ranks with `cores` each.
///
/// # Errors
/// Exit 2 for settings that cannot be, exit 3 for a model that cannot be read.
pub fn run(args: &PlanArgs, world: usize, cores: usize) -> Result<()> {
    let planned = Planned::new(args, world, cores)?;
    let text = if args.json { format!("{:#}\n", planned.to_json()) } else { planned.to_string() };
    answer(&text).map(|_| ())
}

impl Planned {
    /// Works it out.
    ///
    /// # Errors
    /// As [`run`].
    pub fn new(args: &PlanArgs, world: usize, cores: usize) -> Result<Self> {
        crate::cli::at_least_one("--ranks", args.ranks)?;
        let ranks = args.ranks.unwrap_or(world);
        let merged = merge(&args.train, Some(ranks))?;
        let plan = RunPlan::resolve(&merged, ranks, cores, None)?;
        let machine = Machine::read(args, &plan)?;
        let config = match &plan.model {
            ModelSource::Tiny => tiny::config(),
            ModelSource::Folder(dir) => hf::read_config(dir)?.0,
        };
        let seq_len = plan.seq_len.unwrap_or(defaults::SEQ_LEN.min(config.max_positions));
        if seq_len > config.max_positions {
            return Err(Failure::usage("the sequences are longer than the model was made for")
                .at("--seq-len")
                .expected(format!("at most {}, the model's max_position_embeddings", config.max_positions))
                .found(seq_len));
        }
        let units = params::units(&config);
        let segments = segments(&plan, &config, &units, seq_len, plan.sharding())?;
        let cost = footprint(&plan, &config, &units, plan.sharding())?;
        let sent = [cost.sent_weights, cost.sent_gradients];
        let prediction = machine.predict(&plan, &config, seq_len, sent)?;
        let needed = segments.iter().map(|(_, n)| n).sum();
        let remedies = fit::remedies(&plan, &config, &units, seq_len, needed, machine.memory)?;
        let swallowed = swallow::of(&plan, &units)?;
        let ledger = ledger::lines(&plan, &units, &cost);
        Ok(Planned { plan, units, seq_len, ledger, segments, sent, machine, prediction, remedies, swallowed })
    }

    /// Bytes of all segments.
    pub fn needed(&self) -> u64 {
        self.segments.iter().map(|(_, n)| n).sum()
    }

    /// Tokens of a step, all lanes, none of them padding.
    fn tokens(&self) -> u64 {
        (self.plan.global_batch * self.seq_len) as u64
    }

    /// Optimizer steps, if the settings alone say how many.
    fn steps(&self) -> Option<u64> {
        match self.plan.length {
            Length::Steps(steps) => Some(steps),
            Length::Epochs(_) => None,
        }
    }
}

/// What this machine has left, where nothing else is planned for.
fn available() -> Option<u64> {
    memory::available()
}
