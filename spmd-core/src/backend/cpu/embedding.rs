//! Embedding: rows of a table by token id.

use super::elementwise::cast_run;
use super::threads::{Threads, rows_per_task};
use crate::dtype::Element;
use crate::ops::{EmbeddingBackward, EmbeddingForward};
use crate::{DType, Result, each_dtype};
use multiversion::multiversion;

pub(super) fn embedding_forward(threads: &Threads, args: EmbeddingForward<'_>) -> Result<()> {
    let EmbeddingForward { ids, table, out, dim } = args;
    each_dtype!(table, table => each_dtype!(mut out, out => forward(threads, ids, table, out, dim)));
    Ok(())
}

fn forward<W: Element, O: Element>(threads: &Threads, ids: &[u32], table: &[W], out: &mut [O], dim: usize) {
    let rows = rows_per_task(dim);
    threads.chunks(out, rows * dim, |i, out| {
        for (id, out) in ids[i * rows..].iter().zip(out.chunks_mut(dim)) {
            cast_run(&table[*id as usize * dim..][..dim], DType::F32, out);
        }
    });
}

pub(super) fn embedding_backward(threads: &Threads, args: EmbeddingBackward<'_>) -> Result<()> {
    let EmbeddingBackward { ids, d_out, d_table, dim } = args;
    each_dtype!(d_out, d_out => backward(threads, ids, d_out, d_table, dim));
    Ok(())
}

/// Parts the vocabulary is cut into. Each task looks through all ids for its own, so there are few.
const VOCABULARY_PARTS: usize = 64;

/// A task owns a range of the vocabulary, hence every addition to one of its rows, and makes them in order of `t`.
fn backward<G: Element>(threads: &Threads, ids: &[u32], d_out: &[G], d_table: &mut [f32], dim: usize) {
    let dim = dim.max(1);
    let rows = (d_table.len() / dim).div_ceil(VOCABULARY_PARTS).max(1);
    threads.chunks(d_table, rows * dim, |i, d_table| {
        d_table.fill(0.0);
        let range = i * rows..i * rows + d_table.len() / dim;
        for (t, id) in ids.iter().enumerate() {
            if range.contains(&(*id as usize)) {
                add_row(&mut d_table[(*id as usize - range.start) * dim..][..dim], &d_out[t * dim..][..dim]);
            }
        }
    });
}

#[multiversion(targets("x86_64+avx512f+avx512bw+avx512dq+avx512vl+fma", "x86_64+avx2+fma"))]
fn add_row<G: Element>(acc: &mut [f32], x: &[G]) {
    for (a, x) in acc.iter_mut().zip(x) {
        *a += x.load();
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::DType::{Bf16, F32};
    use crate::backend::cpu::testing::{buffer, normal, same_on_threads, slope, wide};

    const IDS: [u32; 9] = [3, 0, 3, 129, 3, 64, 0, 129, 3];

    #[test]
    fn forward_copies_rows() {
        for dim in [1, 17, 48] {
            for (from, to) in [(F32, F32), (F32, Bf16), (Bf16, F32), (Bf16, Bf16)] {
                let table = buffer(from, &normal("table", 130 * dim));
                let got = same_on_threads(|threads| {
                    let mut out = buffer(to, &vec![9.0; IDS.len() * dim]);
                    let args = EmbeddingForward { ids: &IDS, table: table.view(), out: out.view_mut(), dim };
                    embedding_forward(threads, args).unwrap();
                    out.view().to_f32()
                });
                for (i, x) in got.iter().enumerate() {
                    let expected = table.view().get(IDS[i / dim] as usize * dim + i % dim);
                    assert_eq!(x.to_bits(), to.round(expected).to_bits());
                }
            }
        }
    }

    fn run_backward(ids: &[u32], d_out: &crate::Buffer, dim: usize) -> Vec<f32> {
        same_on_threads(|threads| {
            let mut d_table = vec![9.0; 130 * dim];
            let args = EmbeddingBackward { ids, d_out: d_out.view(), d_table: &mut d_table, dim };
            embedding_backward(threads, args).unwrap();
            d_table
        })
    }

    #[test]
    fn backward_adds_in_order_of_t() {
        for dim in [1, 17, 48] {
            for dtype in [F32, Bf16] {
                let d_out = buffer(dtype, &normal("d_out", IDS.len() * dim));
                let mut expected = vec![0.0f32; 130 * dim];
                for (i, x) in d_out.view().to_f32().into_iter().enumerate() {
                    expected[IDS[i / dim] as usize * dim + i % dim] += x;
                }
                assert_eq!(run_backward(&IDS, &d_out, dim), expected);
            }
        }
        assert_eq!(run_backward(&[], &buffer(F32, &[]), 3), vec![0.0; 390], "no row, still overwritten");
    }

    #[test]
    fn backward_is_the_slope_of_the_forward() {
        let dim = 2;
        let (table, d_out) = (wide(&normal("table", 130 * dim)), normal("d_out", IDS.len() * dim));
        let got = run_backward(&IDS, &buffer(F32, &d_out), dim);
        let loss = |table: &[f64]| -> f64 {
            let out = |i: usize| table[IDS[i / dim] as usize * dim + i % dim];
            d_out.iter().enumerate().map(|(i, d)| *d as f64 * out(i)).sum()
        };
        for (i, d) in got.iter().enumerate() {
            // At most four fp32 additions of numbers below 8; the quotient of a linear function is exact but for f64.
            assert!((*d as f64 - slope(&table, i, loss)).abs() < 4.0 * 16.0 * crate::backend::cpu::testing::U + 1e-8);
        }
    }
}
