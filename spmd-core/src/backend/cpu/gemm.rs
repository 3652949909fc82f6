//! PLACEHOLDER

use super::threads::Threads;
use crate::Result;
use crate::ops::*;

pub(super) fn linear_forward(_threads: &Threads, _args: LinearForward<'_>) -> Result<()> {
    unreachable!("placeholder")
}

pub(super) fn linear_backward_input(_threads: &Threads, _args: LinearBackwardInput<'_>) -> Result<()> {
    unreachable!("placeholder")
}

pub(super) fn linear_backward_weight(_threads: &Threads, _args: LinearBackwardWeight<'_>) -> Result<()> {
    unreachable!("placeholder")
}
