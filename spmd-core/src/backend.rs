//! The seam: which backends are compiled in.

pub(crate) mod cpu;
