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
    for world in [1, 2, 3, 4, 6, 7, 8] {
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
fn a_rank_that_does_not_come_is_missed_in_every_group() {
    let limit = Duration::from_millis(200);
    let results = threads::run(4, limit, |comm| {
        let pairs = comm.contiguous(2).expect("two divides four");
        if comm.rank() == 2 { Ok(()) } else { pairs.barrier() }
    });
    let op = "barrier in groups of 2 neighbouring ranks (call 0)".to_owned();
    let timeout = Error::Timeout { op, seconds: 0.2, missing: vec![2], world: 4 };
    let late = Ok(Err(timeout));
    assert_eq!(results, [late.clone(), late.clone(), Ok(Ok(())), late]);
}

#[test]
fn a_panicking_rank_fails_every_group_at_once() {
    let begin = Instant::now();
    let results = threads::run(4, LIMIT, |comm| {
        assert!(comm.rank() != 1, "the cat is on the keyboard");
        comm.strided(2).expect("two divides four").gather_u64(&[1]).map(drop)
    });
    assert!(begin.elapsed() < SOON);
    let died = Error::PeerDied { rank: 1, reason: "panicked: the cat is on the keyboard".to_owned() };
    let (others, own) = (Ok(Err(died.clone())), Err(died));
    assert_eq!(results, [others.clone(), own, others.clone(), others]);
}

#[test]
fn a_group_of_one_waits_for_nobody() {
    let results = threads::run(4, LIMIT, |comm| {
        // The other ranks make no call at all.
        if comm.rank() != 2 {
            return;
        }
        for alone in [comm.contiguous(1), comm.strided(4)] {
            let alone = alone.expect("both divide four");
            assert_eq!((alone.rank(), alone.world()), (0, 1));
            let buffer = |values: &[f32]| Buffer::from_f32(DType::F32, values, "a test").expect("memory");
            let (values, zeros) = (|| buffer(&[1.0, 2.0]), || buffer(&[0.0, 0.0]));
            for ticket in [alone.all_gather(values(), zeros()), alone.exchange(values(), zeros())] {
                let ticket = ticket.expect("lengths fit");
                assert!(ticket.is_done());
                assert_eq!(ticket.wait().expect("done").1.view().to_f32(), [1.0, 2.0]);
            }
            assert_eq!(alone.gather_f64(&[0.5, 1.5]), Ok(vec![0.5, 1.5]));
            assert_eq!(alone.gather_bytes(b"own"), Ok(vec![b"own".to_vec()]));
            assert_eq!(alone.broadcast_bytes(0, b"own".to_vec()), Ok(b"own".to_vec()));
            assert_eq!(alone.barrier(), Ok(()));
            assert_eq!(alone.sent_bytes(), 0);
        }
    });
    assert_eq!(results, [const { Ok(()) }; 4]);
}

#[test]
fn finish_on_a_group_ends_every_clone() {
    let results = threads::run(4, LIMIT, |comm| {
        let (alone, pairs) = (comm.contiguous(1).expect("divides"), comm.contiguous(2).expect("divides"));
        // Half of the ranks finish through a group of one: it is still the end of all, and they wait for each other.
        let finished = if comm.rank() < 2 { alone.clone().finish() } else { pairs.finish() };
        (finished, comm.barrier(), alone.barrier())
    });
    let ended = |op: &str| Err(Error::Ended { op: op.to_owned() });
    let (world, alone) = ("barrier (call 1)", "barrier in groups of 1 neighbouring ranks (call 1)");
    for result in results {
        assert_eq!(result, Ok((Ok(()), ended(world), ended(alone))));
    }
}

#[test]
fn messages_about_groups_name_ranks_of_the_world() {
    let results = threads::run(4, LIMIT, |comm| {
        let group = if comm.rank() == 3 { comm.strided(2) } else { comm.contiguous(2) };
        group.expect("two divides four").broadcast_bytes(1, Vec::new()).map(drop)
    });
    for result in results {
        let error = result.expect("no rank panics").expect_err("ranks in different groups");
        let expected = "the ranks did not make the same call: ranks 0, 1, 2 in broadcast_bytes from member 1 in groups \
                        of 2 neighbouring ranks (call 0); rank 3 in broadcast_bytes from member 1 in groups of ranks \
                        2 apart (call 0)";
        assert_eq!(error.to_string(), expected);
    }
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
