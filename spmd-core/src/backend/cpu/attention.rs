//! PLACEHOLDER

use super::threads::Threads;
use crate::Result;
use crate::ops::*;

pub(super) fn attention_forward(_threads: &Threads, _args: Attention<'_>) -> Result<()> {
    unreachable!("placeholder")
}

pub(super) fn attention_backward(_threads: &Threads, _args: AttentionBackward<'_>) -> Result<()> {
    unreachable!("placeholder")
}
