//! Regions: contiguous addresses in one state, and the trees that find them.
//!
//! ```text
//! by address   [live 4][idle 6][live 1][pending 2 @7:45][zombie 3 @7:44][hole …]   one tree, all
//! by size      idle: one tree · holes: one tree · pending: one tree per stream
//! by age       pending and zombies: two queues per stream, oldest first
//! ```
//!
//! A node lies in an arena and carries the links of every index it can be in
//! (intrusive collections), so that moving it between states allocates nothing.
//! All of this is plain arithmetic on addresses: no driver, no FFI.
//!
//! - I1: regions of a reservation cover it without gap or overlap.
//! - I1: neighbours that could be one region are one region (see [`RegionMap::coalesce`]).
//! - I7: nodes in use are as many as regions.

mod index;
mod map;

pub(crate) use map::{RegionMap, Totals, joinable};

use std::cell::Cell;

use intrusive_collections::RBTreeLink;

use crate::fence::Fence;

/// What the addresses of a region are.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) enum State {
    /// In the hands of a caller.
    Live,
    /// Free, and its fence has passed: any stream may have it, no stream owns it.
    Idle,
    /// Free, but work of the stream that freed it may still use it.
    Pending,
    /// Still mapped to memory that lives elsewhere now; to be unmapped once its fence has passed.
    Zombie,
    /// Reserved and unmapped.
    Hole,
    /// Taken out by an operation whose driver calls run now, outside the lock.
    Transit,
}

impl State {
    /// Every state, in the order of [`Totals`].
    pub(crate) const ALL: [Self; 6] =
        [Self::Live, Self::Idle, Self::Pending, Self::Zombie, Self::Hole, Self::Transit];
}

/// A node's place in the arena.
#[derive(Clone, Copy, PartialEq, Eq, Hash, Debug)]
pub(crate) struct NodeId(pub(crate) u32);

/// One region: a node of the trees.
pub(crate) struct Region {
    address_link: RBTreeLink,
    size_link: RBTreeLink,
    queue_link: RBTreeLink,
    id: NodeId,
    start: Cell<u64>,
    bytes: Cell<u64>,
    state: Cell<State>,
    fence: Cell<Fence>,
    reservation: Cell<u32>,
}

impl Region {
    fn vacant(id: NodeId) -> Self {
        Self {
            address_link: RBTreeLink::new(),
            size_link: RBTreeLink::new(),
            queue_link: RBTreeLink::new(),
            id,
            start: Cell::new(0),
            bytes: Cell::new(0),
            state: Cell::new(State::Hole),
            fence: Cell::new(Fence::PASSED),
            reservation: Cell::new(0),
        }
    }

    pub(crate) fn id(&self) -> NodeId {
        self.id
    }

    /// The first address.
    pub(crate) fn start(&self) -> u64 {
        self.start.get()
    }

    /// One past the last address.
    pub(crate) fn end(&self) -> u64 {
        self.start.get() + self.bytes.get()
    }

    pub(crate) fn bytes(&self) -> u64 {
        self.bytes.get()
    }

    pub(crate) fn state(&self) -> State {
        self.state.get()
    }

    /// Which work must have finished before the memory (pending) or the address (zombie) is free;
    /// [`Fence::PASSED`] in the other states, unless an operation in transit keeps it.
    pub(crate) fn fence(&self) -> Fence {
        self.fence.get()
    }

    /// The reservation that the addresses belong to. Regions never span two, even where the
    /// addresses touch: no mapping call may cross from one reservation into another.
    pub(crate) fn reservation(&self) -> u32 {
        self.reservation.get()
    }
}
