//! Casts and sums, element by element.

use crate::error::expect_len;
use crate::{DType, Result, View, ViewMut};

/// `x = R(x + y)`: the residual.
#[derive(Debug)]
pub struct Add<'a> {
    /// In and out.
    pub x: ViewMut<'a>,
    /// Added.
    pub y: View<'a>,
}

impl Add<'_> {
    pub(crate) fn check(&self) -> Result<()> {
        expect_len("add", "y", self.x.len(), self.y.len())
    }
}

/// `acc = R(acc + x)`, or `acc = R(x)` for a first micro-batch.
#[derive(Debug)]
pub struct Accumulate<'a> {
    /// In and out.
    pub acc: ViewMut<'a>,
    /// Added or copied.
    pub x: View<'a>,
    /// Copy instead of adding.
    pub first: bool,
}

impl Accumulate<'_> {
    pub(crate) fn check(&self) -> Result<()> {
        expect_len("accumulate", "x", self.acc.len(), self.x.len())
    }
}

/// `dst = R(R_through(src))`: a cast, with an optional rounding on the way (a gradient's dtype before the wire's).
#[derive(Debug)]
pub struct Cast<'a> {
    /// Read.
    pub src: View<'a>,
    /// Rounded to this first.
    pub through: DType,
    /// Written.
    pub dst: ViewMut<'a>,
}

impl Cast<'_> {
    pub(crate) fn check(&self) -> Result<()> {
        expect_len("cast", "dst", self.src.len(), self.dst.len())
    }
}
