//! Driver calls that fail, one after the other.

use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, Weak};

use cuda_sys::types::{CUresult, CUstream_flags_enum};
use vpmm::resource::*;
use vpmm::{Error, MemoryResource};

use crate::subjects::{MIB, SUBJECTS, Shared, malloc, plain_pool};
use crate::support::{Rig, call, streams};
use crate::watched::Watched;

/// Whichever driver call of a request fails, the request fails by name or is served all the same; what was
/// allocated keeps its contents, and the next request is served.
#[test]
fn a_call_that_fails_costs_one_request() {
    for subject in SUBJECTS {
        let rig = Rig::simulated(cuda_sim::Schedule::Late { patience: 3 });
        let sim = rig.sim.as_ref().expect("simulated");
        let resource = subject.make(&rig);
        let watched = Watched::new(&rig, &resource);
        let (one, two) = (rig.stream(), rig.stream());
        let kept = watched.allocate(100_000, &one);
        let mut failures = 0;
        for (round, bytes) in [1000, 3 << 20, 7 << 20].into_iter().enumerate() {
            for call in 1..40 {
                // What the other stream has freed is looked at on the way.
                let others = watched.allocate(bytes, &two);
                watched.free(others, &two);
                sim.fail_call(call, CUresult::CUDA_ERROR_UNKNOWN);
                let result = resource.allocate(bytes, 256, one.handle());
                sim.clear_faults();
                match result {
                    Ok(ptr) => {
                        sim.fail_call(call, CUresult::CUDA_ERROR_UNKNOWN);
                        let freed = resource.deallocate(ptr, bytes, 256, one.handle());
                        sim.clear_faults();
                        if freed.is_err() {
                            failures += 1;
                            resource.deallocate(ptr, bytes, 256, one.handle()).expect("freed");
                        }
                    }
                    Err(error) => {
                        failures += 1;
                        assert!(!error.is_out_of_memory(), "{}: {round} {error}", subject.name);
                    }
                }
            }
        }
        println!("{}: {failures} failures", subject.name);
        watched.free(kept, &one);
        watched.assert_intact();
        drop(resource);
        rig.assert_clean();
    }
}

/// Nothing is left of a resource whose making failed at any call.
#[test]
fn a_making_that_fails_leaves_nothing() {
    for subject in SUBJECTS {
        let rig = Rig::simulated(cuda_sim::Schedule::Eager);
        let sim = rig.sim.as_ref().expect("simulated");
        drop(subject.make(&rig));
        let (before, used) = (sim.leaks(), sim.memory_used(0));
        for call in 1..60 {
            sim.fail_call(call, CUresult::CUDA_ERROR_UNKNOWN);
            let made = subject.try_make(&rig);
            sim.clear_faults();
            // Past the last call, or one that may fail without harm.
            if made.is_ok() {
                break;
            }
            assert_eq!(sim.leaks(), before, "{} at call {call}", subject.name);
        }
        assert!(sim.memory_used(0) <= used, "{}", subject.name);
        rig.assert_clean();
    }
}

/// Everything goes back to the device, what was never freed too.
#[test]
fn an_end_gives_everything_back() {
    for subject in SUBJECTS {
        let rig = Rig::simulated(cuda_sim::Schedule::Late { patience: 3 });
        let sim = rig.sim.as_ref().expect("simulated");
        let before = sim.leaks();
        let stream = rig.stream();
        let resource = subject.make(&rig);
        let watched = Watched::new(&rig, &resource);
        let held = [1000, 3 << 20, 7 << 20].map(|bytes| watched.allocate(bytes, &stream));
        held.into_iter().for_each(|held| watched.free(held, &stream));
        drop(watched);
        drop(resource);
        stream.synchronize().expect("the stream finishes");
        drop(stream);
        assert_eq!(sim.leaks(), before, "{}", subject.name);
        rig.assert_clean();
    }
}

/// Makes a pool on a pool below, which hands out at once what comes back.
type Make = fn(&Rig, Arc<CoalescingPool<DeviceMalloc>>) -> Shared;

fn coalescing(rig: &Rig, below: Arc<CoalescingPool<DeviceMalloc>>) -> Shared {
    let config = CoalescingConfig::default();
    Arc::new(CoalescingPool::new(below, &rig.device, &config).expect("a pool"))
}

fn blocks_of_16_mib(rig: &Rig, below: Arc<CoalescingPool<DeviceMalloc>>) -> Shared {
    let mut config = FixedSizeConfig::default();
    (config.block_bytes, config.blocks_at_once, config.at_start) = (16 << 20, 1, false);
    Arc::new(FixedSize::new(below, &rig.device, &config).expect("blocks"))
}

/// A pool that ends gives its memory to a pool below only when the work on it is complete, whichever call of
/// the driver fails on the way.
#[test]
fn an_end_in_which_a_call_fails_waits_all_the_same() {
    const BYTES: usize = 16 << 20;
    let makes: [Make; 2] = [coalescing, blocks_of_16_mib];
    for (make, call) in makes.into_iter().flat_map(|make| (1..16).map(move |call| (make, call))) {
        let rig = Rig::simulated(cuda_sim::Schedule::Late { patience: 64 });
        // One that cannot be destroyed is lost.
        rig.may_leave_events();
        let sim = rig.sim.as_ref().expect("simulated");
        let below = Arc::new(plain_pool(&rig));
        assert_eq!(below.pool_bytes(), 16 * MIB, "all that there is is wanted again");
        let resource = make(&rig, Arc::clone(&below));
        let (first, second) = (rig.stream(), rig.stream());
        let watched = Watched::new(&rig, &resource);
        let held = watched.allocate(BYTES, &first);
        watched.check(&held, &first);
        watched.free(held, &first);
        drop(watched);
        sim.fail_call(call, CUresult::CUDA_ERROR_UNKNOWN);
        drop(resource);
        sim.clear_faults();
        let watched = Watched::new(&rig, &below);
        let again = watched.allocate(BYTES, &second);
        watched.free(again, &second);
        watched.assert_intact();
    }
}

/// Nobody tells which streams use what was never freed: a pool that gives it to a pool below, which hands it to
/// others at once, waits for the device.
#[test]
fn an_end_with_allocations_waits_for_the_device() {
    const BYTES: usize = 16 << 20;
    // What is taken at the start is behind no stream's request.
    let at_start: Make = |rig, below| {
        let mut config = FixedSizeConfig::default();
        (config.block_bytes, config.blocks_at_once) = (BYTES, 1);
        Arc::new(FixedSize::new(below, &rig.device, &config).expect("blocks"))
    };
    let makes: [Make; 4] = [coalescing, blocks_of_16_mib, at_start, |rig, below| {
        let mut config = ArenaConfig::default();
        config.arena_bytes = Some(16 * MIB);
        Arc::new(Arena::new(below, &rig.device, &config).expect("an arena"))
    }];
    // The second is of an arena's part for one stream.
    for (make, bytes) in makes.into_iter().flat_map(|make| [(make, BYTES), (make, 1000)]) {
        let rig = Rig::simulated(cuda_sim::Schedule::Late { patience: 64 });
        let below = Arc::new(plain_pool(&rig));
        let resource = make(&rig, Arc::clone(&below));
        let (first, second) = (rig.stream(), rig.stream());
        let watched = Watched::new(&rig, &resource);
        let held = watched.allocate(bytes, &first);
        watched.check(&held, &first);
        drop(watched);
        drop(resource);
        let watched = Watched::new(&rig, &below);
        let again = watched.allocate(BYTES, &second);
        watched.free(again, &second);
        watched.assert_intact();
    }
}

/// What a pool gives back and the resource below does not take, it has still: whether that refuses, or a
/// function of the caller's panics, and whatever the driver says to questions meanwhile.
#[test]
fn a_piece_that_does_not_go_back_stays() {
    let rig = Rig::simulated(cuda_sim::Schedule::Eager);
    let sim = rig.sim.as_ref().expect("simulated");
    let (fails, panics) = (AtomicBool::new(false), AtomicBool::new(false));
    let (below, malloc) = (malloc(&rig), malloc(&rig));
    let upstream = Callback::new(
        below.facts(),
        |bytes, align, stream| below.allocate(bytes, align, stream),
        |ptr, bytes, align, stream| {
            assert!(!panics.load(Ordering::Relaxed), "for the test");
            if fails.load(Ordering::Relaxed) {
                sim.fail_nth("cuStreamGetId", 1, CUresult::CUDA_ERROR_UNKNOWN);
                return Err(Error::Unsupported { what: "a free, for the test" });
            }
            malloc.deallocate(ptr, bytes, align, stream)
        },
    );
    let config = CoalescingConfig::default();
    let pool = CoalescingPool::new(upstream, &rig.device, &config).expect("a pool");
    let (raw, foreign) = streams::make(&rig, CUstream_flags_enum::CU_STREAM_NON_BLOCKING.0);
    let ptr = pool.allocate(1 << 20, 256, foreign).expect("memory");
    pool.deallocate(ptr, 1 << 20, 256, foreign).expect("freed");
    fails.store(true, Ordering::Relaxed);
    pool.trim(foreign, true).expect_err("refused");
    sim.clear_faults();
    assert_eq!(pool.pool_bytes(), MIB);
    panics.store(true, Ordering::Relaxed);
    assert!(catch_unwind(AssertUnwindSafe(|| pool.trim(foreign, true))).is_err());
    assert_eq!(pool.pool_bytes(), MIB);
    fails.store(false, Ordering::Relaxed);
    panics.store(false, Ordering::Relaxed);
    assert_eq!(pool.trim(foreign, true).expect("all of it"), MIB);
    drop(pool);
    call!(rig.driver, cuStreamDestroy_v2(raw));
    rig.assert_clean();
}

/// A piece that stays is still in the order of the stream that gave it back.
#[test]
fn a_piece_that_stays_is_still_its_streams() {
    Rig::everywhere(|rig| {
        let (below, malloc) = (malloc(rig), malloc(rig));
        let refuses = AtomicBool::new(true);
        let upstream = Callback::new(
            below.facts(),
            |bytes, align, stream| below.allocate(bytes, align, stream),
            |ptr, bytes, align, stream| match refuses.load(Ordering::Relaxed) {
                true => Err(Error::Unsupported { what: "a free, for the test" }),
                false => malloc.deallocate(ptr, bytes, align, stream),
            },
        );
        let mut config = CoalescingConfig::default();
        (config.initial_bytes, config.max_bytes) = (MIB, Some(MIB));
        let pool = CoalescingPool::new(upstream, &rig.device, &config).expect("a pool");
        let watched = Watched::new(rig, &pool);
        let (own, other) = (rig.stream(), rig.stream());
        let held = watched.allocate(1 << 20, &own);
        let stall = rig.stall(own.handle());
        watched.free(held, &own);
        pool.trim(own.handle(), false).expect_err("refused");
        let next = watched.allocate(1 << 20, &other);
        drop(stall);
        watched.free(next, &other);
        refuses.store(false, Ordering::Relaxed);
        watched.assert_intact();
    });
}

/// What upstream gave to a stream that no event could be recorded on is for others once the device was waited for.
#[test]
fn a_growth_without_an_event_is_for_others_later() {
    let rig = Rig::simulated(cuda_sim::Schedule::Eager);
    let sim = rig.sim.as_ref().expect("simulated");
    let upstream = CoalescingPool::new(malloc(&rig), &rig.device, &CoalescingConfig::default());
    let mut config = CoalescingConfig::default();
    config.max_bytes = Some(16 * MIB);
    let pool =
        CoalescingPool::new(upstream.expect("a pool"), &rig.device, &config).expect("a pool");
    let (raw, foreign) = streams::make(&rig, CUstream_flags_enum::CU_STREAM_NON_BLOCKING.0);
    let own = rig.stream();
    sim.fail_nth("cuEventRecord", 1, CUresult::CUDA_ERROR_UNKNOWN);
    let small = pool.allocate(1 << 20, 256, foreign).expect("memory");
    sim.clear_faults();
    assert_eq!(pool.pool_bytes(), 8 * MIB);
    let all = [(); 2].map(|()| pool.allocate(7 << 20, 256, own.handle()).expect("memory"));
    for ptr in all {
        pool.deallocate(ptr, 7 << 20, 256, own.handle()).expect("freed");
    }
    pool.deallocate(small, 1 << 20, 256, foreign).expect("freed");
    drop(pool);
    call!(rig.driver, cuStreamDestroy_v2(raw));
    rig.assert_clean();
}

/// What is still allocated at a pool's end goes back beside a capture, too, where its free waits for the device; and
/// where nothing is, events tell of everything.
#[test]
fn an_end_waits_for_the_device_only_where_it_must() {
    Rig::everywhere(|rig| {
        let (own, capturing) = (rig.stream(), rig.stream());
        let raw = capturing.handle().raw();
        let limit = Arc::new(Limiting::new(malloc(rig), 64 << 20));
        let mut fixed = FixedSizeConfig::default();
        (fixed.block_bytes, fixed.blocks_at_once) = (4096, 4);
        let ordered = |rig: &Rig| {
            let below = CoalescingPool::new(malloc(rig), &rig.device, &CoalescingConfig::default());
            below.expect("a pool")
        };
        let below = Arc::new(ordered(rig));
        let over_limit: [Box<dyn MemoryResource>; 2] = [
            Box::new(
                CoalescingPool::new(Arc::clone(&limit), &rig.device, &CoalescingConfig::default())
                    .expect("a pool"),
            ),
            Box::new(FixedSize::new(Arc::clone(&limit), &rig.device, &fixed).expect("blocks")),
        ];
        for pool in over_limit {
            pool.allocate(4096, 256, own.handle()).expect("memory");
            streams::begin_capture(rig, raw);
            drop(pool);
            assert_eq!(streams::end_capture(rig, raw), 0);
        }
        assert_eq!(limit.allocated_bytes(), 0);
        let over_ordered: [Box<dyn MemoryResource>; 2] = [
            Box::new(
                CoalescingPool::new(Arc::clone(&below), &rig.device, &CoalescingConfig::default())
                    .expect("a pool"),
            ),
            Box::new(FixedSize::new(Arc::clone(&below), &rig.device, &fixed).expect("blocks")),
        ];
        for pool in over_ordered {
            let ptr = pool.allocate(4096, 256, own.handle()).expect("memory");
            rig.fill(ptr.address(), 4096, 1, own.handle());
            pool.deallocate(ptr, 4096, 256, own.handle()).expect("freed");
            streams::begin_capture(rig, raw);
            drop(pool);
            assert_eq!(streams::end_capture(rig, raw), 0);
        }
        assert_eq!(below.live_bytes(), 0);
    });
}

/// The same where another stream has come to the place of the one that gives back, and the driver cannot be asked
/// about that one either.
#[test]
fn a_piece_that_does_not_go_back_stays_though_its_stream_is_forgotten() {
    let rig = Rig::simulated(cuda_sim::Schedule::Eager);
    let sim = rig.sim.as_ref().expect("simulated");
    let refuses = Arc::new(AtomicBool::new(true));
    let pool: Arc<OnceLock<Weak<dyn MemoryResource>>> = Arc::default();
    let non_blocking = CUstream_flags_enum::CU_STREAM_NON_BLOCKING.0;
    let [(raw, foreign), (raw_other, other)] = [(); 2].map(|()| streams::make(&rig, non_blocking));
    let (below, malloc) = (malloc(&rig), malloc(&rig));
    let upstream =
        Callback::new(below.facts(), move |bytes, align, of| below.allocate(bytes, align, of), {
            let (refuses, pool, sim) = (Arc::clone(&refuses), Arc::clone(&pool), sim.clone());
            move |ptr, bytes, align, stream| {
                if refuses.load(Ordering::Relaxed) {
                    let pool = pool.get().and_then(Weak::upgrade).expect("the pool");
                    pool.allocate(1000, 256, other).expect_err("it gives back just now");
                    sim.fail_nth("cuStreamGetCtx", 1, CUresult::CUDA_ERROR_UNKNOWN);
                    return Err(Error::Unsupported { what: "a free, for the test" });
                }
                malloc.deallocate(ptr, bytes, align, stream)
            }
        });
    let mut config = CoalescingConfig::default();
    config.max_bytes = Some(MIB);
    let made = Arc::new(CoalescingPool::new(upstream, &rig.device, &config).expect("a pool"));
    let weak: Weak<dyn MemoryResource> = Arc::downgrade(&made) as _;
    assert!(pool.set(weak).is_ok());
    let ptr = made.allocate(1 << 20, 256, foreign).expect("memory");
    made.deallocate(ptr, 1 << 20, 256, foreign).expect("freed");
    made.trim(foreign, true).expect_err("refused");
    sim.clear_faults();
    assert_eq!(made.pool_bytes(), MIB);
    refuses.store(false, Ordering::Relaxed);
    let ptr = made.allocate(1 << 20, 256, other).expect("the same memory");
    made.deallocate(ptr, 1 << 20, 256, other).expect("freed");
    assert_eq!(made.pool_bytes(), MIB);
    drop(made);
    for raw in [raw, raw_other] {
        call!(rig.driver, cuStreamDestroy_v2(raw));
    }
    rig.assert_clean();
}

/// Whatever driver call of the making fails: the driver keeps a pool with memory in use, though it was destroyed.
#[test]
fn a_pool_of_the_drivers_that_cannot_be_made_leaves_no_memory() {
    let rig = Rig::simulated(cuda_sim::Schedule::Eager);
    let sim = rig.sim.as_ref().expect("simulated");
    let mut config = DriverPoolConfig::default();
    config.initial_bytes = 16 * MIB;
    let before = sim.memory_used(0);
    for call in 1..100 {
        sim.fail_call(call, CUresult::CUDA_ERROR_UNKNOWN);
        let made = DriverPool::new(&rig.device, &config);
        sim.clear_faults();
        let made = made.map(drop);
        assert_eq!(sim.memory_used(0), before, "call {call}: {made:?}");
        if call > 20 && made.is_ok() {
            return;
        }
    }
    panic!("the pool was never made");
}

/// Which has come from below and has no lane: a chunk for a stream in whose place another has come meanwhile, and
/// that the driver cannot be asked about. Or one of the beginning, whose stream cannot be waited for.
#[test]
fn a_piece_that_has_no_place_and_does_not_go_back_stays() {
    type Below = Box<dyn MemoryResource>;
    type Open = fn(&Rig, Below, bool) -> Result<Shared, Error>;
    let opens: [Open; 2] = [
        |rig, below, at_start| {
            let mut config = CoalescingConfig::default();
            config.initial_bytes = if at_start { MIB } else { 0 };
            Ok(Arc::new(CoalescingPool::new(below, &rig.device, &config)?))
        },
        |rig, below, at_start| {
            let mut config = FixedSizeConfig::default();
            (config.blocks_at_once, config.at_start) = (1, at_start);
            Ok(Arc::new(FixedSize::new(below, &rig.device, &config)?))
        },
    ];
    let non_blocking = CUstream_flags_enum::CU_STREAM_NON_BLOCKING.0;
    for (open, ordered) in opens.into_iter().flat_map(|open| [(open, false), (open, true)]) {
        let rig = Rig::simulated(cuda_sim::Schedule::Eager);
        let sim = rig.sim.as_ref().expect("simulated");
        let [(raw, foreign), (raw_other, other)] =
            [(); 2].map(|()| streams::make(&rig, non_blocking));
        let (held, refusals) = (Arc::new(AtomicU64::new(0)), Arc::new(AtomicU64::new(0)));
        let pool: Arc<OnceLock<Weak<dyn MemoryResource>>> = Arc::default();
        let below = || -> Below {
            let below = Arc::new(Limiting::new(malloc(&rig), MIB));
            let facts = below.facts().with_stream_order(ordered);
            let (held, refusals) = (Arc::clone(&held), Arc::clone(&refusals));
            let (pool, sim, given_back) = (Arc::clone(&pool), sim.clone(), Arc::clone(&held));
            let again = Arc::clone(&below);
            Box::new(Callback::new(
                facts,
                move |bytes, align, of| {
                    let ptr = below.allocate(bytes, align, of)?;
                    held.fetch_add(1, Ordering::Relaxed);
                    if let Some(pool) = pool.get().and_then(Weak::upgrade) {
                        pool.allocate(1000, 256, other).expect_err("it grows just now");
                        sim.fail_nth("cuStreamGetCtx", 1, CUresult::CUDA_ERROR_UNKNOWN);
                        sim.fail_nth("cuStreamGetCtx", 2, CUresult::CUDA_ERROR_UNKNOWN);
                    }
                    Ok(ptr)
                },
                move |ptr, bytes, align, stream| {
                    if refusals.load(Ordering::Relaxed) > 0 {
                        refusals.fetch_sub(1, Ordering::Relaxed);
                        return Err(Error::Unsupported { what: "a free, for the test" });
                    }
                    given_back.fetch_sub(1, Ordering::Relaxed);
                    again.deallocate(ptr, bytes, align, stream)
                },
            ))
        };
        let held = || held.load(Ordering::Relaxed);
        if ordered {
            sim.fail_nth("cuStreamSynchronize", 1, CUresult::CUDA_ERROR_UNKNOWN);
            refusals.store(1, Ordering::Relaxed);
            let error = open(&rig, below(), true).map(drop).expect_err("no wait");
            assert!(matches!(error, Error::Driver { call: "cuStreamSynchronize", .. }), "{error}");
            assert_eq!((held(), refusals.load(Ordering::Relaxed)), (0, 0));
        }
        let made = open(&rig, below(), false).expect("a pool");
        assert!(pool.set(Arc::downgrade(&made)).is_ok());
        refusals.store(1, Ordering::Relaxed);
        let error = made.allocate(1 << 20, 256, foreign).expect_err("no place");
        assert!(matches!(error, Error::Driver { call: "cuStreamGetCtx", .. }), "{error}");
        sim.clear_faults();
        assert_eq!((held(), refusals.load(Ordering::Relaxed)), (1, 0));
        assert_eq!(made.held_bytes(), Some(MIB));
        let ptr = made.allocate(1 << 20, 256, other).expect("the same memory");
        assert_eq!(made.held_bytes(), Some(MIB));
        made.deallocate(ptr, 1 << 20, 256, other).expect("freed");
        drop(made);
        assert_eq!(held(), 0);
        for raw in [raw, raw_other] {
            call!(rig.driver, cuStreamDestroy_v2(raw));
        }
        rig.assert_clean();
    }
}

/// What a bin of its own gives back and a function below panics at is the bin's still: a free of its first block with
/// a size of no bin's does not go below.
#[test]
fn a_bins_piece_that_a_panic_below_kept_is_no_callers() {
    type Bins = Binning<Box<dyn MemoryResource>>;
    let rig = Rig::simulated(cuda_sim::Schedule::Eager);
    let sim = rig.sim.as_ref().expect("simulated");
    let non_blocking = CUstream_flags_enum::CU_STREAM_NON_BLOCKING.0;
    let [(raw, foreign), (raw_other, other)] = [(); 2].map(|()| streams::make(&rig, non_blocking));
    let freed = Arc::new(AtomicU64::new(0));
    let binning: Arc<OnceLock<Weak<Bins>>> = Arc::default();
    let panics = Arc::new(AtomicBool::new(true));
    let upstream: Box<dyn MemoryResource> = {
        let below = Arc::new(malloc(&rig));
        let again = Arc::clone(&below);
        let (binning, panics) = (Arc::clone(&binning), Arc::clone(&panics));
        let (fails, sim, freed) = (Arc::clone(&panics), sim.clone(), Arc::clone(&freed));
        Box::new(Callback::new(
            below.facts().with_max_bytes(Some(2 * MIB as usize)),
            move |bytes, align, of| {
                let ptr = below.allocate(bytes, align, of)?;
                if fails.load(Ordering::Relaxed) {
                    let binning = binning.get().and_then(Weak::upgrade).expect("the bins");
                    binning.allocate(1000, 256, other).expect_err("the bin grows just now");
                    sim.fail_nth("cuStreamGetCtx", 1, CUresult::CUDA_ERROR_UNKNOWN);
                }
                Ok(ptr)
            },
            move |ptr, bytes, align, stream| {
                assert!(!panics.load(Ordering::Relaxed), "for the test");
                freed.fetch_add(1, Ordering::Relaxed);
                again.deallocate(ptr, bytes, align, stream)
            },
        ))
    };
    let made = Arc::new(Binning::new(upstream, &rig.device));
    made.add_own_bin(MIB as usize).expect("a bin");
    assert!(binning.set(Arc::downgrade(&made)).is_ok());
    let request = || drop(made.allocate(1 << 20, 256, foreign));
    assert!(catch_unwind(AssertUnwindSafe(request)).is_err());
    sim.clear_faults();
    panics.store(false, Ordering::Relaxed);
    let ptr = made.allocate(1 << 20, 256, other).expect("the same memory");
    let refused = made.deallocate(ptr, 2 << 20, 256, other).expect_err("no bin's size");
    assert!(matches!(refused, Error::WrongSize { .. }), "{refused}");
    assert_eq!(freed.load(Ordering::Relaxed), 0);
    made.deallocate(ptr, 1 << 20, 256, other).expect("freed");
    drop(made);
    assert_eq!(freed.load(Ordering::Relaxed), 1);
    for raw in [raw, raw_other] {
        call!(rig.driver, cuStreamDestroy_v2(raw));
    }
    rig.assert_clean();
}
