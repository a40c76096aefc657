//! Sizes at their borders: of classes, of limits, of address spaces.

use cuda_sim::{Schedule, Simulator};
use cuda_sys::types::CUresult;
use vpmm::{Driver, Error, Pool, PoolConfig};

use crate::rig::{GRANULE, KIB, MIB, config};
use crate::support::Rig;

#[test]
fn what_an_allocation_takes_is_a_sixteenth_more_at_most() {
    let rig = Rig::simulated(Schedule::Eager);
    let watched = rig.small_pool();
    let stream = rig.stream();
    let borders = [512, 16 * KIB, 32 * KIB, 64 * KIB, MIB, GRANULE, 8 * MIB];
    let around = borders.into_iter().flat_map(|at| [at - 511, at - 1, at, at + 1, at + 513]);
    for bytes in around.chain((1..130 * KIB).step_by(1021)) {
        let before = watched.pool.stats().live_bytes;
        let held = watched.malloc(bytes, &stream);
        let taken = watched.pool.stats().live_bytes - before;
        let least = bytes.next_multiple_of(512);
        let most = if bytes <= 64 * KIB { least } else { bytes.next_multiple_of(4 * KIB) };
        let most = most.max(least + least / 16);
        assert!((least..=most).contains(&taken), "{taken} bytes for {bytes}");
        assert!(held.address().is_multiple_of(512));
        watched.free(held, &stream);
    }
    watched.assert_intact();
}

#[test]
fn small_and_large_do_not_share_granules() {
    let rig = Rig::simulated(Schedule::Eager);
    let watched = rig.small_pool();
    let stream = rig.stream();
    let (mut small, mut large) = (Vec::new(), Vec::new());
    for _ in 0..40 {
        small.push(watched.malloc(64 * KIB, &stream));
        large.push(watched.malloc(64 * KIB + 1, &stream));
    }
    let granules = |held: &[crate::support::Held]| -> std::collections::HashSet<u64> {
        held.iter().map(|held| held.address() / GRANULE).collect()
    };
    assert!(granules(&small).is_disjoint(&granules(&large)));
    for held in small.into_iter().chain(large) {
        watched.free(held, &stream);
    }
    watched.assert_intact();
}

#[test]
fn limits_are_kept_to_the_granule() {
    for limit in [0, 1, GRANULE - 1, GRANULE, GRANULE + 1, 3 * GRANULE - 1, 3 * GRANULE] {
        let rig = Rig::simulated(Schedule::Eager);
        let mut config = config(0, 64);
        config.limit_bytes = Some(limit);
        let watched = rig.pool(&config);
        let stream = rig.stream();
        let granules = limit / GRANULE;
        let mut held = Vec::new();
        while let Ok(one) = watched.try_malloc(GRANULE, &stream) {
            held.push(one);
        }
        assert_eq!((held.len() as u64, watched.usage()), (granules, granules), "{limit}");
        match watched.pool.malloc(512, &stream) {
            Err(Error::OutOfMemory { limit_bytes, mapped_bytes, .. }) => {
                assert_eq!((limit_bytes, mapped_bytes), (Some(limit), granules * GRANULE));
            }
            other => panic!("{limit}: {other:?}"),
        }
        held.drain(..).for_each(|held| watched.free(held, &stream));
        if granules > 0 {
            let all = watched.malloc(granules * GRANULE, &stream);
            watched.free(all, &stream);
        }
        watched.assert_intact();
    }
}

#[test]
fn a_request_of_the_whole_limit_is_served_from_what_is_scattered() {
    Rig::everywhere(|rig| {
        let watched = rig.pool(&config(24, 192));
        let stream = rig.stream();
        let mut held: Vec<_> = (0..24).map(|_| watched.malloc(GRANULE, &stream)).collect();
        let rest = held.split_off(12);
        for half in [held, rest] {
            half.into_iter().for_each(|held| watched.free(held, &stream));
        }
        let all = watched.malloc(24 * GRANULE, &stream);
        assert_eq!(watched.usage(), 24);
        watched.free(all, &stream);
        watched.assert_intact();
    });
}

#[test]
fn address_spaces_of_all_sizes() {
    let sim = Simulator::builder().build().unwrap();
    let device = Driver::new(sim.driver()).unwrap().device(0).unwrap();
    let stream = device.stream().unwrap();
    let mut config = PoolConfig::default();
    for bytes in [0, 1, 15 * GRANULE, 16 * GRANULE - 1, 2 << 40, u64::MAX] {
        config.va_size_bytes = Some(bytes);
        let error = Pool::new(&device, &config).map(drop).unwrap_err();
        assert!(matches!(error, Error::Config { name: "va_size_bytes", .. }), "{bytes}: {error}");
    }
    // The least that is accepted serves small and large, and says when it is full.
    config.va_size_bytes = Some(16 * GRANULE);
    let pool = Pool::new(&device, &config).unwrap();
    let mut held = Vec::new();
    for bytes in [512, 3 * MIB, 1 << 20, 64 << 10].into_iter().cycle() {
        match pool.malloc(bytes as usize, &stream) {
            Ok(ptr) => held.push(ptr),
            Err(Error::OutOfMemory { .. } | Error::AddressSpaceExhausted { .. }) => break,
            Err(other) => panic!("{other}"),
        }
        pool.validate().unwrap();
    }
    assert!(held.len() > 10, "{}", held.len());
    for ptr in held {
        pool.free(ptr, &stream).unwrap();
        pool.validate().unwrap();
    }
    drop(pool);
    // All but 2 TiB of addresses, most of them never touched.
    config.va_size_bytes = Some((2 << 40) - GRANULE);
    let pool = Pool::new(&device, &config).unwrap();
    let ptr = pool.malloc(100 << 30, &stream).unwrap();
    pool.free(ptr, &stream).unwrap();
    drop(pool);
    sim.assert_clean();
}

#[test]
fn a_reservation_that_is_refused_is_named() {
    let sim = Simulator::builder().build().unwrap();
    let device = Driver::new(sim.driver()).unwrap().device(0).unwrap();
    sim.fail_nth("cuMemAddressReserve", 1, CUresult::CUDA_ERROR_OUT_OF_MEMORY);
    let error = Pool::new(&device, &config(16, 64)).map(drop).unwrap_err();
    assert!(
        matches!(error, Error::AddressSpaceExhausted { bytes } if bytes == 64 * GRANULE),
        "{error}"
    );
    sim.assert_clean();
}

/// What is free side by side may be longer than any allocation, and than what 31 bits count in units: on a host there
/// is as much memory.
#[test]
fn more_than_a_tebibyte_may_be_free_in_one_piece() {
    const LONG: u64 = 400 << 30;
    let sim = Simulator::builder().host_memory_bytes(2 << 40).build().unwrap();
    let driver = Driver::new(sim.driver()).unwrap();
    let device = driver.device(0).unwrap();
    let stream = device.stream().unwrap();
    let mut config = PoolConfig::default();
    config.moves_per_second = 0;
    config.location = vpmm::Location::Host;
    config.limit_bytes = Some(1900 << 30);
    let pool = Pool::new(&device, &config).unwrap();
    let held = [(); 4].map(|()| pool.malloc(LONG as usize, &stream).unwrap());
    let mut addresses = held.map(|ptr| ptr.address());
    addresses.sort_unstable();
    assert!(addresses.is_sorted_by(|low, high| low + LONG == *high), "{addresses:x?}");
    held.into_iter().for_each(|ptr| pool.free(ptr, &stream).unwrap());
    stream.synchronize().unwrap();
    let whole = pool.snapshot().into_iter().flat_map(|of| of.blocks).map(|of| of.bytes).max();
    assert_eq!(whole, Some(4 * LONG));
    let again = [(); 4].map(|()| pool.malloc(LONG as usize, &stream).unwrap());
    assert_eq!(pool.stats().mapped_bytes, 4 * LONG);
    again.into_iter().for_each(|ptr| pool.free(ptr, &stream).unwrap());
    assert_eq!(pool.trim_to(0).unwrap(), 4 * LONG);
}
