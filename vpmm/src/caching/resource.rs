//! The allocator as a memory resource.

#![forbid(unsafe_code)]

use super::allocator::CachingAllocator;
use super::config::CachingConfig;
use super::core::Core;
use crate::device::{Device, StreamHandle};
use crate::error::{Error, Result};
use crate::resource::{
    Checks, Description, Facts, Identity, MemoryResource, check_align, is_of_nothing,
};
use crate::units::DevicePtr;

/// A free on another stream than the allocation's keeps the memory until everything enqueued there
/// has finished, and then gives it to the allocation's stream. Handles of one allocator are equal.
impl MemoryResource for CachingAllocator {
    /// # Errors
    /// Those of [`CachingAllocator::malloc`], but for [`Error::ZeroSize`]; [`Error::BadAlignment`],
    /// [`Error::AlignmentUnsupported`].
    #[inline]
    fn allocate(&self, bytes: usize, align: usize, stream: StreamHandle) -> Result<DevicePtr> {
        check_align(align, self.core().align)?;
        if bytes == 0 { Ok(DevicePtr::NULL) } else { self.malloc(bytes, stream) }
    }

    /// # Errors
    /// Those of [`CachingAllocator::free`] and of [`CachingAllocator::record_stream`];
    /// [`Error::WrongSize`].
    #[inline]
    fn deallocate(
        &self,
        ptr: DevicePtr,
        bytes: usize,
        _align: usize,
        stream: StreamHandle,
    ) -> Result<()> {
        if is_of_nothing(ptr, bytes)? {
            return Ok(());
        }
        let given_bytes = bytes as u64;
        self.core().free_on(ptr, stream, |block| {
            let bytes = block.requested.get();
            if bytes == given_bytes {
                return Ok(());
            }
            Err(Error::WrongSize { address: block.address(), given_bytes, bytes })
        })
    }

    fn facts(&self) -> Facts {
        let (upstream, align) = (self.upstream().facts(), self.core().align);
        let divisions = self.config().roundup_power2_divisions;
        let most_bytes = Core::most_bytes_over(&upstream);
        let most_bytes = most_bytes.map(|most| divisions.longest(most) as usize);
        upstream
            .with_stream_order(true)
            .with_recorded_streams(true)
            .aligned(align, align)
            .with_max_bytes(most_bytes)
            .with_checks(Checks::PointersAndSizes)
    }

    fn describe(&self) -> Description {
        let config = self.config();
        let mut of = Description::new("caching");
        if let Some(bytes) = config.max_split_size_bytes {
            of = of.with("max_split_size_bytes", bytes);
        }
        let initial = CachingConfig::default();
        for (name, bytes, at_first) in [
            (
                "max_non_split_rounding_bytes",
                config.max_non_split_rounding_bytes,
                initial.max_non_split_rounding_bytes,
            ),
            ("large_segment_bytes", config.large_segment_bytes, initial.large_segment_bytes),
        ] {
            if bytes != at_first {
                of = of.with(name, bytes);
            }
        }
        if config.roundup_power2_divisions.any() {
            of = of.with("roundup_power2_divisions", config.roundup_power2_divisions);
        }
        if let Some(threshold) = config.garbage_collection_threshold {
            of = of.with("garbage_collection_threshold", threshold);
        }
        if let Some(fraction) = config.memory_fraction {
            of = of.with("memory_fraction", fraction);
        }
        of.over(self.upstream().describe())
    }

    fn identity(&self) -> Identity {
        self.core().identity
    }

    fn device(&self) -> Option<&Device> {
        Some(CachingAllocator::device(self))
    }

    fn held_bytes(&self) -> Option<u64> {
        Some(self.memory_reserved())
    }

    fn record_stream(&self, ptr: DevicePtr, stream: StreamHandle) -> Result<()> {
        CachingAllocator::record_stream(self, ptr, stream)
    }
}
