//! Mapping, access, unmapping, and what an address is asked.

use super::*;

const READ: CUmemAccess_flags = CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READ;
const READ_WRITE: CUmemAccess_flags = CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE;

/// The documentation forbids it and an H200's driver lets it pass; the simulator is strict, so
/// that no program comes to rely on it.
const LENIENT: &[CUresult] = &[CUresult::CUDA_ERROR_INVALID_VALUE, CUresult::CUDA_SUCCESS];

pub(crate) fn rows() -> Vec<Row> {
    vec![
        row("map: a whole handle", SUCCESS, |p| {
            let at = p.reserve(2 * p.g)?;
            answer(p.map(at, 2 * p.g, 0, p.create(2 * p.g)?))
        }),
        row("map: in the middle of a reservation", SUCCESS, |p| {
            let at = p.reserve(4 * p.g)?;
            answer(p.map(at + p.g, p.g, 0, p.create(p.g)?))
        }),
        row("map: one handle at two addresses", SUCCESS, |p| {
            let at = p.reserve(2 * p.g)?;
            let handle = p.create(p.g)?;
            p.map(at, p.g, 0, handle)?;
            answer(p.map(at + p.g, p.g, 0, handle))
        }),
        row("map: part of a handle, offset 0", NOT_SUPPORTED, |p| {
            let at = p.reserve(2 * p.g)?;
            answer(p.map(at, p.g, 0, p.create(2 * p.g)?))
        }),
        row("map: part of a handle, offset > 0", NOT_SUPPORTED, |p| {
            let at = p.reserve(2 * p.g)?;
            answer(p.map(at, p.g, p.g, p.create(2 * p.g)?))
        }),
        row("map: larger than the handle", NOT_SUPPORTED, |p| {
            let at = p.reserve(2 * p.g)?;
            answer(p.map(at, 2 * p.g, 0, p.create(p.g)?))
        }),
        row("map: half a granule", NOT_SUPPORTED, |p| {
            let at = p.reserve(2 * p.g)?;
            answer(p.map(at, p.g / 2, 0, p.create(p.g)?))
        }),
        row("map: over a mapping of the same size", INVALID_VALUE, |p| {
            let at = p.open(&[p.g])?;
            answer(p.map(at, p.g, 0, p.create(p.g)?))
        }),
        row("map: over the front of a larger mapping", INVALID_VALUE, |p| {
            let at = p.open(&[2 * p.g])?;
            answer(p.map(at, p.g, 0, p.create(p.g)?))
        }),
        row("map: over the back of a larger mapping", INVALID_VALUE, |p| {
            let at = p.open(&[2 * p.g])?;
            answer(p.map(at + p.g, p.g, 0, p.create(p.g)?))
        }),
        row("map: over a hole and a mapping behind it", INVALID_VALUE, |p| {
            let at = p.reserve(2 * p.g)?;
            p.map(at + p.g, p.g, 0, p.create(p.g)?)?;
            answer(p.map(at, 2 * p.g, 0, p.create(2 * p.g)?))
        }),
        row("map: over the end of a reservation", LENIENT, |p| {
            let at = p.reserve(2 * p.g)?;
            answer(p.map(at + p.g, 2 * p.g, 0, p.create(2 * p.g)?))
        }),
        row("map: size 0", INVALID_VALUE, |p| {
            let at = p.reserve(p.g)?;
            answer(p.map(at, 0, 0, p.create(p.g)?))
        }),
        row("map: at an address that is no multiple of the granule", INVALID_VALUE, |p| {
            let at = p.reserve(4 * p.g)?;
            answer(p.map(at + p.g / 2, p.g, 0, p.create(p.g)?))
        }),
        row("map: outside of any reservation", INVALID_VALUE, |p| {
            let at = p.reserve(p.g)?;
            p.unreserve(at, p.g)?;
            answer(p.map(at, p.g, 0, p.create(p.g)?))
        }),
        row("map: flags 1", INVALID_VALUE, |p| {
            let at = p.reserve(p.g)?;
            answer(p.map_with(at, p.g, 0, p.create(p.g)?, 1))
        }),
        simulator_only("map: a released handle", INVALID_VALUE, |p| {
            let at = p.reserve(p.g)?;
            let handle = p.create(p.g)?;
            p.release(handle)?;
            answer(p.map(at, p.g, 0, handle))
        }),
        row("set access: one mapping", SUCCESS, |p| {
            let at = p.reserve(p.g)?;
            p.map(at, p.g, 0, p.create(p.g)?)?;
            answer(p.set_access(at, p.g))
        }),
        row("set access: several mappings of several sizes at once", SUCCESS, |p| {
            answer(p.open(&[p.g, 4 * p.g, p.g, 2 * p.g]))
        }),
        row("set access: again", SUCCESS, |p| {
            let at = p.open(&[p.g])?;
            answer(p.set_access(at, p.g))
        }),
        row("set access: a part of one mapping", INVALID_VALUE, |p| {
            let at = p.reserve(2 * p.g)?;
            p.map(at, 2 * p.g, 0, p.create(2 * p.g)?)?;
            answer(p.set_access(at, p.g))
        }),
        row("set access: one mapping and a part of the next", INVALID_VALUE, |p| {
            let at = p.reserve(3 * p.g)?;
            p.map(at, p.g, 0, p.create(p.g)?)?;
            p.map(at + p.g, 2 * p.g, 0, p.create(2 * p.g)?)?;
            answer(p.set_access(at, 2 * p.g))
        }),
        row("set access: on unmapped space", INVALID_VALUE, |p| {
            let at = p.reserve(p.g)?;
            answer(p.set_access(at, p.g))
        }),
        // An H200's driver says success, but the last mapping has no access.
        row("set access: over a hole between mappings", LENIENT, |p| {
            let at = p.reserve(3 * p.g)?;
            p.map(at, p.g, 0, p.create(p.g)?)?;
            p.map(at + 2 * p.g, p.g, 0, p.create(p.g)?)?;
            let code = answer(p.set_access(at, 3 * p.g))?;
            ensure(p.access(at + 2 * p.g)? == 0, "the last has none")?;
            Ok(code)
        }),
        row("set access: a hole behind the mapping", INVALID_VALUE, |p| {
            let at = p.reserve(2 * p.g)?;
            p.map(at, p.g, 0, p.create(p.g)?)?;
            answer(p.set_access(at, 2 * p.g))
        }),
        row("set access: a hole before the mapping", INVALID_VALUE, |p| {
            let at = p.reserve(2 * p.g)?;
            p.map(at + p.g, p.g, 0, p.create(p.g)?)?;
            answer(p.set_access(at, 2 * p.g))
        }),
        row("set access: beyond the reservation", INVALID_VALUE, |p| {
            let at = p.open(&[p.g])?;
            answer(p.set_access(at, 64 * p.g))
        }),
        row("set access: size 0", INVALID_VALUE, |p| {
            let at = p.open(&[p.g])?;
            answer(p.set_access(at, 0))
        }),
        row("set access: for device 99", INVALID_VALUE, |p| {
            let at = p.open(&[p.g])?;
            answer(p.set_access_of(at, p.g, 99, READ_WRITE))
        }),
        row("get access: none, then read-only, then read and write", SUCCESS, |p| {
            let at = p.reserve(p.g)?;
            p.map(at, p.g, 0, p.create(p.g)?)?;
            ensure(p.access(at)? == 0, "a mapping gives no access")?;
            p.set_access_of(at, p.g, p.target.device, READ)?;
            ensure(p.access(at)? == u64::from(READ.0), "read-only")?;
            p.set_access(at, p.g)?;
            ensure(p.access(at)? == u64::from(READ_WRITE.0), "read and write")?;
            Ok(CUresult::CUDA_SUCCESS)
        }),
        row("unmap: one mapping", SUCCESS, |p| {
            let at = p.open(&[p.g])?;
            answer(p.unmap(at, p.g))
        }),
        row("unmap: a part of one mapping", INVALID_VALUE, |p| {
            let at = p.open(&[2 * p.g])?;
            answer(p.unmap(at, p.g))
        }),
        row("unmap: one mapping and a part of the next", INVALID_VALUE, |p| {
            let at = p.open(&[p.g, 2 * p.g])?;
            answer(p.unmap(at, 2 * p.g))
        }),
        row("unmap: several whole mappings at once", SUCCESS, |p| {
            let at = p.open(&[p.g, 2 * p.g, p.g])?;
            let code = answer(p.unmap(at, 4 * p.g))?;
            p.unreserve(at, 4 * p.g)?;
            Ok(code)
        }),
        row("unmap: some of several mappings: the others stay", SUCCESS, |p| {
            let stream = p.stream(NON_BLOCKING)?;
            let at = p.open(&[p.g, p.g, p.g])?;
            p.set32(at, 9, 3 * p.g / 4, stream)?;
            p.stream_sync(stream)?;
            let code = answer(p.unmap(at + p.g, p.g))?;
            ensure(p.read32(at, stream)? == 9, "the one before is there")?;
            ensure(p.read32(at + 2 * p.g, stream)? == 9, "the one behind is there")?;
            Ok(code)
        }),
        row("unmap: over holes between mappings", SUCCESS, |p| {
            let at = p.reserve(4 * p.g)?;
            p.map(at, p.g, 0, p.create(p.g)?)?;
            p.map(at + 2 * p.g, p.g, 0, p.create(p.g)?)?;
            answer(p.unmap(at, 4 * p.g))
        }),
        row("unmap: where nothing is mapped", SUCCESS, |p| {
            let at = p.reserve(p.g)?;
            answer(p.unmap(at, p.g))
        }),
        row("unmap, then map again at the address: access is not kept", SUCCESS, |p| {
            let at = p.open(&[p.g])?;
            p.unmap(at, p.g)?;
            p.map(at, p.g, 0, p.create(p.g)?)?;
            ensure(p.access(at)? == 0, "the new mapping has no access")?;
            Ok(CUresult::CUDA_SUCCESS)
        }),
        row("address range: the one mapping, not the reservation", SUCCESS, |p| {
            let at = p.open(&[p.g, 2 * p.g])?;
            ensure(p.address_range(at + 8)? == (at, p.g), "the first mapping")?;
            ensure(p.address_range(at + 2 * p.g)? == (at + p.g, 2 * p.g), "the second mapping")?;
            Ok(CUresult::CUDA_SUCCESS)
        }),
        row("pointer attributes: device memory on the device", SUCCESS, |p| {
            let at = p.open(&[p.g])?;
            let kind = p.pointer_u64(at, CUpointer_attribute::CU_POINTER_ATTRIBUTE_MEMORY_TYPE)?;
            ensure(
                kind == u64::from(CUmemorytype::CU_MEMORYTYPE_DEVICE.0),
                "its type is device memory",
            )?;
            let id = p.pointer_u64(at, CUpointer_attribute::CU_POINTER_ATTRIBUTE_DEVICE_ORDINAL)?;
            ensure(id == p.target.device as u64, "it is on the device")?;
            Ok(CUresult::CUDA_SUCCESS)
        }),
        row("pointer attributes: the range is the reservation", SUCCESS, |p| {
            let at = p.reserve(4 * p.g)?;
            p.map(at + p.g, p.g, 0, p.create(p.g)?)?;
            p.set_access(at + p.g, p.g)?;
            let start = CUpointer_attribute::CU_POINTER_ATTRIBUTE_RANGE_START_ADDR;
            let size = CUpointer_attribute::CU_POINTER_ATTRIBUTE_RANGE_SIZE;
            ensure(p.pointer_u64(at + p.g, start)? == at, "it starts with the reservation")?;
            ensure(p.pointer_u64(at + p.g, size)? == 4 * p.g, "it is as long")?;
            Ok(CUresult::CUDA_SUCCESS)
        }),
        row("pointer attributes: mapped, of a mapping", SUCCESS, |p| {
            let at = p.open(&[p.g])?;
            let mapped = CUpointer_attribute::CU_POINTER_ATTRIBUTE_MAPPED;
            ensure(p.pointer_u64(at, mapped)? & 0xff == 1, "it is")?;
            Ok(CUresult::CUDA_SUCCESS)
        }),
        row("pointer attributes: mapped, of a mapping without access", SUCCESS, |p| {
            let at = p.reserve(p.g)?;
            p.map(at, p.g, 0, p.create(p.g)?)?;
            let mapped = CUpointer_attribute::CU_POINTER_ATTRIBUTE_MAPPED;
            ensure(p.pointer_u64(at, mapped)? & 0xff == 1, "it is")?;
            Ok(CUresult::CUDA_SUCCESS)
        }),
        row("pointer attributes: mapped, of reserved, unmapped space", INVALID_VALUE, |p| {
            let at = p.reserve(p.g)?;
            answer(p.pointer_u64(at, CUpointer_attribute::CU_POINTER_ATTRIBUTE_MAPPED))
        }),
        row("pointer attributes: range, of reserved, unmapped space", INVALID_VALUE, |p| {
            let at = p.reserve(p.g)?;
            answer(p.pointer_u64(at, CUpointer_attribute::CU_POINTER_ATTRIBUTE_RANGE_START_ADDR))
        }),
        row("address range: of reserved, unmapped space", &[CUresult::CUDA_ERROR_NOT_FOUND], |p| {
            let at = p.reserve(p.g)?;
            answer(p.address_range(at))
        }),
        row("get access: of reserved, unmapped space", INVALID_VALUE, |p| {
            let at = p.reserve(p.g)?;
            answer(p.access(at))
        }),
        row("unmap: beyond the reservation", LENIENT, |p| {
            let at = p.open(&[p.g])?;
            answer(p.unmap(at, 64 * p.g))
        }),
        row("unmap: half a granule", INVALID_VALUE, |p| {
            let at = p.open(&[p.g])?;
            answer(p.unmap(at, p.g / 2))
        }),
        row("unmap: size 0", INVALID_VALUE, |p| {
            let at = p.open(&[p.g])?;
            answer(p.unmap(at, 0))
        }),
    ]
}
