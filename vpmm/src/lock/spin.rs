//! A lock that spins, for sections of well under a microsecond as a rule.

use std::cell::UnsafeCell;
use std::fmt;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicBool, Ordering};

use super::backoff::Backoff;
use super::order::{Held, Place, Rank};

/// A test-and-test-and-set lock: one exchange to take it, and a plain store to let it go, as nobody is ever
/// to be woken. Where a section calls the driver at times, those who come then sleep by themselves.
pub(crate) struct SpinLock<T> {
    place: Place,
    held: AtomicBool,
    value: UnsafeCell<T>,
}

// SAFETY: the value is reached through a guard only, of which one exists at a time; so sharing the
// lock sends the value from thread to thread and never shares it.
unsafe impl<T: Send> Sync for SpinLock<T> {}

impl<T> SpinLock<T> {
    pub(crate) const fn new(value: T) -> Self {
        Self::at(Place::NONE, value)
    }

    /// One with a place in the order of locks.
    pub(crate) const fn ranked(rank: Rank, value: T) -> Self {
        Self::at(Place::of(rank), value)
    }

    const fn at(place: Place, value: T) -> Self {
        Self { place, held: AtomicBool::new(false), value: UnsafeCell::new(value) }
    }

    #[inline]
    pub(crate) fn lock(&self) -> SpinGuard<'_, T> {
        let _held = self.place.take();
        if self.held.swap(true, Ordering::Acquire) {
            self.contend();
        }
        SpinGuard { lock: self, _held }
    }

    #[cold]
    fn contend(&self) {
        let mut backoff = Backoff::new();
        loop {
            backoff.pause();
            let is_free = !self.held.load(Ordering::Relaxed);
            if is_free && !self.held.swap(true, Ordering::Acquire) {
                return;
            }
        }
    }

    pub(crate) fn get_mut(&mut self) -> &mut T {
        self.value.get_mut()
    }
}

impl<T> fmt::Debug for SpinLock<T> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("SpinLock").finish_non_exhaustive()
    }
}

/// Access to what the lock guards, until drop.
pub(crate) struct SpinGuard<'a, T> {
    lock: &'a SpinLock<T>,
    _held: Held,
}

impl<T> Deref for SpinGuard<'_, T> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        // SAFETY: the lock is held while the guard lives, so no other reference exists.
        unsafe { &*self.lock.value.get() }
    }
}

impl<T> DerefMut for SpinGuard<'_, T> {
    #[inline]
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: as in `deref`; the guard is borrowed for as long as the reference lives.
        unsafe { &mut *self.lock.value.get() }
    }
}

impl<T> Drop for SpinGuard<'_, T> {
    #[inline]
    fn drop(&mut self) {
        self.lock.held.store(false, Ordering::Release);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn increments_of_many_threads_all_count() {
        let rounds = if cfg!(miri) { 50 } else { 20_000 };
        let lock = SpinLock::new(0_u64);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| (0..rounds).for_each(|_| *lock.lock() += 1));
            }
        });
        assert_eq!(*lock.lock(), 4 * rounds);
    }

    #[test]
    fn it_is_taken_after_a_long_section_and_after_a_panic() {
        let lock = SpinLock::new(0);
        std::thread::scope(|scope| {
            let held = lock.lock();
            scope.spawn(|| *lock.lock() += 1);
            std::thread::sleep(std::time::Duration::from_millis(20));
            drop(held);
        });
        let panicked = std::thread::scope(|scope| {
            let thread = scope.spawn(|| {
                let _guard = lock.lock();
                panic!("with the lock held, for the test");
            });
            thread.join()
        });
        assert!(panicked.is_err());
        assert_eq!(*lock.lock(), 1);
    }
}
