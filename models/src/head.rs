//! Final norm, logits and loss, chunk by chunk of rows: logits and their gradients exist for one chunk at a time.

use crate::acts::{Acts, head_chunk};
use crate::block::Call;
use spmd_core::ops::*;
use spmd_core::{Batch, Result, View};

/// The head's weights: the final gain and the output matrix `[V,D]` (a tied one is the embedding table).
#[derive(Clone, Copy)]
pub(crate) struct HeadWeights<'a> {
    pub(crate) gain: View<'a>,
    pub(crate) matrix: View<'a>,
}

/// Where the gradients of [`HeadWeights`] go.
pub(crate) struct HeadGrads<'a> {
    pub(crate) gain: &'a mut [f32],
    pub(crate) matrix: &'a mut [f32],
}

/// The targets and what comes of them.
pub(crate) struct Loss<'a> {
    pub(crate) targets: &'a [u32],
    /// 1/N.
    pub(crate) scale: f32,
    /// Σ of the targets' losses, added to.
    pub(crate) sum: &'a mut f64,
    /// Receives every row's logits if somebody asked for them.
    pub(crate) sink: Option<&'a mut Vec<f32>>,
}

/// Computes the loss and, where `grads` are wanted, writes them and sets `acts.d_hidden` to the gradient of the head's
/// input.
pub(crate) fn run(
    call: &Call<'_>,
    w: HeadWeights<'_>,
    acts: &mut Acts,
    mut loss: Loss<'_>,
    mut grads: Option<HeadGrads<'_>>,
) -> Result<()> {
    let (device, d, vocab) = (call.device, call.config.hidden_size, call.config.vocab_size);
    let t = loss.targets.len();
    let x = acts.hidden[call.config.layers].view().slice(0..t * d);
    let mut norm = acts.norm.view_mut().slice(0..t * d);
    let rstd = &mut acts.rstd.view_mut().f32("head", "rstd")?[..t];
    let eps = call.config.rms_norm_eps as f32;
    device.rms_norm_forward(RmsNormForward { x, gain: w.gain, eps, out: norm.reborrow(), rstd })?;

    let mut d_norm = acts.d_norm.view_mut().slice(0..t * d);
    let chunk = head_chunk(vocab, acts.logits.len() / vocab);
    let mut added = false;
    for start in (0..t).step_by(chunk) {
        let rows = chunk.min(t - start);
        let targets = &loss.targets[start..start + rows];
        let mut d_rows = d_norm.reborrow().slice(start * d..(start + rows) * d);
        if loss.sink.is_none() && targets.iter().all(|t| *t == Batch::NO_TARGET) {
            d_rows.zero();
            continue;
        }
        let x = norm.as_view().slice(start * d..(start + rows) * d);
        let mut logits = acts.logits.view_mut().slice(0..rows * vocab);
        let (inputs, outputs) = (d, vocab);
        device.linear_forward(LinearForward { x, w: w.matrix, out: logits.reborrow(), rows, inputs, outputs })?;
        if let Some(sink) = &mut loss.sink {
            sink.extend(logits.as_view().to_f32());
        }
        let (scale, gradient) = (loss.scale, grads.is_some());
        device.cross_entropy(CrossEntropy { logits: logits.reborrow(), targets, scale, gradient, loss: loss.sum })?;
        if let Some(g) = &mut grads {
            let d_out = logits.as_view();
            device.linear_backward_input(LinearBackwardInput {
                d_out,
                w: w.matrix,
                d_x: d_rows,
                rows,
                inputs,
                outputs,
            })?;
            let d_w = &mut *g.matrix;
            device.linear_backward_weight(LinearBackwardWeight { x, d_out, d_w, add: added, rows, inputs, outputs })?;
            added = true;
        }
    }
    let Some(g) = grads else { return Ok(()) };
    if !added {
        g.matrix.fill(0.0);
    }
    let mut d_x = acts.d_hidden.view_mut().slice(0..t * d);
    d_x.zero();
    let d_out = d_norm.as_view();
    device.rms_norm_backward(RmsNormBackward { x, gain: w.gain, rstd, d_out, d_x, d_gain: g.gain })
}
