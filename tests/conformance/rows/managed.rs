//! Managed memory.

use super::*;

const GLOBAL: u32 = CUmemAttach_flags_enum::CU_MEM_ATTACH_GLOBAL.0;
/// The host, where a prefetch takes a device (`CU_DEVICE_CPU`).
const CPU: CUdevice = -1;

pub(crate) fn rows() -> Vec<Row> {
    vec![
        row("managed: written by the device, read by device and host", SUCCESS, |p| {
            let stream = p.stream(NON_BLOCKING)?;
            let at = p.managed(MIB, GLOBAL)?;
            p.set32(at, 6, MIB / 4, stream)?;
            ensure(p.read32(at + MIB - 4, stream)? == 6, "the device reads what it wrote")?;
            p.stream_sync(stream)?;
            // SAFETY: managed memory of that length, which no work uses any more.
            let word = unsafe { (at as *const u32).read_volatile() };
            ensure(word == 6, "so does the host")?;
            answer(p.free(at))
        }),
        row("managed: size 0", INVALID_VALUE, |p| answer(p.managed(0, GLOBAL))),
        row("managed: attached to nobody", INVALID_VALUE, |p| answer(p.managed(MIB, 0))),
        row("managed: at least 256-byte alignment", SUCCESS, |p| {
            let addresses = [p.managed(1, GLOBAL)?, p.managed(3, GLOBAL)?, p.managed(257, GLOBAL)?];
            let aligned = addresses.iter().all(|at| at.is_multiple_of(256));
            ensure(aligned, "every address is a multiple of 256")?;
            Ok(CUresult::CUDA_SUCCESS)
        }),
        row("managed: what it says of itself", SUCCESS, |p| {
            let (managed, plain) = (p.managed(MIB, GLOBAL)?, p.alloc(MIB)?);
            let is_managed = CUpointer_attribute::CU_POINTER_ATTRIBUTE_IS_MANAGED;
            ensure(p.pointer_u64(managed, is_managed)? != 0, "it is managed")?;
            ensure(p.pointer_u64(plain, is_managed)? == 0, "other memory is not")?;
            Ok(CUresult::CUDA_SUCCESS)
        }),
        row("managed: freed inside", INVALID_VALUE, |p| {
            let at = p.managed(MIB, GLOBAL)?;
            answer(p.free(at + 512))
        }),
        row("managed: freed twice", INVALID_VALUE, |p| {
            let at = p.managed(MIB, GLOBAL)?;
            p.free(at)?;
            answer(p.free(at))
        }),
        row("managed: freed as page-locked memory", INVALID_VALUE, |p| {
            let at = p.managed(MIB, GLOBAL)?;
            answer(p.free_host(at))
        }),
        row("managed: what cuMemHostGetFlags says of it", SUCCESS, |p| {
            let at = p.managed(MIB, GLOBAL)?;
            answer(p.host_flags(at))
        }),
        row(
            "managed: where the device sees it, asked as of page-locked memory",
            INVALID_VALUE,
            |p| {
                let at = p.managed(MIB, GLOBAL)?;
                answer(p.host_device_pointer(at))
            },
        ),
        row("managed: its range", SUCCESS, |p| {
            let at = p.managed(MIB, GLOBAL)?;
            ensure(p.address_range(at + 100)? == (at, MIB), "it is what was asked for")?;
            Ok(CUresult::CUDA_SUCCESS)
        }),
        row("managed: page-locked", INVALID_VALUE, |p| {
            let at = p.managed(MIB, GLOBAL)?;
            answer(p.register_at(at, 4096))
        }),
        row("managed: unlocked", INVALID_VALUE, |p| {
            let at = p.managed(MIB, GLOBAL)?;
            answer(p.unregister(at))
        }),
        row("prefetch: to the device and back", SUCCESS, |p| {
            let stream = p.stream(NON_BLOCKING)?;
            let at = p.managed(4 * MIB, GLOBAL)?;
            p.prefetch(at, 4 * MIB, 0, stream)?;
            p.set32(at, 7, MIB, stream)?;
            p.prefetch(at, MIB, CPU, stream)?;
            ensure(p.read32(at, stream)? == 7, "it holds what was written")?;
            answer(p.free(at))
        }),
        row("prefetch: no bytes", INVALID_VALUE, |p| {
            let stream = p.stream(NON_BLOCKING)?;
            let at = p.managed(MIB, GLOBAL)?;
            answer(p.prefetch(at, 0, 0, stream))
        }),
        row("prefetch: memory of cuMemAlloc", INVALID_VALUE, |p| {
            let stream = p.stream(NON_BLOCKING)?;
            let at = p.alloc(MIB)?;
            answer(p.prefetch(at, MIB, 0, stream))
        }),
        row("prefetch: to a device that is not there", INVALID_DEVICE, |p| {
            let stream = p.stream(NON_BLOCKING)?;
            let at = p.managed(MIB, GLOBAL)?;
            answer(p.prefetch(at, MIB, 100, stream))
        }),
    ]
}
