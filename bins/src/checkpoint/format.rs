//! What `state.rkyv` says, and how it lies on disk: magic, format version, length and xxh3-64 of the payload, payload. The
//! payload is an rkyv archive of [`CheckpointState`], which is validated when it is read.

use crate::hf::FileDType;
use crate::hf::weights::{EMBEDDING, HEAD};
use crate::{Exit, Failure, Result};
use rkyv::util::AlignedVec;
use rkyv::{Archive, Deserialize, Serialize, rancor};
use spmd_core::DType;
use std::fmt;
use std::path::Path;
use xxhash_rust::xxh3::xxh3_64;

/// The file that makes a folder a checkpoint. It is written last.
pub const STATE_FILE: &str = "state.rkyv";

/// The version this program writes, and the newest it reads.
pub const FORMAT_VERSION: u32 = 1;

const MAGIC: &[u8; 8] = b"UmbraCkp";
/// Magic, version, payload length, checksum.
const PREFIX: usize = 8 + 4 + 8 + 8;

/// The most elements under one checksum.
pub const CHUNK: usize = 1 << 20;

/// What a block of numbers is to the run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash, Archive, Serialize, Deserialize)]
#[repr(u8)]
pub enum Role {
    /// The bf16 copy that loads as a Hugging Face model. Absent in a checkpoint of one file a rank.
    Model,
    /// The embedding table once more in the model files, as `lm_head.weight`: only where the source of a tied model
    /// stores it. Its chunks name the embedding as their tensor.
    TiedHead,
    /// The weights the optimizer reads and writes.
    Shadow,
    /// The mean of the gradients.
    ExpAvg,
    /// The mean of their squares.
    ExpAvgSq,
}

impl Role {
    /// The roles training goes on from; every checkpoint has them.
    pub const STATE: [Role; 3] = [Role::Shadow, Role::ExpAvg, Role::ExpAvgSq];

    /// The name in files and messages: how the role's files begin.
    pub const fn name(self) -> &'static str {
        match self {
            Role::Model | Role::TiedHead => "model",
            Role::Shadow => "shadow",
            Role::ExpAvg => "exp_avg",
            Role::ExpAvgSq => "exp_avg_sq",
        }
    }
}

impl fmt::Display for Role {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// The dtypes of the stored roles; the model's is bf16.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Archive, Serialize, Deserialize)]
pub struct RoleDTypes {
    /// Of `shadow`: F32 or BF16.
    pub shadow: FileDType,
    /// Of `exp_avg`: F32 or BF16.
    pub exp_avg: FileDType,
    /// Of `exp_avg_sq`: F32 or BF16.
    pub exp_avg_sq: FileDType,
}

impl RoleDTypes {
    /// Those of a policy: its shadow's and its moments' dtype.
    pub fn new(shadow: DType, moments: DType) -> Self {
        RoleDTypes { shadow: shadow.into(), exp_avg: moments.into(), exp_avg_sq: moments.into() }
    }

    /// The dtype of a role.
    pub const fn of(&self, role: Role) -> FileDType {
        match role {
            Role::Model | Role::TiedHead => FileDType::Bf16,
            Role::Shadow => self.shadow,
            Role::ExpAvg => self.exp_avg,
            Role::ExpAvgSq => self.exp_avg_sq,
        }
    }
}

/// What a checkpoint knows of the run beside its numbers.
#[derive(Debug, Clone, PartialEq, Eq, Archive, Serialize, Deserialize)]
pub struct RunFacts {
    /// Tokens trained on so far, over all ranks.
    pub tokens: u64,
    /// The resolved settings as JSON.
    pub settings_json: String,
    /// The precision policy's name.
    pub policy: String,
    /// Canonical ranks of the run.
    pub lanes: u64,
    /// ZeRO stage as written; any may resume.
    pub stage: u8,
    /// Ranks that shared one copy of the state as written.
    pub shard_group: u64,
    /// Passes over the data that are complete.
    pub epoch: u64,
    /// Rows of the running pass that are used up.
    pub row_in_epoch: u64,
    /// The layout-free hash of shadow and moments, if it was computed.
    pub state_hash: Option<u64>,
}

/// One tensor of the model. A tied head is not among them.
#[derive(Debug, Clone, PartialEq, Eq, Archive, Serialize, Deserialize)]
pub struct TensorEntry {
    /// Hugging Face's name.
    pub name: String,
    /// Row-major shape.
    pub shape: Vec<u64>,
    /// What the model the run began with stores it in: the dtype of the run's final model.
    pub source_dtype: FileDType,
}

impl TensorEntry {
    /// Number of elements; `None` if no machine could hold them.
    pub fn elements(&self) -> Option<u64> {
        self.shape.iter().try_fold(1u64, |n, size| n.checked_mul(*size))
    }
}

/// One file of the folder (`state.rkyv` is not listed).
#[derive(Debug, Clone, PartialEq, Eq, Archive, Serialize, Deserialize)]
pub struct FileEntry {
    /// Its name in the folder.
    pub name: String,
    /// Its length in bytes.
    pub len: u64,
}

/// Consecutive elements of one tensor under one checksum, at most [`CHUNK`].
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Archive, Serialize, Deserialize)]
pub struct Chunk {
    /// What they are.
    pub role: Role,
    /// Index into [`CheckpointState::tensors`].
    pub tensor: u32,
    /// The first element's index in the tensor, row-major.
    pub start: u64,
    /// How many.
    pub elements: u64,
    /// Index into [`CheckpointState::files`].
    pub file: u32,
    /// Byte of the file at which they begin.
    pub offset: u64,
    /// xxh3-64 of their bytes.
    pub xxh3: u64,
}

/// Bytes of a file that are no tensor: a header, or a whole small file.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Archive, Serialize, Deserialize)]
pub struct PlainRange {
    /// Index into [`CheckpointState::files`].
    pub file: u32,
    /// Byte of the file at which they begin.
    pub offset: u64,
    /// How many.
    pub len: u64,
    /// xxh3-64 of them.
    pub xxh3: u64,
}

/// The content of `state.rkyv`.
#[derive(Debug, Clone, PartialEq, Eq, Archive, Serialize, Deserialize)]
pub struct CheckpointState {
    /// The version of Umbra that wrote it.
    pub umbra: String,
    /// Completed steps.
    pub step: u64,
    /// Ranks that wrote it.
    pub world: u64,
    /// The run.
    pub run: RunFacts,
    /// `config.json` as the source model spells it. The folder's own says bfloat16.
    pub config_json: String,
    /// The tensors in the order of the model's units.
    pub tensors: Vec<TensorEntry>,
    /// The source of a tied model stores `lm_head.weight` as well.
    pub stores_tied_head: bool,
    /// The dtypes of the roles.
    pub dtypes: RoleDTypes,
    /// Every file but `state.rkyv`.
    pub files: Vec<FileEntry>,
    /// Every block of numbers, by role, tensor and start.
    pub chunks: Vec<Chunk>,
    /// Everything else in the files.
    pub plain: Vec<PlainRange>,
}

impl CheckpointState {
    /// The index of a tensor.
    pub fn tensor(&self, name: &str) -> Option<usize> {
        self.tensors.iter().position(|t| t.name == name)
    }

    /// Whether the folder holds model files; a checkpoint of one file a rank does not.
    pub fn stores_model(&self) -> bool {
        // Chunks are sorted by role, and the model's comes first.
        self.chunks.first().is_some_and(|c| c.role == Role::Model)
    }

    /// The chunks of one tensor, in order.
    pub fn chunks_of(&self, role: Role, tensor: usize) -> &[Chunk] {
        let key = |c: &Chunk| (c.role, c.tensor as usize);
        let start = self.chunks.partition_point(|c| key(c) < (role, tensor));
        let end = self.chunks.partition_point(|c| key(c) <= (role, tensor));
        &self.chunks[start..end]
    }

    /// The name that the numbers of a chunk have in their file.
    pub fn name_of(&self, chunk: &Chunk) -> &str {
        match chunk.role {
            Role::TiedHead => HEAD,
            _ => self.tensors.get(chunk.tensor as usize).map_or("", |t| &t.name),
        }
    }

    /// Bytes of a chunk.
    pub fn bytes_of(&self, chunk: &Chunk) -> u64 {
        chunk.elements.saturating_mul(self.dtypes.of(chunk.role).size() as u64)
    }

    /// Bytes of the folder, without `state.rkyv`.
    pub fn bytes(&self) -> u64 {
        self.files.iter().map(|f| f.len).sum()
    }

    /// Whether the chunks are every tensor's elements, each once, and chunks and plain ranges every file's bytes, each
    /// once. The first contradiction otherwise.
    ///
    /// # Errors
    /// What does not fit, as text.
    pub fn check(&self) -> Result<(), String> {
        super::tiles::check(self)
    }

    /// Elements in the tensor that a role's chunks belong to, if the role has this tensor.
    pub(super) fn elements_in(&self, role: Role, tensor: usize) -> Option<u64> {
        let entry = &self.tensors[tensor];
        let stored = match role {
            Role::Model => self.stores_model(),
            Role::TiedHead => self.stores_model() && self.stores_tied_head && entry.name == EMBEDDING,
            Role::Shadow | Role::ExpAvg | Role::ExpAvgSq => true,
        };
        if stored { entry.elements() } else { Some(0) }
    }

    /// The bytes of `state.rkyv`.
    pub(super) fn encode(&self) -> Result<Vec<u8>> {
        let payload = rkyv::to_bytes::<rancor::Error>(self).map_err(|e| {
            Failure::new(Exit::Bug, "the state of a checkpoint cannot be put into bytes").found(e.to_string())
        })?;
        let mut bytes = Vec::with_capacity(PREFIX + payload.len());
        bytes.extend_from_slice(MAGIC);
        bytes.extend_from_slice(&FORMAT_VERSION.to_le_bytes());
        bytes.extend_from_slice(&(payload.len() as u64).to_le_bytes());
        bytes.extend_from_slice(&xxh3_64(&payload).to_le_bytes());
        bytes.extend_from_slice(&payload);
        Ok(bytes)
    }

    /// The state in `bytes`; `path` is what messages call them.
    pub(super) fn decode(path: &Path, bytes: &[u8]) -> Result<Self> {
        let fault = |what: &str| Failure::input(what.to_owned()).at(path.display()).hint(DAMAGED);
        let number = |at: usize| bytes.get(at..at + 8).and_then(|b| b.try_into().ok()).map_or(0, u64::from_le_bytes);
        if !bytes.starts_with(&MAGIC[..bytes.len().min(MAGIC.len())]) {
            return Err(fault("this is not the state file of a checkpoint")
                .expected(format!("a file that begins with `{}`", MAGIC.escape_ascii()))
                .found(format!("`{}`", bytes[..MAGIC.len().min(bytes.len())].escape_ascii())));
        }
        if bytes.len() < PREFIX {
            return Err(fault("the state file of a checkpoint is truncated")
                .expected(format!("at least {PREFIX} bytes"))
                .found(format!("{} bytes", bytes.len())));
        }
        let version = number(8) as u32;
        if version != FORMAT_VERSION {
            let newer = version > FORMAT_VERSION;
            return Err(fault(if newer { "the checkpoint is of a newer format" } else { "no such checkpoint format" })
                .expected(format!("format {FORMAT_VERSION}"))
                .found(format!("format {version}"))
                .hint(if newer {
                    "read it with the version of Umbra that wrote it, or a newer one"
                } else {
                    DAMAGED
                }));
        }
        let (len, xxh3) = (number(12), number(20));
        let payload = &bytes[PREFIX..];
        if len != payload.len() as u64 {
            let what = if len > payload.len() as u64 { "truncated" } else { "longer than it says" };
            return Err(fault(&format!("the state file of a checkpoint is {what}"))
                .expected(format!("{len} bytes after the first {PREFIX}"))
                .found(format!("{} bytes", payload.len())));
        }
        if xxh3 != xxh3_64(payload) {
            return Err(fault("the state file of a checkpoint is damaged")
                .expected(format!("xxh3 {xxh3:016x}"))
                .found(format!("xxh3 {:016x}", xxh3_64(payload))));
        }
        // An archive is read in place, which asks for the alignment of its widest field.
        let mut aligned = AlignedVec::<16>::with_capacity(payload.len());
        aligned.extend_from_slice(payload);
        let state = rkyv::from_bytes::<CheckpointState, rancor::Error>(&aligned)
            .map_err(|e| fault("the state file of a checkpoint cannot be read").found(e.to_string()))?;
        state.check().map_err(|e| fault("the state file of a checkpoint contradicts itself").found(e))?;
        Ok(state)
    }
}

/// What to do about a file that is not as it was written.
pub(super) const DAMAGED: &str = "the checkpoint is damaged or incomplete: copy it again, or use an earlier one";

/// What one rank has written, for the rank that commits.
#[derive(Debug, Clone, Default, PartialEq, Eq, Archive, Serialize, Deserialize)]
pub struct Written {
    /// Its blocks of numbers.
    pub chunks: Vec<Chunk>,
    /// Headers and small files.
    pub plain: Vec<PlainRange>,
}

impl Written {
    /// As bytes, for the way between ranks.
    ///
    /// # Errors
    /// Exit 1: no memory layout holds them.
    pub fn to_bytes(&self) -> Result<Vec<u8>> {
        rkyv::to_bytes::<rancor::Error>(self)
            .map(|bytes| bytes.into_vec())
            .map_err(|e| Failure::new(Exit::Bug, "a list of blocks cannot be put into bytes").found(e.to_string()))
    }

    /// Back from [`Written::to_bytes`].
    ///
    /// # Errors
    /// Exit 1: bytes that are no such list.
    pub fn from_bytes(bytes: &[u8]) -> Result<Self> {
        let mut aligned = AlignedVec::<16>::with_capacity(bytes.len());
        aligned.extend_from_slice(bytes);
        rkyv::from_bytes::<Written, rancor::Error>(&aligned).map_err(|e| {
            Failure::new(Exit::Bug, "a list of blocks from another rank cannot be read").found(e.to_string())
        })
    }
}
