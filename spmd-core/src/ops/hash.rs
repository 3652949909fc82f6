//! A hash of numbers that does not depend on how they are laid out.

use super::Piece;
use super::optimizer::expect_ordered;
use crate::{Result, View};

/// `sum += Σ mix(key ⊕ rotl(index, 32) ⊕ bits)` modulo 2⁶⁴ over the elements of all pieces, with
/// `key = mix(mix(salt) ⊕ tensor)`.
///
/// `index` is the element's place in its whole parameter and `bits` its fp32 bit pattern; a bf16 element counts with the
/// pattern it widens to, so it hashes like the same number in fp32. [`crate::rng::mix`] is SplitMix64's step (Steele, Lea,
/// Flood: "Fast splittable pseudorandom number generators", OOPSLA 2014, with Stafford's thirteenth set of constants): an
/// increment, then two multiplications between three xor-shifts.
///
/// What follows from that:
/// * Index and bits fill one half of the word each and `mix` is a bijection, so within a parameter of up to 2³² elements
///   every (index, bits) has a term of its own: one changed element always changes the sum, by as little as +0 to −0. (In
///   a longer parameter the index's high half lies over the bits, and different elements may share a term.)
/// * Several changes together cancel only by chance, as 2⁻⁶⁴: two elements swapped, tensors exchanged, a shifted index. It
///   is not made to withstand somebody who looks for such changes.
/// * The sum wraps, so it is the same however the elements are cut into pieces, shards, threads and ranks, whose sums add
///   up to the whole's. Under exclusive-or two equal terms would cancel; here they count twice.
#[derive(Debug)]
pub struct StateHash<'a> {
    /// A shard, or any run of elements.
    pub x: View<'a>,
    /// What is hashed of it: ordered ranges, of any length. Nothing else (padding) counts.
    pub pieces: &'a [Piece],
    /// Tells apart what has the same tensors: weights and their moments, say.
    pub salt: u64,
    /// Added to, modulo 2⁶⁴.
    pub sum: &'a mut u64,
}

impl StateHash<'_> {
    pub(crate) fn check(&self) -> Result<()> {
        expect_ordered("state_hash", self.pieces, self.x.len())
    }
}
