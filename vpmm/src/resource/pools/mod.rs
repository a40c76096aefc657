//! Resources that take large pieces from another one and hand out parts.
//!
//! | room | what it is |
//! |---|---|
//! | `sizes` | free blocks by size |
//! | `blocks` | what stands where in the pieces, and whose it is |
//! | `lanes` | what each stream has freed, and how another may come after it |
//! | `by_stream` | a value for each stream, found without a lock |
//! | `uses` | freed blocks that further streams may still be using |
//! | `coalescing`, `fixed_size` | pools made of these |
//! | `binning`, `arena` | pools made of pools |

mod arena;
mod binning;
mod blocks;
mod by_stream;
mod coalescing;
mod fixed_size;
mod lanes;
mod sizes;
mod uses;

pub use arena::{Arena, ArenaConfig, ArenaDump};
pub use binning::Binning;
pub use coalescing::{CoalescingConfig, CoalescingPool};
pub use fixed_size::{FixedSize, FixedSizeConfig};

use std::sync::{Mutex, MutexGuard, PoisonError};

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
