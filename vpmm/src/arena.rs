//! Storage of nodes: addresses that never move, vacancies used again, nothing freed until the end.

use std::ptr::NonNull;

const BLOCK: usize = 256;

/// Nodes in blocks of 256. A node's address is fixed from its making to the arena's drop, which
/// is what lets the trees link nodes by address.
pub(crate) struct Arena<T> {
    /// Leaked boxes, so that moving the vector asserts nothing about the nodes behind them.
    blocks: Vec<NonNull<[T; BLOCK]>>,
    vacant: Vec<u32>,
}

impl<T> Arena<T> {
    pub(crate) fn new() -> Self {
        Self { blocks: Vec::new(), vacant: Vec::new() }
    }

    /// The number of a vacant node. Its fields hold whatever they held last; `make` makes nodes
    /// that were never used, from their number.
    pub(crate) fn take(&mut self, make: impl Fn(u32) -> T) -> u32 {
        self.vacant.pop().unwrap_or_else(|| self.extend(make))
    }

    /// Makes a block of nodes: the number of its first.
    #[cold]
    #[inline(never)]
    fn extend(&mut self, make: impl Fn(u32) -> T) -> u32 {
        let first = (self.blocks.len() * BLOCK) as u32;
        let block = Box::new(std::array::from_fn(|i| make(first + i as u32)));
        self.blocks.push(NonNull::from(Box::leak(block)));
        self.vacant.extend((first + 1..first + BLOCK as u32).rev());
        first
    }

    pub(crate) fn give_back(&mut self, id: u32) {
        self.vacant.push(id);
    }

    #[inline]
    pub(crate) fn get(&self, id: u32) -> &T {
        let block = self.blocks[id as usize / BLOCK];
        // SAFETY: the block was leaked from a box in `take` and is freed in `drop` only, so it is
        // alive while `self` is; nodes are changed through `Cell`s and links alone, never through
        // `&mut`, so shared references to them may coexist.
        unsafe { &block.as_ref()[id as usize % BLOCK] }
    }

    /// Nodes that there are, in use or not.
    pub(crate) fn capacity(&self) -> usize {
        self.blocks.len() * BLOCK
    }

    /// Nodes that are in use.
    pub(crate) fn in_use(&self) -> usize {
        self.blocks.len() * BLOCK - self.vacant.len()
    }
}

impl<T> Drop for Arena<T> {
    fn drop(&mut self) {
        for block in self.blocks.drain(..) {
            // SAFETY: leaked from a box in `take`, freed once here; owners declare the trees that
            // link the nodes before the arena, so that those are dropped before it.
            drop(unsafe { Box::from_raw(block.as_ptr()) });
        }
    }
}
