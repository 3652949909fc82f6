//! The one place a backend is chosen, and the checked front of every kernel.

use crate::backend::cpu::Cpu;
use crate::ops::{self, Kernels};
use crate::{Buffer, DType, Result};
use std::sync::Arc;

/// A handle to what computes: cheap to clone, given to whoever needs kernels or memory.
#[derive(Clone)]
pub struct Device {
    kernels: Arc<dyn Kernels>,
    name: String,
}

impl std::fmt::Debug for Device {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Device").field("name", &self.name).finish_non_exhaustive()
    }
}

impl Device {
    /// The CPU with `threads` threads (at least one). One thread runs inline, without a pool.
    ///
    /// # Errors
    /// Threads that could not be started.
    pub fn cpu(threads: usize) -> Result<Self> {
        let cpu = Cpu::new(threads)?;
        Ok(Device { name: format!("cpu, {} thread(s), {}", threads.max(1), cpu.isa()), kernels: Arc::new(cpu) })
    }

    /// What it is, for the start-up table.
    pub fn name(&self) -> &str {
        &self.name
    }

    /// `len` zeros on this device.
    ///
    /// # Errors
    /// Memory that could not be had.
    pub fn zeros(&self, dtype: DType, len: usize, what: &'static str) -> Result<Buffer> {
        Buffer::zeros(dtype, len, what)
    }
}

/// Writes `Device::op(args)`: check once, then hand to the backend.
macro_rules! fronts {
    ($($op:ident($args:ident)),* $(,)?) => {
        impl Device {
            $(
                #[doc = concat!("Runs [`ops::", stringify!($args), "`], whose documentation has the mathematics.")]
                ///
                /// # Errors
                /// Arguments whose shapes or dtypes do not fit each other.
                pub fn $op(&self, args: ops::$args<'_>) -> Result<()> {
                    args.check()?;
                    self.kernels.$op(args)
                }
            )*
        }
    };
}
crate::ops::every_op!(fronts);
