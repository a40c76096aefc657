//! Allocation by the driver: cuMemAlloc, stream-ordered pools, and page-locked host memory.

mod support;

use std::ptr::null_mut;
use std::time::Duration;

use cuda_sim::{Schedule, Simulator};
use cuda_sys::types::*;
use support::{Gpu, MIB, call, location, ok};

const INVALID: CUresult = CUresult::CUDA_ERROR_INVALID_VALUE;
const OOM: CUresult = CUresult::CUDA_ERROR_OUT_OF_MEMORY;
const LATE: Schedule = Schedule::Late { patience: 100 };

impl Gpu {
    fn take(&self, bytes: usize, stream: CUstream) -> u64 {
        let mut at = 0;
        ok!(self, cuMemAllocAsync(&mut at, bytes, stream));
        at
    }

    fn default_pool(&self) -> CUmemoryPool {
        let mut pool = null_mut();
        ok!(self, cuDeviceGetDefaultMemPool(&mut pool, 0));
        pool
    }

    fn get(&self, pool: CUmemoryPool, attribute: CUmemPool_attribute) -> u64 {
        let mut value = 0_u64;
        ok!(self, cuMemPoolGetAttribute(pool, attribute, (&raw mut value).cast()));
        value
    }

    fn set<T>(&self, pool: CUmemoryPool, attribute: CUmemPool_attribute, mut value: T) {
        ok!(self, cuMemPoolSetAttribute(pool, attribute, (&raw mut value).cast()));
    }

    fn keep_everything(&self) {
        let pool = self.default_pool();
        self.set(pool, CUmemPool_attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD, u64::MAX);
    }
}

#[test]
fn the_freeing_stream_has_the_block_back_at_once() {
    let gpu = Gpu::new(Simulator::builder().schedule(LATE));
    let (a, b) = (gpu.stream(), gpu.stream());
    let first = gpu.take(MIB, a);
    gpu.fill(first, 1, 4, a);
    ok!(gpu, cuMemFreeAsync(first, a));
    // Nothing orders b after that: it gets other memory.
    let other = gpu.take(MIB, b);
    assert_ne!(first, other);
    assert_eq!(gpu.take(MIB, a), first);
    gpu.sim.assert_clean();
}

#[test]
fn another_stream_follows_events() {
    let gpu = Gpu::new(Simulator::builder().schedule(LATE));
    let (a, b) = (gpu.stream(), gpu.stream());
    let first = gpu.take(20 * MIB, a);
    gpu.fill(first, 1, 4, a);
    ok!(gpu, cuMemFreeAsync(first, a));
    let event = gpu.record(a);
    ok!(gpu, cuStreamWaitEvent(b, event, 0));
    let second = gpu.take(20 * MIB, b);
    assert_eq!(first, second);
    gpu.fill(second, 2, 4, b);
    ok!(gpu, cuStreamSynchronize(b));
    gpu.sim.assert_clean();
}

#[test]
fn another_stream_gets_what_has_run() {
    let gpu = Gpu::new(Simulator::builder());
    gpu.keep_everything();
    let (a, b) = (gpu.stream(), gpu.stream());
    let first = gpu.take(20 * MIB, a);
    gpu.fill(first, 1, 4, a);
    ok!(gpu, cuMemFreeAsync(first, a));
    let second = gpu.take(20 * MIB, b);
    assert_eq!(first, second, "the free has run, whether or not the host knows");
    gpu.fill(second, 2, 4, b);
    gpu.sim.assert_clean();
    // Without that leave, only what the host knows counts.
    ok!(gpu, cuMemFreeAsync(second, b));
    let pool = gpu.default_pool();
    gpu.set(pool, CUmemPool_attribute::CU_MEMPOOL_ATTR_REUSE_ALLOW_OPPORTUNISTIC, 0_i32);
    assert_ne!(gpu.take(20 * MIB, a), second);
    ok!(gpu, cuStreamSynchronize(b));
    assert_eq!(gpu.take(20 * MIB, a), second);
    gpu.sim.assert_clean();
}

#[test]
fn no_use_is_beside_the_free() {
    for schedule in [LATE, Schedule::Eager] {
        // Whether the use comes before the free, on the GPU or as the host has seen, or beside it.
        for (order, expected) in [("before", 0), ("seen", 0), ("beside", 1)] {
            let gpu = Gpu::new(Simulator::builder().schedule(schedule));
            gpu.keep_everything();
            let (own, user) = (gpu.stream(), gpu.stream());
            let block = gpu.take(MIB, own);
            ok!(gpu, cuStreamWaitEvent(user, gpu.record(own), 0));
            gpu.fill(block, 1, 4, user);
            if order == "before" {
                ok!(gpu, cuStreamWaitEvent(own, gpu.record(user), 0));
            }
            if order == "seen" {
                ok!(gpu, cuStreamSynchronize(user));
            }
            ok!(gpu, cuMemFreeAsync(block, own));
            ok!(gpu, cuCtxSynchronize());
            let races = gpu.sim.report().races;
            assert_eq!(races.len(), expected, "{order}: {races:?}");
        }
    }
}

#[test]
fn no_use_is_beside_the_allocation() {
    for schedule in [LATE, Schedule::Eager] {
        for (ordered, expected) in [(true, 0), (false, 1)] {
            let gpu = Gpu::new(Simulator::builder().schedule(schedule));
            gpu.keep_everything();
            let (own, user) = (gpu.stream(), gpu.stream());
            let block = gpu.take(MIB, own);
            if ordered {
                ok!(gpu, cuStreamWaitEvent(user, gpu.record(own), 0));
            }
            gpu.fill(block, 1, 4, user);
            ok!(gpu, cuCtxSynchronize());
            let races = gpu.sim.report().races;
            assert_eq!(races.len(), expected, "{ordered}: {races:?}");
        }
    }
}

/// As the documentation of cuMemFree says: it waits for nothing where the memory is a pool's.
#[test]
fn the_host_frees_memory_of_a_pool_that_it_knows_to_be_unused() {
    for schedule in [LATE, Schedule::Eager] {
        for waits in [true, false] {
            let gpu = Gpu::new(Simulator::builder().schedule(schedule));
            gpu.keep_everything();
            let (stream, other) = (gpu.stream_with(0), gpu.stream());
            let block = gpu.take(20 * MIB, stream);
            gpu.fill(block, 1, 4, stream);
            if waits {
                ok!(gpu, cuStreamSynchronize(stream));
            }
            ok!(gpu, cuMemFree_v2(block));
            assert_eq!(gpu.take(20 * MIB, other), block, "it is anybody's at once");
            ok!(gpu, cuCtxSynchronize());
            let races = gpu.sim.report().races;
            assert_eq!(races.is_empty(), waits, "{races:?}");
        }
    }
}

/// Nothing orders memory's next owner after that, whoever it is, and the bytes may be anybody's.
#[test]
fn no_use_comes_after_the_free() {
    for schedule in [LATE, Schedule::Eager] {
        let gpu = Gpu::new(Simulator::builder().schedule(schedule));
        gpu.keep_everything();
        let stream = gpu.stream();
        let block = gpu.take(MIB, stream);
        gpu.fill(block, 1, 4, stream);
        ok!(gpu, cuMemFreeAsync(block, stream));
        gpu.fill(block + 4, 2, 1, stream);
        ok!(gpu, cuCtxSynchronize());
        let misuse = gpu.sim.report().misuse;
        assert_eq!(misuse.len(), 1, "{misuse:?}");
        assert!(misuse[0].contains("of memory that `cuMemFreeAsync` on"), "{misuse:?}");
        // Who has it next may use it, as far as it goes.
        let again = gpu.take(1000, stream);
        assert_eq!(again, block);
        gpu.fill(again, 3, 250, stream);
        ok!(gpu, cuCtxSynchronize());
        assert_eq!(gpu.sim.report().misuse.len(), 1);
        gpu.fill(again, 3, 251, stream);
        ok!(gpu, cuCtxSynchronize());
        assert_eq!(gpu.sim.report().misuse.len(), 2, "beyond its end");
        assert!(gpu.sim.report().races.is_empty());
    }
}

/// Words that are written and waited for order nothing and race with nothing, but are somebody's too.
#[test]
fn no_word_is_used_after_the_free() {
    let gpu = Gpu::new(Simulator::builder().schedule(LATE));
    gpu.keep_everything();
    let stream = gpu.stream();
    let block = gpu.take(MIB, stream);
    ok!(gpu, cuStreamWriteValue64_v2(stream, block, 7, 0));
    ok!(gpu, cuStreamWaitValue32_v2(stream, block, 7, 1));
    ok!(gpu, cuMemFreeAsync(block, stream));
    ok!(gpu, cuCtxSynchronize());
    gpu.sim.assert_clean();
    ok!(gpu, cuStreamWriteValue32_v2(stream, block, 8, 0));
    ok!(gpu, cuCtxSynchronize());
    ok!(gpu, cuStreamWaitValue32_v2(stream, block, 8, 1));
    ok!(gpu, cuCtxSynchronize());
    let misuse = gpu.sim.report().misuse;
    assert_eq!(misuse.len(), 2, "{misuse:?}");
    for (what, kind) in misuse.iter().zip(["write", "read"]) {
        assert!(
            what.contains(kind) && what.contains("of memory that `cuMemFreeAsync` on"),
            "{what}"
        );
    }
    assert!(gpu.sim.report().races.is_empty());
}

/// Small blocks share a granule, so that their addresses stay mapped.
#[test]
fn what_cu_mem_free_took_is_used_no_more() {
    let gpu = Gpu::new(Simulator::builder());
    let (a, b) = (gpu.stream(), gpu.stream());
    let [_stays, block] = [gpu.alloc(64), gpu.alloc(64)];
    gpu.fill(block, 1, 4, a);
    ok!(gpu, cuMemFree_v2(block));
    gpu.fill(block, 2, 4, a);
    ok!(gpu, cuCtxSynchronize());
    let misuse = gpu.sim.report().misuse;
    assert_eq!(misuse.len(), 1, "{misuse:?}");
    assert!(misuse[0].contains("of memory that `cuMemFree_v2` on the host"), "{misuse:?}");
    // In a stream's order it is freed as memory of a pool is, and every stream's afterwards.
    assert_eq!(gpu.alloc(64), block);
    gpu.fill(block, 3, 4, a);
    ok!(gpu, cuMemFreeAsync(block, a));
    assert_eq!(gpu.alloc(64), block);
    gpu.fill(block, 4, 4, b);
    assert!(gpu.sim.report().races.is_empty());
    ok!(gpu, cuMemFreeAsync(block, a));
    ok!(gpu, cuCtxSynchronize());
    assert_eq!(gpu.sim.report().races.len(), 1, "b's use is beside the free");
}

#[test]
fn at_the_limit_a_wait_is_inserted() {
    let gpu = Gpu::new(Simulator::builder().schedule(LATE).memory_bytes(64 << 20));
    let (a, b) = (gpu.stream(), gpu.stream());
    let first = gpu.take(40 * MIB, a);
    gpu.fill(first, 1, 4, a);
    ok!(gpu, cuMemFreeAsync(first, a));
    let second = gpu.take(40 * MIB, b);
    assert_eq!(first, second);
    gpu.fill(second, 2, 4, b);
    ok!(gpu, cuStreamSynchronize(b));
    assert_eq!(gpu.word(second), 2, "a's work came first");
    gpu.sim.assert_clean();
    ok!(gpu, cuMemFreeAsync(second, b));
    let pool = gpu.default_pool();
    gpu.set(pool, CUmemPool_attribute::CU_MEMPOOL_ATTR_REUSE_ALLOW_INTERNAL_DEPENDENCIES, 0_i32);
    let mut at = 0;
    assert_eq!(call!(gpu, cuMemAllocAsync(&mut at, 40 * MIB, a)), OOM);
}

#[test]
fn unused_memory_goes_back_at_a_sync_beyond_the_threshold() {
    use CUmemPool_attribute as A;
    let gpu = Gpu::new(Simulator::builder());
    let stream = gpu.stream();
    let pool = gpu.default_pool();
    let block = gpu.take(100 * MIB, stream);
    assert_eq!(gpu.get(pool, A::CU_MEMPOOL_ATTR_USED_MEM_CURRENT), 100 << 20);
    assert_eq!(gpu.sim.memory_used(0), 100 << 20);
    ok!(gpu, cuMemFreeAsync(block, stream));
    assert_eq!(gpu.get(pool, A::CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT), 100 << 20);
    ok!(gpu, cuStreamSynchronize(stream));
    assert_eq!(gpu.sim.memory_used(0), 0);
    assert_eq!(gpu.get(pool, A::CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH), 100 << 20);
    gpu.set(pool, A::CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH, 0_u64);
    assert_eq!(gpu.get(pool, A::CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH), 0);

    gpu.keep_everything();
    let block = gpu.take(100 * MIB, stream);
    ok!(gpu, cuMemFreeAsync(block, stream));
    ok!(gpu, cuStreamSynchronize(stream));
    assert_eq!(gpu.sim.memory_used(0), 100 << 20);
    ok!(gpu, cuMemPoolTrimTo(pool, 200 << 20));
    assert_eq!(gpu.sim.memory_used(0), 100 << 20);
    ok!(gpu, cuMemPoolTrimTo(pool, 0));
    assert_eq!(gpu.sim.memory_used(0), 0);
}

#[test]
fn bad_frees_change_nothing() {
    let gpu = Gpu::new(Simulator::builder());
    let stream = gpu.stream();
    let block = gpu.take(MIB, stream);
    assert_eq!(call!(gpu, cuMemFreeAsync(block + 512, stream)), INVALID, "interior");
    assert_eq!(call!(gpu, cuMemFreeAsync(0x1234, stream)), INVALID, "foreign");
    ok!(gpu, cuMemFreeAsync(block, stream));
    assert_eq!(call!(gpu, cuMemFreeAsync(block, stream)), INVALID, "twice");
    // Also where the first free joined the block to one before it.
    let pair = [gpu.take(MIB, stream), gpu.take(MIB, stream)];
    for block in pair {
        ok!(gpu, cuMemFreeAsync(block, stream));
    }
    for block in pair {
        assert_eq!(call!(gpu, cuMemFreeAsync(block, stream)), INVALID, "twice");
    }
    assert_eq!(gpu.sim.leaks().allocations, 0);
}

#[test]
fn pools_of_ones_own() {
    let gpu = Gpu::new(Simulator::builder());
    let stream = gpu.stream();
    let props = CUmemPoolProps {
        allocType: CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED,
        location: location(0),
        maxSize: 64 * MIB,
        ..Default::default()
    };
    let mut pool = null_mut();
    ok!(gpu, cuMemPoolCreate(&mut pool, &props));
    let mut block = 0;
    ok!(gpu, cuMemAllocFromPoolAsync(&mut block, 40 * MIB, pool, stream));
    let mut more = 0;
    let code = call!(gpu, cuMemAllocFromPoolAsync(&mut more, 40 * MIB, pool, stream));
    assert_eq!(code, OOM, "beyond maxSize");
    // A destroyed pool lives as long as its allocations.
    ok!(gpu, cuMemPoolDestroy(pool));
    gpu.fill(block, 3, 1, stream);
    assert_eq!(gpu.word(block), 3);
    ok!(gpu, cuMemFreeAsync(block, stream));
    ok!(gpu, cuStreamSynchronize(stream));
    assert_eq!(gpu.sim.memory_used(0), 0);
    gpu.sim.assert_clean();
    assert_eq!(call!(gpu, cuMemPoolTrimTo(pool, 0)), INVALID);
}

/// Frees that have not been passed keep a destroyed pool's memory until they are.
#[test]
fn a_destroyed_pool_waits_for_its_frees() {
    let gpu = Gpu::new(Simulator::builder().schedule(LATE));
    let stream = gpu.stream();
    let props = CUmemPoolProps {
        allocType: CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED,
        location: location(0),
        ..Default::default()
    };
    for freed_first in [false, true] {
        let before = gpu.sim.memory_used(0);
        let mut pool = null_mut();
        ok!(gpu, cuMemPoolCreate(&mut pool, &props));
        let mut at = 0;
        ok!(gpu, cuMemAllocFromPoolAsync(&mut at, MIB, pool, stream));
        gpu.fill(at, 1, 4, stream);
        if freed_first {
            ok!(gpu, cuMemFreeAsync(at, stream));
            ok!(gpu, cuMemPoolDestroy(pool));
        } else {
            ok!(gpu, cuMemPoolDestroy(pool));
            ok!(gpu, cuMemFreeAsync(at, stream));
        }
        // The work that uses it has not run.
        assert!(gpu.sim.memory_used(0) > before);
        ok!(gpu, cuStreamSynchronize(stream));
        assert_eq!(gpu.sim.memory_used(0), before);
    }
    gpu.sim.assert_clean();
}

#[test]
fn many_blocks_keep_their_bytes() {
    // A deterministic mix of sizes, streams and frees, with every block's pattern checked.
    let gpu = Gpu::new(Simulator::builder().schedule(Schedule::Random).seed(11));
    gpu.keep_everything();
    let streams = [gpu.stream(), gpu.stream(), gpu.stream()];
    let mut live: Vec<(u64, u64, u32, usize)> = Vec::new();
    let mut dice = 1_u64;
    for step in 0..3000_u32 {
        dice = dice.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
        let roll = dice >> 33;
        let stream = (roll % 3) as usize;
        if live.len() < 40 && roll % 5 < 3 {
            let words = 1 + (roll >> 4) % 50_000;
            let at = gpu.take(words as usize * 4, streams[stream]);
            gpu.fill(at, step, words as usize, streams[stream]);
            live.push((at, words, step, stream));
        } else if !live.is_empty() {
            let (at, words, value, stream) = live.swap_remove(roll as usize % live.len());
            let check = move |memory: &mut cuda_sim::DeviceMemory<'_>| {
                for word in [0, words / 2, words - 1] {
                    if memory.read_u32(at + word * 4)? != value {
                        return Err(CUresult::CUDA_ERROR_ASSERT);
                    }
                }
                Ok(())
            };
            gpu.sim.enqueue(streams[stream], "check", check).unwrap();
            ok!(gpu, cuMemFreeAsync(at, streams[stream]));
        }
    }
    ok!(gpu, cuCtxSynchronize());
    gpu.sim.assert_clean();
    assert_eq!(gpu.sim.leaks().allocations, live.len());
}

#[test]
fn mem_alloc_shares_granules_and_free_waits() {
    let gpu = Gpu::new(Simulator::builder().schedule(LATE).memory_bytes(64 << 20));
    let small: Vec<_> = (0..100).map(|_| gpu.alloc(1000)).collect();
    assert_eq!(gpu.sim.memory_used(0), 2 << 20);
    let (mut free, mut total) = (0, 0);
    ok!(gpu, cuMemGetInfo_v2(&mut free, &mut total));
    assert_eq!((free, total), (62 * MIB, 64 * MIB));
    let stream = gpu.stream();
    let watched = gpu.alloc(4);
    gpu.fill(watched, 4, 1, stream);
    ok!(gpu, cuMemFree_v2(small[0]));
    assert_eq!(gpu.word(watched), 4, "cuMemFree waited for the device");
    assert_eq!(call!(gpu, cuMemFree_v2(small[0])), INVALID, "twice");
    for block in &small[1..] {
        ok!(gpu, cuMemFreeAsync(*block, stream));
    }
    ok!(gpu, cuMemFree_v2(watched));
    assert_eq!(gpu.sim.memory_used(0), 0);
    let mut at = 0;
    assert_eq!(call!(gpu, cuMemAlloc_v2(&mut at, 65 * MIB)), OOM);
    gpu.sim.assert_clean();
}

/// As documented: the call returns when the bytes are staged, and other streams know of the copy what
/// the legacy stream's order tells.
#[test]
fn a_synchronous_copy_from_pageable_memory_may_arrive_later() {
    for (flags, expected) in [(0, 0), (1, 1)] {
        let gpu = Gpu::new(Simulator::builder().schedule(LATE));
        let stream = gpu.stream_with(flags);
        let memory = gpu.alloc(4);
        let words = [5_u32];
        ok!(gpu, cuMemcpyHtoD_v2(memory, words.as_ptr().cast(), 4));
        assert_eq!(gpu.word(memory), 0, "it is staged");
        gpu.fill(memory, 6, 1, stream);
        let mut back = 0_u32;
        ok!(gpu, cuMemcpyHtoD_v2(memory, words.as_ptr().cast(), 4));
        ok!(gpu, cuMemcpyDtoH_v2((&raw mut back).cast(), memory, 4));
        assert_eq!(back, 5);
        ok!(gpu, cuCtxSynchronize());
        let races = gpu.sim.report().races;
        assert_eq!(!races.is_empty(), expected == 1, "{races:?}");
    }
    // From page-locked memory it has arrived.
    let gpu = Gpu::new(Simulator::builder().schedule(LATE));
    let (stream, memory) = (gpu.stream(), gpu.alloc(4));
    let mut locked = null_mut();
    ok!(gpu, cuMemAllocHost_v2(&mut locked, 4));
    ok!(gpu, cuMemcpyHtoD_v2(memory, locked, 4));
    gpu.fill(memory, 6, 1, stream);
    ok!(gpu, cuMemFreeHost(locked));
    gpu.sim.assert_clean();
}

/// Its bytes are there when the call returns, or it says that they are not, and they never come.
#[test]
fn a_copy_to_pageable_memory_arrives_or_fails() {
    let gpu = Gpu::new(Simulator::builder().deadlock_after(Duration::from_millis(30)));
    let (stream, memory) = (gpu.stream(), gpu.alloc(4));
    let mut word = 7_u32;
    let to = (&raw mut word).cast();
    let copy = || call!(gpu, cuMemcpyDtoHAsync_v2(to, memory, 4, stream));
    let spin = gpu.sim.spin(stream).unwrap();
    assert_eq!(copy(), CUresult::CUDA_ERROR_LAUNCH_TIMEOUT);
    spin.release();
    ok!(gpu, cuStreamSynchronize(stream));
    assert_eq!(word, 7, "not late either");
    assert_eq!((copy(), word), (CUresult::CUDA_SUCCESS, 0));
    let gpu = Gpu::new(Simulator::builder().schedule(LATE));
    let (stream, memory) = (gpu.stream(), gpu.alloc(4));
    gpu.sim.enqueue(stream, "stray", |memory| memory.write(0x1000, &[1])).unwrap();
    let code = call!(gpu, cuMemcpyDtoHAsync_v2(to, memory, 4, stream));
    assert_eq!(code, CUresult::CUDA_ERROR_ILLEGAL_ADDRESS);
}

/// They would end the program.
#[test]
fn copies_do_not_follow_device_addresses_on_the_host() {
    let gpu = Gpu::new(Simulator::builder());
    let (stream, memory) = (gpu.stream(), gpu.alloc(8));
    let as_host = memory as *mut std::ffi::c_void;
    assert_eq!(call!(gpu, cuMemcpyHtoD_v2(memory + 4, as_host, 4)), INVALID);
    assert_eq!(call!(gpu, cuMemcpyDtoH_v2(as_host, memory + 4, 4)), INVALID);
    assert_eq!(call!(gpu, cuMemcpyHtoDAsync_v2(memory + 4, as_host, 4, stream)), INVALID);
    assert_eq!(call!(gpu, cuMemcpyDtoHAsync_v2(as_host, memory + 4, 4, stream)), INVALID);
    assert_eq!(gpu.sim.report().misuse.len(), 4);
    ok!(gpu, cuMemcpyAsync(memory, memory + 4, 4, stream));
}

/// Device work would follow them as addresses of the host, which they are not.
#[test]
fn device_addresses_are_no_host_memory_to_lock() {
    let gpu = Gpu::new(Simulator::builder());
    let (stream, memory) = (gpu.stream(), gpu.alloc(MIB));
    for (at, bytes) in [(memory, MIB), (1 << 12, memory as usize)] {
        assert_eq!(call!(gpu, cuMemHostRegister_v2(at as *mut _, bytes, 0)), INVALID);
    }
    // The first is refused by a GPU as well; what it does with the second is not known.
    assert_eq!(gpu.sim.report().misuse.len(), 1);
    gpu.fill(memory, 1, 4, stream);
    ok!(gpu, cuCtxSynchronize());
    assert_eq!(gpu.word(memory), 1);
}

#[test]
fn copies_from_pageable_and_locked_memory() {
    let gpu = Gpu::new(Simulator::builder().schedule(LATE));
    let stream = gpu.stream();
    let memory = gpu.alloc(8);
    let mut locked = null_mut();
    ok!(gpu, cuMemAllocHost_v2(&mut locked, 4));
    let locked: *mut u32 = locked.cast();
    let mut pageable = 1_u32;
    // SAFETY: four bytes of page-locked memory, which no work uses yet.
    unsafe { locked.write(1) };
    ok!(gpu, cuMemcpyHtoDAsync_v2(memory, (&raw const pageable).cast(), 4, stream));
    ok!(gpu, cuMemcpyHtoDAsync_v2(memory + 4, locked.cast(), 4, stream));
    // Pageable memory was read at the call; page-locked memory is read when the copy runs.
    pageable = 2;
    // SAFETY: as above; that the copy reads it later is what this test shows.
    unsafe { locked.write(2) };
    ok!(gpu, cuStreamSynchronize(stream));
    assert_eq!((gpu.word(memory), gpu.word(memory + 4)), (1, 2));
    ok!(gpu, cuMemcpyDtoHAsync_v2((&raw mut pageable).cast(), memory, 4, stream));
    assert_eq!(pageable, 1, "a copy to pageable memory has arrived");
    ok!(gpu, cuMemcpyDtoHAsync_v2(locked.cast(), memory, 4, stream));
    // SAFETY: the copy has not run, and runs on this thread when it does.
    assert_eq!(unsafe { locked.read() }, 2);
    ok!(gpu, cuStreamSynchronize(stream));
    // SAFETY: the copy is over.
    assert_eq!(unsafe { locked.read() }, 1);
    ok!(gpu, cuMemFreeHost(locked.cast()));
    gpu.sim.assert_clean();
}
