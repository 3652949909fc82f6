//! One safetensors header: eight bytes of length, JSON, data without holes. The rules are the format's own
//! (`Metadata::validate` of the safetensors crate); they are checked here because the crate wants the whole file in memory
//! and does not say which tensor is at fault.

use super::Entry;
use crate::{Failure, Result};
use serde_json::{Map, Value};
use std::collections::BTreeMap;
use std::fs::File;
use std::os::unix::fs::FileExt;
use std::path::Path;

/// How the text begins that Git leaves in place of a large file it has not fetched.
const LFS_POINTER: &[u8; 8] = b"version ";

/// The longest header the format allows, in bytes.
const MAX_HEADER: u64 = 100_000_000;
const LENGTH_BYTES: u64 = 8;

/// What the header says of one tensor, with offsets from the start of the file.
#[derive(Debug)]
pub(super) struct Info {
    dtype: String,
    shape: Vec<usize>,
    start: u64,
    end: u64,
}

impl Info {
    pub(super) fn entry(self, file: usize) -> Entry {
        Entry { file, dtype: self.dtype, shape: self.shape, start: self.start, len: self.end - self.start }
    }
}

/// A checked header.
#[derive(Debug)]
pub(super) struct Header {
    pub(super) tensors: BTreeMap<String, Info>,
}

impl Header {
    pub(super) fn read(path: &Path, file: &File) -> Result<Self> {
        let fault = |what: &str| Failure::input(what.to_owned()).at(path.display()).hint(DAMAGED);
        let unreadable = |e: std::io::Error| fault("a weight file cannot be read").found(e);
        let file_len = file.metadata().map_err(unreadable)?.len();
        if file_len < LENGTH_BYTES {
            return Err(fault("a weight file is truncated")
                .expected("a safetensors file: at least its eight length bytes")
                .found(format!("{file_len} bytes")));
        }
        let mut length = [0; LENGTH_BYTES as usize];
        file.read_exact_at(&mut length, 0).map_err(unreadable)?;
        if length == *LFS_POINTER {
            return Err(fault("a weight file is a Git LFS pointer, not the weights")
                .expected("a safetensors file")
                .found(format!("{file_len} bytes of text that name a file elsewhere"))
                .hint("git lfs pull in the model's repository"));
        }
        let length = u64::from_le_bytes(length);
        if length > MAX_HEADER || length > file_len - LENGTH_BYTES {
            return Err(fault("a weight file lies about its header, or is truncated")
                .expected(format!("a header of at most {} bytes", MAX_HEADER.min(file_len - LENGTH_BYTES)))
                .found(format!("a header length of {length} in a file of {file_len} bytes")));
        }
        let mut json = vec![0; length as usize];
        file.read_exact_at(&mut json, LENGTH_BYTES).map_err(unreadable)?;
        let map: Map<String, Value> =
            serde_json::from_slice(&json).map_err(|e| fault("a safetensors header is not JSON").found(e))?;
        let data = LENGTH_BYTES + length;
        let mut tensors = BTreeMap::new();
        for (name, value) in map {
            if name != "__metadata__" {
                let info = parse(path, &name, &value, data)?;
                tensors.insert(name, info);
            }
        }
        check_bytes(path, &tensors, data, file_len)?;
        Ok(Header { tensors })
    }
}

const DAMAGED: &str = "the file is damaged or incomplete: copy or download it again";

fn fault(path: &Path, name: &str, what: &str) -> Failure {
    Failure::input(what.to_owned()).at(format!("{}, tensor {name}", path.display())).hint(DAMAGED)
}

fn parse(path: &Path, name: &str, value: &Value, data: u64) -> Result<Info> {
    let wrong = || {
        fault(path, name, "a safetensors header entry cannot be read")
            .expected("{\"dtype\": a name, \"shape\": [sizes], \"data_offsets\": [begin, end]}")
            .found(value)
    };
    let numbers = |key: &str| -> Option<Vec<u64>> { value.get(key)?.as_array()?.iter().map(Value::as_u64).collect() };
    let dtype = value.get("dtype").and_then(Value::as_str).ok_or_else(wrong)?.to_owned();
    let shape: Vec<usize> = numbers("shape").ok_or_else(wrong)?.into_iter().map(|n| n as usize).collect();
    let offsets = numbers("data_offsets").filter(|o| o.len() == 2).ok_or_else(wrong)?;
    let from_start = |offset: u64| data.checked_add(offset).ok_or_else(wrong);
    let info = Info { dtype, shape, start: from_start(offsets[0])?, end: from_start(offsets[1])? };
    let expected = bytes_of(&info).ok_or_else(wrong)?;
    if info.end.checked_sub(info.start) != Some(expected) {
        return Err(fault(path, name, "a safetensors header lies about a tensor's bytes")
            .expected(format!("{expected} bytes for {} {:?}", info.dtype, info.shape))
            .found(format!("data_offsets [{}, {}]", offsets[0], offsets[1])));
    }
    Ok(info)
}

/// Bytes that dtype and shape make. `None` when they overflow, or the format has no such dtype.
fn bytes_of(info: &Info) -> Option<u64> {
    let dtype: safetensors::Dtype = serde_json::from_value(Value::String(info.dtype.clone())).ok()?;
    let elements = info.shape.iter().try_fold(1u64, |n, size| n.checked_mul(*size as u64))?;
    let bits = elements.checked_mul(dtype.bitsize() as u64)?;
    (bits % 8 == 0).then_some(bits / 8)
}

/// The data must be the tensors one after another, without holes or overlaps, to the last byte of the file.
fn check_bytes(path: &Path, tensors: &BTreeMap<String, Info>, data: u64, file_len: u64) -> Result<()> {
    let mut order: Vec<(&String, &Info)> = tensors.iter().collect();
    order.sort_by_key(|(_, info)| (info.start, info.end));
    let mut at = data;
    for (name, info) in order {
        if info.start != at {
            let what = if info.start < at { "two tensors overlap" } else { "there is a hole before a tensor" };
            return Err(fault(path, name, &format!("{what} in a weight file"))
                .expected(format!("data that begins at byte {}, where the tensor before ends", at - data))
                .found(format!("data_offsets [{}, {}]", info.start - data, info.end - data)));
        }
        if info.end > file_len {
            return Err(fault(path, name, "a weight file is truncated")
                .expected(format!("{} bytes for this tensor", info.end - info.start))
                .found(format!(
                    "{} bytes before the file ends (its length is {file_len})",
                    file_len.saturating_sub(at)
                )));
        }
        at = info.end;
    }
    if at != file_len {
        return Err(Failure::input("a weight file is longer than its header says")
            .at(path.display())
            .expected(format!("{at} bytes"))
            .found(format!("{file_len} bytes"))
            .hint(DAMAGED));
    }
    Ok(())
}
