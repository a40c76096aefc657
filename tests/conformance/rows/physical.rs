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

/// What a bad descriptor gets: the driver does not say more.
const UNKNOWN: &[CUresult] = &[CUresult::CUDA_ERROR_UNKNOWN];
