//! Everything that can be known before the first byte of weights is read: the model, the rows, the length of the run,
//! and the memory it will take.

use crate::cli::ScheduleKind;
use crate::data::{Dataset, Limits, Sampler};
use crate::plan::{Length, RunPlan, defaults};
use crate::source::Source;
use crate::{Exit, Failure, Result, memory, table, tiny};
use collectives::Comm;
use models::activation_bytes;
use optim::{Layout, Schedule, Shape, grads, weights};
use spmd_core::Batch;
use spmd_core::backend::scratch_bytes;
use spmd_core::ops::AttentionShape;

/// What a run works on.
#[derive(Debug)]
pub(crate) struct Prepared {
    /// The model to start from.
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
}

impl Prepared {
    pub(crate) fn new(plan: &RunPlan) -> Result<Self> {
        let source = Source::open(&plan.model, plan.seed)?;
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
        let schedule = schedule(plan, steps)?;
        let segments = segments(plan, &source, longest);
        Ok(Prepared { source, sampler, longest, steps, schedule, segments })
    }

    /// The targets of the whole step and this rank's micro-batches.
    pub(crate) fn step_data(&mut self, step: u64, rank: usize) -> Result<(u64, Vec<Batch>)> {
        let targets = self.sampler.targets(step)?;
        let micro = (0..self.sampler.micro_batches(step)).map(|j| self.sampler.batch(step, j, rank)).collect();
        Ok((targets, micro))
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
        let activations = self.segments.iter().find(|(name, _)| name == ACTIVATIONS).map_or(0, |(_, n)| *n);
        let hint = if activations * 2 > self.planned() {
            "a smaller --micro-batch (with a larger --accum) or a smaller --seq-len: activations are most of it"
        } else if plan.policy.precision().shadow == spmd_core::DType::F32 {
            "more ranks on more machines, or --policy low-sr, whose weights and moments take half"
        } else {
            "more ranks on more machines, or a smaller model"
        };
        Err(Failure::new(Exit::Memory, "the run does not fit in memory")
            .expected(format!("at most {} available on this machine", table::bytes(available)))
            .found(format!("{} for its {local} rank(s)", table::bytes(needed)))
            .hint(hint))
    }
}

const ACTIVATIONS: &str = "activations";

/// What each rank holds, by segment, the process itself left out.
pub(crate) fn segments(plan: &RunPlan, source: &Source, longest: usize) -> Vec<(String, u64)> {
    let attention = AttentionShape {
        batch: plan.micro_batch,
        seq_len: longest,
        heads: source.config.heads,
        kv_heads: source.config.kv_heads,
        head_dim: source.config.head_dim,
        window: source.config.sliding_window,
    };
    let precision = plan.policy.precision();
    let config = &source.config;
    let (units, stages) = (source.units(), models::params::stages(config));
    let layout = Layout::new(units, 0, plan.world, plan.decay_norms);
    let state = layout.shard_len() * (precision.shadow.size() + 2 * precision.moments.size());
    let [full, exchange, shards] = grads::grad_bytes(&layout, &stages, &precision);
    let tokens = plan.micro_batch * longest;
    let segments = [
        ("state shards (shadow, moments)", state),
        ("gathered units", weights::gather_bytes(&layout, &stages, precision.compute)),
        ("full gradient", full),
        ("exchange buffers", exchange),
        ("gradient shards", shards),
        (ACTIVATIONS, activation_bytes(config, precision.compute, tokens)),
        ("kernel scratch", scratch_bytes(plan.threads, &attention, precision.compute)),
    ];
    segments.into_iter().map(|(name, n)| (name.to_owned(), n as u64)).collect()
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

fn schedule(plan: &RunPlan, total_steps: u64) -> Result<Schedule> {
    let shape = match plan.schedule {
        ScheduleKind::Constant => Shape::Constant,
        ScheduleKind::Linear => Shape::Linear,
        ScheduleKind::Cosine => Shape::Cosine,
        ScheduleKind::Wsd => Shape::Wsd { decay_steps: plan.decay_steps(total_steps)? },
    };
    let warmup_steps = plan.warmup_steps(total_steps)?;
    Ok(Schedule { lr: plan.lr, min_lr: plan.min_lr, warmup_steps, shape, total_steps })
}
