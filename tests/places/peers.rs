//! Pools that other devices may reach.

use cuda_sim::Simulator;
use cuda_sys::types::*;
use vpmm::{Access, Device, Driver, Error, Location, Pool, Sharing, Stream};

use crate::rig::{GRANULE, Profile};
use crate::support::{Held, Rig, Watched, call};

/// A peer's kernel checks what the owner's wrote, after everything on the owner's stream.
fn check_from(peer: &Rig, owner: &Rig, held: &[Held], after: &Stream, on: &Stream) {
    order(owner, after, peer, on);
    held.iter().for_each(|held| held.check(peer, on));
    // What is freed next comes after the peer's look at it.
    order(peer, on, owner, after);
}

/// Makes one device's stream wait for another's.
fn order(before: &Rig, first: &Stream, after: &Rig, second: &Stream) {
    let mut event = std::ptr::null_mut();
    call!(before.driver, cuCtxSetCurrent(before.device.context()));
    call!(before.driver, cuEventCreate(&mut event, CUevent_flags_enum::CU_EVENT_DISABLE_TIMING.0));
    call!(before.driver, cuEventRecord(event, first.handle().raw()));
    call!(after.driver, cuCtxSetCurrent(after.device.context()));
    call!(after.driver, cuStreamWaitEvent(second.handle().raw(), event, 0));
    call!(after.driver, cuEventDestroy_v2(event));
}

/// Grows, frees every other block, and has the rest brought together; looks at everything from the
/// peer on the way.
fn grow_and_move(watched: &Watched<'_>, peer: &Rig, owner: &Rig) {
    let (stream, on_peer) = (owner.stream(), peer.stream());
    let mut held: Vec<Held> = (0..5).map(|_| watched.malloc(2 * GRANULE, &stream)).collect();
    held.push(watched.malloc(1000, &stream));
    check_from(peer, owner, &held, &stream, &on_peer);
    for index in [3, 1] {
        watched.free(held.remove(index), &stream);
    }
    held.push(watched.malloc(4 * GRANULE, &stream));
    assert!(watched.moved() > 0);
    check_from(peer, owner, &held, &stream, &on_peer);
    on_peer.synchronize().unwrap();
    held.into_iter().for_each(|held| watched.free(held, &stream));
    stream.synchronize().unwrap();
}

#[test]
fn access_given_before_allocation_is_kept_through_growth_and_movement() {
    Rig::everywhere_with_peers(|owner, peer| {
        for profile in Profile::BOTH {
            let watched = owner.pool(profile, Location::Device);
            assert_eq!(watched.pool.access(&peer.device), Access::None);
            watched.pool.set_access(&peer.device, Access::ReadWrite).unwrap();
            assert_eq!(watched.pool.access(&peer.device), Access::ReadWrite);
            grow_and_move(&watched, peer, owner);
            assert_eq!(peer.mismatches(), 0);
            watched.assert_intact();
        }
    });
}

#[test]
fn access_given_after_allocation_holds_for_what_is_there() {
    Rig::everywhere_with_peers(|owner, peer| {
        for profile in Profile::BOTH {
            let watched = owner.pool(profile, Location::Device);
            let (stream, on_peer) = (owner.stream(), peer.stream());
            // Some of it has moved before.
            let mut held: Vec<Held> =
                (0..5).map(|_| watched.malloc(2 * GRANULE, &stream)).collect();
            held.push(watched.malloc(1000, &stream));
            for index in [3, 1] {
                watched.free(held.remove(index), &stream);
            }
            held.push(watched.malloc(4 * GRANULE, &stream));
            watched.pool.set_access(&peer.device, Access::Read).unwrap();
            assert_eq!(watched.pool.access(&peer.device), Access::Read);
            check_from(peer, owner, &held, &stream, &on_peer);
            on_peer.synchronize().unwrap();
            // And is taken away, while the owner's work goes on.
            watched.pool.set_access(&peer.device, Access::None).unwrap();
            assert_eq!(watched.pool.access(&peer.device), Access::None);
            held.into_iter().for_each(|held| watched.free(held, &stream));
            assert_eq!(peer.mismatches(), 0);
            watched.assert_intact();
        }
    });
}

/// A copy from one device's pool into the other's, by the reader and by the writer.
#[test]
fn copies_between_two_pools() {
    Rig::everywhere_with_peers(|here, there| {
        for profile in Profile::BOTH {
            let (near, far) =
                (here.pool(profile, Location::Device), there.pool(profile, Location::Device));
            near.pool.set_access(&there.device, Access::ReadWrite).unwrap();
            far.pool.set_access(&here.device, Access::ReadWrite).unwrap();
            for pull in [false, true] {
                let (stream, on_far) = (here.stream(), there.stream());
                let bytes = 3 * GRANULE;
                let (from, to) = (near.malloc(bytes, &stream), far.malloc(bytes, &on_far));
                let (by, on) = if pull { (there, &on_far) } else { (here, &stream) };
                if pull {
                    order(here, &stream, there, &on_far);
                } else {
                    order(there, &on_far, here, &stream);
                }
                call!(by.driver, cuCtxSetCurrent(by.device.context()));
                call!(
                    by.driver,
                    cuMemcpyDtoDAsync_v2(
                        to.address(),
                        from.address(),
                        bytes as usize,
                        on.handle().raw()
                    )
                );
                if pull {
                    order(there, &on_far, here, &stream);
                } else {
                    order(here, &stream, there, &on_far);
                }
                // The copy has the pattern of its source.
                let copy = Held { ptr: to.ptr, ..from };
                copy.check(there, &on_far);
                near.free(from, &stream);
                far.free(copy, &on_far);
                on_far.synchronize().unwrap();
            }
            assert_eq!((here.mismatches(), there.mismatches()), (0, 0));
            near.assert_intact();
            far.assert_intact();
        }
    });
}

fn two_devices(builder: cuda_sim::Builder) -> (Simulator, [Device; 2]) {
    let sim = builder.devices(2).build().unwrap();
    let driver = Driver::new(sim.driver()).unwrap();
    let devices = [0, 1].map(|ordinal| driver.device(ordinal).unwrap());
    (sim, devices)
}

fn opened(profile: Profile, device: &Device) -> Pool {
    profile.open(device, Location::Device, Sharing::None).unwrap()
}

/// What the driver says that a device may do.
fn driver_says(device: &Device, address: u64) -> u64 {
    let location = CUmemLocation {
        type_: CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE,
        id: device.ordinal() as i32,
    };
    let mut flags = 0;
    call!(device.driver(), cuMemGetAccess(&mut flags, &location, address));
    flags
}

#[test]
fn what_cannot_be_given_or_taken() {
    let (sim, [device, peer]) = two_devices(Simulator::builder().peer_access(false));
    for profile in Profile::BOTH {
        let pool = opened(profile, &device);
        let error = pool.set_access(&peer, Access::Read).unwrap_err();
        assert!(matches!(error, Error::PeerUnsupported { device: 0, peer: 1 }), "{error}");
        assert_eq!(pool.access(&peer), Access::None);
        // Nothing to take away is no mistake, nor is what the owner has.
        pool.set_access(&peer, Access::None).unwrap();
        pool.set_access(&device, Access::ReadWrite).unwrap();
        for access in [Access::None, Access::Read] {
            let error = pool.set_access(&device, access).unwrap_err();
            assert!(matches!(error, Error::OwnerAccess { device: 0 }), "{error}");
        }
        assert_eq!(pool.access(&device), Access::ReadWrite);
        // Memory of the host is within reach of both.
        let pool = profile.open(&device, Location::HostNuma(1), Sharing::None).unwrap();
        let stream = device.stream().unwrap();
        let ptr = pool.malloc(GRANULE as usize, &stream).unwrap();
        pool.set_access(&peer, Access::ReadWrite).unwrap();
        assert_eq!(driver_says(&peer, ptr.address()), 3);
        pool.free(ptr, &stream).unwrap();
    }
    sim.assert_clean();
}

/// Nothing runs any more in a context that has failed, but what a peer does goes on: it was ordered before frees there.
#[test]
fn memory_of_a_failed_context_stays_where_a_peer_may_use_it() {
    for profile in Profile::BOTH {
        for access in [Access::Read, Access::None] {
            let (sim, [device, peer]) = two_devices(Simulator::builder());
            let pool = opened(profile, &device);
            let tagged = pool.tagged("beside").unwrap();
            let graph = pool.graph_pool().unwrap();
            let stream = device.stream().unwrap();
            // Never freed: the end waits for the whole context.
            pool.malloc(GRANULE as usize, &stream).unwrap();
            tagged.malloc(GRANULE as usize, &stream).unwrap();
            pool.set_access(&peer, Access::ReadWrite).unwrap();
            pool.set_access(&peer, access).unwrap();
            sim.lose_device(0, CUresult::CUDA_ERROR_ILLEGAL_ADDRESS);
            drop((stream, graph, tagged));
            pool.destroy().unwrap();
            let is_left = access != Access::None;
            assert_eq!(sim.memory_used(0) > 0, is_left, "{profile:?}, {access:?}");
        }
    }
}

/// A fault at each call: everything as before, on both sides, and the next attempt succeeds.
#[test]
fn a_failure_changes_nothing() {
    for profile in Profile::BOTH {
        for (from, to) in [(Access::None, Access::ReadWrite), (Access::ReadWrite, Access::Read)] {
            let mut met = 0;
            for n in 1.. {
                let (sim, [device, peer]) = two_devices(Simulator::builder());
                let pool = opened(profile, &device);
                pool.set_access(&peer, from).unwrap();
                let stream = device.stream().unwrap();
                // A hole between, so that there are two runs to set.
                let sizes = [4, 2, 4];
                let blocks =
                    sizes.map(|granules| pool.malloc(granules * GRANULE as usize, &stream));
                let [first, middle, last] = blocks.map(Result::unwrap);
                pool.free(middle, &stream).unwrap();
                sim.fail_call(n, CUresult::CUDA_ERROR_UNKNOWN);
                let result = pool.set_access(&peer, to);
                sim.clear_faults();
                pool.validate().unwrap();
                let expected = if result.is_ok() { to } else { from };
                assert_eq!(pool.access(&peer), expected, "{profile:?}, call {n}");
                for ptr in [first, last] {
                    assert_eq!(driver_says(&peer, ptr.address()), u64::from(flags(expected)));
                    assert_eq!(driver_says(&device, ptr.address()), 3);
                }
                let failed = result.is_err();
                met += usize::from(failed);
                pool.set_access(&peer, to).unwrap();
                assert_eq!(driver_says(&peer, last.address()), u64::from(flags(to)));
                for ptr in [first, last] {
                    pool.free(ptr, &stream).unwrap();
                }
                drop((pool, stream));
                sim.assert_clean();
                if !failed && n > 8 {
                    break;
                }
            }
            assert!(met >= 2, "{profile:?}: only {met} faults were met");
        }
    }
}

/// The driver refuses to set one run, and to set the one before back: what the books say does not hold
/// everywhere, and the same setting once more makes it hold.
#[test]
fn what_could_not_be_taken_back_is_taken_back_later() {
    for profile in Profile::BOTH {
        for (before, tried) in
            [(Access::None, Access::ReadWrite), (Access::ReadWrite, Access::None)]
        {
            let (sim, [device, peer]) = two_devices(Simulator::builder());
            let pool = opened(profile, &device);
            pool.set_access(&peer, before).unwrap();
            let stream = device.stream().unwrap();
            let blocks =
                [4, 2, 4].map(|granules| pool.malloc(granules * GRANULE as usize, &stream));
            let [first, middle, last] = blocks.map(Result::unwrap);
            pool.free(middle, &stream).unwrap();
            stream.synchronize().unwrap();
            pool.trim_to(0).unwrap();
            // The second run, and then the first and the second back.
            for n in 2..=4 {
                sim.fail_nth("cuMemSetAccess", n, CUresult::CUDA_ERROR_UNKNOWN);
            }
            let failed = pool.set_access(&peer, tried).unwrap_err();
            assert!(matches!(failed, Error::Driver { call: "cuMemSetAccess", .. }), "{failed}");
            sim.clear_faults();
            assert_eq!(pool.access(&peer), before);
            let torn = driver_says(&peer, first.address());
            assert_eq!(torn, u64::from(flags(tried)), "{profile:?}: it was set back after all");
            pool.set_access(&peer, before).unwrap();
            for ptr in [first, last] {
                let says = driver_says(&peer, ptr.address());
                assert_eq!(says, u64::from(flags(before)), "{profile:?}: {before:?} at {ptr}");
            }
            // And no call is made for what holds.
            let calls = device.driver().calls();
            pool.set_access(&peer, before).unwrap();
            assert_eq!(device.driver().calls().since(&calls).count("cuMemSetAccess"), 0);
            [first, last].into_iter().for_each(|ptr| pool.free(ptr, &stream).unwrap());
            drop((pool, stream));
            sim.assert_clean();
        }
    }
}

/// What fails for one heap of a pool is taken back for those before it.
#[test]
fn what_fails_for_a_further_heap_is_taken_back_for_the_main_one() {
    for profile in Profile::BOTH {
        let (sim, [device, peer]) = two_devices(Simulator::builder());
        let pool = opened(profile, &device);
        let stream = device.stream().unwrap();
        let tagged = pool.tagged("weights").unwrap();
        let held = [
            pool.malloc(GRANULE as usize, &stream).unwrap(),
            tagged.malloc(GRANULE as usize, &stream).unwrap(),
        ];
        sim.fail_nth("cuMemSetAccess", 2, CUresult::CUDA_ERROR_UNKNOWN);
        pool.set_access(&peer, Access::ReadWrite).unwrap_err();
        assert_eq!(pool.access(&peer), Access::None);
        let says = || held.map(|ptr| driver_says(&peer, ptr.address()));
        let flags_of = |access| u64::from(flags(access));
        assert_eq!(says(), [flags_of(Access::None); 2], "{profile:?}");
        pool.set_access(&peer, Access::ReadWrite).unwrap();
        assert_eq!(says(), [flags_of(Access::ReadWrite); 2], "{profile:?}");
        held.into_iter().for_each(|ptr| pool.free(ptr, &stream).unwrap());
        drop((tagged, pool, stream));
        sim.assert_clean();
    }
}

/// The driver's pool for small requests has the access that the pages have, whatever is refused.
#[test]
fn what_fails_for_pages_is_taken_back_for_small_requests() {
    for is_back in [true, false] {
        let (sim, [device, peer]) = two_devices(Simulator::builder());
        let pool = opened(Profile::Paged, &device);
        let stream = device.stream().unwrap();
        let ptr = pool.malloc(GRANULE as usize, &stream).unwrap();
        let count = |calls: &vpmm::DriverCalls| {
            device.driver().calls().since(calls).count("cuMemPoolSetAccess")
        };
        sim.fail_nth("cuMemSetAccess", 1, CUresult::CUDA_ERROR_UNKNOWN);
        if !is_back {
            sim.fail_nth("cuMemPoolSetAccess", 2, CUresult::CUDA_ERROR_UNKNOWN);
        }
        let calls = device.driver().calls();
        pool.set_access(&peer, Access::ReadWrite).unwrap_err();
        assert_eq!(count(&calls), 2, "set, and set back");
        // Where that was refused it is done by the next call, though the access is what it is by the books.
        let calls = device.driver().calls();
        pool.set_access(&peer, Access::None).unwrap();
        assert_eq!(count(&calls), u64::from(!is_back));
        pool.free(ptr, &stream).unwrap();
        drop((pool, stream));
        sim.assert_clean();
    }
}

fn flags(access: Access) -> u32 {
    match access {
        Access::None => 0,
        Access::Read => 1,
        Access::ReadWrite => 3,
    }
}
