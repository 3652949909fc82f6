//! Checkpoints written by several ranks, read back by other ranges, damaged, crashed and removed.

mod damage;
mod folders;
mod round_trip;
mod source;

use super::plan::SaveSpec;
use super::*;
use crate::hf::FileDType;
use crate::hf::fixture::unit;
use crate::hf::weights::EMBEDDING;
use crate::{Exit, Result};
use spmd_core::{Buffer, DType, UnitSpec, View};
use std::fs;
use std::path::{Path, PathBuf};

/// A model whose tensors end at no round number.
fn units() -> Vec<UnitSpec> {
    vec![
        unit(&[(EMBEDDING, &[7, 6])]),
        unit(&[("model.layers.0.norm", &[5]), ("model.layers.0.w", &[13, 11]), ("model.layers.0.v", &[3, 9])]),
        unit(&[("model.norm.weight", &[1])]),
    ]
}

/// Number `i` of a role: all kinds of bits, both signs and subnormals among them, below 2 in magnitude.
fn value(role: Role, unit: usize, i: usize) -> f32 {
    let x = (i as u64 + 1).wrapping_mul(0x9e37_79b9_7f4a_7c15) ^ ((role as u64 + 1) << 40) ^ ((unit as u64 + 1) << 50);
    f32::from_bits((x.wrapping_mul(0xbf58_476d_1ce4_e5b9) >> 32) as u32 & 0xbfff_ffff)
}

/// Cuts every unit for `world` ranks at odd places; the last ranks of a small unit own nothing.
fn runs(units: &[UnitSpec], world: usize) -> Vec<Vec<Run>> {
    let owned = |len: usize, rank: usize| {
        let part = len.div_ceil(world) | 1;
        (part * rank).min(len)..(part * (rank + 1)).min(len)
    };
    let of = |rank: usize| {
        let mut out = Vec::new();
        for (u, unit) in units.iter().enumerate() {
            let mine = owned(unit.len(), rank);
            for (param, range) in unit.ranges().into_iter().enumerate() {
                let (start, end) = (range.start.max(mine.start), range.end.min(mine.end));
                if start < end {
                    let range = (start - mine.start, end - mine.start, start - range.start);
                    out.push(Run { unit: u, param, start: range.2, range: range.0..range.1 });
                }
            }
        }
        out
    };
    (0..world).map(of).collect()
}

/// Everything one save needs.
struct Save {
    units: Vec<UnitSpec>,
    dtype: DType,
    files: Files,
    world: usize,
    tied_head: bool,
    max_file_bytes: u64,
    step: u64,
}

impl Save {
    fn new(files: Files, world: usize) -> Self {
        let (units, dtype, tied_head, step) = (units(), DType::F32, true, 10);
        Save { units, dtype, files, world, tied_head, max_file_bytes: 300, step }
    }

    fn facts(&self) -> SourceFacts {
        let params = self.units.iter().map(|u| u.params.len()).sum();
        SourceFacts {
            config_json: "{\n \"dtype\": \"float32\", \"rms_norm_eps\": 1e-05}".to_owned(),
            dtypes: vec![FileDType::F16; params],
            stores_tied_head: self.tied_head,
            companions: vec![("tokenizer.json".to_owned(), b"{\"a\": 1}".to_vec())],
        }
    }

    fn plan(&self, out_dir: &Path) -> SavePlan {
        let spec = SaveSpec {
            out_dir,
            step: self.step,
            units: &self.units,
            dtypes: RoleDTypes::new(self.dtype, self.dtype),
            source: &self.facts(),
            files: self.files,
            runs: &runs(&self.units, self.world),
            max_file_bytes: self.max_file_bytes,
        };
        SavePlan::new(spec).unwrap()
    }

    /// The slices of rank `rank`, one buffer a unit and role of [`Role::STATE`].
    fn slices(&self, rank: usize) -> Vec<[Buffer; 3]> {
        let slice = |u: usize, role: Role| {
            let part = self.units[u].len().div_ceil(self.world) | 1;
            let start = (part * rank).min(self.units[u].len());
            let end = (start + part).min(self.units[u].len());
            let values: Vec<f32> = (start..end).map(|i| value(role, u, i)).collect();
            Buffer::from_f32(self.dtype, &values, "test").unwrap()
        };
        (0..self.units.len()).map(|u| Role::STATE.map(|role| slice(u, role))).collect()
    }

    /// One rank's part, with its own plan as another process has it.
    fn write(&self, out_dir: &Path, rank: usize) -> Result<Written> {
        let slices = self.slices(rank);
        let view = |unit: usize, role: Role| -> View<'_> { slices[unit][role as usize - Role::Shadow as usize].view() };
        self.plan(out_dir).write_rank(rank, view)
    }

    /// All of it, the last rank first; returns the folder.
    fn save(&self, out_dir: &Path) -> PathBuf {
        let plan = self.plan(out_dir);
        plan.create().unwrap();
        let written: Vec<Written> = (0..self.world).rev().map(|rank| self.write(out_dir, rank).unwrap()).collect();
        plan.commit(run_facts(), &written).unwrap()
    }
}

fn run_facts() -> RunFacts {
    RunFacts {
        tokens: 12_345,
        settings_json: "{\"lr\": 0.1}".to_owned(),
        policy: "shadow".to_owned(),
        lanes: 4,
        stage: 3,
        shard_group: 2,
        epoch: 1,
        row_in_epoch: 7,
        state_hash: Some(42),
    }
}

fn names(dir: &Path) -> Vec<String> {
    let mut names: Vec<String> =
        fs::read_dir(dir).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
    names.sort();
    names
}

fn no_progress(_: u64, _: u64) {}

/// Bits, so that -0 and NaN count as what they are.
fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|x| x.to_bits()).collect()
}
