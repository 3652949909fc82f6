//! Rotary position embedding.

use super::threads::{Threads, rows_per_task};
use crate::dtype::Element;
use crate::ops::Rope;
use crate::{Result, each_dtype};
use multiversion::multiversion;

pub(super) fn rope(threads: &Threads, args: Rope<'_>) -> Result<()> {
    let Rope { x, row_len, heads, head_dim, seq_len, first_position, cos, sin, inverse } = args;
    if head_dim == 0 {
        return Ok(());
    }
    let half = head_dim / 2;
    let rows = rows_per_task(row_len);
    each_dtype!(mut x, x => threads.chunks(x, rows * row_len, |i, x| {
        for (t, row) in x.chunks_mut(row_len).enumerate() {
            let position = first_position + (i * rows + t) % seq_len.max(1);
            let angles = position * half..(position + 1) * half;
            rotate_row(&mut row[..heads * head_dim], &cos[angles.clone()], &sin[angles], inverse);
        }
    }));
    Ok(())
}

/// Angles rounded at a time and used for every head of the row.
const TILE: usize = 64;

#[multiversion(targets("x86_64+avx512f+avx512bw+avx512dq+avx512vl+fma", "x86_64+avx2+fma"))]
fn rotate_row<E: Element>(row: &mut [E], cos: &[f32], sin: &[f32], inverse: bool) {
    let half = cos.len();
    let sign = if inverse { -1.0 } else { 1.0 };
    for from in (0..half).step_by(TILE) {
        let n = TILE.min(half - from);
        let (mut c, mut s) = ([0.0f32; TILE], [0.0f32; TILE]);
        for j in 0..n {
            c[j] = E::store(cos[from + j]).load();
            s[j] = sign * E::store(sin[from + j]).load();
        }
        for head in row.chunks_exact_mut(2 * half) {
            let (low, high) = head.split_at_mut(half);
            rotate(&mut low[from..from + n], &mut high[from..from + n], &c[..n], &s[..n]);
        }
    }
}

/// `low' = R(R(low·c) + R(−high·s))`, `high' = R(R(high·c) + R(low·s))`.
#[inline(always)]
fn rotate<E: Element>(low: &mut [E], high: &mut [E], c: &[f32], s: &[f32]) {
    let round = |x: f32| E::store(x).load();
    for (((low, high), c), s) in low.iter_mut().zip(high).zip(c).zip(s) {
        let (a, b) = (low.load(), high.load());
        *low = E::store(round(a * c) + round(-b * s));
        *high = E::store(round(b * c) + round(a * s));
    }
}

#[cfg(test)]
mod tests;
