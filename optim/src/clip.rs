//! The gradient norm over all ranks, in an order no layout changes, and the factor that clips it.

use crate::{Layout, UnitLayout};
use spmd_core::precision::ClipForm;

/// Added to the norm in the factor's denominator, as both engines do.
const CLIP_EPS: f64 = 1e-6;

/// The factor gradients are multiplied by so that their norm is at most `max_norm` (0: off). A norm of zero or below the
/// limit leaves them untouched.
pub fn clip_factor(norm: f64, max_norm: f64, form: ClipForm) -> f32 {
    if max_norm <= 0.0 {
        return 1.0;
    }
    let factor = match form {
        ClipForm::Torch => (max_norm / (norm + CLIP_EPS)).min(1.0),
        ClipForm::DeepSpeed => 1.0 / ((norm + CLIP_EPS) / max_norm).max(1.0),
    };
    factor as f32
}

/// Adds per-block numbers in unit, then block order: `add(unit, part, number)`. `gathered` holds every part's blocks, part
/// after part; a part's are its cut of each unit, unit after unit, padding blocks included (they count as nothing).
/// `blocks(unit)` says how many blocks each part has of a unit, and `part(i)` which part has the `i`-th cut.
pub(crate) fn fold_blocks(
    layout: &Layout,
    gathered: &[f64],
    parts: usize,
    blocks: impl Fn(&UnitLayout) -> usize,
    part: impl Fn(usize) -> usize,
    mut add: impl FnMut(usize, usize, f64),
) {
    let per_part = gathered.len() / parts.max(1);
    let mut offset = 0;
    for (u, unit) in layout.units.iter().enumerate() {
        let cut = blocks(unit);
        for block in 0..unit.blocks() {
            let part = part(block / cut);
            add(u, part, gathered[part * per_part + offset + block % cut]);
        }
        offset += cut;
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_factor_leaves_small_norms_alone_and_lands_large_ones_on_the_limit() {
        for form in [ClipForm::Torch, ClipForm::DeepSpeed] {
            assert_eq!(clip_factor(0.0, 1.0, form), 1.0);
            assert_eq!(clip_factor(0.9, 1.0, form), 1.0);
            assert_eq!(clip_factor(50.0, 0.0, form), 1.0, "off");
            assert_eq!(clip_factor(4.0, 1.0, form), (1.0 / 4.000001f64) as f32);
        }
    }
}
