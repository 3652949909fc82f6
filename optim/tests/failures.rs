//! Steps that must not be made: every rank hears of it, and no weight or moment has changed.

#[path = "support/toy.rs"]
mod toy;

use collectives::threads;
use optim::{Error, Hyper, Sharding, StepReport};
use spmd_core::ops::Rule;
use spmd_core::{Batch, Policy};
use std::time::{Duration, Instant};
use toy::{Answers, At, Shards, on_ranks};

const WORLD: usize = 3;
const ACCUM: u32 = 2;
const HYPER: Hyper = Hyper {
    rule: Rule::AdamW,
    lr: 1e-3,
    beta1: 0.9,
    beta2: 0.999,
    eps: 1e-8,
    weight_decay: 0.1,
    momentum: 0.0,
    max_norm: 1.0,
    seed: 5,
};
/// The step, lane and micro-batch in which something goes wrong. Step 0 leaves moments that are not zero.
const BAD: At = At { lane: 2, step: 1, micro: 1 };

fn gradient(at: At, _stage: usize, _position: usize, out: &mut [f32]) {
    for (i, x) in out.iter_mut().enumerate() {
        *x = (1 + (i + at.lane as usize) % 7) as f32 * 1e-3;
    }
}

fn loss(at: At) -> f64 {
    1.0 + f64::from(at.lane)
}

const GOOD: Answers = Answers { gradient, loss };

/// Puts `value` at `index` of the block's gradient on the bad lane.
fn spoil<const BITS: u32>(at: At, stage: usize, position: usize, index: usize, out: &mut [f32]) {
    gradient(at, stage, position, out);
    if at == BAD && stage == 1 {
        out[index] = f32::from_bits(BITS);
    }
}

/// Runs a good step, the bad one and another good one; returns what the bad one said, and asserts that the run went on as
/// if it had never been tried.
fn refused(policy: Policy, answers: Answers) -> Vec<Error> {
    let run = |answers: Answers, steps: &[u32]| -> Vec<(Vec<Shards>, Vec<Error>)> {
        on_ranks(WORLD, |comm| {
            let mut t = toy::trainer(comm, policy.precision(), Sharding::zero3(WORLD), false, answers);
            let (mut states, mut errors) = (Vec::new(), Vec::new());
            for step in steps {
                let (before, made) = (toy::shards(&t, Vec::new()), t.state.step);
                let (report, _) = toy::step(&mut t, *step, ACCUM, 100, &HYPER);
                let after = toy::shards(&t, Vec::new());
                match report {
                    Ok(StepReport { grad_norm, .. }) => {
                        assert!(grad_norm.is_finite());
                        assert_eq!(t.state.step, made + 1);
                        states.push(after);
                    }
                    Err(error) => {
                        assert_eq!(t.state.step, made, "no step was counted");
                        assert!(before == after, "no weight and no moment has changed");
                        errors.push(error);
                    }
                }
            }
            (states, errors)
        })
    };
    let (tried, never) = (run(answers, &[0, 1, 2]), run(GOOD, &[0, 2]));
    for ((tried, errors), (never, none)) in tried.iter().zip(&never) {
        assert_eq!((errors.len(), none.len()), (1, 0));
        assert!(tried == never, "the next step is the one that would have been made");
    }
    let errors: Vec<Error> = tried.into_iter().flat_map(|(_, errors)| errors).collect();
    let text = |e: &Error| e.to_string();
    assert!(errors.iter().all(|e| text(e) == text(&errors[0])), "one message on every rank: {errors:?}");
    errors
}

fn not_finite(error: &Error) -> (&str, f64, usize) {
    match error {
        Error::NotFinite { what, value, rank } => (what, *value, *rank),
        other => panic!("{other}"),
    }
}

#[test]
fn a_loss_that_is_not_finite_names_its_rank_and_micro_batch() {
    fn nan(at: At) -> f64 {
        if at == BAD { f64::NAN } else { loss(at) }
    }
    fn infinite(at: At) -> f64 {
        if at == BAD { f64::INFINITY } else { loss(at) }
    }
    for policy in Policy::ALL {
        for (loss, text) in [(nan as fn(At) -> f64, "NaN"), (infinite, "inf")] {
            let errors = refused(policy, Answers { gradient, loss });
            let (what, _, rank) = not_finite(&errors[0]);
            assert_eq!((what, rank), ("the loss of micro-batch 1", 2));
            assert_eq!(errors[0].to_string(), format!("the loss of micro-batch 1 is {text} on rank 2"));
        }
    }
}

#[test]
fn a_gradient_that_is_not_finite_names_its_unit_and_the_rank_that_holds_it() {
    const NAN: u32 = 0x7fc0_0000;
    const INFINITY: u32 = 0x7f80_0000;
    // The block has 13,146 elements: four blocks of 4,096, two a rank, so the third rank owns none of it.
    let answers = |gradient| Answers { gradient, loss };
    let nan_on_0 = answers(|at, stage, position, out| spoil::<NAN>(at, stage, position, 48, out));
    let nan_on_1 = answers(|at, stage, position, out| spoil::<NAN>(at, stage, position, 8192, out));
    let infinite = answers(|at, stage, position, out| spoil::<INFINITY>(at, stage, position, 13_145, out));
    for policy in Policy::ALL {
        for (answers, owner) in [(nan_on_0, 0), (nan_on_1, 1), (infinite, 1)] {
            let errors = refused(policy, answers);
            let (what, value, rank) = not_finite(&errors[0]);
            assert_eq!((what, rank), ("the gradient of block", owner), "{policy}");
            assert!(!value.is_finite());
        }
    }
}

#[test]
fn a_contribution_that_a_bf16_wire_cannot_hold_is_not_finite() {
    /// The largest fp32 number: finite, and beyond the largest bf16.
    const LARGEST: u32 = 0x7f7f_ffff;
    let answers = Answers { gradient: |at, stage, position, out| spoil::<LARGEST>(at, stage, position, 0, out), loss };
    for policy in [Policy::DeepSpeed, Policy::FsdpMixed, Policy::FsdpLow, Policy::LowSr] {
        assert_eq!(not_finite(&refused(policy, answers)[0]).2, 0, "{policy}");
    }
}

#[test]
fn a_tied_gradient_that_is_not_finite_counts_too() {
    fn tied(at: At, stage: usize, position: usize, out: &mut [f32]) {
        gradient(at, stage, position, out);
        if at == BAD && position == 1 {
            out[8_999] = f32::NAN;
        }
    }
    for policy in Policy::ALL {
        let errors = refused(policy, Answers { gradient: tied, loss });
        // 9,000 elements are three blocks, one a rank.
        let (what, _, rank) = not_finite(&errors[0]);
        assert_eq!((what, rank), ("the gradient of embed", 2));
    }
}

/// Every rank takes a step with these micro-batches; returns what each said. The state must not have changed.
fn with_batches(batches: impl Fn(u32) -> Vec<Batch> + Sync) -> Vec<Error> {
    let limit = Duration::from_secs(1);
    let start = Instant::now();
    let said = threads::run(WORLD, limit, |comm| {
        let mut t = toy::trainer(comm, Policy::Shadow.precision(), Sharding::zero3(WORLD), false, GOOD);
        let before = toy::shards(&t, Vec::new());
        let batches = batches(t.comm.rank() as u32);
        let result = optim::train_step(&mut t, &batches, 100, &HYPER, &mut |_, _| {});
        assert!(before == toy::shards(&t, Vec::new()), "nothing has changed");
        assert_eq!(t.state.step, 0);
        result.expect_err("one rank is not with the others")
    });
    assert!(start.elapsed() < limit * 20, "nobody waits for ever");
    said.into_iter().map(|rank| rank.unwrap_or_else(Error::Comm)).collect()
}

#[test]
fn a_batch_that_one_rank_cannot_take_leaves_the_others_with_a_timeout_that_names_it() {
    let errors = with_batches(|lane| {
        let good = At { lane, step: 0, micro: 0 }.batch();
        let bad = Batch { ids: vec![0; 2], ..good.clone() };
        vec![good, if lane == 1 { bad } else { At { lane, step: 0, micro: 1 }.batch() }]
    });
    assert!(matches!(&errors[1], Error::Core(spmd_core::Error::Shape { op: "begin", .. })), "{}", errors[1]);
    for rank in [0, 2] {
        let Error::Comm(collectives::Error::Timeout { missing, .. }) = &errors[rank] else {
            panic!("{}", errors[rank])
        };
        assert!(missing.contains(&1), "{}", errors[rank]);
    }
}

#[test]
fn ranks_with_another_number_of_micro_batches_are_told_apart() {
    let errors = with_batches(|lane| {
        let count = if lane == 2 { 1 } else { 2 };
        (0..count).map(|micro| At { lane, step: 0, micro }.batch()).collect()
    });
    for error in &errors {
        assert!(matches!(error, Error::Comm(collectives::Error::Mismatch { .. })), "{error}");
    }
}

#[test]
fn a_rank_that_panics_takes_the_others_down_at_once() {
    fn panics(at: At, stage: usize, position: usize, out: &mut [f32]) {
        assert!(at.lane != 1 || stage != 2, "a fault in the backward");
        gradient(at, stage, position, out);
    }
    let said = threads::run(WORLD, Duration::from_secs(60), |comm| {
        let mut t = toy::trainer(
            comm,
            Policy::Shadow.precision(),
            Sharding::zero3(WORLD),
            false,
            Answers { gradient: panics, loss },
        );
        toy::step(&mut t, 0, ACCUM, 100, &HYPER).0.expect_err("rank 1 is gone")
    });
    for (rank, said) in said.into_iter().enumerate() {
        let error = said.unwrap_or_else(Error::Comm);
        let Error::Comm(collectives::Error::PeerDied { rank: 1, reason }) = &error else { panic!("{rank}: {error}") };
        assert_eq!(reason, "panicked: a fault in the backward");
    }
}
