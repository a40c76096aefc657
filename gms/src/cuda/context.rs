//! What only clients do: map memory, wait for the device, copy.

use std::ffi::c_void;
use std::marker::PhantomData;
use std::os::fd::OwnedFd;
use std::ptr::{self, NonNull};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

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
    left: Mutex<Left>,
}

/// What nobody uses any more and the driver would not take away: ranges by address and bytes.
#[derive(Debug, Default)]
struct Left {
    mapped: Vec<(u64, u64)>,
    /// Reservations in which some of it is. Others could have their addresses once they are given back.
    reserved: Vec<(u64, u64)>,
}

impl Left {
    fn is_mapped_in(&self, (start, bytes): (u64, u64)) -> bool {
        self.mapped.iter().any(|(address, _)| (start..start + bytes).contains(address))
    }
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
        Ok(Self(Arc::new(Share { cuda: cuda.clone(), raw, left: Mutex::default() })))
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

    fn left(&self) -> MutexGuard<'_, Left> {
        self.0.left.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Tries once more what the driver would not unmap when it was dropped.
    ///
    /// # Errors
    /// The first that it refuses again, of those at addresses that matter to the caller.
    pub(crate) fn unmap_left(&self, matters: impl Fn(u64) -> bool) -> Result<(), CudaError> {
        let mut left = self.left();
        if left.mapped.is_empty() {
            return Ok(());
        }
        let _current = self.enter()?;
        self.0.cuda.unmap_left(&mut left, matters)
    }
}

impl Cuda {
    /// The context is current.
    fn unmap_left(&self, left: &mut Left, matters: impl Fn(u64) -> bool) -> Result<(), CudaError> {
        let mut unmapped = Ok(());
        left.mapped.retain(|&(address, bytes)| {
            // SAFETY: whole mappings that have been dropped, and a reservation that is theirs still.
            let refused = unsafe { self.table().cuMemUnmap(address, bytes as usize) }.err();
            let stays = refused.is_some();
            if let Some(error) = refused.filter(|_| unmapped.is_ok() && matters(address)) {
                unmapped = Err(error);
            }
            stays
        });
        for range in std::mem::take(&mut left.reserved) {
            if left.is_mapped_in(range) {
                left.reserved.push(range);
            } else {
                self.give_back(range);
            }
        }
        unmapped
    }

    /// Gives addresses back at which nothing is mapped.
    fn give_back(&self, (address, bytes): (u64, u64)) {
        // SAFETY: exactly the range that was reserved, once.
        if let Err(error) = unsafe { self.table().cuMemAddressFree(address, bytes as usize) } {
            tracing::error!(%error, address, "addresses could not be given back");
        }
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
        let left = self.left.get_mut().unwrap_or_else(PoisonError::into_inner);
        if !left.mapped.is_empty() {
            // SAFETY: the context is alive while this has its share in it.
            let entered = unsafe { self.cuda.table().cuCtxPushCurrent_v2(self.raw) };
            // The process's end takes what stays now.
            let _ = entered.and_then(|()| {
                let _ = self.cuda.unmap_left(left, |_| true);
                let mut popped = ptr::null_mut();
                // SAFETY: the pointer is to a live context handle; what was pushed is still on the stack.
                unsafe { self.cuda.table().cuCtxPopCurrent_v2(&mut popped) }
            });
        }
        // SAFETY: the share was taken in `retain` and is given back once.
        let _ = unsafe { self.cuda.table().cuDevicePrimaryCtxRelease_v2(self.cuda.0.device) };
    }
}

/// A range of addresses, given back when this is dropped, or once what was mapped there is.
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
        let range = (self.address, self.bytes);
        let mut left = self.context.left();
        if left.is_mapped_in(range) {
            left.reserved.push(range);
            return;
        }
        drop(left);
        let _current = self.context.enter();
        self.context.cuda().give_back(range);
    }
}

/// What is mapped from an address on. Nobody may use it any more when this is dropped; what the driver would
/// not unmap then is left to the context.
#[derive(Debug)]
struct Mapped {
    context: Context,
    address: u64,
    /// Of whole mappings end to end; 0 where nothing is mapped any more, or yet.
    bytes: u64,
}

impl Mapped {
    /// Nobody uses it any more. It stays mapped if the driver refuses.
    fn unmap(&mut self) -> Result<(), CudaError> {
        if self.bytes > 0 {
            let _current = self.context.enter()?;
            let table = self.context.cuda().table();
            // SAFETY: exactly what was mapped, once. That no work uses it is the caller's promise; the
            // manager waits for the device first.
            unsafe { table.cuMemUnmap(self.address, self.bytes as usize) }?;
            self.bytes = 0;
        }
        Ok(())
    }
}

impl Drop for Mapped {
    fn drop(&mut self) {
        if let Err(error) = self.unmap() {
            tracing::error!(%error, address = self.address, "memory could not be unmapped");
            self.context.left().mapped.push((self.address, self.bytes));
        }
    }
}

/// Physical memory at an address. It keeps the memory alive; nobody may use the address any more
/// when this is dropped.
#[derive(Debug)]
pub(crate) struct Mapping {
    /// Before the handle, so that it goes first.
    mapped: Mapped,
    _handle: PhysicalHandle,
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
        // What was there before may be there still.
        context.unmap_left(|left| left == address)?;
        let handle = PhysicalHandle::import(cuda, file, bytes)?;
        // SAFETY: the handle is alive; a range that is no free part of a reservation, or not of the
        // memory's size, is answered with an error; offset and flags must be 0.
        unsafe { cuda.table().cuMemMap(address, bytes as usize, 0, handle.raw, 0) }?;
        Ok(Self { mapped: Mapped { context: context.clone(), address, bytes }, _handle: handle })
    }

    /// Takes the memory away, which nobody uses any more. It stays if the driver refuses.
    pub(crate) fn unmap(&mut self) -> Result<(), CudaError> {
        self.mapped.unmap()
    }
}

/// One piece of memory at many addresses, end to end. As with [`Mapping`], nobody may use them any
/// more when this is dropped.
#[derive(Debug)]
pub(crate) struct Aliases {
    /// Before the block, so that it goes first.
    mapped: Mapped,
    /// What is mapped, as many times as it takes.
    _block: Arc<PhysicalHandle>,
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
        let mut mapped = Mapped { context: context.clone(), address, bytes: 0 };
        while mapped.bytes < bytes {
            let at = address + mapped.bytes;
            // SAFETY: as in `Mapping::import`.
            unsafe { table.cuMemMap(at, size as usize, 0, block.raw, 0) }?;
            mapped.bytes += size;
        }
        Ok(Self { mapped, _block: block.clone() })
    }

    /// Takes the block away, as [`Mapping::unmap`].
    pub(crate) fn unmap(&mut self) -> Result<(), CudaError> {
        self.mapped.unmap()
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
