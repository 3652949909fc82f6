//! What is really held, beside what was planned: the plan of a run is checked against its buffers after the first step.

use crate::state::Role;
use crate::{Footprint, Trainer};
use spmd_core::{DType, View};

/// A class of buffers whose size or dtype is not what was planned.
#[derive(Debug, Clone, PartialEq, Eq)]
pub struct Mismatch {
    /// The class.
    pub what: &'static str,
    /// As planned.
    pub planned: String,
    /// As found.
    pub found: String,
}

impl<M> Trainer<M> {
    /// Compares every buffer with what [`Footprint`] says of this run's layout, and the dtype of what stays with the
    /// precision's; after a step, when every buffer has been used and nothing is on its way.
    ///
    /// # Errors
    /// The first class that differs.
    pub fn check_held(&self) -> Result<(), Mismatch> {
        let planned = Footprint::new(&self.layout, &self.stages, &self.precision, &self.sharding, 1);
        let [full, exchange, gradients, partials] = self.grads.allocated();
        let of = |role: Role| self.state.units.iter().map(move |unit| unit.role(role));
        let state: usize = Role::ALL.into_iter().flat_map(of).map(|view| view.bytes().len()).sum();
        let classes = [
            ("state shards", planned.state, state),
            ("gathered units", planned.gathered, self.weights.allocated()),
            // With an fp32 wire a full gradient and the send buffer trade places.
            ("full gradients and exchange buffers", planned.full + planned.exchange, full + exchange),
            ("gradient shards", planned.gradients, gradients),
            ("partial sums", planned.partials, partials),
        ];
        for (what, planned, found) in classes {
            // Slots and send buffers grow as they are needed, so a model of few units may need fewer of them.
            let fits = if what == "gathered units" { found <= planned } else { found == planned };
            if !fits {
                let bytes = |n: usize| format!("{n} bytes");
                return Err(Mismatch { what, planned: bytes(planned), found: bytes(found) });
            }
        }
        let (p, first) = (&self.precision, |role| of(role).next().map(|view: View<'_>| view.dtype()));
        let dtypes = [
            ("shadow", p.shadow, first(Role::Shadow)),
            ("exp_avg", p.moments, first(Role::ExpAvg)),
            ("exp_avg_sq", p.moments, first(Role::ExpAvgSq)),
            ("accumulated gradient", p.accumulate, self.grads.accumulated_dtype()),
            ("gathered weights", p.compute, self.weights.dtype()),
        ];
        for (what, planned, found) in dtypes {
            if found.is_some_and(|found| found != planned) {
                let found = found.map_or(String::new(), |dtype: DType| dtype.to_string());
                return Err(Mismatch { what, planned: planned.to_string(), found });
            }
        }
        Ok(())
    }
}
