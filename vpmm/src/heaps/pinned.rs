//! Page-locked host memory, and copies between it and the device that the host can wait for.

use std::cell::{Cell, RefCell};
use std::ffi::c_void;
use std::ptr::{self, NonNull};

use crate::capture::BesideCaptures;
use crate::device::{Device, StreamHandle};
use crate::driver::Failure;
use crate::event::Event;

/// Page-locked memory of the host, until drop.
pub(super) struct Pinned {
    device: Device,
    memory: NonNull<u8>,
    bytes: usize,
}

// SAFETY: the memory is this value's alone, and the driver frees it from any thread.
unsafe impl Send for Pinned {}

impl Pinned {
    /// Slow: the system has to find and lock every page.
    pub(super) fn new(device: &Device, bytes: u64) -> Result<Self, Failure> {
        let driver = device.driver();
        let _beside = BesideCaptures::enter(driver)?;
        let mut memory: *mut c_void = ptr::null_mut();
        // SAFETY: the pointer is to a live pointer; the caller has the context current.
        unsafe { driver.cuMemHostAlloc(&mut memory, bytes as usize, 0) }?;
        let code = cuda_sys::types::CUresult::CUDA_ERROR_OUT_OF_MEMORY;
        let refused = Failure { call: "cuMemHostAlloc", code };
        let memory = NonNull::new(memory.cast()).ok_or(refused)?;
        Ok(Self { device: device.clone(), memory, bytes: bytes as usize })
    }

    pub(super) fn bytes(&self) -> u64 {
        self.bytes as u64
    }

    /// The contents, once copies into it have been waited for.
    ///
    /// # Safety
    /// No copy into the memory is under way.
    pub(super) unsafe fn slice(&self) -> &[u8] {
        // SAFETY: as long as allocated, by the driver, which zeroes nothing but whose pages are
        // the process's and initialised; nobody writes meanwhile, by the caller's word.
        unsafe { std::slice::from_raw_parts(self.memory.as_ptr(), self.bytes) }
    }

    /// # Safety
    /// No copy from or into the memory is under way.
    pub(super) unsafe fn slice_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `slice`, and the borrow is the only one.
        unsafe { std::slice::from_raw_parts_mut(self.memory.as_ptr(), self.bytes) }
    }

    /// The address of a byte of it, `None` where a range does not fit.
    fn at(&self, offset: u64, bytes: u64) -> Option<*mut c_void> {
        let end = offset.checked_add(bytes)?;
        if end > self.bytes() {
            return None;
        }
        // SAFETY: the offset is within the memory.
        Some(unsafe { self.memory.as_ptr().add(offset as usize) }.cast())
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        let driver = self.device.driver();
        let free = || {
            let _context = self.device.enter()?;
            let _beside = BesideCaptures::enter(driver)?;
            // SAFETY: allocated in `new`, freed once here; copies were waited for, or the value is
            // in limbo until they were.
            Ok::<(), crate::Error>(unsafe { driver.cuMemFreeHost(self.memory.as_ptr().cast()) }?)
        };
        // Once more, for what passes; after that it is the driver's until the process ends.
        let _ = free().or_else(|_| free());
    }
}

/// Copies on one stream, in order.
pub(super) struct Copies<'a> {
    device: &'a Device,
    stream: StreamHandle,
    /// Memory that copies may still use, which could not be waited for.
    limbo: RefCell<Vec<Pinned>>,
    lost: Cell<bool>,
}

impl<'a> Copies<'a> {
    /// The device's context is current while this is used.
    pub(super) fn on(device: &'a Device, stream: StreamHandle) -> Self {
        Self { device, stream, limbo: RefCell::default(), lost: Cell::new(false) }
    }

    /// Enqueues a copy from the device.
    ///
    /// # Safety
    /// The memory stays until the copy has been waited for, and nobody else uses that part of it.
    /// The device's addresses stay mapped as long.
    pub(super) unsafe fn save(
        &self,
        to: &Pinned,
        offset: u64,
        from: u64,
        bytes: u64,
    ) -> Result<(), Failure> {
        let to = to.at(offset, bytes).ok_or(OUT_OF_RANGE)?;
        // SAFETY: the range is within the memory; the rest is the caller's word.
        unsafe {
            self.device.driver().cuMemcpyDtoHAsync_v2(to, from, bytes as usize, self.stream.raw())
        }
    }

    /// Enqueues a copy to the device.
    ///
    /// # Safety
    /// As [`save`](Self::save).
    pub(super) unsafe fn load(
        &self,
        from: &Pinned,
        offset: u64,
        to: u64,
        bytes: u64,
    ) -> Result<(), Failure> {
        let from = from.at(offset, bytes).ok_or(OUT_OF_RANGE)?;
        // SAFETY: as in `save`.
        unsafe {
            self.device.driver().cuMemcpyHtoDAsync_v2(to, from, bytes as usize, self.stream.raw())
        }
    }

    /// A mark behind what was enqueued so far.
    pub(super) fn mark(&self) -> Result<Done<'a>, Failure> {
        let driver = self.device.driver();
        let done = Done { device: self.device, event: Event::new(driver)? };
        done.event.record(driver, self.stream)?;
        Ok(done)
    }

    /// Waits for everything that was enqueued on the stream so far: by an event, and should the
    /// driver refuse that, for the stream.
    pub(super) fn wait(&self) -> Result<(), Failure> {
        let Err(failure) = self.mark().and_then(Done::wait) else { return Ok(()) };
        let driver = self.device.driver();
        let waited = BesideCaptures::enter(driver).and_then(|_beside| {
            // SAFETY: whoever made the handle vouches that its stream is alive.
            unsafe { driver.cuStreamSynchronize(self.stream.raw()) }
        });
        self.lost.set(waited.is_err());
        waited.map_err(|_| failure)
    }

    /// Whether copies may be under way that could not be waited for.
    pub(super) fn are_lost(&self) -> bool {
        self.lost.get()
    }

    /// Keeps memory that such copies may use.
    pub(super) fn strand(&self, memory: impl IntoIterator<Item = Pinned>) {
        self.limbo.borrow_mut().extend(memory);
    }

    pub(super) fn into_limbo(self) -> Vec<Pinned> {
        self.limbo.into_inner()
    }
}

/// A range that is not within the memory it was meant for.
const OUT_OF_RANGE: Failure = Failure {
    call: "cuMemcpyDtoHAsync_v2",
    code: cuda_sys::types::CUresult::CUDA_ERROR_INVALID_VALUE,
};

/// A point of a stream that the host can wait for.
pub(super) struct Done<'a> {
    device: &'a Device,
    event: Event,
}

impl Done<'_> {
    /// Waits on the host, for this point only.
    pub(super) fn wait(self) -> Result<(), Failure> {
        let driver = self.device.driver();
        let _beside = BesideCaptures::enter(driver)?;
        self.event.wait(driver)
    }
}

impl Drop for Done<'_> {
    fn drop(&mut self) {
        // SAFETY: made in `Copies::mark`, known to nobody else.
        let _ = unsafe { self.event.destroy(self.device.driver()) };
    }
}
