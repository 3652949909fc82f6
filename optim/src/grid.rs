//! Where a rank stands: which copy of the state it belongs to, which shard of it it holds, which slice it sums.
//!
//! Ranks are split into groups of [`Grid::shard`] neighbours. A group shares one copy of the state: its ranks' *shards* make
//! up the whole. Ranks at the same position of every group are *replicas*: they hold the same shard, and each of them sums
//! and writes one *slice* of it. One group (plain ZeRO-1 to 3) has no replicas, so a slice is the shard; groups of one
//! (stage 0) hold everything, and a slice is what the rank would own under ZeRO.

use spmd_core::{Error, Result};

/// One rank's place among all.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Grid {
    /// This rank.
    pub rank: usize,
    /// Ranks.
    pub world: usize,
    /// Ranks that share one copy of the state.
    pub shard: usize,
}

impl Grid {
    /// One copy of the state over all ranks.
    pub fn whole(rank: usize, world: usize) -> Self {
        Grid { rank, world, shard: world }
    }

    /// Copies of the state: ranks that hold the same shard.
    pub fn replicas(&self) -> usize {
        self.world / self.shard
    }

    /// Which shard this rank holds.
    pub fn position(&self) -> usize {
        self.rank % self.shard
    }

    /// Which copy of the state this rank belongs to, and which slice of its shard it sums.
    pub fn replica(&self) -> usize {
        self.rank / self.shard
    }

    /// The rank that sums slice `slice` of the world's, counted along a unit.
    pub fn owner(&self, slice: usize) -> usize {
        slice % self.replicas() * self.shard + slice / self.replicas()
    }
}

/// How a run is laid out over its ranks. It changes what is whole and when, and how much is sent; never a sum.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash)]
pub struct Sharding {
    /// ZeRO stage. 0: all state whole on every rank; 1: shadow and moments sharded, a micro-batch's gradients whole until
    /// its end; 2: gradients reduced unit by unit; 3: weights sharded too.
    pub stage: u8,
    /// Ranks that share one copy of the state; 1 at stage 0.
    pub group: usize,
    /// Canonical ranks: whose contributions are added in which order.
    pub lanes: usize,
    /// Whether stage 3 lets go of a unit's weights between forward and backward.
    pub reshard_after_forward: bool,
}

impl Sharding {
    /// ZeRO-3 over all ranks, a lane each.
    pub fn zero3(world: usize) -> Self {
        Sharding { stage: 3, group: world, lanes: world, reshard_after_forward: true }
    }

    /// Whether gathered weights stay until the optimizer changes them.
    pub fn keeps_weights(&self) -> bool {
        self.stage < 3 || !self.reshard_after_forward
    }

    /// Whether all gradients of a micro-batch are held before the first is reduced.
    pub fn keeps_gradients(&self) -> bool {
        self.stage < 2
    }

    /// How often a rank goes through a micro-batch: it computes lanes `rank`, `world + rank`, …
    pub fn passes(&self, world: usize) -> usize {
        self.lanes.div_ceil(world)
    }

    /// The grid of one rank.
    ///
    /// # Errors
    /// A group that does not divide the world.
    pub fn grid(&self, rank: usize, world: usize) -> Result<Grid> {
        if self.group == 0 || !world.is_multiple_of(self.group) {
            return Err(Error::Shape {
                op: "sharding",
                what: "the shard group",
                expected: format!("a divisor of the {world} ranks"),
                found: self.group.to_string(),
            });
        }
        Ok(Grid { rank, world, shard: self.group })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_slice_has_one_owner_and_lies_in_its_shard() {
        for (world, shard) in [(1, 1), (4, 4), (4, 2), (4, 1), (8, 2), (6, 3)] {
            let mut owned = vec![0; world];
            for slice in 0..world {
                let owner = Grid { rank: 0, world, shard }.owner(slice);
                owned[owner] += 1;
                let grid = Grid { rank: owner, world, shard };
                assert_eq!(grid.position() * grid.replicas() + grid.replica(), slice);
            }
            assert!(owned.iter().all(|n| *n == 1), "{world} {shard}: {owned:?}");
        }
    }
}
