//! How things end around a pool, in both profiles: threads, streams, the context, the process, and
//! what a child of the process is told.
//!
//! Every test runs in a process of its own, which is killed where it takes too long: what hangs or
//! crashes there fails that test alone.

mod contexts;
mod forks;
mod processes;
mod rig;
mod streams;
#[path = "../support/pools.rs"]
mod support;
mod threads;
