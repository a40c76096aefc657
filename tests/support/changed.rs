//! The simulator's driver with some of its functions replaced, and threads held inside them.

use std::sync::atomic::{AtomicU32, Ordering};
use std::time::{Duration, Instant};

use cuda_sim::Simulator;
use vpmm::Driver;

/// The simulator's driver with some of its functions replaced.
pub(crate) fn changed(sim: &Simulator, change: impl FnOnce(&mut cuda_sys::DriverApi)) -> Driver {
    let inner = sim.driver();
    let mut api = *inner;
    change(&mut api);
    // SAFETY: the functions are the simulator's, which is kept alive, and replacements of the same
    // signatures.
    let driver = unsafe {
        cuda_sys::Driver::from_symbols(
            "changed",
            |name| api.symbol(name),
            std::sync::Arc::new(inner),
        )
    };
    Driver::new(driver).unwrap()
}

/// A gate in a driver function: the next call that comes to it is held until it is opened.
pub(crate) struct Gate(AtomicU32);

const OPEN: u32 = 0;
const ARMED: u32 = 1;
const HOLDS: u32 = 2;

impl Gate {
    pub(crate) const fn new() -> Self {
        Self(AtomicU32::new(OPEN))
    }

    pub(crate) fn arm(&self) {
        self.0.store(ARMED, Ordering::SeqCst);
    }

    /// Holds the caller if it is the first since the gate was armed.
    pub(crate) fn pass(&self) {
        let first =
            self.0.compare_exchange(ARMED, HOLDS, Ordering::SeqCst, Ordering::SeqCst).is_ok();
        while first && self.0.load(Ordering::SeqCst) == HOLDS {
            std::thread::sleep(Duration::from_millis(1));
        }
    }

    /// Waits until somebody is held.
    pub(crate) fn wait(&self) {
        let start = Instant::now();
        while self.0.load(Ordering::SeqCst) != HOLDS {
            assert!(start.elapsed() < Duration::from_secs(30), "nobody came to the gate");
            std::thread::yield_now();
        }
    }

    pub(crate) fn open(&self) {
        self.0.store(OPEN, Ordering::SeqCst);
    }
}

pub(crate) const fn nothing() {}

/// Has a module replace a driver function in a table, by its `put`: something is done before and after each
/// call. For one simulator at a time: a driver function carries no context.
macro_rules! replaced {
    ($function:ident($($argument:ident: $type:ty),*), $before:expr) => {
        $crate::support::changed::replaced!(
            $function($($argument: $type),*),
            $before,
            $crate::support::changed::nothing()
        );
    };
    ($function:ident($($argument:ident: $type:ty),*), $before:expr, $after:expr) => {
        use std::sync::{Mutex, PoisonError};

        use cuda_sys::types::*;

        type Function = unsafe extern "C" fn($($type),*) -> CUresult;

        static REAL: Mutex<Option<Function>> = Mutex::new(None);

        unsafe extern "C" fn held($($argument: $type),*) -> CUresult {
            $before;
            let Some(real) = *REAL.lock().unwrap_or_else(PoisonError::into_inner) else {
                return CUresult::CUDA_ERROR_NOT_FOUND;
            };
            // SAFETY: the arguments are passed on as they came, to the function that was in the
            // place of this one.
            let answer = unsafe { real($($argument),*) };
            $after;
            answer
        }

        pub(super) fn put(api: &mut cuda_sys::DriverApi) {
            *REAL.lock().unwrap_or_else(PoisonError::into_inner) = api.$function;
            api.$function = Some(held);
        }
    };
}
pub(crate) use replaced;

/// Makes a module for a driver function with a gate `BEFORE` it and one `AFTER` it; its `put`
/// replaces the function in a table. For one test at a time: the gates are statics.
macro_rules! gated {
    ($module:ident: $function:ident($($argument:ident: $type:ty),* $(,)?)) => {
        mod $module {
            use $crate::support::changed::{Gate, replaced};

            #[allow(dead_code, reason = "a test arms one or both")]
            pub(super) static BEFORE: Gate = Gate::new();
            #[allow(dead_code, reason = "a test arms one or both")]
            pub(super) static AFTER: Gate = Gate::new();

            replaced!($function($($argument: $type),*), BEFORE.pass(), AFTER.pass());
        }
    };
}
pub(crate) use gated;
