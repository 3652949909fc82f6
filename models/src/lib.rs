//! Mistral and Llama as an ordered list of units. Single-device code: it never sees a rank or a file.
//!
//! Reading order: [`config`] (what a model is), [`params`] (its table of parameters), `block` (forward and backward of
//! one block), `head` (logits and loss by chunks), [`mistral`] (how the training step drives them).

pub mod acts;
mod block;
pub mod cache;
pub mod config;
mod head;
pub mod init;
pub mod mistral;
pub mod params;
pub mod rope;

pub use acts::activation_bytes;
pub use cache::KvCache;
pub use config::{Config, ConfigError, Family, RopeScaling};
pub use mistral::Mistral;
