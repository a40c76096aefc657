//! The order between streams: what a pool may conclude from it, and what callers tell it.

#![forbid(unsafe_code)]

use std::sync::atomic::{AtomicU64, Ordering};

/// What to do when free memory exists that another stream may still be using.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub enum PendingPolicy {
    /// Map new pages while the limit and the device allow it, and wait on the GPU for another
    /// stream's memory only after that: no dependency is added that the program did not ask for.
    #[default]
    GrowFirst,
    /// Take the other streams' memory first, with a wait on the GPU, and map new pages only for
    /// what is missing then: the least memory, at the price of false dependencies between streams.
    WaitFirst,
}

/// In which ways a stream may get memory that another stream freed: the three switches of the
/// driver's own pools (`CU_MEMPOOL_ATTR_REUSE_…`), all on by default as there. A stream's own
/// memory is always its to use again at once; what the host has seen complete is everybody's.
///
/// ```
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let sim = cuda_sim::Simulator::builder().build()?;
/// # let driver = vpmm::Driver::new(sim.driver())?;
/// # let device = driver.device(0)?;
/// let mut config = vpmm::PoolConfig::default();
/// config.limit_bytes = Some(64 << 20);
/// config.reuse.opportunistic = false;
/// config.reuse.internal_dependencies = false;
/// config.out_of_memory = vpmm::WaitPolicy::FailAtOnce; // else the host waits for `one`
/// let pool = vpmm::Pool::new(&device, &config)?;
///
/// let (one, other) = (device.stream()?, device.stream()?);
/// let ptr = pool.malloc(64 << 20, &one)?;
/// pool.free(ptr, &one)?;
/// // Nobody has said that `other` comes after `one`, and no other way is left.
/// assert!(pool.malloc(64 << 20, &other).is_err_and(|error| error.is_out_of_memory()));
/// one.synchronize()?;
/// let ptr = pool.malloc(64 << 20, &other)?;
/// # pool.free(ptr, &other)?;
/// # Ok(())
/// # }
/// ```
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct Reuse {
    /// Where a caller has said by [`Pool::follows`](crate::Pool::follows) that the one stream comes
    /// after the other. Off, the pool ignores what it is told there.
    pub follow_event_dependencies: bool,
    /// Where the pool finds out by an event that the other stream has come past the free. Off, it
    /// does not ask for that reason, and memory stays with the stream that freed it until the host
    /// has waited for that; or until that stream has ended, which needs it no more: about such it asks.
    /// Of a stream that is known by its raw handle alone the end is known when another comes by that handle.
    pub opportunistic: bool,
    /// By a wait on the GPU that the pool adds; [`PendingPolicy`] says when. Off, it adds none.
    pub internal_dependencies: bool,
}

impl Default for Reuse {
    fn default() -> Self {
        Self { follow_event_dependencies: true, opportunistic: true, internal_dependencies: true }
    }
}

/// A point of a stream, as far as one pool is concerned: everything that was freed there before.
/// Made by [`Pool::mark`](crate::Pool::mark).
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub struct Mark {
    /// The pool that it is of.
    pub(crate) pool: u64,
    /// The stream, by the pool's own number of it.
    pub(crate) stream: u32,
    /// The point: what the pool counts there.
    pub(crate) point: u64,
    /// The stream's epoch then, where the pool has epochs; the stream's id in the paged profile.
    pub(crate) epoch: u64,
}

/// A number for a new pool, which no other of the process ever has: a mark that outlives its pool
/// is foreign to every other.
pub(crate) fn next_pool() -> u64 {
    static POOLS: AtomicU64 = AtomicU64::new(0);
    POOLS.fetch_add(1, Ordering::Relaxed) + 1
}
