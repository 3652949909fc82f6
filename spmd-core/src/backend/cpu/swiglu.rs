//! SwiGLU.
//!
//! With `z = e^−|x|`, `σ(x)` is `1/(1+z)` for `x ≥ 0` and `z/(1+z)` below: the exponential never overflows, so the
//! tail of `silu` is right down to the smallest numbers.

use super::math::exp_f32;
use super::threads::{Threads, rows_per_task};
use crate::dtype::Element;
use crate::ops::{SwiGluBackward, SwiGluForward};
use crate::{Result, each_dtype};
use multiversion::multiversion;

pub(super) fn swiglu_forward(threads: &Threads, args: SwiGluForward<'_>) -> Result<()> {
    let SwiGluForward { gate_up, out, width } = args;
    each_dtype!(mut out, out => forward(threads, gate_up.typed("swiglu_forward", "gate_up")?, out, width.max(1)));
    Ok(())
}

fn forward<E: Element>(threads: &Threads, gate_up: &[E], out: &mut [E], width: usize) {
    let rows = rows_per_task(width);
    threads.chunks(out, rows * width, |i, out| {
        let gate_up = &gate_up[2 * i * rows * width..][..2 * out.len()];
        for (out, row) in out.chunks_mut(width).zip(gate_up.chunks(2 * width)) {
            let (gate, up) = row.split_at(width);
            forward_row(gate, up, out);
        }
    });
}

pub(super) fn swiglu_backward(threads: &Threads, args: SwiGluBackward<'_>) -> Result<()> {
    let op = "swiglu_backward";
    let SwiGluBackward { gate_up, d_out, d_gate_up, width } = args;
    each_dtype!(mut d_gate_up, d_gate_up => {
        backward(threads, gate_up.typed(op, "gate_up")?, d_out.typed(op, "d_out")?, d_gate_up, width.max(1));
    });
    Ok(())
}

fn backward<E: Element>(threads: &Threads, gate_up: &[E], d_out: &[E], d_gate_up: &mut [E], width: usize) {
    let rows = rows_per_task(width);
    threads.chunks(d_gate_up, 2 * rows * width, |i, d_gate_up| {
        let gate_up = &gate_up[2 * i * rows * width..][..d_gate_up.len()];
        let d_out = &d_out[i * rows * width..][..d_gate_up.len() / 2];
        for ((d_row, row), d_out) in
            d_gate_up.chunks_mut(2 * width).zip(gate_up.chunks(2 * width)).zip(d_out.chunks(width))
        {
            let ((gate, up), (d_gate, d_up)) = (row.split_at(width), d_row.split_at_mut(width));
            backward_row(gate, up, d_out, d_gate, d_up);
        }
    });
}

#[multiversion(targets("x86_64+avx512f+avx512bw+avx512dq+avx512vl+fma", "x86_64+avx2+fma"))]
fn forward_row<E: Element>(gate: &[E], up: &[E], out: &mut [E]) {
    for ((o, g), u) in out.iter_mut().zip(gate).zip(up) {
        let s = E::store(Sigmoid::of(g.load()).silu()).load();
        *o = E::store(s * u.load());
    }
}

#[multiversion(targets("x86_64+avx512f+avx512bw+avx512dq+avx512vl+fma", "x86_64+avx2+fma"))]
fn backward_row<E: Element>(gate: &[E], up: &[E], d_out: &[E], d_gate: &mut [E], d_up: &mut [E]) {
    let inputs = gate.iter().zip(up).zip(d_out);
    for (((g, u), d), (d_gate, d_up)) in inputs.zip(d_gate.iter_mut().zip(d_up)) {
        let (u, d) = (u.load(), d.load());
        let at = Sigmoid::of(g.load());
        *d_up = E::store(d * E::store(at.silu()).load());
        *d_gate = E::store(d * u * at.silu_slope());
    }
}

/// σ around `x`, as a numerator over `1 + z`.
#[derive(Clone, Copy)]
struct Sigmoid {
    x: f32,
    /// Of σ(x): 1 or z.
    above: f32,
    /// Of 1 − σ(x): z or 1.
    below: f32,
    /// 1 + z, between 1 and 2.
    sum: f32,
}

impl Sigmoid {
    #[inline(always)]
    fn of(x: f32) -> Self {
        let z = exp_f32(-x.abs());
        let positive = x >= 0.0;
        Sigmoid { x, above: if positive { 1.0 } else { z }, below: if positive { z } else { 1.0 }, sum: 1.0 + z }
    }

    /// x·σ(x).
    #[inline(always)]
    fn silu(self) -> f32 {
        self.x * self.above / self.sum
    }

    /// σ(x)·(1 + x·(1 − σ(x))).
    #[inline(always)]
    fn silu_slope(self) -> f32 {
        (self.above / self.sum) * (1.0 + self.x * (self.below / self.sum))
    }
}

#[cfg(test)]
mod tests;
