//! A lock that one thread takes without an atomic read-modify-write.
//!
//! The owner says "busy", then looks whether it is revoked; a revoker says "revoked", then looks
//! whether the owner is busy. One of the two must see the other, for which each needs a full fence
//! between its store and its load. The owner's is left out: the revoker makes the kernel run a
//! fence on every processor that runs a thread of this process (`membarrier`), which serves for
//! both. Where the system has no such call, the owner runs a fence after all.

use std::cell::UnsafeCell;
use std::ops::{Deref, DerefMut};
use std::sync::atomic::{Ordering, compiler_fence};

use super::order::{Held, Place, Rank};
use super::sync::{AtomicBool, AtomicU8, fence, spin_loop, yield_now};

/// How the two sides order their store before their load.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum Asymmetry {
    /// Revokers fence for both sides.
    Kernel,
    /// Each side fences for itself.
    None,
}

impl Asymmetry {
    /// Asks the system, and registers the process with it.
    pub(crate) fn detect() -> Self {
        if membarrier::register() { Self::Kernel } else { Self::None }
    }

    /// The revoker's fence, once for any number of locks.
    fn heavy(self) {
        fence(Ordering::SeqCst);
        if self == Self::Kernel {
            membarrier::run();
        }
    }
}

#[cfg(all(target_os = "linux", not(miri), not(all(loom, test))))]
mod membarrier {
    use std::ffi::{c_int, c_long, c_uint};

    unsafe extern "C" {
        /// The C library's way to any system call; the standard library links it.
        fn syscall(number: c_long, ...) -> c_long;
    }

    #[cfg(target_arch = "x86_64")]
    const NUMBER: c_long = 324;
    #[cfg(target_arch = "aarch64")]
    const NUMBER: c_long = 283;
    #[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
    const NUMBER: c_long = -1;

    const PRIVATE_EXPEDITED: c_int = 1 << 3;
    const REGISTER_PRIVATE_EXPEDITED: c_int = 1 << 4;

    fn call(command: c_int) -> bool {
        let none: c_uint = 0;
        // SAFETY: membarrier takes a command, flags and a processor number, reads no memory, and
        // answers a command (or a number) that it does not know with an error.
        unsafe { syscall(NUMBER, command, none, none) == 0 }
    }

    pub(super) fn register() -> bool {
        call(REGISTER_PRIVATE_EXPEDITED)
    }

    /// In a process that has registered it fails only where the kernel has no memory for a set of
    /// processors, or where a filter of system calls came later. Then the caller waits: a store
    /// reaches the other processors within microseconds, only that nothing promises it.
    pub(super) fn run() {
        if !call(PRIVATE_EXPEDITED) {
            std::thread::sleep(std::time::Duration::from_millis(1));
        }
    }
}

#[cfg(all(loom, test))]
mod membarrier {
    pub(super) use crate::lock::model::{membarrier as run, register};
}

#[cfg(all(any(not(target_os = "linux"), miri), not(all(loom, test))))]
mod membarrier {
    pub(super) fn register() -> bool {
        false
    }

    pub(super) fn run() {}
}

/// What keeps an owner from going in at once: that somebody has revoked the lock …
const REVOKED: u8 = 1;
/// … or that the owner has to run a fence, always.
const FENCED: u8 = 2;

/// What these locks are for.
const PLACE: Place = Place::of(Rank::Front);

/// A value that one thread, its owner, enters cheaply, and others after revoking it.
#[repr(C)]
pub(crate) struct Biased<T> {
    busy: AtomicBool,
    /// [`REVOKED`] and [`FENCED`]: both in one number, so that the owner looks once.
    state: AtomicU8,
    /// Whether the model's kernel fences for the owner.
    #[cfg(all(loom, test))]
    asymmetry: Asymmetry,
    value: UnsafeCell<T>,
}

// SAFETY: the value is reached by the owner between `enter` and the guard's drop, or by a revoker
// between `revoke` and `restore`; the protocol at the top of this file makes these exclude each
// other, so sharing the lock only sends the value from thread to thread.
unsafe impl<T: Send> Sync for Biased<T> {}

impl<T> Biased<T> {
    #[cfg(test)]
    pub(crate) fn new(value: T, asymmetry: Asymmetry) -> Self {
        Self {
            busy: AtomicBool::new(false),
            state: AtomicU8::new(Self::first_state(asymmetry)),
            #[cfg(all(loom, test))]
            asymmetry,
            value: UnsafeCell::new(value),
        }
    }

    /// Makes a lock of the memory around a value, and returns the value's place, which is not written.
    ///
    /// # Safety
    /// The memory is the caller's alone, for writing, and aligned; the lock counts as made only once there is
    /// a value.
    pub(crate) unsafe fn make_around(place: *mut Self, asymmetry: Asymmetry) -> *mut T {
        // SAFETY: the caller vouches for the memory; nothing is read, and fields do not overlap.
        unsafe {
            (&raw mut (*place).busy).write(AtomicBool::new(false));
            (&raw mut (*place).state).write(AtomicU8::new(Self::first_state(asymmetry)));
            #[cfg(all(loom, test))]
            (&raw mut (*place).asymmetry).write(asymmetry);
            UnsafeCell::raw_get(&raw const (*place).value)
        }
    }

    fn first_state(asymmetry: Asymmetry) -> u8 {
        match asymmetry {
            Asymmetry::Kernel => 0,
            Asymmetry::None => FENCED,
        }
    }

    /// The owner's entry; `None` while somebody has revoked it.
    ///
    /// # Safety
    /// No two threads call this on one lock without synchronising in between, and no guard of it
    /// lives already.
    pub(crate) unsafe fn enter(&self) -> Option<BiasedGuard<'_, T>> {
        let held = PLACE.take();
        self.busy.store(true, Ordering::Relaxed);
        self.owners_fence();
        let mut state = self.state.load(Ordering::Acquire);
        if state & FENCED != 0 {
            fence(Ordering::SeqCst);
            state = self.state.load(Ordering::Acquire);
        }
        self.unless(state & REVOKED != 0, held)
    }

    /// The owner's entry where nothing is in its way, in a handful of instructions and without a
    /// call: `None` while somebody has revoked the lock, and always where owners run a fence, which
    /// leaves [`enter`](Self::enter) to be tried.
    ///
    /// # Safety
    /// As for [`enter`](Self::enter).
    #[inline(always)]
    pub(crate) unsafe fn enter_at_once(&self) -> Option<BiasedGuard<'_, T>> {
        let held = PLACE.take();
        self.busy.store(true, Ordering::Relaxed);
        self.owners_fence();
        self.unless(self.state.load(Ordering::Acquire) != 0, held)
    }

    /// Where the kernel fences for owners, if it does.
    #[inline(always)]
    fn owners_fence(&self) {
        compiler_fence(Ordering::SeqCst);
        #[cfg(all(loom, test))]
        if self.asymmetry == Asymmetry::Kernel {
            super::model::interrupt();
        }
    }

    /// The guard, unless something is in the way. Whoever comes in has acquired what a former
    /// revoker did to the value, by its look at the state.
    #[inline(always)]
    fn unless(&self, barred: bool, _held: Held) -> Option<BiasedGuard<'_, T>> {
        if barred {
            self.busy.store(false, Ordering::Release);
            return None;
        }
        Some(BiasedGuard { lock: self, _held })
    }

    /// Revokes every lock of `locks`, waits for owners that are inside, hands each value to `work`,
    /// and restores the locks.
    ///
    /// # Safety
    /// One thread at a time revokes, and it is inside none of these locks, which were made for the
    /// same `asymmetry`.
    pub(crate) unsafe fn revoke<'a>(
        locks: impl Iterator<Item = &'a Self> + Clone,
        asymmetry: Asymmetry,
        mut work: impl FnMut(&mut T),
    ) where
        T: 'a,
    {
        // Owners that are inside are waited for.
        let _held = PLACE.take();
        for lock in locks.clone() {
            // Nobody else writes it.
            let state = lock.state.load(Ordering::Relaxed);
            lock.state.store(state | REVOKED, Ordering::Relaxed);
        }
        asymmetry.heavy();
        for lock in locks {
            let mut spins = 0_u32;
            while lock.busy.load(Ordering::Acquire) {
                spins += 1;
                if spins < 100 { spin_loop() } else { yield_now() }
            }
            // SAFETY: the owner left before we saw `busy` clear, and whoever sets it from now on
            // sees `REVOKED`; the caller vouches that no other revoker is here.
            work(unsafe { &mut *lock.value.get() });
            let state = lock.state.load(Ordering::Relaxed);
            lock.state.store(state & !REVOKED, Ordering::Release);
        }
    }
}

/// The owner's access, until drop.
pub(crate) struct BiasedGuard<'a, T> {
    lock: &'a Biased<T>,
    _held: Held,
}

impl<T> Deref for BiasedGuard<'_, T> {
    type Target = T;

    #[inline(always)]
    fn deref(&self) -> &T {
        // SAFETY: the owner is inside while the guard lives, so nobody else is.
        unsafe { &*self.lock.value.get() }
    }
}

impl<T> DerefMut for BiasedGuard<'_, T> {
    #[inline(always)]
    fn deref_mut(&mut self) -> &mut T {
        // SAFETY: as in `deref`; the guard is borrowed for as long as the reference lives.
        unsafe { &mut *self.lock.value.get() }
    }
}

impl<T> Drop for BiasedGuard<'_, T> {
    #[inline(always)]
    fn drop(&mut self) {
        self.lock.busy.store(false, Ordering::Release);
    }
}

#[cfg(all(test, not(loom)))]
mod tests {
    use super::*;

    /// The two ways in, as owners take them.
    ///
    /// # Safety
    /// As for [`Biased::enter`].
    unsafe fn enter<T>(lock: &Biased<T>) -> Option<BiasedGuard<'_, T>> {
        // SAFETY: passed on to the caller; the second is tried where the first gave no guard.
        unsafe { lock.enter_at_once().or_else(|| lock.enter()) }
    }

    /// An owner and a revoker both add to a number without an atomic operation: every addition
    /// counts only if they exclude each other.
    fn additions_all_count(asymmetry: Asymmetry) {
        let rounds: u64 = if cfg!(miri) { 30 } else { 3_000 };
        let lock = Biased::new(0_u64, asymmetry);
        let mut mine = 0;
        std::thread::scope(|scope| {
            let revoker = scope.spawn(|| {
                for _ in 0..rounds {
                    // SAFETY: the only revoker, and it never enters.
                    unsafe { Biased::revoke([&lock].into_iter(), asymmetry, |value| *value += 1) };
                }
            });
            while !revoker.is_finished() {
                for _ in 0..100 {
                    // SAFETY: the only thread that enters; the guard ends with the statement.
                    if let Some(mut value) = unsafe { enter(&lock) } {
                        *value += 1;
                        mine += 1;
                    }
                }
            }
        });
        // SAFETY: as above.
        assert_eq!(unsafe { lock.enter() }.map(|value| *value), Some(rounds + mine));
    }

    #[test]
    fn owner_and_revoker_exclude_each_other() {
        additions_all_count(Asymmetry::detect());
        additions_all_count(Asymmetry::None);
    }
}
