//! What a pool says of itself.

use cuda_sim::Schedule;
use vpmm::{Sharing, Stream};

use crate::rig::{GRANULE, KIB, bare, config};
use crate::support::Rig;

/// However often memory was exported, it is as much.
#[test]
fn what_was_exported_again_counts_once() {
    let rig = Rig::simulated(Schedule::Eager);
    let mut settings = config(4, 64);
    settings.sharing = Sharing::FileDescriptor;
    let watched = rig.pool(&settings);
    let stream = rig.stream();
    let [first, _second] = [(); 2].map(|()| watched.malloc(GRANULE, &stream));
    for _ in 0..2 {
        drop(watched.pool.export(first.ptr).unwrap());
        assert_eq!(watched.pool.stats().exported_bytes, GRANULE);
    }
    watched.assert_intact();
}

/// In whichever way a request is served that no front has a block for.
#[test]
fn peaks_count_what_comes_from_behind_fronts() {
    let rig = Rig::simulated(Schedule::Eager);
    let watched = rig.pool(&config(4, 96));
    let (stream, other) = (rig.stream(), rig.stream());
    let peak_of = |bytes: u64| {
        watched.pool.reset_peaks();
        let held = watched.malloc(bytes, bare(&stream));
        watched.free(held, bare(&stream));
        watched.pool.stats().peak_live_bytes
    };
    let of = |stream: &Stream, bytes: [u64; 2]| bytes.map(|bytes| watched.malloc(bytes, stream));
    let pair = of(&stream, [GRANULE; 2]);
    let nobodys = watched.malloc(2 * GRANULE, &other);
    pair.into_iter().for_each(|held| watched.free(held, bare(&stream)));
    assert_eq!(peak_of(2 * GRANULE), 4 * GRANULE, "a block");
    let halves = of(&stream, [GRANULE + GRANULE / 2, GRANULE / 2]);
    watched.free(halves[1], bare(&stream));
    assert_eq!(peak_of(KIB), 3 * GRANULE + GRANULE / 2 + 4 * KIB, "one among large ones");
    watched.free(halves[0], bare(&stream));
    let [first, last] = of(&stream, [GRANULE; 2]);
    watched.free(nobodys, bare(&other));
    other.synchronize().unwrap();
    watched.free(last, bare(&stream));
    assert_eq!(peak_of(3 * GRANULE), 4 * GRANULE, "neighbours");
    assert_eq!(watched.moved(), 0);
    watched.free(first, &stream);
    watched.assert_intact();
}
