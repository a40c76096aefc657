//! Streams that end with frees pending on them.

use vpmm::{Stream, StreamHandle};

use crate::rig::{ALL, GRANULE, Profile, SIZES, bounded};
use crate::support::streams::make;
use crate::support::{Rig, call};

/// A stream by who made it.
enum Made<'a> {
    Ours(Stream),
    /// By the driver; the pool is not told of its end.
    Raw(&'a Rig, cuda_sys::types::CUstream, StreamHandle),
}

impl<'a> Made<'a> {
    fn both(rig: &'a Rig) -> [Self; 2] {
        // A stream that does not wait for the legacy one, as the library's.
        let (raw, handle) = make(rig, 1);
        [Self::Ours(rig.stream()), Self::Raw(rig, raw, handle)]
    }

    fn handle(&self) -> StreamHandle {
        match self {
            Self::Ours(stream) => stream.handle(),
            Self::Raw(_, _, handle) => *handle,
        }
    }

    fn end(self) {
        if let Self::Raw(rig, raw, _) = self {
            call!(rig.driver, cuStreamDestroy_v2(raw));
        }
    }
}

fn overlap(one: &crate::support::Held, other: &crate::support::Held) -> bool {
    one.address() < other.address() + other.bytes && other.address() < one.address() + one.bytes
}

#[test]
fn a_stream_ends_with_frees_pending() {
    bounded("streams::a_stream_ends_with_frees_pending", || {
        Rig::each(|rig, profile| {
            for which in 0..2 {
                let watched = rig.pool(profile);
                let [ours, raw] = Made::both(rig);
                let (ending, other) = if which == 0 { (ours, raw) } else { (raw, ours) };
                let held = SIZES.map(|bytes| watched.malloc(bytes, ending.handle()));
                let stall = rig.stall(ending.handle());
                held.iter().for_each(|held| watched.free(*held, ending.handle()));
                ending.end();
                // The work behind the frees still runs.
                let next = SIZES.map(|bytes| watched.malloc(bytes, other.handle()));
                for (one, other) in held.iter().flat_map(|one| next.map(|other| (one, other))) {
                    assert!(!overlap(one, &other), "{profile:?}: {one:?} is given to {other:?}");
                }
                drop(stall);
                next.into_iter().for_each(|held| watched.free(held, other.handle()));
                rig.device.synchronize().unwrap();
                assert_eq!(watched.pool.stats().live_bytes, 0);
                let all = watched.malloc(ALL * GRANULE, other.handle());
                watched.free(all, other.handle());
                watched.assert_intact();
                other.end();
            }
        });
    });
}

/// A driver gives the handle of a stream that ended to the next one: neither takes the other's memory
/// for its own.
#[test]
fn streams_end_one_after_another() {
    bounded("streams::streams_end_one_after_another", || {
        Rig::each(|rig, profile| {
            let watched = rig.pool(profile);
            let mut left = None;
            for round in 0..60_usize {
                let [ours, raw] = Made::both(rig);
                let (now, unused) = if round % 2 == 0 { (ours, raw) } else { (raw, ours) };
                unused.end();
                let handle = now.handle();
                let held = [0, 1].map(|at| watched.malloc(SIZES[(round + at) % 3], handle));
                if let Some(before) = left {
                    // Allocated on a stream that has ended.
                    rig.device.synchronize().unwrap();
                    watched.free(before, handle);
                }
                watched.free(held[0], handle);
                left = Some(held[1]);
                now.end();
            }
            rig.device.synchronize().unwrap();
            watched.free(left.unwrap(), StreamHandle::LEGACY);
            assert_eq!(watched.pool.stats().live_bytes, 0);
            watched.assert_intact();
        });
    });
}

/// The pool is the first to go, while streams that have ended still work on its memory.
#[test]
fn a_pool_ends_after_its_streams() {
    bounded("streams::a_pool_ends_after_its_streams", || {
        Rig::everywhere(|rig| {
            for profile in Profile::ALL {
                let watched = rig.pool(profile);
                for stream in Made::both(rig) {
                    let held = SIZES.map(|bytes| watched.malloc(bytes, stream.handle()));
                    held.into_iter().for_each(|held| watched.free(held, stream.handle()));
                    stream.end();
                }
                drop(watched);
                assert_eq!(rig.mismatches(), 0);
            }
        });
    });
}
