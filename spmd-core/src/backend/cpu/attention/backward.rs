//! The gradients of attention. A task is one key/value head of one sequence: it walks the blocks of queries in order and
//! adds to the gradients of its keys and values in fp32, so the order of every sum is fixed.

use super::{Geometry, KEYS, KeysValues, Queries, softmax, with_keys_values};
use crate::backend::cpu::gemm::sgemm;
use crate::backend::cpu::matrix::{Mat, MatMut, Operand, SharedMut};
use crate::backend::cpu::scratch::{carve, with_task};
use crate::backend::cpu::threads::Threads;
use crate::ops::AttentionBackward;
use crate::{Result, View};
use std::ops::Range;

pub(in super::super) fn attention_backward(threads: &Threads, args: AttentionBackward<'_>) -> Result<()> {
    let AttentionBackward { shape, qkv, out, lse, d_out, d_qkv } = args;
    if d_qkv.is_empty() {
        return Ok(());
    }
    let width = shape.heads * shape.head_dim;
    let d_qkv = SharedMut::new(d_qkv, shape.rows(), shape.row_len());
    with_keys_values(threads, &shape, qkv, |geometry, kv| {
        let saved = Saved {
            out: matches!(out, View::F32(_)).then(|| Mat::dense(out, shape.rows(), width)),
            d_out: Mat::dense(d_out, shape.rows(), width),
            lse,
        };
        threads.each(shape.batch * shape.kv_heads, |i| {
            let (sequence, kv_head) = (i / shape.kv_heads, i % shape.kv_heads);
            with_task(task_scratch(&geometry), |scratch| {
                let task = Task { geometry: &geometry, kv, saved: &saved, sequence, kv_head };
                task.run(&d_qkv, scratch);
            });
        });
    })
}

/// fp32 elements of a task: probabilities and their gradients, queries, output gradients and query gradients of a block,
/// its row terms, and the gradients of all keys and values of the head.
pub(super) fn task_scratch(geometry: &Geometry<'_>) -> usize {
    let d = geometry.shape.head_dim;
    geometry.group * geometry.block * (2 * KEYS + 3 * d + 1) + 2 * geometry.shape.seq_len * d
}

/// What the backward reads beside `qkv`.
struct Saved<'a> {
    /// The output, where it was not rounded.
    out: Option<Mat<'a>>,
    d_out: Mat<'a>,
    lse: &'a [f32],
}

struct Task<'a> {
    geometry: &'a Geometry<'a>,
    kv: KeysValues<'a>,
    saved: &'a Saved<'a>,
    sequence: usize,
    kv_head: usize,
}

/// Scratch of a block of queries.
struct Block<'a> {
    q: &'a mut [f32],
    d_out: &'a mut [f32],
    d_q: &'a mut [f32],
    delta: &'a mut [f32],
    p: &'a mut [f32],
    d_p: &'a mut [f32],
}

impl Task<'_> {
    fn run(&self, d_qkv: &SharedMut<'_>, scratch: &mut [f32]) {
        let shape = self.geometry.shape;
        let (d, seq_len) = (shape.head_dim, shape.seq_len);
        let mut rest = scratch;
        let (d_k, d_v) = (carve(&mut rest, seq_len * d), carve(&mut rest, seq_len * d));
        d_k.fill(0.0);
        d_v.fill(0.0);
        for block in 0..self.geometry.query_blocks() {
            let queries = Queries::new(self.geometry, self.sequence, self.kv_head, block);
            self.query_block(&queries, d_k, d_v, d_qkv, rest);
        }
        let rows = self.sequence * seq_len..(self.sequence + 1) * seq_len;
        for (first, gradient) in [(shape.heads, d_k), (shape.heads + shape.kv_heads, d_v)] {
            let column = (first + self.kv_head) * d;
            // SAFETY: the rows of this task's sequence, and the columns of its key/value head: no other task writes them.
            unsafe { d_qkv.rect(rows.clone(), column..column + d) }.store(gradient);
        }
    }

    fn query_block(
        &self,
        queries: &Queries<'_>,
        d_k: &mut [f32],
        d_v: &mut [f32],
        d_qkv: &SharedMut<'_>,
        mut rest: &mut [f32],
    ) {
        let (stacked, d) = (queries.stacked(), self.geometry.shape.head_dim);
        let mut block = Block {
            q: carve(&mut rest, stacked * d),
            d_out: carve(&mut rest, stacked * d),
            d_q: carve(&mut rest, stacked * d),
            delta: carve(&mut rest, stacked),
            p: carve(&mut rest, stacked * KEYS),
            d_p: carve(&mut rest, stacked * KEYS),
        };
        queries.stack(self.geometry.qkv, block.q);
        queries.stack(self.saved.d_out, block.d_out);
        block.d_q.fill(0.0);
        self.row_terms(queries, &mut block);
        // The row terms of a rounded output left p and d_p of the last block of keys in place.
        let in_place = self.saved.out.is_none() && queries.key_blocks().count() == 1;
        for keys in queries.key_blocks() {
            if !in_place {
                self.recompute(queries, &keys, &mut block);
            }
            self.key_block(queries, &keys, &mut block, d_k, d_v);
        }
        let size = queries.at.len() * d;
        for (nth, head) in queries.heads().enumerate() {
            // SAFETY: the rows of this block and the columns of a query head that only this task's key/value head serves.
            unsafe { d_qkv.rect(queries.rows(), queries.columns(head)) }
                .store(&block.d_q[nth * size..(nth + 1) * size]);
        }
    }

    /// delta of each row: Σ d_out·out where `out` is exact, else Σ p·d_p over all keys.
    fn row_terms(&self, queries: &Queries<'_>, block: &mut Block<'_>) {
        let d = self.geometry.shape.head_dim;
        if let Some(out) = self.saved.out {
            // `d_q` is still unused: the stacked output lies there meanwhile.
            queries.stack(out, block.d_q);
            for ((delta, out), d_out) in
                block.delta.iter_mut().zip(block.d_q.chunks_exact(d)).zip(block.d_out.chunks_exact(d))
            {
                *delta = softmax::dot(out, d_out);
            }
            block.d_q.fill(0.0);
            return;
        }
        block.delta.fill(0.0);
        for keys in queries.key_blocks() {
            self.recompute(queries, &keys, block);
            let n = keys.len();
            for (row, delta) in block.delta.iter_mut().enumerate() {
                let seen = queries.seen(row, &keys);
                let seen = row * n + seen.start..row * n + seen.end;
                *delta += softmax::dot(&block.p[seen.clone()], &block.d_p[seen]);
            }
        }
    }

    /// p = e^{q·k/√d − lse} and d_p = d_out·v for a block of keys.
    fn recompute(&self, queries: &Queries<'_>, keys: &Range<usize>, block: &mut Block<'_>) {
        let (stacked, n, d) = (queries.stacked(), keys.len(), self.geometry.shape.head_dim);
        let (k, v) = (queries.keys(&self.kv, keys), queries.values(&self.kv, keys));
        let (p, d_p) = (&mut block.p[..stacked * n], &mut block.d_p[..stacked * n]);
        let (q, d_out) = (Operand::new(block.q, d), Operand::new(block.d_out, d));
        sgemm(d, self.geometry.scale, q, k.t(), 0.0, &mut MatMut::dense(p, stacked, n));
        sgemm(d, 1.0, d_out, v.t(), 0.0, &mut MatMut::dense(d_p, stacked, n));
        let (heads, first) = (self.geometry.shape.heads, queries.heads().start);
        for (row, p) in p.chunks_exact_mut(n).enumerate() {
            let (head, i) = (first + row / queries.at.len(), row % queries.at.len());
            let lse = self.saved.lse[(queries.rows().start + i) * heads + head];
            softmax::probabilities(p, queries.seen(row, keys), lse);
        }
    }

    /// Adds a block of keys to the gradients: d_v += pᵀ·d_out; with d_s = p·(d_p − delta)/√d, d_k += d_sᵀ·q, d_q += d_s·k.
    fn key_block(
        &self,
        queries: &Queries<'_>,
        keys: &Range<usize>,
        block: &mut Block<'_>,
        d_k: &mut [f32],
        d_v: &mut [f32],
    ) {
        let (stacked, n, d) = (queries.stacked(), keys.len(), self.geometry.shape.head_dim);
        let scale = self.geometry.scale;
        let (p, d_s) = (&block.p[..stacked * n], &mut block.d_p[..stacked * n]);
        for ((p, d_s), delta) in p.chunks_exact(n).zip(d_s.chunks_exact_mut(n)).zip(block.delta.iter()) {
            softmax::score_gradient(p, d_s, *delta);
        }
        let (p, d_s, k) = (Operand::new(p, n), Operand::new(d_s, n), queries.keys(&self.kv, keys));
        let own = keys.start * d..keys.end * d;
        sgemm(stacked, 1.0, p.t(), Operand::new(block.d_out, d), 1.0, &mut MatMut::dense(&mut d_v[own.clone()], n, d));
        sgemm(stacked, scale, d_s.t(), Operand::new(block.q, d), 1.0, &mut MatMut::dense(&mut d_k[own], n, d));
        sgemm(n, scale, d_s, k, 1.0, &mut MatMut::dense(block.d_q, stacked, d));
    }
}
