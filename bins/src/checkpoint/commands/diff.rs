//! `umbra checkpoint diff`: whether two checkpoints are the same state, bit for bit, and where they part.

mod text;

use super::meter::Meter;
use crate::checkpoint::format::CHUNK;
use crate::checkpoint::{CheckpointState, Reader, Role, TensorEntry};
use crate::{Failure, Result};
use serde_json::{Value, json};
use spmd_core::ops::{Piece, StateHash};
use spmd_core::rng::tensor_key;
use spmd_core::{Device, View};
use std::collections::{BTreeMap, BTreeSet};
use std::path::{Path, PathBuf};

/// What came of comparing two checkpoints.
#[derive(Debug)]
pub(super) struct Compared {
    pub(super) a: Facts,
    pub(super) b: Facts,
    /// Tensors that only one of them has, or that have another shape, in words.
    pub(super) unpaired: Vec<String>,
    /// One entry a role, in their order.
    pub(super) roles: Vec<RoleCount>,
    pub(super) first: Option<First>,
    /// Settings and facts of the run that differ: name, in A, in B.
    pub(super) settings: Vec<(String, Value, Value)>,
}

/// One of the two.
#[derive(Debug)]
pub(super) struct Facts {
    pub(super) dir: PathBuf,
    pub(super) step: u64,
    pub(super) weights: u64,
    /// Of the numbers as they were read now.
    pub(super) hash: u64,
}

/// What differs in a role.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct RoleCount {
    pub(super) role: Role,
    /// In A and in B.
    pub(super) dtypes: [&'static str; 2],
    pub(super) tensors_differ: usize,
    pub(super) elements_differ: u64,
}

/// The first tensor that differs.
#[derive(Debug, Clone, PartialEq)]
pub(super) struct First {
    pub(super) role: Role,
    pub(super) tensor: String,
    pub(super) elements: u64,
    pub(super) tally: Tally,
}

/// The differences within one tensor.
#[derive(Debug, Clone, Default, PartialEq)]
pub(super) struct Tally {
    /// How many elements have other bits.
    pub(super) differ: u64,
    /// Index and both values of the first.
    pub(super) first: Option<(u64, f32, f32)>,
    /// The largest |a − b|; NaN once one of them is.
    pub(super) largest: f64,
}

impl Tally {
    /// Adds consecutive elements, of which the first has index `start`.
    pub(super) fn add(&mut self, start: u64, a: &[f32], b: &[f32]) {
        for (index, (&a, &b)) in (start..).zip(a.iter().zip(b)).filter(|(_, (a, b))| a.to_bits() != b.to_bits()) {
            self.differ += 1;
            self.first.get_or_insert((index, a, b));
            let distance = (f64::from(a) - f64::from(b)).abs();
            if distance.is_nan() || distance > self.largest {
                self.largest = distance;
            }
        }
    }
}

impl Compared {
    /// Whether training goes on from both with the same numbers.
    pub(super) fn same(&self) -> bool {
        self.a.step == self.b.step && self.unpaired.is_empty() && self.first.is_none()
    }
}

/// Compares every number of the checkpoints in `a` and `b`, widened to fp32. At most one block of each is in memory.
///
/// # Errors
/// Exit 3: one of them is damaged, or its numbers are not those its run hashed.
pub(super) fn compare(a: &Path, b: &Path, threads: usize) -> Result<Compared> {
    let device = Device::cpu(threads).map_err(Failure::from)?;
    let (mut a, mut b) = (Side::open(a)?, Side::open(b)?);
    let total = a.bytes() + b.bytes();
    let (mut meter, mut roles, mut first) = (Meter::new("comparing"), Vec::new(), None);
    // The hash salts a role with its place in the optimizer's order.
    for (role, salt) in Role::STATE.into_iter().zip(optim::Role::ALL.map(|role| role as u64)) {
        let mut walk = Walk { device: &device, role, salt, total, meter: &mut meter };
        let mut count =
            RoleCount { role, dtypes: [a.dtype(role), b.dtype(role)], tensors_differ: 0, elements_differ: 0 };
        for tensor in a.tensors() {
            let paired = b.has(&tensor);
            let tally = walk.tensor(&tensor, &mut a, paired.then_some(&mut b))?;
            count.tensors_differ += usize::from(tally.differ > 0);
            count.elements_differ += tally.differ;
            if tally.differ > 0 && first.is_none() {
                let elements = tensor.elements().unwrap_or(0);
                first = Some(First { role, tensor: tensor.name, elements, tally });
            }
        }
        for tensor in b.tensors().into_iter().filter(|tensor| !a.has(tensor)) {
            walk.tensor(&tensor, &mut b, None)?;
        }
        roles.push(count);
    }
    drop(meter);
    let (unpaired, settings) = (unpaired(a.state(), b.state()), settings(a.state(), b.state()));
    Ok(Compared { a: a.facts()?, b: b.facts()?, unpaired, roles, first, settings })
}

/// One role's way through the tensors.
struct Walk<'a> {
    device: &'a Device,
    role: Role,
    salt: u64,
    total: u64,
    meter: &'a mut Meter,
}

impl Walk<'_> {
    /// Reads one tensor of `a` and, if it has it, of `b`, a block at a time; adds to their hashes and compares.
    fn tensor(&mut self, tensor: &TensorEntry, a: &mut Side, mut b: Option<&mut Side>) -> Result<Tally> {
        let (mut tally, elements) = (Tally::default(), tensor.elements().unwrap_or(0) as usize);
        for start in (0..elements).step_by(CHUNK) {
            let len = CHUNK.min(elements - start);
            a.read(self, tensor, start, len)?;
            if let Some(b) = b.as_deref_mut() {
                b.read(self, tensor, start, len)?;
                tally.add(start as u64, &a.block, &b.block);
            }
            let done = a.done + b.as_ref().map_or(0, |b| b.done);
            self.meter.at(done.min(self.total), self.total);
        }
        Ok(tally)
    }
}

/// A checkpoint that is being read.
struct Side {
    reader: Reader,
    block: Vec<f32>,
    hash: u64,
    /// Bytes read.
    done: u64,
}

impl Side {
    fn open(dir: &Path) -> Result<Self> {
        Ok(Side { reader: Reader::open(dir)?, block: Vec::with_capacity(CHUNK), hash: 0, done: 0 })
    }

    fn state(&self) -> &CheckpointState {
        self.reader.state()
    }

    fn dtype(&self, role: Role) -> &'static str {
        self.state().dtypes.of(role).header_name()
    }

    fn tensors(&self) -> Vec<TensorEntry> {
        self.state().tensors.clone()
    }

    fn has(&self, tensor: &TensorEntry) -> bool {
        self.state().tensor(&tensor.name).is_some_and(|index| self.state().tensors[index].shape == tensor.shape)
    }

    fn weights(&self) -> u64 {
        self.state().tensors.iter().filter_map(TensorEntry::elements).sum()
    }

    /// Bytes of everything that is compared.
    fn bytes(&self) -> u64 {
        let size: usize = Role::STATE.map(|role| self.state().dtypes.of(role).size()).iter().sum();
        self.weights() * size as u64
    }

    fn read(&mut self, walk: &Walk<'_>, tensor: &TensorEntry, start: usize, len: usize) -> Result<()> {
        self.block.resize(len, 0.0);
        self.reader.read(walk.role, &tensor.name, start, &mut self.block)?;
        let (name, first_index) = (tensor_key(&tensor.name), start as u64);
        let pieces = [Piece { range: 0..len, tensor: name, first_index, decay: false }];
        let hash = StateHash { x: View::F32(&self.block), pieces: &pieces, salt: walk.salt, sum: &mut self.hash };
        walk.device.state_hash(hash).map_err(Failure::from)?;
        self.done += (len * self.state().dtypes.of(walk.role).size()) as u64;
        Ok(())
    }

    fn facts(self) -> Result<Facts> {
        match self.state().run.state_hash.filter(|stored| *stored != self.hash) {
            None => Ok(Facts {
                dir: self.reader.dir().to_owned(),
                step: self.state().step,
                weights: self.weights(),
                hash: self.hash,
            }),
            Some(stored) => Err(Failure::input("the numbers of the checkpoint are not those that its run hashed")
                .at(self.reader.dir().display())
                .expected(format!("state hash {stored:016x}, as the run computed it before it saved"))
                .found(format!("state hash {:016x}", self.hash))
                .hint("its checksums are right, so they changed before they were written: suspect the memory of that machine, and use an earlier checkpoint")),
        }
    }
}

/// Tensors without a partner of the same shape.
fn unpaired(a: &CheckpointState, b: &CheckpointState) -> Vec<String> {
    let shape_in = |state: &CheckpointState, name: &str| state.tensor(name).map(|i| state.tensors[i].shape.clone());
    let mut found = Vec::new();
    for tensor in &a.tensors {
        match shape_in(b, &tensor.name) {
            None => found.push(format!("{} is only in A", tensor.name)),
            Some(shape) if shape != tensor.shape => {
                found.push(format!("{} is {:?} in A and {shape:?} in B", tensor.name, tensor.shape));
            }
            Some(_) => {}
        }
    }
    let only_b = b.tensors.iter().filter(|tensor| a.tensor(&tensor.name).is_none());
    found.extend(only_b.map(|tensor| format!("{} is only in B", tensor.name)));
    found
}

/// Settings of the runs, and where they stood, as far as they differ. Layouts may differ and the state be the same.
fn settings(a: &CheckpointState, b: &CheckpointState) -> Vec<(String, Value, Value)> {
    let (a, b) = (named(a), named(b));
    let names: BTreeSet<&String> = a.keys().chain(b.keys()).collect();
    let value =
        |of: &BTreeMap<String, Value>, name: &str| of.get(name).cloned().unwrap_or_else(|| json!("(not there)"));
    let rows = names.into_iter().map(|name| (name.clone(), value(&a, name), value(&b, name)));
    rows.filter(|(_, a, b)| a != b).collect()
}

fn named(state: &CheckpointState) -> BTreeMap<String, Value> {
    let run = &state.run;
    let mut all: BTreeMap<String, Value> = [
        ("policy", json!(run.policy)),
        ("lanes", json!(run.lanes)),
        ("world", json!(state.world)),
        ("stage", json!(run.stage)),
        ("shard_group", json!(run.shard_group)),
        ("tokens", json!(run.tokens)),
        ("epoch", json!(run.epoch)),
        ("row_in_epoch", json!(run.row_in_epoch)),
        ("umbra", json!(state.umbra)),
    ]
    .map(|(name, value)| (name.to_owned(), value))
    .into();
    if let Ok(Value::Object(settings)) = serde_json::from_str(&run.settings_json) {
        for (name, setting) in settings {
            // What the run recorded outside its settings is what it did, so it stands.
            all.entry(name).or_insert_with(|| setting.get("value").cloned().unwrap_or(setting));
        }
    }
    all
}
