//! What happens when memory runs out, in both profiles: callbacks, waiting, and the map in the error.

mod callbacks;
mod maps;
#[path = "../lifetimes/rig.rs"]
mod rig;
mod small;
#[allow(unused_macros, reason = "no driver function is held here")]
#[path = "../support/pools.rs"]
mod support;
mod waits;
