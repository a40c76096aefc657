//! An allocation that outlives a great many streams which use it, as weights outlive requests: each stream
//! leaves nothing behind once its work is over, in the driver or on the host.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use cuda_sim::Schedule;
use vpmm::{MemoryResource, Stream};

use crate::subjects::SUBJECTS;
use crate::support::Rig;

/// The system's allocator, which counts the bytes that each thread has.
struct Counting;

thread_local! {
    /// Without a destructor, so that it may be used from within an allocator.
    static LIVE: Cell<i64> = const { Cell::new(0) };
}

fn count(bytes: i64) {
    LIVE.with(|live| live.set(live.get() + bytes));
}

#[global_allocator]
static HEAP: Counting = Counting;

// SAFETY: every call is passed on to the system's allocator as it came; what is not here calls these.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count(layout.size() as i64);
        // SAFETY: passed on to the caller.
        unsafe { System.alloc(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        count(-(layout.size() as i64));
        // SAFETY: passed on to the caller.
        unsafe { System.dealloc(ptr, layout) }
    }
}

/// Streams that come, use the weights beside memory of their own, and go.
fn requests(rig: &Rig, resource: &dyn MemoryResource, weights: vpmm::DevicePtr, lent: bool) {
    const BYTES: usize = 64 << 10;
    for _ in 0..500 {
        let own = rig.stream();
        // SAFETY: it lives longer than its loan.
        let loan = lent.then(|| unsafe { Stream::borrowed(&rig.device, own.handle()) }.unwrap());
        let stream = loan.as_ref().unwrap_or(&own);
        let held = resource.allocate(BYTES, 256, stream.handle()).unwrap();
        resource.record_stream(weights, stream.handle()).unwrap();
        resource.deallocate(held, BYTES, 256, stream.handle()).unwrap();
        stream.synchronize().unwrap();
    }
}

#[test]
fn streams_that_used_it_and_ended_leave_nothing() {
    for subject in SUBJECTS {
        for lent in [false, true] {
            let rig = Rig::simulated(Schedule::Eager);
            let resource = subject.make(&rig);
            if !resource.facts().records_streams {
                continue;
            }
            let sim = rig.sim.as_ref().unwrap();
            let own = rig.stream();
            let weights = resource.allocate(1 << 20, 256, own.handle()).unwrap();
            requests(&rig, &*resource, weights, lent);
            let (events, bytes) = (sim.leaks().events, LIVE.with(Cell::get));
            requests(&rig, &*resource, weights, lent);
            let what = format!("{}, {}", subject.name, ["ended", "lent"][usize::from(lent)]);
            let events = sim.leaks().events.saturating_sub(events);
            let bytes = LIVE.with(Cell::get) - bytes;
            assert!(events <= 16, "{what}: {events} events more");
            assert!(bytes <= 16 << 10, "{what}: {bytes} bytes more");
            resource.deallocate(weights, 1 << 20, 256, own.handle()).unwrap();
            drop(resource);
            rig.assert_clean();
        }
    }
}
