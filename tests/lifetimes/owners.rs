//! The pool of a pointer.

use cuda_sim::{Schedule, Simulator};
use vpmm::{DevicePtr, Driver, Error, PagedConfig, Pool};

use crate::rig::{GRANULE, Profile, SMALL};
use crate::support::{Rig, call};

#[test]
fn every_address_leads_to_its_pool() {
    Rig::everywhere(|rig| {
        let stream = rig.stream();
        let pools = Profile::BOTH.map(|profile| [(); 2].map(|()| profile.open(&rig.device)));
        let pools: Vec<Pool> = pools.into_iter().flatten().collect();
        for pool in &pools {
            let held = [3 * GRANULE, GRANULE, SMALL].map(|bytes| {
                let ptr = pool.malloc(bytes as usize, &stream).unwrap();
                (ptr, bytes)
            });
            for (ptr, bytes) in held {
                // Its start, its end, and between.
                for offset in [0, 1, bytes / 2, bytes - 1] {
                    let found = Pool::of(&rig.driver, ptr.address() + offset);
                    assert_eq!(found.as_ref(), Some(pool), "{bytes} bytes at {offset}");
                }
            }
            // The pool says what is wrong with a pointer that is inside.
            let inside = DevicePtr::from_address(held[0].0.address() + GRANULE);
            let error = Pool::free_any(&rig.driver, inside, &stream).unwrap_err();
            assert!(matches!(error, Error::InteriorPointer { .. }), "{error}");
            // Freed, it is still an address of the pool's.
            let freed = held[0].0;
            Pool::free_any(&rig.driver, freed, &stream).unwrap();
            assert_eq!(Pool::of(&rig.driver, freed.address()).as_ref(), Some(pool));
            let error = Pool::free_any(&rig.driver, freed, &stream).unwrap_err();
            assert!(matches!(error, Error::DoubleFree { .. }), "{error}");
            for (ptr, _) in &held[1..] {
                Pool::free_any(&rig.driver, *ptr, &stream).unwrap();
            }
            pool.validate().unwrap();
            assert_eq!(pool.stats().live_count + pool.stats().small_live_count, 0);
        }
    });
}

/// Also of small requests, whose addresses are the driver's to give to any pool.
#[test]
fn another_pool_s_pointers_are_foreign() {
    Rig::everywhere(|rig| {
        let stream = rig.stream();
        let pools = Profile::BOTH.map(|profile| [(); 2].map(|()| profile.open(&rig.device)));
        let pools: Vec<Pool> = pools.into_iter().flatten().collect();
        for owner in &pools {
            for bytes in [3 * GRANULE, SMALL] {
                let ptr = owner.malloc(bytes as usize, &stream).unwrap();
                for pool in pools.iter().filter(|pool| *pool != owner) {
                    for refused in [pool.free(ptr, &stream), pool.record_stream(ptr, &stream)] {
                        let error = refused.unwrap_err();
                        assert!(matches!(error, Error::ForeignPointer { .. }), "{error}");
                    }
                }
                owner.free(ptr, &stream).unwrap();
                let error = owner.free(ptr, &stream).unwrap_err();
                assert!(matches!(error, Error::DoubleFree { .. }), "{error}");
            }
        }
    });
}

#[test]
fn foreign_memory_has_no_pool() {
    Rig::everywhere(|rig| {
        let stream = rig.stream();
        let pools = Profile::BOTH.map(|profile| profile.open(&rig.device));
        let of_pool = pools.each_ref().map(|pool| pool.malloc(SMALL as usize, &stream).unwrap());
        let mut foreign = 0;
        call!(rig.driver, cuCtxSetCurrent(rig.device.context()));
        call!(rig.driver, cuMemAlloc_v2(&mut foreign, GRANULE as usize));
        for address in [0, 1, foreign, foreign + 5, u64::MAX] {
            assert_eq!(Pool::of(&rig.driver, address), None, "{address:#x}");
            let ptr = DevicePtr::from_address(address);
            let error = Pool::free_any(&rig.driver, ptr, &stream).unwrap_err();
            assert!(matches!(error, Error::ForeignPointer { address: named } if named == address));
        }
        call!(rig.driver, cuMemFree_v2(foreign));
        for (pool, ptr) in pools.iter().zip(of_pool) {
            pool.free(ptr, &stream).unwrap();
        }
    });
}

/// Reservations that a pool makes later are found, too.
#[test]
fn a_pool_with_several_reservations() {
    let rig = Rig::simulated(Schedule::Eager);
    let stream = rig.stream();
    let mut config = PagedConfig::default();
    config.va_size_bytes = 2 * GRANULE;
    let pool = Pool::paged(&rig.device, &config).unwrap();
    let other = Pool::paged(&rig.device, &config).unwrap();
    let mut held = Vec::new();
    for _ in 0..5 {
        for pool in [&pool, &other] {
            let ptr = pool.malloc(2 * GRANULE as usize, &stream).unwrap();
            assert_eq!(Pool::of(&rig.driver, ptr.address() + GRANULE).as_ref(), Some(pool));
            held.push((pool, ptr));
        }
    }
    assert_eq!(pool.stats().reservation_count, 5);
    for (pool, ptr) in &held {
        assert_eq!(Pool::of(&rig.driver, ptr.address()).as_ref(), Some(*pool));
        pool.free(*ptr, &stream).unwrap();
    }
    let addresses: Vec<u64> = held.iter().map(|(_, ptr)| ptr.address()).collect();
    drop((pool, other));
    for address in addresses {
        assert_eq!(Pool::of(&rig.driver, address), None);
    }
    rig.assert_clean();
}

/// A pool of one driver is unknown to another one.
#[test]
fn drivers_know_their_own_pools() {
    let sims = [(); 2].map(|()| Simulator::builder().build().unwrap());
    let drivers = sims.each_ref().map(|sim| Driver::new(sim.driver()).unwrap());
    let devices = drivers.each_ref().map(|driver| driver.device(0).unwrap());
    for profile in Profile::BOTH {
        let pool = profile.open(&devices[0]);
        let stream = devices[0].stream().unwrap();
        for bytes in [GRANULE, SMALL] {
            let ptr = pool.malloc(bytes as usize, &stream).unwrap();
            assert_eq!(Pool::of(&drivers[1], ptr.address()), None);
            assert_eq!(Pool::of(pool.device().driver(), ptr.address()).as_ref(), Some(&pool));
            pool.free(ptr, &stream).unwrap();
        }
    }
}

/// The question makes no driver call.
#[test]
fn finding_a_pool_costs_no_driver_call() {
    let rig = Rig::simulated(Schedule::Eager);
    let stream = rig.stream();
    for profile in Profile::BOTH {
        let pool = profile.open(&rig.device);
        let held = [GRANULE, SMALL].map(|bytes| pool.malloc(bytes as usize, &stream).unwrap());
        let before = rig.driver.calls().total();
        for address in [held[0].address(), held[1].address() + 7, 12345] {
            let _ = Pool::of(&rig.driver, address);
        }
        assert_eq!(rig.driver.calls().total(), before);
        held.into_iter().for_each(|ptr| pool.free(ptr, &stream).unwrap());
    }
}
