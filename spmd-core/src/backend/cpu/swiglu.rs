//! PLACEHOLDER

use super::threads::Threads;
use crate::Result;
use crate::ops::*;

pub(super) fn swiglu_forward(_threads: &Threads, _args: SwiGluForward<'_>) -> Result<()> {
    unreachable!("placeholder")
}

pub(super) fn swiglu_backward(_threads: &Threads, _args: SwiGluBackward<'_>) -> Result<()> {
    unreachable!("placeholder")
}
