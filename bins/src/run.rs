//! `umbra train`: find what to go on from, prepare, load, step, save. Ranks meet after every phase that can fail on one of
//! them alone.

mod agree;
mod output;
pub(crate) mod prepare;
mod record;
mod resume;
mod save;

use crate::cli::TrainArgs;
use crate::config;
use crate::host::{clock, note};
use crate::launch::meet;
use crate::plan::RunPlan;
use crate::plan::resume::Change;
use crate::source::Source;
use crate::{Exit, Failure, Result};
use collectives::Comm;
use models::Mistral;
use optim::{Grads, Hyper, StepReport, Trainer, train_step};
use output::{Lock, Output, Start};
use prepare::Prepared;
pub(crate) use record::layout;
use record::{Made, Recorder};
use resume::{Candidates, Checkpoint};
use save::Saver;
use spmd_core::{Batch, Device};

/// Trains, from the beginning or from a checkpoint. Every rank calls it with the same arguments, `cores` being this
/// rank's, and returns the same result.
///
/// # Errors
/// The failure to show, the same on every rank.
pub fn train(args: &TrainArgs, cores: usize, comm: &Comm) -> Result<()> {
    // Which folder a run has is asked before what it goes on from, and only Umbra's own files can say.
    let early = meet(comm, config::merge(args, None))?;
    meet(comm, RunPlan::check_written(&early))?;
    let mut candidates = Candidates::find(&early, comm)?;
    let baseline = crate::memory::resident();
    let session = loop {
        let from = candidates.next(comm)?;
        let resumes = from.is_some();
        let mut restoring = false;
        match Session::open(args, cores, comm, from, &mut candidates.lock, baseline, &mut restoring) {
            // Damage in the numbers is only seen when they are read.
            Err(failure) if resumes && restoring => candidates.pass_over(failure, comm)?,
            opened => break opened?,
        }
    };
    match session {
        Some(session) => session.run(comm),
        None => Ok(()),
    }
}

/// A run that is ready for its next step.
struct Session {
    plan: RunPlan,
    prepared: Prepared,
    from: Option<Checkpoint>,
    /// Seconds it took to read weights, or weights and moments.
    loading: f64,
    changes: Vec<Change>,
    output: Output,
    trainer: Trainer<Mistral>,
    recorder: Recorder,
    saver: Saver,
}

impl Session {
    /// Resolves, prepares, allocates and loads; none if the run is finished already.
    fn open(
        args: &TrainArgs,
        cores: usize,
        comm: &Comm,
        from: Option<Checkpoint>,
        lock: &mut Option<Lock>,
        baseline: Option<u64>,
        restoring: &mut bool,
    ) -> Result<Option<Self>> {
        let kept = from.as_ref().map(Checkpoint::kept);
        let lanes = kept.map_or(comm.world(), |kept| kept.lanes);
        let merged = meet(comm, config::merge(args, Some(lanes)))?;
        let mut plan = meet(comm, RunPlan::resolve(&merged, comm.world(), cores, kept.as_ref()))?;
        // Once sums were made in another order the state is no longer that of its lanes, whatever comes after.
        plan.different_bits |= from.as_ref().is_some_and(Checkpoint::has_different_bits);
        let prepared = meet(comm, Prepared::new(&plan, from.as_ref()))?;
        agree::agree(&plan, &prepared, comm)?;
        let changes = from.as_ref().map(|from| from.changes(&plan, &prepared.rows())).transpose();
        let changes = meet(comm, changes)?.unwrap_or_default();
        let long_enough = from.as_ref().map_or(Ok(()), |from| from.fits(prepared.steps));
        meet(comm, long_enough)?;
        let output = match meet(comm, Output::open(&plan, &prepared, from.as_ref(), lock, comm))? {
            Start::Finished(message) => {
                if comm.rank() == 0 {
                    note(message);
                }
                return Ok(None);
            }
            Start::Open(output) => output,
        };
        let device = meet(comm, Device::cpu(plan.threads).map_err(Failure::from))?;
        meet(comm, prepared.check_memory(&plan, comm))?;
        let mut trainer = meet(comm, build(&plan, &prepared, &device, comm))?;
        let began = clock();
        let loaded = match &from {
            None => load(&mut trainer, &prepared.source),
            Some(checkpoint) => {
                *restoring = true;
                restore(&mut trainer, &prepared.source, checkpoint)
            }
        };
        meet(comm, loaded)?;
        *restoring = false;
        let loading = clock() - began;
        let saver = meet(comm, Saver::new(&plan, &prepared, &device, &trainer.layout, comm))?;
        let recorder = Recorder::new(&plan, &prepared, &device, comm, baseline, from.as_ref())?;
        Ok(Some(Session { plan, prepared, from, loading, changes, output, trainer, recorder, saver }))
    }

    fn run(mut self, comm: &Comm) -> Result<()> {
        let (plan, steps) = (&self.plan, self.prepared.steps);
        meet(comm, self.output.take())?;
        meet(comm, self.saver.begin(self.prepared.source.units()))?;
        // With no step left there is nothing to save: what is there stays as it is.
        if let Some(from) = self.from.as_ref().filter(|from| from.is_of(&plan.out)) {
            self.saver.has(from.state().step);
        }
        let from = self.from.as_ref().map(|checkpoint| (checkpoint, self.loading));
        let begun = self.output.begin(plan, steps, from, &self.changes, &mut self.recorder);
        meet(comm, begun)?;
        for step in self.trainer.state.step..steps {
            if let Err(failure) = self.step(step) {
                // Every rank has found that it is not finite, so all can still finish the save that goes on: it is what a
                // run with a smaller rate goes on from.
                if failure.exit == Exit::NotFinite {
                    let _ = self.saver.wait();
                }
                return Err(failure);
            }
        }
        self.recorder.finish()?;
        let done = self.trainer.state.step;
        let hash = self.trainer.state_hash().map_err(Failure::from)?;
        let facts = self.saver.facts(done, &self.prepared, self.recorder.tokens(), Some(hash));
        self.saver.last(done, &self.trainer, facts)?;
        self.output.save_model(&self.trainer, &self.prepared.source, self.saver.source(), comm)?;
        meet(comm, self.output.finish(&self.plan, steps))
    }

    /// One optimizer step: this rank's batches, the step, what is due after it, the record.
    fn step(&mut self, step: u64) -> Result<()> {
        let Session { plan, prepared, trainer, recorder, saver, .. } = self;
        let started = clock();
        let (targets, batches) = prepared.step_data(step, plan, trainer.comm.rank())?;
        let data = clock() - started;
        let hyper = plan.hyper(&prepared.schedule, step);
        let first = self.from.as_ref().map_or(0, |checkpoint| checkpoint.state().step);
        let dump = plan.dump.as_ref().filter(|_| step == first);
        let report = match dump {
            None => train_step(trainer, &batches, targets, &hyper, &mut |_, _| {}),
            Some(dir) => dumped_step(dir, &prepared.source, trainer, plan, &batches, targets, &hyper)?,
        };
        let report = report.map_err(|e| at_step(e.into(), step))?;
        if step == first {
            meet(&trainer.comm, held_as_planned(trainer))?;
        }
        let seconds = clock() - started;
        let done = step + 1;
        let hashed = plan.hash_every.is_some_and(|every| done.is_multiple_of(every));
        let hash = hashed.then(|| trainer.state_hash()).transpose().map_err(Failure::from)?;
        let made = Made { step, lr: hyper.lr, report, supervised: targets, seconds, data, hash };
        recorder.step(&made, &batches)?;
        let started = clock();
        saver.poll()?;
        // The last state is saved where it lies, without a copy.
        if saver.is_due(done) && done < prepared.steps {
            let facts = saver.facts(done, prepared, recorder.tokens(), hash);
            saver.start(done, trainer, facts)?;
            recorder.held_up(clock() - started);
        }
        Ok(())
    }
}

/// After the first step: every buffer has the size and dtype that the start-up table and `umbra plan` say.
fn held_as_planned(trainer: &Trainer<Mistral>) -> Result<()> {
    trainer.check_held().map_err(|wrong| {
        Failure::new(Exit::Bug, format!("the plan does not say what is held: {}", wrong.what))
            .at(format!("rank {}", trainer.comm.rank()))
            .expected(wrong.planned)
            .found(wrong.found)
    })
}

/// The trainer, every buffer allocated, weights still zero.
fn build(plan: &RunPlan, prepared: &Prepared, device: &Device, comm: &Comm) -> Result<Trainer<Mistral>> {
    let precision = plan.precision();
    let config = prepared.source.config.clone();
    let (rows, cols) = (plan.micro_batch, prepared.longest);
    let model = Mistral::new(device.clone(), config, precision.compute, rows, cols, plan.recompute);
    let model = model.map_err(Failure::from)?;
    let (sharding, decay_norms) = (plan.sharding(), plan.decay_norms);
    Trainer::new(model, device.clone(), comm.clone(), precision, sharding, decay_norms, clock).map_err(Failure::from)
}

/// Fills this rank's shards of a new run, reading only its byte ranges.
pub(crate) fn load(trainer: &mut Trainer<Mistral>, source: &Source) -> Result<()> {
    let Trainer { state, layout, .. } = trainer;
    state.load(source.units(), layout, |param, start, out| source.fill(param, start, out))
}

/// Fills this rank's shards of weights and moments as they were kept, reading only its byte ranges.
fn restore(trainer: &mut Trainer<Mistral>, source: &Source, from: &Checkpoint) -> Result<()> {
    let Trainer { state, layout, .. } = trainer;
    let fill = |role, param: &spmd_core::ParamSpec, start, out: spmd_core::ViewMut<'_>| {
        from.reader.read_into(save::kept_as(role), &param.name, start, out)
    };
    state.restore(source.units(), layout, fill)?;
    state.step = from.state().step;
    Ok(())
}

/// A step whose logits and gradients are written to `dir`.
fn dumped_step(
    dir: &std::path::Path,
    source: &Source,
    trainer: &mut Trainer<Mistral>,
    plan: &RunPlan,
    batches: &[Batch],
    targets: u64,
    hyper: &Hyper,
) -> Result<optim::Result<StepReport>> {
    let comm = trainer.comm.clone();
    let layout = trainer.layout.clone();
    trainer.model.collect_logits();
    let mut shards = Ok(Vec::new());
    let mut inspect = |_: &Mistral, grads: &Grads| shards = output::gradient_parts(grads, source.units(), &layout);
    let report = train_step(trainer, batches, targets, hyper, &mut inspect);
    let logits = trainer.model.take_logits().unwrap_or_default();
    if report.is_ok() {
        let passes = plan.passes();
        let written = shards.and_then(|parts| output::dump(dir, source, &comm, (batches, passes), &logits, parts));
        meet(&comm, written)?;
    }
    Ok(report)
}

/// Adds the step to a failure that stopped it.
fn at_step(failure: Failure, step: u64) -> Failure {
    match failure.exit {
        Exit::NotFinite => Failure { what: format!("step {step}: {}", failure.what), ..failure },
        _ => failure,
    }
}

impl From<optim::Error> for Failure {
    fn from(error: optim::Error) -> Self {
        match error {
            optim::Error::Core(core) => core.into(),
            optim::Error::Comm(comm) => comm.into(),
            optim::Error::NotFinite { .. } => Failure::new(Exit::NotFinite, error.to_string())
                .expected("finite numbers; no weight was changed by this step")
                .hint("a smaller --lr or a longer warm-up; under another policy than fp32, --policy fp32 tells whether precision is the cause"),
            optim::Error::Drift { .. } => Failure::new(Exit::Bug, error.to_string())
                .expected("the same bits on every group of ranks")
                .hint("faulty memory or different processors in one run; --resume goes on from the last checkpoint"),
        }
    }
}
