//! The sum over a micro-batch's lanes on fewer ranks than lanes.
//!
//! The lanes are split top-down into contiguous halves while their count is even; an odd block is a left fold. A pass over
//! the ranks sums a run of lanes that is a subtree (or a single lane), so over passes the same tree remains: `2^levels`
//! blocks, each a left fold of `fold` passes. Like a binary counter, it needs one partial sum a level, and one for the fold.

use crate::Result;
use spmd_core::ops::Accumulate;
use spmd_core::{Buffer, DType, Device, View, ViewMut};

/// The tree over the passes of a micro-batch.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Tree {
    levels: u32,
    fold: usize,
}

impl Tree {
    /// The tree over `passes` sums.
    pub(crate) fn new(passes: usize) -> Self {
        let levels = passes.max(1).trailing_zeros();
        Tree { levels, fold: passes.max(1) >> levels }
    }

    /// Whether there is a single pass and nothing to hold.
    pub(crate) fn is_single(self) -> bool {
        self.levels == 0 && self.fold == 1
    }

    /// Partial sums held at most, beside the incoming one.
    pub(crate) fn partials(self) -> usize {
        self.levels as usize + usize::from(self.fold > 1)
    }

    fn passes(self) -> usize {
        self.fold << self.levels
    }
}

/// One slice's partial sums, all fp32.
#[derive(Debug)]
pub(crate) struct Partials {
    tree: Tree,
    /// Sum of `2^l` blocks each, where the counter has a one.
    levels: Vec<Buffer>,
    /// The left fold of an odd block.
    fold: Option<Buffer>,
}

/// Where a block's sum is.
#[derive(Clone, Copy)]
enum At {
    Incoming,
    Fold,
    Level(usize),
}

impl Partials {
    pub(crate) fn new(device: &Device, tree: Tree, len: usize) -> Result<Self> {
        let zeros = || device.zeros(DType::F32, len, "partial sums");
        let levels = (0..tree.levels).map(|_| zeros()).collect::<spmd_core::Result<_>>()?;
        Ok(Partials { tree, levels, fold: (tree.fold > 1).then(zeros).transpose()? })
    }

    /// Bytes of all partial sums.
    pub(crate) fn allocated(&self) -> usize {
        self.levels.iter().chain(&self.fold).map(Buffer::allocated).sum()
    }

    /// Where the sum over the lanes of `pass` is to be written, before [`Partials::add`].
    pub(crate) fn landing<'a>(&'a mut self, pass: usize, incoming: &'a mut Buffer) -> ViewMut<'a> {
        let (block, i) = (pass / self.tree.fold, pass % self.tree.fold);
        match &mut self.fold {
            Some(fold) if i == 0 => fold.view_mut(),
            None if block % 2 == 0 => self.levels[0].view_mut(),
            _ => incoming.view_mut(),
        }
    }

    /// Takes in what was written to [`Partials::landing`]; after the last pass returns the sum over all lanes.
    pub(crate) fn add<'a>(
        &'a mut self,
        device: &Device,
        pass: usize,
        incoming: &'a Buffer,
    ) -> Result<Option<View<'a>>> {
        let (block, i) = (pass / self.tree.fold, pass % self.tree.fold);
        if let Some(fold) = self.fold.as_mut().filter(|_| i > 0) {
            device.accumulate(Accumulate { acc: fold.view_mut(), x: incoming.view(), first: false })?;
        }
        if i + 1 < self.tree.fold {
            return Ok(None);
        }
        // Every level below the counter's lowest zero is full: the block is added to it from the right, level by level.
        let full = block.trailing_ones() as usize;
        let mut at = match self.fold {
            Some(_) => At::Fold,
            None if full == 0 => At::Level(0),
            None => At::Incoming,
        };
        for level in 0..full {
            let (below, rest) = self.levels.split_at_mut(level);
            let x = match at {
                At::Incoming => incoming.view(),
                At::Fold => self.fold.as_ref().map_or(incoming.view(), Buffer::view),
                At::Level(l) => below[l].view(),
            };
            device.accumulate(Accumulate { acc: rest[0].view_mut(), x, first: false })?;
            at = At::Level(level);
        }
        if pass + 1 < self.tree.passes() {
            match at {
                At::Level(l) if l != full => self.levels.swap(l, full),
                At::Fold => self.fold.iter_mut().for_each(|fold| std::mem::swap(fold, &mut self.levels[full])),
                At::Level(_) | At::Incoming => {}
            }
            return Ok(None);
        }
        Ok(Some(match at {
            At::Level(l) => self.levels[l].view(),
            At::Fold | At::Incoming => self.fold.as_ref().map_or(incoming.view(), Buffer::view),
        }))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The tree, written down plainly.
    fn tree(x: &[f32]) -> f32 {
        match x.len() % 2 {
            0 => tree(&x[..x.len() / 2]) + tree(&x[x.len() / 2..]),
            _ => x[1..].iter().fold(x[0], |sum, x| sum + x),
        }
    }

    #[test]
    fn passes_are_summed_as_the_tree_over_them() {
        let device = Device::cpu(1).unwrap();
        for passes in [2, 3, 4, 5, 6, 7, 8, 9, 10, 12, 16, 20, 24, 48] {
            // Numbers of many exponents, so that another order gives other bits.
            let value =
                |p: usize, i: usize| ((p * 37 + i * 11) % 97) as f32 * 1.000_1_f32.powi((p * p % 31) as i32 * 300);
            let len = 5;
            let mut partials = Partials::new(&device, Tree::new(passes), len).unwrap();
            let mut incoming = Buffer::zeros(DType::F32, len, "test").unwrap();
            for round in 0..2 {
                for pass in 0..passes {
                    let x: Vec<f32> = (0..len).map(|i| value(pass, i + round)).collect();
                    partials.landing(pass, &mut incoming).copy_from_f32(&x);
                    let sum = partials.add(&device, pass, &incoming).unwrap().map(|v| v.to_f32());
                    assert_eq!(sum.is_some(), pass + 1 == passes);
                    if let Some(sum) = sum {
                        for (i, sum) in sum.iter().enumerate() {
                            let all: Vec<f32> = (0..passes).map(|p| value(p, i + round)).collect();
                            assert_eq!(sum.to_bits(), tree(&all).to_bits(), "{passes} passes, element {i}");
                        }
                    }
                }
            }
        }
    }

    #[test]
    fn a_partial_sum_is_held_for_each_power_of_two_and_one_for_an_odd_fold() {
        let partials = |passes| Tree::new(passes).partials();
        assert_eq!([1, 2, 4, 8, 3, 6, 12].map(partials), [0, 1, 2, 3, 1, 2, 3]);
    }
}
