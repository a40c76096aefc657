//! Locks for paths where a mutex of the standard library costs as much as the work under it.
//!
//! [`SpinLock`] is one atomic exchange. [`PatientMutex`] is the standard library's, for sections that may
//! be long, and waits awake before it sleeps. [`Biased`] is no exchange: one thread enters by a plain store
//! and a plain load, and pays for that with a system call in whoever must take it from that thread.

mod backoff;
mod biased;
#[cfg(all(loom, test))]
mod model;
mod patient;
mod spin;
mod thread;

/// What the biased lock is made of: the standard library's, or what a model checker puts in its place.
mod sync {
    #[cfg(all(loom, test))]
    pub(super) use loom::{
        hint::spin_loop,
        sync::atomic::{AtomicBool, fence},
        thread::yield_now,
    };
    #[cfg(not(all(loom, test)))]
    pub(super) use std::{
        hint::spin_loop,
        sync::atomic::{AtomicBool, fence},
        thread::yield_now,
    };
}

pub(crate) use biased::{Asymmetry, Biased, BiasedGuard};
pub(crate) use patient::{PatientGuard, PatientMutex};
pub(crate) use spin::SpinLock;
pub(crate) use thread::{Life, Token};
