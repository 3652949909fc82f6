//! SwiGLU: silu(gate) · up. A row of `gate_up` is `[F gate | F up]`.

use crate::error::expect_len;
use crate::{Result, View, ViewMut};

/// `out = R(R(silu(gate)) · up)`, `silu(x) = x / (1 + e^−x)` in fp32.
#[derive(Debug)]
pub struct SwiGluForward<'a> {
    /// `[T, 2F]`.
    pub gate_up: View<'a>,
    /// `[T, F]`.
    pub out: ViewMut<'a>,
    /// `F`.
    pub width: usize,
}

impl SwiGluForward<'_> {
    pub(crate) fn check(&self) -> Result<()> {
        expect_len("swiglu_forward", "gate_up", 2 * self.out.len(), self.gate_up.len())?;
        expect_len("swiglu_forward", "out", self.out.len() / self.width.max(1) * self.width, self.out.len())
    }
}

/// `d_up = R(d_out · R(silu(gate)))`, `d_gate = R(d_out · up · silu′(gate))`,
/// `silu′(x) = σ(x)(1 + x(1 − σ(x)))` in fp32.
#[derive(Debug)]
pub struct SwiGluBackward<'a> {
    /// `[T, 2F]`.
    pub gate_up: View<'a>,
    /// Gradient of the output `[T, F]`.
    pub d_out: View<'a>,
    /// `[T, 2F]`, overwritten.
    pub d_gate_up: ViewMut<'a>,
    /// `F`.
    pub width: usize,
}

impl SwiGluBackward<'_> {
    pub(crate) fn check(&self) -> Result<()> {
        let op = "swiglu_backward";
        expect_len(op, "gate_up", 2 * self.d_out.len(), self.gate_up.len())?;
        expect_len(op, "d_gate_up", self.gate_up.len(), self.d_gate_up.len())?;
        expect_len(op, "d_out", self.d_out.len() / self.width.max(1) * self.width, self.d_out.len())
    }
}
