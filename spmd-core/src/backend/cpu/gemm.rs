//! Matrix products. The result is cut into tiles, one task each, and a tile is a single-threaded BLAS product over the
//! whole summed dimension. Where the borders lie depends on the shape alone.

mod blas;

pub(crate) use blas::sgemm;

use super::matrix::{Mat, MatMut, Operand, SharedMut, TileMut};
use super::scratch::{carve, with_task};
use super::threads::Threads;
use crate::ops::{LinearBackwardInput, LinearBackwardWeight, LinearForward};
use crate::{Result, ViewMut};
use std::ops::Range;

/// Longest side of a tile. OpenBLAS comes within a few per cent of its rate on the whole product from here on; half of it
/// costs about a tenth.
const TILE: usize = 512;
/// Shortest side a tile is cut to for the sake of more tasks.
const SMALLEST: usize = 128;
/// Below so many tiles, they are cut further.
const TASKS: usize = 8;
/// Columns of an operand that are widened at a time.
const PANEL: usize = 256;

/// fp32 elements a task keeps: a panel of either operand, and the tile before it is rounded.
pub(super) const TASK_SCRATCH: usize = 2 * TILE * PANEL + TILE * TILE;

pub(super) fn linear_forward(threads: &Threads, args: LinearForward<'_>) -> Result<()> {
    let LinearForward { x, w, out, rows, inputs, outputs } = args;
    let a = Factor { stored: Mat::dense(x, rows, inputs), transposed: false };
    let b = Factor { stored: Mat::dense(w, outputs, inputs), transposed: true };
    product(threads, Product { a, b, m: rows, n: outputs, k: inputs, beta: 0.0 }, out);
    Ok(())
}

pub(super) fn linear_backward_input(threads: &Threads, args: LinearBackwardInput<'_>) -> Result<()> {
    let LinearBackwardInput { d_out, w, d_x, rows, inputs, outputs } = args;
    let a = Factor { stored: Mat::dense(d_out, rows, outputs), transposed: false };
    let b = Factor { stored: Mat::dense(w, outputs, inputs), transposed: false };
    product(threads, Product { a, b, m: rows, n: inputs, k: outputs, beta: 0.0 }, d_x);
    Ok(())
}

pub(super) fn linear_backward_weight(threads: &Threads, args: LinearBackwardWeight<'_>) -> Result<()> {
    let LinearBackwardWeight { x, d_out, d_w, add, rows, inputs, outputs } = args;
    let a = Factor { stored: Mat::dense(d_out, rows, outputs), transposed: true };
    let b = Factor { stored: Mat::dense(x, rows, inputs), transposed: false };
    let beta = if add { 1.0 } else { 0.0 };
    product(threads, Product { a, b, m: outputs, n: inputs, k: rows, beta }, ViewMut::F32(d_w));
    Ok(())
}

/// An operand as it lies in memory, and whether the product takes it transposed.
#[derive(Clone, Copy)]
struct Factor<'a> {
    stored: Mat<'a>,
    transposed: bool,
}

impl<'a> Factor<'a> {
    /// Rows and columns as the product sees them.
    fn rect(&self, rows: Range<usize>, cols: Range<usize>) -> Factor<'a> {
        let stored = if self.transposed { self.stored.rect(cols, rows) } else { self.stored.rect(rows, cols) };
        Factor { stored, transposed: self.transposed }
    }

    fn operand<'b>(&self, panel: &'b mut [f32]) -> Operand<'b>
    where
        'a: 'b,
    {
        let operand = self.stored.operand(panel);
        if self.transposed { operand.t() } else { operand }
    }
}

/// `out[m,n] = R(a[m,k] · b[k,n] + beta · out)`; beta is 1 only for an fp32 result.
struct Product<'a> {
    a: Factor<'a>,
    b: Factor<'a>,
    m: usize,
    n: usize,
    k: usize,
    beta: f32,
}

fn product(threads: &Threads, p: Product<'_>, out: ViewMut<'_>) {
    let tiling = Tiling::of(p.m, p.n);
    let out = SharedMut::new(out, p.m, p.n);
    threads.each(tiling.tiles(), |i| {
        let (rows, cols) = tiling.tile(i);
        // SAFETY: tiles of different numbers do not overlap, and `each` runs every number once.
        let tile = unsafe { out.rect(rows.clone(), cols.clone()) };
        let (a, b) = (p.a.rect(rows, 0..p.k), p.b.rect(0..p.k, cols));
        match tile {
            // Everything is fp32: the library reads and writes in place.
            TileMut::F32(mut c) if a.stored.is_f32() && b.stored.is_f32() => {
                sgemm(p.k, 1.0, a.operand(&mut []), b.operand(&mut []), p.beta, &mut c);
            }
            tile => with_task(TASK_SCRATCH, |scratch| accumulate_widened(a, b, p.k, p.beta, tile, scratch)),
        }
    });
}

/// Widens panel after panel of the bf16 operands and sums their products in fp32: in place, or in scratch memory when the
/// result is bf16, which is then rounded once.
fn accumulate_widened(a: Factor<'_>, b: Factor<'_>, k: usize, beta: f32, tile: TileMut<'_>, scratch: &mut [f32]) {
    let mut rest = scratch;
    let (panel_a, panel_b) = (carve(&mut rest, TILE * PANEL), carve(&mut rest, TILE * PANEL));
    let mut sum = |c: &mut MatMut<'_, f32>, beta: f32| {
        let (m, n) = (c.rows(), c.cols());
        // With nothing to sum there is one empty panel, so that `beta` is still applied.
        let panels = k.div_ceil(PANEL).max(1);
        for i in 0..panels {
            let columns = part(k, panels, 1, i);
            let (a, b) = (a.rect(0..m, columns.clone()), b.rect(columns.clone(), 0..n));
            let beta = if i == 0 { beta } else { 1.0 };
            sgemm(columns.len(), 1.0, a.operand(panel_a), b.operand(panel_b), beta, c);
        }
    };
    match tile {
        TileMut::F32(mut c) => sum(&mut c, beta),
        TileMut::Bf16(c) => {
            let wide = &mut rest[..c.rows() * c.cols()];
            sum(&mut MatMut::dense(wide, c.rows(), c.cols()), 0.0);
            TileMut::Bf16(c).store(wide);
        }
    }
}

/// How a result is cut: `down × across` tiles of nearly equal size.
struct Tiling {
    m: usize,
    n: usize,
    down: usize,
    across: usize,
}

impl Tiling {
    fn of(m: usize, n: usize) -> Self {
        let (mut down, mut across) = (m.div_ceil(TILE), n.div_ceil(TILE));
        while down * across != 0 && down * across < TASKS {
            let (height, width) = (m.div_ceil(down), n.div_ceil(across));
            if height.max(width) < 2 * SMALLEST {
                break;
            }
            *(if height > width { &mut down } else { &mut across }) *= 2;
        }
        Tiling { m, n, down, across }
    }

    fn tiles(&self) -> usize {
        self.down * self.across
    }

    fn tile(&self, i: usize) -> (Range<usize>, Range<usize>) {
        (part(self.m, self.down, UNIT, i / self.across), part(self.n, self.across, UNIT, i % self.across))
    }
}

/// Tile sides are multiples of this, a multiple of every BLAS kernel's register block.
const UNIT: usize = 16;

/// Part `i` when `len` is cut into `parts` of nearly equal length, all but the last multiples of `unit`.
fn part(len: usize, parts: usize, unit: usize, i: usize) -> Range<usize> {
    let each = len.div_ceil(parts).next_multiple_of(unit);
    (i * each).min(len)..((i + 1) * each).min(len)
}

#[cfg(test)]
mod tests;
