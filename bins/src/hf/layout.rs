//! The dtypes of weight files, and where every tensor of a folder lies before a byte of it is written.

use crate::{Failure, Result};
use serde_json::{Map, Value, json};
use spmd_core::UnitSpec;
use std::collections::HashMap;

/// The dtypes Umbra reads and writes in weight files. fp16 is a storage dtype only: no role of a policy has it.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, rkyv::Archive, rkyv::Serialize, rkyv::Deserialize)]
#[repr(u8)]
pub enum FileDType {
    /// IEEE single precision.
    F32,
    /// bfloat16.
    Bf16,
    /// IEEE half precision.
    F16,
}

impl FileDType {
    /// Bytes one element takes.
    pub const fn size(self) -> usize {
        match self {
            FileDType::F32 => 4,
            FileDType::Bf16 | FileDType::F16 => 2,
        }
    }

    /// The name in a safetensors header.
    pub const fn header_name(self) -> &'static str {
        match self {
            FileDType::F32 => "F32",
            FileDType::Bf16 => "BF16",
            FileDType::F16 => "F16",
        }
    }

    /// The dtype of a safetensors header's name, if Umbra has it.
    pub fn from_header_name(name: &str) -> Option<Self> {
        [FileDType::F32, FileDType::Bf16, FileDType::F16].into_iter().find(|d| d.header_name() == name)
    }

    /// The name `dtype` has in config.json.
    pub const fn config_name(self) -> &'static str {
        match self {
            FileDType::F32 => "float32",
            FileDType::Bf16 => "bfloat16",
            FileDType::F16 => "float16",
        }
    }
}

impl From<spmd_core::DType> for FileDType {
    fn from(dtype: spmd_core::DType) -> Self {
        match dtype {
            spmd_core::DType::F32 => FileDType::F32,
            spmd_core::DType::Bf16 => FileDType::Bf16,
        }
    }
}

/// Where one tensor lies.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Place {
    pub(crate) shard: usize,
    /// Byte of the file at which element 0 lies.
    pub(crate) start: u64,
    pub(crate) dtype: FileDType,
    /// Elements.
    pub(crate) len: usize,
}

/// One file: its name, everything before the data, and its length.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Shard {
    pub(crate) name: String,
    /// The eight length bytes and the padded JSON.
    pub(crate) header: Vec<u8>,
    /// Bytes of the whole file.
    pub(crate) len: u64,
}

/// All files of a folder's weights.
#[derive(Debug, Clone, PartialEq, Eq)]
pub(crate) struct Layout {
    pub(crate) shards: Vec<Shard>,
    pub(crate) places: HashMap<String, Place>,
    /// `PREFIX.safetensors.index.json`, if there is more than one file.
    pub(crate) index: Option<Value>,
    prefix: String,
}

/// A tensor to be laid out.
pub(crate) struct Tensor {
    pub(crate) name: String,
    pub(crate) shape: Vec<usize>,
    pub(crate) dtype: FileDType,
}

impl Tensor {
    fn elements(&self) -> usize {
        self.shape.iter().product()
    }

    fn bytes(&self) -> u64 {
        self.elements() as u64 * self.dtype.size() as u64
    }
}

impl Layout {
    /// Lays out the tensors of `units` in order, in files whose names begin with `prefix`, starting a new file when the next
    /// tensor would take the current one above `max_shard_bytes` of data (a larger tensor gets a file of its own). With
    /// `tied_head`, `lm_head.weight` is stored as a second copy of the embedding table.
    pub(crate) fn new(
        prefix: &str,
        units: &[UnitSpec],
        dtype: impl Fn(&str) -> FileDType,
        tied_head: bool,
        max_shard_bytes: u64,
    ) -> Self {
        let mut tensors: Vec<Tensor> = Vec::new();
        for param in units.iter().flat_map(|unit| &unit.params) {
            tensors.push(Tensor { name: param.name.clone(), shape: param.shape.clone(), dtype: dtype(&param.name) });
        }
        if let Some(table) = tensors.iter().find(|t| t.name == super::weights::EMBEDDING).filter(|_| tied_head) {
            let name = super::weights::HEAD.to_owned();
            tensors.push(Tensor { dtype: table.dtype, shape: table.shape.clone(), name });
        }
        let files = split(tensors, max_shard_bytes);
        let total: u64 = files.iter().flatten().map(Tensor::bytes).sum();
        let mut layout = Layout::empty(prefix);
        let count = files.len();
        for (i, file) in files.iter().enumerate() {
            let name = match count {
                1 => format!("{prefix}.safetensors"),
                _ => format!("{prefix}-{:05}-of-{count:05}.safetensors", i + 1),
            };
            layout.add_shard(name, file);
        }
        if count > 1 {
            let name = |t: &Tensor| layout.shards[layout.places[&t.name].shard].name.clone();
            let map: Map<String, Value> = files.iter().flatten().map(|t| (t.name.clone(), name(t).into())).collect();
            layout.index = Some(json!({"metadata": {"total_size": total}, "weight_map": map}));
        }
        layout
    }

    /// One file of this name, tensors in this order.
    pub(crate) fn of_file(name: String, tensors: &[Tensor]) -> Self {
        let mut layout = Layout::empty("");
        layout.add_shard(name, tensors);
        layout
    }

    fn empty(prefix: &str) -> Self {
        Layout { shards: Vec::new(), places: HashMap::new(), index: None, prefix: prefix.to_owned() }
    }

    /// The name of the file that holds [`Layout::index`].
    pub(crate) fn index_name(&self) -> String {
        format!("{}.safetensors.index.json", self.prefix)
    }

    fn add_shard(&mut self, name: String, tensors: &[Tensor]) {
        let mut header = Map::new();
        header.insert("__metadata__".to_owned(), json!({"format": "pt"}));
        let mut at = 0;
        for t in tensors {
            let end = at + t.bytes();
            let entry = json!({"dtype": t.dtype.header_name(), "shape": t.shape, "data_offsets": [at, end]});
            header.insert(t.name.clone(), entry);
            at = end;
        }
        let mut json = Value::Object(header).to_string().into_bytes();
        // The format asks for data that begins at a multiple of eight, reached by spaces after the JSON.
        json.resize(json.len().next_multiple_of(8), b' ');
        let mut bytes = (json.len() as u64).to_le_bytes().to_vec();
        bytes.append(&mut json);
        let mut start = bytes.len() as u64;
        for t in tensors {
            let place = Place { shard: self.shards.len(), start, dtype: t.dtype, len: t.elements() };
            self.places.insert(t.name.clone(), place);
            start += t.bytes();
        }
        self.shards.push(Shard { name, header: bytes, len: start });
    }

    /// Where `name` lies.
    ///
    /// # Errors
    /// A name the layout was not made with: a fault of ours, exit 1.
    pub(crate) fn place(&self, name: &str) -> Result<Place> {
        self.places
            .get(name)
            .copied()
            .ok_or_else(|| Failure::new(crate::Exit::Bug, format!("no place was laid out for tensor {name}")))
    }
}

fn split(tensors: Vec<Tensor>, max_shard_bytes: u64) -> Vec<Vec<Tensor>> {
    let mut files: Vec<Vec<Tensor>> = vec![Vec::new()];
    let mut bytes = 0;
    for tensor in tensors {
        if bytes > 0 && bytes + tensor.bytes() > max_shard_bytes {
            files.push(Vec::new());
            bytes = 0;
        }
        bytes += tensor.bytes();
        // There is always a last file: the list starts with one and only grows.
        if let Some(file) = files.last_mut() {
            file.push(tensor);
        }
    }
    files
}
