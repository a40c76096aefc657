//! Blocks of one size.
//!
//! ```text
//! request ──▶ the stream's front ──▶ its lane, nobody's ──▶ other lanes, when they have enough ──▶ upstream
//!                 ▲ │ older half        ▲
//! free ───────────┘ └───────────────────┘
//! ```
//!
//! | room | what it is |
//! |---|---|
//! | `chunks` | all blocks, found by address without a lock |
//! | `front` | the blocks that one stream freed last, under a lock of its own |
//! | `state` | what each stream has freed before, under one lock |

mod chunks;
mod front;
mod state;

use std::fmt;
use std::sync::{Arc, Weak};

use smallvec::SmallVec;

use chunks::{BlockId, Chunks};
use front::{Front, Put};
use state::State;

use super::blocks::NOBODY;
use super::by_stream::ByStream;
use super::give_all_back;
use super::lanes::{self, Lanes, Named};
use super::sizes::{MOST_BYTES, UNIT};
use crate::device::{Device, StreamHandle};
use crate::driver::{Awaited, StreamWatcher};
use crate::error::{Error, Result};
use crate::lock::{Alone, SpinGuard, SpinLock};
use crate::ordering::Mark;
use crate::resource::request::{MIN_ALIGN, check_align, check_device, is_of_nothing, rounded};
use crate::resource::{Checks, Description, Facts, Identity, MemoryResource, or_undo};
use crate::units::{Bytes, DevicePtr, round_up};

/// What a [`FixedSize`] is made with.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct FixedSizeConfig {
    /// The bytes of each block, rounded up to a multiple of 256: what a request may be at most. At first
    /// 1 MiB.
    pub block_bytes: usize,
    /// How many blocks are taken from upstream at a time; no more than have room in the longest piece that upstream
    /// ever gives ([`Facts::max_bytes`]). For each one 24 bytes of the host's memory are needed. At first 128.
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
/// at once, the latest first, without a driver call and without a lock that other streams use. What other
/// streams have freed is asked about when it is needed, and taken over with a wait on the GPU. Streams that
/// go on asking each other get some slack for it: up to 32 blocks, and 128 MiB, of others' may then
/// be left alone and as much be taken from upstream instead, so that one question serves for many blocks.
/// Every wrong free is found. Memory goes back to upstream at the drop, which waits as that of
/// a [`CoalescingPool`](super::CoalescingPool).
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
    /// Rounded.
    block_bytes: u64,
    blocks_at_once: u64,
    /// One request at a time makes room.
    growing: Alone,
    identity: Identity,
}

/// What there is, and whose it is. It sees streams end.
struct Core {
    device: Device,
    chunks: Chunks,
    /// Of streams whose end is told. Locked after `state`.
    fronts: ByStream<Front>,
    state: SpinLock<State>,
}

impl Core {
    fn state(&self) -> SpinGuard<'_, State> {
        self.state.lock()
    }

    /// The front of a stream that has one.
    #[inline]
    fn front(&self, named: Named) -> Option<&Front> {
        if named.is_told() { self.fronts.find(named.stream()) } else { None }
    }

    /// The latest block in a stream's front.
    #[inline]
    fn pop(&self, named: Named) -> Option<BlockId> {
        self.front(named)?.pop(named.stream())
    }
}

impl StreamWatcher for Core {
    fn stream_ends(&self, stream: StreamHandle) {
        let mut state = self.state();
        if let Some(number) = lanes::number_of(&self.device, stream) {
            if let Some(front) = self.fronts.find(number) {
                state.end(front);
            }
            self.fronts.give_up(number);
        }
        state.stream_ends(stream);
    }

    fn marks(&self, of: Awaited) -> SmallVec<[Mark; 2]> {
        let mut state = self.state();
        // What is in a front was freed before the wait, and gets its epoch now.
        match of {
            Awaited::Stream(stream, _) => {
                let number = lanes::number_of(&self.device, stream);
                if let Some(front) = number.and_then(|number| self.fronts.find(number)) {
                    state.settle(front);
                }
            }
            Awaited::Device(_) => state.settle_all(self),
        }
        state.lanes.marks(of)
    }

    fn passed(&self, mark: &Mark) {
        let mut state = self.state();
        if let Some((lane, epoch)) = state.lanes.see_mark(mark) {
            state.pass(lane, epoch);
            state.settle_uses();
        }
    }
}

impl<R: MemoryResource> FixedSize<R> {
    /// Blocks of memory from `upstream`, for streams of this device.
    ///
    /// # Errors
    /// [`Error::Config`] for blocks of no bytes, no blocks at once, or more of both than there can be;
    /// [`Error::WrongDevice`] where upstream is for streams of another device; [`Error::RequestTooLong`] where it never
    /// gives as much as one block; upstream's, for the first blocks.
    pub fn new(upstream: R, device: &Device, config: &FixedSizeConfig) -> Result<Self> {
        device.driver().check_process()?;
        let wrong = |name, value: usize| Error::Config {
            name,
            value: value.to_string(),
            reason: "blocks must have bytes, and all of them at once at most 256 TiB".to_owned(),
        };
        let bytes = round_up(config.block_bytes as u64, UNIT)
            .filter(|bytes| (1..=MOST_BYTES).contains(bytes));
        let block_bytes = bytes.ok_or_else(|| wrong("block_bytes", config.block_bytes))?;
        let blocks_at_once = config.blocks_at_once as u64;
        let at_once = block_bytes.checked_mul(blocks_at_once);
        let fits = at_once.is_some_and(|bytes| (1..=MOST_BYTES).contains(&bytes));
        if !fits || blocks_at_once > u64::from(u32::MAX) / 2 {
            return Err(wrong("blocks_at_once", config.blocks_at_once));
        }
        check_device(&upstream, device)?;
        let most_bytes = upstream.facts().max_bytes.map_or(u64::MAX, |most| most as u64);
        if block_bytes > most_bytes {
            return Err(Error::RequestTooLong { bytes: block_bytes, most_bytes });
        }
        let blocks_at_once = blocks_at_once.min(most_bytes / block_bytes);
        let core = Arc::new(Core {
            device: device.clone(),
            chunks: Chunks::new(block_bytes, blocks_at_once),
            fronts: ByStream::new(),
            state: SpinLock::new(State::new(Lanes::new(device), block_bytes)),
        });
        let watcher: Weak<dyn StreamWatcher> = Arc::downgrade(&core) as _;
        device.driver().watch_streams(watcher);
        let (growing, identity) = (Alone::among(device.driver().companion()), Identity::unique());
        let blocks = Self { upstream, core, block_bytes, blocks_at_once, growing, identity };
        if config.at_start {
            // On a stream of its own, so that no other is waited for; after the wait it is everybody's.
            let stream = device.stream()?;
            let named = lanes::name(device, stream.handle())?;
            let ptr = blocks.get_chunk(stream.handle())?;
            if blocks.upstream.facts().stream_ordered
                && let Err(error) = stream.synchronize()
            {
                // The error to report is the first one.
                let _ = blocks.give_back(ptr, named, stream.handle());
                return Err(error);
            }
            if !blocks.add_chunk(&mut blocks.core.state(), ptr, NOBODY, 0) {
                blocks.give_chunk(ptr, stream.handle())?;
            }
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

    /// A chunk that is not in the books goes upstream, or comes there: also where upstream panics.
    fn give_back(&self, ptr: DevicePtr, named: Named, stream: StreamHandle) -> Result<()> {
        or_undo(
            || self.give_chunk(ptr, stream),
            || {
                let mut state = self.core.state();
                let (lane, epoch) = match state.lane(named) {
                    Ok(lane) => (lane, state.lanes.put(lane, named)),
                    Err(_) => state.put_lost(),
                };
                self.add_chunk(&mut state, ptr, lane, epoch);
            },
        )
    }

    /// Enters a chunk, free; `false` where no more can be counted.
    fn add_chunk(&self, state: &mut State, ptr: DevicePtr, lane: u32, epoch: u64) -> bool {
        let Some(chunk) = self.core.chunks.add(ptr, self.blocks_at_once) else { return false };
        // From the last to the first, so that the lowest is handed out first.
        state.add_at(lane, epoch, self.core.chunks.blocks_of(chunk).rev());
        true
    }

    /// A request that the stream's front does not serve.
    #[cold]
    fn search(&self, named: Named, stream: StreamHandle) -> Result<BlockId> {
        let hit = {
            let mut state = self.core.state();
            let lane = state.lane(named)?;
            state.hit(lane, self.core.front(named))
        };
        hit.map_or_else(|| self.miss(named, stream), Ok)
    }

    #[cold]
    fn miss(&self, named: Named, stream: StreamHandle) -> Result<BlockId> {
        let Some(_growing) = self.growing.enter() else { return Err(self.exhausted()) };
        {
            let mut state = self.core.state();
            let lane = state.lane(named)?;
            // Whoever was here before may have made room.
            if let Some(block) = self.look_again(&mut state, lane, named) {
                return Ok(block);
            }
            if let Some(block) = state.take_waited_for(lane, named) {
                return Ok(block);
            }
            if let Some(block) = state.ask_uses(lane)? {
                return Ok(block);
            }
            let others = state.others(&self.core, lane);
            if state.is_worth_asking(&others)
                && let Some(block) = state.ask(&others, lane, named)?
            {
                state.note_ask();
                return Ok(block);
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
                        let _ = self.give_back(ptr, named, stream);
                        return Err(error);
                    }
                };
                let ordered = self.upstream.facts().stream_ordered;
                let (lane, epoch) =
                    if ordered { (lane, state.lanes.put(lane, named)) } else { (NOBODY, 0) };
                if self.add_chunk(&mut state, ptr, lane, epoch) {
                    state.note_growth();
                } else {
                    drop(state);
                    self.give_chunk(ptr, stream)?;
                    state = self.core.state();
                }
                None
            }
            Err(error) => {
                let lane = state.lane(named)?;
                if let Some(block) = self.look_again(&mut state, lane, named) {
                    return Ok(block);
                }
                let others = state.others(&self.core, lane);
                if let Some(block) = state.ask(&others, lane, named)? {
                    return Ok(block);
                }
                if let Some(pending) = state.lost() {
                    drop(state);
                    let waited = lanes::wait_for_device_beside(&self.core.device, stream)?;
                    state = self.core.state();
                    if waited {
                        state.device_passed(&pending);
                    }
                }
                Some(error)
            }
        };
        let lane = state.lane(named)?;
        self.look_again(&mut state, lane, named).ok_or_else(|| {
            let refusal = refusal.filter(|error| !error.is_out_of_memory());
            refusal.unwrap_or_else(|| self.exhausted())
        })
    }

    /// What a stream may have at once: other threads of it may have freed meanwhile, into its front. That is its own
    /// whatever handle it comes by now.
    fn look_again(&self, state: &mut State, lane: u32, named: Named) -> Option<BlockId> {
        let number = named.stream();
        state.hit(lane, None).or_else(|| self.core.fronts.find(number)?.pop(number))
    }

    fn exhausted(&self) -> Error {
        // In this order: another thread may add blocks meanwhile, and hand them out.
        let live = self.core.chunks.live() * self.block_bytes;
        let held = self.held();
        Error::OutOfMemory {
            requested_bytes: self.block_bytes,
            free_bytes: held - live,
            largest_free_bytes: if held > live { self.block_bytes } else { 0 },
            mapped_bytes: held,
            live_bytes: live,
            limit_bytes: None,
            map: None,
        }
    }

    /// A free of what further streams use; or a wrong one.
    #[cold]
    fn free_noted(&self, named: Named, address: u64, asked: u64, error: Error) -> Result<()> {
        let mut state = self.core.state();
        let Some(block) = self.core.chunks.free_noted(address, asked) else { return Err(error) };
        state.keep(named, address, block).inspect_err(|_| {
            self.core.chunks.take_back_noted(block, asked);
        })
    }

    /// A free on a stream without a front: its first, or one of a stream whose end nobody tells. Those have
    /// none, since their events must cover each free.
    #[cold]
    fn free_slowly(&self, named: Named, block: BlockId) -> Result<()> {
        let mut state = self.core.state();
        let lane = state.lane(named)?;
        if named.is_told() {
            let stream = named.stream();
            let begin = |front: &Front| front.begin(stream, lane);
            let front = self.core.fronts.open(stream, begin, |_| Ok(Front::new(stream, lane)))?;
            // Another thread of the stream may have opened and filled it.
            let rest = front.fill([block].into_iter());
            if !rest.is_empty() {
                state.add(lane, rest);
            }
            return Ok(());
        }
        let epoch = state.lanes.freed(lane, named)?;
        state.add_at(lane, epoch, [block]);
        Ok(())
    }

    fn held(&self) -> u64 {
        u64::from(self.core.chunks.count()) * self.blocks_at_once * self.block_bytes
    }
}

/// What blocks of a size are able to do over an upstream like this.
pub(super) fn facts_over(upstream: &Facts, block_bytes: usize) -> Facts {
    Facts::of_device_memory()
        .accessible(upstream.device_accessible, upstream.host_accessible)
        .with_managed(upstream.managed)
        .with_stream_order(true)
        .with_recorded_streams(true)
        .with_max_bytes(Some(block_bytes))
        .with_checks(Checks::PointersAndSizes)
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
        let block = match self.core.pop(named) {
            Some(block) => block,
            None => self.search(named, stream)?,
        };
        let address = self.core.chunks.take(block, asked);
        Ok(address.map_or(DevicePtr::NULL, DevicePtr::from_address))
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
        let (address, asked) = (ptr.address(), bytes as u64);
        let block = match self.core.chunks.free(address, asked) {
            Ok(block) => block,
            Err(error) => return self.free_noted(named, address, asked, error),
        };
        let put = self.core.front(named).map(|front| front.push(named.stream(), block));
        match put {
            Some(Put::In) => Ok(()),
            Some(Put::Over(lane, older)) => {
                self.core.state().add(lane, older);
                Ok(())
            }
            Some(Put::NotIts) | None => self.free_slowly(named, block).inspect_err(|_| {
                self.core.chunks.take_back(block, asked);
            }),
        }
    }

    fn facts(&self) -> Facts {
        facts_over(&self.upstream.facts(), self.block_bytes())
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
        Some(if self.core.device.driver().is_forked() { 0 } else { self.held() })
    }

    /// Whoever lacks memory asks about these uses; no stream waits for them. A stream that was made
    /// elsewhere must be alive until the free.
    ///
    /// # Errors
    /// Those of [`deallocate`](Self::deallocate), but for the size.
    fn record_stream(&self, ptr: DevicePtr, stream: StreamHandle) -> Result<()> {
        let named = lanes::name(&self.core.device, stream)?;
        let mut state = self.core.state();
        let lane = state.lane(named)?;
        self.core.chunks.note(ptr.address())?;
        state.note(ptr.address(), lane, named);
        Ok(())
    }
}

impl<R: MemoryResource> Drop for FixedSize<R> {
    /// Where nobody can tell whether work has finished (a context that went first, a wait for the device beside
    /// a capture) upstream gets nothing back.
    fn drop(&mut self) {
        if self.core.device.driver().check_process().is_err() {
            return;
        }
        self.core.state().settle_all(&self.core);
        let of_callers = self.core.chunks.live() > 0 && self.upstream.facts().stream_ordered;
        if !lanes::retire(&*self.core, &self.core.state, |state| &mut state.lanes, of_callers) {
            return;
        }
        let chunks = self.core.chunks.pointers().map(|ptr| (ptr, self.chunk_bytes()));
        give_all_back(&self.upstream, &self.core.device, chunks);
    }
}

impl<R: MemoryResource> fmt::Debug for FixedSize<R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut shown = f.debug_struct("FixedSize");
        shown.field("block_bytes", &self.block_bytes);
        // In a child of the process no lock is taken that a thread of the parent may hold.
        if !self.core.device.driver().is_forked() {
            shown
                .field("held_bytes", &self.held())
                .field("live", &self.core.chunks.live())
                .field("streams", &self.core.state().lanes.len());
        }
        shown.finish_non_exhaustive()
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::resource::{DeviceMalloc, Limiting};
    use crate::stream::Stream;

    #[test]
    #[cfg_attr(miri, ignore = "the simulator calls the system")]
    fn streams_that_end_leave_no_fronts() {
        let sim = cuda_sim::Simulator::builder().build().expect("a simulator");
        let driver = crate::Driver::new(sim.driver()).expect("a driver");
        let device = driver.device(0).expect("a device");
        let mut config = FixedSizeConfig::default();
        (config.block_bytes, config.blocks_at_once) = (4096, 4);
        let blocks =
            FixedSize::new(DeviceMalloc::new(&device), &device, &config).expect("a resource");
        for _ in 0..64 {
            let stream = device.stream().expect("a stream");
            let ptr = blocks.allocate(4096, 256, stream.handle()).expect("a block");
            blocks.deallocate(ptr, 4096, 256, stream.handle()).expect("freed");
        }
        assert_eq!(blocks.core.fronts.all().len(), 1);
    }

    /// A front that was given up lies behind one whose stream has the lane that it was of.
    #[test]
    #[cfg_attr(miri, ignore = "the simulator calls the system")]
    fn a_front_that_was_given_up_hides_no_other() {
        let sim = cuda_sim::Simulator::builder().build().expect("a simulator");
        let driver = crate::Driver::new(sim.driver()).expect("a driver");
        let device = driver.device(0).expect("a device");
        let mut config = FixedSizeConfig::default();
        (config.block_bytes, config.blocks_at_once) = (4096, 2);
        let upstream = Limiting::new(DeviceMalloc::new(&device), 2 * 4096);
        let blocks = FixedSize::new(upstream, &device, &config).expect("a resource");
        let stream = || device.stream().expect("a stream");
        let allocate = |on: &Stream| blocks.allocate(4096, 256, on.handle()).expect("a block");
        let free =
            |ptr, on: &Stream| blocks.deallocate(ptr, 4096, 256, on.handle()).expect("freed");
        let (first, second) = (stream(), stream());
        let [of_first, of_second] = [&first, &second].map(allocate);
        free(of_first, &first);
        free(of_second, &second);
        // The second one's lane is empty when it ends, and the first one's is not.
        let kept = allocate(&second);
        drop(second);
        drop(first);
        let third = stream();
        free(kept, &third);
        let last = stream();
        // The first one's block, and that in the third one's front: upstream has no more.
        let held = [(); 2].map(|()| allocate(&last));
        assert_ne!(held[0], held[1]);
        held.into_iter().for_each(|ptr| free(ptr, &last));
    }
}
