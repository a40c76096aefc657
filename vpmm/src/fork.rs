//! Memory that a fork wipes: how a child finds out, without a system call, that nothing that its
//! parent made with the driver is of any use to it.
//!
//! The driver does not work in a child of a process that had started it, and locks may be held by
//! threads that the child does not have. So a child must be turned away before it takes a lock or
//! makes a call; on the hot path by what is wiped there anyway (`MADV_WIPEONFORK`).

use std::ptr::NonNull;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::pages::Pages;

/// A mapping of zeroes, which is one of zeroes again in a child.
pub(crate) struct Wiped {
    pages: Pages,
    /// Whether the system wipes it.
    wipes: bool,
}

impl Wiped {
    /// `None` where the system has no memory.
    pub(crate) fn new(bytes: usize) -> Option<Self> {
        let pages = Pages::new(bytes)?;
        let wipes = pages.wipe_on_fork();
        Some(Self { pages, wipes })
    }

    /// Has all of it taken now, rather than page by page. Only a help.
    pub(crate) fn populate(&self) {
        self.pages.populate();
    }

    /// Its first byte: zeroed memory, aligned to a page.
    pub(crate) fn start(&self) -> NonNull<u8> {
        self.pages.start()
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
