//! What a pool holds.

use vpmm_core::Stats;

use crate::grows::{self, Grows};
use crate::guard::Failure;

/// What a pool holds and has done: `size` is set by `vpmm_stats_init`, the rest by `vpmm_pool_stats`.
/// Bytes unless a name says otherwise.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct vpmm_stats {
    /// The bytes of this structure, as the program was built with it.
    pub size: usize,
    /// In the hands of callers, without small requests of the paged profile.
    pub live_bytes: u64,
    /// The most of that since the pool was made or `vpmm_pool_reset_peaks`.
    pub peak_live_bytes: u64,
    /// Freed, and kept for their stream's next requests.
    pub cached_bytes: u64,
    /// Free to every stream.
    pub idle_bytes: u64,
    /// Freed, and still in use by a stream as far as is known; with `deferred_bytes`.
    pub pending_bytes: u64,
    /// Physical memory held.
    pub mapped_bytes: u64,
    /// The most of that.
    pub peak_mapped_bytes: u64,
    /// Addresses reserved.
    pub reserved_bytes: u64,
    /// In the hands of callers of the paged profile's small requests.
    pub small_live_bytes: u64,
    /// What the driver holds for them.
    pub small_mapped_bytes: u64,
    /// The most of that.
    pub peak_small_mapped_bytes: u64,
    /// Allocations in the hands of callers, without small ones.
    pub live_count: u64,
    /// Small ones.
    pub small_live_count: u64,
    /// Physical handles held.
    pub extent_count: u64,
    /// Physical handles made so far.
    pub extents_created: u64,
    /// Physical handles moved to other addresses so far.
    pub extents_moved: u64,
    /// Waits that streams were made to do so far.
    pub device_waits: u64,
    /// Waits of the host so far.
    pub host_waits: u64,
    /// The part of `pending_bytes` that no stream may have yet, as further streams that it was noted for may
    /// still be using it.
    pub deferred_bytes: u64,
}

/// What all fields but the size are.
macro_rules! fields {
    ($( $name:ident )*) => {
        impl vpmm_stats {
            fn of(stats: &Stats) -> Self {
                Self { size: size_of::<Self>(), $( $name: stats.$name, )* }
            }
        }

        // SAFETY: numbers of 8 bytes each, the size first.
        unsafe impl Grows for vpmm_stats {
            const NAME: &'static str = "vpmm_stats";
            const INITIAL: Self = Self { size: size_of::<Self>(), $( $name: 0, )* };
        }
    };
}

fields! {
    live_bytes peak_live_bytes cached_bytes idle_bytes pending_bytes mapped_bytes peak_mapped_bytes
    reserved_bytes small_live_bytes small_mapped_bytes peak_small_mapped_bytes live_count
    small_live_count extent_count extents_created extents_moved device_waits host_waits
    deferred_bytes
}

/// Fills what a program has room for.
///
/// # Safety
/// `out` is null, or to as many bytes as its first field says.
pub(crate) unsafe fn fill(out: *mut vpmm_stats, stats: &Stats) -> Result<(), Failure> {
    // SAFETY: the caller vouches for it.
    unsafe { grows::fill(out, vpmm_stats::of(stats)) }
}

/// Sets all numbers to 0, and the size: `sizeof (vpmm_stats)`, as the program has it.
///
/// # Safety
/// `stats` is null or has room for `size` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vpmm_stats_init(stats: *mut vpmm_stats, size: usize) {
    // SAFETY: the caller vouches for it.
    unsafe { grows::init(stats, size) };
}
