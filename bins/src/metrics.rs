//! `metrics.jsonl`: one JSON object a step, readable while the run goes on; event files for TensorBoard beside it.

use crate::tensorboard::EventWriter;
use crate::{Failure, Result};
use serde::Serialize;
use std::fs::{File, OpenOptions};
use std::io::{ErrorKind, Write};
use std::path::{Path, PathBuf};

/// What one step reports. Floats are written with the fewest digits that read back to the same bits; a value that is not
/// finite is written as null, because JSON has no word for it.
#[derive(Debug, Clone, PartialEq, Default, Serialize)]
pub struct StepRecord {
    /// From 0.
    pub step: u64,
    /// Mean over the supervised tokens of the whole step, all ranks.
    pub loss: f64,
    /// Of the whole gradient, before clipping.
    pub grad_norm: f64,
    /// What the gradient was multiplied by.
    pub clip_coef: f64,
    /// The learning rate of this step.
    pub lr: f64,
    /// Of the weights with an update that is not zero, the share whose bf16 value does not change; none if every update
    /// is zero.
    pub swallowed: Option<f64>,
    /// Movement made over movement asked for, Σ(applied·Δ)/ΣΔ²; none if every update is zero.
    pub arrived: Option<f64>,
    /// Tokens since the start of the run, without padding.
    pub tokens: u64,
    /// Targets of this step.
    pub supervised: u64,
    /// Tokens per second, all ranks.
    pub tps: f64,
    /// Tokens per second of one rank.
    pub tps_per_rank: f64,
    /// 10¹² floating-point operations a second, all ranks: 6·(weights of matrix products)·tokens + attention as computed.
    pub tflops: f64,
    /// Share of the machine's measured peak; none if no peak was measured.
    pub mfu: Option<f64>,
    /// The whole step, in milliseconds.
    pub step_ms: f64,
    /// Waiting for data.
    pub data_ms: f64,
    /// Waiting for other ranks (communication that computing did not hide).
    pub comm_ms: f64,
    /// Norm, clipping and AdamW.
    pub optim_ms: f64,
    /// Resident memory of the largest rank, in 2³⁰ bytes; none where the system does not say.
    pub mem_gib: Option<f64>,
    /// What the start-up table predicted for it.
    pub mem_plan_gib: f64,
    /// Passes over the data so far, with fraction.
    pub epoch: f64,
    /// Predicted seconds to the end of the run.
    pub eta_s: f64,
    /// Milliseconds training was held up for by a checkpoint after this step; absent without one.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub save_ms: Option<f64>,
    /// Hash of every weight and moment after this step, 16 hexadecimal digits; absent when not asked for.
    #[serde(skip_serializing_if = "Option::is_none")]
    pub state_hash: Option<String>,
}

impl StepRecord {
    /// Appends the record as one line, newline included, to `line`.
    ///
    /// # Errors
    /// None in practice: every field has a JSON form.
    fn append_to(&self, line: &mut Vec<u8>) -> std::io::Result<()> {
        serde_json::to_writer(&mut *line, self)?;
        line.push(b'\n');
        Ok(())
    }
}

/// Writes records to `metrics.jsonl`, and with `--tensorboard` to an event file beside it.
#[derive(Debug)]
pub struct MetricsWriter {
    lines: Appender,
    events: Option<EventWriter>,
}

impl MetricsWriter {
    /// Opens `metrics.jsonl` in the run folder for appending; it is created if missing. `waits` says whether records wait
    /// for a full disk to have room again.
    ///
    /// # Errors
    /// A disk failure (exit 7).
    pub fn open(folder: &Path, waits: bool) -> Result<Self> {
        Ok(MetricsWriter { lines: Appender::open(folder.join("metrics.jsonl"), waits)?, events: None })
    }

    /// Writes every record there as well.
    #[must_use]
    pub fn with_events(self, events: EventWriter) -> Self {
        MetricsWriter { events: Some(events), ..self }
    }

    /// Appends one record; it has reached the operating system when this returns.
    ///
    /// # Errors
    /// A disk failure (exit 7).
    pub fn write(&mut self, record: &StepRecord) -> Result<()> {
        let mut line = Vec::with_capacity(1024);
        let written = record.append_to(&mut line).map_err(|e| self.lines.failure(&e));
        written
            .and_then(|()| self.lines.append(&line))
            .and_then(|()| self.events.as_mut().map_or(Ok(()), |events| events.write(record)))
            .map_err(|failure| Failure {
                what: format!("the metrics of step {} could not be written", record.step),
                ..failure
            })
    }

    /// Writes what still waits, at the end of a run.
    ///
    /// # Errors
    /// A disk failure (exit 7).
    pub fn finish(&mut self) -> Result<()> {
        self.lines.finish()?;
        self.events.as_mut().map_or(Ok(()), EventWriter::finish)
    }
}

/// A file that grows while the run goes on, each time with one write, so that a reader never sees half a record for long.
#[derive(Debug)]
pub(crate) struct Appender {
    file: File,
    path: PathBuf,
    /// What is not written yet: the newest record, and those a full disk has not taken.
    pending: Vec<u8>,
    /// Whether records wait for a full disk to have room again: the save that fills it is about to fail and be removed.
    waits: bool,
}

impl Appender {
    fn open(path: PathBuf, waits: bool) -> Result<Self> {
        let file = OpenOptions::new().create(true).append(true).open(&path).map_err(|e| {
            Failure::disk("a file of the run's metrics cannot be opened")
                .at(path.display())
                .found(e)
                .hint("a folder that exists and may be written, with --out")
        })?;
        Ok(Appender { file, path, pending: Vec::new(), waits })
    }

    /// Opens the file `name` in `folder`, which is made if it is missing.
    pub(crate) fn create(folder: &Path, name: &str, waits: bool) -> Result<Self> {
        std::fs::create_dir_all(folder).map_err(|e| {
            Failure::disk("a folder for the run's metrics cannot be made")
                .at(folder.display())
                .found(e)
                .hint("a folder that may be written, with --out")
        })?;
        Appender::open(folder.join(name), waits)
    }

    /// Appends a record, or keeps it while the disk is full and records wait.
    pub(crate) fn append(&mut self, record: &[u8]) -> Result<()> {
        self.pending.extend(record);
        match self.flush() {
            Err(e) if self.waits && e.kind() == ErrorKind::StorageFull => Ok(()),
            written => written.map_err(|e| self.failure(&e)),
        }
    }

    /// Writes what still waits.
    pub(crate) fn finish(&mut self) -> Result<()> {
        self.flush().map_err(|e| self.failure(&e))
    }

    /// Writes the records that wait: all of them or none.
    fn flush(&mut self) -> std::io::Result<()> {
        let before = self.file.metadata()?.len();
        self.file.write_all(&self.pending).inspect_err(|_| {
            // What was written of a record is no record; if it cannot be taken back the reader skips it.
            let _ = self.file.set_len(before);
        })?;
        self.pending.clear();
        Ok(())
    }

    fn failure(&self, error: &std::io::Error) -> Failure {
        Failure::disk("the last metrics could not be written")
            .at(self.path.display())
            .found(error)
            .hint("free space on this disk, or another --out")
    }
}

/// Keeps the records of steps before `step` and nothing after: what a run that goes on from there will write again. Without
/// such records the file is removed. Returns how many there are.
///
/// # Errors
/// A disk failure (exit 7).
pub fn keep_steps(folder: &Path, step: u64) -> Result<u64> {
    let path = folder.join("metrics.jsonl");
    let failed = |e: std::io::Error| {
        Failure::disk("the metrics of an earlier run cannot be taken over").at(path.display()).found(e)
    };
    let bytes = match std::fs::read(&path) {
        Ok(bytes) => bytes,
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => return Ok(0),
        Err(e) => return Err(failed(e)),
    };
    // A line that was cut off by a crash is no JSON; it belongs to a step that is made again.
    let earlier = |line: &&[u8]| {
        let record = serde_json::from_slice::<serde_json::Value>(line).unwrap_or_default();
        record["step"].as_u64().is_some_and(|s| s < step)
    };
    let kept: Vec<&[u8]> = bytes.split_inclusive(|b| *b == b'\n').filter(earlier).collect();
    if kept.is_empty() {
        return std::fs::remove_file(&path).map(|()| 0).map_err(failed);
    }
    let partial = folder.join("metrics.jsonl.partial");
    std::fs::write(&partial, kept.concat()).and_then(|()| std::fs::rename(&partial, &path)).map_err(failed)?;
    Ok(kept.len() as u64)
}

/// The middle one of some values, or the mean of the two in the middle; none of none.
pub fn median(values: &[f64]) -> Option<f64> {
    let mut sorted = values.to_vec();
    sorted.sort_by(f64::total_cmp);
    let (low, high) = (sorted.get(sorted.len().checked_sub(1)? / 2)?, sorted.get(sorted.len() / 2)?);
    Some((low + high) / 2.0)
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::Value;

    fn record() -> StepRecord {
        StepRecord {
            step: 3,
            loss: 6.326_971_530_914_307,
            grad_norm: f64::from(0.1_f32),
            clip_coef: 1.0,
            lr: 1e-5,
            swallowed: Some(0.978_125),
            arrived: Some(1.0),
            tokens: 4096,
            supervised: 1020,
            tps: 1.0 / 3.0,
            mem_gib: Some(0.5),
            eta_s: 12.25,
            ..StepRecord::default()
        }
    }

    #[test]
    fn a_line_has_every_metric_in_order_and_floats_survive() {
        let mut line = Vec::new();
        record().append_to(&mut line).unwrap();
        assert_eq!(line.pop(), Some(b'\n'));
        assert!(!line.contains(&b'\n'));
        let value: Value = serde_json::from_slice(&line).unwrap();
        let names: Vec<&str> = value.as_object().unwrap().keys().map(String::as_str).collect();
        let contract = "step loss grad_norm clip_coef lr swallowed arrived tokens supervised tps tps_per_rank tflops mfu \
                        step_ms data_ms comm_ms optim_ms mem_gib mem_plan_gib epoch eta_s";
        assert_eq!(names, contract.split_whitespace().collect::<Vec<_>>());
        let r = record();
        for (name, x) in [("loss", r.loss), ("grad_norm", r.grad_norm), ("lr", r.lr), ("tps", r.tps)] {
            assert_eq!(value[name].as_f64().unwrap().to_bits(), x.to_bits(), "{name}");
        }
        assert_eq!(value["step"], 3);
        assert_eq!(value["supervised"], 1020);
        assert_eq!(value["mfu"], Value::Null);
    }

    #[test]
    fn what_is_not_finite_or_not_there_is_null() {
        let mut line = Vec::new();
        let bad = StepRecord { loss: f64::NAN, grad_norm: f64::INFINITY, swallowed: None, ..record() };
        bad.append_to(&mut line).unwrap();
        let value: Value = serde_json::from_slice(&line).unwrap();
        for name in ["loss", "grad_norm", "swallowed"] {
            assert_eq!(value[name], Value::Null, "{name}");
        }
        assert_eq!(value["arrived"], 1.0);
    }

    #[test]
    fn medians_do_not_depend_on_order() {
        assert_eq!(median(&[]), None);
        assert_eq!(median(&[3.0]), Some(3.0));
        assert_eq!(median(&[9.0, 1.0, 4.0]), Some(4.0));
        assert_eq!(median(&[9.0, 1.0, 4.0, 2.0]), Some(3.0));
    }

    #[test]
    fn lines_are_appended_and_visible_at_once() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("metrics.jsonl");
        let mut writer = MetricsWriter::open(folder.path(), false).unwrap();
        for step in 0..2 {
            writer.write(&StepRecord { step, ..record() }).unwrap();
            assert_eq!(std::fs::read_to_string(&path).unwrap().lines().count() as u64, step + 1);
        }
        drop(writer);
        MetricsWriter::open(folder.path(), false).unwrap().write(&StepRecord { step: 2, ..record() }).unwrap();
        let steps: Vec<u64> = std::fs::read_to_string(&path)
            .unwrap()
            .lines()
            .map(|l| serde_json::from_str::<Value>(l).unwrap()["step"].as_u64().unwrap())
            .collect();
        assert_eq!(steps, [0, 1, 2]);
    }

    #[test]
    fn a_folder_that_is_not_there_is_a_disk_failure() {
        let folder = tempfile::tempdir().unwrap();
        let failure = MetricsWriter::open(&folder.path().join("missing"), false).unwrap_err();
        assert_eq!(failure.exit, crate::Exit::Disk);
        assert!(failure.place.unwrap().ends_with("missing/metrics.jsonl"));
    }

    #[cfg(target_os = "linux")]
    #[test]
    fn a_full_disk_is_a_disk_failure_that_names_the_step() {
        let file = OpenOptions::new().write(true).open("/dev/full").unwrap();
        let lines = Appender { file, path: "metrics.jsonl".into(), pending: Vec::new(), waits: false };
        let mut writer = MetricsWriter { lines, events: None };
        let failure = writer.write(&record()).unwrap_err();
        assert_eq!(failure.exit, crate::Exit::Disk);
        assert!(failure.what.contains("step 3"));
        // With --save-failure continue the lines wait until there is room, or the run ends.
        let folder = tempfile::tempdir().unwrap();
        (writer.lines.pending, writer.lines.waits) = (Vec::new(), true);
        (0..2).for_each(|step| writer.write(&StepRecord { step, ..record() }).unwrap());
        assert_eq!(writer.finish().unwrap_err().exit, crate::Exit::Disk);
        writer.lines.file = MetricsWriter::open(folder.path(), true).unwrap().lines.file;
        writer.write(&StepRecord { step: 2, ..record() }).unwrap();
        let text = std::fs::read_to_string(folder.path().join("metrics.jsonl")).unwrap();
        let steps: Vec<u64> =
            text.lines().map(|l| serde_json::from_str::<Value>(l).unwrap()["step"].as_u64().unwrap()).collect();
        assert_eq!(steps, [0, 1, 2]);
    }
}
