//! Runs that must not differ: what is trained (a recipe), and all the ways to lay it out.

use crate::cases::{Data, uneven_rows};
use spmd_core::Policy;
use std::fmt;

/// Models whose sizes divide badly: tied with a window, and untied with scaled RoPE.
pub const FIXTURES: [&str; 2] = ["mistral-odd-tied", "llama-scaled-rope"];

/// The numbers of ranks that keep the bits, for 8 and for 12 lanes.
pub const WORLDS: [(usize, [usize; 4]); 2] = [(8, [1, 2, 4, 8]), (12, [1, 3, 6, 12])];

/// What decides the bits of a run.
#[derive(Debug, Clone, Copy, PartialEq, Eq, PartialOrd, Ord)]
pub struct Recipe {
    /// The model.
    pub fixture: &'static str,
    /// The precision policy.
    pub policy: Policy,
    /// Canonical ranks.
    pub lanes: usize,
    /// Micro-batches of a step: one of two rows, or three of one row.
    pub accum: usize,
}

impl Recipe {
    /// Steps of a run: a whole one, the short one that ends the epoch, and a whole one of the next epoch.
    pub const STEPS: usize = 3;

    /// The rows: one step's and five more (with accumulation a micro-batch's and five more), so that in the short step a
    /// lane has one row where others have two, lanes have no row, and a micro-batch is missing.
    pub fn rows(&self) -> Data {
        let whole = self.lanes * self.accum * self.micro_batch();
        let short = self.lanes * (self.accum / 2) + 5;
        Data::new(uneven_rows(whole + short))
    }

    fn micro_batch(&self) -> usize {
        if self.accum == 1 { 2 } else { 1 }
    }

    /// The flags of `umbra train`, the layout left out. Rows are shuffled, every gradient is clipped.
    pub fn flags(&self) -> String {
        let Recipe { policy, lanes, accum, .. } = self;
        format!(
            "--policy {} --lanes {lanes} --accum {accum} --micro-batch {} --steps {} --seed 3 --lr 1e-3 --weight-decay 0.1 \
             --clip 0.5 --hash-every 1 --keep 0",
            policy.name(),
            self.micro_batch(),
            Recipe::STEPS
        )
    }

    /// A rank for each lane: the run that the others of this recipe are held against.
    pub fn reference(self) -> Combination {
        let ranks = self.lanes;
        let layout = Layout { ranks, stage: 3, group: Group::All, reshard: true, recompute: false, threads: 1 };
        Combination { recipe: self, layout }
    }
}

impl fmt::Display for Recipe {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Recipe { fixture, policy, lanes, accum } = self;
        write!(f, "{fixture}, {}, {lanes} lanes, accum {accum}", policy.name())
    }
}

/// Ranks that share one copy of the state.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub enum Group {
    /// All of them.
    All,
    /// Some of them: two, or three where twos are not a power of two.
    Some,
    /// Each on its own.
    One,
}

impl Group {
    /// How many ranks that is, of `ranks`.
    pub fn size(self, ranks: usize) -> usize {
        match self {
            Group::All => ranks,
            Group::Some if ranks.is_multiple_of(2) && (ranks / 2).is_power_of_two() => 2,
            Group::Some => 3,
            Group::One => 1,
        }
    }
}

impl fmt::Display for Group {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Group::All => "all",
            Group::Some => "some",
            Group::One => "one",
        })
    }
}

/// What must not.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Layout {
    /// Ranks.
    pub ranks: usize,
    /// ZeRO stage.
    pub stage: u8,
    /// Ranks that share one copy of the state.
    pub group: Group,
    /// Whether weights are let go of between forward and backward.
    pub reshard: bool,
    /// Whether the backward pass computes activations again.
    pub recompute: bool,
    /// Threads of each rank.
    pub threads: usize,
}

impl Layout {
    /// Every layout of `ranks` ranks.
    pub fn all(ranks: usize) -> Vec<Self> {
        let mut layouts = Vec::new();
        for (stage, group, reshard) in placements(ranks) {
            for (recompute, threads) in [(false, 1), (false, 2), (true, 1), (true, 2)] {
                layouts.push(Layout { ranks, stage, group, reshard, recompute, threads });
            }
        }
        layouts
    }

    /// Its flags of `umbra train`.
    pub fn flags(&self) -> String {
        let Layout { ranks, stage, group, reshard, recompute, threads } = *self;
        let reshard = if reshard { "on" } else { "off" };
        let recompute = if recompute { "block" } else { "none" };
        format!(
            "--stage {stage} --shard-group {} --reshard-after-forward {reshard} --recompute {recompute} --threads {threads}",
            group.size(ranks)
        )
    }
}

impl fmt::Display for Layout {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{} ranks {}", self.ranks, self.flags())
    }
}

/// Stage, groups, and whether stage 3 reshards: all that are not refused and not the same as another.
fn placements(ranks: usize) -> Vec<(u8, Group, bool)> {
    let mut groups = vec![Group::All, Group::Some, Group::One];
    groups.retain(|group| *group == Group::All || group.size(ranks) < ranks);
    let mut found = vec![(0, Group::One, false)];
    for (stage, reshard) in [(1, false), (2, false), (3, false), (3, true)] {
        found.extend(groups.iter().map(|group| (stage, *group, reshard)));
    }
    found
}

/// One run of the matrix.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Combination {
    /// What it trains.
    pub recipe: Recipe,
    /// How.
    pub layout: Layout,
}

impl Combination {
    /// The axes of the matrix, in the order of [`Combination::values`].
    pub const AXES: [&'static str; 10] =
        ["fixture", "policy", "lanes", "accum", "ranks", "stage", "group", "reshard", "recompute", "threads"];

    /// Every layout of every recipe of these fixtures.
    pub fn all(fixtures: &[&'static str]) -> Vec<Self> {
        let mut all = Vec::new();
        for fixture in fixtures {
            for policy in Policy::ALL {
                for (lanes, worlds) in WORLDS {
                    for accum in [1, 3] {
                        let recipe = Recipe { fixture, policy, lanes, accum };
                        let layouts = worlds.into_iter().flat_map(Layout::all);
                        all.extend(layouts.map(|layout| Combination { recipe, layout }));
                    }
                }
            }
        }
        all
    }

    /// Its value on every axis.
    pub fn values(&self) -> Vec<String> {
        let Recipe { fixture, policy, lanes, accum } = self.recipe;
        let Layout { ranks, stage, group, reshard, recompute, threads } = self.layout;
        let policy = policy.name();
        let values: [&dyn fmt::Display; 10] =
            [&fixture, &policy, &lanes, &accum, &ranks, &stage, &group, &reshard, &recompute, &threads];
        values.map(ToString::to_string).into()
    }

    /// All flags of `umbra train` but model, data and output.
    pub fn flags(&self) -> String {
        format!("{} {}", self.recipe.flags(), self.layout.flags())
    }
}

impl fmt::Display for Combination {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}: {}", self.recipe, self.layout)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn layouts_are_counted_by_hand() {
        // Stages 1, 2 and 3 (twice) with every size of group there is, and stage 0; each with and without recompute, on one
        // and on two threads.
        let count = |ranks| Layout::all(ranks).len();
        assert_eq!([1, 2, 3, 4, 6, 8, 12].map(count), [5, 9, 9, 13, 13, 13, 13].map(|placements| 4 * placements));
        assert_eq!(Combination::all(&FIXTURES).len(), 2 * 6 * 2 * 2 * 160);
        let size = |ranks| Group::Some.size(ranks);
        assert_eq!([4, 6, 8, 12].map(size), [2, 3, 2, 3]);
    }

    /// Two groups of three, and four groups of three.
    #[test]
    fn groups_are_a_power_of_two() {
        for combination in Combination::all(&FIXTURES) {
            let Layout { ranks, group, .. } = combination.layout;
            let size = group.size(ranks);
            assert!(size == 1 || (ranks % size == 0 && (ranks / size).is_power_of_two()), "{combination}");
        }
    }
}
