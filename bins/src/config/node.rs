//! Values of a configuration file that know where they were written.

use std::fmt;
use std::path::PathBuf;
use std::sync::Arc;

/// A line and a column, both from 1, columns in characters.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Spot {
    /// Line.
    pub line: usize,
    /// Column.
    pub column: usize,
}

/// A spot in a file: shown as `file:line:column`.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Place {
    /// The file.
    pub file: Arc<PathBuf>,
    /// Where in it.
    pub spot: Spot,
}

impl fmt::Display for Place {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}:{}:{}", self.file.display(), self.spot.line, self.spot.column)
    }
}

/// What is written at one spot.
#[derive(Debug, Clone, PartialEq)]
pub enum Value {
    /// `null`, or nothing.
    Null,
    /// `true` or `false` of the file's own grammar; words such as `yes` are text.
    Bool(bool),
    /// A number, as it was written.
    Number(String),
    /// Text.
    Text(String),
    /// A list.
    List(Vec<Node>),
    /// Named values in their order. Names may repeat here; whoever reads them refuses that.
    Map(Vec<Entry>),
}

/// A value and its spot.
#[derive(Debug, Clone, PartialEq)]
pub struct Node {
    /// The value.
    pub value: Value,
    /// Its first character.
    pub spot: Spot,
}

/// A named value.
#[derive(Debug, Clone, PartialEq)]
pub struct Entry {
    /// The name.
    pub key: String,
    /// The name's first character.
    pub spot: Spot,
    /// The value.
    pub node: Node,
}

/// Why a text is not of its grammar.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Malformed {
    /// Where reading stopped.
    pub spot: Spot,
    /// What would have been right there.
    pub expected: String,
    /// What is there.
    pub found: String,
}

impl Node {
    /// The entries, if it is a map.
    pub fn entries(&self) -> Option<&[Entry]> {
        match &self.value {
            Value::Map(entries) => Some(entries),
            _ => None,
        }
    }
}

impl fmt::Display for Node {
    /// On one line, as it would be written in JSON.
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match &self.value {
            Value::Null => f.write_str("null"),
            Value::Bool(b) => write!(f, "{b}"),
            Value::Number(n) => f.write_str(n),
            Value::Text(t) => write!(f, "{t:?}"),
            Value::List(items) => {
                f.write_str("[")?;
                for (i, item) in items.iter().enumerate() {
                    write!(f, "{}{item}", if i == 0 { "" } else { ", " })?;
                }
                f.write_str("]")
            }
            Value::Map(entries) => {
                f.write_str("{")?;
                for (i, e) in entries.iter().enumerate() {
                    write!(f, "{}{:?}: {}", if i == 0 { "" } else { ", " }, e.key, e.node)?;
                }
                f.write_str("}")
            }
        }
    }
}
