//! A record of every matrix product the CPU backend makes, and a way to make the same products alone: what a training
//! step is measured against. Off, it costs one relaxed load a product.

use crate::backend::cpu::{MatMut, Operand, sgemm};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, PoisonError};

/// One call of the BLAS library: `c[m,n] = a[m,k] · b[k,n] + beta · c`, row-major.
#[derive(Debug, Clone, Copy, PartialEq)]
pub struct GemmShape {
    /// Whether `a` is stored transposed, `[k,m]`.
    pub trans_a: bool,
    /// Whether `b` is stored transposed, `[n,k]`.
    pub trans_b: bool,
    /// Rows of `c`.
    pub m: usize,
    /// Columns of `c`.
    pub n: usize,
    /// The summed dimension.
    pub k: usize,
    /// Elements from one stored row of `a` to the next.
    pub lda: usize,
    /// Elements from one stored row of `b` to the next.
    pub ldb: usize,
    /// Elements from one row of `c` to the next.
    pub ldc: usize,
    /// 0 overwrites `c`, 1 adds to it.
    pub beta: f32,
    /// Addresses of `a`, `b` and `c`, in elements: a replay keeps their distances, so that what lay in a cache because an
    /// earlier product had touched it does so again.
    pub at: [usize; 3],
}

impl GemmShape {
    pub(crate) fn of(
        m: usize,
        n: usize,
        k: usize,
        a: Operand<'_>,
        b: Operand<'_>,
        beta: f32,
        c: &mut MatMut<'_, f32>,
    ) -> Self {
        let at =
            [a.data.as_ptr().addr(), b.data.as_ptr().addr(), c.as_mut_ptr().addr()].map(|byte| byte / size_of::<f32>());
        GemmShape { trans_a: a.transposed, trans_b: b.transposed, m, n, k, lda: a.ld, ldb: b.ld, ldc: c.ld(), beta, at }
    }

    /// Multiplications and additions, `2·m·n·k`.
    pub fn flops(&self) -> f64 {
        2.0 * self.m as f64 * self.n as f64 * self.k as f64
    }

    /// Elements that `a`, `b` and `c` span.
    fn spans(&self) -> [usize; 3] {
        let span = |rows: usize, cols: usize, ld: usize| (rows - 1) * ld + cols;
        let of = |transposed, rows, cols, ld| if transposed { span(cols, rows, ld) } else { span(rows, cols, ld) };
        [
            of(self.trans_a, self.m, self.k, self.lda),
            of(self.trans_b, self.k, self.n, self.ldb),
            span(self.m, self.n, self.ldc),
        ]
    }
}

static ON: AtomicBool = AtomicBool::new(false);
static LOG: Mutex<Vec<GemmShape>> = Mutex::new(Vec::new());

/// Empties the record and starts it. It covers every thread and device of the process.
pub fn start() {
    LOG.lock().unwrap_or_else(PoisonError::into_inner).clear();
    ON.store(true, Ordering::Release);
}

/// Stops the record and returns it. Products of one thread are in their order; threads are interleaved as they ran.
pub fn take() -> Vec<GemmShape> {
    ON.store(false, Ordering::Release);
    std::mem::take(&mut *LOG.lock().unwrap_or_else(PoisonError::into_inner))
}

/// Whether products are being recorded.
#[inline]
pub(crate) fn is_on() -> bool {
    ON.load(Ordering::Relaxed)
}

pub(crate) fn record(shape: GemmShape) {
    LOG.lock().unwrap_or_else(PoisonError::into_inner).push(shape);
}

/// Memory a replay works on.
#[derive(Debug)]
pub struct Scratch {
    operands: Vec<f32>,
    results: Vec<f32>,
}

impl Scratch {
    /// `elements` for what is read and as many for what is written; more where a single product of `shapes` needs it.
    /// Twice the largest cache or more keeps a replay honest: matrices that were far apart stay apart.
    pub fn new(shapes: &[GemmShape], elements: usize) -> Self {
        let largest = shapes.iter().flat_map(GemmShape::spans).max().unwrap_or(0);
        let elements = elements.max(largest);
        // Plain small numbers: neither zeros nor subnormals, which some processors treat apart.
        let operands = (0..elements).map(|i| (i % 17) as f32 / 64.0 - 0.125).collect();
        Scratch { operands, results: vec![0.25; elements] }
    }
}

/// Makes these products again on the calling thread, in this order. The caller holds the clock, and replays once before
/// it counts, so that the memory is resident.
pub fn replay(shapes: &[GemmShape], scratch: &mut Scratch) {
    let Scratch { operands, results } = scratch;
    for shape in shapes {
        let [in_a, in_b, in_c] = shape.spans();
        // Where it was, modulo the scratch memory, and pushed in from its end.
        let place = |at: usize, span: usize, len: usize| (at % len).min(len - span);
        let a = &operands[place(shape.at[0], in_a, operands.len())..];
        let b = &operands[place(shape.at[1], in_b, operands.len())..];
        let start = place(shape.at[2], in_c, results.len());
        let a = Operand { data: a, ld: shape.lda, transposed: shape.trans_a };
        let b = Operand { data: b, ld: shape.ldb, transposed: shape.trans_b };
        let mut c = MatMut::strided(&mut results[start..], shape.m, shape.n, shape.ldc);
        sgemm(shape.k, 1.0, a, b, shape.beta, &mut c);
    }
}
