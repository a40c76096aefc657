//! Several threads on one pool.

use cuda_sim::{Schedule, Simulator};
use cuda_sys::types::CUresult;
use vpmm::StreamHandle;

use crate::rig::{MIB, PAGE, config};
use crate::support::changed::{changed, gated};
use crate::support::{Held, Lcg, Rig};

#[test]
fn four_threads_with_sizes_small_and_large() {
    for schedule in [Schedule::Eager, Schedule::Late { patience: 2 }, Schedule::Random] {
        four_threads(&Rig::simulated(schedule));
    }
    if let Some(rig) = Rig::gpu() {
        four_threads(&rig);
    }
}

fn four_threads(rig: &Rig) {
    let mut config = config(PAGE, 0);
    config.va_size_bytes = 64 << 30;
    let watched = rig.pool(&config);
    std::thread::scope(|scope| {
        for thread in 0..4 {
            let watched = &watched;
            scope.spawn(move || {
                let stream = watched.rig.stream();
                let mut random = Lcg(thread);
                let mut held = std::collections::VecDeque::<Held>::new();
                for op in 0..30 {
                    let bytes = if op % 3 == 0 {
                        1 + random.below(100 * 1024)
                    } else {
                        100 * MIB + random.below(300 * MIB)
                    };
                    held.push_back(watched.malloc(bytes, &stream));
                    if op % 2 == 0 {
                        watched.free(held.pop_front().expect("just pushed"), &stream);
                    }
                }
                held.drain(..).for_each(|held| watched.free(held, &stream));
            });
        }
    });
    let stream = rig.stream();
    let large = watched.malloc(1 << 30, &stream);
    watched.free(large, &stream);
    watched.assert_intact();
}

#[test]
fn threads_on_their_own_default_streams_hand_memory_round() {
    let rig = Rig::simulated(Schedule::Random);
    let pool = vpmm::Pool::paged(&rig.device, &config(PAGE, 0)).unwrap();
    for round in 0..8 {
        std::thread::scope(|scope| {
            for thread in 0..4 {
                let (pool, rig) = (&pool, &rig);
                scope.spawn(move || {
                    for step in 0..8 {
                        let bytes = (1 + (round + thread + step) % 5) * PAGE;
                        let ptr = pool.malloc(bytes as usize, StreamHandle::PER_THREAD).unwrap();
                        let seed = round * 1000 + thread * 100 + step;
                        rig.fill(ptr.address(), bytes, seed, StreamHandle::PER_THREAD);
                        rig.check(ptr.address(), bytes, seed, StreamHandle::PER_THREAD);
                        pool.free(ptr, StreamHandle::PER_THREAD).unwrap();
                        pool.validate().unwrap();
                    }
                });
            }
        });
    }
    assert_eq!(rig.mismatches(), 0);
    rig.assert_clean();
}

#[test]
fn one_pointer_freed_by_many_threads_is_freed_once() {
    let rig = Rig::simulated(Schedule::Eager);
    let pool = vpmm::Pool::paged(&rig.device, &config(PAGE, 4)).unwrap();
    for bytes in [PAGE, 1000] {
        for _ in 0..50 {
            let stream = rig.stream();
            let ptr = pool.malloc(bytes as usize, &stream).unwrap();
            let freed: usize = std::thread::scope(|scope| {
                let free = || usize::from(pool.free(ptr, stream.handle()).is_ok());
                let threads = [(); 4].map(|()| scope.spawn(free));
                threads.into_iter().map(|thread| thread.join().unwrap()).sum()
            });
            assert_eq!(freed, 1);
            pool.validate().unwrap();
        }
    }
    rig.assert_clean();
}

gated!(creation: cuMemCreate(
    handle: *mut CUmemGenericAllocationHandle,
    bytes: usize,
    properties: *const CUmemAllocationProp,
    flags: u64,
));

/// A request was to have new pages while another stream's were pending. By the time that the device turns out to
/// have none left those are idle.
#[test]
fn what_has_become_idle_makes_up_for_pages_that_the_device_does_not_have() {
    let sim = Simulator::builder().schedule(Schedule::Manual).build().unwrap();
    let driver = changed(&sim, creation::put);
    let device = driver.device(0).unwrap();
    let pool = vpmm::Pool::paged(&device, &config(PAGE, 0)).unwrap();
    let (one, other) = (device.stream().unwrap(), device.stream().unwrap());
    let ptr = pool.malloc(3 * PAGE as usize, &one).unwrap();
    pool.free(ptr, &one).unwrap();
    sim.set_memory_limit(0, sim.memory_used(0) + PAGE);
    creation::AFTER.arm();
    let served = std::thread::scope(|scope| {
        let request = scope.spawn(|| pool.malloc(4 * PAGE as usize, &other));
        creation::AFTER.wait();
        one.synchronize().unwrap();
        creation::AFTER.open();
        request.join().unwrap()
    });
    pool.validate().unwrap();
    let stats = pool.stats();
    assert_eq!((stats.pages_created, stats.pages_moved), (4, 3), "{served:?}");
    pool.free(served.unwrap(), &other).unwrap();
    drop((pool, one, other, device));
    sim.assert_clean();
}

gated!(small_request: cuMemAllocFromPoolAsync(
    address: *mut CUdeviceptr,
    bytes: usize,
    pool: CUmemoryPool,
    stream: CUstream,
));

/// A request that the driver is at work for counts: others do not pass the limit beside it, pages no more than small
/// ones. One that the driver refuses, or that is freed, counts no more.
#[test]
fn a_small_request_that_is_under_way_counts() {
    let sim = Simulator::builder().build().unwrap();
    let driver = changed(&sim, small_request::put);
    let device = driver.device(0).unwrap();
    let mut config = config(PAGE, 0);
    config.limit_bytes = Some(PAGE);
    config.out_of_memory = vpmm::WaitPolicy::FailAtOnce;
    let pool = vpmm::Pool::paged(&device, &config).unwrap();
    let [one, other] = [(); 2].map(|()| device.stream().unwrap());
    let most = PAGE as usize / 2;
    for beside in [most + 1, PAGE as usize] {
        for refused in [false, true] {
            small_request::BEFORE.arm();
            std::thread::scope(|scope| {
                let request = scope.spawn(|| pool.malloc(most, &one));
                small_request::BEFORE.wait();
                let too_much = pool.malloc(beside, &other);
                // As much as there is beside it.
                let enough = pool.malloc(most, &other);
                if refused {
                    sim.fail_nth("cuMemAllocFromPoolAsync", 1, CUresult::CUDA_ERROR_UNKNOWN);
                }
                small_request::BEFORE.open();
                let request = request.join().unwrap();
                assert!(too_much.is_err_and(|error| error.is_out_of_memory()), "{beside}");
                pool.free(enough.unwrap(), &other).unwrap();
                match request {
                    Ok(ptr) => pool.free(ptr, &one).unwrap(),
                    Err(error) => assert!(refused && !error.is_out_of_memory(), "{error}"),
                }
            });
            let all = pool.malloc(PAGE as usize - 1, &other).unwrap();
            pool.free(all, &other).unwrap();
            pool.validate().unwrap();
        }
    }
    let pages = pool.malloc(PAGE as usize, &other).unwrap();
    pool.free(pages, &other).unwrap();
    drop((pool, one, other, device));
    sim.assert_clean();
}
