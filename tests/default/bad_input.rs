//! Bad arguments: each is a named error, and nothing has changed after it.

use cuda_sim::{Schedule, Simulator};
use vpmm::{DevicePtr, Error, StreamHandle};

use crate::rig::{GRANULE, KIB, MIB, config, held};
use crate::support::streams::assert_second_context_refused;
use crate::support::{Rig, call};

#[test]
fn every_bad_pointer_is_named() {
    Rig::everywhere(|rig| {
        let watched = rig.small_pool();
        let stream = rig.stream();
        let raw = StreamHandle::PER_THREAD;
        let large = watched.malloc(2 * GRANULE, &stream);
        let (small, next) = (watched.malloc(4 * KIB, &stream), watched.malloc(4 * KIB, &stream));
        let before = held(&watched.pool.stats());
        for handle in [stream.handle(), raw] {
            let free = |address: u64| watched.pool.free(DevicePtr::from_address(address), handle);
            // Elsewhere, and in the reservation where there is no memory.
            let beyond = [small.address() + GRANULE, large.address() + 100 * GRANULE];
            for address in [0, 1, u64::MAX, 0xdead_0000, beyond[0], beyond[1]] {
                let error = free(address).unwrap_err();
                assert!(matches!(error, Error::ForeignPointer { .. }), "{address:#x}: {error}");
            }
            for (held, offset) in [
                (large, 1),
                (large, 8),
                (large, 512),
                (large, GRANULE),
                (large, 2 * GRANULE - 1),
                (small, 256),
                (small, 512),
                (next, 4 * KIB - 1),
            ] {
                let error = free(held.address() + offset).unwrap_err();
                assert!(
                    matches!(error, Error::InteriorPointer { start, .. } if start == held.address()),
                    "{offset}: {error}"
                );
            }
            // Memory that was never handed out.
            let error = free(next.address() + 4 * KIB).unwrap_err();
            assert!(matches!(error, Error::DoubleFree { .. }), "{error}");
        }
        assert_eq!(held(&watched.pool.stats()), before);
        for held in [large, small, next] {
            watched.free(held, &stream);
        }
        watched.assert_intact();
    });
}

/// Freed twice: while the front has the block, while the stream's free memory has it, when it is
/// part of a larger free block, and when it is nobody's.
#[test]
fn a_second_free_is_refused_wherever_the_block_is() {
    Rig::everywhere(|rig| {
        for bytes in [512, 64 * KIB, 64 * KIB + 1, MIB, GRANULE, 5 * GRANULE] {
            let watched = rig.small_pool();
            let (stream, other) = (rig.stream(), rig.stream());
            let twice = |ptr: DevicePtr| {
                for handle in [stream.handle(), other.handle(), StreamHandle::LEGACY] {
                    let error = watched.pool.free(ptr, handle).unwrap_err();
                    assert!(matches!(error, Error::DoubleFree { .. }), "{bytes}: {error}");
                }
                watched.validate();
            };
            let held = [(); 3].map(|()| watched.malloc(bytes, &stream));
            watched.free(held[1], &stream);
            twice(held[1].ptr);
            // Empties every front: nothing has so much in a piece.
            let large = watched.malloc(30 * GRANULE, &other);
            if large.address() != held[1].address() {
                twice(held[1].ptr);
            }
            watched.free(held[0], &stream);
            watched.free(held[2], &stream);
            watched.free(large, &other);
            rig.device.synchronize().unwrap();
            let larger = watched.malloc(31 * GRANULE, &other);
            held.iter().filter(|held| held.address() != larger.address()).for_each(|held| {
                let error = watched.pool.free(held.ptr, &stream).unwrap_err();
                let named = matches!(
                    error,
                    Error::DoubleFree { .. }
                        | Error::ForeignPointer { .. }
                        | Error::InteriorPointer { .. }
                );
                assert!(named, "{bytes}: {error}");
            });
            watched.free(larger, &other);
            watched.assert_intact();
        }
    });
}

#[test]
fn sizes_that_cannot_be_are_refused_and_the_pool_goes_on() {
    Rig::everywhere(|rig| {
        let watched = rig.small_pool();
        let stream = rig.stream();
        for handle in [stream.handle(), StreamHandle::LEGACY, StreamHandle::PER_THREAD] {
            assert!(matches!(watched.pool.malloc(0, handle), Err(Error::ZeroSize)));
            for bytes in [usize::MAX, usize::MAX - 5, usize::MAX - GRANULE as usize + 2] {
                let error = watched.pool.malloc(bytes, handle).unwrap_err();
                assert!(matches!(error, Error::SizeOverflow { .. }), "{error}");
            }
            for bytes in [1_usize << 62, 1 << 40, 600 << 30, 65 * GRANULE as usize] {
                match watched.pool.malloc(bytes, handle) {
                    Err(Error::OutOfMemory { requested_bytes, .. }) => {
                        assert_eq!(requested_bytes, bytes as u64);
                    }
                    other => panic!("{bytes}: {other:?}"),
                }
            }
        }
        assert_eq!(watched.usage(), 0);
        let (one, two) = (watched.malloc(MIB, &stream), watched.malloc(MIB, &stream));
        watched.free(one, &stream);
        watched.free(two, &stream);
        watched.assert_intact();
    });
}

#[test]
fn more_than_the_device_has_is_refused() {
    let sim = Simulator::builder().memory_bytes(64 * GRANULE).build().unwrap();
    let driver = vpmm::Driver::new(sim.driver()).unwrap();
    let device = driver.device(0).unwrap();
    let pool = vpmm::Pool::new(&device, &vpmm::PoolConfig::default()).unwrap();
    let stream = device.stream().unwrap();
    let error = pool.malloc(65 * GRANULE as usize, &stream).unwrap_err();
    assert!(matches!(error, Error::OutOfMemory { limit_bytes: None, .. }), "{error}");
    let all = pool.malloc(64 * GRANULE as usize, &stream).unwrap();
    let error = pool.malloc(1, &stream).unwrap_err();
    assert!(error.is_out_of_memory(), "{error}");
    pool.free(all, &stream).unwrap();
    pool.malloc(1, &stream).unwrap();
    pool.validate().unwrap();
    sim.assert_clean();
}

#[test]
fn streams_of_other_devices_and_contexts_are_refused() {
    let sim = Simulator::builder().devices(2).build().unwrap();
    let driver = vpmm::Driver::new(sim.driver()).unwrap();
    let (zero, one) = (driver.device(0).unwrap(), driver.device(1).unwrap());
    let pool = vpmm::Pool::new(&zero, &config(16, 96)).unwrap();
    let (right, wrong) = (zero.stream().unwrap(), one.stream().unwrap());
    let bytes = GRANULE as usize;
    let ptr = pool.malloc(bytes, &right).unwrap();
    // SAFETY: the stream is alive until the end of the test.
    let raw = unsafe { StreamHandle::from_raw(wrong.handle().raw()) };
    for wrong in [wrong.handle(), raw] {
        for error in [pool.malloc(bytes, wrong).unwrap_err(), pool.free(ptr, wrong).unwrap_err()] {
            let named = matches!(error, Error::WrongDevice { stream_device: 1, pool_device: 0 });
            assert!(named, "{error}");
        }
    }
    // The device current on the thread does not matter, the stream's does.
    call!(driver, cuCtxSetCurrent(one.context()));
    let again = [(); 2].map(|()| pool.malloc(5 * bytes, &right).unwrap());
    let mut current = std::ptr::null_mut();
    call!(driver, cuCtxGetCurrent(&mut current));
    assert_eq!(current, one.context(), "the caller's context is current again");
    let of_default = pool.malloc(bytes, StreamHandle::LEGACY).unwrap();
    pool.free(of_default, StreamHandle::LEGACY).unwrap();
    for ptr in again.into_iter().chain([ptr]) {
        pool.free(ptr, &right).unwrap();
    }
    pool.validate().unwrap();
    drop(pool);
    sim.assert_clean();
}

#[test]
fn a_stream_of_a_second_context_of_the_device_is_refused() {
    let rig = Rig::simulated(Schedule::Eager);
    assert_second_context_refused(&rig.small_pool(), GRANULE as usize);
}

#[test]
fn a_pointer_of_another_pool_is_foreign() {
    Rig::everywhere(|rig| {
        let (one, two) = (rig.small_pool(), rig.small_pool());
        let stream = rig.stream();
        // No context is current on this thread, as in a program that uses the driver alone.
        call!(rig.driver, cuCtxSetCurrent(std::ptr::null_mut()));
        let (a, b) = (one.malloc(MIB, &stream), two.malloc(MIB, &stream));
        for handle in [stream.handle(), StreamHandle::LEGACY] {
            let error = one.pool.free(b.ptr, handle).unwrap_err();
            assert!(matches!(error, Error::ForeignPointer { .. }), "{error}");
        }
        one.free(a, &stream);
        two.free(b, &stream);
        one.assert_intact();
        two.assert_intact();
    });
}
