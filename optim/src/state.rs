//! What a rank keeps between steps: its shard of the shadow and of both moments.

use crate::layout::Segment;
use crate::{Layout, Result};
use spmd_core::dtype::round_bf16;
use spmd_core::{Buffer, Device, ParamSpec, Precision, UnitSpec, View, ViewMut, stream};

/// Weights are loaded and handed out in runs of at most this many elements, so that no scratch grows with the model.
const RUN: usize = 1 << 18;

/// What the optimizer keeps of every weight.
#[derive(Debug, Clone, Copy, PartialEq, Eq, Hash, PartialOrd, Ord)]
pub enum Role {
    /// The weights the optimizer reads and writes.
    Shadow,
    /// First moment.
    ExpAvg,
    /// Second moment.
    ExpAvgSq,
}

impl Role {
    /// All three, in the order in which they are hashed and stored.
    pub const ALL: [Role; 3] = [Role::Shadow, Role::ExpAvg, Role::ExpAvgSq];
}

/// One unit's shards.
#[derive(Debug)]
pub struct UnitState {
    /// The weights the optimizer reads and writes.
    pub shadow: Buffer,
    /// First moment.
    pub exp_avg: Buffer,
    /// Second moment.
    pub exp_avg_sq: Buffer,
}

impl UnitState {
    /// One role's shard, padding included.
    pub fn role(&self, role: Role) -> View<'_> {
        match role {
            Role::Shadow => self.shadow.view(),
            Role::ExpAvg => self.exp_avg.view(),
            Role::ExpAvgSq => self.exp_avg_sq.view(),
        }
    }
}

/// Every unit's shards of this rank.
#[derive(Debug)]
pub struct State {
    /// One entry a unit.
    pub units: Vec<UnitState>,
    /// Optimizer steps made.
    pub step: u64,
    round_loaded: bool,
}

impl State {
    /// Zeros of the policy's dtypes.
    ///
    /// # Errors
    /// Memory that could not be had.
    pub fn new(device: &Device, layout: &Layout, precision: &Precision) -> Result<Self> {
        Self::with_moments(device, layout, precision, |shard_len| shard_len)
    }

    /// Shadow shards without moments: for a model that is only read.
    ///
    /// # Errors
    /// Memory that could not be had.
    pub fn weights_only(device: &Device, layout: &Layout, precision: &Precision) -> Result<Self> {
        Self::with_moments(device, layout, precision, |_| 0)
    }

    fn with_moments(
        device: &Device,
        layout: &Layout,
        precision: &Precision,
        moments: impl Fn(usize) -> usize,
    ) -> Result<Self> {
        let unit = |len: usize| -> Result<UnitState> {
            Ok(UnitState {
                shadow: device.zeros(precision.shadow, len, "shadow shard")?,
                exp_avg: device.zeros(precision.moments, moments(len), "exp_avg shard")?,
                exp_avg_sq: device.zeros(precision.moments, moments(len), "exp_avg_sq shard")?,
            })
        };
        let units = layout.units.iter().map(|u| unit(u.shard_len())).collect::<Result<_>>()?;
        Ok(State { units, step: 0, round_loaded: precision.round_loaded })
    }

    /// Fills the shadow of a new run: `fill(param, start, out)` writes elements `start..start + out.len()` of a parameter.
    /// It is asked only for what this rank holds.
    ///
    /// # Errors
    /// The first error `fill` returns.
    pub fn load<E>(
        &mut self,
        specs: &[UnitSpec],
        layout: &Layout,
        mut fill: impl FnMut(&ParamSpec, usize, &mut [f32]) -> Result<(), E>,
    ) -> Result<(), E> {
        let mut scratch = vec![0.0; RUN];
        for (unit, run) in runs(&layout.segments) {
            let param = &specs[unit].params[run.param];
            let out = &mut scratch[..run.range.len()];
            fill(param, run.start, out)?;
            if self.round_loaded {
                out.iter_mut().for_each(|x| *x = round_bf16(*x));
            }
            self.units[unit].shadow.view_mut().slice(run.range).copy_from_f32(out);
        }
        Ok(())
    }

    /// Fills everything as it was kept: `fill(role, param, start, out)` writes elements `start..start + out.len()` of a
    /// parameter in the dtype of `out`. It is asked only for what this rank holds, and by a thread for each role, so that
    /// the disk has work while numbers are checked.
    ///
    /// # Errors
    /// The first error `fill` returns, of the first role that has one.
    pub fn restore<E: Send>(
        &mut self,
        specs: &[UnitSpec],
        layout: &Layout,
        fill: impl Fn(Role, &ParamSpec, usize, ViewMut<'_>) -> Result<(), E> + Sync,
    ) -> Result<(), E> {
        let (mut shadow, mut exp_avg, mut exp_avg_sq) = (Vec::new(), Vec::new(), Vec::new());
        for (unit, segments) in self.units.iter_mut().zip(&layout.segments) {
            shadow.push((unit.shadow.view_mut(), segments));
            exp_avg.push((unit.exp_avg.view_mut(), segments));
            exp_avg_sq.push((unit.exp_avg_sq.view_mut(), segments));
        }
        let fill_role = |role: Role, shards: Vec<(ViewMut<'_>, &Vec<Segment>)>| {
            for (spec, (mut shard, segments)) in specs.iter().zip(shards) {
                for s in segments {
                    fill(role, &spec.params[s.param], s.start, shard.reborrow().slice(s.range.clone()))?;
                }
            }
            Ok(())
        };
        std::thread::scope(|scope| {
            let of_role = |(role, shards)| scope.spawn(move || fill_role(role, shards));
            let threads = Role::ALL.into_iter().zip([shadow, exp_avg, exp_avg_sq]).map(of_role).collect::<Vec<_>>();
            threads.into_iter().try_for_each(|t| t.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)))
        })
    }

    /// This rank's slice of one role of a unit, padding included: what it writes to disk, so that no replica writes the
    /// same.
    pub fn slice(&self, layout: &Layout, unit: usize, role: Role) -> View<'_> {
        self.units[unit].role(role).slice(layout.units[unit].slice_in_shard())
    }

    /// Hands out this rank's slice of the shadow, widened to fp32: `take(param, start, values)`.
    ///
    /// # Errors
    /// The first error `take` returns.
    pub fn each<E>(
        &self,
        specs: &[UnitSpec],
        layout: &Layout,
        take: impl FnMut(&ParamSpec, usize, &[f32]) -> Result<(), E>,
    ) -> Result<(), E> {
        each_run(specs, layout, |unit| self.slice(layout, unit, Role::Shadow), take)
    }
}

/// A copy of this rank's slices, to be written while training goes on.
#[derive(Debug)]
pub struct Snapshot {
    units: Vec<[Buffer; 3]>,
}

impl Snapshot {
    /// Room for the slices of `state`, touched, so that the first copy is as fast as every other.
    ///
    /// # Errors
    /// Memory that could not be had.
    pub fn new(device: &Device, layout: &Layout, precision: &Precision) -> Result<Self> {
        let buffer = |dtype, len| -> Result<Buffer> {
            let mut buffer = device.zeros(dtype, len, "snapshot")?;
            buffer.bytes_mut().fill(0);
            Ok(buffer)
        };
        let unit = |len: usize| -> Result<[Buffer; 3]> {
            let moments = precision.moments;
            Ok([buffer(precision.shadow, len)?, buffer(moments, len)?, buffer(moments, len)?])
        };
        Ok(Snapshot { units: layout.units.iter().map(|u| unit(u.slice_len)).collect::<Result<_>>()? })
    }

    /// Copies the slices of `state`.
    pub fn take(&mut self, state: &State, layout: &Layout) {
        for (unit, buffers) in self.units.iter_mut().enumerate() {
            for (role, buffer) in Role::ALL.into_iter().zip(buffers) {
                stream::copy(buffer.bytes_mut(), state.slice(layout, unit, role).bytes());
            }
        }
    }

    /// The slice of one role of a unit, padding included, as it was when it was taken.
    pub fn slice(&self, unit: usize, role: Role) -> View<'_> {
        self.units[unit][role as usize].view()
    }
}

/// Hands out slices of a unit, widened to fp32, parameter by parameter.
pub(crate) fn each_run<'a, E>(
    specs: &[UnitSpec],
    layout: &Layout,
    slice: impl Fn(usize) -> View<'a>,
    mut take: impl FnMut(&ParamSpec, usize, &[f32]) -> Result<(), E>,
) -> Result<(), E> {
    let mut scratch = vec![0.0; RUN];
    for (unit, run) in runs(&layout.slices) {
        let out = &mut scratch[..run.range.len()];
        widen(slice(unit).slice(run.range), out);
        take(&specs[unit].params[run.param], run.start, out)?;
    }
    Ok(())
}

fn widen(from: View<'_>, to: &mut [f32]) {
    match from {
        View::F32(s) => to.copy_from_slice(s),
        View::Bf16(s) => s.iter().zip(to).for_each(|(x, y)| *y = spmd_core::dtype::from_bf16(*x)),
    }
}

/// Segments, cut into runs of at most [`RUN`] elements, with their unit.
fn runs(segments: &[Vec<Segment>]) -> impl Iterator<Item = (usize, Segment)> {
    let segments = segments.iter().enumerate().flat_map(|(unit, s)| s.iter().map(move |s| (unit, s)));
    segments.flat_map(|(unit, s)| {
        s.range.clone().step_by(RUN).map(move |at| {
            let range = at..(at + RUN).min(s.range.end);
            (unit, Segment { param: s.param, start: s.start + at - s.range.start, range })
        })
    })
}

/// Zeroes what lies behind the unit's own elements in a padded buffer.
pub(crate) fn zero_padding(buffer: ViewMut<'_>, len: usize) {
    let all = buffer.len();
    buffer.slice(len..all).zero();
}
