//! The contract: what ranks can do together. Every length, dtype and rank is checked here, before a transport sees it.

use crate::oneshot::{Receiver, lock};
use crate::solo::Solo;
use crate::transport::{Header, Kind, Outcome, Transport, Work};
use crate::{Error, Group, Result};
use spmd_core::{Buffer, DType};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// How long a wait may take unless [`Comm::set_timeout`] says otherwise.
pub const DEFAULT_TIMEOUT: Duration = Duration::from_secs(600);

/// Elements in one message unless [`Comm::set_split_limit`] says otherwise. MPI counts in `int`, and libraries have
/// overflowed inside at less than 2^31, so there is room left.
pub const DEFAULT_SPLIT_LIMIT: usize = 1 << 28;

/// This rank's end of the world's ranks, or of a group of them. Cheap to clone; clones are the same communicator.
///
/// Every rank makes the same calls in the same order. Calls that do not agree (another operation, group, dtype, length
/// or root) give [`Error::Mismatch`] on every rank. Operations on buffers only start here and complete in the order in
/// which they were started, while the caller does something else.
///
/// On a group's communicator ([`Comm::contiguous`], [`Comm::strided`]) ranks, roots and the world are the group's, and
/// data moves within it. Everything else is the world's: all groups make the call together, with one length, a call
/// waits until every rank of the world has come to it, and errors name ranks of the world. Where a group has a single
/// rank a call is a copy, done before it returns; it waits for nobody and has no place in the order of calls.
#[derive(Clone)]
pub struct Comm {
    inner: Arc<Inner>,
    group: Group,
    /// This rank's place in its group.
    rank: usize,
    /// Ranks in its group.
    world: usize,
}

struct Inner {
    transport: Box<dyn Transport>,
    /// Held while a call is handed over, so that the numbers are in the order of the queue.
    order: Mutex<Order>,
    timeout_nanos: AtomicU64,
    split: AtomicU64,
    sent: AtomicU64,
}

#[derive(Default)]
struct Order {
    /// Number of the next call.
    next: u64,
    /// Whether `finish` was called.
    ended: bool,
}

impl std::fmt::Debug for Comm {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Comm(rank {} of {}, {}, {})", self.rank, self.world, self.group, self.transport())
    }
}

impl Comm {
    pub(crate) fn new(transport: Box<dyn Transport>, timeout: Duration) -> Self {
        let (rank, world) = (transport.rank(), transport.world());
        let inner = Inner {
            transport,
            order: Mutex::default(),
            timeout_nanos: AtomicU64::new(0),
            split: AtomicU64::new(DEFAULT_SPLIT_LIMIT as u64),
            sent: AtomicU64::new(0),
        };
        let comm = Comm { inner: Arc::new(inner), group: Group::World, rank, world };
        comm.set_timeout(timeout);
        comm
    }

    /// This communicator narrowed to groups of `n` neighbours: ranks `k·n` up to `(k + 1)·n`. `n` = world is the world.
    ///
    /// # Errors
    /// An `n` that does not divide the world; a communicator that is narrowed already.
    pub fn contiguous(&self, n: usize) -> Result<Comm> {
        self.narrowed("contiguous", n, Group::Contiguous(n))
    }

    /// This communicator narrowed to `n` groups of ranks that lie `n` apart, those with the same `rank % n`, in the
    /// order of their ranks. `n` = 1 is the world.
    ///
    /// # Errors
    /// An `n` that does not divide the world; a communicator that is narrowed already.
    pub fn strided(&self, n: usize) -> Result<Comm> {
        self.narrowed("strided", n, Group::Strided(n))
    }

    fn narrowed(&self, op: &'static str, n: usize, group: Group) -> Result<Comm> {
        if self.group != Group::World {
            return Err(shape(op, "the communicator", Group::World.to_string(), self.group));
        }
        if n == 0 || !self.world.is_multiple_of(n) {
            return Err(shape(op, "the argument", format!("a divisor of the {} ranks", self.world), n));
        }
        let group = if group.size(self.world) == self.world { Group::World } else { group };
        Ok(Comm { inner: self.inner.clone(), group, rank: group.place(self.rank), world: group.size(self.world) })
    }

    /// The ranks that calls move data between.
    pub fn group(&self) -> Group {
        self.group
    }

    /// This rank, from 0: its place in its group.
    pub fn rank(&self) -> usize {
        self.rank
    }

    /// Number of ranks in the group.
    pub fn world(&self) -> usize {
        self.world
    }

    /// Bytes of data that this rank has sent to other ranks through all clones so far, whatever their group: in a group
    /// of `g` ranks, `g - 1` times the `send` of an all-gather or a slice of an exchange. A call counts when it starts.
    /// The other calls and the headers are not counted, nor are a rank's own slices.
    pub fn sent_bytes(&self) -> u64 {
        self.inner.sent.load(Ordering::Relaxed)
    }

    /// What carries the data: "solo", "threads" or "mpi".
    pub fn transport(&self) -> &'static str {
        self.inner.transport.name()
    }

    /// How long a wait, or one of the calls that wait by themselves, may take before it gives [`Error::Timeout`].
    /// Ranks that are still computing count as missing, so it has to be longer than the ranks may drift apart.
    pub fn set_timeout(&self, limit: Duration) {
        let nanos = u64::try_from(limit.as_nanos()).unwrap_or(u64::MAX);
        self.inner.timeout_nanos.store(nanos, Ordering::Relaxed);
    }

    /// Largest number of elements (of all ranks of a group together; at least one a rank) that travel in one message;
    /// longer ones are split. Has to be the same on every rank. A lower limit gives the same bytes, more slowly.
    pub fn set_split_limit(&self, elements: usize) {
        self.inner.split.store(elements.clamp(1, i32::MAX as usize) as u64, Ordering::Relaxed);
    }

    /// Starts an all-gather: `recv` becomes the `send` of rank 0, of rank 1, … one after another.
    ///
    /// `send` has this rank's `n` elements, `recv` `world · n` of the same dtype. The operation owns the buffers until
    /// [`Ticket::wait`] hands them back.
    ///
    /// # Errors
    /// Lengths or dtypes that do not fit each other; [`Error::Ended`] after [`Comm::finish`].
    pub fn all_gather(&self, send: Buffer, recv: Buffer) -> Result<Ticket> {
        let expected = send.len().checked_mul(self.world);
        check_buffers("all_gather", &send, &recv, expected)?;
        let slice = send.size();
        Ok(Ticket { call: self.start_buffers(Kind::AllGather, slice, send, recv)? })
    }

    /// Starts an exchange (all-to-all): slice `r` of `send` goes to rank `r`, and slice `r` of `recv` comes from there.
    ///
    /// Both have `world · n` elements of one dtype. The operation owns them until [`Ticket::wait`] hands them back.
    ///
    /// # Errors
    /// Lengths or dtypes that do not fit each other, or a length that the world does not divide.
    pub fn exchange(&self, send: Buffer, recv: Buffer) -> Result<Ticket> {
        if !send.len().is_multiple_of(self.world) {
            let expected = format!("a multiple of the {} ranks", self.world);
            return Err(shape("exchange", "the send buffer's length", expected, send.len()));
        }
        check_buffers("exchange", &send, &recv, Some(send.len()))?;
        let slice = send.size() / self.world;
        Ok(Ticket { call: self.start_buffers(Kind::Exchange, slice, send, recv)? })
    }

    /// Everybody's numbers in rank order, on every rank. Each rank gives equally many.
    ///
    /// # Errors
    /// Ranks that do not agree, are gone or do not come in time.
    pub fn gather_f64(&self, values: &[f64]) -> Result<Vec<f64>> {
        let bytes = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        Ok(self.gather_words(Kind::GatherF64, bytes)?.map(f64::from_le_bytes).collect())
    }

    /// Everybody's numbers in rank order, on every rank. Each rank gives equally many.
    ///
    /// # Errors
    /// Ranks that do not agree, are gone or do not come in time.
    pub fn gather_u64(&self, values: &[u64]) -> Result<Vec<u64>> {
        let bytes = values.iter().flat_map(|v| v.to_le_bytes()).collect();
        Ok(self.gather_words(Kind::GatherU64, bytes)?.map(u64::from_le_bytes).collect())
    }

    /// Everybody's bytes in rank order, on every rank. The lengths may differ.
    ///
    /// # Errors
    /// Ranks that do not agree, are gone or do not come in time.
    pub fn gather_bytes(&self, bytes: &[u8]) -> Result<Vec<Vec<u8>>> {
        self.start(Kind::GatherBytes, None, bytes.len(), 0, Work::Bytes(bytes.to_vec()))?.parts()
    }

    /// The bytes that rank `root` gives, on every rank. What the other ranks give is ignored.
    ///
    /// # Errors
    /// A root outside the group; ranks that do not agree, are gone or do not come in time.
    pub fn broadcast_bytes(&self, root: usize, bytes: Vec<u8>) -> Result<Vec<u8>> {
        if root >= self.world {
            return Err(shape("broadcast_bytes", "the root", format!("below the {} ranks", self.world), root));
        }
        let bytes = if root == self.rank { bytes } else { Vec::new() };
        let mut parts = self.start(Kind::Broadcast, None, bytes.len(), root, Work::Bytes(bytes))?.parts()?;
        Ok(parts.pop().unwrap_or_default())
    }

    /// Returns when every rank of the world has come here.
    ///
    /// # Errors
    /// Ranks that do not agree, are gone or do not come in time.
    pub fn barrier(&self) -> Result<()> {
        self.start(Kind::Barrier, None, 0, 0, Work::Bytes(Vec::new()))?.parts().map(drop)
    }

    /// The orderly end, of the world also on a group's communicator: waits for every rank and everything started, then
    /// closes the transport. Calls on clones, of whatever group, give [`Error::Ended`] afterwards. A communicator that
    /// is dropped instead never waits for anybody; under MPI the launcher then treats the process's end as a failure
    /// and stops the other ranks.
    ///
    /// # Errors
    /// Ranks that do not agree, are gone or do not come in time.
    pub fn finish(self) -> Result<()> {
        self.start(Kind::Finish, None, 0, 0, Work::Bytes(Vec::new()))?.parts().map(drop)
    }

    /// `slice`: bytes that each other rank of the group gets.
    fn start_buffers(&self, kind: Kind, slice: usize, send: Buffer, recv: Buffer) -> Result<Call> {
        let call = self.start(kind, Some(send.dtype()), send.len(), 0, Work::Buffers(send, recv))?;
        self.inner.sent.fetch_add((slice * (self.world - 1)) as u64, Ordering::Relaxed);
        Ok(call)
    }

    fn start(&self, kind: Kind, dtype: Option<DType>, len: usize, root: usize, work: Work) -> Result<Call> {
        let limit = self.timeout();
        let split = self.inner.split.load(Ordering::Relaxed);
        let transport = &self.inner.transport;
        let group = if kind == Kind::Finish { Group::World } else { self.group };
        let mut order = lock(&self.inner.order);
        let header = Header { seq: order.next, len: len as u64, split, root: root as u32, kind, group, dtype };
        if order.ended {
            return Err(Error::Ended { op: header.describe() });
        }
        order.ended = kind == Kind::Finish;
        let result = if group.size(transport.world()) == 1 {
            Solo.start(header, work, limit)
        } else {
            order.next += 1;
            transport.start(header, work, limit)
        };
        Ok(Call { result, header, comm: self.clone() })
    }

    fn gather_words(&self, kind: Kind, bytes: Vec<u8>) -> Result<impl Iterator<Item = [u8; 8]>> {
        let parts = self.start(kind, None, bytes.len() / 8, 0, Work::Bytes(bytes))?.parts()?;
        let word = |bytes: &[u8]| std::array::from_fn(|i| bytes[i]);
        Ok(parts.into_iter().flat_map(move |part| part.chunks_exact(8).map(word).collect::<Vec<_>>()))
    }

    fn timeout(&self) -> Duration {
        Duration::from_nanos(self.inner.timeout_nanos.load(Ordering::Relaxed))
    }
}

pub(crate) fn shape(op: &'static str, what: &'static str, expected: String, found: impl ToString) -> Error {
    Error::Shape { op, what, expected, found: found.to_string() }
}

fn check_buffers(op: &'static str, send: &Buffer, recv: &Buffer, expected: Option<usize>) -> Result<()> {
    if send.dtype() != recv.dtype() {
        return Err(Error::DType { op, send: send.dtype(), recv: recv.dtype() });
    }
    if expected != Some(recv.len()) {
        let expected = expected.map_or("fewer elements than can be counted".to_owned(), |n| n.to_string());
        return Err(shape(op, "the receive buffer's length", expected, recv.len()));
    }
    Ok(())
}

/// A call on its way.
struct Call {
    result: Receiver,
    header: Header,
    comm: Comm,
}

impl Call {
    fn wait(self) -> Result<Outcome> {
        let (transport, limit) = (&self.comm.inner.transport, self.comm.timeout());
        let result = self.result.wait(limit.saturating_add(transport.grace()));
        let result = result.unwrap_or_else(|| {
            let missing = transport.missing(self.header.seq);
            Err(timeout(&self.header, limit, missing, transport.world()))
        });
        match result {
            Err(Error::Ended { .. }) => Err(Error::Ended { op: self.header.describe() }),
            other => other,
        }
    }

    fn parts(self) -> Result<Vec<Vec<u8>>> {
        match self.wait()? {
            Outcome::Parts(parts) => Ok(parts),
            // A call that was given bytes gives bytes back: see `Work` and `Outcome`.
            Outcome::Buffers(..) => unreachable!("a call on bytes returned buffers"),
        }
    }
}

pub(crate) fn timeout(header: &Header, limit: Duration, missing: Vec<usize>, world: usize) -> Error {
    Error::Timeout { op: header.describe(), seconds: limit.as_secs_f64(), missing, world }
}

/// An operation on buffers on its way. Dropping it is safe: the operation still completes, and the buffers with it.
#[must_use = "the buffers come back from `wait`"]
pub struct Ticket {
    call: Call,
}

impl std::fmt::Debug for Ticket {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        write!(f, "Ticket({}, done: {})", self.call.header.describe(), self.is_done())
    }
}

impl Ticket {
    /// Waits for the operation and hands the (send, receive) buffers back.
    ///
    /// # Errors
    /// Ranks that do not agree, are gone or do not come in time; the buffers are lost then.
    pub fn wait(self) -> Result<(Buffer, Buffer)> {
        match self.call.wait()? {
            Outcome::Buffers(send, recv) => Ok((send, recv)),
            // A call that was given buffers gives buffers back: see `Work` and `Outcome`.
            Outcome::Parts(_) => unreachable!("a call on buffers returned bytes"),
        }
    }

    /// Whether [`Ticket::wait`] would return at once.
    pub fn is_done(&self) -> bool {
        self.call.result.is_done()
    }
}
