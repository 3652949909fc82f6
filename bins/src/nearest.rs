//! The name somebody may have meant.

/// The one of `names` that `written` is a slip of the pen for, if any: a third of its letters wrong at most.
pub(crate) fn nearest<'n>(written: &str, names: impl IntoIterator<Item = &'n str>) -> Option<&'n str> {
    let plain = |text: &str| text.to_lowercase().replace('-', "_");
    let written = plain(written);
    let close = names.into_iter().map(|known| (distance(&written, &plain(known)), known)).min();
    close.filter(|(d, _)| *d <= (written.chars().count() / 3).max(1)).map(|(_, known)| known)
}

/// Letters to insert, remove or replace to turn `a` into `b` (Levenshtein's distance), a row of the table at a time.
fn distance(a: &str, b: &str) -> usize {
    let mut row: Vec<usize> = (0..=b.chars().count()).collect();
    for (i, x) in a.chars().enumerate() {
        let mut diagonal = row[0];
        row[0] = i + 1;
        for (j, y) in b.chars().enumerate() {
            let replaced = diagonal + usize::from(x != y);
            diagonal = row[j + 1];
            row[j + 1] = replaced.min(diagonal + 1).min(row[j] + 1);
        }
    }
    row[row.len() - 1]
}

#[cfg(test)]
mod tests {
    use super::{distance, nearest};

    #[test]
    fn slips_are_known_and_other_words_are_not() {
        let names = ["stage", "overlap_comm", "reduce_bucket_size"];
        assert_eq!(nearest("stgae", names), None, "two letters of five");
        assert_eq!(nearest("stag", names), Some("stage"));
        assert_eq!(nearest("overlap-com", names), Some("overlap_comm"));
        assert_eq!(nearest("reduce_buket_sise", names), Some("reduce_bucket_size"));
        assert_eq!(nearest("colour", names), None);
    }

    #[test]
    fn the_distance_counts_slips() {
        for (a, b, d) in
            [("", "", 0), ("", "abc", 3), ("abc", "", 3), ("lr", "lr", 0), ("kitten", "sitting", 3), ("ab", "ba", 2)]
        {
            assert_eq!(distance(a, b), d, "{a} {b}");
        }
    }
}
