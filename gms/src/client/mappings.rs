//! What a process has mapped, or keeps addresses for.

use std::collections::BTreeMap;
use std::collections::HashMap;
use std::sync::Arc;

use super::{AllocationInfo, ClientError};
use crate::cuda::{Mapping, Reservation};

/// An address with what belongs there.
#[derive(Debug)]
pub(super) struct Place {
    /// The memory, if it is mapped. Before `reservation`, so that it goes first.
    pub(super) mapping: Option<Mapping>,
    /// Addresses, which several places may share.
    pub(super) reservation: Arc<Reservation>,
    pub(super) bytes: u64,
    /// What is there, unless it was only reserved.
    pub(super) allocation: Option<AllocationInfo>,
    /// How many were put in before it.
    order: u64,
}

impl Place {
    /// Addresses with nothing mapped.
    pub(super) fn new(
        reservation: Arc<Reservation>,
        bytes: u64,
        allocation: Option<AllocationInfo>,
    ) -> Self {
        Self { mapping: None, reservation, bytes, allocation, order: 0 }
    }

    /// Takes the memory away, which nobody uses any more. It stays if the driver refuses.
    pub(super) fn unmap(&mut self) -> Result<(), ClientError> {
        if let Some(mapping) = &mut self.mapping {
            mapping.unmap()?;
        }
        self.mapping = None;
        Ok(())
    }
}

/// A mapping as callers see it.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct MappingInfo {
    /// Where it is.
    pub address: u64,
    /// Its bytes.
    pub bytes: u64,
    /// The allocation's name.
    pub allocation_id: String,
    /// What it is for.
    pub tag: String,
    /// Its place in the layout.
    pub layout_slot: u64,
    /// Whether the memory is there; if not, only the address is kept.
    pub is_mapped: bool,
}

/// Places by address, and by allocation.
#[derive(Debug, Default)]
pub(super) struct Places {
    by_address: BTreeMap<u64, Place>,
    addresses: HashMap<String, u64>,
    inserted: u64,
}

impl Places {
    pub(super) fn insert(&mut self, address: u64, mut place: Place) {
        place.order = self.inserted;
        self.inserted += 1;
        if let Some(allocation) = &place.allocation
            && !allocation.allocation_id.is_empty()
        {
            self.addresses.insert(allocation.allocation_id.clone(), address);
        }
        self.by_address.insert(address, place);
    }

    pub(super) fn get(&self, address: u64) -> Result<&Place, ClientError> {
        self.by_address.get(&address).ok_or(ClientError::UnknownAddress { address })
    }

    pub(super) fn get_mut(&mut self, address: u64) -> Result<&mut Place, ClientError> {
        self.by_address.get_mut(&address).ok_or(ClientError::UnknownAddress { address })
    }

    pub(super) fn remove(&mut self, address: u64) -> Option<Place> {
        let place = self.by_address.remove(&address)?;
        if let Some(allocation) = &place.allocation {
            self.unbind(address, &allocation.allocation_id);
        }
        Some(place)
    }

    /// An allocation is at an address no more. Another may have it by now.
    fn unbind(&mut self, address: u64, allocation_id: &str) {
        if self.addresses.get(allocation_id) == Some(&address) {
            self.addresses.remove(allocation_id);
        }
    }

    /// Says which allocation is at an address from now on.
    pub(super) fn bind(
        &mut self,
        address: u64,
        allocation: AllocationInfo,
    ) -> Result<(), ClientError> {
        let place = self.get_mut(address)?;
        let id = allocation.allocation_id.clone();
        if let Some(before) = place.allocation.replace(allocation) {
            self.unbind(address, &before.allocation_id);
        }
        self.addresses.insert(id, address);
        Ok(())
    }

    /// Where an allocation is.
    pub(super) fn address_of(&self, allocation_id: &str) -> Option<u64> {
        self.addresses.get(allocation_id).copied()
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (u64, &Place)> {
        self.by_address.iter().map(|(address, place)| (*address, place))
    }

    pub(super) fn iter_mut(&mut self) -> impl Iterator<Item = (u64, &mut Place)> {
        self.by_address.iter_mut().map(|(address, place)| (*address, place))
    }

    pub(super) fn is_empty(&self) -> bool {
        self.by_address.is_empty()
    }

    pub(super) fn clear(&mut self) {
        self.by_address.clear();
        self.addresses.clear();
    }

    /// The addresses that have an allocation, in the order of its slots; those that are to get one,
    /// which have no slot yet, in the order in which they came.
    pub(super) fn in_slot_order(&self) -> Vec<(u64, AllocationInfo)> {
        let placed = self.iter();
        let placed =
            placed.filter_map(|(at, place)| Some((place.order, at, place.allocation.clone()?)));
        let mut placed: Vec<_> = placed.collect();
        placed.sort_by_key(|(order, _, allocation)| (allocation.layout_slot, *order));
        placed.into_iter().map(|(_, at, allocation)| (at, allocation)).collect()
    }
}

/// A range of addresses, and which reservation it is of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) struct Range {
    pub(super) start: u64,
    pub(super) bytes: u64,
    /// Where the reservation begins.
    pub(super) reservation: u64,
}

/// Joins ranges that lie end to end in one reservation, in whatever order they come. Over the end of
/// a reservation the driver takes no range.
pub(super) fn runs(mut ranges: Vec<Range>) -> Vec<Range> {
    ranges.sort_unstable();
    let mut joined: Vec<Range> = Vec::new();
    for range in ranges {
        match joined.last_mut() {
            Some(last)
                if last.start + last.bytes == range.start
                    && last.reservation == range.reservation =>
            {
                last.bytes += range.bytes;
            }
            _ => joined.push(range),
        }
    }
    joined
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn ranges_end_to_end_are_one() {
        let range = |start, bytes, reservation| Range { start, bytes, reservation };
        let apart = vec![range(8, 2, 0), range(0, 4, 0), range(4, 2, 0), range(10, 1, 10)];
        assert_eq!(runs(apart), [range(0, 6, 0), range(8, 2, 0), range(10, 1, 10)]);
        assert_eq!(runs(Vec::new()), []);
    }
}
