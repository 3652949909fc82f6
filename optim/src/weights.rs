//! The walk: gathers each stage's units before it runs, starts the next stage's gather meanwhile, and lets go of what is
//! no longer needed.
//!
//! A few slots hold gathered units. A unit that is still in a slot (the last block when the backward begins, the
//! embedding between micro-batches) is not gathered again; an optimizer step makes every slot stale.

use crate::{Clock, Layout, Result, State};
use collectives::{Comm, Ticket};
use spmd_core::ops::Cast;
use spmd_core::{Buffer, DType, Device, Stage, View};

/// Most units one stage needs at once: its own and, for a tied head, the embedding.
pub(crate) const MAX_STAGE_UNITS: usize = 2;

#[derive(Debug, Default)]
struct Slot {
    unit: Option<usize>,
    /// The gathered unit in the compute dtype; `None` while the transport has it.
    buffer: Option<Buffer>,
    ticket: Option<Ticket>,
    capacity: usize,
}

/// Gathered units and what is on its way.
#[derive(Debug)]
pub struct Weights {
    compute: DType,
    slots: Vec<Slot>,
    sends: Vec<Buffer>,
    /// Seconds spent waiting for gathers that were not there yet.
    pub(crate) waited: f64,
}

/// A stage's gathered units, in the stage's order, without padding.
#[derive(Debug)]
pub struct Gathered<'a> {
    views: [View<'a>; MAX_STAGE_UNITS],
    count: usize,
}

impl<'a> std::ops::Deref for Gathered<'a> {
    type Target = [View<'a>];
    fn deref(&self) -> &[View<'a>] {
        &self.views[..self.count]
    }
}

impl Weights {
    /// Slots for a model with these stages: as many as two neighbouring stages need together.
    pub fn new(compute: DType, stages: &[Stage]) -> Self {
        let slots = (0..slot_count(stages)).map(|_| Slot::default()).collect();
        Weights { compute, slots, sends: Vec::new(), waited: 0.0 }
    }

    /// A slot for each of `units` units: all of them stay gathered, for a world of one that only reads.
    pub fn resident(compute: DType, units: usize) -> Self {
        Weights { compute, slots: (0..units).map(|_| Slot::default()).collect(), sends: Vec::new(), waited: 0.0 }
    }

    /// Gathers `stage` (waiting if need be), starts gathering `next`, and lends `stage`'s units until the next call.
    ///
    /// # Errors
    /// Ranks that do not agree, are gone or do not come in time.
    pub fn gather(&mut self, ctx: &Context<'_>, stage: &Stage, next: Option<&Stage>) -> Result<Gathered<'_>> {
        let mut pinned = [usize::MAX; 2 * MAX_STAGE_UNITS];
        let units = stage.units.iter().chain(next.iter().flat_map(|n| &n.units));
        pinned.iter_mut().zip(units).for_each(|(p, u)| *p = *u);
        for unit in &stage.units {
            self.start(ctx, *unit, &pinned)?;
        }
        for unit in &stage.units {
            self.finish(ctx, *unit)?;
        }
        for unit in next.iter().flat_map(|n| &n.units) {
            self.start(ctx, *unit, &pinned)?;
        }
        let mut views = [View::F32(&[]); MAX_STAGE_UNITS];
        for (view, unit) in views.iter_mut().zip(&stage.units) {
            let slot = self.slots.iter().find(|s| s.unit == Some(*unit));
            if let Some(buffer) = slot.and_then(|s| s.buffer.as_ref()) {
                *view = buffer.view().slice(0..ctx.layout.units[*unit].len);
            }
        }
        Ok(Gathered { views, count: stage.units.len() })
    }

    /// Forgets every gathered unit: the weights have changed.
    pub(crate) fn invalidate(&mut self) -> Result<()> {
        for i in 0..self.slots.len() {
            self.land(i)?;
            self.slots[i].unit = None;
        }
        Ok(())
    }

    /// Starts gathering `unit` into a slot that holds none of `pinned`, unless it is there or under way.
    fn start(&mut self, ctx: &Context<'_>, unit: usize, pinned: &[usize]) -> Result<()> {
        if self.slots.iter().any(|s| s.unit == Some(unit)) {
            return Ok(());
        }
        let layout = ctx.layout.units[unit];
        let need = layout.padded_len();
        let free = |s: &Slot| s.unit.is_none_or(|u| !pinned.contains(&u));
        // An empty slot; then the smallest that is large enough, or else the largest: buffers grow as little as possible.
        let fit = |s: &Slot| (s.unit.is_some(), s.capacity < need, s.capacity.abs_diff(need));
        let candidates = (0..self.slots.len()).filter(|i| free(&self.slots[*i]));
        let Some(i) = candidates.min_by_key(|i| fit(&self.slots[*i])) else {
            return Ok(()); // cannot happen with `slot_count` slots; the gather then simply starts later
        };
        self.land(i)?;
        let mut send = match self.sends.pop() {
            Some(send) => send,
            None => Buffer::zeros(self.compute, 0, "gather send buffer")?,
        };
        send.resize(self.compute, layout.shard_len, "gather send buffer")?;
        let src = ctx.state.units[unit].shadow.view();
        ctx.device.cast(Cast { src, through: DType::F32, dst: send.view_mut() })?;
        let mut recv = match self.slots[i].buffer.take() {
            Some(recv) => recv,
            None => Buffer::zeros(self.compute, 0, "gathered unit")?,
        };
        recv.resize(self.compute, need, "gathered unit")?;
        let capacity = self.slots[i].capacity.max(need);
        self.slots[i] =
            Slot { unit: Some(unit), buffer: None, ticket: Some(ctx.comm.all_gather(send, recv)?), capacity };
        Ok(())
    }

    /// Waits for `unit`.
    fn finish(&mut self, ctx: &Context<'_>, unit: usize) -> Result<()> {
        let Some(i) = self.slots.iter().position(|s| s.unit == Some(unit)) else {
            return Ok(());
        };
        let before = (ctx.clock)();
        self.land(i)?;
        self.waited += (ctx.clock)() - before;
        Ok(())
    }

    /// Takes back the buffers of slot `i` if the transport has them.
    fn land(&mut self, i: usize) -> Result<()> {
        if let Some(ticket) = self.slots[i].ticket.take() {
            let (send, recv) = ticket.wait()?;
            self.sends.push(send);
            self.slots[i].buffer = Some(recv);
        }
        Ok(())
    }
}

/// What a gather needs to know; borrowed for the length of a micro-batch.
#[derive(Clone, Copy)]
pub struct Context<'a> {
    /// Kernels.
    pub device: &'a Device,
    /// Ranks.
    pub comm: &'a Comm,
    /// The cut.
    pub layout: &'a Layout,
    /// This rank's shards.
    pub state: &'a State,
    /// Seconds since any fixed moment.
    pub clock: Clock,
}

fn slot_count(stages: &[Stage]) -> usize {
    let together = |a: &Stage, b: &Stage| a.units.len() + b.units.iter().filter(|u| !a.units.contains(u)).count();
    stages.windows(2).map(|w| together(&w[0], &w[1])).chain(stages.iter().map(|s| s.units.len())).max().unwrap_or(0)
}

/// Bytes of the slots and send buffers at their largest, by walking the stages of a step (forward and back) as
/// [`Weights::gather`] does.
pub fn gather_bytes(layout: &Layout, stages: &[Stage], compute: DType) -> usize {
    let mut slots = vec![(usize::MAX, 0); slot_count(stages)];
    let walk: Vec<&Stage> = stages.iter().chain(stages.iter().rev().skip(1)).collect();
    let mut send = 0;
    for (i, stage) in walk.iter().enumerate() {
        let next = walk.get(i + 1).map_or(&[][..], |n| &n.units[..]);
        let pinned: Vec<usize> = stage.units.iter().chain(next).copied().collect();
        for unit in &pinned {
            let need = layout.units[*unit].padded_len();
            if slots.iter().any(|s| s.0 == *unit) {
                continue;
            }
            let fit = |s: &(usize, usize)| (s.0 != usize::MAX, s.1 < need, s.1.abs_diff(need));
            if let Some(s) = slots.iter_mut().filter(|s| !pinned.contains(&s.0)).min_by_key(|s| fit(s)) {
                *s = (*unit, s.1.max(need));
            }
            send = send.max(layout.units[*unit].shard_len);
        }
    }
    (slots.iter().map(|s| s.1).sum::<usize>() + MAX_STAGE_UNITS * send) * compute.size()
}
