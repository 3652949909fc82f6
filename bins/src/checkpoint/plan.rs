//! Where every byte of a checkpoint goes, known on every rank before the first is written.

use super::folder;
use super::format::{Role, RoleDTypes, TensorEntry};
use crate::hf::FileDType;
use crate::hf::layout::{Layout, Shard, Tensor};
use crate::hf::save::{json_text, with_dtype};
use crate::hf::weights::EMBEDDING;
use crate::{Exit, Failure, Result};
use spmd_core::UnitSpec;
use std::ops::Range;
use std::path::{Path, PathBuf};

/// How ranks share the files of a checkpoint.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Files {
    /// Whole tensors in files that all ranks write into, and the model as a Hugging Face folder.
    Shared,
    /// One file a rank, for file systems that handle parallel writers badly; no model files.
    PerRank,
}

/// Elements one rank writes: consecutive ones of one parameter.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Run {
    /// Index of the unit.
    pub unit: usize,
    /// Index of the parameter in the unit.
    pub param: usize,
    /// Index of the first element in the parameter, row-major.
    pub start: usize,
    /// Where they lie in this rank's slice of the unit.
    pub range: Range<usize>,
}

/// What a checkpoint carries over from the model the run began with.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct SourceFacts {
    /// `config.json` as the source spells it.
    pub config_json: String,
    /// The dtype the source stores each parameter in, in the order of the units.
    pub dtypes: Vec<FileDType>,
    /// The source of a tied model stores `lm_head.weight` as well.
    pub stores_tied_head: bool,
    /// Name and content of the tokenizer and generation files. Rank 0 writes them; others may leave the list empty, and
    /// then [`SavePlan::bytes`] lacks them.
    pub companions: Vec<(String, Vec<u8>)>,
}

/// What is to be saved.
#[derive(Debug, Clone, Copy)]
pub struct SaveSpec<'a> {
    /// The run's output folder; the checkpoint becomes `checkpoints/step-NNNNNN` in it.
    pub out_dir: &'a Path,
    /// Completed steps.
    pub step: u64,
    /// The model.
    pub units: &'a [UnitSpec],
    /// The dtypes of the state.
    pub dtypes: RoleDTypes,
    /// The source model.
    pub source: &'a SourceFacts,
    /// How the files are shared.
    pub files: Files,
    /// Per rank, the elements it writes: together every element of every parameter, each once. A rank may have none.
    pub runs: &'a [Vec<Run>],
    /// The most bytes of tensors in one shared file ([`crate::hf::save::MAX_SHARD_BYTES`]); a larger tensor has a file of
    /// its own.
    pub max_file_bytes: u64,
}

/// A [`Run`] and the place of its first element in a file, for every role that is stored.
#[derive(Debug)]
pub(super) struct PlacedRun {
    pub(super) tensor: u32,
    pub(super) unit: usize,
    pub(super) start: usize,
    pub(super) range: Range<usize>,
    pub(super) places: Vec<(Role, u32, u64)>,
}

/// A checkpoint to be written, as every rank knows it.
///
/// Order of calls: [`SavePlan::create`] on rank 0; then [`SavePlan::write_rank`] on every rank; then, with what all of
/// them returned, [`SavePlan::commit`] on rank 0, or [`SavePlan::discard`] if one of them failed. None waits for another
/// rank: the caller carries the news.
#[derive(Debug)]
pub struct SavePlan {
    pub(super) out_dir: PathBuf,
    pub(super) step: u64,
    /// The files that hold tensors. Files of a checkpoint are counted these first, then [`SavePlan::small`].
    pub(super) shards: Vec<Shard>,
    /// config.json, index files and companions.
    pub(super) small: Vec<(String, Vec<u8>)>,
    pub(super) files: Files,
    /// Per rank.
    pub(super) runs: Vec<Vec<PlacedRun>>,
    pub(super) tensors: Vec<TensorEntry>,
    pub(super) dtypes: RoleDTypes,
    pub(super) config_json: String,
    pub(super) stores_tied_head: bool,
}

impl SavePlan {
    /// Lays out every file. Touches no disk; ranks that are given the same get the same.
    ///
    /// # Errors
    /// Exit 1: runs that are outside the model, a source of another model.
    pub fn new(spec: SaveSpec<'_>) -> Result<Self> {
        let tensors = tensors(&spec)?;
        let mut plan = SavePlan {
            out_dir: spec.out_dir.to_owned(),
            step: spec.step,
            shards: Vec::new(),
            small: vec![("config.json".to_owned(), config_text(&spec.source.config_json)?.into_bytes())],
            files: spec.files,
            runs: Vec::with_capacity(spec.runs.len()),
            tensors,
            dtypes: spec.dtypes,
            config_json: spec.source.config_json.clone(),
            stores_tied_head: spec.source.stores_tied_head,
        };
        match spec.files {
            Files::Shared => plan.place_shared(&spec)?,
            Files::PerRank => plan.place_per_rank(&spec)?,
        }
        plan.small.extend(spec.source.companions.iter().cloned());
        Ok(plan)
    }

    /// Where the checkpoint will be.
    pub fn dir(&self) -> PathBuf {
        folder::complete(&self.out_dir, self.step)
    }

    /// Bytes the checkpoint takes on disk, exact but for `state.rkyv`.
    pub fn bytes(&self) -> u64 {
        let small: usize = self.small.iter().map(|(_, content)| content.len()).sum();
        self.shards.iter().map(|shard| shard.len).sum::<u64>() + small as u64
    }

    fn place_shared(&mut self, spec: &SaveSpec<'_>) -> Result<()> {
        let max = spec.max_file_bytes;
        let mut layouts: Vec<(Role, usize, Layout)> = Vec::new();
        for role in [Role::Shadow, Role::Model, Role::ExpAvg, Role::ExpAvgSq] {
            let (dtype, tied) = (spec.dtypes.of(role), role == Role::Model && self.stores_tied_head);
            let layout = Layout::new(role.name(), spec.units, |_| dtype, tied, max);
            if let Some(index) = &layout.index {
                self.small.push((layout.index_name(), json_text(index).into_bytes()));
            }
            let first = self.shards.len();
            self.shards.extend(layout.shards.iter().cloned());
            layouts.push((role, first, layout));
        }
        let place = |layout: &(Role, usize, Layout), name: &str, start: usize| -> Result<(u32, u64)> {
            let place = layout.2.place(name)?;
            Ok(((layout.1 + place.shard) as u32, place.start + (start * place.dtype.size()) as u64))
        };
        for runs in spec.runs {
            let mut placed = Vec::with_capacity(runs.len());
            for run in runs {
                let mut new = self.placed(spec.units, run)?;
                let name = &spec.units[run.unit].params[run.param].name;
                for layout in &layouts {
                    let (file, offset) = place(layout, name, run.start)?;
                    new.places.push((layout.0, file, offset));
                    if layout.0 == Role::Model && self.stores_tied_head && name == EMBEDDING {
                        let (file, offset) = place(layout, crate::hf::weights::HEAD, run.start)?;
                        new.places.push((Role::TiedHead, file, offset));
                    }
                }
                placed.push(new);
            }
            self.runs.push(placed);
        }
        Ok(())
    }

    fn place_per_rank(&mut self, spec: &SaveSpec<'_>) -> Result<()> {
        for (rank, runs) in spec.runs.iter().enumerate() {
            let name =
                |role: Role, run: &Run| format!("{role}/{}@{}", spec.units[run.unit].params[run.param].name, run.start);
            let mut placed = runs.iter().map(|run| self.placed(spec.units, run)).collect::<Result<Vec<_>>>()?;
            let mut tensors = Vec::with_capacity(Role::STATE.len() * runs.len());
            for role in Role::STATE {
                let dtype = spec.dtypes.of(role);
                tensors.extend(runs.iter().map(|r| Tensor { name: name(role, r), shape: vec![r.range.len()], dtype }));
            }
            let file = format!("rank-{rank:05}-of-{:05}.safetensors", spec.runs.len());
            let layout = Layout::of_file(file, &tensors);
            for (run, placed) in runs.iter().zip(&mut placed) {
                for role in Role::STATE {
                    placed.places.push((role, self.shards.len() as u32, layout.place(&name(role, run))?.start));
                }
            }
            self.shards.extend(layout.shards);
            self.runs.push(placed);
        }
        Ok(())
    }

    /// `run` without places, if it lies inside the model.
    fn placed(&self, units: &[UnitSpec], run: &Run) -> Result<PlacedRun> {
        let param = units.get(run.unit).and_then(|unit| unit.params.get(run.param));
        let inside = |len: usize| run.start.checked_add(run.range.len()).is_some_and(|end| end <= len);
        if !param.is_some_and(|param| inside(param.len())) {
            return Err(Failure::new(Exit::Bug, format!("{run:?} was given to save, which is outside the model")));
        }
        let before: usize = units[..run.unit].iter().map(|unit| unit.params.len()).sum();
        Ok(PlacedRun {
            tensor: (before + run.param) as u32,
            unit: run.unit,
            start: run.start,
            range: run.range.clone(),
            places: Vec::new(),
        })
    }
}

fn tensors(spec: &SaveSpec<'_>) -> Result<Vec<TensorEntry>> {
    let params: Vec<_> = spec.units.iter().flat_map(|unit| &unit.params).collect();
    if params.len() != spec.source.dtypes.len() {
        let what = format!("{} dtypes of the source for {} parameters", spec.source.dtypes.len(), params.len());
        return Err(Failure::new(Exit::Bug, what));
    }
    let entry = |(param, dtype): (&spmd_core::ParamSpec, &FileDType)| TensorEntry {
        name: param.name.clone(),
        shape: param.shape.iter().map(|n| *n as u64).collect(),
        source_dtype: *dtype,
    };
    Ok(params.into_iter().zip(&spec.source.dtypes).map(entry).collect())
}

/// `config.json` of the folder: the source's text where it says bfloat16 already.
fn config_text(source: &str) -> Result<String> {
    let config = serde_json::from_str(source)
        .map_err(|e| Failure::new(Exit::Bug, "config.json of the source is not JSON any more").found(e))?;
    Ok(with_dtype(&config, FileDType::Bf16).map_or_else(|| source.to_owned(), |changed| json_text(&changed)))
}
