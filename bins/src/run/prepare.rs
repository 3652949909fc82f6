//! Everything that can be known before the first byte of weights is read: the model, the rows, the length of the run,
//! and the memory it will take.

use super::resume::Checkpoint;
use crate::data::{Dataset, Limits, Sampler};
use crate::plan::{Length, ModelSource, RunPlan, defaults};
use crate::source::Source;
use crate::table::StageFacts;
use crate::{Exit, Failure, Result, memory, table, tiny};
use collectives::Comm;
use models::{Config, activation_bytes};
use optim::{Footprint, Grid, Layout, Schedule, Sharding};
use spmd_core::backend::scratch_bytes;
use spmd_core::ops::AttentionShape;
use spmd_core::{Batch, UnitSpec};

/// What a run works on.
#[derive(Debug)]
pub(crate) struct Prepared {
    /// The model to start from, or the checkpoint to go on from.
    pub(crate) source: Source,
    /// Which row goes where.
    pub(crate) sampler: Sampler,
    /// The longest row a micro-batch can hold.
    pub(crate) longest: usize,
    /// Optimizer steps of the run.
    pub(crate) steps: u64,
    /// The learning rate.
    pub(crate) schedule: Schedule,
    /// Memory by named segment, in bytes.
    pub(crate) segments: Vec<(String, u64)>,
    /// What each ZeRO stage would take on these ranks.
    pub(crate) stages: Vec<StageFacts>,
}

impl Prepared {
    pub(crate) fn new(plan: &RunPlan, from: Option<&Checkpoint>) -> Result<Self> {
        let source = match from {
            Some(checkpoint) => Source::open(&ModelSource::Folder(checkpoint.dir.clone()), plan.seed)?,
            None => Source::open(&plan.model, plan.seed)?,
        };
        let limit = source.config.max_positions;
        let seq_len = plan.seq_len.unwrap_or(defaults::SEQ_LEN.min(limit));
        if seq_len > limit {
            return Err(Failure::usage("the sequences are longer than the model was made for")
                .at("--seq-len")
                .expected(format!("at most {limit}, the model's max_position_embeddings"))
                .found(seq_len)
                .hint("a smaller --seq-len"));
        }
        let limits = Limits { seq_len, vocab_size: source.config.vocab_size, truncate: plan.truncate };
        let tokenizer = source.tokenizer();
        let data = if plan.data.is_empty() {
            Dataset::from_text(tiny::TEXT_NAME, tiny::TEXT, limits, &tokenizer)?
        } else {
            Dataset::load(&plan.data, limits, &tokenizer)?
        };
        let longest = data.longest();
        let mut sampler = Sampler::new(data, plan.micro_batch, plan.accum, plan.lanes, plan.shuffle, plan.seed)?;
        let steps = match plan.length {
            Length::Steps(steps) => steps,
            Length::Epochs(epochs) => ((epochs * sampler.steps_per_epoch() as f64).ceil() as u64).max(1),
        };
        check_targets(&mut sampler, steps)?;
        let schedule = plan.schedule(steps)?;
        let segments = segments(plan, &source.config, source.units(), longest, plan.sharding())?;
        let stages = stages(plan, &source, longest)?;
        Ok(Prepared { source, sampler, longest, steps, schedule, segments, stages })
    }

    /// The targets of the whole step, and this rank's batches: a lane a pass, micro-batch by micro-batch.
    pub(crate) fn step_data(&mut self, step: u64, plan: &RunPlan, rank: usize) -> Result<(u64, Vec<Batch>)> {
        let targets = self.sampler.targets(step)?;
        let lanes: Vec<usize> = (0..plan.passes()).map(|pass| pass * plan.world + rank).collect();
        let mut batches = Vec::with_capacity(plan.accum * lanes.len());
        for j in 0..self.sampler.micro_batches(step) {
            for lane in &lanes {
                // Where the lanes do not fill the last pass, a rank takes part with nothing.
                let lane = Some(*lane).filter(|lane| *lane < plan.lanes);
                batches.push(lane.map_or_else(Batch::default, |lane| self.sampler.batch(step, j, lane)));
            }
        }
        Ok((targets, batches))
    }

    /// The rows, so that two runs can be told to have the same.
    pub(crate) fn rows(&self) -> String {
        let data = self.sampler.data();
        format!("{} rows, {} tokens, hash {:016x}", data.len(), data.tokens(), data.hash())
    }

    /// Bytes of all segments.
    pub(crate) fn planned(&self) -> u64 {
        self.segments.iter().map(|(_, n)| n).sum()
    }

    /// Refuses a run that cannot fit: all ranks of this machine together against what it has.
    pub(crate) fn check_memory(&self, plan: &RunPlan, comm: &Comm) -> Result<()> {
        let Some(available) = memory::available() else { return Ok(()) };
        // Without knowing the nodes, every rank is taken to be on this one only when the launcher says so.
        let local = std::env::var("OMPI_COMM_WORLD_LOCAL_SIZE").ok().and_then(|v| v.parse::<u64>().ok());
        let local = local.unwrap_or(1).min(comm.world() as u64);
        let needed = self.planned() * local;
        if needed <= available {
            return Ok(());
        }
        Err(Failure::new(Exit::Memory, "the run does not fit in memory")
            .expected(format!("at most {} available on this machine", table::bytes(available)))
            .found(format!("{} for its {local} rank(s)", table::bytes(needed)))
            .hint(self.smaller(plan)))
    }

    /// What would take less.
    fn smaller(&self, plan: &RunPlan) -> &'static str {
        let of = |part: &str| self.segments.iter().find(|(name, _)| name == part).map_or(0, |(_, n)| *n);
        if of(ACTIVATIONS) * 2 > self.planned() {
            return match plan.recompute {
                false => {
                    "--recompute block, a smaller --micro-batch (with a larger --accum) or a smaller --seq-len: activations are most of it"
                }
                true => {
                    "a smaller --micro-batch (with a larger --accum) or a smaller --seq-len: activations are most of it"
                }
            };
        }
        if plan.stage < 3 || plan.shard_group < plan.world || !plan.reshard_after_forward {
            return "--stage 3 over all ranks gives the same result and needs the least memory";
        }
        if plan.precision().shadow == spmd_core::DType::F32 {
            return "more ranks on more machines, or --policy low-sr, whose weights and moments take half";
        }
        "more ranks on more machines, or a smaller model"
    }
}

const ACTIVATIONS: &str = "activations";

/// One block of numbers as it is read or lies ready for the disk, one as it is rounded, and what is known of every block.
const CHECKPOINT_SCRATCH: usize = 8 << 20;

/// What each rank holds under `sharding`, by segment, the process itself left out.
pub(crate) fn segments(
    plan: &RunPlan,
    config: &Config,
    units: &[UnitSpec],
    longest: usize,
    sharding: Sharding,
) -> Result<Vec<(String, u64)>> {
    let attention = AttentionShape {
        batch: plan.micro_batch,
        seq_len: longest,
        heads: config.heads,
        kv_heads: config.kv_heads,
        head_dim: config.head_dim,
        window: config.sliding_window,
    };
    let precision = plan.precision();
    let cost = footprint(plan, config, units, sharding)?;
    let tokens = plan.micro_batch * longest;
    let gathered = if sharding.keeps_weights() { "gathered weights, all units" } else { "gathered units" };
    let full = if sharding.keeps_gradients() { "full gradients, all units" } else { "full gradient" };
    let snapshot = if plan.save_every.is_some() { cost.snapshot } else { 0 };
    let segments = [
        ("state shards (shadow, moments)", cost.state),
        (gathered, cost.gathered),
        (full, cost.full),
        ("exchange buffers", cost.exchange),
        ("gradient shards", cost.gradients),
        ("partial sums of lanes", cost.partials),
        (ACTIVATIONS, activation_bytes(config, precision.compute, tokens, plan.recompute)),
        ("kernel scratch", scratch_bytes(plan.threads, &attention, precision.compute)),
        ("snapshot while saving", snapshot),
        ("reading and writing checkpoints", if plan.keep > 0 { CHECKPOINT_SCRATCH } else { 0 }),
    ];
    let here = |(name, n): &(&str, usize)| *n > 0 || *name == ACTIVATIONS;
    Ok(segments.into_iter().filter(here).map(|(name, n)| (name.to_owned(), n as u64)).collect())
}

/// Bytes held and sent by the largest rank under `sharding`.
pub(crate) fn footprint(plan: &RunPlan, config: &Config, units: &[UnitSpec], sharding: Sharding) -> Result<Footprint> {
    let grid = sharding.grid(0, plan.world)?;
    let layout = Layout::new(units, grid, plan.decay_norms);
    let stages = models::params::stages(config);
    Ok(Footprint::new(&layout, &stages, &plan.precision(), &sharding, plan.accum))
}

/// Memory and traffic of every stage on these ranks, everything else as it is.
fn stages(plan: &RunPlan, source: &Source, longest: usize) -> Result<Vec<StageFacts>> {
    if plan.world == 1 {
        return Ok(Vec::new());
    }
    let own = plan.sharding();
    let facts = |stage: u8| -> Result<StageFacts> {
        let sharding = match stage {
            _ if stage == own.stage => own,
            0 => Sharding { stage, group: 1, reshard_after_forward: false, ..own },
            _ => {
                let group = if own.stage == 0 { plan.world } else { own.group };
                Sharding { stage, group, reshard_after_forward: stage == 3, ..own }
            }
        };
        let (config, units) = (&source.config, source.units());
        let bytes = segments(plan, config, units, longest, sharding)?.iter().map(|(_, n)| n).sum();
        Ok(StageFacts {
            stage,
            bytes,
            sent: footprint(plan, config, units, sharding)?.sent(),
            chosen: stage == own.stage,
        })
    };
    (0..=3).map(facts).collect()
}

/// Where every rank's part of the state lies.
pub(crate) fn grid(plan: &RunPlan, rank: usize) -> Grid {
    Grid { rank, world: plan.world, shard: plan.shard_group }
}

/// Refuses a run that would come to a step with nothing to predict, before it starts. Only data with such rows can; so that
/// no run waits for it, the first million steps are looked at, and a later one stops when it comes.
fn check_targets(sampler: &mut Sampler, steps: u64) -> Result<()> {
    const LOOKED_AT: u64 = 1_000_000;
    if sampler.data().without_target() == 0 {
        return Ok(());
    }
    (0..steps.min(LOOKED_AT)).try_for_each(|step| sampler.targets(step).map(|_| ()))
}
