//! What a step reports: measured on every rank, gathered once, written by rank 0.

use super::prepare::Prepared;
use super::resume::Checkpoint;
use crate::host::sgemm_rate;
use crate::metrics::{MetricsWriter, StepRecord};
use crate::plan::RunPlan;
use crate::progress::Progress;
use crate::table::{self, StartupFacts};
use crate::{Failure, Result, memory};
use collectives::Comm;
use models::{Config, params};
use optim::StepReport;
use spmd_core::{Batch, Device};

/// The product whose speed `mfu` is a share of: this many rows, columns and terms, a few milliseconds in all.
const SGEMM: usize = 512;

/// Keeps counts, writes metrics and shows progress.
#[derive(Debug)]
pub(crate) struct Recorder {
    comm: Comm,
    config: Config,
    steps: u64,
    steps_per_epoch: u64,
    /// Operations a second of all ranks in a matrix product.
    peak: f64,
    mem_plan: u64,
    facts: StartupFacts,
    tokens: u64,
    /// Mean seconds of a step so far, the first left out where possible.
    pace: f64,
    measured: u64,
    progress: Progress,
    writer: Option<MetricsWriter>,
    last: Option<StepRecord>,
    /// Seconds the last checkpoint held training up for.
    held_up: Option<f64>,
}

/// A step that was made.
#[derive(Debug)]
pub(crate) struct Made {
    pub(crate) step: u64,
    pub(crate) lr: f64,
    pub(crate) report: StepReport,
    /// Targets of the whole step.
    pub(crate) supervised: u64,
    /// Seconds it took.
    pub(crate) seconds: f64,
    /// Of those, seconds its data took.
    pub(crate) data: f64,
    pub(crate) hash: Option<u64>,
}

impl Recorder {
    pub(crate) fn new(
        plan: &RunPlan,
        prepared: &Prepared,
        device: &Device,
        comm: &Comm,
        baseline: Option<u64>,
        from: Option<&Checkpoint>,
    ) -> Result<Self> {
        let rate = sgemm_rate(device, SGEMM).map_err(Failure::from)?;
        let own = [rate, baseline.unwrap_or(0) as f64];
        let gathered = comm.gather_f64(&own).map_err(Failure::from)?;
        let peak = gathered.iter().step_by(2).sum();
        let largest = gathered.iter().skip(1).step_by(2).fold(0.0, |a: f64, b| a.max(*b)) as u64;
        let facts = facts(plan, prepared, device, baseline.map(|_| largest));
        let root = comm.rank() == 0;
        Ok(Recorder {
            comm: comm.clone(),
            config: prepared.source.config.clone(),
            steps: prepared.steps,
            steps_per_epoch: prepared.sampler.steps_per_epoch(),
            peak,
            mem_plan: facts.total(),
            facts,
            tokens: from.map_or(0, |checkpoint| checkpoint.state().run.tokens),
            pace: 0.0,
            measured: 0,
            progress: if root { Progress::new(prepared.steps, plan.log_every) } else { Progress::hidden() },
            writer: None,
            last: None,
            held_up: None,
        })
    }

    /// The start-up table.
    pub(crate) fn startup_table(&self) -> String {
        table::startup_table(&self.facts)
    }

    /// Rank 0: where metrics go.
    pub(crate) fn write_to(&mut self, writer: MetricsWriter) {
        self.writer = Some(writer);
    }

    /// Tokens since the start of the run.
    pub(crate) fn tokens(&self) -> u64 {
        self.tokens
    }

    /// Training was held up for so many seconds by a checkpoint; the next step's record says so.
    pub(crate) fn held_up(&mut self, seconds: f64) {
        self.held_up = Some(seconds);
    }

    /// After a step: gathers what only each rank knows, then rank 0 writes and shows it.
    pub(crate) fn step(&mut self, made: &Made, batches: &[Batch]) -> Result<()> {
        let report = &made.report;
        let tokens: usize = batches.iter().map(|b| b.tokens).sum();
        let resident = memory::peak_rss().unwrap_or(0) as f64;
        let held_up = self.held_up.take();
        let own = [
            tokens as f64,
            flops(&self.config, batches),
            resident,
            report.comm_seconds,
            report.optim_seconds,
            made.data,
            held_up.unwrap_or(0.0),
        ];
        let all = self.comm.gather_f64(&own).map_err(Failure::from)?;
        let column = |i: usize| all.iter().skip(i).step_by(own.len()).copied();
        let largest = |i: usize| column(i).fold(0.0, f64::max);
        let (tokens, flops) = (column(0).sum::<f64>(), column(1).sum::<f64>());
        let (step, seconds) = (made.step, made.seconds);
        self.tokens += tokens as u64;
        self.keep_pace(seconds);
        let (tps, rate) = (tokens / seconds, flops / seconds);
        let record = StepRecord {
            step,
            loss: report.loss,
            grad_norm: report.grad_norm,
            clip_coef: report.clip_coef,
            lr: made.lr,
            swallowed: report.swallowed,
            arrived: report.arrived,
            tokens: self.tokens,
            supervised: made.supervised,
            tps,
            tps_per_rank: tps / self.comm.world() as f64,
            tflops: rate / 1e12,
            mfu: (self.peak > 0.0).then(|| rate / self.peak),
            step_ms: seconds * 1e3,
            data_ms: largest(5) * 1e3,
            comm_ms: largest(3) * 1e3,
            optim_ms: largest(4) * 1e3,
            mem_gib: (largest(2) > 0.0).then(|| largest(2) / (1u64 << 30) as f64),
            mem_plan_gib: self.mem_plan as f64 / (1u64 << 30) as f64,
            epoch: (step + 1) as f64 / self.steps_per_epoch as f64,
            eta_s: self.pace * (self.steps - step - 1) as f64,
            save_ms: held_up.map(|_| largest(6) * 1e3),
            state_hash: made.hash.map(|hash| format!("{hash:016x}")),
        };
        let written = match &mut self.writer {
            Some(writer) => writer.write(&record),
            None => Ok(()),
        };
        self.progress.step(&record);
        self.last = Some(record);
        // Only rank 0 writes, so only it can fail: the others learn of it in the meeting.
        crate::launch::meet(&self.comm, written)
    }

    fn keep_pace(&mut self, seconds: f64) {
        self.measured += 1;
        // The first step touches memory for the first time; it says little about the others.
        let n = self.measured.saturating_sub(1).max(1) as f64;
        self.pace = if self.measured <= 2 { seconds } else { self.pace + (seconds - self.pace) / n };
    }

    pub(crate) fn finish(&mut self) -> Result<()> {
        self.progress.finish(self.last.as_ref());
        let written = self.writer.as_mut().map_or(Ok(()), MetricsWriter::finish);
        crate::launch::meet(&self.comm, written)
    }
}

/// Operations of a training step on these micro-batches: 6 a weight of a matrix product and token computed (padding
/// included), and 12·d a query-key pair and head (two products forward, four backward).
fn flops(config: &Config, micro: &[Batch]) -> f64 {
    let attention = (12 * config.head_dim * config.heads * config.layers) as f64;
    let weights = 6.0 * params::matmul_weights(config) as f64;
    let batch = |b: &Batch| {
        let pairs = b.rows as f64 * params::attended_pairs(config, b.cols) as f64;
        weights * (b.rows * b.cols) as f64 + attention * pairs
    };
    micro.iter().map(batch).sum()
}

fn facts(plan: &RunPlan, prepared: &Prepared, device: &Device, baseline: Option<u64>) -> StartupFacts {
    let source = &prepared.source;
    let data = match plan.data.as_slice() {
        [] => crate::tiny::TEXT_NAME.to_owned(),
        [one] => one.display().to_string(),
        [first, rest @ ..] => format!("{} and {} more", first.display(), rest.len()),
    };
    StartupFacts {
        model: source.name(),
        shape: source.shape(),
        params: params::count(source.units()) as u64,
        policy: plan.policy,
        precision: plan.precision(),
        optimizer: plan.optimizer_in_words(),
        world: plan.world,
        layout: layout(plan),
        stages: prepared.stages.clone(),
        same_bits: !plan.different_bits,
        lanes: plan.lanes,
        device: device.name().to_owned(),
        data,
        rows: prepared.sampler.data().len() as u64,
        cut: prepared.sampler.data().cut() as u64,
        without_target: prepared.sampler.data().without_target() as u64,
        seq_len: prepared.longest,
        micro_batch: plan.micro_batch,
        accum: plan.accum,
        tokens_per_step: (plan.global_batch * prepared.longest) as u64,
        steps: prepared.steps,
        epochs: prepared.steps as f64 / prepared.sampler.steps_per_epoch() as f64,
        schedule: plan.schedule_in_words(&prepared.schedule),
        segments: prepared.segments.clone(),
        baseline,
        available: memory::available(),
        out: plan.out.display().to_string(),
        preset: plan.preset,
    }
}

/// How the state lies on the ranks, in words.
pub(crate) fn layout(plan: &RunPlan) -> String {
    let mut text = match plan.world {
        1 => "1 rank".to_owned(),
        world => format!("{world} ranks, ZeRO-{}", plan.stage),
    };
    if plan.stage > 0 && plan.shard_group < plan.world {
        text += &format!(" in groups of {}", plan.shard_group);
    }
    if plan.stage == 3 && !plan.reshard_after_forward && plan.world > 1 {
        text += ", weights kept until the step";
    }
    if plan.recompute {
        text += ", blocks recomputed";
    }
    if plan.lanes != plan.world {
        let passes = if plan.passes() == 1 { "1 pass".to_owned() } else { format!("{} passes", plan.passes()) };
        text += &format!(", {} lane(s) in {passes}", plan.lanes);
    }
    if plan.lanes < plan.world {
        text += &format!(", {} ranks idle", plan.world - plan.lanes);
    }
    if plan.different_bits {
        text += " (--allow-different-bits: sums in another order than these lanes' own)";
    }
    text
}
