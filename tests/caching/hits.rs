//! A hit costs no heap allocation and no driver call.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use vpmm::{DevicePtr, StreamHandle};

use crate::support::{Lcg, Rig};

/// The system's allocator, which counts the calls of each thread.
struct Counting;

thread_local! {
    /// Without a destructor, so that it may be used from within an allocator.
    static CALLS: Cell<u64> = const { Cell::new(0) };
}

#[global_allocator]
static HEAP: Counting = Counting;

// SAFETY: every call is passed on to the system's allocator as it came; what is not here calls these.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        CALLS.with(|calls| calls.set(calls.get() + 1));
        // SAFETY: passed on to the caller.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        CALLS.with(|calls| calls.set(calls.get() + 1));
        // SAFETY: passed on to the caller.
        unsafe { System.dealloc(ptr, layout) }
    }
}

/// Calls of this thread to the heap and of everybody to the driver, during some work.
fn cost(rig: &Rig, work: impl FnOnce()) -> (u64, u64) {
    let calls = rig.driver.calls();
    let before = CALLS.with(Cell::get);
    work();
    let heap = CALLS.with(Cell::get) - before;
    (heap, rig.driver.calls().since(&calls).total())
}

#[test]
fn the_counter_counts() {
    let rig = Rig::simulated(cuda_sim::Schedule::Eager);
    let (heap, calls) = cost(&rig, || {
        drop(std::hint::black_box(Box::new(1)));
        rig.device.synchronize().unwrap();
    });
    assert!(heap >= 2 && calls >= 2, "{heap} {calls}");
}

/// The same random requests and frees each time, on two streams.
fn program(
    rig: &Rig,
    allocator: &vpmm::CachingAllocator,
    streams: [StreamHandle; 2],
) -> (u64, u64) {
    let mut random = Lcg(3);
    let mut live: Vec<DevicePtr> = Vec::with_capacity(64);
    cost(rig, || {
        for _ in 0..5_000 {
            if live.len() < 64 && random.below(2) == 0 {
                let doubling = random.below(26);
                let bytes = 1 + random.below(1 << doubling) as usize;
                live.push(allocator.malloc(bytes, streams[random.below(2) as usize]).unwrap());
            } else if !live.is_empty() {
                let ptr = live.swap_remove(random.below(live.len() as u64) as usize);
                allocator.free(ptr).unwrap();
            }
        }
        live.drain(..).for_each(|ptr| allocator.free(ptr).unwrap());
    })
}

#[test]
fn what_is_warm_costs_neither_heap_nor_driver() {
    Rig::everywhere(|rig| {
        let cached = rig.cached();
        let own = rig.stream();
        let streams = [own.handle(), StreamHandle::LEGACY];
        let cold = program(rig, &cached.allocator, streams);
        assert!(cold.0 > 0 && cold.1 > 0, "{cold:?}");
        // It may take more than one round until nothing new is asked for.
        let misses = |_| {
            let before = cached.allocator.cache_stats().1;
            program(rig, &cached.allocator, streams);
            cached.allocator.cache_stats().1 - before
        };
        assert!((0..10).map(misses).any(|misses| misses == 0));
        assert_eq!(program(rig, &cached.allocator, streams), (0, 0));
        cached.assert_intact();
    });
}
