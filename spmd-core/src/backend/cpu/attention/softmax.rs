//! The rows of a block of scores. Sums run in fixed lanes (element j of the visible part goes to lane j mod LANES), so
//! every instruction set gives the same bits.

use crate::backend::cpu::math::exp_f32;
use multiversion::multiversion;
use std::ops::Range;

const LANES: usize = 16;

/// One step of the online softmax on a row of scores: with m' = max(m, the scores seen), scores become e^{score − m'}
/// (0 where not `seen`), `max` becomes m' and `sum` is carried over and added to. Returns e^{m − m'}, the factor for what
/// was accumulated under the old maximum.
#[multiversion(targets("x86_64+avx512f+avx512bw+avx512dq+avx512vl+fma", "x86_64+avx2+fma"))]
pub(super) fn online(scores: &mut [f32], seen: Range<usize>, max: &mut f32, sum: &mut f32) -> f32 {
    scores[..seen.start].fill(0.0);
    scores[seen.end..].fill(0.0);
    let row = &mut scores[seen];
    if row.is_empty() {
        return 1.0;
    }
    let mut lanes = [*max; LANES];
    let (groups, rest) = row.as_chunks::<LANES>();
    let larger = |lane: &mut f32, x: &f32| *lane = if *x > *lane { *x } else { *lane };
    groups.iter().for_each(|group| lanes.iter_mut().zip(group).for_each(|(lane, x)| larger(lane, x)));
    lanes.iter_mut().zip(rest).for_each(|(lane, x)| larger(lane, x));
    let new = lanes.iter().fold(*max, |max, x| if *x > max { *x } else { max });

    let mut lanes = [0.0f32; LANES];
    let (groups, rest) = row.as_chunks_mut::<LANES>();
    for group in groups {
        for (lane, x) in lanes.iter_mut().zip(group) {
            *x = exp_f32(*x - new);
            *lane += *x;
        }
    }
    for (lane, x) in lanes.iter_mut().zip(rest) {
        *x = exp_f32(*x - new);
        *lane += *x;
    }
    // Nothing was accumulated before the first block: −∞ − m' gives the factor 0.
    let shrink = exp_f32(*max - new);
    *sum = *sum * shrink + fold(lanes);
    *max = new;
    shrink
}

/// Scores become probabilities e^{score − lse}, 0 where not `seen`.
#[multiversion(targets("x86_64+avx512f+avx512bw+avx512dq+avx512vl+fma", "x86_64+avx2+fma"))]
pub(super) fn probabilities(scores: &mut [f32], seen: Range<usize>, lse: f32) {
    scores[..seen.start].fill(0.0);
    scores[seen.end..].fill(0.0);
    scores[seen].iter_mut().for_each(|x| *x = exp_f32(*x - lse));
}

/// Σ a·b.
#[multiversion(targets("x86_64+avx512f+avx512bw+avx512dq+avx512vl+fma", "x86_64+avx2+fma"))]
pub(super) fn dot(a: &[f32], b: &[f32]) -> f32 {
    let mut lanes = [0.0f32; LANES];
    let (groups_a, rest_a) = a.as_chunks::<LANES>();
    let (groups_b, rest_b) = b.as_chunks::<LANES>();
    for (x, y) in groups_a.iter().zip(groups_b) {
        for ((lane, x), y) in lanes.iter_mut().zip(x).zip(y) {
            *lane += x * y;
        }
    }
    for ((lane, x), y) in lanes.iter_mut().zip(rest_a).zip(rest_b) {
        *lane += x * y;
    }
    fold(lanes)
}

/// The gradient of the scores, p·(d_p − delta), in place of d_p.
#[multiversion(targets("x86_64+avx512f+avx512bw+avx512dq+avx512vl+fma", "x86_64+avx2+fma"))]
pub(super) fn score_gradient(p: &[f32], d_p: &mut [f32], delta: f32) {
    for (p, d_p) in p.iter().zip(d_p) {
        *d_p = p * (*d_p - delta);
    }
}

/// Pairwise, in a fixed order.
#[inline(always)]
fn fold(mut lanes: [f32; LANES]) -> f32 {
    let mut width = LANES / 2;
    while width > 0 {
        for i in 0..width {
            lanes[i] += lanes[i + width];
        }
        width /= 2;
    }
    lanes[0]
}
