//! Memory resources: one acceptance suite that every one of them passes, and some stacks; and what each
//! does that others do not.
//!
//! Every test runs on the simulator, whose race detector proves the order of uses; those that need
//! nothing of it run on a GPU too, where there is one.

mod adaptors;
mod bounds;
mod captures;
mod crowd;
mod current;
mod defects;
mod devices;
mod failures;
mod growth;
mod handovers;
mod loans;
mod logs;
mod meetings;
mod outlived;
mod program;
mod sequences;
mod sizes;
mod stacks;
mod streams;
mod subjects;
#[allow(unused_macros, reason = "no driver function is held here")]
#[path = "../support/pools.rs"]
mod support;
mod taken;
mod uses;
mod watched;
mod wrong;
