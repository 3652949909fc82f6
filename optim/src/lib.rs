//! Sharding and the training step: the gather/release walk, gradient shards, the fp32 shadow, clipping and schedules.
//!
//! Reading order: [`step`] (the ZeRO-3 step, one function), [`grid`] (which rank holds what), [`layout`] (how a unit is
//! cut), [`weights`] (gather, prefetch, release), [`grads`] (reduce-scatter and accumulation), `lanes` (the tree over
//! passes), [`state`] (the shadow and the moments), [`footprint`] (what it all costs).

pub mod clip;
pub mod error;
pub mod footprint;
pub mod grads;
pub mod grid;
mod held;
mod lanes;
pub mod layout;
pub mod schedule;
pub mod state;
pub mod step;
pub mod weights;

pub use error::{Error, Result};
pub use footprint::Footprint;
pub use grads::Grads;
pub use grid::{Grid, Sharding};
pub use held::Mismatch;
pub use layout::{Layout, UnitLayout};
pub use schedule::{Curve, Schedule, Shape};
pub use state::{Role, Snapshot, State};
pub use step::{Hyper, StepReport, Trainer, train_step};
pub use weights::Weights;

/// Seconds since any fixed moment. Handed in, because this crate does not read the clock.
pub type Clock = fn() -> f64;
