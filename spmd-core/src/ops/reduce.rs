//! The ordered sum of the lanes' contributions.

use crate::error::expect_len;
use crate::{Result, View, ViewMut};

/// `out[i] = R(tree(parts[0][i], …, parts[n−1][i]))`: the parts are split top-down into contiguous halves while their
/// count is even; an odd block is a left fold. Sums are fp32; one rounding at the top.
#[derive(Debug)]
pub struct OrderedSum<'a> {
    /// `n` contributions one after another, `out.len()` elements each.
    pub parts: View<'a>,
    /// The sum.
    pub out: ViewMut<'a>,
}

impl OrderedSum<'_> {
    pub(crate) fn check(&self) -> Result<()> {
        let n = self.parts.len() / self.out.len().max(1);
        expect_len("ordered_sum", "parts", n * self.out.len(), self.parts.len())
    }
}
