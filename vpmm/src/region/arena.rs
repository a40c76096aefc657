//! Storage of nodes: addresses that never move, vacancies used again, nothing freed until the end.

use std::ptr::NonNull;

use super::{NodeId, Region};

const BLOCK: usize = 256;

/// Nodes in blocks of 256. A node's address is fixed from its making to the arena's drop, which
/// is what lets the trees link nodes by address.
pub(super) struct Arena {
    /// Leaked boxes, so that moving the vector asserts nothing about the nodes behind them.
    blocks: Vec<NonNull<[Region; BLOCK]>>,
    vacant: Vec<NodeId>,
}

impl Arena {
    pub(super) fn new() -> Self {
        Self { blocks: Vec::new(), vacant: Vec::new() }
    }

    /// A vacant node. Its fields hold whatever they held last.
    pub(super) fn take(&mut self) -> NodeId {
        if let Some(id) = self.vacant.pop() {
            return id;
        }
        let first = self.blocks.len() * BLOCK;
        let block = Box::new(std::array::from_fn(|i| Region::vacant(NodeId((first + i) as u32))));
        self.blocks.push(NonNull::from(Box::leak(block)));
        self.vacant.extend((first + 1..first + BLOCK).rev().map(|i| NodeId(i as u32)));
        NodeId(first as u32)
    }

    pub(super) fn give_back(&mut self, id: NodeId) {
        self.vacant.push(id);
    }

    pub(super) fn get(&self, id: NodeId) -> &Region {
        let block = self.blocks[id.0 as usize / BLOCK];
        // SAFETY: the block was leaked from a box in `take` and is freed in `drop` only, so it is
        // alive while `self` is; nodes are changed through `Cell`s and links alone, never through
        // `&mut`, so shared references to them may coexist.
        unsafe { &block.as_ref()[id.0 as usize % BLOCK] }
    }

    /// Nodes that are in use.
    pub(super) fn in_use(&self) -> usize {
        self.blocks.len() * BLOCK - self.vacant.len()
    }
}

impl Drop for Arena {
    fn drop(&mut self) {
        for block in self.blocks.drain(..) {
            // SAFETY: leaked from a box in `take`, freed once here; the trees that link the nodes
            // are declared before the arena in `RegionMap`, hence dropped before it.
            drop(unsafe { Box::from_raw(block.as_ptr()) });
        }
    }
}
