//! Ranks as threads of one process: the transport for tests of everything that runs on ranks.
//!
//! The last rank to come to a call moves the data for all of them, so a started call completes while the others compute.

use crate::oneshot::{self, Receiver, Sender, lock};
use crate::transport::{Header, Kind, Outcome, Transport, Work, agree};
use crate::{Comm, Error, Result};
use spmd_core::Buffer;
use std::collections::HashMap;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// Runs `body` once a rank, each on its own thread, and returns what they returned, in rank order.
///
/// A rank that panics is `Err(PeerDied)` here and in every call that other ranks make or wait for. `limit` is the
/// communicator's timeout ([`Comm::set_timeout`]): a rank that returns early leaves the others with [`Error::Timeout`].
pub fn run<T: Send>(world: usize, limit: Duration, body: impl Fn(Comm) -> T + Sync) -> Vec<Result<T>> {
    let hub = Arc::new(Hub { world, state: Mutex::default() });
    let (hub, body) = (&hub, &body);
    std::thread::scope(|scope| {
        let ranks: Vec<_> = (0..world).map(|rank| scope.spawn(move || run_rank(hub, rank, limit, body))).collect();
        let died =
            |rank| move |_| Err(Error::PeerDied { rank, reason: "its thread ended without a result".to_owned() });
        ranks.into_iter().enumerate().map(|(rank, thread)| thread.join().unwrap_or_else(died(rank))).collect()
    })
}

fn run_rank<T>(hub: &Arc<Hub>, rank: usize, limit: Duration, body: &(impl Fn(Comm) -> T + Sync)) -> Result<T> {
    let comm = Comm::new(Box::new(Member { hub: hub.clone(), rank }), limit);
    // Nothing of the body's is looked at after a panic, and the hub's state is valid between its locks.
    catch_unwind(AssertUnwindSafe(|| body(comm))).map_err(|payload| {
        let reason = format!("panicked: {}", crate::panics::message(&*payload));
        let error = Error::PeerDied { rank, reason };
        hub.fail(error.clone());
        error
    })
}

/// Where the ranks meet.
struct Hub {
    world: usize,
    state: Mutex<State>,
}

#[derive(Default)]
struct State {
    /// Calls that not every rank has come to yet, by number.
    open: HashMap<u64, Vec<Entry>>,
    /// Set when a rank has died: nothing completes any more.
    failed: Option<Error>,
}

/// One rank in one call.
struct Entry {
    rank: usize,
    header: Header,
    work: Work,
    done: Sender,
}

impl Hub {
    fn arrive(&self, entry: Entry) {
        let seq = entry.header.seq;
        let mut state = lock(&self.state);
        if let Some(error) = state.failed.clone() {
            drop(state);
            return entry.done.complete(Err(error));
        }
        let entries = state.open.entry(seq).or_default();
        entries.push(entry);
        if entries.len() == self.world {
            let entries = state.open.remove(&seq).unwrap_or_default();
            drop(state);
            settle(entries, self.world);
        }
    }

    fn fail(&self, error: Error) {
        let mut state = lock(&self.state);
        state.failed.get_or_insert(error.clone());
        let open: Vec<Entry> = state.open.drain().flat_map(|(_, entries)| entries).collect();
        drop(state);
        open.into_iter().for_each(|entry| entry.done.complete(Err(error.clone())));
    }
}

/// Completes a call that every rank has come to.
fn settle(mut entries: Vec<Entry>, world: usize) {
    entries.sort_by_key(|entry| entry.rank);
    let headers: Vec<Header> = entries.iter().map(|entry| entry.header).collect();
    if let Err(error) = agree(&headers) {
        return entries.into_iter().for_each(|entry| entry.done.complete(Err(error.clone())));
    }
    let Header { kind, root, group, .. } = headers[0];
    let mut groups: Vec<Vec<Entry>> = (0..world / group.size(world)).map(|_| Vec::new()).collect();
    entries.into_iter().for_each(|entry| groups[group.number(entry.rank)].push(entry));
    groups.into_iter().for_each(|members| move_data(kind, root as usize, members));
}

/// Completes a call for one group, whose members come in order.
fn move_data(kind: Kind, root: usize, members: Vec<Entry>) {
    let (mut done, mut sends, mut recvs, mut parts) = (Vec::new(), Vec::new(), Vec::new(), Vec::new());
    for entry in members {
        done.push(entry.done);
        match entry.work {
            Work::Buffers(send, recv) => {
                sends.push(send);
                recvs.push(recv);
            }
            Work::Bytes(bytes) => parts.push(bytes),
        }
    }
    match kind {
        Kind::AllGather | Kind::Exchange => {
            recvs.iter_mut().enumerate().for_each(|(place, recv)| collect(kind, place, &sends, recv));
            let pairs = sends.into_iter().zip(recvs);
            done.into_iter().zip(pairs).for_each(|(d, (send, recv))| d.complete(Ok(Outcome::Buffers(send, recv))));
            return;
        }
        Kind::GatherF64 | Kind::GatherU64 | Kind::GatherBytes => {}
        Kind::Broadcast => parts = parts.into_iter().skip(root).take(1).collect(),
        Kind::Barrier | Kind::Finish => parts.clear(),
    }
    done.into_iter().for_each(|d| d.complete(Ok(Outcome::Parts(parts.clone()))));
}

/// Fills the receive buffer of the member at `place`: slice by slice from the members' send buffers.
fn collect(kind: Kind, place: usize, sends: &[Buffer], recv: &mut Buffer) {
    let slice = recv.size() / sends.len();
    if slice == 0 {
        return;
    }
    for (into, send) in recv.bytes_mut().chunks_exact_mut(slice).zip(sends) {
        let from = if kind == Kind::AllGather { 0 } else { place * slice };
        into.copy_from_slice(&send.bytes()[from..from + slice]);
    }
}

/// One rank's end of the hub.
struct Member {
    hub: Arc<Hub>,
    rank: usize,
}

impl Transport for Member {
    fn rank(&self) -> usize {
        self.rank
    }

    fn world(&self) -> usize {
        self.hub.world
    }

    fn name(&self) -> &'static str {
        "threads"
    }

    fn start(&self, header: Header, work: Work, _limit: Duration) -> Receiver {
        let (done, receiver) = oneshot::channel();
        self.hub.arrive(Entry { rank: self.rank, header, work, done });
        receiver
    }

    fn missing(&self, seq: u64) -> Vec<usize> {
        let state = lock(&self.hub.state);
        // A call that is not open was completed in this very moment: nobody is missing.
        let Some(entries) = state.open.get(&seq) else { return Vec::new() };
        (0..self.hub.world).filter(|rank| entries.iter().all(|entry| entry.rank != *rank)).collect()
    }
}
