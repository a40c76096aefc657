//! Memory that a fork wipes: how a child finds out, without a system call, that nothing that its
//! parent made with the driver is of any use to it.
//!
//! The driver does not work in a child of a process that had started it, and locks may be held by
//! threads that the child does not have. So a child must be turned away before it takes a lock or
//! makes a call; on the hot path by what is wiped there anyway (`MADV_WIPEONFORK`).

use std::ptr::{self, NonNull};
use std::sync::atomic::{AtomicU32, Ordering};

use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};

/// A mapping of zeroes, which is one of zeroes again in a child.
pub(crate) struct Wiped {
    start: NonNull<u8>,
    bytes: usize,
    /// Whether the system wipes it.
    wipes: bool,
}

// SAFETY: plain memory that stays where it is until drop; who uses it from several threads does so
// by atomics.
unsafe impl Send for Wiped {}
// SAFETY: as above.
unsafe impl Sync for Wiped {}

impl Wiped {
    /// `None` where the system has no memory.
    pub(crate) fn new(bytes: usize) -> Option<Self> {
        let flags = MapFlags::PRIVATE;
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // SAFETY: a new mapping anywhere, of nothing else's memory.
        let start = unsafe { mmap_anonymous(ptr::null_mut(), bytes, access, flags) }.ok()?;
        // SAFETY: the mapping just made, which holds nothing yet. Linux before 4.14 refuses.
        let wipes = unsafe { madvise(start, bytes, Advice::LinuxWipeOnFork) }.is_ok();
        Some(Self { start: NonNull::new(start.cast())?, bytes, wipes })
    }

    /// Its first byte: zeroed memory, aligned to a page.
    pub(crate) fn start(&self) -> NonNull<u8> {
        self.start
    }
}

impl Drop for Wiped {
    fn drop(&mut self) {
        // SAFETY: made in `new`, with this length; nobody uses it after its owner's end.
        let _ = unsafe { munmap(self.start.as_ptr().cast(), self.bytes) };
    }
}

/// Whether this is the process that made it.
pub(crate) struct Birthmark {
    memory: Wiped,
    process: u32,
}

impl Birthmark {
    /// `None` where the system has no memory.
    pub(crate) fn new() -> Option<Self> {
        let mark =
            Self { memory: Wiped::new(size_of::<AtomicU32>())?, process: std::process::id() };
        mark.word().store(1, Ordering::Relaxed);
        Some(mark)
    }

    fn word(&self) -> &AtomicU32 {
        // SAFETY: the mapping is page-aligned, long enough, zeroed at first (a valid state) and
        // alive while `self` is.
        unsafe { self.memory.start().cast::<AtomicU32>().as_ref() }
    }

    /// Whether the process is a child of the one that made this: one load, a system call where the
    /// system does not wipe.
    #[inline]
    pub(crate) fn is_childs(&self) -> bool {
        if self.memory.wipes {
            self.word().load(Ordering::Relaxed) == 0
        } else {
            std::process::id() != self.process
        }
    }
}
