//! The `vpmm` command as a library: reading traces, replaying them, reporting.

pub mod bytes;
pub mod trace;
