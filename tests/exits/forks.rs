//! A fork: the child is told, its values end quietly, and the parent is unharmed.

use std::io::{ErrorKind, Read};
use std::os::unix::net::UnixStream;
use std::os::unix::process::ExitStatusExt;
use std::process::ExitStatus;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

use cuda_sim::{Schedule, Simulator};
use cuda_sys::types::CUresult;
use vpmm::caching::CachingConfig;
use vpmm::resource::{
    Arena, ArenaConfig, CoalescingConfig, CoalescingPool, DeviceMalloc, FixedSize, FixedSizeConfig,
    HostMalloc, Limiting, LogFormat, Logging, Report, ThreadSafe, Tracking, TrackingConfig,
};
use vpmm::{
    Access, CachingAllocator, Contents, CurrentPool, DeviceBuffer, DevicePtr, Error, GraphPool,
    Mark, MemoryResource, OutOfMemoryCallback, Pool, PoolConfig, Recovery, Result, Sharing, Stream,
    StreamHandle, Tagged,
};

use crate::rig::{ASLEEP, AWAKE, GRANULE, MIB, Profile, SIZES, beside, bounded};
use crate::support::changed::{changed, gated};
use crate::support::{Held, Rig, Watched};

gated!(recording: cuEventRecord(event: CUevent, stream: CUstream));
gated!(creation: cuMemCreate(
    handle: *mut CUmemGenericAllocationHandle,
    bytes: usize,
    prop: *const CUmemAllocationProp,
    flags: u64,
));

gated!(reading: cuMemcpyDtoHAsync_v2(
    to: *mut std::ffi::c_void,
    from: CUdeviceptr,
    bytes: usize,
    stream: CUstream,
));

/// A child of this process, which ends by itself or is killed.
struct Child(libc::pid_t);

/// The seconds that a child has.
const LONGEST: u32 = 20;

/// Runs `body` in a child of this process.
fn fork(body: impl FnOnce()) -> Child {
    // SAFETY: the child calls what glibc keeps working after a fork (memory from the heap), and what
    // is tested here, and never returns from this function.
    let child = unsafe { libc::fork() };
    assert!(child >= 0, "no child: {}", std::io::Error::last_os_error());
    if child != 0 {
        return Child(child);
    }
    // SAFETY: a number of seconds, after which a signal ends the child, whatever it waits for.
    unsafe { libc::alarm(LONGEST) };
    let ended = std::panic::catch_unwind(std::panic::AssertUnwindSafe(body));
    // SAFETY: ends the process at once; what belongs to the parent is not dropped here.
    unsafe { libc::_exit(if ended.is_ok() { 0 } else { 1 }) };
}

/// Runs `body` in another thread of a child of this process, to its end.
///
/// Not one of the standard library's: they begin with a lock of all threads of the process, and a thread
/// that was just beginning or ending in the parent holds it in the child for ever.
fn in_a_thread<F: Fn() + Sync>(body: F) {
    extern "C" fn begin<F: Fn() + Sync>(body: *mut libc::c_void) -> *mut libc::c_void {
        // SAFETY: `body` of `in_a_thread`, which waits for this thread.
        let body = unsafe { &*body.cast::<F>().cast_const() };
        let ended = std::panic::catch_unwind(std::panic::AssertUnwindSafe(body));
        if ended.is_ok() { std::ptr::null_mut() } else { std::ptr::dangling_mut() }
    }
    let mut thread = 0;
    let given = (&raw const body).cast_mut().cast();
    // SAFETY: a place for the thread's number, default attributes, and a function that never unwinds,
    // with what it takes: alive until the join below.
    let started = unsafe { libc::pthread_create(&mut thread, std::ptr::null(), begin::<F>, given) };
    assert_eq!(started, 0, "no thread");
    let mut panicked = std::ptr::null_mut();
    // SAFETY: the thread was started above and is joined once; a live pointer.
    assert_eq!(unsafe { libc::pthread_join(thread, &mut panicked) }, 0, "no end");
    assert!(panicked.is_null(), "a panic in a thread of the child's own");
}

impl Child {
    /// Waits for its end.
    fn end(self) -> ExitStatus {
        let mut status = 0;
        // SAFETY: a child of this process, which nobody else waits for; a live int.
        let waited = unsafe { libc::waitpid(self.0, &mut status, 0) };
        assert_eq!(waited, self.0);
        ExitStatus::from_raw(status)
    }
}

/// What a process has of a pool.
struct Owned<'a> {
    rig: &'a Rig,
    profile: Profile,
    pool: Pool,
    stream: Stream,
    graph: GraphPool,
    tagged: [Tagged; 2],
    mark: Mark,
    held: DevicePtr,
    of_orphan: DevicePtr,
    guards: Guards,
}

/// Values whose end changes what a pool knows.
type Guards = (OutOfMemoryCallback, CurrentPool);

fn guards(pool: &Pool) -> Guards {
    (pool.on_out_of_memory(|_, _| Recovery::GiveUp), pool.current_for_scope())
}

impl<'a> Owned<'a> {
    /// With memory in fronts, where requests are served without a driver call or a lock.
    fn new(rig: &'a Rig, profile: Profile) -> Self {
        let (pool, orphan) = (profile.open(&rig.device), profile.open(&rig.device));
        let stream = rig.stream();
        let of_orphan = orphan.malloc(GRANULE as usize, &stream).unwrap();
        drop(orphan);
        let (graph, tagged) = beside(&pool, &stream);
        graph.end(&stream).unwrap();
        let held = pool.malloc(GRANULE as usize, &stream).unwrap();
        for bytes in SIZES {
            let ptr = pool.malloc(bytes as usize, &stream).unwrap();
            pool.free(ptr, &stream).unwrap();
        }
        let mark = pool.mark(&stream).unwrap();
        let guards = guards(&pool);
        Self { rig, profile, pool, stream, graph, tagged, mark, held, of_orphan, guards }
    }

    /// In a child: every call says why it does not work, and no value minds its end.
    fn ends_in_a_child(self) {
        let Self { rig, profile, pool, stream, graph, tagged, mark, held, of_orphan, .. } = &self;
        let (held, of_orphan) = (*held, *of_orphan);
        for bytes in SIZES {
            told(pool.malloc(bytes as usize, stream), "malloc");
            told(pool.malloc(bytes as usize, StreamHandle::PER_THREAD), "malloc of a thread");
            told(tagged[0].malloc(bytes as usize, stream), "malloc of a tag");
        }
        told(pool.free(held, stream), "free");
        told(pool.free(held, StreamHandle::LEGACY), "free on the legacy stream");
        told(Pool::free_any(&rig.driver, of_orphan, stream), "free_any");
        told(pool.record_stream(held, StreamHandle::LEGACY), "record_stream");
        told(pool.mark(stream), "mark");
        told(pool.follows(StreamHandle::LEGACY, mark), "follows");
        told(pool.passed(mark), "passed");
        told(pool.trim_to(0), "trim_to");
        told(pool.set_access(&rig.device, Access::ReadWrite), "set_access");
        told(pool.export(held).map(drop), "export");
        told(pool.export_all().map(drop), "export_all");
        told(pool.tagged("new"), "tagged");
        told(pool.suspend(AWAKE, stream, &Contents::Discard), "suspend");
        told(pool.resume(ASLEEP, stream), "resume");
        told(pool.resume_empty(ASLEEP, stream), "resume_empty");
        told(pool.graph_pool(), "graph_pool");
        told(graph.begin(stream), "begin");
        told(graph.end(stream), "end");
        told(graph.release(stream), "release");
        told(Pool::default_of(&rig.device), "default_of");
        told(Pool::current(&rig.device), "current");
        told(stream.synchronize(), "synchronize");
        told(rig.device.synchronize(), "synchronize the device");
        told(rig.device.stream(), "a new stream");
        told(rig.driver.device(0), "a device");
        in_a_thread(|| told(pool.malloc(1, stream), "malloc in a thread of the child's own"));
        assert_eq!(pool.stats().live_bytes, 0, "nothing of it is the child's");
        assert_eq!((pool.allocation(held.address()), graph.stats().live_bytes), (None, 0));
        assert_eq!(Pool::of(&rig.driver, of_orphan.address()), None);
        let _ = (tagged[0].stats(), tagged[1].is_asleep(), pool.layout().to_string());
        assert!(pool.validate().is_ok() && !format!("{pool:?} {graph:?} {stream:?}").is_empty());
        pool.reset_peaks();
        // A pool of its own it cannot have, either.
        told(profile.try_open(&rig.device), "a pool");
        assert_eq!(pool.make_current(), None);
        Pool::forget_current(&rig.device);
        drop(guards(pool));
        let Self { pool, stream, graph, tagged, guards, .. } = self;
        drop((stream, guards, graph, tagged));
        let (pool, error) = pool.destroy().expect_err("it is the parent's");
        assert!(matches!(error, Error::Forked), "{error}");
        drop(pool);
    }
}

#[track_caller]
fn told<T>(result: Result<T>, what: &str) {
    match result {
        Err(Error::Forked) => {}
        Err(error) => panic!("{what}: {error}"),
        Ok(_) => panic!("{what}: it went well in a child"),
    }
}

/// Forks with everything that a pool can have, and goes on as the child does.
fn fork_with(rig: &Rig, watched: &Watched<'_>, profile: Profile) {
    let owned = Owned::new(rig, profile);
    let held: Vec<Held> = SIZES.iter().map(|bytes| watched.malloc(*bytes, &owned.stream)).collect();
    let child = fork(|| {
        // SAFETY: the child has a copy of the value, which it drops once and the parent's owner,
        // which is not run in the child, never. The same for the pool under observation.
        unsafe { std::ptr::read(&owned) }.ends_in_a_child();
        // SAFETY: as above.
        let pool: Pool = unsafe { std::ptr::read(&*watched.pool) };
        told(pool.free(held[0].ptr, StreamHandle::LEGACY), "free");
        drop(pool);
    });
    for held in &held {
        // Nobody else is given them, and they hold what they held.
        let other = watched.malloc(held.bytes, &owned.stream);
        watched.free(other, &owned.stream);
        watched.free(*held, &owned.stream);
    }
    let ended = child.end();
    assert!(ended.success(), "the child: {ended}");
    let Owned { pool, stream, graph, tagged, held, of_orphan, mark, guards, .. } = owned;
    drop(guards);
    stream.synchronize().unwrap();
    pool.passed(&mark).unwrap();
    pool.resume(ASLEEP, &stream).unwrap();
    graph.release(&stream).unwrap();
    pool.free(held, &stream).unwrap();
    let twice = pool.free(held, &stream).unwrap_err();
    assert!(matches!(twice, Error::DoubleFree { .. } | Error::StalePointer { .. }), "{twice}");
    Pool::free_any(&rig.driver, of_orphan, &stream).unwrap();
    pool.validate().unwrap();
    drop((graph, tagged));
    pool.destroy().unwrap();
}

#[test]
fn a_child_is_told_and_the_parent_goes_on() {
    bounded("forks::a_child_is_told_and_the_parent_goes_on", || {
        Rig::each(|rig, profile| {
            let used = || rig.sim.as_ref().map_or(0, |sim| sim.memory_used(0));
            rig.device.synchronize().unwrap();
            let before = used();
            let watched = rig.pool(profile);
            for _ in 0..3 {
                fork_with(rig, &watched, profile);
            }
            watched.assert_intact();
            drop(watched);
            rig.device.synchronize().unwrap();
            assert_eq!(used(), before, "{profile:?}: everything has gone back, once");
        });
    });
}

/// A simulated machine is one process's: a child makes its own, and turns its own child away by that.
#[test]
fn a_simulator_is_of_the_process_that_made_it() {
    bounded("forks::a_simulator_is_of_the_process_that_made_it", || {
        let answer = |simulator: &Simulator| {
            let init = simulator.driver().cuInit.expect("a simulator has it");
            // SAFETY: cuInit takes no pointers.
            unsafe { init(0) }
        };
        let make = || Simulator::builder().build().expect("there is a slot");
        let (here, not_there) = (CUresult::CUDA_SUCCESS, CUresult::CUDA_ERROR_NOT_INITIALIZED);
        let parents = make();
        let child = fork(|| {
            assert_eq!(answer(&parents), not_there);
            let own = make();
            assert_eq!((answer(&own), answer(&parents)), (here, not_there));
            let grandchild = fork(|| {
                assert_eq!((answer(&own), answer(&parents)), (not_there, not_there));
                assert_eq!(answer(&make()), here);
            });
            assert!(grandchild.end().success());
            assert_eq!((answer(&own), answer(&parents)), (here, not_there));
        });
        assert!(child.end().success());
        assert_eq!(answer(&parents), here);
    });
}

/// Set where the scope ends, by a panic too.
struct SetAtEnd<'a>(&'a AtomicBool);

impl Drop for SetAtEnd<'_> {
    fn drop(&mut self) {
        self.0.store(true, Ordering::Relaxed);
    }
}

/// Children that come while other threads are anywhere in the pool, its locks held or not.
#[test]
fn a_child_comes_while_threads_are_at_work() {
    bounded("forks::a_child_comes_while_threads_are_at_work", || {
        Rig::each(|rig, profile| {
            let pool = profile.open(&rig.device);
            let watched = rig.shared_pool(profile);
            let done = AtomicBool::new(false);
            std::thread::scope(|scope| {
                let _at_the_end = SetAtEnd(&done);
                for thread in 0..3_u64 {
                    let (pool, watched, done) = (&pool, &watched, &done);
                    scope.spawn(move || {
                        let own = rig.stream();
                        for step in thread.. {
                            if done.load(Ordering::Relaxed) {
                                break;
                            }
                            let bytes = SIZES[step as usize % 3] as usize;
                            let ptr = pool.malloc(bytes, &own).unwrap();
                            pool.free(ptr, &own).unwrap();
                            let held = watched.malloc(SIZES[step as usize % 3], &own);
                            watched.free(held, &own);
                            pool.trim_to(MIB).unwrap();
                            drop(pool.on_out_of_memory(|_, _| Recovery::GiveUp));
                            assert!(Pool::of(&rig.driver, 1).is_none());
                        }
                    });
                }
                let start = Instant::now();
                for children in 0.. {
                    if children >= 5 && start.elapsed() > Duration::from_secs(2) {
                        break;
                    }
                    fork_with(rig, &watched, profile);
                }
            });
            pool.validate().unwrap();
            pool.destroy().unwrap();
            watched.assert_intact();
        });
    });
}

/// A child that comes while a thread of the parent has its turn with a container of a thread.
#[test]
fn a_child_has_no_turn_with_a_container() {
    bounded("forks::a_child_has_no_turn_with_a_container", || {
        let sim = Simulator::builder().schedule(Schedule::Eager).build().unwrap();
        let driver = changed(&sim, reading::put);
        let device = driver.device(0).unwrap();
        let (pool, own) =
            (Pool::new(&device, &PoolConfig::default()).unwrap(), Stream::per_thread(&device));
        let mut copy = DeviceBuffer::zeroed(3, &own, &pool).unwrap();
        let shared = DeviceBuffer::from_slice(&[1, 2, 3], &own, &pool).unwrap();
        reading::BEFORE.arm();
        std::thread::scope(|scope| {
            let reads = scope.spawn(|| shared.to_vec().unwrap());
            reading::BEFORE.wait();
            let child = fork(|| {
                told(shared.to_vec(), "to_vec");
                told(copy.as_mut_slice().copy_from(&shared.as_slice()), "copy_from");
                // SAFETY: the child has a copy of the value, which it drops once and the parent's owner,
                // which is not run in the child, never.
                told(unsafe { std::ptr::read(&shared) }.release(), "release");
                // SAFETY: as above.
                drop(unsafe { std::ptr::read(&shared) });
            });
            let ended = child.end();
            reading::BEFORE.open();
            assert_eq!(reads.join().unwrap(), [1, 2, 3]);
            assert!(ended.success(), "the child: {ended}");
        });
        shared.release().unwrap();
    });
}

/// A child that comes while a thread of the parent grows the pool, and has an export of it, a peer's access
/// and a heap with a name.
#[test]
fn a_child_is_told_of_what_was_shared() {
    bounded("forks::a_child_is_told_of_what_was_shared", || {
        let sim = Simulator::builder().devices(2).schedule(Schedule::Eager).build().unwrap();
        let driver = changed(&sim, creation::put);
        let [device, peer] = [0, 1].map(|ordinal| driver.device(ordinal).unwrap());
        let mut config = PoolConfig::default();
        config.sharing = Sharing::FileDescriptor;
        let pool = Pool::new(&device, &config).unwrap();
        pool.set_access(&peer, Access::ReadWrite).unwrap();
        let stream = device.stream().unwrap();
        let tagged = pool.tagged("tag").unwrap();
        let ptr = tagged.malloc(MIB as usize, &stream).unwrap();
        let mut export = pool.export_all().unwrap();
        let (here, there) = UnixStream::pair().unwrap();
        creation::BEFORE.arm();
        std::thread::scope(|scope| {
            let growing = scope.spawn(|| pool.malloc(MIB as usize, &stream).unwrap());
            creation::BEFORE.wait();
            let child = fork(|| {
                told(export.send(&here), "send");
                assert_eq!(pool.access(&peer), Access::None, "nobody reaches it from a child");
                assert_eq!(tagged.stats().live_bytes, 0, "nothing of it is the child's");
            });
            let ended = child.end();
            creation::BEFORE.open();
            pool.free(growing.join().unwrap(), &stream).unwrap();
            assert!(ended.success(), "the child: {ended}");
        });
        // The other end has heard nothing of the child.
        there.set_nonblocking(true).unwrap();
        assert!((&there).read(&mut [0]).is_err_and(|error| error.kind() == ErrorKind::WouldBlock));
        tagged.free(ptr, &stream).unwrap();
    });
}

/// A child that comes while a thread is held inside a driver call, with every lock that a growth takes.
#[test]
fn a_child_comes_while_a_thread_holds_the_locks() {
    bounded("forks::a_child_comes_while_a_thread_holds_the_locks", || {
        for profile in [Profile::Default, Profile::Paged] {
            let sim = Simulator::builder().schedule(Schedule::Eager).build().unwrap();
            let driver = changed(&sim, creation::put);
            let rig = Rig::with(driver, sim.clone());
            let before = sim.leaks();
            let owned = Owned::new(&rig, profile);
            creation::BEFORE.arm();
            let (ptr, ended) = std::thread::scope(|scope| {
                let growing = scope.spawn(|| {
                    let stream = rig.stream();
                    let ptr = owned.pool.malloc((20 * GRANULE) as usize, &stream).unwrap();
                    rig.fill(ptr.address(), 20 * GRANULE, 7, stream.handle());
                    stream.synchronize().unwrap();
                    ptr
                });
                creation::BEFORE.wait();
                let child = fork(|| {
                    // SAFETY: the child's copy, dropped once in it.
                    unsafe { std::ptr::read(&owned) }.ends_in_a_child();
                });
                let ended = child.end();
                creation::BEFORE.open();
                (growing.join().unwrap(), ended)
            });
            assert!(ended.success(), "the child: {ended}");
            let stream = rig.stream();
            rig.check(ptr.address(), 20 * GRANULE, 7, stream.handle());
            assert_eq!(rig.mismatches(), 0);
            owned.pool.free(ptr, &stream).unwrap();
            Pool::free_any(&rig.driver, owned.of_orphan, &stream).unwrap();
            let Owned { pool, graph, tagged, stream: own, guards, .. } = owned;
            drop((graph, tagged, own, stream, guards));
            pool.validate().unwrap();
            pool.destroy().unwrap();
            rig.device.synchronize().unwrap();
            assert_eq!(sim.leaks(), before);
            rig.assert_clean();
        }
    });
}

/// What a process has of a caching allocator: memory that is allocated, cached, and waits for a further
/// stream.
struct OwnedCache<'a> {
    rig: &'a Rig,
    allocator: CachingAllocator,
    streams: [Stream; 2],
    held: DevicePtr,
}

impl<'a> OwnedCache<'a> {
    fn new(rig: &'a Rig) -> Self {
        let allocator = CachingAllocator::new(&rig.device, &CachingConfig::default()).unwrap();
        let streams = [rig.stream(), rig.stream()];
        let [held, cached, waiting] =
            [(); 3].map(|()| allocator.malloc(3 << 20, &streams[0]).unwrap());
        allocator.free(cached).unwrap();
        allocator.record_stream(waiting, &streams[1]).unwrap();
        allocator.free(waiting).unwrap();
        Self { rig, allocator, streams, held }
    }

    /// As [`Owned::ends_in_a_child`].
    fn ends_in_a_child(self) {
        let Self { rig, allocator, streams: [own, side], held } = self;
        // Hits, misses, and a stream that was not seen before.
        for bytes in [3 << 20, 100 << 20] {
            for stream in [own.handle(), StreamHandle::LEGACY, StreamHandle::PER_THREAD] {
                told(allocator.malloc(bytes, stream), "malloc");
            }
        }
        told(allocator.free(held), "free");
        told(allocator.record_stream(held, &side), "record_stream");
        told(allocator.deallocate(held, 3 << 20, 256, side.handle()), "deallocate");
        told(allocator.empty_cache(), "empty_cache");
        told(allocator.alloc_zeros::<u8>(5000, &own).map(drop), "alloc_zeros");
        told(CachingAllocator::new(&rig.device, &CachingConfig::default()), "an allocator");
        assert_eq!((allocator.memory_allocated(), allocator.memory_reserved()), (0, 0));
        assert!(allocator.snapshot().is_empty() && allocator.validate().is_ok());
        assert!(!format!("{allocator:?}").is_empty());
        // The streams first: their end is told to an allocator that is alive.
        drop((own, side));
        drop(allocator);
    }

    /// In the parent everything goes on, and goes back.
    fn ends(self) {
        let Self { rig, allocator, streams: [own, side], held } = self;
        rig.fill(held.address(), 3 << 20, 5, own.handle());
        rig.check(held.address(), 3 << 20, 5, own.handle());
        allocator.free(held).unwrap();
        assert!(matches!(allocator.free(held), Err(Error::DoubleFree { .. })));
        side.synchronize().unwrap();
        let again = allocator.malloc(9 << 20, &own).unwrap();
        assert_eq!(allocator.memory_reserved(), 20 << 20, "what waited is free");
        allocator.free(again).unwrap();
        allocator.validate().unwrap();
        allocator.empty_cache().unwrap();
        assert_eq!(allocator.memory_reserved(), 0);
        assert_eq!(rig.mismatches(), 0);
    }
}

#[test]
fn a_child_is_told_of_a_cache_and_the_parent_goes_on() {
    bounded("forks::a_child_is_told_of_a_cache_and_the_parent_goes_on", || {
        Rig::everywhere(|rig| {
            for _ in 0..3 {
                let owned = OwnedCache::new(rig);
                let child = fork(|| {
                    // SAFETY: the child's copy, dropped once in it.
                    unsafe { std::ptr::read(&owned) }.ends_in_a_child();
                });
                let ended = child.end();
                assert!(ended.success(), "the child: {ended}");
                owned.ends();
            }
        });
    });
}

/// The same while a thread is held inside a driver call, with the lock of all that waits.
#[test]
fn a_child_comes_while_a_thread_holds_a_caches_locks() {
    bounded("forks::a_child_comes_while_a_thread_holds_a_caches_locks", || {
        let sim = Simulator::builder().schedule(Schedule::Eager).build().unwrap();
        let rig = Rig::with(changed(&sim, recording::put), sim);
        let owned = OwnedCache::new(&rig);
        recording::BEFORE.arm();
        let (ptr, ended) = std::thread::scope(|scope| {
            let lacks = scope.spawn(|| owned.allocator.malloc(100 << 20, &owned.streams[0]));
            recording::BEFORE.wait();
            let child = fork(|| {
                // SAFETY: the child's copy, dropped once in it.
                unsafe { std::ptr::read(&owned) }.ends_in_a_child();
            });
            let ended = child.end();
            recording::BEFORE.open();
            (lacks.join().unwrap().unwrap(), ended)
        });
        assert!(ended.success(), "the child: {ended}");
        owned.allocator.free(ptr).unwrap();
        owned.allocator.empty_cache().unwrap();
        owned.ends();
    });
}

/// A resource of two blocks of 2 MiB, while a thread is held inside a driver call with what locks it has then. `look`
/// is what else is asked of it in a child.
fn fork_beside_a_request<R: MemoryResource>(rig: &Rig, resource: R, look: impl Fn(&R)) {
    const BYTES: usize = GRANULE as usize;
    let [own, side] = [rig.stream(), rig.stream()];
    let [held, freed] = [(); 2].map(|()| resource.allocate(BYTES, 256, side.handle()).unwrap());
    resource.deallocate(freed, BYTES, 256, side.handle()).unwrap();
    recording::BEFORE.arm();
    let (ptr, ended) = std::thread::scope(|scope| {
        let asks = scope.spawn(|| resource.allocate(BYTES, 256, own.handle()));
        recording::BEFORE.wait();
        let child = fork(|| {
            // SAFETY: the child's copy, dropped once in it.
            let resource = unsafe { std::ptr::read(&resource) };
            for stream in [own.handle(), side.handle(), StreamHandle::LEGACY] {
                told(resource.allocate(BYTES, 256, stream), "allocate");
                told(resource.deallocate(held, BYTES, 256, stream), "deallocate");
                told(resource.record_stream(held, stream), "record_stream");
            }
            assert_eq!(resource.held_bytes(), Some(0));
            assert!(!resource.describe().to_string().is_empty());
            look(&resource);
        });
        let ended = child.end();
        recording::BEFORE.open();
        (asks.join().unwrap().unwrap(), ended)
    });
    assert!(ended.success(), "the child: {ended}");
    for ptr in [ptr, held] {
        resource.deallocate(ptr, BYTES, 256, own.handle()).unwrap();
    }
    assert_eq!(resource.held_bytes(), Some(2 * GRANULE));
}

#[test]
fn a_child_comes_while_a_thread_holds_a_resources_locks() {
    bounded("forks::a_child_comes_while_a_thread_holds_a_resources_locks", || {
        let sim = Simulator::builder().schedule(Schedule::Eager).build().unwrap();
        let rig = Rig::with(changed(&sim, recording::put), sim.clone());
        let before = sim.leaks();
        let upstream = || DeviceMalloc::new(&rig.device);
        let pool = || {
            let mut config = CoalescingConfig::default();
            (config.initial_bytes, config.max_bytes) = (2 * GRANULE, Some(2 * GRANULE));
            CoalescingPool::new(upstream(), &rig.device, &config).unwrap()
        };
        fork_beside_a_request(&rig, pool(), |pool| {
            assert_eq!((pool.pool_bytes(), pool.live_bytes()), (0, 0));
            assert!(!format!("{pool:?}").is_empty());
            told(pool.trim(StreamHandle::LEGACY, true), "trim");
        });
        let mut config = FixedSizeConfig::default();
        (config.block_bytes, config.blocks_at_once) = (GRANULE as usize, 2);
        let upstream_of_blocks = Limiting::new(upstream(), 2 * GRANULE);
        let blocks = FixedSize::new(upstream_of_blocks, &rig.device, &config).unwrap();
        fork_beside_a_request(&rig, blocks, |blocks| assert!(!format!("{blocks:?}").is_empty()));
        let mut config = ArenaConfig::default();
        config.arena_bytes = Some(2 * GRANULE);
        let arena = Arena::new(upstream(), &rig.device, &config).unwrap();
        fork_beside_a_request(&rig, arena, |arena| {
            assert_eq!(arena.dump().arena_bytes(), 0);
            assert!(!arena.dump().to_string().is_empty() && !format!("{arena:?}").is_empty());
        });
        fork_beside_a_request(&rig, ThreadSafe::new(pool()), |_| ());
        assert_eq!(sim.leaks(), before);
        rig.assert_clean();
    });
}

/// What is allocated is the parent's, and leaks from no child.
#[test]
fn a_child_reports_nothing_that_its_parent_has_allocated() {
    bounded("forks::a_child_reports_nothing_that_its_parent_has_allocated", || {
        let rig = Rig::simulated(Schedule::Eager);
        let found = Arc::new(AtomicBool::new(false));
        let mut config = TrackingConfig::default();
        let told = Arc::clone(&found);
        config.report = Report::Callback(Arc::new(move |_| told.store(true, Ordering::Relaxed)));
        let tracking = Tracking::new(DeviceMalloc::new(&rig.device), config);
        let ptr = tracking.allocate(1000, 256, StreamHandle::LEGACY).unwrap();
        let child = fork(|| {
            // SAFETY: the child's copy, dropped once in it.
            drop(unsafe { std::ptr::read(&tracking) });
            assert!(!found.load(Ordering::Relaxed), "a leak of the parent's");
        });
        let ended = child.end();
        assert!(ended.success(), "the child: {ended}");
        assert_eq!(tracking.outstanding_bytes(), 1000);
        tracking.deallocate(ptr, 1000, 256, StreamHandle::LEGACY).unwrap();
    });
}

/// A thread of the parent's is in the writer, and is not in the child.
#[test]
fn a_child_does_not_wait_for_a_log_that_its_parent_writes() {
    struct Waits(Arc<[AtomicBool; 2]>);
    impl std::io::Write for Waits {
        fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
            let [is_in, goes_on] = &*self.0;
            is_in.store(true, Ordering::Release);
            while !goes_on.load(Ordering::Acquire) {
                std::thread::yield_now();
            }
            Ok(bytes.len())
        }

        fn flush(&mut self) -> std::io::Result<()> {
            Ok(())
        }
    }
    let flags = Arc::new([AtomicBool::new(false), AtomicBool::new(true)]);
    let writer = Waits(Arc::clone(&flags));
    let log = Logging::to_writer(HostMalloc::new(), LogFormat::Rmm, writer);
    let use_it = || {
        let ptr = log.allocate(1000, 256, StreamHandle::LEGACY).expect("memory");
        log.deallocate(ptr, 1000, 256, StreamHandle::LEGACY).expect("freed");
        log.flush().expect("written");
    };
    let [is_in, goes_on] = &*flags;
    is_in.store(false, Ordering::Relaxed);
    goes_on.store(false, Ordering::Relaxed);
    let child = std::thread::scope(|scope| {
        scope.spawn(use_it);
        while !is_in.load(Ordering::Acquire) {
            std::thread::yield_now();
        }
        let child = fork(use_it);
        goes_on.store(true, Ordering::Release);
        child
    });
    assert!(child.end().success());
    assert_eq!(log.lost_rows(), 0);
}
