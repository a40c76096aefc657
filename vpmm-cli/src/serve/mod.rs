//! `vpmm serve`, `vpmm snapshot` and `vpmm serve-bench`: the GPU memory service.

mod args;
mod bench;
mod fleet;
mod run;
mod snapshot;

pub use args::{
    Limit, ServeArgs, ServeBenchArgs, ServeDevice, ServeDeviceError, SnapshotArgs, SnapshotCommand,
    SnapshotPlace,
};
pub(crate) use bench::bench;
pub(crate) use run::serve;
pub(crate) use snapshot::snapshot;
