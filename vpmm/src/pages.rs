//! Memory straight from the system: zeros, and no page of it taken before it is touched.

use std::alloc::{Layout, alloc_zeroed, dealloc};
use std::ptr::{self, NonNull};

use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};

/// A private mapping, of zeros at first. An allocator's zeroed memory need not be fresh, and is written for it
/// then.
pub(crate) struct Pages {
    start: NonNull<u8>,
    bytes: usize,
}

// SAFETY: plain memory that stays where it is until drop; who uses it from several threads does so
// by atomics.
unsafe impl Send for Pages {}
// SAFETY: as above.
unsafe impl Sync for Pages {}

impl Pages {
    /// `None` for none, and where the system has no memory.
    pub(crate) fn new(bytes: usize) -> Option<Self> {
        if cfg!(miri) {
            return Self::stand_in(bytes);
        }
        let access = ProtFlags::READ | ProtFlags::WRITE;
        // Most of it is never touched, and nobody is to be refused memory for that.
        let private = MapFlags::PRIVATE | MapFlags::NORESERVE;
        // SAFETY: a new mapping anywhere, of nothing else's memory.
        let start = unsafe { mmap_anonymous(ptr::null_mut(), bytes, access, private) };
        Some(Self { start: NonNull::new(start.ok()?.cast())?, bytes })
    }

    /// What Miri has for them.
    fn stand_in(bytes: usize) -> Option<Self> {
        let layout = Self::layout(bytes).filter(|layout| layout.size() > 0)?;
        // SAFETY: the layout is not empty.
        let start = unsafe { alloc_zeroed(layout) };
        Some(Self { start: NonNull::new(start)?, bytes })
    }

    fn layout(bytes: usize) -> Option<Layout> {
        Layout::from_size_align(bytes, 4096).ok()
    }

    /// Has a fork make it zeros again in the child. Whether it will: Linux before 4.14 refuses.
    pub(crate) fn wipe_on_fork(&self) -> bool {
        let start = self.start.as_ptr().cast();
        // SAFETY: the whole mapping; in this process nothing of it changes.
        unsafe { madvise(start, self.bytes, Advice::LinuxWipeOnFork) }.is_ok()
    }

    /// Has all of it taken now, rather than page by page. Only a help: Linux before 5.14 refuses.
    pub(crate) fn populate(&self) {
        let start = self.start.as_ptr().cast();
        // SAFETY: the whole mapping, of which no byte changes.
        let _ = unsafe { madvise(start, self.bytes, Advice::LinuxPopulateWrite) };
    }

    /// Its first byte, aligned to a page.
    pub(crate) fn start(&self) -> NonNull<u8> {
        self.start
    }
}

impl Drop for Pages {
    fn drop(&mut self) {
        if cfg!(miri) {
            if let Some(layout) = Self::layout(self.bytes) {
                // SAFETY: allocated in `stand_in`, with this layout; nobody uses it after its owner's end.
                unsafe { dealloc(self.start.as_ptr(), layout) };
            }
            return;
        }
        // SAFETY: made in `new`, with this length; nobody uses it after its owner's end.
        let _ = unsafe { munmap(self.start.as_ptr().cast(), self.bytes) };
    }
}
