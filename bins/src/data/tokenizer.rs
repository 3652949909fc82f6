//! Text to token ids and back.

mod byte_json;

use crate::{Failure, Result};
use std::cell::OnceCell;
use std::path::{Path, PathBuf};

pub use byte_json::byte_tokenizer_json;

/// How text becomes tokens.
#[derive(Debug, Clone)]
pub enum Tokenizer {
    /// Every byte is its own token, 0 to 255. No special tokens.
    Byte,
    /// A `tokenizer.json`.
    Hf(Box<HfTokenizer>),
}

/// A `tokenizer.json` and what its template puts around a text.
#[derive(Debug, Clone)]
pub struct HfTokenizer {
    inner: tokenizers::Tokenizer,
    path: PathBuf,
    /// Ids the template puts before a text (BOS, mostly).
    before: Vec<u32>,
    /// Ids the template puts after a text (EOS, where the tokenizer adds one).
    after: Vec<u32>,
}

impl Tokenizer {
    /// Reads `dir/tokenizer.json`. Its truncation and padding are switched off: rows are never cut or filled silently.
    ///
    /// # Errors
    /// Exit 3: no such file, or not a tokenizer.
    pub fn from_folder(dir: &Path) -> Result<Self> {
        let path = dir.join("tokenizer.json");
        let bytes = std::fs::read(&path).map_err(|e| {
            Failure::input("text needs a tokenizer, and the model folder has none that can be read")
                .at(path.display())
                .expected("the model's tokenizer.json")
                .found(e)
                .hint("copy tokenizer.json into the model folder, or give rows of input_ids")
        })?;
        Self::from_json(&bytes, &path)
    }

    fn from_json(bytes: &[u8], path: &Path) -> Result<Self> {
        let bad = |e: tokenizers::Error| {
            Failure::input("tokenizer.json cannot be used")
                .at(path.display())
                .expected("a tokenizer as the tokenizers library writes it")
                .found(e)
        };
        let mut inner = tokenizers::Tokenizer::from_bytes(bytes).map_err(bad)?;
        inner.with_padding(None);
        inner.with_truncation(None).map_err(bad)?;
        let mut out = HfTokenizer { inner, path: path.to_owned(), before: Vec::new(), after: Vec::new() };
        // The template is what special tokens the post-processor adds around any text.
        let probe = out.inner.encode("a", true).map_err(bad)?;
        let (ids, added) = (probe.get_ids(), probe.get_special_tokens_mask());
        let first = added.iter().take_while(|m| **m == 1).count();
        let last = added.iter().rev().take_while(|m| **m == 1).count();
        if first + last <= ids.len() {
            out.before = ids[..first].to_vec();
            out.after = ids[ids.len() - last..].to_vec();
        }
        Ok(Tokenizer::Hf(Box::new(out)))
    }

    /// Token ids of one document: the tokenizer's own template (BOS, EOS) exactly once, also where the text spells those
    /// tokens at its start or end already.
    ///
    /// # Errors
    /// Exit 3: the tokenizer refuses the text.
    pub fn encode(&self, text: &str) -> Result<Vec<u32>> {
        let hf = match self {
            Tokenizer::Byte => return Ok(text.bytes().map(u32::from).collect()),
            Tokenizer::Hf(hf) => hf,
        };
        let encoding = hf
            .inner
            .encode_fast(text, false)
            .map_err(|e| Failure::input("the tokenizer refuses a text").at(hf.path.display()).found(e))?;
        let mut body = encoding.get_ids();
        body = body.strip_prefix(&hf.before[..]).unwrap_or(body);
        body = body.strip_suffix(&hf.after[..]).unwrap_or(body);
        Ok([&hf.before, body, &hf.after].concat())
    }

    /// Token ids of a prompt to be continued: as [`Tokenizer::encode`], without what the template puts after a text.
    ///
    /// # Errors
    /// Exit 3: the tokenizer refuses the text.
    pub fn encode_prompt(&self, text: &str) -> Result<Vec<u32>> {
        let mut ids = self.encode(text)?;
        if let Tokenizer::Hf(hf) = self {
            ids.truncate(ids.len() - hf.after.len());
        }
        Ok(ids)
    }

    /// Text of ids. Bytes that are not UTF-8 become U+FFFD. Special tokens are left out unless `special`.
    ///
    /// # Errors
    /// Exit 3: the tokenizer refuses the ids.
    pub fn decode(&self, ids: &[u32], special: bool) -> Result<String> {
        match self {
            Tokenizer::Byte => {
                let bytes: Vec<u8> = ids.iter().filter_map(|id| u8::try_from(*id).ok()).collect();
                Ok(String::from_utf8_lossy(&bytes).into_owned())
            }
            Tokenizer::Hf(hf) => hf
                .inner
                .decode(ids, !special)
                .map_err(|e| Failure::input("the tokenizer cannot decode these ids").at(hf.path.display()).found(e)),
        }
    }

    /// One more than the largest id it can give.
    pub fn vocab_size(&self) -> usize {
        match self {
            Tokenizer::Byte => 256,
            Tokenizer::Hf(hf) => hf.inner.get_vocab(true).values().max().map_or(0, |id| *id as usize + 1),
        }
    }
}

/// A tokenizer that is read when the first text asks for it: rows of ids need none.
#[derive(Debug)]
pub struct LazyTokenizer {
    folder: Option<PathBuf>,
    loaded: OnceCell<Tokenizer>,
}

impl LazyTokenizer {
    /// The byte tokenizer.
    pub fn byte() -> Self {
        LazyTokenizer { folder: None, loaded: OnceCell::from(Tokenizer::Byte) }
    }

    /// `tokenizer.json` of a model folder.
    pub fn folder(dir: &Path) -> Self {
        LazyTokenizer { folder: Some(dir.to_owned()), loaded: OnceCell::new() }
    }

    /// The tokenizer.
    ///
    /// # Errors
    /// As [`Tokenizer::from_folder`].
    pub fn get(&self) -> Result<&Tokenizer> {
        if let Some(tokenizer) = self.loaded.get() {
            return Ok(tokenizer);
        }
        let tokenizer = match &self.folder {
            Some(dir) => Tokenizer::from_folder(dir)?,
            None => Tokenizer::Byte,
        };
        Ok(self.loaded.get_or_init(|| tokenizer))
    }
}

/// Text of ids as they come, never with half a character in it.
#[derive(Debug, Clone, Default)]
pub struct TextStream {
    /// Ids whose text may still change; those before `given` have been given out and are kept as context, as a token's text
    /// can depend on the one before it (a leading space).
    ids: Vec<u32>,
    given: usize,
}

/// A character takes at most four bytes, so more ids than this that still end in U+FFFD hold bytes that are no text.
const LONGEST_CHARACTER: usize = 4;

impl TextStream {
    /// Takes one id; the text that is certain now, empty where a character is not finished.
    ///
    /// # Errors
    /// Exit 3: the tokenizer refuses the ids.
    pub fn push(&mut self, tokenizer: &Tokenizer, id: u32) -> Result<String> {
        self.ids.push(id);
        let text = self.pending(tokenizer)?;
        if text.ends_with('\u{fffd}') && self.ids.len() - self.given < LONGEST_CHARACTER {
            return Ok(String::new());
        }
        self.ids.drain(..self.given);
        self.given = self.ids.len();
        Ok(text)
    }

    /// The text still held back; bytes that never became a character are U+FFFD.
    ///
    /// # Errors
    /// Exit 3: the tokenizer refuses the ids.
    pub fn finish(self, tokenizer: &Tokenizer) -> Result<String> {
        self.pending(tokenizer)
    }

    /// Text of the ids that were not given out, in the context of those that were.
    fn pending(&self, tokenizer: &Tokenizer) -> Result<String> {
        let before = tokenizer.decode(&self.ids[..self.given], false)?;
        let all = tokenizer.decode(&self.ids, false)?;
        // Context never ends inside a character, so its text begins the whole text; if a decoder breaks that, give all.
        Ok(all.strip_prefix(&before).map_or(all.clone(), str::to_owned))
    }
}

#[cfg(test)]
mod tests;
