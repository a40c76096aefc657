//! What a pool's memory is made of: where it is, how it can be shared, who may reach it.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use cuda_sys::types::*;
use smallvec::SmallVec;

use crate::budget::Budget;
use crate::capture::BesideCaptures;
use crate::device::Device;
use crate::driver::Failure;
use crate::error::{Error, Result};
use crate::location::{Access, Location, Sharing};
use crate::mapping::{self, NewMappings};
use crate::physical::{self, Extent};

/// What a failure is called that is none of the driver's: all heaps together would pass the pool's limit.
pub(crate) const LIMIT: &str = "limit_bytes";

/// The kind of memory that a pool holds. Every handle is made and every mapping opened through
/// this, so that all of a pool's memory is alike.
pub(crate) struct Backing {
    device: Device,
    location: Location,
    sharing: Sharing,
    granule_bytes: u64,
    /// Devices beside the pool's that may reach the memory.
    peers: Mutex<Vec<Peer>>,
    /// Whether the memory is made for GPUDirect RDMA.
    rdma: bool,
    /// Numbers of devices whose access the driver would neither change everywhere nor set back: some of the
    /// memory has another than the books say.
    torn: Mutex<Vec<u32>>,
    /// What all heaps of the pool hold together, and the part of it made here.
    budget: Arc<Budget>,
    held: AtomicU64,
}

#[derive(Clone)]
struct Peer {
    /// Its primary context stays retained while it has access.
    device: Device,
    access: Access,
}

/// A device as one that is to have access.
fn descriptor(device: &Device, access: Access) -> CUmemAccessDesc {
    CUmemAccessDesc { location: device.location(), flags: access.flags() }
}

/// Waits for what runs in the primary context that has come after a device's own, where it was reset: there what was
/// mapped before is mapped still. As any wait for a context it ends captures.
pub(crate) fn wait_for_next_context(device: &Device) -> Result<()> {
    let Some(_context) = device.enter_next()? else { return Ok(()) };
    let driver = device.driver();
    let _beside = BesideCaptures::enter(driver)?;
    // SAFETY: no arguments.
    Ok(unsafe { driver.cuCtxSynchronize() }?)
}

impl Backing {
    /// Makes sure that the device has such memory. Where it is a matter of more than the device (the
    /// host's nodes, rights in a container, the fabric), a granule is made and given back.
    pub(crate) fn new(
        device: &Device,
        location: Location,
        sharing: Sharing,
        gpu_direct_rdma: bool,
    ) -> Result<Self> {
        use CUdevice_attribute as A;
        let ordinal = device.ordinal();
        let has = |attribute| device.attribute(attribute).map(|value| value != 0);
        if !device.supports_vmm()? {
            return Err(Error::VmmUnsupported { ordinal });
        }
        let location_is_there = match location {
            Location::Device => true,
            Location::Host => has(A::CU_DEVICE_ATTRIBUTE_HOST_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED)?,
            Location::HostNuma(_) => {
                has(A::CU_DEVICE_ATTRIBUTE_HOST_NUMA_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED)?
            }
        };
        if !location_is_there {
            return Err(Error::LocationUnsupported { ordinal, location });
        }
        if location == Location::Host && sharing != Sharing::None {
            return Err(Error::Config {
                name: "sharing",
                value: format!("{sharing:?}"),
                reason: "Location::Host cannot be shared; a node of the host can".to_owned(),
            });
        }
        if gpu_direct_rdma {
            let refused = |reason| Error::Config {
                name: "gpu_direct_rdma",
                value: "true".to_owned(),
                reason,
            };
            if location != Location::Device {
                return Err(refused(format!("it is of memory on the device, not of {location}")));
            }
            if !device.can_map_for_rdma() {
                return Err(refused(format!("device {ordinal} has none for mapped memory")));
            }
        }
        let can_be_shared = match sharing {
            Sharing::None => true,
            Sharing::FileDescriptor => {
                has(A::CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR_SUPPORTED)?
            }
            Sharing::Fabric => has(A::CU_DEVICE_ATTRIBUTE_HANDLE_TYPE_FABRIC_SUPPORTED)?,
        };
        if !can_be_shared {
            return Err(Error::SharingUnsupported { ordinal, sharing });
        }
        let mut backing = Self {
            device: device.clone(),
            location,
            sharing,
            granule_bytes: 0,
            rdma: gpu_direct_rdma,
            peers: Mutex::default(),
            torn: Mutex::default(),
            budget: Arc::new(Budget::new()),
            held: AtomicU64::new(0),
        };
        backing.granule_bytes = match device.granularity_of(&backing.properties()) {
            Ok(bytes) => bytes,
            Err(failure) => return Err(backing.not_there(failure)),
        };
        if location != Location::Device || sharing == Sharing::Fabric {
            backing.try_a_granule()?;
        }
        Ok(backing)
    }

    /// Memory of the same kind for another heap of the pool, open to the same devices, under the
    /// same limit.
    pub(crate) fn of_another_heap(&self) -> Self {
        Self {
            device: self.device.clone(),
            location: self.location,
            sharing: self.sharing,
            granule_bytes: self.granule_bytes,
            rdma: self.rdma,
            peers: Mutex::new(self.peers().clone()),
            torn: Mutex::default(),
            budget: Arc::clone(&self.budget),
            held: AtomicU64::new(0),
        }
    }

    pub(crate) fn budget(&self) -> &Budget {
        &self.budget
    }

    /// What a heap is to keep so that all heaps of the pool together hold no more than this, as far as that is up
    /// to it.
    pub(crate) fn share_of(&self, keep_bytes: u64) -> u64 {
        let others = self.budget.held().saturating_sub(self.held.load(Ordering::Relaxed));
        keep_bytes.saturating_sub(others)
    }

    fn try_a_granule(&self) -> Result<()> {
        let extent = self.create(self.granule_bytes).map_err(|failure| self.not_there(failure))?;
        let mut orphans = Vec::new();
        // SAFETY: made just now, mapped nowhere, known to nobody.
        unsafe { physical::release_all(self.device.driver(), [extent], &mut orphans) };
        self.gave_up(self.granule_bytes);
        if orphans.is_empty() {
            return Ok(());
        }
        // Once more, as a pool tries again with handles that the driver would not take back.
        let mut lost = Vec::new();
        // SAFETY: as above; the first attempt did not take it.
        unsafe { physical::release_all(self.device.driver(), orphans, &mut lost) };
        Ok(())
    }

    /// What the driver's refusal of this kind of memory means.
    fn not_there(&self, failure: Failure) -> Error {
        let refused = matches!(
            failure.code,
            CUresult::CUDA_ERROR_NOT_SUPPORTED
                | CUresult::CUDA_ERROR_NOT_PERMITTED
                | CUresult::CUDA_ERROR_INVALID_VALUE
                | CUresult::CUDA_ERROR_INVALID_DEVICE
        );
        let (ordinal, location, sharing) = (self.device.ordinal(), self.location, self.sharing);
        match (refused, location, sharing) {
            (true, Location::Device, Sharing::Fabric) => {
                Error::SharingUnsupported { ordinal, sharing }
            }
            (true, Location::Host | Location::HostNuma(_), _) => {
                Error::LocationUnsupported { ordinal, location }
            }
            _ => failure.about(self.granule_bytes),
        }
    }

    pub(crate) fn location(&self) -> Location {
        self.location
    }

    pub(crate) fn sharing(&self) -> Sharing {
        self.sharing
    }

    /// The least bytes of a handle.
    pub(crate) fn granule_bytes(&self) -> u64 {
        self.granule_bytes
    }

    /// Where the memory is, as the driver says it.
    pub(crate) fn cuda_location(&self) -> CUmemLocation {
        match self.location {
            Location::Device => self.device.location(),
            Location::Host => {
                CUmemLocation { type_: CUmemLocationType::CU_MEM_LOCATION_TYPE_HOST, id: 0 }
            }
            Location::HostNuma(node) => CUmemLocation {
                type_: CUmemLocationType::CU_MEM_LOCATION_TYPE_HOST_NUMA,
                // A node past the range of int cannot exist; -1 lets the driver say so.
                id: i32::try_from(node).unwrap_or(-1),
            },
        }
    }

    fn properties(&self) -> CUmemAllocationProp {
        let mut properties = CUmemAllocationProp {
            type_: CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED,
            requestedHandleTypes: self.sharing.handle_type(),
            location: self.cuda_location(),
            ..Default::default()
        };
        properties.allocFlags.gpuDirectRDMACapable = u8::from(self.rdma);
        properties
    }

    /// Makes an extent. Past the limit of all heaps together it answers as a device without memory.
    pub(crate) fn create(&self, bytes: u64) -> Result<Extent, Failure> {
        if !self.budget.take(bytes) {
            let code = CUresult::CUDA_ERROR_OUT_OF_MEMORY;
            return Err(Failure { call: LIMIT, code });
        }
        let made = physical::create(self.device.driver(), bytes, &self.properties());
        match made {
            Ok(_) => _ = self.held.fetch_add(bytes, Ordering::Relaxed),
            Err(_) => self.budget.give_back(bytes),
        }
        made
    }

    /// Counts memory that a pool of the driver's own is about to be asked for; `false` where the limit does not allow
    /// it.
    pub(crate) fn count(&self, bytes: u64) -> bool {
        let counted = self.budget.take(bytes);
        if counted {
            self.held.fetch_add(bytes, Ordering::Relaxed);
        }
        counted
    }

    /// Notes that extents made here, or memory counted here, were given up, or will be and count no more.
    pub(crate) fn gave_up(&self, bytes: u64) {
        self.held.fetch_sub(bytes, Ordering::Relaxed);
        self.budget.give_back(bytes);
    }

    /// Opens new mappings to everybody who may reach the pool's memory, in one call.
    pub(crate) fn open(&self, mappings: &NewMappings<'_>) -> Result<(), Failure> {
        mappings.open_to(&self.everybody())
    }

    /// Who may reach the memory: the pool's device, the host where the memory is there, the peers.
    pub(crate) fn everybody(&self) -> SmallVec<[CUmemAccessDesc; 4]> {
        let mut all = SmallVec::new();
        all.push(descriptor(&self.device, Access::ReadWrite));
        if self.location != Location::Device {
            let (location, flags) = (self.cuda_location(), Access::ReadWrite.flags());
            all.push(CUmemAccessDesc { location, flags });
        }
        all.extend(self.peers().iter().map(|peer| descriptor(&peer.device, peer.access)));
        all
    }

    fn peers(&self) -> MutexGuard<'_, Vec<Peer>> {
        self.peers.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What a device may do with the memory.
    pub(crate) fn access_of(&self, device: &Device) -> Access {
        if device.ordinal() == self.device.ordinal() {
            return Access::ReadWrite;
        }
        let peers = self.peers();
        let found = peers.iter().find(|peer| peer.device.ordinal() == device.ordinal());
        found.map_or(Access::None, |peer| peer.access)
    }

    /// Whether nothing uses the memory, though a wait for what does has failed with this: nothing runs any more in the
    /// pool's context, which has failed or was reset, and nobody else may reach the memory. The work of another device
    /// was ordered before frees in that context, and goes on.
    ///
    /// Handles and mappings are no context's: the driver goes on with them then. So may callers with what is
    /// `allocated`, in the context that comes after a reset: that is waited for.
    pub(crate) fn is_at_rest_after(&self, error: &Error, allocated: bool) -> bool {
        let is_over = |waited: Result<()>| waited.map_or_else(|of| of.is_context_dead(), |()| true);
        error.is_context_dead()
            && self.peers().is_empty()
            && self.torn().is_empty()
            && (!allocated || is_over(wait_for_next_context(&self.device)))
    }

    fn torn(&self) -> MutexGuard<'_, Vec<u32>> {
        self.torn.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Notes that some of the memory is open to a device otherwise than the books say.
    pub(crate) fn tear(&self, device: &Device) {
        let mut torn = self.torn();
        if !torn.contains(&device.ordinal()) {
            torn.push(device.ordinal());
        }
    }

    /// Checks whether a device may be given this access; `false` where it has it already, everywhere.
    pub(crate) fn may_set(&self, device: &Device, access: Access) -> Result<bool> {
        let (peer, owner) = (device.ordinal(), self.device.ordinal());
        if peer == owner {
            return match access {
                Access::ReadWrite => Ok(false),
                Access::None | Access::Read => Err(Error::OwnerAccess { device: owner }),
            };
        }
        // Memory of the host is within every device's reach.
        let far = self.location == Location::Device && access != Access::None;
        if far && !device.can_access(&self.device)? {
            return Err(Error::PeerUnsupported { device: owner, peer });
        }
        Ok(self.access_of(device) != access || self.torn().contains(&peer))
    }

    /// Sets a device's access to mappings, and to every one made from now on. On failure it has the
    /// access that it had.
    ///
    /// # Safety
    /// The runs are of whole mappings of the pool, all of those that it has; none is made or undone
    /// meanwhile.
    pub(crate) unsafe fn set_access(
        &self,
        device: &Device,
        access: Access,
        runs: &[(u64, u64)],
    ) -> Result<()> {
        let driver = self.device.driver();
        let before = self.access_of(device);
        let set = |access: Access, (start, bytes): (u64, u64)| {
            // SAFETY: whole mappings, by the caller's word; the list has one entry.
            unsafe { mapping::set_access(driver, start, bytes, &[descriptor(device, access)]) }
        };
        for (index, run) in runs.iter().enumerate() {
            if let Err(failure) = set(access, *run) {
                // The one that failed, too: some of it may have been changed. If the driver refuses
                // this as well there is nothing left to try; the next call sets every run anew.
                let refused = runs[..=index].iter().filter(|run| set(before, **run).is_err());
                if refused.count() > 0 {
                    self.tear(device);
                }
                return Err(failure.about(run.1));
            }
        }
        self.torn().retain(|torn| *torn != device.ordinal());
        let mut peers = self.peers();
        peers.retain(|peer| peer.device.ordinal() != device.ordinal());
        if access != Access::None {
            peers.push(Peer { device: device.clone(), access });
        }
        Ok(())
    }
}

impl Drop for Backing {
    /// What is left goes with the heap.
    fn drop(&mut self) {
        self.budget.give_back(*self.held.get_mut());
    }
}
