//! Where a pool's memory is and who may reach it, in both profiles: memory on the host, other
//! devices, other processes, network cards.

mod cards;
mod locations;
mod peers;
mod rig;
mod sharing;
#[allow(unused_macros, reason = "no driver function is held here")]
#[path = "../support/pools.rs"]
mod support;
