//! From a path to a [`Layer`]: the dialect is told by what is in the file.

use super::assume::{Assume, LoadDType};
use super::node::{Malformed, Node, Place};
use super::{Layer, accelerate, deepspeed, hjson, own, yaml};
use crate::{Failure, Result};
use std::fmt;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The format of a configuration file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Dialect {
    /// DeepSpeed's JSON.
    DeepSpeed,
    /// Accelerate's YAML.
    Accelerate,
    /// Umbra's TOML: the names of the flags.
    Umbra,
}

impl fmt::Display for Dialect {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Dialect::DeepSpeed => "DeepSpeed JSON",
            Dialect::Accelerate => "Accelerate YAML",
            Dialect::Umbra => "Umbra TOML",
        })
    }
}

/// What a file's meaning depends on beside the file.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Facts {
    /// Canonical ranks: `--lanes`, or the world.
    pub lanes: usize,
    /// Whether `--lanes` was written, so that a file's number of processes gives way to it.
    pub lanes_written: bool,
    /// Whether the command line says how many rows a step has: then a file need not, and need not agree with itself.
    pub batch_written: bool,
    /// The program it was written for.
    pub assume: Assume,
    /// The dtype in which weights are loaded: as assumed, or as config.json says.
    pub load: LoadDType,
}

/// A configuration file, read as far as its grammar goes.
#[derive(Debug)]
pub struct Document {
    file: Arc<PathBuf>,
    /// Its format.
    pub dialect: Dialect,
    node: Node,
}

impl Document {
    /// Reads the text of a file.
    ///
    /// # Errors
    /// Exit 2: a file that cannot be read, is of no known dialect, or is malformed.
    pub fn open(path: &Path) -> Result<Self> {
        let file = Arc::new(path.to_owned());
        let text = text_of(path)?;
        let (dialect, node) = tree(&file, &text)?;
        Ok(Document { file, dialect, node })
    }

    /// What it means. Umbra's own files need no `facts`; of the others nothing is read without.
    ///
    /// # Errors
    /// Exit 2: what cannot be honoured.
    pub fn layer(&self, facts: Option<&Facts>) -> Result<Layer> {
        match (self.dialect, facts) {
            (Dialect::Umbra, _) => own::layer(&self.file, &self.node),
            (Dialect::DeepSpeed, Some(facts)) => deepspeed::layer(&self.file, &self.node, facts),
            (Dialect::Accelerate, Some(facts)) => accelerate::layer(&self.file, &self.node, facts),
            (_, None) => Ok(Layer::new(self.file.clone(), self.dialect)),
        }
    }
}

/// Longer files are no configuration.
const MAX_BYTES: u64 = 1 << 20;

fn text_of(path: &Path) -> Result<String> {
    let failure = |found: String| {
        Failure::usage("a configuration file cannot be read")
            .at(path.display())
            .expected("DeepSpeed JSON, Accelerate YAML or Umbra TOML")
            .found(found)
    };
    let cannot = |e: std::io::Error| failure(e.to_string()).hint("check the path given to --config");
    let facts = std::fs::metadata(path).map_err(cannot)?;
    if !facts.is_file() {
        return Err(failure("no file, but a folder or a device".to_owned()).hint("check the path given to --config"));
    }
    if facts.len() > MAX_BYTES {
        let found = format!("{} bytes", facts.len());
        return Err(failure(found).expected(format!("at most {MAX_BYTES} bytes: configuration is short")));
    }
    String::from_utf8(std::fs::read(path).map_err(cannot)?).map_err(|e| {
        let before = &e.as_bytes()[..e.utf8_error().valid_up_to()];
        let line = before.iter().filter(|b| **b == b'\n').count() + 1;
        let column = String::from_utf8_lossy(before).lines().last().map_or(0, |line| line.chars().count()) + 1;
        Failure::usage("a configuration file is not UTF-8")
            .at(format!("{}:{line}:{column}", path.display()))
            .expected("text in UTF-8")
            .found("other bytes")
            .hint("save it as UTF-8")
    })
}

/// The tree of a text and its dialect. The first of what is not white space or a comment decides between JSON and the
/// other two; of those, TOML has `name = value`.
fn tree(file: &Arc<PathBuf>, text: &str) -> Result<(Dialect, Node)> {
    let parsed = |dialect, parsed: Result<Node, Malformed>| match parsed {
        Ok(node) => Ok((dialect, node)),
        Err(wrong) => Err(malformed(file, dialect, wrong)),
    };
    match told(text) {
        Some(Dialect::DeepSpeed) => parsed(Dialect::DeepSpeed, hjson::parse(text)),
        Some(Dialect::Umbra) => parsed(Dialect::Umbra, own::parse(text)),
        Some(Dialect::Accelerate) => parsed(Dialect::Accelerate, yaml::parse(text)),
        None => Err(Failure::usage("a configuration file is empty")
            .at(file.display())
            .expected("DeepSpeed JSON, Accelerate YAML or Umbra TOML")
            .found("nothing but white space and comments")),
    }
}

/// The dialect of a text; none if it holds nothing.
fn told(text: &str) -> Option<Dialect> {
    let text = text.trim_start_matches('\u{feff}');
    let comment = |line: &&str| line.is_empty() || line.starts_with('#') || line.starts_with("//");
    let first = text.lines().map(str::trim).find(|line| !comment(line))?;
    if first.starts_with('{') || first.starts_with("/*") {
        return Some(Dialect::DeepSpeed);
    }
    let name_end = first.find(|c: char| !(c.is_alphanumeric() || "_-.\"' ".contains(c)));
    let toml = first.starts_with('[') || name_end.is_some_and(|at| first[at..].starts_with('='));
    Some(if toml { Dialect::Umbra } else { Dialect::Accelerate })
}

fn malformed(file: &Arc<PathBuf>, dialect: Dialect, wrong: Malformed) -> Failure {
    Failure::usage(format!("the file is not well-formed {dialect}"))
        .at(Place { file: file.clone(), spot: wrong.spot })
        .expected(wrong.expected)
        .found(wrong.found)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn dialects_are_told_by_content() {
        for (text, dialect) in [
            ("{\"bf16\": {}}", Dialect::DeepSpeed),
            ("// about\n# it\n{", Dialect::DeepSpeed),
            ("/* about */ {", Dialect::DeepSpeed),
            ("compute_environment: LOCAL_MACHINE\n", Dialect::Accelerate),
            ("---\nfsdp_config: {}\n", Dialect::Accelerate),
            ("# about\nlr = 1e-5\n", Dialect::Umbra),
            ("lr=1", Dialect::Umbra),
            ("[schedule]\n", Dialect::Umbra),
        ] {
            assert_eq!(told(text), Some(dialect), "{text}");
        }
        assert_eq!(told(" \n# nothing\n"), None);
    }
}
