//! The seam: which backends are compiled in.

pub(crate) mod cpu;

pub use cpu::scratch_bytes;
