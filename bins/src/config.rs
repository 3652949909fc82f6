//! Configuration files: DeepSpeed JSON, Accelerate YAML and Umbra's own TOML, each read as the flags it means.
//!
//! Data flows one way: text becomes a tree of values that know their places ([`node`]); a dialect turns the tree into a
//! [`Layer`], the flags it stands for, with a remark on everything else; layers and the command line become one plan.

mod accelerate;
mod assume;
mod command;
mod convert;
mod deepspeed;
mod hjson;
mod layer;
mod meaning;
mod merge;
pub mod node;
mod own;
mod prove;
mod read;
mod section;
mod yaml;

pub use assume::{Assume, Version};
pub use command::run;
pub use layer::{Layer, Remark, Saying, Setting, Source};
pub use merge::{Files, merge};
pub use read::{Dialect, Document, Facts};
