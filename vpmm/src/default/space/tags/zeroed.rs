//! Numbers in pages of the host that are taken as they are written.

use std::ops::Range;
use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, AtomicU64};

use rustix::mm::{Advice, madvise};

use crate::pages::Pages;

/// Numbers, zero at first, that cost the host's memory only where they were written.
pub(super) struct Zeroed<T> {
    start: NonNull<T>,
    length: usize,
    _pages: Pages,
}

/// # Safety
/// Zeros are a valid one, and any thread may use it by reference.
pub(super) unsafe trait Number {}

// SAFETY: an atomic is as its number is, of which zeros are one.
unsafe impl Number for AtomicU32 {}
// SAFETY: as above.
unsafe impl Number for AtomicU64 {}

// SAFETY: the memory is of numbers that any thread may use, alive until drop; the pointer itself never changes.
unsafe impl<T: Number> Send for Zeroed<T> {}
// SAFETY: as above.
unsafe impl<T: Number> Sync for Zeroed<T> {}

impl<T: Number> Zeroed<T> {
    /// `None` for none, and where the system does not give the address space.
    pub(super) fn new(length: usize) -> Option<Self> {
        let pages = Pages::new(length.checked_mul(size_of::<T>())?)?;
        // A page is aligned as any number is.
        Some(Self { start: pages.start().cast(), length, _pages: pages })
    }

    /// Has pages behind some of the numbers, which stay as they are.
    pub(super) fn touch(&self, range: Range<usize>) {
        if cfg!(miri) {
            return;
        }
        // SAFETY: it touches no memory of the program's.
        let page = unsafe { libc::sysconf(libc::_SC_PAGESIZE) };
        let Ok(page @ 1..) = usize::try_from(page) else { return };
        if range.start >= range.end.min(self.length) {
            return;
        }
        // With all of the first page and of the last: the mapping is of whole pages, and nobody else's.
        let first = range.start * size_of::<T>() / page * page;
        let bytes = range.end.min(self.length) * size_of::<T>() - first;
        let pages = self.start.as_ptr().wrapping_byte_add(first).cast();
        // Linux before 5.14 refuses, and has them touched one by one later.
        // SAFETY: the range begins at a page of this mapping and ends within its last; the call changes no byte.
        let _ = unsafe { madvise(pages, bytes, Advice::LinuxPopulateWrite) };
    }

    /// The number there.
    ///
    /// # Safety
    /// There is.
    #[inline(always)]
    pub(super) unsafe fn within(&self, at: usize) -> &T {
        debug_assert!(at < self.length);
        // SAFETY: the caller vouches for the index; the memory is zeroed, which is a valid state of atomics, and
        // alive while `self` is.
        unsafe { self.start.add(at).as_ref() }
    }
}
