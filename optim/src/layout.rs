//! The only ZeRO arithmetic: how a unit is padded and cut into shards, and which parameters a shard holds.
//!
//! A unit's parameters lie one after another in one flat buffer. It is cut into blocks of [`BLOCK`] elements, and rank `r`
//! owns the `r`-th run of blocks; all runs are equally long, so the last ranks of a small unit may own padding alone.

use spmd_core::ops::{BLOCK, Piece};
use spmd_core::rng::tensor_key;
use spmd_core::{ParamKind, UnitSpec};
use std::ops::Range;

/// How one unit is cut.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct UnitLayout {
    /// Elements without padding.
    pub len: usize,
    /// Elements of every rank's shard, a multiple of [`BLOCK`].
    pub shard_len: usize,
    world: usize,
}

impl UnitLayout {
    /// Cuts `len` elements for `world` ranks.
    pub fn new(len: usize, world: usize) -> Self {
        UnitLayout { len, shard_len: len.div_ceil(BLOCK).div_ceil(world) * BLOCK, world }
    }

    /// Elements of the gathered unit, padding included.
    pub fn padded_len(&self) -> usize {
        self.shard_len * self.world
    }

    /// The flat elements rank `rank` owns, padding excluded; may be empty.
    pub fn owned(&self, rank: usize) -> Range<usize> {
        let start = (rank * self.shard_len).min(self.len);
        start..(start + self.shard_len).min(self.len)
    }

    /// Blocks of every rank's shard, padding included.
    pub fn shard_blocks(&self) -> usize {
        self.shard_len / BLOCK
    }

    /// Blocks that hold weights.
    pub fn blocks(&self) -> usize {
        self.len.div_ceil(BLOCK)
    }
}

/// A run of one rank's shard that belongs to one parameter.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Segment {
    /// Index of the parameter in its unit.
    pub param: usize,
    /// Where in the shard.
    pub range: Range<usize>,
    /// Index of the first element within the parameter.
    pub start: usize,
}

/// The cut of a whole model, seen from one rank.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Layout {
    /// One entry a unit.
    pub units: Vec<UnitLayout>,
    /// Per unit: the parameters in this rank's shard, in order.
    pub segments: Vec<Vec<Segment>>,
    /// Per unit: the segments cut at block borders, as the optimizer's kernel takes them.
    pub pieces: Vec<Vec<Piece>>,
}

impl Layout {
    /// Cuts `units` for rank `rank` of `world`. Weight decay applies to matrices, to gains only with `decay_norms`.
    pub fn new(units: &[UnitSpec], rank: usize, world: usize, decay_norms: bool) -> Self {
        let layouts: Vec<_> = units.iter().map(|u| UnitLayout::new(u.len(), world)).collect();
        let segments: Vec<_> = units.iter().zip(&layouts).map(|(u, l)| segments(u, l.owned(rank))).collect();
        let pieces = units.iter().zip(&segments).map(|(u, s)| pieces(u, s, decay_norms)).collect();
        Layout { units: layouts, segments, pieces }
    }

    /// Elements of this rank's shards together.
    pub fn shard_len(&self) -> usize {
        self.units.iter().map(|u| u.shard_len).sum()
    }

    /// The longest padded unit.
    pub fn largest(&self) -> usize {
        self.units.iter().map(UnitLayout::padded_len).max().unwrap_or(0)
    }
}

fn segments(unit: &UnitSpec, owned: Range<usize>) -> Vec<Segment> {
    let overlap = |(param, range): (usize, Range<usize>)| {
        let (start, end) = (range.start.max(owned.start), range.end.min(owned.end));
        (start < end).then(|| Segment {
            param,
            range: start - owned.start..end - owned.start,
            start: start - range.start,
        })
    };
    unit.ranges().into_iter().enumerate().filter_map(overlap).collect()
}

fn pieces(unit: &UnitSpec, segments: &[Segment], decay_norms: bool) -> Vec<Piece> {
    let mut pieces = Vec::new();
    for s in segments {
        let param = &unit.params[s.param];
        let decay = decay_norms || param.kind == ParamKind::Matrix;
        let mut at = s.range.start;
        while at < s.range.end {
            let end = ((at / BLOCK + 1) * BLOCK).min(s.range.end);
            let first_index = (s.start + at - s.range.start) as u64;
            pieces.push(Piece { range: at..end, tensor: tensor_key(&param.name), first_index, decay });
            at = end;
        }
    }
    pieces
}

#[cfg(test)]
mod tests {
    use super::*;
    use spmd_core::ParamSpec;

    fn unit(lens: &[usize]) -> UnitSpec {
        let param = |(i, n): (usize, &usize)| ParamSpec {
            name: format!("p{i}"),
            shape: vec![*n],
            kind: if i % 2 == 0 { ParamKind::Gain } else { ParamKind::Matrix },
        };
        UnitSpec { name: "u".to_owned(), params: lens.iter().enumerate().map(param).collect() }
    }

    #[test]
    fn every_element_has_one_owner_and_shards_start_on_block_borders() {
        for len in [1, 48, 4095, 4096, 4097, 3 * 4096 + 1, 100_000] {
            for world in [1, 2, 3, 4, 7, 8] {
                let l = UnitLayout::new(len, world);
                assert_eq!(l.shard_len % BLOCK, 0);
                let mut at = 0;
                for rank in 0..world {
                    let r = l.owned(rank);
                    assert_eq!(r.start, at.min(len));
                    assert!(r.is_empty() || r.start.is_multiple_of(BLOCK));
                    at = r.end;
                }
                assert_eq!(at, len);
                assert!(l.padded_len() >= len);
            }
        }
    }

    #[test]
    fn pieces_cover_each_parameter_once_within_blocks() {
        let u = unit(&[48, 9000, 48, 5000]);
        for world in [1, 2, 3, 7] {
            let mut seen = [0u64; 4];
            for rank in 0..world {
                let layout = Layout::new(std::slice::from_ref(&u), rank, world, false);
                for p in &layout.pieces[0] {
                    assert_eq!(p.range.start / BLOCK, (p.range.end - 1) / BLOCK);
                    let i = (0..4).find(|i| tensor_key(&format!("p{i}")) == p.tensor).unwrap();
                    assert_eq!(p.first_index, seen[i], "pieces come in order");
                    assert_eq!(p.decay, i % 2 == 1);
                    seen[i] += p.range.len() as u64;
                }
            }
            assert_eq!(seen, [48, 9000, 48, 5000]);
        }
    }
}
