//! What a manager asks the server for: allocations, metadata, to publish.

use std::os::fd::OwnedFd;

use super::{MemoryManager, Result};
use crate::client::{AllocationInfo, ClientError, MetadataValue};
use crate::lock::Granted;

impl MemoryManager {
    /// Makes an allocation, of whole granules. Nothing is mapped.
    ///
    /// # Errors
    /// [`ClientError::WrongLock`], [`ClientError::Refused`], [`ClientError::Size`].
    pub fn allocate_handle(&mut self, bytes: u64, tag: &str) -> Result<AllocationInfo> {
        let bytes = self.aligned(bytes)?;
        self.writer()?.allocate(bytes, tag)
    }

    /// A descriptor of an allocation's memory.
    ///
    /// # Errors
    /// [`ClientError::Refused`].
    pub fn export_handle(&mut self, allocation_id: &str) -> Result<OwnedFd> {
        Ok(self.session()?.export(allocation_id)?.1)
    }

    /// An allocation.
    ///
    /// # Errors
    /// [`ClientError::Refused`].
    pub fn handle_info(&mut self, allocation_id: &str) -> Result<AllocationInfo> {
        self.session()?.get(allocation_id)
    }

    /// Gives an allocation back; false if there was none. What is mapped of it stays mapped.
    ///
    /// # Errors
    /// [`ClientError::WrongLock`].
    pub fn free_handle(&mut self, allocation_id: &str) -> Result<bool> {
        self.writer()?.free(allocation_id)
    }

    /// All allocations, or those of a tag, in the order of their slots.
    ///
    /// # Errors
    /// [`ClientError::NotConnected`].
    pub fn list_handles(&mut self, tag: Option<&str>) -> Result<Vec<AllocationInfo>> {
        self.session()?.list(tag)
    }

    /// The hash of the published or sealed layout.
    ///
    /// # Errors
    /// [`ClientError::NotConnected`].
    pub fn layout_hash(&mut self) -> Result<String> {
        self.session()?.layout_hash()
    }

    /// Publishes the layout: waits for the device, takes the memory away here and keeps the
    /// addresses, publishes, and ends the session. So whoever reads finds finished work, and nobody
    /// here can write to what others read.
    ///
    /// # Errors
    /// [`ClientError::WrongLock`], [`ClientError::Cuda`] as [`unmap_all`](Self::unmap_all): nothing is
    /// published then, and the session stays. Where it ends with an error, what is published or not is
    /// known by the next [`connect`](Self::connect).
    pub fn commit(&mut self) -> Result<()> {
        match self.session()?.granted() {
            Granted::Rw => {
                self.unmap_all()?;
                self.session.take().ok_or(ClientError::NotConnected)?.commit()
            }
            has => Err(ClientError::WrongLock { needed: "RW", has }),
        }
    }

    /// Seals the layout: its allocations outlive this process, and the next who asks for
    /// [`Requested::RwDataOrRw`](crate::lock::Requested::RwDataOrRw) gets them. Session and mappings
    /// stay. The hash comes back.
    ///
    /// # Errors
    /// [`ClientError::WrongLock`].
    pub fn commit_layout(&mut self) -> Result<String> {
        let hash = self.writer()?.commit_layout()?;
        self.hash.clone_from(&hash);
        Ok(hash)
    }

    /// Puts an entry of metadata.
    ///
    /// # Errors
    /// [`ClientError::WrongLock`], [`ClientError::Refused`].
    pub fn metadata_put(
        &mut self,
        key: &str,
        allocation_id: &str,
        offset_bytes: u64,
        value: &[u8],
    ) -> Result<()> {
        self.writer()?.metadata_put(key, allocation_id, offset_bytes, value)
    }

    /// An entry of metadata, if there is one.
    ///
    /// # Errors
    /// [`ClientError::NotConnected`].
    pub fn metadata_get(&mut self, key: &str) -> Result<Option<MetadataValue>> {
        self.session()?.metadata_get(key)
    }

    /// The names of entries that begin so, sorted.
    ///
    /// # Errors
    /// [`ClientError::NotConnected`].
    pub fn metadata_list(&mut self, prefix: &str) -> Result<Vec<String>> {
        self.session()?.metadata_list(prefix)
    }

    /// Takes an entry away; false if there was none.
    ///
    /// # Errors
    /// [`ClientError::WrongLock`].
    pub fn metadata_delete(&mut self, key: &str) -> Result<bool> {
        self.writer()?.metadata_delete(key)
    }
}
