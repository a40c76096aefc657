//! Bad arguments to heaps beside the main one: each is a named error, and nothing has changed after
//! it.

use cuda_sim::Simulator;
use vpmm::{Buffers, Contents, DevicePtr, Error, Location, StreamHandle};

use crate::rig::{GRANULE, MIB, Profile};
use crate::support::Rig;

#[track_caller]
fn of_another_device<T>(result: Result<T, Error>) {
    let error = result.err().expect("a stream of another device was taken");
    let named = matches!(error, Error::WrongDevice { stream_device: 1, pool_device: 0 });
    assert!(named, "{error}");
}

#[test]
fn streams_of_another_device_are_refused() {
    for profile in Profile::BOTH {
        let rig = Rig::on(Simulator::builder().devices(2).build().unwrap());
        let watched = rig.pool(profile, Location::Device);
        let pool = &watched.pool;
        let (right, wrong) = (rig.stream(), rig.beside(1).stream());
        // SAFETY: the stream is alive until the end of the test.
        let raw = unsafe { StreamHandle::from_raw(wrong.handle().raw()) };
        let tagged = pool.tagged("weights").unwrap();
        let graph = pool.graph_pool().unwrap();
        let held = tagged.malloc(GRANULE as usize, &right).unwrap();
        rig.fill(held.address(), GRANULE, 5, right.handle());
        let before = (pool.stats().live_bytes, pool.stats().mapped_bytes, watched.layout());
        for wrong in [wrong.handle(), raw] {
            of_another_device(tagged.malloc(MIB as usize, wrong));
            of_another_device(tagged.free(held, wrong));
            of_another_device(pool.free(held, wrong));
            of_another_device(pool.record_stream(held, wrong));
            of_another_device(pool.suspend("weights", wrong, &Contents::Discard));
            of_another_device(graph.begin(wrong));
            of_another_device(graph.release(wrong));
        }
        assert!(!tagged.is_asleep());
        pool.suspend("weights", &right, &Contents::Keep(Buffers::Release)).unwrap();
        for wrong in [wrong.handle(), raw] {
            of_another_device(pool.resume("weights", wrong));
            of_another_device(pool.resume_empty("weights", wrong));
        }
        assert!(tagged.is_asleep());
        pool.resume("weights", &right).unwrap();
        let after = (pool.stats().live_bytes, pool.stats().mapped_bytes, watched.layout());
        assert_eq!(after, before);
        rig.check(held.address(), GRANULE, 5, right.handle());
        pool.free(held, &right).unwrap();
        graph.release(&right).unwrap();
        watched.assert_intact();
    }
}

#[test]
fn what_was_not_suspended_is_not_resumed() {
    Rig::everywhere(|rig| {
        for profile in Profile::BOTH {
            let watched = rig.pool(profile, Location::Device);
            let pool = &watched.pool;
            let stream = rig.stream();
            let tagged = pool.tagged("weights").unwrap();
            let held = tagged.malloc(GRANULE as usize, &stream).unwrap();
            rig.fill(held.address(), GRANULE, 5, stream.handle());
            let before = pool.stats().mapped_bytes;
            for _ in 0..2 {
                for refused in
                    [pool.resume("weights", &stream), pool.resume_empty("weights", &stream)]
                {
                    assert!(matches!(refused, Err(Error::NotAsleep)), "{refused:?}");
                }
                for refused in
                    [pool.resume("nobody", &stream), pool.resume_empty("nobody", &stream)]
                {
                    assert!(matches!(refused, Err(Error::UnknownTag)), "{refused:?}");
                }
                assert_eq!(pool.stats().mapped_bytes, before);
                // The second time round it has slept and woken.
                pool.suspend("weights", &stream, &Contents::Keep(Buffers::Release)).unwrap();
                pool.resume("weights", &stream).unwrap();
            }
            rig.check(held.address(), GRANULE, 5, stream.handle());
            pool.free(held, &stream).unwrap();
            watched.assert_intact();
        }
    });
}

#[test]
fn every_bad_pointer_is_named() {
    Rig::everywhere(|rig| {
        for profile in Profile::BOTH {
            let watched = rig.pool(profile, Location::Device);
            let pool = &watched.pool;
            let stream = rig.stream();
            let (one, two) = (pool.tagged("one").unwrap(), pool.tagged("two").unwrap());
            let held = one.malloc(2 * GRANULE as usize, &stream).unwrap();
            let other = two.malloc(2 * GRANULE as usize, &stream).unwrap();
            let live = pool.stats().live_bytes;
            for address in [0, 1, u64::MAX, other.address()] {
                let error = one.free(DevicePtr::from_address(address), &stream).unwrap_err();
                assert!(matches!(error, Error::ForeignPointer { .. }), "{address:#x}: {error}");
            }
            let inside = DevicePtr::from_address(held.address() + GRANULE);
            for error in [one.free(inside, &stream), pool.free(inside, &stream)] {
                let error = error.unwrap_err();
                assert!(matches!(error, Error::InteriorPointer { .. }), "{error}");
            }
            assert_eq!(pool.stats().live_bytes, live);
            pool.free(held, &stream).unwrap();
            for error in [one.free(held, &stream), pool.free(held, &stream)] {
                let error = error.unwrap_err();
                assert!(matches!(error, Error::DoubleFree { .. }), "{error}");
            }
            two.free(other, &stream).unwrap();
            watched.assert_intact();
        }
    });
}
