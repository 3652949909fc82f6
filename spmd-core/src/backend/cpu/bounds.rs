//! Random buffers, and comparison with f64 results that carry an error bound each: for the tests of matrix products,
//! attention and loss.

use crate::rng::{Purpose, Stream};
use crate::{Buffer, DType};

/// `n` standard normal numbers in a buffer, rounded to `dtype`.
pub(super) fn random(dtype: DType, seed: u64, n: usize) -> Buffer {
    let stream = Stream::new(seed, Purpose::Init, 0, 0);
    let values: Vec<f32> = (0..n as u64).map(|i| stream.normal(i) as f32).collect();
    Buffer::from_f32(dtype, &values, "test").unwrap()
}

pub(super) fn zeros(dtype: DType, n: usize) -> Buffer {
    Buffer::zeros(dtype, n, "test").unwrap()
}

/// The stored numbers, exactly.
pub(super) fn exact(buffer: &Buffer) -> Vec<f64> {
    buffer.view().to_f32().into_iter().map(f64::from).collect()
}

/// One unit in the last place of `x` in bf16 (8 significant bits); nothing for fp32, whose rounding the caller's bound has.
fn output_ulp(dtype: DType, x: f64) -> f64 {
    match dtype {
        DType::F32 => 0.0,
        DType::Bf16 if x == 0.0 => 0.0,
        DType::Bf16 => f64::powi(2.0, x.abs().log2().floor() as i32 - 7),
    }
}

/// Every `found[i]` is within `bound[i]` of `expected[i]`, and one unit in the last place more where it was rounded to
/// bf16. A bound is for fp32 arithmetic: where sums cancel it, not the unit, is what counts.
pub(super) fn assert_within(what: &str, found: &Buffer, expected: &[f64], bound: &[f64]) {
    assert_eq!(found.len(), expected.len(), "{what}");
    for (i, ((x, y), bound)) in exact(found).iter().zip(expected).zip(bound).enumerate() {
        let allowed = bound + output_ulp(found.dtype(), *y);
        assert!((x - y).abs() <= allowed, "{what}[{i}] is {x}, expected {y} within {allowed:e}");
    }
}
