//! `umbra train`: prepare, load, step, save. Ranks meet after every phase that can fail on one of them alone.

mod agree;
mod output;
pub(crate) mod prepare;
mod record;

use crate::host::{clock, note};
use crate::launch::meet;
use crate::plan::RunPlan;
use crate::source::Source;
use crate::{Exit, Failure, Result};
use collectives::Comm;
use models::Mistral;
use optim::{Grads, Hyper, StepReport, Trainer, train_step};
use output::{Output, Start};
use prepare::Prepared;
use record::Recorder;
use spmd_core::{Batch, Device};

/// Trains. Every rank calls it with the same plan and returns the same result.
///
/// # Errors
/// The failure to show, the same on every rank.
pub fn train(plan: &RunPlan, comm: &Comm) -> Result<()> {
    let mut prepared = meet(comm, Prepared::new(plan))?;
    agree::agree(plan, &prepared, comm)?;
    let mut output = match meet(comm, Output::open(plan, &prepared, comm))? {
        Start::Finished(message) => {
            if comm.rank() == 0 {
                note(message);
            }
            return Ok(());
        }
        Start::Fresh(output) => output,
    };
    let device = meet(comm, Device::cpu(plan.threads).map_err(Failure::from))?;
    let baseline = crate::memory::resident();
    meet(comm, prepared.check_memory(plan, comm))?;
    let mut trainer = meet(comm, build(plan, &prepared, &device, comm))?;
    meet(comm, load(&mut trainer, &prepared.source))?;
    let mut recorder = Recorder::new(plan, &prepared, &device, comm, baseline)?;
    meet(comm, output.begin(plan, &prepared, &mut recorder))?;
    for step in 0..prepared.steps {
        one_step(step, plan, &mut prepared, &mut trainer, &mut recorder)?;
    }
    recorder.finish();
    meet(comm, output.save_model(&trainer, &prepared.source, comm))?;
    meet(comm, output.finish(plan, prepared.steps))
}

/// The trainer, every buffer allocated, weights still zero.
fn build(plan: &RunPlan, prepared: &Prepared, device: &Device, comm: &Comm) -> Result<Trainer<Mistral>> {
    let precision = plan.policy.precision();
    let config = prepared.source.config.clone();
    let (rows, cols) = (plan.micro_batch, prepared.longest);
    let model = Mistral::new(device.clone(), config, precision.compute, rows, cols).map_err(Failure::from)?;
    Trainer::new(model, device.clone(), comm.clone(), precision, plan.decay_norms, clock).map_err(Failure::from)
}

/// Fills this rank's shards, reading only its byte ranges.
pub(crate) fn load(trainer: &mut Trainer<Mistral>, source: &Source) -> Result<()> {
    let Trainer { state, layout, .. } = trainer;
    state.load(source.units(), layout, |param, start, out| source.fill(param, start, out))
}

/// One optimizer step: this rank's micro-batches, the step, the record.
fn one_step(
    step: u64,
    plan: &RunPlan,
    prepared: &mut Prepared,
    trainer: &mut Trainer<Mistral>,
    recorder: &mut Recorder,
) -> Result<()> {
    let started = clock();
    let (targets, micro) = prepared.step_data(step, trainer.comm.rank())?;
    let data_seconds = clock() - started;
    let hyper = Hyper {
        lr: prepared.schedule.at(step),
        beta1: plan.beta1,
        beta2: plan.beta2,
        eps: plan.eps,
        weight_decay: plan.weight_decay,
        max_norm: plan.clip,
        seed: plan.seed,
    };
    let dump = plan.dump.as_ref().filter(|_| step == 0);
    let report = match dump {
        None => train_step(trainer, &micro, targets, &hyper, &mut |_, _| {}),
        Some(dir) => dumped_step(dir, &prepared.source, trainer, &micro, targets, &hyper)?,
    };
    let report = report.map_err(|e| at_step(e.into(), step))?;
    recorder.step(step, hyper.lr, &report, &micro, targets, (started, data_seconds))
}

/// A step whose logits and gradients are written to `dir`.
fn dumped_step(
    dir: &std::path::Path,
    source: &Source,
    trainer: &mut Trainer<Mistral>,
    micro: &[Batch],
    targets: u64,
    hyper: &Hyper,
) -> Result<optim::Result<StepReport>> {
    let comm = trainer.comm.clone();
    let layout = trainer.layout.clone();
    trainer.model.collect_logits();
    let mut shards = Ok(Vec::new());
    let mut inspect = |_: &Mistral, grads: &Grads| shards = output::gradient_parts(grads, source.units(), &layout);
    let report = train_step(trainer, micro, targets, hyper, &mut inspect);
    let logits = trainer.model.take_logits().unwrap_or_default();
    if report.is_ok() {
        let written = shards.and_then(|parts| output::dump(dir, source, &comm, micro, &logits, parts));
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
        }
    }
}
