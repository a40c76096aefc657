//! Addresses of this process, and one allocation's memory at one of them.

use std::os::fd::OwnedFd;
use std::sync::Arc;

use super::{MemoryManager, Result};
use crate::client::mappings::Place;
use crate::client::{AllocationInfo, ClientError};
use crate::cuda::{Mapping, Reservation};

/// Bytes that are reserved at a time for mappings that are made one by one. Addresses cost nothing, and
/// each reservation a call of the driver.
const ROOM_BYTES: u64 = 1 << 30;

/// Addresses that are reserved and belong to nobody yet.
#[derive(Debug)]
pub(super) struct Room {
    reservation: Arc<Reservation>,
    next: u64,
    end: u64,
}

/// Addresses that nobody else gets before this is dropped, though their manager has ended: see
/// [`MemoryManager::keep_addresses`].
#[derive(Debug)]
pub struct KeptAddresses(#[expect(dead_code, reason = "it keeps them")] Arc<Reservation>);

impl MemoryManager {
    /// Keeps the addresses of a mapping, or of a scratch mapping, beyond the manager's end: for who still has pointers
    /// there then, though to nothing. `None` where none begins at the address. Asks nobody. Small mappings have their
    /// addresses from a larger reservation, which is kept as a whole.
    pub fn keep_addresses(&self, address: u64) -> Option<KeptAddresses> {
        let place = self.places.get(address).ok().map(|place| &place.reservation);
        let reservation = place.or_else(|| self.scratches.reservation(address))?;
        Some(KeptAddresses(Arc::clone(reservation)))
    }

    /// Addresses for a mapping: the next ones of what was reserved before, or, for large ones, of their
    /// own. They are given back when all that were reserved together are.
    fn room(&mut self, bytes: u64) -> Result<(u64, Arc<Reservation>)> {
        if bytes > ROOM_BYTES / 4 {
            let reservation = Arc::new(Reservation::new(&self.context, bytes)?);
            return Ok((reservation.address(), reservation));
        }
        let room = match self.room.take() {
            Some(room) if bytes <= room.end - room.next => room,
            _ => {
                let reservation = Arc::new(Reservation::new(&self.context, ROOM_BYTES)?);
                let next = reservation.address();
                Room { reservation, next, end: next + ROOM_BYTES }
            }
        };
        let (address, reservation) = (room.next, Arc::clone(&room.reservation));
        self.room = Some(Room { next: address + bytes, ..room });
        Ok((address, reservation))
    }

    pub(super) fn aligned(&self, bytes: u64) -> Result<u64> {
        let aligned = self.context.cuda().aligned(bytes).filter(|bytes| *bytes > 0);
        aligned.ok_or(ClientError::Size { bytes })
    }

    /// Reserves addresses for so many bytes, in whole granules.
    ///
    /// # Errors
    /// [`ClientError::Size`], [`ClientError::Cuda`].
    pub fn reserve(&mut self, bytes: u64) -> Result<u64> {
        let bytes = self.aligned(bytes)?;
        let (address, reservation) = self.room(bytes)?;
        self.places.insert(address, Place::new(reservation, bytes, None));
        Ok(address)
    }

    /// Maps an allocation's memory at an address that was reserved for it, for reading, or also for
    /// writing if the lock is a writer's. The descriptor is closed.
    ///
    /// # Errors
    /// [`ClientError::UnknownAddress`], [`ClientError::MappingState`], [`ClientError::Cuda`]; the
    /// address is as before then.
    pub fn map(&mut self, address: u64, file: OwnedFd, allocation: AllocationInfo) -> Result<()> {
        let write = self.may_write();
        let mapping = self.import(address, &file, allocation.aligned_size)?;
        let bytes = self.places.get(address)?.bytes;
        // Before it is said to be there: an error takes the mapping away again.
        self.context.set_access(address, bytes, write)?;
        self.places.bind(address, allocation)?;
        self.places.get_mut(address)?.mapping = Some(mapping);
        Ok(())
    }

    /// Maps a descriptor's memory without access.
    pub(super) fn import(&self, address: u64, file: &OwnedFd, bytes: u64) -> Result<Mapping> {
        let place = self.places.get(address)?;
        if place.mapping.is_some() {
            return Err(ClientError::MappingState { address, state: "mapped already" });
        }
        if place.bytes != bytes {
            return Err(ClientError::MappingState { address, state: "of another size" });
        }
        Ok(Mapping::import(&self.context, file, bytes, address)?)
    }

    /// Takes the memory at an address away and keeps the address. Waits for the device first.
    ///
    /// # Errors
    /// [`ClientError::UnknownAddress`], [`ClientError::Cuda`]; the memory is there as before then.
    pub fn unmap(&mut self, address: u64) -> Result<()> {
        if self.places.get(address)?.mapping.is_some() {
            self.context.synchronize()?;
            self.places.get_mut(address)?.unmap()?;
        }
        Ok(())
    }

    /// Gives an address back at which no memory is.
    ///
    /// # Errors
    /// [`ClientError::UnknownAddress`], [`ClientError::MappingState`].
    pub fn free_address(&mut self, address: u64) -> Result<()> {
        if self.places.get(address)?.mapping.is_some() {
            return Err(ClientError::MappingState { address, state: "still mapped" });
        }
        self.places.remove(address);
        Ok(())
    }
}
