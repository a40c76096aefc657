//! Small and large blocks each in addresses of their own, until one kind lacks them.

use cuda_sim::{Schedule, Simulator};
use vpmm::{Pool, PoolConfig};

use crate::rig::{GRANULE, KIB, MIB, bare, config};
use crate::support::Rig;

/// A few small blocks among hundreds of large ones are no reason to map more for small ones, which nothing else
/// can have; many in a row are.
#[test]
fn each_part_is_served_ahead_by_its_own_growths() {
    let rig = Rig::simulated(Schedule::Eager);
    let pool = vpmm::Pool::new(&rig.device, &vpmm::PoolConfig::default()).expect("a pool");
    let stream = rig.stream();
    let load = |bytes, times: u64| {
        for _ in 0..times {
            pool.malloc(bytes, &stream).unwrap();
        }
    };
    let mapped = || pool.stats().mapped_bytes / GRANULE;
    let eight = 8 * GRANULE as usize;
    load(eight, 100);
    assert_eq!(mapped(), 800);
    load(512, 1);
    assert_eq!(mapped(), 801, "one granule for a small block");
    load(eight, 1);
    assert_eq!(mapped(), 809);
    let few = 64 * KIB as usize;
    load(few, 32 * 40);
    let ahead = mapped() - 809 - 40;
    assert!((4..=16).contains(&ahead), "{ahead} granules ahead of forty");
}

/// What small blocks take from the large part is lacking there later, and moves back and forth: while it is a
/// thousandth of the pool it is made.
#[test]
fn the_small_part_takes_nothing_from_the_large_one_while_it_is_little() {
    let rig = Rig::simulated(Schedule::Eager);
    let pool = vpmm::Pool::new(&rig.device, &vpmm::PoolConfig::default()).expect("a pool");
    let stream = rig.stream();
    let large: Vec<_> =
        (0..100).map(|_| pool.malloc(32 * GRANULE as usize, &stream).unwrap()).collect();
    large.into_iter().step_by(2).for_each(|ptr| pool.free(ptr, &stream).unwrap());
    let fill = || {
        for _ in 0..32 {
            pool.malloc(64 * KIB as usize, &stream).unwrap();
        }
        let stats = pool.stats();
        (stats.mapped_bytes / GRANULE - 3200, stats.extents_moved)
    };
    assert_eq!([(); 6].map(|()| fill()), [(1, 0), (2, 0), (3, 0), (3, 1), (3, 2), (3, 3)]);
}

#[test]
fn small_blocks_come_from_the_large_part_rather_than_not_at_all() {
    let rig = Rig::simulated(Schedule::Eager);
    let watched = rig.pool(&config(4, 64));
    let stream = rig.stream();
    let pinned = watched.malloc(7 * MIB, &stream);
    let half = watched.malloc(700 * KIB, &stream);
    // Nothing is left for a granule of the small part's own.
    let small = [(); 4].map(|()| watched.malloc(4 * KIB, &stream));
    assert_eq!(watched.usage(), 4);
    for held in small.into_iter().chain([pinned, half]) {
        watched.free(held, &stream);
    }
    watched.assert_intact();
}

/// What fronts keep is told small from large by its address alone, which this block would be taken for the wrong one
/// by.
#[test]
fn large_blocks_come_from_the_small_part_rather_than_not_at_all_and_are_in_no_front() {
    let rig = Rig::simulated(Schedule::Eager);
    let watched = rig.pool(&config(4, 64));
    let stream = rig.stream();
    let small = watched.malloc(4 * KIB, &stream);
    let pinned = watched.malloc(6 * MIB, &stream);
    // Only the small block's granule has room.
    for _ in 0..3 {
        let half = watched.malloc(700 * KIB, &stream);
        assert_eq!((watched.usage(), half.address() / GRANULE), (4, small.address() / GRANULE));
        watched.free(half, &stream);
        assert_eq!(watched.pool.stats().cached_bytes, 0);
        watched.assert_intact();
    }
    watched.free(pinned, &stream);
    watched.free(small, &stream);
    watched.assert_intact();
}

/// Small blocks have an eighth of the addresses: half of what a device has, and a quarter of what a tagged heap may
/// hold. What they need beyond that lies among large blocks, and a large one finds it again.
#[test]
fn small_blocks_fill_all_memory_and_not_only_their_own_addresses() {
    let sim = Simulator::builder().memory_bytes(80 * GRANULE).build().unwrap();
    let rig = Rig::on(sim);
    let stream = rig.stream();
    let sizes = [64 * KIB, 3 * KIB];
    // Each in a pool that has to grow for it.
    for (is_tagged, bytes) in [false, true].into_iter().flat_map(|tag| sizes.map(|of| (tag, of))) {
        let mut config = PoolConfig::default();
        config.limit_bytes = is_tagged.then_some(64 * GRANULE);
        let pool = Pool::new(&rig.device, &config).unwrap();
        let tagged = pool.tagged("cache").unwrap();
        let malloc = |bytes: u64| match is_tagged {
            false => pool.malloc(bytes as usize, &stream),
            true => tagged.malloc(bytes as usize, &stream),
        };
        // The rig holds some of the device's memory.
        let (most, least) = if is_tagged { (64, 64) } else { (80, 78) };
        let mut held = Vec::new();
        while let Ok(ptr) = malloc(bytes) {
            held.push(ptr);
        }
        let mapped = pool.stats().mapped_bytes / GRANULE;
        assert!((least..=most).contains(&mapped), "{mapped} granules of {most}");
        assert!(pool.stats().live_bytes > mapped * GRANULE / 8 * 7, "{:?}", pool.stats());
        pool.validate().unwrap();
        held.into_iter().for_each(|ptr| pool.free(ptr, &stream).unwrap());
        pool.free(malloc(40 * GRANULE).unwrap(), &stream).unwrap();
        pool.validate().unwrap();
    }
    rig.assert_clean();
}

/// Small blocks have no addresses left, and the device has more memory again than when it was asked last: what they
/// get among large ones is made, too.
#[test]
fn small_blocks_without_addresses_have_what_the_device_has_again() {
    let sim = Simulator::builder().build().unwrap();
    let device = vpmm::Driver::new(sim.driver()).unwrap().device(0).unwrap();
    let pool = Pool::new(&device, &config(60, 64)).unwrap();
    let stream = device.stream().unwrap();
    let small = || pool.malloc(64 << 10, &stream);
    // An eighth of the addresses.
    (0..8 * GRANULE / (64 * KIB)).for_each(|_| _ = small().unwrap());
    let large = |granules: u64| pool.malloc((granules * GRANULE) as usize, &stream).unwrap();
    large(20);
    let apart = [(); 4].map(|()| large(1));
    [apart[0], apart[2]].into_iter().for_each(|ptr| pool.free(ptr, bare(&stream)).unwrap());
    assert_eq!(pool.stats().mapped_bytes, 32 * GRANULE);
    sim.set_memory_limit(0, sim.memory_used(0) + GRANULE);
    // One is made, and the device said to have no more; two move.
    large(3);
    assert_eq!(pool.stats().mapped_bytes, 33 * GRANULE);
    sim.set_memory_limit(0, sim.memory_used(0) + 4 * GRANULE);
    small().unwrap();
    assert_eq!(pool.stats().mapped_bytes, 34 * GRANULE);
    pool.validate().unwrap();
}
