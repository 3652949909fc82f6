//! Strided matrices over borrowed memory: what the matrix products read and write, in rectangles.

use crate::dtype::{from_bf16, to_bf16};
use crate::{View, ViewMut};
use half::bf16;
use multiversion::multiversion;
use std::marker::PhantomData;
use std::ops::Range;

/// A row-major matrix to read, of either dtype; row `i` starts at element `i·ld`.
#[derive(Clone, Copy)]
pub(super) struct Mat<'a> {
    data: View<'a>,
    rows: usize,
    cols: usize,
    ld: usize,
}

impl<'a> Mat<'a> {
    /// `rows × cols` elements laid out densely.
    pub(super) fn dense(data: View<'a>, rows: usize, cols: usize) -> Self {
        Mat { data, rows, cols, ld: cols }
    }

    /// The rectangle `rows × cols` of this matrix. Panics like slicing if it lies outside, which is our own mistake.
    pub(super) fn rect(&self, rows: Range<usize>, cols: Range<usize>) -> Mat<'a> {
        assert!(rows.end <= self.rows && cols.end <= self.cols, "rectangle outside its matrix");
        let (height, width) = (rows.len(), cols.len());
        let start = rows.start * self.ld + cols.start;
        // An empty rectangle has no last row whose end could be computed, and may start behind the last element.
        let range = if height == 0 || width == 0 { 0..0 } else { start..start + (height - 1) * self.ld + width };
        Mat { data: self.data.slice(range), rows: height, cols: width, ld: self.ld }
    }

    /// Elements of a dense copy.
    pub(super) fn len(&self) -> usize {
        self.rows * self.cols
    }

    pub(super) fn is_f32(&self) -> bool {
        matches!(self.data, View::F32(_))
    }

    /// The elements as a BLAS operand: in place where they are fp32, otherwise widened into `panel`, which must hold
    /// [`Mat::len`] elements.
    pub(super) fn operand<'b>(&self, panel: &'b mut [f32]) -> Operand<'b>
    where
        'a: 'b,
    {
        match self.data {
            View::F32(data) => Operand { data, ld: self.ld, transposed: false },
            View::Bf16(_) => {
                let panel = &mut panel[..self.len()];
                self.copy_to(panel);
                Operand { data: panel, ld: self.cols, transposed: false }
            }
        }
    }

    /// A dense widened copy.
    pub(super) fn copy_to(&self, dense: &mut [f32]) {
        assert_eq!(dense.len(), self.len(), "a dense copy has as many elements as its source");
        if dense.is_empty() {
            return;
        }
        match self.data {
            View::F32(data) => {
                for (row, to) in data.chunks(self.ld).zip(dense.chunks_exact_mut(self.cols)) {
                    to.copy_from_slice(&row[..self.cols]);
                }
            }
            View::Bf16(data) => widen_rows(data, self.ld, dense, self.cols),
        }
    }
}

/// An fp32 operand of a matrix product.
#[derive(Clone, Copy)]
pub(crate) struct Operand<'a> {
    /// From the first element on.
    pub(crate) data: &'a [f32],
    /// Elements from one stored row to the next.
    pub(crate) ld: usize,
    /// Whether the product takes it transposed.
    pub(crate) transposed: bool,
}

impl<'a> Operand<'a> {
    pub(super) fn new(data: &'a [f32], ld: usize) -> Self {
        Operand { data, ld, transposed: false }
    }

    /// The same elements, transposed.
    pub(super) fn t(self) -> Self {
        Operand { transposed: !self.transposed, ..self }
    }
}

/// A strided matrix to write, the only one with access to its elements.
pub(crate) struct MatMut<'a, T> {
    start: *mut T,
    rows: usize,
    cols: usize,
    ld: usize,
    lifetime: PhantomData<&'a mut [T]>,
}

impl<'a, T> MatMut<'a, T> {
    /// A dense matrix.
    pub(super) fn dense(data: &'a mut [T], rows: usize, cols: usize) -> Self {
        assert_eq!(data.len(), rows * cols, "a dense matrix has rows × cols elements");
        MatMut { start: data.as_mut_ptr(), rows, cols, ld: cols, lifetime: PhantomData }
    }

    /// `rows` rows of `cols` elements, `ld` apart, from the first element of `data` on.
    pub(crate) fn strided(data: &'a mut [T], rows: usize, cols: usize, ld: usize) -> Self {
        let needed = if rows == 0 { 0 } else { (rows - 1) * ld + cols };
        assert!(ld >= cols && needed <= data.len(), "a strided matrix within its memory");
        MatMut { start: data.as_mut_ptr(), rows, cols, ld, lifetime: PhantomData }
    }

    pub(crate) fn rows(&self) -> usize {
        self.rows
    }

    pub(crate) fn cols(&self) -> usize {
        self.cols
    }

    /// Elements from one row to the next.
    pub(crate) fn ld(&self) -> usize {
        self.ld
    }

    /// The first element; row `i` of `cols` elements starts `i·ld` behind it.
    pub(crate) fn as_mut_ptr(&mut self) -> *mut T {
        self.start
    }

    pub(super) fn row(&mut self, i: usize) -> &mut [T] {
        assert!(i < self.rows, "row outside its matrix");
        // SAFETY: `start` heads a rectangle of `rows` rows, `cols` elements each, `ld` apart, inside one allocation that
        // is borrowed for 'a and reached through this value alone (`dense` and `strided` took it whole; `SharedMut::rect` has its
        // caller promise it); i < rows was just checked.
        unsafe { std::slice::from_raw_parts_mut(self.start.add(i * self.ld), self.cols) }
    }
}

/// A rectangle to write, of either dtype.
pub(super) enum TileMut<'a> {
    F32(MatMut<'a, f32>),
    Bf16(MatMut<'a, bf16>),
}

impl TileMut<'_> {
    /// Writes a dense matrix of the same shape, rounded once.
    pub(super) fn store(&mut self, dense: &[f32]) {
        match self {
            TileMut::F32(tile) => {
                for i in 0..tile.rows() {
                    let cols = tile.cols();
                    tile.row(i).copy_from_slice(&dense[i * cols..(i + 1) * cols]);
                }
            }
            TileMut::Bf16(tile) => {
                for i in 0..tile.rows() {
                    let cols = tile.cols();
                    narrow(&dense[i * cols..(i + 1) * cols], tile.row(i));
                }
            }
        }
    }
}

/// A matrix that tasks write at the same time, each its own rectangles.
pub(super) struct SharedMut<'a> {
    start: Start,
    rows: usize,
    cols: usize,
    lifetime: PhantomData<&'a mut [f32]>,
}

enum Start {
    F32(*mut f32),
    Bf16(*mut bf16),
}

// SAFETY: the pointer is reached only through `rect`, whose caller promises that no two rectangles alive at the same time
// overlap; f32 and bf16 may be written from any thread.
unsafe impl Sync for SharedMut<'_> {}

impl<'a> SharedMut<'a> {
    /// `rows × cols` elements laid out densely.
    pub(super) fn new(data: ViewMut<'a>, rows: usize, cols: usize) -> Self {
        assert_eq!(data.len(), rows * cols, "a dense matrix has rows × cols elements");
        let start = match data {
            ViewMut::F32(s) => Start::F32(s.as_mut_ptr()),
            ViewMut::Bf16(s) => Start::Bf16(s.as_mut_ptr()),
        };
        SharedMut { start, rows, cols, lifetime: PhantomData }
    }

    /// The rectangle `rows × cols`.
    ///
    /// # Safety
    /// No other rectangle alive at the same time may overlap it.
    pub(super) unsafe fn rect(&self, rows: Range<usize>, cols: Range<usize>) -> TileMut<'_> {
        assert!(rows.end <= self.rows && cols.end <= self.cols, "rectangle outside its matrix");
        let (at, ld) = (rows.start * self.cols + cols.start, self.cols);
        let (height, width) = (rows.len(), cols.len());
        // `wrapping_add`: an empty rectangle may start behind the last element; such a pointer is never read.
        match self.start {
            Start::F32(p) => {
                let start = p.wrapping_add(at);
                TileMut::F32(MatMut { start, rows: height, cols: width, ld, lifetime: PhantomData })
            }
            Start::Bf16(p) => {
                let start = p.wrapping_add(at);
                TileMut::Bf16(MatMut { start, rows: height, cols: width, ld, lifetime: PhantomData })
            }
        }
    }
}

/// Rows of `cols` elements, `ld` apart, widened into a dense matrix.
#[multiversion(targets("x86_64+avx512f+avx512bw+avx512dq+avx512vl+fma", "x86_64+avx2+fma"))]
fn widen_rows(rows: &[bf16], ld: usize, dense: &mut [f32], cols: usize) {
    for (row, to) in rows.chunks(ld).zip(dense.chunks_exact_mut(cols)) {
        for (x, y) in row.iter().zip(to) {
            *y = from_bf16(*x);
        }
    }
}

#[multiversion(targets("x86_64+avx512f+avx512bw+avx512dq+avx512vl+fma", "x86_64+avx2+fma"))]
fn narrow(from: &[f32], to: &mut [bf16]) {
    for (x, y) in from.iter().zip(to) {
        *y = to_bf16(*x);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rectangles_are_read_widened_and_written_rounded() {
        let values: Vec<f32> = (0..12).map(|i| i as f32 + 0.001).collect();
        let rounded: Vec<bf16> = values.iter().map(|x| to_bf16(*x)).collect();
        let mut dense = vec![0.0; 4];
        Mat::dense(View::F32(&values), 3, 4).rect(1..3, 2..4).copy_to(&mut dense);
        assert_eq!(dense, [6.001, 7.001, 10.001, 11.001]);
        Mat::dense(View::Bf16(&rounded), 3, 4).rect(1..3, 2..4).copy_to(&mut dense);
        assert_eq!(dense, [6.0, 7.0, 10.0, 11.0]);
        assert_eq!(Mat::dense(View::F32(&values), 3, 4).rect(3..3, 4..4).len(), 0);

        let mut target = vec![bf16::ZERO; 12];
        let shared = SharedMut::new(ViewMut::Bf16(&mut target), 3, 4);
        // SAFETY: the only rectangle alive.
        unsafe { shared.rect(0..2, 1..3) }.store(&[1.001, 2.0, 3.0, 4.0]);
        let stored: Vec<f32> = target.iter().map(|x| from_bf16(*x)).collect();
        assert_eq!(stored, [0.0, 1.0, 2.0, 0.0, 0.0, 3.0, 4.0, 0.0, 0.0, 0.0, 0.0, 0.0]);
    }
}
