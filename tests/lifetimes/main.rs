//! How pools are found and how they end, in both profiles: the current pool of a device, the pool of
//! a pointer, pools that nobody has a handle of any more.

mod current;
mod ends;
mod orphans;
mod owners;
mod rig;
#[path = "../support/pools.rs"]
mod support;
