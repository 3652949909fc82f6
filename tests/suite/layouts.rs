//! The layout changes nothing: ranks, micro-batches, threads and transports against each other, bit by bit where the order
//! of summation is the same and within rounding where it is not.
//!
//! Lanes are summed as a tree: contiguous halves while their count is even, an odd block from left to right. So 2, 3, 5 and
//! 7 lanes are summed from left to right, as one rank sums its micro-batches; 4 lanes are (0+1)+(2+3), which is not.
//!
//! Models are stored in fp32, so that `model/` holds every bit of the weights. Rows differ in length and in their labels,
//! and the epoch does not divide into steps, so that padding, normalisation and lanes without rows take part.

use umbra_tests::cases::{Data, Model, uneven_rows};
use umbra_tests::layouts::FIXTURES;
use umbra_tests::tensors::{Tensors, same_bits};
use umbra_tests::{Metrics, Train, folder, weight_files};

/// All that a run leaves.
#[derive(Debug)]
struct Made {
    metrics: Metrics,
    dump: Tensors,
    weights: Vec<(String, Vec<u8>)>,
}

/// Trains with a dump of the first step; `run` starts it.
fn train_as(
    run: impl FnOnce(Train<'_>, &str) -> Metrics,
    ranks: usize,
    model: &Model,
    data: &Data,
    flags: &str,
) -> Made {
    let dir = folder();
    let (out, dump) = (dir.path().join("run"), dir.path().join("dump"));
    let flags = format!("{flags} --dump {}", dump.display());
    let metrics = run(Train { ranks, model: model.path(), data: &data.path(), out: &out }, &flags);
    let dump = Tensors::read(&dump.join("dump.safetensors"));
    Made { metrics, dump, weights: weight_files(&out) }
}

fn train(ranks: usize, model: &Model, data: &Data, flags: &str) -> Made {
    train_as(|train, flags| train.run(flags), ranks, model, data, flags)
}

/// The same run with ranks that are threads of one process.
fn train_on_threads(ranks: usize, model: &Model, data: &Data, flags: &str) -> Made {
    train_as(|train, flags| train.run_on_threads(flags), ranks, model, data, flags)
}

#[track_caller]
fn assert_same(a: &Made, b: &Made, what: &str) {
    for (a, b) in a.metrics.results().iter().zip(&b.metrics.results()) {
        assert_eq!(a, b, "{what}");
    }
    assert_eq!(a.metrics.0.len(), b.metrics.0.len(), "{what}");
    assert!(a.dump.0.keys().eq(b.dump.0.keys()), "{what}");
    for (name, values) in &a.dump.0 {
        assert!(same_bits(values, b.dump.get(name)), "{what}: {name} of the first step");
    }
    let names = |made: &Made| made.weights.iter().map(|(name, _)| name.clone()).collect::<Vec<_>>();
    assert_eq!(names(a), names(b), "{what}");
    for ((name, a), (_, b)) in a.weights.iter().zip(&b.weights) {
        assert!(a == b, "{what}: the bytes of model/{name}");
    }
}

/// Two models whose sizes divide badly: tied and untied, with and without a window.
fn odd_models() -> [(&'static str, Model); 2] {
    FIXTURES.map(|name| (name, Model::widened(name)))
}

/// 37 rows in steps of 4, 6, 10 and 14: every epoch ends with a step in which lanes have one row or none.
#[test]
fn two_three_five_and_seven_ranks_make_the_bits_of_one() {
    let data = Data::new(uneven_rows(37));
    for (name, model) in odd_models() {
        for ranks in [2, 3, 5, 7] {
            let flags = "--policy fp32 --micro-batch 2 --steps 11 --lr 1e-3 --weight-decay 0.1";
            let many = train(ranks, &model, &data, flags);
            let one = train(1, &model, &data, &format!("{flags} --accum {ranks}"));
            assert_same(&many, &one, &format!("{name} on {ranks} ranks"));
            assert!(many.metrics.column("loss").iter().all(|loss| loss.is_finite()));
        }
    }
}

/// The same holds where contributions are summed in fp32 from bf16 arithmetic: nothing is rounded between two additions.
#[test]
fn the_default_policy_makes_the_bits_of_one_rank_too() {
    let data = Data::new(uneven_rows(37));
    for (name, model) in odd_models() {
        let flags = "--policy shadow --micro-batch 2 --steps 11 --lr 1e-3";
        let many = train(3, &model, &data, flags);
        let one = train(1, &model, &data, &format!("{flags} --accum 3"));
        assert_same(&many, &one, name);
    }
}

/// Four lanes are summed in another order than four micro-batches. A first-step gradient differs by a few roundings of
/// 6e-8 (bound 1e-6); Adam and 20 steps at 1e-3 make more of it, but no more than 1e-4 of the loss.
#[test]
fn four_ranks_make_the_numbers_of_one() {
    let data = Data::new(uneven_rows(37));
    for (name, model) in odd_models() {
        let flags = "--policy fp32 --micro-batch 2 --steps 20 --lr 1e-3";
        let many = train(4, &model, &data, flags);
        let one = train(1, &model, &data, &format!("{flags} --accum 4"));
        let (worst, tensor) = many.dump.worst_gradient(&one.dump);
        assert!(worst <= 1e-6, "{name}: first-step gradient of {tensor} {worst:e}");
        let pairs = many.metrics.column("loss").into_iter().zip(one.metrics.column("loss"));
        let largest = pairs.map(|(a, b)| (a - b).abs()).fold(0.0, f64::max);
        println!("{name}: 4 ranks against 1: gradients {worst:.1e}, loss of 20 steps {largest:.1e}");
        assert!(largest <= 1e-4, "{name}: loss {largest:e}");
        assert_eq!(many.metrics.column("supervised"), one.metrics.column("supervised"));
    }
}

/// Transports move bytes; sums are made by the same kernel in the same order.
#[test]
fn threads_and_mpi_make_the_same_bits() {
    let data = Data::new(uneven_rows(21));
    let (_, model) = &odd_models()[0];
    let all = spmd_core::Policy::ALL.map(|policy| policy.name());
    let some = ["shadow", "low-sr"];
    for (ranks, policies) in [(2, &all[..]), (3, &some[..]), (4, &some[..])] {
        for policy in policies {
            let flags = format!("--policy {policy} --micro-batch 2 --accum 2 --steps 5 --lr 1e-3 --seed 3");
            let mpi = train(ranks, model, &data, &flags);
            let threads = train_on_threads(ranks, model, &data, &flags);
            assert_same(&mpi, &threads, &format!("{policy} on {ranks} ranks"));
        }
    }
}

/// Products are cut at borders that the shape sets, so threads only decide who computes what.
#[test]
fn the_number_of_threads_changes_nothing() {
    let data = Data::new(uneven_rows(21));
    for (name, model) in odd_models() {
        for policy in ["fp32", "low-sr"] {
            let flags = |threads| format!("--policy {policy} --micro-batch 3 --steps 4 --lr 1e-3 --threads {threads}");
            let one = train(2, &model, &data, &flags(1));
            for threads in [2, 3] {
                let many = train(2, &model, &data, &flags(threads));
                assert_same(&one, &many, &format!("{name}, {policy}, {threads} threads"));
            }
        }
    }
}

/// Every unit is one block, so all but the first rank own no weight at all; they compute and take part all the same.
#[test]
fn ranks_without_a_weight_of_their_own_work() {
    let data = Data::new(uneven_rows(23));
    let model = Model::one_small_layer();
    for ranks in [3, 5] {
        let flags = "--policy fp32 --micro-batch 1 --steps 10 --lr 1e-2";
        let many = train(ranks, &model, &data, flags);
        let one = train(1, &model, &data, &format!("{flags} --accum {ranks}"));
        assert_same(&many, &one, &format!("{ranks} ranks"));
        let losses = many.metrics.column("loss");
        assert!(losses[9] < losses[0], "it learns: {losses:?}");
    }
}
