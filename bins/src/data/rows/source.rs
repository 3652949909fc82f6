//! A data file as text: what kind it is, and its lines.

use crate::{Failure, Result};
use std::path::Path;

/// What a file holds.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(super) enum Kind {
    /// One JSON object a line.
    Lines,
    /// Running text.
    Text,
}

impl Kind {
    /// A place in a file of this kind: a line or a window, from 1.
    pub(super) fn place(self, path: &Path, position: usize) -> String {
        match self {
            Kind::Lines => format!("{}:{position}", path.display()),
            Kind::Text => format!("{}, window {position}", path.display()),
        }
    }
}

/// A whole file in memory.
pub(super) struct Source {
    content: String,
    pub(super) kind: Kind,
}

const BOM: char = '\u{feff}';

impl Source {
    pub(super) fn read(path: &Path) -> Result<Self> {
        let bytes = std::fs::read(path).map_err(|e| {
            Failure::input("a data file cannot be read")
                .at(path.display())
                .expected("JSON Lines or plain text")
                .found(if path.is_dir() { "a folder".to_owned() } else { e.to_string() })
                .hint("check the spelling of --data; relative names start from the current folder")
        })?;
        let content = String::from_utf8(bytes).map_err(|e| not_utf8(path, &e))?;
        if content.trim_start_matches(BOM).trim().is_empty() {
            return Err(empty(path));
        }
        let kind = kind(path, &content)?;
        Ok(Source { content, kind })
    }

    /// The content without a byte-order mark.
    pub(super) fn text(&self) -> &str {
        self.content.strip_prefix(BOM).unwrap_or(&self.content)
    }

    /// Lines that are not blank, with their numbers from 1. `\r\n` ends a line as `\n` does.
    pub(super) fn lines(&self) -> impl Iterator<Item = (usize, &str)> {
        self.text().lines().enumerate().map(|(i, line)| (i + 1, line)).filter(|(_, line)| !line.trim().is_empty())
    }
}

/// `.txt` is text. Anything else is JSON Lines if its first line that is not blank begins an object, and text if not;
/// but a file whose name says JSON and whose content does not is a mistake to report, not text to train on.
fn kind(path: &Path, content: &str) -> Result<Kind> {
    let ending = path.extension().map(|e| e.to_string_lossy().to_ascii_lowercase()).unwrap_or_default();
    if ending == "txt" {
        return Ok(Kind::Text);
    }
    let text = content.strip_prefix(BOM).unwrap_or(content);
    let named_json = ["json", "jsonl", "ndjson"].contains(&ending.as_str());
    let first = text.trim_start().chars().next();
    if named_json && first == Some('[') {
        return Err(Failure::input("the data file is a JSON list")
            .at(path.display())
            .expected("JSON Lines: one object a line")
            .found("a list of all rows")
            .hint(format!("convert it: jq -c '.[]' {} > rows.jsonl", path.display())));
    }
    Ok(if first == Some('{') || named_json { Kind::Lines } else { Kind::Text })
}

pub(super) fn empty(path: &Path) -> Failure {
    Failure::input("a data file is empty").at(path.display()).expected("at least one row").found("none")
}

fn not_utf8(path: &Path, error: &std::string::FromUtf8Error) -> Failure {
    let at = error.utf8_error().valid_up_to();
    let before = &error.as_bytes()[..at];
    let line = 1 + before.iter().filter(|b| **b == b'\n').count();
    let found =
        error.as_bytes().get(at).map_or_else(String::new, |b| format!("byte 0x{b:02x} at byte {at} of the file"));
    Failure::input("a data file is not UTF-8")
        .at(format!("{}:{line}", path.display()))
        .expected("UTF-8 text")
        .found(found)
        .hint("convert it: iconv -f LATIN1 -t UTF-8 (or the encoding it is in)")
}
