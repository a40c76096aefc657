//! What both profiles offer beside allocation itself: order between streams, uses on further streams,
//! limits, questions about what is held.
//!
//! Every test runs on the simulator; those that need nothing of it run on a GPU too, where there
//! is one.

mod foreign;
mod limits;
mod ordering;
mod queries;
mod recorded;
mod rig;
#[allow(unused_macros, reason = "no driver function is held here")]
#[path = "../support/pools.rs"]
mod support;
mod threads;
