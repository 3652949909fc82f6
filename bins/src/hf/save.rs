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
use spmd_core::dtype::to_bf16;
use spmd_core::{UnitSpec, bf16};
use std::fs::{File, OpenOptions};
use std::io;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

pub use folder::{COMPANIONS, check_target};
pub(crate) use folder::{companions, read_text};

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
        let layout = Layout::new("model", units, dtype, tied_head, max_shard_bytes);
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
            Some(index) => write_json(&partial.join(self.layout.index_name()), index),
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

    /// Rank 0, after every rank's `sync`: adds `config.json` (`config` as it is spelled, where nothing in it changes) and
    /// the `companions` (name and content of tokenizer and generation files), syncs, and renames the folder to its final
    /// name. A model folder of ours that has that name already is replaced.
    ///
    /// # Errors
    /// Exit 7 when the disk refuses; exit 3 for a `config` that is no JSON.
    pub fn finish(&self, config: &str, companions: &[(String, Vec<u8>)]) -> Result<()> {
        let partial = folder::partial(&self.dir);
        let parsed: Value = serde_json::from_str(config)
            .map_err(|e| Failure::input("config.json of the source is not JSON").found(e))?;
        let changed = self.config_to_write(&parsed).map(|changed| json_text(&changed));
        let config = changed.as_deref().unwrap_or(config);
        let companions = companions.iter().map(|(name, content)| (name.as_str(), content.as_slice()));
        for (name, content) in companions.chain([("config.json", config.as_bytes())]) {
            let path = partial.join(name);
            std::fs::write(&path, content)
                .map_err(|e| disk_failure("a file of the model folder cannot be written", &path, &e))?;
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
        let elements = |dtype| self.layout.places.values().filter(|p| p.dtype == dtype).map(|p| p.len).sum::<usize>();
        let dtypes = [FileDType::Bf16, FileDType::F32, FileDType::F16];
        let named = config.get(dtype_key(config)).and_then(Value::as_str);
        if dtypes.iter().any(|d| Some(d.config_name()) == named && elements(*d) > 0) {
            return None;
        }
        with_dtype(config, dtypes.into_iter().max_by_key(|d| elements(*d))?)
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

/// The key that names the weights' dtype in this `config.json`: it has a new and an old name.
fn dtype_key(config: &Value) -> &'static str {
    if config.get("dtype").is_some() { "dtype" } else { "torch_dtype" }
}

/// `config` with the dtype it names changed, or `None` if it says so already (or is no object, which was refused before).
pub(crate) fn with_dtype(config: &Value, dtype: FileDType) -> Option<Value> {
    let (key, name) = (dtype_key(config), Value::from(dtype.config_name()));
    let mut changed = config.clone();
    let before = changed.as_object_mut()?.insert(key.to_owned(), name.clone());
    (before != Some(name)).then_some(changed)
}

/// Rounds to nearest even into a 16-bit dtype, as bits. The index of the first finite value that became infinite, if there
/// is one.
pub(crate) fn narrow(dtype: FileDType, from: &[f32], to: &mut [u16]) -> std::result::Result<(), usize> {
    // One loop for each dtype, so that rounding is inlined and runs at the speed of memory.
    let infinity = match dtype {
        FileDType::F16 => {
            to.iter_mut().zip(from).for_each(|(to, from)| *to = f16::from_f32(*from).to_bits());
            f16::INFINITY.to_bits()
        }
        FileDType::F32 | FileDType::Bf16 => {
            to.iter_mut().zip(from).for_each(|(to, from)| *to = to_bf16(*from).to_bits());
            bf16::INFINITY.to_bits()
        }
    };
    // An infinity is rare, so where it comes from is asked only once one is there.
    if to.iter().fold(false, |any, to| any | (to & 0x7fff == infinity)) {
        let grown = to.iter().zip(from).position(|(to, from)| to & 0x7fff == infinity && from.is_finite());
        return grown.map_or(Ok(()), Err);
    }
    Ok(())
}

/// The exit-6 failure of a finite value that `dtype` can only hold as infinity.
pub(crate) fn too_large(name: &str, dtype: FileDType, index: usize, value: f32) -> Failure {
    Failure::new(Exit::NotFinite, "a weight became too large for the dtype it is stored in")
        .at(format!("tensor {name}, index {index}"))
        .expected(format!("a value {} can hold", dtype.header_name()))
        .found(value)
        .hint("the run diverged: lower --lr, or convert the source model to bf16 first")
}

/// An exit-7 failure from what the operating system said, with what to try.
pub(crate) fn disk_failure(what: &str, path: &Path, error: &io::Error) -> Failure {
    use io::ErrorKind::{FileTooLarge, NotFound, PermissionDenied, QuotaExceeded, ReadOnlyFilesystem, StorageFull};
    let hint = match error.kind() {
        StorageFull => "the disk is full: free space, or choose another place with --out",
        QuotaExceeded => "the quota is used up: free space, or choose another place with --out",
        PermissionDenied => "make the folder writable, or choose another place with --out",
        ReadOnlyFilesystem => "the file system is read-only: choose another place with --out",
        FileTooLarge => {
            "a limit on the size of files: ulimit -f, or the file system's own; choose another place with --out"
        }
        NotFound => "a folder on the way is missing or was removed during the run",
        _ => "check the disk and the folder, or choose another place with --out",
    };
    Failure::disk(what).at(path.display()).found(error).hint(hint)
}

/// A JSON file as it is written. A `Value` always prints: its keys are strings.
pub(crate) fn json_text(value: &Value) -> String {
    format!("{value:#}\n")
}

fn write_json(path: &Path, value: &Value) -> Result<()> {
    std::fs::write(path, json_text(value))
        .map_err(|e| disk_failure("a file of the model folder cannot be written", path, &e))
}
