//! Blocks: the pieces that segments are cut into.
//!
//! ```text
//! segment  [ allocated | free | waiting | allocated | free ]
//!            previous ◀──── block ────▶ next
//! ```

#![forbid(unsafe_code)]

use std::cell::Cell;

use intrusive_collections::RBTreeLink;

use super::size::Kind;

/// What is in place of a neighbour where there is none.
pub(super) const NONE: u32 = u32::MAX;

/// What a block is now.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum State {
    /// A node that is no block.
    Vacant,
    /// In the hands of a caller.
    Allocated,
    /// Freed, while further streams may still use it.
    Waiting,
    /// In its stream's set of free blocks.
    Free,
    /// A whole segment on its way back upstream.
    Leaving,
}

/// A node of the arena.
pub(super) struct Block {
    pub(super) link: RBTreeLink,
    address: Cell<u64>,
    bytes: Cell<u64>,
    /// As the caller asked; what it was last where the block is not active.
    pub(super) requested: Cell<u64>,
    /// Neighbours in the segment.
    pub(super) previous: Cell<u32>,
    pub(super) next: Cell<u32>,
    id: u32,
    /// The place of the stream that it belongs to.
    pub(super) place: Cell<u32>,
    /// The number of the allocation, which its pointer carries.
    pub(super) tag: Cell<u32>,
    /// Streams that have to come past the free.
    pub(super) waits: Cell<u32>,
    pub(super) kind: Cell<Kind>,
    pub(super) state: Cell<State>,
    /// Whether further streams use it.
    pub(super) noted: Cell<bool>,
    /// How many searches the pool had seen when the block became free.
    pub(super) freed_at: Cell<u64>,
}

impl Block {
    pub(super) fn vacant(id: u32) -> Self {
        Self {
            link: RBTreeLink::new(),
            address: Cell::new(0),
            bytes: Cell::new(0),
            requested: Cell::new(0),
            previous: Cell::new(NONE),
            next: Cell::new(NONE),
            id,
            place: Cell::new(0),
            tag: Cell::new(0),
            waits: Cell::new(0),
            kind: Cell::new(Kind::Small),
            state: Cell::new(State::Vacant),
            noted: Cell::new(false),
            freed_at: Cell::new(0),
        }
    }

    #[inline]
    pub(super) fn id(&self) -> u32 {
        self.id
    }

    #[inline]
    pub(super) fn address(&self) -> u64 {
        self.address.get()
    }

    #[inline]
    pub(super) fn bytes(&self) -> u64 {
        self.bytes.get()
    }

    /// One past its last address.
    #[inline]
    pub(super) fn end(&self) -> u64 {
        self.address() + self.bytes()
    }

    /// Not while it is in a set.
    #[inline]
    pub(super) fn set_bounds(&self, address: u64, bytes: u64) {
        self.address.set(address);
        self.bytes.set(bytes);
    }

    /// The order of free blocks: by size, then by address.
    #[inline]
    pub(super) fn key(&self) -> Key {
        Key(u128::from(self.bytes()) << 64 | u128::from(self.address()))
    }

    /// Whether its segment has others.
    #[inline]
    pub(super) fn is_split(&self) -> bool {
        self.previous.get() != NONE || self.next.get() != NONE
    }
}

/// Size above address.
#[derive(Clone, Copy, PartialEq, Eq, PartialOrd, Ord, Debug)]
pub(super) struct Key(u128);

impl Key {
    /// The least key of blocks of so many bytes.
    #[inline]
    pub(super) fn of_bytes(bytes: u64) -> Self {
        Self(u128::from(bytes) << 64)
    }
}
