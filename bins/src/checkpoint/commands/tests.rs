//! The commands, on small checkpoints that the module's own writer makes.

mod compared;
mod exported;
mod found;

use crate::checkpoint::plan::SaveSpec;
use crate::checkpoint::{Files, Role, RoleDTypes, Run, RunFacts, SavePlan};
use crate::hf::FileDType;
use crate::hf::save::MAX_SHARD_BYTES;
use crate::source::Source;
use crate::tiny;
use serde_json::Value;
use spmd_core::{Buffer, DType, ParamKind, ParamSpec, UnitSpec};
use std::ops::Range;
use std::path::{Path, PathBuf};

/// A Mistral of one layer with tensors of odd sizes.
fn source() -> Source {
    let small = models::Config { vocab_size: 11, hidden_size: 12, intermediate_size: 20, layers: 1, ..tiny::config() };
    Source::drawn(models::Config { heads: 3, kv_heads: 1, head_dim: 4, ..small }, 3)
}

/// A checkpoint to be made.
struct Save {
    step: u64,
    dtype: DType,
    files: Files,
    world: usize,
    units: Vec<UnitSpec>,
    /// Numbers that are not those of [`value`]: role, tensor, index, number.
    changes: Vec<(Role, &'static str, usize, f32)>,
    settings_json: &'static str,
    state_hash: Option<u64>,
}

impl Default for Save {
    fn default() -> Self {
        Save {
            step: 4,
            dtype: DType::F32,
            files: Files::Shared,
            world: 1,
            units: source().units().to_vec(),
            changes: Vec::new(),
            settings_json: r#"{"lr": {"value": 1e-5, "from": "default"}, "data": {"value": ["a", "b"], "from": "flag"}}"#,
            state_hash: None,
        }
    }
}

/// Element `i` of a tensor. Multiples of 1/64 below 4, which bf16 holds exactly: eight bits of them at most.
fn value(role: Role, tensor: &str, i: usize) -> f32 {
    let k = (37 * i + 11 * tensor.len() + 5 * role as usize) % 251;
    (k as f32 - 64.0) / 64.0
}

/// The elements of a unit that a rank owns: equal parts, the last ones shorter or empty.
fn owned(len: usize, world: usize, rank: usize) -> Range<usize> {
    let part = len.div_ceil(world) | 1;
    (part * rank).min(len)..(part * (rank + 1)).min(len)
}

impl Save {
    /// All numbers of a unit in one role, in order.
    fn numbers(&self, unit: &UnitSpec, role: Role) -> Vec<f32> {
        let of = |param: &ParamSpec| {
            let mut values: Vec<f32> = (0..param.len()).map(|i| value(role, &param.name, i)).collect();
            for (_, _, i, x) in self.changes.iter().filter(|(r, tensor, ..)| *r == role && *tensor == param.name) {
                values[*i] = *x;
            }
            values
        };
        unit.params.iter().flat_map(of).collect()
    }

    fn runs(&self, rank: usize) -> Vec<Run> {
        let mut runs = Vec::new();
        for (u, unit) in self.units.iter().enumerate() {
            let mine = owned(unit.len(), self.world, rank);
            for (param, range) in unit.ranges().into_iter().enumerate() {
                let (start, end) = (range.start.max(mine.start), range.end.min(mine.end));
                if start < end {
                    let range = (start - range.start, start - mine.start..end - mine.start);
                    runs.push(Run { unit: u, param, start: range.0, range: range.1 });
                }
            }
        }
        runs
    }

    /// Writes it into `out_dir`; returns its folder.
    fn make(&self, out_dir: &Path) -> PathBuf {
        let mut source = source().facts(true).unwrap();
        source.dtypes = vec![FileDType::F16; self.units.iter().map(|unit| unit.params.len()).sum()];
        let runs: Vec<Vec<Run>> = (0..self.world).map(|rank| self.runs(rank)).collect();
        let plan = SavePlan::new(SaveSpec {
            out_dir,
            step: self.step,
            units: &self.units,
            dtypes: RoleDTypes::new(self.dtype, self.dtype),
            source: &source,
            files: self.files,
            runs: &runs,
            max_file_bytes: MAX_SHARD_BYTES,
        })
        .unwrap();
        plan.create().unwrap();
        let write = |rank: usize| {
            let slice = |unit: &UnitSpec, role: Role| {
                let numbers = &self.numbers(unit, role)[owned(unit.len(), self.world, rank)];
                Buffer::from_f32(self.dtype, numbers, "test").unwrap()
            };
            let slices: Vec<[Buffer; 3]> =
                self.units.iter().map(|unit| Role::STATE.map(|role| slice(unit, role))).collect();
            plan.write_rank(rank, |unit, role| slices[unit][role as usize - Role::Shadow as usize].view()).unwrap()
        };
        let written: Vec<_> = (0..self.world).map(write).collect();
        let facts = RunFacts {
            tokens: 12_345,
            settings_json: self.settings_json.to_owned(),
            policy: "shadow".to_owned(),
            lanes: 4,
            stage: 3,
            shard_group: self.world as u64,
            epoch: 1,
            row_in_epoch: 7,
            state_hash: self.state_hash,
        };
        plan.commit(facts, &written).unwrap()
    }
}

fn matrix(name: &str, shape: &[usize]) -> ParamSpec {
    ParamSpec { name: name.to_owned(), shape: shape.to_vec(), kind: ParamKind::Matrix }
}

/// Changes the last byte of a file.
fn damage(path: &Path) {
    let mut bytes = std::fs::read(path).unwrap();
    *bytes.last_mut().unwrap() ^= 1;
    std::fs::write(path, bytes).unwrap();
}

fn json(text: &str) -> Value {
    serde_json::from_str(text).unwrap()
}
