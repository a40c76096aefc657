//! The order in which a thread may take locks, and that none of the later ones is held in a driver call: checked where
//! debug assertions are on, and nothing at all, neither code nor memory, where they are not.
//!
//! What is looked at is what the thread holds, of whichever pool. So an inversion is found by the first
//! thread that comes that way, and not only where two meet.

use std::marker::PhantomData;
use std::sync::{Condvar, Mutex, MutexGuard, PoisonError};
use std::time::Duration;

pub(crate) use held::{Held, Place, check_driver_call};

/// A guard stays in the thread that took the lock, and no other has a reference to it: through one two
/// threads would have what is guarded, which need not bear that.
type OfThread = PhantomData<*const ()>;

/// The default profile's locks: what comes later is taken under what comes before.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(crate) enum Rank {
    /// Of several pools at a time: heaps beside a pool's main one make room under its.
    Growing,
    Eager,
    Revoking,
    Registry,
    Front,
    Space,
    Bell,
}

// Threads of a model are not threads of the system, whose memory this would be in.
#[cfg(all(debug_assertions, not(loom)))]
mod held {
    use std::cell::Cell;

    use super::{OfThread, Rank};

    thread_local! {
        /// How many locks of each rank the thread holds. Without a destructor: threads take locks to their end.
        static HELD: Cell<[u8; 8]> = const { Cell::new([0; 8]) };
    }

    /// A lock's place in the order, if it has one.
    #[derive(Clone, Copy)]
    pub(crate) struct Place(Option<Rank>);

    impl Place {
        pub(crate) const NONE: Self = Self(None);

        pub(crate) const fn of(rank: Rank) -> Self {
            Self(Some(rank))
        }

        /// What goes before the taking of a lock, so that it does not wait for ever for what it has.
        pub(crate) fn take(self) -> Held {
            let Some(rank) = self.0 else { return Held(None, OfThread::default()) };
            let mut held = HELD.get();
            let later = held[rank as usize..].iter().rposition(|count| *count > 0);
            let several = rank == Rank::Growing && later == Some(0);
            // A thread that unwinds has something worse to tell.
            if later.is_some() && !several && !std::thread::panicking() {
                panic!("a lock out of order: {rank:?} under {held:?} of each rank");
            }
            held[rank as usize] += 1;
            HELD.set(held);
            Held(Some(rank), OfThread::default())
        }
    }

    /// What goes before a driver call, which may take long: none is made in a front or under the space, nor under what
    /// is taken after those.
    pub(crate) fn check_driver_call() {
        let held = HELD.get();
        let short = &held[Rank::Front as usize..];
        if short.iter().any(|count| *count > 0) && !std::thread::panicking() {
            panic!("a driver call under {held:?} locks of each rank");
        }
    }

    /// Until drop the thread holds a lock of a rank.
    pub(crate) struct Held(Option<Rank>, OfThread);

    impl Drop for Held {
        fn drop(&mut self) {
            if let Some(rank) = self.0 {
                let mut held = HELD.get();
                held[rank as usize] -= 1;
                HELD.set(held);
            }
        }
    }
}

#[cfg(not(all(debug_assertions, not(loom))))]
mod held {
    use super::{OfThread, Rank};

    #[derive(Clone, Copy)]
    pub(crate) struct Place;

    impl Place {
        pub(crate) const NONE: Self = Self;

        #[inline(always)]
        pub(crate) const fn of(_: Rank) -> Self {
            Self
        }

        #[inline(always)]
        pub(crate) fn take(self) -> Held {
            Held(OfThread::default())
        }
    }

    pub(crate) struct Held(
        #[allow(dead_code, reason = "it is there for what it forbids")] OfThread,
    );

    #[inline(always)]
    pub(crate) fn check_driver_call() {}
}

/// A mutex with a place in the order, which takes no notice of poison: nothing here panics with a lock held,
/// and a panic elsewhere in a caller's thread must not take the pool from all others.
pub(crate) struct Ordered<T> {
    place: Place,
    mutex: Mutex<T>,
}

impl<T> Ordered<T> {
    pub(crate) const fn new(rank: Rank, value: T) -> Self {
        Self { place: Place::of(rank), mutex: Mutex::new(value) }
    }

    pub(crate) fn lock(&self) -> OrderedGuard<'_, T> {
        let held = self.place.take();
        let guard = self.mutex.lock().unwrap_or_else(PoisonError::into_inner);
        OrderedGuard { guard, held }
    }
}

/// Access to what the mutex guards, until drop.
pub(crate) struct OrderedGuard<'a, T> {
    guard: MutexGuard<'a, T>,
    held: Held,
}

impl<'a, T> OrderedGuard<'a, T> {
    /// Waits for a call, as long as a condition is not met, for so long at most.
    pub(crate) fn wait_timeout_while(
        self,
        calls: &Condvar,
        period: Duration,
        condition: impl FnMut(&mut T) -> bool,
    ) -> OrderedGuard<'a, T> {
        let Self { guard, held } = self;
        let waited = calls.wait_timeout_while(guard, period, condition);
        let (guard, _) = waited.unwrap_or_else(PoisonError::into_inner);
        OrderedGuard { guard, held }
    }
}

impl<T> std::ops::Deref for OrderedGuard<'_, T> {
    type Target = T;

    fn deref(&self) -> &T {
        &self.guard
    }
}

impl<T> std::ops::DerefMut for OrderedGuard<'_, T> {
    fn deref_mut(&mut self) -> &mut T {
        &mut self.guard
    }
}

#[cfg(all(test, debug_assertions, not(loom)))]
mod tests {
    use std::panic::{AssertUnwindSafe, catch_unwind};

    use super::*;
    use crate::lock::SpinLock;

    fn is_refused(take: impl FnOnce()) -> bool {
        catch_unwind(AssertUnwindSafe(take)).is_err()
    }

    #[test]
    fn an_inversion_is_found_though_no_other_thread_is_there() {
        let growing = Ordered::new(Rank::Growing, ());
        let registry = Ordered::new(Rank::Registry, 7);
        let space = SpinLock::ranked(Rank::Space, ());
        {
            let _growing = growing.lock();
            assert_eq!(*registry.lock(), 7);
            let _space = space.lock();
            assert!(is_refused(|| drop(registry.lock())), "the registry under the space");
            assert!(is_refused(|| drop(growing.lock())), "its own again, with the space between");
        }
        // Neither what was refused nor what was let go is held.
        let _registry = registry.lock();
        assert!(is_refused(|| drop(growing.lock())), "growing under the registry");
        drop(space.lock());
    }

    #[test]
    fn locks_may_go_in_any_order() {
        let [revoking, registry] =
            [Rank::Revoking, Rank::Registry].map(|rank| Ordered::new(rank, ()));
        let (first, second) = (revoking.lock(), registry.lock());
        drop(first);
        assert!(is_refused(|| drop(revoking.lock())), "the later one is held still");
        drop(second);
        drop(revoking.lock());
    }

    #[test]
    fn a_rank_is_held_once_but_for_growing() {
        let [one, other] = [(); 2].map(|()| Ordered::new(Rank::Eager, ()));
        let _one = one.lock();
        assert!(is_refused(|| drop(other.lock())), "two streams' at a time");
        drop(_one);
        let [main, beside] = [(); 2].map(|()| Ordered::new(Rank::Growing, ()));
        let _main = main.lock();
        drop(beside.lock());
    }

    #[test]
    fn no_driver_call_is_made_in_a_front_or_under_the_space() {
        use crate::lock::{Asymmetry, Biased};
        let allowed = [Rank::Growing, Rank::Eager, Rank::Revoking, Rank::Registry];
        let locks = allowed.map(|rank| Ordered::new(rank, ()));
        let _held = locks.each_ref().map(Ordered::lock);
        check_driver_call();
        for rank in [Rank::Space, Rank::Bell] {
            let lock = SpinLock::ranked(rank, ());
            let held = lock.lock();
            assert!(is_refused(check_driver_call), "under {rank:?}");
            drop(held);
            check_driver_call();
        }
        let front = Biased::new((), Asymmetry::None);
        // SAFETY: this thread alone enters, and nobody revokes.
        let inside = unsafe { front.enter() };
        assert!(is_refused(check_driver_call), "inside a front");
        drop(inside);
        check_driver_call();
    }

    #[test]
    fn an_owner_is_in_one_front_and_takes_nothing_before_it() {
        use crate::lock::{Asymmetry, Biased};
        let asymmetry = Asymmetry::detect();
        let [mine, other] = [(); 2].map(|()| Biased::new((), asymmetry));
        let revoking = Ordered::new(Rank::Revoking, ());
        let space = SpinLock::ranked(Rank::Space, ());
        // SAFETY: this thread alone enters, and revokes while it is inside none.
        let enter = |front: &Biased<()>| drop(unsafe { front.enter() });
        // SAFETY: as above.
        let inside = unsafe { mine.enter() };
        assert!(is_refused(|| enter(&other)) && is_refused(|| drop(revoking.lock())));
        drop(space.lock());
        drop(inside);
        enter(&other);
        let _space = space.lock();
        // SAFETY: as above; it is refused before it revokes anything.
        let revoke = || unsafe { Biased::revoke([&mine].into_iter(), asymmetry, |()| ()) };
        assert!(is_refused(revoke), "an owner inside may wait for the space");
    }
}
