//! Sharding and the training step: the gather/release walk, gradient shards, the fp32 shadow, clipping and schedules.
//!
//! Reading order: [`step`] (the ZeRO-3 step, one function), [`layout`] (how a unit is cut), [`weights`] (gather, prefetch,
//! release), [`grads`] (reduce-scatter and accumulation), [`state`] (the shadow and the moments).

pub mod clip;
pub mod error;
pub mod grads;
pub mod layout;
pub mod schedule;
pub mod state;
pub mod step;
pub mod weights;

pub use error::{Error, Result};
pub use grads::Grads;
pub use layout::{Layout, UnitLayout};
pub use schedule::{Schedule, Shape};
pub use state::State;
pub use step::{Hyper, StepReport, Trainer, train_step};
pub use weights::Weights;

/// Seconds since any fixed moment. Handed in, because this crate does not read the clock.
pub type Clock = fn() -> f64;
