//! Ranks that agree on a failure.

use super::*;
use collectives::threads;
use std::time::Duration;

/// Long enough for threads on a busy machine; a test that works never waits for it.
const LIMIT: Duration = Duration::from_secs(60);

fn run<T: Send>(world: usize, body: impl Fn(&Comm) -> Result<T> + Sync) -> Vec<Result<T>> {
    threads::run(world, LIMIT, |comm| {
        let result = body(&comm);
        meet(&comm, result)
    })
    .into_iter()
    .map(|rank| rank.unwrap())
    .collect()
}

#[test]
fn if_all_went_well_everyone_keeps_its_own_result() {
    for world in [1, 3] {
        let values: Vec<usize> = run(world, |comm| Ok(comm.rank() * 10)).into_iter().map(Result::unwrap).collect();
        assert_eq!(values, (0..world).map(|r| r * 10).collect::<Vec<_>>());
    }
}

#[test]
fn one_failing_rank_fails_all_with_its_message_and_code() {
    let results = run(3, |comm| {
        if comm.rank() == 1 {
            Err(Failure::input("row 7 is empty").at("rows.jsonl:7").hint("remove it"))
        } else {
            Ok(())
        }
    });
    for result in results {
        let expected = Failure::input("on rank 1: row 7 is empty").at("rows.jsonl:7").hint("remove it");
        assert_eq!(result.unwrap_err(), expected);
    }
}

#[test]
fn the_same_failure_on_all_ranks_names_none_and_different_ones_name_the_lowest() {
    for result in run::<()>(3, |_| Err(Failure::usage("--accum cannot be 0"))) {
        assert_eq!(result.unwrap_err(), Failure::usage("--accum cannot be 0"));
    }
    for result in run::<()>(2, |comm| Err(Failure::disk(format!("disk {}", comm.rank())))) {
        assert_eq!(result.unwrap_err(), Failure::disk("on rank 0: disk 0"));
    }
}

#[test]
fn a_failure_in_the_middle_of_a_step_reaches_ranks_that_are_calls_ahead() {
    let results = run::<()>(3, |comm| {
        if comm.rank() == 2 {
            return Err(Failure::new(Exit::NotFinite, "the loss is not finite"));
        }
        // Two gathers under way when the barrier is asked for, as with prefetch.
        let buffer = |n| spmd_core::Buffer::zeros(spmd_core::DType::F32, n, "test");
        let first = comm.all_gather(buffer(2)?, buffer(6)?)?;
        let second = comm.all_gather(buffer(1)?, buffer(3)?)?;
        first.wait()?;
        second.wait()?;
        comm.barrier()?;
        Ok(())
    });
    for result in results {
        assert_eq!(result.unwrap_err(), Failure::new(Exit::NotFinite, "on rank 2: the loss is not finite"));
    }
}

#[test]
fn bytes_of_another_step_are_not_taken_for_a_report() {
    let results = run::<()>(2, |comm| {
        if comm.rank() == 1 {
            return Err(Failure::disk("full"));
        }
        let all = comm.gather_bytes(b"null")?;
        if all[1] == b"null" { Ok(()) } else { Err(Failure::new(Exit::Bug, PARTED)) }
    });
    for result in results {
        assert_eq!(result.unwrap_err(), Failure::disk("on rank 1: full"));
    }
}

#[test]
fn a_rank_that_is_gone_leaves_the_others_with_their_own_failure() {
    let results = threads::run(3, LIMIT, |comm| {
        if comm.rank() == 2 {
            panic!("on purpose");
        }
        let own = if comm.rank() == 1 { Err(Failure::disk("full")) } else { Ok(()) };
        meet(&comm, own)
    });
    let mut results = results.into_iter();
    let lost = results.next().unwrap().unwrap().unwrap_err();
    assert_eq!(lost.exit, Exit::Lost);
    assert!(lost.what.starts_with("rank 2 died"), "{lost}");
    assert_eq!(results.next().unwrap().unwrap().unwrap_err(), Failure::disk("full"));
    assert!(results.next().unwrap().is_err());
}

#[test]
fn causes_count_more_than_consequences() {
    let lost = || Some(Failure::new(Exit::Lost, "rank 2 died"));
    let parted = || Some(describe(Error::Mismatch { asked: vec!["barrier".into(), "finish".into()] }));
    let cause = || Some(Failure::new(Exit::Memory, "no memory"));
    assert_eq!(agreed(&[lost(), parted(), cause()]).unwrap().what, "on rank 2: no memory");
    assert_eq!(agreed(&[None, lost(), None]).unwrap().exit, Exit::Lost);
    assert_eq!(agreed(&[parted(), parted()]), parted());
    assert_eq!(agreed(&[None, None]), None);
}

#[test]
fn every_error_has_its_exit_code() {
    let cases = [
        (describe(Error::PeerDied { rank: 3, reason: "gone".into() }), Exit::Lost, "rank 3 died: gone"),
        (
            describe(Error::Timeout { op: "barrier".into(), seconds: 1.0, missing: vec![2], world: 3 }),
            Exit::Lost,
            "barrier did not complete within 1 s: 2 of 3 came, rank 2 missing",
        ),
        (describe(Error::Launch { what: "no MPI".into(), hint: "build it".into() }), Exit::Usage, "no MPI"),
        (describe(Error::Ended { op: "barrier".into() }), Exit::Bug, "barrier after the communicator was finished"),
        (describe(Error::Mismatch { asked: vec!["a".into(), "b".into()] }), Exit::Bug, PARTED),
        (
            describe_core(spmd_core::Error::TokenId { op: "embedding", id: 9, position: 0, vocab: 8 }),
            Exit::Input,
            "a token id is not in the model's vocabulary",
        ),
        (
            describe(Error::Core(spmd_core::Error::Memory { bytes: 8, what: "x", reason: "full".into() })),
            Exit::Memory,
            "8 bytes of memory for x could not be had: full",
        ),
        (
            describe_core(spmd_core::Error::Device { name: "cuda".into(), reason: "none".into() }),
            Exit::Usage,
            "device cuda is not available: none",
        ),
    ];
    for (failure, exit, what) in cases {
        assert_eq!((failure.exit, failure.what.as_str()), (exit, what));
    }
    let f = describe(Error::Mismatch { asked: vec!["a".into(), "b".into()] });
    assert_eq!(f.found.as_deref(), Some("rank 0 in a; rank 1 in b"));
}
