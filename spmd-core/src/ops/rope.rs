//! Rotary position embedding, half-split form (Hugging Face's layout, not interleaved).

use crate::error::expect_len;
use crate::{Error, Result, ViewMut};

/// In place on the first `heads` heads of each row: with `c = R(cos)`, `s = R(sin)` of the row's position,
/// `x' = R(R(x·c) + R(rot(x)·s))`, `rot(x) = (−x[d/2..], x[..d/2])`. `inverse` applies the transpose (the backward):
/// the sign of `s` flips, the rounding points stay.
#[derive(Debug)]
pub struct Rope<'a> {
    /// Rows of `row_len` elements; heads lie at the start of a row, `head_dim` each.
    pub x: ViewMut<'a>,
    /// Elements a row (at least `heads * head_dim`).
    pub row_len: usize,
    /// Heads to rotate.
    pub heads: usize,
    /// `d`, even.
    pub head_dim: usize,
    /// Rows a sequence: row `t` has position `first_position + t % seq_len`.
    pub seq_len: usize,
    /// Position of a sequence's first row (0 in training).
    pub first_position: usize,
    /// cos of each position's angles, fp32 `[positions, d/2]`.
    pub cos: &'a [f32],
    /// sin, same shape.
    pub sin: &'a [f32],
    /// Backward.
    pub inverse: bool,
}

impl Rope<'_> {
    pub(crate) fn check(&self) -> Result<()> {
        let op = "rope";
        if self.row_len == 0 || !self.x.len().is_multiple_of(self.row_len) || self.heads * self.head_dim > self.row_len
        {
            return Err(Error::Shape {
                op,
                what: "x",
                expected: format!("rows of at least {} x {} elements", self.heads, self.head_dim),
                found: format!("{} elements in rows of {}", self.x.len(), self.row_len),
            });
        }
        expect_len(op, "sin", self.cos.len(), self.sin.len())?;
        let rows = self.x.len() / self.row_len;
        let positions = self.first_position + rows.min(self.seq_len);
        if !self.head_dim.is_multiple_of(2) || self.cos.len() < positions * self.head_dim / 2 {
            return Err(Error::Shape {
                op,
                what: "cos",
                expected: format!("at least {positions} positions of {}/2 angles", self.head_dim),
                found: format!("{} elements", self.cos.len()),
            });
        }
        Ok(())
    }
}
