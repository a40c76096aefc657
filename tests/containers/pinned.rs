//! Page-locked memory and copies that go on beside the host.

use std::sync::Arc;

use cuda_sim::{Schedule, Simulator};
use cuda_sys::types::CUresult;
use vpmm::resource::{
    CoalescingConfig, CoalescingPool, DeviceMalloc, HostMalloc, Limiting, PinnedHost,
};
use vpmm::{DeviceBuffer, DevicePtr, DeviceScalar, DeviceVec, Error, MemoryResource, PinnedVec};

use crate::resources::pool;
use crate::support::Rig;
use crate::support::streams::{begin_capture, end_capture};

const COUNT: usize = 300_000;

#[test]
fn a_slice_for_the_host() {
    Rig::everywhere(|rig| {
        let stream = rig.stream();
        let resource = PinnedHost::new(&rig.device);
        let mut values = PinnedVec::zeroed(1_000, &stream, resource.clone()).unwrap();
        assert_eq!(values[..], [0_u64; 1_000]);
        values[7] = 8;
        values.iter_mut().rev().take(3).for_each(|value| *value = 1);
        assert_eq!((values[7], values[997], values[996]), (8, 1, 0));
        let copy = PinnedVec::from_slice(&values, &stream, &resource).unwrap();
        assert_eq!(copy[..], values[..]);
        let none = PinnedVec::<u8, _>::zeroed(0, &stream, &resource).unwrap();
        assert!(none.is_empty());
        let empty = PinnedVec::from_slice(&[(); 3], &stream, &resource).unwrap();
        assert_eq!(empty.len(), 3);
        for len in [usize::MAX, isize::MAX as usize / 8 + 1] {
            let error = PinnedVec::<u64, _>::zeroed(len, &stream, &resource).unwrap_err();
            assert!(matches!(error, Error::SizeOverflow { .. }), "{error}");
        }
    });
}

/// What a pool gives is for what the stream does next: the host writes when what was enqueued before is done.
#[test]
fn a_vector_in_memory_that_its_stream_still_uses() {
    let rig = Rig::simulated(Schedule::Manual);
    let (stream, malloc) = (rig.stream(), PinnedHost::new(&rig.device));
    let config = CoalescingConfig::default();
    let pool = CoalescingPool::new(malloc, &rig.device, &config).unwrap();
    let mut buffer = DeviceBuffer::uninit(COUNT, &stream, &pool).unwrap();
    buffer.as_mut_slice().fill(0xFF).unwrap();
    let address = buffer.ptr();
    drop(buffer);
    // SAFETY: the host reaches page-locked memory; nobody frees it by its address.
    let values = unsafe { PinnedVec::<u8, _>::zeroed_in(COUNT, &stream, &pool) }.unwrap();
    assert_eq!(values.as_ptr() as u64, address.address(), "the same memory");
    rig.device.synchronize().unwrap();
    assert!(values.iter().all(|value| *value == 0));
    drop(values);
    begin_capture(&rig, stream.handle().raw());
    // SAFETY: as above.
    let refused = unsafe { PinnedVec::<u8, _>::zeroed_in(COUNT, &stream, &pool) };
    assert!(matches!(refused, Err(Error::StreamCapturing)), "{:?}", refused.err());
    end_capture(&rig, stream.handle().raw());
    drop(refused);
    drop(pool);
    rig.assert_clean();
}

/// Nobody frees a vector's memory under it.
#[test]
fn a_bare_address_does_not_free_it() {
    let rig = Rig::simulated(Schedule::Eager);
    let stream = rig.stream();
    let pinned = PinnedHost::new(&rig.device);
    let host = HostMalloc::new();
    let of_pinned = PinnedVec::from_slice(&[1_u8, 2, 3], &stream, &pinned).unwrap();
    let of_host = PinnedVec::from_slice(&[1_u8, 2, 3], &stream, &host).unwrap();
    let resources: [(&dyn MemoryResource, _); 2] =
        [(&pinned, of_pinned.as_ptr()), (&host, of_host.as_ptr())];
    for (resource, address) in resources {
        let bare = DevicePtr::from_address(address as u64);
        let error = resource.deallocate(bare, 3, 256, stream.handle()).unwrap_err();
        assert!(matches!(error, Error::ForeignPointer { .. }), "{error}");
    }
    assert_eq!((&of_pinned[..], &of_host[..]), (&[1, 2, 3][..], &[1, 2, 3][..]));
}

/// Nor by what a container of the same resource says of its own: another vector would have the memory
/// next, with slices on it, and the container still be written.
#[test]
fn a_containers_address_does_not_free_it() {
    let rig = Rig::simulated(Schedule::Eager);
    let stream = rig.stream();
    let pinned = PinnedHost::new(&rig.device);
    let host = HostMalloc::new();
    let resources: [&dyn MemoryResource; 2] = [&pinned, &host];
    for resource in resources {
        let buffer = DeviceBuffer::uninit(4096, &stream, resource).unwrap();
        let values = DeviceVec::<u32, _>::uninit(1024, &stream, resource).unwrap();
        let scalar = DeviceScalar::<[u32; 1024], _>::uninit(&stream, resource).unwrap();
        for ptr in [buffer.ptr(), values.ptr(), values.as_slice().ptr(), scalar.ptr()] {
            let error = resource.deallocate(ptr, 4096, 256, stream.handle()).unwrap_err();
            assert!(matches!(error, Error::ForeignPointer { .. }), "{error}");
        }
        buffer.release().unwrap();
    }
}

#[test]
fn there_and_back() {
    Rig::everywhere(|rig| {
        let stream = rig.stream();
        let pool = pool(rig);
        let resource = Arc::new(PinnedHost::new(&rig.device));
        let numbers: Vec<u32> = (0..COUNT as u32).collect();
        let host = PinnedVec::from_slice(&numbers, &stream, Arc::clone(&resource)).unwrap();
        let mut values = DeviceVec::uninit(COUNT, &stream, &pool).unwrap();
        let stall = rig.stall(stream.handle());
        let upload = host.upload(&mut values.as_mut_slice()).unwrap();
        assert!(!upload.is_complete().unwrap(), "it goes on beside the host");
        drop(stall);
        let mut host = upload.wait().unwrap();
        host.fill(0);
        let host = host.download(&values.as_slice()).unwrap().wait().unwrap();
        assert_eq!(host[..], numbers[..]);
        // A part of the values.
        let part = PinnedVec::zeroed(10, &stream, resource).unwrap();
        let part = part.download(&values.slice(100..110).unwrap()).unwrap().wait().unwrap();
        assert_eq!(part[..], numbers[100..110]);
        let error = part.upload(&mut values.as_mut_slice()).unwrap_err();
        assert!(matches!(error, Error::LengthMismatch { given: 10, len: COUNT }), "{error}");
    });
}

/// A transfer that nobody waits for is waited for by its drop, and its memory freed after.
#[test]
fn a_transfer_is_dropped() {
    Rig::everywhere(|rig| {
        let stream = rig.stream();
        let device_memory = DeviceMalloc::new(&rig.device);
        let resource = PinnedHost::new(&rig.device);
        let mut values = DeviceVec::zeroed(COUNT, &stream, &device_memory).unwrap();
        for round in 1..4_u32 {
            let host = PinnedVec::from_slice(&vec![round; COUNT], &stream, &resource).unwrap();
            drop(host.upload(&mut values.as_mut_slice()).unwrap());
            assert_eq!(values.get(COUNT - 1).unwrap(), round);
        }
    });
}

/// The driver refuses to wait for the stream once: a copy to or from a slice of the host's is over all the
/// same when the call is.
#[test]
fn one_wait_for_a_copy_is_refused() {
    let rig = Rig::on(Simulator::builder().schedule(Schedule::Manual).build().unwrap());
    let sim = rig.sim.clone().unwrap();
    let (stream, pool) = (rig.stream(), pool(&rig));
    let resource = PinnedHost::new(&rig.device);
    let mut host = PinnedVec::from_slice(&[5_u32; 1000], &stream, &resource).unwrap();
    let mut values = DeviceVec::uninit(1000, &stream, &pool).unwrap();
    let refuse = || sim.fail_nth("cuStreamSynchronize", 1, CUresult::CUDA_ERROR_UNKNOWN);
    let is_over = || assert_eq!(sim.run_until_idle(), 0, "the copy was under way");
    sim.run_until_idle();
    refuse();
    let done = values.as_mut_slice().copy_from_slice(&host);
    is_over();
    done.unwrap();
    host.fill(6);
    refuse();
    let done = values.as_slice().copy_to_slice(&mut host);
    is_over();
    done.unwrap();
    assert_eq!(host[..], [5; 1000]);
    // Where the stream cannot be waited for at all the device is.
    refuse();
    sim.fail_nth("cuStreamSynchronize", 2, CUresult::CUDA_ERROR_UNKNOWN);
    let done = values.as_mut_slice().copy_from_slice(&host);
    is_over();
    done.unwrap();
    // Where neither the stream nor the device can be waited for, the first failure is told.
    refuse();
    sim.fail_nth("cuStreamSynchronize", 2, CUresult::CUDA_ERROR_NOT_READY);
    sim.fail_nth("cuCtxSynchronize", 1, CUresult::CUDA_ERROR_NOT_READY);
    let error = values.to_vec().unwrap_err();
    let first =
        Error::Driver { call: "cuStreamSynchronize", code: CUresult::CUDA_ERROR_UNKNOWN, bytes: 0 };
    assert_eq!(error.to_string(), first.to_string());
}

/// The driver refuses the wait for a copy that memory of the host's is lent to. It is waited for all the same, before the
/// host has its memory back, and not by way of the device while another stream captures: the driver would refuse that,
/// too, and end the capture.
#[test]
fn a_copy_that_cannot_be_waited_for_once_is_waited_for_beside_a_capture() {
    let rig = Rig::on(Simulator::builder().schedule(Schedule::Manual).build().unwrap());
    let sim = rig.sim.clone().unwrap();
    let (stream, capturing) = (rig.stream(), rig.stream());
    let pinned = PinnedHost::new(&rig.device);
    let mut host = PinnedVec::zeroed(1000, &stream, pinned).unwrap();
    let values = DeviceVec::filled(7_u32, 1000, &stream, DeviceMalloc::new(&rig.device)).unwrap();
    begin_capture(&rig, capturing.handle().raw());
    // Refused twice the wait is for the device, which cannot be beside the capture, and then for the stream again.
    for times in 1..=2 {
        host.fill(0);
        for nth in 1..=times {
            sim.fail_nth("cuStreamSynchronize", nth, CUresult::CUDA_ERROR_UNKNOWN);
        }
        values.as_slice().copy_to_slice(&mut host).unwrap();
        assert_eq!(host[..], [7; 1000]);
    }
    assert_eq!(end_capture(&rig, capturing.handle().raw()), 0);
    rig.assert_clean();
}

/// What a copy that goes on uses stays until it is done, whatever memory it is: nobody else waits for that.
#[test]
fn a_transfer_waits_for_its_copy() {
    let rig = Rig::simulated(Schedule::Late { patience: 3 });
    let (stream, pool) = (rig.stream(), pool(&rig));
    let mut values = DeviceVec::<u32, _>::uninit(COUNT, &stream, &pool).unwrap();
    let host = PinnedVec::zeroed(COUNT, &stream, HostMalloc::new()).unwrap();
    let transfer = host.upload(&mut values.as_mut_slice()).unwrap();
    let before = rig.driver.calls();
    drop(transfer);
    assert_eq!(rig.driver.calls().since(&before).count("cuEventSynchronize"), 1);
}

/// A transfer in a capture would be a part of the graph; and one whose end cannot be recorded is waited for at once,
/// or its memory is never anybody's again.
#[test]
fn a_transfer_that_cannot_be() {
    let rig = Rig::simulated(Schedule::Late { patience: 3 });
    let (sim, stream, pool) = (rig.sim.clone().unwrap(), rig.stream(), pool(&rig));
    let mut values = DeviceVec::<u32, _>::uninit(COUNT, &stream, &pool).unwrap();
    let resource = Limiting::new(PinnedHost::new(&rig.device), 4 << 20);
    let before = rig.driver.calls();
    let fresh = || PinnedVec::<u32, _>::zeroed(COUNT, &stream, &resource).unwrap();
    let host = fresh();
    let waits = rig.driver.calls().since(&before).count("cuStreamSynchronize");
    assert_eq!(waits, 0, "nobody used it before");
    begin_capture(&rig, stream.handle().raw());
    let error = host.upload(&mut values.as_mut_slice()).unwrap_err();
    assert!(matches!(error, Error::StreamCapturing), "{error}");
    let error = fresh().download(&values.as_slice()).unwrap_err();
    assert!(matches!(error, Error::StreamCapturing), "{error}");
    assert_eq!(end_capture(&rig, stream.handle().raw()), 0);
    assert_eq!(resource.allocated_bytes(), 0);
    for (refuses_the_wait, left) in [(false, 0), (true, 1)] {
        let host = fresh();
        let bytes = resource.allocated_bytes();
        sim.fail_nth("cuEventRecord", 1, CUresult::CUDA_ERROR_UNKNOWN);
        if refuses_the_wait {
            sim.fail_nth("cuStreamSynchronize", 1, CUresult::CUDA_ERROR_UNKNOWN);
        }
        let error = host.upload(&mut values.as_mut_slice()).unwrap_err();
        assert!(matches!(error, Error::Driver { call: "cuEventRecord", .. }), "{error}");
        assert_eq!(resource.allocated_bytes(), left * bytes);
        sim.clear_faults();
        stream.synchronize().unwrap();
    }
}
