//! Wrong frees: found where the resource says so, harmless in any case that it finds.

use vpmm::resource::Checks;
use vpmm::{DevicePtr, Error, MemoryResource};

use crate::subjects::each;
use crate::watched::Watched;

#[test]
fn wrong_pointers_and_sizes_are_refused_and_change_nothing() {
    each(|rig, resource| {
        let checks = resource.facts().checks;
        if checks == Checks::Nothing {
            return;
        }
        let watched = Watched::new(rig, resource);
        let stream = rig.stream();
        let handle = stream.handle();
        let (kept, gone) = (watched.allocate(5000, &stream), watched.allocate(5000, &stream));
        watched.free(gone, &stream);
        let wrong = |ptr: DevicePtr, bytes: usize, what: &str| {
            let refused = resource.deallocate(ptr, bytes, 256, handle);
            assert!(refused.is_err(), "{what} was accepted");
        };
        wrong(gone.ptr, 5000, "a double free");
        let inside = DevicePtr::from_address(kept.ptr.address() + 256);
        wrong(inside, 5000, "a pointer inside an allocation");
        wrong(DevicePtr::from_address(0x1000), 5000, "a pointer from nowhere");
        wrong(DevicePtr::NULL, 5000, "a null pointer with a size");
        wrong(kept.ptr, 0, "an allocation without its size");
        if checks == Checks::PointersAndSizes {
            wrong(kept.ptr, 4999, "a size too small");
            wrong(kept.ptr, 5001, "a size too large");
            wrong(kept.ptr, 5 << 20, "a size of another kind");
            let one_bit_more = || {
                (13..usize::BITS)
                    .for_each(|bit| wrong(kept.ptr, 5000 | 1 << bit, "a size with a bit more"));
            };
            one_bit_more();
            if resource.facts().records_streams {
                resource.record_stream(kept.ptr, rig.stream().handle()).expect("noted");
                one_bit_more();
            }
        }
        // One pointer is never handed out twice.
        let (a, b) = (watched.allocate(5000, &stream), watched.allocate(5000, &stream));
        for held in [a, b, kept] {
            watched.free(held, &stream);
        }
        watched.assert_intact();
    });
}

#[test]
fn resources_are_equal_to_what_they_share_memory_with() {
    each(|_, resource| {
        let other: &dyn MemoryResource = resource;
        assert!(resource.is_equal(other) && other.is_equal(&resource));
        let host = vpmm::resource::HostMalloc::new();
        assert!(!resource.is_equal(&host) && !host.is_equal(other));
    });
}

#[test]
fn a_failed_free_leaves_the_allocation_where_it_was() {
    each(|rig, resource| {
        let watched = Watched::new(rig, resource);
        let stream = rig.stream();
        if let Some(sim) = &rig.sim {
            let held = watched.allocate(5000, &stream);
            // Whatever driver calls a free makes, one of them fails; then it is made again.
            for call in 1..20 {
                let code = cuda_sys::types::CUresult::CUDA_ERROR_UNKNOWN;
                sim.fail_call(call, code);
                let result = resource.deallocate(held.ptr, held.bytes, 256, stream.handle());
                sim.clear_faults();
                match result {
                    Ok(()) => return,
                    Err(Error::Driver { .. }) => {
                        watched.check(&held, &stream);
                        stream.synchronize().expect("the stream finishes");
                    }
                    Err(error) => panic!("{error}"),
                }
            }
            panic!("the free never succeeded");
        }
    });
}
