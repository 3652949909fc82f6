//! Gradients: full for one stage at a time, then exchanged, summed in lane order and added to this rank's shard.

use crate::state::{each_run, zero_padding};
use crate::weights::{Context, MAX_STAGE_UNITS};
use crate::{Layout, Result, UnitLayout};
use collectives::ReduceTicket;
use spmd_core::ops::{Accumulate, Cast};
use spmd_core::{Buffer, DType, Device, ParamSpec, Precision, Stage, UnitSpec, View, ViewMut};

/// A gradient shard that grows by one contribution a micro-batch.
#[derive(Debug)]
struct Sum {
    shard: Buffer,
    /// Whether it holds anything of this step yet.
    started: bool,
}

/// An exchange on its way: whose gradient it is.
#[derive(Debug)]
struct Flying {
    unit: usize,
    tied: bool,
    ticket: ReduceTicket,
}

/// Full gradients of one stage, one exchange on its way, and the accumulated shards.
#[derive(Debug)]
pub struct Grads {
    precision: Precision,
    /// fp32, one per unit of a stage: what the backward writes.
    full: Vec<Buffer>,
    /// In the wire dtype; `None` while the transport has them.
    exchange: Option<(Buffer, Buffer)>,
    flying: Option<Flying>,
    /// A finished sum that is not accumulated yet.
    reduced: Buffer,
    shards: Vec<Sum>,
    /// For a unit that a stage needs beside its own (a tied weight): what those stages contribute, on its own until the
    /// step's last micro-batch. So each of the two sums is a left fold over micro-batches of a tree over lanes, like every
    /// other gradient's, and one rank with n micro-batches makes the same bits as n ranks with one.
    tied: Vec<Option<Sum>>,
    /// Seconds spent waiting for exchanges that were not there yet.
    pub(crate) waited: f64,
}

impl Grads {
    /// Buffers for a model cut like `layout`.
    ///
    /// # Errors
    /// Memory that could not be had.
    pub fn new(device: &Device, layout: &Layout, stages: &[Stage], precision: Precision) -> Result<Self> {
        let mut full = Vec::new();
        for len in full_lens(layout, stages) {
            full.push(device.zeros(DType::F32, len, "full gradient")?);
        }
        let wire = |what| device.zeros(precision.wire, layout.largest(), what);
        let sum = |len: usize| -> Result<Sum> {
            Ok(Sum { shard: device.zeros(precision.accumulate, len, "gradient shard")?, started: false })
        };
        let tied =
            |(unit, layout): (usize, &UnitLayout)| is_tied(unit, stages).then(|| sum(layout.shard_len)).transpose();
        let largest_shard = layout.units.iter().map(|u| u.shard_len).max().unwrap_or(0);
        Ok(Grads {
            precision,
            full,
            exchange: Some((wire("gradient send buffer")?, wire("gradient receive buffer")?)),
            flying: None,
            reduced: device.zeros(precision.reduced, largest_shard, "reduced gradient")?,
            shards: layout.units.iter().map(|u| sum(u.shard_len)).collect::<Result<_>>()?,
            tied: layout.units.iter().enumerate().map(tied).collect::<Result<_>>()?,
            waited: 0.0,
        })
    }

    /// Forgets the last step's gradients.
    pub fn reset(&mut self) {
        self.shards.iter_mut().chain(self.tied.iter_mut().flatten()).for_each(|sum| sum.started = false);
    }

    /// Views for the backward of `stage` to overwrite, without padding.
    ///
    /// # Errors
    /// Memory that could not be had.
    pub fn full(&mut self, layout: &Layout, stage: &Stage) -> Result<[ViewMut<'_>; MAX_STAGE_UNITS]> {
        let mut views = [ViewMut::F32(&mut []), ViewMut::F32(&mut [])];
        for ((view, buffer), unit) in views.iter_mut().zip(&mut self.full).zip(&stage.units) {
            let layout = layout.units[*unit];
            buffer.resize(DType::F32, layout.padded_len(), "full gradient")?;
            *view = buffer.view_mut().slice(0..layout.len);
        }
        Ok(views)
    }

    /// Sends what the backward of `stage` wrote on its way, unit by unit. The previous exchange is finished first.
    ///
    /// # Errors
    /// Ranks that do not agree, are gone or do not come in time.
    pub fn reduce_scatter(&mut self, ctx: &Context<'_>, stage: &Stage) -> Result<()> {
        for (position, unit) in stage.units.iter().enumerate() {
            self.drain(ctx)?;
            let layout = ctx.layout.units[*unit];
            let Some((mut send, mut recv)) = self.exchange.take() else { continue };
            if self.precision.wire == DType::F32 && self.precision.grad == DType::F32 {
                // Nothing to round: the full gradient itself goes out and the old send buffer takes its place.
                std::mem::swap(&mut send, &mut self.full[position]);
                send.resize(DType::F32, layout.padded_len(), "gradient send buffer")?;
            } else {
                send.resize(self.precision.wire, layout.padded_len(), "gradient send buffer")?;
                let src = self.full[position].view().slice(0..layout.len);
                let dst = send.view_mut().slice(0..layout.len);
                ctx.device.cast(Cast { src, through: self.precision.grad, dst })?;
            }
            zero_padding(send.view_mut(), layout.len);
            recv.resize(self.precision.wire, layout.padded_len(), "gradient receive buffer")?;
            let ticket = ctx.comm.reduce_scatter(ctx.device, send, recv)?;
            self.flying = Some(Flying { unit: *unit, tied: position > 0, ticket });
        }
        Ok(())
    }

    /// Finishes the exchange on its way, if any: sums in lane order, rounds to `reduced`, adds to the shard.
    ///
    /// # Errors
    /// Ranks that do not agree, are gone or do not come in time.
    fn drain(&mut self, ctx: &Context<'_>) -> Result<()> {
        let Some(Flying { unit, tied, ticket }) = self.flying.take() else { return Ok(()) };
        let before = (ctx.clock)();
        let own = &mut self.shards[unit];
        let Sum { shard, started } = if tied { self.tied[unit].as_mut().unwrap_or(own) } else { own };
        let first = !std::mem::replace(started, true);
        if first && self.precision.reduced == self.precision.accumulate {
            self.exchange = Some(ticket.wait(shard.view_mut())?);
        } else {
            self.reduced.resize(self.precision.reduced, shard.len(), "reduced gradient")?;
            self.exchange = Some(ticket.wait(self.reduced.view_mut())?);
            ctx.device.accumulate(Accumulate { acc: shard.view_mut(), x: self.reduced.view(), first })?;
        }
        self.waited += (ctx.clock)() - before;
        Ok(())
    }

    /// After the last micro-batch: finishes the exchange on its way and adds up the two sums of a tied weight (their order
    /// makes no difference to two of them).
    ///
    /// # Errors
    /// Ranks that do not agree, are gone or do not come in time.
    pub fn finish(&mut self, ctx: &Context<'_>) -> Result<()> {
        self.drain(ctx)?;
        for (own, tied) in self.shards.iter_mut().zip(&mut self.tied) {
            if let Some(tied) = tied {
                ctx.device.accumulate(Accumulate { acc: own.shard.view_mut(), x: tied.shard.view(), first: false })?;
            }
        }
        Ok(())
    }

    /// The accumulated gradient of this rank's shard of `unit`.
    pub fn shard(&self, unit: usize) -> View<'_> {
        self.shards[unit].shard.view()
    }

    /// Hands out the accumulated gradients of this rank, widened to fp32: `take(param, start, values)`.
    ///
    /// # Errors
    /// The first error `take` returns.
    pub fn each<E>(
        &self,
        specs: &[UnitSpec],
        layout: &Layout,
        take: impl FnMut(&ParamSpec, usize, &[f32]) -> Result<(), E>,
    ) -> Result<(), E> {
        each_run(specs, layout, |unit| self.shards[unit].shard.view(), take)
    }
}

/// Whether some stage needs `unit` beside its own.
fn is_tied(unit: usize, stages: &[Stage]) -> bool {
    stages.iter().any(|stage| stage.units.iter().skip(1).any(|other| *other == unit))
}

/// The longest padded unit at each position of a stage. With an fp32 wire the first of these and the send buffer trade
/// places, so both are as long as the longest unit.
fn full_lens(layout: &Layout, stages: &[Stage]) -> Vec<usize> {
    let positions = stages.iter().map(|s| s.units.len()).max().unwrap_or(0);
    vec![layout.largest(); positions]
}

/// Bytes by use: full gradients, exchange buffers, and gradient shards with the reduced sum.
pub fn grad_bytes(layout: &Layout, stages: &[Stage], precision: &Precision) -> [usize; 3] {
    let full: usize = full_lens(layout, stages).iter().sum();
    let largest_shard = layout.units.iter().map(|u| u.shard_len).max().unwrap_or(0);
    let tied = |(unit, _): &(usize, &UnitLayout)| is_tied(*unit, stages);
    let tied: usize = layout.units.iter().enumerate().filter(tied).map(|(_, u)| u.shard_len).sum();
    [
        full * DType::F32.size(),
        2 * layout.largest() * precision.wire.size(),
        (layout.shard_len() + tied) * precision.accumulate.size() + largest_shard * precision.reduced.size(),
    ]
}
