//! Embedding: rows of a table by token id.

use crate::error::expect_len;
use crate::{Error, Result, View, ViewMut};

/// `out[t] = table[ids[t]]`.
#[derive(Debug)]
pub struct EmbeddingForward<'a> {
    /// Token ids `[T]`.
    pub ids: &'a [u32],
    /// `[V,D]`.
    pub table: View<'a>,
    /// `[T,D]`.
    pub out: ViewMut<'a>,
    /// `D`.
    pub dim: usize,
}

impl EmbeddingForward<'_> {
    pub(crate) fn check(&self) -> Result<()> {
        let op = "embedding_forward";
        expect_len(op, "out", self.ids.len() * self.dim, self.out.len())?;
        check_ids(op, self.ids, self.table.len(), self.dim)
    }
}

/// `d_table[v] = Σ_{t: ids[t]=v} d_out[t]`, fp32, overwritten, added in order of `t`.
#[derive(Debug)]
pub struct EmbeddingBackward<'a> {
    /// Token ids `[T]`.
    pub ids: &'a [u32],
    /// Gradient of the output `[T,D]`.
    pub d_out: View<'a>,
    /// `[V,D]`, fp32, overwritten.
    pub d_table: &'a mut [f32],
    /// `D`.
    pub dim: usize,
}

impl EmbeddingBackward<'_> {
    pub(crate) fn check(&self) -> Result<()> {
        let op = "embedding_backward";
        expect_len(op, "d_out", self.ids.len() * self.dim, self.d_out.len())?;
        check_ids(op, self.ids, self.d_table.len(), self.dim)
    }
}

fn check_ids(op: &'static str, ids: &[u32], table: usize, dim: usize) -> Result<()> {
    let vocab = table / dim.max(1);
    expect_len(op, "table", vocab * dim, table)?;
    match ids.iter().position(|id| *id as usize >= vocab) {
        Some(position) => Err(Error::TokenId { op, id: ids[position], position, vocab }),
        None => Ok(()),
    }
}
