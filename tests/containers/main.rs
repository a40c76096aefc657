//! Containers: memory with an owner, over every kind of resource, on the simulator and on a GPU where
//! there is one.

mod buffers;
mod ends;
mod pinned;
mod program;
mod resources;
mod streams;
#[allow(unused_macros, reason = "no driver function is held here")]
#[path = "../support/pools.rs"]
mod support;
mod values;
