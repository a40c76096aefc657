//! A session together with what is mapped through it.

use std::os::fd::OwnedFd;
use std::path::{Path, PathBuf};
use std::sync::Arc;

use super::mappings::{Place, Places, Range, runs};
use super::{AllocationInfo, ClientError, ConnectOptions, MappingInfo, MetadataValue, Session};
use crate::cuda::{Context, Cuda, Mapping, PhysicalHandle, Reservation};
use crate::lock::{Granted, Requested};

type Result<T> = std::result::Result<T, ClientError>;

/// What a process uses the service through: writes a layout and publishes it, or maps one that is
/// there; gives the memory up and has it back at the same addresses.
///
/// It takes part in the device's primary context. Work of the process on the memory is the process's
/// own to order: what takes memory away here waits for the device first.
///
/// ```no_run
/// use gms::client::{ConnectOptions, MemoryManager};
/// use gms::lock::Requested;
///
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// let driver = cuda_sys::Driver::load()?;
/// let mut manager = MemoryManager::new(&driver, 0, "/tmp/gms.sock")?;
/// manager.connect(ConnectOptions::new(Requested::RwOrRo))?;
/// let weights = manager.create_mapping(64 << 20, "weights")?;
/// // … fill the memory at `weights` …
/// manager.commit()?;
/// manager.connect(ConnectOptions::new(Requested::Ro))?;
/// manager.remap_all()?; // at the same address, read-only
/// # Ok(())
/// # }
/// ```
#[derive(Debug)]
pub struct MemoryManager {
    session: Option<Session>,
    // Before the context, which its mappings need.
    places: Places,
    context: Context,
    path: PathBuf,
    /// The hash of the layout whose addresses are kept; empty where it is not known.
    hash: String,
    unmapped: bool,
}

impl MemoryManager {
    /// For a device and the server at a path. Does not connect.
    ///
    /// # Errors
    /// [`ClientError::Cuda`].
    pub fn new(
        driver: &cuda_sys::Driver,
        ordinal: u32,
        socket_path: impl Into<PathBuf>,
    ) -> Result<Self> {
        let context = Context::retain(&Cuda::open(driver, ordinal)?)?;
        Ok(Self {
            session: None,
            places: Places::default(),
            context,
            path: socket_path.into(),
            hash: String::new(),
            unmapped: false,
        })
    }

    // What it is in.

    /// The lock that it has.
    pub fn granted_lock(&self) -> Option<Granted> {
        self.session.as_ref().map(Session::granted)
    }

    /// Whether it has a session.
    pub fn is_connected(&self) -> bool {
        self.session.is_some()
    }

    /// Whether the memory was given up and only the addresses are kept.
    pub fn is_unmapped(&self) -> bool {
        self.unmapped
    }

    /// Bytes of all mappings, whether the memory is there or not.
    pub fn total_bytes(&self) -> u64 {
        self.places.iter().map(|(_, place)| place.bytes).sum()
    }

    /// What sizes are rounded up to.
    pub fn granularity(&self) -> u64 {
        self.context.cuda().granularity()
    }

    /// The server's socket.
    pub fn socket_path(&self) -> &Path {
        &self.path
    }

    /// What is mapped, or kept an address for, by address.
    pub fn mappings(&self) -> Vec<MappingInfo> {
        let known = self.places.iter().filter_map(|(address, place)| {
            let allocation = place.allocation.as_ref()?;
            Some(MappingInfo {
                address,
                bytes: place.bytes,
                allocation_id: allocation.allocation_id.clone(),
                tag: allocation.tag.clone(),
                layout_slot: allocation.layout_slot,
                is_mapped: place.mapping.is_some(),
            })
        });
        known.collect()
    }

    /// The allocation that belongs at an address, if there is one.
    pub fn allocation_at(&self, address: u64) -> Option<&AllocationInfo> {
        self.places.get(address).ok()?.allocation.as_ref()
    }

    // The connection.

    /// Connects and waits for a lock. A writer's hash is not known; a reader takes the published
    /// layout's, unless it keeps addresses of one it knew.
    ///
    /// # Errors
    /// [`ClientError::AlreadyConnected`], [`ClientError::Connect`], [`ClientError::LockTimeout`].
    pub fn connect(&mut self, options: ConnectOptions) -> Result<Granted> {
        if let Some(session) = &self.session {
            return Err(ClientError::AlreadyConnected { has: session.granted() });
        }
        let mut session = Session::connect(&self.path, options)?;
        let granted = session.granted();
        let keeps = !self.places.is_empty() && !self.hash.is_empty();
        match granted {
            Granted::Rw => self.hash.clear(),
            Granted::Ro | Granted::RwData if !keeps => self.hash = session.layout_hash()?,
            Granted::Ro | Granted::RwData => {}
        }
        self.session = Some(session);
        Ok(granted)
    }

    /// Gives the lock up. What is mapped stays mapped.
    pub fn abort(&mut self) {
        self.session = None;
    }

    /// The session, for requests that this has no method for.
    ///
    /// # Errors
    /// [`ClientError::NotConnected`].
    pub fn session(&mut self) -> Result<&mut Session> {
        self.session.as_mut().ok_or(ClientError::NotConnected)
    }

    fn writer(&mut self) -> Result<&mut Session> {
        let session = self.session()?;
        match session.granted() {
            Granted::Rw => Ok(session),
            has => Err(ClientError::WrongLock { needed: "RW", has }),
        }
    }

    fn may_write(&self) -> bool {
        self.granted_lock().is_some_and(|granted| granted != Granted::Ro)
    }

    // Allocations at the server.

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
    /// [`ClientError::WrongLock`], [`ClientError::Cuda`]; what is published or not is known by the
    /// next [`connect`](Self::connect).
    pub fn commit(&mut self) -> Result<()> {
        match self.session()?.granted() {
            Granted::Ro => Err(ClientError::WrongLock { needed: "RW", has: Granted::Ro }),
            Granted::Rw | Granted::RwData => {
                self.unmap_all()?;
                self.session.take().ok_or(ClientError::NotConnected)?.commit()
            }
        }
    }

    /// Seals the layout: its allocations outlive this process, and the next who asks for
    /// [`Requested::RwDataOrRw`] gets them. Session and mappings stay. The hash comes back.
    ///
    /// # Errors
    /// [`ClientError::WrongLock`].
    pub fn commit_layout(&mut self) -> Result<String> {
        let hash = self.writer()?.commit_layout()?;
        self.hash.clone_from(&hash);
        Ok(hash)
    }

    // Addresses.

    fn aligned(&self, bytes: u64) -> Result<u64> {
        let aligned = self.context.cuda().aligned(bytes).filter(|bytes| *bytes > 0);
        aligned.ok_or(ClientError::Size { bytes })
    }

    /// Reserves addresses for so many bytes, in whole granules.
    ///
    /// # Errors
    /// [`ClientError::Size`], [`ClientError::Cuda`].
    pub fn reserve(&mut self, bytes: u64) -> Result<u64> {
        let bytes = self.aligned(bytes)?;
        let reservation = Arc::new(Reservation::new(self.context.cuda(), bytes)?);
        let address = reservation.address();
        let place = Place { mapping: None, reservation, bytes, allocation: None };
        self.places.insert(address, place);
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
    fn import(&self, address: u64, file: &OwnedFd, bytes: u64) -> Result<Mapping> {
        let place = self.places.get(address)?;
        if place.mapping.is_some() {
            return Err(ClientError::MappingState { address, state: "mapped already" });
        }
        if place.bytes != bytes {
            return Err(ClientError::MappingState { address, state: "of another size" });
        }
        let handle = PhysicalHandle::import(self.context.cuda(), file, bytes)?;
        Ok(Mapping::new(handle, address)?)
    }

    /// Takes the memory at an address away and keeps the address. Waits for the device first.
    ///
    /// # Errors
    /// [`ClientError::UnknownAddress`], [`ClientError::Cuda`].
    pub fn unmap(&mut self, address: u64) -> Result<()> {
        if self.places.get(address)?.mapping.is_some() {
            self.context.synchronize()?;
            self.places.get_mut(address)?.mapping = None;
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

    // Metadata.

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

    // Everything together.

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

    fn place(&mut self, allocation: AllocationInfo, file: OwnedFd) -> Result<u64> {
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
    /// As [`create_mapping`](Self::create_mapping), except that allocations made stay at the server.
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
        let mut new = all.clone();
        new.retain(|allocation| self.places.address_of(&allocation.allocation_id).is_none());
        self.place_many(new)?;
        let placed = all.into_iter().map(|allocation| {
            let address = self.import_mapping(&allocation.allocation_id)?;
            Ok((allocation, address))
        });
        placed.collect()
    }

    /// Maps allocations side by side, with one call for their access.
    fn place_many(&mut self, allocations: Vec<AllocationInfo>) -> Result<Vec<u64>> {
        let total = allocations.iter().try_fold(0_u64, |total, allocation| {
            total.checked_add(allocation.aligned_size).ok_or(ClientError::Size { bytes: u64::MAX })
        })?;
        if total == 0 {
            return Ok(Vec::new());
        }
        let reservation = Arc::new(Reservation::new(self.context.cuda(), total)?);
        let mut addresses = Vec::with_capacity(allocations.len());
        let mut address = reservation.address();
        for allocation in allocations {
            let bytes = allocation.aligned_size;
            addresses.push(address);
            let reservation = Arc::clone(&reservation);
            let allocation = Some(allocation);
            let place = Place { mapping: None, reservation, bytes, allocation };
            self.places.insert(address, place);
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
    fn map_at(&mut self, addresses: &[u64]) -> Result<()> {
        let mut ids = Vec::with_capacity(addresses.len());
        for address in addresses {
            let allocation = self.places.get(*address)?.allocation.as_ref();
            let state = ClientError::MappingState { address: *address, state: "only reserved" };
            ids.push(allocation.ok_or(state)?.allocation_id.clone());
        }
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

    /// Takes a mapping away with its address, and, as a writer, with its allocation. Waits for the
    /// device first.
    ///
    /// # Errors
    /// [`ClientError::UnknownAddress`], [`ClientError::Cuda`], [`ClientError::Refused`] where the
    /// server does not know the allocation; the mapping is as before then.
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
    /// [`ClientError::Cuda`].
    pub fn unmap_all(&mut self) -> Result<()> {
        self.context.synchronize()?;
        for (_, place) in self.places.iter_mut() {
            place.mapping = None;
        }
        self.unmapped = true;
        Ok(())
    }

    /// Brings the memory back at the same addresses: as a reader that of the published layout, if it
    /// is the one whose addresses were kept.
    ///
    /// Allocations are told by the order of their slots, so that a layout that was written anew in
    /// the same shape fits, too.
    ///
    /// # Errors
    /// [`ClientError::StaleLayout`], [`ClientError::Refused`], [`ClientError::Cuda`]; nothing is
    /// mapped then.
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
        let addresses: Vec<u64> = kept.iter().map(|(address, _)| *address).collect();
        for (address, now) in addresses.iter().zip(there) {
            self.places.bind(*address, now)?;
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
        let sizes: Vec<u64> = kept.iter().map(|(_, allocation)| allocation.aligned_size).collect();
        let made = self.writer()?.allocate_many(&sizes, tag)?;
        for ((address, _), allocation) in kept.into_iter().zip(made) {
            self.places.bind(address, allocation)?;
        }
        self.unmapped = true;
        Ok(())
    }

    /// Gives everything up: memory, addresses, the lock. Waits for the device first.
    ///
    /// # Errors
    /// [`ClientError::Cuda`] where waiting fails; everything is given up all the same.
    pub fn close(mut self) -> Result<()> {
        let waited = self.context.synchronize();
        self.places.clear();
        Ok(waited?)
    }

    /// The device's number.
    pub fn ordinal(&self) -> u32 {
        self.context.cuda().ordinal()
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

    /// Gives memory and addresses up, whatever the device says.
    pub(crate) fn forget_all(&mut self) {
        if let Err(error) = self.context.synchronize() {
            tracing::warn!(%error, "the device cannot be waited for");
        }
        self.places.clear();
        self.unmapped = false;
    }

    /// The context, for copies.
    pub(crate) fn context(&self) -> &Context {
        &self.context
    }
}

impl Drop for MemoryManager {
    fn drop(&mut self) {
        if !self.places.is_empty()
            && let Err(error) = self.context.synchronize()
        {
            tracing::warn!(%error, "the device cannot be waited for");
        }
    }
}

/// The lock that a process asks for that writes a layout where there is none and reads it where there
/// is one.
impl Default for ConnectOptions {
    fn default() -> Self {
        Self::new(Requested::RwOrRo)
    }
}
