//! The MPI transport: one thread owns MPI, takes calls from a queue and makes blocking calls.
//!
//! Open MPI makes no progress between calls, so a non-blocking collective would run inside its wait; on a thread of its
//! own a blocking one overlaps with the caller's work. That thread initialises and finalises MPI and makes every call but
//! one: `MPI_Abort` may come from any thread, which is why MPI is asked for `MPI_THREAD_MULTIPLE`.
//!
//! Before each call every rank sends its header to every other. That finds ranks in different calls and ranks that do
//! not come, and since nobody goes on before all headers are there, the blocking call that follows never spins for a
//! rank that is still computing.
//!
//! A group's data travels over a communicator of its own. It is made at the group's first call, after the headers, so by
//! every rank at the same place, and kept.

mod ffi;

use crate::comm::timeout;
use crate::oneshot::{self, Receiver, Sender};
use crate::transport::{HEADER_BYTES, Header, Kind, Outcome, Transport, Work, agree};
use crate::{Error, Result};
use ffi::{Element, World};
use spmd_core::DType;
use std::sync::mpsc;
use std::time::{Duration, Instant};

pub(crate) use ffi::abort_all;

pub(crate) struct Mpi {
    rank: usize,
    world: usize,
    jobs: mpsc::Sender<Job>,
}

struct Job {
    header: Header,
    work: Work,
    limit: Duration,
    done: Sender,
}

/// Starts the thread that owns MPI. A process that turns out to be alone is finalised again at once.
pub(crate) fn connect() -> Result<Mpi> {
    let (jobs, queue) = mpsc::channel();
    let (ready, started) = mpsc::channel();
    let own = move || match World::init() {
        Ok(world) if world.size() == 1 => {
            // The caller turns this into an error of its own; one from closing a world of one adds nothing.
            let _ = world.finalize();
            let _ = ready.send(Ok((0, 1)));
        }
        Ok(world) => {
            let _ = ready.send(Ok((world.rank(), world.size())));
            serve(world, &queue);
        }
        // A send fails only if the caller is gone, and then nobody wants to know.
        Err(error) => drop(ready.send(Err(error))),
    };
    let spawned = std::thread::Builder::new().name("mpi".to_owned()).spawn(own);
    spawned.map_err(|e| no_thread(&e.to_string()))?;
    let (rank, world) = started.recv().map_err(|_| no_thread("it ended while starting MPI"))??;
    Ok(Mpi { rank, world, jobs })
}

fn no_thread(reason: &str) -> Error {
    let what = format!("the thread that owns MPI could not be started: {reason}");
    Error::Launch { what, hint: "check the limits on threads and processes (ulimit -u)".to_owned() }
}

impl Transport for Mpi {
    fn rank(&self) -> usize {
        self.rank
    }

    fn world(&self) -> usize {
        self.world
    }

    fn name(&self) -> &'static str {
        "mpi"
    }

    fn start(&self, header: Header, work: Work, limit: Duration) -> Receiver {
        let (done, receiver) = oneshot::channel();
        // After `finish` nobody takes the job; dropping it completes it with `Ended`.
        drop(self.jobs.send(Job { header, work, limit, done }));
        receiver
    }

    fn missing(&self, _seq: u64) -> Vec<usize> {
        Vec::new()
    }

    fn grace(&self) -> Duration {
        Duration::from_millis(500)
    }
}

/// Works the queue until `finish` or until every `Comm` is gone. The latter leaves MPI as it is: finalising would wait
/// for the other ranks.
fn serve(mut world: World, queue: &mpsc::Receiver<Job>) {
    let mut failed: Option<Error> = None;
    while let Ok(Job { header, work, limit, done }) = queue.recv() {
        let result = match &failed {
            Some(error) => Err(error.clone()),
            None => perform(&mut world, &header, work, limit),
        };
        match result {
            Ok(outcome) if header.kind == Kind::Finish => return done.complete(world.finalize().map(|()| outcome)),
            Ok(outcome) => done.complete(Ok(outcome)),
            Err(error) => {
                // After a mismatch every rank is at the same place again. After anything else MPI's state is unknown.
                if !matches!(error, Error::Mismatch { .. }) {
                    failed = Some(error.clone());
                }
                done.complete(Err(error));
            }
        }
    }
}

fn perform(world: &mut World, header: &Header, work: Work, limit: Duration) -> Result<Outcome> {
    let headers = meet(world, header, limit)?;
    agree(&headers)?;
    if matches!(header.kind, Kind::Barrier | Kind::Finish) {
        return Ok(Outcome::Parts(Vec::new()));
    }
    let (group, rank) = (header.group, world.rank());
    let of_group = |(r, h): (usize, Header)| (group.number(r) == group.number(rank)).then_some(h);
    let headers: Vec<Header> = headers.into_iter().enumerate().filter_map(of_group).collect();
    let members = world.members(group)?;
    let split = header.split as usize;
    match work {
        Work::Buffers(send, mut recv) => {
            let element = match send.dtype() {
                DType::F32 => Element::F32,
                DType::Bf16 => Element::U16,
            };
            if header.kind == Kind::AllGather {
                members.all_gather(element, send.bytes(), recv.bytes_mut(), split)?;
            } else {
                members.all_to_all(element, send.bytes(), recv.bytes_mut(), split)?;
            }
            Ok(Outcome::Buffers(send, recv))
        }
        Work::Bytes(mine) => match header.kind {
            Kind::Broadcast => {
                let mut bytes = mine;
                bytes.resize(headers[header.root as usize].len as usize, 0);
                members.broadcast(header.root as usize, &mut bytes, split)?;
                Ok(Outcome::Parts(vec![bytes]))
            }
            kind => {
                let unit = if kind == Kind::GatherBytes { 1 } else { 8 };
                let lens: Vec<usize> = headers.iter().map(|h| h.len as usize * unit).collect();
                Ok(Outcome::Parts(members.gather(&mine, &lens, split)?))
            }
        },
    }
}

/// Exchanges headers: returns everybody's, in rank order, once all ranks have come to a call.
///
/// While ranks are missing it sleeps longer and longer, up to an eighth of what it has waited and half a millisecond: a
/// call is late by at most an eighth of its wait, and the core is free for whoever computes.
fn meet(world: &mut World, header: &Header, limit: Duration) -> Result<Vec<Header>> {
    const YIELD_ONLY: Duration = Duration::from_micros(50);
    const LONGEST_SLEEP: Duration = Duration::from_micros(500);
    world.start_headers(&header.to_bytes())?;
    let begin = Instant::now();
    while !world.headers_done()? {
        let waited = begin.elapsed();
        if waited > limit {
            return Err(timeout(header, limit, world.headers_missing()?, world.size()));
        }
        if waited < YIELD_ONLY {
            std::thread::yield_now();
        } else {
            std::thread::sleep((waited / 8).min(LONGEST_SLEEP));
        }
    }
    let read = |(rank, bytes): (usize, [u8; HEADER_BYTES])| {
        let reason = "it sent a header that this version does not know; every rank must run the same binary";
        Header::from_bytes(&bytes).ok_or_else(|| Error::PeerDied { rank, reason: reason.to_owned() })
    };
    (0..world.size()).map(|rank| read((rank, world.header_of(rank)))).collect()
}
