//! A mutex for sections that are short as a rule, and wait for the driver at times.

use std::ops::{Deref, DerefMut};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::backoff::Backoff;

/// A mutex without regard to poison, before which a thread waits awake for some microseconds, looking ever
/// more rarely. To wake one that sleeps takes whoever unlocks a system call, longer than the section.
#[derive(Debug)]
pub(crate) struct PatientMutex<T> {
    mutex: Mutex<T>,
    /// Whether a thread has the mutex, for those that wait awake. Only a hint.
    taken: AtomicBool,
}

impl<T> PatientMutex<T> {
    pub(crate) const fn new(value: T) -> Self {
        Self { mutex: Mutex::new(value), taken: AtomicBool::new(false) }
    }

    #[inline]
    pub(crate) fn lock(&self) -> PatientGuard<'_, T> {
        if self.taken.load(Ordering::Relaxed) {
            self.wait();
        }
        let guard = self.mutex.lock().unwrap_or_else(PoisonError::into_inner);
        self.taken.store(true, Ordering::Relaxed);
        PatientGuard { guard, taken: &self.taken }
    }

    #[cold]
    fn wait(&self) {
        let mut backoff = Backoff::new();
        while backoff.pause() && self.taken.load(Ordering::Relaxed) {}
    }

    pub(crate) fn get_mut(&mut self) -> &mut T {
        self.mutex.get_mut().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Access to what the mutex guards, until drop.
pub(crate) struct PatientGuard<'a, T> {
    guard: MutexGuard<'a, T>,
    taken: &'a AtomicBool,
}

impl<T> Deref for PatientGuard<'_, T> {
    type Target = T;

    #[inline]
    fn deref(&self) -> &T {
        &self.guard
    }
}

impl<T> DerefMut for PatientGuard<'_, T> {
    #[inline]
    fn deref_mut(&mut self) -> &mut T {
        &mut self.guard
    }
}

impl<T> Drop for PatientGuard<'_, T> {
    #[inline]
    fn drop(&mut self) {
        // Before the mutex is unlocked, when the fields are dropped.
        self.taken.store(false, Ordering::Relaxed);
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_taken_after_a_long_section_and_after_a_panic() {
        let mutex = PatientMutex::new(0);
        std::thread::scope(|scope| {
            let held = mutex.lock();
            scope.spawn(|| *mutex.lock() += 1);
            std::thread::sleep(std::time::Duration::from_millis(20));
            drop(held);
        });
        let panicked = std::thread::scope(|scope| {
            let thread = scope.spawn(|| {
                let _guard = mutex.lock();
                panic!("with the lock held, for the test");
            });
            thread.join()
        });
        assert!(panicked.is_err() && mutex.mutex.is_poisoned());
        assert_eq!(*mutex.lock(), 1);
    }

    #[test]
    fn increments_of_many_threads_all_count() {
        let rounds = if cfg!(miri) { 50 } else { 20_000 };
        let mut mutex = PatientMutex::new(0_u64);
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| (0..rounds).for_each(|_| *mutex.lock() += 1));
            }
        });
        assert_eq!(*mutex.get_mut(), 4 * rounds);
    }
}
