//! PLACEHOLDER

use super::threads::Threads;
use crate::Result;
use crate::ops::*;

pub(super) fn rope(_threads: &Threads, _args: Rope<'_>) -> Result<()> {
    unreachable!("placeholder")
}
