//! What a row of the list works with: thin wrappers over the driver's calls that remember what
//! they made, so that a row leaves nothing behind however it ends.

use std::cell::RefCell;
use std::ffi::{c_int, c_uint, c_void};
use std::fmt;
use std::os::fd::{AsRawFd, FromRawFd, OwnedFd};
use std::ptr;
use std::sync::atomic::{AtomicU32, Ordering};

use cuda_sys::Driver;
use cuda_sys::types::*;

/// Calls a function of the table and turns what is not success into [`Refused`].
macro_rules! ask {
    ($driver:expr, $name:ident($($argument:expr),* $(,)?)) => {{
        let driver: &Driver = $driver;
        match driver.$name {
            // SAFETY: every pointer argument is made from a live local or a live object of the
            // wrapper that asks; numbers and handles are the driver's to judge.
            Some(function) => match unsafe { function($($argument),*) } {
                CUresult::CUDA_SUCCESS => Ok(()),
                code => Err(Refused { call: stringify!($name), code: Some(code) }),
            },
            None => Err(Refused { call: stringify!($name), code: None }),
        }
    }};
}

/// A call that did not succeed.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Refused {
    pub(crate) call: &'static str,
    /// What it answered; `None` if the driver has no such call.
    pub(crate) code: Option<CUresult>,
}

pub(crate) type Asked<T> = Result<T, Refused>;

/// Why a row has no answer.
#[derive(Debug)]
pub(crate) enum Trouble {
    /// A call that only prepares the one in question failed.
    Setup(Refused),
    /// The answer's code is right or wrong, but what it should mean does not hold.
    Fact(String),
}

impl From<Refused> for Trouble {
    fn from(refused: Refused) -> Self {
        Self::Setup(refused)
    }
}

impl fmt::Display for Trouble {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Setup(Refused { call, code: Some(code) }) => write!(f, "setup: {call}: {code}"),
            Self::Setup(Refused { call, code: None }) => write!(f, "no {call} in this driver"),
            Self::Fact(text) => f.write_str(text),
        }
    }
}

/// The code that the call in question answered.
pub(crate) fn answer<T>(asked: Asked<T>) -> Result<CUresult, Trouble> {
    match asked {
        Ok(_) => Ok(CUresult::CUDA_SUCCESS),
        Err(Refused { code: Some(code), .. }) => Ok(code),
        Err(refused) => Err(refused.into()),
    }
}

/// Says in words what should have held.
pub(crate) fn ensure(holds: bool, what: &str) -> Result<(), Trouble> {
    if holds { Ok(()) } else { Err(Trouble::Fact(format!("not so: {what}"))) }
}

pub(crate) const LEGACY: CUstream = CU_STREAM_LEGACY;
pub(crate) const PER_THREAD: CUstream = CU_STREAM_PER_THREAD;
pub(crate) const BLOCKING: u32 = CUstream_flags::CU_STREAM_DEFAULT.0;
pub(crate) const NON_BLOCKING: u32 = CUstream_flags::CU_STREAM_NON_BLOCKING.0;
pub(crate) const GLOBAL: CUstreamCaptureMode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL;
pub(crate) const THREAD_LOCAL: CUstreamCaptureMode =
    CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_THREAD_LOCAL;
pub(crate) const RELAXED: CUstreamCaptureMode = CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_RELAXED;
const POSIX_FD: CUmemAllocationHandleType =
    CUmemAllocationHandleType::CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR;

/// A device with its primary context current and the tests' kernels loaded.
pub(crate) struct Target<'a> {
    pub(crate) driver: &'a Driver,
    pub(crate) device: CUdevice,
    pub(crate) context: CUcontext,
    /// The granule: 2 MiB on every GPU so far.
    pub(crate) granule: u64,
    module: CUmodule,
    spin: CUfunction,
    fill: CUfunction,
    check: CUfunction,
}

impl<'a> Target<'a> {
    /// The first device of a driver.
    pub(crate) fn open(driver: &'a Driver) -> Asked<Self> {
        ask!(driver, cuInit(0))?;
        let mut device = 0;
        ask!(driver, cuDeviceGet(&mut device, 0))?;
        let mut context = ptr::null_mut();
        ask!(driver, cuDevicePrimaryCtxRetain(&mut context, device))?;
        ask!(driver, cuCtxSetCurrent(context))?;
        let mut module = ptr::null_mut();
        ask!(driver, cuModuleLoadData(&mut module, cuda_sim::kernels::PTX.as_ptr().cast()))?;
        let function = |name: &std::ffi::CStr| {
            let mut function = ptr::null_mut();
            ask!(driver, cuModuleGetFunction(&mut function, module, name.as_ptr()))?;
            Ok(function)
        };
        let (spin, fill, check) =
            (function(c"vpmm_spin")?, function(c"vpmm_fill")?, function(c"vpmm_check")?);
        let mut granule = 0;
        let minimum = CUmemAllocationGranularity_flags::CU_MEM_ALLOC_GRANULARITY_MINIMUM;
        let prop = properties(device);
        ask!(driver, cuMemGetAllocationGranularity(&mut granule, &prop, minimum))?;
        let granule = granule as u64;
        let target = Self { driver, device, context, granule, module, spin, fill, check };
        target.warm()?;
        Ok(target)
    }

    /// Uses every kind of work once. A driver that loads code lazily may wait for the device
    /// to be idle at the first use, which would never end behind a kernel that spins.
    fn warm(&self) -> Asked<()> {
        let probe = Probe::new(self);
        let stream = probe.stream(NON_BLOCKING)?;
        let memory = probe.alloc(4096)?;
        probe.hold(stream)?.release();
        probe.fill(memory, 1, 7, stream)?;
        probe.check(memory, 1, 7, memory + 64, stream)?;
        probe.set32(memory, 1, 4, stream)?;
        probe.copy(memory + 1024, memory, 64, stream)?;
        probe.read32(memory, stream)?;
        probe.sync()
    }

    fn visitor(&self) -> Visitor<'a> {
        let handles = [
            self.context as usize,
            self.module as usize,
            self.spin as usize,
            self.fill as usize,
            self.check as usize,
        ];
        Visitor { driver: self.driver, device: self.device, granule: self.granule, handles }
    }

    /// Gives the context back.
    pub(crate) fn close(self) -> Asked<()> {
        ask!(self.driver, cuModuleUnload(self.module))?;
        ask!(self.driver, cuCtxSetCurrent(ptr::null_mut()))?;
        ask!(self.driver, cuDevicePrimaryCtxRelease_v2(self.device))
    }
}

/// Memory on a device, not exportable.
pub(crate) fn properties(device: c_int) -> CUmemAllocationProp {
    CUmemAllocationProp {
        type_: CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED,
        location: on(device),
        ..Default::default()
    }
}

/// Memory of the host, wherever the driver puts it.
pub(crate) fn host() -> CUmemLocation {
    CUmemLocation { type_: CUmemLocationType::CU_MEM_LOCATION_TYPE_HOST, id: 0 }
}

pub(crate) fn on(device: c_int) -> CUmemLocation {
    CUmemLocation { type_: CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE, id: device }
}

/// Asks a question from a new thread on which the target's context is current.
///
/// Handles are the driver's, which may be used from any thread; raw pointers only keep the
/// compiler from knowing it, so the context travels as a number.
pub(crate) fn on_another_thread<T: Send>(
    target: &Target<'_>,
    question: impl FnOnce(&Probe<'_>) -> Asked<T> + Send,
) -> Asked<T> {
    let visitor = target.visitor();
    std::thread::scope(|scope| {
        let asked = scope.spawn(move || {
            let target = visitor.arrive();
            let probe = Probe::new(&target);
            probe.set_context(target.context)?;
            question(&probe)
        });
        asked.join().expect("the question does not panic")
    })
}

/// A [`Target`] on its way to another thread: handles as numbers.
struct Visitor<'a> {
    driver: &'a Driver,
    device: CUdevice,
    granule: u64,
    handles: [usize; 5],
}

impl<'a> Visitor<'a> {
    fn arrive(self) -> Target<'a> {
        let [context, module, spin, fill, check] = self.handles;
        Target {
            driver: self.driver,
            device: self.device,
            context: context as CUcontext,
            granule: self.granule,
            module: module as CUmodule,
            spin: spin as CUfunction,
            fill: fill as CUfunction,
            check: check as CUfunction,
        }
    }
}

/// What a row made and must not leave behind.
#[derive(Default)]
struct Made {
    flags: Vec<u64>,
    streams: Vec<CUstream>,
    events: Vec<CUevent>,
    allocations: Vec<u64>,
    pools: Vec<CUmemoryPool>,
    mappings: Vec<(u64, u64)>,
    handles: Vec<u64>,
    reservations: Vec<(u64, u64)>,
}

impl Made {
    fn is_empty(&self) -> bool {
        let Self { flags, streams, events, allocations, pools, mappings, handles, reservations } =
            self;
        flags.is_empty()
            && streams.is_empty()
            && events.is_empty()
            && allocations.is_empty()
            && pools.is_empty()
            && mappings.is_empty()
            && handles.is_empty()
            && reservations.is_empty()
    }
}

/// One row's use of a [`Target`].
pub(crate) struct Probe<'t> {
    pub(crate) target: &'t Target<'t>,
    /// The granule in bytes.
    pub(crate) g: u64,
    made: RefCell<Made>,
}

/// A kernel that spins until it is let go, at the latest when the row ends.
pub(crate) struct Hold {
    flag: u64,
}

impl Hold {
    pub(crate) fn release(self) {
        let_go(self.flag);
    }
}

/// A graph that can be launched, until drop.
pub(crate) struct Graph<'t> {
    driver: &'t Driver,
    graph: CUgraph,
    executable: CUgraphExec,
}

impl Drop for Graph<'_> {
    fn drop(&mut self) {
        // What a row leaves behind is found by the list itself.
        if !self.executable.is_null() {
            let _ = ask!(self.driver, cuGraphExecDestroy(self.executable));
        }
        if !self.graph.is_null() {
            let _ = ask!(self.driver, cuGraphDestroy(self.graph));
        }
    }
}

fn let_go(flag: u64) {
    // SAFETY: the flag is an aligned word of page-locked memory that the probe frees only
    // after all flags were set; the device only reads it.
    unsafe { AtomicU32::from_ptr(flag as *mut u32) }.store(1, Ordering::Release);
}

fn forget<T: PartialEq>(list: &mut Vec<T>, item: &T) {
    if let Some(at) = list.iter().rposition(|other| other == item) {
        list.swap_remove(at);
    }
}

impl<'t> Probe<'t> {
    pub(crate) fn new(target: &'t Target<'t>) -> Self {
        Self { target, g: target.granule, made: RefCell::default() }
    }

    pub(crate) fn driver(&self) -> &'t Driver {
        self.target.driver
    }

    // Addresses

    pub(crate) fn reserve(&self, bytes: u64) -> Asked<u64> {
        self.reserve_with(bytes, 0, 0, 0)
    }

    pub(crate) fn reserve_with(&self, bytes: u64, align: u64, hint: u64, flags: u64) -> Asked<u64> {
        let (mut at, bytes_) = (0, bytes as usize);
        ask!(self.driver(), cuMemAddressReserve(&mut at, bytes_, align as usize, hint, flags))?;
        self.made.borrow_mut().reservations.push((at, bytes));
        Ok(at)
    }

    pub(crate) fn unreserve(&self, at: u64, bytes: u64) -> Asked<()> {
        ask!(self.driver(), cuMemAddressFree(at, bytes as usize))?;
        forget(&mut self.made.borrow_mut().reservations, &(at, bytes));
        Ok(())
    }

    // Physical memory

    pub(crate) fn create(&self, bytes: u64) -> Asked<u64> {
        self.create_with(bytes, &properties(self.target.device), 0)
    }

    pub(crate) fn create_exportable(&self, bytes: u64) -> Asked<u64> {
        let mut prop = properties(self.target.device);
        prop.requestedHandleTypes = POSIX_FD;
        self.create_with(bytes, &prop, 0)
    }

    pub(crate) fn create_with(
        &self,
        bytes: u64,
        prop: &CUmemAllocationProp,
        flags: u64,
    ) -> Asked<u64> {
        let mut handle = 0;
        ask!(self.driver(), cuMemCreate(&mut handle, bytes as usize, prop, flags))?;
        self.made.borrow_mut().handles.push(handle);
        Ok(handle)
    }

    pub(crate) fn release(&self, handle: u64) -> Asked<()> {
        ask!(self.driver(), cuMemRelease(handle))?;
        forget(&mut self.made.borrow_mut().handles, &handle);
        Ok(())
    }

    pub(crate) fn retain(&self, at: u64) -> Asked<u64> {
        let mut handle = 0;
        ask!(self.driver(), cuMemRetainAllocationHandle(&mut handle, at as *mut c_void))?;
        self.made.borrow_mut().handles.push(handle);
        Ok(handle)
    }

    pub(crate) fn export(&self, handle: u64) -> Asked<OwnedFd> {
        let mut fd: c_int = -1;
        let to = ptr::from_mut(&mut fd).cast();
        ask!(self.driver(), cuMemExportToShareableHandle(to, handle, POSIX_FD, 0))?;
        // SAFETY: the driver made a new descriptor for us, which nothing else owns.
        Ok(unsafe { OwnedFd::from_raw_fd(fd) })
    }

    pub(crate) fn import(&self, fd: &OwnedFd) -> Asked<u64> {
        self.import_raw(fd.as_raw_fd())
    }

    pub(crate) fn import_raw(&self, fd: c_int) -> Asked<u64> {
        let (mut handle, fd) = (0, fd as usize as *mut c_void);
        ask!(self.driver(), cuMemImportFromShareableHandle(&mut handle, fd, POSIX_FD))?;
        self.made.borrow_mut().handles.push(handle);
        Ok(handle)
    }

    pub(crate) fn handle_properties(&self, handle: u64) -> Asked<CUmemAllocationProp> {
        let mut prop = CUmemAllocationProp::default();
        ask!(self.driver(), cuMemGetAllocationPropertiesFromHandle(&mut prop, handle))?;
        Ok(prop)
    }

    // Mappings

    pub(crate) fn map(&self, at: u64, bytes: u64, offset: u64, handle: u64) -> Asked<()> {
        self.map_with(at, bytes, offset, handle, 0)
    }

    pub(crate) fn map_with(
        &self,
        at: u64,
        bytes: u64,
        offset: u64,
        handle: u64,
        flags: u64,
    ) -> Asked<()> {
        ask!(self.driver(), cuMemMap(at, bytes as usize, offset as usize, handle, flags))?;
        self.made.borrow_mut().mappings.push((at, bytes));
        Ok(())
    }

    pub(crate) fn set_access(&self, at: u64, bytes: u64) -> Asked<()> {
        let read_write = CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
        self.set_access_of(at, bytes, self.target.device, read_write)
    }

    pub(crate) fn set_access_of(
        &self,
        at: u64,
        bytes: u64,
        device: c_int,
        flags: CUmemAccess_flags,
    ) -> Asked<()> {
        let desc = CUmemAccessDesc { location: on(device), flags };
        ask!(self.driver(), cuMemSetAccess(at, bytes as usize, &desc, 1))
    }

    /// Sets the access of several at a time.
    pub(crate) fn set_access_of_all(
        &self,
        at: u64,
        bytes: u64,
        locations: &[CUmemLocation],
    ) -> Asked<()> {
        let flags = CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
        let all: Vec<CUmemAccessDesc> = locations
            .iter()
            .map(|location| CUmemAccessDesc { location: *location, flags })
            .collect();
        ask!(self.driver(), cuMemSetAccess(at, bytes as usize, all.as_ptr(), all.len()))
    }

    /// One of the target's device attributes.
    pub(crate) fn attribute(&self, attribute: CUdevice_attribute) -> Asked<c_int> {
        let mut value = 0;
        ask!(self.driver(), cuDeviceGetAttribute(&mut value, attribute, self.target.device))?;
        Ok(value)
    }

    /// The access of the target's device to the mapping at an address.
    pub(crate) fn access(&self, at: u64) -> Asked<u64> {
        let (mut flags, location) = (0, on(self.target.device));
        ask!(self.driver(), cuMemGetAccess(&mut flags, &location, at))?;
        Ok(flags)
    }

    pub(crate) fn unmap(&self, at: u64, bytes: u64) -> Asked<()> {
        ask!(self.driver(), cuMemUnmap(at, bytes as usize))?;
        let end = at + bytes;
        self.made.borrow_mut().mappings.retain(|&(start, size)| start < at || start + size > end);
        Ok(())
    }

    /// Reserves room and maps one new handle of each size there, side by side, with access.
    pub(crate) fn open(&self, sizes: &[u64]) -> Asked<u64> {
        let total = sizes.iter().sum();
        let start = self.reserve(total)?;
        let mut at = start;
        for &bytes in sizes {
            self.map(at, bytes, 0, self.create(bytes)?)?;
            at += bytes;
        }
        self.set_access(start, total)?;
        Ok(start)
    }

    /// Maps a handle at a fresh address, with access.
    pub(crate) fn map_anew(&self, handle: u64, bytes: u64) -> Asked<u64> {
        let at = self.reserve(bytes)?;
        self.map(at, bytes, 0, handle)?;
        self.set_access(at, bytes)?;
        Ok(at)
    }

    pub(crate) fn address_range(&self, at: u64) -> Asked<(u64, u64)> {
        let (mut base, mut size) = (0, 0);
        ask!(self.driver(), cuMemGetAddressRange_v2(&mut base, &mut size, at))?;
        Ok((base, size as u64))
    }

    pub(crate) fn pointer_u64(&self, at: u64, attribute: CUpointer_attribute) -> Asked<u64> {
        let mut value = 0u64;
        let to = ptr::from_mut(&mut value).cast();
        ask!(self.driver(), cuPointerGetAttribute(to, attribute, at))?;
        Ok(value)
    }

    // Allocation

    pub(crate) fn alloc(&self, bytes: u64) -> Asked<u64> {
        let mut at = 0;
        ask!(self.driver(), cuMemAlloc_v2(&mut at, bytes as usize))?;
        self.made.borrow_mut().allocations.push(at);
        Ok(at)
    }

    pub(crate) fn free(&self, at: u64) -> Asked<()> {
        ask!(self.driver(), cuMemFree_v2(at))?;
        forget(&mut self.made.borrow_mut().allocations, &at);
        Ok(())
    }

    /// Managed memory. It is freed like any other.
    pub(crate) fn managed(&self, bytes: u64, flags: u32) -> Asked<u64> {
        let mut at = 0;
        ask!(self.driver(), cuMemAllocManaged(&mut at, bytes as usize, flags))?;
        self.made.borrow_mut().allocations.push(at);
        Ok(at)
    }

    pub(crate) fn prefetch(
        &self,
        at: u64,
        bytes: u64,
        device: CUdevice,
        stream: CUstream,
    ) -> Asked<()> {
        ask!(self.driver(), cuMemPrefetchAsync(at, bytes as usize, device, stream))
    }

    pub(crate) fn alloc_async(&self, bytes: u64, stream: CUstream) -> Asked<u64> {
        let mut at = 0;
        ask!(self.driver(), cuMemAllocAsync(&mut at, bytes as usize, stream))?;
        self.made.borrow_mut().allocations.push(at);
        Ok(at)
    }

    pub(crate) fn free_async(&self, at: u64, stream: CUstream) -> Asked<()> {
        ask!(self.driver(), cuMemFreeAsync(at, stream))?;
        forget(&mut self.made.borrow_mut().allocations, &at);
        Ok(())
    }

    pub(crate) fn pool(&self) -> Asked<CUmemoryPool> {
        let props = CUmemPoolProps {
            allocType: CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED,
            location: on(self.target.device),
            ..Default::default()
        };
        let mut pool = ptr::null_mut();
        ask!(self.driver(), cuMemPoolCreate(&mut pool, &props))?;
        self.made.borrow_mut().pools.push(pool);
        Ok(pool)
    }

    pub(crate) fn pool_destroy(&self, pool: CUmemoryPool) -> Asked<()> {
        ask!(self.driver(), cuMemPoolDestroy(pool))?;
        forget(&mut self.made.borrow_mut().pools, &pool);
        Ok(())
    }

    pub(crate) fn default_pool(&self) -> Asked<CUmemoryPool> {
        let mut pool = ptr::null_mut();
        ask!(self.driver(), cuDeviceGetDefaultMemPool(&mut pool, self.target.device))?;
        Ok(pool)
    }

    pub(crate) fn alloc_from(
        &self,
        pool: CUmemoryPool,
        bytes: u64,
        stream: CUstream,
    ) -> Asked<u64> {
        let mut at = 0;
        ask!(self.driver(), cuMemAllocFromPoolAsync(&mut at, bytes as usize, pool, stream))?;
        self.made.borrow_mut().allocations.push(at);
        Ok(at)
    }

    pub(crate) fn pool_u64(
        &self,
        pool: CUmemoryPool,
        attribute: CUmemPool_attribute,
    ) -> Asked<u64> {
        let mut value = 0u64;
        let to = ptr::from_mut(&mut value).cast();
        ask!(self.driver(), cuMemPoolGetAttribute(pool, attribute, to))?;
        Ok(value)
    }

    pub(crate) fn pool_open(&self, pool: CUmemoryPool) -> Asked<()> {
        let flags = CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
        let access = CUmemAccessDesc { location: on(self.target.device), flags };
        ask!(self.driver(), cuMemPoolSetAccess(pool, &access, 1))
    }

    pub(crate) fn pool_access(&self, pool: CUmemoryPool) -> Asked<CUmemAccess_flags> {
        let (mut flags, mut location) = (CUmemAccess_flags(0), on(self.target.device));
        ask!(self.driver(), cuMemPoolGetAccess(&mut flags, pool, &mut location))?;
        Ok(flags)
    }

    /// Makes the pool the one that cuMemAllocAsync takes from.
    pub(crate) fn pool_choose(&self, pool: CUmemoryPool) -> Asked<()> {
        ask!(self.driver(), cuDeviceSetMemPool(self.target.device, pool))
    }

    pub(crate) fn pool_trim(&self, pool: CUmemoryPool, keep_bytes: u64) -> Asked<()> {
        ask!(self.driver(), cuMemPoolTrimTo(pool, keep_bytes as usize))
    }

    // Streams and events

    pub(crate) fn stream(&self, flags: u32) -> Asked<CUstream> {
        let mut stream = ptr::null_mut();
        ask!(self.driver(), cuStreamCreate(&mut stream, flags))?;
        self.made.borrow_mut().streams.push(stream);
        Ok(stream)
    }

    pub(crate) fn stream_destroy(&self, stream: CUstream) -> Asked<()> {
        ask!(self.driver(), cuStreamDestroy_v2(stream))?;
        forget(&mut self.made.borrow_mut().streams, &stream);
        Ok(())
    }

    pub(crate) fn stream_query(&self, stream: CUstream) -> Asked<()> {
        ask!(self.driver(), cuStreamQuery(stream))
    }

    pub(crate) fn stream_sync(&self, stream: CUstream) -> Asked<()> {
        ask!(self.driver(), cuStreamSynchronize(stream))
    }

    pub(crate) fn stream_id(&self, stream: CUstream) -> Asked<u64> {
        let mut id = 0;
        ask!(self.driver(), cuStreamGetId(stream, &mut id))?;
        Ok(id)
    }

    pub(crate) fn stream_flags(&self, stream: CUstream) -> Asked<u32> {
        let mut flags: c_uint = 0;
        ask!(self.driver(), cuStreamGetFlags(stream, &mut flags))?;
        Ok(flags)
    }

    /// Makes the stream wait until the word at `at` has this value, or as `flags` say.
    pub(crate) fn wait_value(
        &self,
        stream: CUstream,
        at: u64,
        value: u32,
        flags: u32,
    ) -> Asked<()> {
        ask!(self.driver(), cuStreamWaitValue32_v2(stream, at, value, flags))
    }

    pub(crate) fn stream_context(&self, stream: CUstream) -> Asked<CUcontext> {
        let mut context = ptr::null_mut();
        ask!(self.driver(), cuStreamGetCtx(stream, &mut context))?;
        Ok(context)
    }

    pub(crate) fn write_value(&self, stream: CUstream, at: u64, value: u64) -> Asked<()> {
        ask!(self.driver(), cuStreamWriteValue64_v2(stream, at, value, 0))
    }

    pub(crate) fn sync(&self) -> Asked<()> {
        ask!(self.driver(), cuCtxSynchronize())
    }

    pub(crate) fn set_context(&self, context: CUcontext) -> Asked<()> {
        ask!(self.driver(), cuCtxSetCurrent(context))
    }

    pub(crate) fn event(&self) -> Asked<CUevent> {
        self.event_with(CUevent_flags::CU_EVENT_DISABLE_TIMING.0)
    }

    pub(crate) fn event_with(&self, flags: u32) -> Asked<CUevent> {
        let mut event = ptr::null_mut();
        ask!(self.driver(), cuEventCreate(&mut event, flags))?;
        self.made.borrow_mut().events.push(event);
        Ok(event)
    }

    pub(crate) fn event_destroy(&self, event: CUevent) -> Asked<()> {
        ask!(self.driver(), cuEventDestroy_v2(event))?;
        forget(&mut self.made.borrow_mut().events, &event);
        Ok(())
    }

    pub(crate) fn record(&self, event: CUevent, stream: CUstream) -> Asked<()> {
        ask!(self.driver(), cuEventRecord(event, stream))
    }

    pub(crate) fn record_with(&self, event: CUevent, stream: CUstream, flags: u32) -> Asked<()> {
        ask!(self.driver(), cuEventRecordWithFlags(event, stream, flags))
    }

    pub(crate) fn query(&self, event: CUevent) -> Asked<()> {
        ask!(self.driver(), cuEventQuery(event))
    }

    pub(crate) fn event_sync(&self, event: CUevent) -> Asked<()> {
        ask!(self.driver(), cuEventSynchronize(event))
    }

    pub(crate) fn wait(&self, stream: CUstream, event: CUevent) -> Asked<()> {
        self.wait_with(stream, event, 0)
    }

    pub(crate) fn wait_with(&self, stream: CUstream, event: CUevent, flags: u32) -> Asked<()> {
        ask!(self.driver(), cuStreamWaitEvent(stream, event, flags))
    }

    pub(crate) fn elapsed(&self, start: CUevent, end: CUevent) -> Asked<f32> {
        let mut milliseconds = 0.0;
        ask!(self.driver(), cuEventElapsedTime(&mut milliseconds, start, end))?;
        Ok(milliseconds)
    }

    // Capture

    pub(crate) fn begin_capture(&self, stream: CUstream, mode: CUstreamCaptureMode) -> Asked<()> {
        ask!(self.driver(), cuStreamBeginCapture_v2(stream, mode))
    }

    pub(crate) fn end_capture(&self, stream: CUstream) -> Asked<()> {
        let mut graph = ptr::null_mut();
        let ended = ask!(self.driver(), cuStreamEndCapture(stream, &mut graph));
        if !graph.is_null() {
            ask!(self.driver(), cuGraphDestroy(graph))?;
        }
        ended
    }

    /// Ends a capture and keeps what came of it, ready to be launched.
    pub(crate) fn end_capture_as_graph(&self, stream: CUstream) -> Asked<Graph<'t>> {
        let mut graph =
            Graph { driver: self.driver(), graph: ptr::null_mut(), executable: ptr::null_mut() };
        ask!(self.driver(), cuStreamEndCapture(stream, &mut graph.graph))?;
        ask!(self.driver(), cuGraphInstantiateWithFlags(&mut graph.executable, graph.graph, 0))?;
        Ok(graph)
    }

    pub(crate) fn launch_graph(&self, graph: &Graph<'_>, stream: CUstream) -> Asked<()> {
        ask!(self.driver(), cuGraphLaunch(graph.executable, stream))
    }

    /// Whether a stream captures, and in which capture.
    pub(crate) fn capture_info(&self, stream: CUstream) -> Asked<(CUstreamCaptureStatus, u64)> {
        let (mut status, mut id) = (CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE, 0);
        let (graph, nodes, count) = (ptr::null_mut(), ptr::null_mut(), ptr::null_mut());
        ask!(
            self.driver(),
            cuStreamGetCaptureInfo_v2(stream, &mut status, &mut id, graph, nodes, count)
        )?;
        Ok((status, id))
    }

    pub(crate) fn capture_status(&self, stream: CUstream) -> Asked<CUstreamCaptureStatus> {
        let mut status = CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
        ask!(self.driver(), cuStreamIsCapturing(stream, &mut status))?;
        Ok(status)
    }

    /// Sets this thread's capture mode and returns the one before.
    pub(crate) fn exchange_mode(
        &self,
        mut mode: CUstreamCaptureMode,
    ) -> Asked<CUstreamCaptureMode> {
        ask!(self.driver(), cuThreadExchangeStreamCaptureMode(&mut mode))?;
        Ok(mode)
    }

    // Device work

    /// `words` 32-bit words of one value.
    pub(crate) fn set32(&self, at: u64, value: u32, words: u64, stream: CUstream) -> Asked<()> {
        ask!(self.driver(), cuMemsetD32Async(at, value, words as usize, stream))
    }

    pub(crate) fn copy(&self, to: u64, from: u64, bytes: u64, stream: CUstream) -> Asked<()> {
        ask!(self.driver(), cuMemcpyDtoDAsync_v2(to, from, bytes as usize, stream))
    }

    /// One 32-bit word, once the stream's work so far is done.
    pub(crate) fn read32(&self, at: u64, stream: CUstream) -> Asked<u32> {
        let mut word = 0u32;
        let to = ptr::from_mut(&mut word).cast();
        let copied = ask!(self.driver(), cuMemcpyDtoHAsync_v2(to, at, 4, stream));
        self.stream_sync(stream)?;
        copied.map(|()| word)
    }

    fn launch(
        &self,
        function: CUfunction,
        blocks: u32,
        threads: u32,
        words: &mut [u64],
        stream: CUstream,
    ) -> Asked<()> {
        let mut params: Vec<*mut c_void> =
            words.iter_mut().map(|word| ptr::from_mut(word).cast()).collect();
        ask!(
            self.driver(),
            cuLaunchKernel(
                function,
                blocks,
                1,
                1,
                threads,
                1,
                1,
                0,
                stream,
                params.as_mut_ptr(),
                ptr::null_mut()
            )
        )
    }

    /// Writes the tests' pattern to 8-byte words.
    pub(crate) fn fill(&self, at: u64, words: u64, seed: u64, stream: CUstream) -> Asked<()> {
        self.fill_strided(at, words, 1, seed, stream)
    }

    /// As [`Self::fill`], to every `stride`-th word.
    pub(crate) fn fill_strided(
        &self,
        at: u64,
        words: u64,
        stride: u64,
        seed: u64,
        stream: CUstream,
    ) -> Asked<()> {
        self.launch(self.target.fill, 8, 128, &mut [at, words, stride, seed], stream)
    }

    /// Adds the number of words that are not the tests' pattern to the word at `errors`.
    pub(crate) fn check(
        &self,
        at: u64,
        words: u64,
        seed: u64,
        errors: u64,
        stream: CUstream,
    ) -> Asked<()> {
        self.launch(self.target.check, 8, 128, &mut [at, words, 1, seed, errors], stream)
    }

    /// Page-locked host memory that the device sees at the same address, all 0.
    pub(crate) fn host_words(&self, words: usize) -> Asked<u64> {
        let mut at = ptr::null_mut();
        let flags = CU_MEMHOSTALLOC_DEVICEMAP | CU_MEMHOSTALLOC_PORTABLE;
        ask!(self.driver(), cuMemHostAlloc(&mut at, words * 8, flags))?;
        // SAFETY: the memory is new, of that many bytes, and nobody else uses it yet.
        unsafe { at.cast::<u8>().write_bytes(0, words * 8) };
        self.made.borrow_mut().flags.push(at as u64);
        Ok(at as u64)
    }

    pub(crate) fn free_host(&self, at: u64) -> Asked<()> {
        ask!(self.driver(), cuMemFreeHost(at as *mut c_void))?;
        forget(&mut self.made.borrow_mut().flags, &at);
        Ok(())
    }

    /// Page-locks memory that the host has; `whole` is the caller's for as long as it is registered.
    pub(crate) fn register(&self, whole: &mut [u8]) -> Asked<u64> {
        let at = whole.as_mut_ptr();
        ask!(self.driver(), cuMemHostRegister_v2(at.cast(), whole.len(), 0))?;
        Ok(at as u64)
    }

    pub(crate) fn unregister(&self, at: u64) -> Asked<()> {
        ask!(self.driver(), cuMemHostUnregister(at as *mut c_void))
    }

    /// Page-locks whatever lies there.
    pub(crate) fn register_at(&self, at: u64, bytes: u64) -> Asked<()> {
        ask!(self.driver(), cuMemHostRegister_v2(at as *mut c_void, bytes as usize, 0))
    }

    /// Where the device sees page-locked memory.
    pub(crate) fn host_device_pointer(&self, at: u64) -> Asked<u64> {
        let mut seen = 0;
        ask!(self.driver(), cuMemHostGetDevicePointer_v2(&mut seen, at as *mut c_void, 0))?;
        Ok(seen)
    }

    pub(crate) fn host_flags(&self, at: u64) -> Asked<u32> {
        let mut flags: c_uint = 0;
        ask!(self.driver(), cuMemHostGetFlags(&mut flags, at as *mut c_void))?;
        Ok(flags)
    }

    /// Free and total bytes of the device.
    pub(crate) fn memory_info(&self) -> Asked<(usize, usize)> {
        let (mut free, mut total) = (0, 0);
        ask!(self.driver(), cuMemGetInfo_v2(&mut free, &mut total))?;
        Ok((free, total))
    }

    /// Copies to host memory, for the host.
    pub(crate) fn fetch(&self, to: &mut [u8], from: u64) -> Asked<()> {
        ask!(self.driver(), cuMemcpyDtoH_v2(to.as_mut_ptr().cast(), from, to.len()))
    }

    /// Copies from host memory, for the host.
    pub(crate) fn put(&self, to: u64, from: &[u8]) -> Asked<()> {
        ask!(self.driver(), cuMemcpyHtoD_v2(to, from.as_ptr().cast(), from.len()))
    }

    /// Copies to page-locked memory, in stream order.
    pub(crate) fn save(&self, to: u64, from: u64, bytes: u64, stream: CUstream) -> Asked<()> {
        ask!(self.driver(), cuMemcpyDtoHAsync_v2(to as *mut c_void, from, bytes as usize, stream))
    }

    /// Copies from page-locked memory, in stream order.
    pub(crate) fn load(&self, to: u64, from: u64, bytes: u64, stream: CUstream) -> Asked<()> {
        ask!(self.driver(), cuMemcpyHtoDAsync_v2(to, from as *const c_void, bytes as usize, stream))
    }

    /// Makes the stream busy until the hold is released.
    pub(crate) fn hold(&self, stream: CUstream) -> Asked<Hold> {
        let flag = self.host_words(1)?;
        self.launch(self.target.spin, 1, 1, &mut [flag], stream)?;
        Ok(Hold { flag })
    }

    /// Enqueues a host function; `data` must live until it has run.
    ///
    /// # Safety
    /// `function` must be safe to call once with `data` from another thread.
    pub(crate) unsafe fn host_function(
        &self,
        stream: CUstream,
        function: unsafe extern "C" fn(*mut c_void),
        data: *mut c_void,
    ) -> Asked<()> {
        ask!(self.driver(), cuLaunchHostFunc(stream, Some(function), data))
    }

    /// Gives back everything that was made and still exists. The first call that fails.
    pub(crate) fn clean_up(&self) -> Asked<()> {
        let made = self.made.take();
        let driver = self.driver();
        let mut first = Ok(());
        let mut note = |asked: Asked<()>| {
            if first.is_ok() {
                first = asked;
            }
        };
        note(self.set_context(self.target.context));
        if made.is_empty() {
            // Nothing to synchronise for, which would end other threads' captures.
            return first;
        }
        made.flags.iter().for_each(|&flag| let_go(flag));
        for &stream in &made.streams {
            let none = CUstreamCaptureStatus::CU_STREAM_CAPTURE_STATUS_NONE;
            if self.capture_status(stream).is_ok_and(|status| status != none) {
                // What an invalidated capture answers is no trouble of the clean-up.
                let _ = self.end_capture(stream);
            }
        }
        note(self.sync());
        made.events.iter().for_each(|&event| note(ask!(driver, cuEventDestroy_v2(event))));
        made.streams.iter().for_each(|&stream| note(ask!(driver, cuStreamDestroy_v2(stream))));
        made.allocations.iter().for_each(|&at| note(ask!(driver, cuMemFree_v2(at))));
        made.pools.iter().for_each(|&pool| note(ask!(driver, cuMemPoolDestroy(pool))));
        made.flags.iter().for_each(|&at| note(ask!(driver, cuMemFreeHost(at as *mut c_void))));
        for &(at, bytes) in &made.mappings {
            note(ask!(driver, cuMemUnmap(at, bytes as usize)));
        }
        made.handles.iter().for_each(|&handle| note(ask!(driver, cuMemRelease(handle))));
        for &(at, bytes) in &made.reservations {
            note(ask!(driver, cuMemAddressFree(at, bytes as usize)));
        }
        first
    }
}

impl Drop for Probe<'_> {
    fn drop(&mut self) {
        let _ = self.clean_up();
    }
}
