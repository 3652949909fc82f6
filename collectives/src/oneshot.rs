//! A result that is handed over once, from whoever completes an operation to whoever waits for it. Unlike a channel it
//! can be asked whether the result is there without taking it.

use crate::transport::Outcome;
use crate::{Error, Result};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

#[derive(Default)]
struct Slot {
    result: Mutex<Option<Result<Outcome>>>,
    filled: Condvar,
}

/// The completing end. Dropped without a result it reports that the communicator has ended, so nobody waits for nothing.
pub(crate) struct Sender {
    slot: Option<Arc<Slot>>,
}

/// The waiting end. Dropping it is safe at any time: whatever arrives is dropped with the slot.
pub(crate) struct Receiver {
    slot: Arc<Slot>,
}

pub(crate) fn channel() -> (Sender, Receiver) {
    let slot = Arc::<Slot>::default();
    (Sender { slot: Some(slot.clone()) }, Receiver { slot })
}

impl Sender {
    pub(crate) fn complete(mut self, result: Result<Outcome>) {
        if let Some(slot) = self.slot.take() {
            slot.fill(result);
        }
    }
}

impl Drop for Sender {
    fn drop(&mut self) {
        if let Some(slot) = self.slot.take() {
            slot.fill(Err(Error::Ended { op: "an operation".to_owned() }));
        }
    }
}

impl Slot {
    fn fill(&self, result: Result<Outcome>) {
        *lock(&self.result) = Some(result);
        self.filled.notify_all();
    }
}

impl Receiver {
    pub(crate) fn is_done(&self) -> bool {
        lock(&self.slot.result).is_some()
    }

    /// The result, or `None` when it has not come within `limit`.
    pub(crate) fn wait(self, limit: Duration) -> Option<Result<Outcome>> {
        // A limit so long that the clock cannot express its end is no limit.
        let deadline = Instant::now().checked_add(limit);
        let mut result = lock(&self.slot.result);
        loop {
            if let Some(result) = result.take() {
                return Some(result);
            }
            let left = match deadline {
                Some(deadline) => deadline.saturating_duration_since(Instant::now()),
                None => Duration::MAX,
            };
            if left.is_zero() {
                return None;
            }
            result = self.slot.filled.wait_timeout(result, left).unwrap_or_else(PoisonError::into_inner).0;
        }
    }
}

/// Locks a mutex whose data stays valid whatever its holder did: every critical section here is a single assignment,
/// insertion or removal.
pub(crate) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
