//! What can go wrong with files.

use std::io;
use std::path::PathBuf;

use crate::client::ClientError;
use crate::cuda::CudaError;

/// Why a layout was not saved or loaded. Nothing was published, and no folder has got its name.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum StorageError {
    /// The server, or the connection to it.
    #[error(transparent)]
    Client(#[from] ClientError),
    /// The driver.
    #[error(transparent)]
    Cuda(#[from] CudaError),
    /// A file.
    #[error("cannot {what} {}: {source}", path.display())]
    File {
        /// What was to be done.
        what: &'static str,
        /// With which file.
        path: PathBuf,
        /// Why it was not.
        source: io::Error,
    },
    /// There is something of this name already.
    #[error("{} is there already", path.display())]
    Exists {
        /// The folder.
        path: PathBuf,
    },
    /// Another process is saving to this name.
    #[error("{} is being written by another process", path.display())]
    Busy {
        /// The folder.
        path: PathBuf,
    },
    /// Nothing is published.
    #[error("no layout is published")]
    NothingPublished,
    /// A file is not what was written.
    #[error("{} is damaged: {reason}", path.display())]
    Damaged {
        /// The file.
        path: PathBuf,
        /// How that shows.
        reason: String,
    },
    /// The device has other granules than the layout was saved with.
    #[error("allocation {index} was of {saved} bytes and would be of {here} here")]
    Granularity {
        /// Which allocation.
        index: usize,
        /// Its bytes, as saved.
        saved: u64,
        /// Its bytes on this device.
        here: u64,
    },
    /// A setting that cannot be.
    #[error("{0}")]
    Options(&'static str),
}
