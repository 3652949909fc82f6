//! What a rank keeps between steps: its shard of the shadow and of both moments.

use crate::{Layout, Result};
use spmd_core::dtype::round_bf16;
use spmd_core::{Buffer, Device, ParamSpec, Precision, UnitSpec, View, ViewMut};

/// Weights are loaded and handed out in runs of at most this many elements, so that no scratch grows with the model.
const RUN: usize = 1 << 18;

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
        let units = layout.units.iter().map(|u| unit(u.shard_len)).collect::<Result<_>>()?;
        Ok(State { units, step: 0, round_loaded: precision.round_loaded })
    }

    /// Fills the shadow: `fill(param, start, out)` writes elements `start..start + out.len()` of a parameter. It is asked
    /// only for what this rank owns.
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
        for (unit, run) in runs(layout) {
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

    /// Hands out the shadow of this rank, widened to fp32: `take(param, start, values)`.
    ///
    /// # Errors
    /// The first error `take` returns.
    pub fn each<E>(
        &self,
        specs: &[UnitSpec],
        layout: &Layout,
        take: impl FnMut(&ParamSpec, usize, &[f32]) -> Result<(), E>,
    ) -> Result<(), E> {
        each_run(specs, layout, |unit| self.units[unit].shadow.view(), take)
    }
}

/// Hands out shards of a unit, widened to fp32, parameter by parameter.
pub(crate) fn each_run<'a, E>(
    specs: &[UnitSpec],
    layout: &Layout,
    shard: impl Fn(usize) -> View<'a>,
    mut take: impl FnMut(&ParamSpec, usize, &[f32]) -> Result<(), E>,
) -> Result<(), E> {
    let mut scratch = vec![0.0; RUN];
    for (unit, run) in runs(layout) {
        let out = &mut scratch[..run.range.len()];
        widen(shard(unit).slice(run.range), out);
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

/// This rank's segments, cut into runs of at most [`RUN`] elements, with their unit.
fn runs(layout: &Layout) -> impl Iterator<Item = (usize, crate::layout::Segment)> {
    let segments = layout.segments.iter().enumerate().flat_map(|(unit, s)| s.iter().map(move |s| (unit, s)));
    segments.flat_map(|(unit, s)| {
        s.range.clone().step_by(RUN).map(move |at| {
            let range = at..(at + RUN).min(s.range.end);
            (unit, crate::layout::Segment { param: s.param, start: s.start + at - s.range.start, range })
        })
    })
}

/// Zeroes what lies behind the unit's own elements in a padded buffer.
pub(crate) fn zero_padding(buffer: ViewMut<'_>, len: usize) {
    let all = buffer.len();
    buffer.slice(len..all).zero();
}
