//! Pools whose memory is on the host.

use cuda_sim::{Schedule, Simulator};
use cuda_sys::types::*;
use vpmm::{Error, Location, PagedConfig, Pool, PoolConfig, Sharing};

use crate::rig::{GRANULE, LIMIT, Profile};
use crate::support::{Rig, call};

const ON_THE_HOST: [Location; 2] = [Location::Host, Location::HostNuma(0)];

/// Whether a device has such pools; says so where it has not.
fn has(rig: &Rig, location: Location) -> bool {
    match Profile::Default.open(&rig.device, location, Sharing::None) {
        Ok(_) => true,
        Err(error @ Error::LocationUnsupported { .. }) if rig.sim.is_none() => {
            println!("skipped: {error}");
            false
        }
        Err(error) => panic!("{location}: {error}"),
    }
}

/// Growth, movement, small requests: on the host as on a device.
#[test]
fn a_pool_lives_on_the_host() {
    Rig::everywhere(|rig| {
        for location in ON_THE_HOST.into_iter().filter(|location| has(rig, *location)) {
            for profile in Profile::BOTH {
                let watched = rig.pool(profile, location);
                let stream = rig.stream();
                let mut held: Vec<_> =
                    (0..5).map(|_| watched.malloc(2 * GRANULE, &stream)).collect();
                let small = watched.malloc(1000, &stream);
                if let Some(sim) = &rig.sim {
                    assert!(sim.host_memory_used() >= 10 * GRANULE);
                }
                // Every other one, so that four granules have to be brought together.
                for index in [3, 1] {
                    watched.free(held.remove(index), &stream);
                }
                held.push(watched.malloc(4 * GRANULE, &stream));
                assert!(watched.moved() > 0, "{profile:?} at its limit of {LIMIT} moves");
                held.push(small);
                held.into_iter().for_each(|held| watched.free(held, &stream));
                watched.assert_intact();
            }
        }
    });
}

/// The host has more memory than the device: a limit above the device's is kept there, and with nothing said there
/// are addresses for it, in every heap.
#[test]
fn a_limit_on_the_host_may_be_above_the_devices_memory() {
    for location in ON_THE_HOST {
        let sim = Simulator::builder().memory_bytes(16 * GRANULE).build().unwrap();
        let rig = Rig::on(sim.clone());
        let stream = rig.stream();
        for is_tagged in [false, true] {
            let mut config = PoolConfig::default();
            (config.location, config.limit_bytes) = (location, Some(100 * GRANULE));
            let pool = Pool::new(&rig.device, &config).unwrap();
            let tagged = pool.tagged("cache").unwrap();
            let malloc = || {
                let bytes = 10 * GRANULE as usize;
                if is_tagged { tagged.malloc(bytes, &stream) } else { pool.malloc(bytes, &stream) }
            };
            let held = [(); 10].map(|()| malloc().unwrap());
            assert!(malloc().is_err_and(|error| error.is_out_of_memory()));
            assert_eq!(sim.host_memory_used(), 100 * GRANULE);
            pool.validate().unwrap();
            held.into_iter().for_each(|ptr| pool.free(ptr, &stream).unwrap());
        }
    }
}

/// The host reads what a kernel wrote, through the pool's own address. On a GPU only: the simulator
/// has device addresses where the host can have none.
#[test]
fn the_host_reads_and_writes_too() {
    let Some(rig) = Rig::gpu() else { return };
    for location in ON_THE_HOST.into_iter().filter(|location| has(&rig, *location)) {
        for profile in Profile::BOTH {
            let pool = profile.open(&rig.device, location, Sharing::None).unwrap();
            let stream = rig.stream();
            let ptr = pool.malloc(GRANULE as usize, &stream).unwrap();
            call!(rig.driver, cuMemsetD32Async(ptr.address(), 7, 1024, stream.handle().raw()));
            stream.synchronize().unwrap();
            let words = ptr.address() as *mut u32;
            // SAFETY: memory of the host that the pool has opened to it, of more than 1,024 words,
            // and no device work is under way.
            let word = unsafe { words.add(1023).read_volatile() };
            assert_eq!(word, 7, "{profile:?}, {location}");
            // SAFETY: as above.
            unsafe { words.write_volatile(8) };
            let mut back = 0_u32;
            call!(rig.driver, cuMemcpyDtoH_v2((&raw mut back).cast(), ptr.address(), 4));
            assert_eq!(back, 8);
            pool.free(ptr, &stream).unwrap();
        }
    }
}

/// The driver is told of both who may reach the memory.
#[test]
fn the_device_and_the_host_have_access() {
    let rig = Rig::simulated(Schedule::Eager);
    for location in ON_THE_HOST {
        for profile in Profile::BOTH {
            let pool = profile.open(&rig.device, location, Sharing::None).unwrap();
            let stream = rig.stream();
            let ptr = pool.malloc(GRANULE as usize, &stream).unwrap();
            for place in [
                CUmemLocation { type_: CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE, id: 0 },
                CUmemLocation { type_: CUmemLocationType::CU_MEM_LOCATION_TYPE_HOST, id: 0 },
            ] {
                let mut flags = 0;
                call!(rig.driver, cuMemGetAccess(&mut flags, &place, ptr.address()));
                assert_eq!(flags, 3, "{profile:?}, {location}");
            }
            pool.free(ptr, &stream).unwrap();
        }
    }
}

/// What small requests of the paged profile take is where the pages are.
#[test]
fn small_requests_are_at_the_same_place() {
    let rig = Rig::simulated(Schedule::Eager);
    let before = rig.sim.as_ref().unwrap().memory_used(0);
    for location in ON_THE_HOST {
        let watched = rig.pool(Profile::Paged, location);
        let stream = rig.stream();
        let held = watched.malloc(100, &stream);
        let sim = rig.sim.as_ref().unwrap();
        assert_eq!(sim.memory_used(0), before);
        assert!(sim.host_memory_used() > 0);
        watched.free(held, &stream);
        watched.assert_intact();
    }
}

#[test]
fn what_is_not_there_is_named() {
    let sim = Simulator::builder().host_memory_bytes(0).build().unwrap();
    let rig = Rig::on(sim);
    for profile in Profile::BOTH {
        for location in ON_THE_HOST {
            let error = profile.open(&rig.device, location, Sharing::None).unwrap_err();
            let named = matches!(
                error,
                Error::LocationUnsupported { ordinal: 0, location: named } if named == location
            );
            assert!(named, "{profile:?}: {error}");
        }
        let error = profile.open(&rig.device, Location::Device, Sharing::Fabric).unwrap_err();
        assert!(matches!(error, Error::SharingUnsupported { ordinal: 0, .. }), "{error}");
    }
    let rig = Rig::simulated(Schedule::Eager);
    let before = rig.sim.as_ref().unwrap().leaks();
    for profile in Profile::BOTH {
        for node in [2, 99, u32::MAX] {
            let location = Location::HostNuma(node);
            let error = profile.open(&rig.device, location, Sharing::None).unwrap_err();
            assert!(matches!(error, Error::LocationUnsupported { .. }), "node {node}: {error}");
            assert!(error.to_string().contains(&node.to_string()), "{error}");
        }
        let error = profile.open(&rig.device, Location::Host, Sharing::FileDescriptor).unwrap_err();
        assert!(matches!(error, Error::Config { name: "sharing", .. }), "{error}");
    }
    assert_eq!(rig.sim.as_ref().unwrap().leaks(), before);
    assert_eq!(rig.sim.as_ref().unwrap().host_memory_used(), 0);
}

/// Without the driver's pools at the place there is nothing to serve requests with no pages.
#[test]
fn no_pages_and_no_pools() {
    let rig = Rig::simulated(Schedule::Eager);
    let mut config = PagedConfig::default();
    config.page_size_bytes = Some(u64::MAX);
    config.location = Location::Host;
    let pool = Pool::paged(&rig.device, &config).unwrap();
    let stream = rig.stream();
    let ptr = pool.malloc(GRANULE as usize, &stream).unwrap();
    assert!(rig.sim.as_ref().unwrap().host_memory_used() >= GRANULE);
    pool.free(ptr, &stream).unwrap();
}
