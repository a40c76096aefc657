//! The three kinds of index over nodes. Each keeps nodes by address of the node, unowned.
//!
//! The functions are safe to call only from [`RegionMap`](super::RegionMap), which alone decides
//! membership: a node is in the index that its state and fence name, and in no other.

use intrusive_collections::{Bound, KeyAdapter, RBTree, RBTreeLink, UnsafeRef, intrusive_adapter};

use super::Region;

intrusive_adapter!(AddressAdapter = UnsafeRef<Region>: Region { address_link => RBTreeLink });
intrusive_adapter!(SizeAdapter = UnsafeRef<Region>: Region { size_link => RBTreeLink });
intrusive_adapter!(QueueAdapter = UnsafeRef<Region>: Region { queue_link => RBTreeLink });

impl<'a> KeyAdapter<'a> for AddressAdapter {
    type Key = u64;

    fn get_key(&self, region: &'a Region) -> u64 {
        region.start()
    }
}

impl<'a> KeyAdapter<'a> for SizeAdapter {
    type Key = (u64, u64);

    fn get_key(&self, region: &'a Region) -> (u64, u64) {
        (region.bytes(), region.start())
    }
}

impl<'a> KeyAdapter<'a> for QueueAdapter {
    type Key = u64;

    fn get_key(&self, region: &'a Region) -> u64 {
        region.fence().sequence
    }
}

/// A counted, unowned pointer to a node, as the collections want it.
///
/// # Safety
/// The node must stay where it is, and alive, while any index links it.
unsafe fn unowned(region: &Region) -> UnsafeRef<Region> {
    // SAFETY: the caller vouches for the node's life; the reference is not null.
    unsafe { UnsafeRef::from_raw(region) }
}

/// Every region by its start address.
pub(super) struct AddressIndex(RBTree<AddressAdapter>);

impl AddressIndex {
    pub(super) fn new() -> Self {
        Self(RBTree::new(AddressAdapter::new()))
    }

    /// # Safety
    /// The node stays alive and in place while it is in the index, and is in no other
    /// `AddressIndex`. (Linked twice, it panics.)
    pub(super) unsafe fn insert(&mut self, region: &Region) {
        // SAFETY: passed on to the caller.
        self.0.insert(unsafe { unowned(region) });
    }

    /// # Safety
    /// The node is in this index.
    pub(super) unsafe fn remove(&mut self, region: &Region) {
        // SAFETY: the caller vouches for membership.
        unsafe { self.0.cursor_mut_from_ptr(region) }.remove();
    }

    /// The region with the greatest start that is not above `address`.
    pub(super) fn at_or_below(&self, address: u64) -> Option<&Region> {
        self.0.upper_bound(Bound::Included(&address)).get()
    }

    /// # Safety
    /// The node is in this index.
    pub(super) unsafe fn next(&self, region: &Region) -> Option<&Region> {
        // SAFETY: the caller vouches for membership.
        let mut cursor = unsafe { self.0.cursor_from_ptr(region) };
        cursor.move_next();
        cursor.get()
    }

    /// # Safety
    /// The node is in this index.
    pub(super) unsafe fn previous(&self, region: &Region) -> Option<&Region> {
        // SAFETY: the caller vouches for membership.
        let mut cursor = unsafe { self.0.cursor_from_ptr(region) };
        cursor.move_prev();
        cursor.get()
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &Region> {
        self.0.iter()
    }
}

/// Regions of one kind by (size, address): best fit is its lower bound.
pub(super) struct SizeIndex(RBTree<SizeAdapter>);

impl SizeIndex {
    pub(super) fn new() -> Self {
        Self(RBTree::new(SizeAdapter::new()))
    }

    /// # Safety
    /// As [`AddressIndex::insert`]; and the node's size and address do not change while it is in.
    pub(super) unsafe fn insert(&mut self, region: &Region) {
        // SAFETY: passed on to the caller.
        self.0.insert(unsafe { unowned(region) });
    }

    /// # Safety
    /// The node is in this index.
    pub(super) unsafe fn remove(&mut self, region: &Region) {
        // SAFETY: the caller vouches for membership.
        unsafe { self.0.cursor_mut_from_ptr(region) }.remove();
    }

    /// The smallest region of at least `bytes`, and of those the lowest.
    pub(super) fn best_fit(&self, bytes: u64) -> Option<&Region> {
        self.0.lower_bound(Bound::Included(&(bytes, 0))).get()
    }

    pub(super) fn largest(&self) -> Option<&Region> {
        self.0.back().get()
    }

    pub(super) fn iter(&self) -> impl DoubleEndedIterator<Item = &Region> {
        self.0.iter()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}

/// Regions of one kind and one stream, in the order of their fences: the oldest first. A tree, since one may come
/// to many that are newer.
pub(super) struct Queue(RBTree<QueueAdapter>);

impl Queue {
    pub(super) fn new() -> Self {
        Self(RBTree::new(QueueAdapter::new()))
    }

    /// Puts a node behind all whose fence is as old or older. O(log nodes).
    ///
    /// # Safety
    /// As [`AddressIndex::insert`]; and the node's fence does not change while it is in.
    pub(super) unsafe fn insert(&mut self, region: &Region) {
        // SAFETY: passed on to the caller.
        self.0.insert(unsafe { unowned(region) });
    }

    /// # Safety
    /// The node is in this queue.
    pub(super) unsafe fn remove(&mut self, region: &Region) {
        // SAFETY: the caller vouches for membership.
        unsafe { self.0.cursor_mut_from_ptr(region) }.remove();
    }

    pub(super) fn front(&self) -> Option<&Region> {
        self.0.front().get()
    }

    pub(super) fn back(&self) -> Option<&Region> {
        self.0.back().get()
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = &Region> {
        self.0.iter()
    }

    pub(super) fn is_empty(&self) -> bool {
        self.0.is_empty()
    }
}
