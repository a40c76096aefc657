//! A pool that coalesces, over any other resource.

use std::fmt;
use std::sync::{Arc, Weak};

use smallvec::SmallVec;

use super::blocks::{Blocks, Chunk, NOBODY, Run};
use super::give_all_back;
use super::lanes::{self, Lanes, Named};
use super::sizes::{MOST_BYTES, Sized, UNIT};
use super::uses::Uses;
use crate::device::{Device, StreamHandle};
use crate::driver::{Awaited, StreamWatcher};
use crate::error::{Error, Result};
use crate::lock::{Alone, SpinGuard, SpinLock};
use crate::ordering::{Mark, PendingPolicy};
use crate::resource::request::{MIN_ALIGN, check_align, check_device, is_of_nothing, rounded};
use crate::resource::{Checks, Description, Facts, Identity, MemoryResource, or_undo};
use crate::units::{Bytes, DevicePtr, round_up};

/// What a [`CoalescingPool`] is made with.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct CoalescingConfig {
    /// What the pool takes from upstream when it is made, in bytes: a multiple of 256. At first 0.
    pub initial_bytes: u64,
    /// The most that the pool may hold, in bytes: a multiple of 256, and at least the initial size. At
    /// first there is none.
    pub max_bytes: Option<u64>,
    /// Whether to take what other streams have freed, with a wait on the GPU, before the pool grows, as
    /// RMM's does, or after. At first before: a growth as a rule doubles the pool.
    pub pending_policy: PendingPolicy,
}

impl Default for CoalescingConfig {
    fn default() -> Self {
        Self { initial_bytes: 0, max_bytes: None, pending_policy: PendingPolicy::WaitFirst }
    }
}

impl CoalescingConfig {
    fn check(&self) -> Result<()> {
        let wrong = |name, value: u64, reason: &str| {
            Err(Error::Config { name, value: value.to_string(), reason: reason.to_owned() })
        };
        if !self.initial_bytes.is_multiple_of(UNIT) {
            return wrong("initial_bytes", self.initial_bytes, "it must be a multiple of 256");
        }
        let Some(most) = self.max_bytes else { return Ok(()) };
        if !most.is_multiple_of(UNIT) {
            return wrong("max_bytes", most, "it must be a multiple of 256");
        }
        if most < self.initial_bytes {
            return wrong("max_bytes", most, "it must be at least initial_bytes");
        }
        Ok(())
    }
}

/// How much is asked for at a growth.
#[derive(Clone, Copy, Debug)]
pub(super) enum Growth {
    /// As much as the pool has, or half of what its maximum leaves.
    Double,
    /// This many bytes.
    By(u64),
}

/// A pool that takes large pieces from another resource and hands out parts, in the order of streams:
/// best fit, neighbours that are free become one. RMM: `pool_memory_resource`.
///
/// # Streams
/// What a stream has freed it may have again at once, without an event. What other streams have freed is
/// asked about when it is needed; what is complete is every stream's from then on. What is not may be
/// taken over by a wait on the GPU ([`CoalescingConfig::pending_policy`]), of which there is one for all
/// that the other stream has freed until then. On streams that are not made by this library an event
/// is recorded at each free, and they can neither allocate nor free while they capture a graph.
///
/// # Growth
/// By what the pool has already (with a maximum, by half of what is left of it), or the size of the request
/// if that is more; if upstream has not so much, by half of that, and so on. At the maximum, and when
/// upstream has no more, pieces that are wholly free go back first. A request above the maximum, or longer than what
/// upstream gives in one piece, is refused as too long. What a stream-ordered upstream gives is
/// the requesting stream's until it has been ordered for others.
///
/// # Cost
/// A hit makes no driver call for streams of this library and takes one lock; a search takes logarithmic time.
/// Up to eight blocks of a size that a stream freed last, 8 MiB of each stream or a 64th of the pool together,
/// stand aside for its next requests of just that size, and coalesce when a request finds nothing else.
/// Requests that find nothing go one at a time, ask an event for each stream that has freed something,
/// and look through all blocks before the pool grows.
///
/// Every wrong free is found. At the drop the pool waits on the host for what was freed, and gives
/// everything back, also what is still allocated: for that it waits for the whole device where upstream is in
/// the order of streams and might hand it out again at once. (RMM's does not wait.) Such a wait ends the
/// captures of others, and fails beside them: upstream gets nothing back then.
///
/// ```
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let sim = cuda_sim::Simulator::builder().build()?;
/// # let driver = vpmm::Driver::new(sim.driver())?;
/// # let device = driver.device(0)?;
/// # let stream = device.stream()?;
/// use vpmm::resource::{CoalescingConfig, CoalescingPool, DeviceMalloc, MemoryResource};
///
/// let mut config = CoalescingConfig::default();
/// config.initial_bytes = 64 << 20;
/// config.max_bytes = Some(1 << 30);
/// let pool = CoalescingPool::new(DeviceMalloc::new(&device), &device, &config)?;
/// let ptr = pool.allocate(10 << 20, 256, stream.handle())?;
/// pool.deallocate(ptr, 10 << 20, 256, stream.handle())?;
/// assert_eq!(pool.held_bytes(), Some(64 << 20));
/// # Ok(())
/// # }
/// ```
pub struct CoalescingPool<R: MemoryResource> {
    upstream: R,
    core: Arc<Core>,
    config: CoalescingConfig,
    growth: Growth,
    /// One request at a time makes room.
    growing: Alone,
    identity: Identity,
}

/// What the pool has, and whose it is. It sees streams end.
#[derive(Debug)]
struct Core {
    device: Device,
    state: SpinLock<State>,
}

#[derive(Debug)]
struct State {
    blocks: Blocks,
    lanes: Lanes,
    uses: Uses<u32>,
}

impl State {
    /// The lane of a stream.
    #[inline]
    fn lane(&mut self, named: Named) -> Result<u32> {
        let (blocks, uses) = (&self.blocks, &self.uses);
        self.lanes.lane(named, |lane| !blocks.has_free(lane) && !uses.names(lane))
    }

    /// The best fit of the stream's own memory and nobody's.
    #[inline]
    fn hit(&mut self, lane: u32, bytes: u64, asked: u64) -> Option<u64> {
        if let Some(address) = self.blocks.take_aside(lane, bytes, asked) {
            return Some(address);
        }
        let own = self.blocks.best_fit(lane, bytes);
        let best = match (own, self.blocks.best_fit(NOBODY, bytes)) {
            (Some(own), Some(nobodys)) => Some(own.min(nobodys)),
            (own, nobodys) => own.or(nobodys),
        };
        best.map(|block| self.blocks.take(block, bytes, asked))
    }

    /// Asks every stream that has freed something how far it has come.
    fn poll(&mut self) -> Result<()> {
        self.blocks.settle_all();
        for lane in self.lanes.all() {
            if (self.blocks.has_free(lane) || self.uses.names(lane))
                && let Some(epoch) = self.lanes.poll(lane)?
            {
                self.blocks.pass(lane, epoch);
            }
        }
        self.settle_uses();
        Ok(())
    }

    /// What nobody can be using any more is nobody's.
    fn settle_uses(&mut self) {
        let blocks = &mut self.blocks;
        self.uses.settle(&self.lanes, |id| blocks.let_go(id));
    }

    /// A block of another stream, which this one is made to wait for: best fit, but one that needs no
    /// further wait is preferred.
    fn take_over(
        &mut self,
        lane: u32,
        named: Named,
        bytes: u64,
        asked: u64,
    ) -> Result<Option<u64>> {
        let mut offers: Vec<(u32, Sized)> = self
            .lanes
            .all()
            .filter(|other| *other != lane)
            .filter_map(|other| Some((other, self.blocks.best_fit(other, bytes)?)))
            .collect();
        offers.sort_unstable_by_key(|(other, block)| {
            let is_after = self.lanes.is_after(lane, *other, self.blocks.epoch(*block));
            (!is_after, *block)
        });
        for (other, block) in offers {
            let epoch = self.blocks.epoch(block);
            if self.lanes.come_after(lane, named, other, epoch)? {
                // The rest stays the other stream's, as it was.
                return Ok(Some(self.blocks.take(block, bytes, asked)));
            }
        }
        Ok(None)
    }

    /// Joins free neighbours of several owners, if that makes a block that is long enough. With `wait`, also
    /// those that other streams may still be using.
    fn join(
        &mut self,
        lane: u32,
        named: Named,
        bytes: u64,
        asked: u64,
        wait: bool,
    ) -> Result<Option<u64>> {
        if self.blocks.free_bytes() < bytes {
            return Ok(None);
        }
        let mut refused: SmallVec<[u32; 4]> = SmallVec::new();
        loop {
            let usable = |of: u32| of == lane || of == NOBODY || wait && !refused.contains(&of);
            let Some(run) = self.blocks.run(bytes, usable) else { return Ok(None) };
            if let Some(other) = self.wait_for_run(lane, named, &run)? {
                refused.push(other);
                continue;
            }
            let epoch = self.lanes.put(lane, named);
            self.blocks.join(&run, lane, epoch);
            return Ok(self.hit(lane, bytes, asked));
        }
    }

    /// Makes a stream wait for all that have a part in a run; names one that cannot be waited for.
    fn wait_for_run(&mut self, lane: u32, named: Named, run: &Run) -> Result<Option<u32>> {
        for (other, epoch) in run.lanes() {
            if other != NOBODY && !self.lanes.come_after(lane, named, other, epoch)? {
                return Ok(Some(other));
            }
        }
        Ok(None)
    }

    /// Takes out a chunk that is wholly free, for a stream to give back: with `wait`, also one that other
    /// streams may still be using.
    fn take_chunk(&mut self, named: Named, wait: bool) -> Result<Option<Chunk>> {
        let lane = self.lane(named)?;
        self.blocks.settle_all();
        let mut refused: SmallVec<[u32; 4]> = SmallVec::new();
        loop {
            let usable = |of: u32| of == lane || of == NOBODY || wait && !refused.contains(&of);
            let Some(whole) = self.blocks.whole_chunk(usable) else { return Ok(None) };
            match self.wait_for_run(lane, named, &whole)? {
                Some(other) => refused.push(other),
                None => return Ok(self.blocks.remove_chunk(&whole)),
            }
        }
    }

    /// What a wait for the device would prove free, if there is memory that nothing else does.
    fn lost(&mut self) -> Option<Vec<(u32, u64)>> {
        let lost = |lane: u32| {
            self.lanes.is_lost(lane) && (self.blocks.has_free(lane) || self.uses.names(lane))
        };
        self.lanes.all().any(lost).then(|| self.lanes.pending())
    }

    fn pass_all(&mut self) {
        for lane in self.lanes.all() {
            self.blocks.pass(lane, self.lanes.passed(lane));
        }
        self.settle_uses();
    }

    fn exhausted(&self, bytes: u64, limit_bytes: Option<u64>) -> Error {
        Error::OutOfMemory {
            requested_bytes: bytes,
            free_bytes: self.blocks.free_bytes(),
            largest_free_bytes: self.blocks.longest_free(),
            mapped_bytes: self.blocks.held(),
            live_bytes: self.blocks.live_bytes(),
            limit_bytes,
            map: None,
        }
    }
}

impl Core {
    fn new(device: &Device) -> Arc<Self> {
        let (blocks, lanes) = (Blocks::default(), Lanes::new(device));
        let state = State { blocks, lanes, uses: Uses::new() };
        let core = Arc::new(Self { device: device.clone(), state: SpinLock::new(state) });
        let watcher: Weak<dyn StreamWatcher> = Arc::downgrade(&core) as _;
        device.driver().watch_streams(watcher);
        core
    }

    fn state(&self) -> SpinGuard<'_, State> {
        self.state.lock()
    }

    /// For who only asks. In a child of the process nothing is known, and no lock is taken that a thread of the parent
    /// may hold.
    fn read(&self) -> Option<SpinGuard<'_, State>> {
        (!self.device.driver().is_forked()).then(|| self.state())
    }
}

impl StreamWatcher for Core {
    fn stream_ends(&self, stream: StreamHandle) {
        let State { lanes, uses, .. } = &mut *self.state();
        lanes.stream_ends(stream, |lane| uses.names(lane));
    }

    fn marks(&self, of: Awaited) -> SmallVec<[Mark; 2]> {
        self.state().lanes.marks(of)
    }

    fn passed(&self, mark: &Mark) {
        let mut state = self.state();
        if let Some((lane, epoch)) = state.lanes.see_mark(mark) {
            state.blocks.pass(lane, epoch);
            state.settle_uses();
        }
    }
}

impl<R: MemoryResource> CoalescingPool<R> {
    /// A pool over `upstream`, for streams of this device.
    ///
    /// # Errors
    /// [`Error::Config`]; [`Error::WrongDevice`] where upstream is for streams of another one; those of upstream,
    /// for the initial size.
    pub fn new(upstream: R, device: &Device, config: &CoalescingConfig) -> Result<Self> {
        Self::growing_by(upstream, device, config, Growth::Double)
    }

    pub(super) fn growing_by(
        upstream: R,
        device: &Device,
        config: &CoalescingConfig,
        growth: Growth,
    ) -> Result<Self> {
        device.driver().check_process()?;
        config.check()?;
        check_device(&upstream, device)?;
        let pool = Self {
            upstream,
            core: Core::new(device),
            config: *config,
            growth,
            growing: Alone::among(device.driver().companion()),
            identity: Identity::unique(),
        };
        if config.initial_bytes > 0 {
            pool.take_initial(config.initial_bytes)?;
        }
        Ok(pool)
    }

    fn take_initial(&self, bytes: u64) -> Result<()> {
        // On a stream of its own, so that no other is waited for; after the wait it is everybody's.
        let stream = self.core.device.stream()?;
        let named = lanes::name(&self.core.device, stream.handle())?;
        let ptr = self.upstream.allocate(bytes as usize, MIN_ALIGN, stream.handle())?;
        if self.upstream.facts().stream_ordered
            && let Err(error) = stream.synchronize()
        {
            // The error to report is the first one.
            let _ = self.give_back(ptr, bytes, named, stream.handle());
            return Err(error);
        }
        self.core.state().blocks.add_chunk(ptr, bytes, NOBODY, 0);
        Ok(())
    }

    /// What is below.
    pub fn upstream(&self) -> &R {
        &self.upstream
    }

    /// What the pool holds, in bytes: all that it has from upstream. 0 in a child of the process.
    pub fn pool_bytes(&self) -> u64 {
        self.core.read().map_or(0, |state| state.blocks.held())
    }

    /// What of it is allocated, in bytes, each request rounded up to 256. 0 in a child of the process.
    pub fn live_bytes(&self) -> u64 {
        self.core.read().map_or(0, |state| state.blocks.live_bytes())
    }

    /// Gives pieces that are wholly free back to upstream, those that `stream` may use: its own and those
    /// that no stream can still be using. Returns their bytes. With `wait` the stream is made to wait on the
    /// GPU for those of other streams, too.
    ///
    /// One event asked about for each stream that has freed something; upstream's cost for each piece. A call
    /// from below, while this pool grows or gives back in the same thread, or in one that waits for this one, gives
    /// nothing back.
    ///
    /// # Errors
    /// Those of [`allocate`](MemoryResource::allocate) for the stream, and upstream's. What was given back
    /// until then is given back.
    pub fn trim(&self, stream: StreamHandle, wait: bool) -> Result<u64> {
        let named = lanes::name(&self.core.device, stream)?;
        let Some(_growing) = self.growing.enter() else { return Ok(0) };
        self.trim_as(named, stream, wait, u64::MAX)
    }

    /// Gives back at least so many bytes, if there are; `growing` is held.
    fn trim_as(&self, named: Named, stream: StreamHandle, wait: bool, least: u64) -> Result<u64> {
        let mut given_back = 0;
        self.core.state().poll()?;
        while given_back < least {
            let Some(chunk) = self.core.state().take_chunk(named, wait)? else { break };
            self.give_back(chunk.ptr, chunk.bytes, named, stream)?;
            given_back += chunk.bytes;
        }
        Ok(given_back)
    }

    /// A chunk that is not in the books goes upstream, or comes there: also where upstream panics.
    fn give_back(
        &self,
        ptr: DevicePtr,
        bytes: u64,
        named: Named,
        stream: StreamHandle,
    ) -> Result<()> {
        let free = || self.upstream.deallocate(ptr, bytes as usize, MIN_ALIGN, stream);
        or_undo(free, || {
            let mut state = self.core.state();
            // It had a lane just now, which another stream may have by this time.
            let (lane, epoch) = match state.lane(named) {
                Ok(lane) => (lane, state.lanes.put(lane, named)),
                Err(_) => state.lanes.put_lost(),
            };
            state.blocks.add_chunk(ptr, bytes, lane, epoch);
        })
    }

    #[cold]
    fn miss(&self, named: Named, stream: StreamHandle, bytes: u64, asked: u64) -> Result<u64> {
        let Some(_growing) = self.growing.enter() else {
            return Err(self.core.state().exhausted(bytes, self.config.max_bytes));
        };
        {
            let mut state = self.core.state();
            let lane = state.lane(named)?;
            // Whoever was here before may have made room; and what stood aside may be long enough as one.
            state.blocks.settle(lane);
            if let Some(address) = state.hit(lane, bytes, asked) {
                return Ok(address);
            }
            state.poll()?;
            if let Some(address) = state.hit(lane, bytes, asked) {
                return Ok(address);
            }
            if let Some(address) = state.join(lane, named, bytes, asked, false)? {
                return Ok(address);
            }
            if self.config.pending_policy == PendingPolicy::WaitFirst
                && let Some(address) = self.wait(&mut state, lane, named, bytes, asked)?
            {
                return Ok(address);
            }
        }
        let refusal = match self.grow(named, stream, bytes, asked)? {
            Ok(address) => return Ok(address),
            Err(refusal) => refusal,
        };
        {
            let mut state = self.core.state();
            let lane = state.lane(named)?;
            state.blocks.settle_all();
            if let Some(address) = self.wait(&mut state, lane, named, bytes, asked)? {
                return Ok(address);
            }
        }
        let lost = self.core.state().lost();
        if let Some(pending) = lost
            && lanes::wait_for_device_beside(&self.core.device, stream)?
        {
            let mut state = self.core.state();
            state.lanes.device_passed(&pending);
            state.pass_all();
            let lane = state.lane(named)?;
            if let Some(address) = state.hit(lane, bytes, asked) {
                return Ok(address);
            }
        }
        // What is wholly free but too short makes room for what is long enough.
        if self.trim_as(named, stream, true, bytes)? > 0
            && let Ok(address) = self.grow(named, stream, bytes, asked)?
        {
            return Ok(address);
        }
        let state = self.core.state();
        let known = state.exhausted(bytes, self.config.max_bytes);
        Err(refusal.filter(|error| !error.is_out_of_memory()).unwrap_or(known))
    }

    fn wait(
        &self,
        state: &mut State,
        lane: u32,
        named: Named,
        bytes: u64,
        asked: u64,
    ) -> Result<Option<u64>> {
        match state.take_over(lane, named, bytes, asked)? {
            Some(address) => Ok(Some(address)),
            None => state.join(lane, named, bytes, asked, true),
        }
    }

    /// Takes more from upstream: the address, or why there is no more (nothing, where it is the maximum).
    fn grow(
        &self,
        named: Named,
        stream: StreamHandle,
        bytes: u64,
        asked: u64,
    ) -> Result<Result<u64, Option<Error>>> {
        let Some(mut ask) = self.growth_for(bytes) else { return Ok(Err(None)) };
        let ptr = loop {
            match self.upstream.allocate(ask as usize, MIN_ALIGN, stream) {
                Ok(ptr) => break ptr,
                // Too long for what is below as well: its maximum may have changed.
                Err(error)
                    if ask > bytes
                        && (error.is_out_of_memory()
                            || matches!(error, Error::RequestTooLong { .. })) =>
                {
                    ask = round_up(ask / 2, UNIT).unwrap_or(bytes).max(bytes);
                }
                Err(error) => return Ok(Err(Some(error))),
            }
        };
        let mut state = self.core.state();
        let lane = match state.lane(named) {
            Ok(lane) => lane,
            Err(error) => {
                drop(state);
                let _ = self.give_back(ptr, ask, named, stream);
                return Err(error);
            }
        };
        if self.upstream.facts().stream_ordered {
            // Ordered for this stream only, all of it.
            let epoch = state.lanes.put(lane, named);
            state.blocks.add_chunk(ptr, ask, lane, epoch);
        } else {
            state.blocks.add_chunk(ptr, ask, NOBODY, 0);
        }
        // Another thread of this stream may have been quicker: then there is another block, or none.
        match state.hit(lane, bytes, asked) {
            Some(address) => Ok(Ok(address)),
            None => Ok(Err(None)),
        }
    }

    /// The longest request that can ever be served, rounded as requests are, where that is known: no more than the
    /// pool may hold, and in one piece.
    fn most_bytes(&self) -> Option<u64> {
        self.most_bytes_over(&self.upstream.facts())
    }

    /// The same over an upstream like this. Who knows it does not ask once more: where pools stand on each other each
    /// would ask twice as often as the one above.
    fn most_bytes_over(&self, upstream: &Facts) -> Option<u64> {
        let of_upstream = upstream.max_bytes.map(|most| most as u64 / UNIT * UNIT);
        match (self.config.max_bytes, of_upstream) {
            (Some(own), Some(of_upstream)) => Some(own.min(of_upstream)),
            (own, of_upstream) => own.or(of_upstream),
        }
    }

    /// How much to ask for; `None` where the maximum does not allow what is needed.
    fn growth_for(&self, bytes: u64) -> Option<u64> {
        let held = self.core.state().blocks.held();
        let more = match (self.growth, self.config.max_bytes) {
            (Growth::By(step), _) => step,
            (Growth::Double, None) => held,
            (Growth::Double, Some(most)) => most.saturating_sub(held) / 2,
        };
        let more = round_up(more, UNIT)?.max(bytes).min(MOST_BYTES);
        let room = self.config.max_bytes.map_or(u64::MAX, |most| most.saturating_sub(held));
        let in_one = self.most_bytes().unwrap_or(u64::MAX).max(bytes);
        (bytes <= room).then_some(more.min(room).min(in_one))
    }

    /// Shows every piece: its bytes, and the bytes of its blocks in order, each with whether it is live.
    pub(super) fn visit(&self, mut piece: impl FnMut(u64, &[(u64, bool)])) {
        let Some(state) = self.core.read() else { return };
        for chunk in state.blocks.chunks() {
            let blocks: Vec<_> = state.blocks.pieces(chunk).collect();
            piece(chunk.bytes, &blocks);
        }
    }

    /// Serves a request of `asked` bytes that was rounded to `bytes` from what a stream that is known by its
    /// handle has, or nobody.
    #[inline]
    pub(super) fn hit_named(&self, named: Named, bytes: u64, asked: u64) -> Option<DevicePtr> {
        let mut state = self.core.state();
        let lane = state.lanes.known(named)?;
        state.hit(lane, bytes, asked).map(DevicePtr::from_address)
    }

    /// Serves a request of `asked` bytes that was rounded to `bytes`.
    #[inline]
    pub(super) fn allocate_named(
        &self,
        named: Named,
        stream: StreamHandle,
        bytes: u64,
        asked: u64,
    ) -> Result<DevicePtr> {
        match self.hit_named(named, bytes, asked) {
            Some(ptr) => Ok(ptr),
            None => self.search_named(named, stream, bytes, asked).map(DevicePtr::from_address),
        }
    }

    #[cold]
    fn search_named(
        &self,
        named: Named,
        stream: StreamHandle,
        bytes: u64,
        asked: u64,
    ) -> Result<u64> {
        if let Some(most_bytes) = self.most_bytes().filter(|most| bytes > *most) {
            return Err(Error::RequestTooLong { bytes: asked, most_bytes });
        }
        let hit = {
            let mut state = self.core.state();
            if bytes > MOST_BYTES {
                return Err(state.exhausted(bytes, self.config.max_bytes));
            }
            let lane = state.lane(named)?;
            state.hit(lane, bytes, asked)
        };
        hit.map_or_else(|| self.miss(named, stream, bytes, asked), Ok)
    }

    /// Frees what was asked for with `asked` bytes, on a stream that is known by its handle. `false`, and
    /// nothing done, where there is anything to say to it.
    #[inline]
    pub(super) fn free_known(&self, named: Named, address: u64, asked: u64) -> bool {
        let mut state = self.core.state();
        let Some(lane) = state.lanes.known(named) else { return false };
        let Some(node) = state.blocks.find_live(address, asked) else { return false };
        if state.uses.is_noted(address) {
            return false;
        }
        let epoch = state.lanes.freed_on_known(lane);
        state.blocks.free(node, lane, epoch);
        true
    }

    /// Frees what was asked for with `asked` bytes.
    pub(super) fn free_named(&self, named: Named, address: u64, asked: u64) -> Result<()> {
        let mut state = self.core.state();
        let node = state.blocks.find(address, asked)?;
        let lane = state.lane(named)?;
        if state.uses.is_noted(address) {
            let State { blocks, lanes, uses } = &mut *state;
            uses.keep(address, node, lanes, (lane, named))?;
            blocks.keep(node);
            return Ok(());
        }
        let epoch = state.lanes.freed(lane, named)?;
        state.blocks.free(node, lane, epoch);
        Ok(())
    }
}

impl<R: MemoryResource> CoalescingPool<R> {
    /// Notes that a stream uses the allocation that begins at an address.
    pub(super) fn note_use(&self, named: Named, address: u64) -> Result<()> {
        let mut state = self.core.state();
        state.blocks.find_any(address)?;
        let lane = state.lane(named)?;
        let State { lanes, uses, blocks, .. } = &mut *state;
        for gone in uses.gone(address, lanes, lane) {
            // What fails is as it was, and met by whoever asks next.
            if let Ok(Some(epoch)) = lanes.poll(gone) {
                blocks.pass(gone, epoch);
            }
        }
        uses.note(address, lanes, lane, named);
        Ok(())
    }
}

impl<R: MemoryResource> MemoryResource for CoalescingPool<R> {
    /// # Errors
    /// [`Error::BadAlignment`], [`Error::AlignmentUnsupported`] above 256 bytes,
    /// [`Error::SizeOverflow`], [`Error::RequestTooLong`] above [`Facts::max_bytes`], [`Error::OutOfMemory`],
    /// [`Error::StreamCapturing`], [`Error::WrongDevice`], [`Error::WrongContext`], [`Error::Driver`],
    /// [`Error::ContextLost`], [`Error::Forked`]; upstream's, but for those of lacking memory.
    #[inline]
    fn allocate(&self, bytes: usize, align: usize, stream: StreamHandle) -> Result<DevicePtr> {
        check_align(align, MIN_ALIGN)?;
        if bytes == 0 {
            return Ok(DevicePtr::NULL);
        }
        let (asked, bytes) = (bytes as u64, rounded(bytes)?);
        let named = lanes::name(&self.core.device, stream)?;
        self.allocate_named(named, stream, bytes, asked)
    }

    /// # Errors
    /// [`Error::DoubleFree`], [`Error::InteriorPointer`], [`Error::ForeignPointer`],
    /// [`Error::WrongSize`], [`Error::StreamCapturing`], [`Error::WrongDevice`],
    /// [`Error::WrongContext`], [`Error::Driver`], [`Error::ContextLost`], [`Error::Forked`].
    #[inline]
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
        if self.free_known(named, address, asked) {
            return Ok(());
        }
        self.free_named(named, address, asked)
    }

    fn facts(&self) -> Facts {
        let upstream = self.upstream.facts();
        Facts::of_device_memory()
            .accessible(upstream.device_accessible, upstream.host_accessible)
            .with_managed(upstream.managed)
            .with_stream_order(true)
            .with_recorded_streams(true)
            .with_max_bytes(self.most_bytes_over(&upstream).map(|most| most as usize))
            .with_checks(Checks::PointersAndSizes)
    }

    fn describe(&self) -> Description {
        let mut description = Description::new("pool");
        if self.config.initial_bytes > 0 {
            description = description.with("initial", Bytes(self.config.initial_bytes));
        }
        if let Some(most) = self.config.max_bytes {
            description = description.with("max", Bytes(most));
        }
        if self.config.pending_policy != PendingPolicy::WaitFirst {
            description = description.with("pending", "grow-first");
        }
        description.over(self.upstream.describe())
    }

    fn identity(&self) -> Identity {
        self.identity
    }

    fn device(&self) -> Option<&Device> {
        Some(&self.core.device)
    }

    fn held_bytes(&self) -> Option<u64> {
        Some(self.pool_bytes())
    }

    /// Whoever lacks memory asks about these uses; no stream waits for them. A stream that was made
    /// elsewhere must be alive until the free.
    ///
    /// # Errors
    /// Those of [`deallocate`](Self::deallocate), but for the size.
    fn record_stream(&self, ptr: DevicePtr, stream: StreamHandle) -> Result<()> {
        self.note_use(lanes::name(&self.core.device, stream)?, ptr.address())
    }
}

impl<R: MemoryResource> Drop for CoalescingPool<R> {
    /// Where nobody can tell whether work has finished (a context that went first, a wait for the device beside
    /// a capture) upstream gets nothing back.
    fn drop(&mut self) {
        if self.core.device.driver().check_process().is_err() {
            return;
        }
        let of_callers = self.live_bytes() > 0 && self.upstream.facts().stream_ordered;
        if !lanes::retire(&*self.core, &self.core.state, |state| &mut state.lanes, of_callers) {
            return;
        }
        let chunks = self.core.state().blocks.drain();
        let chunks = chunks.into_iter().map(|chunk| (chunk.ptr, chunk.bytes as usize));
        give_all_back(&self.upstream, &self.core.device, chunks);
    }
}

impl<R: MemoryResource> fmt::Debug for CoalescingPool<R> {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let mut shown = f.debug_struct("CoalescingPool");
        shown.field("config", &self.config);
        if let Some(state) = self.core.read() {
            shown
                .field("held_bytes", &state.blocks.held())
                .field("live_bytes", &state.blocks.live_bytes())
                .field("live", &state.blocks.live_count())
                .field("streams", &state.lanes.len());
        }
        shown.finish_non_exhaustive()
    }
}
