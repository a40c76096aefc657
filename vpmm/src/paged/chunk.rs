//! A chunk: one reservation, and the flat tables that say what each of its pages is.

use crate::physical::Extent;
use crate::region::NodeId;
use crate::reservation::Reservation;

/// One reservation with three tables indexed by `(address - base) / page`. The tables are zeroed
/// memory that the system provides when it is touched: addresses that were never used cost none.
pub(super) struct Chunk {
    reservation: Reservation,
    page: u64,
    /// The handle mapped at a page as its current mapping; 0 for none.
    extents: Vec<u64>,
    /// For the first page of an allocation its node and tag (`node + 1` in the high half); else 0.
    owners: Vec<u64>,
    /// The id of the stream that the last allocation at a page was made on.
    streams: Vec<u64>,
}

impl Chunk {
    pub(super) fn new(reservation: Reservation, page: u64) -> Self {
        let pages = (reservation.bytes() / page) as usize;
        Self {
            reservation,
            page,
            extents: vec![0; pages],
            owners: vec![0; pages],
            streams: vec![0; pages],
        }
    }

    pub(super) fn base(&self) -> u64 {
        self.reservation.base()
    }

    pub(super) fn bytes(&self) -> u64 {
        self.reservation.bytes()
    }

    pub(super) fn contains(&self, address: u64) -> bool {
        address.checked_sub(self.base()).is_some_and(|offset| offset < self.bytes())
    }

    fn page_of(&self, address: u64) -> usize {
        ((address - self.base()) / self.page) as usize
    }

    /// The extents of the pages from `start` on, `bytes` long.
    pub(super) fn extents(
        &self,
        start: u64,
        bytes: u64,
    ) -> impl Iterator<Item = Option<Extent>> + '_ {
        let first = self.page_of(start);
        let range = first..first + (bytes / self.page) as usize;
        self.extents[range].iter().map(|handle| (*handle != 0).then_some(Extent(*handle)))
    }

    pub(super) fn set_extent(&mut self, address: u64, extent: Extent) {
        let at = self.page_of(address);
        self.extents[at] = extent.0;
    }

    /// Takes the extent of a page out of the table.
    pub(super) fn take_extent(&mut self, address: u64) -> Option<Extent> {
        let at = self.page_of(address);
        let handle = std::mem::take(&mut self.extents[at]);
        (handle != 0).then_some(Extent(handle))
    }

    /// The allocation that starts at exactly this address.
    pub(super) fn owner(&self, address: u64) -> Option<(NodeId, u32)> {
        if !(address - self.base()).is_multiple_of(self.page) {
            return None;
        }
        let packed = self.owners[self.page_of(address)];
        let node = u32::try_from((packed >> 32).checked_sub(1)?).ok()?;
        Some((NodeId(node), packed as u32))
    }

    pub(super) fn set_owner(&mut self, address: u64, owner: Option<(NodeId, u32)>) {
        let at = self.page_of(address);
        self.owners[at] =
            owner.map_or(0, |(node, tag)| (u64::from(node.0) + 1) << 32 | u64::from(tag));
    }

    /// The stream of the allocation that starts at an address.
    pub(super) fn stream(&self, address: u64) -> u64 {
        self.streams[self.page_of(address)]
    }

    pub(super) fn set_stream(&mut self, address: u64, stream: u64) {
        let at = self.page_of(address);
        self.streams[at] = stream;
    }

    /// Entries of the first two tables that are in use, for validation.
    pub(super) fn used(&self) -> (impl Iterator<Item = Extent> + '_, usize) {
        let owners = self.owners.iter().filter(|packed| **packed != 0).count();
        (self.extents.iter().filter(|handle| **handle != 0).map(|handle| Extent(*handle)), owners)
    }

    /// Takes the extents of a range out of the table.
    pub(super) fn drain_extents(&mut self, start: u64, bytes: u64, mut with: impl FnMut(Extent)) {
        let first = self.page_of(start);
        for handle in &mut self.extents[first..first + (bytes / self.page) as usize] {
            if *handle != 0 {
                with(Extent(std::mem::take(handle)));
            }
        }
    }
}
