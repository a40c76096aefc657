//! Allocations that are made, or there already, and mapped: one, or a layout's whole.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use super::{MemoryManager, Result};
use crate::client::mappings::{Place, Range, runs};
use crate::client::{AllocationInfo, ClientError};
use crate::cuda::{Mapping, Reservation};

impl MemoryManager {
    /// Makes an allocation and maps it: its address.
    ///
    /// # Errors
    /// [`ClientError::WrongLock`], [`ClientError::Refused`], [`ClientError::Cuda`]; nothing is left
    /// of it then.
    pub fn create_mapping(&mut self, bytes: u64, tag: &str) -> Result<u64> {
        let bytes = self.aligned(bytes)?;
        let (made, file) = self.writer()?.allocate_and_export(bytes, tag)?;
        let id = made.allocation_id.clone();
        self.place(made, file).inspect_err(|_| {
            // The error that matters is the first.
            let _ = self.session.as_mut().map(|session| session.free(&id));
        })
    }

    /// Maps an allocation that is there: its address, which is the same if it is mapped already.
    ///
    /// # Errors
    /// [`ClientError::Refused`], [`ClientError::Cuda`], [`ClientError::MappingState`] where the memory
    /// was given up and only the address is kept.
    pub fn import_mapping(&mut self, allocation_id: &str) -> Result<u64> {
        if let Some(address) = self.places.address_of(allocation_id) {
            return match self.places.get(address)?.mapping {
                Some(_) => Ok(address),
                None => Err(ClientError::MappingState { address, state: "not mapped" }),
            };
        }
        let (about, file) = self.session()?.export(allocation_id)?;
        self.place(about, file)
    }

    pub(super) fn place(&mut self, allocation: AllocationInfo, file: OwnedFd) -> Result<u64> {
        let context = self.context.clone();
        let _current = context.enter()?;
        let address = self.reserve(allocation.aligned_size)?;
        match self.map(address, file, allocation) {
            Ok(()) => Ok(address),
            Err(error) => {
                self.places.remove(address);
                Err(error)
            }
        }
    }

    /// Makes allocations of a tag and maps them side by side: the address of each.
    ///
    /// # Errors
    /// As [`create_mapping`](Self::create_mapping), except that allocations stay at the server where they
    /// cannot be mapped.
    pub fn create_mappings(&mut self, sizes: &[u64], tag: &str) -> Result<Vec<u64>> {
        let sizes: Vec<u64> =
            sizes.iter().map(|bytes| self.aligned(*bytes)).collect::<Result<_>>()?;
        let made = self.writer()?.allocate_many(&sizes, tag)?;
        self.place_many(made)
    }

    /// Maps every allocation of the layout, or of a tag, side by side, in the order of their slots:
    /// the address of each. Those that are mapped already keep theirs.
    ///
    /// # Errors
    /// As [`import_mapping`](Self::import_mapping); none of them is mapped then.
    pub fn import_all(&mut self, tag: Option<&str>) -> Result<Vec<(AllocationInfo, u64)>> {
        let all = self.session()?.list(tag)?;
        let mut new = Vec::new();
        for allocation in &all {
            let id = &allocation.allocation_id;
            match self.places.address_of(id) {
                None => new.push(allocation.clone()),
                // Asks nobody. One whose memory was given up is told before anything is mapped.
                Some(_) => drop(self.import_mapping(id)?),
            }
        }
        self.place_many(new)?;
        let placed = all.into_iter().map(|allocation| {
            let address = self.import_mapping(&allocation.allocation_id)?;
            Ok((allocation, address))
        });
        placed.collect()
    }

    /// Maps allocations side by side, with one call for their access.
    pub(super) fn place_many(&mut self, allocations: Vec<AllocationInfo>) -> Result<Vec<u64>> {
        let total = allocations.iter().try_fold(0_u64, |total, allocation| {
            total.checked_add(allocation.aligned_size).ok_or(ClientError::Size { bytes: u64::MAX })
        })?;
        if total == 0 {
            return Ok(Vec::new());
        }
        let reservation = Arc::new(Reservation::new(&self.context, total)?);
        let mut addresses = Vec::with_capacity(allocations.len());
        let mut address = reservation.address();
        for allocation in allocations {
            let bytes = allocation.aligned_size;
            addresses.push(address);
            let reservation = Arc::clone(&reservation);
            self.places.insert(address, Place::new(reservation, bytes, Some(allocation)));
            address += bytes;
        }
        match self.map_at(&addresses) {
            Ok(()) => Ok(addresses),
            Err(error) => {
                addresses.iter().for_each(|address| drop(self.places.remove(*address)));
                Err(error)
            }
        }
    }

    /// Brings the memory back to addresses whose allocations are known. All of it, or none.
    pub(super) fn map_at(&mut self, addresses: &[u64]) -> Result<()> {
        let mut ids = Vec::with_capacity(addresses.len());
        for address in addresses {
            let allocation = self.places.get(*address)?.allocation.as_ref();
            let state = ClientError::MappingState { address: *address, state: "only reserved" };
            ids.push(allocation.ok_or(state)?.allocation_id.clone());
        }
        let context = self.context.clone();
        let _current = context.enter()?;
        let write = self.may_write();
        let mut made: Vec<(u64, Mapping)> = Vec::with_capacity(addresses.len());
        // Out of its place, as what it calls needs the rest.
        let mut session = self.session.take().ok_or(ClientError::NotConnected)?;
        let exported = session.export_many(&ids, |about, file| {
            let address = addresses[made.len()];
            made.push((address, self.import(address, &file, about.aligned_size)?));
            Ok(())
        });
        self.session = Some(session);
        exported?;
        let mut ranges = Vec::with_capacity(made.len());
        for (address, _) in &made {
            let place = self.places.get(*address)?;
            let (start, reservation) = (*address, place.reservation.address());
            ranges.push(Range { start, bytes: place.bytes, reservation });
        }
        for run in runs(ranges) {
            self.context.set_access(run.start, run.bytes, write)?;
        }
        for (address, mapping) in made {
            self.places.get_mut(address)?.mapping = Some(mapping);
        }
        Ok(())
    }

    /// Makes allocations of exactly these sizes and tags, in this order, and maps them side by side.
    pub(crate) fn create_layout(
        &mut self,
        wanted: &[(u64, &str)],
    ) -> Result<Vec<(AllocationInfo, u64)>> {
        let mut made = Vec::with_capacity(wanted.len());
        for part in wanted.chunk_by(|one, next| one.1 == next.1) {
            let sizes: Vec<u64> = part.iter().map(|(size, _)| *size).collect();
            made.extend(self.writer()?.allocate_many(&sizes, part[0].1)?);
        }
        let addresses = self.place_many(made.clone())?;
        Ok(made.into_iter().zip(addresses).collect())
    }
}
