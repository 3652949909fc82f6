//! The layout-independent hash. Terms are whole numbers and their sum wraps, so no order of adding can change it.

use super::threads::{Threads, rows_per_task};
use crate::dtype::Element;
use crate::ops::{Piece, StateHash};
use crate::rng::mix;
use crate::{Result, each_dtype};
use multiversion::multiversion;
use std::sync::atomic::{AtomicU64, Ordering};

pub(super) fn state_hash(threads: &Threads, args: StateHash<'_>) -> Result<()> {
    let StateHash { x, pieces, salt, sum } = args;
    let total = AtomicU64::new(*sum);
    let (task, salt) = (rows_per_task(1), mix(salt));
    each_dtype!(x, x => threads.each(x.len().div_ceil(task), |i| {
        let part = hash_part(x, pieces, salt, i * task..x.len().min((i + 1) * task));
        // Only the sum itself is shared, so no order with other memory is needed.
        total.fetch_add(part, Ordering::Relaxed);
    }));
    *sum = total.into_inner();
    Ok(())
}

/// The terms of the elements of `x` in `range`. `salt` is mixed already.
fn hash_part<E: Element>(x: &[E], pieces: &[Piece], salt: u64, range: std::ops::Range<usize>) -> u64 {
    let from = pieces.partition_point(|p| p.range.end <= range.start);
    let inside = pieces[from..].iter().take_while(|p| p.range.start < range.end);
    inside.fold(0, |sum, p| {
        let (start, end) = (p.range.start.max(range.start), p.range.end.min(range.end));
        let index = p.first_index + (start - p.range.start) as u64;
        sum.wrapping_add(hash_run(&x[start..end], mix(salt ^ p.tensor), index))
    })
}

/// The terms of one run: element `i` has index `first + i` in its parameter.
#[multiversion(targets("x86_64+avx512f+avx512bw+avx512dq+avx512vl+fma", "x86_64+avx2+fma"))]
fn hash_run<E: Element>(x: &[E], key: u64, first: u64) -> u64 {
    x.iter()
        .zip(first..)
        .fold(0, |sum: u64, (x, index)| sum.wrapping_add(mix(key ^ index.rotate_left(32) ^ x.load().to_bits() as u64)))
}

#[cfg(test)]
mod tests;
