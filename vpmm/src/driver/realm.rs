//! Which driver something is of.

#![forbid(unsafe_code)]

use std::sync::atomic::{AtomicU32, Ordering};

/// What tells a [`Driver`](super::Driver) and its clones from others in the process.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Realm(u32);

impl Realm {
    /// How many bits its number has.
    pub(crate) const BITS: u32 = 24;

    /// One of a driver that had too many before it. Nobody tells the end of its streams.
    pub(crate) const NONE: Self = Self(0);

    /// The next driver's.
    pub(super) fn next() -> Self {
        /// Counts drivers: nothing but their names depends on it.
        static DRIVERS: AtomicU32 = AtomicU32::new(0);
        // The number of which every bit is set is the legacy stream's.
        const MOST: u32 = (1 << Realm::BITS) - 2;
        let next = |count| (count < MOST).then_some(count + 1);
        let before = DRIVERS.fetch_update(Ordering::Relaxed, Ordering::Relaxed, next);
        before.map_or(Self::NONE, |count| Self(count + 1))
    }

    #[inline(always)]
    pub(crate) fn number(self) -> u64 {
        u64::from(self.0)
    }
}
