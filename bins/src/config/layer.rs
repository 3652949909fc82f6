//! What a configuration file says, as flags; and a remark on everything in it that is no flag.

use super::node::Place;
use super::read::Dialect;
use super::section::Field;
use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;

/// Where a setting of a file comes from.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Source {
    /// The file and the spot of the key; of an implied setting the file alone.
    pub file: Arc<PathBuf>,
    /// The key's place.
    pub place: Option<Place>,
    /// Dotted key and value as written (`zero_optimization.stage: 3`), or why the file means this without writing it.
    pub says: String,
}

impl fmt::Display for Source {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.place {
            Some(place) => write!(f, "{place} ({})", self.says),
            None => write!(f, "{} ({})", self.file.display(), self.says),
        }
    }
}

/// One flag that a file stands for.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Setting {
    /// The long flag without its dashes.
    pub flag: String,
    /// Its values as they would be written on the command line.
    pub values: Vec<String>,
    /// Where it comes from.
    pub source: Source,
}

/// What becomes of a key that sets nothing.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub enum Saying {
    /// Honoured: it says what Umbra does anyway.
    Same,
    /// It has no effect here, for the reason given.
    NoEffect,
    /// Umbra does this differently, as said.
    Differs,
}

/// A sentence about a key.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Remark {
    /// Where it is written.
    pub source: Source,
    /// What becomes of it.
    pub saying: Saying,
    /// Why.
    pub why: String,
}

/// One file, read.
#[derive(Debug, Clone, PartialEq)]
pub struct Layer {
    /// The file.
    pub file: Arc<PathBuf>,
    /// Its format.
    pub dialect: Dialect,
    /// What it sets, in its order.
    pub settings: Vec<Setting>,
    /// What is to be said of the rest.
    pub remarks: Vec<Remark>,
}

impl Layer {
    pub(super) fn new(file: Arc<PathBuf>, dialect: Dialect) -> Self {
        Layer { file, dialect, settings: Vec::new(), remarks: Vec::new() }
    }

    /// Sets a flag because of a key.
    pub(super) fn set(&mut self, flag: &str, value: impl fmt::Display, field: &Field<'_>) {
        self.set_all(flag, vec![value.to_string()], field);
    }

    /// Sets a flag of several values because of a key.
    pub(super) fn set_all(&mut self, flag: &str, values: Vec<String>, field: &Field<'_>) {
        let source = self.source(field);
        self.settings.push(Setting { flag: flag.to_owned(), values, source });
    }

    /// Sets a flag because of what the file does not say: `why` is such as "DeepSpeed 0.19.6 without the key".
    pub(super) fn imply(&mut self, flag: &str, value: impl fmt::Display, why: impl fmt::Display) {
        let source = Source { file: self.file.clone(), place: None, says: why.to_string() };
        self.settings.push(Setting { flag: flag.to_owned(), values: vec![value.to_string()], source });
    }

    /// Says that a key asks for what is done anyway.
    pub(super) fn same(&mut self, field: &Field<'_>, why: impl fmt::Display) {
        self.remark(Saying::Same, field, why);
    }

    /// Says that a key has no effect, and why.
    pub(super) fn no_effect(&mut self, field: &Field<'_>, why: impl fmt::Display) {
        self.remark(Saying::NoEffect, field, why);
    }

    /// Says what Umbra does differently from the engine.
    pub(super) fn differs(&mut self, field: &Field<'_>, why: impl fmt::Display) {
        self.remark(Saying::Differs, field, why);
    }

    fn remark(&mut self, saying: Saying, field: &Field<'_>, why: impl fmt::Display) {
        let source = self.source(field);
        self.remarks.push(Remark { source, saying, why: why.to_string() });
    }

    fn source(&self, field: &Field<'_>) -> Source {
        // A whole section is not repeated in every message.
        let says = match field.node.entries() {
            Some(_) => format!("{}: {{...}}", field.path),
            None => format!("{}: {}", field.path, field.node),
        };
        Source { file: self.file.clone(), place: Some(field.place()), says }
    }
}
