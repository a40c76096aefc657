//! The `vpmm` command as a library: reading traces, replaying them through
//! allocators, reporting.
//!
//! | room | what it is |
//! |---|---|
//! | [`trace`] | from a log to operations on numbered allocations |
//! | [`device`] | the GPU or the simulated one; nearly all unsafe code |
//! | [`backend`] | allocators by name, behind one interface |
//! | [`replay`] | order, threads, time, device work that checks contents |
//! | [`fit`] | the smallest limit at which a trace completes |
//! | [`mod@bench`] | what single calls cost, case by case |
//! | [`report`] | the tables and the JSON |
//! | [`serve`] | the GPU memory service |
//! | [`args`], [`command`], [`exit`] | the command line, what it does, how it ends |

pub mod args;
pub mod backend;
pub mod bench;
pub mod command;
pub mod device;
pub mod exit;
pub mod fit;
pub mod replay;
pub mod report;
pub mod serve;
pub mod trace;

pub use stacks::bytes;
