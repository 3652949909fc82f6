//! A world of one and ranks as threads: the conformance suite, and what happens when a rank does not play along.

use collectives::{Comm, Error, Launch, conformance, connect, threads};
use spmd_core::{Buffer, DType, Device};
use std::time::{Duration, Instant};

const LIMIT: Duration = Duration::from_secs(60);

/// Far below [`LIMIT`]: what ends sooner did not wait for a time-out.
const SOON: Duration = Duration::from_secs(20);

#[test]
fn a_world_of_one_conforms() {
    let launch = Launch { size_hint: None, source: "a test".to_owned() };
    let comm = connect(&launch).expect("a world of one needs nothing");
    let solo = conformance::run(&comm).expect("solo conforms");
    comm.finish().expect("nobody to wait for");
    let one = threads::run(1, LIMIT, |comm| conformance::run(&comm)).remove(0);
    assert_eq!(solo, one.expect("no panic").expect("one thread conforms"));
}

#[test]
fn threads_conform() {
    for world in [1, 2, 3, 4, 7] {
        for (rank, result) in threads::run(world, LIMIT, |comm| conformance::run(&comm)).into_iter().enumerate() {
            let result = result.expect("no rank panics");
            assert!(result.is_ok(), "rank {rank} of {world}: {:?}", result.err());
        }
    }
}

#[test]
fn nothing_works_after_finish() {
    let results = threads::run(2, LIMIT, |comm| {
        let clone = comm.clone();
        (comm.finish(), clone.barrier(), clone.finish())
    });
    let ended = |op: &str| Err(Error::Ended { op: op.to_owned() });
    let rank = Ok((Ok(()), ended("barrier (call 1)"), ended("finish (call 1)")));
    assert_eq!(results, [rank.clone(), rank]);
}

#[test]
fn a_panicking_rank_fails_the_others_at_once() {
    let begin = Instant::now();
    let results = threads::run(3, LIMIT, |comm| {
        assert!(comm.rank() != 1, "the cat is on the keyboard");
        (comm.barrier(), comm.gather_u64(&[1]).map(drop))
    });
    assert!(begin.elapsed() < SOON);
    let died = Error::PeerDied { rank: 1, reason: "panicked: the cat is on the keyboard".to_owned() };
    let (both, own) = (Ok((Err(died.clone()), Err(died.clone()))), Err(died));
    assert_eq!(results, [both.clone(), own, both]);
}

#[test]
fn a_rank_that_does_not_come_is_named() {
    let limit = Duration::from_millis(200);
    let results = threads::run(4, limit, |comm| if comm.rank() == 2 { Ok(()) } else { comm.barrier() });
    let op = "barrier (call 0)".to_owned();
    let timeout = Error::Timeout { op, seconds: 0.2, missing: vec![2], world: 4 };
    let late = Ok(Err(timeout));
    assert_eq!(results, [late.clone(), late.clone(), Ok(Ok(())), late]);
}

#[test]
fn a_started_operation_is_done_only_when_every_rank_has_come() {
    let start = |comm: &Comm| {
        let buffer = |len| Buffer::from_f32(DType::F32, &vec![comm.rank() as f32; len], "a test").expect("memory");
        comm.all_gather(buffer(2), buffer(4)).expect("lengths fit")
    };
    let (told, heard) = std::sync::mpsc::channel::<bool>();
    let heard = std::sync::Mutex::new(heard);
    let results = threads::run(2, LIMIT, |comm| {
        if comm.rank() == 0 {
            let ticket = start(&comm);
            let early = ticket.is_done();
            told.send(early).expect("rank 1 listens");
            let (_, recv) = ticket.wait().expect("rank 1 comes");
            return (early, recv.view().to_f32());
        }
        let early = heard.lock().expect("only rank 1 locks").recv().expect("rank 0 tells");
        let ticket = start(&comm);
        assert!(ticket.is_done(), "the last rank completes the operation");
        (early, ticket.wait().expect("done").1.view().to_f32())
    });
    assert_eq!(results, [Ok((false, vec![0.0, 0.0, 1.0, 1.0])), Ok((false, vec![0.0, 0.0, 1.0, 1.0]))]);
}

#[test]
fn a_sum_into_another_length_is_refused() {
    let device = Device::cpu(1).expect("one thread");
    let results = threads::run(2, LIMIT, |comm| {
        let buffer = |len| Buffer::zeros(DType::F32, len, "a test").expect("memory");
        let ticket = comm.reduce_scatter(&device, buffer(8), buffer(8)).expect("lengths fit");
        ticket.wait(buffer(8).view_mut()).map(drop)
    });
    for result in results {
        assert!(matches!(result, Ok(Err(Error::Shape { op: "reduce_scatter", .. }))), "{result:?}");
    }
}
