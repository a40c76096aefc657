//! What is done when a request finds no memory.
//!
//! ```text
//! the heap has nothing    it has moved, made, taken over, and waited for pending frees (policy)
//! the pool's others       give back what nobody uses, and what was freed before (policy); the heap is asked again
//! callbacks, in order     each until it gives up; after each "retry" the heap is asked again
//! wait (policy)           the heap is asked again and again until the time is over
//! the error, with a map
//! ```
//!
//! All of it is done without any lock of the pool.

use std::cell::Cell;
use std::fmt;
use std::ops::ControlFlow;
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, Weak};
use std::thread;
use std::time::{Duration, Instant};

use super::Pool;
use crate::default::Core;
use crate::error::{Error, Result};
use crate::heap::Heap;
use crate::memory_map::MemoryMap;
use crate::out_of_memory::{Recovery, WaitPolicy};

/// Times that callbacks may ask for a retry during one request: one that always does would else keep
/// the caller for ever.
const MOST_RETRIES: u32 = 256;

const SHORTEST_PAUSE: Duration = Duration::from_micros(20);
const LONGEST_PAUSE: Duration = Duration::from_millis(1);

type Callback = dyn Fn(&Pool, &Error) -> Recovery + Send + Sync;

/// A pool's policy and callbacks.
pub(super) struct Shortage {
    policy: WaitPolicy,
    callbacks: Arc<Callbacks>,
}

impl Shortage {
    pub(super) fn new(policy: WaitPolicy) -> Self {
        let (list, process) = (Mutex::default(), std::process::id());
        Self { policy, callbacks: Arc::new(Callbacks { list, process }) }
    }
}

/// Callbacks in the order of their registration, by ascending number.
struct Callbacks {
    list: Mutex<List>,
    /// The process that they are of: in a child of it nothing may take the lock.
    process: u32,
}

#[derive(Default)]
struct List {
    last: u64,
    entries: Vec<(u64, Arc<Callback>)>,
}

impl Callbacks {
    fn lock(&self) -> MutexGuard<'_, List> {
        self.list.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn is_childs(&self) -> bool {
        std::process::id() != self.process
    }

    fn add(&self, callback: Arc<Callback>) -> u64 {
        if self.is_childs() {
            return 0;
        }
        let mut list = self.lock();
        list.last += 1;
        let id = list.last;
        list.entries.push((id, callback));
        id
    }

    /// The callback, for its owner to drop without the lock.
    fn remove(&self, id: u64) -> Option<Arc<Callback>> {
        if self.is_childs() {
            return None;
        }
        let mut list = self.lock();
        let at = list.entries.binary_search_by_key(&id, |(id, _)| *id).ok()?;
        Some(list.entries.remove(at).1)
    }

    /// The first of these numbers that is registered.
    fn first_in(&self, ids: std::ops::RangeInclusive<u64>) -> Option<(u64, Arc<Callback>)> {
        let list = self.lock();
        let at = list.entries.partition_point(|(id, _)| id < ids.start());
        list.entries.get(at).filter(|(id, _)| ids.contains(id)).cloned()
    }
}

/// A registration of [`Pool::on_out_of_memory`]: dropping it removes the callback. From then on it is
/// not called any more; a call that another thread is in goes on to its end.
#[must_use = "dropping it removes the callback"]
pub struct OutOfMemoryCallback {
    callbacks: Weak<Callbacks>,
    id: u64,
}

impl OutOfMemoryCallback {
    /// Leaves the callback in place for the pool's life.
    pub fn keep(mut self) {
        self.callbacks = Weak::new();
    }
}

impl Drop for OutOfMemoryCallback {
    fn drop(&mut self) {
        let removed = self.callbacks.upgrade().and_then(|callbacks| callbacks.remove(self.id));
        drop(removed);
    }
}

impl fmt::Debug for OutOfMemoryCallback {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("OutOfMemoryCallback").field("id", &self.id).finish_non_exhaustive()
    }
}

thread_local! {
    /// Whether this thread is in a callback, of whatever pool.
    static IN_CALLBACK: Cell<bool> = const { Cell::new(false) };
}

/// The thread's stay in callbacks, which are not entered twice.
struct InCallback;

impl InCallback {
    fn enter() -> Option<Self> {
        // Made only there: dropping one ends the stay.
        if IN_CALLBACK.replace(true) { None } else { Some(Self) }
    }
}

impl Drop for InCallback {
    fn drop(&mut self) {
        IN_CALLBACK.set(false);
    }
}

impl Pool {
    /// Registers a callback for requests that find no memory: it may make room (free allocations of
    /// this pool or another, [trim](Self::trim_to) another pool of the device, give up a cache) and
    /// answer that the request is to be [tried again](Recovery::Retry).
    ///
    /// It runs in the thread that asked for memory, without any lock of the pool, and gets the pool and
    /// the error so far (without a [map](Error::map)). Callbacks run in the order of their
    /// registration. One that answers `Retry` is asked again if that fails, 256 times at most in one
    /// request; when it gives up, the next one is asked. While a thread is in a callback its own
    /// requests, on any pool, call none. What a callback allocates elsewhere, and panics, are its own
    /// affair. It is not asked about a request that is longer than the limit that the pool was made with; about one
    /// that is longer than a limit [set later](Self::limit_to) it is, since it may raise that.
    ///
    /// A callback that owns a handle of this pool keeps the pool for ever: it gets one as its argument.
    ///
    /// ```
    /// # fn main() -> Result<(), Box<dyn std::error::Error>> {
    /// # let sim = cuda_sim::Simulator::builder().build()?;
    /// # let driver = vpmm::Driver::new(sim.driver())?;
    /// # let device = driver.device(0)?;
    /// use std::sync::{Arc, Mutex};
    /// use vpmm::{Pool, PoolConfig, Recovery};
    ///
    /// let mut config = PoolConfig::default();
    /// config.limit_bytes = Some(64 << 20);
    /// let pool = Pool::new(&device, &config)?;
    /// let stream = Arc::new(device.stream()?);
    /// let cached = Arc::new(Mutex::new(vec![pool.malloc(60 << 20, &*stream)?]));
    ///
    /// let callback = pool.on_out_of_memory({
    ///     let (cached, stream) = (Arc::clone(&cached), Arc::clone(&stream));
    ///     move |pool, _error| match cached.lock().unwrap().pop() {
    ///         Some(ptr) if pool.free(ptr, &*stream).is_ok() => Recovery::Retry,
    ///         _ => Recovery::GiveUp,
    ///     }
    /// });
    /// let ptr = pool.malloc(50 << 20, &*stream)?;
    /// assert!(cached.lock().unwrap().is_empty());
    /// drop(callback);
    /// # pool.free(ptr, &*stream)?;
    /// # Ok(())
    /// # }
    /// ```
    pub fn on_out_of_memory(
        &self,
        callback: impl Fn(&Self, &Error) -> Recovery + Send + Sync + 'static,
    ) -> OutOfMemoryCallback {
        let callbacks = &self.family.shortage.callbacks;
        let id = callbacks.add(Arc::new(callback));
        OutOfMemoryCallback { callbacks: Arc::downgrade(callbacks), id }
    }

    /// Where memory ran out in a heap, the main one where none is named, does what may give some, and tries again in
    /// between.
    pub(super) fn recover<T>(
        &self,
        core: Option<&Core>,
        error: Error,
        mut attempt: impl FnMut() -> Result<T>,
    ) -> Result<T> {
        if !error.is_out_of_memory() {
            return Err(error);
        }
        let mut attempt = || match attempt() {
            Err(error) if error.is_out_of_memory() => {
                ControlFlow::Continue(self.of_all_heaps(error))
            }
            result => ControlFlow::Break(result),
        };
        match self.make_room(self.of_all_heaps(error), &mut attempt) {
            ControlFlow::Break(result) => result,
            ControlFlow::Continue(error) => Err(self.with_map(core, error)),
        }
    }

    /// A heap says what it has itself; the limit is of all together.
    fn of_all_heaps(&self, mut error: Error) -> Error {
        if let Error::OutOfMemory { free_bytes, mapped_bytes, live_bytes, .. } = &mut error
            && self.family.heaps.has_others()
        {
            let stats = self.stats();
            *free_bytes = stats.free_bytes() + stats.cached_bytes;
            *mapped_bytes = stats.mapped_bytes + stats.small_mapped_bytes;
            *live_bytes = stats.live_bytes + stats.small_live_bytes;
        }
        error
    }

    fn make_room<T>(
        &self,
        error: Error,
        attempt: &mut impl FnMut() -> ControlFlow<Result<T>, Error>,
    ) -> ControlFlow<Result<T>, Error> {
        // A limit that was set later is a callback's to raise.
        if error.is_hopeless() && !self.family.heaps.may_hold(&error) {
            return ControlFlow::Continue(error);
        }
        let error = self.after_pending(error, attempt)?;
        let error = self.ask_callbacks(error, attempt)?;
        self.wait(error, attempt)
    }

    /// Tries again after a wait for what was freed before, where the policy is to and the heap has not
    /// waited by itself.
    fn after_pending<T>(
        &self,
        error: Error,
        attempt: &mut impl FnMut() -> ControlFlow<Result<T>, Error>,
    ) -> ControlFlow<Result<T>, Error> {
        if self.family.shortage.policy != WaitPolicy::WaitForPending
            || self.family.heaps.is_hopeless(&error)
        {
            return ControlFlow::Continue(error);
        }
        let bytes = match error {
            Error::OutOfMemory { requested_bytes, .. } => requested_bytes,
            _ => u64::MAX,
        };
        match self.heap().wait_for_pending(bytes) {
            Ok(true) => attempt(),
            Ok(false) => ControlFlow::Continue(error),
            Err(error) => ControlFlow::Break(Err(error)),
        }
    }

    fn ask_callbacks<T>(
        &self,
        mut error: Error,
        attempt: &mut impl FnMut() -> ControlFlow<Result<T>, Error>,
    ) -> ControlFlow<Result<T>, Error> {
        let callbacks = &self.family.shortage.callbacks;
        // Those that callbacks register are for the next request.
        let last = callbacks.lock().last;
        let (mut next, mut retries) = (0, 0);
        while retries < MOST_RETRIES
            && let Some((id, callback)) = callbacks.first_in(next..=last)
        {
            let answer = {
                let Some(_in_callback) = InCallback::enter() else { break };
                callback(self, &error)
            };
            if answer == Recovery::Retry {
                retries += 1;
                error = self.after_pending(attempt()?, attempt)?;
                next = id; // the same again, if it is still there
            } else {
                next = id + 1;
            }
        }
        ControlFlow::Continue(error)
    }

    fn wait<T>(
        &self,
        mut error: Error,
        attempt: &mut impl FnMut() -> ControlFlow<Result<T>, Error>,
    ) -> ControlFlow<Result<T>, Error> {
        let WaitPolicy::WaitUpTo(most) = self.family.shortage.policy else {
            return ControlFlow::Continue(error);
        };
        if self.family.heaps.is_hopeless(&error) {
            return ControlFlow::Continue(error);
        }
        // A time that no clock can show is for ever.
        let end = Instant::now().checked_add(most);
        let mut pause = SHORTEST_PAUSE;
        loop {
            let left = end.map_or(pause, |end| end.saturating_duration_since(Instant::now()));
            if left.is_zero() {
                return ControlFlow::Continue(error);
            }
            thread::sleep(pause.min(left));
            error = attempt()?;
            pause = (pause * 2).min(LONGEST_PAUSE);
        }
    }

    /// The error as it is given up with: it says what stands where in the heap that was asked.
    fn with_map(&self, core: Option<&Core>, mut error: Error) -> Error {
        let heap = core.map_or_else(|| self.heap(), |core| core as &dyn Heap);
        if let Error::OutOfMemory { requested_bytes, limit_bytes, map, .. } = &mut error {
            *map = Some(Arc::new(MemoryMap {
                requested_bytes: *requested_bytes,
                limit_bytes: *limit_bytes,
                stats: self.stats(),
                layout: heap.layout(),
                largest_free: heap.largest_free(),
            }));
        }
        error
    }
}
