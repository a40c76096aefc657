//! How pools are found and how they end, in both profiles: the current pool of a device, the pool of
//! a pointer, pools that nobody has a handle of any more.

mod current;
mod orphans;
mod owners;
mod rig;
#[allow(unused_macros, reason = "no driver function is held here")]
#[path = "../support/pools.rs"]
mod support;
