//! Which row goes where, and what a batch holds.

use super::*;
use crate::Exit;
use crate::data::{LazyTokenizer, Limits};
use std::path::PathBuf;

const NONE: u32 = Batch::NO_TARGET;

fn load(lines: &str) -> Dataset {
    let dir = tempfile::tempdir().unwrap();
    let path: PathBuf = dir.path().join("rows.jsonl");
    std::fs::write(&path, lines).unwrap();
    Dataset::load(&[path], Limits { seq_len: 64, vocab_size: 1000, truncate: false }, &LazyTokenizer::byte()).unwrap()
}

/// `n` rows; row r is r, r.
fn rows(n: usize) -> Dataset {
    load(&(0..n).map(|r| format!("{{\"input_ids\":[{r},{r}]}}\n")).collect::<String>())
}

/// The rows of one lane's micro-batch, by the number every id of them is.
fn numbers(batch: &Batch) -> Vec<u32> {
    batch.ids.chunks(batch.cols.max(1)).map(|row| row[0]).collect()
}

#[test]
fn rows_go_where_the_formula_says() {
    let (micro, accum, lanes) = (2, 3, 4);
    let mut sampler = Sampler::new(rows(48), micro, accum, lanes, false, 0).unwrap();
    assert_eq!(sampler.steps_per_epoch(), 2);
    for step in 0..4u64 {
        let s = step as usize % 2;
        assert_eq!(sampler.micro_batches(step), accum);
        for j in 0..accum {
            for g in 0..lanes {
                let expected: Vec<u32> =
                    (0..micro).map(|i| (((s * accum + j) * lanes + g) * micro + i) as u32).collect();
                assert_eq!(numbers(&sampler.batch(step, j, g)), expected);
            }
        }
    }
}

#[test]
fn an_epoch_ends_with_what_is_left() {
    // A step takes 2·2·2 = 8 rows; the second has 13 − 8 = 5: micro-batch 0 has 2 + 2, micro-batch 1 has 1 + 0.
    let mut sampler = Sampler::new(rows(13), 2, 2, 2, false, 0).unwrap();
    assert_eq!((sampler.steps_per_epoch(), sampler.epoch(3)), (2, (1, 1)));
    assert_eq!(sampler.micro_batches(1), 2);
    assert_eq!(numbers(&sampler.batch(1, 0, 1)), [10, 11]);
    assert_eq!(numbers(&sampler.batch(1, 1, 0)), [12]);
    assert_eq!(sampler.batch(1, 1, 1), Batch::default());
    assert_eq!(sampler.rows_of(1), [8, 9, 10, 11, 12]);
    assert_eq!(numbers(&sampler.batch(2, 0, 0)), [0, 1]);
    // Nine rows leave one: only one micro-batch has any lane with a row.
    let mut sampler = Sampler::new(rows(9), 2, 2, 2, false, 0).unwrap();
    assert_eq!((sampler.micro_batches(0), sampler.micro_batches(1)), (2, 1));
    assert_eq!(numbers(&sampler.batch(1, 0, 0)), [8]);
    assert_eq!(sampler.batch(1, 0, 1).rows, 0);
}

#[test]
fn batches_are_shifted_and_padded_to_their_longest_row() {
    let data = load(concat!(
        "{\"input_ids\":[1,2,3,4],\"labels\":[-100,-100,7,8]}\n",
        "{\"input_ids\":[5,6]}\n",
        "{\"input_ids\":[9]}\n",
        "{\"input_ids\":[10,11,12]}\n",
    ));
    let mut sampler = Sampler::new(data, 2, 1, 2, false, 0).unwrap();
    let first = Batch {
        rows: 2,
        cols: 4,
        ids: vec![1, 2, 3, 4, 5, 6, 0, 0],
        targets: vec![NONE, 7, 8, NONE, 6, NONE, NONE, NONE],
        tokens: 6,
    };
    assert_eq!(sampler.batch(0, 0, 0), first);
    let second = Batch {
        rows: 2,
        cols: 3,
        ids: vec![9, 0, 0, 10, 11, 12],
        targets: vec![NONE, NONE, NONE, 11, 12, NONE],
        tokens: 4,
    };
    assert_eq!(sampler.batch(0, 0, 1), second);
    assert_eq!(sampler.supervised(0), (first.supervised() + second.supervised()) as u64);
    assert_eq!(sampler.targets(0).unwrap(), 5);
}

#[test]
fn a_shuffle_is_a_permutation_of_seed_and_epoch_alone() {
    let n = 101;
    let epoch = |lanes: usize, seed: u64, epoch: u64| -> Vec<usize> {
        let mut sampler = Sampler::new(rows(n), 1, 1, lanes, true, seed).unwrap();
        let steps = sampler.steps_per_epoch();
        (epoch * steps..(epoch + 1) * steps).flat_map(|step| sampler.rows_of(step)).collect()
    };
    let order = epoch(1, 7, 0);
    let mut sorted = order.clone();
    sorted.sort_unstable();
    assert_eq!(sorted, (0..n).collect::<Vec<_>>());
    assert_eq!(order, epoch(4, 7, 0), "the order does not depend on the lanes");
    assert_ne!(order, epoch(1, 7, 1));
    assert_ne!(order, epoch(1, 8, 0));
    // The expected number of fixed points of a random permutation is 1, its variance 1: 10 lies nine deviations away.
    assert!(order.iter().enumerate().filter(|(i, row)| i == *row).count() < 10);
}

#[test]
fn every_permutation_of_three_is_about_equally_likely() {
    let mut counts = std::collections::HashMap::new();
    let mut order = Vec::new();
    let draws = 6000;
    for epoch in 0..draws {
        shuffled(&mut order, 3, 1, epoch);
        *counts.entry(order.clone()).or_insert(0) += 1;
    }
    // Each count is binomial(6000, 1/6): mean 1000, standard deviation 28.9; five of them are 145.
    assert_eq!(counts.len(), 6);
    assert!(counts.values().all(|c: &i32| (c - 1000).abs() < 145), "{counts:?}");
}

#[test]
fn going_back_to_an_earlier_epoch_gives_its_order_again() {
    let mut sampler = Sampler::new(rows(20), 2, 1, 2, true, 3).unwrap();
    let first = sampler.rows_of(0);
    let later = sampler.rows_of(5);
    assert_ne!(first, later);
    assert_eq!(sampler.rows_of(0), first);
}

#[test]
fn fewer_rows_than_a_step_needs_are_refused_with_the_arithmetic() {
    let failure = Sampler::new(rows(11), 2, 3, 2, true, 0).unwrap_err();
    assert_eq!(failure.exit, Exit::Input);
    assert_eq!(failure.expected.as_deref(), Some("12 rows: micro-batch 2 × accum 3 × lanes 2"));
    assert_eq!(failure.found.as_deref(), Some("11 rows"));
    assert!(Sampler::new(rows(12), 2, 3, 2, true, 0).is_ok());
    assert_eq!(Sampler::new(rows(2), 1, 0, 1, true, 0).unwrap_err().exit, Exit::Usage);
    assert_eq!(Sampler::new(rows(2), usize::MAX, 2, 1, true, 0).unwrap_err().exit, Exit::Input);
}

#[test]
fn a_step_with_nothing_to_predict_names_its_rows() {
    let data = load("{\"input_ids\":[1,2]}\n{\"input_ids\":[3]}\n{\"input_ids\":[4,5],\"labels\":[4,-100]}\n");
    let mut sampler = Sampler::new(data, 1, 1, 1, false, 0).unwrap();
    assert_eq!(sampler.targets(0).unwrap(), 1);
    let failure = sampler.targets(2).unwrap_err();
    assert_eq!(failure.exit, Exit::Input);
    assert!(failure.place.unwrap().ends_with("rows.jsonl:3"));
}
