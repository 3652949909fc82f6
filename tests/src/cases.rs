//! Models and rows that the tests make themselves.

use crate::tensors::Tensors;
use crate::{Row, folder, model, write_rows};
use safetensors::{Dtype, tensor::TensorView};
use serde_json::{Value, json};
use std::fs;
use std::path::{Path, PathBuf};
use tempfile::TempDir;

/// A model folder, removed when dropped.
#[derive(Debug)]
pub struct Model(TempDir);

impl Model {
    /// Its path.
    pub fn path(&self) -> &Path {
        self.0.path()
    }

    /// A fixture with its weights stored in fp32, one file, so that a run's output shows every bit of its weights.
    pub fn widened(name: &str) -> Self {
        let from = model(name);
        let mut tensors = Vec::new();
        let entries = fs::read_dir(&from).expect("a fixture").map(|entry| entry.expect("an entry").path());
        for path in entries.filter(|path| path.extension().is_some_and(|e| e == "safetensors")) {
            if path.file_name().is_some_and(|name| name == "reference.safetensors") {
                continue;
            }
            let bytes = fs::read(&path).expect("a file of weights");
            let values = Tensors::parse(&bytes);
            let file = safetensors::SafeTensors::deserialize(&bytes).expect("a safetensors file");
            for (name, view) in file.iter() {
                tensors.push((name.to_owned(), view.shape().to_vec(), values.get(name).to_vec()));
            }
        }
        let config = fs::read(from.join("config.json")).expect("a configuration");
        Model::write(serde_json::from_slice(&config).expect("JSON"), &tensors)
    }

    /// One layer, every unit within one block of 4,096 elements: embedding 1,040, layer 3,296, head 1,056.
    pub fn one_small_layer() -> Self {
        let (vocabulary, hidden, mlp, q, kv) = (65, 16, 36, 32, 16);
        let config = json!({
            "architectures": ["MistralForCausalLM"], "model_type": "mistral", "hidden_act": "silu",
            "vocab_size": vocabulary, "hidden_size": hidden, "intermediate_size": mlp, "num_hidden_layers": 1,
            "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 64,
            "rms_norm_eps": 1e-5, "rope_theta": 10000.0, "sliding_window": 5, "tie_word_embeddings": false,
            "torch_dtype": "float32",
        });
        let layer = |part: &str| format!("model.layers.0.{part}.weight");
        let shapes: Vec<(String, Vec<usize>)> = vec![
            ("model.embed_tokens.weight".to_owned(), vec![vocabulary, hidden]),
            (layer("input_layernorm"), vec![hidden]),
            (layer("self_attn.q_proj"), vec![q, hidden]),
            (layer("self_attn.k_proj"), vec![kv, hidden]),
            (layer("self_attn.v_proj"), vec![kv, hidden]),
            (layer("self_attn.o_proj"), vec![hidden, q]),
            (layer("post_attention_layernorm"), vec![hidden]),
            (layer("mlp.gate_proj"), vec![mlp, hidden]),
            (layer("mlp.up_proj"), vec![mlp, hidden]),
            (layer("mlp.down_proj"), vec![hidden, mlp]),
            ("model.norm.weight".to_owned(), vec![hidden]),
            ("lm_head.weight".to_owned(), vec![vocabulary, hidden]),
        ];
        let mut wave = Wave(7);
        let tensors = shapes.into_iter().map(|(name, shape)| {
            let n = shape.iter().product();
            // Gains around 1, matrices around 0.
            let centre = if shape.len() == 1 { 1.0 } else { 0.0 };
            let values = (0..n).map(|_| centre + (wave.below(2001) as f32 - 1000.0) / 4000.0).collect();
            (name, shape, values)
        });
        Model::write(config, &tensors.collect::<Vec<_>>())
    }

    fn write(mut config: Value, tensors: &[(String, Vec<usize>, Vec<f32>)]) -> Self {
        let dir = folder();
        for name in ["dtype", "torch_dtype"] {
            if config.get(name).is_some() {
                config[name] = json!("float32");
            }
        }
        fs::write(dir.path().join("config.json"), config.to_string()).expect("a configuration to be written");
        let bytes: Vec<Vec<u8>> =
            tensors.iter().map(|(.., values)| values.iter().flat_map(|x| x.to_le_bytes()).collect()).collect();
        let views = tensors.iter().zip(&bytes).map(|((name, shape, _), bytes)| {
            (name.as_str(), TensorView::new(Dtype::F32, shape.clone(), bytes).expect("values that fill their shape"))
        });
        let path = dir.path().join("model.safetensors");
        safetensors::serialize_to_file(views, None, &path).expect("weights to be written");
        Model(dir)
    }
}

/// A plain sequence of numbers that look random (a 64-bit linear congruential generator, Knuth's multiplier).
#[derive(Debug)]
pub struct Wave(pub u64);

impl Wave {
    /// The next number, below `n`.
    pub fn below(&mut self, n: u64) -> u64 {
        self.0 = self.0.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
        (self.0 >> 33) % n
    }
}

/// `n` rows of 1 to 41 tokens below 65, in no order of length: a prompt without loss, then targets with holes; among the
/// first are one of a single token and one without any target.
pub fn uneven_rows(n: usize) -> Vec<Row> {
    let mut wave = Wave(1);
    let row = |i: usize| {
        let len = if i == 2 { 1 } else { 2 + wave.below(40) as usize };
        let ids: Vec<u32> = (0..len).map(|_| wave.below(65) as u32).collect();
        let prompt = if i == 4 { len } else { 1 + wave.below(len as u64 / 2 + 1) as usize };
        let keep = |at: usize, id: u32, hole: bool| if at < prompt || hole { -100 } else { i64::from(id) };
        let labels = ids.iter().enumerate().map(|(at, id)| keep(at, *id, wave.below(7) == 0)).collect();
        (ids, labels)
    };
    (0..n).map(row).collect()
}

/// Ten records of a prompt and an answer, with answers of 1, 2, 3, 5, 8, 13, 21, 34, 55 and 89 tokens in mixed order. A mean
/// over each record's own tokens would weigh them all alike.
pub fn chat_rows() -> Vec<Row> {
    let mut wave = Wave(5);
    let row = |answer: usize| {
        let prompt = 3 + wave.below(20) as usize;
        let ids: Vec<u32> = (0..prompt + answer).map(|_| wave.below(65) as u32).collect();
        let labels = ids.iter().enumerate().map(|(at, id)| if at < prompt { -100 } else { i64::from(*id) }).collect();
        (ids, labels)
    };
    [89, 1, 34, 2, 21, 3, 55, 5, 13, 8].map(row).to_vec()
}

/// The targets of a row: labels that are not -100, the first position never.
pub fn targets((_, labels): &Row) -> u64 {
    labels.iter().skip(1).filter(|label| **label != -100).count() as u64
}

/// Rows in a file of their own.
#[derive(Debug)]
pub struct Data {
    dir: TempDir,
    /// What the file holds.
    pub rows: Vec<Row>,
}

impl Data {
    /// Writes `rows`.
    pub fn new(rows: Vec<Row>) -> Self {
        let dir = folder();
        write_rows(&dir.path().join("rows.jsonl"), &rows);
        Data { dir, rows }
    }

    /// The file.
    pub fn path(&self) -> PathBuf {
        self.dir.path().join("rows.jsonl")
    }
}
