//! Matrix products: y = x Wᵀ and its two gradients.

use crate::error::expect_len;
use crate::{Result, View, ViewMut};

/// `out[T,O] = R(x[T,I] · w[O,I]ᵀ)`: operands widened, accumulated in fp32, rounded once.
#[derive(Debug)]
pub struct LinearForward<'a> {
    /// Input `[T,I]`.
    pub x: View<'a>,
    /// Weight `[O,I]`.
    pub w: View<'a>,
    /// Output `[T,O]`.
    pub out: ViewMut<'a>,
    /// `T`.
    pub rows: usize,
    /// `I`.
    pub inputs: usize,
    /// `O`.
    pub outputs: usize,
}

impl LinearForward<'_> {
    pub(crate) fn check(&self) -> Result<()> {
        let op = "linear_forward";
        expect_len(op, "x", self.rows * self.inputs, self.x.len())?;
        expect_len(op, "w", self.outputs * self.inputs, self.w.len())?;
        expect_len(op, "out", self.rows * self.outputs, self.out.len())
    }
}

/// `d_x[T,I] = R(d_out[T,O] · w[O,I])`.
#[derive(Debug)]
pub struct LinearBackwardInput<'a> {
    /// Gradient of the output `[T,O]`.
    pub d_out: View<'a>,
    /// Weight `[O,I]`.
    pub w: View<'a>,
    /// Gradient of the input `[T,I]`, overwritten.
    pub d_x: ViewMut<'a>,
    /// `T`.
    pub rows: usize,
    /// `I`.
    pub inputs: usize,
    /// `O`.
    pub outputs: usize,
}

impl LinearBackwardInput<'_> {
    pub(crate) fn check(&self) -> Result<()> {
        let op = "linear_backward_input";
        expect_len(op, "d_out", self.rows * self.outputs, self.d_out.len())?;
        expect_len(op, "w", self.outputs * self.inputs, self.w.len())?;
        expect_len(op, "d_x", self.rows * self.inputs, self.d_x.len())
    }
}

/// `d_w[O,I] = d_out[T,O]ᵀ · x[T,I]`, in fp32; added to what is there when `add` is set.
#[derive(Debug)]
pub struct LinearBackwardWeight<'a> {
    /// Input `[T,I]`.
    pub x: View<'a>,
    /// Gradient of the output `[T,O]`.
    pub d_out: View<'a>,
    /// Gradient of the weight `[O,I]`, fp32.
    pub d_w: &'a mut [f32],
    /// Add to `d_w` instead of overwriting it (the head works chunk by chunk).
    pub add: bool,
    /// `T`; with zero rows `d_w` is zeroed, or left alone when `add` is set.
    pub rows: usize,
    /// `I`.
    pub inputs: usize,
    /// `O`.
    pub outputs: usize,
}

impl LinearBackwardWeight<'_> {
    pub(crate) fn check(&self) -> Result<()> {
        let op = "linear_backward_weight";
        expect_len(op, "x", self.rows * self.inputs, self.x.len())?;
        expect_len(op, "d_out", self.rows * self.outputs, self.d_out.len())?;
        expect_len(op, "d_w", self.outputs * self.inputs, self.d_w.len())
    }
}
