//! Which checkpoint a run goes on from, if any: found by rank 0, told to every rank.

use super::output::Lock;
use crate::checkpoint::{self, CheckpointState, Reader, is_checkpoint};
use crate::cli::TrainArgs;
use crate::host::note;
use crate::launch::meet;
use crate::plan::resume::{Change, changes, check};
use crate::plan::{Kept, ModelSource, Resume, RunPlan, defaults};
use crate::source::Source;
use crate::{Exit, Failure, Result};
use collectives::Comm;
use serde_json::Value;
use std::path::{Path, PathBuf};

/// A checkpoint to go on from.
#[derive(Debug)]
pub(crate) struct Checkpoint {
    /// Its folder.
    pub(crate) dir: PathBuf,
    /// Its numbers.
    pub(crate) reader: Reader,
    /// The settings of its run.
    settings: Value,
}

impl Checkpoint {
    fn open(dir: PathBuf) -> Result<Self> {
        let reader = Reader::open(&dir)?;
        let settings = serde_json::from_str(&reader.state().run.settings_json).map_err(|e| {
            Failure::input("the settings in a checkpoint cannot be read")
                .at(dir.join(checkpoint::STATE_FILE).display())
                .found(e)
                .hint("another checkpoint, or start a new run from its weights: --model DIR")
        })?;
        Ok(Checkpoint { dir, reader, settings })
    }

    /// What it says of the run.
    pub(crate) fn state(&self) -> &CheckpointState {
        self.reader.state()
    }

    /// Whether it lies in this output folder, under the name of a complete one.
    pub(crate) fn is_of(&self, out: &Path) -> bool {
        let place = checkpoint::folder::complete(out, self.state().step).canonicalize();
        place.is_ok_and(|place| self.dir.canonicalize().is_ok_and(|dir| dir == place))
    }

    /// Whether some of its steps were summed in another order than its lanes' own.
    pub(crate) fn has_different_bits(&self) -> bool {
        self.settings["different_bits"]["value"] == Value::Bool(true)
    }

    /// Refuses a run of fewer steps than were made.
    pub(crate) fn fits(&self, steps: u64) -> Result<()> {
        let made = self.state().step;
        if made <= steps {
            return Ok(());
        }
        Err(Failure::usage("the checkpoint has made more steps than the run is to have")
            .at(self.dir.display())
            .expected(format!("at most {steps} steps"))
            .found(format!("{made} steps made"))
            .hint("a longer run, or --resume with an earlier checkpoint"))
    }

    /// What the run keeps of the layout.
    pub(crate) fn kept(&self) -> Kept {
        let accum = self.settings["accum"]["value"].as_u64().unwrap_or(1) as usize;
        Kept { lanes: self.state().run.lanes as usize, accum }
    }

    /// The settings, and rows, that alter the result and are not what they were; all of them were allowed by `--override`.
    ///
    /// # Errors
    /// Exit 2, listing those that were not.
    pub(crate) fn changes(&self, plan: &RunPlan, rows: &str) -> Result<Vec<Change>> {
        let mut changed = changes(&self.settings, plan);
        let old = &self.settings[ROWS]["value"];
        if old.as_str().is_some_and(|old| old != rows) {
            changed.push(Change { name: "data".to_owned(), old: old.clone(), new: rows.into() });
        }
        let changed = check(changed, &plan.overrides, &self.dir)?;
        if changed.iter().any(|change| change.name == "model") {
            self.same_model(plan)?;
        }
        Ok(changed)
    }

    /// Refuses another model than the checkpoint's: its weights are those that are trained on, whatever `--model` says.
    fn same_model(&self, plan: &RunPlan) -> Result<()> {
        let own = Source::open(&ModelSource::Folder(self.dir.clone()), plan.seed)?;
        let other = Source::open(&plan.model, plan.seed)?;
        if own.config == other.config {
            return Ok(());
        }
        Err(Failure::usage("--override model cannot exchange the model of a run")
            .at("--model")
            .expected(format!("a model of the checkpoint's architecture\n{}", own.shape()))
            .found(other.shape())
            .hint("a new run with that model and another --out"))
    }
}

/// The name under which a checkpoint's settings have the rows.
const ROWS: &str = "data_rows";

/// The settings as a checkpoint keeps them: those of run.json, and the rows.
pub(crate) fn settings_to_keep(plan: &RunPlan, rows: &str) -> String {
    let mut settings = plan.to_json()["settings"].take();
    // So that the same folder is known as such from another working folder.
    if let ModelSource::Folder(dir) = &plan.model
        && let Ok(dir) = dir.canonicalize()
    {
        settings["model"]["value"] = serde_json::json!(ModelSource::Folder(dir));
    }
    settings[ROWS] = serde_json::json!({ "value": rows, "from": "data" });
    settings.to_string()
}

/// The checkpoints a run may go on from, the best first.
#[derive(Debug)]
pub(crate) struct Candidates {
    dirs: Vec<PathBuf>,
    /// Whether a damaged one may be passed over.
    fall_back: bool,
    passed_over: usize,
    /// On rank 0: the output folder, if a run has used it. It is taken before anything in it is looked at.
    pub(crate) lock: Option<Lock>,
}

impl Candidates {
    /// Looks for them: the one that `--resume` names, or those of the output folder.
    ///
    /// # Errors
    /// A folder that cannot be read, or one named that holds no checkpoint.
    pub(crate) fn find(args: &TrainArgs, comm: &Comm) -> Result<Self> {
        let resume = args.resume.as_ref().map_or(Resume::Auto { told: false }, Resume::from);
        let out = args.out.clone().unwrap_or_else(|| PathBuf::from(defaults::OUT));
        let root = comm.rank() == 0;
        let lock = meet(comm, if root { Lock::take_used(&out) } else { Ok(None) })?;
        let found = if root { look(&resume, &out) } else { Ok(Vec::new()) };
        let text = meet(comm, found.and_then(|dirs| paths_to_json(&dirs)))?;
        let bytes = comm.broadcast_bytes(0, text).map_err(Failure::from)?;
        // Rank 0 wrote it just now.
        let dirs: Vec<PathBuf> = serde_json::from_slice(&bytes).unwrap_or_default();
        Ok(Candidates { dirs, fall_back: resume == Resume::Auto { told: true }, passed_over: 0, lock })
    }

    /// The best one left, opened by every rank; none if there never was one.
    ///
    /// # Errors
    /// Exit 3: it is damaged and may not be passed over, or none is left.
    pub(crate) fn next(&mut self, comm: &Comm) -> Result<Option<Checkpoint>> {
        while let Some(dir) = self.dirs.get(self.passed_over) {
            match meet(comm, Checkpoint::open(dir.clone())) {
                Ok(checkpoint) => return Ok(Some(checkpoint)),
                Err(failure) => self.pass_over(failure, comm)?,
            }
        }
        Ok(None)
    }

    /// Goes on to the one before, if that is allowed, and says so.
    ///
    /// # Errors
    /// `failure`, if it is not, or if it was the last.
    pub(crate) fn pass_over(&mut self, failure: Failure, comm: &Comm) -> Result<()> {
        if failure.exit != Exit::Input || self.passed_over >= self.dirs.len() {
            return Err(failure);
        }
        let before = self.dirs.get(self.passed_over + 1);
        if !self.fall_back {
            return Err(match before {
                Some(before) => failure.hint(format!("--resume auto goes on from {} instead", before.display())),
                None => failure,
            });
        }
        let Some(before) = before else {
            return Err(failure.hint("no earlier checkpoint is left: start again with another --out"));
        };
        if comm.rank() == 0 {
            note(format_args!(
                "warning: this checkpoint is passed over for {}\n{}",
                before.display(),
                failure.as_reason()
            ));
        }
        self.passed_over += 1;
        Ok(())
    }
}

fn look(resume: &Resume, out: &Path) -> Result<Vec<PathBuf>> {
    let complete = |dir: &Path| Ok(checkpoint::list(dir)?.into_iter().map(|(_, dir)| dir).collect::<Vec<_>>());
    match resume {
        Resume::Never => Ok(Vec::new()),
        // Without run.json nothing of the folder is a run's; whether that is refused is seen when it is opened.
        Resume::Auto { .. } if !out.join("run.json").exists() => Ok(Vec::new()),
        Resume::Auto { .. } => complete(out),
        Resume::From(dir) if is_checkpoint(dir) => Ok(vec![dir.clone()]),
        Resume::From(dir) => match complete(dir)?.into_iter().next() {
            Some(newest) => Ok(vec![newest]),
            None => Err(Failure::input("there is no checkpoint to resume from")
                .at(dir.display())
                .expected("a folder checkpoints/step-NNNNNN, or the output folder of a run that has one")
                .found(if dir.exists() { "a folder without one" } else { "no such folder" })
                .hint("umbra checkpoint inspect DIR shows what a folder holds")),
        },
    }
}

fn paths_to_json(dirs: &[PathBuf]) -> Result<Vec<u8>> {
    serde_json::to_vec(dirs).map_err(|e| {
        Failure::usage("a folder's name is not UTF-8, and ranks cannot be told of it").found(e).hint("another --out")
    })
}
