//! Reading a map of a configuration file key by key: what is not asked for is unknown, and each value says what it should
//! have been.

use super::hjson::is_number;
use super::node::{Entry, Node, Place, Spot, Value};
use crate::nearest::nearest;
use crate::{Failure, Result};
use std::collections::HashMap;
use std::path::PathBuf;
use std::sync::Arc;

/// A map that is being read. Every key it may have is asked for once; [`Section::finish`] refuses the others.
#[derive(Debug)]
pub(super) struct Section<'a> {
    file: Arc<PathBuf>,
    /// Dotted path of the map in the file, empty for the whole.
    path: String,
    entries: &'a [Entry],
    taken: Vec<bool>,
    known: Vec<&'static str>,
}

/// One named value of a map.
#[derive(Debug, Clone)]
pub(super) struct Field<'a> {
    file: Arc<PathBuf>,
    /// Dotted path in the file: `zero_optimization.stage`.
    pub(super) path: String,
    /// Where the name is.
    pub(super) spot: Spot,
    /// The value.
    pub(super) node: &'a Node,
}

impl<'a> Section<'a> {
    /// The map `node` of `file`.
    ///
    /// # Errors
    /// It is not a map, or a name is there twice: both places are shown.
    pub(super) fn new(file: &Arc<PathBuf>, path: &str, node: &'a Node) -> Result<Self> {
        let place = |spot| Place { file: file.clone(), spot };
        let Some(entries) = node.entries() else {
            let what = if path.is_empty() { "the file" } else { path };
            return Err(Failure::usage(format!("{what} is not a table of names and values"))
                .at(place(node.spot))
                .expected("names and values")
                .found(node));
        };
        let mut seen: HashMap<&str, &Entry> = HashMap::new();
        for entry in entries {
            if let Some(first) = seen.insert(&entry.key, entry) {
                return Err(Failure::usage(format!("{} is written twice", dotted(path, &entry.key)))
                    .at(place(entry.spot))
                    .expected(format!("one value; the first is at {}: {}", place(first.spot), first.node))
                    .found(&entry.node)
                    .hint("remove one of the two"));
            }
        }
        let taken = vec![false; entries.len()];
        Ok(Section { file: file.clone(), path: path.to_owned(), entries, taken, known: Vec::new() })
    }

    /// The value of `key`, if it is written. A key asked for is known from now on.
    pub(super) fn take(&mut self, key: &'static str) -> Option<Field<'a>> {
        self.known.push(key);
        let index = self.entries.iter().position(|e| e.key == key)?;
        self.taken[index] = true;
        let entry = &self.entries[index];
        let path = dotted(&self.path, key);
        Some(Field { file: self.file.clone(), path, spot: entry.spot, node: &entry.node })
    }

    /// The first of `keys` that is written, where they are spellings of one.
    ///
    /// # Errors
    /// Two of them are written, with different values.
    pub(super) fn take_one(&mut self, keys: &[&'static str]) -> Result<Option<Field<'a>>> {
        let mut found: Option<Field<'a>> = None;
        for field in keys.iter().filter_map(|key| self.take(key)).collect::<Vec<_>>() {
            match &found {
                Some(first) if first.node.value != field.node.value => return Err(contradiction(first, &field)),
                Some(_) => {}
                None => found = Some(field),
            }
        }
        Ok(found)
    }

    /// Every key that has not been asked for.
    pub(super) fn rest(&mut self) -> Vec<Field<'a>> {
        let mut rest = Vec::new();
        for (entry, taken) in self.entries.iter().zip(&mut self.taken) {
            if !std::mem::replace(taken, true) {
                let path = dotted(&self.path, &entry.key);
                rest.push(Field { file: self.file.clone(), path, spot: entry.spot, node: &entry.node });
            }
        }
        rest
    }

    /// Refuses what has not been asked for.
    ///
    /// # Errors
    /// Exit 2: the first unknown key, with the nearest one that is known.
    pub(super) fn finish(self) -> Result<()> {
        let Some(index) = self.taken.iter().position(|taken| !taken) else { return Ok(()) };
        let entry = &self.entries[index];
        let place = Place { file: self.file.clone(), spot: entry.spot };
        let within = if self.path.is_empty() { String::new() } else { format!(" in {}", self.path) };
        let failure = Failure::usage(format!("there is no key {:?}{within}", entry.key)).at(place).found(&entry.key);
        Err(match nearest(&entry.key, self.known.iter().copied()) {
            Some(known) => failure.expected(format!("perhaps {known:?}")).hint(format!("did you mean {known:?}?")),
            None => failure
                .expected("a key of this format")
                .hint("remove it if nothing depends on it; nothing is ignored in silence"),
        })
    }
}

fn dotted(path: &str, key: &str) -> String {
    if path.is_empty() { key.to_owned() } else { format!("{path}.{key}") }
}

/// Two places that set one thing to different values.
pub(super) fn contradiction(first: &Field<'_>, second: &Field<'_>) -> Failure {
    Failure::usage(format!("{} contradicts {}", second.path, first.path))
        .at(second.place())
        .expected(format!("{} as at {}", first.node, first.place()))
        .found(second.node)
        .hint("remove one of the two")
}

impl<'a> Field<'a> {
    /// Where it is.
    pub(super) fn place(&self) -> Place {
        Place { file: self.file.clone(), spot: self.spot }
    }

    fn wrong(&self, expected: &str) -> Failure {
        let place = Place { file: self.file.clone(), spot: self.node.spot };
        Failure::usage(format!("{} cannot be {}", self.path, self.node)).at(place).expected(expected).found(self.node)
    }

    /// A value that means nothing here.
    pub(super) fn bad(&self, expected: &str) -> Failure {
        self.wrong(expected)
    }

    /// What Umbra cannot or will not do, with what to write instead.
    pub(super) fn refused(&self, why: &str, instead: &str) -> Failure {
        Failure::usage(format!("{} {} is not supported: {why}", self.path, self.node)).at(self.place()).hint(instead)
    }

    /// Whether `null`, or nothing, is written.
    pub(super) fn is_null(&self) -> bool {
        self.node.value == Value::Null
    }

    /// Whether `"auto"` is written.
    pub(super) fn is_auto(&self) -> bool {
        matches!(&self.node.value, Value::Text(t) if t == "auto")
    }

    /// Its map.
    ///
    /// # Errors
    /// Exit 2 if it is none.
    pub(super) fn section(&self) -> Result<Section<'a>> {
        Section::new(&self.file, &self.path, self.node)
    }

    /// Text, or what is written as it is written: a number and a truth value are their own spelling.
    ///
    /// # Errors
    /// Exit 2 for lists and maps.
    pub(super) fn text(&self) -> Result<String> {
        match &self.node.value {
            Value::Text(text) | Value::Number(text) => Ok(text.clone()),
            Value::Bool(b) => Ok(b.to_string()),
            Value::Null | Value::List(_) | Value::Map(_) => Err(self.wrong("text")),
        }
    }

    /// One of `words`, whatever its case; its spelling in `words` is returned.
    ///
    /// # Errors
    /// Exit 2 listing them.
    pub(super) fn choice(&self, words: &[&'static str]) -> Result<&'static str> {
        let text = self.text()?;
        let found = words.iter().find(|word| word.eq_ignore_ascii_case(&text));
        found.copied().ok_or_else(|| {
            let failure = self.wrong(&format!("one of {}", words.join(", ")));
            match nearest(&text, words.iter().copied()) {
                Some(word) => failure.hint(format!("did you mean {word:?}?")),
                None => failure,
            }
        })
    }

    /// A truth value: the grammar's own, or one of the words that Accelerate and YAML take for it.
    ///
    /// # Errors
    /// Exit 2 for anything else.
    pub(super) fn bool(&self) -> Result<bool> {
        let word = match &self.node.value {
            Value::Bool(b) => return Ok(*b),
            Value::Text(t) | Value::Number(t) => t.to_lowercase(),
            Value::Null | Value::List(_) | Value::Map(_) => return Err(self.wrong("true or false")),
        };
        match word.as_str() {
            "true" | "yes" | "on" | "y" | "t" | "1" => Ok(true),
            "false" | "no" | "off" | "n" | "f" | "0" => Ok(false),
            _ => Err(self.wrong("true or false")),
        }
    }

    /// A finite number; text that is one counts, because YAML 1.1 reads `1e-5` as text.
    ///
    /// # Errors
    /// Exit 2 for anything else.
    pub(super) fn number(&self) -> Result<f64> {
        match &self.node.value {
            Value::Number(text) | Value::Text(text) if is_number(text) => {
                text.parse().map_err(|_| self.wrong("a number"))
            }
            _ => Err(self.wrong("a number")),
        }
    }

    /// A whole number from 0, in any spelling: `500000000`, `5e8`, `8.0`.
    ///
    /// # Errors
    /// Exit 2 for anything else, fractions among it.
    pub(super) fn count(&self) -> Result<u64> {
        let expected = "a whole number that is 0 or more";
        let Ok(number) = self.number() else { return Err(self.wrong(expected)) };
        if let Value::Number(text) | Value::Text(text) = &self.node.value
            && let Ok(exact) = text.parse()
        {
            return Ok(exact);
        }
        // 2^53: every whole number below has one f64.
        let whole = number.fract() == 0.0 && (0.0..9_007_199_254_740_992.0).contains(&number);
        if whole { Ok(number as u64) } else { Err(self.wrong(expected)) }
    }

    /// A whole number from 1.
    ///
    /// # Errors
    /// Exit 2 for anything else.
    pub(super) fn positive(&self) -> Result<u64> {
        match self.count() {
            Ok(n) if n > 0 => Ok(n),
            _ => Err(self.wrong("a whole number that is 1 or more")),
        }
    }

    /// The items of a list.
    ///
    /// # Errors
    /// Exit 2 if it is none.
    pub(super) fn list(&self) -> Result<&'a [Node]> {
        match &self.node.value {
            Value::List(items) => Ok(items),
            _ => Err(self.wrong("a list")),
        }
    }
}
