//! A model to start from: a Hugging Face folder, a checkpoint or the embedded one, behind one door.

use crate::checkpoint::{Reader, Role, STATE_FILE, SourceFacts, is_checkpoint};
use crate::data::tokenizer::LazyTokenizer;
use crate::hf::FileDType;
use crate::hf::weights::{HEAD, WeightFiles};
use crate::plan::ModelSource;
use crate::{Failure, Result, hf, tiny};
use models::{Config, Family, params};
use spmd_core::{ParamSpec, UnitSpec};
use std::path::{Path, PathBuf};

/// Where a model's architecture, weights and tokenizer come from.
#[derive(Debug)]
pub struct Source {
    /// The architecture.
    pub config: Config,
    /// `config.json` as it was read, or as it would be written.
    pub config_json: serde_json::Value,
    /// The folder, if it is one.
    pub dir: Option<PathBuf>,
    weights: Weights,
    units: Vec<UnitSpec>,
    seed: u64,
}

/// Where numbers come from.
#[derive(Debug)]
enum Weights {
    /// They are drawn.
    Drawn,
    /// The weight files of a model folder.
    Files(WeightFiles),
    /// The shadow of a checkpoint: the weights as training left them, before they are rounded for the model files.
    Checkpoint(Box<Reader>),
}

impl Source {
    /// Opens a folder (a model's or a checkpoint), reading headers but no weights, or the embedded model, whose weights are drawn from `seed`.
    ///
    /// # Errors
    /// Exit 3: whatever is wrong with the folder, all tensors listed.
    pub fn open(model: &ModelSource, seed: u64) -> Result<Self> {
        match model {
            ModelSource::Tiny => Ok(Source::drawn(tiny::config(), seed)),
            ModelSource::Folder(dir) if is_checkpoint(dir) => Source::checkpoint(Reader::open(dir)?, seed),
            ModelSource::Folder(dir) => {
                let (config, config_json) = hf::read_config(dir)?;
                let mut weights = WeightFiles::open(dir)?;
                if config.tied {
                    weights.adopt_head();
                }
                let units = params::units(&config);
                weights.check(&units, config.tied)?;
                Ok(Source {
                    config,
                    config_json,
                    dir: Some(dir.clone()),
                    weights: Weights::Files(weights),
                    units,
                    seed,
                })
            }
        }
    }

    /// A model of this architecture with weights drawn from `seed`.
    pub fn drawn(config: Config, seed: u64) -> Self {
        let config_json = hf::write_config(&config);
        let units = params::units(&config);
        Source { config, config_json, dir: None, weights: Weights::Drawn, units, seed }
    }

    /// The model a checkpoint was written from.
    ///
    /// # Errors
    /// Exit 3: it holds another model than its `config.json` describes.
    fn checkpoint(reader: Reader, seed: u64) -> Result<Self> {
        let (dir, state) = (reader.dir().to_owned(), reader.state());
        let (config, config_json) = hf::parse_config(dir.join(STATE_FILE), &state.config_json)?;
        let units = params::units(&config);
        let params: Vec<&ParamSpec> = units.iter().flat_map(|unit| &unit.params).collect();
        let same = |p: &ParamSpec, t: &crate::checkpoint::TensorEntry| {
            p.name == t.name && p.shape.iter().map(|n| *n as u64).eq(t.shape.iter().copied())
        };
        if params.len() != state.tensors.len() || !params.iter().zip(&state.tensors).all(|(p, t)| same(p, t)) {
            let other = params.iter().zip(&state.tensors).find(|(p, t)| !same(p, t));
            let found = other.map(|(p, t)| format!("{} {:?} for {} {:?}", t.name, t.shape, p.name, p.shape));
            return Err(Failure::input("the checkpoint holds another model than its configuration describes")
                .at(dir.display())
                .expected(format!("{} tensors in the order of the architecture", params.len()))
                .found(found.unwrap_or_else(|| format!("{} tensors", state.tensors.len()))));
        }
        Ok(Source { config, config_json, dir: Some(dir), weights: Weights::Checkpoint(Box::new(reader)), units, seed })
    }

    /// The model's units.
    pub fn units(&self) -> &[UnitSpec] {
        &self.units
    }

    /// Fills `out` with elements `start..start + out.len()` of a parameter; only those bytes are read.
    ///
    /// # Errors
    /// Exit 3: a file that cannot be read, or a value that is not finite.
    pub fn fill(&self, param: &ParamSpec, start: usize, out: &mut [f32]) -> Result<()> {
        match &self.weights {
            Weights::Files(files) => files.read(&param.name, start..start + out.len(), out),
            Weights::Checkpoint(reader) => {
                reader.read(Role::Shadow, &param.name, start, out)?;
                match out.iter().position(|x| !x.is_finite()) {
                    None => Ok(()),
                    Some(i) => Err(Failure::input("a weight of the checkpoint is not finite")
                        .at(format!("{}, tensor {}, index {}", reader.dir().display(), param.name, start + i))
                        .expected("a finite number")
                        .found(out[i])
                        .hint("the run had diverged: use an earlier checkpoint")),
                }
            }
            Weights::Drawn => {
                models::init::fill(param, self.config.initializer_range, self.seed, start, out);
                Ok(())
            }
        }
    }

    /// The dtype a parameter is stored in: the source's (of a checkpoint, the one of the model its run began with), bf16
    /// for a drawn model.
    pub fn dtype_of(&self, name: &str) -> FileDType {
        let stored = match &self.weights {
            Weights::Drawn => None,
            Weights::Files(files) => files.dtype_of(name),
            Weights::Checkpoint(reader) => {
                reader.state().tensor(name).map(|index| reader.state().tensors[index].source_dtype)
            }
        };
        stored.unwrap_or(FileDType::Bf16)
    }

    /// Whether the source stores a tied head a second time.
    pub fn stores_tied_head(&self) -> bool {
        self.config.tied
            && match &self.weights {
                Weights::Drawn => false,
                Weights::Files(files) => files.contains(HEAD),
                Weights::Checkpoint(reader) => reader.state().stores_tied_head,
            }
    }

    /// What checkpoints carry over from this model. Rank 0 alone writes the small files, so only it need ask for their
    /// content with `companions`.
    ///
    /// # Errors
    /// Exit 3: a small file of the folder cannot be read.
    pub fn facts(&self, companions: bool) -> Result<SourceFacts> {
        let config_json = match (&self.weights, &self.dir) {
            (Weights::Checkpoint(reader), _) => reader.state().config_json.clone(),
            (Weights::Files(_), Some(dir)) => hf::save::read_text(&dir.join("config.json"))?,
            _ => hf::save::json_text(&self.config_json),
        };
        let params = self.units.iter().flat_map(|unit| &unit.params);
        Ok(SourceFacts {
            config_json,
            dtypes: params.map(|p| self.dtype_of(&p.name)).collect(),
            stores_tied_head: self.stores_tied_head(),
            companions: if companions { hf::save::companions(self.dir.as_deref())? } else { Vec::new() },
        })
    }

    /// The tokenizer, loaded when first used.
    pub fn tokenizer(&self) -> LazyTokenizer {
        self.dir.as_deref().map_or_else(LazyTokenizer::byte, LazyTokenizer::folder)
    }

    /// What tables call the model.
    pub fn name(&self) -> String {
        let dir = self.dir.as_deref().map_or("tiny (embedded)".to_owned(), |d: &Path| d.display().to_string());
        match &self.weights {
            Weights::Checkpoint(reader) => format!("{dir} (checkpoint of step {})", reader.state().step),
            Weights::Drawn | Weights::Files(_) => dir,
        }
    }

    /// The architecture in a few words.
    pub fn shape(&self) -> String {
        let c = &self.config;
        let family = match c.family {
            Family::Mistral => "Mistral",
            Family::Llama => "Llama",
        };
        let window = c.sliding_window.map_or(String::new(), |w| format!(", window {w}"));
        let tied = if c.tied { ", tied" } else { "" };
        format!(
            "{family}, {} layers, hidden {}, {} heads over {} of {}, MLP {}, vocabulary {}{window}{tied}",
            c.layers, c.hidden_size, c.heads, c.kv_heads, c.head_dim, c.intermediate_size, c.vocab_size
        )
    }
}
