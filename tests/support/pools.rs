//! What the suites of both profiles are made of: a device to test on, a pool under observation,
//! faults, a driver with functions replaced. What differs by profile is in each suite's `rig`.

#![allow(dead_code, unused_imports, reason = "each suite uses a part")]

pub(crate) mod chance;
pub(crate) mod changed;
pub(crate) mod faults;
mod meeting;
mod random;
mod rig;
pub(crate) mod streams;
mod watched;

pub(crate) use meeting::Meeting;
pub(crate) use random::{Lcg, cases};
pub(crate) use rig::{Rig, Stall, call};
pub(crate) use watched::{Held, Watched};
