//! Rows of tokens from files: JSON Lines of `input_ids` (and `labels`) or of `text`, and plain text cut into windows.
//! Which of them a file is, its content says; files of different kinds may be mixed.

mod jsonl;
mod source;
#[cfg(test)]
mod tests;

use super::tokenizer::{LazyTokenizer, Tokenizer};
use crate::{Failure, Result};
use source::{Kind, Source};
use spmd_core::Batch;
use std::path::{Path, PathBuf};

/// What a row may be.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Limits {
    /// The most tokens of a row (`--seq-len`).
    pub seq_len: usize,
    /// Token ids lie below this.
    pub vocab_size: usize,
    /// Cut a row that is too long instead of refusing it (`--truncate`).
    pub truncate: bool,
}

/// One row.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Row<'a> {
    /// Token ids.
    pub ids: &'a [u32],
    /// The label at each position, not shifted, [`Batch::NO_TARGET`] where there is no loss. Without labels: the ids.
    pub labels: &'a [u32],
}

impl Row<'_> {
    /// Positions with a target: label t is predicted at position t − 1, so the label at position 0 never counts.
    pub fn supervised(&self) -> usize {
        self.labels.iter().skip(1).filter(|label| **label != Batch::NO_TARGET).count()
    }
}

/// Where a row lies in the store and where it came from.
#[derive(Debug, Clone, Copy)]
struct Entry {
    start: usize,
    /// Start in `labels`; `None`: the ids are the labels.
    labels: Option<usize>,
    len: u32,
    supervised: u32,
    file: u32,
    /// Line (from 1), or for plain text the window (from 1).
    position: u32,
}

/// All rows of a run, in the order of the files.
#[derive(Debug, Clone, Default)]
pub struct Dataset {
    ids: Vec<u32>,
    labels: Vec<u32>,
    rows: Vec<Entry>,
    cut: usize,
    files: Vec<(PathBuf, Kind)>,
}

impl Dataset {
    /// Reads `files`. The tokenizer is loaded only if one of them holds text.
    ///
    /// # Errors
    /// Exit 3, naming file and line: what cannot be read, is not UTF-8 or not JSON, has neither `input_ids` nor `text` or
    /// values of the wrong type, a token id or label outside the vocabulary, a row that is empty or longer than
    /// `limits.seq_len`, an empty file, or no target in any row.
    pub fn load(files: &[PathBuf], limits: Limits, tokenizer: &LazyTokenizer) -> Result<Self> {
        let mut out = Dataset::default();
        for path in files {
            out.add_file(path, limits, tokenizer)?;
        }
        out.check_targets()?;
        Ok(out)
    }

    /// The rows of one text, as a plain-text file named `name` would give them.
    ///
    /// # Errors
    /// As [`Dataset::load`].
    pub fn from_text(name: &str, text: &str, limits: Limits, tokenizer: &LazyTokenizer) -> Result<Self> {
        let mut out = Dataset::default();
        out.files.push((PathBuf::from(name), Kind::Text));
        out.add_windows(Path::new(name), text, limits, tokenizer.get()?)?;
        out.check_targets()?;
        Ok(out)
    }

    /// Number of rows.
    pub fn len(&self) -> usize {
        self.rows.len()
    }

    /// Whether there is no row.
    pub fn is_empty(&self) -> bool {
        self.rows.is_empty()
    }

    /// Row `i`.
    pub fn row(&self, i: usize) -> Row<'_> {
        let entry = &self.rows[i];
        let len = entry.len as usize;
        let ids = &self.ids[entry.start..entry.start + len];
        let labels = entry.labels.map_or(ids, |start| &self.labels[start..start + len]);
        Row { ids, labels }
    }

    /// Targets of row `i`, counted when it was read.
    pub fn supervised(&self, i: usize) -> usize {
        self.rows[i].supervised as usize
    }

    /// Where row `i` came from: `data.jsonl:17`, or `book.txt, window 4`.
    pub fn place(&self, i: usize) -> String {
        let entry = &self.rows[i];
        let (path, kind) = &self.files[entry.file as usize];
        kind.place(path, entry.position as usize)
    }

    /// Tokens of all rows.
    pub fn tokens(&self) -> usize {
        self.ids.len()
    }

    /// Tokens of the longest row.
    pub fn longest(&self) -> usize {
        self.rows.iter().map(|row| row.len as usize).max().unwrap_or(0)
    }

    /// A hash of every token and label (FNV-1a over their 32 bits): equal rows, equal hash.
    pub fn hash(&self) -> u64 {
        let add = |h: u64, word: &u32| (h ^ u64::from(*word)).wrapping_mul(0x0000_0100_0000_01b3);
        self.ids.iter().chain(&self.labels).fold(0xcbf2_9ce4_8422_2325, add)
    }

    /// Rows that were cut to the limit.
    pub fn cut(&self) -> usize {
        self.cut
    }

    /// Rows in which nothing is to be predicted.
    pub fn without_target(&self) -> usize {
        self.rows.iter().filter(|row| row.supervised == 0).count()
    }

    fn add_file(&mut self, path: &Path, limits: Limits, tokenizer: &LazyTokenizer) -> Result<()> {
        let source = Source::read(path)?;
        let before = self.rows.len();
        self.files.push((path.to_owned(), source.kind));
        match source.kind {
            Kind::Text => self.add_windows(path, source.text(), limits, tokenizer.get()?)?,
            Kind::Lines => {
                for (number, line) in source.lines() {
                    let place = || Kind::Lines.place(path, number);
                    let row = jsonl::parse(line, limits, tokenizer).map_err(|e| e.at(place()))?;
                    self.push(row.ids, row.labels, number, limits).map_err(|e| e.at(place()))?;
                }
            }
        }
        if self.rows.len() == before {
            return Err(source::empty(path));
        }
        Ok(())
    }

    /// Consecutive windows over the tokens of one document. A last window of one token could predict nothing and is left
    /// out.
    fn add_windows(&mut self, path: &Path, text: &str, limits: Limits, tokenizer: &Tokenizer) -> Result<()> {
        let ids = tokenizer.encode(text)?;
        for (i, window) in ids.chunks(limits.seq_len.max(1)).enumerate() {
            if window.len() >= 2 || i == 0 {
                let place = || Kind::Text.place(path, i + 1);
                jsonl::check_ids(window.iter().map(|id| i64::from(*id)), limits).map_err(|e| e.at(place()))?;
                self.push(window.to_vec(), None, i + 1, limits).map_err(|e| e.at(place()))?;
            }
        }
        Ok(())
    }

    /// Adds one checked row of the last file.
    fn push(&mut self, mut ids: Vec<u32>, mut labels: Option<Vec<u32>>, position: usize, limits: Limits) -> Result<()> {
        if ids.is_empty() {
            return Err(Failure::input("a row is empty").expected("at least one token").found("none"));
        }
        if ids.len() > limits.seq_len && limits.truncate {
            self.cut += 1;
            ids.truncate(limits.seq_len);
            labels.iter_mut().for_each(|l| l.truncate(limits.seq_len));
        }
        if ids.len() > limits.seq_len {
            return Err(Failure::input("a row is longer than --seq-len")
                .expected(format!("at most {} tokens", limits.seq_len))
                .found(format!("{} tokens", ids.len()))
                .hint(format!("--seq-len {} or more, or --truncate to cut such rows", ids.len())));
        }
        let supervised = Row { ids: &ids, labels: labels.as_deref().unwrap_or(&ids) }.supervised();
        self.rows.push(Entry {
            start: self.ids.len(),
            labels: labels.as_ref().map(|_| self.labels.len()),
            len: small(ids.len())?,
            supervised: small(supervised)?,
            file: small(self.files.len().saturating_sub(1))?,
            position: small(position)?,
        });
        self.ids.extend(ids);
        self.labels.extend(labels.into_iter().flatten());
        Ok(())
    }

    fn check_targets(&self) -> Result<()> {
        if self.rows.iter().any(|row| row.supervised > 0) {
            return Ok(());
        }
        let names: Vec<String> = self.files.iter().map(|(path, _)| path.display().to_string()).collect();
        Err(Failure::input("no row has anything to predict")
            .at(names.join(", "))
            .expected("at least one row with two tokens and a label that is not -100 after its first position")
            .found(format!("{} rows without a target", self.rows.len()))
            .hint("check the labels: -100 means no loss at that position"))
    }
}

/// Counts that are stored in 32 bits.
fn small(n: usize) -> Result<u32> {
    u32::try_from(n).map_err(|_| Failure::input("a count does not fit in 32 bits").found(n))
}
