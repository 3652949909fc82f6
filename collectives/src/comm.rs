//! The contract: what ranks can do together. Every length, dtype and rank is checked here, before a transport sees it.

use crate::oneshot::{Receiver, lock};
use crate::transport::{Header, Kind, Outcome, Transport, Work};
use crate::{Error, Result};
use spmd_core::{Buffer, DType};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// How long a wait may take unless [`Comm::set_timeout`] says otherwise.
pub const DEFAULT_TIMEOUT: Duration = Duration::from_secs(600);

/// Elements in one message unless [`Comm::set_split_limit`] says otherwise. MPI counts in `int`, and libraries have
/// overflowed inside at less than 2^31, so there is room left.
pub const DEFAULT_SPLIT_LIMIT: usize = 1 << 28;

/// This rank's end of a group of ranks. Cheap to clone; clones are the same communicator.
///
/// Every rank makes the same calls in the same order. Calls that do not agree (another operation, dtype, length or root)
/// give [`Error::Mismatch`] on every rank. Operations on buffers only start here and complete in the order in which they
/// were started, while the caller does something else.
#[derive(Clone)]
pub struct Comm {
    inner: Arc<Inner>,
}

struct Inner {
    transport: Box<dyn Transport>,
    /// Held while a call is handed over, so that the numbers are in the order of the queue.
    order: Mutex<Order>,
    timeout_nanos: AtomicU64,
    split: AtomicU64,
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
        write!(f, "Comm(rank {} of {}, {})", self.rank(), self.world(), self.transport())
    }
}

impl Comm {
    pub(crate) fn new(transport: Box<dyn Transport>, timeout: Duration) -> Self {
        let inner = Inner {
            transport,
            order: Mutex::default(),
            timeout_nanos: AtomicU64::new(0),
            split: AtomicU64::new(DEFAULT_SPLIT_LIMIT as u64),
        };
        let comm = Comm { inner: Arc::new(inner) };
        comm.set_timeout(timeout);
        comm
    }

    /// This rank, from 0.
    pub fn rank(&self) -> usize {
        self.inner.transport.rank()
    }

    /// Number of ranks.
    pub fn world(&self) -> usize {
        self.inner.transport.world()
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

    /// Largest number of elements (of all ranks together; at least one a rank) that travel in one message; longer ones
    /// are split. Has to be the same on every rank. A lower limit gives the same bytes, more slowly.
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
        let expected = send.len().checked_mul(self.world());
        check_buffers("all_gather", &send, &recv, expected)?;
        Ok(Ticket { call: self.start_buffers(Kind::AllGather, send, recv)? })
    }

    /// Starts an exchange (all-to-all): slice `r` of `send` goes to rank `r`, and slice `r` of `recv` comes from there.
    ///
    /// Both have `world · n` elements of one dtype. The operation owns them until [`Ticket::wait`] hands them back.
    ///
    /// # Errors
    /// Lengths or dtypes that do not fit each other, or a length that the world does not divide.
    pub fn exchange(&self, send: Buffer, recv: Buffer) -> Result<Ticket> {
        if !send.len().is_multiple_of(self.world()) {
            let expected = format!("a multiple of the {} ranks", self.world());
            return Err(shape("exchange", "the send buffer's length", expected, send.len()));
        }
        check_buffers("exchange", &send, &recv, Some(send.len()))?;
        Ok(Ticket { call: self.start_buffers(Kind::Exchange, send, recv)? })
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
    /// A root outside the world; ranks that do not agree, are gone or do not come in time.
    pub fn broadcast_bytes(&self, root: usize, bytes: Vec<u8>) -> Result<Vec<u8>> {
        if root >= self.world() {
            return Err(shape("broadcast_bytes", "the root", format!("below the {} ranks", self.world()), root));
        }
        let bytes = if root == self.rank() { bytes } else { Vec::new() };
        let mut parts = self.start(Kind::Broadcast, None, bytes.len(), root, Work::Bytes(bytes))?.parts()?;
        Ok(parts.pop().unwrap_or_default())
    }

    /// Returns when every rank has come here.
    ///
    /// # Errors
    /// Ranks that do not agree, are gone or do not come in time.
    pub fn barrier(&self) -> Result<()> {
        self.start(Kind::Barrier, None, 0, 0, Work::Bytes(Vec::new()))?.parts().map(drop)
    }

    /// The orderly end: waits for every rank and everything started, then closes the transport. Calls on clones give
    /// [`Error::Ended`] afterwards. A communicator that is dropped instead never waits for anybody; under MPI the
    /// launcher then treats the process's end as a failure and stops the other ranks.
    ///
    /// # Errors
    /// Ranks that do not agree, are gone or do not come in time.
    pub fn finish(self) -> Result<()> {
        self.start(Kind::Finish, None, 0, 0, Work::Bytes(Vec::new()))?.parts().map(drop)
    }

    fn start_buffers(&self, kind: Kind, send: Buffer, recv: Buffer) -> Result<Call> {
        self.start(kind, Some(send.dtype()), send.len(), 0, Work::Buffers(send, recv))
    }

    fn start(&self, kind: Kind, dtype: Option<DType>, len: usize, root: usize, work: Work) -> Result<Call> {
        let limit = self.timeout();
        let split = self.inner.split.load(Ordering::Relaxed);
        let mut order = lock(&self.inner.order);
        let header = Header { seq: order.next, len: len as u64, split, root: root as u32, kind, dtype };
        if order.ended {
            return Err(Error::Ended { op: header.describe() });
        }
        order.next += 1;
        order.ended = kind == Kind::Finish;
        let result = self.inner.transport.start(header, work, limit);
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
