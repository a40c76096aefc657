//! Heaps beside the main one: memory of graphs, and memory that can sleep.

use std::fmt;
use std::sync::{Arc, Weak};

use super::{Pool, Profile};
use crate::default::{Core, Routed};
use crate::device::StreamHandle;
use crate::error::{Error, Result};
use crate::heap::{Beside, Heap};
use crate::heaps::{Contents, Graph, Resumed, Suspended, TaggedHeap};
use crate::paged::PagedPool;
use crate::sharing::Export;
use crate::stats::Stats;
use crate::units::DevicePtr;

impl Pool {
    /// Makes a pool for the memory of one CUDA graph, or of several that never run at the same time.
    /// What is allocated in a capture that it is [open](GraphPool::begin) to comes from there, and
    /// nothing of it is moved, given to others, or unmapped while graphs may use it.
    ///
    /// It counts towards this pool's limit, has its location, and is open to the same devices.
    /// Reserves addresses; makes no memory yet.
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # use cuda_sys::types::*;
    /// # let sim = cuda_sim::Simulator::builder().build()?;
    /// # let driver = vpmm::Driver::new(sim.driver())?;
    /// # let device = driver.device(0)?;
    /// # let raw = driver.raw();
    /// # let (begin, end) = (raw.cuStreamBeginCapture_v2.unwrap(), raw.cuStreamEndCapture.unwrap());
    /// # let destroy = raw.cuGraphDestroy.unwrap();
    /// let pool = vpmm::Pool::new(&device, &vpmm::PoolConfig::default())?;
    /// let stream = device.stream()?;
    /// let graph_pool = pool.graph_pool()?;
    ///
    /// graph_pool.begin(&stream)?;
    /// // … cuStreamBeginCapture(stream) …
    /// # unsafe { begin(stream.handle().raw(), CUstreamCaptureMode::CU_STREAM_CAPTURE_MODE_GLOBAL) };
    /// let scratch = pool.malloc(1 << 20, &stream)?;
    /// // … kernels that use `scratch.address()` …
    /// pool.free(scratch, &stream)?;
    /// // … cuStreamEndCapture(stream, &mut graph) …
    /// # let mut graph = std::ptr::null_mut();
    /// # assert_eq!(unsafe { end(stream.handle().raw(), &mut graph) }, CUresult::CUDA_SUCCESS);
    /// # unsafe { destroy(graph) };
    /// graph_pool.end(&stream)?;
    ///
    /// // … the graph is launched on `stream`, as often as you like …
    /// graph_pool.release(&stream)?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`Error::AddressSpaceExhausted`], [`Error::ContextLost`], [`Error::Driver`].
    pub fn graph_pool(&self) -> Result<GraphPool> {
        self.check_process()?;
        let graph = self.family.heaps.new_graph()?;
        Ok(GraphPool { graph: Arc::downgrade(&graph), pool: self.clone() })
    }

    /// A heap of this pool whose memory can be given to the device and brought back as one: see
    /// [`suspend`](Self::suspend). The same tag is the same heap; it lasts as long as the pool.
    ///
    /// It counts towards this pool's limit and threshold, has its location, policies and pace
    /// ([`moves_per_second`](crate::PoolConfig::moves_per_second), [`patience`](crate::PoolConfig::patience)),
    /// and is open to the same devices.
    /// [Marks](Self::mark) are of the main heap alone; a wait by
    /// [`Stream::synchronize`](crate::Stream::synchronize) is told to every heap.
    /// Reserves addresses the first time; makes no memory yet.
    ///
    /// # Errors
    /// [`Error::AddressSpaceExhausted`], [`Error::ContextLost`], [`Error::Driver`].
    pub fn tagged(&self, tag: &str) -> Result<Tagged> {
        self.check_process()?;
        Ok(Tagged { heap: self.family.heaps.tagged(tag)?, pool: self.clone() })
    }

    /// Gives all physical memory of a [tagged heap](Self::tagged) back to the device. Allocations
    /// keep their addresses, and get memory there again by [`resume`](Self::resume), with what
    /// they held where `contents` says so. Pointers, and captured graphs that use them, stay valid,
    /// but nothing may use the memory in between.
    ///
    /// All work that uses the heap's allocations must come before on `stream`. Waits on the host for
    /// what `stream` was given so far, and for work before the frees of what was freed; for the whole
    /// context only where a stream that freed some of the heap's memory ended in a capture.
    ///
    /// Only what is allocated is copied. Then the memory goes in two driver calls for each physical
    /// handle. While the heap sleeps its requests fail ([`Error::Asleep`]); frees go on.
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let sim = cuda_sim::Simulator::builder().build()?;
    /// # let driver = vpmm::Driver::new(sim.driver())?;
    /// # let device = driver.device(0)?;
    /// use vpmm::{Buffers, Contents};
    ///
    /// let pool = vpmm::Pool::new(&device, &vpmm::PoolConfig::default())?;
    /// let stream = device.stream()?;
    /// let weights = pool.tagged("weights")?.malloc(64 << 20, &stream)?;
    /// // … `weights` is filled, and used, on `stream` …
    /// let free = device.free_memory()?;
    /// let asleep = pool.suspend("weights", &stream, &Contents::Keep(Buffers::Release))?;
    /// assert_eq!(device.free_memory()?, free + asleep.bytes);
    /// let awake = pool.resume("weights", &stream)?;
    /// assert_eq!(awake.loaded_bytes, 64 << 20);
    /// pool.free(weights, &stream)?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// [`Error::UnknownTag`], [`Error::Asleep`] where it sleeps already, [`Error::Exported`] where
    /// other processes may have some of it, [`Error::StreamCapturing`] where `stream`, or one that
    /// freed some of it, is capturing, [`Error::ContentsFile`], [`Error::WrongDevice`],
    /// [`Error::WrongContext`], [`Error::StreamEnded`], [`Error::ContextLost`], [`Error::Driver`] (also
    /// where the host has not enough page-locked memory): the heap is awake as it was.
    /// [`Error::HalfAsleep`] where going back failed as well: it says which allocations are asleep.
    pub fn suspend(
        &self,
        tag: &str,
        stream: impl Into<StreamHandle>,
        contents: &Contents,
    ) -> Result<Suspended> {
        self.check_process()?;
        self.family.heaps.find_tag(tag)?.suspend(stream.into(), contents)
    }

    /// Brings a heap's memory back at the same addresses, with the contents that it was suspended
    /// with. Work enqueued on `stream` after the call finds them there; other streams must be
    /// ordered after. The host waits for the copies.
    ///
    /// Three driver calls for each physical handle, and the copies. Memory that is lacking is made room for
    /// as for a request: by what the pool's other heaps hold and nobody uses, by
    /// [callbacks](Self::on_out_of_memory), and by [waiting](crate::WaitPolicy).
    ///
    /// # Errors
    /// [`Error::UnknownTag`], [`Error::NotAsleep`], [`Error::OutOfMemory`],
    /// [`Error::ContentsFile`], [`Error::ContentsChanged`], [`Error::StreamCapturing`],
    /// [`Error::WrongDevice`], [`Error::WrongContext`], [`Error::StreamEnded`], [`Error::ContextLost`],
    /// [`Error::Driver`]: the heap is asleep as it was, and so are its contents.
    pub fn resume(&self, tag: &str, stream: impl Into<StreamHandle>) -> Result<Resumed> {
        self.wake(tag, stream.into(), true)
    }

    /// As [`resume`](Self::resume), but gives the contents up: for those that are lost.
    ///
    /// # Errors
    /// As [`resume`](Self::resume), but for those about contents.
    pub fn resume_empty(&self, tag: &str, stream: impl Into<StreamHandle>) -> Result<Resumed> {
        self.wake(tag, stream.into(), false)
    }

    /// Where memory is lacking room is made as for a request.
    fn wake(&self, tag: &str, stream: StreamHandle, with_contents: bool) -> Result<Resumed> {
        self.check_process()?;
        let heap = self.family.heaps.find_tag(tag)?;
        let bytes = || heap.core().stats().asleep_bytes;
        let attempt = || heap.resume(stream, with_contents);
        attempt().or_else(|error| self.with_room(Some(heap.core()), bytes(), error, attempt))
    }

    /// Where memory ran out in a heap, the main one where none is named: once more, with what the pool's other
    /// heaps can do without; then as [`recover`](Self::recover) does it.
    fn with_room<T>(
        &self,
        core: Option<&Core>,
        bytes: u64,
        error: Error,
        request: impl Fn() -> Result<T>,
    ) -> Result<T> {
        let room = |error| self.family.heaps.with_room(core, bytes, error, &request);
        room(error).or_else(|error| self.recover(core, error, || request().or_else(room)))
    }

    /// A request of the default profile for which the front, which is loose, has no block of exactly its size.
    #[inline(never)]
    pub(super) fn malloc_loosely(&self, pool: &Arc<Core>, routed: Routed<'_>) -> Result<DevicePtr> {
        match pool.malloc_loosely(routed) {
            Some(ptr) => Ok(ptr),
            None => self.malloc_behind(pool, routed),
        }
    }

    /// A request of the default profile for which the front has no block.
    #[inline(never)]
    pub(super) fn malloc_behind(&self, pool: &Arc<Core>, routed: Routed<'_>) -> Result<DevicePtr> {
        match pool.malloc_behind(routed) {
            Some(ptr) => Ok(ptr),
            None => self.malloc_climbing(pool, routed),
        }
    }

    /// The same where nothing behind the front serves it, either.
    #[cold]
    #[inline(never)]
    fn malloc_climbing(&self, pool: &Arc<Core>, routed: Routed<'_>) -> Result<DevicePtr> {
        pool.malloc_climbing(routed).or_else(|error| match pool.routed_handle(routed) {
            Ok(stream) => self.malloc_with_room(error, routed.bytes(), stream),
            Err(_) => Err(error),
        })
    }

    /// A request of the paged profile, or one of the default one without a shortcut to a front.
    #[inline(never)]
    pub(super) fn malloc_beyond(&self, bytes: usize, stream: StreamHandle) -> Result<DevicePtr> {
        let once = |pool: &Self| match &pool.profile {
            Profile::Default(pool) => pool.malloc_outside(bytes, stream),
            Profile::Paged(paged) => pool.malloc_paged(paged, bytes, stream),
        };
        once(self).or_else(|error| self.malloc_with_room(error, bytes, stream))
    }

    #[cold]
    fn malloc_with_room(
        &self,
        error: Error,
        bytes: usize,
        stream: StreamHandle,
    ) -> Result<DevicePtr> {
        self.with_room(None, bytes as u64, error, || self.malloc_once(bytes, stream))
    }

    /// A free of the paged profile, or one of the default one without a shortcut to a front.
    #[inline(never)]
    pub(super) fn free_beyond(&self, ptr: DevicePtr, stream: StreamHandle) -> Result<()> {
        match &self.profile {
            Profile::Default(pool) => pool.free_outside(ptr, stream),
            Profile::Paged(pool) => self.free_paged(pool, ptr, stream),
        }
    }

    /// A request, without what is done where it fails.
    pub(super) fn malloc_once(&self, bytes: usize, stream: StreamHandle) -> Result<DevicePtr> {
        match &self.profile {
            Profile::Default(pool) => pool.malloc(bytes, stream),
            Profile::Paged(pool) => self.malloc_paged(pool, bytes, stream),
        }
    }

    /// A request of the paged profile: another heap's, where its stream takes part in a capture.
    #[inline(never)]
    pub(super) fn malloc_paged(
        &self,
        pool: &PagedPool,
        bytes: usize,
        stream: StreamHandle,
    ) -> Result<DevicePtr> {
        let heaps = &self.family.heaps;
        if heaps.is_open()
            && let Some(served) = heaps.malloc(bytes, stream)
        {
            return served;
        }
        pool.malloc(bytes, stream)
    }

    /// A free of the paged profile: another heap's by its address, or one for later on a stream that
    /// captures.
    #[inline(never)]
    pub(super) fn free_paged(
        &self,
        pool: &PagedPool,
        ptr: DevicePtr,
        stream: StreamHandle,
    ) -> Result<()> {
        let heaps = &self.family.heaps;
        if let Some(freed) = heaps.free(ptr, stream) {
            return freed;
        }
        if heaps.is_postponed(ptr.address()) {
            return Err(Error::DoubleFree { address: ptr.address() });
        }
        match pool.free(ptr, stream) {
            Err(Error::StreamCapturing) if heaps.is_open() => {
                pool.check_live(ptr).map_err(|error| self.unless_foreign(error, ptr))?;
                heaps.postpone(ptr, stream)
            }
            Err(error @ Error::DoubleFree { .. }) => Err(self.unless_foreign(error, ptr)),
            freed => freed,
        }
    }
}

/// A pool for the memory of one CUDA graph, or of several that never run at the same time: made by
/// [`Pool::graph_pool`].
///
/// # What the caller sees to
/// - A graph is launched where it comes after the work that was enqueued on its captured streams
///   before, and after the work that used what was freed here between captures.
/// - Graphs of one pool run one after another, in the order of their captures: a later one may use
///   what an earlier one has freed. So an earlier one, launched again, may write over what a later
///   one left in memory that is still allocated; as it may in PyTorch's pools.
/// - Memory of *other* heaps that a graph uses stays allocated while the graph may run.
///
/// Dropping it ends what has begun. Without [`release`](Self::release) it says that the graphs are launched no more. It
/// neither waits nor ends a capture: the memory goes back once the host has waited for the device by
/// [`Device::synchronize`](crate::Device::synchronize) and nothing is allocated, or with the pool,
/// which then waits for the context.
pub struct GraphPool {
    graph: Weak<Graph>,
    pool: Pool,
}

impl GraphPool {
    fn graph(&self) -> Result<Arc<Graph>> {
        self.graph.upgrade().ok_or(Error::GraphPool { reason: "it has been released" })
    }

    /// From now on until [`end`](Self::end), what is allocated on `stream`, and on streams that take
    /// part in the same capture (by events), comes from here; other streams and threads go on as
    /// before. Before the capture or in it; for several captures one after another.
    ///
    /// What is freed in a capture serves the same stream's next requests; other streams' only after
    /// the end. Frees of any memory of the pool may be made on capturing streams meanwhile, by
    /// handles from elsewhere too. `stream` must live until the end, but for one of the library's,
    /// whose end is also this one's.
    ///
    /// Neither asks the stream anything that would end a capture, nor waits.
    ///
    /// # Errors
    /// [`Error::GraphPool`] where it was released, where a graph's pool has begun on the stream, and
    /// for the legacy default stream, which cannot capture; [`Error::WrongDevice`],
    /// [`Error::WrongContext`], [`Error::StreamEnded`], [`Error::ContextLost`], [`Error::Driver`].
    pub fn begin(&self, stream: impl Into<StreamHandle>) -> Result<()> {
        self.pool.check_process()?;
        self.pool.family.heaps.begin(&self.graph()?, stream.into())
    }

    /// The capture on `stream` needs no more memory. Best called when it has ended.
    ///
    /// Memory that is not the graph's, and was freed in the capture by a handle from elsewhere, gets
    /// its event now; so do graphs' pools that it freed memory of which was there before the capture. If
    /// the stream still captures that is done by the next call of
    /// [`begin`](Self::begin), `end` or [`release`](Self::release) of any graph's pool, or the drop of one, and the
    /// stream must live until then; on a thread's own default stream it is that thread's next call. Where there can be
    /// no event (the stream ended first, or its thread, or the driver refuses it), and where no such call comes, such
    /// memory is kept until the host has waited for the device.
    ///
    /// # Errors
    /// [`Error::GraphPool`] where it has not begun on the stream; [`Error::ContextLost`], after which it
    /// has ended all the same;
    /// [`Error::Driver`].
    pub fn end(&self, stream: impl Into<StreamHandle>) -> Result<()> {
        self.pool.check_process()?;
        self.pool.family.heaps.end(&self.graph()?, stream.into())
    }

    /// Gives the memory back, once everything enqueued on `stream` so far has finished: launches of
    /// the graphs on other streams must come before that, and there are no later ones. Does not wait:
    /// an event is recorded, and asked about by later calls of the pool. What is still allocated keeps
    /// the memory until it is freed, and what was freed until the stream of the free has come so far, in a
    /// capture too.
    ///
    /// # Errors
    /// [`Error::GraphPool`] where it was released, or between a begin and its end;
    /// [`Error::StreamCapturing`], [`Error::StreamEnded`], [`Error::WrongDevice`],
    /// [`Error::WrongContext`], [`Error::ContextLost`], [`Error::Driver`]. It can then be used as before.
    pub fn release(&self, stream: impl Into<StreamHandle>) -> Result<()> {
        self.pool.check_process()?;
        self.pool.family.heaps.release(&self.graph()?, stream.into())
    }

    /// What it holds; nothing when the memory has gone back.
    pub fn stats(&self) -> Stats {
        let graph = self.graph.upgrade().filter(|_| self.pool.check_process().is_ok());
        graph.map_or_else(Stats::default, |graph| graph.stats())
    }
}

impl Drop for GraphPool {
    fn drop(&mut self) {
        if let Some(graph) = self.graph.upgrade()
            && self.pool.check_process().is_ok()
        {
            self.pool.family.heaps.drop_graph(&graph);
        }
    }
}

impl fmt::Debug for GraphPool {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("GraphPool").field("stats", &self.stats()).finish()
    }
}

/// A heap that can sleep: see [`Pool::tagged`] and [`Pool::suspend`]. A clone is the same heap.
#[derive(Clone)]
pub struct Tagged {
    heap: Arc<TaggedHeap>,
    pool: Pool,
}

impl Tagged {
    /// As [`Pool::malloc`], from this heap. Freed by [`free`](Self::free), or by
    /// [`Pool::free`], which finds the heap by the address.
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let sim = cuda_sim::Simulator::builder().build()?;
    /// # let driver = vpmm::Driver::new(sim.driver())?;
    /// # let device = driver.device(0)?;
    /// # let stream = device.stream()?;
    /// let pool = vpmm::Pool::new(&device, &vpmm::PoolConfig::default())?;
    /// let cache = pool.tagged("kv cache")?;
    /// let ptr = cache.malloc(1 << 20, &stream)?;
    /// pool.free(ptr, &stream)?;
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// Those of [`Pool::malloc`], and [`Error::Asleep`].
    #[inline]
    pub fn malloc(&self, bytes: usize, stream: impl Into<StreamHandle>) -> Result<DevicePtr> {
        self.pool.check_process()?;
        let stream = stream.into();
        match self.heap.core().malloc(bytes, stream) {
            Err(error) => self.malloc_with_room(error, bytes, stream),
            served => served,
        }
    }

    #[cold]
    fn malloc_with_room(
        &self,
        error: Error,
        bytes: usize,
        stream: StreamHandle,
    ) -> Result<DevicePtr> {
        let core = self.heap.core();
        self.pool.with_room(Some(core), bytes as u64, error, || core.malloc(bytes, stream))
    }

    /// As [`Pool::free`], for memory of this heap, without looking for its heap.
    ///
    /// # Errors
    /// Those of [`Pool::free`].
    #[inline]
    pub fn free(&self, ptr: DevicePtr, stream: impl Into<StreamHandle>) -> Result<()> {
        self.pool.check_process()?;
        let (core, stream) = (self.heap.core(), stream.into());
        match core.free(ptr, stream) {
            Err(Error::StreamCapturing) => self.free_in_capture(ptr, stream),
            freed => freed,
        }
    }

    /// Which capture it is, if a graph's pool is open to it, is not the heap's to know.
    #[cold]
    fn free_in_capture(&self, ptr: DevicePtr, stream: StreamHandle) -> Result<()> {
        let is_own = self.heap.core().has_address(ptr.address());
        let heaps = &self.pool.family.heaps;
        let freed = if is_own && heaps.is_open() { heaps.free(ptr, stream) } else { None };
        freed.unwrap_or(Err(Error::StreamCapturing))
    }

    /// As [`Pool::export`], for memory of this heap. A heap of which something was exported cannot
    /// be suspended any more.
    ///
    /// # Errors
    /// Those of [`Pool::export`], and [`Error::Asleep`].
    pub fn export(&self, ptr: DevicePtr) -> Result<Export<'_>> {
        self.pool.check_process()?;
        Export::new(self.heap.core().as_ref(), Some(ptr.address()))
    }

    /// As [`Pool::trim_to`], of this heap alone: until it holds no more than `keep_bytes`. Nothing while it
    /// sleeps.
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let sim = cuda_sim::Simulator::builder().build()?;
    /// # let driver = vpmm::Driver::new(sim.driver())?;
    /// # let device = driver.device(0)?;
    /// # let stream = device.stream()?;
    /// let pool = vpmm::Pool::new(&device, &vpmm::PoolConfig::default())?;
    /// let cache = pool.tagged("kv cache")?;
    /// pool.free(pool.malloc(1 << 20, &stream)?, &stream)?;
    /// pool.free(cache.malloc(1 << 20, &stream)?, &stream)?;
    /// stream.synchronize()?;
    /// let (all, held) = (pool.stats().mapped_bytes, cache.stats().mapped_bytes);
    /// assert_eq!(cache.trim_to(0)?, held);
    /// assert_eq!((cache.stats().mapped_bytes, pool.stats().mapped_bytes), (0, all - held));
    /// assert!(held > 0 && all > held);
    /// # Ok(())
    /// # }
    /// ```
    ///
    /// # Errors
    /// Those of [`Pool::trim_to`].
    pub fn trim_to(&self, keep_bytes: u64) -> Result<u64> {
        self.pool.check_process()?;
        if self.is_asleep() { Ok(0) } else { Heap::trim_to(self.heap.core().as_ref(), keep_bytes) }
    }

    /// The tag.
    pub fn tag(&self) -> &str {
        self.heap.tag()
    }

    /// Whether the heap's memory is the device's now.
    pub fn is_asleep(&self) -> bool {
        self.heap.core().is_asleep()
    }

    /// What this heap holds.
    pub fn stats(&self) -> Stats {
        match self.pool.check_process() {
            Ok(()) => self.heap.core().stats(),
            Err(_) => Stats::default(),
        }
    }
}

impl fmt::Debug for Tagged {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("Tagged").field("tag", &self.tag()).field("stats", &self.stats()).finish()
    }
}
