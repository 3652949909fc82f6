//! Attention in blocks of queries and keys, with online softmax (Dao et al., FlashAttention, arXiv:2205.14135; the
//! backward follows its recomputation from the row's log-sum-exp). The query heads that share a key/value head are
//! stacked into one matrix, so that every block product is one BLAS call. Only keys that some query of the block sees are
//! visited.

mod backward;
mod softmax;

pub(super) use backward::attention_backward;

use super::gemm::sgemm;
use super::matrix::{Mat, MatMut, Operand, SharedMut, TileMut};
use super::scratch::{carve, with_call, with_task};
use super::threads::Threads;
use crate::ops::{Attention, AttentionShape};
use crate::{DType, Result, View, ViewMut};
use std::ops::Range;

/// Rows of a block of stacked queries: enough for the block products to run near the BLAS library's rate, few enough that
/// little is computed above the diagonal and the block stays in the second-level cache.
const STACKED: usize = 128;
/// Keys of a block.
const KEYS: usize = 512;
/// Rows widened by one task.
const WIDEN_ROWS: usize = 64;

pub(super) fn attention_forward(threads: &Threads, args: Attention<'_>) -> Result<()> {
    let Attention { shape, qkv, out, lse } = args;
    if shape.rows() == 0 {
        return Ok(());
    }
    let out = SharedMut::new(out, shape.rows(), shape.heads * shape.head_dim);
    let lse = SharedMut::new(ViewMut::F32(lse), shape.rows(), shape.heads);
    with_keys_values(threads, &shape, qkv, |geometry, kv| {
        let blocks = geometry.query_blocks();
        threads.each(shape.batch * shape.kv_heads * blocks, |i| {
            // The last queries see the most keys: they start first.
            let (pair, block) = (i / blocks, blocks - 1 - i % blocks);
            let queries = Queries::new(&geometry, pair / shape.kv_heads, pair % shape.kv_heads, block);
            with_task(geometry.forward_scratch(), |scratch| forward_block(&queries, kv, &out, &lse, scratch));
        });
    })
}

/// The geometry with what follows from it.
#[derive(Clone, Copy)]
struct Geometry<'a> {
    shape: &'a AttentionShape,
    qkv: Mat<'a>,
    /// Query heads of a key/value head.
    group: usize,
    /// Queries of a block, each with `group` heads.
    block: usize,
    /// 1/√d.
    scale: f32,
}

impl<'a> Geometry<'a> {
    fn new(shape: &'a AttentionShape, qkv: View<'a>) -> Self {
        let group = shape.heads / shape.kv_heads;
        let scale = (1.0 / (shape.head_dim as f64).sqrt()) as f32;
        Geometry { shape, qkv: Mat::dense(qkv, shape.rows(), shape.row_len()), group, block: block(group), scale }
    }

    fn query_blocks(&self) -> usize {
        self.shape.seq_len.div_ceil(self.block)
    }

    /// fp32 elements a forward task needs: scores, stacked queries, output, and the row maxima and sums.
    fn forward_scratch(&self) -> usize {
        self.group * self.block * (KEYS + 2 * self.shape.head_dim + 2)
    }
}

fn block(group: usize) -> usize {
    (STACKED / group.max(1)).max(16)
}

/// fp32 elements a task of either direction keeps at most.
pub(super) fn task_scratch(shape: &AttentionShape) -> usize {
    let geometry = Geometry::new(shape, View::F32(&[]));
    geometry.forward_scratch().max(backward::task_scratch(&geometry))
}

/// fp32 elements a call keeps: the widened keys and values.
pub(super) fn call_scratch(shape: &AttentionShape, compute: DType) -> usize {
    if compute == DType::F32 { 0 } else { shape.rows() * 2 * shape.kv_heads * shape.head_dim }
}

/// All keys and values in fp32: in place, or widened once for every task that reads them.
#[derive(Clone, Copy)]
struct KeysValues<'a> {
    data: &'a [f32],
    ld: usize,
    /// Element of a row where the keys start.
    keys: usize,
    /// Element of a row where the values start.
    values: usize,
}

impl<'a> KeysValues<'a> {
    /// Keys (or values, by `first`) of one head in these rows.
    fn rows(&self, first: usize, rows: usize, head: usize, head_dim: usize) -> Operand<'a> {
        Operand::new(&self.data[rows * self.ld + first + head * head_dim..], self.ld)
    }
}

fn with_keys_values(
    threads: &Threads,
    shape: &AttentionShape,
    qkv: View<'_>,
    run: impl FnOnce(Geometry<'_>, KeysValues<'_>),
) -> Result<()> {
    let geometry = Geometry::new(shape, qkv);
    let (queries, width) = (shape.heads * shape.head_dim, shape.kv_heads * shape.head_dim);
    match qkv {
        View::F32(data) => {
            run(geometry, KeysValues { data, ld: shape.row_len(), keys: queries, values: queries + width });
            Ok(())
        }
        View::Bf16(_) => {
            let ld = 2 * width;
            with_call(shape.rows() * ld, "widened keys and values", |wide| {
                threads.chunks(wide, (WIDEN_ROWS * ld).max(1), |i, chunk| {
                    let first = i * WIDEN_ROWS;
                    let rows = first..(first + WIDEN_ROWS).min(shape.rows());
                    geometry.qkv.rect(rows, queries..queries + ld).copy_to(chunk);
                });
                run(geometry, KeysValues { data: wide, ld, keys: 0, values: width });
            })
        }
    }
}

/// One block of queries of one key/value head: all query heads that share it, stacked head by head.
struct Queries<'a> {
    geometry: &'a Geometry<'a>,
    /// First row of the sequence in the batch.
    origin: usize,
    kv_head: usize,
    /// Positions of the queries in the sequence.
    at: Range<usize>,
}

impl<'a> Queries<'a> {
    fn new(geometry: &'a Geometry<'a>, sequence: usize, kv_head: usize, block: usize) -> Self {
        let seq_len = geometry.shape.seq_len;
        let start = block * geometry.block;
        let at = start..(start + geometry.block).min(seq_len);
        Queries { geometry, origin: sequence * seq_len, kv_head, at }
    }

    /// Rows of the stacked matrix.
    fn stacked(&self) -> usize {
        self.geometry.group * self.at.len()
    }

    /// Their rows in the batch.
    fn rows(&self) -> Range<usize> {
        self.origin + self.at.start..self.origin + self.at.end
    }

    /// The query heads they belong to.
    fn heads(&self) -> Range<usize> {
        let group = self.geometry.group;
        self.kv_head * group..(self.kv_head + 1) * group
    }

    /// The columns of query head `head` in a matrix of all heads.
    fn columns(&self, head: usize) -> Range<usize> {
        head * self.geometry.shape.head_dim..(head + 1) * self.geometry.shape.head_dim
    }

    /// Copies these queries' rows and heads of `from` (`[T, ≥H·d]`) into a stacked matrix, widened.
    fn stack(&self, from: Mat<'_>, to: &mut [f32]) {
        let size = self.at.len() * self.geometry.shape.head_dim;
        for (head, part) in self.heads().zip(to.chunks_exact_mut(size.max(1))) {
            from.rect(self.rows(), self.columns(head)).copy_to(part);
        }
    }

    /// The keys that query `i` of the block sees.
    fn visible(&self, i: usize) -> Range<usize> {
        let query = self.at.start + i;
        let first = self.geometry.shape.window.map_or(0, |w| (query + 1).saturating_sub(w));
        first..query + 1
    }

    /// The blocks of keys that any of these queries sees, first to last.
    fn key_blocks(&self) -> impl Iterator<Item = Range<usize>> + use<> {
        let (first, end) = (self.visible(0).start, self.at.end);
        (first..end).step_by(KEYS).map(move |start| start..(start + KEYS).min(end))
    }

    /// Of the keys of a block, the columns that stacked row `row` sees.
    fn seen(&self, row: usize, keys: &Range<usize>) -> Range<usize> {
        let visible = self.visible(row % self.at.len());
        let start = visible.start.clamp(keys.start, keys.end) - keys.start;
        start..(visible.end.clamp(keys.start, keys.end) - keys.start).max(start)
    }

    /// Keys of a block, as `[keys, d]`.
    fn keys<'b>(&self, kv: &KeysValues<'b>, keys: &Range<usize>) -> Operand<'b> {
        kv.rows(kv.keys, self.origin + keys.start, self.kv_head, self.geometry.shape.head_dim)
    }

    /// Values of a block, as `[keys, d]`.
    fn values<'b>(&self, kv: &KeysValues<'b>, keys: &Range<usize>) -> Operand<'b> {
        kv.rows(kv.values, self.origin + keys.start, self.kv_head, self.geometry.shape.head_dim)
    }
}

fn forward_block(
    queries: &Queries<'_>,
    kv: KeysValues<'_>,
    out: &SharedMut<'_>,
    lse: &SharedMut<'_>,
    scratch: &mut [f32],
) {
    let (stacked, d) = (queries.stacked(), queries.geometry.shape.head_dim);
    let mut rest = scratch;
    let q = carve(&mut rest, stacked * d);
    let acc = carve(&mut rest, stacked * d);
    let (max, sum) = (carve(&mut rest, stacked), carve(&mut rest, stacked));
    queries.stack(queries.geometry.qkv, q);
    acc.fill(0.0);
    max.fill(f32::NEG_INFINITY);
    sum.fill(0.0);
    for keys in queries.key_blocks() {
        let n = keys.len();
        let scores = &mut rest[..stacked * n];
        let (k, v) = (queries.keys(&kv, &keys), queries.values(&kv, &keys));
        let mut to = MatMut::dense(scores, stacked, n);
        sgemm(d, queries.geometry.scale, Operand::new(q, d), k.t(), 0.0, &mut to);
        for (row, p) in scores.chunks_exact_mut(n).enumerate() {
            let seen = queries.seen(row, &keys);
            let shrink = softmax::online(p, seen, &mut max[row], &mut sum[row]);
            if shrink != 1.0 {
                acc[row * d..(row + 1) * d].iter_mut().for_each(|x| *x *= shrink);
            }
        }
        sgemm(n, 1.0, Operand::new(scores, n), v, 1.0, &mut MatMut::dense(acc, stacked, d));
    }
    for (row, sum) in acc.chunks_exact_mut(d.max(1)).zip(sum.iter()) {
        row.iter_mut().for_each(|x| *x /= sum);
    }
    let size = queries.at.len() * d;
    for (nth, head) in queries.heads().enumerate() {
        // SAFETY: rows and heads are this task's own: no other has the same sequence, block and key/value head.
        let mut tile = unsafe { out.rect(queries.rows(), queries.columns(head)) };
        tile.store(&acc[nth * size..(nth + 1) * size]);
        // SAFETY: as above.
        if let TileMut::F32(mut column) = unsafe { lse.rect(queries.rows(), head..head + 1) } {
            for i in 0..queries.at.len() {
                let row = nth * queries.at.len() + i;
                column.row(i)[0] = max[row] + sum[row].ln();
            }
        }
    }
}

#[cfg(test)]
mod reference;
#[cfg(test)]
mod tests;
