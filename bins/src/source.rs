//! A model to start from: a Hugging Face folder or the embedded one, behind one door.

use crate::data::tokenizer::LazyTokenizer;
use crate::hf::FileDType;
use crate::hf::weights::{HEAD, WeightFiles};
use crate::plan::ModelSource;
use crate::{Result, hf, tiny};
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
    /// Its weights, if it is a folder.
    weights: Option<WeightFiles>,
    units: Vec<UnitSpec>,
    seed: u64,
}

impl Source {
    /// Opens a folder, reading headers but no weights, or the embedded model, whose weights are drawn from `seed`.
    ///
    /// # Errors
    /// Exit 3: whatever is wrong with the folder, all tensors listed.
    pub fn open(model: &ModelSource, seed: u64) -> Result<Self> {
        match model {
            ModelSource::Tiny => Ok(Source::drawn(tiny::config(), seed)),
            ModelSource::Folder(dir) => {
                let (config, config_json) = hf::read_config(dir)?;
                let weights = WeightFiles::open(dir)?;
                let units = params::units(&config);
                weights.check(&units, config.tied)?;
                Ok(Source { config, config_json, dir: Some(dir.clone()), weights: Some(weights), units, seed })
            }
        }
    }

    /// A model of this architecture with weights drawn from `seed`.
    pub fn drawn(config: Config, seed: u64) -> Self {
        let config_json = hf::write_config(&config);
        let units = params::units(&config);
        Source { config, config_json, dir: None, weights: None, units, seed }
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
            Some(files) => files.read(&param.name, start..start + out.len(), out),
            None => {
                models::init::fill(param, self.config.initializer_range, self.seed, start, out);
                Ok(())
            }
        }
    }

    /// The dtype a parameter is stored in: the source's, bf16 for a drawn model.
    pub fn dtype_of(&self, name: &str) -> FileDType {
        self.weights.as_ref().and_then(|w| w.dtype_of(name)).unwrap_or(FileDType::Bf16)
    }

    /// Whether the source stores a tied head a second time.
    pub fn stores_tied_head(&self) -> bool {
        self.config.tied && self.weights.as_ref().is_some_and(|w| w.contains(HEAD))
    }

    /// The tokenizer, loaded when first used.
    pub fn tokenizer(&self) -> LazyTokenizer {
        self.dir.as_deref().map_or_else(LazyTokenizer::byte, LazyTokenizer::folder)
    }

    /// What tables call the model.
    pub fn name(&self) -> String {
        self.dir.as_deref().map_or("tiny (embedded)".to_owned(), |d: &Path| d.display().to_string())
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
