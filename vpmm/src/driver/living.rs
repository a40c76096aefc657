//! Which streams are alive, of those whose end is told.

#![forbid(unsafe_code)]

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::device::StreamHandle;

/// A stream, and the context that it is of.
struct Life {
    stream: StreamHandle,
    context_id: u64,
}

/// Such streams by their numbers, from when their first handle is made until the first is told of their end. The
/// driver gives no number twice.
#[derive(Default)]
pub(super) struct Living(Mutex<HashMap<u64, Life>>);

impl Living {
    fn by_number(&self) -> MutexGuard<'_, HashMap<u64, Life>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    pub(super) fn add(&self, number: u64, stream: StreamHandle, context_id: u64) {
        self.by_number().insert(number, Life { stream, context_id });
    }

    pub(super) fn remove(&self, number: u64) {
        self.by_number().remove(&number);
    }

    pub(super) fn has(&self, number: u64) -> bool {
        self.by_number().contains_key(&number)
    }

    /// Whether something is true of a stream of a context. None of those that are asked about is destroyed meanwhile.
    pub(super) fn any<E>(
        &self,
        context_id: u64,
        mut is: impl FnMut(StreamHandle) -> Result<bool, E>,
    ) -> Result<bool, E> {
        for life in self.by_number().values().filter(|life| life.context_id == context_id) {
            if is(life.stream)? {
                return Ok(true);
            }
        }
        Ok(false)
    }
}
