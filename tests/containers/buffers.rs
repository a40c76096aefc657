//! Bytes: lengths, contents, memory.

use cuda_sim::{Schedule, Simulator};
use cuda_sys::types::CUresult;
use vpmm::resource::DeviceMalloc;
use vpmm::{DeviceBuffer, Driver, Error};

use crate::resources::{Counting, each};
use crate::support::Rig;

fn bytes(count: usize) -> Vec<u8> {
    (0..count).map(|at| (at * 7 + at / 251) as u8).collect()
}

#[test]
fn contents_and_lengths() {
    each(|rig, resource| {
        let stream = rig.stream();
        for count in [0, 1, 4, 255, 256, 257, 1 << 20, (5 << 20) + 3] {
            let host = bytes(count);
            let mut buffer = DeviceBuffer::from_slice(&host, &stream, resource).unwrap();
            assert_eq!((buffer.len(), buffer.is_empty()), (count, count == 0));
            assert_eq!(buffer.ptr().is_null(), count == 0);
            assert!(buffer.ptr().address().is_multiple_of(buffer.align() as u64));
            assert_eq!(buffer.to_vec().unwrap(), host, "{count} bytes");
            buffer.as_mut_slice().fill(9).unwrap();
            assert!(buffer.to_vec().unwrap().iter().all(|byte| *byte == 9));
            let zeroed = DeviceBuffer::zeroed(count, &stream, resource).unwrap();
            assert!(zeroed.to_vec().unwrap().iter().all(|byte| *byte == 0));
        }
    });
}

#[test]
fn parts() {
    each(|rig, resource| {
        let stream = rig.stream();
        let host = bytes(10_000);
        let mut buffer = DeviceBuffer::from_slice(&host, &stream, resource).unwrap();
        let part = buffer.slice(100..300).unwrap();
        assert_eq!(part.ptr().address(), buffer.ptr().address() + 100);
        assert_eq!(part.slice(50..).unwrap().to_vec().unwrap(), host[150..300]);
        buffer.slice_mut(9_999..).unwrap().copy_from_slice(&[77]).unwrap();
        buffer.slice_mut(..2).unwrap().fill(78).unwrap();
        let now = buffer.to_vec().unwrap();
        assert_eq!((&now[..2], &now[2..9_999], now[9_999]), (&[78, 78][..], &host[2..9_999], 77));
        let (mut left, right) = buffer.as_mut_slice().split_at_mut(4_000).unwrap();
        left.slice_mut(..1_000)
            .unwrap()
            .copy_from(&right.as_slice().slice(..1_000).unwrap())
            .unwrap();
        assert_eq!(buffer.slice(..1_000).unwrap().to_vec().unwrap(), host[4_000..5_000]);
        // What is not there.
        for range in [0..10_001, 10_001..10_001, usize::MAX..usize::MAX] {
            let error = buffer.slice(range.clone()).unwrap_err();
            assert!(matches!(error, Error::OutOfRange { len: 10_000, .. }), "{error}");
            assert!(buffer.slice_mut(range).is_err());
        }
        assert!(buffer.as_mut_slice().split_at_mut(10_001).is_err());
    });
}

/// Lengths are compared before anything is copied.
#[test]
fn lengths_that_differ() {
    each(|rig, resource| {
        let stream = rig.stream();
        let mut buffer = DeviceBuffer::from_slice(&bytes(100), &stream, resource).unwrap();
        let other = DeviceBuffer::zeroed(99, &stream, resource).unwrap();
        let mut host = [5; 101];
        let errors = [
            buffer.as_slice().copy_to_slice(&mut host).unwrap_err(),
            buffer.as_slice().copy_to_slice(&mut host[..99]).unwrap_err(),
            buffer.as_mut_slice().copy_from_slice(&host).unwrap_err(),
            buffer.as_mut_slice().copy_from(&other.as_slice()).unwrap_err(),
        ];
        for error in errors {
            assert!(matches!(error, Error::LengthMismatch { len: 100, .. }), "{error}");
        }
        assert_eq!(host, [5; 101]);
        assert_eq!(buffer.to_vec().unwrap(), bytes(100));
    });
}

#[test]
fn it_grows_and_shrinks() {
    each(|rig, resource| {
        let stream = rig.stream();
        let counting = Counting::new(resource);
        let host = bytes(1_000);
        let mut buffer = DeviceBuffer::from_slice(&host, &stream, &counting).unwrap();
        counting.assert_live(1, 1_000);
        let at_first = buffer.ptr();
        // Shorter: the memory stays.
        buffer.resize(10).unwrap();
        assert_eq!((buffer.len(), buffer.capacity(), buffer.ptr()), (10, 1_000, at_first));
        buffer.resize(1_000).unwrap();
        assert_eq!(buffer.ptr(), at_first);
        assert_eq!(buffer.to_vec().unwrap(), host, "what was there is there again");
        // Longer: other memory, with the same contents.
        buffer.reserve(3 << 20).unwrap();
        assert_eq!((buffer.len(), buffer.capacity()), (1_000, 3 << 20));
        counting.assert_live(1, 3 << 20);
        assert_eq!(buffer.to_vec().unwrap(), host);
        buffer.resize(2 << 20).unwrap();
        assert_eq!(buffer.slice(..1_000).unwrap().to_vec().unwrap(), host);
        buffer.resize(1_000).unwrap();
        buffer.shrink_to_fit().unwrap();
        assert_eq!((buffer.len(), buffer.capacity()), (1_000, 1_000));
        counting.assert_live(1, 1_000);
        assert_eq!(buffer.to_vec().unwrap(), host);
        buffer.resize(0).unwrap();
        buffer.shrink_to_fit().unwrap();
        assert!(buffer.ptr().is_null());
        buffer.resize(5).unwrap();
        buffer.release().unwrap();
        counting.assert_live(0, 0);
    });
}

#[test]
fn copies_have_memory_of_their_own() {
    each(|rig, resource| {
        let stream = rig.stream();
        let host = bytes(70_000);
        let original = DeviceBuffer::from_slice(&host, &stream, resource).unwrap();
        let elsewhere = DeviceMalloc::new(&rig.device);
        let mut copy = original.copy(&stream, elsewhere).unwrap();
        copy.as_mut_slice().fill(1).unwrap();
        assert_eq!(original.to_vec().unwrap(), host);
        drop(original);
        assert!(copy.to_vec().unwrap().iter().all(|byte| *byte == 1));
    });
}

#[test]
fn alignments() {
    let rig = Rig::simulated(Schedule::Eager);
    let (stream, pool) = (rig.stream(), crate::resources::pool(&rig));
    let buffer = DeviceBuffer::uninit_aligned(10, 512, &stream, &pool).unwrap();
    assert!(buffer.ptr().address().is_multiple_of(512));
    for (align, named) in [(0, true), (3, true), (4096, false)] {
        let error = DeviceBuffer::uninit_aligned(10, align, &stream, &pool).unwrap_err();
        let bad = matches!(error, Error::BadAlignment { .. });
        let unsupported = matches!(error, Error::AlignmentUnsupported { .. });
        assert!(if named { bad } else { unsupported }, "{align}: {error}");
    }
    let error = DeviceBuffer::uninit(usize::MAX - 10, &stream, &pool).unwrap_err();
    assert!(matches!(error, Error::SizeOverflow { .. }), "{error}");
}

/// Each driver call of each step fails in turn: the buffer has what it had.
#[test]
fn a_failure_changes_nothing() {
    let mut failures = 0;
    for step in 0..3 {
        for n in 1.. {
            let sim = Simulator::builder().build().unwrap();
            let device = Driver::new(sim.driver()).unwrap().device(0).unwrap();
            let stream = device.stream().unwrap();
            let counting = Counting::new(DeviceMalloc::new(&device));
            let host = bytes(1_000);
            let mut buffer = DeviceBuffer::from_slice(&host, &stream, &counting).unwrap();
            buffer.reserve(2_000).unwrap();
            sim.fail_call(n, CUresult::CUDA_ERROR_NOT_PERMITTED);
            let result = match step {
                0 => buffer.resize(5_000),
                1 => buffer.shrink_to_fit(),
                _ => buffer.reserve(3_000),
            };
            if result.is_ok() {
                // Past the last call, or in the free of the old memory, which stays the resource's.
                assert_eq!(buffer.slice(..1_000).unwrap().to_vec().unwrap(), host);
                if counting.live.load(std::sync::atomic::Ordering::Relaxed) == 1 {
                    break;
                }
                continue;
            }
            failures += 1;
            assert_eq!((buffer.len(), buffer.capacity()), (1_000, 2_000), "step {step}, call {n}");
            assert_eq!(buffer.to_vec().unwrap(), host);
        }
    }
    assert!(failures >= 9, "{failures} failures were met");
}
