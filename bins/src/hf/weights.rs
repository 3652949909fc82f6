//! The safetensors files of a model folder: headers read and checked once, values read by byte range.

mod check;
mod header;
#[cfg(test)]
mod tests;

use super::FileDType;
use crate::{Failure, Result};
use half::f16;
use header::Header;
use serde_json::Value;
use spmd_core::UnitSpec;
use std::collections::BTreeMap;
use std::fs::File;
use std::ops::Range;
use std::os::unix::fs::FileExt;
use std::path::{Path, PathBuf};

#[cfg(not(target_endian = "little"))]
compile_error!("safetensors is little-endian, and values are read as they lie in the file");

/// The token embedding's name in Hugging Face files.
pub const EMBEDDING: &str = "model.embed_tokens.weight";
/// The output head's name in Hugging Face files.
pub const HEAD: &str = "lm_head.weight";

/// Bytes read at once where values are widened.
const SCRATCH: usize = 1 << 20;

/// One tensor of a folder.
#[derive(Debug, Clone, PartialEq, Eq)]
struct Entry {
    file: usize,
    /// As the header spells it: what Umbra cannot read is refused when it is needed, not before.
    dtype: String,
    shape: Vec<usize>,
    /// Byte of the file at which element 0 lies.
    start: u64,
    /// Bytes.
    len: u64,
}

/// The weights of a model folder.
#[derive(Debug)]
pub struct WeightFiles {
    dir: PathBuf,
    files: Vec<(PathBuf, File)>,
    /// Ordered by name, so that messages come in one order everywhere.
    tensors: BTreeMap<String, Entry>,
}

impl WeightFiles {
    /// Opens `model.safetensors`, or the files that `model.safetensors.index.json` names, and checks their headers.
    /// Files that the index does not name are ignored. No weight is read.
    ///
    /// # Errors
    /// Exit 3, naming file and tensor: no weights there, a header that lies, a truncated file, an index that names what is
    /// not there.
    pub fn open(dir: &Path) -> Result<Self> {
        let mut out = WeightFiles { dir: dir.to_owned(), files: Vec::new(), tensors: BTreeMap::new() };
        let (single, index) = (dir.join("model.safetensors"), dir.join("model.safetensors.index.json"));
        if single.exists() {
            let header = out.open_file(single)?;
            let file = out.files.len() - 1;
            out.tensors = header.tensors.into_iter().map(|(name, t)| (name, t.entry(file))).collect();
        } else if index.exists() {
            out.open_shards(&index)?;
        } else {
            return Err(no_weights(dir));
        }
        Ok(out)
    }

    /// Checks that every tensor of `units` is there in its shape and in a dtype Umbra reads, and that nothing else is.
    /// `tied` says that the head has no weight of its own; `lm_head.weight` may then be there as an exact copy of the
    /// embedding table. Buffers `rotary_emb.inv_freq` of old files are ignored.
    ///
    /// # Errors
    /// Exit 3, listing what is missing, extra and misshapen, with the likely cause.
    pub fn check(&self, units: &[UnitSpec], tied: bool) -> Result<()> {
        check::check(self, units, tied)
    }

    /// The dtype `name` is stored in; `None` if there is no such tensor or Umbra does not read its dtype.
    pub fn dtype_of(&self, name: &str) -> Option<FileDType> {
        self.tensors.get(name).and_then(|t| FileDType::from_header_name(&t.dtype))
    }

    /// Whether a tensor of this name is stored.
    pub fn contains(&self, name: &str) -> bool {
        self.tensors.contains_key(name)
    }

    /// Reads elements `range` of tensor `name` (row-major), widened to fp32 exactly, into `out` of the same length. Only
    /// these bytes are read, one MiB at a time.
    ///
    /// # Errors
    /// Exit 3: no such tensor, a dtype Umbra does not read, a file that cannot be read, a value that is not finite (named
    /// with its place).
    pub fn read(&self, name: &str, range: Range<usize>, out: &mut [f32]) -> Result<()> {
        let entry = self.entry(name)?;
        let dtype = self.readable(name, entry)?;
        let elements = entry.len as usize / dtype.size();
        if range.end > elements || range.len() != out.len() {
            let what = format!("elements {range:?} of {name} ({elements}) were asked for into {} places", out.len());
            return Err(Failure::new(crate::Exit::Bug, what));
        }
        let chunk = SCRATCH / dtype.size();
        let mut scratch = match dtype {
            FileDType::F32 => Vec::new(),
            FileDType::Bf16 | FileDType::F16 => vec![0u16; out.len().min(chunk)],
        };
        let mut at = range.start;
        for part in out.chunks_mut(chunk) {
            let byte = entry.start + (at * dtype.size()) as u64;
            let half = if scratch.is_empty() { &mut [][..] } else { &mut scratch[..part.len()] };
            match dtype {
                FileDType::F32 => self.read_bytes(name, entry, byte, bytemuck::cast_slice_mut(part))?,
                FileDType::Bf16 | FileDType::F16 => {
                    self.read_bytes(name, entry, byte, bytemuck::cast_slice_mut(half))?;
                    widen(dtype, half, part);
                }
            }
            if let Some(i) = part.iter().position(|v| !v.is_finite()) {
                return Err(self.not_finite(name, entry, at + i, part[i]));
            }
            at += part.len();
        }
        Ok(())
    }

    fn open_file(&mut self, path: PathBuf) -> Result<Header> {
        let file = File::open(&path)
            .map_err(|e| Failure::input("a weight file cannot be opened").at(path.display()).found(e))?;
        let header = Header::read(&path, &file)?;
        self.files.push((path, file));
        Ok(header)
    }

    fn open_shards(&mut self, index: &Path) -> Result<()> {
        let map = read_index(index)?;
        let mut headers: BTreeMap<String, (usize, Header)> = BTreeMap::new();
        for (name, shard) in map {
            if !headers.contains_key(&shard) {
                let path = self.dir.join(&shard);
                if Path::new(&shard).file_name().is_none_or(|f| f != shard.as_str()) || !path.exists() {
                    return Err(Failure::input("the index names a file that is not there")
                        .at(index.display())
                        .expected(format!("{shard} in the same folder, with tensor {name}"))
                        .found("no such file")
                        .hint("the folder is incomplete: copy or download the missing file"));
                }
                let header = self.open_file(path)?;
                headers.insert(shard.clone(), (self.files.len() - 1, header));
            }
            // It was inserted just above where it was missing.
            let Some((file, header)) = headers.get_mut(&shard) else { continue };
            let Some(info) = header.tensors.remove(&name) else {
                return Err(Failure::input("the index names a tensor that its file does not contain")
                    .at(index.display())
                    .expected(format!("tensor {name} in {shard}"))
                    .found(format!("{shard} has no such tensor"))
                    .hint("index and files come from different saves: copy or download the folder again"));
            };
            let entry = info.entry(*file);
            self.tensors.insert(name, entry);
        }
        // A tensor in a file of the index that the index does not list is in the model's files all the same.
        for (file, header) in headers.into_values() {
            for (name, info) in header.tensors {
                if let Some(first) = self.tensors.get(&name) {
                    return Err(self.twice(&name, first.file, file));
                }
                self.tensors.insert(name, info.entry(file));
            }
        }
        Ok(())
    }

    /// Readers disagree about which of the two counts.
    fn twice(&self, name: &str, first: usize, second: usize) -> Failure {
        Failure::input("a tensor is in two weight files")
            .at(format!("{}, tensor {name}", self.dir.display()))
            .expected("each tensor once")
            .found(format!("{} and {}", self.files[first].0.display(), self.files[second].0.display()))
            .hint("files of different saves are mixed: copy or download the folder again")
    }

    /// A tied model may be stored under the name of its head alone: then that is the embedding table.
    pub fn adopt_head(&mut self) {
        if !self.contains(EMBEDDING)
            && let Some(head) = self.tensors.remove(HEAD)
        {
            self.tensors.insert(EMBEDDING.to_owned(), head);
        }
    }

    fn entry(&self, name: &str) -> Result<&Entry> {
        self.tensors.get(name).ok_or_else(|| {
            Failure::input(format!("the model has no tensor {name}")).at(self.dir.display()).found("no such tensor")
        })
    }

    fn readable(&self, name: &str, entry: &Entry) -> Result<FileDType> {
        FileDType::from_header_name(&entry.dtype).ok_or_else(|| {
            Failure::input("Umbra does not read weights of this dtype")
                .at(self.place(name, entry))
                .expected("F32, BF16 or F16")
                .found(&entry.dtype)
                .hint("use the model in bf16 or fp32; quantized weights cannot be trained")
        })
    }

    fn read_bytes(&self, name: &str, entry: &Entry, byte: u64, into: &mut [u8]) -> Result<()> {
        self.files[entry.file].1.read_exact_at(into, byte).map_err(|e| {
            Failure::input("a weight file cannot be read")
                .at(self.place(name, entry))
                .expected(format!("{} bytes at byte {byte}", into.len()))
                .found(e)
        })
    }

    fn not_finite(&self, name: &str, entry: &Entry, index: usize, value: f32) -> Failure {
        let columns = entry.shape.last().copied().unwrap_or(1).max(1);
        Failure::input("a weight is not finite")
            .at(format!(
                "{}, index {index} (row {}, column {})",
                self.place(name, entry),
                index / columns,
                index % columns
            ))
            .expected("a finite number")
            .found(value)
            .hint("the file was saved from a run that had diverged, or it is damaged: use an earlier checkpoint")
    }

    fn place(&self, name: &str, entry: &Entry) -> String {
        format!("{}, tensor {name}", self.files[entry.file].0.display())
    }
}

fn widen(dtype: FileDType, from: &[u16], to: &mut [f32]) {
    if dtype == FileDType::F16 {
        to.iter_mut().zip(from).for_each(|(to, from)| *to = f16::from_bits(*from).to_f32());
    } else {
        to.iter_mut().zip(from).for_each(|(to, from)| *to = f32::from_bits(u32::from(*from) << 16));
    }
}

/// `weight_map` in the file's own order: tensor name to file name.
fn read_index(path: &Path) -> Result<Vec<(String, String)>> {
    let damaged = |found: String| {
        Failure::input("the index of the weight files cannot be read")
            .at(path.display())
            .expected("a JSON object with weight_map: tensor name to file name")
            .found(found)
    };
    let bytes = std::fs::read(path).map_err(|e| damaged(e.to_string()))?;
    let value: Value = serde_json::from_slice(&bytes).map_err(|e| damaged(e.to_string()))?;
    let Some(map) = value.get("weight_map").and_then(Value::as_object) else {
        return Err(damaged("no weight_map".to_owned()));
    };
    map.iter()
        .map(|(name, shard)| match shard.as_str() {
            Some(shard) => Ok((name.clone(), shard.to_owned())),
            None => Err(damaged(format!("weight_map[{name}] is {shard}"))),
        })
        .collect()
}

fn no_weights(dir: &Path) -> Failure {
    let mut names: Vec<String> = std::fs::read_dir(dir)
        .map(|entries| entries.flatten().map(|e| e.file_name().to_string_lossy().into_owned()).collect())
        .unwrap_or_default();
    names.sort();
    let has = |end: &str| names.iter().any(|name| name.ends_with(end));
    let hint = if names.iter().any(|n| n.starts_with("adapter_model")) {
        "this is an adapter: merge it into its base model and save that"
    } else if has(".bin") || has(".pth") || has(".pt") {
        "PyTorch pickles are not read: save the model with safe_serialization=True"
    } else if has(".gguf") {
        "GGUF is not read: use the model it was converted from"
    } else if has(".safetensors") {
        "model.safetensors.index.json is missing: copy or download it too"
    } else {
        "copy or download the weight files; --model must be the folder that holds them"
    };
    let listed = if names.is_empty() { "an empty folder".to_owned() } else { super::shortened(&names) };
    Failure::input("the folder has no weights Umbra reads")
        .at(dir.display())
        .expected("model.safetensors, or model.safetensors.index.json and its files")
        .found(listed)
        .hint(hint)
}
