//! PyTorch's caching scheme: blocks of fixed segments, a pool for each stream and for small and
//! large requests, best fit, splitting and coalescing, memory given back on demand.
//!
//! It is for programs that count on exactly that scheme, and to compare with. [`Pool`](crate::Pool)
//! holds less memory and takes less time: it moves memory between streams and closes gaps.
//!
//! ```text
//! request ─▶ rounded to 512 bytes ─▶ the stream's pool: up to 1 MiB small, above large
//!         ─▶ best fit by (size, address) ─▶ split where enough is left
//!            or a new segment: 2 MiB, 20 MiB, or the size in steps of 2 MiB
//! free    ─▶ one with its free neighbours ─▶ the stream's pool
//!         ─▶ or waits for the further streams that use it
//! ```
//!
//! | room | what it is |
//! |---|---|
//! | `size`, `config`, `parse` | rounding; settings; PyTorch's text of settings |
//! | `stats` | what is counted |
//! | `table`, `block`, `free_set` | pointers, blocks, sets of free ones |
//! | `books` | all blocks: the scheme itself, without a driver |
//! | `waits` | blocks that further streams still use |
//! | `core`, `grow` | requests; memory from upstream and back |
//! | `snapshot`, `validate` | what is where; whether that agrees |
//! | `allocator`, `buffer`, `resource` | the public face |

mod allocator;
mod block;
mod books;
mod buffer;
mod config;
mod core;
mod free_set;
mod grow;
#[cfg(test)]
mod model;
mod parse;
mod resource;
mod size;
mod snapshot;
mod stats;
mod table;
mod validate;
mod waits;

pub use allocator::CachingAllocator;
pub use buffer::CachedBuffer;
pub use config::CachingConfig;
pub use parse::SettingError;
pub use size::{
    Divisions, LARGE_BUFFER, MIN_BLOCK_SIZE, MIN_LARGE_ALLOC, ROUND_LARGE, SMALL_BUFFER,
    SMALL_SIZE, get_allocation_size, round_size,
};
pub use snapshot::{BlockState, SnapshotBlock, SnapshotSegment};
pub use stats::{CachingStats, Stat, StatArray};
