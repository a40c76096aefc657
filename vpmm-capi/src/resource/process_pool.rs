//! The process's pool as a resource: with its tags, its graphs' pools and its history, as all that plugs
//! into the process has them.

use vpmm_core::resource::{Description, Facts, Identity};
use vpmm_core::{Device, DevicePtr, Error, MemoryResource, Pool, Result, StreamHandle};

use crate::pool::{of_pointer, to_pointer};
use crate::process::{self, Asked, Life};
use crate::service::heap as service;

pub(super) struct ProcessPool(&'static Pool);

impl ProcessPool {
    /// The process's pool that a pool is, if it is one.
    pub(super) fn of(pool: &Pool) -> Option<Self> {
        let is_it = |own: &&'static Pool| own.identity() == pool.identity();
        process::pools().into_iter().find(is_it).map(Self)
    }

    fn ordinal(&self) -> u32 {
        Pool::device(self.0).ordinal()
    }
}

impl MemoryResource for ProcessPool {
    fn allocate(&self, bytes: usize, align: usize, stream: StreamHandle) -> Result<DevicePtr> {
        let most = self.facts().max_align;
        if !align.is_power_of_two() {
            return Err(Error::BadAlignment { align });
        }
        if align > most {
            return Err(Error::AlignmentUnsupported { align, most });
        }
        let (device, raw) = (self.ordinal(), stream.raw().cast());
        // SAFETY: a stream that is given to a resource is alive, and nothing is assumed of its end.
        let made = unsafe { process::allocate(device, bytes, raw, Life::Unknown, Asked::Not) };
        made.map(of_pointer).map_err(Into::into)
    }

    fn deallocate(
        &self,
        ptr: DevicePtr,
        bytes: usize,
        _align: usize,
        stream: StreamHandle,
    ) -> Result<()> {
        match (ptr.is_null(), bytes) {
            (true, 0) => return Ok(()),
            (true, _) => return Err(Error::ForeignPointer { address: 0 }),
            (false, 0) => return Err(Error::ZeroSize),
            (false, _) => {}
        }
        let (device, raw) = (self.ordinal(), stream.raw().cast());
        // SAFETY: as above; who deallocates vouches that the memory is used no more.
        let freed = unsafe { process::free(device, to_pointer(ptr), raw, Life::Unknown) };
        freed.map_err(Into::into)
    }

    fn facts(&self) -> Facts {
        self.0.facts()
    }

    fn describe(&self) -> Description {
        self.0.describe()
    }

    fn identity(&self) -> Identity {
        self.0.identity()
    }

    fn device(&self) -> Option<&Device> {
        Some(Pool::device(self.0))
    }

    fn held_bytes(&self) -> Option<u64> {
        self.0.held_bytes()
    }

    fn record_stream(&self, ptr: DevicePtr, stream: StreamHandle) -> Result<()> {
        process::check_process()?;
        if let Some(heap) = service::of(ptr.address()) {
            return Ok(heap.record_stream(ptr, stream)?);
        }
        // By the bare pool: it finds memory of its tags and graphs by the address.
        Pool::record_stream(self.0, ptr, stream)
    }
}
