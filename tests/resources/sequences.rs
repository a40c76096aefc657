//! Random and mixed sequences, on one stream and on several, by one thread and by several.

use vpmm::{MemoryResource, StreamHandle};

use crate::subjects::each;
use crate::support::{Lcg, Rig};
use crate::watched::Watched;

const MOST: u64 = 5 << 20;

fn most(resource: &dyn MemoryResource) -> u64 {
    resource.facts().max_bytes.map_or(MOST, |most| MOST.min(most as u64))
}

/// A hundred allocations, then all their frees.
fn random(watched: &Watched<'_>, stream: StreamHandle, seed: u64) {
    let (mut random, most) = (Lcg(seed), most(watched.resource));
    let held: Vec<_> =
        (0..100).map(|_| watched.allocate(random.below(most) as usize + 1, stream)).collect();
    held.into_iter().for_each(|held| watched.free(held, stream));
}

/// Allocations and frees in turn, slightly more of the former while a hundred are to come.
fn mixed(watched: &Watched<'_>, streams: &[StreamHandle], seed: u64) {
    let (mut random, most) = (Lcg(seed), most(watched.resource));
    let (mut held, mut made) = (Vec::new(), 0);
    while made < 100 || !held.is_empty() {
        let stream = streams[random.below(streams.len() as u64) as usize];
        if made < 100 && (held.is_empty() || random.below(100) < 53) {
            let bytes = random.below(most) as usize + 1;
            held.push((watched.allocate(bytes, stream), stream));
            made += 1;
        } else {
            let which = random.below(held.len() as u64) as usize;
            let (one, own) = held.swap_remove(which);
            // Half are freed on a stream that comes after their own.
            if random.below(2) == 0 && own != stream {
                watched.rig.order(own, stream);
                watched.free(one, stream);
            } else {
                watched.free(one, own);
            }
        }
    }
}

#[test]
fn random_sequences_on_one_stream() {
    each(|rig, resource| {
        let watched = Watched::new(rig, resource);
        let stream = rig.stream();
        random(&watched, StreamHandle::LEGACY, 1);
        random(&watched, stream.handle(), 2);
        random(&watched, StreamHandle::PER_THREAD, 3);
        mixed(&watched, &[StreamHandle::LEGACY], 4);
        mixed(&watched, &[stream.handle()], 5);
        watched.assert_intact();
    });
}

#[test]
fn mixed_sequences_over_streams() {
    each(|rig, resource| {
        let watched = Watched::new(rig, resource);
        let (a, b, c) = (rig.stream(), rig.stream(), rig.stream());
        let streams = [a.handle(), b.handle(), c.handle(), StreamHandle::LEGACY];
        mixed(&watched, &streams, 6);
        mixed(&watched, &streams, 7);
        watched.assert_intact();
    });
}

/// Work on a thread's own default stream is waited for before the thread ends: the driver hangs where
/// it is not.
fn in_threads(rig: &Rig, work: impl Fn(u64) + Sync) {
    std::thread::scope(|scope| {
        for thread in 0..4 {
            let work = &work;
            scope.spawn(move || {
                work(thread);
                rig.device.synchronize().expect("the device finishes");
            });
        }
    });
}

#[test]
fn four_threads() {
    each(|rig, resource| {
        let watched = Watched::new(rig, resource);
        let shared = rig.stream();
        in_threads(rig, |thread| mixed(&watched, &[shared.handle()], 10 + thread));
        in_threads(rig, |thread| {
            let own = rig.stream();
            mixed(&watched, &[own.handle()], 20 + thread);
            random(&watched, own.handle(), 30 + thread);
        });
        in_threads(rig, |thread| mixed(&watched, &[StreamHandle::PER_THREAD], 40 + thread));
        watched.assert_intact();
    });
}
