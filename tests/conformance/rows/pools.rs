//! The driver's own allocators.

use super::*;

const THRESHOLD: CUmemPool_attribute = CUmemPool_attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD;
const USED: CUmemPool_attribute = CUmemPool_attribute::CU_MEMPOOL_ATTR_USED_MEM_CURRENT;
const RESERVED: CUmemPool_attribute = CUmemPool_attribute::CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT;

pub(crate) fn rows() -> Vec<Row> {
    vec![
        row("alloc: 1 MiB", SUCCESS, |p| {
            let at = p.alloc(MIB)?;
            let stream = p.stream(NON_BLOCKING)?;
            p.set32(at, 6, MIB / 4, stream)?;
            ensure(p.read32(at + MIB - 4, stream)? == 6, "it holds what is written")?;
            answer(p.free(at))
        }),
        row("alloc: size 0", INVALID_VALUE, |p| answer(p.alloc(0))),
        row("alloc: more than any GPU has", OUT_OF_MEMORY, |p| answer(p.alloc(16 * TIB))),
        row("alloc: at least 256-byte alignment", SUCCESS, |p| {
            let addresses = [p.alloc(1)?, p.alloc(3)?, p.alloc(257)?];
            let aligned = addresses.iter().all(|at| at.is_multiple_of(256));
            ensure(aligned, "every address is a multiple of 256")?;
            Ok(CUresult::CUDA_SUCCESS)
        }),
        row("free: a mapped address that cuMemAlloc did not give", INVALID_VALUE, |p| {
            let at = p.open(&[p.g])?;
            answer(p.free(at))
        }),
        row("free: inside an allocation", INVALID_VALUE, |p| {
            let at = p.alloc(MIB)?;
            answer(p.free(at + 512))
        }),
        row("free: twice", INVALID_VALUE, |p| {
            let at = p.alloc(MIB)?;
            p.free(at)?;
            answer(p.free(at))
        }),
        row("free async: inside an allocation", INVALID_VALUE, |p| {
            let stream = p.stream(NON_BLOCKING)?;
            let at = p.alloc_async(MIB, stream)?;
            answer(p.free_async(at + 512, stream))
        }),
        row("free async: a mapped address that no allocator gave", INVALID_VALUE, |p| {
            let stream = p.stream(NON_BLOCKING)?;
            let at = p.open(&[p.g])?;
            answer(p.free_async(at, stream))
        }),
        row("alloc async: usable in stream order", SUCCESS, |p| {
            let stream = p.stream(NON_BLOCKING)?;
            let at = p.alloc_async(MIB, stream)?;
            p.set32(at, 8, MIB / 4, stream)?;
            ensure(p.read32(at + MIB - 4, stream)? == 8, "it holds what is written")?;
            answer(p.free_async(at, stream))
        }),
        row("alloc async: more than any GPU has", OUT_OF_MEMORY, |p| {
            let stream = p.stream(NON_BLOCKING)?;
            answer(p.alloc_async(16 * TIB, stream))
        }),
        row("free async: on another stream, ordered by an event", SUCCESS, |p| {
            let (first, second) = (p.stream(NON_BLOCKING)?, p.stream(NON_BLOCKING)?);
            let event = p.event()?;
            let at = p.alloc_async(MIB, first)?;
            p.set32(at, 8, MIB / 4, first)?;
            p.record(event, first)?;
            p.wait(second, event)?;
            answer(p.free_async(at, second))
        }),
        row("free async: memory of cuMemAlloc", SUCCESS, |p| {
            let stream = p.stream(NON_BLOCKING)?;
            let at = p.alloc(MIB)?;
            answer(p.free_async(at, stream))
        }),
        row("free: memory of cuMemAllocAsync", SUCCESS, |p| {
            let stream = p.stream(NON_BLOCKING)?;
            let at = p.alloc_async(MIB, stream)?;
            p.stream_sync(stream)?;
            answer(p.free(at))
        }),
        row("free async: does not wait for the stream", SUCCESS, |p| {
            let stream = p.stream(NON_BLOCKING)?;
            let at = p.alloc_async(MIB, stream)?;
            let hold = p.hold(stream)?;
            let code = answer(p.free_async(at, stream));
            let still = answer(p.stream_query(stream))?;
            hold.release();
            ensure(still == CUresult::CUDA_ERROR_NOT_READY, "the stream is still busy")?;
            code
        }),
        row("pool: the default pool keeps nothing", SUCCESS, |p| {
            ensure(p.pool_u64(p.default_pool()?, THRESHOLD)? == 0, "its threshold is 0")?;
            Ok(CUresult::CUDA_SUCCESS)
        }),
        row("pool: of our own: what is used is counted", SUCCESS, |p| {
            let stream = p.stream(NON_BLOCKING)?;
            let pool = p.pool()?;
            let at = p.alloc_from(pool, 3 * MIB, stream)?;
            ensure(p.pool_u64(pool, USED)? >= 3 * MIB, "it is used")?;
            ensure(p.pool_u64(pool, RESERVED)? >= 3 * MIB, "it is reserved")?;
            let code = answer(p.free_async(at, stream))?;
            p.stream_sync(stream)?;
            ensure(p.pool_u64(pool, USED)? == 0, "it is used no more")?;
            Ok(code)
        }),
        row("pool: trimming an idle pool gives its memory back", SUCCESS, |p| {
            let stream = p.stream(NON_BLOCKING)?;
            let pool = p.pool()?;
            let at = p.alloc_from(pool, 3 * MIB, stream)?;
            p.free_async(at, stream)?;
            p.stream_sync(stream)?;
            let code = answer(p.pool_trim(pool, 0))?;
            ensure(p.pool_u64(pool, RESERVED)? == 0, "nothing is reserved")?;
            Ok(code)
        }),
        row("pool: destroy with memory in use", SUCCESS, |p| {
            let stream = p.stream(NON_BLOCKING)?;
            let pool = p.pool()?;
            let at = p.alloc_from(pool, MIB, stream)?;
            let code = answer(p.pool_destroy(pool))?;
            p.set32(at, 5, 4, stream)?;
            ensure(p.read32(at, stream)? == 5, "the memory is still good")?;
            p.free_async(at, stream)?;
            Ok(code)
        }),
    ]
}
