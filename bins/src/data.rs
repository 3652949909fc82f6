//! Training data: text to tokens, files to rows, rows to the micro-batches of every lane.

pub mod batches;
pub mod rows;
pub mod tokenizer;

pub use batches::Sampler;
pub use rows::{Dataset, Limits, Row};
pub use tokenizer::{LazyTokenizer, TextStream, Tokenizer, byte_tokenizer_json};
