//! Mistral and Llama as an ordered list of units. Single-device code: it never sees a rank or a file.

pub mod config;

pub use config::{Config, ConfigError, Family, RopeScaling};
