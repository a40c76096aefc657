//! A simulated CUDA driver in plain Rust, for machines without a GPU.
//!
//! A [`Simulator`] is a machine with devices. Its [`driver`](Simulator::driver) is a
//! [`cuda_sys::Driver`], so that a caller runs the code that it runs on a GPU:
//!
//! ```
//! use cuda_sim::{Schedule, Simulator};
//! use cuda_sys::types::CUresult;
//!
//! let sim = Simulator::builder().schedule(Schedule::Late { patience: 2 }).build()?;
//! let driver = sim.driver();
//! let init = driver.cuInit.expect("the simulator has cuInit");
//! // SAFETY: cuInit takes no pointers.
//! assert_eq!(unsafe { init(0) }, CUresult::CUDA_SUCCESS);
//! sim.assert_clean();
//! # Ok::<(), cuda_sim::SimError>(())
//! ```
//!
//! It is a model, not a mock:
//!
//! - Physical memory is real (sparse) memory, so that two mappings of one handle are the same
//!   bytes, and exported handles are descriptors that other processes can import.
//! - Streams complete asynchronously, as late as the contract allows if asked to
//!   ([`Schedule`]); one seed and one sequence of calls are one run.
//! - Work finds memory when it executes, not when it is enqueued, and a race detector ([`race`])
//!   watches the physical bytes, through whatever address they are used: also for uses beside or
//!   after their free, by the driver's own allocators.
//! - The driver's contract is enforced. What would crash a real driver or corrupt memory is
//!   reported as misuse ([`Simulator::assert_clean`]) and answered with an error.
//! - Calls fail on demand, memory ends at a limit, devices are lost.
//! - Every call adds its measured cost to a modelled time ([`costs`]).
//!
//! Not modelled: where pages of managed memory are, the host's own loads and stores through host-located mappings
//! (device work reaches them), arrays, multicast, allocation nodes of graphs, exported memory pools,
//! CUDA IPC, the end of a thread (a driver waits for its default stream then), open descriptors of
//! exported memory (a driver counts it as used until they are closed), and time spent by the device
//! itself.

mod address;
mod allocate;
mod arguments;
mod builder;
mod call;
mod capture;
mod context;
mod copy;
pub mod costs;
mod device;
mod event;
mod faults;
mod handles;
mod heap;
pub mod kernels;
mod managed;
mod memory;
mod module;
mod names;
mod physical;
mod pool;
mod process;
pub mod race;
mod random;
mod ranges;
mod report;
mod schedule;
mod segment;
mod slots;
mod stream;
mod stream_calls;
mod vmm;

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, Weak};

use cuda_sys::types::{CUresult, CUstream};
use rustc_hash::FxHashMap;

pub use builder::{Builder, Schedule, SimError};
pub use costs::Costs;
pub use memory::DeviceMemory;
pub use module::KernelParams;
pub use race::Race;
pub use report::{Leaks, Report};

use crate::call::{Call, InsideWork, Shared, State};
use crate::stream::{Kernel, Work};

/// A simulated machine with its driver. Clones are the same machine.
#[derive(Clone, Debug)]
pub struct Simulator {
    shared: Arc<Shared>,
}

/// A kernel that spins on its stream until this is released or dropped.
#[derive(Debug)]
#[must_use = "dropping it lets the kernel end"]
pub struct SpinHandle {
    released: Arc<AtomicBool>,
    shared: Weak<Shared>,
}

impl SpinHandle {
    /// Lets the kernel end; what waits behind it may run from now on.
    pub fn release(self) {}
}

impl Drop for SpinHandle {
    fn drop(&mut self) {
        self.released.store(true, Ordering::Release);
        if let Some(shared) = self.shared.upgrade()
            && !InsideWork::is(shared.slot)
        {
            shared.call("SpinHandle::release").settle();
            shared.changed.notify_all();
        }
    }
}

/// What control of a simulator from inside its own work gets, where the lock is held.
const INSIDE: &str = "a simulator cannot be controlled from inside its own device work";

impl Simulator {
    /// The most devices that one can have.
    pub const MAX_DEVICES: usize = address::MAX_DEVICES;

    /// Default settings: one device like an H200, eager scheduling, races detected.
    pub fn builder() -> Builder {
        Builder::default()
    }

    fn new(settings: Builder) -> Result<Self, SimError> {
        let devices = settings.devices;
        if devices > address::MAX_DEVICES {
            return Err(SimError::TooManyDevices { asked: devices, most: address::MAX_DEVICES });
        }
        let mut state = State {
            schedule: settings.schedule,
            patience_used: 0,
            deadlock_after: settings.deadlock_after,
            random: random::Random(settings.seed),
            initialized: false,
            peer_access: settings.peer_access,
            gpu_direct_rdma: settings.gpu_direct_rdma,
            fabric: settings.fabric,
            lost: vec![None; devices],
            contexts: context::Contexts::new(devices),
            threads: FxHashMap::default(),
            streams: stream::Streams::new(),
            events: event::Events::new(),
            space: memory::Space {
                physical: physical::Physical::new(
                    devices,
                    settings.memory_bytes,
                    settings.host_memory_bytes,
                ),
                addresses: address::AddressSpace::new(),
                host: memory::HostMemory::default(),
                detector: settings.detect_races.then(race::Detector::new),
            },
            memory_handles: vmm::MemoryHandles::new(),
            heaps: (0..devices)
                .map(|device| heap::Heap::new(physical::Seat::Device(device), physical::GRANULE))
                .collect(),
            pools: pool::Pools::new(devices),
            modules: module::Modules::new(),
            captures: capture::Captures::new(),
            faults: faults::Faults::default(),
            calls: 0,
            counts: vec![0; slots::NAMES.len()],
            flat_us_of: slots::NAMES.iter().map(|name| settings.costs.flat(name)).collect(),
            costs: settings.costs,
            modelled_us: 0.0,
            modelled_us_of: vec![0.0; slots::NAMES.len()],
            findings: report::Findings::default(),
            host: race::Clock::new(),
        };
        for kernel in kernels::KERNELS {
            state.modules.register(kernel.name, kernel.param_sizes, Arc::new(kernel.run));
        }
        let build = |slot, me| Shared {
            process: process::number(),
            slot,
            me,
            state: parking_lot::Mutex::new(state),
            changed: parking_lot::Condvar::new(),
        };
        let shared = slots::claim(build).ok_or(SimError::NoSlot { slots: slots::SLOTS })?;
        Ok(Self { shared })
    }

    /// The driver's function table, with every function that the simulator has. It keeps the
    /// simulator alive.
    pub fn driver(&self) -> cuda_sys::Driver {
        let keep_alive = Arc::clone(&self.shared);
        let slot = self.shared.slot;
        // SAFETY: `symbol` answers the function declared for that name, checked at compile time
        // against the bindings; it is code of this program and always callable.
        unsafe {
            cuda_sys::Driver::from_symbols(
                "simulator",
                |name| slots::symbol(slot, name),
                keep_alive,
            )
        }
    }

    /// # Panics
    /// From inside the simulator's own device work, whose lock is held.
    fn call(&self) -> Call<'_> {
        assert!(!InsideWork::is(self.shared.slot), "{INSIDE}");
        self.shared.call("simulator")
    }

    /// Enqueues a Rust closure as device work: a kernel stand-in. It runs in stream order when
    /// the schedule lets it, under the simulator's lock, so it must not make driver calls, and nor must
    /// the drop of what it owns: they are not permitted.
    ///
    /// A closure that answers `CUDA_ERROR_NOT_READY` is taken to be still running and runs again
    /// later; any other error makes the stream's context answer it from then on, as a failed
    /// kernel does. On a capturing stream the closure becomes a node and runs at each launch.
    ///
    /// # Errors
    /// As a kernel launch: an unknown stream, a lost device, an invalid capture.
    pub fn enqueue(
        &self,
        stream: CUstream,
        name: &str,
        work: impl FnMut(&mut DeviceMemory<'_>) -> Result<(), CUresult> + Send + 'static,
    ) -> Result<(), CUresult> {
        if InsideWork::is(self.shared.slot) {
            return Err(CUresult::CUDA_ERROR_NOT_PERMITTED);
        }
        let mut call = self.call();
        let key = call.stream(stream)?;
        let kernel: Kernel = Arc::new(Mutex::new(work));
        call.submit(key, Work::Kernel(kernel), &name.into()).map(|_| ())
    }

    /// Enqueues a kernel that runs until the handle is released or dropped.
    ///
    /// # Errors
    /// As [`Self::enqueue`].
    pub fn spin(&self, stream: CUstream) -> Result<SpinHandle, CUresult> {
        let released = Arc::new(AtomicBool::new(false));
        let seen = Arc::clone(&released);
        self.enqueue(stream, "spin", move |_| {
            if seen.load(Ordering::Acquire) { Ok(()) } else { Err(CUresult::CUDA_ERROR_NOT_READY) }
        })?;
        Ok(SpinHandle { released, shared: Arc::downgrade(&self.shared) })
    }

    /// Registers the meaning of a kernel: what cuModuleGetFunction finds in a module whose PTX
    /// has an entry of that `name`, and cuLaunchKernel runs once for the whole grid.
    /// `param_sizes` are the bytes of each parameter. Answers are as for [`Self::enqueue`].
    pub fn register_kernel(
        &self,
        name: &str,
        param_sizes: &[usize],
        kernel: impl Fn(&KernelParams, &mut DeviceMemory<'_>) -> Result<(), CUresult>
        + Send
        + Sync
        + 'static,
    ) {
        self.call().modules.register(name, param_sizes, Arc::new(kernel));
    }

    /// Runs the next item of a stream if nothing holds it back; whether one ran.
    pub fn advance(&self, stream: CUstream) -> bool {
        let mut call = self.call();
        call.stream(stream).is_ok_and(|key| call.advance(key))
    }

    /// Runs the next item of every stream whose next item nothing holds back; how many ran.
    pub fn advance_all(&self) -> usize {
        let mut call = self.call();
        let active: Vec<_> = call.streams.active.iter().copied().collect();
        active.into_iter().filter(|key| call.advance(*key)).count()
    }

    /// Runs items until none can run; how many ran. The host does not learn of it.
    pub fn run_until_idle(&self) -> usize {
        self.call().run_ready()
    }

    /// Fails the `n`-th call (1 is the next) of the function `name`, which must be its full
    /// name with version, with `code`. The call has no other effect.
    ///
    /// # Panics
    /// If the simulator has no function of that name: none of its calls would ever fail.
    pub fn fail_nth(&self, name: &str, n: u64, code: CUresult) {
        assert!(slots::NAMES.contains(&name), "the simulator has no function {name}");
        self.call().faults.fail_nth(name, n, code);
    }

    /// Fails the `n`-th call (1 is the next) of any function.
    pub fn fail_call(&self, n: u64, code: CUresult) {
        let mut call = self.call();
        let number = call.calls.saturating_add(n.max(1));
        call.faults.fail_number(number, code);
    }

    /// Fails every call after the next `n`.
    pub fn fail_all_calls_after(&self, n: u64, code: CUresult) {
        let mut call = self.call();
        let number = call.calls.saturating_add(n);
        call.faults.fail_after(number, code);
    }

    /// Forgets every failure that was asked for; a lost device stays lost.
    pub fn clear_faults(&self) {
        self.call().faults.clear();
    }

    /// Driver calls so far, failed ones too.
    pub fn calls(&self) -> u64 {
        self.call().calls
    }

    /// Driver calls so far by function, those that were called.
    pub fn call_counts(&self) -> BTreeMap<&'static str, u64> {
        let call = self.call();
        let counts = slots::NAMES.iter().copied().zip(call.counts.iter().copied());
        counts.filter(|(_, count)| *count > 0).collect()
    }

    /// The time that the calls so far would have taken on the modelled machine, in µs.
    pub fn modelled_us(&self) -> f64 {
        self.call().modelled_us
    }

    /// The same by function, in µs, of those that were called.
    pub fn modelled_us_by_function(&self) -> BTreeMap<&'static str, f64> {
        let call = self.call();
        let called = slots::NAMES.iter().copied().zip(&call.counts).zip(&call.modelled_us_of);
        called.filter(|((_, count), _)| **count > 0).map(|((name, _), us)| (name, *us)).collect()
    }

    /// Loses a device: from now on every call that uses it or its contexts answers `code`, and
    /// none of its work runs. Does nothing for a device that does not exist.
    pub fn lose_device(&self, device: i32, code: CUresult) {
        let mut call = self.call();
        if let Ok(index) = call.device(device) {
            call.lost[index] = Some(code);
        }
    }

    /// Sets the physical memory of a device in bytes; what is in use beyond it stays. Does
    /// nothing for a device that does not exist.
    pub fn set_memory_limit(&self, device: i32, bytes: u64) {
        let mut call = self.call();
        if let Ok(index) = call.device(device) {
            call.space.physical.set_limit(index, bytes);
        }
    }

    /// Physical memory in use on a device in bytes; 0 for a device that does not exist. Memory
    /// imported from another simulator is the exporter's.
    pub fn memory_used(&self, device: i32) -> u64 {
        let call = self.call();
        call.device(device).map_or(0, |index| call.space.physical.used(index))
    }

    /// Physical memory in use on the host, by handles and memory pools, in bytes.
    pub fn host_memory_used(&self) -> u64 {
        self.call().space.physical.used(address::HOST)
    }

    /// Reads device memory from the test, outside of all order and unseen by the race detector.
    ///
    /// # Errors
    /// `CUDA_ERROR_INVALID_VALUE` if some of it is not mapped.
    pub fn peek(&self, address: u64, to: &mut [u8]) -> Result<(), CUresult> {
        self.call().space.peek(address, to)
    }

    /// Everything found so far.
    pub fn report(&self) -> Report {
        let leaks = self.leaks();
        self.call().findings.report(leaks)
    }

    /// For the end of a test.
    ///
    /// # Panics
    /// If there is any race or misuse, with a list.
    pub fn assert_clean(&self) {
        let report = self.report();
        let misuse = report.misuse.iter().map(|what| format!("\n  misuse: {what}"));
        let races = report.races.iter().map(|race| format!("\n  {race}"));
        let findings: String = misuse.chain(races).collect();
        assert!(findings.is_empty(), "the simulator found:{findings}");
    }

    /// What the caller made and has not given back.
    pub fn leaks(&self) -> Leaks {
        let call = self.call();
        let of_heaps: usize = call.heaps.iter().map(|heap| heap.live).sum();
        Leaks {
            handles: call.memory_handles.references(),
            mappings: call.space.addresses.caller_mappings(),
            reservations: call.space.addresses.caller_reservations(),
            streams: call.streams.handles.len(),
            events: call.events.handles.len(),
            allocations: of_heaps + call.pools.allocations(),
            host_allocations: call.space.host.allocations(),
            pools: call.pools.created(),
            contexts: call.contexts.references(),
            modules: call.modules.loaded(),
            graphs: call.captures.graphs(),
        }
    }
}

/// Compiles the README's example.
#[cfg(doctest)]
#[doc = include_str!("../README.md")]
struct Readme;
