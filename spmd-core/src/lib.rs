//! What every other crate of Umbra stands on: dtypes, buffers, devices, kernels, precision, the unit contract and
//! counter-based randomness. It knows no ranks, no files and no JSON.
//!
//! Reading order: [`precision`] (which dtype each role has), [`unit`] (what a model is to the sharder), [`buffer`],
//! [`device`] (the one place a backend is chosen), [`ops`] (every operation a backend owes, with its mathematics).

pub mod backend;
pub mod buffer;
pub mod device;
pub mod dtype;
pub mod error;
pub mod gemm_log;
pub mod ops;
pub mod precision;
pub mod rng;
pub mod stream;
pub mod unit;

pub use buffer::{Buffer, View, ViewMut};
pub use device::Device;
pub use dtype::DType;
pub use error::{Error, Result};
pub use half::bf16;
pub use precision::{Policy, Precision};
pub use unit::{Batch, ParamKind, ParamSpec, Stage, UnitModel, UnitSpec};
