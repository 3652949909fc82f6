//! What the kernels' tests share.

use super::threads::Threads;
use crate::rng::{Purpose, Stream, tensor_key};
use crate::{Buffer, DType};

/// Half an fp32 unit in the last place, relative: the bound on one rounding.
pub(super) const U: f64 = 1.0 / (1u64 << 24) as f64;
/// The same of bf16.
pub(super) const U16: f64 = 1.0 / 256.0;

/// Standard normal numbers, the same for the same name.
pub(super) fn normal(name: &str, n: usize) -> Vec<f32> {
    let stream = Stream::new(1, Purpose::Init, tensor_key(name), 0);
    (0..n as u64).map(|i| stream.normal(i) as f32).collect()
}

/// These numbers in a buffer.
pub(super) fn buffer(dtype: DType, values: &[f32]) -> Buffer {
    Buffer::from_f32(dtype, values, "a test").expect("memory for a test")
}

/// The result of `f` with 1, 2 and 3 threads, which must be the same to the bit.
pub(super) fn same_on_threads<R: PartialEq + std::fmt::Debug>(f: impl Fn(&Threads) -> R) -> R {
    let run = |n| f(&Threads::new(n).expect("threads for a test"));
    let one = run(1);
    for n in [2, 3] {
        assert!(one == run(n), "{n} threads gave other bits than one");
    }
    one
}

/// The derivative of `f` at `x[i]`, by central differences.
pub(super) fn slope(x: &[f64], i: usize, f: impl Fn(&[f64]) -> f64) -> f64 {
    let h = 1e-5;
    let mut moved = x.to_vec();
    moved[i] = x[i] + h;
    let above = f(&moved);
    moved[i] = x[i] - h;
    (above - f(&moved)) / (2.0 * h)
}

/// Widened to f64.
pub(super) fn wide(x: &[f32]) -> Vec<f64> {
    x.iter().map(|x| *x as f64).collect()
}
