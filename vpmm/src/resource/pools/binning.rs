//! A resource for each range of sizes.

use std::collections::HashSet;
use std::fmt;
use std::ptr;
use std::sync::atomic::{AtomicPtr, Ordering};
use std::sync::{Arc, Mutex};

use smallvec::SmallVec;

use super::fixed_size::{FixedSize, FixedSizeConfig, facts_over};
use super::lock;
use crate::device::{Device, StreamHandle};
use crate::error::{Error, Result};
use crate::resource::request::{check_align, check_device, is_of_nothing, rounded};
use crate::resource::{Checks, Description, Facts, Identity, MemoryResource, or_undo};
use crate::units::{Bytes, DevicePtr};

/// What a [`Binning`] makes of its own bins at once, in bytes, if that is less than 128 blocks; or this fraction of
/// the most that upstream can give in one piece, so that several bins have room.
const AT_ONCE: usize = 32 << 20;
const AT_ONCE_OF_MOST: usize = 8;

/// Sends each request to the bin of the least size that suffices, and what no bin is long enough for
/// to another resource. RMM: `binning_memory_resource`.
///
/// Bins that it makes itself are [`FixedSize`], take memory when they are first used, and not more than 32 MiB at a
/// time, nor an eighth of the longest piece that upstream can give (or one block); RMM's take 128 blocks at once
/// when they are made. Bins may be added while others use it. A free that a bin does not know, of something
/// allocated before the bin was added, goes on to the next. Of a bin that is [added](Self::add_bin) where its resource
/// or upstream leaves pointers to the driver, as [`DeviceMalloc`](crate::resource::DeviceMalloc) does, a table has what
/// it gave: a look-up under a lock.
///
/// ```
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let sim = cuda_sim::Simulator::builder().build()?;
/// # let driver = vpmm::Driver::new(sim.driver())?;
/// # let device = driver.device(0)?;
/// # let stream = device.stream()?;
/// use vpmm::resource::{Binning, DeviceMalloc, MemoryResource};
///
/// // Bins of 256 KiB, 512 KiB, 1 MiB.
/// let binning = Binning::with_powers(DeviceMalloc::new(&device), &device, 18..=20)?;
/// binning.add_own_bin(3 << 20)?;
/// let ptr = binning.allocate(700 << 10, 256, stream.handle())?; // of the bin of 1 MiB
/// binning.deallocate(ptr, 700 << 10, 256, stream.handle())?;
/// println!("{}", binning.describe());
/// # Ok(())
/// # }
/// ```
pub struct Binning<R> {
    upstream: Arc<R>,
    /// What the bins of its own have from upstream: allocations there, and none of the callers'.
    chunks: Arc<Chunks>,
    device: Device,
    /// The bins as they are now, the last of `versions`.
    bins: AtomicPtr<Version>,
    /// All that they ever were, as many as bins were added; each stays where it is.
    versions: Mutex<Vec<Arc<Version>>>,
    identity: Identity,
}

type Chunks = Mutex<HashSet<u64>>;

/// Upstream, as the bins of its own see it.
struct ForBins<R> {
    upstream: Arc<R>,
    chunks: Arc<Chunks>,
}

impl<R: MemoryResource> MemoryResource for ForBins<R> {
    fn allocate(&self, bytes: usize, align: usize, stream: StreamHandle) -> Result<DevicePtr> {
        let ptr = self.upstream.allocate(bytes, align, stream)?;
        lock(&self.chunks).insert(ptr.address());
        Ok(ptr)
    }

    fn deallocate(
        &self,
        ptr: DevicePtr,
        bytes: usize,
        align: usize,
        stream: StreamHandle,
    ) -> Result<()> {
        // Out of the table first: once it is freed, the address may be a caller's.
        lock(&self.chunks).remove(&ptr.address());
        let free = || self.upstream.deallocate(ptr, bytes, align, stream);
        or_undo(free, || {
            lock(&self.chunks).insert(ptr.address());
        })
    }

    fn facts(&self) -> Facts {
        self.upstream.facts()
    }

    /// No more, as what is described stands beside the upstream's own description, and not on it.
    fn describe(&self) -> Description {
        Description::new("upstream")
    }

    fn device(&self) -> Option<&Device> {
        self.upstream.device()
    }
}

/// All bins at one time, by size, the least first.
struct Version {
    bins: Vec<Bin>,
}

#[derive(Clone)]
struct Bin {
    bytes: u64,
    max_align: usize,
    /// Made here, over the same upstream.
    is_own: bool,
    resource: Arc<dyn MemoryResource>,
    /// What it gave and has not back, by address, where the resource, or upstream, would free what others have given.
    given: Option<Arc<Mutex<HashSet<u64>>>>,
}

impl Bin {
    fn allocate(&self, bytes: usize, align: usize, stream: StreamHandle) -> Result<DevicePtr> {
        let ptr = self.resource.allocate(bytes, align, stream)?;
        if let Some(given) = &self.given {
            lock(given).insert(ptr.address());
        }
        Ok(ptr)
    }

    /// [`Error::ForeignPointer`], and nothing done, where the bin is known not to have given it.
    fn deallocate(
        &self,
        ptr: DevicePtr,
        bytes: usize,
        align: usize,
        stream: StreamHandle,
    ) -> Result<()> {
        let address = ptr.address();
        let free = || self.resource.deallocate(ptr, bytes, align, stream);
        let Some(given) = &self.given else { return free() };
        // Out of the table first: once it is freed, the address may be another's.
        if !lock(given).remove(&address) {
            return Err(Error::ForeignPointer { address });
        }
        or_undo(free, || {
            lock(given).insert(address);
        })
    }

    fn record_stream(&self, ptr: DevicePtr, stream: StreamHandle) -> Result<()> {
        let address = ptr.address();
        match &self.given {
            Some(given) if !lock(given).contains(&address) => {
                Err(Error::ForeignPointer { address })
            }
            _ => self.resource.record_stream(ptr, stream),
        }
    }

    /// Whether the table has it.
    fn has_given(&self, ptr: DevicePtr) -> bool {
        self.given.as_ref().is_some_and(|given| lock(given).contains(&ptr.address()))
    }
}

impl<R: MemoryResource + 'static> Binning<R> {
    /// Without a bin yet: everything goes to `upstream`.
    pub fn new(upstream: R, device: &Device) -> Self {
        Self {
            upstream: Arc::new(upstream),
            chunks: Arc::default(),
            device: device.clone(),
            bins: AtomicPtr::new(ptr::null_mut()),
            versions: Mutex::default(),
            identity: Identity::unique(),
        }
    }

    /// With bins of its own for these powers of two, in bytes.
    ///
    /// # Errors
    /// [`Error::Config`] for a power above 47; those of [`add_own_bin`](Self::add_own_bin).
    pub fn with_powers(
        upstream: R,
        device: &Device,
        powers: std::ops::RangeInclusive<u32>,
    ) -> Result<Self> {
        let binning = Self::new(upstream, device);
        for power in powers {
            let bytes = 1_usize.checked_shl(power).filter(|_| power < 48).ok_or_else(|| {
                let reason = "a bin has at most 2^47 bytes".to_owned();
                Error::Config { name: "powers", value: power.to_string(), reason }
            })?;
            binning.add_own_bin(bytes)?;
        }
        Ok(binning)
    }

    /// What takes requests that are longer than all bins.
    pub fn upstream(&self) -> &R {
        &self.upstream
    }

    /// The sizes of the bins, in bytes, the least first.
    pub fn bins(&self) -> Vec<u64> {
        self.read().iter().map(|bin| bin.bytes).collect()
    }

    /// Adds a bin of blocks of this size, taken from upstream. Nothing is done where there is one, nor where upstream
    /// never gives so long a piece: it serves the requests itself that are not longer.
    ///
    /// # Errors
    /// [`Error::Config`] for a size that no block can have; [`Error::WrongDevice`] where upstream is for streams of
    /// another device.
    pub fn add_own_bin(&self, bytes: usize) -> Result<()> {
        let most = self.upstream.facts().max_bytes.unwrap_or(usize::MAX);
        let at_once = AT_ONCE.min(most / AT_ONCE_OF_MOST);
        let mut config = FixedSizeConfig::default();
        config.block_bytes = bytes;
        config.blocks_at_once = (at_once / bytes.max(1)).clamp(1, config.blocks_at_once);
        config.at_start = false;
        let (upstream, chunks) = (Arc::clone(&self.upstream), Arc::clone(&self.chunks));
        let upstream = ForBins { upstream, chunks };
        let blocks = match FixedSize::new(upstream, &self.device, &config) {
            Err(Error::RequestTooLong { .. }) => return Ok(()),
            made => made?,
        };
        let bytes = blocks.block_bytes() as u64;
        let max_align = blocks.facts().max_align;
        let resource = Arc::new(blocks);
        self.add(Bin { bytes, max_align, is_own: true, resource, given: None });
        Ok(())
    }

    /// Adds a bin: `resource` takes requests of up to `bytes` that no lesser bin takes. Nothing is done
    /// where there is one of that size.
    ///
    /// # Errors
    /// [`Error::Config`] for no bytes, and for a resource that does not find wrong pointers: frees must
    /// be able to pass it by. [`Error::WrongDevice`] for one that is for streams of another device.
    pub fn add_bin(&self, bytes: usize, resource: Arc<dyn MemoryResource>) -> Result<()> {
        let wrong = |reason: &str| {
            let (name, value) = ("bytes", bytes.to_string());
            Err(Error::Config { name, value, reason: reason.to_owned() })
        };
        if bytes == 0 {
            return wrong("a bin must have bytes");
        }
        let Facts { checks, max_align, .. } = resource.facts();
        if checks == Checks::Nothing {
            return wrong("a bin's resource must find pointers that it does not know");
        }
        check_device(&*resource, &self.device)?;
        // Who knows the sizes has a table of its own, and so has a pool. What is below and has none would free the
        // piece that a bin's first block begins.
        let knows = |checks, identity: Identity| {
            checks == Checks::PointersAndSizes || identity.is_of_a_pool()
        };
        let each_knows = knows(checks, resource.identity())
            && knows(self.upstream.facts().checks, self.upstream.identity());
        let given = (!each_knows).then(Arc::default);
        self.add(Bin { bytes: rounded(bytes)?, max_align, is_own: false, resource, given });
        Ok(())
    }

    fn add(&self, bin: Bin) {
        let mut versions = lock(&self.versions);
        let bins = self.read();
        let Err(at) = bins.binary_search_by_key(&bin.bytes, |known| known.bytes) else { return };
        let mut all = bins.to_vec();
        all.insert(at, bin);
        let version = Arc::new(Version { bins: all });
        self.bins.store(Arc::as_ptr(&version).cast_mut(), Ordering::Release);
        versions.push(version);
    }
}

impl<R> Binning<R> {
    /// The bins as they are now, the least first.
    #[inline]
    fn read(&self) -> &[Bin] {
        // SAFETY: null, or one of `versions`, each of which is never changed, and dropped with `self`.
        let version = unsafe { self.bins.load(Ordering::Acquire).as_ref() };
        version.map_or(&[], |version| &version.bins)
    }
}

/// The first bin that is long enough.
fn first_of(bins: &[Bin], bytes: u64) -> usize {
    bins.partition_point(|bin| bin.bytes < bytes)
}

/// The longest request where upstream serves none that is longer than `most`. What comes to a bin is served there or
/// nowhere, and what is longer than all of them upstream.
fn most_bytes(bins: &[Bin], facts: &[Facts], most: usize) -> usize {
    let (mut served, mut shorter) = (0, 0);
    for (bin, facts) in bins.iter().zip(facts) {
        let bytes = bin.bytes as usize;
        let of_bin = facts.max_bytes.map_or(bytes, |most| most.min(bytes));
        // What is not longer comes to a lesser bin.
        if of_bin > shorter {
            served = of_bin;
        }
        shorter = bytes;
    }
    if most > shorter { most } else { served }
}

impl<R: MemoryResource> MemoryResource for Binning<R> {
    /// # Errors
    /// Those of the bin, or of upstream.
    fn allocate(&self, bytes: usize, align: usize, stream: StreamHandle) -> Result<DevicePtr> {
        check_align(align, usize::MAX)?;
        if bytes == 0 {
            // What cannot be had is refused for nothing, too.
            check_align(align, self.upstream.facts().max_align)?;
            return Ok(DevicePtr::NULL);
        }
        let rounded = rounded(bytes)?;
        let bins = self.read();
        match bins.get(first_of(bins, rounded)) {
            Some(bin) if bin.max_align >= align => bin.allocate(bytes, align, stream),
            _ => self.upstream.allocate(bytes, align, stream),
        }
    }

    /// # Errors
    /// Those of the bins, or of upstream.
    fn deallocate(
        &self,
        ptr: DevicePtr,
        bytes: usize,
        align: usize,
        stream: StreamHandle,
    ) -> Result<()> {
        if is_of_nothing(ptr, bytes)? {
            return Ok(());
        }
        let rounded = rounded(bytes)?;
        let bins = self.read();
        let first = first_of(bins, rounded);
        // A bin's chunk begins where its first block does: a size too large for that bin must not free the
        // chunk. A lesser bin names what is wrong. Nor must what is below free what is a bin's.
        let is_chunk = || lock(&self.chunks).contains(&ptr.address());
        let is_bins = || is_chunk() || bins.iter().any(|bin| bin.has_given(ptr));
        let lesser = if bins[first..].is_empty() && !is_bins() { 0..0 } else { 0..first };
        for bin in bins[first..].iter().chain(&bins[lesser]) {
            match bin.deallocate(ptr, bytes, align, stream) {
                // Allocated before the bin was added, or with a greater alignment than it has.
                Err(Error::ForeignPointer { .. }) => {}
                result => return result,
            }
        }
        self.upstream.deallocate(ptr, bytes, align, stream)
    }

    fn facts(&self) -> Facts {
        let bins = self.read();
        let below = self.upstream.facts();
        // Each is asked once, and what is below not again by each bin of its own: on each other that would be so many
        // times as often with every one.
        let of = |bin: &Bin| match bin.is_own {
            true => facts_over(&below, bin.bytes as usize),
            false => bin.resource.facts(),
        };
        let of_bins: SmallVec<[Facts; 16]> = bins.iter().map(of).collect();
        let most = below.max_bytes.map(|most| most_bytes(bins, &of_bins, most));
        of_bins.into_iter().fold(below.with_max_bytes(most), |facts, bin| {
            let (least, most) = (facts.min_align.min(bin.min_align), facts.max_align);
            facts
                .accessible(
                    facts.device_accessible && bin.device_accessible,
                    facts.host_accessible && bin.host_accessible,
                )
                .with_managed(facts.managed && bin.managed)
                .with_stream_order(facts.stream_ordered || bin.stream_ordered)
                .aligned(least, most)
                .with_recorded_streams(facts.records_streams && bin.records_streams)
                .with_checks(facts.checks.min(bin.checks))
        })
    }

    fn describe(&self) -> Description {
        let bins = self.read();
        let mut description = Description::new("binning");
        for bin in bins.iter() {
            description = description.with("bin", Bytes(bin.bytes));
        }
        for bin in bins.iter() {
            let of_bin = bin.resource.describe();
            description = description.over(if bin.is_own { of_bin.alone() } else { of_bin });
        }
        description.over(self.upstream.describe())
    }

    fn identity(&self) -> Identity {
        self.identity
    }

    /// Upstream's, where that takes another one's streams: bins of that one are refused, and what stands on this is.
    fn device(&self) -> Option<&Device> {
        self.upstream.device().or(Some(&self.device))
    }

    /// # Errors
    /// Those of the bins, or of upstream.
    fn record_stream(&self, ptr: DevicePtr, stream: StreamHandle) -> Result<()> {
        for bin in self.read() {
            match bin.record_stream(ptr, stream) {
                Err(Error::ForeignPointer { .. }) => {}
                result => return result,
            }
        }
        if lock(&self.chunks).contains(&ptr.address()) {
            return Err(Error::ForeignPointer { address: ptr.address() });
        }
        self.upstream.record_stream(ptr, stream)
    }

    /// What upstream holds, in which bins of its own are. Where upstream does not say, what the bins hold. What a bin
    /// that was added holds elsewhere is not told of where upstream says something.
    fn held_bytes(&self) -> Option<u64> {
        let bins: u64 = self.read().iter().filter_map(|bin| bin.resource.held_bytes()).sum();
        // An upstream that counts has the bins' memory in its count.
        self.upstream.held_bytes().or(Some(bins))
    }
}

impl<R: MemoryResource> fmt::Debug for Binning<R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let bins: Vec<_> = self.read().iter().map(|bin| bin.bytes).collect();
        f.debug_struct("Binning").field("bins", &bins).finish_non_exhaustive()
    }
}
