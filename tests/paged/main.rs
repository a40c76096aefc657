//! The paged profile as its users see it: the design's scenarios, the mistakes that its known
//! implementation makes, bad input, failures, and random programs against a model.
//!
//! Every test runs on the simulator; those that need nothing of it run on a GPU too, where there
//! is one.

mod bad_input;
mod claims;
mod costs;
mod crowd;
mod failures;
mod mistakes;
mod program;
mod rig;
mod scenarios;
#[path = "../support/pools.rs"]
mod support;
mod threads;
mod uses;
