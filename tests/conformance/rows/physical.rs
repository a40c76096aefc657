//! Physical handles: creating, releasing, retaining, sharing.

use super::*;

pub(crate) fn rows() -> Vec<Row> {
    vec![
        row("create: one granule", SUCCESS, |p| answer(p.create(p.g))),
        row("create: size 0", INVALID_VALUE, |p| answer(p.create(0))),
        row("create: half a granule", INVALID_VALUE, |p| answer(p.create(p.g / 2))),
        row("create: a granule and a half", INVALID_VALUE, |p| answer(p.create(p.g * 3 / 2))),
        row("create: flags 1", INVALID_VALUE, |p| {
            answer(p.create_with(p.g, &properties(p.target.device), 1))
        }),
        row("create: more than any GPU has", OUT_OF_MEMORY, |p| answer(p.create(16 * TIB))),
        row("create: device 99", INVALID_DEVICE, |p| {
            answer(p.create_with(p.g, &properties(99), 0))
        }),
        row("create: no allocation type", INVALID_VALUE, |p| {
            let mut prop = properties(p.target.device);
            prop.type_ = CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_INVALID;
            answer(p.create_with(p.g, &prop, 0))
        }),
        row("create: with no context current", SUCCESS, |p| {
            p.set_context(std::ptr::null_mut())?;
            answer(p.create(p.g))
        }),
        row("release: unused", SUCCESS, |p| {
            let handle = p.create(p.g)?;
            answer(p.release(handle))
        }),
        row("release: twice", INVALID_VALUE, |p| {
            let handle = p.create(p.g)?;
            p.release(handle)?;
            answer(p.release(handle))
        }),
        row("release: while mapped: the memory stays until unmapped", SUCCESS, |p| {
            let stream = p.stream(NON_BLOCKING)?;
            let handle = p.create(p.g)?;
            let at = p.map_anew(handle, p.g)?;
            p.set32(at, 1, 8, stream)?;
            let code = answer(p.release(handle))?;
            ensure(p.read32(at, stream)? == 1, "what was written is there")?;
            p.set32(at, 2, 8, stream)?;
            ensure(p.read32(at + 28, stream)? == 2, "it can be written")?;
            Ok(code)
        }),
        row("properties of a handle: as created", SUCCESS, |p| {
            let handle = p.create_exportable(p.g)?;
            let prop = p.handle_properties(handle)?;
            ensure(
                prop.requestedHandleTypes
                    == CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR,
                "it remembers how it can be exported",
            )?;
            ensure(prop.location.id == p.target.device, "it is on the device")?;
            Ok(CUresult::CUDA_SUCCESS)
        }),
        row("retain: inside a mapping: the same handle value", SUCCESS, |p| {
            let handle = p.create(2 * p.g)?;
            let at = p.map_anew(handle, 2 * p.g)?;
            let again = p.retain(at + p.g + 4)?;
            ensure(again == handle, "the values are equal")?;
            Ok(CUresult::CUDA_SUCCESS)
        }),
        row("retain: one more reference", SUCCESS, |p| {
            let handle = p.create(p.g)?;
            let at = p.map_anew(handle, p.g)?;
            p.retain(at)?;
            p.release(handle)?;
            answer(p.release(handle))
        }),
        row("retain: works after release", SUCCESS, |p| {
            let handle = p.create(p.g)?;
            let at = p.map_anew(handle, p.g)?;
            p.release(handle)?;
            let again = p.retain(at)?;
            ensure(again == handle, "the values are equal")?;
            p.map_anew(again, p.g)?;
            Ok(CUresult::CUDA_SUCCESS)
        }),
        row("retain: of reserved, unmapped space", INVALID_VALUE, |p| {
            let at = p.reserve(p.g)?;
            answer(p.retain(at))
        }),
        row("create: on the host: opened to device and host in one call", SUCCESS, |p| {
            if !has_host_memory(p)? {
                return Ok(CUresult::CUDA_SUCCESS);
            }
            let mut prop = properties(p.target.device);
            prop.location = host();
            let handle = p.create_with(p.g, &prop, 0)?;
            let at = p.reserve(p.g)?;
            p.map(at, p.g, 0, handle)?;
            let code = answer(p.set_access_of_all(at, p.g, &[on(p.target.device), host()]))?;
            let stream = p.stream(NON_BLOCKING)?;
            p.set32(at, 7, 8, stream)?;
            ensure(p.read32(at + 28, stream)? == 7, "device work reaches it")?;
            Ok(code)
        }),
        row("create: on the host, to be exported", NOT_ON_THE_HOST, |p| {
            let mut prop = properties(p.target.device);
            prop.location = host();
            prop.requestedHandleTypes =
                CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;
            answer(p.create_with(p.g, &prop, 0))
        }),
        row("create: on the current node of the host", NOT_ON_THE_HOST, |p| {
            let mut prop = properties(p.target.device);
            prop.location.type_ = CUmemLocationType::CU_MEM_LOCATION_TYPE_HOST_NUMA_CURRENT;
            answer(p.create_with(p.g, &prop, 0))
        }),
        row("access: of the host's nodes to device memory", NO_SUCH_ACCESS, |p| {
            let (handle, at) = (p.create(p.g)?, p.reserve(p.g)?);
            p.map(at, p.g, 0, handle)?;
            let node =
                CUmemLocation { type_: CUmemLocationType::CU_MEM_LOCATION_TYPE_HOST_NUMA, id: 0 };
            answer(p.set_access_of_all(at, p.g, &[node]))
        }),
        row("export: of a handle made without that type", INVALID_VALUE, |p| {
            let handle = p.create(p.g)?;
            answer(p.export(handle))
        }),
        row("export: twice", SUCCESS, |p| {
            let handle = p.create_exportable(p.g)?;
            p.export(handle)?;
            answer(p.export(handle))
        }),
        row("export: with no context current", SUCCESS, |p| {
            p.set_context(std::ptr::null_mut())?;
            let handle = p.create_exportable(p.g)?;
            answer(p.export(handle))
        }),
        row("import: the same memory, valid after the exporter released it", SUCCESS, |p| {
            let stream = p.stream(NON_BLOCKING)?;
            let handle = p.create_exportable(p.g)?;
            let at = p.map_anew(handle, p.g)?;
            p.set32(at, 42, 8, stream)?;
            p.stream_sync(stream)?;
            let fd = p.export(handle)?;
            p.unmap(at, p.g)?;
            p.release(handle)?;
            let imported = p.import(&fd)?;
            drop(fd);
            let elsewhere = p.map_anew(imported, p.g)?;
            ensure(p.read32(elsewhere, stream)? == 42, "the bytes are there")?;
            Ok(CUresult::CUDA_SUCCESS)
        }),
        row("import: each import is a reference of its own", SUCCESS, |p| {
            let handle = p.create_exportable(p.g)?;
            let fd = p.export(handle)?;
            let (first, second) = (p.import(&fd)?, p.import(&fd)?);
            p.release(handle)?;
            p.release(first)?;
            p.map_anew(second, p.g)?;
            answer(p.release(second))
        }),
        row("import: in the exporting process: another handle value", SUCCESS, |p| {
            let handle = p.create_exportable(p.g)?;
            let imported = p.import(&p.export(handle)?)?;
            ensure(imported != handle, "the values differ")?;
            Ok(CUresult::CUDA_SUCCESS)
        }),
        row("import: of a number that is no descriptor", UNKNOWN, |p| {
            answer(p.import_raw(1 << 20))
        }),
        row("import: of a descriptor of something else", UNKNOWN, |p| {
            let other = std::fs::File::open("/dev/null")
                .map_err(|error| Trouble::Fact(error.to_string()))?;
            answer(p.import(&other.into()))
        }),
    ]
}

/// Whether the device can use memory of the host; where it cannot, a row about it says nothing.
fn has_host_memory(p: &Probe<'_>) -> Asked<bool> {
    use CUdevice_attribute as A;
    Ok(p.attribute(A::CU_DEVICE_ATTRIBUTE_HOST_VIRTUAL_MEMORY_MANAGEMENT_SUPPORTED)? != 0)
}

/// Documented as not possible, without the code.
const NOT_ON_THE_HOST: &[CUresult] =
    &[CUresult::CUDA_ERROR_INVALID_VALUE, CUresult::CUDA_ERROR_NOT_SUPPORTED];
const NO_SUCH_ACCESS: &[CUresult] = &[
    CUresult::CUDA_ERROR_INVALID_VALUE,
    CUresult::CUDA_ERROR_INVALID_DEVICE,
    CUresult::CUDA_ERROR_NOT_SUPPORTED,
];

/// What a bad descriptor gets: the driver does not say more.
const UNKNOWN: &[CUresult] = &[CUresult::CUDA_ERROR_UNKNOWN];
