//! The threads kernels run on. Callers cut their work by shape and hand over one closure a piece.

use crate::{Error, Result, ViewMut};
use rayon::prelude::*;

/// A pool of this rank's own, or nothing: one thread runs inline.
pub(super) struct Threads {
    pool: Option<rayon::ThreadPool>,
}

/// Writable data that lies in consecutive chunks: a slice or a view with its chunk length, or a pair of such.
pub(super) trait Cut: Send + Sized {
    /// The first `chunks` chunks and the rest.
    fn cut(self, chunks: usize) -> (Self, Self);
}

impl<T: Send> Cut for (&mut [T], usize) {
    fn cut(self, chunks: usize) -> (Self, Self) {
        let (data, chunk) = self;
        let (head, tail) = data.split_at_mut((chunks * chunk).min(data.len()));
        ((head, chunk), (tail, chunk))
    }
}

impl Cut for (ViewMut<'_>, usize) {
    fn cut(self, chunks: usize) -> (Self, Self) {
        let (data, chunk) = self;
        let at = (chunks * chunk).min(data.len());
        let (head, tail) = data.split_at(at);
        ((head, chunk), (tail, chunk))
    }
}

impl<A: Cut, B: Cut> Cut for (A, B) {
    fn cut(self, chunks: usize) -> (Self, Self) {
        let ((a, c), (b, d)) = (self.0.cut(chunks), self.1.cut(chunks));
        ((a, b), (c, d))
    }
}

impl Threads {
    pub(super) fn new(threads: usize) -> Result<Self> {
        let build = |n| rayon::ThreadPoolBuilder::new().num_threads(n).thread_name(|i| format!("umbra-{i}")).build();
        let pool = match threads {
            0 | 1 => None,
            n => Some(build(n).map_err(|e| Error::Device { name: "cpu".to_owned(), reason: e.to_string() })?),
        };
        Ok(Threads { pool })
    }

    /// Runs `f(i)` for every `i < n`, on any thread, in any order.
    pub(super) fn each(&self, n: usize, f: impl Fn(usize) + Sync + Send) {
        match &self.pool {
            Some(pool) if n > 1 => pool.install(|| (0..n).into_par_iter().for_each(f)),
            _ => (0..n).for_each(f),
        }
    }

    /// Runs `f(i, part)` on each of the `n` chunks of `data`, on any thread, in any order.
    pub(super) fn parts<D: Cut>(&self, n: usize, data: D, f: impl Fn(usize, D) + Sync + Send) {
        match &self.pool {
            Some(pool) if n > 1 => pool.install(|| halve(0, n, data, &f)),
            _ => {
                let mut rest = data;
                for i in 0..n {
                    let (part, tail) = rest.cut(1);
                    f(i, part);
                    rest = tail;
                }
            }
        }
    }

    /// Runs `f(i, chunk)` on consecutive chunks of `data`, `chunk` elements each (the last may be short).
    pub(super) fn chunks<T: Send>(&self, data: &mut [T], chunk: usize, f: impl Fn(usize, &mut [T]) + Sync + Send) {
        let chunk = chunk.max(1);
        self.parts(data.len().div_ceil(chunk), (data, chunk), |i, (part, _)| f(i, part));
    }

    /// Like [`Threads::chunks`] on two slices cut into the same number of chunks.
    pub(super) fn chunks2<T: Send, U: Send>(
        &self,
        a: (&mut [T], usize),
        b: (&mut [U], usize),
        f: impl Fn(usize, &mut [T], &mut [U]) + Sync + Send,
    ) {
        let (a, b) = ((a.0, a.1.max(1)), (b.0, b.1.max(1)));
        self.parts(a.0.len().div_ceil(a.1), (a, b), |i, ((x, _), (y, _))| f(i, x, y));
    }
}

/// Halves the chunks between two tasks until one is left.
fn halve<D: Cut, F: Fn(usize, D) + Sync>(first: usize, n: usize, data: D, f: &F) {
    if n <= 1 {
        return f(first, data);
    }
    let (left, right) = data.cut(n / 2);
    rayon::join(|| halve(first, n / 2, left, f), || halve(first + n / 2, n - n / 2, right, f));
}

/// Elements a task should have at least, so that handing it out costs little beside its work.
const TASK: usize = 32 * 1024;

/// Rows of `row_len` elements that make one task: a function of the shape, never of the threads.
pub(super) fn rows_per_task(row_len: usize) -> usize {
    (TASK / row_len.max(1)).max(1)
}

/// The instruction set `multiversion` bodies are dispatched to on this machine.
pub(super) fn isa() -> &'static str {
    #[cfg(target_arch = "x86_64")]
    {
        if std::is_x86_feature_detected!("avx512f")
            && std::is_x86_feature_detected!("avx512bw")
            && std::is_x86_feature_detected!("avx512dq")
            && std::is_x86_feature_detected!("avx512vl")
        {
            return "AVX-512";
        }
        if std::is_x86_feature_detected!("avx2") && std::is_x86_feature_detected!("fma") {
            return "AVX2";
        }
    }
    "portable"
}
