//! A lock that says so where the thread would wait for itself.

#![forbid(unsafe_code)]

use std::cell::Cell;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};

/// Lets one thread in at a time. It is held while functions of the caller's may be called, which may come back
/// here: a thread that is in is turned away, where it would wait for itself. So is one that is in another of these
/// which whoever is in here waits for, be it by way of further threads, where these have one list of who waits.
#[derive(Debug, Default)]
pub(crate) struct Alone {
    held: Mutex<()>,
    /// The thread that is in, or 0.
    by: Arc<AtomicUsize>,
    waiting: Arc<Waiting>,
}

/// Every thread that waits for one of these, with who is in there. A thread is here before it begins to wait, so the
/// last of a circle of them sees the others.
#[derive(Debug, Default)]
pub(crate) struct Waiting(Mutex<Vec<(usize, Arc<AtomicUsize>)>>);

/// A thread is in the list until this is dropped.
struct Waits<'a> {
    list: &'a Waiting,
    thread: usize,
}

impl Waiting {
    fn list(&self) -> MutexGuard<'_, Vec<(usize, Arc<AtomicUsize>)>> {
        self.0.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// `None` where who is in waits for this thread.
    fn begin(&self, this: usize, by: &Arc<AtomicUsize>) -> Option<Waits<'_>> {
        let mut waiting = self.list();
        // Each came to the list after it went in where it is: under the list's lock that is seen.
        let mut inside = by.load(Ordering::Relaxed);
        // One that is in by now may be in the list still, as if it waited for itself.
        for _ in 0..=waiting.len() {
            if inside == this {
                return None;
            }
            let Some((_, next)) = waiting.iter().find(|(thread, _)| *thread == inside) else {
                break;
            };
            inside = next.load(Ordering::Relaxed);
        }
        waiting.push((this, Arc::clone(by)));
        Some(Waits { list: self, thread: this })
    }
}

impl Drop for Waits<'_> {
    fn drop(&mut self) {
        self.list.list().retain(|(thread, _)| *thread != self.thread);
    }
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
    /// One of those that a list is for.
    pub(crate) fn among(waiting: &Arc<Waiting>) -> Self {
        Self { waiting: Arc::clone(waiting), ..Self::default() }
    }

    /// Waits until nobody else is in; `None` where this thread is, or where who is in waits for this thread.
    pub(crate) fn enter(&self) -> Option<Inside<'_>> {
        let this = this_thread();
        // Only this thread writes its own number.
        if self.by.load(Ordering::Relaxed) == this {
            return None;
        }
        let held = match self.held.try_lock() {
            Ok(held) => held,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            Err(TryLockError::WouldBlock) => self.wait(this)?,
        };
        self.by.store(this, Ordering::Relaxed);
        Some(Inside { by: &self.by, _held: held })
    }

    #[cold]
    fn wait(&self, this: usize) -> Option<MutexGuard<'_, ()>> {
        let _waits = self.waiting.begin(this, &self.by)?;
        Some(self.held.lock().unwrap_or_else(PoisonError::into_inner))
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
    use std::sync::Barrier;

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

    /// Threads in a circle, each in one and on its way to the next one's: the last is turned away, and the others come
    /// in one after the other.
    #[test]
    fn of_threads_that_wait_for_each_other_one_is_turned_away() {
        for count in 2..5 {
            let waiting = Arc::default();
            let circle: Vec<Alone> = (0..count).map(|_| Alone::among(&waiting)).collect();
            let (met, turned_away) = (Barrier::new(count), AtomicUsize::new(0));
            std::thread::scope(|scope| {
                for at in 0..count {
                    let (circle, met, turned_away) = (&circle, &met, &turned_away);
                    scope.spawn(move || {
                        let inside = circle[at].enter();
                        assert!(inside.is_some());
                        met.wait();
                        if circle[(at + 1) % count].enter().is_none() {
                            turned_away.fetch_add(1, Ordering::Relaxed);
                        }
                    });
                }
            });
            assert_eq!(turned_away.into_inner(), 1);
            assert!(circle.iter().all(|alone| alone.enter().is_some()));
        }
    }

    /// Who waits for one that waits for nobody is never turned away, whatever the others do meanwhile.
    #[test]
    fn who_is_in_no_circle_waits() {
        let waiting = Arc::default();
        let pair = [(); 2].map(|()| Alone::among(&waiting));
        std::thread::scope(|scope| {
            for _ in 0..4 {
                scope.spawn(|| {
                    for _ in 0..200 {
                        let first = pair[0].enter();
                        assert!(first.is_some());
                        let second = pair[1].enter();
                        assert!(second.is_some());
                        drop((first, second));
                        assert!(pair[1].enter().is_some());
                    }
                });
            }
        });
    }
}
