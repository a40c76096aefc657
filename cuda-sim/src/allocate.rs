//! cuMemAlloc, page-locked host memory, and questions about pointers.

use std::ops::Range;
use std::sync::Arc;

use cuda_sys::types::{CUcontext, CUmemorytype, CUpointer_attribute, CUresult};

use crate::address::{BASE, HOST, Owner};
use crate::arguments::{In, Out, Untyped};
use crate::call::Call;
use crate::context::ContextKey;
use crate::heap::{Heap, Wish};
use crate::managed;
use crate::memory::HostKind;
use crate::physical::Seat;
use crate::pool::PoolKey;
use crate::race::{Access, AccessKind, PhysicalId, StreamKey};

const INVALID: CUresult = CUresult::CUDA_ERROR_INVALID_VALUE;

/// What a device address belongs to.
#[derive(Clone, Copy, Debug)]
struct Region {
    start: u64,
    size: u64,
    seat: Seat,
    pool: Option<PoolKey>,
}

impl Region {
    fn is_of_host(self) -> bool {
        self.seat.owner() == HOST
    }
}

impl Call<'_> {
    /// The live allocation or the mapping that holds a device address.
    fn region(&self, address: u64) -> Option<Region> {
        let (start, mapping) = self.space.addresses.mapping(address)?;
        let seat = self.space.physical.get(mapping.physical)?.seat;
        if mapping.handle != 0 {
            return Some(Region { start, size: mapping.size, seat, pool: None });
        }
        let heap = self.heaps.get(seat.owner());
        if let Some((start, size)) = heap.and_then(|heap| heap.find(address)) {
            return Some(Region { start, size, seat, pool: None });
        }
        let (key, (start, size)) = self.pools.find(start, address)?;
        Some(Region { start, size, seat, pool: Some(key) })
    }

    /// Whether network cards may reach the memory at an address: the driver's own, and what was made for it.
    fn is_within_reach_of_cards(&self, address: u64) -> bool {
        let Some((_, mapping)) = self.space.addresses.mapping(address) else { return false };
        if mapping.handle != 0 {
            return self.memory_handles.is_within_reach_of_cards(mapping.handle);
        }
        let extent = self.space.physical.get(mapping.physical);
        let is_of_device = extent.is_some_and(|extent| matches!(extent.seat, Seat::Device(_)));
        is_of_device && self.gpu_direct_rdma
    }

    /// The physical bytes at an address, which lie in one mapping.
    pub(crate) fn bytes_at(&self, address: u64, bytes: u64) -> Option<(PhysicalId, Range<u64>)> {
        let (start, mapping) = self.space.addresses.mapping(address)?;
        Some((mapping.physical, address - start..address - start + bytes))
    }

    /// The physical bytes of the cuMemAlloc memory that begins at an address.
    pub(crate) fn bytes_of_allocation(&self, address: u64) -> Option<(PhysicalId, Range<u64>)> {
        let (_, bytes) = self.heaps[self.allocation_at(address)?].find(address)?;
        self.bytes_at(address, bytes)
    }

    /// The host frees memory of cuMemAlloc: no use may come after.
    fn count_as_given_back(&mut self, address: u64) {
        let Some((physical, range)) = self.bytes_of_allocation(address) else { return };
        let (kind, what) = (AccessKind::Write, self.name);
        let state = &mut *self.state;
        let Some(detector) = &mut state.space.detector else { return };
        let (stream, clock) = (StreamKey::HOST, &state.host);
        let races = detector.give_back(Access { physical, range, kind, stream, clock, what });
        state.findings.races(races);
    }

    /// Waits as the free of page-locked or managed memory does, or its end as such: for the device that it was made
    /// on, whichever context is current. Nothing waits for what other devices do with it.
    pub(crate) fn wait_for_users_of(&mut self, address: u64) -> Result<(), CUresult> {
        let Some((_, host)) = self.space.host.find(address) else { return Err(INVALID) };
        let (context, physical, range) = (host.context, host.id, 0..host.size);
        if let Some(entry) = self.contexts.by_key.get(&context) {
            self.wait_device(entry.device)?;
        }
        let (kind, what) = (AccessKind::Write, self.name);
        let state = &mut *self.state;
        let Some(detector) = &mut state.space.detector else { return Ok(()) };
        let (stream, clock) = (StreamKey::HOST, &state.host);
        let races = detector.give_back(Access { physical, range, kind, stream, clock, what });
        state.findings.races(races);
        Ok(())
    }

    /// Frees memory of cuMemAlloc; `None` if none begins there.
    fn free_allocation(&mut self, address: u64) -> Option<u64> {
        let state = &mut *self.state;
        for heap in &mut state.heaps {
            if let Some(bytes) = heap.free(address, None) {
                heap.trim(&mut state.space, 0);
                for context in state.contexts.by_key.values_mut() {
                    context.allocations.remove(&address);
                }
                return Some(bytes);
            }
        }
        None
    }

    /// The turn of a cuMemFreeAsync of cuMemAlloc memory has come.
    pub(crate) fn free_in_order(&mut self, address: u64) {
        if self.free_allocation(address).is_none() {
            self.findings.misuse(format!("cuMemFreeAsync: nothing is allocated at {address:#x}"));
        }
    }

    /// The device whose cuMemAlloc memory begins at an address.
    pub(crate) fn allocation_at(&self, address: u64) -> Option<usize> {
        let holds = |heap: &Heap| heap.find(address).is_some_and(|(start, _)| start == address);
        self.heaps.iter().position(holds)
    }

    /// The memory that was given out in a context which ends, and that of the host which was locked.
    pub(crate) fn end_memory_of(&mut self, context: ContextKey) {
        let entry = self.contexts.by_key.get_mut(&context);
        let allocations = entry.map(|entry| std::mem::take(&mut entry.allocations));
        for address in allocations.into_iter().flatten() {
            self.count_as_given_back(address);
            self.free_allocation(address);
        }
        for id in self.space.host.end_context(context) {
            self.space.forget(id);
        }
    }

    /// Lets a device use what another one's cuMemAlloc gave out, or no longer.
    pub(crate) fn open_to_peer(&mut self, owner: usize, user: usize, open: bool) {
        let state = &mut *self.state;
        let heap = &mut state.heaps[owner];
        let rights = heap.rights.with(user, if open { 3 } else { 0 });
        if rights != heap.rights {
            heap.set_rights(&mut state.space, rights);
        }
    }
}

pub(crate) fn allocate(call: &mut Call<'_>, out: Out<u64>, bytes: usize) -> Result<(), CUresult> {
    let context = call.current()?;
    let device = call.contexts.by_key[&context].device;
    call.forbid_in_capture()?;
    out.required()?;
    let bytes = bytes as u64;
    if bytes == 0 {
        return Err(INVALID);
    }
    let state = &mut *call.state;
    let heap = &mut state.heaps[device];
    let wish = Wish { bytes, stream: None, knows: None, common: true };
    let taken = match heap.take(wish) {
        Some(taken) => taken,
        None => {
            heap.grow(&mut state.space, bytes)?;
            heap.take(wish).ok_or(CUresult::CUDA_ERROR_OUT_OF_MEMORY)?
        }
    };
    if let Some(context) = call.contexts.by_key.get_mut(&context) {
        context.allocations.insert(taken.address);
    }
    // Whatever freed it, it is every stream's now.
    if let Some((physical, range)) = call.bytes_at(taken.address, bytes)
        && let Some(detector) = &mut call.space.detector
    {
        detector.forget_range(physical, &range);
    }
    call.cost = Some(call.costs.malloc(bytes));
    out.set(taken.address)
}

pub(crate) fn free(call: &mut Call<'_>, address: u64) -> Result<(), CUresult> {
    if address == 0 {
        return Ok(());
    }
    let context = call.current()?;
    call.forbid_in_capture()?;
    if let Some(device) = call.allocation_at(address) {
        call.wait_device(device)?;
        call.count_as_given_back(address);
        let bytes = call.free_allocation(address).ok_or(INVALID)?;
        call.cost = Some(call.costs.free_memory(bytes));
        return call.healthy(context);
    }
    if managed::is_start(call, address) {
        return managed::free(call, address, context);
    }
    // Memory of a pool goes at once. Nothing is waited for: whoever calls this has seen to that.
    let stream = call.contexts.by_key[&context].frees;
    call.free_to_pool(address, stream)?;
    while call.advance(stream) {}
    Ok(())
}

pub(crate) fn info(
    call: &mut Call<'_>,
    free: Out<usize>,
    total: Out<usize>,
) -> Result<(), CUresult> {
    let device = call.current_device()?;
    let physical = &call.space.physical;
    let (limit, used) = (physical.limit(device), physical.used(device));
    free.set(limit.saturating_sub(used) as usize)?;
    total.set(limit as usize)
}

pub(crate) fn address_range(
    call: &mut Call<'_>,
    start: Out<u64>,
    size: Out<usize>,
    address: u64,
) -> Result<(), CUresult> {
    call.current()?;
    let region = match call.region(address) {
        Some(region) => (region.start, region.size),
        None => {
            let found = call.space.host.find(address);
            let (start, allocation) = found.ok_or(CUresult::CUDA_ERROR_NOT_FOUND)?;
            (start, allocation.size)
        }
    };
    start.set_optional(region.0);
    size.set_optional(region.1 as usize);
    Ok(())
}

pub(crate) fn host_allocate(
    call: &mut Call<'_>,
    out: Out<*mut std::ffi::c_void>,
    bytes: usize,
) -> Result<(), CUresult> {
    host_allocate_with_flags(call, out, bytes, 0)
}

pub(crate) fn host_allocate_with_flags(
    call: &mut Call<'_>,
    out: Out<*mut std::ffi::c_void>,
    bytes: usize,
    flags: u32,
) -> Result<(), CUresult> {
    let context = call.current()?;
    call.forbid_in_capture()?;
    out.required()?;
    if bytes == 0 || flags > 7 {
        return Err(INVALID);
    }
    let id = call.space.physical.foreign_id();
    let start = call.space.host.allocate(bytes as u64, flags, id, HostKind::Locked, context)?;
    out.set(start as *mut _)
}

pub(crate) fn host_free(call: &mut Call<'_>, address: Untyped) -> Result<(), CUresult> {
    call.current()?;
    call.forbid_in_capture()?;
    let locked = call.space.host.find(address.0).filter(|(_, host)| !host.is_managed());
    if locked.is_none_or(|(start, _)| start != address.0) {
        return Err(INVALID);
    }
    call.wait_for_users_of(address.0)?;
    let id = call.space.host.remove(address.0, HostKind::Locked).ok_or(INVALID)?;
    call.space.forget(id);
    Ok(())
}

pub(crate) fn host_register(
    call: &mut Call<'_>,
    address: Untyped,
    bytes: usize,
    flags: u32,
) -> Result<(), CUresult> {
    let context = call.current()?;
    call.forbid_in_capture()?;
    let end = address.0.checked_add(bytes as u64).ok_or(INVALID)?;
    if address.0 == 0 || bytes == 0 || flags > 15 {
        return Err(INVALID);
    }
    // Memory that the driver gave out is locked already, or none of the host's.
    let given_out = call.space.host.find(address.0).is_some_and(|(_, host)| !host.is_registered());
    if given_out || call.region(address.0).is_some() {
        return Err(INVALID);
    }
    if end > BASE {
        call.misuse(&format!("{:#x} to {end:#x} are no addresses of the host", address.0));
        return Err(INVALID);
    }
    let id = call.space.physical.foreign_id();
    if call.space.host.register(address.0, bytes as u64, flags, id, context) {
        Ok(())
    } else {
        Err(CUresult::CUDA_ERROR_HOST_MEMORY_ALREADY_REGISTERED)
    }
}

pub(crate) fn host_unregister(call: &mut Call<'_>, address: Untyped) -> Result<(), CUresult> {
    call.current()?;
    call.forbid_in_capture()?;
    let missing = CUresult::CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED;
    let given_out = call.space.host.find(address.0).is_some_and(|(_, host)| !host.is_registered());
    if given_out || call.region(address.0).is_some() {
        return Err(INVALID);
    }
    if !call.space.host.begins(address.0, HostKind::Registered) {
        return Err(missing);
    }
    call.wait_for_users_of(address.0)?;
    let id = call.space.host.remove(address.0, HostKind::Registered).ok_or(missing)?;
    call.space.forget(id);
    Ok(())
}

pub(crate) fn host_device_pointer(
    call: &mut Call<'_>,
    out: Out<u64>,
    address: Untyped,
    flags: u32,
) -> Result<(), CUresult> {
    call.current()?;
    // Managed memory has one address everywhere, and no other to ask for.
    let locked = call.space.host.find(address.0).filter(|(_, host)| !host.is_managed());
    if flags != 0 || locked.is_none() {
        return Err(INVALID);
    }
    out.set(address.0)
}

pub(crate) fn host_flags(
    call: &mut Call<'_>,
    out: Out<u32>,
    address: Untyped,
) -> Result<(), CUresult> {
    call.current()?;
    let (_, allocation) = call.space.host.find(address.0).ok_or(INVALID)?;
    out.set(allocation.flags)
}

pub(crate) fn pointer_attribute(
    call: &mut Call<'_>,
    out: Untyped,
    attribute: CUpointer_attribute,
    address: u64,
) -> Result<(), CUresult> {
    let known = call.answer_attribute(out, attribute, address)?;
    if known { Ok(()) } else { Err(INVALID) }
}

/// Unlike the single question, this answers zeros for a pointer that is not the driver's.
pub(crate) fn pointer_attributes(
    call: &mut Call<'_>,
    count: u32,
    attributes: In<CUpointer_attribute>,
    out: In<*mut std::ffi::c_void>,
    address: u64,
) -> Result<(), CUresult> {
    use CUpointer_attribute as A;
    for index in 0..count as usize {
        let (attribute, out) = (attributes.at(index)?, Untyped(out.at(index)? as u64));
        if call.answer_attribute(out, attribute, address)? {
            continue;
        }
        match attribute {
            A::CU_POINTER_ATTRIBUTE_MEMORY_TYPE
            | A::CU_POINTER_ATTRIBUTE_MAPPED
            | A::CU_POINTER_ATTRIBUTE_IS_MANAGED => out.set(0_u32)?,
            A::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL => out.set(-2_i32)?,
            _ => out.set(0_u64)?,
        }
    }
    Ok(())
}

impl Call<'_> {
    /// The handle of a device's context for a pointer's attribute; null for VMM memory.
    fn context_handle(&self, region: Region) -> usize {
        let primary = self.contexts.primaries.get(region.seat.owner()).and_then(|p| p.context);
        let key: Option<&ContextKey> = primary.as_ref();
        key.and_then(|key| self.contexts.by_key.get(key)).map_or(0, |context| context.handle)
    }

    /// Answers one attribute; false if the pointer is none that the driver knows.
    fn answer_attribute(
        &mut self,
        out: Untyped,
        attribute: CUpointer_attribute,
        address: u64,
    ) -> Result<bool, CUresult> {
        use CUpointer_attribute as A;
        let found = self.space.host.find(address);
        let is_managed = found.is_some_and(|(_, host)| host.is_managed());
        let host = found.map(|(start, host)| (start, host.size));
        let reserved = self.space.addresses.reservation(address, 1);
        let region = self.region(address);
        // Reserved space without a mapping is no pointer yet.
        if host.is_none() && region.is_none() {
            return Ok(false);
        }
        let whole = match (host, region, reserved) {
            (Some(range), _, _) => range,
            // A mapping answers with the reservation around it, an allocation with itself.
            (_, Some(region), Some((_, _, Owner::Driver))) => (region.start, region.size),
            (_, _, Some((start, size, _))) => (start, size),
            (None, _, None) => return Ok(false),
        };
        match attribute {
            A::CU_POINTER_ATTRIBUTE_MAPPED => out.set(1_u32)?,
            A::CU_POINTER_ATTRIBUTE_RANGE_START_ADDR => out.set(whole.0)?,
            A::CU_POINTER_ATTRIBUTE_RANGE_SIZE => out.set(whole.1 as usize)?,
            A::CU_POINTER_ATTRIBUTE_CONTEXT => {
                let handle = region.map_or(0, |region| self.context_handle(region));
                out.set(handle as CUcontext)?;
            }
            A::CU_POINTER_ATTRIBUTE_MEMORY_TYPE => {
                let is_locked = host.is_some() && !is_managed;
                out.set(if is_locked || region.is_some_and(Region::is_of_host) {
                    CUmemorytype::CU_MEMORYTYPE_HOST
                } else {
                    CUmemorytype::CU_MEMORYTYPE_DEVICE
                })?
            }
            A::CU_POINTER_ATTRIBUTE_DEVICE_POINTER => out.set(address)?,
            A::CU_POINTER_ATTRIBUTE_HOST_POINTER if host.is_some() => out.set(address)?,
            A::CU_POINTER_ATTRIBUTE_IS_MANAGED => out.set(u32::from(is_managed))?,
            A::CU_POINTER_ATTRIBUTE_IS_LEGACY_CUDA_IPC_CAPABLE => out.set(0_u32)?,
            A::CU_POINTER_ATTRIBUTE_IS_GPU_DIRECT_RDMA_CAPABLE => {
                out.set(u32::from(self.is_within_reach_of_cards(address)))?;
            }
            A::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL => {
                let device = region.map_or(0, |region| match region.seat {
                    Seat::Device(index) => index as i32,
                    Seat::Host | Seat::HostNuma(_) => 0,
                });
                out.set(device)?;
            }
            A::CU_POINTER_ATTRIBUTE_MAPPING_BASE_ADDR => {
                let base = self.space.addresses.mapping(address).map(|(start, _)| start);
                out.set(base.or(host.map(|host| host.0)).unwrap_or(0))?;
            }
            A::CU_POINTER_ATTRIBUTE_MAPPING_SIZE => {
                let size = self.space.addresses.mapping(address).map(|(_, m)| m.size);
                out.set(size.or(host.map(|host| host.1)).unwrap_or(0) as usize)?;
            }
            A::CU_POINTER_ATTRIBUTE_MEMPOOL_HANDLE => {
                let pool = region.and_then(|region| region.pool);
                let handle = pool.map_or(0, |pool| self.pools.handle_of(pool));
                out.set(handle)?;
            }
            A::CU_POINTER_ATTRIBUTE_BUFFER_ID => {
                let id = self.space.addresses.mapping(address).map(|(_, m)| m.physical.0);
                out.set(id.unwrap_or(0))?;
            }
            _ => return Err(CUresult::CUDA_ERROR_NOT_SUPPORTED),
        }
        Ok(true)
    }
}

/// The name of work that frees, for messages.
pub(crate) fn free_name() -> Arc<str> {
    "cuMemFreeAsync".into()
}
