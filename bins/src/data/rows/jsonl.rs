//! One line of JSON Lines.

use super::Limits;
use crate::data::tokenizer::LazyTokenizer;
use crate::{Failure, Result};
use serde::Deserialize;
use serde_json::Value;
use spmd_core::Batch;

/// Hugging Face's label for "no loss here".
const IGNORED: i64 = -100;

/// A row with every id and label inside the vocabulary.
#[derive(Debug)]
pub(super) struct Parsed {
    pub(super) ids: Vec<u32>,
    pub(super) labels: Option<Vec<u32>>,
}

/// The keys that mean something; others (an index, a source) are ignored.
#[derive(Deserialize)]
struct Line {
    input_ids: Option<Vec<i64>>,
    labels: Option<Vec<i64>>,
    attention_mask: Option<Vec<i64>>,
    text: Option<String>,
}

/// Reads one line; the caller adds the place.
pub(super) fn parse(line: &str, limits: Limits, tokenizer: &LazyTokenizer) -> Result<Parsed> {
    let row: Line = serde_json::from_str(line).map_err(|e| explain(line, &e))?;
    if let Some(found) = row.input_ids {
        let ids = check_ids(found.iter().copied(), limits)?;
        let labels = row.labels.map(|labels| check_labels(&labels, ids.len(), limits)).transpose()?;
        check_mask(row.attention_mask.as_deref(), ids.len())?;
        return Ok(Parsed { ids, labels });
    }
    let Some(text) = row.text else { return Err(no_content(line)) };
    if text.is_empty() {
        return Err(Failure::input("a row is empty").expected("text").found("\"text\": \"\""));
    }
    let ids = tokenizer.get()?.encode(&text)?;
    let ids = check_ids(ids.into_iter().map(i64::from), limits).map_err(|e| {
        e.hint("the tokenizer gives more ids than vocab_size in config.json: it belongs to another model")
    })?;
    Ok(Parsed { ids, labels: None })
}

/// Ids below the vocabulary size.
pub(super) fn check_ids(ids: impl Iterator<Item = i64>, limits: Limits) -> Result<Vec<u32>> {
    ids.enumerate()
        .map(|(i, id)| {
            in_vocabulary(id, limits).ok_or_else(|| {
                Failure::input("a token id is outside the vocabulary")
                    .expected(format!("0 to {} (vocab_size of config.json − 1)", limits.vocab_size.saturating_sub(1)))
                    .found(format!("{id} at position {i}"))
                    .hint("the rows were made with another tokenizer: use the model's own")
            })
        })
        .collect()
}

fn check_labels(labels: &[i64], ids: usize, limits: Limits) -> Result<Vec<u32>> {
    if labels.len() != ids {
        return Err(Failure::input("labels and input_ids differ in length")
            .expected(format!("{ids} labels, one for each of input_ids (not shifted)"))
            .found(format!("{} labels", labels.len())));
    }
    let label = |(i, label): (usize, &i64)| match *label {
        IGNORED => Ok(Batch::NO_TARGET),
        label => in_vocabulary(label, limits).ok_or_else(|| {
            Failure::input("a label is outside the vocabulary")
                .expected(format!("-100 (no loss), or 0 to {}", limits.vocab_size.saturating_sub(1)))
                .found(format!("{label} at position {i}"))
        }),
    };
    labels.iter().enumerate().map(label).collect()
}

fn in_vocabulary(id: i64, limits: Limits) -> Option<u32> {
    u32::try_from(id).ok().filter(|id| (*id as usize) < limits.vocab_size)
}

/// A mask that hides tokens would be training on padding if it were ignored.
fn check_mask(mask: Option<&[i64]>, ids: usize) -> Result<()> {
    let Some(mask) = mask else { return Ok(()) };
    if mask.len() == ids && mask.iter().all(|m| *m == 1) {
        return Ok(());
    }
    let hidden = mask.iter().filter(|m| **m != 1).count();
    Err(Failure::input("attention_mask hides tokens")
        .expected(format!("{ids} ones, or no attention_mask"))
        .found(format!("{} entries, {hidden} of them not 1", mask.len()))
        .hint("leave padding out of input_ids: Umbra pads by itself"))
}

fn no_content(line: &str) -> Failure {
    let keys = match serde_json::from_str(line) {
        Ok(Value::Object(map)) => map.keys().cloned().collect::<Vec<_>>(),
        _ => Vec::new(),
    };
    let keys = if keys.is_empty() { "no key".to_owned() } else { crate::hf::shortened(&keys) };
    Failure::input("a row has neither input_ids nor text")
        .expected("{\"input_ids\": [...], \"labels\": [...]} (labels optional), or {\"text\": \"...\"}")
        .found(keys)
        .hint("rename the key that holds the text to \"text\"")
}

/// Why a line could not be read: no JSON at all, or a value of the wrong type.
fn explain(line: &str, error: &serde_json::Error) -> Failure {
    let value: Value = match serde_json::from_str(line) {
        Ok(value) => value,
        Err(e) => {
            return Failure::input("a line is not JSON")
                .expected("one whole JSON object on one line")
                .found(format!("{e}: {}", around(line, e.column())))
                .hint("one row is one line: no line breaks inside an object, no list around all rows");
        }
    };
    let Value::Object(map) = &value else {
        return Failure::input("a line is not a JSON object")
            .expected("{\"input_ids\": [...]} or {\"text\": \"...\"}")
            .found(around(line, 1));
    };
    let whole = "a list of whole numbers";
    for (key, expected) in [("input_ids", whole), ("labels", whole), ("attention_mask", whole), ("text", "a string")] {
        let found = match map.get(key) {
            Some(Value::Array(list)) if expected == whole => {
                match list.iter().enumerate().find(|(_, v)| v.as_i64().is_none()) {
                    Some((i, wrong)) => format!("{} at position {i}", clipped(&wrong.to_string())),
                    None => continue,
                }
            }
            None | Some(Value::Null) => continue,
            Some(Value::String(_)) if key == "text" => continue,
            Some(other) => clipped(&other.to_string()),
        };
        return Failure::input(format!("{key} has the wrong type")).expected(expected).found(found);
    }
    // Types are right one by one: what is left is what serde itself says, a key that is there twice.
    Failure::input("a row cannot be read").expected("each key once").found(error)
}

/// The most characters of a line that a message shows.
const SHOWN: usize = 60;

fn clipped(text: &str) -> String {
    match text.char_indices().nth(SHOWN) {
        Some((end, _)) => format!("{}…", &text[..end]),
        None => text.to_owned(),
    }
}

/// The part of a line around byte column `column` (from 1).
fn around(line: &str, column: usize) -> String {
    let mut start = column.saturating_sub(SHOWN / 2).min(line.len());
    while !line.is_char_boundary(start) {
        start -= 1;
    }
    let dots = if start > 0 { "…" } else { "" };
    format!("`{dots}{}`", clipped(&line[start..]))
}
