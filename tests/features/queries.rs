//! What a pool knows about a pointer.

use vpmm::{Allocation, StreamHandle};

use crate::rig::{BLOCK, GRANULE};
use crate::support::{Held, Rig, Watched};

fn found(watched: &Watched<'_>, address: u64) -> Option<Allocation> {
    let before = watched.rig.driver.calls();
    let found = watched.pool.allocation(address);
    assert_eq!(watched.rig.driver.calls().since(&before).total(), 0, "no driver call");
    found
}

/// Every address of an allocation names it, and those around it do not.
fn assert_found(watched: &Watched<'_>, held: &Held, stream: Option<StreamHandle>) {
    let (start, bytes) = (held.address(), held.bytes);
    for offset in [0, 1 % bytes, bytes / 3, bytes / 2, bytes - 1] {
        let found = found(watched, start + offset).expect("it is inside");
        assert_eq!((found.start.address(), found.stream), (start, stream), "offset {offset}");
        assert!(
            found.bytes >= bytes && found.bytes < bytes + GRANULE,
            "{} for {bytes}",
            found.bytes
        );
        let end = found_end(watched, start + found.bytes);
        assert_ne!(end, Some(start), "one past the end");
    }
    assert_ne!(found_end(watched, start - 1), Some(start), "one before");
}

fn found_end(watched: &Watched<'_>, address: u64) -> Option<u64> {
    found(watched, address).map(|found| found.start.address())
}

#[test]
fn every_address_of_an_allocation_names_it() {
    Rig::each(|rig, profile| {
        let watched = rig.pool(profile);
        let stream = rig.stream();
        let sizes = [1, 700, 100 << 10, GRANULE, GRANULE + 1, 3 * GRANULE, BLOCK];
        let held: Vec<_> = sizes.iter().map(|bytes| watched.malloc(*bytes, &stream)).collect();
        held.iter().for_each(|held| assert_found(&watched, held, Some(stream.handle())));
        // The pointer that comes back is one that can be freed, and names this allocation alone.
        for held in &held {
            let start = found(&watched, held.address()).expect("it is live").start;
            assert_eq!(start, held.ptr);
        }
        for held in held {
            watched.free(held, &stream);
            assert_eq!(found(&watched, held.address()), None, "it is free");
            assert_eq!(found(&watched, held.address() + held.bytes / 2), None);
        }
        watched.assert_intact();
    });
}

#[test]
fn addresses_of_nobody_name_nothing() {
    Rig::each(|rig, profile| {
        let (watched, other) = (rig.pool(profile), rig.pool(profile));
        let stream = rig.stream();
        let held = [BLOCK, 1000].map(|bytes| other.malloc(bytes, &stream));
        for address in [0, 1, u64::MAX, 1 << 40, held[0].address(), held[1].address()] {
            assert_eq!(found(&watched, address), None, "{address:#x}");
        }
        held.into_iter().for_each(|held| other.free(held, &stream));
        other.assert_intact();
    });
}

#[test]
fn the_stream_is_the_one_of_the_last_allocation_while_the_library_has_it() {
    Rig::each(|rig, profile| {
        let watched = rig.pool(profile);
        let (a, b) = (rig.stream(), rig.stream());
        for bytes in [1000, BLOCK] {
            let held = watched.malloc(bytes, &a);
            watched.free(held, &a);
            a.synchronize().unwrap();
            // As likely as not at the same address, and freed on another stream than its own.
            let of_b = watched.malloc(bytes, &b);
            assert_found(&watched, &of_b, Some(b.handle()));
            rig.order(&b, &a);
            watched.free(of_b, &a);
        }
        watched.assert_intact();
    });
}

#[test]
fn a_stream_that_has_ended_is_not_named() {
    Rig::each(|rig, profile| {
        let watched = rig.pool(profile);
        let (first, second) = (rig.stream(), rig.stream());
        let held = [1000, BLOCK].map(|bytes| watched.malloc(bytes, &first));
        rig.order(&first, &second);
        drop(first);
        held.iter().for_each(|held| assert_found(&watched, held, None));
        // Nothing waits for it any more: its place in the pool may be another stream's, too.
        watched.pool.trim_to(0).unwrap();
        // Its handle may be another stream's now.
        let next = [(); 4].map(|()| rig.stream());
        let of_next = next.each_ref().map(|stream| watched.malloc(BLOCK, stream));
        held.iter().for_each(|held| assert_found(&watched, held, None));
        for (held, stream) in of_next.iter().zip(&next) {
            assert_found(&watched, held, Some(stream.handle()));
            watched.free(*held, stream);
        }
        held.into_iter().for_each(|held| watched.free(held, &second));
        watched.assert_intact();
    });
}

#[test]
fn the_legacy_stream_is_named_and_others_handles_are_not() {
    Rig::each(|rig, profile| {
        let watched = rig.pool(profile);
        for bytes in [1000, BLOCK] {
            let held = watched.malloc(bytes, StreamHandle::LEGACY);
            assert_found(&watched, &held, Some(StreamHandle::LEGACY));
            watched.free(held, StreamHandle::LEGACY);
            let (raw, foreign) = crate::support::streams::make(rig, 1);
            let held = watched.malloc(bytes, foreign);
            assert_found(&watched, &held, None);
            watched.free(held, foreign);
            crate::support::call!(rig.driver, cuStreamDestroy_v2(raw));
        }
        watched.assert_intact();
    });
}
