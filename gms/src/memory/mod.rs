//! The physical memory of a layout: made, exported once, given back in the background.
//!
//! Nothing is mapped here and no context is made, so that a server loses nothing when the programs
//! that use the memory crash, and holds nothing on the device but the memory itself.

#![forbid(unsafe_code)]

mod reclaim;

pub use reclaim::Progress;

use std::os::fd::OwnedFd;
use std::sync::{Arc, Mutex, PoisonError};
use std::time::Instant;

use crate::cuda::{self, Cuda, CudaError, PhysicalHandle};
use reclaim::Reclaimer;

/// The memory of one allocation.
#[derive(Debug)]
pub struct Extent {
    handle: PhysicalHandle,
    /// What the driver exported, once; sending it makes the receiver's own.
    descriptor: Mutex<Option<Arc<OwnedFd>>>,
}

impl Extent {
    /// The descriptor that names the memory in other processes. The driver is asked the first time,
    /// some 17 µs on an H200.
    ///
    /// # Errors
    /// What the driver answers, for example where the process has no descriptors left.
    pub fn descriptor(&self) -> Result<Arc<OwnedFd>, CudaError> {
        let mut cached = self.descriptor.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(file) = &*cached {
            return Ok(Arc::clone(file));
        }
        let started = Instant::now();
        let file = Arc::new(self.handle.export()?);
        tracing::debug!(us = since(started), "memory exported");
        *cached = Some(Arc::clone(&file));
        Ok(file)
    }

    /// Bytes of the memory.
    pub fn bytes(&self) -> u64 {
        self.handle.bytes()
    }
}

/// Makes the memory of one device, for a server.
#[derive(Debug)]
pub struct Memory {
    cuda: Cuda,
    total_bytes: u64,
    reclaimer: Reclaimer,
}

impl Memory {
    /// Initialises the driver, without a context.
    ///
    /// # Errors
    /// What the driver answers: no such device, no virtual memory management.
    pub fn open(driver: &cuda_sys::Driver, ordinal: u32) -> Result<Self, CudaError> {
        let cuda = Cuda::open(driver, ordinal)?;
        let total_bytes = cuda.total_bytes()?;
        Ok(Self { cuda, total_bytes, reclaimer: Reclaimer::start() })
    }

    /// How many devices a driver has.
    ///
    /// # Errors
    /// What the driver answers.
    pub fn devices(driver: &cuda_sys::Driver) -> Result<u32, CudaError> {
        cuda::device_count(driver)
    }

    /// The device's number.
    pub fn ordinal(&self) -> u32 {
        self.cuda.ordinal()
    }

    /// The device's identity, as `GPU-` and hexadecimal digits in five groups.
    ///
    /// # Errors
    /// What the driver answers.
    pub fn uuid(&self) -> Result<String, CudaError> {
        self.cuda.uuid()
    }

    /// All memory of the device.
    pub fn total_bytes(&self) -> u64 {
        self.total_bytes
    }

    /// What the sizes of allocations are multiples of.
    pub fn granularity(&self) -> u64 {
        self.cuda.granularity()
    }

    /// Bytes in whole granules, if the number fits.
    pub fn aligned(&self, bytes: u64) -> Option<u64> {
        self.cuda.aligned(bytes)
    }

    /// Makes memory, if there is any: `None` where the device has too little left.
    ///
    /// # Errors
    /// Any other answer of the driver.
    pub fn try_create(&self, bytes: u64) -> Result<Option<Arc<Extent>>, CudaError> {
        let started = Instant::now();
        match PhysicalHandle::create(&self.cuda, bytes) {
            Ok(handle) => {
                tracing::debug!(bytes, us = since(started), "memory made");
                Ok(Some(Arc::new(Extent { handle, descriptor: Mutex::new(None) })))
            }
            Err(error) if error.is_out_of_memory() => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// Has somebody told of memory that the driver does not take back.
    pub(crate) fn on_lost(&self, tell: impl Fn(CudaError) + Send + Sync + 'static) {
        self.cuda.on_lost(tell);
    }

    /// Gives memory back, in the background: a large layout takes the driver milliseconds.
    pub fn reclaim(&self, extents: Vec<Arc<Extent>>) {
        self.reclaimer.take(extents);
    }

    /// What is not given back by now is not waited for at the end: the driver may never come back from it.
    pub(crate) fn leave(&self) {
        self.reclaimer.leave();
    }

    /// How giving back goes on.
    pub fn progress(&self) -> &Progress {
        self.reclaimer.progress()
    }
}

/// Microseconds, for the log: what is told of a slow driver is told by the driver's own time.
fn since(started: Instant) -> f64 {
    started.elapsed().as_secs_f64() * 1e6
}
