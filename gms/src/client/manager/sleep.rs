//! Memory that goes, and comes back at the same addresses.

use super::{MemoryManager, Result};
use crate::client::ClientError;
use crate::lock::Granted;

impl MemoryManager {
    /// Takes a mapping away with its address, and, as a writer, with its allocation. Waits for the
    /// device first.
    ///
    /// # Errors
    /// [`ClientError::UnknownAddress`], [`ClientError::Cuda`], [`ClientError::Refused`] where the
    /// server does not know the allocation; the address is kept then.
    pub fn destroy_mapping(&mut self, address: u64) -> Result<()> {
        let allocation = self.places.get(address)?.allocation.clone();
        self.unmap(address)?;
        if let (Some(allocation), Some(Granted::Rw)) = (allocation, self.granted_lock())
            && !self.free_handle(&allocation.allocation_id)?
        {
            let error = format!("Unknown allocation: {}", allocation.allocation_id);
            return Err(ClientError::Refused { error });
        }
        self.free_address(address)
    }

    /// Gives all memory up and keeps the addresses. Waits for the device first.
    ///
    /// # Errors
    /// [`ClientError::Cuda`]: nothing was given up where the device cannot be waited for, and all but what
    /// the driver would not unmap otherwise. That is tried again by the next call, and before anything else
    /// comes to its address.
    pub fn unmap_all(&mut self) -> Result<()> {
        let _current = self.context.enter()?;
        self.context.synchronize()?;
        for (_, place) in self.places.iter_mut() {
            place.mapping = None;
        }
        self.scratches.unmap();
        self.unmapped = true;
        // Once more, and what was left before.
        Ok(self.context.unmap_left(|_| true)?)
    }

    /// Brings the memory back at the same addresses: as a reader that of the published layout, if it
    /// is the one whose addresses were kept. What was mapped since stays as it is.
    ///
    /// Allocations are told by the order of their slots, so that a layout that was written anew in
    /// the same shape fits, too.
    ///
    /// # Errors
    /// [`ClientError::StaleLayout`], [`ClientError::MappingState`] where something was mapped since that is of
    /// another layout, [`ClientError::Refused`], [`ClientError::Cuda`]; nothing more is mapped then.
    pub fn remap_all(&mut self) -> Result<()> {
        if !self.unmapped {
            return Ok(());
        }
        let found = self.session()?.layout_hash()?;
        if !self.hash.is_empty() && self.hash != found {
            let reason = format!("its hash was {} and is {found}", self.hash);
            return Err(ClientError::StaleLayout { reason });
        }
        let kept = self.places.in_slot_order();
        let there = self.session()?.list(None)?;
        if kept.len() != there.len() {
            let reason = format!("it had {} allocations and has {}", kept.len(), there.len());
            return Err(ClientError::StaleLayout { reason });
        }
        for (slot, ((_, before), now)) in kept.iter().zip(&there).enumerate() {
            if (before.aligned_size, &before.tag) != (now.aligned_size, &now.tag) {
                let reason = format!(
                    "slot {slot} had {} bytes for {:?} and has {} for {:?}",
                    before.aligned_size, before.tag, now.aligned_size, now.tag
                );
                return Err(ClientError::StaleLayout { reason });
            }
        }
        let mut without = Vec::with_capacity(kept.len());
        for ((address, before), now) in kept.into_iter().zip(there) {
            if self.places.get(address)?.mapping.is_none() {
                without.push((address, now));
            } else if before.allocation_id != now.allocation_id {
                let state = "mapped still, of a layout that is gone";
                return Err(ClientError::MappingState { address, state });
            }
        }
        let addresses: Vec<u64> = without.iter().map(|(address, _)| *address).collect();
        for (address, now) in without {
            self.places.bind(address, now)?;
        }
        self.map_at(&addresses)?;
        self.unmapped = false;
        Ok(())
    }

    /// As a writer of a new layout, makes an allocation for every address that is kept, in the order
    /// of the slots before; [`remap_all`](Self::remap_all) maps them.
    ///
    /// # Errors
    /// [`ClientError::WrongLock`], [`ClientError::MappingState`] where something is mapped,
    /// [`ClientError::Refused`].
    pub fn reallocate_all(&mut self, tag: &str) -> Result<()> {
        let kept = self.places.in_slot_order();
        for (address, _) in &kept {
            if self.places.get(*address)?.mapping.is_some() {
                let address = *address;
                return Err(ClientError::MappingState { address, state: "still mapped" });
            }
        }
        // What was asked for, not what that was rounded up to: the layout's hash knows both.
        let sizes: Vec<u64> = kept.iter().map(|(_, allocation)| allocation.size).collect();
        let made = self.writer()?.allocate_many(&sizes, tag)?;
        for ((address, _), allocation) in kept.into_iter().zip(made) {
            self.places.bind(address, allocation)?;
        }
        self.unmapped = true;
        Ok(())
    }
}
