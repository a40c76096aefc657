//! What device work finds in memory: aliases, order, and addresses that lead nowhere.

use super::*;

const NOT_REGISTERED: &[CUresult] = &[CUresult::CUDA_ERROR_HOST_MEMORY_NOT_REGISTERED];

pub(crate) fn rows() -> Vec<Row> {
    vec![
        row("memset: of mapped memory with access", SUCCESS, |p| {
            let stream = p.stream(NON_BLOCKING)?;
            let at = p.open(&[p.g])?;
            let code = answer(p.set32(at, 0xABCD_1234, p.g / 4, stream))?;
            ensure(p.read32(at + p.g - 4, stream)? == 0xABCD_1234, "the last word is set")?;
            Ok(code)
        }),
        row("memset: across the border of two mappings", SUCCESS, |p| {
            let stream = p.stream(NON_BLOCKING)?;
            let at = p.open(&[p.g, p.g])?;
            let code = answer(p.set32(at + p.g - 64, 5, 32, stream))?;
            ensure(p.read32(at + p.g - 4, stream)? == 5, "set below the border")?;
            ensure(p.read32(at + p.g + 60, stream)? == 5, "set above the border")?;
            Ok(code)
        }),
        row("memset: of reserved, unmapped space", INVALID_VALUE, |p| {
            let stream = p.stream(NON_BLOCKING)?;
            let at = p.reserve(p.g)?;
            answer(p.set32(at, 1, 8, stream))
        }),
        row("memset: of unmapped space that was mapped before", INVALID_VALUE, |p| {
            let stream = p.stream(NON_BLOCKING)?;
            let at = p.open(&[p.g])?;
            p.unmap(at, p.g)?;
            answer(p.set32(at, 1, 8, stream))
        }),
        row("copy: to unmapped space", INVALID_VALUE, |p| {
            let stream = p.stream(NON_BLOCKING)?;
            let from = p.open(&[p.g])?;
            let to = p.reserve(p.g)?;
            answer(p.copy(to, from, 64, stream))
        }),
        row("copy: from unmapped space", INVALID_VALUE, |p| {
            let stream = p.stream(NON_BLOCKING)?;
            let to = p.open(&[p.g])?;
            let from = p.reserve(p.g)?;
            answer(p.copy(to, from, 64, stream))
        }),
        row("alias: what is written through one address is read through the other", SUCCESS, |p| {
            let stream = p.stream(NON_BLOCKING)?;
            let handle = p.create(p.g)?;
            let (a, b) = (p.map_anew(handle, p.g)?, p.map_anew(handle, p.g)?);
            p.set32(a, 17, 16, stream)?;
            ensure(p.read32(b + 60, stream)? == 17, "b shows what a got")?;
            p.set32(b, 18, 16, stream)?;
            ensure(p.read32(a, stream)? == 18, "a shows what b got")?;
            Ok(CUresult::CUDA_SUCCESS)
        }),
        row("alias: memory moved to a fresh address keeps its bytes", SUCCESS, |p| {
            let stream = p.stream(NON_BLOCKING)?;
            let handle = p.create(p.g)?;
            let old = p.map_anew(handle, p.g)?;
            p.fill(old, p.g / 8, 3, stream)?;
            let new = p.map_anew(handle, p.g)?;
            let errors = p.host_words(1)?;
            p.check(new, p.g / 8, 3, errors, stream)?;
            p.stream_sync(stream)?;
            let code = answer(p.unmap(old, p.g))?;
            p.check(new, p.g / 8, 3, errors, stream)?;
            p.stream_sync(stream)?;
            ensure(read_host(errors) == 0, "every word is right, before and after the unmap")?;
            Ok(code)
        }),
        row("alias: granules in reverse order at the new address", SUCCESS, |p| {
            let stream = p.stream(NON_BLOCKING)?;
            let handles = [p.create(p.g)?, p.create(p.g)?, p.create(p.g)?];
            let (old, new) = (p.reserve(3 * p.g)?, p.reserve(3 * p.g)?);
            for (i, &handle) in (0..).zip(&handles) {
                p.map(old + i * p.g, p.g, 0, handle)?;
                p.map(new + (2 - i) * p.g, p.g, 0, handle)?;
            }
            p.set_access(old, 3 * p.g)?;
            p.set_access(new, 3 * p.g)?;
            for i in 0..3 {
                p.set32(old + i * p.g, 100 + i as u32, p.g / 4, stream)?;
            }
            for i in 0..3 {
                let found = p.read32(new + (2 - i) * p.g + 4, stream)?;
                ensure(found == 100 + i as u32, "granule i is at place 2 - i")?;
            }
            Ok(CUresult::CUDA_SUCCESS)
        }),
        row("kernels: a pattern is written and checked", SUCCESS, |p| {
            let stream = p.stream(NON_BLOCKING)?;
            let at = p.open(&[p.g, p.g])?;
            let errors = p.host_words(1)?;
            p.fill(at, p.g / 4, 11, stream)?;
            p.check(at, p.g / 4, 11, errors, stream)?;
            p.stream_sync(stream)?;
            ensure(read_host(errors) == 0, "no word differs")?;
            p.set32(at + p.g, 0, 6, stream)?;
            p.check(at, p.g / 4, 11, errors, stream)?;
            p.stream_sync(stream)?;
            ensure(read_host(errors) == 3, "three words differ after three were overwritten")?;
            Ok(CUresult::CUDA_SUCCESS)
        }),
        row(
            "kernels: the pattern is the one that the host computes, at every stride",
            SUCCESS,
            |p| {
                let stream = p.stream(NON_BLOCKING)?;
                let at = p.open(&[p.g])?;
                for (stride, words, seed) in [(1, 5000, 0), (64, 1000, u64::MAX - 10)] {
                    p.set32(at, 0, p.g / 4, stream)?;
                    p.fill_strided(at, words, stride, seed, stream)?;
                    for index in [0, 1, 17, words - 1] {
                        let word = at + index * stride * 8;
                        let low = u64::from(p.read32(word, stream)?);
                        let high = u64::from(p.read32(word + 4, stream)?);
                        let mix = cuda_sim::kernels::mix(seed, index);
                        ensure(low | high << 32 == mix, "the word is the host's")?;
                    }
                    let behind = at + ((words - 1) * stride + 1) * 8;
                    ensure(p.read32(behind, stream)? == 0, "nothing is written behind the last")?;
                }
                Ok(CUresult::CUDA_SUCCESS)
            },
        ),
        row("order: work on one stream sees what came before on it", SUCCESS, |p| {
            let stream = p.stream(NON_BLOCKING)?;
            let at = p.open(&[p.g])?;
            let hold = p.hold(stream)?;
            for value in 1..=50 {
                p.set32(at, value, 4, stream)?;
                p.copy(at + 1024, at, 16, stream)?;
            }
            hold.release();
            ensure(p.read32(at + 1024, stream)? == 50, "the last value was copied")?;
            Ok(CUresult::CUDA_SUCCESS)
        }),
        row("order: a wait on an event brings another stream's writes", SUCCESS, |p| {
            let (first, second) = (p.stream(NON_BLOCKING)?, p.stream(NON_BLOCKING)?);
            let at = p.open(&[p.g])?;
            let event = p.event()?;
            let hold = p.hold(first)?;
            p.set32(at, 77, 4, first)?;
            p.record(event, first)?;
            let code = answer(p.wait(second, event))?;
            p.copy(at + 4096, at, 16, second)?;
            let waits = answer(p.stream_query(second))?;
            hold.release();
            ensure(waits == CUresult::CUDA_ERROR_NOT_READY, "the second stream waits")?;
            ensure(p.read32(at + 4096, second)? == 77, "the copy came after the write")?;
            Ok(code)
        }),
        row("copy: of no bytes, for the host, does not wait", SUCCESS, |p| {
            // The legacy stream waits for this one, and so does a copy of some bytes.
            let stream = p.stream(0)?;
            let at = p.alloc(MIB)?;
            let hold = p.hold(stream)?;
            let code = answer(p.fetch(&mut [], at))?;
            p.put(at, &[])?;
            let waits = answer(p.stream_query(stream))?;
            hold.release();
            ensure(waits == CUresult::CUDA_ERROR_NOT_READY, "the kernel still runs")?;
            Ok(code)
        }),
        row("copy: from nowhere, for the host, does not wait", INVALID_VALUE, |p| {
            let stream = p.stream(0)?;
            let hold = p.hold(stream)?;
            let code = answer(p.fetch(&mut [0; 64], 16))?;
            let waits = answer(p.stream_query(stream))?;
            hold.release();
            ensure(waits == CUresult::CUDA_ERROR_NOT_READY, "the kernel still runs")?;
            Ok(code)
        }),
        row("copy: to nowhere, for the host, does not wait", INVALID_VALUE, |p| {
            let stream = p.stream(0)?;
            let hold = p.hold(stream)?;
            let code = answer(p.put(16, &[0; 64]))?;
            let waits = answer(p.stream_query(stream))?;
            hold.release();
            ensure(waits == CUresult::CUDA_ERROR_NOT_READY, "the kernel still runs")?;
            Ok(code)
        }),
        row("page-lock: device memory", INVALID_VALUE, |p| {
            let at = p.alloc(MIB)?;
            answer(p.register_at(at, 4096))
        }),
        row("page-lock: what is page-locked already", INVALID_VALUE, |p| {
            let at = p.host_words(512)?;
            answer(p.register_at(at, 4096))
        }),
        row("page-lock: undone for device memory", INVALID_VALUE, |p| {
            let at = p.alloc(MIB)?;
            answer(p.unregister(at))
        }),
        row("page-lock: undone for memory that the driver allocated", INVALID_VALUE, |p| {
            let at = p.host_words(512)?;
            answer(p.unregister(at))
        }),
        row("page-lock: undone where nothing was", NOT_REGISTERED, |p| {
            answer(p.unregister(vec![0u8; 4096].as_ptr() as u64))
        }),
        row("page-locked memory: freed inside", INVALID_VALUE, |p| {
            let at = p.host_words(512)?;
            answer(p.free_host(at + 8))
        }),
        row("page-locked memory: freed as device memory", INVALID_VALUE, |p| {
            let at = p.host_words(512)?;
            answer(p.free(at))
        }),
        row("page-locked memory: freed where device memory is", INVALID_VALUE, |p| {
            let at = p.alloc(MIB)?;
            answer(p.free_host(at))
        }),
        row("page-locked memory: its range", SUCCESS, |p| {
            let at = p.host_words(512)?;
            ensure(p.address_range(at + 8)?.0 == at, "it begins where the memory does")?;
            Ok(CUresult::CUDA_SUCCESS)
        }),
        row("page-locked memory: what device memory says of it", INVALID_VALUE, |p| {
            let at = p.alloc(MIB)?;
            ensure(
                answer(p.host_device_pointer(at))? == CUresult::CUDA_ERROR_INVALID_VALUE,
                "it has no other address",
            )?;
            answer(p.host_flags(at))
        }),
        row("unmap: of one range while a kernel runs elsewhere does not wait", SUCCESS, |p| {
            let stream = p.stream(NON_BLOCKING)?;
            let at = p.open(&[p.g])?;
            let hold = p.hold(stream)?;
            let code = answer(p.unmap(at, p.g))?;
            ensure(
                answer(p.stream_query(stream))? == CUresult::CUDA_ERROR_NOT_READY,
                "the kernel still runs",
            )?;
            hold.release();
            Ok(code)
        }),
        row("map and set access: while a kernel runs does not wait", SUCCESS, |p| {
            let stream = p.stream(NON_BLOCKING)?;
            let hold = p.hold(stream)?;
            let code = answer(p.open(&[p.g, p.g]))?;
            ensure(
                answer(p.stream_query(stream))? == CUresult::CUDA_ERROR_NOT_READY,
                "the kernel still runs",
            )?;
            hold.release();
            Ok(code)
        }),
        row("wait value: with a flush that the device does not have", NOT_SUPPORTED, |p| {
            let flushes = CUdevice_attribute::CU_DEVICE_ATTRIBUTE_CAN_FLUSH_REMOTE_WRITES;
            if p.attribute(flushes)? != 0 {
                return Ok(CUresult::CUDA_ERROR_NOT_SUPPORTED);
            }
            let (stream, at) = (p.stream(NON_BLOCKING)?, p.alloc(MIB)?);
            let flush = CUstreamWaitValue_flags_enum::CU_STREAM_WAIT_VALUE_FLUSH.0;
            answer(p.wait_value(stream, at, 0, flush))
        }),
        row("wait value: at an address that is not a multiple of 4", INVALID_VALUE, |p| {
            let (stream, at) = (p.stream(NON_BLOCKING)?, p.alloc(MIB)?);
            answer(p.wait_value(stream, at + 2, 0, 0))
        }),
        row("wait value: where nothing is", INVALID_VALUE, |p| {
            let stream = p.stream(NON_BLOCKING)?;
            answer(p.wait_value(stream, 16, 0, 0))
        }),
        row("wait value: with flags that do not exist", INVALID_VALUE, |p| {
            let (stream, at) = (p.stream(NON_BLOCKING)?, p.alloc(MIB)?);
            answer(p.wait_value(stream, at, 0, 77))
        }),
        row("write value: at an address that is not a multiple of 8", INVALID_VALUE, |p| {
            let (stream, at) = (p.stream(NON_BLOCKING)?, p.alloc(MIB)?);
            answer(p.write_value(stream, at + 4, 3))
        }),
        row("write value: 64 bits to host memory, after the stream's work", SUCCESS, |p| {
            let stream = p.stream(NON_BLOCKING)?;
            let word = p.host_words(1)?;
            let hold = p.hold(stream)?;
            let code = answer(p.write_value(stream, word, 0x1_0000_0007))?;
            ensure(read_host(word) == 0, "not written while the kernel runs")?;
            hold.release();
            p.stream_sync(stream)?;
            ensure(read_host(word) == 0x1_0000_0007, "written in the end")?;
            Ok(code)
        }),
    ]
}

/// Reads a word of the probe's page-locked memory that device work may change.
fn read_host(at: u64) -> u64 {
    use std::sync::atomic::{AtomicU64, Ordering};
    // SAFETY: the word is aligned page-locked memory that the probe frees only after the row.
    unsafe { AtomicU64::from_ptr(at as *mut u64) }.load(Ordering::Acquire)
}
