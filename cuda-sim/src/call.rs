//! What happens around every driver call: the lock, the count, faults, and panics.

use std::cell::Cell;
use std::ops::{Deref, DerefMut};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};
use std::time::Duration;

use cuda_sys::types::CUresult;
use parking_lot::{Condvar, Mutex, MutexGuard};
use rustc_hash::FxHashMap;

use crate::builder::Schedule;
use crate::capture::Captures;
use crate::context::{ContextKey, Contexts, Thread};
use crate::costs::Costs;
use crate::event::Events;
use crate::faults::Faults;
use crate::heap::Heap;
use crate::memory::Space;
use crate::module::Modules;
use crate::pool::Pools;
use crate::process;
use crate::race::Clock;
use crate::random::Random;
use crate::report::Findings;
use crate::slots::{Function, NAMES};
use crate::stream::Streams;
use crate::vmm::MemoryHandles;

/// One simulated machine, shared by everything that may call into it.
#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) slot: usize,
    pub(crate) me: Weak<Self>,
    /// The process that made it: nothing works in a child, whose locks may be held for ever.
    pub(crate) process: u32,
    pub(crate) state: Mutex<State>,
    /// Signalled whenever waiting work may have become able to run.
    pub(crate) changed: Condvar,
}

/// Everything that the lock protects.
#[derive(Debug)]
pub(crate) struct State {
    pub(crate) schedule: Schedule,
    pub(crate) patience_used: u32,
    pub(crate) deadlock_after: Duration,
    pub(crate) random: Random,
    pub(crate) initialized: bool,
    pub(crate) peer_access: bool,
    pub(crate) gpu_direct_rdma: bool,
    pub(crate) fabric: bool,
    /// The error of each device that was lost.
    pub(crate) lost: Vec<Option<CUresult>>,
    pub(crate) contexts: Contexts,
    pub(crate) threads: FxHashMap<u64, Thread>,
    pub(crate) streams: Streams,
    pub(crate) events: Events,
    pub(crate) space: Space,
    pub(crate) memory_handles: MemoryHandles,
    /// What cuMemAlloc divides, one for each device.
    pub(crate) heaps: Vec<Heap>,
    pub(crate) pools: Pools,
    pub(crate) modules: Modules,
    pub(crate) captures: Captures,
    pub(crate) faults: Faults,
    pub(crate) calls: u64,
    pub(crate) counts: Vec<u64>,
    pub(crate) costs: Costs,
    /// What each function costs where that is one figure, found once for all calls, in µs.
    pub(crate) flat_us_of: Vec<f64>,
    pub(crate) modelled_us: f64,
    /// The same by function.
    pub(crate) modelled_us_of: Vec<f64>,
    pub(crate) findings: Findings,
    /// Everything that the host has seen complete.
    pub(crate) host: Clock,
}

/// A call in progress, holding the lock.
#[derive(Debug)]
pub(crate) struct Call<'a> {
    pub(crate) shared: &'a Shared,
    pub(crate) state: MutexGuard<'a, State>,
    pub(crate) thread: u64,
    pub(crate) name: &'static str,
    /// What the call costs on the modelled machine, where that is not one figure, in µs.
    pub(crate) cost: Option<f64>,
    /// The lock is no longer held where this goes: what the call drops, such as work that has run,
    /// cannot call back into it.
    _inside: InsideWork,
}

impl Deref for Call<'_> {
    type Target = State;

    fn deref(&self) -> &State {
        &self.state
    }
}

impl DerefMut for Call<'_> {
    fn deref_mut(&mut self) -> &mut State {
        &mut self.state
    }
}

static NEXT_THREAD: AtomicU64 = AtomicU64::new(1);

thread_local! {
    static THREAD: u64 = NEXT_THREAD.fetch_add(1, Ordering::Relaxed);
    /// One bit for each simulator whose work this thread is executing, or whose lock it holds.
    static INSIDE_WORK: Cell<u64> = const { Cell::new(0) };
}

/// Marks this thread as executing work of a simulator, or as holding its lock, where driver calls
/// are not permitted.
#[derive(Debug)]
pub(crate) struct InsideWork(u64);

impl InsideWork {
    pub(crate) fn enter(slot: usize) -> Self {
        let before = INSIDE_WORK.get();
        INSIDE_WORK.set(before | (1 << slot));
        Self(before)
    }

    /// Whether this thread executes work of the simulator, or holds its lock.
    pub(crate) fn is(slot: usize) -> bool {
        INSIDE_WORK.get() & (1 << slot) != 0
    }
}

impl Drop for InsideWork {
    fn drop(&mut self) {
        INSIDE_WORK.set(self.0);
    }
}

impl Shared {
    /// Takes the lock outside of any driver call.
    pub(crate) fn call(&self, name: &'static str) -> Call<'_> {
        let thread = THREAD.with(|id| *id);
        let state = self.state.lock();
        let _inside = InsideWork::enter(self.slot);
        Call { shared: self, state, thread, name, cost: None, _inside }
    }

    /// Runs one driver call.
    pub(crate) fn enter(
        self: Arc<Self>,
        function: Function,
        body: &mut dyn FnMut(&mut Call<'_>) -> Result<(), CUresult>,
    ) -> CUresult {
        if process::number() != self.process {
            return CUresult::CUDA_ERROR_NOT_INITIALIZED;
        }
        if InsideWork::is(self.slot) {
            return CUresult::CUDA_ERROR_NOT_PERMITTED;
        }
        let mut call = self.call(NAMES[function.0]);
        call.calls += 1;
        call.counts[function.0] += 1;
        let (calls, name) = (call.calls, call.name);
        if let Some(code) = call.faults.strike(name, calls) {
            return code;
        }
        if !call.initialized && !works_before_init(name) {
            return CUresult::CUDA_ERROR_NOT_INITIALIZED;
        }
        call.before_call();
        // After a panic the state is whatever it was: the misuse that is noted says not to
        // trust what follows.
        let result = catch_unwind(AssertUnwindSafe(|| body(&mut call)));
        let code = match result {
            Ok(Ok(())) => CUresult::CUDA_SUCCESS,
            Ok(Err(code)) => code,
            Err(_) => {
                let name = call.name;
                call.findings.misuse(format!("{name}: the simulator panicked"));
                CUresult::CUDA_ERROR_UNKNOWN
            }
        };
        let cost = call.cost.unwrap_or(call.flat_us_of[function.0]);
        call.modelled_us += cost;
        call.modelled_us_of[function.0] += cost;
        code
    }
}

fn works_before_init(name: &str) -> bool {
    matches!(
        name,
        "cuInit"
            | "cuDriverGetVersion"
            | "cuGetErrorName"
            | "cuGetErrorString"
            | "cuGetProcAddress"
            | "cuGetProcAddress_v2"
    )
}

impl Call<'_> {
    /// Notes misuse under this call's name.
    pub(crate) fn misuse(&mut self, what: &str) {
        let name = self.name;
        self.findings.misuse(format!("{name}: {what}"));
    }

    /// The context that a stream's work runs in.
    pub(crate) fn context_of(&self, stream: crate::race::StreamKey) -> Option<ContextKey> {
        self.streams.by_key.get(&stream).map(|stream| stream.context)
    }
}
