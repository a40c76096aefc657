//! Wrong arguments: each a named error, and nothing changed.

use vpmm::caching::{CachingAllocator, CachingConfig};
use vpmm::{DevicePtr, Error, MemoryResource};

use crate::rig::MIB;
use crate::support::Rig;

#[test]
fn sizes_that_cannot_be_are_refused() {
    Rig::everywhere(|rig| {
        let (cached, stream) = (rig.cached(), rig.stream());
        let error = |bytes| cached.allocator.malloc(bytes, &stream).unwrap_err();
        assert!(matches!(error(0), Error::ZeroSize));
        assert!(matches!(error(usize::MAX), Error::SizeOverflow { .. }));
        assert!(matches!(error(usize::MAX - 511), Error::SizeOverflow { .. }));
        for bytes in [1 << 50, 1 << 62, usize::MAX >> 1] {
            let error = error(bytes);
            assert!(error.is_out_of_memory(), "{bytes}: {error}");
        }
        assert_eq!((cached.reserved(), cached.allocator.block_count()), (0, 0));
        assert_eq!(cached.allocator.stats().num_ooms, 3);
        cached.assert_intact();
    });
}

#[test]
fn wrong_pointers_are_named() {
    Rig::everywhere(|rig| {
        let (cached, stream) = (rig.cached(), rig.stream());
        let [first, second] = [(); 2].map(|()| cached.malloc(3 * MIB, &stream));
        let at = |address| DevicePtr::from_address(address);
        for wrong in [0, 1, first.address() - 1, first.address() + 20 * MIB, u64::MAX] {
            let error = cached.allocator.free(at(wrong)).unwrap_err();
            assert!(
                matches!(error, Error::ForeignPointer { address } if address == wrong),
                "{error}"
            );
        }
        for wrong in [first.address() + 1, first.address() + 3 * MIB - 1] {
            let error = cached.allocator.free(at(wrong)).unwrap_err();
            let start = first.address();
            assert!(
                matches!(error, Error::InteriorPointer { address, start: of } if address == wrong && of == start),
                "{error}"
            );
        }
        cached.free(first, &stream);
        for ptr in [first.ptr, at(first.address()), at(first.address() + MIB)] {
            let error = cached.allocator.free(ptr).unwrap_err();
            assert!(matches!(error, Error::DoubleFree { .. }), "{error}");
            assert!(cached.allocator.record_stream(ptr, &stream).is_err());
        }
        // The address is another allocation's now.
        let again = cached.malloc(2 * MIB, &stream);
        assert_eq!(again.address(), first.address());
        let error = cached.allocator.free(first.ptr).unwrap_err();
        assert!(matches!(error, Error::StalePointer { .. }), "{error}");
        // A bare address is as good as the pointer.
        cached.give_up(&again);
        cached.allocator.free(at(again.address())).unwrap();
        cached.free(second, &stream);
        cached.assert_intact();
    });
}

#[test]
fn sizes_and_alignments_given_back_are_checked() {
    Rig::everywhere(|rig| {
        let (cached, stream) = (rig.cached(), rig.stream());
        let (allocator, stream) = (&cached.allocator, stream.handle());
        let ptr = allocator.allocate(1000, 256, stream).unwrap();
        let error = allocator.deallocate(ptr, 1001, 256, stream).unwrap_err();
        assert!(
            matches!(error, Error::WrongSize { given_bytes: 1001, bytes: 1000, .. }),
            "{error}"
        );
        assert!(matches!(allocator.allocate(1, 3, stream), Err(Error::BadAlignment { align: 3 })));
        let most = allocator.facts().max_align;
        let error = allocator.allocate(1, 2 * most, stream).unwrap_err();
        assert!(matches!(error, Error::AlignmentUnsupported { .. }), "{error}");
        allocator.deallocate(ptr, 1000, 256, stream).unwrap();
        let nothing = allocator.allocate(0, 256, stream).unwrap();
        assert!(nothing.is_null());
        allocator.deallocate(nothing, 0, 256, stream).unwrap();
        assert!(allocator.deallocate(nothing, 1, 256, stream).is_err());
        cached.assert_intact();
    });
}

#[test]
fn settings_that_cannot_be_are_refused() {
    let rig = Rig::simulated(cuda_sim::Schedule::Eager);
    let refused = |change: &dyn Fn(&mut CachingConfig)| {
        let mut config = CachingConfig::default();
        change(&mut config);
        match CachingAllocator::new(&rig.device, &config) {
            Err(Error::Config { name, .. }) => name,
            Err(error) => panic!("{error}"),
            Ok(_) => panic!("{config:?} was taken"),
        }
    };
    for bytes in [1, (20 << 20) - 1] {
        assert_eq!(refused(&|of| of.max_split_size_bytes = Some(bytes)), "max_split_size_bytes");
    }
    let longer_segments = |of: &mut CachingConfig| {
        (of.max_split_size_bytes, of.large_segment_bytes) = (Some(32 << 20), 64 << 20);
    };
    assert_eq!(refused(&longer_segments), "max_split_size_bytes");
    assert_eq!(refused(&|of| of.max_non_split_rounding_bytes = 1), "max_non_split_rounding_bytes");
    assert_eq!(refused(&|of| of.large_segment_bytes = (20 << 20) + 512), "large_segment_bytes");
    assert_eq!(refused(&|of| of.large_segment_bytes = u64::MAX), "large_segment_bytes");
    for threshold in [0.0, 1.0, f64::NAN, -1.0] {
        let name = refused(&|of| of.garbage_collection_threshold = Some(threshold));
        assert_eq!(name, "garbage_collection_threshold");
    }
    for fraction in [-0.1, 1.1, f64::NAN] {
        assert_eq!(refused(&|of| of.memory_fraction = Some(fraction)), "memory_fraction");
        assert!(rig.cached().allocator.set_memory_fraction(fraction).is_err());
    }
}
