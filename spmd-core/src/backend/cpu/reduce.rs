//! The ordered sum of the lanes' contributions.

use super::elementwise::cast_run;
use super::threads::Threads;
use crate::dtype::Element;
use crate::ops::OrderedSum;
use crate::{DType, Result, each_dtype};
use multiversion::multiversion;

pub(super) fn ordered_sum(threads: &Threads, args: OrderedSum<'_>) -> Result<()> {
    each_dtype!(args.parts, parts => each_dtype!(mut args.out, out => sum(threads, parts, out)));
    Ok(())
}

/// Elements summed at a time: the accumulators of every level of the tree stay in the first cache.
const TILE: usize = 1024;
/// Elements a task sums, a multiple of [`TILE`].
const TASK: usize = 16 * TILE;

fn sum<P: Element, O: Element>(threads: &Threads, parts: &[P], out: &mut [O]) {
    let len = out.len();
    let n = parts.len() / len.max(1);
    threads.chunks(out, TASK, |i, out| {
        for (j, out) in out.chunks_mut(TILE).enumerate() {
            let (at, m) = (i * TASK + j * TILE, out.len());
            let part = |p: usize| &parts[p * len + at..][..m];
            match n {
                0 => out.fill(O::store(0.0)),
                1 => cast_run(part(0), DType::F32, out),
                2 => sum2(part(0), part(1), out),
                4 => sum4([part(0), part(1), part(2), part(3)], out),
                _ => {
                    let mut acc = [0.0; TILE];
                    tree(&part, 0, n, &mut acc[..m]);
                    cast_run(&acc[..m], DType::F32, out);
                }
            }
        }
    });
}

/// `acc` = the tree over parts `first .. first + n`: two halves, or a left fold where `n` is odd.
fn tree<'a, P: Element>(part: &impl Fn(usize) -> &'a [P], first: usize, n: usize, acc: &mut [f32]) {
    if n % 2 == 1 {
        cast_run(part(first), DType::F32, acc);
        (first + 1..first + n).for_each(|p| add_to(acc, part(p)));
        return;
    }
    tree(part, first, n / 2, acc);
    let mut right = [0.0; TILE];
    let right = &mut right[..acc.len()];
    tree(part, first + n / 2, n / 2, right);
    add_to(acc, right);
}

#[multiversion(targets("x86_64+avx512f+avx512bw+avx512dq+avx512vl+fma", "x86_64+avx2+fma"))]
fn add_to<P: Element>(acc: &mut [f32], x: &[P]) {
    for (a, x) in acc.iter_mut().zip(x) {
        *a += x.load();
    }
}

#[multiversion(targets("x86_64+avx512f+avx512bw+avx512dq+avx512vl+fma", "x86_64+avx2+fma"))]
fn sum2<P: Element, O: Element>(a: &[P], b: &[P], out: &mut [O]) {
    for ((o, a), b) in out.iter_mut().zip(a).zip(b) {
        *o = O::store(a.load() + b.load());
    }
}

#[multiversion(targets("x86_64+avx512f+avx512bw+avx512dq+avx512vl+fma", "x86_64+avx2+fma"))]
fn sum4<P: Element, O: Element>(parts: [&[P]; 4], out: &mut [O]) {
    let [a, b, c, d] = parts;
    for ((((o, a), b), c), d) in out.iter_mut().zip(a).zip(b).zip(c).zip(d) {
        *o = O::store((a.load() + b.load()) + (c.load() + d.load()));
    }
}

#[cfg(test)]
mod tests;
