//! Writing a Hugging Face folder from many ranks at once. Headers and lengths are known before the first value, so every
//! rank writes its own byte ranges and nobody gathers the model. The folder appears under its name when it is whole.
//!
//! Order of calls, with a barrier between them: `create` on rank 0; `write` (any number of times) and then `sync` on every
//! rank; `finish` on rank 0.

mod folder;
#[cfg(test)]
mod tests;

use super::FileDType;
use super::layout::Layout;
use crate::{Exit, Failure, Result};
use half::f16;
use serde_json::Value;
use spmd_core::UnitSpec;
use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

pub use folder::check_target;

/// Hugging Face's usual limit for one weight file, in bytes.
pub const MAX_SHARD_BYTES: u64 = 5_000_000_000;

/// Elements narrowed and written at once.
const CHUNK: usize = 1 << 18;

/// A folder to be written, as every rank knows it.
#[derive(Debug)]
pub struct ModelWriter {
    dir: PathBuf,
    layout: Layout,
    /// `lm_head.weight` is stored as a copy of the embedding table.
    tied_head: bool,
    /// Files opened for writing by this rank.
    files: Vec<OnceLock<File>>,
}

impl ModelWriter {
    /// Lays out folder `dir`: the parameters of `units` in order, each in `dtype(name)`, in files of at most
    /// `max_shard_bytes` of data (see [`MAX_SHARD_BYTES`]). `tied_head` stores `lm_head.weight` as a second copy of the
    /// embedding table, as the source of a tied model may have done. Touches no disk; every rank gets the same layout.
    pub fn plan(
        dir: &Path,
        units: &[UnitSpec],
        dtype: impl Fn(&str) -> FileDType,
        tied_head: bool,
        max_shard_bytes: u64,
    ) -> Self {
        let layout = Layout::new(units, dtype, tied_head, max_shard_bytes);
        let files = layout.shards.iter().map(|_| OnceLock::new()).collect();
        ModelWriter { dir: dir.to_owned(), layout, tied_head, files }
    }

    /// Bytes the weight files take.
    pub fn bytes(&self) -> u64 {
        self.layout.shards.iter().map(|shard| shard.len).sum()
    }

    /// Rank 0: makes the folder `DIR.partial` beside the final one, with every file at its full length, the headers and the
    /// index written.
    ///
    /// # Errors
    /// Exit 7: the folder is there and not ours to replace, or the disk refuses.
    pub fn create(&self) -> Result<()> {
        check_target(&self.dir)?;
        let partial = folder::partial(&self.dir);
        folder::remove_ours(&partial)?;
        std::fs::create_dir_all(&partial).map_err(|e| disk_failure("the model folder cannot be made", &partial, &e))?;
        for shard in &self.layout.shards {
            let path = partial.join(&shard.name);
            let file = File::create(&path).and_then(|file| {
                file.set_len(shard.len)?;
                file.write_all_at(&shard.header, 0)
            });
            file.map_err(|e| disk_failure("a weight file cannot be made", &path, &e))?;
        }
        match &self.layout.index {
            Some(index) => write_json(&partial.join("model.safetensors.index.json"), index),
            None => Ok(()),
        }
    }

    /// Any rank, after `create`: writes elements `start..start + values.len()` of tensor `name` (row-major), rounded to
    /// nearest even into the tensor's dtype. Ranges of different ranks must not overlap.
    ///
    /// # Errors
    /// Exit 7 when the disk refuses; exit 6 for a finite value that the dtype can only hold as infinity.
    pub fn write(&self, name: &str, start: usize, values: &[f32]) -> Result<()> {
        self.write_one(name, start, values)?;
        if self.tied_head && name == super::weights::EMBEDDING {
            self.write_one(super::weights::HEAD, start, values)?;
        }
        Ok(())
    }

    /// Every rank, after its last `write`: returns when what it wrote has reached the disk.
    ///
    /// # Errors
    /// Exit 7 when the disk refuses.
    pub fn sync(&self) -> Result<()> {
        for (i, file) in self.files.iter().enumerate() {
            if let Some(file) = file.get() {
                file.sync_all().map_err(|e| disk_failure("a weight file cannot be synced", &self.shard_path(i), &e))?;
            }
        }
        Ok(())
    }

    /// Rank 0, after every rank's `sync`: adds `config.json` (from `config`; byte for byte the source's file where nothing
    /// in it changes) and the tokenizer and generation files of folder `source` (without one: the byte tokenizer), syncs, and renames the folder to its final
    /// name. A model folder of ours that has that name already is replaced.
    ///
    /// # Errors
    /// Exit 7 when the disk refuses.
    pub fn finish(&self, source: Option<&Path>, config: &Value) -> Result<()> {
        let partial = folder::partial(&self.dir);
        let changed = self.config_to_write(config);
        match (source, changed) {
            (Some(source), None) => folder::copy(source, &partial, "config.json")?,
            (None, None) => write_json(&partial.join("config.json"), config)?,
            (_, Some(changed)) => write_json(&partial.join("config.json"), &changed)?,
        }
        for name in source.map_or(&[][..], |_| &folder::COMPANIONS) {
            // A file that is not in the source is not in the copy.
            if let Some(source) = source.filter(|s| s.join(name).is_file()) {
                folder::copy(source, &partial, name)?;
            }
        }
        if source.is_none() {
            // Only a model over bytes has no folder to come from.
            write_json(&partial.join("tokenizer.json"), &crate::data::byte_tokenizer_json())?;
        }
        folder::sync(&partial)?;
        folder::put_in_place(&self.dir)
    }

    /// Rank 0, when writing failed: removes what was written so far. What cannot be removed stays under its other name.
    pub fn discard(&self) {
        let _ = folder::remove_ours(&folder::partial(&self.dir));
    }

    /// `config` with a dtype that is true, or `None` where it already is: some tensor has the dtype it names. The most
    /// common dtype (by elements) is the one written.
    fn config_to_write(&self, config: &Value) -> Option<Value> {
        let key = if config.get("dtype").is_some() { "dtype" } else { "torch_dtype" };
        let named = config.get(key).and_then(Value::as_str);
        let elements = |dtype| self.layout.places.values().filter(|p| p.dtype == dtype).map(|p| p.len).sum::<usize>();
        let dtypes = [FileDType::Bf16, FileDType::F32, FileDType::F16];
        if dtypes.iter().any(|d| Some(d.config_name()) == named && elements(*d) > 0) {
            return None;
        }
        let common = dtypes.into_iter().max_by_key(|d| elements(*d))?;
        let mut changed = config.clone();
        changed.as_object_mut()?.insert(key.to_owned(), common.config_name().into());
        Some(changed)
    }

    fn write_one(&self, name: &str, start: usize, values: &[f32]) -> Result<()> {
        let place = self.layout.place(name)?;
        if start.checked_add(values.len()).is_none_or(|end| end > place.len) {
            let what = format!("elements {start}.. ({}) of {name} ({}) were given to write", values.len(), place.len);
            return Err(Failure::new(Exit::Bug, what));
        }
        let file = self.file(place.shard)?;
        let mut scratch = match place.dtype {
            FileDType::F32 => Vec::new(),
            FileDType::Bf16 | FileDType::F16 => vec![0u16; values.len().min(CHUNK)],
        };
        let mut at = start;
        for part in values.chunks(CHUNK) {
            let bytes: &[u8] = match place.dtype {
                FileDType::F32 => bytemuck::cast_slice(part),
                FileDType::Bf16 | FileDType::F16 => {
                    let half = &mut scratch[..part.len()];
                    narrow(place.dtype, part, half).map_err(|i| too_large(name, place.dtype, at + i, part[i]))?;
                    bytemuck::cast_slice(half)
                }
            };
            file.write_all_at(bytes, place.start + (at * place.dtype.size()) as u64)
                .map_err(|e| disk_failure("a weight file cannot be written", &self.shard_path(place.shard), &e))?;
            at += part.len();
        }
        Ok(())
    }

    fn shard_path(&self, shard: usize) -> PathBuf {
        folder::partial(&self.dir).join(&self.layout.shards[shard].name)
    }

    fn file(&self, shard: usize) -> Result<&File> {
        if let Some(file) = self.files[shard].get() {
            return Ok(file);
        }
        let path = self.shard_path(shard);
        let file = OpenOptions::new().write(true).open(&path);
        let file = file.map_err(|e| disk_failure("a weight file cannot be opened for writing", &path, &e))?;
        // Another thread may have opened it meanwhile; then its handle stands and this one is closed.
        Ok(self.files[shard].get_or_init(|| file))
    }
}

/// Rounds into a 16-bit dtype. The index of the first finite value that became infinite, if there is one.
fn narrow(dtype: FileDType, from: &[f32], to: &mut [u16]) -> std::result::Result<(), usize> {
    let (bits, infinity): (fn(f32) -> u16, u16) = match dtype {
        FileDType::F16 => (|x| f16::from_f32(x).to_bits(), f16::INFINITY.to_bits()),
        FileDType::F32 | FileDType::Bf16 => {
            (|x| spmd_core::dtype::to_bf16(x).to_bits(), spmd_core::bf16::INFINITY.to_bits())
        }
    };
    to.iter_mut().zip(from).for_each(|(to, from)| *to = bits(*from));
    match to.iter().zip(from).position(|(to, from)| to & 0x7fff == infinity && from.is_finite()) {
        Some(i) => Err(i),
        None => Ok(()),
    }
}

fn too_large(name: &str, dtype: FileDType, index: usize, value: f32) -> Failure {
    Failure::new(Exit::NotFinite, "a weight became too large for the dtype it is stored in")
        .at(format!("tensor {name}, index {index}"))
        .expected(format!("a value {} can hold", dtype.header_name()))
        .found(value)
        .hint("the run diverged: lower --lr, or convert the source model to bf16 first")
}

/// An exit-7 failure from what the operating system said, with what to try.
pub(crate) fn disk_failure(what: &str, path: &Path, error: &io::Error) -> Failure {
    use io::ErrorKind::{NotFound, PermissionDenied, QuotaExceeded, ReadOnlyFilesystem, StorageFull};
    let hint = match error.kind() {
        StorageFull => "the disk is full: free space, or choose another place with --out",
        QuotaExceeded => "the quota is used up: free space, or choose another place with --out",
        PermissionDenied => "make the folder writable, or choose another place with --out",
        ReadOnlyFilesystem => "the file system is read-only: choose another place with --out",
        NotFound => "a folder on the way is missing or was removed during the run",
        _ => "check the disk and the folder, or choose another place with --out",
    };
    Failure::disk(what).at(path.display()).found(error).hint(hint)
}

fn write_json(path: &Path, value: &Value) -> Result<()> {
    // A `Value` always prints: its keys are strings.
    let text = format!("{value:#}\n");
    std::fs::write(path, text).map_err(|e| disk_failure("a file of the model folder cannot be written", path, &e))
}
