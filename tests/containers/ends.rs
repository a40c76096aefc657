//! How containers end: in any order, with failures, without a panic.

use std::sync::Arc;
use std::sync::atomic::{AtomicU32, Ordering};

use cuda_sim::Schedule;
use cuda_sys::types::CUresult;
use vpmm::resource::{Callback, DeviceMalloc, PinnedHost};
use vpmm::{DeviceBuffer, DeviceScalar, DeviceVec, Error, MemoryResource, PinnedVec};

use crate::resources::{Counting, each, pool};
use crate::support::{Rig, call};

#[test]
fn everything_is_freed() {
    each(|rig, resource| {
        let stream = rig.stream();
        let counting = Arc::new(Counting::new(resource));
        {
            let any: &dyn MemoryResource = &*counting;
            let buffer = DeviceBuffer::zeroed(1000, &stream, any).unwrap();
            let values = DeviceVec::filled(1.5_f32, 300, &stream, any).unwrap();
            let scalar = DeviceScalar::new(1_u64, &stream, any).unwrap();
            counting.assert_live(3, 1000 + 1200 + 8);
            drop((scalar, buffer, values));
        }
        counting.assert_live(0, 0);
        // One that could not be filled is not left behind.
        counting.refuses.store(true, Ordering::Relaxed);
        assert!(DeviceBuffer::zeroed(10, &stream, &counting).is_err());
        counting.refuses.store(false, Ordering::Relaxed);
        counting.assert_live(0, 0);
    });
}

/// A resource that refuses to take memory back: drop says nothing, `release` tells.
#[test]
fn a_free_is_refused() {
    let rig = Rig::simulated(Schedule::Eager);
    let (stream, counting) = (rig.stream(), Counting::new(DeviceMalloc::new(&rig.device)));
    let buffers = [(); 2].map(|()| DeviceBuffer::zeroed(10, &stream, &counting).unwrap());
    counting.refuses.store(true, Ordering::Relaxed);
    let [dropped, released] = buffers;
    drop(dropped);
    let error = released.release().unwrap_err();
    assert!(matches!(error, Error::Unsupported { what: "patience" }), "{error}");
    counting.assert_live(2, 20);
}

/// Another context is current where a container is used and dropped.
#[test]
fn another_context_is_current() {
    let sim = cuda_sim::Simulator::builder().devices(2).build().unwrap();
    let rig = Rig::on(sim);
    let other = rig.driver.device(1).unwrap();
    let (stream, pool) = (rig.stream(), pool(&rig));
    let mut values = DeviceVec::from_slice(&[1_u32, 2, 3], &stream, &pool).unwrap();
    call!(rig.driver, cuCtxSetCurrent(other.context()));
    values.set(0, 7).unwrap();
    values.resize(100_000, 4).unwrap();
    assert_eq!(values.get(0).unwrap() + values.get(99_999).unwrap(), 11);
    let pinned = PinnedVec::from_slice(&[5_u32], &stream, PinnedHost::new(&rig.device)).unwrap();
    let pinned = pinned.upload(&mut values.slice_mut(1..2).unwrap()).unwrap().wait().unwrap();
    assert_eq!((values.get(1).unwrap(), pinned[0]), (5, 5));
    drop((values, pinned, stream));
    drop(pool);
    let mut current = std::ptr::null_mut();
    call!(rig.driver, cuCtxGetCurrent(&mut current));
    assert_eq!(current, other.context(), "the caller's context is as it was");
    rig.assert_clean();
}

/// A container outlives its context.
#[test]
fn the_context_is_lost() {
    let rig = Rig::simulated(Schedule::Eager);
    let stream = rig.stream();
    let pool = pool(&rig);
    let mut values = DeviceVec::from_slice(&[1_u32, 2, 3], &stream, &pool).unwrap();
    let pinned = PinnedVec::from_slice(&[5_u32; 3], &stream, PinnedHost::new(&rig.device)).unwrap();
    let transfer = pinned.upload(&mut values.as_mut_slice()).unwrap();
    rig.sim.as_ref().unwrap().lose_device(0, CUresult::CUDA_ERROR_ECC_UNCORRECTABLE);
    assert!(matches!(values.get(0), Err(Error::ContextLost { .. })));
    assert!(matches!(values.set(0, 1), Err(Error::ContextLost { .. })));
    assert!(values.resize(1 << 20, 0).is_err());
    assert!(values.set_stream(&vpmm::Stream::legacy(&rig.device)).is_err());
    drop(transfer);
    drop((values, stream));
    drop(pool);
    // Its own objects cannot be ended any more.
    std::mem::forget(rig);
}

/// What is released is freed once, and what takes no memory is not freed at all.
#[test]
fn memory_is_freed_once() {
    let rig = Rig::simulated(Schedule::Eager);
    let sim = rig.sim.as_ref().unwrap();
    let (stream, malloc) = (rig.stream(), DeviceMalloc::new(&rig.device));
    let frees = AtomicU32::new(0);
    let resource = Callback::new(
        malloc.facts(),
        |bytes, align, stream| malloc.allocate(bytes, align, stream),
        |ptr, bytes, align, stream| {
            frees.fetch_add(1, Ordering::Relaxed);
            malloc.deallocate(ptr, bytes, align, stream)
        },
    );
    let fresh = |len| DeviceBuffer::zeroed(len, &stream, &resource).unwrap();
    fresh(10).release().unwrap();
    drop(fresh(10));
    assert_eq!(frees.load(Ordering::Relaxed), 2);
    let nothing = fresh(0);
    nothing.record_stream(&stream).unwrap();
    nothing.release().unwrap();
    assert_eq!(frees.load(Ordering::Relaxed), 2);
    // Longer memory that the contents could not be copied to goes back, too.
    let mut grows = fresh(10);
    sim.fail_nth("cuMemcpyDtoDAsync_v2", 1, CUresult::CUDA_ERROR_UNKNOWN);
    grows.resize(1000).unwrap_err();
    assert_eq!((grows.len(), frees.load(Ordering::Relaxed)), (10, 3));
}
