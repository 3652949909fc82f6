//! Reading numbers back by element range, for whatever world reads them. Every block that is touched is checked.

use super::format::{CheckpointState, Chunk, DAMAGED, Role, STATE_FILE};
use crate::hf::FileDType;
use crate::hf::save::{narrow, too_large};
use crate::{Exit, Failure, Result};
use rustix::fs::{Advice, fadvise};
use spmd_core::dtype::{from_bf16, round_bf16};
use spmd_core::{ViewMut, bf16};
use std::fs::File;
use std::io;
use std::num::NonZeroU64;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::{Mutex, OnceLock, PoisonError};
use xxhash_rust::xxh3::xxh3_64;

/// How far ahead of the block being read the disk is asked to fetch, in bytes: a few blocks.
const READ_AHEAD: u64 = 32 << 20;

/// A complete checkpoint, open for reading.
#[derive(Debug)]
pub struct Reader {
    dir: PathBuf,
    state: CheckpointState,
    /// One entry a listed file, opened when it is first needed: a rank needs few of the files of many ranks.
    files: Vec<OnceLock<File>>,
    /// The block last read in part: neighbouring ranges often share one.
    last: Mutex<Option<(Chunk, Vec<u8>)>>,
}

/// The state of the checkpoint in `dir`, validated. No other file is looked at.
///
/// # Errors
/// Exit 3: no such file, or one that is foreign, newer, truncated or damaged.
pub fn read_state(dir: &Path) -> Result<CheckpointState> {
    let path = dir.join(STATE_FILE);
    let bytes = std::fs::read(&path).map_err(|e| {
        Failure::input("the state file of a checkpoint cannot be read")
            .at(path.display())
            .expected("a checkpoint: a folder checkpoints/step-NNNNNN of a run")
            .found(e)
            .hint("check the path; a folder whose name ends in .partial is no checkpoint yet")
    })?;
    CheckpointState::decode(&path, &bytes)
}

impl Reader {
    /// Opens the checkpoint in `dir`: its state is read and validated, and every file it lists must be there in its
    /// length. No numbers are read.
    ///
    /// # Errors
    /// Exit 3, naming every file that is missing or of another length.
    pub fn open(dir: &Path) -> Result<Self> {
        let state = read_state(dir)?;
        let mut wrong = Vec::new();
        for entry in &state.files {
            match std::fs::metadata(dir.join(&entry.name)).map(|m| m.len()) {
                Ok(len) if len == entry.len => {}
                Ok(len) => wrong.push(format!("{}: {len} bytes, expected {}", entry.name, entry.len)),
                Err(e) => wrong.push(format!("{}: {e}", entry.name)),
            }
        }
        if wrong.is_empty() {
            let files = state.files.iter().map(|_| OnceLock::new()).collect();
            return Ok(Reader { dir: dir.to_owned(), state, files, last: Mutex::new(None) });
        }
        Err(Failure::input("the checkpoint lacks files, or parts of them")
            .at(dir.display())
            .expected(format!("the {} files that {STATE_FILE} lists, in their lengths", state.files.len()))
            .found(crate::hf::shortened(&wrong))
            .hint(DAMAGED))
    }

    /// What the checkpoint says of itself.
    pub fn state(&self) -> &CheckpointState {
        &self.state
    }

    /// The folder.
    pub fn dir(&self) -> &Path {
        &self.dir
    }

    /// Fills `out` with elements `start..start + out.len()` of a tensor (row-major), widened to fp32 exactly. Whole blocks
    /// are read and their checksums compared. [`Role::Model`] of a checkpoint without model files is its shadow, rounded
    /// to bf16 as the files would hold it.
    ///
    /// # Errors
    /// Exit 3: a block that is not as it was written (file, tensor, bytes, both checksums), or a tensor it does not have.
    pub fn read(&self, role: Role, tensor: &str, start: usize, out: &mut [f32]) -> Result<()> {
        self.read_into(role, tensor, start, ViewMut::F32(out))
    }

    /// [`Reader::read`] in the dtype of `out`: as it lies, widened exactly, or rounded to nearest even.
    ///
    /// # Errors
    /// As [`Reader::read`], and exit 6 for a finite number that bf16 can only hold as infinity.
    pub fn read_into(&self, role: Role, tensor: &str, start: usize, mut out: ViewMut<'_>) -> Result<()> {
        let index = self
            .state
            .tensor(tensor)
            .ok_or_else(|| Failure::input(format!("the checkpoint has no tensor {tensor}")).at(self.dir.display()))?;
        let elements = self.state.tensors[index].elements().unwrap_or(0) as usize;
        let end = start.checked_add(out.len()).filter(|end| *end <= elements);
        let Some(end) = end else {
            let what = format!("elements {start}.. ({}) of {tensor} ({elements}) were asked for", out.len());
            return Err(Failure::new(Exit::Bug, what));
        };
        let rounded = role == Role::Model && !self.state.stores_model();
        let chunks = self.state.chunks_of(if rounded { Role::Shadow } else { role }, index);
        if chunks.is_empty() && !out.is_empty() {
            return Err(Failure::input(format!("the checkpoint stores no {role:?} of {tensor}")).at(self.dir.display()));
        }
        let first = chunks.partition_point(|c| (c.start + c.elements) as usize <= start);
        let touched = chunks[first..].iter().take_while(|c| (c.start as usize) < end);
        for chunk in touched {
            let (from, len) = (chunk.start as usize, chunk.elements as usize);
            let (begin, stop) = (from.max(start), (from + len).min(end));
            let part = out.reborrow().slice(begin - start..stop - start);
            self.read_part(chunk, begin - from..stop - from, part, rounded)?;
        }
        Ok(())
    }

    /// Elements `range` of a block.
    fn read_part(&self, chunk: &Chunk, range: Range<usize>, mut out: ViewMut<'_>, rounded: bool) -> Result<()> {
        let dtype = self.state.dtypes.of(chunk.role);
        let whole = range.len() as u64 == chunk.elements;
        if whole && dtype == FileDType::from(out.as_view().dtype()) && !(rounded && dtype == FileDType::F32) {
            return match out {
                ViewMut::F32(out) => self.load(chunk, bytemuck::cast_slice_mut(out)),
                ViewMut::Bf16(out) => self.load(chunk, bytemuck::cast_slice_mut(out)),
            };
        }
        // A thread that panicked with the lock leaves nothing wrong: the bytes are out of their place while they are filled.
        let mut last = self.last.lock().unwrap_or_else(PoisonError::into_inner);
        let bytes = match last.take() {
            Some((held, bytes)) if held == *chunk => bytes,
            other => {
                let mut bytes = other.map_or_else(Vec::new, |(_, bytes)| bytes);
                bytes.resize(self.state.bytes_of(chunk) as usize, 0);
                self.load(chunk, &mut bytes)?;
                bytes
            }
        };
        let size = dtype.size();
        let part = &bytes[range.start * size..range.end * size];
        let converted = convert(dtype, part, &mut out, rounded);
        *last = Some((*chunk, bytes));
        converted.map_err(|(i, value)| {
            let index = chunk.start as usize + range.start + i;
            too_large(self.state.name_of(chunk), FileDType::Bf16, index, value)
        })
    }

    fn file(&self, index: usize) -> io::Result<&File> {
        if let Some(file) = self.files[index].get() {
            return Ok(file);
        }
        let file = open_sequential(&self.dir.join(&self.state.files[index].name))?;
        // Another thread may have opened it meanwhile; then its handle stands and this one is closed.
        Ok(self.files[index].get_or_init(|| file))
    }

    /// The bytes of a block, compared with their checksum.
    fn load(&self, chunk: &Chunk, into: &mut [u8]) -> Result<()> {
        let fault = |what: &str| {
            Failure::input(what.to_owned())
                .at(format!(
                    "{}, {} of tensor {}, bytes {}..{}",
                    self.dir.join(&self.state.files[chunk.file as usize].name).display(),
                    chunk.role,
                    self.state.name_of(chunk),
                    chunk.offset,
                    chunk.offset + self.state.bytes_of(chunk)
                ))
                .hint(DAMAGED)
        };
        let read = |file: &File, into: &mut [u8]| {
            // Whoever reads one block reads the next ones soon: the disk fetches them while this one is copied and checked.
            // Only a wish, as in `open_sequential`.
            let _ = fadvise(file, chunk.offset + READ_AHEAD, NonZeroU64::new(into.len() as u64), Advice::WillNeed);
            file.read_exact_at(into, chunk.offset)
        };
        self.file(chunk.file as usize)
            .and_then(|file| read(file, into))
            .map_err(|e| fault("a block of a checkpoint cannot be read").found(e))?;
        let found = xxh3_64(into);
        if found == chunk.xxh3 {
            return Ok(());
        }
        Err(fault("a block of a checkpoint is not as it was written")
            .expected(format!("xxh3 {:016x}", chunk.xxh3))
            .found(format!("xxh3 {found:016x}")))
    }
}

/// Opens a file that is read from front to back for the most part.
pub(super) fn open_sequential(path: &Path) -> io::Result<File> {
    let file = File::open(path)?;
    // Only a wish for more read-ahead, so that the disk works while a block is checked: a file system that does not know
    // it reads when it is asked to.
    let _ = fadvise(&file, 0, None, Advice::Sequential);
    Ok(file)
}

/// Little-endian numbers of `dtype` into the dtype of `out`; with `rounded` through bf16. The index and value of the first
/// finite number that becomes infinite otherwise.
fn convert(dtype: FileDType, from: &[u8], out: &mut ViewMut<'_>, rounded: bool) -> Result<(), (usize, f32)> {
    // The bytes are at no particular alignment, so numbers are taken out one by one; the loops still vectorise.
    let wide = |b: &[u8]| f32::from_bits(u32::from_le_bytes([b[0], b[1], b[2], b[3]]));
    let half = |b: &[u8]| bf16::from_bits(u16::from_le_bytes([b[0], b[1]]));
    match (dtype, out) {
        (FileDType::F32, ViewMut::F32(out)) => {
            out.iter_mut().zip(from.chunks_exact(4)).for_each(|(out, b)| *out = wide(b));
            for (i, x) in out.iter_mut().enumerate().filter(|_| rounded) {
                let before = std::mem::replace(x, round_bf16(*x));
                if before.is_finite() && !x.is_finite() {
                    return Err((i, before));
                }
            }
            Ok(())
        }
        (FileDType::F32, ViewMut::Bf16(out)) => {
            // Part by part through the stack, so that rounding and its check are those of the writers.
            let mut values = [0f32; 1024];
            for (n, (out, from)) in out.chunks_mut(1024).zip(from.chunks(4 * 1024)).enumerate() {
                let values = &mut values[..out.len()];
                values.iter_mut().zip(from.chunks_exact(4)).for_each(|(x, b)| *x = wide(b));
                narrow(FileDType::Bf16, values, bytemuck::cast_slice_mut(out))
                    .map_err(|i| (n * 1024 + i, values[i]))?;
            }
            Ok(())
        }
        (_, ViewMut::F32(out)) => {
            out.iter_mut().zip(from.chunks_exact(2)).for_each(|(out, b)| *out = from_bf16(half(b)));
            Ok(())
        }
        (_, ViewMut::Bf16(out)) => {
            out.iter_mut().zip(from.chunks_exact(2)).for_each(|(out, b)| *out = half(b));
            Ok(())
        }
    }
}
