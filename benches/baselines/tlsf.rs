//! The crate rlsf: TLSF, which keeps its books in headers inside the memory itself. That memory
//! must be the host's, so a small arena stands for the device's: one byte for 16, which makes
//! TLSF's granule of 32 bytes the pool's unit of 512.

use std::alloc::{Layout, alloc, dealloc};
use std::ptr::NonNull;

use rlsf::Tlsf;

use super::{SPACE, UNIT, units};
use crate::rig::{Lane, Subject};

const SCALE: u64 = 16;

/// 28 first levels: blocks of up to 32 << 28 bytes.
type Books = Tlsf<'static, u32, u32, 28, 32>;

pub(crate) struct TwoLevel {
    books: Books,
    arena: NonNull<u8>,
    layout: Layout,
}

impl TwoLevel {
    pub(crate) fn new() -> Self {
        let size = usize::try_from(SPACE / SCALE).expect("a host of 64 bits");
        let layout = Layout::from_size_align(size, 4096).expect("a sound layout");
        // SAFETY: the size is not 0.
        let arena = NonNull::new(unsafe { alloc(layout) }).expect("host memory");
        let mut books = Books::new();
        // SAFETY: (1) the arena is this struct's alone; (2) it is freed after `books` was last
        // used, in drop.
        let added =
            unsafe { books.insert_free_block_ptr(NonNull::slice_from_raw_parts(arena, size)) };
        assert!(added.is_some(), "the arena is large enough for a header");
        Self { books, arena, layout }
    }

    fn layout(bytes: usize) -> Layout {
        let size = usize::try_from(units(bytes) * UNIT / SCALE).expect("a host of 64 bits");
        Layout::from_size_align(size, 8).expect("a sound layout")
    }
}

impl Subject for TwoLevel {
    type Block = NonNull<u8>;

    fn malloc(&mut self, bytes: usize, _lane: Lane) -> NonNull<u8> {
        self.books.allocate(Self::layout(bytes)).expect("the arena is large enough")
    }

    fn free(&mut self, block: NonNull<u8>, _lane: Lane) {
        // SAFETY: `block` came from these books with this alignment and is freed once.
        unsafe { self.books.deallocate(block, 8) };
    }
}

impl Drop for TwoLevel {
    fn drop(&mut self) {
        // SAFETY: allocated with this layout in `new`; the books are not used any more.
        unsafe { dealloc(self.arena.as_ptr(), self.layout) };
    }
}
