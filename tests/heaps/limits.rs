//! One limit over all heaps of a pool, and their numbers.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use cuda_sim::{Schedule, Simulator};
use vpmm::{
    Buffers, Contents, Error, Location, PendingPolicy, Pool, Recovery, Sharing, StreamHandle,
    Tagged, WaitPolicy,
};

use crate::graph;
use crate::rig::{GRANULE, LIMIT, Profile};
use crate::support::{Rig, call};

#[test]
fn the_limit_is_for_all_heaps_together() {
    Rig::everywhere(|rig| {
        for profile in Profile::BOTH {
            let watched = rig.pool(profile, Location::Device);
            let pool = &watched.pool;
            let stream = rig.stream();
            let tagged = pool.tagged("weights").unwrap();
            let half = (LIMIT / 2 * GRANULE) as usize;
            let weights = tagged.malloc(half, &stream).unwrap();
            let ordinary = pool.malloc(half, &stream).unwrap();
            for refused in
                [tagged.malloc(GRANULE as usize, &stream), pool.malloc(GRANULE as usize, &stream)]
            {
                assert!(refused.as_ref().is_err_and(Error::is_out_of_memory), "{refused:?}");
            }
            assert_eq!(pool.stats().mapped_bytes, LIMIT * GRANULE);
            assert_eq!(tagged.stats().mapped_bytes, LIMIT / 2 * GRANULE);
            assert_eq!(pool.stats().live_bytes, LIMIT * GRANULE);
            // What sleeps does not count, and cannot wake while others have its room.
            pool.suspend("weights", &stream, &Contents::Keep(Buffers::Release)).unwrap();
            let more = pool.malloc(GRANULE as usize, &stream).unwrap();
            let refused = pool.resume("weights", &stream);
            assert!(refused.as_ref().is_err_and(Error::is_out_of_memory), "{refused:?}");
            assert!(tagged.is_asleep());
            pool.free(more, &stream).unwrap();
            pool.free(ordinary, &stream).unwrap();
            pool.free(weights, &stream).unwrap();
            watched.validate();
        }
    });
}

/// What the driver's pool holds for requests smaller than a page is the pool's, too.
#[test]
fn a_trim_counts_what_is_held_for_small_requests() {
    Rig::everywhere(|rig| {
        let watched = rig.pool(Profile::Paged, Location::Device);
        let (pool, stream) = (&watched.pool, rig.stream());
        let tagged = pool.tagged("weights").unwrap();
        let weights = [(); 4].map(|()| tagged.malloc(GRANULE as usize, &stream).unwrap());
        let small = pool.malloc(1000, &stream).unwrap();
        weights.into_iter().for_each(|ptr| pool.free(ptr, &stream).unwrap());
        stream.synchronize().unwrap();
        let held = || pool.stats().mapped_bytes + pool.stats().small_mapped_bytes;
        let keep_bytes = held() - 3 * GRANULE;
        assert_eq!(pool.trim_to(keep_bytes).unwrap(), 3 * GRANULE);
        assert_eq!(held(), keep_bytes);
        pool.free(small, &stream).unwrap();
        watched.validate();
    });
}

/// The driver gives that back in pieces: a request that lacks less than one gets it all the same.
#[test]
fn a_heap_that_lacks_less_than_a_piece_has_it_of_what_small_requests_had() {
    let sim = cuda_sim::Simulator::builder().memory_bytes(32 * GRANULE).build().unwrap();
    let driver = vpmm::Driver::new(sim.driver()).unwrap();
    let device = driver.device(0).unwrap();
    let stream = device.stream().unwrap();
    let mut config = vpmm::PagedConfig::default();
    config.va_size_bytes = 256 * GRANULE;
    let pool = Pool::paged(&device, &config).unwrap();
    let tagged = pool.tagged("weights").unwrap();
    let small = pool.malloc(1000, &stream).unwrap();
    pool.free(small, &stream).unwrap();
    let of_small = pool.stats().small_mapped_bytes;
    let weights = tagged.malloc((32 * GRANULE - of_small) as usize, &stream).unwrap();
    assert_eq!(device.free_memory().unwrap(), 0);
    let more = tagged.malloc(GRANULE as usize, &stream).expect("what the driver's pool has free");
    for ptr in [weights, more] {
        pool.free(ptr, &stream).unwrap();
    }
    pool.validate().unwrap();
}

/// What the driver's pool has for small requests that are freed counts for nothing at the limit: what it gives back
/// is no room, and the heap that has some is asked all the same.
#[test]
fn room_is_what_the_limit_has_not_what_the_drivers_pool_gives_back() {
    Rig::everywhere(|rig| {
        for waits in [WaitPolicy::FailAtOnce, WaitPolicy::WaitForPending] {
            let mut config = vpmm::PagedConfig::default();
            config.limit_bytes = Some(64 << 20);
            config.out_of_memory = waits;
            let pool = Pool::paged(&rig.device, &config).unwrap();
            let stream = rig.stream();
            let [one, other] = ["one", "other"].map(|tag| pool.tagged(tag).unwrap());
            let small = [(); 40].map(|()| pool.malloc(1 << 20, &stream).unwrap());
            small.into_iter().for_each(|ptr| pool.free(ptr, &stream).unwrap());
            let held = one.malloc(64 << 20, &stream).unwrap();
            pool.free(held, &stream).unwrap();
            stream.synchronize().unwrap();
            let held = other.malloc(40 << 20, &stream).expect("what the first heap has free");
            pool.free(held, &stream).unwrap();
            pool.validate().unwrap();
        }
    });
}

#[test]
fn a_graphs_memory_stays_where_it_is_when_memory_is_short() {
    Rig::everywhere(|rig| {
        for profile in Profile::BOTH {
            let watched = rig.pool(profile, Location::Device);
            let pool = &watched.pool;
            let stream = rig.stream();
            let graphs = pool.graph_pool().unwrap();
            graphs.begin(&stream).unwrap();
            graph::begin(rig, &stream, graph::GLOBAL);
            let blocks = [(); 5].map(|()| pool.malloc(2 * GRANULE as usize, &stream).unwrap());
            for (seed, ptr) in blocks.iter().enumerate() {
                rig.fill(ptr.address(), 2 * GRANULE, seed as u64, stream.handle());
                rig.check(ptr.address(), 2 * GRANULE, seed as u64, stream.handle());
            }
            for index in [0, 2, 4] {
                pool.free(blocks[index], &stream).unwrap();
            }
            let graph = graph::end(rig, &stream);
            graphs.end(&stream).unwrap();
            graph.launch(&stream);
            // 6 granules are free in pieces, 2 may be made: brought together they would do.
            graphs.begin(&stream).unwrap();
            let refused = pool.malloc(7 * GRANULE as usize, &stream);
            assert!(refused.as_ref().is_err_and(Error::is_out_of_memory), "{refused:?}");
            graphs.end(&stream).unwrap();
            assert_eq!((graphs.stats().extents_moved, graphs.stats().zombie_count), (0, 0));
            graph.launch(&stream);
            for (index, seed) in [(1, 1), (3, 3)] {
                rig.check(blocks[index].address(), 2 * GRANULE, seed, stream.handle());
                pool.free(blocks[index], &stream).unwrap();
            }
            graphs.release(&stream).unwrap();
            watched.assert_intact();
        }
    });
}

#[test]
fn a_pool_lives_until_all_of_every_heap_is_freed() {
    Rig::everywhere(|rig| {
        for profile in Profile::BOTH {
            let pool = profile.open(&rig.device, Location::Device, Sharing::None).unwrap();
            let stream = rig.stream();
            let weights = pool.tagged("weights").unwrap().malloc(1000, &stream).unwrap();
            let graphs = pool.graph_pool().unwrap();
            graphs.begin(&stream).unwrap();
            let output = pool.malloc(1000, &stream).unwrap();
            graphs.end(&stream).unwrap();
            drop((graphs, pool));
            for ptr in [weights, output] {
                let inside = ptr.address() + 500;
                let found = Pool::of(&rig.driver, inside).expect("something is allocated");
                assert_eq!(found.allocation(inside).map(|of| of.start), Some(ptr));
                drop(found);
                Pool::free_any(&rig.driver, ptr, &stream).unwrap();
            }
            assert!(Pool::of(&rig.driver, weights.address()).is_none());
            assert!(Pool::of(&rig.driver, output.address()).is_none());
        }
    });
}

#[test]
fn released_graphs_make_room() {
    Rig::everywhere(|rig| {
        for profile in Profile::BOTH {
            let watched = rig.pool(profile, Location::Device);
            let pool = &watched.pool;
            let stream = rig.stream();
            let graphs = pool.graph_pool().unwrap();
            graphs.begin(&stream).unwrap();
            let all = (LIMIT * GRANULE) as usize;
            let scratch = pool.malloc(all, &stream).unwrap();
            pool.free(scratch, &stream).unwrap();
            graphs.end(&stream).unwrap();
            assert_eq!(pool.stats().mapped_bytes, LIMIT * GRANULE);
            graphs.release(&stream).unwrap();
            stream.synchronize().unwrap();
            drop(pool.graph_pool().unwrap());
            let held = watched.malloc(LIMIT * GRANULE, &stream);
            watched.free(held, &stream);
            watched.assert_intact();
        }
    });
}

/// What a graph that was released still uses is waited for only where requests wait: the host does not wait for the
/// GPU with the other policies.
#[test]
fn a_released_graph_that_still_runs_is_waited_for_where_requests_wait() {
    let brief = Duration::from_millis(20);
    for policy in [WaitPolicy::FailAtOnce, WaitPolicy::WaitUpTo(brief), WaitPolicy::WaitForPending]
    {
        for tagged in [false, true] {
            let rig = Rig::simulated(Schedule::Eager);
            let (stream, other) = (rig.stream(), rig.stream());
            let mut config = vpmm::PoolConfig::default();
            (config.limit_bytes, config.out_of_memory) = (Some(8 * GRANULE), policy);
            let pool = vpmm::Pool::new(&rig.device, &config).unwrap();
            let heap = pool.tagged("weights").unwrap();
            let graphs = pool.graph_pool().unwrap();
            graphs.begin(&stream).unwrap();
            pool.free(pool.malloc(4 * GRANULE as usize, &stream).unwrap(), &stream).unwrap();
            graphs.end(&stream).unwrap();
            let runs = rig.stall(stream.handle());
            graphs.release(&stream).unwrap();
            let request = || match tagged {
                true => heap.malloc(6 * GRANULE as usize, &other),
                false => pool.malloc(6 * GRANULE as usize, &other),
            };
            let waits = policy == WaitPolicy::WaitForPending;
            std::thread::scope(|scope| {
                let asks = scope.spawn(request);
                let begin = Instant::now();
                let most = Duration::from_secs(if waits { 0 } else { 2 }) + 2 * brief;
                while !asks.is_finished() && begin.elapsed() < most {
                    std::thread::sleep(Duration::from_millis(1));
                }
                let waited = !asks.is_finished();
                drop(runs);
                let served = asks.join().unwrap();
                assert_eq!((waited, served.is_ok()), (waits, waits), "{policy:?}: {served:?}");
            });
        }
    }
}

/// A pool that holds more than a limit which was set later gives that up, too, where one heap lacks what another has.
#[test]
fn another_heap_gives_up_what_is_beyond_a_limit_that_was_lowered() {
    Rig::everywhere(|rig| {
        for profile in Profile::BOTH {
            let watched = rig.pool(profile, Location::Device);
            let (pool, stream) = (&watched.pool, rig.stream());
            let heap = pool.tagged("weights").unwrap();
            let held: Vec<_> = (0..LIMIT).map(|_| watched.malloc(GRANULE, &stream)).collect();
            held.into_iter().for_each(|held| watched.free(held, &stream));
            stream.synchronize().unwrap();
            pool.limit_to(Some(LIMIT / 4 * GRANULE)).unwrap();
            let ptr = heap.malloc(2 * GRANULE as usize, &stream).unwrap();
            assert!(pool.stats().mapped_bytes <= LIMIT / 4 * GRANULE, "{profile:?}");
            heap.free(ptr, &stream).unwrap();
            watched.assert_intact();
        }
    });
}

/// Memory that the other heaps hold and nobody uses is no reason to sleep on, as it is none to refuse a request.
#[test]
fn a_heap_wakes_into_what_the_others_can_do_without() {
    Rig::everywhere(|rig| {
        for profile in Profile::BOTH {
            let watched = rig.pool(profile, Location::Device);
            let pool = &watched.pool;
            let stream = rig.stream();
            let [weights, cache] = ["weights", "cache"].map(|tag| pool.tagged(tag).unwrap());
            let bytes = LIMIT / 2 * GRANULE;
            let held = weights.malloc(bytes as usize, &stream).unwrap();
            rig.fill(held.address(), bytes, 7, stream.handle());
            for beside in [None, Some(&cache)] {
                pool.suspend("weights", &stream, &Contents::Keep(Buffers::Release)).unwrap();
                let all = (LIMIT * GRANULE) as usize;
                let other = match beside {
                    None => pool.malloc(all, &stream),
                    Some(heap) => heap.malloc(all, &stream),
                };
                let other = other.unwrap();
                let refused = pool.resume("weights", &stream);
                assert!(refused.as_ref().is_err_and(Error::is_out_of_memory), "{refused:?}");
                assert!(refused.is_err_and(|error| error.map().is_some()));
                assert!(weights.is_asleep());
                pool.free(other, &stream).unwrap();
                stream.synchronize().unwrap();
                assert_eq!(pool.stats().mapped_bytes, LIMIT * GRANULE, "it is kept");
                let awake = pool.resume("weights", &stream).unwrap();
                assert_eq!((awake.bytes, awake.loaded_bytes), (bytes, bytes));
                assert!(pool.stats().mapped_bytes <= LIMIT * GRANULE);
                rig.check(held.address(), bytes, 7, stream.handle());
            }
            pool.free(held, &stream).unwrap();
            watched.assert_intact();
        }
    });
}

/// What the program's callbacks make room for is a heap that wakes, too.
#[test]
fn callbacks_make_room_to_wake_in() {
    Rig::everywhere(|rig| {
        for profile in Profile::BOTH {
            let watched = rig.pool(profile, Location::Device);
            let pool = &watched.pool;
            let stream = Arc::new(rig.stream());
            let tagged = pool.tagged("weights").unwrap();
            let held = tagged.malloc(GRANULE as usize, &*stream).unwrap();
            pool.suspend("weights", &*stream, &Contents::Discard).unwrap();
            let cached = pool.malloc((LIMIT * GRANULE) as usize, &*stream).unwrap();
            let cached = Mutex::new(Some(cached));
            let on = Arc::clone(&stream);
            let _callback =
                pool.on_out_of_memory(move |pool, _| match cached.lock().unwrap().take() {
                    Some(ptr) if pool.free(ptr, &*on).is_ok() => Recovery::Retry,
                    _ => Recovery::GiveUp,
                });
            pool.resume("weights", &*stream).unwrap();
            pool.free(held, &*stream).unwrap();
            watched.assert_intact();
        }
    });
}

/// What one heap holds and nobody uses serves the others' requests, also where the work before its free has yet
/// to end.
#[test]
fn whichever_heap_holds_free_memory_another_has_it() {
    Rig::everywhere(|rig| {
        for profile in Profile::BOTH {
            let watched = rig.pool(profile, Location::Device);
            let pool = &watched.pool;
            let stream = rig.stream();
            let [weights, cache] = ["weights", "cache"].map(|tag| pool.tagged(tag).unwrap());
            let bytes = LIMIT * GRANULE;
            let malloc = |heap: Option<&Tagged>| match heap {
                None => pool.malloc(bytes as usize, &stream),
                Some(heap) => heap.malloc(bytes as usize, &stream),
            };
            for is_done in [true, false] {
                let heaps = [None, Some(&weights), None, Some(&cache), Some(&weights), None];
                for (seed, heap) in heaps.into_iter().enumerate() {
                    let ptr = malloc(heap).unwrap();
                    rig.fill(ptr.address(), bytes, seed as u64, stream.handle());
                    rig.check(ptr.address(), bytes, seed as u64, stream.handle());
                    pool.free(ptr, &stream).unwrap();
                    if is_done {
                        stream.synchronize().unwrap();
                    }
                    watched.validate();
                }
            }
            watched.assert_intact();
        }
    });
}

/// A heap beside the main one waits for the GPU where its pool does, for what was freed there or in another one.
#[test]
fn heaps_wait_for_the_gpu_where_their_pool_does() {
    let bytes = 4 * GRANULE;
    for policy in [WaitPolicy::FailAtOnce, WaitPolicy::WaitForPending] {
        for (from_tagged, to_tagged) in [(true, true), (true, false), (false, true)] {
            // What is enqueued runs when somebody waits for it.
            let rig = Rig::simulated(Schedule::Manual);
            let (stream, other) = (rig.stream(), rig.stream());
            let mut config = vpmm::PoolConfig::default();
            (config.limit_bytes, config.out_of_memory) = (Some(bytes), policy);
            config.reuse.internal_dependencies = false;
            let pool = vpmm::Pool::new(&rig.device, &config).unwrap();
            let tagged = pool.tagged("weights").unwrap();
            let malloc = |is_tagged, stream| match is_tagged {
                true => tagged.malloc(bytes as usize, stream),
                false => pool.malloc(bytes as usize, stream),
            };
            let ptr = malloc(from_tagged, &stream).unwrap();
            rig.fill(ptr.address(), bytes, 1, stream.handle());
            pool.free(ptr, &stream).unwrap();
            let served = malloc(to_tagged, &other);
            let waits = policy == WaitPolicy::WaitForPending;
            assert_eq!(served.is_ok(), waits, "{policy:?} {from_tagged} {to_tagged}: {served:?}");
            served.into_iter().for_each(|ptr| pool.free(ptr, &other).unwrap());
        }
    }
}

/// A heap that lacks memory waits for what events tell of in all others before it waits for the device, which one of
/// them has something that waits for.
#[test]
fn another_heap_waits_for_the_device_only_where_streams_are_not_enough() {
    for profile in Profile::BOTH {
        // Which heap has what only the device tells of, which has the rest, and which lacks it: the main one, or one
        // of two more.
        for (lost, rest, lacks) in [(0, 0, 1), (0, 1, 2), (1, 1, 0), (1, 2, 0), (1, 0, 2)] {
            let rig = Rig::simulated(Schedule::Manual);
            let pool = match profile {
                Profile::Default => {
                    let mut config = vpmm::PoolConfig::default();
                    config.limit_bytes = Some(LIMIT * GRANULE);
                    Pool::new(&rig.device, &config)
                }
                Profile::Paged => {
                    let mut config = vpmm::PagedConfig::default();
                    config.limit_bytes = Some(LIMIT * GRANULE);
                    Pool::paged(&rig.device, &config)
                }
            };
            let pool = pool.unwrap();
            let heaps = ["weights", "cache"].map(|tag| pool.tagged(tag).unwrap());
            let (own, other) = (rig.stream(), rig.stream());
            let malloc = |heap: usize, granules: u64, stream| match heap {
                0 => pool.malloc((granules * GRANULE) as usize, stream),
                _ => heaps[heap - 1].malloc((granules * GRANULE) as usize, stream),
            };
            let used = malloc(lost, 1, &own).unwrap();
            let freed = malloc(rest, LIMIT - 1, &other).unwrap();
            std::thread::scope(|scope| {
                let notes = || pool.record_stream(used, StreamHandle::PER_THREAD);
                scope.spawn(notes).join().unwrap().unwrap();
            });
            rig.fill(freed.address(), GRANULE, 1, other.handle());
            pool.free(used, &own).unwrap();
            pool.free(freed, &other).unwrap();
            own.synchronize().unwrap();
            for (granules, waits) in [(LIMIT - 1, 0), (LIMIT, 1)] {
                let before = rig.driver.calls();
                let ptr = malloc(lacks, granules, &own).unwrap();
                let waited = rig.driver.calls().since(&before).count("cuCtxSynchronize");
                let of = (profile, lost, rest, lacks, granules);
                assert_eq!(waited, waits, "{of:?}");
                pool.free(ptr, &own).unwrap();
            }
            pool.validate().unwrap();
            drop((heaps, pool));
            rig.assert_clean();
        }
    }
}

/// A request waits for what streams have freed in its own heap before it waits for the graphs of one that was
/// released, which may run far longer; that of a tagged heap for what was freed in the others, too.
#[test]
fn a_request_waits_for_a_released_graph_only_where_streams_are_not_enough() {
    let ways = [(false, false), (false, true), (true, true)];
    for (profile, (from, to)) in Profile::BOTH.into_iter().flat_map(|of| ways.map(|way| (of, way)))
    {
        let rig = Rig::simulated(Schedule::Eager);
        let (stream, other, own) = (rig.stream(), rig.stream(), rig.stream());
        let pool = match profile {
            Profile::Default => {
                let mut config = vpmm::PoolConfig::default();
                config.limit_bytes = Some(8 * GRANULE);
                config.reuse.internal_dependencies = false;
                Pool::new(&rig.device, &config)
            }
            Profile::Paged => {
                let mut config = vpmm::PagedConfig::default();
                config.limit_bytes = Some(8 * GRANULE);
                config.reuse.internal_dependencies = false;
                Pool::paged(&rig.device, &config)
            }
        };
        let pool = pool.unwrap();
        let heaps = ["weights", "cache"].map(|tag| pool.tagged(tag).unwrap());
        let malloc = |heap: Option<usize>, stream| match heap {
            None => pool.malloc(4 * GRANULE as usize, stream),
            Some(at) => heaps[at].malloc(4 * GRANULE as usize, stream),
        };
        let graphs = pool.graph_pool().unwrap();
        graphs.begin(&stream).unwrap();
        pool.free(pool.malloc(4 * GRANULE as usize, &stream).unwrap(), &stream).unwrap();
        graphs.end(&stream).unwrap();
        let freed = malloc(from.then_some(0), &other).unwrap();
        let runs = rig.stall(stream.handle());
        graphs.release(&stream).unwrap();
        let uses = rig.stall(other.handle());
        pool.free(freed, &other).unwrap();
        std::thread::scope(|scope| {
            let asks = scope.spawn(|| malloc(to.then_some(1), &own));
            std::thread::sleep(Duration::from_millis(20));
            assert!(!asks.is_finished(), "{profile:?} {from} {to}");
            drop(uses);
            let begin = Instant::now();
            while !asks.is_finished() && begin.elapsed() < Duration::from_secs(5) {
                std::thread::sleep(Duration::from_millis(1));
            }
            let served = asks.is_finished();
            drop(runs);
            pool.free(asks.join().unwrap().unwrap(), &own).unwrap();
            assert!(served, "{profile:?} {from} {to}");
        });
        pool.validate().unwrap();
        drop((graphs, heaps, pool));
        rig.assert_clean();
    }
}

/// A small allocation that is freed, but that another stream uses, is still the driver's: it counts.
#[test]
fn the_limit_counts_small_allocations_that_wait_to_be_freed() {
    let rig = Rig::simulated(Schedule::Manual);
    let mut config = vpmm::PagedConfig::default();
    (config.limit_bytes, config.out_of_memory) = (Some(LIMIT * GRANULE), WaitPolicy::FailAtOnce);
    let pool = Pool::paged(&rig.device, &config).unwrap();
    let tagged = pool.tagged("weights").unwrap();
    let (stream, user) = (rig.stream(), rig.stream());
    let small = [(); 4].map(|()| pool.malloc(GRANULE as usize / 2, &stream).unwrap());
    for ptr in small {
        rig.order(&stream, &user);
        rig.fill(ptr.address(), GRANULE / 2, 1, user.handle());
        pool.record_stream(ptr, &user).unwrap();
        pool.free(ptr, &stream).unwrap();
    }
    let all = (LIMIT * GRANULE) as usize;
    let refused = tagged.malloc(all, &stream);
    assert!(refused.as_ref().is_err_and(Error::is_out_of_memory), "{refused:?}");
    rig.device.synchronize().unwrap();
    let rest = tagged.malloc(all - 2 * GRANULE as usize, &stream).unwrap();
    pool.free(rest, &stream).unwrap();
    pool.validate().unwrap();
    drop((tagged, pool));
    rig.assert_clean();
}

/// Where requests wait for what was freed one waits for those, too, though they give the device nothing back: another
/// one beside them is still in use.
#[test]
fn another_heap_waits_for_small_allocations_that_were_freed() {
    let rig = Rig::simulated(Schedule::Manual);
    let mut config = vpmm::PagedConfig::default();
    config.limit_bytes = Some(LIMIT * GRANULE);
    let pool = Pool::paged(&rig.device, &config).unwrap();
    let tagged = pool.tagged("weights").unwrap();
    let (stream, user) = (rig.stream(), rig.stream());
    let [freed, kept] = [(); 2].map(|()| pool.malloc(GRANULE as usize - 512, &stream).unwrap());
    rig.order(&stream, &user);
    rig.fill(freed.address(), GRANULE - 512, 1, user.handle());
    pool.record_stream(freed, &user).unwrap();
    pool.free(freed, &stream).unwrap();
    let rest = tagged.malloc(((LIMIT - 1) * GRANULE) as usize, &stream).unwrap();
    [rest, kept].into_iter().for_each(|ptr| pool.free(ptr, &stream).unwrap());
    pool.validate().unwrap();
    drop((tagged, pool));
    rig.assert_clean();
}

/// What the main heap holds for small requests is no reason to give up more of its pages than another heap lacks.
#[test]
fn pages_are_given_back_as_many_as_another_heap_lacks() {
    let rig = Rig::simulated(Schedule::Eager);
    let mut config = vpmm::PagedConfig::default();
    config.limit_bytes = Some(40 * GRANULE);
    let pool = Pool::paged(&rig.device, &config).unwrap();
    let tagged = pool.tagged("weights").unwrap();
    let stream = rig.stream();
    let small = [(); 16].map(|()| pool.malloc(GRANULE as usize / 2, &stream).unwrap());
    let pages = pool.malloc(8 * GRANULE as usize, &stream).unwrap();
    pool.free(pages, &stream).unwrap();
    stream.synchronize().unwrap();
    let mut held = vec![tagged.malloc(24 * GRANULE as usize, &stream).unwrap()];
    let pages_held = || pool.stats().mapped_bytes - tagged.stats().mapped_bytes;
    assert_eq!(pages_held(), 8 * GRANULE);
    held.push(tagged.malloc(GRANULE as usize, &stream).unwrap());
    assert!(pages_held() >= 6 * GRANULE, "{}", pages_held() / GRANULE);
    held.extend(small);
    held.into_iter().for_each(|ptr| pool.free(ptr, &stream).unwrap());
    pool.validate().unwrap();
    drop((tagged, pool));
    rig.assert_clean();
}

/// What a heap holds is nothing while it sleeps, by each of its numbers, and handles are made anew when it wakes.
#[test]
fn the_numbers_of_a_heap_that_sleeps_are_of_what_it_holds() {
    Rig::everywhere(|rig| {
        let watched = rig.pool(Profile::Default, Location::Device);
        let (pool, stream) = (&watched.pool, rig.stream());
        let tagged = pool.tagged("weights").unwrap();
        let held =
            [2, 1].map(|granules| tagged.malloc((granules * GRANULE) as usize, &stream).unwrap());
        let awake = tagged.stats();
        assert_eq!((awake.mapped_bytes, awake.peak_mapped_bytes), (3 * GRANULE, 3 * GRANULE));
        pool.suspend("weights", &stream, &Contents::Discard).unwrap();
        let asleep = tagged.stats();
        assert_eq!((asleep.mapped_bytes, asleep.asleep_bytes), (0, 3 * GRANULE));
        assert_eq!(asleep.extent_count, 0);
        assert_eq!(asleep.peak_mapped_bytes, 3 * GRANULE);
        pool.reset_peaks();
        assert_eq!(tagged.stats().peak_mapped_bytes, 0);
        pool.resume("weights", &stream).unwrap();
        let again = tagged.stats();
        assert_eq!((again.mapped_bytes, again.peak_mapped_bytes), (3 * GRANULE, 3 * GRANULE));
        assert_eq!(again.extent_count, awake.extent_count);
        assert_eq!(again.extents_created, 2 * awake.extents_created);
        assert_eq!(again.pages_created, 2 * awake.pages_created);
        held.into_iter().for_each(|ptr| pool.free(ptr, &stream).unwrap());
        watched.assert_intact();
    });
}

/// A pool's counts go on, and its peaks stay, when a graph's memory has gone.
#[test]
fn what_a_graphs_pool_did_still_counts_when_it_is_gone() {
    Rig::everywhere(|rig| {
        for profile in Profile::BOTH {
            let watched = rig.pool(profile, Location::Device);
            let (pool, stream) = (&watched.pool, rig.stream());
            let bytes = 4 * GRANULE;
            let before = pool.stats();
            for round in 1..4 {
                let graphs = pool.graph_pool().unwrap();
                graphs.begin(&stream).unwrap();
                let ptr = pool.malloc(bytes as usize, &stream).unwrap();
                pool.free(ptr, &stream).unwrap();
                graphs.end(&stream).unwrap();
                let there = pool.stats();
                graphs.release(&stream).unwrap();
                stream.synchronize().unwrap();
                drop(pool.graph_pool().unwrap());
                let gone = pool.stats();
                assert_eq!(gone.mapped_bytes, before.mapped_bytes);
                assert_eq!(gone.extents_created, there.extents_created);
                assert_eq!(gone.pages_created, before.pages_created + 4 * round);
                // Those of one after the other are no more than one's.
                assert_eq!(gone.peak_mapped_bytes, before.peak_mapped_bytes + bytes);
                assert_eq!(gone.peak_live_bytes, before.peak_live_bytes + bytes);
            }
            pool.reset_peaks();
            let now = pool.stats();
            assert_eq!(now.peak_mapped_bytes, now.mapped_bytes);
            assert_eq!(now.peak_live_bytes, now.live_bytes);
            watched.assert_intact();
        }
    });
}

/// What a pool keeps when the host has waited is of all its heaps.
#[test]
fn a_heap_gives_back_what_is_above_the_pools_threshold() {
    Rig::everywhere(|rig| {
        for paged in [false, true] {
            let threshold = Some(3 * GRANULE);
            let pool = if paged {
                let mut config = vpmm::PagedConfig::default();
                config.release_threshold_bytes = threshold;
                Pool::paged(&rig.device, &config)
            } else {
                let mut config = vpmm::PoolConfig::default();
                config.release_threshold_bytes = threshold;
                Pool::new(&rig.device, &config)
            };
            let (pool, stream) = (pool.unwrap(), rig.stream());
            let tagged = pool.tagged("weights").unwrap();
            let small = tagged.malloc(GRANULE as usize, &stream).unwrap();
            let large = tagged.malloc(8 * GRANULE as usize, &stream).unwrap();
            pool.free(large, &stream).unwrap();
            stream.synchronize().unwrap();
            assert!(tagged.stats().mapped_bytes <= 3 * GRANULE, "{:?}", tagged.stats());
            // What the main heap has in use leaves the other nothing to keep.
            let ptr = pool.malloc(4 * GRANULE as usize, &stream).unwrap();
            let more = tagged.malloc(2 * GRANULE as usize, &stream).unwrap();
            pool.free(more, &stream).unwrap();
            stream.synchronize().unwrap();
            assert_eq!(pool.stats().mapped_bytes, 5 * GRANULE);
            // Nor the other way round.
            pool.free(ptr, &stream).unwrap();
            let more = tagged.malloc(3 * GRANULE as usize, &stream).unwrap();
            stream.synchronize().unwrap();
            assert_eq!(pool.stats().mapped_bytes, 4 * GRANULE);
            for ptr in [small, more] {
                pool.free(ptr, &stream).unwrap();
            }
            pool.validate().unwrap();
        }
    });
}

/// Where no time counts for a pool none does for its other heaps: each makes as many extents as the main one does.
#[test]
fn a_heap_goes_by_the_clock_no_more_than_its_pool() {
    let rig = Rig::simulated(Schedule::Eager);
    let stream = rig.stream();
    let made = [false, true].map(|is_tagged| {
        let mut config = vpmm::PoolConfig::default();
        config.moves_per_second = 0;
        let pool = Pool::new(&rig.device, &config).unwrap();
        let tagged = pool.tagged("weights").unwrap();
        let malloc = |granules: u64| match is_tagged {
            true => tagged.malloc((granules * GRANULE) as usize, &stream).unwrap(),
            false => pool.malloc((granules * GRANULE) as usize, &stream).unwrap(),
        };
        let mut held = vec![malloc(1)];
        // A program that is at leisure by then has shorter extents made.
        std::thread::sleep(Duration::from_millis(120));
        held.extend((0..40).map(|at| malloc(30 + at % 7)));
        let made = pool.stats().extents_created;
        held.into_iter().for_each(|ptr| pool.free(ptr, &stream).unwrap());
        made
    });
    assert_eq!(made[0], made[1]);
}

/// A pool that would rather wait than grow does so in its other heaps, too.
#[test]
fn a_heap_is_as_patient_as_its_pool() {
    Rig::everywhere(|rig| {
        for is_tagged in [false, true] {
            let mut config = vpmm::PoolConfig::default();
            config.patience = Duration::from_millis(1);
            let pool = Pool::new(&rig.device, &config).unwrap();
            let tagged = pool.tagged("weights").unwrap();
            let malloc = |granules: u64, stream: &vpmm::Stream| match is_tagged {
                true => tagged.malloc((granules * GRANULE) as usize, stream).unwrap(),
                false => pool.malloc((granules * GRANULE) as usize, stream).unwrap(),
            };
            let (one, other) = (rig.stream(), rig.stream());
            let ptr = malloc(5, &one);
            let stall = rig.stall(one.handle());
            // SAFETY: the stream is alive. By the bare handle the block goes past the front.
            let bare = unsafe { vpmm::StreamHandle::from_raw(one.handle().raw()) };
            pool.free(ptr, bare).unwrap();
            let first = malloc(1, &other);
            let stats = pool.stats();
            assert_eq!((stats.device_waits, stats.mapped_bytes), (1, 5 * GRANULE), "{is_tagged}");
            drop(stall);
            pool.free(first, &other).unwrap();
        }
    });
}

/// The limit is of all heaps together, and so is what an error says of it; its map is of the heap that was asked.
#[test]
fn an_error_says_what_all_heaps_hold() {
    Rig::everywhere(|rig| {
        for (profile, is_tagged) in
            Profile::BOTH.into_iter().flat_map(|profile| [(profile, false), (profile, true)])
        {
            let watched = rig.pool(profile, Location::Device);
            let (pool, stream) = (&watched.pool, rig.stream());
            let tagged = pool.tagged("weights").unwrap();
            let malloc = |is_tagged: bool, granules: u64| match is_tagged {
                true => tagged.malloc((granules * GRANULE) as usize, &stream),
                false => pool.malloc((granules * GRANULE) as usize, &stream),
            };
            let beside = malloc(!is_tagged, 6).unwrap();
            let [one, two, three] = [2, 2, 2].map(|granules| malloc(is_tagged, granules).unwrap());
            pool.free(two, &stream).unwrap();
            let told = Arc::new(Mutex::new(None));
            let tell = Arc::clone(&told);
            let callback = pool.on_out_of_memory(move |_, error| {
                *tell.lock().unwrap() = Some(error.clone());
                Recovery::GiveUp
            });
            let refused = malloc(is_tagged, 4).unwrap_err();
            drop(callback);
            let to_callback = told.lock().unwrap().take().expect("it was asked");
            for error in [&to_callback, &refused] {
                let Error::OutOfMemory {
                    free_bytes,
                    largest_free_bytes,
                    mapped_bytes,
                    live_bytes,
                    ..
                } = *error
                else {
                    panic!("{error}")
                };
                let all = [mapped_bytes, live_bytes, free_bytes, largest_free_bytes];
                assert_eq!(all.map(|bytes| bytes / GRANULE), [12, 10, 2, 2], "{error}");
            }
            let map = refused.map().expect("a map");
            assert_eq!(map.stats, pool.stats());
            let free: Vec<_> = map.largest_free.iter().map(|of| (of.start, of.bytes)).collect();
            assert_eq!(free, [(two.address(), 2 * GRANULE)], "{map}");
            assert!(map.layout.to_string().contains("[2][-2]["), "{map}");
            for ptr in [beside, one, three] {
                pool.free(ptr, &stream).unwrap();
            }
            watched.assert_intact();
        }
    });
}

/// A driver call fails as a graph's memory goes: it is tried again, as a trim's would be, and nothing is lost.
#[test]
fn a_graphs_memory_that_does_not_go_at_once_goes_later() {
    use cuda_sys::types::CUresult;
    for call in ["cuMemUnmap", "cuMemRelease"] {
        for profile in Profile::BOTH {
            let rig = Rig::simulated(Schedule::Eager);
            let sim = rig.sim.as_ref().expect("a simulator");
            let watched = rig.pool(profile, Location::Device);
            let (pool, stream) = (&watched.pool, rig.stream());
            let before = rig.device.free_memory().unwrap();
            let graphs = pool.graph_pool().unwrap();
            graphs.begin(&stream).unwrap();
            let held = [4, 2].map(|of| pool.malloc(of * GRANULE as usize, &stream).unwrap());
            held.into_iter().for_each(|ptr| pool.free(ptr, &stream).unwrap());
            graphs.end(&stream).unwrap();
            // Another call of the pool sees to it when the stream has come so far.
            let stall = rig.stall(stream.handle());
            graphs.release(&stream).unwrap();
            drop(stall);
            call!(rig.driver, cuStreamSynchronize(stream.handle().raw()));
            for n in 1..40 {
                sim.fail_nth(call, n, CUresult::CUDA_ERROR_UNKNOWN);
            }
            let mut given = pool.trim_to(0).unwrap();
            sim.clear_faults();
            assert!(given < 6 * GRANULE, "{call}: {given}");
            watched.validate();
            given += pool.trim_to(0).unwrap();
            assert_eq!(given, 6 * GRANULE, "{call}, {profile:?}");
            assert_eq!(pool.stats().mapped_bytes, 0);
            assert_eq!(rig.device.free_memory().unwrap(), before, "{call}, {profile:?}");
            let all = pool.malloc((LIMIT * GRANULE) as usize, &stream).unwrap();
            pool.free(all, &stream).unwrap();
            watched.assert_intact();
        }
    }
}

/// What a heap has given back serves another's request also where a call of the driver fails after that.
#[test]
fn a_request_has_what_a_heap_gave_back_before_it_failed() {
    for tagged_asks in [false, true] {
        let sim = cuda_sim::Simulator::builder().memory_bytes(12 * GRANULE).build().unwrap();
        let device = vpmm::Driver::new(sim.driver()).unwrap().device(0).unwrap();
        let mut config = vpmm::PoolConfig::default();
        (config.moves_per_second, config.out_of_memory) = (0, WaitPolicy::FailAtOnce);
        let pool = Pool::new(&device, &config).unwrap();
        let (tagged, stream) = (pool.tagged("weights").unwrap(), device.stream().unwrap());
        let malloc = |from_tagged: bool, granules: u64| match from_tagged {
            true => tagged.malloc((granules * GRANULE) as usize, &stream),
            false => pool.malloc((granules * GRANULE) as usize, &stream),
        };
        let [long, kept, short] = [6, 1, 3].map(|of| malloc(!tagged_asks, of).unwrap());
        [long, short].into_iter().for_each(|ptr| pool.free(ptr, &stream).unwrap());
        stream.synchronize().unwrap();
        sim.fail_nth("cuMemUnmap", 2, cuda_sys::types::CUresult::CUDA_ERROR_UNKNOWN);
        let served = malloc(tagged_asks, 7);
        sim.clear_faults();
        let all = [kept, served.expect("what went back before the failure")];
        all.into_iter().for_each(|ptr| pool.free(ptr, &stream).unwrap());
        pool.validate().unwrap();
        drop((tagged, pool));
        sim.assert_clean();
    }
}

/// What one heap's trim fails at is told, and the others are trimmed all the same.
#[test]
fn a_trim_that_fails_for_one_heap_trims_the_others() {
    for profile in Profile::BOTH {
        let rig = Rig::simulated(Schedule::Eager);
        let sim = rig.sim.as_ref().expect("a simulator");
        let watched = rig.pool(profile, Location::Device);
        let (pool, stream) = (&watched.pool, rig.stream());
        let tagged = pool.tagged("weights").unwrap();
        let of_tagged = tagged.malloc(3 * GRANULE as usize, &stream);
        let held = [of_tagged, pool.malloc(2 * GRANULE as usize, &stream)];
        held.into_iter().for_each(|ptr| pool.free(ptr.unwrap(), &stream).unwrap());
        stream.synchronize().unwrap();
        sim.fail_nth("cuMemUnmap", 1, cuda_sys::types::CUresult::CUDA_ERROR_UNKNOWN);
        let failed = pool.trim_to(0);
        assert!(matches!(failed, Err(Error::Driver { call: "cuMemUnmap", .. })), "{failed:?}");
        let left = [tagged.stats(), pool.stats()].map(|stats| stats.mapped_bytes / GRANULE);
        assert_eq!(left, [0, 2], "{profile:?}");
        assert_eq!(pool.trim_to(0).unwrap(), 2 * GRANULE);
        watched.assert_intact();
    }
}

/// A limit that is set later is at most the one that the pool was made with.
#[test]
fn no_later_limit_is_above_the_first() {
    for profile in Profile::BOTH {
        let rig = Rig::on(Simulator::builder().build().unwrap());
        let watched = rig.pool(profile, Location::Device);
        let stream = rig.stream();
        for bytes in [None, Some((LIMIT + 1) * GRANULE)] {
            watched.pool.limit_to(bytes).unwrap();
            let error = watched.try_malloc((LIMIT + 1) * GRANULE, &stream).unwrap_err();
            assert!(error.is_out_of_memory(), "{error}");
            watched.free(watched.malloc(LIMIT * GRANULE, &stream), &stream);
        }
        watched.assert_intact();
    }
}

/// Further heaps take other streams' memory before they grow where the pool does.
#[test]
fn heaps_wait_before_they_grow_where_their_pool_does() {
    for policy in [PendingPolicy::GrowFirst, PendingPolicy::WaitFirst] {
        let rig = Rig::on(Simulator::builder().build().unwrap());
        let mut config = vpmm::PoolConfig::default();
        (config.pending_policy, config.moves_per_second) = (policy, 0);
        config.va_size_bytes = Some(128 * GRANULE);
        let pool = vpmm::Pool::new(&rig.device, &config).unwrap();
        let watched = rig.watch(Profile::Default, pool);
        let tagged = watched.pool.tagged("weights").unwrap();
        let (a, b) = (rig.stream(), rig.stream());
        let first = tagged.malloc(4 * GRANULE as usize, &a).unwrap();
        let stall = rig.stall(a.handle());
        tagged.free(first, &a).unwrap();
        let second = tagged.malloc(4 * GRANULE as usize, &b).unwrap();
        let held = if policy == PendingPolicy::WaitFirst { 4 } else { 8 };
        assert_eq!(tagged.stats().mapped_bytes, held * GRANULE, "{policy:?}");
        drop(stall);
        tagged.free(second, &b).unwrap();
        watched.assert_intact();
    }
}
