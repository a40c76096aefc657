//! Which streams are alive, of those whose end is told.

#![forbid(unsafe_code)]

use std::collections::HashSet;
use std::sync::{Mutex, MutexGuard, PoisonError};

/// The numbers of such streams from when their first handle is made until the first is told of their end. The
/// driver gives no number twice.
#[derive(Default)]
pub(super) struct Living(Mutex<HashSet<u64>>);

impl Living {
    fn numbers(&self) -> MutexGuard<'_, HashSet<u64>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn add(&self, number: u64) {
        self.numbers().insert(number);
    }

    pub(super) fn remove(&self, number: u64) {
        self.numbers().remove(&number);
    }

    pub(super) fn has(&self, number: u64) -> bool {
        self.numbers().contains(&number)
    }
}
