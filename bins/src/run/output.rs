//! The run's folder: `run.json`, `metrics.jsonl`, `model/`, and the dump of a first step.

use super::prepare::Prepared;
use super::record::Recorder;
use crate::hf::dump_tensors;
use crate::hf::save::{MAX_SHARD_BYTES, ModelWriter, check_target};
use crate::host::{answer, note};
use crate::launch::meet;
use crate::metrics::MetricsWriter;
use crate::plan::{Resume, RunPlan};
use crate::source::Source;
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

/// The folder of a run that is to be made.
#[derive(Debug)]
pub(crate) struct Output {
    dir: PathBuf,
    root: bool,
    /// Held by rank 0 as long as the run lasts, so that two runs cannot share a folder.
    lock: Option<File>,
}

/// What the folder says about the run.
#[derive(Debug)]
pub(crate) enum Start {
    /// This run is finished already; the message says so.
    Finished(String),
    /// There is nothing to continue.
    Fresh(Output),
}

/// Settings that do not change the result, so that a finished run is recognised whatever they are.
const FREE: [&str; 6] = ["threads", "log_every", "dump", "out", "resume", "preset"];

impl Output {
    /// Looks at the folder; rank 0 tries whether it can be made and written. Nothing is left behind: a run that fails
    /// before its first step has no folder.
    pub(crate) fn open(plan: &RunPlan, prepared: &Prepared, comm: &Comm) -> Result<Start> {
        let root = comm.rank() == 0;
        let dir = plan.out.clone();
        let earlier = read_run(&dir, comm)?;
        if let Some(earlier) = &earlier {
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
            if earlier["finished"] == Value::Bool(true) {
                differs(earlier, &plan.to_json(), &dir)?;
                let message =
                    format!("{}: this run is finished, {} steps; nothing to do", dir.display(), prepared.steps);
                return Ok(Start::Finished(message));
            }
        }
        if root {
            let model = dir.join("model");
            check_target(&model)?;
            if earlier.is_none() && fs::read_dir(&model).is_ok_and(|mut entries| entries.next().is_some()) {
                return Err(Failure::disk("the output folder holds a model that no run here has written")
                    .at(model.display())
                    .expected("a new folder, or one with the run.json of an earlier run")
                    .found("a model and no run.json")
                    .hint("another --out: this run would replace that model"));
            }
            let metrics = dir.join("metrics.jsonl");
            if earlier.is_none() && metrics.exists() {
                return Err(foreign(&metrics));
            }
            try_to_write(&dir)?;
            if earlier.is_some() {
                note(format_args!(
                    "{}: an unfinished run is here; this version keeps no checkpoints, so it starts again",
                    dir.display()
                ));
            }
        }
        Ok(Start::Fresh(Output { dir, root, lock: None }))
    }

    /// Rank 0: shows the start-up table, writes `run.json`, opens `metrics.jsonl` anew.
    pub(crate) fn begin(&mut self, plan: &RunPlan, prepared: &Prepared, recorder: &mut Recorder) -> Result<()> {
        if !self.root {
            return Ok(());
        }
        fs::create_dir_all(&self.dir).map_err(|e| disk(&self.dir, CANNOT_MAKE, &e))?;
        self.lock = Some(lock(&self.dir)?);
        note(recorder.startup_table());
        self.write_run(plan, false, prepared.steps)?;
        let metrics = self.dir.join("metrics.jsonl");
        if metrics.exists() {
            fs::remove_file(&metrics)
                .map_err(|e| disk(&metrics, "the metrics of an unfinished run cannot be removed", &e))?;
        }
        recorder.write_to(MetricsWriter::open(&self.dir)?);
        Ok(())
    }

    /// Writes `model/`: each rank its own byte ranges.
    pub(crate) fn save_model(&self, trainer: &Trainer<Mistral>, source: &Source, comm: &Comm) -> Result<()> {
        let dtype = |name: &str| source.dtype_of(name);
        let dir = self.dir.join("model");
        let writer = ModelWriter::plan(&dir, source.units(), dtype, source.stores_tied_head(), MAX_SHARD_BYTES);
        let root = |run: &dyn Fn() -> Result<()>| if self.root { run() } else { Ok(()) };
        meet(comm, root(&|| writer.create()))?;
        let write =
            |param: &spmd_core::ParamSpec, start: usize, values: &[f32]| writer.write(&param.name, start, values);
        let written = trainer.state.each(source.units(), &trainer.layout, write).and_then(|()| writer.sync());
        let saved = meet(comm, written)
            .and_then(|()| meet(comm, root(&|| writer.finish(source.dir.as_deref(), &source.config_json))));
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
        // The file is only there for other runs to see; one that cannot be removed says nothing to them.
        self.lock = None;
        let _ = fs::remove_file(self.dir.join(LOCK));
        answer(&format!("{}\n", self.dir.join("model").display())).map(|_| ())
    }

    fn write_run(&self, plan: &RunPlan, finished: bool, steps: u64) -> Result<()> {
        let mut run = plan.to_json();
        run["finished"] = json!(finished);
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

/// Beside the results while a run goes on.
const LOCK: &str = ".umbra-lock";

/// Takes the folder for this run. The system lets go of it however the process ends.
fn lock(dir: &Path) -> Result<File> {
    let path = dir.join(LOCK);
    let file = File::create(&path).map_err(|e| disk(&path, "the output folder cannot be locked", &e))?;
    match file.try_lock() {
        Ok(()) => Ok(file),
        Err(fs::TryLockError::WouldBlock) => Err(Failure::disk("another run is writing to the output folder")
            .at(dir.display())
            .expected("a folder of its own for every run")
            .hint("another --out, or wait for that run to end")),
        // A file system without locks (some network ones) cannot tell; runs on it are the user's to keep apart.
        Err(fs::TryLockError::Error(_)) => Ok(file),
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
        Ok(bytes) => Ok(bytes),
        // Below a file there is nothing; that nothing can be made there is said when it is tried.
        Err(e) if matches!(e.kind(), ErrorKind::NotFound | ErrorKind::NotADirectory) => Ok(NO_RUN.to_vec()),
        Err(e) => Err(disk(&path, "run.json cannot be read", &e)),
    };
    let bytes = comm.broadcast_bytes(0, meet(comm, read)?).map_err(Failure::from)?;
    serde_json::from_slice(&bytes).map_err(|e| {
        Failure::disk("run.json of an earlier run is damaged")
            .at(path.display())
            .found(e)
            .hint("another --out, or remove the folder")
    })
}

/// What stands for a run.json that is not there.
const NO_RUN: &[u8] = b"null";

/// Refuses to call a run finished whose settings were others.
fn differs(earlier: &Value, now: &Value, dir: &Path) -> Result<()> {
    let settings = |run: &Value| run["settings"].as_object().cloned().unwrap_or_default();
    let (old, new) = (settings(earlier), settings(now));
    let changed = new.iter().filter(|(name, _)| !FREE.contains(&name.as_str()));
    let changed: Vec<String> = changed
        .filter(|(name, setting)| old.get(*name).is_some_and(|o| o["value"] != setting["value"]))
        .map(|(name, setting)| format!("{name}: {} then, {} now", old[name]["value"], setting["value"]))
        .collect();
    if changed.is_empty() {
        return Ok(());
    }
    Err(Failure::usage("the output folder holds a finished run with other settings")
        .at(dir.display())
        .expected("the same settings, or a folder of its own")
        .found(changed.join("\n"))
        .hint("another --out"))
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
    micro: &[Batch],
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
    let shapes: Vec<u64> = micro.iter().flat_map(shape).collect();
    let gather = |bytes: &[u8]| comm.gather_bytes(bytes).map_err(Failure::from);
    let (gradients, logits) = (gather(&bytes)?, gather(bytemuck::cast_slice(logits))?);
    let shapes = gather(bytemuck::cast_slice(&shapes))?;
    if comm.rank() != 0 {
        return Ok(());
    }
    let mut tensors = vec![whole_logits(&shapes, &logits, source.config.vocab_size)?];
    tensors.extend(whole_gradients(&gradients, source.units())?);
    fs::create_dir_all(dir).map_err(|e| disk(dir, "the dump folder cannot be made", &e))?;
    dump_tensors(&dir.join("dump.safetensors"), &tensors)
}

/// Bytes that arrived, as numbers; they lie at no particular alignment.
fn numbers<T: bytemuck::Pod>(bytes: &[u8]) -> Vec<T> {
    bytes.chunks_exact(size_of::<T>()).map(bytemuck::pod_read_unaligned).collect()
}

type Tensor = (String, Vec<usize>, Vec<f32>);

fn whole_logits(shapes: &[Vec<u8>], logits: &[Vec<u8>], vocab: usize) -> Result<Tensor> {
    let shapes: Vec<Vec<u64>> = shapes.iter().map(|s| numbers(s)).collect();
    let logits: Vec<Vec<f32>> = logits.iter().map(|l| numbers(l)).collect();
    let cols = shapes.iter().flat_map(|s| s.chunks(2)).filter(|s| s[0] > 0).map(|s| s[1]).max().unwrap_or(0) as usize;
    let (mut rows, mut values) = (0, Vec::new());
    let mut at = vec![0; logits.len()];
    for micro in 0..shapes[0].len() / 2 {
        for (rank, shape) in shapes.iter().enumerate() {
            let (r, c) = (shape[2 * micro] as usize, shape[2 * micro + 1] as usize);
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
