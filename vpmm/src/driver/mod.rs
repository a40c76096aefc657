//! The driver functions that this crate calls, and nothing else that is foreign.
//!
//! At start the functions are copied out of `cuda_sys`'s table of optional slots
//! into a private table without options, so that a call is one indirect jump, and
//! what an old driver lacks is one named error at start. Every call is counted
//! and its answer checked in one place.

mod living;
mod realm;
mod watchers;

use std::any::Any;
use std::ffi::{c_char, c_int, c_uchar, c_uint, c_ushort, c_void};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock, Weak};
use std::time::{Duration, Instant};

use cuda_sys::types::*;

use crate::device::{Device, StreamHandle};
use crate::error::{Error, Result};
use crate::fork::Birthmark;

use living::Living;
pub(crate) use realm::Realm;
use watchers::Watchers;
pub(crate) use watchers::{Awaited, StreamWatcher};

/// A driver call that did not succeed.
#[derive(Debug, Clone, Copy, PartialEq, Eq)]
pub(crate) struct Failure {
    pub(crate) call: &'static str,
    pub(crate) code: CUresult,
}

impl Failure {
    /// The failure of a call about `bytes` of memory or address space.
    pub(crate) fn about(self, bytes: u64) -> Error {
        Error::from_driver(self.call, self.code, bytes)
    }

    pub(crate) fn is_out_of_memory(self) -> bool {
        self.code == CUresult::CUDA_ERROR_OUT_OF_MEMORY
    }

    /// Whether a call about one of our events failed because a capture took its record, so that the
    /// event proves nothing about the stream. While the capture is under way the driver says so; once it
    /// is over it calls the event an invalid value, which an event of ours is for no other reason.
    pub(crate) fn is_of_capture(self) -> bool {
        matches!(
            self.code,
            CUresult::CUDA_ERROR_CAPTURED_EVENT | CUresult::CUDA_ERROR_INVALID_VALUE
        )
    }
}

impl From<Failure> for Error {
    fn from(failure: Failure) -> Self {
        failure.about(0)
    }
}

macro_rules! driver_calls {
    ($( $name:ident ( $( $arg:ident : $ty:ty ),* ) ; )*) => {
        #[allow(non_snake_case)]
        struct Table {
            $( $name: unsafe extern "C" fn($( $ty ),*) -> CUresult, )*
        }

        impl Table {
            /// Takes every function that is called here, or names the first that is missing.
            fn resolve(api: &cuda_sys::DriverApi) -> Result<Self, &'static str> {
                Ok(Self { $( $name: api.$name.ok_or(stringify!($name))?, )* })
            }
        }

        #[allow(non_camel_case_types)]
        #[derive(Clone, Copy)]
        enum Call { $( $name, )* }

        const NAMES: &[&str] = &[$( stringify!($name), )*];

        #[allow(non_snake_case, clippy::missing_safety_doc, clippy::too_many_arguments)]
        impl Driver {
            $(
                /// Calls the driver function of this name.
                ///
                /// # Safety
                /// Its contract in the CUDA driver API reference: pointers valid for what it
                /// reads and writes, handles alive.
                pub(crate) unsafe fn $name(&self, $( $arg: $ty ),*) -> Result<(), Failure> {
                    if self.is_forked() {
                        let code = CUresult::CUDA_ERROR_NOT_INITIALIZED;
                        return Err(Failure { call: stringify!($name), code });
                    }
                    crate::lock::check_driver_call();
                    self.0.counts[Call::$name as usize].fetch_add(1, Ordering::Relaxed);
                    // SAFETY: the pointer has this signature (cuda_sys declares it from the header),
                    // the library stays loaded while `self.0.library` lives, and the caller keeps
                    // the function's own contract.
                    let call = || unsafe { (self.0.table.$name)($( $arg ),*) };
                    let clock = &self.0.clock;
                    let code =
                        if clock.is_on() { clock.time(Call::$name, call) } else { call() };
                    if code == CUresult::CUDA_SUCCESS {
                        Ok(())
                    } else {
                        Err(Failure { call: stringify!($name), code })
                    }
                }
            )*
        }
    };
}

driver_calls! {
    cuInit(flags: c_uint);
    cuDriverGetVersion(version: *mut c_int);
    cuDeviceGetCount(count: *mut c_int);
    cuDeviceGet(device: *mut CUdevice, ordinal: c_int);
    cuDeviceGetName(name: *mut c_char, len: c_int, device: CUdevice);
    cuDeviceGetAttribute(value: *mut c_int, attribute: CUdevice_attribute, device: CUdevice);
    cuDeviceTotalMem_v2(bytes: *mut usize, device: CUdevice);
    cuDeviceCanAccessPeer(can: *mut c_int, device: CUdevice, owner: CUdevice);
    cuDevicePrimaryCtxRetain(context: *mut CUcontext, device: CUdevice);
    cuDevicePrimaryCtxRelease_v2(device: CUdevice);
    cuCtxGetCurrent(context: *mut CUcontext);
    cuCtxPushCurrent_v2(context: CUcontext);
    cuCtxPopCurrent_v2(context: *mut CUcontext);
    cuCtxGetDevice(device: *mut CUdevice);
    cuCtxGetId(context: CUcontext, id: *mut u64);
    cuCtxSynchronize();
    cuMemGetInfo_v2(free: *mut usize, total: *mut usize);
    cuStreamCreate(stream: *mut CUstream, flags: c_uint);
    cuStreamDestroy_v2(stream: CUstream);
    cuStreamSynchronize(stream: CUstream);
    cuStreamGetId(stream: CUstream, id: *mut u64);
    cuStreamGetCtx(stream: CUstream, context: *mut CUcontext);
    cuStreamIsCapturing(stream: CUstream, status: *mut CUstreamCaptureStatus);
    cuStreamGetCaptureInfo_v2(
        stream: CUstream,
        status: *mut CUstreamCaptureStatus,
        id: *mut u64,
        graph: *mut CUgraph,
        dependencies: *mut *const CUgraphNode,
        count: *mut usize
    );
    cuStreamWaitEvent(stream: CUstream, event: CUevent, flags: c_uint);
    cuThreadExchangeStreamCaptureMode(mode: *mut CUstreamCaptureMode);
    cuEventCreate(event: *mut CUevent, flags: c_uint);
    cuEventDestroy_v2(event: CUevent);
    cuEventRecord(event: CUevent, stream: CUstream);
    cuEventQuery(event: CUevent);
    cuEventSynchronize(event: CUevent);
    cuEventElapsedTime(milliseconds: *mut f32, earlier: CUevent, later: CUevent);
    cuMemGetAllocationGranularity(
        granularity: *mut usize,
        properties: *const CUmemAllocationProp,
        option: CUmemAllocationGranularity_flags
    );
    cuMemExportToShareableHandle(
        shared: *mut c_void,
        handle: CUmemGenericAllocationHandle,
        kind: CUmemAllocationHandleType,
        flags: u64
    );
    cuMemImportFromShareableHandle(
        handle: *mut CUmemGenericAllocationHandle,
        shared: *mut c_void,
        kind: CUmemAllocationHandleType
    );
    cuMemGetAllocationPropertiesFromHandle(
        properties: *mut CUmemAllocationProp,
        handle: CUmemGenericAllocationHandle
    );
    cuMemAddressReserve(
        address: *mut CUdeviceptr,
        bytes: usize,
        alignment: usize,
        hint: CUdeviceptr,
        flags: u64
    );
    cuMemAddressFree(address: CUdeviceptr, bytes: usize);
    cuMemCreate(
        handle: *mut CUmemGenericAllocationHandle,
        bytes: usize,
        properties: *const CUmemAllocationProp,
        flags: u64
    );
    cuMemRelease(handle: CUmemGenericAllocationHandle);
    cuMemMap(
        address: CUdeviceptr,
        bytes: usize,
        offset: usize,
        handle: CUmemGenericAllocationHandle,
        flags: u64
    );
    cuMemUnmap(address: CUdeviceptr, bytes: usize);
    cuMemSetAccess(address: CUdeviceptr, bytes: usize, access: *const CUmemAccessDesc, count: usize);
    cuMemAlloc_v2(address: *mut CUdeviceptr, bytes: usize);
    cuMemFree_v2(address: CUdeviceptr);
    cuMemAllocManaged(address: *mut CUdeviceptr, bytes: usize, flags: c_uint);
    cuMemPrefetchAsync(address: CUdeviceptr, bytes: usize, device: CUdevice, stream: CUstream);
    cuMemHostAlloc(memory: *mut *mut c_void, bytes: usize, flags: c_uint);
    cuMemFreeHost(memory: *mut c_void);
    cuMemcpyDtoHAsync_v2(to: *mut c_void, from: CUdeviceptr, bytes: usize, stream: CUstream);
    cuMemcpyHtoDAsync_v2(to: CUdeviceptr, from: *const c_void, bytes: usize, stream: CUstream);
    cuMemcpyDtoDAsync_v2(to: CUdeviceptr, from: CUdeviceptr, bytes: usize, stream: CUstream);
    cuMemsetD8Async(to: CUdeviceptr, value: c_uchar, count: usize, stream: CUstream);
    cuMemsetD16Async(to: CUdeviceptr, value: c_ushort, count: usize, stream: CUstream);
    cuMemsetD32Async(to: CUdeviceptr, value: c_uint, count: usize, stream: CUstream);
    cuMemPoolCreate(pool: *mut CUmemoryPool, properties: *const CUmemPoolProps);
    cuMemPoolDestroy(pool: CUmemoryPool);
    cuMemPoolTrimTo(pool: CUmemoryPool, keep_bytes: usize);
    cuMemPoolSetAccess(pool: CUmemoryPool, access: *const CUmemAccessDesc, count: usize);
    cuMemPoolSetAttribute(pool: CUmemoryPool, attribute: CUmemPool_attribute, value: *mut c_void);
    cuMemPoolGetAttribute(pool: CUmemoryPool, attribute: CUmemPool_attribute, value: *mut c_void);
    cuMemAllocFromPoolAsync(
        address: *mut CUdeviceptr,
        bytes: usize,
        pool: CUmemoryPool,
        stream: CUstream
    );
    cuMemFreeAsync(address: CUdeviceptr, stream: CUstream);
}

/// The time spent in driver calls, by function, where somebody asked for it.
struct Clock {
    on: AtomicBool,
    nanoseconds: [AtomicU64; NAMES.len()],
}

impl Default for Clock {
    fn default() -> Self {
        Self { on: AtomicBool::new(false), nanoseconds: std::array::from_fn(|_| AtomicU64::new(0)) }
    }
}

impl Clock {
    fn is_on(&self) -> bool {
        self.on.load(Ordering::Relaxed)
    }

    #[cold]
    fn time(&self, function: Call, call: impl FnOnce() -> CUresult) -> CUresult {
        let start = Instant::now();
        let code = call();
        let took = start.elapsed().as_nanos() as u64;
        self.nanoseconds[function as usize].fetch_add(took, Ordering::Relaxed);
        code
    }
}

struct Inner {
    realm: Realm,
    table: Table,
    clock: Clock,
    counts: [AtomicU64; NAMES.len()],
    birthmark: Birthmark,
    watchers: Watchers,
    living: Living,
    /// The first of what rooms above keep.
    companions: OnceLock<Box<Companion>>,
    library: cuda_sys::Driver,
}

/// What a room above keeps for each driver, one value of a type, and the next such. It is there from the first
/// question on, so that further ones write nothing.
struct Companion {
    /// An `Arc` of the value.
    value: Box<dyn Any + Send + Sync>,
    next: OnceLock<Box<Self>>,
}

/// A loaded and initialised CUDA driver. Cheap to clone; all clones share one call count.
#[derive(Clone)]
pub struct Driver(Arc<Inner>);

impl Driver {
    /// Loads the system's driver (`libcuda.so.1`) and initialises it.
    ///
    /// Slow the first time in a process: `cuInit` finds the devices then.
    ///
    /// # Errors
    /// [`Error::NoDriver`] where no library is found, [`Error::MissingSymbol`] where it is too old,
    /// [`Error::Driver`] where initialisation fails (no device, for example).
    pub fn load() -> Result<Self> {
        let library = cuda_sys::Driver::load().map_err(|error| Error::NoDriver(Arc::new(error)))?;
        Self::new(library)
    }

    /// Takes a driver that the caller loaded, or a simulated one, and initialises it.
    ///
    /// # Errors
    /// As [`Driver::load`], without [`Error::NoDriver`].
    pub fn new(library: cuda_sys::Driver) -> Result<Self> {
        let table = Table::resolve(&library)
            .map_err(|name| Error::MissingSymbol { name, origin: library.origin().to_owned() })?;
        let counts = [const { AtomicU64::new(0) }; NAMES.len()];
        let birthmark = Birthmark::new().ok_or(Error::Driver {
            call: "mmap",
            code: CUresult::CUDA_ERROR_OUT_OF_MEMORY,
            bytes: 0,
        })?;
        let driver = Self(Arc::new(Inner {
            realm: Realm::next(),
            birthmark,
            table,
            clock: Clock::default(),
            counts,
            watchers: Watchers::default(),
            living: Living::default(),
            companions: OnceLock::new(),
            library,
        }));
        // SAFETY: cuInit takes no pointer; flags must be 0.
        unsafe { driver.cuInit(0) }?;
        Ok(driver)
    }

    /// The raw functions, for calls that this crate does not make itself.
    pub fn raw(&self) -> &cuda_sys::Driver {
        &self.0.library
    }

    /// The CUDA version that the driver supports, as the driver counts: 13000 is 13.0.
    ///
    /// # Errors
    /// [`Error::Driver`].
    pub fn version(&self) -> Result<i32> {
        let mut version = 0;
        // SAFETY: the pointer is to a live c_int.
        unsafe { self.cuDriverGetVersion(&mut version) }?;
        Ok(version)
    }

    /// How many devices the driver shows.
    ///
    /// # Errors
    /// [`Error::Driver`].
    pub fn device_count(&self) -> Result<u32> {
        let mut count = 0;
        // SAFETY: the pointer is to a live c_int.
        unsafe { self.cuDeviceGetCount(&mut count) }?;
        Ok(u32::try_from(count).unwrap_or(0))
    }

    /// Opens a device and retains its primary context, the one that the CUDA runtime uses.
    ///
    /// # Errors
    /// [`Error::NoDevice`] for an ordinal that is not there; [`Error::Driver`].
    pub fn device(&self, ordinal: u32) -> Result<Device> {
        Device::open(self, ordinal)
    }

    /// Starts or stops measuring the time in calls made through this driver and its clones. Off at
    /// first; on, it costs two clock readings a call.
    pub fn measure_calls(&self, on: bool) {
        self.0.clock.on.store(on, Ordering::Relaxed);
    }

    /// The time in calls while [`measure_calls`](Self::measure_calls) was on, summed over threads.
    pub fn time_in_calls(&self) -> Duration {
        self.calls().time()
    }

    /// What tells this driver and its clones from others in the process.
    pub(crate) fn realm(&self) -> Realm {
        self.0.realm
    }

    /// The value of this type that belongs to this driver and its clones, made when it is first
    /// asked for.
    pub(crate) fn companion<T: Any + Default + Send + Sync>(&self) -> &Arc<T> {
        let mut place = &self.0.companions;
        loop {
            let here = place.get_or_init(|| {
                let value = Box::new(Arc::<T>::default());
                Box::new(Companion { value, next: OnceLock::new() })
            });
            if let Some(known) = here.value.downcast_ref() {
                return known;
            }
            place = &here.next;
        }
    }

    /// Adds somebody to be told of the end of streams.
    pub(crate) fn watch_streams(&self, watcher: Weak<dyn StreamWatcher>) {
        self.0.watchers.add(watcher);
    }

    /// Whoever was added is told nothing from here on, and is in no call. Its own calls must not do
    /// this.
    pub(crate) fn unwatch_streams<T: StreamWatcher>(&self, watcher: &T) {
        if !self.is_forked() {
            self.0.watchers.remove(watcher);
        }
    }

    /// Whether this process is a child of the one that started the driver (a fork), where nothing works any more. To be
    /// asked before a lock is taken that a thread of the parent may have held: that thread is not here. One load, no
    /// driver call.
    #[inline]
    pub fn is_forked(&self) -> bool {
        self.0.birthmark.is_childs()
    }

    /// Turns a child away, before it takes a lock that a thread of its parent may hold.
    #[inline]
    pub(crate) fn check_process(&self) -> Result<()> {
        if self.is_forked() { Err(Error::Forked) } else { Ok(()) }
    }

    /// Notes a stream whose end will be told.
    pub(crate) fn note_life_of(&self, stream: StreamHandle, context_id: u64) {
        if let Some(number) = stream.known_to(self.realm()) {
            self.0.living.add(number, stream, context_id);
        }
    }

    /// Whether something is true of a stream of a context whose end is told and has not been. It is asked under a lock
    /// that the end of any such stream waits for: it calls nothing but the driver.
    pub(crate) fn any_living<E>(
        &self,
        context_id: u64,
        is: impl FnMut(StreamHandle) -> Result<bool, E>,
    ) -> Result<bool, E> {
        self.0.living.any(context_id, is)
    }

    /// Whether a handle is of a stream whose end was told. The driver may crash on it, or take it for another
    /// stream that has come to its place since.
    pub(crate) fn has_ended(&self, stream: StreamHandle) -> bool {
        stream.known_to(self.realm()).is_some_and(|number| !self.0.living.has(number))
    }

    /// Tells every watcher that a stream is about to be destroyed.
    pub(crate) fn tell_end_of(&self, stream: StreamHandle) {
        if self.is_forked() {
            return;
        }
        let watchers = &self.0.watchers;
        for id in watchers.ids() {
            watchers.call(id, |watcher| watcher.stream_leaves(stream));
        }
        // Before any of them knows: who was told takes it for alive no more, and who was not has it still.
        if let Some(number) = stream.known_to(self.realm()) {
            self.0.living.remove(number);
        }
        for id in watchers.ids() {
            watchers.call(id, |watcher| watcher.stream_ends(stream));
        }
    }

    /// Whether the end of a stream waits for a call that this thread is in. Not under a lock.
    pub(crate) fn awaits_this_thread(&self, stream: StreamHandle) -> bool {
        let watchers = &self.0.watchers;
        let has_passed_on = |id| watchers.call(id, |watcher| watcher.has_passed_on(stream));
        watchers.ids().into_iter().any(|id| has_passed_on(id) == Some(true))
    }

    /// Waits on the host by `wait`, and tells every watcher what has passed by it.
    pub(crate) fn tell_wait_for(
        &self,
        of: Awaited,
        wait: impl FnOnce() -> Result<(), Failure>,
    ) -> Result<()> {
        self.check_process()?;
        let watchers = &self.0.watchers;
        let marks = |id| Some((id, watchers.call(id, |watcher| watcher.marks(of))?));
        let marks: Vec<_> = watchers.ids().into_iter().filter_map(marks).collect();
        wait()?;
        for (id, marks) in marks {
            watchers.call(id, |watcher| marks.iter().for_each(|mark| watcher.passed(mark)));
        }
        Ok(())
    }

    /// The calls made so far through this driver and its clones.
    pub fn calls(&self) -> DriverCalls {
        let read = |of: &[AtomicU64; NAMES.len()]| {
            std::array::from_fn(|index| of[index].load(Ordering::Relaxed))
        };
        DriverCalls { counts: read(&self.0.counts), nanoseconds: read(&self.0.clock.nanoseconds) }
    }
}

impl std::fmt::Debug for Driver {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Driver").field("origin", &self.0.library.origin()).finish()
    }
}

/// How often each driver function was called, and for how long where
/// [that was measured](Driver::measure_calls): a snapshot.
#[derive(Clone, PartialEq, Eq)]
pub struct DriverCalls {
    counts: [u64; NAMES.len()],
    nanoseconds: [u64; NAMES.len()],
}

impl DriverCalls {
    /// The functions that were called at least once, with their counts.
    pub fn iter(&self) -> impl Iterator<Item = (&'static str, u64)> + '_ {
        NAMES.iter().copied().zip(self.counts).filter(|(_, count)| *count > 0)
    }

    /// How often one function was called; 0 for a name that is not called here.
    pub fn count(&self, name: &str) -> u64 {
        NAMES.iter().position(|known| *known == name).map_or(0, |index| self.counts[index])
    }

    /// All calls together.
    pub fn total(&self) -> u64 {
        self.counts.iter().sum()
    }

    /// The time in calls of each function that was measured, summed over threads.
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let sim = cuda_sim::Simulator::builder().build()?;
    /// # let driver = vpmm::Driver::new(sim.driver())?;
    /// # let device = driver.device(0)?;
    /// # let stream = device.stream()?;
    /// # let pool = vpmm::Pool::new(&device, &vpmm::PoolConfig::default())?;
    /// driver.measure_calls(true);
    /// let before = driver.calls();
    /// let ptr = pool.malloc(64 << 20, &stream)?;
    /// let spent = driver.calls().since(&before);
    /// for (function, time) in spent.times() {
    ///     println!("{} calls of {function}: {time:?}", spent.count(function));
    /// }
    /// assert!(spent.times().any(|(function, _)| function == "cuMemSetAccess"));
    /// # pool.free(ptr, &stream)?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn times(&self) -> impl Iterator<Item = (&'static str, Duration)> + '_ {
        let times = NAMES.iter().copied().zip(self.nanoseconds);
        times.filter(|(_, ns)| *ns > 0).map(|(name, ns)| (name, Duration::from_nanos(ns)))
    }

    /// The time in all calls that were measured.
    pub fn time(&self) -> Duration {
        Duration::from_nanos(self.nanoseconds.iter().sum())
    }

    /// What was called after `earlier` was taken.
    pub fn since(&self, earlier: &Self) -> Self {
        let less = |now: &[u64; NAMES.len()], then: &[u64; NAMES.len()]| {
            std::array::from_fn(|index| now[index].saturating_sub(then[index]))
        };
        Self {
            counts: less(&self.counts, &earlier.counts),
            nanoseconds: less(&self.nanoseconds, &earlier.nanoseconds),
        }
    }
}

impl std::fmt::Debug for DriverCalls {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_map().entries(self.iter()).finish()
    }
}
