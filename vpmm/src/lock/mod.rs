//! Locks for paths where a mutex of the standard library costs as much as the work under it.
//!
//! [`SpinLock`] is one atomic exchange. [`Biased`] is none: one thread enters by a plain store and a plain
//! load, and pays for that with a system call in whoever must take it from that thread. And [`Alone`], for what
//! a thread may come to again while it is in, or while another is that waits for it.

mod alone;
mod backoff;
mod biased;
#[cfg(all(loom, test))]
mod model;
mod order;
mod spin;
mod thread;

/// What the biased lock is made of: the standard library's, or what a model checker puts in its place.
mod sync {
    #[cfg(all(loom, test))]
    pub(super) use loom::{
        hint::spin_loop,
        sync::atomic::{AtomicBool, AtomicU8, fence},
        thread::yield_now,
    };
    #[cfg(not(all(loom, test)))]
    pub(super) use std::{
        hint::spin_loop,
        sync::atomic::{AtomicBool, AtomicU8, fence},
        thread::yield_now,
    };
}

pub(crate) use alone::{Alone, this_thread};
pub(crate) use biased::{Asymmetry, Biased, BiasedGuard};
pub(crate) use order::{Ordered, OrderedGuard, Rank, check_driver_call};
pub(crate) use spin::{SpinGuard, SpinLock};
pub(crate) use thread::{Life, Token};

#[cfg(all(test, not(loom)))]
mod tests {
    use std::cell::Cell;

    use super::{BiasedGuard, OrderedGuard, SpinGuard};

    /// Which of two implementations is meant is clear only for a type that no other thread may have.
    trait OfOneThread<A> {
        fn is() {}
    }

    struct Sent;
    struct Shared;

    impl<T> OfOneThread<()> for T {}
    impl<T: Send> OfOneThread<Sent> for T {}
    impl<T: Sync> OfOneThread<Shared> for T {}

    /// It compiles, that is the test: through a guard that two threads had both would have the value, and
    /// what a thread holds is counted in the thread.
    #[test]
    fn guards_stay_with_their_thread() {
        <SpinGuard<'_, Cell<u8>> as OfOneThread<_>>::is();
        <BiasedGuard<'_, Cell<u8>> as OfOneThread<_>>::is();
        <OrderedGuard<'_, Cell<u8>> as OfOneThread<_>>::is();
    }
}
