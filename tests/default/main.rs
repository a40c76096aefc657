//! The default profile as its users see it: random programs against a model, a fault at every
//! driver call, threads, streams of every kind, bad input, and what a hit costs.
//!
//! Every test runs on the simulator; those that need nothing of it run on a GPU too, where there
//! is one.

mod addresses;
mod background;
mod bad_input;
mod changed;
mod costs;
mod crowd;
mod ends;
mod exchanges;
mod failures;
mod full_device;
mod granules;
mod growth;
mod hits;
mod mixed;
mod parts;
mod program;
mod reports;
mod rig;
mod rounds;
mod sizes;
mod splits;
mod streams;
#[path = "../support/pools.rs"]
mod support;
mod threads;
mod trims;
mod waits;
