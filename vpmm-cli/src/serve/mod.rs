//! `vpmm serve`, `vpmm snapshot` and `vpmm serve-bench`: the GPU memory service.

mod args;
mod bench;
mod fleet;
mod run;
mod snapshot;

pub use args::{
    Limit, SaveArgs, ServeArgs, ServeBenchArgs, ServeDevice, ServeDeviceError, SnapshotArgs,
    SnapshotCommand, SnapshotPlace,
};
pub(crate) use bench::bench;
pub(crate) use run::serve;
pub(crate) use snapshot::snapshot;

/// A number for people and scripts, without what a float has behind it.
fn thousandths(number: f64) -> f64 {
    (number * 1e3).round() / 1e3
}
