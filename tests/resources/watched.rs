//! A resource under observation.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

use vpmm::{DevicePtr, Error, MemoryResource, StreamHandle};

use crate::support::Rig;

/// An allocation and what was written into it.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Held {
    pub(crate) ptr: DevicePtr,
    pub(crate) bytes: usize,
    pub(crate) align: usize,
    seed: u64,
}

/// A resource whose every allocation is looked up among all that are live, filled with a pattern, and
/// checked before it is freed: by device work where the device reaches the memory, else by the host.
/// Any thread may use it.
pub(crate) struct Watched<'a> {
    pub(crate) rig: &'a Rig,
    pub(crate) resource: &'a dyn MemoryResource,
    book: Arc<Book>,
}

#[derive(Default)]
struct Book {
    last_seed: AtomicU64,
    /// Bytes by address.
    live: Mutex<BTreeMap<u64, u64>>,
}

impl<'a> Watched<'a> {
    pub(crate) fn new(rig: &'a Rig, resource: &'a dyn MemoryResource) -> Self {
        Self { rig, resource, book: Arc::default() }
    }

    /// Another resource that has memory from the same place: what is allocated of one is nobody's in the other.
    pub(crate) fn beside(&self, resource: &'a dyn MemoryResource) -> Self {
        Self { rig: self.rig, resource, book: Arc::clone(&self.book) }
    }

    pub(crate) fn allocate(&self, bytes: usize, stream: impl Into<StreamHandle>) -> Held {
        self.try_allocate(bytes, 256, stream).expect("memory")
    }

    pub(crate) fn try_allocate(
        &self,
        bytes: usize,
        align: usize,
        stream: impl Into<StreamHandle>,
    ) -> Result<Held, Error> {
        let stream = stream.into();
        let held = self.enter(self.resource.allocate(bytes, align, stream)?, bytes, align);
        if bytes > 0 {
            self.fill(&held, stream);
        }
        Ok(held)
    }

    /// Looks an allocation up among all that are live.
    pub(crate) fn enter(&self, ptr: DevicePtr, bytes: usize, align: usize) -> Held {
        let facts = self.resource.facts();
        let multiple = align.max(facts.min_align).max(256) as u64;
        assert!(ptr.address().is_multiple_of(multiple), "{ptr} is no multiple of {multiple}");
        assert_eq!(ptr.is_null(), bytes == 0);
        // Words follow from the seed plus their number: no two allocations have one in common.
        let seed = self.book.last_seed.fetch_add(1 << 32, Ordering::Relaxed) + 1;
        let held = Held { ptr, bytes, align, seed };
        if bytes == 0 {
            return held;
        }
        self.take_back(&held);
        held
    }

    /// An allocation that was given up is the caller's all the same.
    pub(crate) fn take_back(&self, held: &Held) {
        let (ptr, bytes) = (held.ptr, held.bytes as u64);
        let mut live = self.book.live.lock().expect("no panic");
        let before = live.range(..ptr.address() + bytes).next_back();
        assert!(
            before.is_none_or(|(at, bytes)| at + bytes <= ptr.address()),
            "{ptr} of {bytes} bytes overlaps {before:x?}"
        );
        live.insert(ptr.address(), bytes);
    }

    /// An allocation is no longer the caller's: to be said before the free, since from there on another thread
    /// may be given the address.
    pub(crate) fn give_up(&self, held: &Held) {
        let bytes = self.book.live.lock().expect("no panic").remove(&held.ptr.address());
        assert_eq!(bytes, Some(held.bytes as u64));
    }

    /// Enqueues the writing of the pattern.
    pub(crate) fn fill(&self, held: &Held, stream: StreamHandle) {
        if self.resource.facts().device_accessible {
            self.rig.fill(held.ptr.address(), held.bytes as u64 / 8 * 8, held.seed, stream);
            return;
        }
        for word in host_words(held) {
            // SAFETY: live host memory, aligned to more than a word, of at least eight bytes here.
            unsafe { word.write_volatile(held.seed) };
        }
    }

    /// Enqueues a check of the pattern; see [`assert_intact`](Self::assert_intact).
    pub(crate) fn check(&self, held: &Held, stream: impl Into<StreamHandle>) {
        if self.resource.facts().device_accessible {
            self.rig.check(held.ptr.address(), held.bytes as u64 / 8 * 8, held.seed, stream.into());
            return;
        }
        for word in host_words(held) {
            // SAFETY: as in `fill`.
            assert_eq!(unsafe { word.read_volatile() }, held.seed, "host memory was changed");
        }
    }

    /// Checks the contents on a stream and frees there.
    pub(crate) fn free(&self, held: Held, stream: impl Into<StreamHandle>) {
        self.try_free(held, stream).expect("freed");
    }

    pub(crate) fn try_free(
        &self,
        held: Held,
        stream: impl Into<StreamHandle>,
    ) -> Result<(), Error> {
        let stream = stream.into();
        if held.bytes > 0 {
            self.check(&held, stream);
            self.give_up(&held);
        }
        self.resource.deallocate(held.ptr, held.bytes, held.align, stream)
    }

    /// Waits for the device: no pattern was changed, and nothing raced.
    pub(crate) fn assert_intact(&self) {
        assert_eq!(self.rig.mismatches(), 0, "contents were changed");
        self.rig.assert_clean();
    }
}

/// The first and the last whole word.
fn host_words(held: &Held) -> Vec<*mut u64> {
    let word = |offset: usize| {
        std::ptr::with_exposed_provenance_mut::<u64>(held.ptr.address() as usize + offset)
    };
    if held.bytes < 8 { Vec::new() } else { vec![word(0), word(held.bytes / 8 * 8 - 8)] }
}
