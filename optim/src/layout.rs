//! The only ZeRO arithmetic: how a unit is padded and cut into slices and shards, and which parameters each holds.
//!
//! A unit's parameters lie one after another in one flat buffer. It is cut into blocks of [`BLOCK`] elements, and into as
//! many equally long *slices*, runs of blocks, as there are ranks; a *shard* is the slices of all replicas together (see
//! [`crate::grid`]). The last slices of a small unit may hold padding alone.

use crate::grid::Grid;
use spmd_core::ops::{BLOCK, Piece};
use spmd_core::rng::tensor_key;
use spmd_core::{ParamKind, UnitSpec};
use std::ops::Range;

/// How one unit is cut.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct UnitLayout {
    /// Elements without padding.
    pub len: usize,
    /// Elements of every slice, a multiple of [`BLOCK`].
    pub slice_len: usize,
    grid: Grid,
}

impl UnitLayout {
    /// Cuts `len` elements for the ranks of `grid`.
    pub fn new(len: usize, grid: Grid) -> Self {
        UnitLayout { len, slice_len: len.div_ceil(BLOCK).div_ceil(grid.world) * BLOCK, grid }
    }

    /// Elements of every shard.
    pub fn shard_len(&self) -> usize {
        self.slice_len * self.grid.replicas()
    }

    /// Elements of the gathered unit, padding included.
    pub fn padded_len(&self) -> usize {
        self.slice_len * self.grid.world
    }

    /// The flat elements of this rank's shard, padding excluded; may be empty.
    pub fn shard(&self) -> Range<usize> {
        self.cut(self.grid.position() * self.shard_len(), self.shard_len())
    }

    /// The flat elements of this rank's slice, padding excluded; may be empty.
    pub fn slice(&self) -> Range<usize> {
        self.cut(self.grid.position() * self.shard_len() + self.slice_in_shard().start, self.slice_len)
    }

    /// Where this rank's slice lies in its shard, padding included.
    pub fn slice_in_shard(&self) -> Range<usize> {
        let start = self.grid.replica() * self.slice_len;
        start..start + self.slice_len
    }

    fn cut(&self, start: usize, len: usize) -> Range<usize> {
        start.min(self.len)..(start + len).min(self.len)
    }

    /// Blocks of every slice, padding included.
    pub fn slice_blocks(&self) -> usize {
        self.slice_len / BLOCK
    }

    /// Blocks of every shard, padding included.
    pub fn shard_blocks(&self) -> usize {
        self.shard_len() / BLOCK
    }

    /// Blocks that hold weights.
    pub fn blocks(&self) -> usize {
        self.len.div_ceil(BLOCK)
    }
}

/// A run of one rank's shard or slice that belongs to one parameter.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Segment {
    /// Index of the parameter in its unit.
    pub param: usize,
    /// Where in the shard or slice.
    pub range: Range<usize>,
    /// Index of the first element within the parameter.
    pub start: usize,
}

/// The cut of a whole model, seen from one rank.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Layout {
    /// This rank's place.
    pub grid: Grid,
    /// One entry a unit.
    pub units: Vec<UnitLayout>,
    /// Per unit: the parameters in this rank's shard, in order.
    pub segments: Vec<Vec<Segment>>,
    /// Per unit: the parameters in this rank's slice, in order.
    pub slices: Vec<Vec<Segment>>,
    /// Per unit: the shard's segments cut at block borders, as the optimizer's kernel takes them.
    pub pieces: Vec<Vec<Piece>>,
}

impl Layout {
    /// Cuts `units` for the rank of `grid`. Weight decay applies to matrices, to gains only with `decay_norms`.
    pub fn new(units: &[UnitSpec], grid: Grid, decay_norms: bool) -> Self {
        let layouts: Vec<_> = units.iter().map(|u| UnitLayout::new(u.len(), grid)).collect();
        let each = |part: fn(&UnitLayout) -> Range<usize>| {
            units.iter().zip(&layouts).map(|(u, l)| segments(u, part(l))).collect::<Vec<_>>()
        };
        let (segments, slices) = (each(UnitLayout::shard), each(UnitLayout::slice));
        let pieces = units.iter().zip(&segments).map(|(u, s)| pieces(u, s, decay_norms)).collect();
        Layout { grid, units: layouts, segments, slices, pieces }
    }

    /// Elements of this rank's shards together.
    pub fn shard_len(&self) -> usize {
        self.units.iter().map(UnitLayout::shard_len).sum()
    }

    /// Elements of this rank's slices together.
    pub fn slice_len(&self) -> usize {
        self.units.iter().map(|u| u.slice_len).sum()
    }

    /// The longest padded unit.
    pub fn largest(&self) -> usize {
        self.units.iter().map(UnitLayout::padded_len).max().unwrap_or(0)
    }

    /// The longest shard of a unit.
    pub fn largest_shard(&self) -> usize {
        self.units.iter().map(UnitLayout::shard_len).max().unwrap_or(0)
    }

    /// The longest slice of a unit.
    pub fn largest_slice(&self) -> usize {
        self.units.iter().map(|u| u.slice_len).max().unwrap_or(0)
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
    fn every_element_has_one_slice_and_slices_start_on_block_borders() {
        for len in [1, 48, 4095, 4096, 4097, 3 * 4096 + 1, 100_000] {
            for (world, shard) in [(1, 1), (2, 2), (3, 3), (4, 4), (4, 2), (4, 1), (7, 7), (8, 2)] {
                let layout = |rank| UnitLayout::new(len, Grid { rank, world, shard });
                let mut owned: Vec<Range<usize>> = (0..world).map(|rank| layout(rank).slice()).collect();
                owned.sort_by_key(|r| (r.start, r.end));
                let mut at = 0;
                for slice in owned {
                    assert_eq!(slice.start, at);
                    assert!(slice.is_empty() || slice.start.is_multiple_of(BLOCK));
                    at = slice.end;
                }
                assert_eq!(at, len);
                for rank in 0..world {
                    let l = layout(rank);
                    assert_eq!((l.slice_len % BLOCK, l.padded_len()), (0, l.shard_len() * shard));
                    assert!(l.padded_len() >= len);
                    assert!(l.slice().start >= l.shard().start && l.slice().end <= l.shard().end);
                    let held: usize = (0..shard).map(|p| layout(p).shard().len()).sum();
                    assert_eq!(held, len, "a group holds everything");
                }
            }
        }
    }

    #[test]
    fn pieces_cover_each_parameter_once_within_blocks() {
        let u = unit(&[48, 9000, 48, 5000]);
        for world in [1, 2, 3, 7] {
            let mut seen = [0u64; 4];
            for rank in 0..world {
                let layout = Layout::new(std::slice::from_ref(&u), Grid::whole(rank, world), false);
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
