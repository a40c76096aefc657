//! Addresses that stand on next to no memory, until there is memory for them.
//!
//! A worker that waits to take over wants its cache's addresses now: to make tensors there, and to
//! capture graphs with them. One block of memory, mapped again and again, stands behind all of them.
//! What is written there is of no use to anybody. When the worker takes over, the block goes
//! ([`MemoryManager::unmap_all`]) and allocations of a layout come to the same addresses.

use std::collections::BTreeMap;
use std::sync::{Arc, Weak};

use super::{MemoryManager, Result};
use crate::client::mappings::Place;
use crate::client::{AllocationInfo, ClientError};
use crate::cuda::{Aliases, PhysicalHandle, Reservation};

/// Bytes of the block, unless something else is said: few mappings, as each costs the driver time.
const BLOCK_BYTES: u64 = 512 << 20;

/// One range of addresses over the block.
#[derive(Debug)]
struct Scratch {
    /// The block, mapped; before `reservation`, so that it goes first.
    aliases: Option<Aliases>,
    reservation: Arc<Reservation>,
    /// Bytes that were asked for.
    bytes: u64,
    /// Bytes that an allocation for them will have.
    aligned: u64,
    tag: String,
    /// Who was first.
    order: u64,
}

/// All of them.
#[derive(Debug)]
pub(super) struct Scratches {
    by_address: BTreeMap<u64, Scratch>,
    /// Alive as long as it is mapped anywhere.
    block: Weak<PhysicalHandle>,
    block_bytes: u64,
    made: u64,
}

impl Default for Scratches {
    fn default() -> Self {
        let (by_address, block) = (BTreeMap::new(), Weak::new());
        Self { by_address, block, block_bytes: BLOCK_BYTES, made: 0 }
    }
}

impl Scratches {
    pub(super) fn is_empty(&self) -> bool {
        self.by_address.is_empty()
    }

    /// The addresses of the mapping that begins there.
    pub(super) fn reservation(&self, address: u64) -> Option<&Arc<Reservation>> {
        self.by_address.get(&address).map(|scratch| &scratch.reservation)
    }

    /// Gives the block up and keeps the addresses. The device has been waited for.
    pub(super) fn unmap(&mut self) {
        self.by_address.values_mut().for_each(|scratch| scratch.aliases = None);
    }

    /// Gives everything up. The device has been waited for.
    pub(super) fn clear(&mut self) {
        self.by_address.clear();
    }
}

/// How much stands on how little.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ScratchSummary {
    /// Ranges of addresses.
    pub count: usize,
    /// Bytes that were asked for.
    pub virtual_bytes: u64,
    /// Bytes of memory behind them.
    pub physical_bytes: u64,
}

impl MemoryManager {
    /// Sets the bytes of the block behind scratch mappings, 512 MiB if this is not called: a power of
    /// two and a multiple of the granularity.
    ///
    /// # Errors
    /// [`ClientError::ScratchBlock`] if it is neither, or there are scratch mappings already.
    pub fn set_scratch_block(&mut self, bytes: u64) -> Result<()> {
        let fits = bytes.is_power_of_two() && bytes.is_multiple_of(self.granularity());
        if !fits || !self.scratches.is_empty() {
            let granularity = self.granularity();
            return Err(ClientError::ScratchBlock { bytes, granularity });
        }
        self.scratches.block_bytes = bytes;
        Ok(())
    }

    /// Reserves addresses for so many bytes and puts the block behind all of them, for reading and
    /// writing. Needs no session. The address comes back.
    ///
    /// # Errors
    /// [`ClientError::Size`], [`ClientError::ScratchBlock`], [`ClientError::Cuda`]; nothing is left of
    /// it then.
    pub fn create_scratch_mapping(&mut self, bytes: u64, tag: &str) -> Result<u64> {
        let aligned = self.aligned(bytes)?;
        let block_bytes = self.scratches.block_bytes;
        if !block_bytes.is_multiple_of(self.granularity()) {
            let granularity = self.granularity();
            return Err(ClientError::ScratchBlock { bytes: block_bytes, granularity });
        }
        let whole =
            bytes.checked_next_multiple_of(block_bytes).ok_or(ClientError::Size { bytes })?;
        let block = match self.scratches.block.upgrade() {
            Some(block) => block,
            None => Arc::new(PhysicalHandle::create(self.context.cuda(), block_bytes)?),
        };
        let reservation = Reservation::aligned(&self.context, whole, block_bytes)?;
        let address = reservation.address();
        let aliases = Aliases::map(&self.context, &block, address, whole)?;
        self.context.set_access(address, whole, true)?;
        self.scratches.block = Arc::downgrade(&block);
        self.scratches.made += 1;
        let scratch = Scratch {
            aliases: Some(aliases),
            reservation: Arc::new(reservation),
            bytes,
            aligned,
            tag: tag.to_owned(),
            order: self.scratches.made,
        };
        self.scratches.by_address.insert(address, scratch);
        Ok(address)
    }

    /// Gives a scratch mapping up with its address; false if there is none there. Waits for the device
    /// first.
    ///
    /// # Errors
    /// [`ClientError::Cuda`]; it is as before then.
    pub fn destroy_scratch_mapping(&mut self, address: u64) -> Result<bool> {
        let Some(scratch) = self.scratches.by_address.get_mut(&address) else { return Ok(false) };
        self.context.synchronize()?;
        if let Some(aliases) = &mut scratch.aliases {
            aliases.unmap()?;
        }
        Ok(self.scratches.by_address.remove(&address).is_some())
    }

    /// How many scratch mappings there are, and how much memory they take.
    pub fn scratch_summary(&self) -> ScratchSummary {
        let scratches = self.scratches.by_address.values();
        let mapped = self.scratches.block.strong_count() > 0;
        ScratchSummary {
            count: self.scratches.by_address.len(),
            virtual_bytes: scratches.map(|scratch| scratch.bytes).sum(),
            physical_bytes: if mapped { self.scratches.block_bytes } else { 0 },
        }
    }

    /// Makes scratch mappings, whose block was given up by [`unmap_all`](Self::unmap_all), mappings
    /// whose memory is away: [`reallocate_all`](Self::reallocate_all) makes allocations for them, in
    /// the order in which they were made, and [`remap_all`](Self::remap_all) maps these.
    ///
    /// # Errors
    /// [`ClientError::MappingState`] where the block is there still; nothing is changed then.
    pub fn prepare_scratch_for_reallocation(&mut self) -> Result<()> {
        let mapped = self.scratches.by_address.iter().find(|(_, one)| one.aliases.is_some());
        if let Some((address, _)) = mapped {
            return Err(ClientError::MappingState { address: *address, state: "still mapped" });
        }
        let mut moved: Vec<_> =
            std::mem::take(&mut self.scratches.by_address).into_iter().collect();
        moved.sort_by_key(|(_, scratch)| scratch.order);
        // Whatever else has had its memory back since.
        self.unmapped |= !moved.is_empty();
        for (address, Scratch { reservation, bytes, aligned, tag, .. }) in moved {
            let allocation = AllocationInfo {
                allocation_id: String::new(),
                size: bytes,
                aligned_size: aligned,
                tag,
                layout_slot: 0,
            };
            let place = Place::new(reservation, aligned, Some(allocation));
            self.places.insert(address, place);
        }
        Ok(())
    }
}
