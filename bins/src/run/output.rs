//! The run's folder: `run.json`, `metrics.jsonl`, `model/`, and the dump of a first step.

use super::prepare::Prepared;
use super::record::Recorder;
use super::resume::Checkpoint;
use crate::checkpoint::{self, SourceFacts};
use crate::cli::SaveFailure;
use crate::hf::dump_tensors;
use crate::hf::save::{MAX_SHARD_BYTES, ModelWriter, check_target};
use crate::host::{answer, note};
use crate::launch::meet;
use crate::metrics::MetricsWriter;
use crate::plan::resume::{Change, changes};
use crate::plan::{Resume, RunPlan};
use crate::source::Source;
use crate::tensorboard::EventWriter;
use crate::{Failure, Result};
use collectives::Comm;
use models::Mistral;
use optim::{Grads, Layout, Trainer};
use serde_json::{Value, json};
use spmd_core::{Batch, UnitSpec};
use std::collections::BTreeMap;
use std::fs::{self, File};
use std::io::ErrorKind;
use std::path::{Path, PathBuf};

/// The folder of a run that is to be made, or gone on with.
#[derive(Debug)]
pub(crate) struct Output {
    dir: PathBuf,
    root: bool,
    /// Held by rank 0 as long as the run lasts: two runs cannot share a folder.
    lock: Option<Lock>,
    /// How the run was gone on with so far, an entry each time.
    resumed: Vec<Value>,
    /// The rows, so that another run can be told to have others.
    rows: String,
}

/// What the folder says about the run.
#[derive(Debug)]
pub(crate) enum Start {
    /// This run is finished already; the message says so.
    Finished(String),
    /// There is something to do.
    Open(Output),
}

impl Output {
    /// Looks at the folder; rank 0 tries whether it can be made and written. Nothing is left behind: a run that fails
    /// before its first step has no folder. `from` is the checkpoint the run goes on from.
    pub(crate) fn open(
        plan: &RunPlan,
        prepared: &Prepared,
        from: Option<&Checkpoint>,
        lock: &mut Option<Lock>,
        comm: &Comm,
    ) -> Result<Start> {
        let root = comm.rank() == 0;
        let dir = plan.out.clone();
        let earlier = read_run(&dir, comm)?;
        let mut resumed = Vec::new();
        if let Some(earlier) = &earlier {
            if let Some(message) = self::earlier(plan, prepared, earlier, from, &dir)? {
                return Ok(Start::Finished(message));
            }
            if from.is_some() {
                resumed = earlier["resumed"].as_array().cloned().unwrap_or_default();
            }
        }
        if root {
            if let Some(inside) = dir.ancestors().find(|dir| checkpoint::is_checkpoint(dir)) {
                return Err(Failure::usage("the output folder lies in a checkpoint")
                    .at(dir.display())
                    .expected("a folder of its own for every run")
                    .found(format!("the checkpoint {}", inside.display()))
                    .hint("another --out; --resume or --model name a checkpoint to start from"));
            }
            let model = dir.join("model");
            check_target(&model)?;
            let holds = |dir: &Path| fs::read_dir(dir).is_ok_and(|mut entries| entries.next().is_some());
            for (folder, what) in [(model, "a model"), (dir.join("checkpoints"), "checkpoints")] {
                if earlier.is_none() && holds(&folder) {
                    return Err(Failure::disk(format!("the output folder holds {what} that no run here has written"))
                        .at(folder.display())
                        .expected("a new folder, or one with the run.json of an earlier run")
                        .found(format!("{what} and no run.json"))
                        .hint(match what {
                            "checkpoints" => "another --out, with --resume CHECKPOINT to go on from one of them",
                            _ => "another --out: this run would replace that model",
                        }));
                }
            }
            let metrics = dir.join("metrics.jsonl");
            if earlier.is_none() && metrics.exists() {
                return Err(foreign(&metrics));
            }
            try_to_write(&dir)?;
            if earlier.is_some() && from.is_none() {
                note(format_args!(
                    "{}: an unfinished run without a checkpoint is here; it starts again",
                    dir.display()
                ));
            }
        }
        Ok(Start::Open(Output { dir, root, lock: lock.take(), resumed, rows: prepared.rows() }))
    }

    /// Rank 0: makes the folder and takes it for this run.
    pub(crate) fn take(&mut self) -> Result<()> {
        if self.root {
            fs::create_dir_all(&self.dir).map_err(|e| disk(&self.dir, CANNOT_MAKE, &e))?;
            if self.lock.is_none() {
                self.lock = Some(Lock::take(&self.dir)?);
            }
        }
        Ok(())
    }

    /// Rank 0, once the folder is taken: shows the start-up table, writes `run.json`, and opens `metrics.jsonl`: anew, or after the
    /// steps that the checkpoint `from` (and the seconds it took to read) holds, `changes` of settings being allowed.
    pub(crate) fn begin(
        &mut self,
        plan: &RunPlan,
        steps: u64,
        from: Option<(&Checkpoint, f64)>,
        changes: &[Change],
        recorder: &mut Recorder,
    ) -> Result<()> {
        if !self.root {
            return Ok(());
        }
        plan.files.notes().iter().for_each(note);
        note(recorder.startup_table());
        let step = from.map_or(0, |(checkpoint, _)| checkpoint.state().step);
        if let Some((checkpoint, seconds)) = from {
            note(resumption(checkpoint, seconds, plan, changes));
            let changes: Vec<Value> =
                changes.iter().map(|c| json!({"name": c.name, "old": c.old, "new": c.new})).collect();
            self.resumed.push(json!({
                "step": step, "from": checkpoint.dir.display().to_string(), "world": plan.world, "changes": changes
            }));
        }
        for dir in checkpoint::set_aside(&self.dir, step)? {
            note(format_args!("{}: of steps that are made again; set aside", dir.display()));
        }
        self.write_run(plan, false, steps)?;
        let kept = crate::metrics::keep_steps(&self.dir, step)?;
        if kept < step && from.is_some_and(|(checkpoint, _)| checkpoint.is_of(&self.dir)) {
            note(format_args!(
                "{}: has {kept} of the {step} steps made before",
                self.dir.join("metrics.jsonl").display()
            ));
        }
        let waits = plan.save_failure == SaveFailure::Continue;
        let mut metrics = MetricsWriter::open(&self.dir, waits)?;
        if plan.tensorboard {
            metrics = metrics.with_events(EventWriter::open(&self.dir, step, waits)?);
        }
        recorder.write_to(metrics);
        Ok(())
    }

    /// Writes `model/`: each rank its own byte ranges. `facts` was read from the source when the run began, because a
    /// checkpoint that a run goes on from may be gone at its end.
    pub(crate) fn save_model(
        &self,
        trainer: &Trainer<Mistral>,
        source: &Source,
        facts: &SourceFacts,
        comm: &Comm,
    ) -> Result<()> {
        let dtype = |name: &str| source.dtype_of(name);
        let dir = self.dir.join("model");
        let writer = ModelWriter::plan(&dir, source.units(), dtype, source.stores_tied_head(), MAX_SHARD_BYTES);
        let root = |run: &dyn Fn() -> Result<()>| if self.root { run() } else { Ok(()) };
        meet(comm, root(&|| writer.create()))?;
        let write =
            |param: &spmd_core::ParamSpec, start: usize, values: &[f32]| writer.write(&param.name, start, values);
        let written = trainer.state.each(source.units(), &trainer.layout, write).and_then(|()| writer.sync());
        let saved = meet(comm, written)
            .and_then(|()| meet(comm, root(&|| writer.finish(&facts.config_json, &facts.companions))));
        if saved.is_err() && self.root {
            writer.discard();
        }
        saved
    }

    /// Rank 0: marks the run as finished and says where its results are.
    pub(crate) fn finish(&mut self, plan: &RunPlan, steps: u64) -> Result<()> {
        if !self.root {
            return Ok(());
        }
        self.write_run(plan, true, steps)?;
        self.lock = None;
        answer(&format!("{}\n", self.dir.join("model").display())).map(|_| ())
    }

    fn write_run(&self, plan: &RunPlan, finished: bool, steps: u64) -> Result<()> {
        let mut run = plan.to_json();
        run["data_rows"] = json!(self.rows);
        run["finished"] = json!(finished);
        run["resumed"] = json!(self.resumed);
        run["steps"] = json!(steps);
        let path = self.dir.join("run.json");
        let partial = self.dir.join("run.json.partial");
        // A value made of maps, strings and numbers always serialises.
        let text = serde_json::to_string_pretty(&run).unwrap_or_default() + "\n";
        fs::write(&partial, text)
            .and_then(|()| fs::rename(&partial, &path))
            .map_err(|e| disk(&path, "run.json cannot be written", &e))
    }
}

/// A folder taken for one run. The system lets go of it however the process ends; the file that is only there for other
/// runs to see is removed in an orderly end.
#[derive(Debug)]
pub(crate) struct Lock {
    path: PathBuf,
    /// Locked as long as it is open.
    _file: File,
}

impl Lock {
    const NAME: &'static str = ".umbra-lock";

    /// Takes the folder `dir` for this run.
    ///
    /// # Errors
    /// Exit 7: another run has it, or the disk refuses.
    fn take(dir: &Path) -> Result<Self> {
        let path = dir.join(Lock::NAME);
        let file = File::create(&path).map_err(|e| disk(&path, "the output folder cannot be locked", &e))?;
        match file.try_lock() {
            // A file system without locks (some network ones) cannot tell; runs on it are the user's to keep apart.
            Ok(()) | Err(fs::TryLockError::Error(_)) => Ok(Lock { path, _file: file }),
            Err(fs::TryLockError::WouldBlock) => Err(Failure::disk("another run is writing to the output folder")
                .at(dir.display())
                .expected("a folder of its own for every run")
                .hint("another --out, or wait for that run to end")),
        }
    }

    /// Takes a folder that a run has used, before it is asked what to go on from. One that may not be written is not taken:
    /// a finished run may say so there, and any other is refused when it wants to write.
    pub(crate) fn take_used(dir: &Path) -> Result<Option<Self>> {
        if !dir.join("run.json").exists() {
            return Ok(None);
        }
        match File::create(dir.join(Lock::NAME)).map_err(|e| e.kind()) {
            Err(ErrorKind::PermissionDenied | ErrorKind::ReadOnlyFilesystem) => Ok(None),
            _ => Lock::take(dir).map(Some),
        }
    }
}

impl Drop for Lock {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.path);
    }
}

/// A file that carries the name of one of ours and is not.
fn foreign(path: &Path) -> Failure {
    Failure::disk("the output folder holds a file that no run here has written")
        .at(path.display())
        .expected("a new folder, or one with the run.json of an earlier run")
        .hint("another --out: this run would replace that file")
}

const CANNOT_MAKE: &str = "the output folder cannot be made";

/// Makes the folder and a file in it now, not after hours of training, and removes what it made.
fn try_to_write(dir: &Path) -> Result<()> {
    let missing: Vec<&Path> = dir.ancestors().take_while(|d| !d.as_os_str().is_empty() && !d.exists()).collect();
    let probe = dir.join(".umbra-write-probe");
    let tried = fs::create_dir_all(dir).map_err(|e| disk(dir, CANNOT_MAKE, &e)).and_then(|()| {
        fs::write(&probe, b"x")
            .and_then(|()| fs::remove_file(&probe))
            .map_err(|e| disk(dir, "the output folder cannot be written", &e))
    });
    for made in missing {
        // One that could not be made is not there to be removed.
        let _ = fs::remove_dir(made);
    }
    tried
}

/// What rank 0 finds in the folder, told to every rank: one that sees another disk must not decide otherwise.
fn read_run(dir: &Path, comm: &Comm) -> Result<Option<Value>> {
    let path = dir.join("run.json");
    let read = match if comm.rank() == 0 { fs::read(&path) } else { Ok(Vec::new()) } {
        Ok(bytes) => Ok(unfinished_without_model(dir, bytes)),
        // Below a file there is nothing; that nothing can be made there is said when it is tried.
        Err(e) if matches!(e.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => Ok(NO_RUN.to_vec()),
        Err(e) => Err(disk(&path, "run.json cannot be read", &e)),
    };
    let bytes = comm.broadcast_bytes(0, meet(comm, read)?).map_err(Failure::from)?;
    serde_json::from_slice(&bytes).map_err(|e| {
        Failure::disk("run.json of an earlier run is damaged")
            .at(path.display())
            .found(e)
            .hint("another --out (with --resume to go on from a checkpoint that is in the folder)")
    })
}

/// A finished run whose model is gone has something left to do.
fn unfinished_without_model(dir: &Path, bytes: Vec<u8>) -> Vec<u8> {
    match serde_json::from_slice::<Value>(&bytes) {
        Ok(mut run) if run["finished"] == Value::Bool(true) && !dir.join("model").exists() => {
            run["finished"] = json!(false);
            run.to_string().into_bytes()
        }
        _ => bytes,
    }
}

/// What stands for a run.json that is not there.
const NO_RUN: &[u8] = b"null";

/// What an earlier run in the folder means for this one: the message to end with if it is this run and finished.
fn earlier(
    plan: &RunPlan,
    prepared: &Prepared,
    earlier: &Value,
    from: Option<&Checkpoint>,
    dir: &Path,
) -> Result<Option<String>> {
    let steps = prepared.steps;
    if earlier.get("umbra").is_none() {
        return Err(foreign(&dir.join("run.json")));
    }
    if plan.resume == Resume::Never {
        return Err(Failure::usage("the output folder already holds a run")
            .at(dir.display())
            .expected("an empty or new folder, because of --resume never")
            .found("run.json of an earlier run")
            .hint("another --out, or remove the folder"));
    }
    if earlier["finished"] != Value::Bool(true) || from.is_some_and(|checkpoint| checkpoint.state().step < steps) {
        return Ok(None);
    }
    if from.is_none() {
        let changed = changes(&earlier["settings"], plan);
        let mut changed: Vec<String> = changed.iter().map(ToString::to_string).collect();
        let (old, new) = (&earlier["data_rows"], prepared.rows());
        if old.as_str().is_some_and(|old| old != new) {
            changed.push(format!("data: {old} then, {new} now"));
        }
        if !changed.is_empty() {
            return Err(Failure::usage("the output folder holds a finished run with other settings")
                .at(dir.display())
                .expected("the same settings, or a folder of its own")
                .found(changed.join("\n"))
                .hint("another --out"));
        }
    }
    Ok(Some(format!("{}: this run is finished, {steps} steps; nothing to do", dir.display())))
}

/// What is said when a run goes on.
fn resumption(checkpoint: &Checkpoint, seconds: f64, plan: &RunPlan, changes: &[Change]) -> String {
    let state = checkpoint.state();
    let mut text =
        format!("goes on from {}: {} steps made, read in {seconds:.2} s", checkpoint.dir.display(), state.step);
    if state.world != plan.world as u64 {
        text += &format!(", on {} rank(s) then, {} now", state.world, plan.world);
    }
    if checkpoint.has_different_bits() {
        text += "\n  some of its steps were summed in another order (--allow-different-bits), and so the result has other bits";
    }
    for change in changes {
        text += &format!("\n  overridden  {change}");
    }
    let (old, new) = (state.dtypes, plan.precision());
    let wide = |dtype| dtype == crate::hf::FileDType::F32;
    for (what, old, new) in [("weights", old.shadow, new.shadow), ("moments", old.exp_avg, new.moments)] {
        if wide(old) && !wide(new.into()) {
            text += &format!("\n  {what} were fp32 and are rounded to bf16; going back does not bring them back");
        }
    }
    text
}

fn disk(path: &Path, what: &str, error: &std::io::Error) -> Failure {
    Failure::disk(what)
        .at(path.display())
        .found(error)
        .hint("a folder on a disk with room that you may write, with --out")
}

/// A rank's parts of each gradient: (parameter, first element, values).
pub(crate) type Parts = Vec<(String, usize, Vec<f32>)>;

/// Collects this rank's parts of the accumulated gradients.
pub(crate) fn gradient_parts(grads: &Grads, units: &[UnitSpec], layout: &Layout) -> Result<Parts> {
    let mut parts = Vec::new();
    grads.each(units, layout, |param, start, values| -> Result<()> {
        parts.push((param.name.clone(), start, values.to_vec()));
        Ok(())
    })?;
    Ok(parts)
}

/// Gathers logits and gradients to rank 0, which writes `DIR/dump.safetensors`: `logits` `[rows, T, V]` in global row order
/// (every micro-batch must have the same shape on every rank) and `grad.NAME`.
pub(crate) fn dump(
    dir: &Path,
    source: &Source,
    comm: &Comm,
    (batches, passes): (&[Batch], usize),
    logits: &[f32],
    parts: Parts,
) -> Result<()> {
    let mut bytes = Vec::new();
    for (name, start, values) in &parts {
        bytes.extend((name.len() as u64).to_le_bytes());
        bytes.extend(name.as_bytes());
        bytes.extend((*start as u64).to_le_bytes());
        bytes.extend((values.len() as u64).to_le_bytes());
        bytes.extend(bytemuck::cast_slice::<f32, u8>(values));
    }
    let shape = |b: &Batch| [b.rows as u64, b.cols as u64];
    let shapes: Vec<u64> = batches.iter().flat_map(shape).collect();
    let gather = |bytes: &[u8]| comm.gather_bytes(bytes).map_err(Failure::from);
    let (gradients, logits) = (gather(&bytes)?, gather(bytemuck::cast_slice(logits))?);
    let shapes = gather(bytemuck::cast_slice(&shapes))?;
    if comm.rank() != 0 {
        return Ok(());
    }
    let mut tensors = vec![whole_logits(&shapes, &logits, source.config.vocab_size, passes)?];
    tensors.extend(whole_gradients(&gradients, source.units())?);
    fs::create_dir_all(dir).map_err(|e| disk(dir, "the dump folder cannot be made", &e))?;
    dump_tensors(&dir.join("dump.safetensors"), &tensors)
}

/// Bytes that arrived, as numbers; they lie at no particular alignment.
fn numbers<T: bytemuck::Pod>(bytes: &[u8]) -> Vec<T> {
    bytes.chunks_exact(size_of::<T>()).map(bytemuck::pod_read_unaligned).collect()
}

type Tensor = (String, Vec<usize>, Vec<f32>);

fn whole_logits(shapes: &[Vec<u8>], logits: &[Vec<u8>], vocab: usize, passes: usize) -> Result<Tensor> {
    let shapes: Vec<Vec<u64>> = shapes.iter().map(|s| numbers(s)).collect();
    let logits: Vec<Vec<f32>> = logits.iter().map(|l| numbers(l)).collect();
    let cols = shapes.iter().flat_map(|s| s.chunks(2)).filter(|s| s[0] > 0).map(|s| s[1]).max().unwrap_or(0) as usize;
    let (mut rows, mut values) = (0, Vec::new());
    let mut at = vec![0; logits.len()];
    // Every rank's batches are a micro-batch's passes, one after another: so these come in micro-batch, then lane order.
    let batches =
        (0..shapes[0].len() / 2 / passes).flat_map(|micro| (0..passes).map(move |pass| micro * passes + pass));
    for batch in batches {
        for (rank, shape) in shapes.iter().enumerate() {
            let (r, c) = (shape[2 * batch] as usize, shape[2 * batch + 1] as usize);
            for _ in 0..r {
                // Rows of a narrower micro-batch are filled up with zeros, like padding.
                values.extend_from_slice(&logits[rank][at[rank]..at[rank] + c * vocab]);
                values.resize(values.len() + (cols - c) * vocab, 0.0);
                at[rank] += c * vocab;
                rows += 1;
            }
        }
    }
    Ok(("logits".to_owned(), vec![rows, cols, vocab], values))
}

fn whole_gradients(ranks: &[Vec<u8>], units: &[UnitSpec]) -> Result<Vec<Tensor>> {
    let params = units.iter().flat_map(|u| &u.params);
    let mut whole: BTreeMap<&str, (Vec<usize>, Vec<f32>)> =
        params.map(|p| (p.name.as_str(), (p.shape.clone(), vec![0.0; p.len()]))).collect();
    for bytes in ranks {
        let mut rest = &bytes[..];
        let mut take = |n: usize| {
            let (head, tail) = rest.split_at(n.min(rest.len()));
            rest = tail;
            head
        };
        loop {
            let length = take(8);
            if length.is_empty() {
                break;
            }
            let number = |b: &[u8]| b.try_into().map_or(0, u64::from_le_bytes) as usize;
            let name = String::from_utf8_lossy(take(number(length))).into_owned();
            let (start, len) = (number(take(8)), number(take(8)));
            let values: Vec<f32> = numbers(take(len * 4));
            if let Some((_, out)) = whole.get_mut(name.as_str()) {
                out[start..start + len].copy_from_slice(&values);
            }
        }
    }
    Ok(whole.into_iter().map(|(name, (shape, values))| (format!("grad.{name}"), shape, values)).collect())
}
