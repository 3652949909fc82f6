//! What a layout costs a rank, known before anything is allocated: bytes held and bytes sent.

use crate::grads::{grad_bytes, grad_sent};
use crate::weights::gather_cost;
use crate::{Layout, Sharding};
use spmd_core::{Precision, Stage};

/// Bytes of one rank, by use.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub struct Footprint {
    /// Shards of the shadow and both moments.
    pub state: usize,
    /// Gathered units and the buffers they are sent from.
    pub gathered: usize,
    /// Full gradients of one stage, or of all of them.
    pub full: usize,
    /// Contributions on their way.
    pub exchange: usize,
    /// Accumulated gradients.
    pub gradients: usize,
    /// Sums over earlier passes, where there are fewer ranks than lanes.
    pub partials: usize,
    /// A copy of this rank's part of the state, while it is saved in the background.
    pub snapshot: usize,
    /// Data bytes sent to other ranks in a step to gather weights, headers left out.
    pub sent_weights: u64,
    /// The same to add gradients up, scalars left out.
    pub sent_gradients: u64,
}

impl Footprint {
    /// What a step of `accum` micro-batches takes on a rank with this layout.
    pub fn new(layout: &Layout, stages: &[Stage], precision: &Precision, sharding: &Sharding, accum: usize) -> Self {
        let passes = accum * sharding.passes(layout.grid.world);
        let [full, exchange, gradients, partials] = grad_bytes(layout, stages, precision, sharding);
        let (gathered, sent_weights) = gather_cost(layout, stages, precision.compute, sharding, passes);
        let per_weight = precision.shadow.size() + 2 * precision.moments.size();
        Footprint {
            state: layout.shard_len() * per_weight,
            gathered,
            full,
            exchange,
            gradients,
            partials,
            snapshot: layout.slice_len() * per_weight,
            sent_weights,
            sent_gradients: grad_sent(layout, stages, precision, passes),
        }
    }

    /// All data bytes sent to other ranks in a step.
    pub fn sent(&self) -> u64 {
        self.sent_weights + self.sent_gradients
    }
}
