//! What a model is, without a dtype, a path or a rank in it.

/// A model family that Umbra trains. Both are the same block.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub enum Family {
    /// MistralForCausalLM.
    Mistral,
    /// LlamaForCausalLM.
    Llama,
}

/// How rotary frequencies are stretched. Source: transformers' modeling_rope_utils.
#[derive(Debug, Clone, Copy, PartialEq)]
pub enum RopeScaling {
    /// θ^(−2j/d) as it is.
    Default,
    /// Every frequency divided by `factor`.
    Linear {
        /// Divisor.
        factor: f64,
    },
    /// Long wavelengths divided by `factor`, short ones kept, a smooth ramp between.
    Llama3 {
        /// Divisor of long wavelengths.
        factor: f64,
        /// Wavelengths above original / this are long.
        low_freq_factor: f64,
        /// Wavelengths below original / this are short.
        high_freq_factor: f64,
        /// The context the model was first trained with.
        original_max_position_embeddings: f64,
    },
}

/// The architecture of one model, every value explicit (nothing left to derive).
#[derive(Debug, Clone, PartialEq)]
pub struct Config {
    /// Family.
    pub family: Family,
    /// `V`.
    pub vocab_size: usize,
    /// `D`.
    pub hidden_size: usize,
    /// `F`.
    pub intermediate_size: usize,
    /// Number of blocks.
    pub layers: usize,
    /// `H`.
    pub heads: usize,
    /// `K`.
    pub kv_heads: usize,
    /// `d`; need not be `D/H`.
    pub head_dim: usize,
    /// Added to the mean square of a norm.
    pub rms_norm_eps: f64,
    /// θ.
    pub rope_theta: f64,
    /// Scaling of the frequencies.
    pub rope_scaling: RopeScaling,
    /// Query i sees keys j with i − w < j ≤ i.
    pub sliding_window: Option<usize>,
    /// The head's weight is the embedding table.
    pub tied: bool,
    /// The longest sequence the model was made for.
    pub max_positions: usize,
    /// Standard deviation of freshly drawn matrices.
    pub initializer_range: f64,
}

/// A configuration that describes no model Umbra can run.
#[derive(Debug, Clone, PartialEq, Eq, thiserror::Error)]
#[error("{key} is {found}, expected {expected}")]
pub struct ConfigError {
    /// The key as config.json spells it.
    pub key: &'static str,
    /// What it should be.
    pub expected: String,
    /// What it is.
    pub found: String,
}

/// More blocks than any model has: a larger number is a slip, and would only list units until memory is full.
const MAX_LAYERS: usize = 4096;

impl Config {
    /// Refuses geometry that cannot work.
    ///
    /// # Errors
    /// The first key at fault.
    pub fn check(&self) -> Result<(), ConfigError> {
        let positive = [
            ("vocab_size", self.vocab_size),
            ("hidden_size", self.hidden_size),
            ("intermediate_size", self.intermediate_size),
            ("num_hidden_layers", self.layers),
            ("num_attention_heads", self.heads),
            ("num_key_value_heads", self.kv_heads),
            ("head_dim", self.head_dim),
            ("max_position_embeddings", self.max_positions),
            ("sliding_window", self.sliding_window.unwrap_or(1)),
        ];
        for (key, value) in positive {
            if value == 0 {
                return Err(ConfigError { key, expected: "at least 1".to_owned(), found: "0".to_owned() });
            }
        }
        if self.layers > MAX_LAYERS {
            let expected = format!("at most {MAX_LAYERS}");
            return Err(ConfigError { key: "num_hidden_layers", expected, found: self.layers.to_string() });
        }
        if !self.heads.is_multiple_of(self.kv_heads) {
            let expected = format!("a divisor of num_attention_heads ({})", self.heads);
            return Err(ConfigError { key: "num_key_value_heads", expected, found: self.kv_heads.to_string() });
        }
        if !self.head_dim.is_multiple_of(2) {
            let expected = "an even number (rotary pairs)".to_owned();
            return Err(ConfigError { key: "head_dim", expected, found: self.head_dim.to_string() });
        }
        let finite = [("rms_norm_eps", self.rms_norm_eps), ("rope_theta", self.rope_theta)];
        for (key, value) in finite {
            if !(value.is_finite() && value > 0.0) {
                let expected = "a positive number".to_owned();
                return Err(ConfigError { key, expected, found: value.to_string() });
            }
        }
        Ok(())
    }

    /// Elements of a `qkv` row.
    pub fn qkv_len(&self) -> usize {
        (self.heads + 2 * self.kv_heads) * self.head_dim
    }
}
