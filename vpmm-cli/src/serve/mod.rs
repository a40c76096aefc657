//! `vpmm serve` and `vpmm serve-bench`: the GPU memory service.

mod args;
mod bench;
mod fleet;
mod run;

pub use args::{Limit, ServeArgs, ServeBenchArgs, ServeDevice, ServeDeviceError};
pub(crate) use bench::bench;
pub(crate) use run::serve;
