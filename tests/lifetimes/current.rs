//! The default and the current pool of a device.

use std::sync::Barrier;

use cuda_sim::Simulator;
use vpmm::{Driver, Error, Pool};

use crate::rig::{GRANULE, Profile};

fn two_devices() -> (Simulator, Driver) {
    let sim = Simulator::builder().devices(2).build().unwrap();
    let driver = Driver::new(sim.driver()).unwrap();
    (sim, driver)
}

/// Nothing is left of a driver whose values are gone.
fn assert_gone(sim: &Simulator) {
    sim.assert_clean();
    assert!(sim.leaks().is_empty(), "{:?}", sim.leaks());
}

#[test]
fn a_device_has_one_default_pool() {
    let (sim, driver) = two_devices();
    for ordinal in [0, 1] {
        let device = driver.device(ordinal).unwrap();
        let pool = Pool::current(&device).unwrap();
        assert_eq!(pool.device().ordinal(), ordinal);
        // However often the device is opened, and by whichever clone of the driver.
        let again = Pool::default_of(&driver.clone().device(ordinal).unwrap()).unwrap();
        assert_eq!(again, pool);
        let stream = device.stream().unwrap();
        let before = sim.memory_used(ordinal as i32);
        let ptr = pool.malloc(GRANULE as usize, &stream).unwrap();
        // It is kept without a handle, and with it what it has free.
        drop((pool, again));
        assert_eq!(sim.memory_used(ordinal as i32), before + GRANULE);
        Pool::current(&device).unwrap().free(ptr, &stream).unwrap();
        assert_eq!(sim.memory_used(ordinal as i32), before + GRANULE);
    }
    let [one, two] = [0, 1].map(|ordinal| driver.device(ordinal).unwrap());
    assert_ne!(Pool::current(&one).unwrap(), Pool::current(&two).unwrap());
    // Another driver has pools of its own.
    let (other_sim, other) = two_devices();
    let device = other.device(0).unwrap();
    assert_ne!(Pool::current(&device).unwrap(), Pool::current(&one).unwrap());
    for device in [&one, &two, &device] {
        Pool::forget_current(device);
    }
    drop((one, two, driver, device, other));
    assert_gone(&sim);
    assert_gone(&other_sim);
}

#[test]
fn the_current_pool_is_the_one_made_so_last() {
    let (sim, driver) = two_devices();
    let [device, other] = [0, 1].map(|ordinal| driver.device(ordinal).unwrap());
    for profile in Profile::BOTH {
        let default = Pool::current(&device).unwrap();
        let (first, second) = (profile.open(&device), profile.open(&device));
        assert_eq!(first.make_current(), None);
        assert_eq!(Pool::current(&device).unwrap(), first);
        assert_eq!(second.make_current().as_ref(), Some(&first));
        assert_eq!(Pool::current(&device).unwrap(), second);
        // The default one is still that, and other devices have not noticed.
        assert_eq!(Pool::default_of(&device).unwrap(), default);
        assert_eq!(Pool::current(&other).unwrap(), Pool::default_of(&other).unwrap());
        // It stays current without a handle.
        let stream = device.stream().unwrap();
        let ptr = second.malloc(GRANULE as usize, &stream).unwrap();
        drop(second);
        let current = Pool::current(&device).unwrap();
        assert_eq!(Pool::of(&driver, ptr.address()).as_ref(), Some(&current));
        current.free(ptr, &stream).unwrap();
        drop((current, default));
        Pool::forget_current(&device);
        assert_ne!(Pool::current(&device).unwrap(), first);
        Pool::forget_current(&device);
    }
    Pool::forget_current(&other);
    drop((device, other, driver));
    assert_gone(&sim);
}

#[test]
fn a_scope_gives_the_former_pool_back() {
    let (sim, driver) = two_devices();
    let device = driver.device(0).unwrap();
    for profile in Profile::BOTH {
        let pools = [(); 3].map(|()| profile.open(&device));
        let current = || Pool::current(&device).unwrap();
        {
            let _outer = pools[0].current_for_scope();
            assert_eq!(current(), pools[0]);
            {
                let _inner = pools[1].current_for_scope();
                assert_eq!(current(), pools[1]);
            }
            assert_eq!(current(), pools[0]);
            // What is decided inside holds.
            let inner = pools[1].current_for_scope();
            pools[2].make_current();
            drop(inner);
            assert_eq!(current(), pools[2]);
        }
        assert_eq!(current(), pools[2]);
        Pool::forget_current(&device);
        let default = current();
        {
            let _scope = pools[0].current_for_scope();
            assert_eq!(current(), pools[0]);
        }
        assert_eq!(current(), default);
        {
            // Forgotten inside: nothing comes back.
            let _scope = pools[0].current_for_scope();
            Pool::forget_current(&device);
        }
        assert!(!pools.contains(&current()) && current() != default);
        Pool::forget_current(&device);
    }
    drop((device, driver));
    assert_gone(&sim);
}

#[test]
fn many_threads_get_the_same_default_pool() {
    let (sim, driver) = two_devices();
    let device = driver.device(0).unwrap();
    for _ in 0..20 {
        let (start, device) = (Barrier::new(4), &device);
        let pools: Vec<Pool> = std::thread::scope(|scope| {
            let ask = || {
                start.wait();
                Pool::current(device).unwrap()
            };
            let threads = [(); 4].map(|()| scope.spawn(ask));
            threads.into_iter().map(|thread| thread.join().unwrap()).collect()
        });
        assert!(pools.iter().all(|pool| *pool == pools[0]));
        Pool::forget_current(device);
    }
    drop((device, driver));
    assert_gone(&sim);
}

/// A current pool that is destroyed is current no longer; the default one is in its place.
#[test]
fn a_destroyed_pool_is_not_current() {
    let (sim, driver) = two_devices();
    let device = driver.device(0).unwrap();
    for profile in Profile::BOTH {
        let default = Pool::default_of(&device).unwrap();
        let pool = profile.open(&device);
        pool.make_current();
        // A handle of somebody's is in the way, the device's own is not.
        let found = Pool::current(&device).unwrap();
        let (pool, error) = pool.destroy().unwrap_err();
        assert!(matches!(error, Error::PoolShared { others: 1 }), "{error}");
        assert_eq!(Pool::current(&device).unwrap(), pool);
        drop(found);
        pool.destroy().unwrap();
        assert_eq!(Pool::current(&device).unwrap(), default);
        default.destroy().unwrap();
        Pool::current(&device).unwrap().destroy().unwrap();
    }
    drop((device, driver));
    assert_gone(&sim);
}

/// A device that has no pools says so, and the next question is not spoilt by it.
#[test]
fn a_default_pool_that_cannot_be_made() {
    let (sim, driver) = two_devices();
    let device = driver.device(0).unwrap();
    let code = cuda_sys::types::CUresult::CUDA_ERROR_OUT_OF_MEMORY;
    sim.fail_nth("cuMemAddressReserve", 1, code);
    let error = Pool::current(&device).unwrap_err();
    assert!(matches!(error, Error::AddressSpaceExhausted { .. }), "{error}");
    assert_eq!(Pool::current(&device).unwrap(), Pool::default_of(&device).unwrap());
    Pool::forget_current(&device);
    drop((device, driver));
    assert_gone(&sim);
}
