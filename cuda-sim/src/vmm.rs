//! Virtual memory management: the cuMem calls on handles, reservations and mappings.
//!
//! Answers are those measured on an H200 (driver 580.159). Where the real driver crashes, the
//! call is reported as misuse and answers `CUDA_ERROR_INVALID_VALUE`. So is, as a real driver
//! would not answer but let the work fault or corrupt, taking a mapping away (or some of its
//! rights) while the host has not seen work through it complete.

use std::collections::HashMap;
use std::os::fd::{BorrowedFd, IntoRawFd};

use cuda_sys::types::{
    CUmemAccessDesc, CUmemAllocationGranularity_flags, CUmemAllocationHandleType,
    CUmemAllocationProp, CUmemAllocationType, CUmemLocation, CUmemLocationType, CUresult,
};

use crate::address::{Owner, RESERVATION_UNIT, Refused};
use crate::arguments::{In, Out, Untyped};
use crate::call::Call;
use crate::physical::GRANULE;
use crate::race::PhysicalId;

const INVALID: CUresult = CUresult::CUDA_ERROR_INVALID_VALUE;
const FILE_DESCRIPTOR: CUmemAllocationHandleType =
    CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;

/// What a handle value stands for. It is kept while mappings need it, also when no reference
/// to the handle is left, because a mapping can bring a reference back.
#[derive(Clone, Copy, Debug)]
struct Handle {
    physical: PhysicalId,
    size: u64,
    device: usize,
    exportable: CUmemAllocationHandleType,
    usage: u16,
    references: u64,
    mappings: u64,
}

/// Physical memory handles; values are never used again, so that a stale one is always found.
#[derive(Debug)]
pub(crate) struct MemoryHandles {
    by_value: HashMap<u64, Handle>,
    first: u64,
    next: u64,
    /// References that the caller holds, over all handles.
    references: usize,
}

impl MemoryHandles {
    pub(crate) fn new() -> Self {
        const FIRST: u64 = 0x6000_0000_0000;
        Self { by_value: HashMap::new(), first: FIRST, next: FIRST, references: 0 }
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

    /// The device that a location names.
    fn location_device(&self, location: CUmemLocation) -> Result<usize, CUresult> {
        match location.type_ {
            CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE => self.device(location.id),
            CUmemLocationType::CU_MEM_LOCATION_TYPE_HOST
            | CUmemLocationType::CU_MEM_LOCATION_TYPE_HOST_NUMA
            | CUmemLocationType::CU_MEM_LOCATION_TYPE_HOST_NUMA_CURRENT => {
                Err(CUresult::CUDA_ERROR_NOT_SUPPORTED)
            }
            _ => Err(INVALID),
        }
    }

    /// Checks what cuMemCreate and its kind ask for: the device and the handle type.
    fn allocation_properties(&self, prop: &CUmemAllocationProp) -> Result<usize, CUresult> {
        let known_types = [CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_NONE, FILE_DESCRIPTOR];
        if prop.type_ != CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED
            || !known_types.contains(&prop.requestedHandleTypes)
        {
            return Err(INVALID);
        }
        self.location_device(prop.location)
    }

    /// The rights that access descriptors ask for, as (device, flags).
    pub(crate) fn access_rights(
        &self,
        descriptors: &In<CUmemAccessDesc>,
        count: usize,
    ) -> Result<Vec<(usize, u64)>, CUresult> {
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
                Ok((self.location_device(descriptor.location)?, flags))
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
    let device = call.allocation_properties(&prop)?;
    call.usable(device)?;
    let physical = call.space.physical.create(device, size)?;
    call.cost = Some(call.costs.create(size));
    let value = call.memory_handles.insert(Handle {
        physical,
        size,
        device,
        exportable: prop.requestedHandleTypes,
        usage: prop.allocFlags.usage,
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
    call.usable(handle.device)?;
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
    call.cost = Some(call.costs.unmap(gone.iter().map(|(_, mapping)| mapping.size)));
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
    for &(device, _) in &wanted {
        call.usable(device)?;
    }
    let reserved = call.space.addresses.reservation(address, size);
    if !reserved.is_some_and(|(_, _, owner)| owner == Owner::Caller) {
        return Err(INVALID);
    }
    let state = &mut *call.state;
    let change = |rights| {
        wanted.iter().fold(rights, |rights: crate::address::AccessRights, &(device, flags)| {
            rights.with(device, flags)
        })
    };
    let changed = state.space.addresses.set_access(address, size, change, Some(&state.host));
    let changed = changed.map_err(|refused| call.refused(refused, address, size))?;
    call.cost = Some(if changed.is_empty() {
        call.costs.set_access_again()
    } else {
        call.costs.set_access(changed)
    });
    Ok(())
}

pub(crate) fn get_access(
    call: &mut Call<'_>,
    out: Out<u64>,
    location: In<CUmemLocation>,
    address: u64,
) -> Result<(), CUresult> {
    let device = call.location_device(location.get()?)?;
    let (_, mapping) = call.space.addresses.mapping(address).ok_or(INVALID)?;
    out.set(mapping.access().of(device))
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
        location: CUmemLocation {
            type_: CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE,
            id: handle.device as i32,
        },
        ..Default::default()
    };
    prop.allocFlags.usage = handle.usage;
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
    call.usable(handle.device)?;
    if out.0 == 0
        || flags != 0
        || handle_type != FILE_DESCRIPTOR
        || handle.exportable != handle_type
    {
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
    if handle_type != FILE_DESCRIPTOR {
        return Err(CUresult::CUDA_ERROR_NOT_SUPPORTED);
    }
    // The descriptor travels in the pointer's own bits.
    let bad = CUresult::CUDA_ERROR_UNKNOWN;
    let number = i32::try_from(shared.0).map_err(|_| bad)?;
    // SAFETY: not -1, as it is not negative. Whoever imports vouches that the descriptor is
    // theirs and open; a closed one makes the duplication fail, with no further harm.
    let borrowed = unsafe { BorrowedFd::borrow_raw(number) };
    let file = rustix::io::fcntl_dupfd_cloexec(borrowed, 0).map_err(|_| bad)?;
    let physical = call.space.physical.import(file)?;
    let (device, size) = match call.space.physical.get(physical) {
        Some(extent) => (extent.device, extent.size),
        None => return Err(bad),
    };
    call.cost = Some(call.costs.import(size));
    let value = call.memory_handles.insert(Handle {
        physical,
        size,
        device,
        exportable: FILE_DESCRIPTOR,
        usage: 0,
        references: 1,
        mappings: 0,
    });
    out.set(value)
}
