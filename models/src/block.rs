//! One block, forward and backward, as a list of operations. Shape letters as in `spmd_core::ops`.

use crate::Config;
use crate::acts::Acts;
use crate::cache::KvCache;
use crate::rope::RopeTable;
use spmd_core::ops::*;
use spmd_core::{Device, Result, View, ViewMut};

/// What both directions need to know about the micro-batch.
pub(crate) struct Call<'a> {
    pub(crate) device: &'a Device,
    pub(crate) config: &'a Config,
    pub(crate) rope: &'a RopeTable,
    /// `B`.
    pub(crate) batch: usize,
    /// `S`.
    pub(crate) seq_len: usize,
    /// Position of a sequence's first row: 0 unless a cache holds what came before.
    pub(crate) first_position: usize,
}

/// The block's parameters, or their gradients, cut out of the flat unit. q, k, v are one matrix, gate and up another.
struct Parts<T> {
    norm_att: T,
    qkv: T,
    o: T,
    norm_mlp: T,
    gate_up: T,
    down: T,
}

impl Call<'_> {
    fn tokens(&self) -> usize {
        self.batch * self.seq_len
    }

    fn shape(&self) -> AttentionShape {
        AttentionShape {
            batch: self.batch,
            seq_len: self.seq_len,
            heads: self.config.heads,
            kv_heads: self.config.kv_heads,
            head_dim: self.config.head_dim,
            window: self.config.sliding_window,
        }
    }

    /// Lengths of the six parts in flat order.
    fn lengths(&self) -> [usize; 6] {
        let c = self.config;
        let (d, f) = (c.hidden_size, c.intermediate_size);
        [d, c.qkv_len() * d, d * c.heads * c.head_dim, d, 2 * f * d, d * f]
    }

    fn weights<'w>(&self, flat: View<'w>) -> Parts<View<'w>> {
        let mut at = 0;
        let [norm_att, qkv, o, norm_mlp, gate_up, down] = self.lengths().map(|n| {
            at += n;
            flat.slice(at - n..at)
        });
        Parts { norm_att, qkv, o, norm_mlp, gate_up, down }
    }

    fn grads<'g>(&self, flat: &'g mut [f32]) -> Parts<&'g mut [f32]> {
        let mut rest = flat;
        let [norm_att, qkv, o, norm_mlp, gate_up, down] = self.lengths().map(|n| {
            let (head, tail) = std::mem::take(&mut rest).split_at_mut(n);
            rest = tail;
            head
        });
        Parts { norm_att, qkv, o, norm_mlp, gate_up, down }
    }

    fn rms_norm(&self, x: View<'_>, gain: View<'_>, out: ViewMut<'_>, rstd: ViewMut<'_>) -> Result<()> {
        let (eps, t) = (self.config.rms_norm_eps as f32, self.tokens());
        let rstd = &mut rstd.f32("rms_norm_forward", "rstd")?[..t];
        self.device.rms_norm_forward(RmsNormForward { x, gain, eps, out, rstd })
    }

    /// `out[T,O] = x[T,I] · w[O,I]ᵀ`
    fn linear(&self, x: View<'_>, w: View<'_>, out: ViewMut<'_>, inputs: usize, outputs: usize) -> Result<()> {
        self.device.linear_forward(LinearForward { x, w, out, rows: self.tokens(), inputs, outputs })
    }

    /// `d_x[T,I] = d_out[T,O] · w[O,I]`
    fn d_input(&self, d_out: View<'_>, w: View<'_>, d_x: ViewMut<'_>, inputs: usize, outputs: usize) -> Result<()> {
        let rows = self.tokens();
        self.device.linear_backward_input(LinearBackwardInput { d_out, w, d_x, rows, inputs, outputs })
    }

    /// `d_w[O,I] = d_out[T,O]ᵀ · x[T,I]`
    fn d_weight(&self, x: View<'_>, d_out: View<'_>, d_w: &mut [f32], inputs: usize, outputs: usize) -> Result<()> {
        let (rows, add) = (self.tokens(), false);
        self.device.linear_backward_weight(LinearBackwardWeight { x, d_out, d_w, add, rows, inputs, outputs })
    }

    fn rotate(&self, x: ViewMut<'_>, inverse: bool) -> Result<()> {
        let c = self.config;
        self.device.rope(Rope {
            x,
            row_len: c.qkv_len(),
            heads: c.heads + c.kv_heads,
            head_dim: c.head_dim,
            seq_len: self.seq_len,
            first_position: self.first_position,
            cos: &self.rope.cos,
            sin: &self.rope.sin,
            inverse,
        })
    }
}

/// Reads `acts.hidden[i]`, writes `acts.hidden[i + 1]` and what the backward needs. With a cache, keys and values are kept
/// in it, and a single row attends to all that it holds.
pub(crate) fn forward(
    call: &Call<'_>,
    i: usize,
    weights: View<'_>,
    acts: &mut Acts,
    cache: Option<&mut KvCache>,
) -> Result<()> {
    let (c, t) = (call.config, call.tokens());
    let (d, f) = (c.hidden_size, c.intermediate_size);
    let w = call.weights(weights);
    fill(call, i, &w, acts, cache)?;
    let slot = acts.slot(i);
    let mid = acts.blocks[slot].mid.view().slice(0..t * d);
    let gate_up = acts.blocks[slot].gate_up.view().slice(0..t * 2 * f);
    let mut out = acts.hidden[i + 1].view_mut().slice(0..t * d);
    let mut act = acts.act.view_mut().slice(0..t * f);
    call.device.swiglu_forward(SwiGluForward { gate_up, out: act.reborrow(), width: f })?;
    call.linear(act.as_view(), w.down, out.reborrow(), f, d)?;
    call.device.add(Add { x: out, y: mid })
}

/// Computes what the block's backward reads, from `acts.hidden[i]`: the forward without what only the next block reads.
fn fill(call: &Call<'_>, i: usize, w: &Parts<View<'_>>, acts: &mut Acts, cache: Option<&mut KvCache>) -> Result<()> {
    let (device, c, t) = (call.device, call.config, call.tokens());
    let (d, f, q) = (c.hidden_size, c.intermediate_size, c.heads * c.head_dim);
    let slot = acts.slot(i);
    let x = acts.hidden[i].view().slice(0..t * d);
    let kept = &mut acts.blocks[slot];
    let mut qkv = kept.qkv.view_mut().slice(0..t * c.qkv_len());
    let mut att = kept.att.view_mut().slice(0..t * q);
    let mut mid = kept.mid.view_mut().slice(0..t * d);
    let gate_up = kept.gate_up.view_mut().slice(0..t * 2 * f);
    let mut norm = acts.norm.view_mut().slice(0..t * d);

    call.rms_norm(x, w.norm_att, norm.reborrow(), acts.rstd.view_mut())?;
    call.linear(norm.as_view(), w.qkv, qkv.reborrow(), d, c.qkv_len())?;
    call.rotate(qkv.reborrow(), false)?;
    let attended = match cache {
        Some(cache) => cache.take(device, i, qkv.as_view(), call.first_position, att.reborrow())?,
        None => false,
    };
    if !attended {
        let lse = &mut kept.lse.view_mut().f32("attention_forward", "lse")?[..t * c.heads];
        device.attention_forward(Attention { shape: call.shape(), qkv: qkv.as_view(), out: att.reborrow(), lse })?;
    }
    call.linear(att.as_view(), w.o, mid.reborrow(), q, d)?;
    device.add(Add { x: mid.reborrow(), y: x })?;

    call.rms_norm(mid.as_view(), w.norm_mlp, norm.reborrow(), acts.rstd.view_mut())?;
    call.linear(norm.as_view(), w.gate_up, gate_up, d, 2 * f)
}

/// Turns `acts.d_hidden` from the gradient of the block's output into that of its input; overwrites `grads`. Blocks come
/// from the last to the first, so with recompute the last one still has what its forward left.
pub(crate) fn backward(
    call: &Call<'_>,
    i: usize,
    weights: View<'_>,
    acts: &mut Acts,
    grads: ViewMut<'_>,
) -> Result<()> {
    let (device, c, t) = (call.device, call.config, call.tokens());
    let (d, f, q, r) = (c.hidden_size, c.intermediate_size, c.heads * c.head_dim, c.qkv_len());
    let w = call.weights(weights);
    let g = call.grads(grads.f32("block backward", "grads")?);
    if acts.is_overwritten(i) {
        fill(call, i, &w, acts, None)?;
    }
    let kept = &acts.blocks[acts.slot(i)];
    let x = acts.hidden[i].view().slice(0..t * d);
    let mid = kept.mid.view().slice(0..t * d);
    let (qkv, att) = (kept.qkv.view().slice(0..t * r), kept.att.view().slice(0..t * q));
    let lse = &kept.lse.view().f32("attention_backward", "lse")?[..t * c.heads];
    let gate_up = kept.gate_up.view().slice(0..t * 2 * f);
    let mut norm = acts.norm.view_mut().slice(0..t * d);
    let mut act = acts.act.view_mut().slice(0..t * f);
    let mut d_act = acts.d_act.view_mut().slice(0..t * f);
    let mut d_gate_up = acts.d_gate_up.view_mut().slice(0..t * 2 * f);
    let mut d_norm = acts.d_norm.view_mut().slice(0..t * d);
    let mut d_att = acts.d_att.view_mut().slice(0..t * q);
    let mut d_qkv = acts.d_qkv.view_mut().slice(0..t * r);
    let mut d_hidden = acts.d_hidden.view_mut().slice(0..t * d);

    // MLP half, from the output down to `mid`.
    call.d_input(d_hidden.as_view(), w.down, d_act.reborrow(), f, d)?;
    device.swiglu_forward(SwiGluForward { gate_up, out: act.reborrow(), width: f })?;
    call.d_weight(act.as_view(), d_hidden.as_view(), g.down, f, d)?;
    let d_out = d_act.as_view();
    device.swiglu_backward(SwiGluBackward { gate_up, d_out, d_gate_up: d_gate_up.reborrow(), width: f })?;
    call.rms_norm(mid, w.norm_mlp, norm.reborrow(), acts.rstd.view_mut())?;
    call.d_weight(norm.as_view(), d_gate_up.as_view(), g.gate_up, d, 2 * f)?;
    call.d_input(d_gate_up.as_view(), w.gate_up, d_norm.reborrow(), d, 2 * f)?;
    let rstd = &acts.rstd.view().f32("rms_norm_backward", "rstd")?[..t];
    device.rms_norm_backward(RmsNormBackward {
        x: mid,
        gain: w.norm_mlp,
        rstd,
        d_out: d_norm.as_view(),
        d_x: d_hidden.reborrow(),
        d_gain: g.norm_mlp,
    })?;

    // Attention half, from `mid` down to the block's input.
    call.d_input(d_hidden.as_view(), w.o, d_att.reborrow(), q, d)?;
    call.d_weight(att, d_hidden.as_view(), g.o, q, d)?;
    let (shape, d_out) = (call.shape(), d_att.as_view());
    device.attention_backward(AttentionBackward { shape, qkv, out: att, lse, d_out, d_qkv: d_qkv.reborrow() })?;
    call.rotate(d_qkv.reborrow(), true)?;
    call.rms_norm(x, w.norm_att, norm.reborrow(), acts.rstd.view_mut())?;
    call.d_weight(norm.as_view(), d_qkv.as_view(), g.qkv, d, r)?;
    call.d_input(d_qkv.as_view(), w.qkv, d_norm.reborrow(), d, r)?;
    let rstd = &acts.rstd.view().f32("rms_norm_backward", "rstd")?[..t];
    device.rms_norm_backward(RmsNormBackward {
        x,
        gain: w.norm_att,
        rstd,
        d_out: d_norm.as_view(),
        d_x: d_hidden.reborrow(),
        d_gain: g.norm_att,
    })
}
