//! The caching allocator on a device: each promise of the scheme by itself, and real traces.
//!
//! Every test runs on the simulator; those that need nothing of it run on a GPU too, where there
//! is one.

mod accounting;
mod bad_input;
mod blocks;
mod captures;
mod failures;
mod limits;
mod rig;
mod streams;
#[path = "../support/pools.rs"]
mod support;
mod threads;
mod traces;
mod upstream;
mod uses;
