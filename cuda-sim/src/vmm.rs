//! Virtual memory management: the cuMem calls on handles, reservations and mappings.
//!
//! Answers are those measured on an H200 (driver 580.159). Where the real driver crashes, the
//! call is reported as misuse and answers `CUDA_ERROR_INVALID_VALUE`. So is, as a real driver
//! would not answer but let the work fault or corrupt, taking a mapping away (or some of its
//! rights) while the host has not seen work through it complete.

use std::iter::repeat_n;
use std::os::fd::{BorrowedFd, IntoRawFd};

use cuda_sys::types::{
    CUmemAccessDesc, CUmemAllocationGranularity_flags, CUmemAllocationHandleType,
    CUmemAllocationProp, CUmemAllocationType, CUmemFabricHandle, CUmemLocation, CUmemLocationType,
    CUresult,
};
use rustc_hash::FxHashMap;

use crate::address::{MAX_DEVICES, Mapping, Owner, RESERVATION_UNIT, Refused};
use crate::arguments::{In, Out, Untyped};
use crate::call::Call;
use crate::physical::{GRANULE, NUMA_NODES, Seat};
use crate::race::PhysicalId;

const INVALID: CUresult = CUresult::CUDA_ERROR_INVALID_VALUE;
const FILE_DESCRIPTOR: CUmemAllocationHandleType =
    CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
const FABRIC: CUmemAllocationHandleType = CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_FABRIC;

/// What a handle value stands for. It is kept while mappings need it, also when no reference
/// to the handle is left, because a mapping can bring a reference back.
#[derive(Clone, Copy, Debug)]
struct Handle {
    physical: PhysicalId,
    size: u64,
    seat: Seat,
    exportable: CUmemAllocationHandleType,
    usage: u16,
    /// Made so that network cards may reach it.
    rdma: bool,
    references: u64,
    mappings: u64,
}

/// Physical memory handles; values are never used again, so that a stale one is always found.
#[derive(Debug)]
pub(crate) struct MemoryHandles {
    by_value: FxHashMap<u64, Handle>,
    first: u64,
    next: u64,
    /// References that the caller holds, over all handles.
    references: usize,
}

impl MemoryHandles {
    pub(crate) fn new() -> Self {
        const FIRST: u64 = 0x6000_0000_0000;
        Self { by_value: FxHashMap::default(), first: FIRST, next: FIRST, references: 0 }
    }

    /// Whether network cards may reach what a mapped handle stands for.
    pub(crate) fn is_within_reach_of_cards(&self, value: u64) -> bool {
        self.by_value.get(&value).is_some_and(|handle| handle.rdma)
    }

    /// References that the caller holds.
    pub(crate) fn references(&self) -> usize {
        self.references
    }

    fn insert(&mut self, handle: Handle) -> u64 {
        let value = self.next;
        self.next += 0x40;
        self.references += 1;
        self.by_value.insert(value, handle);
        value
    }

    fn live(&self, value: u64) -> Option<&Handle> {
        self.by_value.get(&value).filter(|handle| handle.references > 0)
    }

    /// Whether the value was ever given out.
    fn was_given(&self, value: u64) -> bool {
        (self.first..self.next).contains(&value) && (value - self.first).is_multiple_of(0x40)
    }
}

/// What an access descriptor asks for.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Right {
    accessor: Seat,
    /// As the driver counts them: 0 none, 1 read, 3 read and write.
    pub(crate) flags: u64,
}

impl Right {
    /// Who is to have it, as in [`AccessRights`](crate::address::AccessRights).
    pub(crate) fn party(self) -> usize {
        self.accessor.owner()
    }
}

impl Call<'_> {
    /// A live handle. Any other value makes the real driver read freed memory.
    fn memory_handle(&mut self, value: u64, arguments: &str) -> Result<Handle, CUresult> {
        if let Some(handle) = self.memory_handles.live(value) {
            return Ok(*handle);
        }
        let what = if self.memory_handles.was_given(value) {
            format!("handle {value:#x} was released{arguments}")
        } else {
            format!("{value:#x} was never a handle{arguments}")
        };
        self.misuse(&what);
        Err(INVALID)
    }

    fn refused(&mut self, refused: Refused, address: u64, size: u64) -> CUresult {
        match refused {
            Refused::Code(code) => code,
            Refused::InUse(in_use) => {
                self.misuse(&format!(
                    "mapping in use: {size:#x} bytes at {address:#x} hold the mapping at {:#x}, and \
                     the host has not seen the work of {} through it complete",
                    in_use.address, in_use.stream
                ));
                INVALID
            }
        }
    }

    /// Where memory that is to be at a location goes.
    pub(crate) fn seat(&self, location: CUmemLocation) -> Result<Seat, CUresult> {
        let seat = match location.type_ {
            CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE => {
                Seat::Device(self.device(location.id)?)
            }
            CUmemLocationType::CU_MEM_LOCATION_TYPE_HOST => Seat::Host,
            CUmemLocationType::CU_MEM_LOCATION_TYPE_HOST_NUMA => {
                if !(0..NUMA_NODES).contains(&location.id) {
                    return Err(CUresult::CUDA_ERROR_INVALID_DEVICE);
                }
                Seat::HostNuma(location.id)
            }
            _ => return Err(INVALID),
        };
        if self.space.physical.has(seat) {
            Ok(seat)
        } else {
            Err(CUresult::CUDA_ERROR_NOT_SUPPORTED)
        }
    }

    /// Who a location names as one that is to reach memory; of a node the number does not count.
    pub(crate) fn accessor(&self, location: CUmemLocation) -> Result<Seat, CUresult> {
        match location.type_ {
            CUmemLocationType::CU_MEM_LOCATION_TYPE_HOST => Ok(Seat::Host),
            CUmemLocationType::CU_MEM_LOCATION_TYPE_HOST_NUMA => Ok(Seat::HostNuma(0)),
            _ => self.seat(location),
        }
    }

    /// Checks what cuMemCreate and its kind ask for: the place and the handle type.
    fn allocation_properties(&self, prop: &CUmemAllocationProp) -> Result<Seat, CUresult> {
        const NONE: CUmemAllocationHandleType = CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_NONE;
        let types = prop.requestedHandleTypes;
        let known = [NONE, FILE_DESCRIPTOR].contains(&types) || (types == FABRIC && self.fabric);
        if prop.type_ != CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED || !known {
            return Err(INVALID);
        }
        let seat = self.seat(prop.location)?;
        // Memory anywhere on the host cannot leave the process.
        if seat == Seat::Host && types != NONE { Err(INVALID) } else { Ok(seat) }
    }

    /// Whether memory can be opened to these parties: to the host if it is the host's, to other
    /// devices if the machine has peer access.
    pub(crate) fn reachable(&self, seat: Seat, wanted: &[Right]) -> Result<(), CUresult> {
        let allowed = |right: &Right| match (right.accessor, seat) {
            (Seat::Device(device), Seat::Device(owner)) => {
                if device == owner || self.peer_access || right.flags == 0 {
                    Ok(())
                } else {
                    Err(CUresult::CUDA_ERROR_INVALID_DEVICE)
                }
            }
            (Seat::Device(_), _) | (Seat::Host, Seat::Host | Seat::HostNuma(_)) => Ok(()),
            (Seat::HostNuma(_), Seat::HostNuma(_)) => Ok(()),
            (Seat::HostNuma(_), _) => Err(INVALID),
            (Seat::Host, Seat::Device(_)) => Err(CUresult::CUDA_ERROR_NOT_SUPPORTED),
        };
        wanted.iter().try_for_each(allowed)
    }

    /// The rights that access descriptors ask for.
    pub(crate) fn access_rights(
        &self,
        descriptors: &In<CUmemAccessDesc>,
        count: usize,
    ) -> Result<Vec<Right>, CUresult> {
        if count == 0 {
            return Err(INVALID);
        }
        (0..count)
            .map(|index| {
                let descriptor = descriptors.at(index)?;
                let flags = u64::from(descriptor.flags.0);
                if !matches!(flags, 0 | 1 | 3) {
                    return Err(INVALID);
                }
                Ok(Right { accessor: self.accessor(descriptor.location)?, flags })
            })
            .collect()
    }
}

pub(crate) fn reserve(
    call: &mut Call<'_>,
    out: Out<u64>,
    size: usize,
    alignment: usize,
    hint: u64,
    flags: u64,
) -> Result<(), CUresult> {
    out.required()?;
    let (size, alignment) = (size as u64, alignment as u64);
    let aligned = alignment == 0 || alignment.is_power_of_two();
    if size == 0 || !size.is_multiple_of(RESERVATION_UNIT) || !aligned || flags != 0 {
        return Err(INVALID);
    }
    let align = alignment.max(RESERVATION_UNIT);
    let start = call.space.addresses.reserve(size, align, hint, Owner::Caller)?;
    call.cost = Some(call.costs.reserve(size));
    out.set(start)
}

pub(crate) fn address_free(call: &mut Call<'_>, start: u64, size: usize) -> Result<(), CUresult> {
    call.space.addresses.free(start, size as u64, Owner::Caller)
}

pub(crate) fn granularity(
    call: &mut Call<'_>,
    out: Out<usize>,
    prop: In<CUmemAllocationProp>,
    option: CUmemAllocationGranularity_flags,
) -> Result<(), CUresult> {
    call.allocation_properties(&prop.get()?)?;
    if option.0 > 1 {
        return Err(INVALID);
    }
    out.set(GRANULE as usize)
}

pub(crate) fn create(
    call: &mut Call<'_>,
    out: Out<u64>,
    size: usize,
    prop: In<CUmemAllocationProp>,
    flags: u64,
) -> Result<(), CUresult> {
    out.required()?;
    let (size, prop) = (size as u64, prop.get()?);
    if size == 0 || !size.is_multiple_of(GRANULE) || flags != 0 {
        return Err(INVALID);
    }
    let seat = call.allocation_properties(&prop)?;
    call.usable(seat.owner())?;
    let physical = call.space.physical.create(seat, size)?;
    call.cost = Some(call.costs.create(size));
    let rdma = prop.allocFlags.gpuDirectRDMACapable != 0 && call.gpu_direct_rdma;
    let value = call.memory_handles.insert(Handle {
        physical,
        size,
        seat,
        exportable: prop.requestedHandleTypes,
        usage: prop.allocFlags.usage,
        rdma,
        references: 1,
        mappings: 0,
    });
    out.set(value)
}

pub(crate) fn release(call: &mut Call<'_>, value: u64) -> Result<(), CUresult> {
    let state = &mut *call.state;
    let given = state.memory_handles.was_given(value);
    let handle = match state.memory_handles.by_value.get_mut(&value) {
        Some(handle) if handle.references > 0 => handle,
        _ => {
            if !given {
                call.misuse(&format!("{value:#x} was never a handle"));
            }
            return Err(INVALID);
        }
    };
    handle.references -= 1;
    let (handle, gone) = (*handle, handle.references == 0 && handle.mappings == 0);
    state.memory_handles.references -= 1;
    if gone {
        state.memory_handles.by_value.remove(&value);
    }
    if state.space.physical.release(handle.physical) {
        state.space.forget(handle.physical);
        call.cost = Some(call.costs.release(handle.size));
    }
    Ok(())
}

pub(crate) fn retain(call: &mut Call<'_>, out: Out<u64>, address: Untyped) -> Result<(), CUresult> {
    out.required()?;
    let state = &mut *call.state;
    let (_, mapping) = state.space.addresses.mapping(address.0).ok_or(INVALID)?;
    let value = mapping.handle;
    let handle = state.memory_handles.by_value.get_mut(&value).ok_or(INVALID)?;
    handle.references += 1;
    state.space.physical.retain(handle.physical);
    state.memory_handles.references += 1;
    out.set(value)
}

pub(crate) fn map(
    call: &mut Call<'_>,
    address: u64,
    size: usize,
    offset: usize,
    value: u64,
    flags: u64,
) -> Result<(), CUresult> {
    let size = size as u64;
    let handle = call.memory_handle(value, &format!(" (mapped at {address:#x})"))?;
    call.usable(handle.seat.owner())?;
    let reserved = call.space.addresses.reservation(address, size);
    let callers = reserved.is_some_and(|(_, _, owner)| owner == Owner::Caller);
    if flags != 0 || size == 0 || !address.is_multiple_of(GRANULE) || !callers {
        return Err(INVALID);
    }
    if offset != 0 || size != handle.size {
        return Err(CUresult::CUDA_ERROR_NOT_SUPPORTED);
    }
    if call.space.addresses.any_mapped(address, size) {
        return Err(INVALID);
    }
    call.space.addresses.map(address, size, handle.physical, value)?;
    call.space.physical.retain(handle.physical);
    if let Some(handle) = call.memory_handles.by_value.get_mut(&value) {
        handle.mappings += 1;
    }
    call.cost = Some(call.costs.map(size));
    Ok(())
}

pub(crate) fn unmap(call: &mut Call<'_>, address: u64, size: usize) -> Result<(), CUresult> {
    let size = size as u64;
    if size == 0 || !address.is_multiple_of(GRANULE) || !size.is_multiple_of(GRANULE) {
        return Err(INVALID);
    }
    let state = &mut *call.state;
    let gone = state.space.addresses.unmap(address, size, Owner::Caller, Some(&state.host));
    let gone = gone.map_err(|refused| call.refused(refused, address, size))?;
    // Each device that memory is open to has entries of its own.
    let entries = |mapping: &Mapping| repeat_n(mapping.size, mapping.access().devices().max(1));
    call.cost = Some(call.costs.unmap(gone.iter().flat_map(|(_, mapping)| entries(mapping))));
    let state = &mut *call.state;
    for (_, mapping) in gone {
        let handles = &mut state.memory_handles.by_value;
        if let Some(handle) = handles.get_mut(&mapping.handle) {
            handle.mappings -= 1;
            if handle.mappings == 0 && handle.references == 0 {
                handles.remove(&mapping.handle);
            }
        }
        if state.space.physical.release(mapping.physical) {
            state.space.forget(mapping.physical);
        }
    }
    Ok(())
}

pub(crate) fn set_access(
    call: &mut Call<'_>,
    address: u64,
    size: usize,
    descriptors: In<CUmemAccessDesc>,
    count: usize,
) -> Result<(), CUresult> {
    let size = size as u64;
    let wanted = call.access_rights(&descriptors, count).map_err(|code| match code {
        // Unlike cuMemCreate.
        CUresult::CUDA_ERROR_INVALID_DEVICE => INVALID,
        code => code,
    })?;
    for right in &wanted {
        call.usable(right.party())?;
    }
    let reserved = call.space.addresses.reservation(address, size);
    if !reserved.is_some_and(|(_, _, owner)| owner == Owner::Caller) {
        return Err(INVALID);
    }
    let mapped = call.space.addresses.mapped_in(address, size);
    let seats = mapped.map(|id| call.space.physical.get(id).map(|extent| extent.seat));
    for seat in seats.collect::<Vec<_>>() {
        call.reachable(seat.ok_or(INVALID)?, &wanted)?;
    }
    let state = &mut *call.state;
    let change = |rights| {
        wanted.iter().fold(rights, |rights: crate::address::AccessRights, right| {
            rights.with(right.party(), right.flags)
        })
    };
    let changed = state.space.addresses.set_access(address, size, change, Some(&state.host));
    let changed = changed.map_err(|refused| call.refused(refused, address, size))?;
    call.cost = Some(if changed.is_empty() {
        call.costs.set_access_again()
    } else {
        let devices = wanted.iter().filter(|right| right.party() < MAX_DEVICES).count().max(1);
        call.costs.set_access(changed.into_iter().flat_map(|size| repeat_n(size, devices)))
    });
    Ok(())
}

pub(crate) fn get_access(
    call: &mut Call<'_>,
    out: Out<u64>,
    location: In<CUmemLocation>,
    address: u64,
) -> Result<(), CUresult> {
    let party = call.accessor(location.get()?)?.owner();
    let (_, mapping) = call.space.addresses.mapping(address).ok_or(INVALID)?;
    out.set(mapping.access().of(party))
}

pub(crate) fn properties(
    call: &mut Call<'_>,
    out: Out<CUmemAllocationProp>,
    value: u64,
) -> Result<(), CUresult> {
    out.required()?;
    let handle = call.memory_handle(value, "")?;
    let mut prop = CUmemAllocationProp {
        type_: CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED,
        requestedHandleTypes: handle.exportable,
        location: handle.seat.location(),
        ..Default::default()
    };
    prop.allocFlags.usage = handle.usage;
    prop.allocFlags.gpuDirectRDMACapable = u8::from(handle.rdma);
    out.set(prop)
}

pub(crate) fn export(
    call: &mut Call<'_>,
    out: Untyped,
    value: u64,
    handle_type: CUmemAllocationHandleType,
    flags: u64,
) -> Result<(), CUresult> {
    let handle = call.memory_handle(value, "")?;
    call.usable(handle.seat.owner())?;
    if out.0 == 0 || flags != 0 || handle.exportable != handle_type {
        return Err(INVALID);
    }
    if handle_type == FABRIC {
        let name = call.space.physical.export_by_name(handle.physical);
        let data = name.map_err(|_| CUresult::CUDA_ERROR_OPERATING_SYSTEM)?;
        return out.set(CUmemFabricHandle { data });
    }
    if handle_type != FILE_DESCRIPTOR {
        return Err(INVALID);
    }
    let file = call.space.physical.export(handle.physical);
    let file = file.map_err(|_| CUresult::CUDA_ERROR_OPERATING_SYSTEM)?;
    out.set(file.into_raw_fd())
}

pub(crate) fn import(
    call: &mut Call<'_>,
    out: Out<u64>,
    shared: Untyped,
    handle_type: CUmemAllocationHandleType,
) -> Result<(), CUresult> {
    out.required()?;
    let bad = CUresult::CUDA_ERROR_UNKNOWN;
    let file = if handle_type == FILE_DESCRIPTOR {
        // The descriptor travels in the pointer's own bits.
        let number = i32::try_from(shared.0).map_err(|_| bad)?;
        // SAFETY: not -1, as it is not negative. Whoever imports vouches that the descriptor is
        // theirs and open; a closed one makes the duplication fail, with no further harm.
        let borrowed = unsafe { BorrowedFd::borrow_raw(number) };
        rustix::io::fcntl_dupfd_cloexec(borrowed, 0).map_err(|_| bad)?
    } else if handle_type == FABRIC && call.fabric {
        let handle: CUmemFabricHandle = shared.get()?;
        crate::physical::open_by_name(&handle.data).ok_or(INVALID)?
    } else {
        return Err(CUresult::CUDA_ERROR_NOT_SUPPORTED);
    };
    let physical = call.space.physical.import(file)?;
    let (seat, size) = match call.space.physical.get(physical) {
        Some(extent) => (extent.seat, extent.size),
        None => return Err(bad),
    };
    call.cost = Some(call.costs.import(size));
    let value = call.memory_handles.insert(Handle {
        physical,
        size,
        seat,
        exportable: handle_type,
        usage: 0,
        rdma: false,
        references: 1,
        mappings: 0,
    });
    out.set(value)
}
