//! The driver calls that the command makes itself: allocators that are nothing
//! but driver calls, and the device work of `--verify`.
//!
//! All of the command's foreign calls are here and in `bare`, `handles` and `stall`. What is unsafe elsewhere passes
//! on a promise about an address: that it is allocated, and freed once.

use std::ffi::{CStr, c_void};
use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use cuda_sys::types::*;
use vpmm::{Device, StreamHandle};

use super::timer::CallClock;

/// The driver with its calls counted, on the device's primary context.
///
/// Every method but [`Calls::enter`] needs that context to be current on the
/// calling thread; where it is not, the driver answers with an error.
#[derive(Debug)]
pub struct Calls<'a> {
    driver: &'a cuda_sys::Driver,
    device: &'a Device,
    count: AtomicU64,
    /// Where an allocator makes these calls and its time is wanted.
    clock: Option<Arc<CallClock>>,
}

/// Calls a driver function by name and checks the answer; `bytes` is what it was about.
macro_rules! call {
    ($self:ident, $bytes:expr, $name:ident ( $( $arg:expr ),* )) => {{
        match $self.driver().$name {
            None => Err(vpmm::Error::MissingSymbol {
                name: stringify!($name),
                origin: $self.driver().origin().to_owned(),
            }),
            Some(function) => {
                let code = $self.counted(|| function($( $arg ),*));
                match code {
                    CUresult::CUDA_SUCCESS => Ok(()),
                    code => Err(vpmm::Error::Driver { call: stringify!($name), code, bytes: $bytes }),
                }
            }
        }
    }};
}

pub(super) use call;

impl<'a> Calls<'a> {
    pub(super) fn new(
        driver: &'a cuda_sys::Driver,
        device: &'a Device,
        clock: Option<Arc<CallClock>>,
    ) -> Self {
        Self { driver, device, count: AtomicU64::new(0), clock }
    }

    pub(super) fn driver(&self) -> &cuda_sys::Driver {
        self.driver
    }

    /// Makes a call that counts.
    #[inline]
    pub(super) fn counted(&self, call: impl FnOnce() -> CUresult) -> CUresult {
        self.count.fetch_add(1, Ordering::Relaxed);
        match &self.clock {
            None => call(),
            Some(clock) => clock.time(call),
        }
    }

    pub(super) fn device(&self) -> &Device {
        self.device
    }

    /// How many calls were made.
    pub fn count(&self) -> u64 {
        self.count.load(Ordering::Relaxed)
    }

    /// Makes the device's primary context current on this thread, for good.
    ///
    /// # Errors
    /// What the driver answers.
    pub fn enter(&self) -> vpmm::Result<()> {
        // SAFETY: the device keeps its primary context retained while it lives.
        unsafe { call!(self, 0, cuCtxSetCurrent(self.device.context())) }
    }

    /// Waits until the device has finished everything.
    ///
    /// # Errors
    /// What the driver answers, or what earlier work has failed with.
    pub fn synchronize(&self) -> vpmm::Result<()> {
        // SAFETY: no arguments.
        unsafe { call!(self, 0, cuCtxSynchronize()) }
    }

    /// `cuMemAlloc`.
    ///
    /// # Errors
    /// What the driver answers: out of memory among others.
    pub fn allocate(&self, bytes: u64) -> vpmm::Result<u64> {
        let mut address = 0;
        // SAFETY: the pointer is to a live CUdeviceptr; any size may be asked for.
        unsafe { call!(self, bytes, cuMemAlloc_v2(&mut address, host_size(bytes)))? };
        Ok(address)
    }

    /// `cuMemFree`: waits for all work on the device.
    ///
    /// # Safety
    /// `address` came from [`Calls::allocate`] and has not been freed.
    ///
    /// # Errors
    /// What the driver answers.
    pub unsafe fn free(&self, address: u64) -> vpmm::Result<()> {
        // SAFETY: the caller vouches for the address.
        unsafe { call!(self, 0, cuMemFree_v2(address)) }
    }

    /// A memory pool of its own on the device, which keeps freed memory for ever
    /// and holds at most `limit_bytes` bytes.
    ///
    /// # Errors
    /// What the driver answers: `CUDA_ERROR_NOT_SUPPORTED` where there are no pools.
    pub fn memory_pool(self, limit_bytes: Option<u64>) -> vpmm::Result<MemoryPool<'a>> {
        let properties = CUmemPoolProps {
            allocType: CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED,
            location: CUmemLocation {
                type_: CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE,
                // A device's number is an int in the driver's own interface.
                id: i32::try_from(self.device.ordinal()).unwrap_or(-1),
            },
            maxSize: host_size(limit_bytes.unwrap_or(0)),
            ..CUmemPoolProps::default()
        };
        let mut handle = ptr::null_mut();
        // SAFETY: both pointers are to live values of the right types.
        unsafe { call!(self, 0, cuMemPoolCreate(&mut handle, &properties))? };
        let pool = MemoryPool { calls: self, handle };
        let mut keep = u64::MAX;
        let attribute = CUmemPool_attribute::CU_MEMPOOL_ATTR_RELEASE_THRESHOLD;
        let value = (&raw mut keep).cast::<c_void>();
        let calls = &pool.calls;
        // SAFETY: the pool is alive, and the threshold is a 64-bit number.
        unsafe { call!(calls, 0, cuMemPoolSetAttribute(pool.handle, attribute, value))? };
        Ok(pool)
    }
}

/// A size for the driver: it counts in `usize`, which has 64 bits where CUDA runs.
pub(super) fn host_size(bytes: u64) -> usize {
    usize::try_from(bytes).unwrap_or(usize::MAX)
}

/// A pool of the driver's stream-ordered allocator; destroyed at drop.
#[derive(Debug)]
pub struct MemoryPool<'a> {
    calls: Calls<'a>,
    handle: CUmemoryPool,
}

// SAFETY: a pool's handle may be used from any thread; the driver locks.
unsafe impl Send for MemoryPool<'_> {}
// SAFETY: as above.
unsafe impl Sync for MemoryPool<'_> {}

impl MemoryPool<'_> {
    /// The calls that the pool is made with.
    pub fn calls(&self) -> &Calls<'_> {
        &self.calls
    }

    /// `cuMemAllocFromPoolAsync`.
    ///
    /// # Errors
    /// What the driver answers: out of memory among others.
    pub fn allocate(&self, bytes: u64, stream: StreamHandle) -> vpmm::Result<u64> {
        let calls = &self.calls;
        let mut address = 0;
        let size = host_size(bytes);
        // SAFETY: the pointer is to a live CUdeviceptr; the pool is alive, and so is the stream,
        // for which whoever made the handle vouches.
        unsafe {
            call!(
                calls,
                bytes,
                cuMemAllocFromPoolAsync(&mut address, size, self.handle, stream.raw())
            )?
        };
        Ok(address)
    }

    /// `cuMemFreeAsync`.
    ///
    /// # Safety
    /// `address` came from [`MemoryPool::allocate`] and has not been freed: the
    /// driver need not notice a second free.
    ///
    /// # Errors
    /// What the driver answers.
    pub unsafe fn free(&self, address: u64, stream: StreamHandle) -> vpmm::Result<()> {
        let calls = &self.calls;
        // SAFETY: the caller vouches for the address; the stream is alive.
        unsafe { call!(calls, 0, cuMemFreeAsync(address, stream.raw())) }
    }

    /// Gives memory that is not in use back to the device.
    ///
    /// # Errors
    /// What the driver answers.
    pub fn trim(&self) -> vpmm::Result<()> {
        let calls = &self.calls;
        // SAFETY: the pool is alive; 0 bytes are to be kept.
        unsafe { call!(calls, 0, cuMemPoolTrimTo(self.handle, 0)) }
    }

    /// The most bytes that the pool has held; not counted as a call of the allocator.
    ///
    /// # Errors
    /// What the driver answers.
    pub fn peak_reserved_bytes(&self) -> vpmm::Result<u64> {
        self.attribute(CUmemPool_attribute::CU_MEMPOOL_ATTR_RESERVED_MEM_HIGH)
    }

    /// The bytes that the pool holds, and those of them in use.
    ///
    /// # Errors
    /// What the driver answers.
    pub fn reserved_and_used_bytes(&self) -> vpmm::Result<(u64, u64)> {
        Ok((
            self.attribute(CUmemPool_attribute::CU_MEMPOOL_ATTR_RESERVED_MEM_CURRENT)?,
            self.attribute(CUmemPool_attribute::CU_MEMPOOL_ATTR_USED_MEM_CURRENT)?,
        ))
    }

    fn attribute(&self, attribute: CUmemPool_attribute) -> vpmm::Result<u64> {
        let uncounted = Calls::new(self.calls.driver, self.calls.device, None);
        let mut value = 0_u64;
        let place = (&raw mut value).cast::<c_void>();
        // SAFETY: the pool is alive, and every attribute asked for here is a 64-bit number.
        unsafe { call!(uncounted, 0, cuMemPoolGetAttribute(self.handle, attribute, place))? };
        Ok(value)
    }
}

impl Drop for MemoryPool<'_> {
    fn drop(&mut self) {
        let calls = &self.calls;
        // SAFETY: made in `memory_pool`, destroyed once here. A failure leaves nothing to do.
        let _ = unsafe { call!(calls, 0, cuMemPoolDestroy(self.handle)) };
    }
}

/// The kernels that write a pattern into device memory and look for it again,
/// with counters of mismatches on the device.
#[derive(Debug)]
pub struct Patterns<'a> {
    calls: Calls<'a>,
    module: CUmodule,
    fill: CUfunction,
    check: CUfunction,
    /// The counters: `counters` words of 64 bits from this address on.
    address: u64,
    counters: usize,
}

// SAFETY: module and function handles may be used from any thread; the driver locks.
unsafe impl Send for Patterns<'_> {}
// SAFETY: as above.
unsafe impl Sync for Patterns<'_> {}

/// Words of device memory, and the pattern in them.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Words {
    /// The first word; a multiple of 8.
    pub address: u64,
    /// How many words, each of 64 bits.
    pub count: u64,
    /// From one word to the next, in words; 1 for words side by side.
    pub stride: u64,
    /// What the pattern is made from.
    pub seed: u64,
}

impl<'a> Patterns<'a> {
    /// Loads the kernels and makes `counters` counters, all 0.
    ///
    /// # Errors
    /// What the driver answers.
    pub fn new(calls: Calls<'a>, counters: usize) -> vpmm::Result<Self> {
        let mut module = ptr::null_mut();
        let image = cuda_sim::kernels::PTX.as_ptr().cast::<c_void>();
        // SAFETY: the text ends in NUL, as the driver wants it of PTX.
        unsafe { call!(calls, 0, cuModuleLoadData(&mut module, image))? };
        let null = ptr::null_mut();
        // Owns the module from here on, so that a failure below unloads it.
        let mut patterns = Self { calls, module, fill: null, check: null, address: 0, counters };
        patterns.fill = patterns.function(c"vpmm_fill")?;
        patterns.check = patterns.function(c"vpmm_check")?;
        let bytes = size_of::<u64>() * counters.max(1);
        patterns.address = patterns.calls.allocate(bytes as u64)?;
        patterns.clear()?;
        Ok(patterns)
    }

    fn function(&self, name: &CStr) -> vpmm::Result<CUfunction> {
        let calls = &self.calls;
        let mut function = ptr::null_mut();
        // SAFETY: the module is loaded, and the name ends in NUL.
        unsafe { call!(calls, 0, cuModuleGetFunction(&mut function, self.module, name.as_ptr()))? };
        Ok(function)
    }

    /// Sets every counter to 0; done when it returns.
    ///
    /// # Errors
    /// What the driver answers.
    pub fn clear(&self) -> vpmm::Result<()> {
        let calls = &self.calls;
        let bytes = size_of::<u64>() * self.counters;
        // SAFETY: the counters are that many bytes of device memory, which this value owns.
        unsafe { call!(calls, bytes as u64, cuMemsetD8_v2(self.address, 0, bytes))? };
        calls.synchronize()
    }

    /// Enqueues the write of a pattern.
    ///
    /// # Safety
    /// The words are memory of the device that the caller has allocated and may
    /// use in work on `stream`.
    ///
    /// # Errors
    /// What the driver answers.
    pub unsafe fn fill(&self, words: Words, stream: StreamHandle) -> vpmm::Result<()> {
        let Words { address, count, stride, seed } = words;
        // SAFETY: the kernel takes these four, and the caller vouches for the memory.
        unsafe { self.launch(self.fill, count, [address, count, stride, seed], stream) }
    }

    /// Enqueues a look at a pattern; words that differ are added to `counter`.
    ///
    /// # Safety
    /// As [`Patterns::fill`].
    ///
    /// # Errors
    /// What the driver answers.
    pub unsafe fn check(
        &self,
        words: Words,
        counter: usize,
        stream: StreamHandle,
    ) -> vpmm::Result<()> {
        assert!(counter < self.counters, "no such counter");
        let Words { address, count, stride, seed } = words;
        let errors = self.address + (size_of::<u64>() * counter) as u64;
        let parameters = [address, count, stride, seed, errors];
        // SAFETY: the kernel takes these five; the caller vouches for the words, and the counter
        // was checked to be one of this value's own.
        unsafe { self.launch(self.check, count, parameters, stream) }
    }

    /// # Safety
    /// `function` is one of this value's kernels, takes `N` words of 64 bits, and
    /// touches only memory that may be used in work on `stream`.
    unsafe fn launch<const N: usize>(
        &self,
        function: CUfunction,
        words: u64,
        mut parameters: [u64; N],
        stream: StreamHandle,
    ) -> vpmm::Result<()> {
        const BLOCK_THREADS: u64 = 256;
        // Enough blocks to fill any device: the kernels loop over what is left.
        const MOST_BLOCKS: u64 = 4096;
        let blocks = words.div_ceil(BLOCK_THREADS).clamp(1, MOST_BLOCKS) as u32;
        let mut places = parameters.each_mut().map(|word| ptr::from_mut(word).cast::<c_void>());
        let calls = &self.calls;
        // SAFETY: `places` points to as many parameters of 8 bytes as the kernel takes, which the
        // driver copies before it returns; the rest is the caller's promise.
        unsafe {
            call!(
                calls,
                0,
                cuLaunchKernel(
                    function,
                    blocks,
                    1,
                    1,
                    BLOCK_THREADS as u32,
                    1,
                    1,
                    0,
                    stream.raw(),
                    places.as_mut_ptr(),
                    ptr::null_mut()
                )
            )
        }
    }

    /// Makes work enqueued on `later` from now on wait for what is on `earlier` now.
    ///
    /// # Errors
    /// What the driver answers.
    pub fn order(&self, earlier: StreamHandle, later: StreamHandle) -> vpmm::Result<()> {
        let calls = &self.calls;
        let flags = CUevent_flags_enum::CU_EVENT_DISABLE_TIMING.0;
        let mut event = ptr::null_mut();
        // SAFETY: the pointer is to a live CUevent.
        unsafe { call!(calls, 0, cuEventCreate(&mut event, flags))? };
        // SAFETY: event and stream are alive.
        let recorded = unsafe { call!(calls, 0, cuEventRecord(event, earlier.raw())) };
        let waited = recorded.and_then(|()| {
            // SAFETY: event and stream are alive.
            unsafe { call!(calls, 0, cuStreamWaitEvent(later.raw(), event, 0)) }
        });
        // SAFETY: made above; a wait that is pending keeps what it needs.
        let destroyed = unsafe { call!(calls, 0, cuEventDestroy_v2(event)) };
        waited.and(destroyed)
    }

    /// Waits for the device and reads every counter.
    ///
    /// # Errors
    /// What the driver answers, or what earlier work has failed with.
    pub fn counts(&self) -> vpmm::Result<Vec<u64>> {
        let calls = &self.calls;
        calls.synchronize()?;
        let mut counts = vec![0_u64; self.counters];
        if self.counters > 0 {
            let bytes = size_of::<u64>() * self.counters;
            let to = counts.as_mut_ptr().cast::<c_void>();
            // SAFETY: `to` is good for writes of that many bytes, and any bits are a u64.
            unsafe { call!(calls, bytes as u64, cuMemcpyDtoH_v2(to, self.address, bytes))? };
        }
        Ok(counts)
    }
}

impl Drop for Patterns<'_> {
    fn drop(&mut self) {
        let calls = &self.calls;
        if self.address != 0 {
            // SAFETY: allocated in `new`, freed once here. It waits for all work on the device, so
            // that no kernel still runs when the module goes. A failure leaves nothing to do.
            let _ = unsafe { calls.free(self.address) };
        }
        // SAFETY: loaded in `new`, unloaded once here.
        let _ = unsafe { call!(calls, 0, cuModuleUnload(self.module)) };
    }
}
