//! What a trim gives back.

use cuda_sim::Schedule;
use vpmm::Stream;

use crate::rig::{GRANULE, bare, config};
use crate::support::{Rig, call};

/// What two streams have freed of one extent goes back, though questions give nothing away.
#[test]
fn a_trim_gives_back_what_two_streams_have_freed_of_one_extent() {
    Rig::everywhere(|rig| {
        let mut settings = config(4, 96);
        settings.reuse.opportunistic = false;
        let watched = rig.pool(&settings);
        let (stream, other) = (rig.stream(), rig.stream());
        // So that what is left over of the first half's granule is nobody's.
        let known = watched.malloc(GRANULE, &other);
        let halves = [&stream, &other].map(|of| (watched.malloc(GRANULE / 2, of), of));
        assert_eq!(watched.usage(), 2);
        halves.into_iter().for_each(|(held, of)| watched.free(held, bare(of)));
        call!(rig.driver, cuStreamSynchronize(stream.handle().raw()));
        call!(rig.driver, cuStreamSynchronize(other.handle().raw()));
        assert_eq!(watched.pool.trim_to(0).unwrap(), GRANULE, "{}", watched.layout());
        watched.free(known, &other);
        watched.assert_intact();
    });
}

/// Memory that has moved goes back as soon as it is mapped nowhere else, whatever addresses others have left since.
#[test]
fn a_trim_gives_back_what_moved_before_beside_addresses_that_still_wait() {
    let rig = Rig::simulated(Schedule::Manual);
    let watched = rig.pool(&config(80, 400));
    let pool = &watched.pool;
    // Half of so many granules move.
    let scattered = |stream: &Stream, granules: u64| {
        let held: Vec<_> = (0..granules).map(|_| watched.malloc(GRANULE, stream)).collect();
        let (go, stay): (Vec<_>, Vec<_>) =
            held.into_iter().enumerate().partition(|(at, _)| at % 2 == 0);
        go.into_iter().for_each(|(_, held)| watched.free(held, bare(stream)));
        let moved = watched.malloc(granules / 2 * GRANULE, stream);
        stay.into_iter().map(|(_, held)| held).chain([moved]).collect::<Vec<_>>()
    };
    let zombies = || pool.stats().zombie_bytes / GRANULE;
    let (one, two) = (rig.stream(), rig.stream());
    let first = scattered(&one, 20);
    assert_eq!(zombies(), 10);
    rig.device.synchronize().unwrap();
    let second = scattered(&two, 24);
    // Those of before are unmapped by then.
    assert_eq!(zombies(), 12);
    first.into_iter().for_each(|held| watched.free(held, bare(&one)));
    one.synchronize().unwrap();
    assert_eq!(pool.trim_to(0).unwrap(), 20 * GRANULE);
    assert_eq!(zombies(), 12);
    watched.validate();
    second.into_iter().for_each(|held| watched.free(held, bare(&two)));
    rig.device.synchronize().unwrap();
    assert_eq!(pool.trim_to(0).unwrap(), 24 * GRANULE);
    watched.assert_intact();
}

/// The longest go first, since each costs the same, and no more than are to go; where those that are left are too long
/// one of them goes all the same.
#[test]
fn a_trim_gives_back_as_few_extents_as_it_takes() {
    let rig = Rig::simulated(Schedule::Eager);
    let mut settings = config(0, 256);
    settings.limit_bytes = None;
    let watched = rig.pool(&settings);
    let stream = rig.stream();
    // Sixteen extents of two granules, and four of one.
    let long = watched.malloc(32 * GRANULE, &stream);
    let short = [(); 4].map(|()| watched.malloc(GRANULE, &stream));
    let trim = |keep: u64| {
        let released = watched.pool.trim_to(keep * GRANULE).unwrap();
        watched.validate();
        let stats = watched.pool.stats();
        (released / GRANULE, stats.mapped_bytes / GRANULE, stats.extent_count)
    };
    assert_eq!(watched.pool.stats().extent_count, 20);
    watched.free(long, &stream);
    assert_eq!(trim(36), (0, 36, 20));
    assert_eq!(trim(35), (2, 34, 19));
    short.into_iter().for_each(|held| watched.free(held, &stream));
    assert_eq!(trim(30), (4, 30, 17));
    assert_eq!(trim(27), (3, 27, 15));
    assert_eq!(trim(3), (24, 3, 3));
    watched.assert_intact();
}
