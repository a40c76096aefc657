//! Heaps beside a pool's main one, in both profiles: memory of graphs, and memory that sleeps.

mod bad_input;
mod crowd;
mod failures;
mod graph;
mod graphs;
mod limits;
#[path = "../places/rig.rs"]
mod rig;
mod sleep;
mod streams;
#[allow(unused_macros, reason = "no driver function is held here")]
#[path = "../support/pools.rs"]
mod support;
