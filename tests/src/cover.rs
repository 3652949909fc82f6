//! A few rows that show much of what many would.
//!
//! A fault usually needs one or two settings to come together, rarely more. So of all combinations of settings, a *cover of
//! strength t* is tried: for every t of the axes, every values of them that occur together in some combination occur
//! together in one that is chosen.

use std::collections::HashMap;

/// Chooses a cover of strength `strength` of `rows`, each one value an axis; returns their places. Greedy: always the row
/// that adds the most, the first of equals, so that the choice is the same every time.
pub fn cover<T: AsRef<str>>(rows: &[Vec<T>], strength: usize) -> Vec<usize> {
    let (tuples, mut missing) = tuples(rows, strength);
    let mut chosen = Vec::new();
    loop {
        let gain = |row: usize| tuples[row].iter().filter(|tuple| missing[**tuple]).count();
        // `max_by_key` takes the last of equals.
        let best = (0..rows.len()).rev().max_by_key(|row| gain(*row));
        let Some(best) = best.filter(|row| gain(*row) > 0) else { return chosen };
        tuples[best].iter().for_each(|tuple| missing[*tuple] = false);
        chosen.push(best);
    }
}

/// Numbers every `strength` values that occur together: those of each row, and a true for each there is.
fn tuples<T: AsRef<str>>(rows: &[Vec<T>], strength: usize) -> (Vec<Vec<usize>>, Vec<bool>) {
    let axes = subsets(rows.first().map_or(0, Vec::len), strength);
    let mut numbers = HashMap::new();
    let mut of_row = |row: &Vec<T>| -> Vec<usize> {
        let tuple = |axes: &Vec<usize>| {
            let values = axes.iter().map(|axis| (*axis, row[*axis].as_ref().to_owned())).collect::<Vec<_>>();
            let next = numbers.len();
            *numbers.entry(values).or_insert(next)
        };
        axes.iter().map(tuple).collect()
    };
    let tuples = rows.iter().map(&mut of_row).collect();
    (tuples, vec![true; numbers.len()])
}

/// All `size` of the numbers below `n`, in rising order.
fn subsets(n: usize, size: usize) -> Vec<Vec<usize>> {
    let mut found = vec![Vec::new()];
    for _ in 0..size {
        let longer = |set: &Vec<usize>| {
            let set = set.clone();
            (set.last().map_or(0, |last| last + 1)..n).map(move |next| [&set[..], &[next]].concat())
        };
        found = found.iter().flat_map(longer).collect();
    }
    found
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layouts::{Combination, FIXTURES};

    /// Every row of `axes` axes of three values each.
    fn product(axes: u32) -> Vec<Vec<String>> {
        (0..3_usize.pow(axes)).map(|i| (0..axes).map(|a| (i / 3_usize.pow(a) % 3).to_string()).collect()).collect()
    }

    #[test]
    fn subsets_are_all_and_in_order() {
        assert_eq!(subsets(4, 2), [[0, 1], [0, 2], [0, 3], [1, 2], [1, 3], [2, 3]]);
        assert_eq!(subsets(10, 3).len(), 120);
        assert!(subsets(2, 3).is_empty());
    }

    /// Four axes of three values: 9 rows are the least (an orthogonal array); greedy comes near, 81 are all.
    #[test]
    fn a_cover_is_small() {
        let rows = product(4);
        let chosen = cover(&rows, 2).len();
        assert!((9..=14).contains(&chosen), "{chosen}");
        assert_eq!(cover(&rows, 1).len(), 3);
        assert_eq!(cover(&rows, 4).len(), 81);
    }

    /// Looked up plainly, pair by pair, in the layouts themselves, of which not every two values go together.
    #[test]
    fn every_pair_that_may_occur_occurs() {
        let rows: Vec<Vec<String>> = Combination::all(&FIXTURES).iter().map(Combination::values).collect();
        let chosen = cover(&rows, 2);
        assert_eq!(chosen, cover(&rows, 2), "the same choice every time");
        let mut pairs = 0;
        for b in 0..rows[0].len() {
            for a in 0..b {
                let together = |row: &Vec<String>| (row[a].clone(), row[b].clone());
                let mut all: Vec<_> = rows.iter().map(together).collect();
                all.sort();
                all.dedup();
                let mut covered: Vec<_> = chosen.iter().map(|row| together(&rows[*row])).collect();
                covered.sort();
                covered.dedup();
                assert_eq!(covered, all, "axes {a} and {b}");
                pairs += all.len();
            }
        }
        // The two axes of most values, seven numbers of ranks and six policies, need 42 rows.
        assert!((42..=60).contains(&chosen.len()), "{} rows for {pairs} pairs of {}", chosen.len(), rows.len());
    }
}
