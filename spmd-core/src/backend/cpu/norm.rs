//! RMSNorm.
//!
//! A row's sums run over [`LANES`] fixed accumulators, element `k` in lane `k % LANES`, which are then folded in
//! halves: every instruction set adds in the same order.

use super::threads::{Threads, rows_per_task};
use crate::dtype::Element;
use crate::ops::{RmsNormBackward, RmsNormForward};
use crate::{Result, each_dtype};
use multiversion::multiversion;

/// Accumulators of a row's sum: enough to keep the adders of a core busy.
const LANES: usize = 32;

pub(super) fn rms_norm_forward(threads: &Threads, args: RmsNormForward<'_>) -> Result<()> {
    let op = "rms_norm_forward";
    let RmsNormForward { x, gain, eps, out, rstd } = args;
    each_dtype!(mut out, out => forward(threads, x.typed(op, "x")?, gain.typed(op, "gain")?, eps, out, rstd));
    Ok(())
}

fn forward<E: Element>(threads: &Threads, x: &[E], gain: &[E], eps: f32, out: &mut [E], rstd: &mut [f32]) {
    let dim = gain.len();
    let rows = rows_per_task(dim);
    threads.chunks2((rstd, rows), (out, rows * dim), |i, rstd, out| {
        forward_rows(&x[i * rows * dim..][..out.len()], gain, eps, out, rstd);
    });
}

#[multiversion(targets("x86_64+avx512f+avx512bw+avx512dq+avx512vl+fma", "x86_64+avx2+fma"))]
fn forward_rows<E: Element>(x: &[E], gain: &[E], eps: f32, out: &mut [E], rstd: &mut [f32]) {
    let dim = gain.len();
    for (t, rstd) in rstd.iter_mut().enumerate() {
        let x = &x[t * dim..][..dim];
        let r = 1.0 / (squares(x) / dim as f32 + eps).sqrt();
        *rstd = r;
        for ((o, x), w) in out[t * dim..][..dim].iter_mut().zip(x).zip(gain) {
            *o = E::store(w.load() * normalised::<E>(x.load(), r));
        }
    }
}

/// `y = R(x·rstd)`.
#[inline(always)]
fn normalised<E: Element>(x: f32, rstd: f32) -> f32 {
    E::store(x * rstd).load()
}

/// Σ x² in the order of this file.
#[inline(always)]
fn squares<E: Element>(x: &[E]) -> f32 {
    let mut lanes = [0.0f32; LANES];
    let (x, rest) = x.as_chunks::<LANES>();
    for x in x {
        for l in 0..LANES {
            lanes[l] += x[l].load() * x[l].load();
        }
    }
    for (lane, x) in lanes.iter_mut().zip(rest) {
        *lane += x.load() * x.load();
    }
    fold(lanes)
}

/// Lane `l` plus lane `l + half`, until one is left.
#[inline(always)]
fn fold(mut lanes: [f32; LANES]) -> f32 {
    let mut half = LANES / 2;
    while half > 0 {
        for l in 0..half {
            lanes[l] += lanes[l + half];
        }
        half /= 2;
    }
    lanes[0]
}

/// Most tasks a backward is cut into: each has its own partial gradient of the gain.
const PARTIALS: usize = 64;

pub(super) fn rms_norm_backward(threads: &Threads, args: RmsNormBackward<'_>) -> Result<()> {
    let op = "rms_norm_backward";
    let RmsNormBackward { x, gain, rstd, d_out, d_x, d_gain } = args;
    each_dtype!(mut d_x, d_x => {
        let (x, gain, d_out) = (x.typed(op, "x")?, gain.typed(op, "gain")?, d_out.typed(op, "d_out")?);
        backward(threads, Inputs { x, gain, rstd, d_out }, d_x, d_gain);
    });
    Ok(())
}

/// What a backward reads.
#[derive(Clone, Copy)]
struct Inputs<'a, E> {
    x: &'a [E],
    gain: &'a [E],
    rstd: &'a [f32],
    d_out: &'a [E],
}

/// The gain's gradient is summed over a task's rows in order of `t`, then over tasks in order.
fn backward<E: Element>(threads: &Threads, inputs: Inputs<'_, E>, d_x: &mut [E], d_gain: &mut [f32]) {
    let dim = d_gain.len();
    let t = inputs.rstd.len();
    let rows = rows_per_task(dim).max(t.div_ceil(PARTIALS));
    // At most PARTIALS rows once a call: small beside the activations, and no argument has room for them.
    let mut partials = vec![0.0f32; t.div_ceil(rows) * dim];
    threads.chunks2((d_x, rows * dim), (&mut partials, dim), |i, d_x, d_gain| {
        let at = i * rows * dim..i * rows * dim + d_x.len();
        let rstd = &inputs.rstd[i * rows..][..d_x.len() / dim];
        backward_rows(Inputs { x: &inputs.x[at.clone()], d_out: &inputs.d_out[at], rstd, ..inputs }, d_x, d_gain);
    });
    d_gain.fill(0.0);
    for partial in partials.chunks(dim.max(1)) {
        d_gain.iter_mut().zip(partial).for_each(|(sum, x)| *sum += x);
    }
}

#[multiversion(targets("x86_64+avx512f+avx512bw+avx512dq+avx512vl+fma", "x86_64+avx2+fma"))]
fn backward_rows<E: Element>(inputs: Inputs<'_, E>, d_x: &mut [E], d_gain: &mut [f32]) {
    let gain = inputs.gain;
    let dim = gain.len();
    for (t, &r) in inputs.rstd.iter().enumerate() {
        let (x, d_out) = (&inputs.x[t * dim..][..dim], &inputs.d_out[t * dim..][..dim]);
        let scale = r * r * (dot(d_out, gain, x) / dim as f32);
        let d_x = &mut d_x[t * dim..][..dim];
        let d_gain = &mut d_gain[..dim];
        for k in 0..dim {
            let (x, d) = (x[k].load(), d_out[k].load());
            d_gain[k] += d * normalised::<E>(x, r);
            d_x[k] = E::store(d_x[k].load() + r * (d * gain[k].load() - x * scale));
        }
    }
}

/// Σ (a·b)·c in the order of this file.
#[inline(always)]
fn dot<E: Element>(a: &[E], b: &[E], c: &[E]) -> f32 {
    let mut lanes = [0.0f32; LANES];
    let ((a, a_rest), (b, b_rest), (c, c_rest)) =
        (a.as_chunks::<LANES>(), b.as_chunks::<LANES>(), c.as_chunks::<LANES>());
    for ((a, b), c) in a.iter().zip(b).zip(c) {
        for l in 0..LANES {
            lanes[l] += a[l].load() * b[l].load() * c[l].load();
        }
    }
    for l in 0..a_rest.len() {
        lanes[l] += a_rest[l].load() * b_rest[l].load() * c_rest[l].load();
    }
    fold(lanes)
}

#[cfg(test)]
mod tests;
