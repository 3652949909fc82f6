//! Groups of ranks: who moves data with whom. The groups of a kind are of one size and share all ranks among them.

use std::fmt;

/// The ranks that a communicator's calls move data between.
///
/// With `G` ranks to a group, hybrid sharding puts a shard's ranks into `Contiguous(G)` and the ranks that hold the same
/// shard into `Strided(G)`.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Group {
    /// All ranks.
    World,
    /// Groups of `n` neighbours: ranks `k·n` up to `(k + 1)·n`.
    Contiguous(usize),
    /// `n` groups of ranks that lie `n` apart: those with the same `rank % n`.
    Strided(usize),
}

impl Group {
    /// How many ranks a group has in a world of `world` ranks, which the group's number divides.
    pub(crate) fn size(self, world: usize) -> usize {
        match self {
            Group::World => world,
            Group::Contiguous(n) => n,
            Group::Strided(n) => world / n,
        }
    }

    /// Which group `rank` is in, counted from 0.
    pub(crate) fn number(self, rank: usize) -> usize {
        match self {
            Group::World => 0,
            Group::Contiguous(n) => rank / n,
            Group::Strided(n) => rank % n,
        }
    }

    /// The place of `rank` in its group, from 0: members are in the order of their ranks.
    pub(crate) fn place(self, rank: usize) -> usize {
        match self {
            Group::World => rank,
            Group::Contiguous(n) => rank % n,
            Group::Strided(n) => rank / n,
        }
    }
}

/// As messages name it.
impl fmt::Display for Group {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Group::World => f.write_str("the world"),
            Group::Contiguous(n) => write!(f, "groups of {n} neighbouring ranks"),
            Group::Strided(n) => write!(f, "groups of ranks {n} apart"),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranks_are_shared_out() {
        // (kind, size in a world of six, the groups)
        let cases: [(Group, usize, &[&[usize]]); 5] = [
            (Group::World, 6, &[&[0, 1, 2, 3, 4, 5]]),
            (Group::Contiguous(2), 2, &[&[0, 1], &[2, 3], &[4, 5]]),
            (Group::Contiguous(3), 3, &[&[0, 1, 2], &[3, 4, 5]]),
            (Group::Strided(2), 3, &[&[0, 2, 4], &[1, 3, 5]]),
            (Group::Strided(3), 2, &[&[0, 3], &[1, 4], &[2, 5]]),
        ];
        for (group, size, groups) in cases {
            assert_eq!(group.size(6), size);
            for (number, members) in groups.iter().enumerate() {
                for (place, rank) in members.iter().enumerate() {
                    assert_eq!((group.number(*rank), group.place(*rank)), (number, place), "{group}, rank {rank}");
                }
            }
        }
    }
}
