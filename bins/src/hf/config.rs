//! `config.json` in both of its spellings, and by name everything in it that Umbra would not compute as transformers does.
//!
//! Defaults of absent keys are those of transformers' `MistralConfig` and `LlamaConfig`
//! (configuration_mistral.py, configuration_llama.py).

mod rope;
#[cfg(test)]
mod tests;

use crate::{Failure, Result};
use models::{Config, Family, RopeScaling};
use serde_json::{Map, Value, json};
use std::fmt::Display;
use std::path::{Path, PathBuf};

/// Reads `dir/config.json`: the architecture with every value explicit, and the JSON itself so that it can be carried
/// over into the folder that is written later.
///
/// # Errors
/// Exit 3, naming file and key: the folder or file cannot be read, is not a JSON object, lacks a required key, has a value
/// of the wrong type, or describes something Umbra does not compute.
pub fn read_config(dir: &Path) -> Result<(Config, Value)> {
    if !dir.is_dir() {
        let found = if dir.exists() { "a file" } else { "nothing there" };
        return Err(Failure::input("the model folder cannot be opened")
            .at(dir.display())
            .expected("a folder with config.json and model*.safetensors")
            .found(found)
            .hint("check the spelling of --model; a model of a hub must be downloaded first"));
    }
    let path = dir.join("config.json");
    let text = std::fs::read_to_string(&path).map_err(|e| {
        Failure::input("config.json cannot be read")
            .at(path.display())
            .expected("the configuration of a Hugging Face model")
            .found(e)
            .hint("point --model at the folder that holds config.json and model*.safetensors")
    })?;
    parse_config(path, &text)
}

/// [`read_config`] of a text; `path` is what messages call it.
///
/// # Errors
/// As [`read_config`].
pub fn parse_config(path: PathBuf, text: &str) -> Result<(Config, Value)> {
    let value: Value = serde_json::from_str(text)
        .map_err(|e| Failure::input("config.json is not JSON").at(path.display()).found(e))?;
    let config = Reader::new(path, &value)?.config()?;
    Ok((config, value))
}

/// The configuration as `config.json` spells it, for a model that has no source folder. The caller adds `dtype`.
pub fn write_config(config: &Config) -> Value {
    let (model_type, architecture) = spelled(config.family);
    let mut out = json!({
        "architectures": [architecture],
        "attention_dropout": 0.0,
        "bos_token_id": null,
        "eos_token_id": null,
        "head_dim": config.head_dim,
        "hidden_act": "silu",
        "hidden_size": config.hidden_size,
        "initializer_range": config.initializer_range,
        "intermediate_size": config.intermediate_size,
        "max_position_embeddings": config.max_positions,
        "model_type": model_type,
        "num_attention_heads": config.heads,
        "num_hidden_layers": config.layers,
        "num_key_value_heads": config.kv_heads,
        "rms_norm_eps": config.rms_norm_eps,
        "rope_theta": config.rope_theta,
        "rope_scaling": rope::spell(config.rope_scaling),
        "tie_word_embeddings": config.tied,
        "vocab_size": config.vocab_size,
    });
    if config.family == Family::Mistral {
        out["sliding_window"] = json!(config.sliding_window);
    }
    out
}

/// The ids that end a generated text: `generation_config.json` of the folder where it names them, `config.json` else.
pub fn eos_token_ids(dir: &Path, config: &Value) -> Vec<u32> {
    let generation = std::fs::read(dir.join("generation_config.json")).ok();
    let generation: Option<Value> = generation.and_then(|bytes| serde_json::from_slice(&bytes).ok());
    for source in [generation.as_ref(), Some(config)].into_iter().flatten() {
        let ids: Vec<u32> = match source.get("eos_token_id") {
            Some(Value::Array(list)) => list.iter().filter_map(as_id).collect(),
            Some(one) => as_id(one).into_iter().collect(),
            None => Vec::new(),
        };
        if !ids.is_empty() {
            return ids;
        }
    }
    Vec::new()
}

fn as_id(value: &Value) -> Option<u32> {
    value.as_u64().and_then(|id| u32::try_from(id).ok())
}

fn spelled(family: Family) -> (&'static str, &'static str) {
    match family {
        Family::Mistral => ("mistral", "MistralForCausalLM"),
        Family::Llama => ("llama", "LlamaForCausalLM"),
    }
}

/// The top level of one config.json, with the file's name for messages.
struct Reader<'a> {
    path: PathBuf,
    keys: &'a Map<String, Value>,
}

impl<'a> Reader<'a> {
    fn new(path: PathBuf, value: &'a Value) -> Result<Self> {
        match value {
            Value::Object(keys) => Ok(Reader { path, keys }),
            other => Err(Failure::input("config.json is not a JSON object").at(path.display()).found(kind(other))),
        }
    }

    fn config(&self) -> Result<Config> {
        let family = self.family()?;
        self.refuse_unknown_mathematics()?;
        let hidden_size = self.required("hidden_size")?;
        let heads = self.required("num_attention_heads")?;
        // MistralConfig's default is 8; null means one key/value head per query head, which is also LlamaConfig's default.
        let kv_heads = match (self.keys.get("num_key_value_heads"), family) {
            (None, Family::Mistral) => 8,
            _ => self.count("num_key_value_heads")?.unwrap_or(heads),
        };
        let positions = if family == Family::Mistral { 131_072 } else { 2048 };
        let config = Config {
            family,
            vocab_size: self.required("vocab_size")?,
            hidden_size,
            intermediate_size: self.required("intermediate_size")?,
            layers: self.required("num_hidden_layers")?,
            heads,
            kv_heads,
            head_dim: self.head_dim(hidden_size, heads)?,
            rms_norm_eps: self.number("rms_norm_eps")?.unwrap_or(1e-6),
            rope_theta: self.rope_theta()?,
            rope_scaling: self.rope_scaling()?,
            sliding_window: self.window(family)?,
            tied: self.flag("tie_word_embeddings")?.unwrap_or(false),
            max_positions: self.count("max_position_embeddings")?.unwrap_or(positions),
            initializer_range: self.number("initializer_range")?.unwrap_or(0.02),
        };
        config.check().map_err(|e| {
            Failure::input("the configuration describes no model")
                .at(self.place(e.key))
                .expected(e.expected)
                .found(e.found)
        })?;
        Ok(config)
    }

    /// Family by `model_type` and `architectures`, which must agree where both are there.
    fn family(&self) -> Result<Family> {
        let known = [Family::Mistral, Family::Llama];
        let by_type = match self.text("model_type")? {
            None => None,
            Some(name) => match known.into_iter().find(|f| spelled(*f).0 == name) {
                Some(family) => Some(family),
                None => return Err(self.unsupported("model_type", "\"mistral\" or \"llama\"", format!("\"{name}\""))),
            },
        };
        let listed = match self.keys.get("architectures") {
            None | Some(Value::Null) => None,
            Some(Value::Array(list)) if list.is_empty() => None,
            Some(list) => Some(list),
        };
        let by_name = match listed {
            None => None,
            Some(list) => {
                let one = list.as_array().filter(|l| l.len() == 1).and_then(|l| l[0].as_str());
                match known.into_iter().find(|f| Some(spelled(*f).1) == one) {
                    Some(family) => Some(family),
                    None => {
                        let expected = "[\"MistralForCausalLM\"] or [\"LlamaForCausalLM\"]";
                        return Err(self.unsupported("architectures", expected, list));
                    }
                }
            }
        };
        match (by_type, by_name) {
            (Some(a), Some(b)) if a != b => {
                let expected = format!("[\"{}\"], as model_type \"{}\" says", spelled(a).1, spelled(a).0);
                Err(self.unsupported("architectures", expected, format!("[\"{}\"]", spelled(b).1)))
            }
            (Some(family), _) | (None, Some(family)) => Ok(family),
            (None, None) => Err(self.missing("model_type", "\"mistral\" or \"llama\"")),
        }
    }

    /// Keys that would make transformers compute something else than Umbra does.
    fn refuse_unknown_mathematics(&self) -> Result<()> {
        for key in ["attention_bias", "mlp_bias"] {
            if self.flag(key)? == Some(true) {
                return Err(self.unsupported(key, "false: Umbra has no bias in its linear layers", "true"));
            }
        }
        if let Some(act) = self.text("hidden_act")?.filter(|act| *act != "silu") {
            return Err(self.unsupported("hidden_act", "\"silu\"", format!("\"{act}\"")));
        }
        if let Some(p) = self.number("attention_dropout")?.filter(|p| *p != 0.0) {
            return Err(self.unsupported("attention_dropout", "0: Umbra has no dropout", p));
        }
        if let Some(found) = self.keys.get("quantization_config").filter(|v| !v.is_null()) {
            let method = found.get("quant_method").unwrap_or(found);
            return Err(self
                .unsupported("quantization_config", "absent: Umbra trains fp32, bf16 and fp16 weights", method)
                .hint("use the unquantized model this one was made from"));
        }
        if let Some(part) = self.number("partial_rotary_factor")?.filter(|part| *part != 1.0) {
            return Err(self.unsupported("partial_rotary_factor", "1: rotary embedding over the whole head", part));
        }
        Ok(())
    }

    fn head_dim(&self, hidden_size: usize, heads: usize) -> Result<usize> {
        if let Some(explicit) = self.count("head_dim")? {
            return Ok(explicit);
        }
        match hidden_size.checked_rem(heads) {
            Some(0) => Ok(hidden_size / heads),
            _ => Err(Failure::input("head_dim cannot be derived")
                .at(self.place("head_dim"))
                .expected(format!("head_dim, or a hidden_size ({hidden_size}) divisible by num_attention_heads"))
                .found(format!("num_attention_heads {heads} and no head_dim"))),
        }
    }

    /// The sliding window of every layer. `layer_types`, where present, must say the same of all of them.
    fn window(&self, family: Family) -> Result<Option<usize>> {
        let window = match (self.keys.get("sliding_window"), family) {
            (None, Family::Mistral) => Some(4096),
            _ => self.count("sliding_window")?,
        };
        if let (Family::Llama, Some(w)) = (family, window) {
            return Err(self.unsupported("sliding_window", "absent or null: Llama attends to every position", w));
        }
        let types = match self.keys.get("layer_types") {
            None | Some(Value::Null) => return Ok(window),
            Some(Value::Array(types)) => types,
            Some(other) => return Err(self.wrong_type("layer_types", "a list of strings", other)),
        };
        let expected = if window.is_some() { "sliding_attention" } else { "full_attention" };
        match types.iter().position(|t| t.as_str() != Some(expected)) {
            None => Ok(window),
            Some(layer) => {
                let place = format!("layer_types[{layer}]");
                let why = match window {
                    Some(w) => format!("\"{expected}\" in every layer, as sliding_window {w} says"),
                    None => format!("\"{expected}\" in every layer, as there is no sliding_window"),
                };
                Err(self.unsupported(&place, why, &types[layer]))
            }
        }
    }

    fn required(&self, key: &str) -> Result<usize> {
        self.count(key)?.ok_or_else(|| self.missing(key, "a whole number"))
    }

    /// A whole number; `None` when absent or null.
    fn count(&self, key: &str) -> Result<Option<usize>> {
        self.typed(key, "a whole number that is not negative", |v| v.as_u64().and_then(|n| usize::try_from(n).ok()))
    }

    fn number(&self, key: &str) -> Result<Option<f64>> {
        self.typed(key, "a number", Value::as_f64)
    }

    fn flag(&self, key: &str) -> Result<Option<bool>> {
        self.typed(key, "true or false", Value::as_bool)
    }

    fn text(&self, key: &str) -> Result<Option<&'a str>> {
        self.typed(key, "a string", Value::as_str)
    }

    fn typed<T>(&self, key: &str, expected: &str, read: impl Fn(&'a Value) -> Option<T>) -> Result<Option<T>> {
        match self.keys.get(key) {
            None | Some(Value::Null) => Ok(None),
            Some(value) => read(value).map(Some).ok_or_else(|| self.wrong_type(key, expected, value)),
        }
    }

    fn place(&self, key: &str) -> String {
        format!("{}, key {key}", self.path.display())
    }

    fn missing(&self, key: &str, expected: impl Display) -> Failure {
        Failure::input(format!("config.json lacks {key}")).at(self.place(key)).expected(expected).found("no such key")
    }

    fn wrong_type(&self, key: &str, expected: impl Display, found: &Value) -> Failure {
        Failure::input(format!("{key} has the wrong type"))
            .at(self.place(key))
            .expected(expected)
            .found(format!("{} {found}", kind(found)))
    }

    fn unsupported(&self, key: &str, expected: impl Display, found: impl Display) -> Failure {
        Failure::input(format!("Umbra does not train models with this {key}"))
            .at(self.place(key))
            .expected(expected)
            .found(found)
            .hint("Umbra trains MistralForCausalLM and LlamaForCausalLM without biases, in fp32, bf16 or fp16")
    }
}

/// What a JSON value is, in words.
pub(crate) fn kind(value: &Value) -> &'static str {
    match value {
        Value::Null => "null",
        Value::Bool(_) => "the boolean",
        Value::Number(_) => "the number",
        Value::String(_) => "the string",
        Value::Array(_) => "the list",
        Value::Object(_) => "the object",
    }
}
