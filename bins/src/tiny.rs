//! The embedded model and text: enough to see a run learn without downloading anything.

use models::{Config, Family, RopeScaling};

/// Plays of Shakespeare (public domain), the beginning of a common collection.
pub const TEXT: &str = include_str!("../assets/shakespeare.txt");

/// What messages call [`TEXT`].
pub const TEXT_NAME: &str = "the embedded text (Shakespeare)";

/// A Mistral of 0.8 million parameters over bytes.
pub fn config() -> Config {
    Config {
        family: Family::Mistral,
        vocab_size: 256,
        hidden_size: 128,
        intermediate_size: 352,
        layers: 4,
        heads: 8,
        kv_heads: 2,
        head_dim: 16,
        rms_norm_eps: 1e-5,
        rope_theta: 10_000.0,
        rope_scaling: RopeScaling::Default,
        sliding_window: Some(128),
        tied: false,
        max_positions: 1024,
        initializer_range: 0.02,
    }
}

/// The 32M model of the benchmarks: vocabulary 8192, hidden 512, 8 layers, 8 heads over 4 of 64, MLP 1408, untied.
pub fn bench_config() -> Config {
    Config {
        vocab_size: 8192,
        hidden_size: 512,
        intermediate_size: 1408,
        layers: 8,
        heads: 8,
        kv_heads: 4,
        head_dim: 64,
        sliding_window: None,
        max_positions: 2048,
        ..config()
    }
}
