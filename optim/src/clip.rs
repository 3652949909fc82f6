//! The gradient norm over all ranks, in an order no layout changes, and the factor that clips it.

use crate::Layout;
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

/// Adds per-block numbers in unit, then block order. `gathered` holds every rank's blocks, rank after rank; a rank's are its
/// shards' blocks, unit after unit, padding blocks included (they count as nothing).
pub(crate) fn fold_blocks(layout: &Layout, gathered: &[f64], world: usize, mut add: impl FnMut(usize, usize, f64)) {
    let per_rank = gathered.len() / world.max(1);
    let mut offset = 0;
    for (u, unit) in layout.units.iter().enumerate() {
        let shard = unit.shard_blocks();
        for block in 0..unit.blocks() {
            let rank = block / shard;
            add(u, rank, gathered[rank * per_rank + offset + block % shard]);
        }
        offset += shard;
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
