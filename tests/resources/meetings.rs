//! Threads and streams that do not wait for each other, and what they cost each other in driver calls.

use std::sync::atomic::Ordering;
use std::sync::{Arc, mpsc};
use std::time::{Duration, Instant};

use cuda_sim::{Schedule, Simulator};
use vpmm::caching::CachingConfig;
use vpmm::resource::*;
use vpmm::{CachingAllocator, Error, MemoryResource, StreamHandle};

use crate::subjects::{MIB, arena, malloc, plain_pool};
use crate::support::changed::{changed, gated};
use crate::support::{Rig, call, streams};
use crate::watched::Watched;

gated!(recording: cuEventRecord(event: CUevent, stream: CUstream));
gated!(last_record: cuEventRecord(event: CUevent, stream: CUstream));
gated!(ending: cuEventRecord(event: CUevent, stream: CUstream));
gated!(waiting: cuEventSynchronize(event: CUevent));
gated!(waiting_for_all: cuCtxSynchronize());
gated!(waited_for_all: cuCtxSynchronize());
gated!(allocating: cuMemAlloc_v2(address: *mut CUdeviceptr, bytes: usize));
gated!(freeing: cuMemFree_v2(address: CUdeviceptr));

mod naming {
    use std::sync::atomic::{AtomicUsize, Ordering};

    use crate::support::changed::{Gate, replaced};

    pub(super) static AT: Gate = Gate::new();
    /// Calls until the one that comes to the gate.
    pub(super) static LEFT: AtomicUsize = AtomicUsize::new(0);

    fn count() {
        let less = |left: usize| left.checked_sub(1);
        if LEFT.fetch_update(Ordering::SeqCst, Ordering::SeqCst, less) == Ok(1) {
            AT.pass();
        }
    }

    replaced!(cuStreamGetId(stream: CUstream, number: *mut u64), count());
}

const BLOCK: usize = 1 << 20;

fn blocks(rig: &Rig, at_once: usize) -> FixedSize<DeviceMalloc> {
    let mut config = FixedSizeConfig::default();
    (config.block_bytes, config.blocks_at_once) = (BLOCK, at_once);
    FixedSize::new(malloc(rig), &rig.device, &config).expect("blocks")
}

/// Whether work is done soon, though something else is held up meanwhile.
fn is_done_soon(work: impl FnOnce() + Send, then: impl FnOnce()) {
    std::thread::scope(|scope| {
        let (done, told) = mpsc::channel();
        scope.spawn(move || {
            work();
            let _ = done.send(());
        });
        let soon = told.recv_timeout(Duration::from_secs(20)).is_ok();
        // Before anything can fail, since whoever is held would never end.
        then();
        assert!(soon, "it waited for the other thread");
    });
}

#[test]
fn a_stream_has_its_blocks_while_another_thread_asks_the_driver() {
    let sim = Simulator::builder().schedule(Schedule::Eager).build().expect("a simulator");
    let driver = changed(&sim, recording::put);
    let rig = Rig::with(driver, sim);
    let blocks = blocks(&rig, 4);
    let (quick, other, asking) = (rig.stream(), rig.stream(), rig.stream());
    let take = |stream: &vpmm::Stream| blocks.allocate(BLOCK, 256, stream.handle()).expect("one");
    let give = |ptr, stream: &vpmm::Stream| {
        blocks.deallocate(ptr, BLOCK, 256, stream.handle()).expect("freed");
    };
    let of_quick = take(&quick);
    let of_other = [(); 3].map(|()| take(&other));
    of_other.into_iter().for_each(|ptr| give(ptr, &other));
    give(of_quick, &quick);
    std::thread::scope(|scope| {
        recording::BEFORE.arm();
        let asks = scope.spawn(|| take(&asking));
        recording::BEFORE.wait();
        let pairs = || {
            for _ in 0..100 {
                let ptr = take(&quick);
                assert_eq!(ptr, of_quick, "its own");
                give(ptr, &quick);
            }
        };
        is_done_soon(pairs, || recording::BEFORE.open());
        give(asks.join().expect("no panic"), &asking);
    });
    assert_eq!(blocks.held_bytes(), Some(4 * MIB));
    rig.assert_clean();
}

/// A stream's end is told to one resource after the other, and then it is destroyed. Whoever was told is not to take
/// it for alive again meanwhile: nobody would tell that one of its end once more.
#[test]
fn a_stream_whose_end_is_being_told_is_refused_by_who_was_told() {
    type Make = fn(&Rig) -> Arc<dyn MemoryResource>;
    let kinds: [Make; 2] = [|rig| Arc::new(plain_pool(rig)), |rig| Arc::new(blocks(rig, 4))];
    let sim = Simulator::builder().schedule(Schedule::Eager).build().expect("a simulator");
    let rig = Rig::with(changed(&sim, ending::put), sim);
    for make in kinds {
        let (stream, other) = (rig.stream(), rig.stream());
        let handle = stream.handle();
        let told_first = make(&rig);
        let ptr = told_first.allocate(1000, 256, handle).expect("memory");
        let told_last = plain_pool(&rig);
        let pending = told_last.allocate(1000, 256, handle).expect("memory");
        told_last.deallocate(pending, 1000, 256, handle).expect("freed");
        ending::BEFORE.arm();
        let refused = std::thread::scope(|scope| {
            scope.spawn(|| drop(stream));
            ending::BEFORE.wait();
            let refused = told_first.deallocate(ptr, 1000, 256, handle);
            ending::BEFORE.open();
            refused
        });
        let name = told_first.describe();
        assert!(matches!(refused, Err(Error::StreamEnded)), "{name}: {refused:?}");
        told_first.deallocate(ptr, 1000, 256, other.handle()).expect("allocated still");
        let ptr = told_first.allocate(1000, 256, rig.stream().handle()).expect("memory");
        told_first.deallocate(ptr, 1000, 256, other.handle()).expect("freed");
        drop(told_first);
        rig.assert_clean();
    }
}

/// A ring of blocks that are allocated on one stream and freed on the other, then the other way round.
fn to_and_fro(watched: &Watched<'_>, streams: &[vpmm::Stream; 2], pairs: usize) {
    let mut ring: Vec<_> = (0..8).map(|_| (watched.allocate(BLOCK, &streams[0]), 0)).collect();
    for pair in 0..pairs {
        let own = pair / 64 % 2;
        let (held, of) = ring.remove(0);
        watched.rig.order(&streams[of], &streams[1 - of]);
        watched.free(held, &streams[1 - of]);
        ring.push((watched.allocate(BLOCK, &streams[own]), own));
    }
    ring.into_iter().for_each(|(held, of)| watched.free(held, &streams[of]));
}

#[test]
fn streams_that_go_on_asking_each_other_ask_for_many_blocks_at_a_time() {
    const PAIRS: u64 = 640;
    for schedule in [Schedule::Eager, Schedule::Late { patience: 3 }, Schedule::Random] {
        let rig = Rig::simulated(schedule);
        let blocks = blocks(&rig, 8);
        let streams = [rig.stream(), rig.stream()];
        let watched = Watched::new(&rig, &blocks);
        to_and_fro(&watched, &streams, 640);
        let before = rig.driver.calls();
        to_and_fro(&watched, &streams, PAIRS as usize);
        let calls = rig.driver.calls().since(&before);
        let asked = ["cuEventRecord", "cuEventQuery", "cuStreamWaitEvent"];
        for name in asked {
            let count = calls.count(name);
            assert!(count <= PAIRS / 16, "{count} calls of {name} for {PAIRS} blocks");
        }
        // What that costs in memory: 32 blocks of slack, and what is made at once.
        assert!(blocks.held_bytes() <= Some((8 + 32 + 8) * MIB), "{:?}", blocks.held_bytes());
        watched.assert_intact();
    }
}

/// Where there is no more to be had, what others have is asked about however little it is.
#[test]
fn slack_is_given_up_where_upstream_has_no_more() {
    Rig::everywhere(|rig| {
        let mut config = FixedSizeConfig::default();
        (config.block_bytes, config.blocks_at_once) = (BLOCK, 8);
        let upstream = Limiting::new(malloc(rig), 16 * MIB);
        let blocks = FixedSize::new(upstream, &rig.device, &config).expect("blocks");
        let streams = [rig.stream(), rig.stream()];
        let watched = Watched::new(rig, &blocks);
        to_and_fro(&watched, &streams, 640);
        let all: Vec<_> = (0..16).map(|_| watched.allocate(BLOCK, &streams[0])).collect();
        assert!(watched.try_allocate(BLOCK, 256, &streams[1]).is_err());
        all.into_iter().for_each(|held| watched.free(held, &streams[0]));
        let all: Vec<_> = (0..16).map(|_| watched.allocate(BLOCK, &streams[1])).collect();
        all.into_iter().for_each(|held| watched.free(held, &streams[1]));
        watched.assert_intact();
    });
}

#[test]
fn a_stream_ends_while_a_pools_end_waits_for_the_device() {
    type Make = fn(&Rig) -> Box<dyn MemoryResource>;
    let makes: [Make; 4] = [
        |rig| Box::new(plain_pool(rig)),
        |rig| Box::new(blocks(rig, 4)),
        |rig| Box::new(Binning::with_powers(malloc(rig), &rig.device, 20..=20).expect("bins")),
        |rig| Box::new(arena(rig, malloc(rig)).expect("an arena")),
    ];
    for make in makes {
        let sim = Simulator::builder().schedule(Schedule::Eager).build().expect("a simulator");
        let driver = changed(&sim, waiting::put);
        let rig = Rig::with(driver, sim);
        let resource = make(&rig);
        let (own, ends) = (rig.stream(), rig.stream());
        for stream in [&own, &ends] {
            let ptr = resource.allocate(BLOCK, 256, stream.handle()).expect("memory");
            resource.deallocate(ptr, BLOCK, 256, stream.handle()).expect("freed");
        }
        std::thread::scope(|scope| {
            waiting::BEFORE.arm();
            let end = scope.spawn(|| drop(resource));
            waiting::BEFORE.wait();
            is_done_soon(|| drop(ends), || waiting::BEFORE.open());
            end.join().expect("no panic");
        });
        drop(own);
        rig.assert_clean();
    }
}

/// A request that waits for the device, because a stream ended in a capture, keeps nobody else waiting: what the
/// device does may depend on another thread.
#[test]
fn others_go_on_while_a_request_waits_for_the_device() {
    for fixed in [false, true] {
        let sim = Simulator::builder().schedule(Schedule::Eager).build().expect("a simulator");
        let driver = changed(&sim, waiting_for_all::put);
        let rig = Rig::with(driver, sim);
        let below = Limiting::new(malloc(&rig), 16 * MIB);
        let resource: Box<dyn MemoryResource> = if fixed {
            let mut config = FixedSizeConfig::default();
            (config.block_bytes, config.blocks_at_once) = (BLOCK, 16);
            Box::new(FixedSize::new(below, &rig.device, &config).expect("blocks"))
        } else {
            let mut config = CoalescingConfig::default();
            config.initial_bytes = 16 * MIB;
            Box::new(CoalescingPool::new(below, &rig.device, &config).expect("a pool"))
        };
        let (quick, asking, ends) = (rig.stream(), rig.stream(), rig.stream());
        let take =
            |stream: &vpmm::Stream| resource.allocate(BLOCK, 256, stream.handle()).expect("one");
        let give = |ptr, stream: &vpmm::Stream| {
            resource.deallocate(ptr, BLOCK, 256, stream.handle()).expect("freed");
        };
        let of_quick = take(&quick);
        let others = [(); 15].map(|()| take(&ends));
        others.into_iter().for_each(|ptr| give(ptr, &ends));
        streams::begin_capture(&rig, ends.handle().raw());
        drop(ends);
        std::thread::scope(|scope| {
            waiting_for_all::BEFORE.arm();
            let asks = scope.spawn(|| take(&asking));
            waiting_for_all::BEFORE.wait();
            let pairs = || {
                give(of_quick, &quick);
                give(take(&quick), &quick);
            };
            is_done_soon(pairs, || waiting_for_all::BEFORE.open());
            give(asks.join().expect("served"), &asking);
        });
        drop(resource);
        rig.assert_clean();
    }
}

/// What is freed while a request waits for the device is not complete when it has waited.
#[test]
fn what_is_freed_during_a_wait_for_the_device_is_not_complete_by_it() {
    for fixed in [false, true] {
        let schedule = Schedule::Late { patience: 64 };
        let sim = Simulator::builder().schedule(schedule).build().expect("a simulator");
        let driver = changed(&sim, waited_for_all::put);
        let rig = Rig::with(driver, sim);
        let below = Limiting::new(malloc(&rig), 2 * MIB);
        let resource: Box<dyn MemoryResource> = if fixed {
            let mut config = FixedSizeConfig::default();
            (config.block_bytes, config.blocks_at_once) = (BLOCK, 2);
            Box::new(FixedSize::new(below, &rig.device, &config).expect("blocks"))
        } else {
            let mut config = CoalescingConfig::default();
            config.initial_bytes = 2 * MIB;
            Box::new(CoalescingPool::new(below, &rig.device, &config).expect("a pool"))
        };
        let watched = Watched::new(&rig, &resource);
        let [busy, ends, asking, other] = [(); 4].map(|()| rig.stream());
        let held = watched.allocate(BLOCK, &busy);
        watched.free(held, &busy);
        let held = watched.allocate(BLOCK, &busy);
        let lost = resource.allocate(BLOCK, 256, ends.handle()).expect("memory");
        streams::begin_capture(&rig, ends.handle().raw());
        resource.deallocate(lost, BLOCK, 256, ends.handle()).expect("freed");
        drop(ends);
        let last = std::thread::scope(|scope| {
            waited_for_all::AFTER.arm();
            let asks = scope.spawn(|| watched.allocate(BLOCK, &asking));
            waited_for_all::AFTER.wait();
            watched.check(&held, &busy);
            watched.free(held, &busy);
            waited_for_all::AFTER.open();
            asks.join().expect("served")
        });
        let again = watched.allocate(BLOCK, &other);
        watched.free(again, &other);
        watched.free(last, &asking);
        watched.assert_intact();
    }
}

/// Another thread of the stream frees while upstream is asked in vain.
#[test]
fn a_block_that_comes_back_while_upstream_refuses_serves_the_request() {
    let sim = Simulator::builder().memory_bytes(6 * MIB).build().expect("a simulator");
    let driver = changed(&sim, allocating::put);
    let rig = Rig::with(driver, sim);
    let blocks = blocks(&rig, 4);
    let stream = rig.stream();
    let take = || blocks.allocate(BLOCK, 256, stream.handle());
    let give = |ptr| blocks.deallocate(ptr, BLOCK, 256, stream.handle()).expect("freed");
    give(take().expect("a block"));
    let mut held = [(); 4].map(|()| take().expect("a block"));
    std::thread::scope(|scope| {
        allocating::BEFORE.arm();
        let asks = scope.spawn(take);
        allocating::BEFORE.wait();
        give(held[3]);
        allocating::BEFORE.open();
        held[3] = asks.join().expect("no panic").expect("what came back");
    });
    held.into_iter().for_each(give);
    assert_eq!(blocks.held_bytes(), Some(4 * MIB));
    rig.assert_clean();
}

/// What one thread has freed another may have before the first has come back from the driver.
#[test]
fn a_peak_is_no_higher_than_what_there_was() {
    let sim = Simulator::builder().build().expect("a simulator");
    let driver = changed(&sim, freeing::put);
    let rig = Rig::with(driver, sim);
    let statistics = Statistics::new(Limiting::new(malloc(&rig), 4 * MIB));
    let take = || statistics.allocate(BLOCK, 256, StreamHandle::LEGACY).expect("memory");
    let give = |ptr| statistics.deallocate(ptr, BLOCK, 256, StreamHandle::LEGACY).expect("freed");
    let held = take();
    std::thread::scope(|scope| {
        freeing::AFTER.arm();
        scope.spawn(|| give(held));
        freeing::AFTER.wait();
        let again = take();
        freeing::AFTER.open();
        give(again);
    });
    let Counters { bytes, allocations } = statistics.counters();
    assert_eq!((bytes.peak, allocations.peak), (BLOCK as i64, 1));
    assert_eq!((bytes.current, allocations.current), (0, 0));
    rig.assert_clean();
}

/// Another thread gives back what belongs to it, to a pool that has been told of its end already.
#[test]
fn a_stream_that_ends_is_given_to_no_pool_that_has_been_told() {
    let sim = Simulator::builder().schedule(Schedule::Eager).build().expect("a simulator");
    let driver = changed(&sim, last_record::put);
    let rig = Rig::with(driver, sim);
    // They are told in the order in which they were made.
    let (below, beside) = (Arc::new(plain_pool(&rig)), plain_pool(&rig));
    let config = CachingConfig::default();
    let above = CachingAllocator::over(Arc::clone(&below), &rig.device, &config).expect("one");
    let (ends, other) = (rig.stream(), rig.stream());
    let ptr = above.malloc(BLOCK, &ends).expect("memory");
    above.free(ptr).expect("freed");
    let ptr = beside.allocate(BLOCK, 256, ends.handle()).expect("memory");
    beside.deallocate(ptr, BLOCK, 256, ends.handle()).expect("freed");
    std::thread::scope(|scope| {
        last_record::BEFORE.arm();
        scope.spawn(|| drop(ends));
        last_record::BEFORE.wait();
        let flushed = above.empty_cache();
        last_record::BEFORE.open();
        flushed.expect("what can go");
    });
    above.empty_cache().expect("the rest");
    assert_eq!((above.memory_reserved(), below.live_bytes()), (0, 0));
    let ptr = below.allocate(16 << 20, 256, other.handle()).expect("all of it");
    below.deallocate(ptr, 16 << 20, 256, other.handle()).expect("freed");
    drop((above, beside, below));
    rig.assert_clean();
}

/// A request of an arena has another stream's superblocks come back, and stops on the way, wherever it asks which stream
/// is meant. Another that finds nothing meanwhile waits for what is on its way, and has what the first one leaves.
#[test]
fn who_finds_an_arena_empty_has_what_another_request_calls_in() {
    for stop in 1.. {
        let sim = Simulator::builder().schedule(Schedule::Eager).build().expect("a simulator");
        let rig = Rig::with(changed(&sim, naming::put), sim);
        let mut config = ArenaConfig::default();
        config.arena_bytes = Some(16 * MIB);
        let arena = Arena::new(malloc(&rig), &rig.device, &config).expect("an arena");
        let (idle, second) = (rig.stream(), rig.stream());
        let (raw, first) = streams::make(&rig, 1);
        let take = |bytes: usize, stream: StreamHandle| arena.allocate(bytes, 256, stream);
        // Two superblocks of one stream, and nothing else.
        let free = [(); 8].map(|()| take(BLOCK, idle.handle()).expect("memory"));
        let rest = take(8 * BLOCK, idle.handle()).expect("memory");
        for ptr in free {
            arena.deallocate(ptr, BLOCK, 256, idle.handle()).expect("freed");
        }
        naming::LEFT.store(stop, Ordering::SeqCst);
        naming::AT.arm();
        let has_stopped = std::thread::scope(|scope| {
            let calls_in = scope.spawn(|| take(BLOCK, first));
            while naming::LEFT.load(Ordering::SeqCst) > 0 && !calls_in.is_finished() {
                std::thread::yield_now();
            }
            let has_stopped = naming::LEFT.swap(0, Ordering::SeqCst) == 0;
            if has_stopped {
                naming::AT.wait();
            }
            let asks = scope.spawn(|| take(BLOCK, second.handle()));
            let begin = Instant::now();
            while !asks.is_finished() && begin.elapsed() < Duration::from_millis(100) {
                std::thread::sleep(Duration::from_millis(1));
            }
            naming::AT.open();
            for (request, stream) in [(calls_in, first), (asks, second.handle())] {
                let made = request.join().expect("no panic");
                let ptr = made.unwrap_or_else(|error| panic!("stopped at {stop}: {error}"));
                arena.deallocate(ptr, BLOCK, 256, stream).expect("freed");
            }
            has_stopped
        });
        arena.deallocate(rest, 8 * BLOCK, 256, idle.handle()).expect("freed");
        drop(arena);
        call!(rig.driver, cuStreamDestroy_v2(raw));
        rig.assert_clean();
        if !has_stopped {
            assert!(stop > 4, "it asks for many streams");
            break;
        }
    }
}
