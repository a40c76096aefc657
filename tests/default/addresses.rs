//! Addresses: what is known of each, what one waits for after a move, and few of them.

use cuda_sim::Schedule;
use vpmm::{DevicePtr, Pool};

use crate::rig::{GRANULE, bare, config};
use crate::support::{Lcg, Rig};

/// What lay across many granules is noted there until something else does.
#[test]
fn an_address_of_a_long_block_that_is_gone_is_no_shorter_ones() {
    let rig = Rig::simulated(Schedule::Eager);
    let watched = rig.pool(&config(200, 400));
    let stream = rig.stream();
    let long = watched.malloc(130 * GRANULE, &stream);
    let inside = [30, 100].map(|granules| long.address() + granules * GRANULE);
    let found = |address| watched.pool.allocation(address).map(|of| of.start.address());
    assert_eq!(inside.map(found), [Some(long.address()); 2]);
    watched.free(long, bare(&stream));
    let short = watched.malloc(GRANULE, &stream);
    assert_eq!(short.address(), long.address());
    assert_eq!(inside.map(found), [None; 2]);
    assert_eq!(found(short.address() + 1), Some(short.address()));
    watched.free(short, &stream);
    watched.assert_intact();
}

/// At the limit, with hardly more addresses: those that were given up wait for the stream, like what was freed.
#[test]
fn addresses_are_waited_for_like_memory() {
    for addresses in 16..24 {
        let rig = Rig::simulated(Schedule::Manual);
        let watched = rig.pool(&config(6, addresses));
        let stream = rig.stream();
        for _ in 0..6 {
            let all = [(); 6].map(|()| watched.malloc(GRANULE, &stream));
            let (gone, kept): (Vec<_>, Vec<_>) =
                all.into_iter().enumerate().partition(|(at, _)| at % 2 == 0);
            gone.into_iter().for_each(|(_, held)| watched.free(held, &stream));
            let together = watched.malloc(3 * GRANULE, &stream);
            watched.free(together, &stream);
            kept.into_iter().for_each(|(_, held)| watched.free(held, &stream));
        }
        watched.assert_intact();
    }
}

/// Of neighbours that move together some were nobody's, and the work of another's stream still uses where it was.
#[test]
fn neighbours_that_move_leave_addresses_each_behind_its_own_fence() {
    let rig = Rig::simulated(Schedule::Manual);
    let watched = rig.pool(&config(5, 96));
    let (stream, other) = (rig.stream(), rig.stream());
    let mine = watched.malloc(GRANULE, &stream);
    // Longer, so that it does not become the other's.
    let nobodys = watched.malloc(2 * GRANULE, &other);
    assert_eq!(mine.address() + GRANULE, nobodys.address());
    let [between, last] = [(); 2].map(|()| watched.malloc(GRANULE, &stream));
    watched.free(nobodys, bare(&other));
    other.synchronize().unwrap();
    [mine, last].into_iter().for_each(|held| watched.free(held, bare(&stream)));
    let long = watched.malloc(4 * GRANULE, &stream);
    assert_eq!(watched.moved(), 3, "{}", watched.layout());
    // Only what nobody waits for can be unmapped: the first one's contents have not been looked at.
    watched.pool.trim_to(0).unwrap();
    assert_eq!(watched.pool.stats().zombie_bytes, GRANULE, "{}", watched.layout());
    [between, long].into_iter().for_each(|held| watched.free(held, &stream));
    watched.assert_intact();
}

/// In blocks of two granules and more, so that every extent that is not in use can move whole.
#[test]
fn with_few_addresses_what_is_refused_lacks_memory_or_addresses_in_a_row() {
    const LIMIT: u64 = 64;
    let rig = Rig::simulated(Schedule::Eager);
    let stream = rig.stream();
    let mut lacked_a_row = 0;
    for seed in 0..500 {
        let mut random = Lcg(seed);
        let config = config(LIMIT, 70 + seed % 60);
        let pool = Pool::new(&rig.device, &config).unwrap();
        let mut live: Vec<(DevicePtr, u64)> = Vec::new();
        for _ in 0..200 {
            if random.below(2) > 0 && !live.is_empty() {
                let (ptr, _) = live.swap_remove(random.below(live.len() as u64) as usize);
                pool.free(ptr, &stream).unwrap();
                continue;
            }
            let granules = 2 * (1 + random.below(12));
            let used: u64 = live.iter().map(|(_, granules)| granules).sum();
            match pool.malloc((granules * GRANULE) as usize, &stream) {
                Ok(ptr) => live.push((ptr, granules)),
                Err(_) if used + granules > LIMIT => {}
                Err(error) => {
                    let layout = pool.layout().to_string();
                    assert!(longest_row(&layout) < granules, "{granules} in {layout}: {error}");
                    lacked_a_row += 1;
                }
            }
        }
        pool.validate().unwrap();
        live.iter().for_each(|(ptr, _)| pool.free(*ptr, &stream).unwrap());
    }
    assert!(lacked_a_row > 0);
    rig.assert_clean();
}

/// The most granules in a row of the large part that are in no allocation, but for those at its end, which are not
/// drawn.
fn longest_row(layout: &str) -> u64 {
    let large = layout.rsplit(" | ").next().unwrap_or_default();
    let (mut row, mut longest) = (0, 0);
    for piece in large.split(['[', ']']).filter(|piece| !piece.is_empty()) {
        match piece.strip_prefix(['-', '*', '~']) {
            Some(granules) => row += granules.parse::<u64>().unwrap(),
            None => row = 0,
        }
        longest = longest.max(row);
    }
    longest
}
