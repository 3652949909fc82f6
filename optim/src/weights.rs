//! The walk: gathers each stage's units before it runs, starts the next stage's gather meanwhile, and lets go of what is
//! no longer needed.
//!
//! A few slots hold gathered units. A unit that is still in a slot (the last block when the backward begins, the
//! embedding between micro-batches) is not gathered again; an optimizer step makes every slot stale. Where weights are kept
//! (ZeRO stages 0 to 2, or without resharding) there is a slot for every unit.

use crate::{Clock, Layout, Result, Sharding, State};
use collectives::{Comm, Ticket};
use spmd_core::ops::Cast;
use spmd_core::{Buffer, DType, Device, Stage, View};

/// Most units one stage needs at once: its own and, for a tied head, the embedding.
pub(crate) const MAX_STAGE_UNITS: usize = 2;

/// A place for one gathered unit.
#[derive(Debug, Default)]
struct Slot {
    /// The gathered unit in the compute dtype; `None` while the transport has it.
    buffer: Option<Buffer>,
    ticket: Option<Ticket>,
}

/// Which unit is in which slot.
#[derive(Debug)]
struct Slots {
    /// The unit, and the largest that ever was here.
    slots: Vec<(Option<usize>, usize)>,
}

impl Slots {
    fn new(count: usize) -> Self {
        Slots { slots: vec![(None, 0); count] }
    }

    fn find(&self, unit: usize) -> Option<usize> {
        self.slots.iter().position(|(held, _)| *held == Some(unit))
    }

    /// Gives `unit` of `need` elements a slot that holds none of `pinned`; `None` if it has one already.
    fn place(&mut self, unit: usize, need: usize, pinned: &[usize]) -> Option<usize> {
        if self.find(unit).is_some() {
            return None;
        }
        let free = |i: &usize| self.slots[*i].0.is_none_or(|u| !pinned.contains(&u));
        // An empty slot; then the smallest that is large enough, or else the largest: buffers grow as little as possible.
        let fit = |i: &usize| {
            let (held, capacity) = self.slots[*i];
            (held.is_some(), capacity < need, capacity.abs_diff(need))
        };
        // With `slot_count` slots there is one; were there none, the gather would simply start later.
        let slot = (0..self.slots.len()).filter(free).min_by_key(fit)?;
        self.slots[slot] = (Some(unit), self.slots[slot].1.max(need));
        Some(slot)
    }

    fn clear(&mut self) {
        self.slots.iter_mut().for_each(|(held, _)| *held = None);
    }
}

/// Gathered units and what is on its way.
#[derive(Debug)]
pub struct Weights {
    compute: DType,
    held: Slots,
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
    /// Slots for a model of `units` units with these stages: one a unit if weights are kept, otherwise as many as two
    /// neighbouring stages need together.
    pub fn new(compute: DType, units: usize, stages: &[Stage], keep: bool) -> Self {
        let count = slot_count(units, stages, keep);
        let slots = (0..count).map(|_| Slot::default()).collect();
        Weights { compute, held: Slots::new(count), slots, sends: Vec::new(), waited: 0.0 }
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
            let slot = self.held.find(*unit).map(|i| &self.slots[i]);
            if let Some(buffer) = slot.and_then(|s| s.buffer.as_ref()) {
                *view = buffer.view().slice(0..ctx.layout.units[*unit].len);
            }
        }
        Ok(Gathered { views, count: stage.units.len() })
    }

    /// Bytes of slots and send buffers, while nothing is on its way.
    pub(crate) fn allocated(&self) -> usize {
        let slots = self.slots.iter().filter_map(|slot| slot.buffer.as_ref());
        slots.chain(&self.sends).map(Buffer::allocated).sum()
    }

    /// The dtype of what was gathered, if anything was.
    pub(crate) fn dtype(&self) -> Option<DType> {
        self.slots.iter().find_map(|slot| slot.buffer.as_ref()).map(|buffer| buffer.view().dtype())
    }

    /// Forgets every gathered unit: the weights have changed.
    pub(crate) fn invalidate(&mut self) -> Result<()> {
        for i in 0..self.slots.len() {
            self.land(i)?;
        }
        self.held.clear();
        Ok(())
    }

    /// Starts gathering `unit` into a slot that holds none of `pinned`, unless it is there or under way.
    fn start(&mut self, ctx: &Context<'_>, unit: usize, pinned: &[usize]) -> Result<()> {
        let layout = ctx.layout.units[unit];
        let need = layout.padded_len();
        let Some(i) = self.held.place(unit, need, pinned) else { return Ok(()) };
        self.land(i)?;
        let mut recv = match self.slots[i].buffer.take() {
            Some(recv) => recv,
            None => Buffer::zeros(self.compute, 0, "gathered unit")?,
        };
        recv.resize(self.compute, need, "gathered unit")?;
        let src = ctx.state.units[unit].shadow.view();
        if ctx.shard.world() == 1 {
            // This rank has all of it.
            ctx.device.cast(Cast { src, through: DType::F32, dst: recv.view_mut() })?;
            self.slots[i].buffer = Some(recv);
            return Ok(());
        }
        let mut send = match self.sends.pop() {
            Some(send) => send,
            None => Buffer::zeros(self.compute, 0, "gather send buffer")?,
        };
        send.resize(self.compute, layout.shard_len(), "gather send buffer")?;
        ctx.device.cast(Cast { src, through: DType::F32, dst: send.view_mut() })?;
        self.slots[i].ticket = Some(ctx.shard.all_gather(send, recv)?);
        Ok(())
    }

    /// Waits for `unit`.
    fn finish(&mut self, ctx: &Context<'_>, unit: usize) -> Result<()> {
        let Some(i) = self.held.find(unit) else { return Ok(()) };
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
    /// The ranks that share a copy of the state with this one.
    pub shard: &'a Comm,
    /// The ranks that hold the same shard as this one.
    pub replicas: &'a Comm,
    /// The cut.
    pub layout: &'a Layout,
    /// This rank's shards.
    pub state: &'a State,
    /// Seconds since any fixed moment.
    pub clock: Clock,
}

fn slot_count(units: usize, stages: &[Stage], keep: bool) -> usize {
    if keep {
        return units;
    }
    let together = |a: &Stage, b: &Stage| a.units.len() + b.units.iter().filter(|u| !a.units.contains(u)).count();
    stages.windows(2).map(|w| together(&w[0], &w[1])).chain(stages.iter().map(|s| s.units.len())).max().unwrap_or(0)
}

/// What gathering takes: bytes of the slots and send buffers at their largest, and data bytes sent to other ranks in a
/// step of `passes` passes over all micro-batches. Found by walking the stages (forward and back) as [`Weights::gather`]
/// does.
pub(crate) fn gather_cost(
    layout: &Layout,
    stages: &[Stage],
    compute: DType,
    sharding: &Sharding,
    passes: usize,
) -> (usize, u64) {
    let mut slots = Slots::new(slot_count(layout.units.len(), stages, sharding.keeps_weights()));
    let others = layout.grid.shard - 1;
    let (mut send, mut sent) = (0, 0);
    for _ in 0..passes {
        let walk: Vec<&Stage> = stages[..stages.len() - 1].iter().chain(stages.iter().rev()).collect();
        for (i, stage) in walk.iter().enumerate() {
            let next = walk.get(i + 1).map_or(&[][..], |n| &n.units[..]);
            let pinned: Vec<usize> = stage.units.iter().chain(next).copied().collect();
            for unit in &pinned {
                let u = layout.units[*unit];
                if slots.place(*unit, u.padded_len(), &pinned).is_some() && others > 0 {
                    send = send.max(u.shard_len());
                    sent += (others * u.shard_len() * compute.size()) as u64;
                }
            }
        }
    }
    let held: usize = slots.slots.iter().map(|(_, capacity)| capacity).sum();
    ((held + MAX_STAGE_UNITS * send) * compute.size(), sent)
}
