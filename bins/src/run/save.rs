//! Checkpoints while a run goes on: a copy of this rank's part of the state is written by a thread of its own, and training
//! waits only for the copy.
//!
//! A save has two parts. Every rank writes and syncs its own byte ranges; when all have, rank 0 writes what holds them
//! together and gives the folder its name. Ranks learn of each other's progress in a small gather after every step while a
//! save goes on, so that all of them take each turn in the same step.

use super::prepare::{Prepared, grid};
use super::resume::settings_to_keep;
use crate::checkpoint::{self, Files, Role, RoleDTypes, Run, RunFacts, SavePlan, SaveSpec, SourceFacts, Written};
use crate::cli::{CheckpointFiles, SaveFailure};
use crate::hf::save::MAX_SHARD_BYTES;
use crate::host::{clock, note};
use crate::launch::meet;
use crate::plan::RunPlan;
use crate::{Exit, Failure, Result, table};
use collectives::Comm;
use models::Mistral;
use optim::{Layout, Snapshot, State, Trainer};
use spmd_core::{Device, UnitModel, UnitSpec, View};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::thread::JoinHandle;

/// Saves checkpoints as the plan says.
#[derive(Debug)]
pub(crate) struct Saver {
    comm: Comm,
    out: PathBuf,
    every: Option<u64>,
    keep: u64,
    on_failure: SaveFailure,
    files: Files,
    source: SourceFacts,
    dtypes: RoleDTypes,
    /// What each rank writes.
    runs: Vec<Vec<Run>>,
    /// What every checkpoint of this run says of it, but for the place it has reached.
    facts: RunFacts,
    /// Room for the copy; the thread has it while it writes.
    snapshot: Option<Snapshot>,
    going: Option<Going>,
    /// The newest complete checkpoint of this run.
    newest: Option<u64>,
}

/// A save that goes on.
#[derive(Debug)]
struct Going {
    step: u64,
    plan: Arc<SavePlan>,
    facts: RunFacts,
    began: f64,
    part: Part,
}

#[derive(Debug)]
enum Part {
    /// Every rank writes; the copy comes back with the result.
    Writing(JoinHandle<(Snapshot, Result<Written>)>),
    /// Rank 0 completes the folder; the others have nothing to do.
    Completing(Option<JoinHandle<Result<()>>>),
}

impl Saver {
    /// Lays out what checkpoints of this run need; room for the copy is made now, if any is to be written meanwhile.
    pub(crate) fn new(
        plan: &RunPlan,
        prepared: &Prepared,
        device: &Device,
        layout: &Layout,
        comm: &Comm,
    ) -> Result<Self> {
        let precision = plan.precision();
        let snapshot = plan.save_every.map(|_| Snapshot::new(device, layout, &precision)).transpose();
        let units = prepared.source.units();
        let runs = (0..comm.world()).map(|rank| runs(&Layout::new(units, grid(plan, rank), false))).collect();
        Ok(Saver {
            comm: comm.clone(),
            out: plan.out.clone(),
            every: plan.save_every,
            keep: plan.keep,
            on_failure: plan.save_failure,
            files: match plan.checkpoint_files {
                CheckpointFiles::Shared => Files::Shared,
                CheckpointFiles::PerRank => Files::PerRank,
            },
            source: prepared.source.facts(comm.rank() == 0)?,
            dtypes: RoleDTypes::new(precision.shadow, precision.moments),
            runs,
            facts: RunFacts {
                tokens: 0,
                settings_json: settings_to_keep(plan, &prepared.rows()),
                policy: plan.policy.name().to_owned(),
                lanes: plan.lanes as u64,
                stage: plan.stage,
                shard_group: plan.shard_group as u64,
                epoch: 0,
                row_in_epoch: 0,
                state_hash: None,
            },
            snapshot: snapshot.map_err(Failure::from)?,
            going: None,
            newest: None,
        })
    }

    /// Rank 0, before the first step: removes what unfinished saves have left, and finds out whether the disk has room.
    pub(crate) fn begin(&self, units: &[UnitSpec]) -> Result<()> {
        if self.keep == 0 || self.comm.rank() != 0 {
            return Ok(());
        }
        for dir in checkpoint::clean(&self.out)? {
            note(format_args!("{}: left by an unfinished save, removed", dir.display()));
        }
        let one = self.plan(units, 0)?.bytes();
        // One that cannot be asked is found full when it is.
        let Ok(free) = checkpoint::free_bytes(&self.out) else { return Ok(()) };
        let held = checkpoint::list(&self.out)?.len() as u64;
        let more = match self.every {
            // One more than are kept, because the old one goes when the new one is there.
            Some(_) => (self.keep + 1).saturating_sub(held).max(1),
            None => 1,
        };
        if free < one {
            return Err(Failure::disk("the disk has no room for a checkpoint")
                .at(self.out.display())
                .expected(format!("{} bytes ({})", one, table::bytes(one)))
                .found(format!("{} bytes ({}) free", free, table::bytes(free)))
                .hint("free space, another --out, or --keep 0: no checkpoints, only the model at the end"));
        }
        if free < one * more {
            let (one, free) = (table::bytes(one), table::bytes(free));
            note(format_args!(
                "warning: {}: {free} free, and {more} more checkpoint(s) of {one} each are to be there at once; a save may fail",
                self.out.display()
            ));
        }
        Ok(())
    }

    /// What was read of the source when the run began.
    pub(crate) fn source(&self) -> &SourceFacts {
        &self.source
    }

    /// Whether a checkpoint is due after `done` steps.
    pub(crate) fn is_due(&self, done: u64) -> bool {
        self.keep > 0 && self.every.is_some_and(|every| done.is_multiple_of(every))
    }

    /// Starts saving the state after `done` steps; training is held up for the copy, and for an earlier save that
    /// is not done yet.
    ///
    /// # Errors
    /// A save that failed, unless the run is to go on then.
    pub(crate) fn start(&mut self, done: u64, trainer: &Trainer<Mistral>, facts: RunFacts) -> Result<()> {
        let began = clock();
        if self.going.is_some() {
            self.wait()?;
            let waited = clock() - began;
            if self.comm.rank() == 0 && waited > 0.1 {
                note(format_args!("step {done}: waited {waited:.1} s for the save before; --save-every is too small"));
            }
        }
        let made = self.plan(trainer.model.units(), done);
        let created = made.and_then(|plan| {
            if self.comm.rank() == 0 {
                plan.create()?;
            }
            Ok(Arc::new(plan))
        });
        let plan = match meet(&self.comm, created) {
            Ok(plan) => plan,
            Err(failure) => return self.failed(failure),
        };
        let Some(mut snapshot) = self.snapshot.take() else {
            return Err(Failure::new(Exit::Bug, "a save began without room for its copy"));
        };
        snapshot.take(&trainer.state, &trainer.layout);
        let (rank, writing) = (self.comm.rank(), plan.clone());
        let write = move || {
            let written = writing.write_rank(rank, |unit, role| snapshot.slice(unit, of(role)));
            (snapshot, written)
        };
        let part = Part::Writing(spawn(write)?);
        self.going = Some(Going { step: done, plan, facts, began, part });
        Ok(())
    }

    /// After every step, on every rank: whether the save that goes on, if any, can take its next turn.
    ///
    /// # Errors
    /// A save that failed, unless the run is to go on then.
    pub(crate) fn poll(&mut self) -> Result<()> {
        let Some(going) = &self.going else { return Ok(()) };
        let ended = match &going.part {
            Part::Writing(thread) => thread.is_finished(),
            Part::Completing(thread) => thread.as_ref().is_none_or(JoinHandle::is_finished),
        };
        let all = self.comm.gather_u64(&[u64::from(ended)]).map_err(Failure::from)?;
        if all.iter().all(|ended| *ended == 1) { self.turn() } else { Ok(()) }
    }

    /// Waits for the save that goes on, if any.
    ///
    /// # Errors
    /// As [`Saver::poll`].
    pub(crate) fn wait(&mut self) -> Result<()> {
        while self.going.is_some() {
            self.turn()?;
        }
        Ok(())
    }

    /// Tells that the state after `step` steps is in a checkpoint of this run's own folder already: written again, it would
    /// for a moment have to make room for itself.
    pub(crate) fn has(&mut self, step: u64) {
        self.newest = Some(step);
    }

    /// Saves the state at the end of the run, from where it lies, and waits for it.
    ///
    /// # Errors
    /// A save that failed, unless the run is to go on then.
    pub(crate) fn last(&mut self, done: u64, trainer: &Trainer<Mistral>, facts: RunFacts) -> Result<()> {
        self.wait()?;
        if self.keep == 0 || self.newest == Some(done) {
            return Ok(());
        }
        let began = clock();
        let plan = self.plan(trainer.model.units(), done)?;
        let created = if self.comm.rank() == 0 { plan.create() } else { Ok(()) };
        if let Err(failure) = meet(&self.comm, created) {
            return self.failed(failure);
        }
        let written =
            plan.write_rank(self.comm.rank(), |unit, role| slice(&trainer.state, &trainer.layout, unit, role));
        let completed = self.gather(written).and_then(|all| match self.comm.rank() {
            0 => complete(&plan, facts, &all, &self.out, self.keep),
            _ => Ok(()),
        });
        match meet(&self.comm, completed) {
            Ok(()) => {
                self.announce(done, &plan, clock() - began);
                Ok(())
            }
            Err(failure) => {
                self.discard(&plan);
                self.failed(failure)
            }
        }
    }

    /// What a checkpoint after `done` steps says of the run.
    pub(crate) fn facts(&self, done: u64, prepared: &Prepared, tokens: u64, state_hash: Option<u64>) -> RunFacts {
        let (epoch, step) = prepared.sampler.epoch(done);
        let row_in_epoch = step * prepared.sampler.global_rows() as u64;
        RunFacts { tokens, epoch, row_in_epoch, state_hash, ..self.facts.clone() }
    }

    /// The next turn of the save that goes on; waits for what this rank does in it.
    fn turn(&mut self) -> Result<()> {
        let Some(Going { step, plan, facts, began, part }) = self.going.take() else { return Ok(()) };
        match part {
            Part::Writing(thread) => {
                let (snapshot, written) = thread.join().map_err(|_| died())?;
                self.snapshot = Some(snapshot);
                let all = match self.gather(written) {
                    Ok(all) => all,
                    Err(failure) => {
                        self.discard(&plan);
                        return self.failed(failure);
                    }
                };
                let completing = (self.comm.rank() == 0).then(|| {
                    let (plan, facts, out, keep) = (plan.clone(), facts.clone(), self.out.clone(), self.keep);
                    spawn(move || complete(&plan, facts, &all, &out, keep))
                });
                let part = Part::Completing(completing.transpose()?);
                self.going = Some(Going { step, plan, facts, began, part });
                Ok(())
            }
            Part::Completing(thread) => {
                let completed = thread.map_or(Ok(()), |thread| thread.join().map_err(|_| died())?);
                match meet(&self.comm, completed) {
                    Ok(()) => {
                        self.announce(step, &plan, clock() - began);
                        Ok(())
                    }
                    Err(failure) => {
                        self.discard(&plan);
                        self.failed(failure)
                    }
                }
            }
        }
    }

    /// What every rank has written, in rank order, as bytes.
    fn gather(&self, written: Result<Written>) -> Result<Vec<Vec<u8>>> {
        let own = meet(&self.comm, written.and_then(|written| written.to_bytes()))?;
        self.comm.gather_bytes(&own).map_err(Failure::from)
    }

    fn plan(&self, units: &[UnitSpec], step: u64) -> Result<SavePlan> {
        SavePlan::new(SaveSpec {
            out_dir: &self.out,
            step,
            units,
            dtypes: self.dtypes,
            source: &self.source,
            files: self.files,
            runs: &self.runs,
            max_file_bytes: MAX_SHARD_BYTES,
        })
    }

    fn discard(&self, plan: &SavePlan) {
        if self.comm.rank() == 0 {
            plan.discard();
        }
    }

    /// What becomes of a failure: the run's, or a warning.
    fn failed(&self, failure: Failure) -> Result<()> {
        if self.on_failure == SaveFailure::Stop || failure.exit == Exit::Lost {
            return Err(failure);
        }
        if self.comm.rank() == 0 {
            note(format_args!(
                "warning: a checkpoint could not be saved; the run goes on (--save-failure continue)\n{}",
                failure.as_reason()
            ));
        }
        Ok(())
    }

    fn announce(&mut self, step: u64, plan: &SavePlan, seconds: f64) {
        self.newest = Some(step);
        if self.comm.rank() == 0 {
            let size = table::bytes(plan.bytes());
            note(format_args!("checkpoint of step {step}: {} ({size} in {seconds:.2} s)", plan.dir().display()));
        }
    }
}

/// Rank 0: gives the checkpoint its name and removes those that are too many. One that cannot be removed is no reason to
/// call the new one failed.
fn complete(plan: &SavePlan, facts: RunFacts, written: &[Vec<u8>], out: &Path, keep: u64) -> Result<()> {
    let written: Vec<Written> = written.iter().map(|bytes| Written::from_bytes(bytes)).collect::<Result<_>>()?;
    plan.commit(facts, &written)?;
    if let Err(failure) = checkpoint::keep(out, usize::try_from(keep).unwrap_or(usize::MAX), None) {
        note(format_args!("warning: an old checkpoint could not be removed\n{}", failure.as_reason()));
    }
    Ok(())
}

/// What the rank of `layout` writes.
fn runs(layout: &Layout) -> Vec<Run> {
    let of_unit = |(unit, segments): (usize, &Vec<optim::layout::Segment>)| {
        let run =
            move |s: &optim::layout::Segment| Run { unit, param: s.param, start: s.start, range: s.range.clone() };
        segments.iter().map(run).collect::<Vec<_>>()
    };
    layout.slices.iter().enumerate().flat_map(of_unit).collect()
}

fn slice<'a>(state: &'a State, layout: &Layout, unit: usize, role: Role) -> View<'a> {
    state.slice(layout, unit, of(role))
}

/// The optimizer's name of a role that training goes on from.
pub(crate) fn of(role: Role) -> optim::Role {
    match role {
        Role::Shadow | Role::Model | Role::TiedHead => optim::Role::Shadow,
        Role::ExpAvg => optim::Role::ExpAvg,
        Role::ExpAvgSq => optim::Role::ExpAvgSq,
    }
}

/// A checkpoint's name of what the optimizer keeps.
pub(crate) fn kept_as(role: optim::Role) -> Role {
    match role {
        optim::Role::Shadow => Role::Shadow,
        optim::Role::ExpAvg => Role::ExpAvg,
        optim::Role::ExpAvgSq => Role::ExpAvgSq,
    }
}

fn spawn<T: Send + 'static>(work: impl FnOnce() -> T + Send + 'static) -> Result<JoinHandle<T>> {
    std::thread::Builder::new().name("checkpoint".to_owned()).spawn(work).map_err(|e| {
        Failure::new(Exit::Memory, "the thread that writes a checkpoint could not be started")
            .found(e)
            .hint("check the limits on threads and processes (ulimit -u)")
    })
}

fn died() -> Failure {
    Failure::new(Exit::Bug, "the thread that writes a checkpoint ended without a result")
}
