//! What outlives a great many things that come and go: an allocation the streams that use it, as weights outlive
//! requests, and a pool whatever is done with it again and again. None of them leaves anything behind once its work
//! is over, in the driver or on the host.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use cuda_sim::Schedule;
use vpmm::{Contents, MemoryResource, PagedConfig, Pool, PoolConfig, Stream};

use crate::subjects::SUBJECTS;
use crate::support::Rig;
use crate::support::streams::{begin_capture, end_capture};

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

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count(layout.size() as i64);
        // SAFETY: passed on to the caller.
        unsafe { System.alloc_zeroed(layout) }
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

/// What a pool is used for, once.
type Round = fn(&Rig, &Pool, &Stream);

const ROUNDS: &[(&str, Round)] = &[
    ("a stream follows one that ends", |rig, pool, own| {
        let other = rig.stream();
        touch(pool, &other);
        let mark = pool.mark(&other).unwrap();
        own.wait_for_stream(&other).unwrap();
        pool.follows(own, &mark).unwrap();
        touch(pool, own);
    }),
    ("one that ends follows a stream", |rig, pool, own| {
        let other = rig.stream();
        touch(pool, own);
        let mark = pool.mark(own).unwrap();
        other.wait_for_stream(own).unwrap();
        pool.follows(&other, &mark).unwrap();
        touch(pool, &other);
    }),
    ("the host waits for a mark", |_, pool, own| {
        touch(pool, own);
        let mark = pool.mark(own).unwrap();
        own.synchronize().unwrap();
        pool.passed(&mark).unwrap();
    }),
    ("further streams use what is freed", |rig, pool, own| {
        let other = rig.stream();
        let held = pool.malloc(1 << 20, own).unwrap();
        other.wait_for_stream(own).unwrap();
        pool.record_stream(held, &other).unwrap();
        pool.free(held, own).unwrap();
        other.synchronize().unwrap();
    }),
    ("a graph is captured", |rig, pool, own| {
        let graph_pool = pool.graph_pool().unwrap();
        graph_pool.begin(own).unwrap();
        begin_capture(rig, own.handle().raw());
        touch(pool, own);
        end_capture(rig, own.handle().raw());
        graph_pool.end(own).unwrap();
        graph_pool.release(own).unwrap();
    }),
    ("a tag sleeps", |_, pool, own| {
        let held = pool.tagged("model").unwrap().malloc(4 << 20, own).unwrap();
        pool.suspend("model", own, &Contents::Discard).unwrap();
        pool.resume("model", own).unwrap();
        pool.free(held, own).unwrap();
    }),
    ("a request is refused", |_, pool, own| {
        assert!(pool.malloc(1 << 46, own).is_err());
    }),
    ("memory goes back", |_, pool, own| {
        touch(pool, own);
        own.synchronize().unwrap();
        pool.trim_to(0).unwrap();
    }),
    ("the limit changes", |_, pool, own| {
        pool.limit_to(Some(1 << 30)).unwrap();
        touch(pool, own);
        pool.limit_to(None).unwrap();
    }),
    ("it is drawn", |_, pool, own| {
        touch(pool, own);
        drop((pool.snapshot(), pool.layout(), pool.stats()));
    }),
    ("a pool is made beside it", |rig, _, own| {
        touch(&Pool::new(&rig.device, &PoolConfig::default()).unwrap(), own);
        touch(&Pool::paged(&rig.device, &PagedConfig::default()).unwrap(), own);
    }),
];

/// A large and a small allocation that end at once.
fn touch(pool: &Pool, stream: &Stream) {
    for bytes in [4 << 20, 512] {
        let held = pool.malloc(bytes, stream).unwrap();
        pool.free(held, stream).unwrap();
    }
}

#[test]
fn what_is_done_with_a_pool_again_and_again_leaves_nothing() {
    const ROUNDS_EACH: usize = 150;
    for (name, round) in ROUNDS {
        for paged in [false, true] {
            let rig = Rig::simulated(Schedule::Eager);
            let pool = match paged {
                false => Pool::new(&rig.device, &PoolConfig::default()),
                true => Pool::paged(&rig.device, &PagedConfig::default()),
            };
            let (pool, own) = (pool.unwrap(), rig.stream());
            let sim = rig.sim.as_ref().unwrap();
            (0..ROUNDS_EACH).for_each(|_| round(&rig, &pool, &own));
            let (events, bytes) = (sim.leaks().events, LIVE.with(Cell::get));
            (0..ROUNDS_EACH).for_each(|_| round(&rig, &pool, &own));
            let events = sim.leaks().events.saturating_sub(events);
            let bytes = LIVE.with(Cell::get) - bytes;
            assert!(events <= 8, "{name}, paged {paged}: {events} events more");
            assert!(bytes <= 8 << 10, "{name}, paged {paged}: {bytes} bytes more");
            drop(pool);
            rig.assert_clean();
        }
    }
}
