//! Sizes from nothing to more than there is, and alignments.

use vpmm::{Error, MemoryResource, StreamHandle};

use crate::subjects::each;
use crate::watched::Watched;

const PIB: usize = 1 << 50;

#[test]
fn every_size_is_served_or_refused_by_name() {
    each(|rig, resource| {
        let watched = Watched::new(rig, resource);
        let stream = rig.stream();
        let most = resource.facts().max_bytes.unwrap_or(usize::MAX);
        for bytes in [0, 4, 1 << 10, 1 << 20, 1 << 30] {
            let first = watched.try_allocate(bytes, 256, &stream);
            if bytes > most {
                let error = first.expect_err("more than the resource can ever give");
                assert!(matches!(error, Error::RequestTooLong { .. }), "{error}");
                continue;
            }
            let first = first.expect("memory");
            let second = watched.allocate(bytes, &stream);
            assert!(bytes == 0 || first.ptr != second.ptr);
            watched.free(first, &stream);
            watched.free(second, &stream);
        }
        watched.assert_intact();
    });
}

#[test]
fn what_there_is_not_is_refused_and_changes_nothing() {
    each(|rig, resource| {
        let watched = Watched::new(rig, resource);
        let stream = rig.stream();
        let kept = watched.allocate(100_000, &stream);
        let held = resource.held_bytes();
        for bytes in [PIB, usize::MAX / 2, usize::MAX - 10, usize::MAX] {
            let error = watched.try_allocate(bytes, 256, &stream).expect_err("no such memory");
            let by_name = matches!(
                error,
                Error::SizeOverflow { .. }
                    | Error::RequestTooLong { .. }
                    | Error::AddressSpaceExhausted { .. }
            );
            // What the driver says to sizes that are no sizes is its own affair.
            let by_driver = bytes > PIB && matches!(error, Error::Driver { .. });
            assert!(error.is_out_of_memory() || by_name || by_driver, "{bytes}: {error}");
            if bytes == PIB && resource.facts().max_bytes.is_none() {
                assert!(error.to_string().to_lowercase().replace('_', " ").contains("out of"));
            }
        }
        assert!(resource.held_bytes() <= held, "a refused request left something");
        let next = watched.allocate(100_000, &stream);
        watched.free(next, &stream);
        watched.free(kept, &stream);
        watched.assert_intact();
    });
}

#[test]
fn alignments_are_kept_or_refused_by_name() {
    each(|rig, resource| {
        let watched = Watched::new(rig, resource);
        let stream = rig.stream();
        let most = resource.facts().max_align;
        assert!(resource.facts().min_align >= 256 && most >= resource.facts().min_align);
        let mut kept = Vec::new();
        for power in 0..=16 {
            let align = 1 << power;
            match watched.try_allocate(1000, align, &stream) {
                Ok(held) => kept.push(held),
                Err(Error::AlignmentUnsupported { .. }) => assert!(align > most),
                Err(error) => panic!("{align}: {error}"),
            }
        }
        assert!(kept.len() >= 9, "every alignment up to 256 bytes is served");
        for bytes in [0, 1000] {
            for align in [0, 3, 255, 257, usize::MAX] {
                let refused = resource.allocate(bytes, align, stream.handle());
                assert!(matches!(refused, Err(Error::BadAlignment { .. })), "{align}: {refused:?}");
            }
            for align in [2 * most, 1 << 63] {
                let refused = resource.allocate(bytes, align, stream.handle());
                let by_name = matches!(refused, Err(Error::AlignmentUnsupported { .. }));
                assert!(by_name, "{bytes} at {align}: {refused:?}");
            }
        }
        kept.into_iter().for_each(|held| watched.free(held, &stream));
        watched.assert_intact();
    });
}

#[test]
fn nothing_can_be_allocated_and_freed_anywhere() {
    each(|rig, resource| {
        let resource: &dyn MemoryResource = resource;
        for stream in [StreamHandle::LEGACY, StreamHandle::PER_THREAD, rig.stream().handle()] {
            let ptr = resource.allocate(0, 256, stream).expect("nothing");
            assert!(ptr.is_null());
            resource.deallocate(ptr, 0, 256, stream).expect("nothing");
        }
    });
}
