//! `--tensorboard`: the scalars of `metrics.jsonl` as event files that TensorBoard reads.
//!
//! An event file is a row of TFRecords (tensorflow/core/lib/io/record_writer.cc): the length of the data, its checksum,
//! the data, its checksum. Each datum is an `Event` protobuf (tensorflow/core/util/event.proto). What is needed of both is
//! so little that it is written by hand.

use crate::Result;
use crate::metrics::{Appender, StepRecord};
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

/// Writes `OUT/tensorboard/events.out.tfevents.TIME.HOST.PID`.
#[derive(Debug)]
pub struct EventWriter {
    file: Appender,
}

impl EventWriter {
    /// Starts a file of its own in the run folder `folder`, whose first step will be `step`. Steps from there on that an
    /// earlier file of the folder has are made again; TensorBoard is told to forget them. `waits` says whether events wait
    /// for a full disk.
    ///
    /// # Errors
    /// A disk failure (exit 7).
    pub fn open(folder: &Path, step: u64, waits: bool) -> Result<Self> {
        let time = now();
        let host = rustix::system::uname().nodename().to_string_lossy().into_owned();
        let name = format!("events.out.tfevents.{:010}.{host}.{}", time as u64, std::process::id());
        let mut file = Appender::create(&folder.join("tensorboard"), &name, waits)?;
        let mut start = Vec::new();
        record(&version(time), &mut start);
        record(&restart(time, step), &mut start);
        file.append(&start)?;
        Ok(EventWriter { file })
    }

    /// Writes one step; it has reached the operating system when this returns.
    ///
    /// # Errors
    /// A disk failure (exit 7).
    pub fn write(&mut self, step: &StepRecord) -> Result<()> {
        let mut bytes = Vec::new();
        record(&scalars(now(), step), &mut bytes);
        self.file.append(&bytes)
    }

    /// Writes what still waits, at the end of a run.
    ///
    /// # Errors
    /// A disk failure (exit 7).
    pub fn finish(&mut self) -> Result<()> {
        self.file.finish()
    }
}

/// Seconds since 1970, which TensorBoard shows as the time of a step.
fn now() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |since| since.as_secs_f64())
}

/// Appends `data` as a TFRecord.
fn record(data: &[u8], out: &mut Vec<u8>) {
    let length = (data.len() as u64).to_le_bytes();
    for part in [&length[..], data] {
        out.extend(part);
        out.extend(masked_crc(part).to_le_bytes());
    }
}

/// The checksum of a TFRecord: rotated and moved, so that a record of records does not have the checksum of its parts.
fn masked_crc(bytes: &[u8]) -> u32 {
    crc32c::crc32c(bytes).rotate_right(15).wrapping_add(0xa282_ead8)
}

/// The event a file begins with: which version of the format it is in.
fn version(time: f64) -> Vec<u8> {
    let mut event = Message::event(time, None);
    event.bytes(3, b"brain.Event:2");
    event.0
}

/// An event that starts a session at `step`: what earlier files say of this and later steps no longer counts.
fn restart(time: f64, step: u64) -> Vec<u8> {
    const START: u64 = 1;
    let mut log = Message::default();
    log.integer(1, START);
    let mut event = Message::event(time, Some(step));
    event.bytes(7, &log.0);
    event.0
}

/// The event of a step: a scalar for each metric that has a finite value.
fn scalars(time: f64, step: &StepRecord) -> Vec<u8> {
    let values = [
        ("loss", Some(step.loss)),
        ("grad_norm", Some(step.grad_norm)),
        ("clip_coef", Some(step.clip_coef)),
        ("lr", Some(step.lr)),
        ("swallowed", step.swallowed),
        ("arrived", step.arrived),
        ("tokens", Some(step.tokens as f64)),
        ("tokens_per_s", Some(step.tps)),
        ("tflops", Some(step.tflops)),
        ("mfu", step.mfu),
        ("step_ms", Some(step.step_ms)),
        ("data_ms", Some(step.data_ms)),
        ("comm_ms", Some(step.comm_ms)),
        ("optim_ms", Some(step.optim_ms)),
        ("save_ms", step.save_ms),
        ("mem_gib", step.mem_gib),
        ("mem_plan_gib", Some(step.mem_plan_gib)),
        ("epoch", Some(step.epoch)),
    ];
    let mut summary = Message::default();
    for (name, value) in values {
        let Some(value) = value.filter(|x| x.is_finite()) else { continue };
        let mut scalar = Message::default();
        scalar.bytes(1, format!("train/{name}").as_bytes());
        scalar.float(2, value as f32);
        summary.bytes(1, &scalar.0);
    }
    let mut event = Message::event(time, Some(step.step));
    event.bytes(5, &summary.0);
    event.0
}

/// A protobuf message in the making.
#[derive(Default)]
struct Message(Vec<u8>);

impl Message {
    /// An `Event` with its time and step; a step of 0 is the default, which protobuf leaves out.
    fn event(time: f64, step: Option<u64>) -> Message {
        let mut event = Message::default();
        event.key(1, 1);
        event.0.extend(time.to_le_bytes());
        if let Some(step) = step.filter(|step| *step > 0) {
            event.integer(2, step);
        }
        event
    }

    /// A field's number and how its value is written: 0 varint, 1 eight bytes, 2 length and bytes, 5 four bytes.
    fn key(&mut self, field: u8, wire: u8) {
        self.0.push(field << 3 | wire);
    }

    fn varint(&mut self, mut x: u64) {
        while x >= 0x80 {
            self.0.push(x as u8 | 0x80);
            x >>= 7;
        }
        self.0.push(x as u8);
    }

    fn integer(&mut self, field: u8, x: u64) {
        self.key(field, 0);
        self.varint(x);
    }

    fn float(&mut self, field: u8, x: f32) {
        self.key(field, 5);
        self.0.extend(x.to_le_bytes());
    }

    fn bytes(&mut self, field: u8, bytes: &[u8]) {
        self.key(field, 2);
        self.varint(bytes.len() as u64);
        self.0.extend(bytes);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The first bytes of any event file, at 1.0 seconds, byte by byte.
    #[test]
    fn the_first_record_has_the_golden_bytes() {
        let mut bytes = Vec::new();
        record(&version(1.0), &mut bytes);
        let data = b"\x09\0\0\0\0\0\0\xf0\x3f\x1a\x0dbrain.Event:2";
        assert_eq!(bytes[..8], [24, 0, 0, 0, 0, 0, 0, 0]);
        // The checksum of the length 24 is the same in every event file that TensorFlow writes.
        assert_eq!(bytes[8..12], [0xa3, 0x7f, 0x4b, 0x22]);
        assert_eq!(bytes[12..36], data[..]);
        assert_eq!(bytes[36..], masked_crc(data).to_le_bytes());
    }

    #[test]
    fn the_checksum_is_crc32c_rotated_and_moved() {
        // RFC 3720, B.4: 32 bytes of zeros, and the numbers from 0 to 31.
        assert_eq!(crc32c::crc32c(&[0; 32]), 0x8a91_36aa);
        let numbers: Vec<u8> = (0..32).collect();
        assert_eq!(crc32c::crc32c(&numbers), 0x46dd_794e);
        // 0x8a9136aa turned right by 15 bits is 0x6d551522; with 0xa282ead8 it is more than 32 bits hold.
        assert_eq!(masked_crc(&[0; 32]), 0x6d55_1522_u32.wrapping_add(0xa282_ead8));
        assert_eq!(masked_crc(&[0; 32]), 0x0fd7_fffa);
    }

    #[test]
    fn a_step_has_a_scalar_for_every_finite_metric() {
        let step = StepRecord { step: 300, loss: 1.5, grad_norm: f64::NAN, swallowed: None, ..StepRecord::default() };
        let event = scalars(2.0, &step);
        // Time, then step 300 as a varint, then the summary.
        assert_eq!(event[..12], [9, 0, 0, 0, 0, 0, 0, 0, 0x40, 0x10, 0xac, 0x02]);
        assert_eq!(event[12], 0x2a);
        let loss = b"\x0a\x11\x0a\x0atrain/loss\x15\0\0\xc0\x3f";
        assert!(event.windows(loss.len()).any(|w| w == loss));
        let text = String::from_utf8_lossy(&event);
        for absent in ["grad_norm", "swallowed", "arrived", "mfu", "save_ms", "mem_gib"] {
            assert!(!text.contains(absent), "{absent}");
        }
        assert_eq!(text.matches("train/").count(), 12);
        // A step of 0 is left out, as protobuf does with defaults.
        assert_eq!(scalars(2.0, &StepRecord::default())[9], 0x2a);
    }

    #[test]
    fn a_run_that_goes_on_writes_a_new_file_that_takes_back_what_it_makes_again() {
        assert_eq!(restart(0.0, 5)[9..], [0x10, 5, 0x3a, 2, 8, 1]);
        let folder = tempfile::tempdir().unwrap();
        let mut writer = EventWriter::open(folder.path(), 0, false).unwrap();
        writer.write(&StepRecord::default()).unwrap();
        writer.finish().unwrap();
        let files: Vec<_> = std::fs::read_dir(folder.path().join("tensorboard")).unwrap().collect();
        let name = files[0].as_ref().unwrap().file_name().into_string().unwrap();
        assert!(name.starts_with("events.out.tfevents.") && name.ends_with(&format!(".{}", std::process::id())));
        let bytes = std::fs::read(files[0].as_ref().unwrap().path()).unwrap();
        // Three records: the version, the start of a session, the step; each has 16 bytes around its data.
        let (mut rest, mut lengths) = (&bytes[..], Vec::new());
        while let Some(length) = rest.first_chunk::<8>() {
            let length = u64::from_le_bytes(*length) as usize;
            let data = &rest[12..12 + length];
            assert_eq!(rest[12 + length..16 + length], masked_crc(data).to_le_bytes());
            lengths.push(length);
            rest = &rest[16 + length..];
        }
        assert_eq!((lengths.len(), lengths[0], lengths[1]), (3, 24, 13));
    }

    #[test]
    fn a_folder_that_cannot_be_made_is_a_disk_failure() {
        let folder = tempfile::tempdir().unwrap();
        std::fs::write(folder.path().join("tensorboard"), "a file").unwrap();
        let failure = EventWriter::open(folder.path(), 0, false).unwrap_err();
        assert_eq!(failure.exit, crate::Exit::Disk);
        assert!(failure.place.unwrap().contains("tensorboard"));
    }
}
