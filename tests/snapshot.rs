//! Snapshots: every block of every heap, as the statistics count them.

use std::ops::Range;
use std::sync::atomic::{AtomicBool, Ordering};

use cuda_sim::{Schedule, Simulator};
use cuda_sys::types::CUresult;
use vpmm::snapshot::{BlockState, HeapName, Segment};
use vpmm::{Contents, Device, DevicePtr, Driver, PagedConfig, Pool, PoolConfig, Stream};

fn device() -> (Simulator, Device) {
    let sim = Simulator::builder().build().unwrap();
    let device = Driver::new(sim.driver()).unwrap().device(0).unwrap();
    (sim, device)
}

fn sum(segments: &[Segment], state: BlockState) -> u64 {
    segments.iter().map(|segment| segment.bytes_in(state)).sum()
}

/// Blocks lie side by side in their segments, segments apart from each other.
fn check(segments: &[Segment]) {
    let mut end = 0;
    for segment in segments {
        assert!(segment.address >= end, "segments in ascending order");
        end = segment.address + segment.bytes;
        let mut at = segment.address;
        for block in &segment.blocks {
            assert_eq!(block.address, at, "no gap before a block");
            at += block.bytes;
        }
        assert_eq!(at, end, "the blocks are the segment");
    }
}

/// Numbers that look random.
fn next(state: &mut u64) -> u64 {
    *state = state.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1_442_695_040_888_963_407);
    *state >> 33
}

fn random_program(pool: &Pool, sizes: Range<u64>) {
    let device = pool.device();
    let streams = [device.stream().unwrap(), device.stream().unwrap()];
    let (mut live, mut seed) = (Vec::new(), 7);
    for turn in 0..600 {
        let stream = &streams[(next(&mut seed) % 2) as usize];
        if live.is_empty() || next(&mut seed) % 5 < 3 {
            let bytes = sizes.start + next(&mut seed) % (sizes.end - sizes.start);
            live.push((pool.malloc(bytes as usize, stream).unwrap(), bytes));
        } else {
            let at = next(&mut seed) as usize % live.len();
            pool.free(live.swap_remove(at).0, stream).unwrap();
        }
        if turn % 50 != 49 {
            continue;
        }
        let (segments, stats) = (pool.snapshot(), pool.stats());
        check(&segments);
        assert_eq!(sum(&segments, BlockState::Live), stats.live_bytes);
        assert_eq!(sum(&segments, BlockState::Cached), stats.cached_bytes);
        let free = sum(&segments, BlockState::Pending) + sum(&segments, BlockState::Idle);
        assert_eq!(free, stats.pending_bytes + stats.idle_bytes);
        assert_eq!(segments.iter().map(|of| of.bytes).sum::<u64>(), stats.mapped_bytes);
        for (ptr, bytes) in &live {
            let blocks = segments.iter().flat_map(|segment| &segment.blocks);
            let found = blocks.filter(|block| block.address == ptr.address()).collect::<Vec<_>>();
            assert!(found.len() == 1 && found[0].state == BlockState::Live);
            assert!(found[0].bytes >= *bytes);
        }
    }
    for (ptr, _) in live {
        pool.free(ptr, &streams[0]).unwrap();
    }
}

#[test]
fn it_agrees_with_the_statistics() {
    let (sim, device) = device();
    random_program(&Pool::new(&device, &PoolConfig::default()).unwrap(), 1..3 << 20);
    random_program(&Pool::new(&device, &PoolConfig::default()).unwrap(), 1..20 << 10);
    sim.assert_clean();
}

#[test]
fn so_it_does_in_pages() {
    let (sim, device) = device();
    // Smaller requests are the driver's pool's, which it does not show.
    let pool = Pool::paged(&device, &PagedConfig::default()).unwrap();
    random_program(&pool, 2 << 20..9 << 20);
    sim.assert_clean();
}

/// In both profiles; and all of it counts as pending, as the statistics have it.
#[test]
fn what_waits_for_further_streams_is_told_apart() {
    let sim = Simulator::builder().schedule(Schedule::Manual).build().unwrap();
    let device = Driver::new(sim.driver()).unwrap().device(0).unwrap();
    for pool in [
        Pool::new(&device, &PoolConfig::default()).unwrap(),
        Pool::paged(&device, &PagedConfig::default()).unwrap(),
    ] {
        let (own, side) = (device.stream().unwrap(), device.stream().unwrap());
        let stall = sim.spin(side.handle().raw()).unwrap();
        let [used, other] = [(); 2].map(|()| pool.malloc(4 << 20, &own).unwrap());
        pool.record_stream(used, &side).unwrap();
        pool.free(used, &own).unwrap();
        pool.free(other, &own).unwrap();
        let state_of = |address: u64| {
            let segments = pool.snapshot();
            check(&segments);
            let stats = pool.stats();
            let [pending, deferred, cached] =
                [BlockState::Pending, BlockState::Deferred, BlockState::Cached]
                    .map(|state| sum(&segments, state));
            assert_eq!((pending + deferred, cached), (stats.pending_bytes, stats.cached_bytes));
            let blocks = segments.iter().flat_map(|segment| &segment.blocks);
            let mut around =
                blocks.filter(|of| (of.address..of.address + of.bytes).contains(&address));
            let block = *around.next().unwrap();
            (block.state, block.bytes)
        };
        assert_eq!(state_of(used.address()), (BlockState::Deferred, 4 << 20));
        assert_ne!(state_of(other.address()).0, BlockState::Deferred);
        stall.release();
        device.synchronize().unwrap();
        pool.trim_to(1 << 30).unwrap();
        assert_ne!(state_of(used.address()).0, BlockState::Deferred, "the use is over");
    }
    sim.assert_clean();
}

/// Blocks of pages are of the stream that they were allocated on, or that freed them, by the driver's number.
#[test]
fn pages_are_of_their_stream() {
    let sim = Simulator::builder().schedule(Schedule::Manual).build().unwrap();
    let driver = Driver::new(sim.driver()).unwrap();
    let device = driver.device(0).unwrap();
    let pool = Pool::paged(&device, &PagedConfig::default()).unwrap();
    let (own, legacy) = (device.stream().unwrap(), Stream::legacy(&device));
    let mut number = 0;
    let ask = driver.raw().cuStreamGetId.unwrap();
    // SAFETY: the stream is alive, and the pointer live.
    assert_eq!(unsafe { ask(own.handle().raw(), &mut number) }, CUresult::CUDA_SUCCESS);
    let [one, two] = [&own, &legacy].map(|stream| pool.malloc(4 << 20, stream).unwrap());
    let of = |ptr: DevicePtr| {
        let segments = pool.snapshot();
        let mut blocks = segments.iter().flat_map(|segment| &segment.blocks);
        let block = blocks.find(|block| block.address == ptr.address()).unwrap();
        (block.state, block.stream)
    };
    assert_eq!(of(one), (BlockState::Live, Some(number)));
    assert_eq!(of(two), (BlockState::Live, Some(0)));
    let stall = sim.spin(own.handle().raw()).unwrap();
    pool.free(two, &own).unwrap();
    assert_eq!(of(two), (BlockState::Pending, Some(number)));
    stall.release();
    device.synchronize().unwrap();
    pool.free(one, &own).unwrap();
    sim.assert_clean();
}

#[test]
fn heaps_have_their_names() {
    let (_sim, device) = device();
    let pool = Pool::new(&device, &PoolConfig::default()).unwrap();
    let stream = device.stream().unwrap();
    let main = pool.malloc(1 << 20, &stream).unwrap();
    let tagged = pool.tagged("weights").unwrap().malloc(2 << 20, &stream).unwrap();
    let graphs = pool.graph_pool().unwrap();
    graphs.begin(&stream).unwrap();
    let captured = pool.malloc(3 << 20, &stream).unwrap();
    graphs.end(&stream).unwrap();
    let further = pool.graph_pool().unwrap();
    further.begin(&stream).unwrap();
    let captured_there = pool.malloc(3 << 20, &stream).unwrap();
    further.end(&stream).unwrap();
    let name_of = |ptr: vpmm::DevicePtr| {
        let segments = pool.snapshot();
        let holds =
            |segment: &&Segment| segment.blocks.iter().any(|block| block.address == ptr.address());
        let segment = segments.iter().find(holds).unwrap();
        (segment.heap.clone(), segment.is_asleep)
    };
    assert_eq!(name_of(main), (HeapName::Main, false));
    assert_eq!(name_of(tagged), (HeapName::Tagged("weights".to_owned()), false));
    assert_eq!(name_of(captured), (HeapName::Graph(0), false));
    assert_eq!(name_of(captured_there), (HeapName::Graph(1), false));
    pool.suspend("weights", &stream, &Contents::Discard).unwrap();
    assert_eq!(name_of(tagged), (HeapName::Tagged("weights".to_owned()), true));
    pool.resume("weights", &stream).unwrap();
    for ptr in [main, tagged, captured, captured_there] {
        pool.free(ptr, &stream).unwrap();
    }
}

#[test]
fn other_threads_go_on_meanwhile() {
    let (_sim, device) = device();
    let pool = Pool::new(&device, &PoolConfig::default()).unwrap();
    let over = AtomicBool::new(false);
    std::thread::scope(|scope| {
        for seed in 0..2 {
            let (pool, over, stream) = (&pool, &over, device.stream().unwrap());
            scope.spawn(move || {
                let mut seed = seed;
                while !over.load(Ordering::Relaxed) {
                    let bytes = 1 + next(&mut seed) as usize % (2 << 20);
                    let ptr = pool.malloc(bytes, &stream).unwrap();
                    pool.free(ptr, &stream).unwrap();
                }
            });
        }
        for _ in 0..200 {
            for segment in pool.snapshot() {
                let mut at = segment.address;
                for block in &segment.blocks {
                    // Blocks in other threads' hands are left out; what is there does not overlap.
                    assert!(block.address >= at && block.bytes > 0);
                    at = block.address + block.bytes;
                }
                assert!(at <= segment.address + segment.bytes);
            }
        }
        over.store(true, Ordering::Relaxed);
    });
    pool.validate().unwrap();
}
