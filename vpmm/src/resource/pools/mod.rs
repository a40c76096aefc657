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

use super::MemoryResource;
use super::request::MIN_ALIGN;
use crate::device::{Device, StreamHandle};
use crate::stream::Stream;
use crate::units::DevicePtr;

/// At a pool's end, when all work on its chunks is complete: gives them back to upstream.
fn give_all_back<R: MemoryResource>(
    upstream: &R,
    device: &Device,
    chunks: impl Iterator<Item = (DevicePtr, usize)>,
) {
    let mut chunks = chunks.peekable();
    if chunks.peek().is_none() {
        return;
    }
    // Any stream does; one of its own disturbs no capture.
    let own = device.stream().ok();
    let stream = own.as_ref().map_or(StreamHandle::LEGACY, Stream::handle);
    for (ptr, bytes) in chunks {
        // There is nobody to tell, and nothing else to be done with it.
        let _ = upstream.deallocate(ptr, bytes, MIN_ALIGN, stream);
    }
}

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}
