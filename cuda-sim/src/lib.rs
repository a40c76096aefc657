//! A simulated CUDA driver in plain Rust. The signatures come first; the model follows.

pub mod race;

use std::collections::BTreeMap;
use std::sync::Arc;

use cuda_sys::types::{CUresult, CUstream};

/// When enqueued work runs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Default)]
pub enum Schedule {
    /// As soon as its dependencies allow, at the latest when it is enqueued.
    #[default]
    Eager,
    /// Adversarially late: only when the host waits for it, or after `patience` polls.
    Late {
        /// How many polls in a row answer "not ready" before the polled work runs.
        patience: u32,
    },
    /// At each driver call a seeded choice of streams advances by a seeded number of items.
    Random,
    /// Only the `advance` methods and synchronising calls run work.
    Manual,
}

/// Why a simulator could not be built.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum SimError {
    /// Every slot of this process has a live simulator.
    #[error("all {0} simulator slots of this process are taken")]
    NoSlot(usize),
    /// The host could not provide the memory that stands for the device's.
    #[error("the host refused the memory behind a simulated device: {0}")]
    Host(#[from] std::io::Error),
}

/// Settings of a simulator to be.
#[derive(Clone, Debug, Default)]
pub struct Builder {}

impl Builder {
    /// The number of simulated devices; default 1.
    pub fn devices(self, _count: u32) -> Self {
        self
    }
    /// Physical memory of each device in bytes; default that of an H200.
    pub fn memory_bytes(self, _bytes: u64) -> Self {
        self
    }
    /// Seeds the scheduler: the same seed and the same calls give the same run.
    pub fn seed(self, _seed: u64) -> Self {
        self
    }
    /// When enqueued work runs; default [`Schedule::Eager`].
    pub fn schedule(self, _schedule: Schedule) -> Self {
        self
    }
    /// Whether the race detector is on; default true.
    pub fn detect_races(self, _on: bool) -> Self {
        self
    }
    /// Builds it.
    pub fn build(self) -> Result<Simulator, SimError> {
        Err(SimError::NoSlot(0))
    }
}

/// A simulated machine with its driver. Clones are the same machine.
#[derive(Clone, Debug)]
pub struct Simulator {}

/// Device memory as the work of one stream sees it while it executes.
#[derive(Debug)]
pub struct DeviceMemory<'a> {
    _state: std::marker::PhantomData<&'a mut ()>,
}

type Access = Result<(), CUresult>;

impl DeviceMemory<'_> {
    /// Reads `buf.len()` bytes at `addr`.
    pub fn read(&mut self, _addr: u64, _buf: &mut [u8]) -> Access {
        Err(CUresult::CUDA_ERROR_ILLEGAL_ADDRESS)
    }
    /// Writes bytes at `addr`.
    pub fn write(&mut self, _addr: u64, _bytes: &[u8]) -> Access {
        Err(CUresult::CUDA_ERROR_ILLEGAL_ADDRESS)
    }
    /// Fills `bytes` bytes at `addr`.
    pub fn fill_u8(&mut self, _addr: u64, _value: u8, _bytes: u64) -> Access {
        Err(CUresult::CUDA_ERROR_ILLEGAL_ADDRESS)
    }
    /// Fills `words` 32-bit words at `addr`.
    pub fn fill_u32(&mut self, _addr: u64, _value: u32, _words: u64) -> Access {
        Err(CUresult::CUDA_ERROR_ILLEGAL_ADDRESS)
    }
    /// Reads one 32-bit word.
    pub fn read_u32(&mut self, _addr: u64) -> Result<u32, CUresult> {
        Err(CUresult::CUDA_ERROR_ILLEGAL_ADDRESS)
    }
    /// Reads one 64-bit word.
    pub fn read_u64(&mut self, _addr: u64) -> Result<u64, CUresult> {
        Err(CUresult::CUDA_ERROR_ILLEGAL_ADDRESS)
    }
    /// Writes one 32-bit word.
    pub fn write_u32(&mut self, _addr: u64, _value: u32) -> Access {
        Err(CUresult::CUDA_ERROR_ILLEGAL_ADDRESS)
    }
    /// Writes one 64-bit word.
    pub fn write_u64(&mut self, _addr: u64, _value: u64) -> Access {
        Err(CUresult::CUDA_ERROR_ILLEGAL_ADDRESS)
    }
    /// Copies `bytes` bytes from `from` to `to`; the ranges must not overlap.
    pub fn copy(&mut self, _to: u64, _from: u64, _bytes: u64) -> Access {
        Err(CUresult::CUDA_ERROR_ILLEGAL_ADDRESS)
    }
}

/// A launch's arguments as a registered kernel sees them.
#[derive(Clone, Debug, Default)]
pub struct KernelParams {
    /// Blocks in x, y, z.
    pub grid: [u32; 3],
    /// Threads of a block in x, y, z.
    pub block: [u32; 3],
}

impl KernelParams {
    /// The bytes of parameter `index`.
    pub fn bytes(&self, _index: usize) -> Result<&[u8], CUresult> {
        Err(CUresult::CUDA_ERROR_INVALID_VALUE)
    }
    /// Parameter `index` as a 32-bit word; `CUDA_ERROR_INVALID_VALUE` if it is not of 4 bytes.
    pub fn u32(&self, _index: usize) -> Result<u32, CUresult> {
        Err(CUresult::CUDA_ERROR_INVALID_VALUE)
    }
    /// Parameter `index` as a 64-bit word; `CUDA_ERROR_INVALID_VALUE` if it is not of 8 bytes.
    pub fn u64(&self, _index: usize) -> Result<u64, CUresult> {
        Err(CUresult::CUDA_ERROR_INVALID_VALUE)
    }
}

/// A running kernel that ends when this is released or dropped.
#[derive(Debug)]
pub struct SpinHandle {}

impl SpinHandle {
    /// Lets the kernel end.
    pub fn release(self) {}
}

/// What still exists.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Leaks {
    /// References to physical memory handles that were not released.
    pub handles: usize,
    /// Mappings that were not unmapped.
    pub mappings: usize,
    /// Address reservations that were not freed.
    pub reservations: usize,
    /// Streams that were not destroyed.
    pub streams: usize,
    /// Events that were not destroyed.
    pub events: usize,
    /// Allocations (cuMemAlloc, cuMemAllocAsync) that were not freed.
    pub allocations: usize,
    /// Page-locked host allocations that were not freed.
    pub host_allocations: usize,
    /// Memory pools made by cuMemPoolCreate that were not destroyed.
    pub pools: usize,
    /// Contexts (created, or primary with references) that were not given back.
    pub contexts: usize,
    /// Modules that were not unloaded.
    pub modules: usize,
    /// Graphs and executable graphs that were not destroyed.
    pub graphs: usize,
}

impl Leaks {
    /// Whether nothing is left.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

/// What the simulator has found so far.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct Report {
    /// Unordered uses of the same physical bytes.
    pub races: Vec<race::Race>,
    /// What would crash or corrupt on a real driver, in order.
    pub misuse: Vec<String>,
    /// What still exists.
    pub leaks: Leaks,
}

impl Simulator {
    /// Default settings.
    pub fn builder() -> Builder {
        Builder::default()
    }
    /// The driver's function table; it keeps the simulator alive.
    pub fn driver(&self) -> cuda_sys::Driver {
        // SAFETY: no symbol is answered.
        unsafe { cuda_sys::Driver::from_symbols("simulator", |_| std::ptr::null(), Arc::new(())) }
    }
    /// Enqueues a Rust closure as device work.
    pub fn enqueue(
        &self,
        _stream: CUstream,
        _name: &str,
        _work: impl FnMut(&mut DeviceMemory<'_>) -> Result<(), CUresult> + Send + 'static,
    ) -> Result<(), CUresult> {
        Err(CUresult::CUDA_ERROR_NOT_INITIALIZED)
    }
    /// Enqueues a kernel that spins until the handle is released or dropped.
    pub fn spin(&self, _stream: CUstream) -> Result<SpinHandle, CUresult> {
        Err(CUresult::CUDA_ERROR_NOT_INITIALIZED)
    }
    /// Registers what cuModuleGetFunction(`name`) finds and cuLaunchKernel runs.
    /// A kernel that returns `CUDA_ERROR_NOT_READY` is run again later, as if it were spinning.
    pub fn register_kernel(
        &self,
        _name: &str,
        _param_sizes: &[usize],
        _kernel: impl Fn(&KernelParams, &mut DeviceMemory<'_>) -> Result<(), CUresult>
        + Send
        + Sync
        + 'static,
    ) {
    }
    /// Runs the next item of a stream if nothing holds it back; whether one ran.
    pub fn advance(&self, _stream: CUstream) -> bool {
        false
    }
    /// Runs the next item of every stream that nothing holds back; how many ran.
    pub fn advance_all(&self) -> usize {
        0
    }
    /// Runs items until none can run; how many ran.
    pub fn run_until_idle(&self) -> usize {
        0
    }
    /// Fails the `n`-th call (1: the next) of the function `name` with `code`.
    pub fn fail_nth(&self, _name: &str, _n: u64, _code: CUresult) {}
    /// Fails the `n`-th call (1: the next) of any function.
    pub fn fail_call(&self, _n: u64, _code: CUresult) {}
    /// Fails every call after the next `n`.
    pub fn fail_all_calls_after(&self, _n: u64, _code: CUresult) {}
    /// Forgets every fault that was asked for, not a lost device.
    pub fn clear_faults(&self) {}
    /// Driver calls so far.
    pub fn calls(&self) -> u64 {
        0
    }
    /// Driver calls so far by name.
    pub fn call_counts(&self) -> BTreeMap<&'static str, u64> {
        BTreeMap::new()
    }
    /// The time that the calls would have taken on the modelled machine, in microseconds.
    pub fn modelled_us(&self) -> f64 {
        0.0
    }
    /// From now on every call on that device's contexts answers `code`.
    pub fn lose_device(&self, _device: i32, _code: CUresult) {}
    /// Sets the physical memory of a device.
    pub fn set_memory_limit(&self, _device: i32, _bytes: u64) {}
    /// Physical memory in use on a device.
    pub fn memory_used(&self, _device: i32) -> u64 {
        0
    }
    /// Reads device memory from the test, outside of all order.
    pub fn peek(&self, _addr: u64, _buf: &mut [u8]) -> Result<(), CUresult> {
        Err(CUresult::CUDA_ERROR_INVALID_VALUE)
    }
    /// Everything found so far.
    pub fn report(&self) -> Report {
        Report::default()
    }
    /// Panics with a readable list if there is any race or misuse.
    pub fn assert_clean(&self) {}
    /// What still exists.
    pub fn leaks(&self) -> Leaks {
        Leaks::default()
    }
}
