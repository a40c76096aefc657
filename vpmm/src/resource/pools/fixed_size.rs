//! Blocks of one size.

use std::collections::{BTreeMap, VecDeque};
use std::fmt;
use std::sync::{Arc, Mutex, MutexGuard, Weak};

use smallvec::SmallVec;

use super::blocks::NOBODY;
use super::lanes::{self, Lanes, Named};
use super::lock;
use super::sizes::{MOST_BYTES, UNIT};
use crate::device::{Device, StreamHandle};
use crate::driver::{Awaited, StreamWatcher};
use crate::error::{Error, Result};
use crate::ordering::Mark;
use crate::resource::request::{MIN_ALIGN, check_align, is_of_nothing, rounded};
use crate::resource::{Checks, Description, Facts, Identity, MemoryResource};
use crate::stream::Stream;
use crate::units::{Bytes, DevicePtr, round_up};

/// What a [`FixedSize`] is made with.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct FixedSizeConfig {
    /// The bytes of each block, rounded up to a multiple of 256: what a request may be at most. At first
    /// 1 MiB.
    pub block_bytes: usize,
    /// How many blocks are taken from upstream at a time. At first 128.
    pub blocks_at_once: usize,
    /// Whether the first of these are taken when the resource is made, or by the first request. At first
    /// when it is made.
    pub at_start: bool,
}

impl Default for FixedSizeConfig {
    fn default() -> Self {
        Self { block_bytes: 1 << 20, blocks_at_once: 128, at_start: true }
    }
}

/// Blocks of one size, which every request gets one of: constant time, no fragmentation, and what
/// a request is shorter than a block is lost to it. RMM: `fixed_size_memory_resource`.
///
/// Streams are treated as by [`CoalescingPool`](super::CoalescingPool): a stream's own blocks are its own
/// at once, the latest first; what other streams have freed is asked about when it is needed, and taken
/// over with a wait on the GPU before more is taken from upstream. A stream's own blocks cost it no driver
/// call. Every wrong free is found. Memory goes back to upstream at the drop.
///
/// ```
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let sim = cuda_sim::Simulator::builder().build()?;
/// # let driver = vpmm::Driver::new(sim.driver())?;
/// # let device = driver.device(0)?;
/// # let stream = device.stream()?;
/// use vpmm::resource::{DeviceMalloc, FixedSize, FixedSizeConfig, MemoryResource};
///
/// let mut config = FixedSizeConfig::default();
/// config.block_bytes = 4096;
/// let blocks = FixedSize::new(DeviceMalloc::new(&device), &device, &config)?;
/// let ptr = blocks.allocate(3000, 256, stream.handle())?;
/// assert!(blocks.allocate(5000, 256, stream.handle()).is_err());
/// blocks.deallocate(ptr, 3000, 256, stream.handle())?;
/// # Ok(())
/// # }
/// ```
pub struct FixedSize<R: MemoryResource> {
    upstream: R,
    core: Arc<Core>,
    block_bytes: u64,
    blocks_at_once: u64,
    /// One request at a time makes room.
    growing: Mutex<()>,
    identity: Identity,
}

#[derive(Debug)]
struct Core {
    device: Device,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    lanes: Lanes,
    /// What each lane has freed, the latest last, each with its epoch. The first lane is nobody's.
    free: Vec<VecDeque<(u32, u64)>>,
    /// For each block what was asked for, or [`FREE`].
    asked: Vec<u64>,
    /// What was got from upstream, by its first address: the pointer, and the number of its first block.
    chunks: BTreeMap<u64, (DevicePtr, u32)>,
    /// The address of each block.
    addresses: Vec<u64>,
    live: usize,
}

/// In the place of what was asked for: the block is free. No request has no bytes.
const FREE: u64 = 0;

impl State {
    fn lane(&mut self, named: Named) -> Result<u32> {
        let free = &self.free;
        let is_empty = |lane: u32| free.get(lane as usize).is_none_or(VecDeque::is_empty);
        let lane = self.lanes.lane(named, is_empty)?;
        if lane as usize >= self.free.len() {
            self.free.resize_with(lane as usize + 1, VecDeque::new);
        }
        Ok(lane)
    }

    fn has_free(&self, lane: u32) -> bool {
        self.free.get(lane as usize).is_some_and(|free| !free.is_empty())
    }

    fn hit(&mut self, lane: u32, asked: u64) -> Option<u64> {
        let own = self.free[lane as usize].pop_back();
        let (block, _) = own.or_else(|| self.free[NOBODY as usize].pop_back())?;
        Some(self.take(block, asked))
    }

    fn take(&mut self, block: u32, asked: u64) -> u64 {
        self.asked[block as usize] = asked;
        self.live += 1;
        self.addresses[block as usize]
    }

    /// What a lane has up to an epoch becomes nobody's.
    fn pass(&mut self, lane: u32, epoch: u64) {
        // Epochs grow, and so what has passed is at the front.
        let Some(free) = self.free.get_mut(lane as usize) else { return };
        let passed = free.partition_point(|(_, of)| *of <= epoch);
        let passed: Vec<_> = free.drain(..passed).map(|(block, _)| (block, 0)).collect();
        self.free[NOBODY as usize].extend(passed);
    }

    fn poll(&mut self) -> Result<()> {
        for lane in self.lanes.all() {
            if self.has_free(lane)
                && let Some(epoch) = self.lanes.poll(lane)?
            {
                self.pass(lane, epoch);
            }
        }
        Ok(())
    }

    /// The block that another stream freed first, which this one is made to wait for where it must.
    fn take_over(&mut self, lane: u32, named: Named, asked: u64) -> Result<Option<u64>> {
        let mut offers: Vec<(bool, u32, u64)> = self
            .lanes
            .all()
            .filter(|other| *other != lane)
            .filter_map(|other| {
                let (_, epoch) = self.free.get(other as usize)?.front()?;
                Some((!self.lanes.is_after(lane, other, *epoch), other, *epoch))
            })
            .collect();
        offers.sort_unstable();
        for (_, other, epoch) in offers {
            if self.lanes.come_after(lane, named, other, epoch)?
                && let Some((block, _)) = self.free[other as usize].pop_front()
            {
                return Ok(Some(self.take(block, asked)));
            }
        }
        Ok(None)
    }

    fn find_lost(&mut self) -> Result<()> {
        let lost = |lane: u32| self.lanes.is_lost(lane) && self.has_free(lane);
        if self.lanes.all().any(lost) {
            self.lanes.wait_for_device()?;
            for lane in self.lanes.all() {
                self.pass(lane, self.lanes.passed(lane));
            }
        }
        Ok(())
    }

    fn add_chunk(&mut self, ptr: DevicePtr, count: u64, bytes: u64, lane: u32, epoch: u64) {
        let first = self.addresses.len() as u32;
        self.chunks.insert(ptr.address(), (ptr, first));
        for number in 0..count {
            self.addresses.push(ptr.address() + number * bytes);
            self.asked.push(FREE);
        }
        // From the last to the first, so that the lowest is handed out first.
        let free = &mut self.free[lane as usize];
        free.extend((0..count as u32).rev().map(|number| (first + number, epoch)));
    }

    /// The live block that begins at an address and was asked for with this size.
    fn find(&self, address: u64, asked: u64, block_bytes: u64, at_once: u64) -> Result<u32> {
        let foreign = Error::ForeignPointer { address };
        let Some((start, (_, first))) = self.chunks.range(..=address).next_back() else {
            return Err(foreign);
        };
        let (number, inside) = ((address - start) / block_bytes, (address - start) % block_bytes);
        if number >= at_once {
            return Err(foreign);
        }
        let block = first + number as u32;
        match self.asked[block as usize] {
            FREE => Err(Error::DoubleFree { address }),
            _ if inside != 0 => Err(Error::InteriorPointer { address, start: address - inside }),
            bytes if bytes != asked => Err(Error::WrongSize { address, given_bytes: asked, bytes }),
            _ => Ok(block),
        }
    }
}

impl Core {
    fn state(&self) -> MutexGuard<'_, State> {
        lock(&self.state)
    }
}

impl StreamWatcher for Core {
    fn stream_ends(&self, stream: StreamHandle) {
        self.state().lanes.stream_ends(stream);
    }

    fn marks(&self, of: Awaited) -> SmallVec<[Mark; 2]> {
        self.state().lanes.marks(of)
    }

    fn passed(&self, mark: &Mark) {
        let mut state = self.state();
        if let Some((lane, epoch)) = state.lanes.see_mark(mark) {
            state.pass(lane, epoch);
        }
    }
}

impl<R: MemoryResource> FixedSize<R> {
    /// Blocks of memory from `upstream`, for streams of this device.
    ///
    /// # Errors
    /// [`Error::Config`] for blocks of no bytes, no blocks at once, or more of both than there can be;
    /// upstream's, for the first blocks.
    pub fn new(upstream: R, device: &Device, config: &FixedSizeConfig) -> Result<Self> {
        device.driver().check_process()?;
        let wrong = |name, value: usize| Error::Config {
            name,
            value: value.to_string(),
            reason: "blocks must have bytes, and all of them at once at most 256 TiB".to_owned(),
        };
        let bytes = round_up(config.block_bytes as u64, UNIT).filter(|bytes| *bytes > 0);
        let block_bytes = bytes.ok_or_else(|| wrong("block_bytes", config.block_bytes))?;
        let blocks_at_once = config.blocks_at_once as u64;
        let at_once = block_bytes.checked_mul(blocks_at_once);
        let fits = at_once.is_some_and(|bytes| bytes > 0 && bytes <= MOST_BYTES);
        if !fits || blocks_at_once > u64::from(u32::MAX) / 2 {
            return Err(wrong("blocks_at_once", config.blocks_at_once));
        }
        let state = State {
            lanes: Lanes::new(device),
            free: vec![VecDeque::new()],
            asked: Vec::new(),
            chunks: BTreeMap::new(),
            addresses: Vec::new(),
            live: 0,
        };
        let core = Arc::new(Core { device: device.clone(), state: Mutex::new(state) });
        let watcher: Weak<dyn StreamWatcher> = Arc::downgrade(&core) as _;
        device.driver().watch_streams(watcher);
        let (growing, identity) = (Mutex::new(()), Identity::unique());
        let blocks = Self { upstream, core, block_bytes, blocks_at_once, growing, identity };
        if config.at_start {
            // On a stream of its own, so that no other is waited for; after the wait it is everybody's.
            let stream = device.stream()?;
            let ptr = blocks.get_chunk(stream.handle())?;
            if blocks.upstream.facts().stream_ordered
                && let Err(error) = stream.synchronize()
            {
                blocks.give_chunk(ptr, stream.handle())?;
                return Err(error);
            }
            blocks.core.state().add_chunk(ptr, blocks_at_once, block_bytes, NOBODY, 0);
        }
        Ok(blocks)
    }

    /// What is below.
    pub fn upstream(&self) -> &R {
        &self.upstream
    }

    /// The bytes of each block.
    pub fn block_bytes(&self) -> usize {
        self.block_bytes as usize
    }

    fn chunk_bytes(&self) -> usize {
        (self.block_bytes * self.blocks_at_once) as usize
    }

    fn get_chunk(&self, stream: StreamHandle) -> Result<DevicePtr> {
        self.upstream.allocate(self.chunk_bytes(), MIN_ALIGN, stream)
    }

    fn give_chunk(&self, ptr: DevicePtr, stream: StreamHandle) -> Result<()> {
        self.upstream.deallocate(ptr, self.chunk_bytes(), MIN_ALIGN, stream)
    }

    #[cold]
    fn miss(&self, named: Named, stream: StreamHandle, asked: u64) -> Result<u64> {
        let _growing = lock(&self.growing);
        {
            let mut state = self.core.state();
            let lane = state.lane(named)?;
            if let Some(address) = state.hit(lane, asked) {
                return Ok(address);
            }
            state.poll()?;
            if let Some(address) = state.hit(lane, asked) {
                return Ok(address);
            }
            if let Some(address) = state.take_over(lane, named, asked)? {
                return Ok(address);
            }
        }
        let more = self.get_chunk(stream);
        let mut state = self.core.state();
        let refusal = match more {
            Ok(ptr) => {
                let lane = match state.lane(named) {
                    Ok(lane) => lane,
                    Err(error) => {
                        drop(state);
                        self.give_chunk(ptr, stream)?;
                        return Err(error);
                    }
                };
                let ordered = self.upstream.facts().stream_ordered;
                let (lane, epoch) =
                    if ordered { (lane, state.lanes.put(lane, named)) } else { (NOBODY, 0) };
                state.add_chunk(ptr, self.blocks_at_once, self.block_bytes, lane, epoch);
                None
            }
            Err(error) => {
                state.find_lost()?;
                Some(error)
            }
        };
        let lane = state.lane(named)?;
        state.hit(lane, asked).ok_or_else(|| {
            let held = self.held(&state);
            let live = state.live as u64 * self.block_bytes;
            refusal.filter(|error| !error.is_out_of_memory()).unwrap_or(Error::OutOfMemory {
                requested_bytes: self.block_bytes,
                free_bytes: held - live,
                largest_free_bytes: if held > live { self.block_bytes } else { 0 },
                mapped_bytes: held,
                live_bytes: live,
                limit_bytes: None,
                map: None,
            })
        })
    }

    fn held(&self, state: &State) -> u64 {
        state.addresses.len() as u64 * self.block_bytes
    }
}

impl<R: MemoryResource> MemoryResource for FixedSize<R> {
    /// # Errors
    /// [`Error::RequestTooLong`] above the size of a block; else as for
    /// [`CoalescingPool`](super::CoalescingPool).
    fn allocate(&self, bytes: usize, align: usize, stream: StreamHandle) -> Result<DevicePtr> {
        check_align(align, MIN_ALIGN)?;
        if bytes == 0 {
            return Ok(DevicePtr::NULL);
        }
        let asked = bytes as u64;
        if rounded(bytes)? > self.block_bytes {
            return Err(Error::RequestTooLong { bytes: asked, most_bytes: self.block_bytes });
        }
        let named = lanes::name(&self.core.device, stream)?;
        let hit = {
            let mut state = self.core.state();
            let lane = state.lane(named)?;
            state.hit(lane, asked)
        };
        let address = hit.map_or_else(|| self.miss(named, stream, asked), Ok)?;
        Ok(DevicePtr::from_address(address))
    }

    /// # Errors
    /// As for [`CoalescingPool`](super::CoalescingPool).
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
        let named = lanes::name(&self.core.device, stream)?;
        let mut state = self.core.state();
        let (address, asked) = (ptr.address(), bytes as u64);
        let block = state.find(address, asked, self.block_bytes, self.blocks_at_once)?;
        let lane = state.lane(named)?;
        let epoch = state.lanes.freed(lane, named)?;
        state.asked[block as usize] = FREE;
        state.live -= 1;
        state.free[lane as usize].push_back((block, epoch));
        Ok(())
    }

    fn facts(&self) -> Facts {
        let upstream = self.upstream.facts();
        Facts::of_device_memory()
            .accessible(upstream.device_accessible, upstream.host_accessible)
            .with_managed(upstream.managed)
            .with_stream_order(true)
            .with_max_bytes(Some(self.block_bytes()))
            .with_checks(Checks::PointersAndSizes)
    }

    fn describe(&self) -> Description {
        Description::new("fixed-size")
            .with("block", Bytes(self.block_bytes))
            .with("at-once", self.blocks_at_once)
            .over(self.upstream.describe())
    }

    fn identity(&self) -> Identity {
        self.identity
    }

    fn device(&self) -> Option<&Device> {
        Some(&self.core.device)
    }

    fn held_bytes(&self) -> Option<u64> {
        Some(self.held(&self.core.state()))
    }
}

impl<R: MemoryResource> Drop for FixedSize<R> {
    fn drop(&mut self) {
        if self.core.device.driver().check_process().is_err() {
            return;
        }
        let mut state = self.core.state();
        // A driver that answers with an error has nothing left that could be waited for.
        let _ = state.lanes.wait_for_all();
        let chunks = std::mem::take(&mut state.chunks);
        state.lanes.end();
        drop(state);
        if chunks.is_empty() {
            return;
        }
        // All is complete, so any stream does; one of its own disturbs no capture.
        let own: Option<Stream> = self.core.device.stream().ok();
        let stream = own.as_ref().map_or(StreamHandle::LEGACY, Stream::handle);
        for (ptr, _) in chunks.into_values() {
            // There is nobody to tell, and nothing else to be done with it.
            let _ = self.give_chunk(ptr, stream);
        }
    }
}

impl<R: MemoryResource> fmt::Debug for FixedSize<R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let state = self.core.state();
        f.debug_struct("FixedSize")
            .field("block_bytes", &self.block_bytes)
            .field("blocks", &state.addresses.len())
            .field("live", &state.live)
            .field("streams", &state.lanes.len())
            .finish_non_exhaustive()
    }
}
