//! Causal grouped-query attention with an optional sliding window, blocked, with online softmax: no `S×S` matrix exists.

use crate::error::expect_len;
use crate::{Error, Result, View, ViewMut};

/// The geometry both directions share. A row of `qkv` is `[H·d queries | K·d keys | K·d values]`, rotated already.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct AttentionShape {
    /// `B`: sequences; none sees another.
    pub batch: usize,
    /// `S`: rows a sequence.
    pub seq_len: usize,
    /// `H`.
    pub heads: usize,
    /// `K`; query head `i` uses key/value head `i / (H/K)`.
    pub kv_heads: usize,
    /// `d`.
    pub head_dim: usize,
    /// Query `i` sees keys `j` with `i − w < j ≤ i`; `None`: all `j ≤ i`. Blocks outside the window are skipped.
    pub window: Option<usize>,
}

impl AttentionShape {
    /// Elements of a `qkv` row.
    pub fn row_len(&self) -> usize {
        (self.heads + 2 * self.kv_heads) * self.head_dim
    }

    /// `B·S`.
    pub fn rows(&self) -> usize {
        self.batch * self.seq_len
    }

    fn check(&self, op: &'static str) -> Result<()> {
        if self.kv_heads == 0 || !self.heads.is_multiple_of(self.kv_heads) || self.window == Some(0) {
            return Err(Error::Shape {
                op,
                what: "heads",
                expected: "a multiple of the key/value heads, and a window of at least 1".to_owned(),
                found: format!("{} over {}, window {:?}", self.heads, self.kv_heads, self.window),
            });
        }
        Ok(())
    }
}

/// `out[t, h] = R(Σ_j softmax_j(q·k_j / √d) v_j)`; scores and probabilities stay fp32 and are never rounded.
#[derive(Debug)]
pub struct Attention<'a> {
    /// Geometry.
    pub shape: AttentionShape,
    /// `[B·S, (H+2K)·d]`.
    pub qkv: View<'a>,
    /// `[B·S, H·d]`.
    pub out: ViewMut<'a>,
    /// log Σ_j exp(score) of each row and head, fp32 `[B·S, H]`, kept for the backward.
    pub lse: &'a mut [f32],
}

impl Attention<'_> {
    pub(crate) fn check(&self) -> Result<()> {
        let (op, s) = ("attention_forward", self.shape);
        s.check(op)?;
        expect_len(op, "qkv", s.rows() * s.row_len(), self.qkv.len())?;
        expect_len(op, "out", s.rows() * s.heads * s.head_dim, self.out.len())?;
        expect_len(op, "lse", s.rows() * s.heads, self.lse.len())
    }
}

/// Gradients of queries, keys and values. Probabilities are recomputed as `exp(score − lse)`. The row term
/// `δ = Σ_j p_j (d_out·v_j)` is exact: where `out` was rounded it is computed from the probabilities, not from `out`.
#[derive(Debug)]
pub struct AttentionBackward<'a> {
    /// Geometry.
    pub shape: AttentionShape,
    /// `[B·S, (H+2K)·d]`.
    pub qkv: View<'a>,
    /// Output of the forward `[B·S, H·d]`.
    pub out: View<'a>,
    /// From the forward `[B·S, H]`.
    pub lse: &'a [f32],
    /// Gradient of the output `[B·S, H·d]`.
    pub d_out: View<'a>,
    /// Gradient of `qkv`, same layout, overwritten.
    pub d_qkv: ViewMut<'a>,
}

impl AttentionBackward<'_> {
    pub(crate) fn check(&self) -> Result<()> {
        let (op, s) = ("attention_backward", self.shape);
        s.check(op)?;
        expect_len(op, "qkv", s.rows() * s.row_len(), self.qkv.len())?;
        expect_len(op, "out", s.rows() * s.heads * s.head_dim, self.out.len())?;
        expect_len(op, "lse", s.rows() * s.heads, self.lse.len())?;
        expect_len(op, "d_out", self.out.len(), self.d_out.len())?;
        expect_len(op, "d_qkv", self.qkv.len(), self.d_qkv.len())
    }
}

/// Attention of one new row against a cache: every one of the `len` cached keys is visible. `out[h] = R(Σ_j softmax_j(q·k_j /
/// √d) v_j)`, scores and probabilities fp32. The order of the cache's slots is free (a rolling cache needs no sorting).
#[derive(Debug)]
pub struct AttentionCached<'a> {
    /// Rotated queries `[H·d]`.
    pub q: View<'a>,
    /// Rotated keys, at least `[len, K·d]`.
    pub keys: View<'a>,
    /// Values, same shape.
    pub values: View<'a>,
    /// `[H·d]`.
    pub out: ViewMut<'a>,
    /// Cached rows.
    pub len: usize,
    /// `K`.
    pub kv_heads: usize,
    /// `d`.
    pub head_dim: usize,
}

impl AttentionCached<'_> {
    pub(crate) fn check(&self) -> Result<()> {
        let (op, row) = ("attention_cached", self.kv_heads * self.head_dim);
        expect_len(op, "out", self.q.len(), self.out.len())?;
        expect_len(op, "values", self.keys.len(), self.values.len())?;
        if row == 0 || !self.q.len().is_multiple_of(row) || self.len == 0 || self.keys.len() < self.len * row {
            return Err(Error::Shape {
                op,
                what: "keys",
                expected: format!("at least {} (and at least 1) rows of {row}, a divisor of the queries", self.len),
                found: format!("{} elements for {} queries", self.keys.len(), self.q.len()),
            });
        }
        Ok(())
    }
}
