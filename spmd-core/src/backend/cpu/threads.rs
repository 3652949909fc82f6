//! The threads kernels run on. Callers cut their work by shape and hand over one closure a piece.

use crate::{Error, Result};
use rayon::prelude::*;

/// A pool of this rank's own, or nothing: one thread runs inline.
pub(super) struct Threads {
    pool: Option<rayon::ThreadPool>,
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

    /// Runs `f(i, chunk)` on consecutive chunks of `data`, `chunk` elements each (the last may be short).
    pub(super) fn chunks<T: Send>(&self, data: &mut [T], chunk: usize, f: impl Fn(usize, &mut [T]) + Sync + Send) {
        match &self.pool {
            Some(pool) if data.len() > chunk => {
                pool.install(|| data.par_chunks_mut(chunk).enumerate().for_each(|(i, c)| f(i, c)));
            }
            _ => data.chunks_mut(chunk).enumerate().for_each(|(i, c)| f(i, c)),
        }
    }

    /// Like [`Threads::chunks`] on two slices cut into the same number of chunks.
    pub(super) fn chunks2<T: Send, U: Send>(
        &self,
        a: (&mut [T], usize),
        b: (&mut [U], usize),
        f: impl Fn(usize, &mut [T], &mut [U]) + Sync + Send,
    ) {
        match &self.pool {
            Some(pool) if a.0.len() > a.1 => pool.install(|| {
                let pairs = a.0.par_chunks_mut(a.1).zip(b.0.par_chunks_mut(b.1));
                pairs.enumerate().for_each(|(i, (x, y))| f(i, x, y));
            }),
            _ => {
                let pairs = a.0.chunks_mut(a.1).zip(b.0.chunks_mut(b.1));
                pairs.enumerate().for_each(|(i, (x, y))| f(i, x, y));
            }
        }
    }
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
