//! What only clients do: map memory, wait for the device, copy.

use std::ffi::c_void;
use std::marker::PhantomData;
use std::os::fd::OwnedFd;
use std::ptr::{self, NonNull};
use std::sync::Arc;

use cuda_sys::types::*;

use super::{Cuda, CudaError, PhysicalHandle, location};

/// A share in the device's primary context, which this process and its libraries have in common.
/// Clones are the same share.
#[derive(Clone, Debug)]
pub(crate) struct Context(Arc<Share>);

#[derive(Debug)]
struct Share {
    cuda: Cuda,
    raw: CUcontext,
}

// SAFETY: a context may be used from any thread; it is only ever made current by calls that the
// driver makes safe for threads.
unsafe impl Send for Share {}
// SAFETY: as for `Send`.
unsafe impl Sync for Share {}

/// A context is the thread's current one as long as this lives.
pub(crate) struct Current<'a> {
    context: &'a Context,
    /// Whether it was made that here; it is not where it was already, as in programs that use the
    /// device's runtime.
    is_pushed: bool,
    /// What is current is a matter of the thread.
    _thread: PhantomData<*mut ()>,
}

impl Context {
    pub(crate) fn retain(cuda: &Cuda) -> Result<Self, CudaError> {
        let mut raw = ptr::null_mut();
        // SAFETY: the pointer is to a live context handle, and the device was found at the start.
        unsafe { cuda.table().cuDevicePrimaryCtxRetain(&mut raw, cuda.0.device) }?;
        Ok(Self(Arc::new(Share { cuda: cuda.clone(), raw })))
    }

    pub(crate) fn cuda(&self) -> &Cuda {
        &self.0.cuda
    }

    /// Makes this the thread's current context, unless it is. Whoever makes several calls enters once
    /// for all of them: those within find it current.
    pub(crate) fn enter(&self) -> Result<Current<'_>, CudaError> {
        let (mut current, table) = (ptr::null_mut(), self.cuda().table());
        // SAFETY: the pointer is to a live context handle.
        unsafe { table.cuCtxGetCurrent(&mut current) }?;
        let is_pushed = current != self.0.raw;
        if is_pushed {
            // SAFETY: the context is alive while this has its share in it.
            unsafe { table.cuCtxPushCurrent_v2(self.0.raw) }?;
        }
        Ok(Current { context: self, is_pushed, _thread: PhantomData })
    }

    /// Waits until the device has done everything that was given to it in this context.
    pub(crate) fn synchronize(&self) -> Result<(), CudaError> {
        let _current = self.enter()?;
        // SAFETY: no arguments; a context is current.
        unsafe { self.cuda().table().cuCtxSynchronize() }
    }

    /// Opens a whole range of mappings to the device, for reading or also for writing.
    ///
    /// The caller vouches that no work is under way that the change would take rights from.
    pub(crate) fn set_access(&self, at: u64, bytes: u64, write: bool) -> Result<(), CudaError> {
        let flags = if write {
            CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        } else {
            CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READ
        };
        let access = CUmemAccessDesc { location: location(self.cuda().ordinal()), flags };
        let _current = self.enter()?;
        // SAFETY: the pointer is to one live descriptor, as the count says; a range that is no
        // whole mapping is answered with an error.
        unsafe { self.cuda().table().cuMemSetAccess(at, bytes as usize, &access, 1) }
    }
}

impl Drop for Current<'_> {
    fn drop(&mut self) {
        if !self.is_pushed {
            return;
        }
        let mut popped = ptr::null_mut();
        // SAFETY: the pointer is to a live context handle; what was pushed is still on the stack.
        let _ = unsafe { self.context.cuda().table().cuCtxPopCurrent_v2(&mut popped) };
    }
}

impl Drop for Share {
    fn drop(&mut self) {
        // SAFETY: the share was taken in `retain` and is given back once.
        let _ = unsafe { self.cuda.table().cuDevicePrimaryCtxRelease_v2(self.cuda.0.device) };
    }
}

/// A range of addresses, given back when this is dropped. Nothing may be mapped there then.
#[derive(Debug)]
pub(crate) struct Reservation {
    context: Context,
    address: u64,
    bytes: u64,
}

impl Reservation {
    pub(crate) fn new(context: &Context, bytes: u64) -> Result<Self, CudaError> {
        Self::aligned(context, bytes, context.cuda().granularity())
    }

    /// Addresses that begin at a multiple of a power of two.
    pub(crate) fn aligned(
        context: &Context,
        bytes: u64,
        alignment: u64,
    ) -> Result<Self, CudaError> {
        let (mut address, table) = (0, context.cuda().table());
        let (size, alignment) = (bytes as usize, alignment as usize);
        let _current = context.enter()?;
        // SAFETY: the pointer is to a live address; there is no hint, and flags must be 0.
        unsafe { table.cuMemAddressReserve(&mut address, size, alignment, 0, 0) }?;
        Ok(Self { context: context.clone(), address, bytes })
    }

    pub(crate) fn address(&self) -> u64 {
        self.address
    }
}

impl Drop for Reservation {
    fn drop(&mut self) {
        let (table, bytes) = (self.context.cuda().table(), self.bytes as usize);
        let _current = self.context.enter();
        // SAFETY: exactly the range that was reserved; where something is mapped in it still, the
        // driver refuses and the addresses are lost, nothing else.
        if let Err(error) = unsafe { table.cuMemAddressFree(self.address, bytes) } {
            tracing::error!(%error, address = self.address, "addresses could not be given back");
        }
    }
}

/// Physical memory at an address. It keeps the memory alive; nobody may use the address any more
/// when this is dropped.
#[derive(Debug)]
pub(crate) struct Mapping {
    context: Context,
    handle: PhysicalHandle,
    address: u64,
}

impl Mapping {
    /// Maps memory that another process exported at an address of a reservation. Gives no access
    /// yet. The descriptor is of no further use.
    pub(crate) fn import(
        context: &Context,
        file: &OwnedFd,
        bytes: u64,
        address: u64,
    ) -> Result<Self, CudaError> {
        let cuda = context.cuda();
        let _current = context.enter()?;
        let handle = PhysicalHandle::import(cuda, file, bytes)?;
        // SAFETY: the handle is alive; a range that is no free part of a reservation, or not of the
        // memory's size, is answered with an error; offset and flags must be 0.
        unsafe { cuda.table().cuMemMap(address, bytes as usize, 0, handle.raw, 0) }?;
        Ok(Self { context: context.clone(), handle, address })
    }
}

impl Drop for Mapping {
    fn drop(&mut self) {
        let (table, bytes) = (self.context.cuda().table(), self.handle.bytes() as usize);
        let _current = self.context.enter();
        // SAFETY: exactly what was mapped, once. That no work uses it is the promise of whoever
        // drops this; the manager waits for the device first.
        if let Err(error) = unsafe { table.cuMemUnmap(self.address, bytes) } {
            tracing::error!(%error, address = self.address, "memory could not be unmapped");
        }
    }
}

/// One piece of memory at many addresses, end to end. As with [`Mapping`], nobody may use them any
/// more when this is dropped.
#[derive(Debug)]
pub(crate) struct Aliases {
    context: Context,
    /// What is mapped, as many times as it takes.
    block: Arc<PhysicalHandle>,
    address: u64,
    times: u64,
}

impl Aliases {
    /// Maps a block over so many bytes, a multiple of its own, at an address of a reservation. Gives no
    /// access yet.
    pub(crate) fn map(
        context: &Context,
        block: &Arc<PhysicalHandle>,
        address: u64,
        bytes: u64,
    ) -> Result<Self, CudaError> {
        let table = context.cuda().table();
        let _current = context.enter()?;
        let size = block.bytes();
        // Counts what is mapped, so that an error takes it away again.
        let mut made = Self { context: context.clone(), block: block.clone(), address, times: 0 };
        while made.times * size < bytes {
            let at = address + made.times * size;
            // SAFETY: as in `Mapping::import`.
            unsafe { table.cuMemMap(at, size as usize, 0, block.raw, 0) }?;
            made.times += 1;
        }
        Ok(made)
    }
}

impl Drop for Aliases {
    fn drop(&mut self) {
        if self.times == 0 {
            return;
        }
        let bytes = (self.times * self.block.bytes()) as usize;
        let _current = self.context.enter();
        // SAFETY: whole mappings end to end, once; as in `Mapping`.
        if let Err(error) = unsafe { self.context.cuda().table().cuMemUnmap(self.address, bytes) } {
            tracing::error!(%error, address = self.address, "memory could not be unmapped");
        }
    }
}

/// Page-locked memory of the host, and the stream that copies to and from it.
#[derive(Debug)]
pub(crate) struct HostBuffer<'a> {
    context: &'a Context,
    memory: NonNull<u8>,
    bytes: usize,
}

// SAFETY: the memory is this value's alone, and page-locked memory may be used and freed from any
// thread.
unsafe impl Send for HostBuffer<'_> {}

impl<'a> HostBuffer<'a> {
    pub(crate) fn new(context: &'a Context, bytes: usize) -> Result<Self, CudaError> {
        let _current = context.enter()?;
        let mut memory = ptr::null_mut();
        // SAFETY: the pointer is to a live pointer; a context is current.
        unsafe { context.cuda().table().cuMemAllocHost_v2(&mut memory, bytes) }?;
        let code = CUresult::CUDA_ERROR_OUT_OF_MEMORY;
        let memory = NonNull::new(memory.cast::<u8>())
            .ok_or(CudaError::Call { call: "cuMemAllocHost_v2", code })?;
        // SAFETY: so many bytes were just allocated there; from here on they have a value.
        unsafe { memory.as_ptr().write_bytes(0, bytes) };
        Ok(Self { context, memory, bytes })
    }

    pub(crate) fn bytes(&self) -> &[u8] {
        // SAFETY: the memory is allocated, has been written whole, and is this value's; copies of
        // the device into it need `&mut self` and have ended when they return.
        unsafe { std::slice::from_raw_parts(self.memory.as_ptr(), self.bytes) }
    }

    pub(crate) fn bytes_mut(&mut self) -> &mut [u8] {
        // SAFETY: as in `bytes`, and nobody else has a reference.
        unsafe { std::slice::from_raw_parts_mut(self.memory.as_ptr(), self.bytes) }
    }
}

impl Drop for HostBuffer<'_> {
    fn drop(&mut self) {
        let Ok(_current) = self.context.enter() else { return };
        // SAFETY: allocated by `new` and freed once; no copy is under way, as each is waited for.
        let _ = unsafe { self.context.cuda().table().cuMemFreeHost(self.memory.as_ptr().cast()) };
    }
}

/// A stream for copies.
#[derive(Debug)]
pub(crate) struct Stream<'a> {
    context: &'a Context,
    raw: CUstream,
}

// SAFETY: a stream may be used from any thread.
unsafe impl Send for Stream<'_> {}

/// The flag of a stream that does not wait for the legacy default stream.
const NON_BLOCKING: u32 = 1;

impl<'a> Stream<'a> {
    pub(crate) fn new(context: &'a Context) -> Result<Self, CudaError> {
        let _current = context.enter()?;
        let mut raw = ptr::null_mut();
        // SAFETY: the pointer is to a live stream handle; a context is current.
        unsafe { context.cuda().table().cuStreamCreate(&mut raw, NON_BLOCKING) }?;
        Ok(Self { context, raw })
    }

    /// Copies from the device, and waits until the bytes are there.
    pub(crate) fn read(
        &self,
        from: u64,
        to: &mut HostBuffer<'_>,
        bytes: usize,
    ) -> Result<(), CudaError> {
        let table = self.context.cuda().table();
        let bytes = bytes.min(to.bytes);
        let _current = self.context.enter()?;
        let to = to.memory.as_ptr().cast::<c_void>();
        // SAFETY: the buffer has so many bytes and is borrowed until the copy has ended; a range
        // that is not mapped is answered with an error.
        unsafe { table.cuMemcpyDtoHAsync_v2(to, from, bytes, self.raw) }?;
        // SAFETY: the stream is alive while this is.
        unsafe { table.cuStreamSynchronize(self.raw) }
    }

    /// Copies to the device, and waits until the bytes are there.
    pub(crate) fn write(
        &self,
        to: u64,
        from: &HostBuffer<'_>,
        bytes: usize,
    ) -> Result<(), CudaError> {
        let table = self.context.cuda().table();
        let bytes = bytes.min(from.bytes);
        let _current = self.context.enter()?;
        let from = from.memory.as_ptr().cast::<c_void>();
        // SAFETY: as in `read`.
        unsafe { table.cuMemcpyHtoDAsync_v2(to, from, bytes, self.raw) }?;
        // SAFETY: the stream is alive while this is.
        unsafe { table.cuStreamSynchronize(self.raw) }
    }
}

impl Drop for Stream<'_> {
    fn drop(&mut self) {
        let Ok(_current) = self.context.enter() else { return };
        // SAFETY: made by `new` and destroyed once.
        let _ = unsafe { self.context.cuda().table().cuStreamDestroy_v2(self.raw) };
    }
}
