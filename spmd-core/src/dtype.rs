//! The dtypes Umbra stores numbers in.

use half::bf16;

/// Storage type of a buffer. Arithmetic is always fp32 or better, whatever the storage.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum DType {
    /// IEEE single precision.
    F32,
    /// bfloat16: fp32's exponent, 8 significant bits.
    Bf16,
}

impl DType {
    /// Bytes one element takes.
    pub const fn size(self) -> usize {
        match self {
            DType::F32 => 4,
            DType::Bf16 => 2,
        }
    }

    /// `x` rounded to this dtype (nearest, ties to even) and widened again: the identity for fp32.
    pub fn round(self, x: f32) -> f32 {
        match self {
            DType::F32 => x,
            DType::Bf16 => round_bf16(x),
        }
    }

    /// The name used in tables, files and error messages.
    pub const fn name(self) -> &'static str {
        match self {
            DType::F32 => "fp32",
            DType::Bf16 => "bf16",
        }
    }
}

impl std::fmt::Display for DType {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.pad(self.name())
    }
}

/// R16: `x` rounded to bf16 (nearest, ties to even), as fp32. Branch-free for finite values so that loops vectorise;
/// a NaN stays a NaN.
#[inline(always)]
pub fn round_bf16(x: f32) -> f32 {
    let bits = x.to_bits();
    let rounded = bits.wrapping_add(0x7fff + ((bits >> 16) & 1)) & 0xffff_0000;
    // Adding may carry a NaN's payload over into infinity or a sign change: keep the quiet bit instead.
    f32::from_bits(if x.is_nan() { (bits | 0x0040_0000) & 0xffff_0000 } else { rounded })
}

/// R16 as a stored bf16. Same bits as [`round_bf16`].
#[inline(always)]
pub fn to_bf16(x: f32) -> bf16 {
    bf16::from_bits((round_bf16(x).to_bits() >> 16) as u16)
}

/// Widening, exact.
#[inline(always)]
pub fn from_bf16(x: bf16) -> f32 {
    f32::from_bits((x.to_bits() as u32) << 16)
}

/// An element a kernel body can be generic over: how to load it as fp32 and how to store fp32 into it with one rounding.
pub trait Element: Copy + Send + Sync + bytemuck::Pod + 'static {
    /// Which dtype this is.
    const DTYPE: DType;
    /// Exact widening.
    fn load(self) -> f32;
    /// Nearest-even rounding.
    fn store(x: f32) -> Self;
}

impl Element for f32 {
    const DTYPE: DType = DType::F32;
    #[inline(always)]
    fn load(self) -> f32 {
        self
    }
    #[inline(always)]
    fn store(x: f32) -> Self {
        x
    }
}

impl Element for bf16 {
    const DTYPE: DType = DType::Bf16;
    #[inline(always)]
    fn load(self) -> f32 {
        from_bf16(self)
    }
    #[inline(always)]
    fn store(x: f32) -> Self {
        to_bf16(x)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn rounding_agrees_with_half_on_every_high_half_and_every_tie() {
        for high in 0..=u16::MAX {
            for low in [0u32, 1, 0x7fff, 0x8000, 0x8001, 0xffff] {
                let x = f32::from_bits(((high as u32) << 16) | low);
                let (ours, theirs) = (to_bf16(x), bf16::from_f32(x));
                assert!(ours.to_bits() == theirs.to_bits() || (x.is_nan() && ours.is_nan()), "{x:?}");
            }
        }
    }
}
