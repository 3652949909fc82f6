//! RMSNorm. Source of the rounding points: transformers' MistralRMSNorm (the gain is applied after the down-cast).

use crate::error::expect_len;
use crate::{Result, View, ViewMut};

/// `y = R(x · rstd)`, `out = R(gain · y)` with `rstd = 1/√(mean(x²) + eps)` in fp32, per row of `D`.
#[derive(Debug)]
pub struct RmsNormForward<'a> {
    /// Input `[T,D]`.
    pub x: View<'a>,
    /// Gain `[D]`.
    pub gain: View<'a>,
    /// Added to the mean square.
    pub eps: f32,
    /// Output `[T,D]`.
    pub out: ViewMut<'a>,
    /// `1/√(mean(x²)+eps)` of each row `[T]`, kept for the backward.
    pub rstd: &'a mut [f32],
}

impl RmsNormForward<'_> {
    pub(crate) fn check(&self) -> Result<()> {
        let op = "rms_norm_forward";
        expect_len(op, "x", self.rstd.len() * self.gain.len(), self.x.len())?;
        expect_len(op, "out", self.x.len(), self.out.len())
    }
}

/// With `y = R(x·rstd)`, `g = d_out·gain`: `d_gain[k] = Σ_t d_out·y` (fp32, overwritten, in an order the shape alone
/// decides) and `d_x += rstd·(g − x·rstd²·mean(g·x))`, added to the residual's gradient already in `d_x` and rounded once.
#[derive(Debug)]
pub struct RmsNormBackward<'a> {
    /// Input of the forward `[T,D]`.
    pub x: View<'a>,
    /// Gain `[D]`.
    pub gain: View<'a>,
    /// From the forward `[T]`.
    pub rstd: &'a [f32],
    /// Gradient of the output `[T,D]`.
    pub d_out: View<'a>,
    /// In: the gradient that arrives by the residual path (zeros if there is none). Out: R(it + this op's) `[T,D]`.
    pub d_x: ViewMut<'a>,
    /// Gradient of the gain `[D]`, fp32, overwritten.
    pub d_gain: &'a mut [f32],
}

impl RmsNormBackward<'_> {
    pub(crate) fn check(&self) -> Result<()> {
        let op = "rms_norm_backward";
        expect_len(op, "x", self.rstd.len() * self.gain.len(), self.x.len())?;
        expect_len(op, "d_out", self.x.len(), self.d_out.len())?;
        expect_len(op, "d_x", self.x.len(), self.d_x.len())?;
        expect_len(op, "d_gain", self.gain.len(), self.d_gain.len())
    }
}
