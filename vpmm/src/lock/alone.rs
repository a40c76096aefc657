//! A lock that says so where the thread has it already.

#![forbid(unsafe_code)]

use std::cell::Cell;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError, TryLockError};

/// Lets one thread in at a time. It is held while functions of the caller's may be called, which may come back
/// here: a thread that is in is turned away, where it would wait for itself.
#[derive(Debug, Default)]
pub(crate) struct Alone {
    held: Mutex<()>,
    /// The thread that is in, or 0.
    by: AtomicUsize,
}

/// Leaves at drop.
pub(crate) struct Inside<'a> {
    by: &'a AtomicUsize,
    _held: MutexGuard<'a, ()>,
}

/// A number that no other thread has at the same time, and that is not 0.
pub(crate) fn this_thread() -> usize {
    thread_local!(static PLACE: Cell<u8> = const { Cell::new(0) });
    PLACE.with(|place| std::ptr::from_ref(place).addr())
}

impl Alone {
    /// Waits until nobody else is in; `None` where this thread is.
    pub(crate) fn enter(&self) -> Option<Inside<'_>> {
        let this = this_thread();
        // Only this thread writes its own number.
        if self.by.load(Ordering::Relaxed) == this {
            return None;
        }
        let held = self.held.lock().unwrap_or_else(PoisonError::into_inner);
        self.by.store(this, Ordering::Relaxed);
        Some(Inside { by: &self.by, _held: held })
    }

    /// The same without a wait; `None` where any thread is in, this one or another.
    pub(crate) fn try_enter(&self) -> Option<Inside<'_>> {
        let held = match self.held.try_lock() {
            Ok(held) => held,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => return None,
        };
        self.by.store(this_thread(), Ordering::Relaxed);
        Some(Inside { by: &self.by, _held: held })
    }
}

impl Drop for Inside<'_> {
    fn drop(&mut self) {
        self.by.store(0, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn who_is_in_is_turned_away_and_others_wait() {
        let (alone, count) = (Alone::default(), AtomicUsize::new(0));
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..50 {
                        let inside = alone.enter();
                        assert!(inside.is_some() && alone.enter().is_none());
                        assert!(alone.try_enter().is_none());
                        assert_eq!(count.fetch_add(1, Ordering::Relaxed), 0);
                        assert_eq!(count.fetch_sub(1, Ordering::Relaxed), 1);
                        drop(inside);
                    }
                });
            }
        });
        assert!(alone.enter().is_some());
        let inside = alone.try_enter();
        assert!(inside.is_some() && alone.enter().is_none());
    }
}
