//! Hugging Face model folders: reading the configuration and the weights, and writing such a folder again.

pub mod config;
mod dump;
pub(crate) mod layout;
pub mod save;
pub mod weights;

pub use config::{eos_token_ids, parse_config, read_config, write_config};
pub use dump::dump_tensors;
pub use layout::FileDType;
pub use save::ModelWriter;
pub use weights::WeightFiles;

#[cfg(test)]
pub(crate) mod fixture;

/// The most entries of a list that a message shows; the rest is counted.
const SHOWN: usize = 8;

/// The first entries, comma-separated, and how many more there are.
pub(crate) fn shortened<T: AsRef<str>>(list: &[T]) -> String {
    let shown: Vec<&str> = list.iter().take(SHOWN).map(AsRef::as_ref).collect();
    match list.len().saturating_sub(SHOWN) {
        0 => shown.join(", "),
        more => format!("{} and {more} more", shown.join(", ")),
    }
}
