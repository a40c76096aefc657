//! A published layout in files, and back.
//!
//! ```text
//! DIR/manifest.json        allocations in the order of their slots, where each lies, checksums
//!     gms_metadata.json    the table of metadata
//!     shards/shard_0000.bin, …   the bytes, some GiB to a file, no allocation split
//! ```
//!
//! The files are the Python service's, and either reads the other's; only the checksums are this
//! one's own, in a key of the manifest that the other does not look at.
//!
//! 1. A folder of this name is whole: it gets its name last.
//! 2. A layout is published only if every byte of it was checked: its length, its checksum, and that
//!    allocations and metadata have the hash that they were saved with.
//!
//! Bytes go in chunks, several at a time, through page-locked memory and around the page cache where
//! the file system lets them.

#![forbid(unsafe_code)]

mod chunks;
mod error;
mod files;
mod limits;
mod load;
mod manifest;
mod save;

pub use error::StorageError;
pub use limits::{Limits, measure};
pub use load::{check, load};
pub use save::save;

/// How layouts are saved and loaded.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct StorageOptions {
    /// Bytes after which the next file is begun.
    pub shard_bytes: u64,
    /// How many chunks are under way at a time.
    pub workers: usize,
    /// Bytes of a chunk; a multiple of the device's granularity (2 MiB).
    pub chunk_bytes: u64,
    /// Whether to go around the page cache where that is possible.
    pub direct: bool,
}

impl Default for StorageOptions {
    /// Files of 4 GiB, eight chunks of 16 MiB at a time, around the page cache.
    fn default() -> Self {
        Self { shard_bytes: 4 << 30, workers: 8, chunk_bytes: 16 << 20, direct: true }
    }
}

/// What was saved or loaded.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Stored {
    /// Allocations of the layout.
    pub allocations: usize,
    /// Their bytes.
    pub bytes: u64,
    /// Entries of metadata.
    pub metadata: usize,
    /// The layout's hash.
    pub layout_hash: String,
    /// Whether there were checksums; files of the Python service have none.
    pub checked: bool,
}
