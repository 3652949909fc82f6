//! Tensors of safetensors files, widened to fp32.

use half::bf16;
use safetensors::{Dtype, SafeTensors};
use std::collections::BTreeMap;
use std::path::Path;

/// The tensors of one file, by name.
#[derive(Debug, Clone, PartialEq)]
pub struct Tensors(pub BTreeMap<String, Vec<f32>>);

impl Tensors {
    /// Reads F32 and BF16 tensors.
    pub fn read(path: &Path) -> Self {
        let bytes = std::fs::read(path).unwrap_or_else(|e| panic!("{}: {e}", path.display()));
        Tensors::parse(&bytes)
    }

    /// Reads F32 and BF16 tensors from a file's bytes.
    pub fn parse(bytes: &[u8]) -> Self {
        let file = SafeTensors::deserialize(bytes).expect("a safetensors file");
        let widen = |dtype: Dtype, data: &[u8]| -> Vec<f32> {
            match dtype {
                Dtype::F32 => data.as_chunks().0.iter().map(|b| f32::from_le_bytes(*b)).collect(),
                Dtype::BF16 => data.as_chunks().0.iter().map(|b| bf16::from_le_bytes(*b).to_f32()).collect(),
                other => panic!("a tensor of {other:?}"),
            }
        };
        Tensors(file.iter().map(|(name, t)| (name.to_owned(), widen(t.dtype(), t.data()))).collect())
    }

    /// One tensor.
    pub fn get(&self, name: &str) -> &[f32] {
        self.0.get(name).unwrap_or_else(|| panic!("no tensor {name} among {:?}", self.0.keys()))
    }

    /// The gradients: `grad.NAME` without the prefix.
    pub fn gradients(&self) -> impl Iterator<Item = (&str, &[f32])> {
        self.0.iter().filter_map(|(name, values)| Some((name.strip_prefix("grad.")?, &values[..])))
    }

    /// The largest [`distance`] of a gradient from that of the same name in `reference`, and which it is.
    pub fn worst_gradient<'a>(&'a self, reference: &Tensors) -> (f64, &'a str) {
        let names = |tensors: &Tensors| tensors.gradients().map(|(name, _)| name.to_owned()).collect::<Vec<_>>();
        assert_eq!(names(self), names(reference), "one gradient a parameter");
        let each = self.gradients().map(|(name, x)| (distance(x, reference.get(&format!("grad.{name}"))), name));
        each.max_by(|a, b| a.0.total_cmp(&b.0)).expect("at least one gradient")
    }
}

/// ‖x − reference‖₂ / ‖reference‖₂, in f64; NaN counts as infinite.
pub fn distance(x: &[f32], reference: &[f32]) -> f64 {
    assert_eq!(x.len(), reference.len(), "tensors of one size");
    let square = |x: f64| x * x;
    let difference: f64 = x.iter().zip(reference).map(|(x, r)| square(*x as f64 - *r as f64)).sum();
    let size: f64 = reference.iter().map(|r| square(*r as f64)).sum();
    let ratio = (difference / size).sqrt();
    // 0/0 is a reference of zeros met exactly.
    if difference == 0.0 {
        0.0
    } else if ratio.is_nan() {
        f64::INFINITY
    } else {
        ratio
    }
}

/// Equal bits, the sign of zero included.
pub fn same_bits(a: &[f32], b: &[f32]) -> bool {
    a.len() == b.len() && a.iter().zip(b).all(|(a, b)| a.to_bits() == b.to_bits())
}
