//! What a request costs does not follow how much there is: counted in driver calls and page faults, which do
//! not depend on how fast the machine is.

use std::thread;
use std::time::{Duration, Instant};

use cuda_sim::{Schedule, Simulator};
use vpmm::{Device, DevicePtr, Driver, Pool, PoolConfig, Stream};

use crate::hits::cost;
use crate::rig::{GRANULE, bare, config};
use crate::support::changed::changed;

/// Rounds until streams have what they need of each other: 18 have been seen.
const WARM: usize = 32;

/// How often a thousand live blocks are exchanged for others.
const BATCHES: usize = 32;

/// Among any number of live blocks of 512 B to 4 KiB, on so many streams in turn, hits cost no call of the heap or
/// the driver, and other requests hardly any.
fn requests_among_live_allocations(streams: usize) {
    let sim = Simulator::builder().build().unwrap();
    let device = Driver::new(sim.driver()).unwrap().device(0).unwrap();
    let pool = Pool::new(&device, &PoolConfig::default()).unwrap();
    let streams: Vec<Stream> = (0..streams).map(|_| device.stream().unwrap()).collect();
    // A hundred at a time on one stream, one at a time on each of many.
    let each = (100 / streams.len()).max(1);
    // Each stream has all sizes.
    let size = |at: usize| 512 << (at / streams.len() % 4);
    let mut held = Vec::with_capacity(each);
    let mut live: Vec<(DevicePtr, &Stream)> = Vec::with_capacity(1_000_000);
    for count in [100, 10_000, 1_000_000] {
        while live.len() < count {
            let stream = &streams[live.len() % streams.len()];
            live.push((pool.malloc(size(live.len()), stream).unwrap(), stream));
        }
        assert_eq!(pool.stats().live_count, count as u64);
        for bytes in [512, 1536, 2048, 4096] {
            let mut round = || {
                for stream in &streams {
                    held.extend((0..each).map(|_| pool.malloc(bytes, stream).unwrap()));
                    held.drain(..).for_each(|ptr| pool.free(ptr, stream).unwrap());
                }
            };
            // Streams take from each other at first, until each has what it needs.
            (0..WARM).for_each(|_| round());
            assert_eq!(cost(device.driver(), round), (0, 0), "{bytes} bytes, {count} live");
        }
        // A thousand go, from all over the memory, and come again in other sizes: past the fronts. A stream that
        // lacks some asks others now and then, which is one call for many such requests.
        let places = |batch: usize| (0..1_000).map(move |of| (batch * 1_000 + of) * 7919 % count);
        let (heap, driver) = cost(device.driver(), || {
            for batch in 0..BATCHES {
                let distinct = || places(batch).take(count);
                distinct().for_each(|at| pool.free(live[at].0, live[at].1).unwrap());
                for at in distinct() {
                    let (ptr, stream) = &mut live[at];
                    *ptr = pool.malloc(size(at + streams.len()), *stream).unwrap();
                }
            }
        });
        let few = BATCHES as u64 * 1_000 / 32;
        // The simulator's own calls of the heap are among them: two or three for each of the driver's.
        assert!(driver <= few && heap <= 2 * few, "{heap} {driver}, {count} live");
    }
    live.into_iter().for_each(|(ptr, stream)| pool.free(ptr, stream).unwrap());
    drop(pool);
    sim.assert_clean();
}

#[test]
fn requests_among_up_to_a_million_live_allocations() {
    requests_among_live_allocations(1);
}

#[test]
fn requests_on_a_thousand_streams_among_up_to_a_million_live_allocations() {
    requests_among_live_allocations(1_000);
}

/// What two streams freed by turns is one run of all their blocks to whom it may serve: a request that it does not
/// serve goes through it a few times, and not once for each of the blocks.
#[test]
fn a_run_of_two_streams_frees_is_looked_at_once() {
    const BLOCKS: usize = 8_000;
    let sim = Simulator::builder().build().unwrap();
    let device = Driver::new(sim.driver()).unwrap().device(0).unwrap();
    // A pool with a limit looks in more places before it grows.
    let mut config = PoolConfig::default();
    config.limit_bytes = Some(device.total_memory().unwrap());
    let pool = Pool::new(&device, &config).unwrap();
    let [own, other] = [(); 2].map(|()| device.stream().unwrap());
    let malloc = |kib: usize, stream: &Stream| pool.malloc(kib << 10, stream).unwrap();
    let mut of_own = Vec::new();
    let mut of_other = Vec::new();
    for _ in 0..BLOCKS {
        of_own.push(malloc(128, &own));
        of_other.push(malloc(256, &other));
    }
    // Everybody's, each between two that are live.
    of_other.into_iter().for_each(|ptr| pool.free(ptr, &other).unwrap());
    device.synchronize().unwrap();
    // Shorter than what is beside them, so that they stay the stream's own.
    of_own.into_iter().for_each(|ptr| pool.free(ptr, &own).unwrap());
    let begin = Instant::now();
    let more = malloc(BLOCKS * 384 + (1 << 20), &own);
    let took = begin.elapsed();
    pool.free(more, &own).unwrap();
    pool.validate().unwrap();
    assert!(took < Duration::from_secs(1), "{took:?}");
}

/// Frees that wait for a stream which is far behind are no matter of requests on streams that have nothing to do
/// with it, however many they are.
#[test]
fn requests_beside_frees_that_wait_for_others_do_not_go_through_them() {
    const FREES: usize = 50_000;
    let sim = Simulator::builder().schedule(Schedule::Manual).build().unwrap();
    let device = Driver::new(sim.driver()).unwrap().device(0).unwrap();
    let pool = Pool::new(&device, &PoolConfig::default()).unwrap();
    let [own, side, other] = [(); 3].map(|()| device.stream().unwrap());
    sim.enqueue(side.handle().raw(), "keeps it busy", |_| Ok(())).unwrap();
    for _ in 0..FREES {
        let ptr = pool.malloc(512, &own).unwrap();
        pool.record_stream(ptr, &side).unwrap();
        pool.free(ptr, &own).unwrap();
    }
    assert_eq!(pool.stats().pending_bytes, FREES as u64 * 512);
    // Each grows the pool. A machine that has other things to do holds up some of them, but hardly all.
    let took = |_| {
        let begin = Instant::now();
        pool.malloc(20 << 20, &other).unwrap();
        begin.elapsed()
    };
    let quickest = (0..64).map(took).min();
    assert!(quickest < Some(Duration::from_millis(1)), "{quickest:?}");
    sim.run_until_idle();
    device.synchronize().unwrap();
    assert_eq!(pool.stats().pending_bytes, 0);
    pool.validate().unwrap();
}

/// Nor are they a matter of frees that wait for another stream, which comes past them at once.
#[test]
fn frees_that_wait_for_a_quick_stream_do_not_go_through_those_that_wait_for_a_slow_one() {
    const FREES: usize = 200_000;
    let sim = Simulator::builder().build().unwrap();
    let device = Driver::new(sim.driver()).unwrap().device(0).unwrap();
    let pool = Pool::new(&device, &PoolConfig::default()).unwrap();
    let [own, slow, quick] = [(); 3].map(|()| device.stream().unwrap());
    let at_work = sim.spin(slow.handle().raw()).unwrap();
    let noted_free = |bytes: usize, further: &Stream| {
        let ptr = pool.malloc(bytes, &own).unwrap();
        pool.record_stream(ptr, further).unwrap();
        pool.free(ptr, &own).unwrap();
    };
    (0..FREES).for_each(|_| noted_free(512, &slow));
    assert_eq!(pool.stats().pending_bytes, FREES as u64 * 512);
    // Each of these finds that the one before it is over.
    let took = |_| {
        let begin = Instant::now();
        noted_free(GRANULE as usize, &quick);
        begin.elapsed()
    };
    let mut took: Vec<Duration> = (0..64).map(took).collect();
    took.sort_unstable();
    assert!(took[32] < Duration::from_micros(500), "{took:?}");
    at_work.release();
    device.synchronize().unwrap();
    assert_eq!(pool.stats().pending_bytes, 0);
    pool.validate().unwrap();
}

/// However many streams noted frees wait for, a request of another one asks about a few.
#[test]
fn questions_among_frees_that_wait_for_a_thousand_streams() {
    let sim = Simulator::builder().schedule(Schedule::Manual).build().unwrap();
    let device = Driver::new(sim.driver()).unwrap().device(0).unwrap();
    let pool = Pool::new(&device, &PoolConfig::default()).unwrap();
    let [own, other] = [(); 2].map(|()| device.stream().unwrap());
    let streams: Vec<Stream> = (0..1000).map(|_| device.stream().unwrap()).collect();
    for stream in &streams {
        sim.enqueue(stream.handle().raw(), "keeps it busy", |_| Ok(())).unwrap();
        let ptr = pool.malloc(512, &own).unwrap();
        pool.record_stream(ptr, stream).unwrap();
        pool.free(ptr, &own).unwrap();
    }
    for _ in 0..20 {
        let before = device.driver().calls();
        pool.malloc(20 << 20, &other).unwrap();
        let calls = device.driver().calls().since(&before);
        let (asked, recorded) = (calls.count("cuEventQuery"), calls.count("cuEventRecord"));
        assert!(asked <= 64 && recorded <= 64, "{calls:?}");
    }
    // And all are asked about in time: each request the next ones.
    sim.run_until_idle();
    let round = |_| {
        pool.malloc(20 << 20, &other).unwrap();
        sim.run_until_idle();
    };
    assert!(pool.stats().pending_count >= 1000);
    (0..200).for_each(round);
    assert_eq!(pool.stats().pending_count, 1, "one block of the stream that freed them");
    pool.validate().unwrap();
}

/// A patient pool looks through its streams once for a request, and not for each of them.
#[test]
fn a_patient_pool_of_many_streams_looks_through_them_once() {
    const STREAMS: usize = 2000;
    let sim = Simulator::builder().schedule(Schedule::Manual).build().unwrap();
    let device = Driver::new(sim.driver()).unwrap().device(0).unwrap();
    let mut config = PoolConfig::default();
    config.patience = Duration::from_nanos(1);
    let pool = Pool::new(&device, &config).unwrap();
    let streams: Vec<Stream> = (0..STREAMS).map(|_| device.stream().unwrap()).collect();
    for stream in &streams {
        let ptr = pool.malloc(GRANULE as usize, stream).unwrap();
        pool.free(ptr, stream).unwrap();
    }
    let took = |round: usize| {
        let begin = Instant::now();
        pool.malloc(20 << 20, &streams[round]).unwrap();
        begin.elapsed()
    };
    let mut took: Vec<Duration> = (0..32).map(took).collect();
    took.sort_unstable();
    assert!(took[16] < Duration::from_millis(5), "{took:?}");
}

/// A trim asks for a while about what streams have freed, but not so often about each of a great many.
#[test]
fn a_trim_beside_many_busy_streams_asks_few_questions() {
    const STREAMS: usize = 500;
    let sim = Simulator::builder().schedule(Schedule::Manual).build().unwrap();
    let device = Driver::new(sim.driver()).unwrap().device(0).unwrap();
    let pool = Pool::new(&device, &PoolConfig::default()).unwrap();
    let streams: Vec<Stream> = (0..STREAMS).map(|_| device.stream().unwrap()).collect();
    let held: Vec<DevicePtr> =
        streams.iter().map(|stream| pool.malloc(GRANULE as usize, stream).unwrap()).collect();
    for (ptr, stream) in held.into_iter().zip(&streams) {
        sim.enqueue(stream.handle().raw(), "keeps it busy", |_| Ok(())).unwrap();
        pool.free(ptr, stream).unwrap();
    }
    let before = device.driver().calls();
    // What was made ahead goes.
    pool.trim_to(0).unwrap();
    let calls = device.driver().calls().since(&before).total();
    assert_eq!(pool.stats().pending_bytes, STREAMS as u64 * GRANULE);
    assert!(calls < 24 * STREAMS as u64, "{calls} calls");
    sim.run_until_idle();
    pool.trim_to(0).unwrap();
    assert_eq!(pool.stats().mapped_bytes, 0);
}

/// A pool of `count` blocks of five granules, of which every other one was freed: as many extents that may move.
fn scattered(pool: &Pool, stream: &Stream, count: usize) {
    let five = 5 * GRANULE as usize;
    let blocks: Vec<DevicePtr> = (0..count).map(|_| pool.malloc(five, stream).unwrap()).collect();
    blocks.into_iter().step_by(2).for_each(|ptr| pool.free(ptr, stream).unwrap());
}

/// Extents made and moved for a request of so many granules, with a program at work since `worked`.
fn handles(moves_per_second: u32, blocks: usize, worked: Duration, granules: u64) -> (u64, u64) {
    let sim = Simulator::builder().build().unwrap();
    let driver = Driver::new(sim.driver()).unwrap();
    handles_with(&driver, moves_per_second, blocks, worked, granules)
}

fn handles_with(
    driver: &Driver,
    moves_per_second: u32,
    blocks: usize,
    worked: Duration,
    granules: u64,
) -> (u64, u64) {
    let device = driver.device(0).unwrap();
    let mut config = PoolConfig::default();
    config.moves_per_second = moves_per_second;
    let pool = Pool::new(&device, &config).unwrap();
    let stream = device.stream().unwrap();
    scattered(&pool, &stream, blocks);
    thread::sleep(worked);
    let before = pool.stats();
    pool.malloc((granules * GRANULE) as usize, &stream).unwrap();
    let after = pool.stats();
    pool.validate().unwrap();
    let made = after.extents_created - before.extents_created;
    (made, after.extents_moved - before.extents_moved)
}

/// Moving what there is comes first, but not all of it where that would take long; and what is made beside is
/// in fewer extents then.
#[test]
fn a_request_in_haste_has_few_extents_made_and_moved() {
    let (made, moved) = handles(0, 300, Duration::ZERO, 1200);
    assert_eq!(moved, 54, "{made} made");
    assert!(made <= 10, "{made} made");
    // Where few move, more are made.
    let (made, moved) = handles(0, 12, Duration::ZERO, 1200);
    assert!(moved >= 12 && (12..=32 - moved / 2).contains(&made), "{made} made, {moved} moved");
}

/// Takes much longer to open a mapping than any driver does.
mod slow_opening {
    use std::time::{Duration, Instant};

    use crate::rig::GRANULE;
    use crate::support::changed::replaced;

    fn wait(bytes: usize) {
        let begin = Instant::now();
        let least = Duration::from_micros(40 * (bytes as u64 / GRANULE));
        while begin.elapsed() < least {
            std::hint::spin_loop();
        }
    }

    replaced!(
        cuMemSetAccess(
            address: CUdeviceptr,
            bytes: usize,
            access: *const CUmemAccessDesc,
            count: usize
        ),
        wait(bytes)
    );
}

/// Where the driver takes longer for each, fewer still are made: on a machine that is busy with something else, as few
/// as there may be beside what moves.
#[test]
fn a_request_in_haste_has_fewer_extents_made_by_a_slow_driver() {
    let sim = Simulator::builder().build().unwrap();
    let driver = changed(&sim, slow_opening::put);
    let (made, moved) = handles_with(&driver, 0, 12, Duration::ZERO, 1200);
    assert!(moved >= 12 && (8..28).contains(&made), "{made} made, {moved} moved");
}

/// A program at its own pace has all of it moved, and as many extents made as may be beside.
#[test]
fn what_moves_for_a_request_at_leisure_counts_among_what_is_made_at_once() {
    let (made, moved) =
        handles(PoolConfig::default().moves_per_second, 300, Duration::from_millis(500), 1200);
    // Extents that were made slowly are short, and more of them move.
    assert!(moved >= 150, "{made} made, {moved} moved");
    assert!(made <= 256_u64.saturating_sub(moved).max(64), "{made} made, {moved} moved");
}

/// However many streams have freed memory that is pending, a request asks about a few.
#[test]
fn questions_among_a_thousand_streams() {
    let sim = Simulator::builder().schedule(Schedule::Manual).build().unwrap();
    let device = Driver::new(sim.driver()).unwrap().device(0).unwrap();
    let pool = Pool::new(&device, &config(4096, 16384)).unwrap();
    let streams: Vec<Stream> = (0..1000).map(|_| device.stream().unwrap()).collect();
    for stream in &streams {
        let ptr = pool.malloc(GRANULE as usize, stream).unwrap();
        pool.free(ptr, stream).unwrap();
    }
    for round in 0..20 {
        let before = device.driver().calls();
        pool.malloc((2 + round % 5) * GRANULE as usize, &streams[round * 7]).unwrap();
        let calls = device.driver().calls().since(&before);
        let (asked, recorded) = (calls.count("cuEventQuery"), calls.count("cuEventRecord"));
        assert!(asked <= 40 && recorded <= 40, "{calls:?}");
        // And a hit among them costs nothing.
        let hit = &streams[999 - round];
        let pair = || {
            let ptr = pool.malloc(4096, hit).unwrap();
            pool.free(ptr, hit).unwrap();
        };
        pair();
        assert_eq!(cost(device.driver(), pair), (0, 0));
    }
    drop(pool);
    sim.assert_clean();
}

/// Granules that are free and apart in [`with_zombies`], for further requests.
const SPARE: usize = 100;

/// A pool in which the addresses of so many granules wait for `stream`, each apart from the others.
fn with_zombies(device: &Device, stream: &Stream, zombies: usize) -> Pool {
    // Half of the memory moves, and the other half is between.
    let granules = 2 * (zombies + SPARE);
    let pool = Pool::new(device, &config(granules as u64, 4 * granules as u64)).unwrap();
    let bytes = GRANULE as usize;
    let mut held: Vec<DevicePtr> =
        (0..granules).map(|_| pool.malloc(bytes, stream).unwrap()).collect();
    // In the order of addresses every other one goes.
    held.sort_by_key(|ptr| ptr.address());
    held.iter().step_by(2).for_each(|ptr| pool.free(*ptr, stream).unwrap());
    let each = zombies.min(250);
    for _ in 0..zombies / each {
        pool.malloc(each * bytes, stream).unwrap();
    }
    pool
}

/// What a request costs in driver calls is the same however many zombies there are: the same bounds for a hundred
/// and for ten thousand.
#[test]
fn requests_among_ten_thousand_zombies() {
    for count in [100, 10_000] {
        let sim = Simulator::builder().schedule(Schedule::Manual).build().unwrap();
        let device = Driver::new(sim.driver()).unwrap().device(0).unwrap();
        let (stream, other) = (device.stream().unwrap(), device.stream().unwrap());
        let pool = with_zombies(&device, &stream, count);
        let zombies = || pool.stats().zombie_bytes / GRANULE;
        assert_eq!((zombies(), pool.stats().zombie_count), (count as u64, count as u64));
        let bytes = GRANULE as usize;
        // Nothing has finished: a miss asks, and unmaps nothing.
        let pair = || {
            let ptr = pool.malloc(bytes, &stream).unwrap();
            pool.free(ptr, &stream).unwrap();
        };
        pair();
        assert_eq!(cost(device.driver(), pair), (0, 0));
        let before = device.driver().calls();
        pool.malloc(3 * bytes, &stream).unwrap();
        let calls = device.driver().calls().since(&before);
        assert!(calls.total() <= 24 && calls.count("cuMemUnmap") == 0, "{calls:?}");
        // All has finished: a miss unmaps some, and no more than some.
        device.synchronize().unwrap();
        let mut unmapped = 0;
        for _ in 0..5 {
            let before = device.driver().calls();
            pool.malloc(3 * bytes, &other).unwrap();
            let calls = device.driver().calls().since(&before);
            let unmaps = calls.count("cuMemUnmap");
            assert!(unmaps <= 128 && calls.total() - unmaps <= 24, "{calls:?}");
            unmapped += unmaps;
        }
        assert!(unmapped >= 100, "{unmapped}");
        drop(pool);
        sim.assert_clean();
    }
}

/// Addresses that a thousand extents have left side by side are one zombie, and one call would unmap them
/// all: some 15 microseconds for each.
#[test]
fn requests_beside_a_long_zombie() {
    const EACH: usize = 1000;
    let sim = Simulator::builder().schedule(Schedule::Manual).build().unwrap();
    let device = Driver::new(sim.driver()).unwrap().device(0).unwrap();
    let pool = Pool::new(&device, &config(3 * EACH as u64, 16 * EACH as u64)).unwrap();
    let (stream, other) = (device.stream().unwrap(), device.stream().unwrap());
    let bytes = GRANULE as usize;
    let some = |count| -> Vec<DevicePtr> {
        (0..count).map(|_| pool.malloc(bytes, &stream).unwrap()).collect()
    };
    let (low, _between, high) = (some(EACH), some(1), some(EACH - 100));
    low.iter().chain(&high).for_each(|ptr| pool.free(*ptr, &stream).unwrap());
    // No more may be made, so that all that is lacking has to move.
    pool.limit_to(Some(pool.stats().mapped_bytes)).unwrap();
    pool.malloc((2 * EACH - 150) * bytes, &stream).unwrap();
    pool.limit_to(None).unwrap();
    let zombies = || pool.stats().zombie_bytes / GRANULE;
    assert!(zombies() >= 800, "only {}", zombies());
    assert!(pool.stats().zombie_count <= 4, "{}", pool.layout());
    device.synchronize().unwrap();
    let mut before = zombies();
    for _ in 0..15 {
        pool.malloc(20 * bytes, &other).unwrap();
        pool.validate().unwrap();
        assert!(before - zombies() <= 64, "{} at once", before - zombies());
        before = zombies();
    }
    assert!(before < 800);
    pool.trim_to(0).unwrap();
    assert_eq!(zombies(), 0);
    drop(pool);
    sim.assert_clean();
}

/// Where nothing else is left a request has addresses unmapped, until there are enough in a row: not all at once, of
/// which there may be thousands.
#[test]
fn a_request_that_lacks_addresses_has_no_more_unmapped_than_it_needs() {
    const ALL: usize = 2000;
    const MOVED: usize = 750;
    let sim = Simulator::builder().build().unwrap();
    let device = Driver::new(sim.driver()).unwrap().device(0).unwrap();
    let stream = device.stream().unwrap();
    let pool = Pool::new(&device, &config(ALL as u64, (ALL + MOVED + 600) as u64)).unwrap();
    let bytes = GRANULE as usize;
    let mut held: Vec<DevicePtr> = (0..ALL).map(|_| pool.malloc(bytes, &stream).unwrap()).collect();
    held.sort_by_key(|ptr| ptr.address());
    let free = |ptr: &DevicePtr| pool.free(*ptr, &stream).unwrap();
    held.iter().step_by(2).for_each(free);
    for _ in 0..MOVED / 250 {
        pool.malloc(250 * bytes, &stream).unwrap();
    }
    held.iter().skip(1).step_by(2).for_each(free);
    device.synchronize().unwrap();
    let zombies = || pool.stats().zombie_bytes / GRANULE;
    let (waiting, before) = (zombies(), device.driver().calls());
    // There is no such hole, and half of what has moved is in the way of what is free: hundreds of gaps.
    pool.malloc(800 * bytes, &stream).unwrap();
    let unmapped = device.driver().calls().since(&before).count("cuMemUnmap");
    assert!((129..waiting).contains(&unmapped), "{unmapped} of {waiting}");
    pool.validate().unwrap();
    drop(pool);
    sim.assert_clean();
}

/// Page faults of the calling thread so far that needed no disk.
fn faults() -> i64 {
    // SAFETY: zeros are such a structure.
    let mut usage: libc::rusage = unsafe { std::mem::zeroed() };
    // SAFETY: the pointer is live for the call.
    assert_eq!(unsafe { libc::getrusage(libc::RUSAGE_THREAD, &raw mut usage) }, 0);
    usage.ru_minflt
}

/// Whether the system populates pages when it is told to: Linux from 5.14 on.
fn populates() -> bool {
    const PAGES: usize = 16;
    // SAFETY: no arguments that matter.
    let page = usize::try_from(unsafe { libc::sysconf(libc::_SC_PAGESIZE) }).unwrap();
    let (access, kind) =
        (libc::PROT_READ | libc::PROT_WRITE, libc::MAP_PRIVATE | libc::MAP_ANONYMOUS);
    // SAFETY: a new mapping anywhere.
    let start = unsafe { libc::mmap(std::ptr::null_mut(), PAGES * page, access, kind, -1, 0) };
    assert_ne!(start, libc::MAP_FAILED);
    // SAFETY: the mapping just made, of which no byte changes.
    let answer = unsafe { libc::madvise(start, PAGES * page, libc::MADV_POPULATE_WRITE) };
    // SAFETY: nobody uses it.
    unsafe { libc::munmap(start, PAGES * page) };
    answer == 0
}

/// A pool that has just been made has the host's memory for its first gigabyte: one that found it page by
/// page met 273 faults in these requests, which took three quarters of their time.
#[test]
fn the_first_gigabyte_meets_few_page_faults() {
    if !populates() {
        println!("skipped: this system does not populate pages (MADV_POPULATE_WRITE)");
        return;
    }
    let sim = Simulator::builder().build().unwrap();
    let device = Driver::new(sim.driver()).unwrap().device(0).unwrap();
    let stream = device.stream().unwrap();
    // Without what the simulator and the allocator of the host meet once.
    let mut met = 0;
    for _ in 0..3 {
        let pool = Pool::new(&device, &PoolConfig::default()).unwrap();
        let mut live: Vec<DevicePtr> = Vec::with_capacity(512);
        let before = faults();
        live.extend((0..512).map(|_| pool.malloc(GRANULE as usize, &stream).unwrap()));
        met = faults() - before;
        live.into_iter().for_each(|ptr| pool.free(ptr, &stream).unwrap());
    }
    assert!(met < 64, "{met} page faults");
    sim.assert_clean();
}

/// The first request of all finds the host's memory that it writes ready: shortcuts to fronts, its block's tag. And it
/// reads no tag where there can be none, at the ends of a part. It met four faults, a third of what it took beside
/// the driver.
#[test]
fn the_first_request_meets_no_page_fault() {
    if !populates() {
        println!("skipped: this system does not populate pages (MADV_POPULATE_WRITE)");
        return;
    }
    let sim = Simulator::builder().build().unwrap();
    let device = Driver::new(sim.driver()).unwrap().device(0).unwrap();
    let stream = device.stream().unwrap();
    let faults_of_first = |bytes: usize| {
        let pool = Pool::new(&device, &PoolConfig::default()).unwrap();
        let before = faults();
        let first = pool.malloc(bytes, &stream).unwrap();
        let met = faults() - before;
        pool.free(first, &stream).unwrap();
        met
    };
    for bytes in [GRANULE as usize, 64 << 20, 1 << 30] {
        // The fewest: the simulator and the allocator of the host meet some at first, and now and then.
        assert_eq!((0..16).map(|_| faults_of_first(bytes)).min(), Some(0), "{bytes} bytes");
    }
    sim.assert_clean();
}

/// A request at the limit, beside many streams that have freed what their work still uses: its stream is made to wait
/// for those that it gets something from, and for none where all that there is would not do.
#[test]
fn a_request_at_the_limit_waits_for_no_stream_in_vain() {
    const STREAMS: usize = 200;
    let sim = Simulator::builder().schedule(Schedule::Manual).build().unwrap();
    let device = Driver::new(sim.driver()).unwrap().device(0).unwrap();
    let mut settings = config(STREAMS as u64, 8 * STREAMS as u64);
    settings.out_of_memory = vpmm::WaitPolicy::FailAtOnce;
    let pool = Pool::new(&device, &settings).unwrap();
    let streams: Vec<Stream> = (0..STREAMS).map(|_| device.stream().unwrap()).collect();
    let asks = device.stream().unwrap();
    let waits = |bytes: u64| {
        let before = device.driver().calls();
        let served = pool.malloc(bytes as usize, &asks);
        (device.driver().calls().since(&before).count("cuStreamWaitEvent"), served)
    };
    // Half of each granule is in use.
    let half = |stream: &Stream| pool.malloc(GRANULE as usize / 2, stream).unwrap();
    let pairs: Vec<[DevicePtr; 2]> = streams.iter().map(|of| [half(of), half(of)]).collect();
    for ([one, _], stream) in pairs.iter().zip(&streams) {
        pool.free(*one, stream).unwrap();
    }
    let free = STREAMS as u64 * GRANULE / 2;
    let (beyond, refused) = waits(free + GRANULE);
    assert!(refused.is_err_and(|error| error.is_out_of_memory()));
    assert_eq!(beyond, 0, "there is not so much, whoever it is waited for");
    // It might have been in one piece.
    let (first, refused) = waits(3 * GRANULE);
    assert!(refused.is_err_and(|error| error.is_out_of_memory()));
    assert!((1..=STREAMS as u64).contains(&first), "{first}");
    let (again, refused) = waits(3 * GRANULE);
    assert!(refused.is_err_and(|error| error.is_out_of_memory()));
    assert_eq!(again, 0, "what they freed is the stream's own by now");
    let (small, served) = waits(GRANULE / 2);
    assert_eq!((small, served.is_ok()), (0, true));
    pool.validate().unwrap();
    device.synchronize().unwrap();
    for ([_, other], stream) in pairs.iter().zip(&streams) {
        pool.free(*other, stream).unwrap();
    }
    // No more of them than the request needs.
    let (some, served) = waits(9 * GRANULE);
    assert!(served.is_ok(), "{served:?}");
    assert!(some <= 10, "{some}");
    pool.validate().unwrap();
    sim.assert_clean();
}

/// A pool at `limit` of so many holes of a granule, each between two granules of which the one behind is live, or
/// free; and in the order of their addresses what it has of those.
fn with_holes(
    device: &Device,
    stream: &Stream,
    holes: usize,
    limit: u64,
) -> (Pool, Vec<DevicePtr>) {
    let pool = Pool::new(device, &config(limit, 8 * holes as u64)).unwrap();
    let malloc = |_| pool.malloc(GRANULE as usize, stream).unwrap();
    let mut held: Vec<DevicePtr> = (0..2 * holes).map(malloc).collect();
    held.sort_by_key(|ptr| ptr.address());
    held.iter().step_by(2).for_each(|ptr| pool.free(*ptr, stream).unwrap());
    assert_eq!(pool.trim_to(0).unwrap(), holes as u64 * GRANULE);
    (pool, held.into_iter().skip(1).step_by(2).collect())
}

/// A long request's windows go over dozens of holes each, and one begins at each of thousands.
#[test]
fn a_request_among_thousands_of_holes_goes_through_some_of_them() {
    const HOLES: usize = 6000;
    let sim = Simulator::builder().memory_bytes(64 << 30).build().unwrap();
    let device = Driver::new(sim.driver()).unwrap().device(0).unwrap();
    let stream = device.stream().unwrap();
    let (pool, held) = with_holes(&device, &stream, HOLES, 2 * HOLES as u64);
    held.iter().for_each(|ptr| pool.free(*ptr, &stream).unwrap());
    let took = |granules: u64| {
        let begin = Instant::now();
        let ptr = pool.malloc((granules * GRANULE) as usize, &stream).unwrap();
        let took = begin.elapsed();
        pool.free(ptr, &stream).unwrap();
        took
    };
    let took: Vec<Duration> = (0..16).map(|at| took(90 + 8 * at)).collect();
    let is_short = |took: &Duration| *took < Duration::from_millis(10);
    assert!(took.iter().any(is_short), "{took:?}");
    // Nor is any of them looked at where all that there is would not do.
    let refused = |_| {
        let begin = Instant::now();
        let refused = pool.malloc((3 * HOLES as u64 * GRANULE) as usize, &stream);
        assert!(refused.is_err_and(|error| error.is_out_of_memory()));
        begin.elapsed()
    };
    let took: Vec<Duration> = (0..8).map(refused).collect();
    assert!(took.iter().any(is_short), "{took:?}");
    pool.validate().unwrap();
    drop(pool);
    sim.assert_clean();
}

/// Whatever other holes there are, what lies before the largest grows there in place.
#[test]
fn free_memory_before_the_largest_hole_grows_in_place_however_many_holes_there_are() {
    for holes in [100, 4500] {
        let sim = Simulator::builder().memory_bytes(64 << 30).build().unwrap();
        let device = Driver::new(sim.driver()).unwrap().device(0).unwrap();
        let stream = device.stream().unwrap();
        let (pool, held) = with_holes(&device, &stream, holes, 2 * holes as u64);
        let last = *held.last().unwrap();
        pool.free(last, &stream).unwrap();
        let before = pool.stats().mapped_bytes;
        pool.malloc(3 * GRANULE as usize, &stream).unwrap();
        assert_eq!(pool.stats().mapped_bytes, before + 2 * GRANULE, "{holes} holes");
        pool.validate().unwrap();
    }
}

/// What a thousand streams freed after the marks that a stream follows is no matter of each of its requests.
#[test]
fn requests_of_a_stream_that_follows_a_thousand_look_at_some_of_what_those_freed() {
    const STREAMS: usize = 1000;
    let sim =
        Simulator::builder().memory_bytes(8 << 30).schedule(Schedule::Manual).build().unwrap();
    let device = Driver::new(sim.driver()).unwrap().device(0).unwrap();
    let pool = Pool::new(&device, &config(4000, 20_000)).unwrap();
    let follows = device.stream().unwrap();
    let streams: Vec<Stream> = (0..STREAMS).map(|_| device.stream().unwrap()).collect();
    for stream in &streams {
        let held: Vec<DevicePtr> = (0..400).map(|_| pool.malloc(1024, stream).unwrap()).collect();
        pool.follows(&follows, &pool.mark(stream).unwrap()).unwrap();
        held.iter().step_by(2).for_each(|ptr| pool.free(*ptr, bare(stream)).unwrap());
    }
    let took = |_| {
        let begin = Instant::now();
        pool.malloc(3 * GRANULE as usize, &follows).unwrap();
        begin.elapsed()
    };
    // All of that has been looked through by then, some for each.
    let took: Vec<Duration> = (0..24).map(took).collect();
    assert!(took[16..].iter().any(|took| *took < Duration::from_millis(5)), "{took:?}");
    pool.validate().unwrap();
}
