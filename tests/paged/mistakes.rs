//! The mistakes of the design's known implementation, none of which is made here.

use std::ffi::c_int;
use std::sync::atomic::{AtomicU32, Ordering};

use cuda_sim::{Schedule, Simulator};
use cuda_sys::types::*;
use vpmm::{Error, PendingPolicy, StreamHandle};

use crate::rig::{MIB, PAGE, config};
use crate::support::changed::{changed, gated};
use crate::support::streams::{begin_capture, end_capture};
use crate::support::{Rig, call};

#[test]
fn a_free_is_ordered_on_the_stream_that_frees_not_on_the_one_that_allocated() {
    Rig::everywhere(|rig| {
        let watched = rig.small_pool(0);
        let (a, b) = (rig.stream(), rig.stream());
        let held = watched.pages(2, &a);
        a.synchronize().unwrap();
        let stall = rig.stall(b.handle());
        watched.free(held, &b); // B is busy with a check of the contents
        let other = watched.pages(2, &a);
        assert_ne!(other.address(), held.address(), "B may still read it");
        drop(stall);
        watched.free(other, &a);
        watched.assert_intact();
    });
}

#[test]
fn a_pair_costs_one_record_and_no_event_is_made_or_destroyed() {
    Rig::everywhere(|rig| {
        let watched = rig.small_pool(8);
        let stream = rig.stream();
        let warm = watched.pool.malloc(PAGE as usize, &stream).unwrap();
        watched.pool.free(warm, &stream).unwrap();
        let before = rig.driver.calls();
        for _ in 0..1000 {
            let ptr = watched.pool.malloc(PAGE as usize, &stream).unwrap();
            watched.pool.free(ptr, &stream).unwrap();
        }
        let calls = rig.driver.calls().since(&before);
        assert_eq!(calls.count("cuEventRecord"), 1000);
        for never in
            ["cuEventCreate", "cuEventDestroy_v2", "cuEventQuery", "cuMemMap", "cuMemCreate"]
        {
            // The first free of a new high mark of pending regions may need one more event.
            assert!(calls.count(never) <= 1, "{never}: {calls:?}");
        }
    });
}

#[test]
fn a_thousand_zombies_cost_one_question() {
    let rig = Rig::simulated(Schedule::Manual);
    let watched = rig.small_pool(0);
    let stream = rig.stream();
    let held: Vec<_> =
        (0..2000).map(|_| watched.pool.malloc(PAGE as usize, &stream).unwrap()).collect();
    held.iter().step_by(2).for_each(|ptr| watched.pool.free(*ptr, &stream).unwrap());
    let large = watched.pool.malloc((1000 * PAGE) as usize, &stream).unwrap();
    assert_eq!(watched.pool.stats().zombie_bytes, 1000 * PAGE);
    watched.pool.free(large, &stream).unwrap();
    let before = rig.driver.calls();
    let hit = watched.pool.malloc(PAGE as usize, &stream).unwrap();
    let calls = rig.driver.calls().since(&before);
    assert_eq!((calls.count("cuEventQuery"), calls.count("cuMemUnmap")), (1, 0), "{calls:?}");
    watched.pool.free(hit, &stream).unwrap();
    watched.pool.validate().unwrap();
    watched.assert_intact();
}

/// Addresses side by side that memory has left are one zombie, of which one request does not pay for all.
#[test]
fn a_zombie_of_many_pages_is_unmapped_by_several_requests() {
    let rig = Rig::simulated(Schedule::Manual);
    let watched = rig.small_pool(0);
    let stream = rig.stream();
    let malloc = |pages: u64| watched.pool.malloc((pages * PAGE) as usize, &stream).unwrap();
    let (low, _between, _high) = (malloc(500), malloc(1), malloc(400));
    watched.pool.free(low, &stream).unwrap();
    malloc(501);
    let zombies = || watched.pool.stats().zombie_bytes / PAGE;
    assert_eq!((zombies(), watched.pool.stats().zombie_count), (500, 1));
    rig.device.synchronize().unwrap();
    // Once when it comes, and once before it has memory moved or made.
    for left in [372, 244, 116] {
        malloc(1);
        assert_eq!(zombies(), left);
        watched.pool.validate().unwrap();
    }
    watched.assert_intact();
}

#[test]
fn a_thousand_regions_of_another_stream_cost_a_few_questions() {
    let rig = Rig::simulated(Schedule::Manual);
    let watched = rig.small_pool(0);
    let (a, b) = (rig.stream(), rig.stream());
    let held: Vec<_> = (0..2000).map(|_| watched.pool.malloc(PAGE as usize, &a).unwrap()).collect();
    held.iter().step_by(2).for_each(|ptr| watched.pool.free(*ptr, &a).unwrap());
    let before = rig.driver.calls();
    watched.pool.malloc(PAGE as usize, &b).unwrap();
    let calls = rig.driver.calls().since(&before);
    assert_eq!(calls.count("cuEventQuery"), 2, "the newest, then the oldest: {calls:?}");
    // Past the library, which would tell the pool.
    call!(rig.driver, cuCtxSynchronize());
    let before = rig.driver.calls();
    watched.pool.malloc(PAGE as usize, &b).unwrap();
    let calls = rig.driver.calls().since(&before);
    assert_eq!(calls.count("cuEventQuery"), 1, "the newest answers for all: {calls:?}");
    assert_eq!((calls.count("cuMemCreate"), watched.pool.stats().idle_count), (0, 999));
    watched.assert_intact();
}

#[test]
fn one_call_opens_all_pages_of_a_request() {
    Rig::everywhere(|rig| {
        let watched = rig.small_pool(0);
        let stream = rig.stream();
        let before = rig.driver.calls();
        let held = watched.pages(64, &stream);
        let calls = rig.driver.calls().since(&before);
        assert_eq!(
            (calls.count("cuMemCreate"), calls.count("cuMemMap"), calls.count("cuMemSetAccess")),
            (64, 64, 1)
        );
        watched.free(held, &stream);
        watched.assert_intact();
    });
}

#[test]
fn neighbours_of_streams_that_are_gone_become_one() {
    Rig::everywhere(|rig| {
        let watched = rig.small_pool(0);
        let mut first = None;
        let held: Vec<_> = (0..8)
            .map(|_| {
                let stream = rig.stream();
                let held = watched.pages(2, &stream);
                first.get_or_insert(held.address());
                (held, stream)
            })
            .collect();
        for (held, stream) in held {
            watched.free(held, &stream);
            stream.synchronize().unwrap();
        } // each stream is destroyed here
        let stream = rig.stream();
        let whole = watched.pages(16, &stream);
        assert_eq!((Some(whole.address()), watched.moved(), watched.usage()), (first, 0, 16));
        watched.free(whole, &stream);
        watched.assert_intact();
    });
}

#[test]
fn idle_memory_next_to_busy_memory_stays_idle() {
    Rig::everywhere(|rig| {
        let watched = rig.small_pool(100);
        let (a, b) = (rig.stream(), rig.stream());
        let held = watched.pages(1, &a);
        let stall = rig.stall(a.handle());
        watched.free(held, &a);
        let before = rig.driver.calls();
        let one = watched.pages(1, &b);
        let calls = rig.driver.calls().since(&before);
        assert_eq!(
            (calls.count("cuStreamWaitEvent"), watched.moved(), watched.usage()),
            (0, 0, 100)
        );
        // And A has both at once, in place: its own and the idle beside it.
        let rest = watched.pages(98, &a);
        assert_eq!((watched.moved(), watched.usage()), (0, 100));
        drop(stall);
        watched.free(one, &b);
        watched.free(rest, &a);
        watched.assert_intact();
    });
}

#[test]
fn growing_comes_before_waiting_for_another_stream_unless_asked_otherwise() {
    Rig::everywhere(|rig| {
        for (policy, waits, usage) in
            [(PendingPolicy::GrowFirst, 0, 4), (PendingPolicy::WaitFirst, 1, 2)]
        {
            let mut config = config(PAGE, 0);
            config.pending_policy = policy;
            let watched = rig.pool(&config);
            let (a, b) = (rig.stream(), rig.stream());
            let held = watched.pages(2, &a);
            let stall = rig.stall(a.handle());
            watched.free(held, &a);
            let before = rig.driver.calls();
            let other = watched.pages(2, &b);
            let calls = rig.driver.calls().since(&before);
            assert_eq!(
                (calls.count("cuStreamWaitEvent"), watched.usage()),
                (waits, usage),
                "{policy:?}"
            );
            drop(stall);
            watched.free(other, &b);
            watched.assert_intact();
        }
    });
}

#[test]
fn two_streams_that_wait_for_each_other_are_not_deadlocked_by_the_pool() {
    // B must not be made to wait for A's event while A waits for something that B has yet to do.
    Rig::everywhere(|rig| {
        let watched = rig.small_pool(0);
        let (a, b) = (rig.stream(), rig.stream());
        let held = watched.pages(2, &a);
        let until_b_has_run = rig.stall(a.handle());
        watched.free(held, &a);
        let other = watched.pages(2, &b);
        b.synchronize().unwrap(); // returns although A is stuck
        drop(until_b_has_run);
        watched.free(other, &b);
        watched.assert_intact();
    });
}

#[test]
fn sizes_that_overflow_are_refused() {
    Rig::everywhere(|rig| {
        let watched = rig.small_pool(2);
        let stream = rig.stream();
        for bytes in [usize::MAX, usize::MAX - 5, usize::MAX - PAGE as usize + 2] {
            let error = watched.pool.malloc(bytes, &stream).unwrap_err();
            assert!(matches!(error, Error::SizeOverflow { .. }), "{error}");
        }
        let error = watched.pool.malloc(1 << 62, &stream).unwrap_err();
        assert!(
            matches!(
                error,
                Error::AddressSpaceExhausted { .. }
                    | Error::Driver { .. }
                    | Error::OutOfMemory { .. }
            ),
            "{error}"
        );
        let (one, two) = (watched.pages(1, &stream), watched.pages(1, &stream));
        assert_ne!(one.address(), two.address());
        watched.assert_intact();
    });
}

#[test]
fn a_stale_free_does_not_reach_the_new_owner() {
    Rig::everywhere(|rig| {
        let watched = rig.small_pool(0);
        let stream = rig.stream();
        for bytes in [PAGE, 1000] {
            let old = watched.malloc(bytes, &stream);
            watched.free(old, &stream);
            let new = watched.malloc(bytes, &stream);
            assert_eq!(new.address(), old.address(), "the address is used again");
            let error = watched.pool.free(old.ptr, &stream).unwrap_err();
            assert!(matches!(error, Error::StalePointer { .. }), "{error}");
            watched.free(new, &stream);
        }
        watched.assert_intact();
    });
}

#[test]
fn memory_of_small_requests_is_kept_across_a_synchronisation() {
    Rig::everywhere(|rig| {
        let watched = rig.small_pool(0);
        let stream = rig.stream();
        let held = watched.malloc(MIB, &stream);
        watched.free(held, &stream);
        rig.device.synchronize().unwrap();
        assert!(
            watched.pool.stats().small_mapped_bytes >= MIB,
            "given back, to be made again by the next request"
        );
        watched.assert_intact();
    });
}

#[test]
fn each_device_gives_its_own_memory() {
    let sim = Simulator::builder().devices(2).build().unwrap();
    let driver = vpmm::Driver::new(sim.driver()).unwrap();
    let device = driver.device(1).unwrap();
    let pool = vpmm::Pool::paged(&device, &config(PAGE, 4)).unwrap();
    assert_eq!((sim.memory_used(0), sim.memory_used(1)), (0, 4 * PAGE));
    let stream = device.stream().unwrap();
    let ptr = pool.malloc(8 * PAGE as usize, &stream).unwrap();
    assert_eq!((sim.memory_used(0), sim.memory_used(1)), (0, 8 * PAGE));
    pool.free(ptr, &stream).unwrap();
    sim.assert_clean();
}

#[test]
fn a_capture_is_left_alone_and_leaves_the_pool_alone() {
    Rig::everywhere(|rig| {
        let watched = rig.small_pool(0);
        let (capturing, other) = (rig.stream(), rig.stream());
        let held = watched.pages(2, &capturing);
        let of_other = watched.pages(1, &other);
        watched.free(of_other, &other);
        begin_capture(rig, capturing.handle().raw());
        for error in [
            watched.pool.malloc(PAGE as usize, &capturing).unwrap_err(),
            watched.pool.free(held.ptr, &capturing).unwrap_err(),
        ] {
            assert!(matches!(error, Error::StreamCapturing), "{error}");
        }
        // Another stream goes on, questions about events included, and the capture stays valid.
        let grown = watched.pages(8, &other);
        watched.free(grown, &other);
        let moved = watched.pages(16, &other);
        watched.free(moved, &other);
        // A pool that comes and goes meanwhile does not end the capture either.
        let short = rig.small_pool(1);
        let one = short.pages(1, &other);
        short.free(one, &other);
        drop(short);
        assert_eq!(end_capture(rig, capturing.handle().raw()), 0, "nodes");
        watched.free(held, &capturing);
        watched.assert_intact();
    });
}

#[test]
fn debug_lists_every_region_zombies_too() {
    let rig = Rig::simulated(Schedule::Manual);
    let watched = rig.small_pool(0);
    let stream = rig.stream();
    let held = [(); 4].map(|()| watched.pages(1, &stream));
    watched.free(held[0], &stream);
    watched.free(held[2], &stream);
    let _two = watched.pages(2, &stream);
    let text = format!("{:?}", watched.pool);
    let regions = text.split("regions: [").nth(1).expect("a list of regions");
    let addresses: Vec<u64> = regions
        .split("0x")
        .skip(1)
        .step_by(2)
        .map(|part| u64::from_str_radix(part.split(' ').next().unwrap(), 16).unwrap())
        .collect();
    assert_eq!(addresses.len(), 6, "{regions}");
    assert!(addresses.is_sorted(), "{regions}");
    for (state, count) in [("Live", 3), ("Zombie stream", 2), ("Hole", 1)] {
        assert_eq!(regions.matches(state).count(), count, "{state} in {regions}");
    }
    watched.assert_intact();
}

#[test]
fn a_lost_device_is_an_error_and_not_memory_that_is_never_ready() {
    let rig = Rig::simulated(Schedule::Manual);
    let sim = rig.sim.clone().expect("a simulated rig");
    let pool = vpmm::Pool::paged(&rig.device, &config(PAGE, 0)).unwrap();
    let stream = rig.stream();
    let held = [(); 3].map(|()| pool.malloc(PAGE as usize, &stream).unwrap());
    pool.free(held[0], &stream).unwrap();
    sim.lose_device(0, CUresult::CUDA_ERROR_ILLEGAL_ADDRESS);
    for error in [
        pool.malloc(4 * PAGE as usize, &stream).unwrap_err(),
        pool.free(held[1], &stream).unwrap_err(),
    ] {
        assert!(error.is_context_lost(), "{error}");
    }
    pool.validate().unwrap();
    std::mem::forget(rig); // its kernels and streams went with the device
}

#[test]
fn the_default_streams_are_those_of_the_pools_context_and_the_calling_thread() {
    Rig::everywhere(|rig| {
        let watched = rig.small_pool(0);
        let pool = &watched.pool;
        let legacy = pool.malloc(PAGE as usize, StreamHandle::LEGACY).unwrap();
        pool.free(legacy, StreamHandle::LEGACY).unwrap();
        // A thread's own stream ends with the thread; what it freed is still found by others.
        std::thread::scope(|scope| {
            scope.spawn(|| {
                let ptr = pool.malloc(PAGE as usize, StreamHandle::PER_THREAD).unwrap();
                pool.free(ptr, StreamHandle::PER_THREAD).unwrap();
            });
        });
        rig.device.synchronize().unwrap();
        let usage = watched.usage();
        let ptr = pool.malloc(usage as usize * PAGE as usize, StreamHandle::PER_THREAD).unwrap();
        assert_eq!(watched.usage(), usage);
        pool.free(ptr, StreamHandle::PER_THREAD).unwrap();
        watched.assert_intact();
    });
}

#[test]
fn nothing_is_found_without_a_driver_and_nothing_happens_at_load() {
    // SAFETY: no symbol is answered, so no pointer has to be right.
    let empty = unsafe {
        cuda_sys::Driver::from_symbols("nothing", |_| std::ptr::null(), std::sync::Arc::new(()))
    };
    let error = vpmm::Driver::new(empty).unwrap_err();
    assert!(matches!(error, Error::MissingSymbol { name: "cuInit", .. }), "{error}");
}

gated!(create: cuMemCreate(
    handle: *mut u64,
    bytes: usize,
    properties: *const CUmemAllocationProp,
    flags: u64,
));

#[test]
fn a_slow_driver_call_does_not_stop_other_threads() {
    // Nothing finishes by itself, so that what B frees stays B's.
    let sim = Simulator::builder().schedule(Schedule::Manual).build().unwrap();
    let driver = changed(&sim, create::put);
    let device = driver.device(0).unwrap();
    let pool = vpmm::Pool::paged(&device, &config(PAGE, 0)).unwrap();
    let (a, b) = (device.stream().unwrap(), device.stream().unwrap());
    let of_b = pool.malloc(PAGE as usize, &b).unwrap();
    pool.free(of_b, &b).unwrap();
    create::BEFORE.arm();
    std::thread::scope(|scope| {
        let growing = scope.spawn(|| pool.malloc(64 * PAGE as usize, &a).unwrap());
        create::BEFORE.wait();
        // The other thread is inside the driver now, and stays there until these are done.
        for _ in 0..100 {
            let page = pool.malloc(PAGE as usize, &b).unwrap();
            let small = pool.malloc(4096, &b).unwrap();
            pool.free(page, &b).unwrap();
            pool.free(small, &b).unwrap();
        }
        pool.validate().unwrap();
        assert!(!growing.is_finished());
        create::BEFORE.open();
        let ptr = growing.join().unwrap();
        pool.free(ptr, &a).unwrap();
    });
    pool.validate().unwrap();
    sim.assert_clean();
}

static EVENT_FLAGS: AtomicU32 = AtomicU32::new(0);

unsafe extern "C" fn noting_event_create(event: *mut CUevent, flags: u32) -> CUresult {
    EVENT_FLAGS.store(flags, Ordering::Release);
    // SAFETY: the pool passes a pointer to a live handle. The event is none, but never reaches the
    // simulator: what would be done with it is replaced too.
    unsafe { event.write(std::ptr::without_provenance_mut(0x1000)) };
    CUresult::CUDA_SUCCESS
}

unsafe extern "C" fn no_record(_event: CUevent, _stream: CUstream) -> CUresult {
    CUresult::CUDA_ERROR_UNKNOWN
}

unsafe extern "C" fn no_destroy(_event: CUevent) -> CUresult {
    CUresult::CUDA_SUCCESS
}

#[test]
fn events_have_no_timing() {
    let sim = Simulator::builder().build().unwrap();
    let driver = changed(&sim, |api| {
        api.cuEventCreate = Some(noting_event_create);
        api.cuEventRecord = Some(no_record);
        api.cuEventDestroy_v2 = Some(no_destroy);
    });
    let device = driver.device(0).unwrap();
    let pool = vpmm::Pool::paged(&device, &config(PAGE, 0)).unwrap();
    let stream = device.stream().unwrap();
    let ptr = pool.malloc(PAGE as usize, &stream).unwrap();
    assert!(pool.free(ptr, &stream).is_err(), "it cannot be recorded");
    let flags = EVENT_FLAGS.load(Ordering::Acquire);
    assert_eq!(flags, CUevent_flags_enum::CU_EVENT_DISABLE_TIMING.0, "eight times as dear with");
    pool.validate().unwrap();
}

unsafe extern "C" fn no_attribute(
    value: *mut c_int,
    _: CUdevice_attribute,
    _: CUdevice,
) -> CUresult {
    // SAFETY: the pool passes a pointer to a live number.
    unsafe { value.write(0) };
    CUresult::CUDA_SUCCESS
}

#[test]
fn a_device_without_virtual_memory_management_is_refused_and_nothing_is_left() {
    let sim = Simulator::builder().build().unwrap();
    let driver = changed(&sim, |api| api.cuDeviceGetAttribute = Some(no_attribute));
    let device = driver.device(0).unwrap();
    let before = sim.leaks();
    let error = vpmm::Pool::paged(&device, &config(PAGE, 4)).unwrap_err();
    assert!(matches!(error, Error::VmmUnsupported { ordinal: 0 }), "{error}");
    assert_eq!(sim.leaks(), before);
    sim.assert_clean();
}

#[test]
fn device_numbers_that_do_not_exist_are_errors() {
    Rig::everywhere(|rig| {
        for ordinal in [99, u32::MAX] {
            let error = rig.driver.device(ordinal).unwrap_err();
            let there = rig.driver.device_count().unwrap();
            let told = matches!(
                error,
                Error::NoDevice { ordinal: asked, count } if (asked, count) == (ordinal, there)
            );
            assert!(told && error.to_string().contains(&format!("device {ordinal}:")), "{error}");
        }
        assert!(c_int::try_from(rig.driver.device_count().unwrap()).unwrap() >= 1);
    });
}

/// A write through a freed address cannot be kept from the memory's new owner before the zombie
/// is unmapped; the simulator, at least, names it.
#[test]
fn a_write_through_a_freed_address_is_reported_as_a_race() {
    let rig = Rig::simulated(Schedule::Manual);
    let sim = rig.sim.clone().expect("a simulated rig");
    let watched = rig.small_pool(0);
    let (stream, stale) = (rig.stream(), rig.stream());
    let held = [(); 4].map(|()| watched.pages(1, &stream));
    watched.free(held[0], &stream);
    watched.free(held[2], &stream);
    let two = watched.pages(2, &stream);
    assert_eq!(watched.moved(), 2);
    rig.fill(held[0].address(), PAGE, 99, stale.handle());
    rig.device.synchronize().unwrap();
    assert!(
        !sim.report().races.is_empty(),
        "the new owner at {:#x} was overwritten",
        two.address()
    );
}

/// Statics are never dropped: the process ends with the pool alive, and ends well.
#[test]
fn a_pool_in_a_static_lives_to_the_end_of_the_process() {
    static POOL: std::sync::OnceLock<(Simulator, vpmm::Pool)> = std::sync::OnceLock::new();
    let (sim, pool) = POOL.get_or_init(|| {
        let sim = Simulator::builder().build().unwrap();
        let device = vpmm::Driver::new(sim.driver()).unwrap().device(0).unwrap();
        (sim, vpmm::Pool::paged(&device, &config(PAGE, 2)).unwrap())
    });
    let stream = pool.device().stream().unwrap();
    let freed = pool.malloc(PAGE as usize, &stream).unwrap();
    pool.malloc(PAGE as usize, &stream).unwrap();
    pool.free(freed, &stream).unwrap();
    pool.validate().unwrap();
    sim.assert_clean();
}
