//! Gradients: full for one stage at a time (or, at ZeRO stages 0 and 1, for all of them), then exchanged, summed in lane
//! order and added to this rank's slice.
//!
//! A contribution travels once between the ranks of a group and, where there are several groups, the groups' sums travel
//! between replicas in fp32. Both hops are exchanges of slices followed by a local sum, and both fly while the backward of
//! the next stage computes.

use crate::lanes::{Partials, Tree};
use crate::state::{each_run, zero_padding};
use crate::weights::{Context, MAX_STAGE_UNITS};
use crate::{Layout, Result, Sharding, UnitLayout};
use collectives::{ReduceTicket, Ticket};
use spmd_core::ops::{Accumulate, Cast, OrderedSum};
use spmd_core::{Buffer, DType, Device, ParamSpec, Precision, Stage, UnitSpec, View, ViewMut};

/// A gradient slice that grows by one contribution a micro-batch.
#[derive(Debug)]
struct Sum {
    slice: Buffer,
    /// Whether it holds anything of this step yet.
    started: bool,
    /// Sums over the lanes of earlier passes; `None` where there is only one pass.
    partials: Option<Partials>,
}

/// Whose gradient it is.
#[derive(Debug, Clone, Copy)]
struct Whose {
    unit: usize,
    /// The contribution of a stage that needs the unit beside its own (a tied weight).
    tied: bool,
    /// Index of its full gradient.
    full: usize,
    pass: usize,
}

/// Full gradients, exchanges on their way, and the accumulated slices.
#[derive(Debug)]
pub struct Grads {
    precision: Precision,
    stages: Vec<Stage>,
    /// Whether every stage has full gradients of its own, reduced at the end of the pass.
    whole: bool,
    passes: usize,
    /// The pass being computed.
    pass: usize,
    /// fp32, one per unit of a stage: what the backward writes.
    full: Vec<Buffer>,
    /// In the wire dtype; `None` while the transport has them.
    exchange: Option<(Buffer, Buffer)>,
    flying: Option<(Whose, ReduceTicket)>,
    /// The sum of a group's lanes and what other groups send, fp32; `None` while the transport has them.
    cross: Option<(Buffer, Buffer)>,
    crossing: Option<(Whose, ReduceTicket)>,
    /// The sum over one pass's lanes, where it cannot be written where it belongs.
    incoming: Buffer,
    /// A finished sum, rounded, that is not accumulated yet.
    reduced: Buffer,
    sums: Vec<Sum>,
    /// For a unit that a stage needs beside its own (a tied weight): what those stages contribute, on its own until the
    /// step's last micro-batch. So each of the two sums is a left fold over micro-batches of a tree over lanes, like every
    /// other gradient's, and one rank with n micro-batches makes the same bits as n ranks with one.
    tied: Vec<Option<Sum>>,
    gathered: Gathered,
    /// Seconds spent waiting for exchanges that were not there yet.
    pub(crate) waited: f64,
}

/// Shards of accumulated gradients, gathered from the slices of all replicas, one ahead.
#[derive(Debug, Default)]
struct Gathered {
    buffers: Vec<Option<Buffer>>,
    flying: Option<(usize, Ticket)>,
    /// Stands in for a slice that the transport has.
    spare: Option<Buffer>,
}

impl Grads {
    /// Buffers for a model cut like `layout`.
    ///
    /// # Errors
    /// Memory that could not be had.
    pub fn new(
        device: &Device,
        layout: &Layout,
        stages: &[Stage],
        precision: Precision,
        sharding: &Sharding,
    ) -> Result<Self> {
        let zeros = |dtype, len, what| -> Result<Buffer> { Ok(device.zeros(dtype, len, what)?) };
        let sizes = Sizes::new(layout, stages, &precision, sharding);
        let passes = sharding.passes(layout.grid.world);
        let tree = Tree::new(passes);
        let sum = |len: usize| -> Result<Sum> {
            Ok(Sum {
                slice: zeros(precision.accumulate, len, "gradient shard")?,
                started: false,
                partials: (!tree.is_single()).then(|| Partials::new(device, tree, len)).transpose()?,
            })
        };
        let tied =
            |(unit, layout): (usize, &UnitLayout)| is_tied(unit, stages).then(|| sum(layout.slice_len)).transpose();
        let wire = |len, what| zeros(precision.wire, len, what);
        let full = |len: &usize| zeros(DType::F32, *len, "full gradient");
        let gathered = |len: &usize| zeros(precision.accumulate, *len, "gathered gradient").map(Some);
        Ok(Grads {
            precision,
            stages: stages.to_vec(),
            whole: sharding.keeps_gradients(),
            passes,
            pass: 0,
            full: sizes.full.iter().map(full).collect::<Result<_>>()?,
            exchange: Some((wire(sizes.send, "gradient send buffer")?, wire(sizes.recv, "gradient receive buffer")?)),
            flying: None,
            cross: Some((
                zeros(DType::F32, sizes.cross, "gradient sum of the group")?,
                zeros(DType::F32, sizes.cross, "gradient sums of other groups")?,
            )),
            crossing: None,
            incoming: zeros(DType::F32, sizes.incoming, "sum over a pass")?,
            reduced: zeros(precision.reduced, sizes.reduced, "reduced gradient")?,
            sums: layout.units.iter().map(|u| sum(u.slice_len)).collect::<Result<_>>()?,
            tied: layout.units.iter().enumerate().map(tied).collect::<Result<_>>()?,
            gathered: Gathered {
                buffers: sizes.gathered.iter().map(gathered).collect::<Result<_>>()?,
                flying: None,
                spare: Some(zeros(precision.accumulate, 0, "gathered gradient")?),
            },
            waited: 0.0,
        })
    }

    /// Bytes by use, as [`grad_bytes`] counts them, while nothing is on its way.
    pub(crate) fn allocated(&self) -> [usize; 4] {
        let pair = |pair: &Option<(Buffer, Buffer)>| {
            pair.as_ref().map_or(0, |(send, recv)| send.allocated() + recv.allocated())
        };
        let sums = || self.sums.iter().chain(self.tied.iter().flatten());
        let gathered = self.gathered.buffers.iter().flatten().chain(&self.gathered.spare);
        let partials: usize = sums().filter_map(|sum| sum.partials.as_ref()).map(Partials::allocated).sum();
        [
            self.full.iter().map(Buffer::allocated).sum(),
            pair(&self.exchange) + pair(&self.cross),
            sums().map(|sum| sum.slice.allocated()).sum::<usize>()
                + gathered.map(Buffer::allocated).sum::<usize>()
                + self.reduced.allocated(),
            partials + self.incoming.allocated(),
        ]
    }

    /// The dtype in which micro-batches are added up.
    pub(crate) fn accumulated_dtype(&self) -> Option<DType> {
        self.sums.first().map(|sum| sum.slice.view().dtype())
    }

    /// Forgets the last step's gradients.
    pub fn reset(&mut self) {
        self.pass = 0;
        self.sums.iter_mut().chain(self.tied.iter_mut().flatten()).for_each(|sum| sum.started = false);
    }

    /// Views for the backward of stage `s` to overwrite, without padding.
    ///
    /// # Errors
    /// Memory that could not be had.
    pub fn full(&mut self, layout: &Layout, s: usize) -> Result<[ViewMut<'_>; MAX_STAGE_UNITS]> {
        let mut views = [ViewMut::F32(&mut []), ViewMut::F32(&mut [])];
        let first = self.first_full(s);
        for ((view, buffer), unit) in views.iter_mut().zip(&mut self.full[first..]).zip(&self.stages[s].units) {
            let layout = layout.units[*unit];
            buffer.resize(DType::F32, layout.padded_len(), "full gradient")?;
            *view = buffer.view_mut().slice(0..layout.len);
        }
        Ok(views)
    }

    /// Index of the first full gradient of stage `s`.
    fn first_full(&self, s: usize) -> usize {
        if self.whole { self.stages[..s].iter().map(|stage| stage.units.len()).sum() } else { 0 }
    }

    /// After the backward of stage `s`: sends what it wrote on its way, unit by unit; at ZeRO stages 0 and 1 it is kept
    /// until [`Grads::end_pass`].
    ///
    /// # Errors
    /// Ranks that do not agree, are gone or do not come in time.
    pub fn reduce_scatter(&mut self, ctx: &Context<'_>, s: usize) -> Result<()> {
        if self.whole {
            // What the last pass sent last may still be on its way; its full gradient is written again soon.
            return self.land(ctx);
        }
        self.send_stage(ctx, s)
    }

    /// After the backward of every stage.
    ///
    /// # Errors
    /// Ranks that do not agree, are gone or do not come in time.
    pub fn end_pass(&mut self, ctx: &Context<'_>) -> Result<()> {
        if self.whole {
            (0..self.stages.len()).rev().try_for_each(|s| self.send_stage(ctx, s))?;
            if self.stages.len() == 1 {
                self.land(ctx)?;
            }
        }
        self.pass = (self.pass + 1) % self.passes;
        Ok(())
    }

    fn send_stage(&mut self, ctx: &Context<'_>, s: usize) -> Result<()> {
        for position in 0..self.stages[s].units.len() {
            let unit = self.stages[s].units[position];
            let full = self.first_full(s) + position;
            self.send(ctx, Whose { unit, tied: position > 0, full, pass: self.pass })?;
        }
        Ok(())
    }

    /// Starts the first hop of one full gradient. The previous one is taken in first.
    fn send(&mut self, ctx: &Context<'_>, whose: Whose) -> Result<()> {
        self.land(ctx)?;
        let layout = ctx.layout.units[whose.unit];
        let Some((mut send, mut recv)) = self.exchange.take() else { return Ok(()) };
        if self.sends_full() {
            // Nothing to round: the full gradient itself goes out and the old send buffer takes its place.
            std::mem::swap(&mut send, &mut self.full[whose.full]);
        } else {
            send.resize(self.precision.wire, layout.padded_len(), "gradient send buffer")?;
            let src = self.full[whose.full].view().slice(0..layout.len);
            let dst = send.view_mut().slice(0..layout.len);
            ctx.device.cast(Cast { src, through: self.precision.grad, dst })?;
        }
        zero_padding(send.view_mut(), layout.len);
        // With one copy of the state the group is the world; a rank that holds everything exchanges with all its replicas.
        let comm = if ctx.shard.world() > 1 { ctx.shard } else { ctx.replicas };
        if comm.world() == 1 {
            self.sum_pass(ctx, whose, |out| Ok(ctx.device.ordered_sum(OrderedSum { parts: send.view(), out })?))?;
            self.give_back(whose, send, recv);
            return Ok(());
        }
        recv.resize(self.precision.wire, layout.padded_len(), "gradient receive buffer")?;
        self.flying = Some((whose, comm.reduce_scatter(ctx.device, send, recv)?));
        Ok(())
    }

    /// Whether a full gradient leaves as it is.
    fn sends_full(&self) -> bool {
        self.precision.wire == DType::F32 && self.precision.grad == DType::F32
    }

    fn give_back(&mut self, whose: Whose, mut send: Buffer, recv: Buffer) {
        if self.whole && self.sends_full() {
            // Every full gradient has a buffer of its own size.
            std::mem::swap(&mut send, &mut self.full[whose.full]);
        }
        self.exchange = Some((send, recv));
    }

    /// Ends the first hop on its way, if any; its sum is the pass's, or goes on to the replicas.
    fn land(&mut self, ctx: &Context<'_>) -> Result<()> {
        let Some((whose, ticket)) = self.flying.take() else { return Ok(()) };
        let before = (ctx.clock)();
        if ctx.shard.world() == 1 || ctx.replicas.world() == 1 {
            let (send, recv) = self.sum_pass(ctx, whose, |out| Ok(ticket.wait(out)?))?;
            self.give_back(whose, send, recv);
        } else {
            self.land_crossing(ctx)?;
            let Some((mut partial, mut others)) = self.cross.take() else { return Ok(()) };
            let len = ctx.layout.units[whose.unit].shard_len();
            partial.resize(DType::F32, len, "gradient sum of the group")?;
            others.resize(DType::F32, len, "gradient sums of other groups")?;
            let (send, recv) = ticket.wait(partial.view_mut())?;
            self.give_back(whose, send, recv);
            self.crossing = Some((whose, ctx.replicas.reduce_scatter(ctx.device, partial, others)?));
        }
        self.waited += (ctx.clock)() - before;
        Ok(())
    }

    /// Ends the second hop on its way, if any.
    fn land_crossing(&mut self, ctx: &Context<'_>) -> Result<()> {
        if let Some((whose, ticket)) = self.crossing.take() {
            self.cross = Some(self.sum_pass(ctx, whose, |out| Ok(ticket.wait(out)?))?);
        }
        Ok(())
    }

    /// Has one pass's contributions added up (`sum` writes to the place it is given) where they belong; after the last pass
    /// the sum over all lanes is rounded to `reduced` and added to the slice. Returns what `sum` did.
    fn sum_pass<T>(
        &mut self,
        ctx: &Context<'_>,
        whose: Whose,
        sum: impl FnOnce(ViewMut<'_>) -> Result<T>,
    ) -> Result<T> {
        let (reduced, accumulate) = (self.precision.reduced, self.precision.accumulate);
        let own = &mut self.sums[whose.unit];
        let Sum { slice, started, partials } =
            if whose.tied { self.tied[whose.unit].as_mut().unwrap_or(own) } else { own };
        let len = slice.len();
        let Some(partials) = partials else {
            let first = !std::mem::replace(started, true);
            if first && reduced == accumulate {
                return sum(slice.view_mut());
            }
            self.reduced.resize(reduced, len, "reduced gradient")?;
            let buffers = sum(self.reduced.view_mut())?;
            ctx.device.accumulate(Accumulate { acc: slice.view_mut(), x: self.reduced.view(), first })?;
            return Ok(buffers);
        };
        self.incoming.resize(DType::F32, len, "sum over a pass")?;
        let buffers = sum(partials.landing(whose.pass, &mut self.incoming))?;
        if let Some(total) = partials.add(ctx.device, whose.pass, &self.incoming)? {
            let first = !std::mem::replace(started, true);
            let acc = slice.view_mut();
            if reduced == DType::F32 {
                ctx.device.accumulate(Accumulate { acc, x: total, first })?;
            } else {
                self.reduced.resize(reduced, len, "reduced gradient")?;
                ctx.device.cast(Cast { src: total, through: DType::F32, dst: self.reduced.view_mut() })?;
                ctx.device.accumulate(Accumulate { acc, x: self.reduced.view(), first })?;
            }
        }
        Ok(buffers)
    }

    /// After the last micro-batch: takes in what is on its way and adds up the two sums of a tied weight (their order makes
    /// no difference to two of them).
    ///
    /// # Errors
    /// Ranks that do not agree, are gone or do not come in time.
    pub fn finish(&mut self, ctx: &Context<'_>) -> Result<()> {
        self.land(ctx)?;
        let before = (ctx.clock)();
        self.land_crossing(ctx)?;
        self.waited += (ctx.clock)() - before;
        for (own, tied) in self.sums.iter_mut().zip(&mut self.tied) {
            if let Some(tied) = tied {
                ctx.device.accumulate(Accumulate { acc: own.slice.view_mut(), x: tied.slice.view(), first: false })?;
            }
        }
        Ok(())
    }

    /// The accumulated gradient of this rank's slice of `unit`.
    pub fn slice(&self, unit: usize) -> View<'_> {
        self.sums[unit].slice.view()
    }

    /// The accumulated gradient of this rank's shard of `unit`: its slice, or those of all replicas, gathered. Units are
    /// asked for in order; the next one is on its way meanwhile.
    ///
    /// # Errors
    /// Ranks that do not agree, are gone or do not come in time.
    pub fn shard(&mut self, ctx: &Context<'_>, unit: usize) -> Result<View<'_>> {
        if ctx.replicas.world() == 1 {
            return Ok(self.sums[unit].slice.view());
        }
        let before = (ctx.clock)();
        if self.gathered.flying.as_ref().is_none_or(|(flying, _)| *flying != unit) {
            self.start_gather(ctx, unit)?;
        }
        if let Some((_, ticket)) = self.gathered.flying.take() {
            let (slice, shard) = ticket.wait()?;
            self.gathered.spare = Some(std::mem::replace(&mut self.sums[unit].slice, slice));
            self.gathered.buffers[unit % 2] = Some(shard);
        }
        self.waited += (ctx.clock)() - before;
        if unit + 1 < self.sums.len() {
            self.start_gather(ctx, unit + 1)?;
        }
        Ok(self.gathered.buffers[unit % 2].as_ref().map_or(View::F32(&[]), Buffer::view))
    }

    fn start_gather(&mut self, ctx: &Context<'_>, unit: usize) -> Result<()> {
        let (Some(mut shard), Some(spare)) = (self.gathered.buffers[unit % 2].take(), self.gathered.spare.take())
        else {
            return Ok(()); // one gather at a time: both are there
        };
        let len = ctx.layout.units[unit].shard_len();
        shard.resize(self.precision.accumulate, len, "gathered gradient")?;
        let slice = std::mem::replace(&mut self.sums[unit].slice, spare);
        self.gathered.flying = Some((unit, ctx.replicas.all_gather(slice, shard)?));
        Ok(())
    }

    /// Hands out the accumulated gradients of this rank's slices, widened to fp32: `take(param, start, values)`.
    ///
    /// # Errors
    /// The first error `take` returns.
    pub fn each<E>(
        &self,
        specs: &[UnitSpec],
        layout: &Layout,
        take: impl FnMut(&ParamSpec, usize, &[f32]) -> Result<(), E>,
    ) -> Result<(), E> {
        each_run(specs, layout, |unit| self.sums[unit].slice.view(), take)
    }
}

/// Whether some stage needs `unit` beside its own.
fn is_tied(unit: usize, stages: &[Stage]) -> bool {
    stages.iter().any(|stage| stage.units.iter().skip(1).any(|other| *other == unit))
}

/// Elements of each buffer.
#[derive(Debug)]
struct Sizes {
    full: Vec<usize>,
    send: usize,
    recv: usize,
    /// Each of the two.
    cross: usize,
    incoming: usize,
    reduced: usize,
    gathered: Vec<usize>,
    /// All accumulated slices.
    slices: usize,
    /// All partial sums.
    partials: usize,
}

impl Sizes {
    fn new(layout: &Layout, stages: &[Stage], precision: &Precision, sharding: &Sharding) -> Self {
        let (grid, largest) = (layout.grid, layout.largest());
        let sends_full = precision.wire == DType::F32 && precision.grad == DType::F32;
        let positions = stages.iter().map(|s| s.units.len()).max().unwrap_or(0);
        let full = match sharding.keeps_gradients() {
            true => stages.iter().flat_map(|s| &s.units).map(|u| layout.units[*u].padded_len()).collect(),
            // With an fp32 wire the first of these and the send buffer trade places, so both are as long as the longest.
            false => vec![largest; positions],
        };
        let tree = Tree::new(sharding.passes(grid.world));
        let tied = |(unit, _): &(usize, &UnitLayout)| is_tied(*unit, stages);
        let tied: usize = layout.units.iter().enumerate().filter(tied).map(|(_, u)| u.slice_len).sum();
        let slices = layout.slice_len() + tied;
        let if_any = |needed: bool, len: usize| if needed { len } else { 0 };
        let reduced = tree.is_single() || precision.reduced != DType::F32;
        Sizes {
            full,
            send: if_any(!(sharding.keeps_gradients() && sends_full), largest),
            recv: if_any(grid.world > 1, largest),
            cross: if_any(grid.shard > 1 && grid.replicas() > 1, layout.largest_shard()),
            incoming: if_any(!tree.is_single(), layout.largest_slice()),
            reduced: if_any(reduced, layout.largest_slice()),
            gathered: vec![layout.largest_shard(); if_any(grid.replicas() > 1, 2)],
            slices,
            partials: tree.partials() * slices,
        }
    }
}

/// Bytes by use: full gradients; exchange buffers; accumulated slices with the sums on their way there; partial sums over
/// passes.
pub(crate) fn grad_bytes(layout: &Layout, stages: &[Stage], precision: &Precision, sharding: &Sharding) -> [usize; 4] {
    let sizes = Sizes::new(layout, stages, precision, sharding);
    let (fp32, accumulate) = (DType::F32.size(), precision.accumulate.size());
    let gathered: usize = sizes.gathered.iter().sum();
    [
        sizes.full.iter().sum::<usize>() * fp32,
        (sizes.send + sizes.recv) * precision.wire.size() + 2 * sizes.cross * fp32,
        (sizes.slices + gathered) * accumulate + sizes.reduced * precision.reduced.size(),
        (sizes.partials + sizes.incoming) * fp32,
    ]
}

/// Data bytes a rank sends to others in one step of `passes` passes over all micro-batches: contributions, groups' sums, and
/// the slices of gradients that replicas gather.
pub(crate) fn grad_sent(layout: &Layout, stages: &[Stage], precision: &Precision, passes: usize) -> u64 {
    let grid = layout.grid;
    let (group, replicas) = (grid.shard, grid.replicas());
    let per_pass = |unit: &usize| {
        let u = layout.units[*unit];
        match (group, replicas) {
            // One hop: to the group, or to all replicas where a rank holds everything.
            (1, n) | (n, 1) => (n - 1) * (u.padded_len() / n) * precision.wire.size(),
            _ => (group - 1) * u.shard_len() * precision.wire.size() + (replicas - 1) * u.slice_len * DType::F32.size(),
        }
    };
    let exchanged: usize = stages.iter().flat_map(|s| &s.units).map(per_pass).sum();
    let gathered = (replicas - 1) * layout.slice_len() * precision.accumulate.size();
    (exchanged * passes + gathered) as u64
}
