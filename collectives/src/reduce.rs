//! The ordered reduce-scatter: an exchange of slices, then a local sum in rank order.

use crate::comm::shape;
use crate::{Comm, Result, Ticket};
use spmd_core::ops::OrderedSum;
use spmd_core::{Buffer, Device, ViewMut};

/// A reduce-scatter on its way. Dropping it is safe.
#[derive(Debug)]
#[must_use = "the sum is made in `wait`"]
pub struct ReduceTicket {
    exchange: Ticket,
    device: Device,
    shard: usize,
}

impl Comm {
    /// Starts a reduce-scatter: this rank gets the sum over the ranks (of its group) of their `send`'s slice `rank`.
    ///
    /// `send` and `recv` have `world · n` elements of one dtype; `recv` is scratch and comes back with the slices it
    /// received. The bytes on the wire are those of a ring. The sum is [`OrderedSum`]'s tree over the ranks, in fp32 with
    /// one rounding, so its bits depend neither on the transport nor on the MPI library.
    ///
    /// # Errors
    /// Lengths or dtypes that do not fit each other, or a length that the world does not divide.
    pub fn reduce_scatter(&self, device: &Device, send: Buffer, recv: Buffer) -> Result<ReduceTicket> {
        let shard = send.len() / self.world();
        Ok(ReduceTicket { exchange: self.exchange(send, recv)?, device: device.clone(), shard })
    }
}

impl ReduceTicket {
    /// Waits for the slices and writes their sum to `out` (`n` elements of any dtype). Hands (send, receive) back.
    ///
    /// # Errors
    /// An `out` of another length; ranks that do not agree, are gone or do not come in time. The buffers are lost then.
    pub fn wait(self, out: ViewMut<'_>) -> Result<(Buffer, Buffer)> {
        if out.len() != self.shard {
            return Err(shape("reduce_scatter", "the output's length", self.shard.to_string(), out.len()));
        }
        let (send, recv) = self.exchange.wait()?;
        if self.shard > 0 {
            self.device.ordered_sum(OrderedSum { parts: recv.view(), out })?;
        }
        Ok((send, recv))
    }

    /// Whether the slices are here, so that [`ReduceTicket::wait`] only has to add them.
    pub fn is_done(&self) -> bool {
        self.exchange.is_done()
    }
}
