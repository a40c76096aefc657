//! Pointers to resources are resources.

#![forbid(unsafe_code)]

use std::sync::Arc;

use super::description::Description;
use super::facts::Facts;
use super::identity::Identity;
use super::memory_resource::MemoryResource;
use crate::device::{Device, StreamHandle};
use crate::error::Result;
use crate::units::DevicePtr;

macro_rules! forward {
    ($( $pointer:ty ),*) => { $(
        impl<R: MemoryResource + ?Sized> MemoryResource for $pointer {
            #[inline]
            fn allocate(&self, bytes: usize, align: usize, stream: StreamHandle) -> Result<DevicePtr> {
                (**self).allocate(bytes, align, stream)
            }

            #[inline]
            fn deallocate(
                &self,
                ptr: DevicePtr,
                bytes: usize,
                align: usize,
                stream: StreamHandle,
            ) -> Result<()> {
                (**self).deallocate(ptr, bytes, align, stream)
            }

            fn facts(&self) -> Facts {
                (**self).facts()
            }

            fn describe(&self) -> Description {
                (**self).describe()
            }

            fn identity(&self) -> Identity {
                (**self).identity()
            }

            fn device(&self) -> Option<&Device> {
                (**self).device()
            }

            fn held_bytes(&self) -> Option<u64> {
                (**self).held_bytes()
            }

            fn record_stream(&self, ptr: DevicePtr, stream: StreamHandle) -> Result<()> {
                (**self).record_stream(ptr, stream)
            }

            fn is_equal(&self, other: &dyn MemoryResource) -> bool {
                (**self).is_equal(other)
            }
        }
    )* };
}

forward!(&R, Box<R>, Arc<R>);
