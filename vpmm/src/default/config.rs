//! Settings of the default profile.

#![forbid(unsafe_code)]

use std::time::Duration;

use crate::error::{Error, Result};
use crate::location::{Location, Sharing};
use crate::ordering::{PendingPolicy, Reuse};
use crate::out_of_memory::WaitPolicy;

/// Granules of addresses that a pool can have: units are counted in 32 bits.
const MOST_UNITS: u64 = u32::MAX as u64;

/// Settings of [`Pool::new`](crate::Pool::new).
///
/// ```
/// let mut config = vpmm::PoolConfig::default();
/// config.limit_bytes = Some(8 << 30);
/// ```
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct PoolConfig {
    /// The most physical memory that the pool may hold, rounded down to granules; what the device
    /// has by default. On the device no more than that; on the host it may be more.
    pub limit_bytes: Option<u64>,
    /// Bytes of addresses reserved; by default four times the device's memory, or on the host four
    /// times the limit where that is more, so that free memory can be brought together at addresses
    /// of its own while the old ones are still in use.
    /// Addresses cost no device memory, and host memory only where they are used: at most 1/1024,
    /// 1/128 where small blocks are.
    /// Less than 2 TiB.
    pub va_size_bytes: Option<u64>,
    /// Whether to grow or to wait when only other streams' memory is free.
    pub pending_policy: PendingPolicy,
    /// How long a request that finds no memory waits for some.
    pub out_of_memory: WaitPolicy,
    /// In which ways memory goes from one stream to another.
    pub reuse: Reuse,
    /// Held memory above this is given back, as far as it is free, when the host has waited for the
    /// GPU: by [`Stream::synchronize`](crate::Stream::synchronize),
    /// [`Device::synchronize`](crate::Device::synchronize) or [`Pool::passed`](crate::Pool::passed). What
    /// [graphs' pools](crate::Pool::graph_pool) and [tagged heaps](crate::Pool::tagged) hold counts; what
    /// is free in a tagged one goes back when the host has waited for a stream that freed there.
    /// `CU_MEMPOOL_ATTR_RELEASE_THRESHOLD` of the driver's pools, which have 0 by default; here
    /// everything is kept by default.
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let sim = cuda_sim::Simulator::builder().build()?;
    /// # let driver = vpmm::Driver::new(sim.driver())?;
    /// # let device = driver.device(0)?;
    /// # let stream = device.stream()?;
    /// let mut config = vpmm::PoolConfig::default();
    /// config.release_threshold_bytes = Some(0);
    /// let pool = vpmm::Pool::new(&device, &config)?;
    /// let ptr = pool.malloc(64 << 20, &stream)?;
    /// pool.free(ptr, &stream)?;
    /// assert_eq!(pool.stats().mapped_bytes, 64 << 20);
    /// stream.synchronize()?;
    /// assert_eq!(pool.stats().mapped_bytes, 0);
    /// # Ok(())
    /// # }
    /// ```
    pub release_threshold_bytes: Option<u64>,
    /// Extents that may move each second, in the long run, where new memory could be had instead;
    /// 1,000 by default, 3 to 4 % of one thread's time at most. Moving keeps the pool about as large
    /// as what is live, growing costs its time only once. While a pool finds its size more may move:
    /// some for each extent that was made; once there have been more moves than extents were made, fewer
    /// may, by the square of that ratio. Moves during which the requesting stream was busy throughout with
    /// what it had been given before do not count, since they keep nobody waiting but the host. At the
    /// limit extents move whenever that helps. A program that gives back all that it has and goes through the
    /// same again at once, a tenth of its time spent on moves, soon gets memory instead: up to twice what was
    /// live at most, if no limit is set. For each move's
    /// time 32 handles more than needed may be made, in shorter extents, of which a block keeps
    /// less from moving: once, while the pool grows, and not in a program's first 16 milliseconds.
    /// With 0 no time counts: what is made and moved follows from the requests and from what of the work before
    /// them has finished, as if they came in haste. Without a limit no request then has more than 54 extents
    /// moved and 32 made, some 3 ms of an H200's driver, where at leisure one for a large part of all that a
    /// program has may take four times as long: for a pool that is a few per cent smaller.
    pub moves_per_second: u32,
    /// Makes the pool rather wait than grow, where memory that other streams freed would do but is not
    /// ready; not at all by default. Three things happen then before it grows, the last two for
    /// requests of more than 64 KiB only: for smaller ones a pool grows by a granule, once.
    ///
    /// The stream that most of the free memory waits for keeps it when it is ready, for others to have by
    /// the block. Where [`Reuse::internal_dependencies`] is on the asking stream waits on the GPU for one
    /// such block that is not ready, behind everything that the other stream has been given: 128 times,
    /// and 16 times more each second. The host goes on meanwhile; but the two streams do not run side by
    /// side up to there. Else the calling thread looks for so long whether the memory becomes ready, and
    /// with it waits every other that needs the pool to grow; in sum never for more than a 64th of the
    /// time since the pool was made, nor than 64 ms and a 1024th of it. What is waited for again and
    /// again the pool grows for.
    ///
    /// A program whose host is ahead of the GPU, and that loads the next step's data on a stream of its
    /// own, holds a few batches less for it.
    pub patience: Duration,
    /// A thread that works ahead of requests; none by default.
    pub background: Option<Background>,
    /// Where the memory is; on the device by default. The default limit follows the device's memory
    /// in every case.
    pub location: Location,
    /// How memory can be shared with other processes; not at all by default.
    pub sharing: Sharing,
    /// Whether network cards and other devices of the bus may reach the memory, by GPUDirect RDMA: what a
    /// message-passing library is to register with them. They may what `cudaMalloc` gives, not what
    /// `cudaMallocAsync` does. Not by default: each mapping then takes the driver a tenth longer. An allocation may lie
    /// in several physical handles, which whoever registers it has to allow for. `gpuDirectRDMACapable` of `CUmemAllocationProp`, in the CUDA driver
    /// API's "Virtual Memory Management".
    pub gpu_direct_rdma: bool,
}

impl Default for PoolConfig {
    fn default() -> Self {
        Self {
            limit_bytes: None,
            va_size_bytes: None,
            pending_policy: PendingPolicy::default(),
            out_of_memory: WaitPolicy::default(),
            reuse: Reuse::default(),
            release_threshold_bytes: None,
            moves_per_second: 1000,
            patience: Duration::ZERO,
            background: None,
            location: Location::default(),
            sharing: Sharing::default(),
            gpu_direct_rdma: false,
        }
    }
}

/// What a pool's helper does: a thread that takes work off requests.
///
/// At every look it closes streams' epochs, so that what has been freed belongs to nobody before
/// anybody asks; empties fronts that nobody has touched for a while; unmaps addresses whose memory
/// has moved; and maps memory ahead, if it is told how much. It never waits for the GPU. What fails
/// is tried again at the next look, or met by the next request; when the context is lost it stops.
///
/// It never records on the legacy default stream, since that can end the capture of another stream;
/// what that stream frees is for requests to find, as without a helper.
///
/// It does all that for the pool's main heap: graphs' pools and tagged heaps have no helper.
///
/// The pool's end ends the thread, after the driver call that it is in. A pool that is never dropped,
/// or of which something is allocated for ever, keeps it until the process ends.
///
/// ```
/// let mut background = vpmm::Background::default();
/// background.ahead_bytes = 64 << 20;
/// let mut config = vpmm::PoolConfig::default();
/// config.background = Some(background);
/// ```
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct Background {
    /// The time between two looks, 100 µs at least; 5 ms by default. Where memory is to be mapped
    /// ahead it also looks when a request has grown the pool.
    pub period: Duration,
    /// Free memory to keep mapped where the pool grew last, rounded up to granules, so that requests
    /// there need no driver call; an eighth of it where small blocks are. 0 by default.
    ///
    /// Never past the limit, and not where that would leave less than an eighth of what the pool
    /// may hold: neither of the limit nor of what the device has free.
    pub ahead_bytes: u64,
}

impl Default for Background {
    fn default() -> Self {
        Self { period: Duration::from_millis(5), ahead_bytes: 0 }
    }
}

/// The settings with the device's numbers applied.
#[derive(Clone, Debug)]
pub(super) struct Checked {
    pub(super) limit_bytes: Option<u64>,
    pub(super) pending_policy: PendingPolicy,
    pub(super) out_of_memory: WaitPolicy,
    pub(super) reuse: Reuse,
    pub(super) release_threshold_bytes: Option<u64>,
    pub(super) moves_per_second: u32,
    pub(super) patience: Duration,
    pub(super) background: Option<Background>,
    /// Granules of addresses.
    pub(super) granules: u32,
    /// Granules of memory, at most.
    pub(super) capacity: u64,
}

impl PoolConfig {
    pub(super) fn check(&self, granule_bytes: u64, device_bytes: u64) -> Result<Checked> {
        let granule_units = granule_bytes / super::class::UNIT_BYTES;
        let limit = self.location.most(self.limit_bytes, device_bytes);
        let bytes = self.va_size_bytes.unwrap_or_else(|| limit.max(device_bytes).saturating_mul(4));
        let most = MOST_UNITS / granule_units;
        let granules = match self.va_size_bytes {
            Some(bytes) if bytes / granule_bytes > most => {
                return Err(bad(bytes, "a pool has less than 2 TiB of addresses"));
            }
            _ => (bytes / granule_bytes).min(most),
        };
        // Both parts, the granule between them, and one to place something in each.
        if granules < 16 {
            return Err(bad(bytes, "a pool needs 16 granules of addresses at least"));
        }
        Ok(Checked {
            limit_bytes: self.limit_bytes,
            pending_policy: self.pending_policy,
            out_of_memory: self.out_of_memory,
            reuse: self.reuse,
            release_threshold_bytes: self.release_threshold_bytes,
            moves_per_second: self.moves_per_second,
            patience: self.patience,
            background: self.background.clone(),
            granules: granules as u32,
            capacity: limit.min(bytes.max(device_bytes)) / granule_bytes,
        })
    }
}

fn bad(value: u64, reason: &str) -> Error {
    Error::Config { name: "va_size_bytes", value: value.to_string(), reason: reason.to_owned() }
}

#[cfg(test)]
mod tests {
    use super::*;

    const GRANULE: u64 = 2 << 20;

    #[test]
    fn addresses_are_four_times_the_memory_and_less_than_2_tib() {
        let checked = PoolConfig::default().check(GRANULE, 80 << 30).map(|of| of.granules);
        assert_eq!(checked.ok(), Some(4 * 40 * 1024));
        let checked = PoolConfig::default().check(GRANULE, 900 << 30).map(|of| of.granules);
        assert_eq!(checked.ok(), Some((1 << 20) - 1));
    }

    #[test]
    fn bad_sizes_are_named() {
        for bytes in [0, 4 << 20, 2 << 40] {
            let config = PoolConfig { va_size_bytes: Some(bytes), ..PoolConfig::default() };
            let error = config.check(GRANULE, 80 << 30).err();
            assert!(matches!(error, Some(Error::Config { name: "va_size_bytes", .. })), "{bytes}");
        }
    }
}
