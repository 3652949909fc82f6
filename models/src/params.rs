//! The table of parameters: name, shape and kind of each, cut into units. Everything else iterates over it.

use crate::Config;
use spmd_core::{ParamKind, ParamSpec, Stage, UnitSpec};

/// Hugging Face's name of the embedding table, which a tied head uses too.
pub const EMBEDDING: &str = "model.embed_tokens.weight";
/// Hugging Face's name of an untied head's weight.
pub const HEAD: &str = "lm_head.weight";

/// The units in order: embedding, each block, head. Inside a block the matrices that share an input lie next to each
/// other (q, k, v; gate, up), so that one product serves all of them.
pub fn units(c: &Config) -> Vec<UnitSpec> {
    let matrix = |name: String, shape: [usize; 2]| ParamSpec { name, shape: shape.to_vec(), kind: ParamKind::Matrix };
    let gain = |name: String| ParamSpec { name, shape: vec![c.hidden_size], kind: ParamKind::Gain };
    let (d, f) = (c.hidden_size, c.intermediate_size);
    let (q, kv) = (c.heads * c.head_dim, c.kv_heads * c.head_dim);
    let mut units =
        vec![UnitSpec { name: "embed".to_owned(), params: vec![matrix(EMBEDDING.to_owned(), [c.vocab_size, d])] }];
    for i in 0..c.layers {
        let name = |part: &str| format!("model.layers.{i}.{part}.weight");
        units.push(UnitSpec {
            name: format!("block {i}"),
            params: vec![
                gain(name("input_layernorm")),
                matrix(name("self_attn.q_proj"), [q, d]),
                matrix(name("self_attn.k_proj"), [kv, d]),
                matrix(name("self_attn.v_proj"), [kv, d]),
                matrix(name("self_attn.o_proj"), [d, q]),
                gain(name("post_attention_layernorm")),
                matrix(name("mlp.gate_proj"), [f, d]),
                matrix(name("mlp.up_proj"), [f, d]),
                matrix(name("mlp.down_proj"), [d, f]),
            ],
        });
    }
    let mut head = vec![gain("model.norm.weight".to_owned())];
    if !c.tied {
        head.push(matrix(HEAD.to_owned(), [c.vocab_size, d]));
    }
    units.push(UnitSpec { name: "head".to_owned(), params: head });
    units
}

/// The stages in forward order. A tied head needs the embedding unit beside its own.
pub fn stages(c: &Config) -> Vec<Stage> {
    let head = c.layers + 1;
    let mut stages: Vec<Stage> = (0..head).map(|u| Stage { units: vec![u] }).collect();
    stages.push(Stage { units: if c.tied { vec![head, 0] } else { vec![head] } });
    stages
}

/// Parameters of the whole model; a tied weight counts once.
pub fn count(units: &[UnitSpec]) -> usize {
    units.iter().map(UnitSpec::len).sum()
}

/// Weights that take part in a matrix product of the forward pass (a tied head's table counts, an embedding look-up does
/// not): the `N` of the 6·N operations a token costs in training.
pub fn matmul_weights(c: &Config) -> usize {
    let (q, kv) = (c.heads * c.head_dim, c.kv_heads * c.head_dim);
    let block = c.hidden_size * (2 * q + 2 * kv + 3 * c.intermediate_size);
    c.layers * block + c.vocab_size * c.hidden_size
}

/// Query-key pairs one sequence of `len` tokens computes in one head: causal, inside the window.
pub fn attended_pairs(c: &Config, len: usize) -> u64 {
    let window = c.sliding_window.unwrap_or(len).min(len) as u64;
    let len = len as u64;
    window * (window + 1) / 2 + (len - window) * window
}
