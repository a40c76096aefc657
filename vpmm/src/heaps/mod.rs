//! Heaps beside a pool's main one, each a heap of the default profile at addresses of its own.
//!
//! ```text
//! Heaps ─ main            serves every request that says nothing else, of either profile
//!       ─ graph heaps     memory taken in captures; nothing in them moves           graph, captures
//!       ─ tagged heaps    memory that can sleep: given to the device and back       tagged, contents
//! ```
//!
//! All hold memory of one kind, open to the same devices, under one limit (`Budget`). A free is told
//! its heap by the address. While a graph's pool is open to a capture the main heap has no shortcuts
//! for streams, and its calls come here first.
//!
//! Locks, in the order in which they may be taken, before any lock of a heap: `making`, `captures`,
//! a graph's `calls`, a tagged heap's `sleep`; under another heap's only `members` with `gone` and a graph's
//! `life`, `end` and `freed`.

mod captures;
mod contents;
mod graph;
mod pinned;
mod tagged;

pub use contents::{Buffers, Contents};
pub(crate) use graph::Graph;
pub(crate) use tagged::TaggedHeap;
pub use tagged::{Resumed, Suspended};

use std::ptr;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, RwLock, Weak};
use std::time::Duration;

use smallvec::SmallVec;

use crate::capture::{BesideCaptures, OpenCaptures, stream_is_capturing, wait_at_end};
use crate::default::{Core, PoolConfig};
use crate::device::{Device, StreamHandle};
use crate::driver::{Awaited, StreamWatcher};
use crate::error::{Error, Result};
use crate::event::Event;
use crate::heap::{Beside, Heap};
use crate::location::{Access, Location};
use crate::ordering::{Mark, PendingPolicy, Reuse};
use crate::out_of_memory::WaitPolicy;
use crate::snapshot::{HeapName, Segment};
use crate::stats::Stats;
use crate::units::DevicePtr;
use crate::validate::Violation;
use captures::{Captures, Participant, When};

fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Records a new event on a stream that is not capturing, in the current context.
fn record(device: &Device, stream: StreamHandle) -> Result<Event> {
    let driver = device.driver();
    if stream_is_capturing(driver, stream)? {
        return Err(Error::StreamCapturing);
    }
    let event = Event::new(driver)?;
    // Another thread may have begun a capture in between, which then has the record.
    let taken = event.record(driver, stream).and_then(|()| stream_is_capturing(driver, stream));
    let refused = match taken {
        Ok(false) => return Ok(event),
        Ok(true) => Error::StreamCapturing,
        Err(failure) => failure.into(),
    };
    // SAFETY: made above and known to nobody.
    let _ = unsafe { event.destroy(driver) };
    Err(refused)
}

/// What a heap holds, by what its trims go. What the driver's pool holds for small requests is the main heap's.
fn held_bytes(stats: &Stats) -> u64 {
    stats.mapped_bytes + stats.small_mapped_bytes
}

/// What further heaps have in common with the main one.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Terms {
    pub(crate) limit_bytes: Option<u64>,
    pub(crate) release_threshold_bytes: Option<u64>,
    pub(crate) pending_policy: PendingPolicy,
    pub(crate) reuse: Reuse,
    pub(crate) out_of_memory: WaitPolicy,
    pub(crate) moves_per_second: u32,
    pub(crate) patience: Duration,
}

#[derive(Clone)]
enum Member {
    Graph(Arc<Graph>),
    Tagged(Arc<TaggedHeap>),
}

impl Member {
    fn core(&self) -> &Arc<Core> {
        match self {
            Self::Graph(graph) => &graph.core,
            Self::Tagged(heap) => heap.core(),
        }
    }
}

/// What the host waits for as other heaps give memory back for one that lacks some, the nearest first.
#[derive(Clone, Copy, PartialEq, Eq)]
enum Waits {
    Nothing,
    /// What was freed in the main heap, for a request of that, where it has not waited by itself.
    Own,
    /// What events on the streams tell of, in the others.
    Streams,
    /// Launches of released graphs.
    Graphs,
    /// All that the device has been given, for what nothing else tells of.
    Device,
}

/// All heaps of a pool.
pub(crate) struct Heaps {
    main: Arc<dyn Heap>,
    /// The main heap, where it is of the default profile.
    core: Option<Arc<Core>>,
    terms: Terms,
    /// Held while a heap is made, or who may reach the memory is changed: a new heap is open to the
    /// same devices as the others. Whether streams are watched: from the first heap on that was to be made.
    making: Mutex<bool>,
    members: RwLock<Vec<Member>>,
    /// What was counted of heaps that have gone, and the peaks of all beside the main one when one went. Changes with
    /// `members`.
    gone: Mutex<Stats>,
    captures: Mutex<Captures>,
    /// Whether a graph's pool is open to a capture.
    open: AtomicBool,
    /// Whether there are heaps beside the main one.
    any: AtomicBool,
    /// Counts what only a wait for the device settles, or may have to: graphs' pools whose last handle was dropped
    /// without a release, frees whose stream cannot be named any more, and those in captures.
    left_to_device: AtomicU64,
}

impl Heaps {
    pub(crate) fn new(main: Arc<dyn Heap>, core: Option<Arc<Core>>, terms: Terms) -> Arc<Self> {
        if let Some(limit) = terms.limit_bytes {
            main.backing().budget().limit_to(limit);
        }
        let heaps = Arc::new(Self {
            main,
            core,
            terms,
            making: Mutex::new(false),
            members: RwLock::default(),
            gone: Mutex::default(),
            captures: Mutex::new(Captures::new()),
            open: AtomicBool::new(false),
            any: AtomicBool::new(false),
            left_to_device: AtomicU64::new(0),
        });
        if let Some(core) = &heaps.core {
            let beside: Weak<dyn Beside> = Arc::downgrade(&heaps) as _;
            core.set_beside(beside);
        }
        heaps
    }

    /// Every segment of every heap.
    pub(crate) fn snapshot(&self) -> Vec<Segment> {
        let mut segments = self.main.snapshot();
        let mut graphs = 0;
        for member in self.members() {
            let heap = match &member {
                Member::Graph(_) => {
                    graphs += 1;
                    HeapName::Graph(graphs - 1)
                }
                Member::Tagged(heap) => HeapName::Tagged(heap.tag().to_owned()),
            };
            let of_heap = member.core().snapshot().into_iter();
            segments.extend(of_heap.map(|segment| Segment { heap: heap.clone(), ..segment }));
        }
        segments
    }

    /// Changes the limit of all heaps together, to at most the one that the pool was made with.
    pub(crate) fn limit_to(&self, bytes: Option<u64>) {
        let least = [bytes, self.terms.limit_bytes].into_iter().flatten().min();
        self.main.backing().budget().limit_to(least.unwrap_or(u64::MAX));
    }

    /// Whether the highest limit that can be set has room for a request that was out of memory.
    pub(crate) fn may_hold(&self, error: &Error) -> bool {
        match error {
            Error::OutOfMemory { requested_bytes, .. } => {
                self.terms.limit_bytes.is_none_or(|most| *requested_bytes <= most)
            }
            _ => true,
        }
    }

    /// Whether there is no use in waiting, nor in what others give back, for a request that was out of memory: it
    /// is for more than the limit, as that is now, or than the device has.
    pub(crate) fn is_hopeless(&self, error: &Error) -> bool {
        let is_beyond = |bytes: u64| {
            let on_device = self.main.backing().location() == Location::Device;
            on_device && self.device().total_memory().is_ok_and(|most| bytes > most)
        };
        match error {
            Error::OutOfMemory { requested_bytes, .. } => {
                error.is_hopeless() || is_beyond(*requested_bytes)
            }
            _ => false,
        }
    }

    /// The owner lets go: no stream's end is told here any more.
    pub(crate) fn retire(&self) {
        self.device().driver().unwatch_streams(self);
    }

    fn device(&self) -> &Device {
        self.main.device()
    }

    fn members(&self) -> Vec<Member> {
        self.members.read().unwrap_or_else(PoisonError::into_inner).clone()
    }

    /// The heap beside the main one that an address is of.
    fn of(&self, address: u64) -> Option<Member> {
        if !self.has_others() {
            return None;
        }
        let members = self.members.read().unwrap_or_else(PoisonError::into_inner);
        members.iter().find(|member| member.core().has_address(address)).cloned()
    }

    /// The heap that an address is of; the main one where it is of none.
    pub(crate) fn heap_of(&self, address: u64) -> Option<Arc<dyn Heap>> {
        self.of(address).map(|member| Arc::clone(member.core()) as _)
    }

    /// Makes a further heap and enters it. The caller holds `making`.
    fn make(&self, fixed: bool, enter: impl FnOnce(Arc<Core>) -> Member) -> Result<Member> {
        let device = self.device();
        let backing = self.main.backing().of_another_heap();
        let granule_bytes = Core::granule_of(&backing);
        let most = backing.location().most(self.terms.limit_bytes, device.total_memory()?);
        // As much again as it may hold, to grow in; at the least what its parts need.
        let bytes = most.saturating_mul(2).max(64 * granule_bytes);
        let addresses = bytes.min((2 << 40) - granule_bytes) / granule_bytes * granule_bytes;
        let config = PoolConfig {
            limit_bytes: self.terms.limit_bytes,
            // A graph's memory stays until the graph is gone.
            release_threshold_bytes: self.terms.release_threshold_bytes.filter(|_| !fixed),
            va_size_bytes: Some(addresses),
            pending_policy: self.terms.pending_policy,
            reuse: self.terms.reuse,
            out_of_memory: self.terms.out_of_memory,
            moves_per_second: self.terms.moves_per_second,
            // In a capture nothing is waited for.
            patience: if fixed { Duration::ZERO } else { self.terms.patience },
            location: backing.location(),
            ..PoolConfig::default()
        };
        let core = Core::beside(backing, device, &config, fixed)?;
        let member = enter(core);
        let mut members = self.members.write().unwrap_or_else(PoisonError::into_inner);
        members.push(member.clone());
        self.any.store(true, Ordering::Release);
        Ok(member)
    }

    /// Watches streams from now on, once. `watches`: what `making` guards.
    fn watch(self: &Arc<Self>, watches: &mut bool) {
        if !std::mem::replace(watches, true) {
            let watcher: Weak<dyn StreamWatcher> = Arc::downgrade(self) as _;
            self.device().driver().watch_streams(watcher);
        }
    }

    pub(crate) fn new_graph(self: &Arc<Self>) -> Result<Arc<Graph>> {
        self.reap(false);
        let mut making = lock(&self.making);
        self.watch(&mut making);
        match self.make(true, |core| Member::Graph(Arc::new(Graph::new(core))))? {
            Member::Graph(graph) => Ok(graph),
            Member::Tagged(_) => Err(Error::UnknownTag),
        }
    }

    /// The heap with a tag, made where there is none.
    pub(crate) fn tagged(self: &Arc<Self>, tag: &str) -> Result<Arc<TaggedHeap>> {
        let mut making = lock(&self.making);
        match self.find_tag(tag) {
            Ok(found) => Ok(found),
            Err(_) => {
                self.watch(&mut making);
                let enter = |core| Member::Tagged(Arc::new(TaggedHeap::new(tag, core)));
                match self.make(false, enter)? {
                    Member::Tagged(heap) => Ok(heap),
                    Member::Graph(_) => Err(Error::UnknownTag),
                }
            }
        }
    }

    pub(crate) fn find_tag(&self, tag: &str) -> Result<Arc<TaggedHeap>> {
        let members = self.members.read().unwrap_or_else(PoisonError::into_inner);
        let found = members.iter().find_map(|member| match member {
            Member::Tagged(heap) if heap.tag() == tag => Some(Arc::clone(heap)),
            _ => None,
        });
        found.ok_or(Error::UnknownTag)
    }

    /// Opens a graph's pool to what a stream captures, or will.
    pub(crate) fn begin(&self, graph: &Arc<Graph>, stream: StreamHandle) -> Result<()> {
        if stream == StreamHandle::LEGACY {
            return Err(Error::GraphPool { reason: "the legacy default stream cannot capture" });
        }
        let device = self.device();
        let _context = device.enter()?;
        device.check_stream(stream)?;
        self.reap(false);
        let mut captures = lock(&self.captures);
        self.finish_ended(&mut captures);
        graph.check_open()?;
        captures.begin(graph, stream)?;
        self.set_open(true);
        // A default stream's capture can be asked about here only: see `Captures::find`.
        if stream == StreamHandle::PER_THREAD
            && let Err(error) = captures.find(device, stream)
        {
            let _ = captures.end(graph, stream);
            self.set_open(captures.is_open());
            return Err(error);
        }
        Ok(())
    }

    fn set_open(&self, open: bool) {
        if self.open.swap(open, Ordering::SeqCst) == open {
            return;
        }
        self.device().driver().companion::<OpenCaptures>().count(open);
        if let Some(core) = &self.core {
            core.set_closed(open);
        }
    }

    pub(crate) fn is_open(&self) -> bool {
        self.open.load(Ordering::Relaxed)
    }

    pub(crate) fn end(&self, graph: &Arc<Graph>, stream: StreamHandle) -> Result<()> {
        let context = match self.device().enter() {
            // The capture went with it, and is over all the same.
            Err(error @ Error::ContextLost { .. }) => Err(error),
            entered => Ok(entered?),
        };
        {
            let mut captures = lock(&self.captures);
            let streams = captures.end(graph, stream)?;
            for participant in streams {
                self.end_participant(&mut captures, graph, participant);
            }
            self.set_open(captures.is_open());
            if context.is_ok() {
                self.finish_ended(&mut captures);
            }
        }
        let _context = context?;
        self.reap(false);
        Ok(())
    }

    /// A stream's part in a capture is over: what it freed of graphs' memory is for the next
    /// capture; what it freed of other memory waits for an event, and so does the end of a graph's
    /// memory of before.
    fn end_participant(&self, captures: &mut Captures, of: &Graph, participant: Participant) {
        let number = participant.number;
        // From here on no call is under way under the number. What other graphs are asked for may last, and is not
        // waited for: the lock of all captures is held.
        let mut made = lock(&of.calls);
        made.retain(|_, number| *number != participant.number);
        let mut waits = self.core.as_ref().is_some_and(|core| core.has_held(number));
        for member in self.members() {
            match member {
                Member::Graph(graph) => waits |= graph.end_part(number),
                Member::Tagged(heap) => waits |= heap.core().has_held(number),
            }
        }
        if waits {
            captures.ending.push(participant);
        }
    }

    /// Records the events, and makes the frees, that captures were in the way of.
    fn finish_ended(&self, captures: &mut Captures) {
        for ended in captures.take_ended(self.device()) {
            self.end_held_behind(ended);
        }
        captures.postponed.retain_mut(|of| {
            let When::Ended(stream) = of.when else { return true };
            // In another thread the handle of a default stream means another one.
            if !of.is_reachable() {
                return true;
            }
            match self.main.free(of.ptr, stream) {
                Err(Error::StreamCapturing) => true,
                // The main heap was told of its end, and this one is about to be.
                Err(Error::StreamEnded) => {
                    of.when = When::DevicePassed(self.leave_to_device());
                    true
                }
                Err(Error::Driver { .. }) => {
                    // Somebody else's handle need not live any longer.
                    if stream.known_to(self.device().driver().realm()).is_none() {
                        of.when = When::DevicePassed(self.leave_to_device());
                    }
                    true
                }
                _ => false,
            }
        });
    }

    fn end_held_behind(&self, ended: Participant) {
        if let Some(core) = &self.core {
            core.end_held_behind(ended.number, ended.handle);
        }
        for member in self.members() {
            match member {
                Member::Tagged(heap) => heap.core().end_held_behind(ended.number, ended.handle),
                Member::Graph(graph) => graph.end_part_behind(ended.number, ended.handle),
            }
        }
    }

    pub(crate) fn release(&self, graph: &Arc<Graph>, stream: StreamHandle) -> Result<()> {
        {
            let _context = self.device().enter()?;
            let mut captures = lock(&self.captures);
            self.finish_ended(&mut captures);
            if captures.is_open_to(graph) {
                return Err(Error::GraphPool { reason: "a capture is still using it" });
            }
            graph.release(stream)?;
        }
        self.reap(false);
        Ok(())
    }

    /// The number of one thing more that waits for the device.
    fn leave_to_device(&self) -> u64 {
        self.left_to_device.fetch_add(1, Ordering::Relaxed) + 1
    }

    /// The last handle of a graph's pool is gone.
    pub(crate) fn drop_graph(&self, graph: &Graph) {
        let context = self.device().enter();
        {
            let mut captures = lock(&self.captures);
            for participant in captures.end_all(graph) {
                self.end_participant(&mut captures, graph, participant);
            }
            self.set_open(captures.is_open());
            // It may be the last call that sees to them.
            if context.is_ok() {
                self.finish_ended(&mut captures);
            }
        }
        graph.drop_handle(self.leave_to_device());
    }

    /// Ends graphs' heaps that nothing uses any more, and gives back what drivers refused to take
    /// before. `wait` for released graphs on the host. Whether there was anything.
    pub(crate) fn reap(&self, wait: bool) -> bool {
        self.reap_bytes(wait).is_some()
    }

    /// The same: the bytes that went back, where there was anything.
    fn reap_bytes(&self, wait: bool) -> Option<u64> {
        let mut bytes = None;
        let mut count = |more: u64| *bytes.get_or_insert(0) += more;
        for member in self.members() {
            match member {
                Member::Graph(graph) => {
                    if graph.is_quiet(wait).unwrap_or(false)
                        && let Ok(Some((given, is_over))) = graph.end_unused()
                    {
                        if is_over {
                            self.remove(&graph);
                        }
                        if is_over || given > 0 {
                            count(given);
                        }
                    }
                }
                Member::Tagged(heap) => match heap.release_kept() {
                    0 => {}
                    kept => count(kept),
                },
            }
        }
        bytes
    }

    /// Takes a graph's heap out of the list.
    fn remove(&self, graph: &Arc<Graph>) {
        let (all, of_graph) = (self.stats(), graph.stats());
        let mut members = self.members.write().unwrap_or_else(PoisonError::into_inner);
        members
            .retain(|member| !matches!(member, Member::Graph(other) if Arc::ptr_eq(other, graph)));
        let mut gone = lock(&self.gone);
        gone.add_counts(&of_graph);
        gone.raise_peaks(&all);
    }

    /// Has the other heaps, the main one first, give free memory back for one that lacks some; that is the main
    /// one where there is none. `waits` for what on the host. Whether it has gained anything.
    fn reclaim(&self, for_heap: Option<&Core>, bytes: u64, waits: Waits) -> bool {
        match waits {
            Waits::Own => {
                return for_heap.is_none() && self.main.wait_for_pending(bytes).unwrap_or(false);
            }
            Waits::Graphs => return self.reap(true),
            _ => {}
        }
        let mut any = self.reap(false);
        let members = self.members();
        let budget = self.main.backing().budget();
        // All that is held beyond a limit that was lowered goes first.
        let mut missing = bytes
            .saturating_add(self.main.backing().granule_bytes())
            .saturating_add(budget.excess());
        let room = budget.room();
        // Or it is the device that has too little.
        let is_limited = room < missing;
        for heap in self.other_heaps(for_heap, &members) {
            if missing == 0 {
                break;
            }
            if waits != Waits::Nothing {
                // What cannot be waited for, as beside a capture, stays.
                let _ = heap.wait_for_frees(waits == Waits::Device);
            }
            let (held, before) = (held_bytes(&heap.stats()), budget.room());
            let trimmed = heap.trim_to(held.saturating_sub(missing));
            // What went back before a failure has gone back.
            let given = trimmed.unwrap_or_else(|_| held.saturating_sub(held_bytes(&heap.stats())));
            // What the driver's pool gives back was counted by what was allocated of it: that is no room at the limit.
            let gained = if is_limited { budget.room().saturating_sub(before) } else { given };
            missing = missing.saturating_sub(gained.min(given));
            any |= given > 0;
        }
        // Small allocations that went to the driver's pool count no more, though that gave nothing back.
        any || budget.room() > room
    }

    /// The heaps that may give something back for another one: the main one first, then those tagged ones that are
    /// awake.
    fn other_heaps<'a>(
        &'a self,
        for_heap: Option<&'a Core>,
        members: &'a [Member],
    ) -> impl Iterator<Item = &'a dyn Heap> {
        let tagged = members.iter().filter_map(|member| match member {
            Member::Tagged(heap) => Some(heap.core()),
            Member::Graph(_) => None,
        });
        let tagged = tagged.filter(move |core| {
            !for_heap.is_some_and(|heap| ptr::eq(Arc::as_ptr(core), heap)) && !core.is_asleep()
        });
        let main = for_heap.map(|_| self.main.as_ref());
        main.into_iter().chain(tagged.map(|core| core.as_ref() as &dyn Heap))
    }

    /// A request of a heap, the main one where none is named, that found no memory: tried again when others
    /// have made room; where the host may wait for the GPU, with what was freed there before, each time with what
    /// takes a longer wait.
    pub(crate) fn with_room<T>(
        &self,
        for_heap: Option<&Core>,
        bytes: u64,
        mut error: Error,
        request: impl Fn() -> Result<T>,
    ) -> Result<T> {
        let mut has_lost = false;
        let all = [Waits::Nothing, Waits::Own, Waits::Streams, Waits::Graphs, Waits::Device];
        for waits in all {
            let may_wait = self.terms.out_of_memory == WaitPolicy::WaitForPending;
            let stays =
                (waits != Waits::Nothing && !may_wait) || (waits == Waits::Device && !has_lost);
            if !error.is_out_of_memory() || stays || !self.has_others() || self.is_hopeless(&error)
            {
                break;
            }
            if waits == Waits::Streams {
                // Before the requests that follow, since others may wait meanwhile.
                let members = self.members();
                has_lost = self.other_heaps(for_heap, &members).any(Heap::has_lost);
            }
            if self.reclaim(for_heap, bytes, waits) {
                match request() {
                    Err(again) => error = again,
                    served => return served,
                }
            }
        }
        Err(error)
    }

    /// Whether there are heaps beside the main one.
    pub(crate) fn has_others(&self) -> bool {
        self.any.load(Ordering::Acquire)
    }

    /// Keeps a free on a capturing stream, for a main heap that cannot take it now.
    pub(crate) fn postpone(&self, ptr: DevicePtr, stream: StreamHandle) -> Result<()> {
        let mut captures = lock(&self.captures);
        match captures.find(self.device(), stream)? {
            Some(_) => captures.postpone(ptr, stream, self.leave_to_device()),
            None => Err(Error::StreamCapturing),
        }
    }

    /// Whether a free of this address waits for a capture's end.
    pub(crate) fn is_postponed(&self, address: u64) -> bool {
        self.has_others() && lock(&self.captures).is_postponed(address)
    }

    /// The sum over the heaps beside the main one. Counts go on, and peaks stay, where one has gone.
    pub(crate) fn stats(&self) -> Stats {
        let (members, gone) = {
            let members = self.members.read().unwrap_or_else(PoisonError::into_inner);
            (members.clone(), lock(&self.gone).clone())
        };
        let mut sum = Stats::default();
        members.iter().for_each(|member| sum.add(&member.core().stats()));
        sum.add_counts(&gone);
        sum.raise_peaks(&gone);
        sum
    }

    /// Allocations of the heaps beside the main one.
    pub(crate) fn live_count(&self) -> u64 {
        if !self.has_others() {
            return 0;
        }
        let live = |member: &Member| Heap::live_count(member.core().as_ref());
        self.members().iter().map(live).sum()
    }

    pub(crate) fn validate(&self) -> Result<(), Violation> {
        self.members().iter().try_for_each(|member| member.core().validate())
    }

    /// Trims the main heap and those tagged heaps that are awake, until all heaps together hold no
    /// more than this; graphs' memory stays. What fails for one is told when all were trimmed.
    pub(crate) fn trim_to(&self, keep_bytes: u64) -> Result<u64> {
        let mut given = self.reap_bytes(false).unwrap_or(0);
        let members = self.members();
        let tagged = members.iter().filter_map(|member| match member {
            Member::Tagged(heap) if !heap.core().is_asleep() => {
                Some(heap.core().as_ref() as &dyn Heap)
            }
            _ => None,
        });
        let held = |stats: Stats| held_bytes(&stats);
        let mut all = held(self.main.stats()) + held(self.stats());
        let mut failed = Ok(());
        for heap in std::iter::once(self.main.as_ref() as &dyn Heap).chain(tagged) {
            let others = all.saturating_sub(held(heap.stats()));
            match heap.trim_to(keep_bytes.saturating_sub(others)) {
                Ok(bytes) => given += bytes,
                Err(error) => failed = failed.and(Err(error)),
            }
            all = others + held(heap.stats());
        }
        failed.map(|()| given)
    }

    pub(crate) fn reset_peaks(&self) {
        {
            let mut gone = lock(&self.gone);
            (gone.peak_live_bytes, gone.peak_mapped_bytes) = (0, 0);
        }
        self.main.reset_peaks();
        self.members().iter().for_each(|member| Heap::reset_peaks(member.core().as_ref()));
    }

    /// Sets a device's access to every heap. On failure it has the access that it had.
    pub(crate) fn set_access(&self, device: &Device, access: Access) -> Result<()> {
        let _making = lock(&self.making);
        let before = self.main.access_of(device);
        let members = self.members();
        let heaps: Vec<&dyn Heap> = std::iter::once(self.main.as_ref() as &dyn Heap)
            .chain(members.iter().map(|member| member.core().as_ref() as &dyn Heap))
            .collect();
        for (index, heap) in heaps.iter().enumerate() {
            if let Err(error) = heap.set_access(device, access) {
                for heap in &heaps[..index] {
                    // The error to report is the first one.
                    let _ = heap.set_access(device, before);
                }
                return Err(error);
            }
        }
        Ok(())
    }
}

impl Beside for Heaps {
    fn malloc(&self, bytes: usize, stream: StreamHandle) -> Option<Result<DevicePtr>> {
        let found = |captures: &mut Captures| captures.find(self.device(), stream);
        let number = match found(&mut lock(&self.captures)) {
            Ok(Some((graph, _))) => graph,
            Ok(None) => return None,
            Err(error) => return Some(Err(error)),
        };
        let graph = number;
        let request = || {
            let mut captures = lock(&self.captures);
            // It may have ended since.
            let Some((graph, number)) = found(&mut captures)? else {
                return Err(Error::GraphPool { reason: "it has not begun on this stream" });
            };
            let mut made = lock(&graph.calls);
            drop(captures);
            graph.malloc(bytes, stream, number, &mut made)
        };
        let room = |error| self.with_room(Some(&graph.core), bytes as u64, error, request);
        Some(request().or_else(room))
    }

    fn free(&self, ptr: DevicePtr, stream: StreamHandle) -> Option<Result<()>> {
        let member = self.of(ptr.address())?;
        let core = member.core();
        let graph = matches!(member, Member::Graph(_));
        if self.is_open() && (graph || !core.knows(stream)) {
            let mut captures = lock(&self.captures);
            match captures.find(self.device(), stream) {
                Ok(Some((of, number))) => {
                    let mut made = lock(&of.calls);
                    drop(captures);
                    if let Member::Graph(owner) = &member
                        && !(Arc::ptr_eq(owner, &of) && made.remove(&ptr.address()).is_some())
                    {
                        owner.note_free(number, || self.leave_to_device());
                    }
                    return Some(core.free_held(ptr, stream, number));
                }
                Ok(None) => {}
                Err(error) => return Some(Err(error)),
            }
        }
        let freed = core.free(ptr, stream);
        if let Member::Graph(graph) = &member
            && freed.is_ok()
            && !graph.is_open()
        {
            self.reap(false);
        }
        Some(freed)
    }

    fn while_capturing(
        &self,
        stream: StreamHandle,
        call: &dyn Fn(u64) -> Result<()>,
    ) -> Option<Result<()>> {
        let mut captures = lock(&self.captures);
        let (of, number) = captures.find(self.device(), stream).ok().flatten()?;
        let _calls = lock(&of.calls);
        drop(captures);
        Some(call(number))
    }

    fn make_room(&self, wait: bool) -> bool {
        self.has_others() && self.reap(wait)
    }
}

impl StreamWatcher for Heaps {
    fn stream_ends(&self, stream: StreamHandle) {
        if stream.known_to(self.device().driver().realm()).is_none() {
            return;
        }
        // Without it, too: the stream ends all the same, and another may come to its place.
        let _context = self.device().enter();
        let mut captures = lock(&self.captures);
        for (graph, participant) in captures.stream_ends(stream) {
            self.end_participant(&mut captures, &graph, participant);
        }
        self.set_open(captures.is_open());
        // The stream goes: what was freed on it by a bare handle, now or in captures that were over before, gets its
        // event now, or never.
        let gone = captures.ending.extract_if(.., |participant| participant.handle == stream);
        gone.for_each(|participant| self.end_held_behind(participant));
        for of in &mut captures.postponed {
            if matches!(of.when, When::Ended(on) if on.raw() == stream.raw()) {
                of.when = When::DevicePassed(self.leave_to_device());
            }
        }
    }

    fn marks(&self, of: Awaited) -> SmallVec<[Mark; 2]> {
        let mut marks = SmallVec::new();
        let point = self.left_to_device.load(Ordering::Relaxed);
        if matches!(of, Awaited::Device(ordinal) if ordinal == self.device().ordinal()) {
            marks.push(Mark { pool: 0, stream: u32::MAX, point, epoch: 0 });
        }
        marks
    }

    fn passed(&self, mark: &Mark) {
        lock(&self.captures).postponed.retain(|of| {
            // On any stream; no other thread makes this one capture.
            let is_left = || {
                let freed = self.main.free(of.ptr, StreamHandle::PER_THREAD);
                matches!(freed, Err(Error::StreamCapturing | Error::Driver { .. }))
            };
            !of.has_passed(mark.point) || is_left()
        });
        for member in self.members() {
            if let Member::Graph(graph) = member {
                graph.device_passed(mark.point);
            }
        }
        self.reap(false);
    }
}

impl Drop for Heaps {
    /// Graphs that were launched may still run, on streams that nobody told of: where one's pool was
    /// never released the host waits for the whole context.
    fn drop(&mut self) {
        let members =
            std::mem::take(self.members.get_mut().unwrap_or_else(PoisonError::into_inner));
        let graphs = members.iter().filter_map(|member| match member {
            Member::Graph(graph) => Some(graph),
            Member::Tagged(_) => None,
        });
        let graphs: Vec<&Arc<Graph>> = graphs.collect();
        let all_quiet = graphs.iter().all(|graph| graph.is_quiet(true).unwrap_or(false));
        if all_quiet {
            return;
        }
        let waited = self.device().enter().and_then(|_context| {
            let _beside = BesideCaptures::enter(self.device().driver())?;
            Ok(wait_at_end(self.device())?)
        });
        // Each of them sees to what is allocated there.
        let is_at_rest =
            |error: &Error| members.iter().all(|of| of.core().is_at_rest_after(error, false));
        if waited.is_err_and(|error| !is_at_rest(&error)) {
            // What may still be in use is left to the driver, which reclaims it with the process.
            members.into_iter().for_each(std::mem::forget);
        }
    }
}
