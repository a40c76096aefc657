//! Locks for paths where a mutex of the standard library costs as much as the work under it.
//!
//! [`SpinLock`] is one atomic exchange. [`Biased`] is none: one thread enters by a plain store and
//! a plain load, and pays for that with a system call in whoever must take it from that thread.

mod biased;
mod spin;
mod thread;

pub(crate) use biased::{Asymmetry, Biased, BiasedGuard};
pub(crate) use spin::SpinLock;
pub(crate) use thread::{Life, Token};
