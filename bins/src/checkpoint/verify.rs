//! Every byte of a checkpoint against its checksum, and everything that is wrong by name.

use super::format::{CheckpointState, FileEntry, Role, STATE_FILE};
use super::read::{Reader, open_sequential, read_state};
use crate::Result;
use std::collections::HashSet;
use std::fmt;
use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::sync::atomic::{AtomicUsize, Ordering};
use xxhash_rust::xxh3::Xxh3Default;

/// Bytes read at once.
const BUFFER: u64 = 4 << 20;

/// The most threads that check: two keep most disks busy, and a checkpoint may be checked beside other work.
const THREADS: usize = 4;

/// One thing that is not as it was written.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Fault {
    /// The file's name in the folder.
    pub file: String,
    /// The tensor it hits; the first one where it hits several. `None` for a header, a small file or an unlisted one.
    pub tensor: Option<(Role, String)>,
    /// The bytes of the file that are wrong.
    pub bytes: Range<u64>,
    /// What it is.
    pub kind: FaultKind,
}

/// Kinds of faults.
#[derive(Debug, Clone, PartialEq, Eq)]
pub enum FaultKind {
    /// A listed file is not there.
    Missing,
    /// A file is shorter or longer than listed.
    Length {
        /// As listed, in bytes.
        expected: u64,
        /// As it is.
        found: u64,
    },
    /// Bytes do not give their checksum.
    Checksum {
        /// xxh3-64 as listed.
        expected: u64,
        /// xxh3-64 of what is there.
        found: u64,
    },
    /// The system does not give the bytes.
    Unreadable(String),
    /// A file that the checkpoint does not list.
    Unlisted,
}

impl fmt::Display for Fault {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.file)?;
        if let Some((role, tensor)) = &self.tensor {
            write!(f, ", {role} of tensor {tensor}")?;
        }
        let Range { start, end } = self.bytes;
        match &self.kind {
            FaultKind::Missing => write!(f, ": the file is missing"),
            FaultKind::Length { expected, found } => write!(f, ": {found} bytes, expected {expected}"),
            FaultKind::Checksum { expected, found } => {
                write!(f, ", bytes {start}..{end}: xxh3 {found:016x}, expected {expected:016x}")
            }
            FaultKind::Unreadable(error) => write!(f, ", bytes {start}..{end}: {error}"),
            FaultKind::Unlisted => write!(f, ": no file of the checkpoint"),
        }
    }
}

/// Checks every byte of the checkpoint in `dir`, also of one that [`Reader::open`] refuses for lack of files. `progress` is
/// called with the bytes done and their total. An empty list: everything is as it was written.
///
/// # Errors
/// Exit 3: `state.rkyv` itself is missing or damaged, so there is nothing to compare with.
pub fn verify(dir: &Path, progress: &mut dyn FnMut(u64, u64)) -> Result<Vec<Fault>> {
    Ok(verify_files(dir, &read_state(dir)?, progress))
}

impl Reader {
    /// [`verify`] with the state that is open.
    pub fn verify(&self, progress: &mut dyn FnMut(u64, u64)) -> Vec<Fault> {
        verify_files(self.dir(), self.state(), progress)
    }
}

/// Bytes of a file under one checksum, and the tensor they belong to.
struct Block<'a> {
    offset: u64,
    len: u64,
    xxh3: u64,
    tensor: Option<(Role, &'a str)>,
}

impl Block<'_> {
    fn fault(&self, file: &FileEntry, kind: FaultKind) -> Fault {
        let tensor = self.tensor.map(|(role, name)| (role, name.to_owned()));
        Fault { file: file.name.clone(), tensor, bytes: self.offset..self.offset + self.len, kind }
    }
}

fn verify_files(dir: &Path, state: &CheckpointState, progress: &mut dyn FnMut(u64, u64)) -> Vec<Fault> {
    let blocks = blocks(state);
    let mut faults = Vec::new();
    let mut jobs: Vec<(&FileEntry, &Block<'_>)> = Vec::new();
    for (entry, blocks) in state.files.iter().zip(&blocks) {
        let len = match std::fs::metadata(dir.join(&entry.name)) {
            Ok(metadata) => metadata.len(),
            Err(e) => {
                let missing = e.kind() == std::io::ErrorKind::NotFound;
                let kind = if missing { FaultKind::Missing } else { FaultKind::Unreadable(e.to_string()) };
                faults.push(whole(entry, blocks, 0, kind));
                continue;
            }
        };
        if len != entry.len {
            faults.push(whole(entry, blocks, len, FaultKind::Length { expected: entry.len, found: len }));
        }
        // Of a truncated file, what is there is still compared.
        jobs.extend(blocks.iter().take_while(|b| b.offset + b.len <= len).map(|block| (entry, block)));
    }
    compare(dir, &jobs, progress, &mut faults);
    let order = |name: &str| state.files.iter().position(|file| file.name == name);
    faults.sort_by_key(|fault| (order(&fault.file), fault.bytes.start));
    faults.extend(unlisted(dir, state));
    faults
}

/// The fault of a file that lacks everything from byte `from`, with the first tensor that is not whole.
fn whole(entry: &FileEntry, blocks: &[Block<'_>], from: u64, kind: FaultKind) -> Fault {
    let lost = blocks.iter().find(|b| b.tensor.is_some() && b.offset + b.len > from);
    let tensor = lost.and_then(|b| b.tensor).map(|(role, name)| (role, name.to_owned()));
    Fault { file: entry.name.clone(), tensor, bytes: from.min(entry.len)..entry.len, kind }
}

/// Compares every block with its checksum. Some threads share the blocks, so that the disk is read while sums are made.
fn compare(dir: &Path, jobs: &[(&FileEntry, &Block<'_>)], progress: &mut dyn FnMut(u64, u64), faults: &mut Vec<Fault>) {
    let total = jobs.iter().map(|(_, block)| block.len).sum();
    let mut done = 0;
    let mut report = |index: usize, kind: Option<FaultKind>| {
        let (entry, block) = jobs[index];
        done += block.len;
        progress(done, total);
        faults.extend(kind.map(|kind| block.fault(entry, kind)));
    };
    let next = AtomicUsize::new(0);
    let take = || Some(next.fetch_add(1, Ordering::Relaxed)).filter(|index| *index < jobs.len());
    let helpers = std::thread::available_parallelism().map_or(1, usize::from).min(THREADS) - 1;
    std::thread::scope(|scope| {
        let (send, receive) = std::sync::mpsc::channel();
        for _ in 0..helpers {
            let send = send.clone();
            let work = move || {
                let mut checker = Checker::new(dir);
                while let Some(index) = take() {
                    // This end only closes when the scope is left by a panic.
                    let _ = send.send((index, checker.check(jobs[index])));
                }
            };
            // A system that gives no more threads leaves more to this one.
            let _ = std::thread::Builder::new().spawn_scoped(scope, work);
        }
        drop(send);
        let mut checker = Checker::new(dir);
        while let Some(index) = take() {
            report(index, checker.check(jobs[index]));
            receive.try_iter().for_each(|(index, kind)| report(index, kind));
        }
        receive.iter().for_each(|(index, kind)| report(index, kind));
    });
}

/// Makes checksums of blocks; those of one file mostly come one after another.
struct Checker<'a> {
    dir: &'a Path,
    file: Option<(&'a str, File)>,
    buffer: Vec<u8>,
}

impl<'a> Checker<'a> {
    fn new(dir: &'a Path) -> Self {
        Checker { dir, file: None, buffer: Vec::new() }
    }

    /// What is wrong with a block, if something is.
    fn check(&mut self, (entry, block): (&'a FileEntry, &Block<'_>)) -> Option<FaultKind> {
        match self.checksum(&entry.name, block) {
            Ok(found) if found == block.xxh3 => None,
            Ok(found) => Some(FaultKind::Checksum { expected: block.xxh3, found }),
            Err(e) => Some(FaultKind::Unreadable(e.to_string())),
        }
    }

    fn checksum(&mut self, name: &'a str, block: &Block<'_>) -> std::io::Result<u64> {
        let file = match self.file.take() {
            Some((open, file)) if open == name => file,
            _ => open_sequential(&self.dir.join(name))?,
        };
        let (_, file) = self.file.insert((name, file));
        let mut hash = Xxh3Default::new();
        let mut at = 0;
        while at < block.len {
            let n = (block.len - at).min(BUFFER) as usize;
            self.buffer.resize(n, 0);
            file.read_exact_at(&mut self.buffer, block.offset + at)?;
            hash.update(&self.buffer);
            at += n as u64;
        }
        Ok(hash.digest())
    }
}

/// The blocks of every file, in order.
fn blocks(state: &CheckpointState) -> Vec<Vec<Block<'_>>> {
    let mut files: Vec<Vec<Block<'_>>> = state.files.iter().map(|_| Vec::new()).collect();
    for c in &state.chunks {
        let tensor = Some((c.role, state.name_of(c)));
        files[c.file as usize].push(Block { offset: c.offset, len: state.bytes_of(c), xxh3: c.xxh3, tensor });
    }
    for p in &state.plain {
        files[p.file as usize].push(Block { offset: p.offset, len: p.len, xxh3: p.xxh3, tensor: None });
    }
    files.iter_mut().for_each(|blocks| blocks.sort_unstable_by_key(|b| b.offset));
    files
}

fn unlisted(dir: &Path, state: &CheckpointState) -> Vec<Fault> {
    let listed: HashSet<&str> = state.files.iter().map(|f| f.name.as_str()).chain([STATE_FILE]).collect();
    let found = |name: String| {
        let len = std::fs::metadata(dir.join(&name)).map_or(0, |m| m.len());
        Fault { file: name, tensor: None, bytes: 0..len, kind: FaultKind::Unlisted }
    };
    let mut names: Vec<String> = match std::fs::read_dir(dir) {
        Ok(entries) => entries.flatten().map(|e| e.file_name().to_string_lossy().into_owned()).collect(),
        Err(e) => {
            let kind = FaultKind::Unreadable(e.to_string());
            return vec![Fault { file: ".".to_owned(), tensor: None, bytes: 0..0, kind }];
        }
    };
    names.retain(|name| !listed.contains(name.as_str()));
    names.sort();
    names.into_iter().map(found).collect()
}
