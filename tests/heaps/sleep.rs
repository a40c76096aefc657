//! Heaps that sleep and wake.

use std::fs;
use std::os::unix::fs::PermissionsExt;
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};

use cuda_sim::Simulator;
use cuda_sys::types::CUresult;
use vpmm::{Access, Buffers, Contents, DevicePtr, Error, Location, Sharing, Tagged};

use crate::graph;
use crate::rig::{GRANULE, LIMIT, MIB, Profile};
use crate::support::changed::{changed, gated};
use crate::support::{Rig, Watched, call, streams};

fn everywhere(test: impl Fn(&Rig, Profile)) {
    Rig::everywhere(|rig| Profile::BOTH.iter().for_each(|profile| test(rig, *profile)));
}

/// A path of its own for each call; removed by whoever asked.
pub(crate) fn path() -> PathBuf {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let number = NEXT.fetch_add(1, Ordering::Relaxed);
    std::env::temp_dir().join(format!("vpmm-heaps-{}-{number}", std::process::id()))
}

/// Sizes with holes between them once every second one is freed.
const SIZES: [u64; 7] = [5 * GRANULE / 2, 1000, MIB, GRANULE, 70_000, 3 * MIB, 512];

/// Fills a heap, frees every second allocation, and answers the others with what they hold.
fn populate(rig: &Rig, tagged: &Tagged, stream: &vpmm::Stream) -> Vec<(DevicePtr, u64, u64)> {
    let all: Vec<_> = SIZES
        .iter()
        .enumerate()
        .map(|(index, bytes)| {
            let ptr = tagged.malloc(*bytes as usize, stream).unwrap();
            let seed = (index as u64 + 1) << 42;
            rig.fill(ptr.address(), *bytes, seed, stream.handle());
            (ptr, *bytes, seed)
        })
        .collect();
    let mut kept = Vec::new();
    for (index, held) in all.into_iter().enumerate() {
        if index % 2 == 0 {
            kept.push(held);
        } else {
            tagged.free(held.0, stream).unwrap();
        }
    }
    kept
}

fn check(rig: &Rig, held: &[(DevicePtr, u64, u64)], stream: &vpmm::Stream) {
    for (ptr, bytes, seed) in held {
        rig.check(ptr.address(), *bytes, *seed, stream.handle());
    }
    assert_eq!(rig.mismatches(), 0);
}

fn cycle(rig: &Rig, watched: &Watched<'_>, contents: &Contents) {
    let pool = &watched.pool;
    let (stream, other) = (rig.stream(), rig.stream());
    let tagged = pool.tagged("weights").unwrap();
    let held = populate(rig, &tagged, &stream);
    // A graph of another heap that uses the memory.
    graph::begin(rig, &other, graph::GLOBAL);
    rig.check(held[0].0.address(), held[0].1, held[0].2, other.handle());
    let graph = graph::end(rig, &other);
    rig.order(&stream, &other);
    graph.launch(&other);
    rig.order(&other, &stream);
    for round in 0..3 {
        let mapped = tagged.stats().mapped_bytes;
        let free = rig.device.free_memory().unwrap();
        let asleep = pool.suspend("weights", &stream, contents).unwrap();
        assert_eq!(rig.device.free_memory().unwrap(), free + mapped, "round {round}");
        assert_eq!((asleep.bytes, asleep.kept_bytes), (mapped, 0));
        let live: u64 = held.iter().map(|(_, bytes, _)| bytes).sum();
        match contents {
            Contents::Discard => assert_eq!(asleep.saved_bytes, 0),
            _ => assert!((live..=mapped).contains(&asleep.saved_bytes), "{asleep:?}"),
        }
        assert!(tagged.is_asleep() && tagged.stats().mapped_bytes == 0);
        assert_eq!(tagged.stats().asleep_bytes, mapped);
        watched.validate();
        let ordinary = watched.malloc(MIB, &other);
        watched.free(ordinary, &other);
        let awake = pool.resume("weights", &stream).unwrap();
        assert_eq!((awake.bytes, awake.loaded_bytes), (mapped, asleep.saved_bytes));
        assert_eq!(tagged.stats().mapped_bytes, mapped);
        watched.validate();
        if *contents == Contents::Discard {
            for (ptr, bytes, seed) in &held {
                rig.fill(ptr.address(), *bytes, *seed, stream.handle());
            }
        }
        rig.order(&stream, &other);
        graph.launch(&other);
        rig.order(&other, &stream);
        check(rig, &held, &stream);
    }
    let more = tagged.malloc(MIB as usize, &stream).unwrap();
    pool.free(more, &stream).unwrap();
    for (ptr, ..) in held {
        pool.free(ptr, &stream).unwrap();
    }
    watched.assert_intact();
}

/// Two addresses have a part each of two of the heap's extents: both are mapped again, with what they had.
#[test]
fn extents_in_two_parts_sleep_and_wake() {
    everywhere(|rig, profile| {
        if profile != Profile::Default {
            return;
        }
        let watched = rig.pool(profile, Location::Device);
        let (pool, stream) = (&watched.pool, rig.stream());
        let tagged = pool.tagged("weights").unwrap();
        let short = 204 * 4096;
        let malloc = |bytes: u64, seed: u64| {
            let ptr = tagged.malloc(bytes as usize, &stream).unwrap();
            rig.fill(ptr.address(), bytes, seed, stream.handle());
            (ptr, bytes, seed)
        };
        let long = GRANULE - short;
        let [a, b, c, d] =
            [(short, 1), (long, 2), (long, 3), (short, 4)].map(|(bytes, seed)| malloc(bytes, seed));
        let rest = malloc((LIMIT - 2) * GRANULE, 5);
        [a, d].into_iter().for_each(|(ptr, ..)| tagged.free(ptr, &stream).unwrap());
        let split = malloc(2 * short, 6);
        assert_eq!(tagged.stats().mapped_bytes, LIMIT * GRANULE);
        let held = [b, c, rest, split];
        for contents in [Contents::Keep(Buffers::Retain), Contents::Keep(Buffers::Release)] {
            let asleep = pool.suspend("weights", &stream, &contents).unwrap();
            assert_eq!((asleep.bytes, asleep.saved_bytes), (LIMIT * GRANULE, LIMIT * GRANULE));
            watched.validate();
            pool.resume("weights", &stream).unwrap();
            watched.validate();
            check(rig, &held, &stream);
        }
        for (ptr, ..) in held {
            pool.free(ptr, &stream).unwrap();
            watched.validate();
        }
        watched.assert_intact();
    });
}

#[test]
fn contents_are_kept_by_the_host() {
    everywhere(|rig, profile| {
        for buffers in [Buffers::Release, Buffers::Retain] {
            let watched = rig.pool(profile, Location::Device);
            cycle(rig, &watched, &Contents::Keep(buffers));
        }
    });
}

#[test]
fn contents_are_kept_in_a_file() {
    everywhere(|rig, profile| {
        let watched = rig.pool(profile, Location::Device);
        let path = path();
        cycle(rig, &watched, &Contents::Save(path.clone()));
        fs::remove_file(path).unwrap();
    });
}

#[test]
fn contents_are_discarded() {
    everywhere(|rig, profile| {
        let watched = rig.pool(profile, Location::Device);
        cycle(rig, &watched, &Contents::Discard);
    });
}

#[test]
fn long_memory_goes_through_the_files_buffers_in_turn() {
    Rig::everywhere(|rig| {
        let pool = vpmm::Pool::new(&rig.device, &vpmm::PoolConfig::default()).unwrap();
        let stream = rig.stream();
        let tagged = pool.tagged("long").unwrap();
        let bytes = 300 * MIB + 4096;
        let ptr = tagged.malloc(bytes as usize, &stream).unwrap();
        // Every piece has something of its own.
        for at in (0..bytes / MIB).step_by(10) {
            rig.fill(ptr.address() + at * MIB, MIB, at << 40, stream.handle());
        }
        let path = path();
        let asleep = pool.suspend("long", &stream, &Contents::Save(path.clone())).unwrap();
        assert_eq!(asleep.saved_bytes, bytes);
        assert_eq!(fs::metadata(&path).unwrap().len(), bytes);
        pool.resume("long", &stream).unwrap();
        for at in (0..bytes / MIB).step_by(10) {
            rig.check(ptr.address() + at * MIB, MIB, at << 40, stream.handle());
        }
        assert_eq!(rig.mismatches(), 0);
        fs::remove_file(path).unwrap();
        pool.free(ptr, &stream).unwrap();
    });
}

#[test]
fn requests_fail_and_frees_go_on_while_asleep() {
    everywhere(|rig, profile| {
        let watched = rig.pool(profile, Location::Device);
        let pool = &watched.pool;
        let stream = rig.stream();
        let raw = graph::Raw::new(rig, false);
        let tagged = pool.tagged("weights").unwrap();
        let mut held = populate(rig, &tagged, &stream);
        rig.device.synchronize().unwrap();
        let nobody = pool.suspend("nobody", &stream, &Contents::Discard);
        assert!(matches!(nobody, Err(Error::UnknownTag)));
        assert!(matches!(pool.resume("weights", &stream), Err(Error::NotAsleep)));
        pool.suspend("weights", &stream, &Contents::Keep(Buffers::Release)).unwrap();
        let again = pool.suspend("weights", &stream, &Contents::Discard);
        assert!(matches!(again, Err(Error::Asleep)));
        for stream in [stream.handle(), raw.handle()] {
            assert!(matches!(tagged.malloc(1000, stream), Err(Error::Asleep)));
        }
        let (first, ..) = held.remove(0);
        pool.free(first, &stream).unwrap();
        assert!(matches!(pool.free(first, &stream), Err(Error::DoubleFree { .. })));
        let (second, ..) = held.remove(0);
        pool.free(second, raw.handle()).unwrap();
        assert!(matches!(tagged.malloc(1000, &stream), Err(Error::Asleep)));
        watched.validate();
        pool.resume("weights", &stream).unwrap();
        check(rig, &held, &stream);
        let more = tagged.malloc(GRANULE as usize, &stream).unwrap();
        rig.fill(more.address(), GRANULE, 6, stream.handle());
        held.push((more, GRANULE, 6));
        check(rig, &held, &stream);
        for (ptr, ..) in held {
            pool.free(ptr, &stream).unwrap();
        }
        watched.assert_intact();
    });
}

#[test]
fn threads_allocate_while_the_heap_sleeps_and_wakes() {
    everywhere(|rig, profile| {
        let pool = profile.open(&rig.device, Location::Device, Sharing::None).unwrap();
        let stream = rig.stream();
        let tagged = pool.tagged("weights").unwrap();
        let held = populate(rig, &tagged, &stream);
        stream.synchronize().unwrap();
        let (over, served) = (AtomicBool::new(false), AtomicU64::new(0));
        std::thread::scope(|scope| {
            for thread in 0..3_usize {
                let (tagged, pool) = (&tagged, &pool);
                let (over, served) = (&over, &served);
                scope.spawn(move || {
                    // No device work: what a heap holds must not be used around its sleep.
                    let own = rig.stream();
                    let mut mine = Vec::new();
                    let mut round = thread;
                    while !over.load(Ordering::Relaxed) {
                        round += 1;
                        match tagged.malloc(1000 << (round % 9), &own) {
                            Ok(ptr) => {
                                served.fetch_add(1, Ordering::Relaxed);
                                mine.push(ptr);
                            }
                            Err(Error::Asleep) => std::thread::yield_now(),
                            Err(error) => assert!(error.is_out_of_memory(), "{error}"),
                        }
                        if mine.len() > 5 || round % 4 == 0 {
                            mine.pop().into_iter().for_each(|ptr| pool.free(ptr, &own).unwrap());
                        }
                    }
                    mine.into_iter().for_each(|ptr| pool.free(ptr, &own).unwrap());
                });
            }
            for round in 0..30 {
                pool.suspend("weights", &stream, &Contents::Keep(Buffers::Retain)).unwrap();
                pool.resume("weights", &stream).unwrap();
                while served.load(Ordering::Relaxed) < round {
                    std::thread::yield_now();
                }
            }
            over.store(true, Ordering::Relaxed);
        });
        pool.validate().unwrap();
        check(rig, &held, &stream);
        held.into_iter().for_each(|(ptr, ..)| pool.free(ptr, &stream).unwrap());
        rig.assert_clean();
    });
}

#[test]
fn a_file_that_was_changed_is_refused() {
    everywhere(|rig, profile| {
        let watched = rig.pool(profile, Location::Device);
        let pool = &watched.pool;
        let stream = rig.stream();
        let tagged = pool.tagged("weights").unwrap();
        let held = populate(rig, &tagged, &stream);
        let path = path();
        pool.suspend("weights", &stream, &Contents::Save(path.clone())).unwrap();
        let written = fs::read(&path).unwrap();
        let modified = fs::metadata(&path).unwrap().modified().unwrap();
        let free = rig.device.free_memory().unwrap();
        let refused = |what: &str| {
            let error = pool.resume("weights", &stream).unwrap_err();
            assert!(
                matches!(error, Error::ContentsChanged { .. } | Error::ContentsFile(_)),
                "{what}: {error}"
            );
            assert!(tagged.is_asleep());
            assert_eq!(rig.device.free_memory().unwrap(), free, "{what}");
            watched.validate();
            error.to_string()
        };
        fs::write(&path, &written[..written.len() - 1]).unwrap();
        refused("short");
        let mut changed = written.clone();
        changed[written.len() / 2] ^= 1;
        fs::write(&path, &changed).unwrap();
        refused("one bit");
        fs::File::options().write(true).open(&path).unwrap().set_modified(modified).unwrap();
        let text = refused("one bit, and the time that it had");
        assert!(text.contains("its bytes are not those written"), "{text}");
        fs::remove_file(&path).unwrap();
        let text = refused("gone");
        assert!(text.contains(&format!(": {}: No such", path.display())), "{text}");
        // Memory without contents is still to be had.
        let awake = pool.resume_empty("weights", &stream).unwrap();
        assert_eq!(awake.loaded_bytes, 0);
        for (ptr, ..) in held {
            pool.free(ptr, &stream).unwrap();
        }
        watched.assert_intact();
    });
}

#[test]
fn a_file_may_have_another_name_and_other_rights_meanwhile() {
    everywhere(|rig, profile| {
        let watched = rig.pool(profile, Location::Device);
        let pool = &watched.pool;
        let stream = rig.stream();
        let tagged = pool.tagged("weights").unwrap();
        let held = populate(rig, &tagged, &stream);
        let (path, other) = (path(), path());
        pool.suspend("weights", &stream, &Contents::Save(path.clone())).unwrap();
        fs::rename(&path, &other).unwrap();
        assert!(matches!(pool.resume("weights", &stream), Err(Error::ContentsFile(_))));
        fs::hard_link(&other, &path).unwrap();
        fs::remove_file(&other).unwrap();
        fs::set_permissions(&path, fs::Permissions::from_mode(0o400)).unwrap();
        pool.resume("weights", &stream).unwrap();
        check(rig, &held, &stream);
        fs::remove_file(&path).unwrap();
        for (ptr, ..) in held {
            pool.free(ptr, &stream).unwrap();
        }
        watched.assert_intact();
    });
}

#[test]
fn a_capturing_stream_neither_suspends_nor_resumes() {
    everywhere(|rig, profile| {
        let watched = rig.pool(profile, Location::Device);
        let pool = &watched.pool;
        let (stream, capturing) = (rig.stream(), rig.stream());
        let tagged = pool.tagged("weights").unwrap();
        let held = populate(rig, &tagged, &stream);
        graph::begin(rig, &capturing, graph::GLOBAL);
        let refused = pool.suspend("weights", &capturing, &Contents::Discard);
        assert!(matches!(refused, Err(Error::StreamCapturing)));
        // On another stream it goes on beside the capture.
        let keep = Contents::Keep(Buffers::Release);
        pool.suspend("weights", &stream, &keep).unwrap();
        assert!(matches!(pool.resume("weights", &capturing), Err(Error::StreamCapturing)));
        pool.resume("weights", &stream).unwrap();
        drop(graph::end(rig, &capturing));
        // What was freed on a stream that captures may be in use by what came before.
        let stall = rig.stall(capturing.handle());
        rig.fill(held[0].0.address(), held[0].1, 1, capturing.handle());
        graph::begin(rig, &capturing, graph::GLOBAL);
        pool.free(held[0].0, &capturing).unwrap();
        let refused = pool.suspend("weights", &stream, &keep);
        assert!(matches!(refused, Err(Error::StreamCapturing)), "{refused:?}");
        assert!(!tagged.is_asleep());
        drop(graph::stop(rig, &capturing));
        drop(stall);
        pool.suspend("weights", &stream, &keep).unwrap();
        pool.resume("weights", &stream).unwrap();
        check(rig, &held[1..], &stream);
        for (ptr, ..) in &held[1..] {
            pool.free(*ptr, &stream).unwrap();
        }
        watched.assert_intact();
    });
}

/// The same by a handle from elsewhere, which is known by another number in the capture.
#[test]
fn a_heap_stays_awake_for_what_was_freed_in_a_capture_that_a_graphs_pool_is_open_to() {
    everywhere(|rig, profile| {
        let watched = rig.pool(profile, Location::Device);
        let pool = &watched.pool;
        let (stream, raw) = (rig.stream(), graph::Raw::new(rig, false));
        let tagged = pool.tagged("weights").unwrap();
        let ptr = tagged.malloc(GRANULE as usize, raw.handle()).unwrap();
        let stall = rig.stall(raw.handle());
        rig.fill(ptr.address(), GRANULE, 1, raw.handle());
        let graphs = pool.graph_pool().unwrap();
        graphs.begin(raw.handle()).unwrap();
        graph::begin(rig, raw.handle(), graph::RELAXED);
        pool.free(ptr, raw.handle()).unwrap();
        let refused = pool.suspend("weights", &stream, &Contents::Discard);
        assert!(matches!(refused, Err(Error::StreamCapturing)), "{refused:?}");
        assert!(!tagged.is_asleep());
        let graph = graph::stop(rig, raw.handle());
        graphs.end(raw.handle()).unwrap();
        drop(stall);
        pool.suspend("weights", &stream, &Contents::Discard).unwrap();
        pool.resume("weights", &stream).unwrap();
        graphs.release(raw.handle()).unwrap();
        watched.assert_intact();
        drop(graph);
    });
}

#[test]
fn exported_memory_stays() {
    Rig::everywhere(|rig| {
        for profile in Profile::BOTH {
            let pool = profile.open(&rig.device, Location::Device, Sharing::FileDescriptor);
            let watched = rig.watch(profile, pool.unwrap());
            let stream = rig.stream();
            let tagged = watched.pool.tagged("weights").unwrap();
            let ptr = tagged.malloc(GRANULE as usize, &stream).unwrap();
            drop(tagged.export(ptr).unwrap());
            let refused = watched.pool.suspend("weights", &stream, &Contents::Discard);
            assert!(matches!(refused, Err(Error::Exported { .. })), "{refused:?}");
            let more = tagged.malloc(MIB as usize, &stream).unwrap();
            for ptr in [ptr, more] {
                watched.pool.free(ptr, &stream).unwrap();
            }
            watched.assert_intact();
        }
    });
}

#[test]
fn peers_have_access_after_the_heap_woke() {
    Rig::everywhere_with_peers(|rig, peer| {
        for profile in Profile::BOTH {
            let watched = rig.pool(profile, Location::Device);
            let pool = &watched.pool;
            let (stream, far) = (rig.stream(), peer.stream());
            let early = pool.tagged("early").unwrap();
            let first = early.malloc(MIB as usize, &stream).unwrap();
            pool.suspend("early", &stream, &Contents::Discard).unwrap();
            pool.set_access(&peer.device, Access::ReadWrite).unwrap();
            pool.resume("early", &stream).unwrap();
            let late = pool.tagged("late").unwrap();
            let second = late.malloc(MIB as usize, &stream).unwrap();
            stream.synchronize().unwrap();
            for ptr in [first, second] {
                peer.fill(ptr.address(), MIB, 3, far.handle());
                far.synchronize().unwrap();
                rig.check(ptr.address(), MIB, 3, stream.handle());
                stream.synchronize().unwrap();
                pool.free(ptr, &stream).unwrap();
            }
            watched.assert_intact();
        }
    });
}

gated!(enter: cuCtxGetCurrent(context: *mut CUcontext));

/// A thread is about to trim a heap and stops. Meanwhile another has the heap sleep: what was free of it has gone
/// already.
#[test]
fn a_heap_that_falls_asleep_before_a_trim_is_not_trimmed() {
    let sim = Simulator::builder().build().unwrap();
    let rig = Rig::with(changed(&sim, enter::put), sim.clone());
    for profile in Profile::BOTH {
        let watched = rig.pool(profile, Location::Device);
        let (pool, stream) = (&watched.pool, rig.stream());
        let tagged = pool.tagged("weights").unwrap();
        let held = populate(&rig, &tagged, &stream);
        let mapped = tagged.stats().mapped_bytes;
        enter::BEFORE.arm();
        let given = std::thread::scope(|scope| {
            let trimming = scope.spawn(|| tagged.trim_to(0));
            enter::BEFORE.wait();
            let slept = pool.suspend("weights", &stream, &Contents::Keep(Buffers::Release));
            enter::BEFORE.open();
            assert_eq!(slept.unwrap().bytes, mapped);
            trimming.join().unwrap()
        });
        assert_eq!(given.unwrap(), 0);
        pool.resume("weights", &stream).unwrap();
        assert_eq!(tagged.stats().mapped_bytes, mapped);
        check(&rig, &held, &stream);
        for (ptr, ..) in held {
            pool.free(ptr, &stream).unwrap();
        }
        watched.assert_intact();
    }
}

gated!(identify: cuStreamGetId(stream: CUstream, number: *mut u64));

/// A request is on its way, and another thread has the heap sleep: it is not given addresses without memory.
#[test]
fn a_request_that_a_heap_falls_asleep_before_is_refused() {
    let sim = Simulator::builder().build().unwrap();
    let rig = Rig::with(changed(&sim, identify::put), sim.clone());
    let watched = rig.pool(Profile::Default, Location::Device);
    let (pool, stream, other) = (&watched.pool, rig.stream(), rig.stream());
    let tagged = pool.tagged("weights").unwrap();
    // Free memory, which is nobody's when the heap sleeps.
    for on in [&stream, &other] {
        let ptr = tagged.malloc(4 * GRANULE as usize, on).unwrap();
        tagged.free(ptr, on).unwrap();
    }
    let (raw, foreign) = streams::make(&rig, 0);
    identify::BEFORE.arm();
    let refused = std::thread::scope(|scope| {
        let request = scope.spawn(|| tagged.malloc(GRANULE as usize, foreign));
        identify::BEFORE.wait();
        let slept = pool.suspend("weights", &stream, &Contents::Discard);
        identify::BEFORE.open();
        slept.unwrap();
        request.join().unwrap()
    });
    assert!(matches!(refused, Err(Error::Asleep)), "{refused:?}");
    watched.validate();
    pool.resume("weights", &stream).unwrap();
    let ptr = tagged.malloc(GRANULE as usize, foreign).unwrap();
    tagged.free(ptr, foreign).unwrap();
    watched.assert_intact();
    drop(tagged);
    call!(rig.driver, cuStreamDestroy_v2(raw));
}

gated!(mapping: cuMemMap(
    address: CUdeviceptr,
    bytes: usize,
    offset: usize,
    handle: CUmemGenericAllocationHandle,
    flags: u64
));

/// A request is having memory moved, and another thread has the heap sleep: the addresses that the memory leaves wait
/// for what was freed before, which is waited for, too.
#[test]
fn a_heap_sleeps_behind_a_request_that_has_memory_moved() {
    let sim = Simulator::builder().build().unwrap();
    let rig = Rig::with(changed(&sim, mapping::put), sim.clone());
    let watched = rig.pool(Profile::Default, Location::Device);
    let (pool, stream, other) = (&watched.pool, rig.stream(), rig.stream());
    let tagged = pool.tagged("weights").unwrap();
    let malloc = |granules: u64| tagged.malloc((granules * GRANULE) as usize, &stream).unwrap();
    let mut held: Vec<_> = (0..LIMIT).map(|_| malloc(1)).collect();
    let mut kept = Vec::new();
    while let (Some(goes), Some(stays)) = (held.pop(), held.pop()) {
        tagged.free(goes, &stream).unwrap();
        kept.push(stays);
    }
    mapping::BEFORE.arm();
    let (moved, slept) = std::thread::scope(|scope| {
        let request = scope.spawn(|| malloc(2));
        mapping::BEFORE.wait();
        let sleep = scope.spawn(|| pool.suspend("weights", &other, &Contents::Discard));
        std::thread::sleep(std::time::Duration::from_millis(50));
        mapping::BEFORE.open();
        (request.join().unwrap(), sleep.join().unwrap())
    });
    assert!(tagged.stats().extents_moved > 0);
    slept.unwrap();
    watched.validate();
    pool.resume("weights", &stream).unwrap();
    watched.validate();
    for ptr in kept.into_iter().chain(held).chain([moved]) {
        pool.free(ptr, &stream).unwrap();
    }
    watched.assert_intact();
}

/// The driver would not unmap addresses that memory has left: why is told, and the heap is awake.
#[test]
fn addresses_that_cannot_be_unmapped_keep_a_heap_awake_by_name() {
    let rig = Rig::simulated(cuda_sim::Schedule::Eager);
    let watched = rig.pool(Profile::Default, Location::Device);
    let (pool, stream) = (&watched.pool, rig.stream());
    let tagged = pool.tagged("weights").unwrap();
    let malloc = |granules: u64| tagged.malloc((granules * GRANULE) as usize, &stream).unwrap();
    let held: Vec<_> = (0..LIMIT).map(|_| malloc(1)).collect();
    [1, 3].into_iter().for_each(|at: usize| tagged.free(held[at], &stream).unwrap());
    let moved = malloc(2);
    assert!(tagged.stats().zombie_bytes > 0);
    let refused = cuda_sys::types::CUresult::CUDA_ERROR_UNKNOWN;
    rig.sim.as_ref().unwrap().fail_nth("cuMemUnmap", 1, refused);
    let error = pool.suspend("weights", &stream, &Contents::Discard).unwrap_err();
    let told = matches!(error, Error::Driver { call: "cuMemUnmap", code, .. } if code == refused);
    assert!(told && !tagged.is_asleep(), "{error}");
    watched.validate();
    pool.suspend("weights", &stream, &Contents::Discard).unwrap();
    pool.resume("weights", &stream).unwrap();
    let live = held.iter().enumerate().filter(|(at, _)| ![1, 3].contains(at));
    for ptr in live.map(|(_, ptr)| *ptr).chain([moved]) {
        pool.free(ptr, &stream).unwrap();
    }
    watched.assert_intact();
}

gated!(mapping_beside: cuMemMap(
    address: CUdeviceptr,
    bytes: usize,
    offset: usize,
    handle: CUmemGenericAllocationHandle,
    flags: u64
));

/// A thread frees what a further stream still uses, while another has the heap sleep behind that use.
#[test]
fn what_is_freed_on_the_way_to_sleep_keeps_no_heap_awake() {
    let sim = Simulator::builder().build().unwrap();
    let rig = Rig::with(changed(&sim, mapping_beside::put), sim.clone());
    let watched = rig.pool(Profile::Default, Location::Device);
    let (pool, stream, other, further) = (&watched.pool, rig.stream(), rig.stream(), rig.stream());
    let tagged = pool.tagged("weights").unwrap();
    let malloc = || tagged.malloc(GRANULE as usize, &stream).unwrap();
    let used = malloc();
    pool.record_stream(used, &further).unwrap();
    let stall = rig.stall(further.handle());
    rig.order(&further, &other);
    mapping_beside::BEFORE.arm();
    let pause = || std::thread::sleep(std::time::Duration::from_millis(50));
    let (asked, slept) = std::thread::scope(|scope| {
        let request = scope.spawn(malloc);
        mapping_beside::BEFORE.wait();
        let sleep = scope.spawn(|| pool.suspend("weights", &other, &Contents::Discard));
        pause();
        tagged.free(used, &stream).unwrap();
        mapping_beside::BEFORE.open();
        pause();
        drop(stall);
        (request.join().unwrap(), sleep.join().unwrap())
    });
    slept.unwrap();
    watched.validate();
    assert_eq!(pool.resume("weights", &stream).unwrap().bytes, 2 * GRANULE);
    pool.free(asked, &stream).unwrap();
    watched.assert_intact();
}

/// Copies that the host could not wait for still write there when all has been freed, and the heap ends.
#[test]
fn an_end_waits_for_copies_that_could_not_be_waited_for() {
    for profile in Profile::BOTH {
        let rig = Rig::simulated(cuda_sim::Schedule::Eager);
        let sim = rig.sim.as_ref().unwrap();
        let pool = profile.open(&rig.device, Location::Device, Sharing::None).unwrap();
        let tagged = pool.tagged("ends").unwrap();
        let (stream, other) = (rig.stream(), rig.stream());
        let ptr = tagged.malloc(GRANULE as usize, &stream).unwrap();
        let contents = Contents::Keep(Buffers::Release);
        pool.suspend("ends", &stream, &contents).unwrap();
        let spin = sim.spin(stream.handle().raw()).unwrap();
        let code = cuda_sys::types::CUresult::CUDA_ERROR_UNKNOWN;
        sim.fail_nth("cuEventRecord", 1, code);
        sim.fail_nth("cuStreamSynchronize", 1, code);
        pool.resume("ends", &stream).unwrap_err();
        tagged.free(ptr, &other).unwrap();
        std::thread::scope(|scope| {
            let ends = scope.spawn(|| {
                drop(tagged);
                pool.destroy().unwrap();
            });
            std::thread::sleep(std::time::Duration::from_millis(50));
            spin.release();
            ends.join().unwrap();
        });
        stream.synchronize().unwrap();
        sim.assert_clean();
    }
}

/// Locked pages are kept for the next time where that is asked for, and else given back.
#[test]
fn locked_pages_are_kept_where_that_is_asked_for() {
    let rig = Rig::on(Simulator::builder().build().unwrap());
    let sim = rig.sim.as_ref().unwrap();
    for profile in Profile::BOTH {
        let watched = rig.pool(profile, Location::Device);
        let (pool, stream) = (&watched.pool, rig.stream());
        let tagged = pool.tagged("weights").unwrap();
        let held = populate(&rig, &tagged, &stream);
        let host = || sim.leaks().host_allocations;
        let before = host();
        let cycle = |buffers| {
            let calls = rig.driver.calls();
            pool.suspend("weights", &stream, &Contents::Keep(buffers)).unwrap();
            let asleep = host() - before;
            pool.resume("weights", &stream).unwrap();
            check(&rig, &held, &stream);
            let locked = rig.driver.calls().since(&calls).count("cuMemHostAlloc");
            (locked, asleep, host() - before)
        };
        assert_eq!(cycle(Buffers::Release), (1, 1, 0));
        assert_eq!(cycle(Buffers::Retain), (1, 1, 1));
        assert_eq!(cycle(Buffers::Retain), (0, 1, 1));
        assert_eq!(cycle(Buffers::Release), (0, 1, 0));
        held.into_iter().for_each(|(ptr, ..)| pool.free(ptr, &stream).unwrap());
        watched.assert_intact();
    }
}

/// The host may have as much memory as is needed, and not in one piece.
#[test]
fn contents_are_kept_in_shorter_pieces_where_there_is_no_longer_one() {
    let rig = Rig::on(Simulator::builder().build().unwrap());
    let sim = rig.sim.as_ref().unwrap();
    let watched = rig.pool(Profile::Default, Location::Device);
    let (pool, stream) = (&watched.pool, rig.stream());
    let tagged = pool.tagged("weights").unwrap();
    let bytes = 10 * GRANULE;
    let ptr = tagged.malloc(bytes as usize, &stream).unwrap();
    rig.fill(ptr.address(), bytes, 3, stream.handle());
    let code = CUresult::CUDA_ERROR_OUT_OF_MEMORY;
    // Shorter than 16 MiB no piece is tried.
    (1..3).for_each(|n| sim.fail_nth("cuMemHostAlloc", n, code));
    let keep = Contents::Keep(Buffers::Release);
    let error = pool.suspend("weights", &stream, &keep).unwrap_err();
    assert!(matches!(error, Error::Driver { call: "cuMemHostAlloc", .. }), "{error}");
    sim.clear_faults();
    assert!(!tagged.is_asleep());
    sim.fail_nth("cuMemHostAlloc", 1, code);
    let before = sim.leaks().host_allocations;
    let asleep = pool.suspend("weights", &stream, &keep).unwrap();
    assert_eq!((asleep.saved_bytes, sim.leaks().host_allocations), (bytes, before + 2));
    pool.resume("weights", &stream).unwrap();
    check(&rig, &[(ptr, bytes, 3)], &stream);
    pool.free(ptr, &stream).unwrap();
    watched.assert_intact();
}

/// Whether a file is the one that was written is known before any memory is taken from the device.
#[test]
fn another_file_is_refused_before_anything_is_made() {
    let rig = Rig::on(Simulator::builder().build().unwrap());
    let watched = rig.pool(Profile::Default, Location::Device);
    let (pool, stream) = (&watched.pool, rig.stream());
    let tagged = pool.tagged("weights").unwrap();
    let held = populate(&rig, &tagged, &stream);
    let (path, aside) = (path(), path());
    // What was there before is longer, and no part of what is.
    fs::write(&path, vec![7; 64 << 20]).unwrap();
    pool.suspend("weights", &stream, &Contents::Save(path.clone())).unwrap();
    let written = fs::read(&path).unwrap();
    assert!(written.len() < 64 << 20);
    let modified = fs::metadata(&path).unwrap().modified().unwrap();
    let restore = || {
        let file = fs::File::options().write(true).open(&path).unwrap();
        file.set_len(written.len() as u64).unwrap();
        file.set_modified(modified).unwrap();
    };
    let refused = |what: &str, reason: &str| {
        let calls = rig.driver.calls();
        let error = pool.resume("weights", &stream).unwrap_err();
        let said = error.to_string();
        assert!(matches!(error, Error::ContentsChanged { .. }) && said.contains(reason), "{said}");
        assert_eq!(rig.driver.calls().since(&calls).count("cuMemCreate"), 0, "{what}");
    };
    let file = fs::File::options().write(true).open(&path).unwrap();
    file.set_len(written.len() as u64 + 1).unwrap();
    file.set_modified(modified).unwrap();
    refused("longer", "it is not as long");
    restore();
    let later = modified + std::time::Duration::from_secs(1);
    file.set_modified(later).unwrap();
    refused("written to", "it was written to, or is another");
    restore();
    fs::rename(&path, &aside).unwrap();
    fs::write(&path, &written).unwrap();
    restore();
    refused("another with the same bytes and time", "it was written to, or is another");
    fs::rename(&aside, &path).unwrap();
    pool.resume("weights", &stream).unwrap();
    check(&rig, &held, &stream);
    fs::remove_file(&path).unwrap();
    held.into_iter().for_each(|(ptr, ..)| pool.free(ptr, &stream).unwrap());
    watched.assert_intact();
}

#[test]
fn a_file_that_cannot_be_made_is_named() {
    let rig = Rig::on(Simulator::builder().build().unwrap());
    let watched = rig.pool(Profile::Default, Location::Device);
    let (pool, stream) = (&watched.pool, rig.stream());
    let tagged = pool.tagged("weights").unwrap();
    let held = populate(&rig, &tagged, &stream);
    let path = path().join("weights");
    let error = pool.suspend("weights", &stream, &Contents::Save(path.clone())).unwrap_err();
    assert!(matches!(error, Error::ContentsFile(_)), "{error}");
    assert!(error.to_string().contains(&path.display().to_string()), "{error}");
    assert!(!tagged.is_asleep());
    let more = tagged.malloc(MIB as usize, &stream).unwrap();
    pool.free(more, &stream).unwrap();
    check(&rig, &held, &stream);
    held.into_iter().for_each(|(ptr, ..)| pool.free(ptr, &stream).unwrap());
    watched.assert_intact();
}

/// Contents that are lost may be in use until the stream has come so far.
#[test]
fn memory_whose_contents_are_discarded_is_waited_for() {
    everywhere(|rig, profile| {
        let watched = rig.pool(profile, Location::Device);
        let (pool, stream) = (&watched.pool, rig.stream());
        let tagged = pool.tagged("weights").unwrap();
        let ptr = tagged.malloc(GRANULE as usize, &stream).unwrap();
        let stall = rig.stall(stream.handle());
        rig.fill(ptr.address(), GRANULE, 1, stream.handle());
        std::thread::scope(|scope| {
            let suspending =
                scope.spawn(|| pool.suspend("weights", &stream, &Contents::Discard).map(drop));
            std::thread::sleep(std::time::Duration::from_millis(50));
            assert!(!suspending.is_finished(), "{profile:?}");
            drop(stall);
            suspending.join().unwrap().unwrap();
        });
        pool.resume("weights", &stream).unwrap();
        pool.free(ptr, &stream).unwrap();
        watched.assert_intact();
    });
}
