//! What threads that meet by chance do by chance: driver calls that fail, and that let others go first.

use std::cell::{Cell, RefCell};
use std::collections::BTreeMap;
use std::sync::{Mutex, PoisonError};
use std::time::Duration;

use cuda_sys::types::CUresult;

use super::Lcg;

/// What a driver call that fails answers.
pub(crate) const FAULT: CUresult = CUresult::CUDA_ERROR_UNKNOWN;

thread_local! {
    /// Of a hundred driver calls.
    static FAILING: Cell<u64> = const { Cell::new(0) };
    /// No other one of the same call does then.
    static ONCE: Cell<bool> = const { Cell::new(false) };
    static CHANCE: RefCell<Lcg> = const { RefCell::new(Lcg(0)) };
}

/// What this thread's chances follow from.
pub(crate) fn seed(seed: u64) {
    CHANCE.set(Lcg(seed));
}

/// Once in so many times.
pub(crate) fn chance(of: u64) -> bool {
    below(of) == 0
}

/// A number below another.
pub(crate) fn below(bound: u64) -> u64 {
    CHANCE.with_borrow_mut(|chance| chance.below(bound))
}

/// Makes a call in which so many of a hundred driver calls fail.
pub(crate) fn with_faults<T>(percent: u64, call: impl FnOnce() -> T) -> T {
    let before = FAILING.replace(percent);
    let result = call();
    FAILING.set(before);
    result
}

/// The same where one fails at most.
pub(crate) fn with_one_fault<T>(percent: u64, call: impl FnOnce() -> T) -> T {
    let before = ONCE.replace(true);
    let result = with_faults(percent, call);
    ONCE.set(before);
    result
}

/// A thread's chances, for another one that does part of its call.
pub(crate) struct Chances {
    failing: u64,
    seed: u64,
}

impl Chances {
    pub(crate) fn of_this_thread() -> Self {
        Self { failing: FAILING.get(), seed: below(u64::MAX) }
    }

    pub(crate) fn take_over(self) {
        FAILING.set(self.failing);
        seed(self.seed);
    }
}

/// Whether a driver call fails. Others go first, now and then: here the library holds few locks, or none.
pub(crate) fn fails() -> bool {
    match below(32) {
        0 => std::thread::sleep(Duration::from_micros(50)),
        1..4 => std::thread::yield_now(),
        _ => {}
    }
    let failing = FAILING.get();
    let fails = failing > 0 && below(100) < failing;
    if fails && ONCE.get() {
        FAILING.set(0);
    }
    fails
}

/// Makes a module for each of some driver functions, in which that [`fails`] by chance, and a function that
/// replaces them all in a table.
#[allow(unused_macros, reason = "in some suites no driver function fails by chance")]
macro_rules! failing {
    ($put:ident: $($module:ident: $function:ident($($argument:ident: $type:ty),* $(,)?);)*) => {
        $(mod $module {
            use $crate::support::chance::{FAULT, fails};
            $crate::support::changed::replaced!(
                $function($($argument: $type),*),
                if fails() { return FAULT }
            );
        })*

        fn $put(api: &mut cuda_sys::DriverApi) {
            $($module::put(api);)*
        }
    };
}
pub(crate) use failing;

/// How often programs came to what they are for.
#[derive(Debug)]
pub(crate) struct Reached(Mutex<BTreeMap<&'static str, u64>>);

impl Reached {
    pub(crate) const fn new() -> Self {
        Self(Mutex::new(BTreeMap::new()))
    }

    pub(crate) fn count(&self, what: &'static str) {
        *self.0.lock().unwrap_or_else(PoisonError::into_inner).entry(what).or_default() += 1;
    }

    /// Prints all, and fails where one of these is not among them.
    pub(crate) fn assert_all(&self, expected: &[&str]) {
        let reached = self.0.lock().unwrap_or_else(PoisonError::into_inner);
        println!("{reached:#?}");
        for what in expected {
            assert!(reached.contains_key(what), "no {what}");
        }
    }
}

/// A number that an environment variable may set.
pub(crate) fn number(name: &str, otherwise: u64) -> u64 {
    std::env::var(name).ok().and_then(|set| set.parse().ok()).unwrap_or(otherwise)
}
