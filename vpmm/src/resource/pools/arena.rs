//! An arena for each stream, and one that they share.

use std::collections::BTreeMap;
use std::fmt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, Weak};

use smallvec::SmallVec;

use super::by_stream::ByStream;
use super::coalescing::{CoalescingConfig, CoalescingPool, Growth};
use super::lanes::{self, Named};
use super::lock;
use super::sizes::UNIT;
use crate::device::{Device, StreamHandle};
use crate::driver::{Awaited, StreamWatcher};
use crate::error::{Error, Result};
use crate::ordering::Mark;
use crate::resource::request::{MIN_ALIGN, check_align, is_of_nothing, rounded};
use crate::resource::{Checks, Description, Facts, Identity, MemoryResource};
use crate::stream::RawHandles;
use crate::units::{Bytes, DevicePtr};

/// Longer requests are served by the shared arena.
const LARGE: u64 = 1 << 20;
/// What a stream's arena takes from the shared one at a time.
const SUPERBLOCK: u64 = 4 << 20;

/// What an [`Arena`] is made with.
#[derive(Clone, Copy, Debug, Default)]
#[non_exhaustive]
pub struct ArenaConfig {
    /// All that there is, in bytes: taken from upstream at once. At first half of the device's free
    /// memory. At least 1 MiB; what is no multiple of 256 is rounded down.
    pub arena_bytes: Option<u64>,
}

/// One piece of memory, divided into an arena for each stream and one for requests above 1 MiB: threads
/// on different streams do not meet at a lock. RMM: `arena_memory_resource`.
///
/// A stream's arena takes superblocks of 4 MiB from the shared one, and gives them back when another
/// request finds no memory. Neither ever waits on the host: memory goes from stream to stream as in
/// a [`CoalescingPool`], by what is complete or by a wait on the GPU. A free may come on any stream: the
/// superblock tells whose arena it is. It never takes more from upstream than at the start.
///
/// When a stream of this library ends its arena is given up. Of other streams nobody tells; their arenas
/// stay until another stream comes by the same raw handle, and give up what is free when memory is short.
///
/// Every wrong free is found. Memory goes back to upstream at the drop, which waits as that of
/// a [`CoalescingPool`].
///
/// ```
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let sim = cuda_sim::Simulator::builder().build()?;
/// # let driver = vpmm::Driver::new(sim.driver())?;
/// # let device = driver.device(0)?;
/// # let stream = device.stream()?;
/// use vpmm::resource::{Arena, ArenaConfig, DeviceMalloc, MemoryResource};
///
/// let mut config = ArenaConfig::default();
/// config.arena_bytes = Some(64 << 20);
/// let arena = Arena::new(DeviceMalloc::new(&device), &device, &config)?;
/// let ptr = arena.allocate(1000, 256, stream.handle())?;
/// println!("{}", arena.dump());
/// arena.deallocate(ptr, 1000, 256, stream.handle())?;
/// # Ok(())
/// # }
/// ```
pub struct Arena<R: MemoryResource + 'static> {
    streams: Arc<Streams<R>>,
    shared: Arc<CoalescingPool<R>>,
    owners: Arc<Owners>,
    device: Device,
    arena_bytes: u64,
    identity: Identity,
}

type OwnPool<R> = CoalescingPool<Superblocks<R>>;

/// The arena of one stream. One that was given up goes to another stream.
struct Own<R: MemoryResource> {
    pool: OwnPool<R>,
    /// Its stream is gone.
    has_ended: AtomicBool,
}

/// Every stream's arena. It sees streams end.
struct Streams<R: MemoryResource> {
    device: Device,
    of: ByStream<Own<R>>,
    /// Of those whose end nobody tells.
    by_raw: Mutex<RawHandles>,
}

/// Whose each superblock is: the place of the arena, by the first address; with its bytes.
type Owners = Mutex<BTreeMap<u64, (u64, u32)>>;

/// The shared arena, as one stream's arena sees it.
struct Superblocks<R: MemoryResource> {
    shared: Arc<CoalescingPool<R>>,
    owners: Arc<Owners>,
    own: u32,
}

impl<R: MemoryResource> MemoryResource for Superblocks<R> {
    fn allocate(&self, bytes: usize, align: usize, stream: StreamHandle) -> Result<DevicePtr> {
        let ptr = self.shared.allocate(bytes, align, stream)?;
        lock(&self.owners).insert(ptr.address(), (bytes as u64, self.own));
        Ok(ptr)
    }

    fn deallocate(
        &self,
        ptr: DevicePtr,
        bytes: usize,
        align: usize,
        stream: StreamHandle,
    ) -> Result<()> {
        // Out of the table first: once it is shared again, it may become another stream's.
        let known = lock(&self.owners).remove(&ptr.address());
        self.shared.deallocate(ptr, bytes, align, stream).inspect_err(|_| {
            if let Some(known) = known {
                lock(&self.owners).insert(ptr.address(), known);
            }
        })
    }

    fn facts(&self) -> Facts {
        self.shared.facts()
    }

    fn describe(&self) -> Description {
        self.shared.describe()
    }
}

impl<R: MemoryResource> StreamWatcher for Streams<R> {
    fn stream_ends(&self, stream: StreamHandle) {
        let number = lanes::number_of(&self.device, stream);
        if let Some(own) = number.and_then(|number| self.of.find(number)) {
            own.has_ended.store(true, Ordering::Relaxed);
        }
    }

    fn marks(&self, _of: Awaited) -> SmallVec<[Mark; 2]> {
        SmallVec::new()
    }

    fn passed(&self, _mark: &Mark) {}
}

impl<R: MemoryResource + 'static> Arena<R> {
    /// An arena of memory from `upstream`, for streams of this device.
    ///
    /// # Errors
    /// [`Error::Config`] for less than 1 MiB; [`Error::WrongDevice`] where upstream is for streams of another device;
    /// upstream's.
    pub fn new(upstream: R, device: &Device, config: &ArenaConfig) -> Result<Self> {
        let arena_bytes = match config.arena_bytes {
            Some(bytes) => bytes,
            None => device.free_memory()? / 2,
        };
        if arena_bytes < LARGE {
            let reason = "an arena has at least 1 MiB".to_owned();
            let value = arena_bytes.to_string();
            return Err(Error::Config { name: "arena_bytes", value, reason });
        }
        let arena_bytes = arena_bytes / UNIT * UNIT;
        let (initial_bytes, max_bytes) = (arena_bytes, Some(arena_bytes));
        let all = CoalescingConfig { initial_bytes, max_bytes, ..Default::default() };
        let shared = Arc::new(CoalescingPool::new(upstream, device, &all)?);
        let streams = Arc::new(Streams {
            device: device.clone(),
            of: ByStream::new(),
            by_raw: Mutex::default(),
        });
        let watcher: Weak<dyn StreamWatcher> = Arc::downgrade(&streams) as _;
        device.driver().watch_streams(watcher);
        let owners = Arc::default();
        let (device, identity) = (device.clone(), Identity::unique());
        Ok(Self { streams, shared, owners, device, arena_bytes, identity })
    }

    /// What is below.
    pub fn upstream(&self) -> &R {
        self.shared.upstream()
    }

    /// The arena of a stream, made if there is none.
    #[inline]
    fn own(&self, named: Named, stream: StreamHandle) -> Result<&Own<R>> {
        match self.streams.of.find(named.stream()) {
            Some(own) => Ok(own),
            None => self.open(named, stream),
        }
    }

    #[cold]
    fn open(&self, named: Named, stream: StreamHandle) -> Result<&Own<R>> {
        if !named.is_told() {
            let is_known = |known| self.streams.of.find(known).is_some();
            let former = lock(&self.streams.by_raw).came_by(stream, named.stream(), is_known);
            if let Some(own) = former.and_then(|former| self.streams.of.find(former)) {
                own.has_ended.store(true, Ordering::Relaxed);
            }
        }
        self.give_up_ended(stream);
        let again = |own: &Own<R>| own.has_ended.store(false, Ordering::Relaxed);
        self.streams.of.open(named.stream(), again, |place| {
            let (shared, owners) = (Arc::clone(&self.shared), Arc::clone(&self.owners));
            let pool = CoalescingPool::growing_by(
                Superblocks { shared, owners, own: place },
                &self.device,
                &CoalescingConfig::default(),
                Growth::By(SUPERBLOCK),
            )?;
            Ok(Own { pool, has_ended: AtomicBool::new(false) })
        })
    }

    /// Gives up the arenas of streams that have ended, as far as nothing of them is in use.
    fn give_up_ended(&self, stream: StreamHandle) {
        for (number, own) in self.streams.of.all() {
            if !own.has_ended.load(Ordering::Relaxed) {
                continue;
            }
            // What fails here is tried again when the next stream comes.
            let _ = own.pool.trim(stream, false);
            if own.pool.pool_bytes() == 0 {
                self.streams.of.give_up(number);
            }
        }
    }

    /// Brings superblocks that are wholly free back to the shared arena. One that another request is about to bring
    /// back is there then, too.
    fn call_in(&self, stream: StreamHandle, wait: bool) -> Result<()> {
        for (_, own) in self.streams.of.all() {
            own.pool.trim(stream, wait)?;
        }
        Ok(())
    }

    #[inline(never)]
    fn search(
        &self,
        named: Named,
        stream: StreamHandle,
        bytes: u64,
        asked: u64,
    ) -> Result<DevicePtr> {
        let request = || {
            if bytes > LARGE {
                self.shared.allocate_named(named, stream, bytes, asked)
            } else {
                self.own(named, stream)?.pool.allocate_named(named, stream, bytes, asked)
            }
        };
        let mut result = request();
        // Longer than all there is: nothing would help.
        if bytes > self.arena_bytes {
            return result;
        }
        for wait in [false, true] {
            // Also where nothing was brought back here: another request may have done so since this one looked.
            if result.as_ref().is_err_and(Error::is_out_of_memory) {
                self.call_in(stream, wait)?;
                result = request();
            }
        }
        result
    }

    /// The stream's arena that an address is in a superblock of.
    fn owner_of(&self, address: u64) -> Option<&Own<R>> {
        let place = {
            let owners = lock(&self.owners);
            let below = owners.range(..=address).next_back();
            below.filter(|(start, (bytes, _))| address - **start < *bytes).map(|(_, of)| of.1)
        };
        place.and_then(|place| self.streams.of.at(place))
    }

    /// What stands where, in numbers. All of them are 0 in a child of the process.
    pub fn dump(&self) -> ArenaDump {
        // As what its parts hold: nothing is known in a child of the process.
        if self.device.driver().is_forked() {
            return ArenaDump::default();
        }
        let shared = Part::of(&self.shared);
        let superblocks = lock(&self.owners);
        let superblock_bytes = superblocks.values().map(|(bytes, _)| *bytes).sum();
        let superblock_count = superblocks.len();
        drop(superblocks);
        let streams = self.streams.of.all().into_iter();
        let mut streams: Vec<(u64, Part)> = streams
            .map(|(number, own)| (number, Part::of(&own.pool)))
            .filter(|(_, part)| part.bytes > 0)
            .collect();
        streams.sort_unstable_by_key(|(number, _)| *number);
        ArenaDump { shared, superblock_bytes, superblock_count, streams }
    }
}

/// What a part of an [`Arena`] holds.
#[derive(Clone, Copy, Default, PartialEq, Eq, Debug)]
struct Part {
    bytes: u64,
    chunks: usize,
    live_bytes: u64,
    live_count: usize,
    free_bytes: u64,
    largest_free_bytes: u64,
}

impl Part {
    fn of<R: MemoryResource>(pool: &CoalescingPool<R>) -> Self {
        let mut part = Self::default();
        pool.visit(|bytes, blocks| {
            part.bytes += bytes;
            part.chunks += 1;
            let mut run = 0;
            for (bytes, is_live) in blocks {
                if *is_live {
                    part.live_bytes += bytes;
                    part.live_count += 1;
                    run = 0;
                } else {
                    part.free_bytes += bytes;
                    run += bytes;
                    part.largest_free_bytes = part.largest_free_bytes.max(run);
                }
            }
        });
        part
    }

    /// How much of what is free is of no use to the longest request that could be served, in percent.
    fn fragmentation(&self) -> f64 {
        if self.free_bytes == 0 {
            return 0.0;
        }
        (1.0 - self.largest_free_bytes as f64 / self.free_bytes as f64) * 100.0
    }
}

/// What an [`Arena`] holds and where, at one time: see [`Arena::dump`]. Displayed it is a table of lines.
/// RMM writes one to `rmm_arena_memory_dump.log`.
#[derive(Clone, Default, PartialEq, Debug)]
pub struct ArenaDump {
    shared: Part,
    superblock_bytes: u64,
    superblock_count: usize,
    streams: Vec<(u64, Part)>,
}

impl ArenaDump {
    /// All that the arena has, in bytes.
    pub fn arena_bytes(&self) -> u64 {
        self.shared.bytes
    }

    /// What of it streams' arenas have, in bytes.
    pub fn superblock_bytes(&self) -> u64 {
        self.superblock_bytes
    }

    /// What nobody has, in bytes.
    pub fn free_bytes(&self) -> u64 {
        self.shared.free_bytes
    }

    /// The longest piece of it, in bytes.
    pub fn largest_free_bytes(&self) -> u64 {
        self.shared.largest_free_bytes
    }

    /// How many streams' arenas have memory.
    pub fn streams(&self) -> usize {
        self.streams.len()
    }
}

impl fmt::Display for ArenaDump {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let shared = &self.shared;
        writeln!(f, "arena: {}", Bytes(shared.bytes))?;
        writeln!(
            f,
            "  superblocks: {} of {}",
            self.superblock_count,
            Bytes(self.superblock_bytes)
        )?;
        let large = shared.live_bytes.saturating_sub(self.superblock_bytes);
        let count = shared.live_count.saturating_sub(self.superblock_count);
        writeln!(f, "  large allocations: {count} of {}", Bytes(large))?;
        write!(f, "  free: {}", Bytes(shared.free_bytes))?;
        write!(f, ", largest {}", Bytes(shared.largest_free_bytes))?;
        write!(f, ", fragmentation {:.1} %", shared.fragmentation())?;
        for (number, part) in &self.streams {
            write!(f, "\nstream {number}: {} superblocks, ", part.chunks)?;
            write!(f, "{} in {} allocations, ", Bytes(part.live_bytes), part.live_count)?;
            write!(f, "{} free", Bytes(part.free_bytes))?;
            write!(f, ", largest {}", Bytes(part.largest_free_bytes))?;
            write!(f, ", fragmentation {:.1} %", part.fragmentation())?;
        }
        Ok(())
    }
}

impl<R: MemoryResource + 'static> MemoryResource for Arena<R> {
    /// # Errors
    /// As for [`CoalescingPool`].
    fn allocate(&self, bytes: usize, align: usize, stream: StreamHandle) -> Result<DevicePtr> {
        check_align(align, MIN_ALIGN)?;
        if bytes == 0 {
            return Ok(DevicePtr::NULL);
        }
        let (asked, bytes) = (bytes as u64, rounded(bytes)?);
        let named = lanes::name(&self.device, stream)?;
        if bytes <= LARGE
            && let Some(own) = self.streams.of.find(named.stream())
            && let Some(ptr) = own.pool.hit_named(named, bytes, asked)
        {
            return Ok(ptr);
        }
        self.search(named, stream, bytes, asked)
    }

    /// # Errors
    /// As for [`CoalescingPool`].
    fn deallocate(
        &self,
        ptr: DevicePtr,
        bytes: usize,
        _align: usize,
        stream: StreamHandle,
    ) -> Result<()> {
        if is_of_nothing(ptr, bytes)? {
            return Ok(());
        }
        let (address, asked) = (ptr.address(), bytes as u64);
        let named = lanes::name(&self.device, stream)?;
        if asked > LARGE {
            return match self.owner_of(address) {
                // With a wrong size, then: a superblock is none of the callers' allocations, though the shared arena
                // knows it.
                Some(own) => own.pool.free_named(named, address, asked),
                None => self.shared.free_named(named, address, asked),
            };
        }
        // As a rule it is of this stream.
        if let Some(own) = self.streams.of.find(named.stream()) {
            if own.pool.free_known(named, address, asked) {
                return Ok(());
            }
            match own.pool.free_named(named, address, asked) {
                Err(Error::ForeignPointer { .. }) => {}
                result => return result,
            }
        }
        match self.owner_of(address) {
            Some(own) => own.pool.free_named(named, address, asked),
            // A large one, with a wrong size; or nothing of this arena.
            None => self.shared.free_named(named, address, asked),
        }
    }

    fn facts(&self) -> Facts {
        let upstream = self.upstream().facts();
        Facts::of_device_memory()
            .accessible(upstream.device_accessible, upstream.host_accessible)
            .with_managed(upstream.managed)
            .with_stream_order(true)
            .with_recorded_streams(true)
            .with_max_bytes(Some(self.arena_bytes as usize))
            .with_checks(Checks::PointersAndSizes)
    }

    fn describe(&self) -> Description {
        Description::new("arena")
            .with("size", Bytes(self.arena_bytes))
            .over(self.upstream().describe())
    }

    fn identity(&self) -> Identity {
        self.identity
    }

    fn device(&self) -> Option<&Device> {
        Some(&self.device)
    }

    fn held_bytes(&self) -> Option<u64> {
        Some(self.shared.pool_bytes())
    }

    /// # Errors
    /// As for [`CoalescingPool`].
    fn record_stream(&self, ptr: DevicePtr, stream: StreamHandle) -> Result<()> {
        let named = lanes::name(&self.device, stream)?;
        match self.owner_of(ptr.address()) {
            Some(own) => own.pool.note_use(named, ptr.address()),
            None => self.shared.note_use(named, ptr.address()),
        }
    }
}

impl<R: MemoryResource + 'static> Drop for Arena<R> {
    /// No thread that tells of a stream's end has the streams' arenas for a moment longer: they end here.
    fn drop(&mut self) {
        self.device.driver().unwatch_streams(&*self.streams);
    }
}

impl<R: MemoryResource + 'static> fmt::Debug for Arena<R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut shown = f.debug_struct("Arena");
        shown.field("shared", &self.shared);
        if !self.device.driver().is_forked() {
            shown.field("streams", &self.streams.of.all().len());
        }
        shown.finish_non_exhaustive()
    }
}
