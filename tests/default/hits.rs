//! I8: what is warm costs no heap allocation and no driver call.

use std::alloc::{GlobalAlloc, Layout, System};
use std::cell::Cell;

use vpmm::{Driver, PoolConfig, Stream};

use crate::rig::{GIB, GRANULE, KIB, MIB};
use crate::support::Rig;

/// The system's allocator, which counts the calls of each thread.
struct Counting;

thread_local! {
    /// Without a destructor, so that it may be used from within an allocator.
    static CALLS: Cell<u64> = const { Cell::new(0) };
}

fn count() {
    CALLS.with(|calls| calls.set(calls.get() + 1));
}

#[global_allocator]
static HEAP: Counting = Counting;

// SAFETY: every call is passed on to the system's allocator as it came.
unsafe impl GlobalAlloc for Counting {
    unsafe fn alloc(&self, layout: Layout) -> *mut u8 {
        count();
        // SAFETY: passed on to the caller.
        unsafe { System.alloc(layout) }
    }

    unsafe fn alloc_zeroed(&self, layout: Layout) -> *mut u8 {
        count();
        // SAFETY: passed on to the caller.
        unsafe { System.alloc_zeroed(layout) }
    }

    unsafe fn dealloc(&self, ptr: *mut u8, layout: Layout) {
        count();
        // SAFETY: passed on to the caller.
        unsafe { System.dealloc(ptr, layout) }
    }

    unsafe fn realloc(&self, ptr: *mut u8, layout: Layout, size: usize) -> *mut u8 {
        count();
        // SAFETY: passed on to the caller.
        unsafe { System.realloc(ptr, layout, size) }
    }
}

/// Calls of this thread to the heap and of everybody to the driver, during some work.
pub(crate) fn cost(driver: &Driver, work: impl FnOnce()) -> (u64, u64) {
    let calls = driver.calls();
    let before = CALLS.with(Cell::get);
    work();
    let heap = CALLS.with(Cell::get) - before;
    (heap, driver.calls().since(&calls).total())
}

#[test]
fn the_counter_counts() {
    let rig = Rig::simulated(cuda_sim::Schedule::Eager);
    let (heap, calls) = cost(&rig.driver, || {
        drop(std::hint::black_box(Box::new(1)));
        rig.device.synchronize().unwrap();
    });
    assert!(heap >= 2 && calls >= 2, "{heap} {calls}");
}

fn settings(limited: bool) -> PoolConfig {
    let mut config = PoolConfig::default();
    config.va_size_bytes = Some(64 << 30);
    config.limit_bytes = limited.then_some(16 << 30);
    config
}

/// 512 bytes to 64 MiB, and some that are no power of two.
fn sizes() -> Vec<u64> {
    let powers = (9..=26).map(|power| 1_u64 << power);
    powers.flat_map(|bytes| [bytes, bytes + bytes / 3]).collect()
}

/// At once after the pool was made, and when the program has been at work for a while: memory is then
/// called in before the pool grows, so that streams take longer to settle.
#[test]
fn pairs_on_one_stream_and_on_many() {
    Rig::everywhere(|rig| {
        let cases = [(1, false), (1, true), (64, false), (64, true)];
        for ((streams, limited), at_leisure) in
            cases.map(|case| [(case, false), (case, true)]).concat()
        {
            let pool = vpmm::Pool::new(&rig.device, &settings(limited)).unwrap();
            if at_leisure {
                std::thread::sleep(std::time::Duration::from_millis(50));
            }
            let streams: Vec<Stream> = (0..streams).map(|_| rig.stream()).collect();
            for bytes in sizes() {
                let pairs = |rounds: usize| {
                    for _ in 0..rounds {
                        for stream in &streams {
                            let ptr = pool.malloc(bytes as usize, stream).unwrap();
                            pool.free(ptr, stream).unwrap();
                        }
                    }
                };
                // Streams take from each other at first, until each has what it needs: 18 rounds have
                // been seen.
                pairs(32);
                let paid = cost(&rig.driver, || pairs(20));
                assert_eq!(paid, (0, 0), "{bytes} bytes on {} streams", streams.len());
            }
        }
    });
}

/// Several blocks of a size at a time, first in first out: beyond what the front keeps.
#[test]
fn many_of_one_size_at_a_time() {
    Rig::everywhere(|rig| {
        let pool = vpmm::Pool::new(&rig.device, &settings(false)).unwrap();
        let stream = rig.stream();
        let mut held = Vec::with_capacity(64);
        for bytes in [512, 4 * KIB, 64 * KIB, MIB, GRANULE, 5 * MIB] {
            let mut rounds = |rounds: usize| {
                for _ in 0..rounds {
                    held.extend((0..64).map(|_| pool.malloc(bytes as usize, &stream).unwrap()));
                    held.drain(..).for_each(|ptr| pool.free(ptr, &stream).unwrap());
                }
            };
            rounds(3);
            let paid = cost(&rig.driver, || rounds(10));
            assert_eq!(paid, (0, 0), "{bytes} bytes");
        }
    });
}

/// Sizes that hardly ever come again: nothing of the front is of use, everything is split and
/// joined.
#[test]
fn random_sizes_in_a_warm_pool() {
    Rig::everywhere(|rig| {
        for (most, live) in [(4 * MIB, 300), (64 * MIB, 40)] {
            let pool = vpmm::Pool::new(&rig.device, &settings(false)).unwrap();
            let stream = rig.stream();
            let mut held = Vec::with_capacity(live);
            let mut round = || {
                let mut random = 7_u64;
                let mut below = |bound: u64| {
                    random = random.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
                    (random >> 33) % bound
                };
                for _ in 0..3000 {
                    if held.len() == live {
                        let at = below(live as u64) as usize;
                        pool.free(held.swap_remove(at), &stream).unwrap();
                    }
                    held.push(pool.malloc(1 + below(most) as usize, &stream).unwrap());
                }
                held.drain(..).for_each(|ptr| pool.free(ptr, &stream).unwrap());
            };
            // Enough in one piece for the requests in whatever order, and nodes for the pieces.
            let whole = pool.malloc((most * live as u64) as usize, &stream).unwrap();
            pool.free(whole, &stream).unwrap();
            round();
            for _ in 0..3 {
                assert_eq!(cost(&rig.driver, &mut round), (0, 0), "sizes up to {most}");
            }
        }
    });
}

/// What fronts keep of the memory beyond the peak follows the peak, up and down, although the pool stays
/// as it is.
#[test]
fn fronts_keep_of_what_the_pool_has_to_spare_now() {
    Rig::everywhere(|rig| {
        let pool = vpmm::Pool::new(&rig.device, &settings(false)).unwrap();
        let streams: Vec<Stream> = (0..16).map(|_| rig.stream()).collect();
        for stream in &streams {
            let few = pool.malloc(512, stream).unwrap();
            pool.free(few, stream).unwrap();
        }
        // By turns, or fronts would keep no large block once what is live has ebbed.
        let held: Vec<_> = (0..8).map(|n| pool.malloc(128 * 1024, &streams[n]).unwrap()).collect();
        held.into_iter().zip(&streams).for_each(|(ptr, stream)| pool.free(ptr, stream).unwrap());
        let stream = &streams[0];
        let whole = pool.malloc(2 * GIB as usize, stream).unwrap();
        pool.free(whole, stream).unwrap();
        // 102 MiB in blocks of different classes. What does not fit beside others takes their place.
        let kept = || {
            let held: Vec<_> = (0..17)
                .map(|n| pool.malloc((4 * MIB + n * 256 * KIB) as usize, stream).unwrap())
                .collect();
            held.into_iter().for_each(|ptr| pool.free(ptr, stream).unwrap());
            pool.stats().cached_bytes
        };
        let mapped = pool.stats().mapped_bytes;
        // 60 MiB: half of a 16th of what is beyond the peak. The last six blocks.
        pool.reset_peaks();
        let much = kept();
        let most = pool.malloc(GIB as usize * 7 / 4, stream).unwrap();
        // 16 MiB: an eighth of a 16th of the pool. The last two.
        let little = kept();
        pool.free(most, stream).unwrap();
        pool.reset_peaks();
        let again = kept();
        assert_eq!(pool.stats().mapped_bytes, mapped, "no growth");
        assert!(little <= 17 * MIB, "{little} bytes where little is to spare");
        assert!(much >= 44 * MIB && again >= 44 * MIB, "{much} and {again} bytes where much is");
    });
}
