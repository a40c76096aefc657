//! A stream that does not go on.

use std::ffi::c_void;
use std::ptr;
use std::sync::atomic::{AtomicU32, Ordering};

use cuda_sys::types::*;
use vpmm::StreamHandle;

use super::calls::{Calls, call};

/// A kernel that runs on a stream until it is released, or this is dropped: nothing that is enqueued
/// behind it finishes before, no event among it.
///
/// Meanwhile whatever waits for the device, or for that stream, waits for ever.
#[derive(Debug)]
pub struct Stall<'a> {
    calls: Calls<'a>,
    module: CUmodule,
    /// In the host's memory, where the kernel looks. Null where there is none yet.
    flag: *mut u32,
}

// SAFETY: a module's handle may be used from any thread, the driver locks; the flag is written as a
// whole.
unsafe impl Send for Stall<'_> {}
// SAFETY: as above.
unsafe impl Sync for Stall<'_> {}

impl<'a> Stall<'a> {
    /// Enqueues the kernel.
    ///
    /// # Errors
    /// What the driver answers.
    pub fn new(calls: Calls<'a>, stream: StreamHandle) -> vpmm::Result<Self> {
        let mut module = ptr::null_mut();
        let image = cuda_sim::kernels::PTX.as_ptr().cast::<c_void>();
        // SAFETY: the text ends in NUL, as the driver wants it of PTX.
        unsafe { call!(calls, 0, cuModuleLoadData(&mut module, image))? };
        // Owns the module from here on, so that a failure below unloads it.
        let mut stall = Self { calls, module, flag: ptr::null_mut() };
        let calls = &stall.calls;
        let mut function = ptr::null_mut();
        // SAFETY: the module is loaded, and the name ends in NUL.
        unsafe {
            call!(calls, 0, cuModuleGetFunction(&mut function, module, c"vpmm_spin".as_ptr()))?
        };
        let bytes = size_of::<u64>();
        let mut host = ptr::null_mut();
        // SAFETY: the pointer is to a live one of the right type.
        unsafe { call!(calls, 0, cuMemHostAlloc(&mut host, bytes, CU_MEMHOSTALLOC_DEVICEMAP))? };
        stall.flag = host.cast();
        stall.write(0);
        let mut address: CUdeviceptr = 0;
        // SAFETY: the pointer is to a live CUdeviceptr, `host` was allocated to be mapped.
        unsafe { call!(calls, 0, cuMemHostGetDevicePointer_v2(&mut address, host, 0))? };
        let mut arguments = [ptr::from_mut(&mut address).cast::<c_void>()];
        let (none, arguments) = (ptr::null_mut(), arguments.as_mut_ptr());
        // SAFETY: the kernel takes this one parameter of 8 bytes, which the driver copies before it
        // returns; the flag lives until the kernel has ended.
        unsafe {
            call!(
                calls,
                0,
                cuLaunchKernel(function, 1, 1, 1, 1, 1, 1, 0, stream.raw(), arguments, none)
            )?
        };
        Ok(stall)
    }

    /// Lets the stream go on.
    pub fn release(&self) {
        self.write(1);
    }

    fn write(&self, flag: u32) {
        if !self.flag.is_null() {
            // SAFETY: memory of the host that is freed at drop, aligned to a page. Who reads or writes
            // it does so at once, the kernel too.
            unsafe { AtomicU32::from_ptr(self.flag) }.store(flag, Ordering::Release);
        }
    }
}

/// Lets the stream go on, and waits for the device.
impl Drop for Stall<'_> {
    fn drop(&mut self) {
        self.release();
        let calls = &self.calls;
        // The kernel has ended after this, or the context is lost: nobody reads the flag any more.
        let _ = calls.synchronize();
        if !self.flag.is_null() {
            // SAFETY: allocated in `new`, freed once here. A failure leaves nothing to do.
            let _ = unsafe { call!(calls, 0, cuMemFreeHost(self.flag.cast())) };
        }
        // SAFETY: loaded in `new`, unloaded once here.
        let _ = unsafe { call!(calls, 0, cuModuleUnload(self.module)) };
    }
}
