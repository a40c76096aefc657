//! A pool ends while other threads wait for streams, or end them.

use std::time::{Duration, Instant};

use cuda_sim::{Schedule, Simulator};
use vpmm::{PagedConfig, Pool, PoolConfig};

use crate::rig::{GRANULE, Profile};
use crate::support::changed::{changed, gated};

/// Gives a thread that does not wait the time to come to its end; one that waits is not held up.
fn pause(thread: &std::thread::ScopedJoinHandle<'_, impl Sized>) {
    let start = Instant::now();
    while !thread.is_finished() && start.elapsed() < Duration::from_millis(200) {
        std::thread::yield_now();
    }
}

/// A pool that gives back what is free whenever the host has waited for a stream.
fn open_generous(profile: Profile, device: &vpmm::Device) -> Pool {
    match profile {
        Profile::Default => {
            let mut config = PoolConfig::default();
            config.va_size_bytes = Some(128 * GRANULE);
            config.release_threshold_bytes = Some(0);
            Pool::new(device, &config)
        }
        Profile::Paged => {
            let mut config = PagedConfig::default();
            config.va_size_bytes = 128 * GRANULE;
            config.release_threshold_bytes = Some(0);
            Pool::paged(device, &config)
        }
    }
    .unwrap()
}

gated!(unmap: cuMemUnmap(address: CUdeviceptr, bytes: usize));

/// Who waits for a stream tells every pool, and is in the middle of one of them when its last handle
/// is dropped elsewhere: everything is given back when that drop returns, not some time later.
#[test]
fn a_pool_has_ended_when_its_last_handle_is_dropped() {
    for profile in Profile::BOTH {
        let sim = Simulator::builder().schedule(Schedule::Eager).build().unwrap();
        let driver = changed(&sim, unmap::put);
        let device = driver.device(0).unwrap();
        let stream = device.stream().unwrap();
        let before = device.free_memory().unwrap();
        let pool = open_generous(profile, &device);
        let held = [(); 2].map(|()| pool.malloc(4 * GRANULE as usize, &stream).unwrap());
        held.into_iter().for_each(|ptr| pool.free(ptr, &stream).unwrap());
        unmap::BEFORE.arm();
        std::thread::scope(|scope| {
            let waiting = scope.spawn(|| stream.synchronize().unwrap());
            unmap::BEFORE.wait();
            let ending = scope.spawn(|| {
                drop(pool);
                device.free_memory().unwrap()
            });
            pause(&ending);
            unmap::BEFORE.open();
            assert_eq!(ending.join().unwrap(), before, "{profile:?}: given back by the drop");
            waiting.join().unwrap();
        });
        drop((stream, device));
        sim.assert_clean();
        assert!(sim.leaks().is_empty(), "{profile:?}: {:?}", sim.leaks());
    }
}

gated!(record: cuEventRecord(event: CUevent, stream: CUstream));

/// A pool that ends is about to record on a stream that another thread destroys: it is told of that,
/// although nobody has a handle any more, and nothing is recorded on a stream that is gone.
#[test]
fn a_stream_ends_while_a_pool_does() {
    let sim = Simulator::builder().schedule(Schedule::Manual).build().unwrap();
    let driver = changed(&sim, record::put);
    let device = driver.device(0).unwrap();
    let streams = [(); 2].map(|()| device.stream().unwrap());
    let pool = Profile::Default.open(&device);
    for stream in &streams {
        let ptr = pool.malloc(4 * GRANULE as usize, stream).unwrap();
        pool.free(ptr, stream).unwrap();
    }
    record::BEFORE.arm();
    std::thread::scope(|scope| {
        let ending = scope.spawn(|| drop(pool));
        record::BEFORE.wait();
        let destroying = scope.spawn(|| drop(streams));
        pause(&destroying);
        record::BEFORE.open();
        destroying.join().unwrap();
        ending.join().unwrap();
    });
    drop(device);
    sim.assert_clean();
    assert!(sim.leaks().is_empty(), "{:?}", sim.leaks());
}
