//! When enqueued work runs.
//!
//! No thread drives the streams: work advances inside driver calls (and the test's `advance`
//! calls) under the simulator's lock, so that one seed and one sequence of calls give one run.
//! Only host functions leave the lock, each on a thread of its own, as a driver's do.

use std::ops::Range;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::{Arc, PoisonError};
use std::time::{Duration, Instant};

use cuda_sys::types::CUresult;
use rustc_hash::FxHashSet;

use crate::builder::Schedule;
use crate::call::{Call, InsideWork};
use crate::context::ContextKey;
use crate::memory::DeviceMemory;
use crate::race::{Access, AccessKind, Clock, PhysicalId, StreamKey};
use crate::stream::{Item, Kernel, Kind, Point, Recorded, Task, Work};

/// How long work that may be released from outside is left before it is looked at again.
const LOOK_AGAIN: Duration = Duration::from_millis(1);
/// How long an eager enqueue gives a host function to end before it goes on without it.
const HOST_FUNCTION_GRACE: Duration = Duration::from_millis(20);

/// What became of a stream's next item.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum Step {
    Ran,
    /// It waits for something, or is running.
    Blocked,
    /// There is none.
    Idle,
}

impl Call<'_> {
    /// Appends work to a stream that is not capturing, and lets the schedule run what it will.
    pub(crate) fn enqueue(
        &mut self,
        stream: StreamKey,
        after: &[Recorded],
        work: Work,
        what: &Arc<str>,
    ) -> Result<Recorded, CUresult> {
        let recorded = self.append(stream, after, work, what)?;
        self.settle();
        Ok(recorded)
    }

    /// As [`Self::enqueue`], running nothing yet.
    pub(crate) fn append(
        &mut self,
        stream: StreamKey,
        after: &[Recorded],
        work: Work,
        what: &Arc<str>,
    ) -> Result<Recorded, CUresult> {
        self.append_for(stream, after, work, what, None)
    }

    /// The same, for a device that may be another than the stream's.
    pub(crate) fn append_for(
        &mut self,
        stream: StreamKey,
        after: &[Recorded],
        work: Work,
        what: &Arc<str>,
        device: Option<usize>,
    ) -> Result<Recorded, CUresult> {
        let gone = CUresult::CUDA_ERROR_INVALID_HANDLE;
        let state = &mut *self.state;
        let entry = state.streams.by_key.get(&stream).ok_or(gone)?;
        let context = state.contexts.by_key.get(&entry.context).ok_or(gone)?;
        let siblings: &[StreamKey] = match entry.kind {
            Kind::Legacy => &context.blocking,
            Kind::PerThread | Kind::Blocking => std::slice::from_ref(&context.legacy),
            Kind::NonBlocking => &[],
        };
        let generation = state.space.addresses.generation();
        let task = Task { work, what: Arc::clone(what), generation, device };
        state.streams.push(stream, siblings, &state.host, after, task).ok_or(gone)
    }

    /// Gives the schedule its turn at the start of a driver call.
    pub(crate) fn before_call(&mut self) {
        if self.schedule != Schedule::Random {
            return;
        }
        let active: Vec<_> = self.streams.active.iter().copied().collect();
        for stream in active {
            // Five streams of eight stand still; the others run up to three items.
            for _ in 0..self.random.below(8).saturating_sub(4) {
                if self.step(stream) != Step::Ran {
                    break;
                }
            }
        }
    }

    /// Gives the schedule its turn after something may have become able to run.
    pub(crate) fn settle(&mut self) {
        if self.schedule == Schedule::Eager {
            self.run_ready();
        }
    }

    /// Runs items until none can run; how many ran.
    pub(crate) fn run_ready(&mut self) -> usize {
        let mut ran = 0;
        loop {
            let before = ran;
            let active: Vec<_> = self.streams.active.iter().copied().collect();
            for stream in active {
                while self.step(stream) == Step::Ran {
                    ran += 1;
                }
            }
            if ran == before {
                return ran;
            }
        }
    }

    /// Runs the next item of a stream if nothing holds it back.
    pub(crate) fn advance(&mut self, stream: StreamKey) -> bool {
        self.step(stream) == Step::Ran
    }

    fn step(&mut self, key: StreamKey) -> Step {
        let state = &mut *self.state;
        let Some(stream) = state.streams.by_key.get(&key) else { return Step::Idle };
        if stream.running {
            return Step::Blocked;
        }
        let Some(head) = stream.queue.front() else { return Step::Idle };
        if !head.after.iter().all(|&point| state.streams.is_done(point)) {
            return Step::Blocked;
        }
        let context = stream.context;
        let health = self.healthy(context);
        let dead = health.is_err();
        let Some(stream) = self.streams.by_key.get_mut(&key) else { return Step::Idle };
        let Some(item) = stream.queue.pop_front() else { return Step::Idle };
        let seq = item.seq;
        match &item.task.work {
            // They are called whatever has failed.
            Work::Callback(function) => {
                let (function, status) = (Arc::clone(function), health.err());
                stream.running = true;
                let status = status.unwrap_or(CUresult::CUDA_SUCCESS);
                return self.start_host_function(key, seq, Arc::new(move || function(status)));
            }
            // On a context with an error nothing else runs any more; whoever waits learns of it.
            _ if dead => {}
            Work::Order => {}
            Work::Record { event, record } => {
                let now = self.modelled_us;
                self.events.stamp(*event, *record, now);
            }
            Work::Free { address } => {
                if let Some(bytes) = self.bytes_of_allocation(*address) {
                    self.count_as_written(key, &item, bytes, true);
                }
                self.free_in_order(*address);
            }
            Work::Take { physical, range } => {
                let bytes = (*physical, range.clone());
                self.count_as_written(key, &item, bytes, false);
            }
            Work::Return { physical, range } => {
                let bytes = (*physical, range.clone());
                self.count_as_written(key, &item, bytes, true);
            }
            Work::Host(function) => {
                let function = Arc::clone(function);
                stream.running = true;
                return self.start_host_function(key, seq, function);
            }
            Work::Kernel(kernel) => {
                let kernel = Arc::clone(kernel);
                match self.execute(key, &item, &kernel) {
                    Err(CUresult::CUDA_ERROR_NOT_READY) => {
                        if let Some(stream) = self.streams.by_key.get_mut(&key) {
                            stream.queue.push_front(item);
                        }
                        return Step::Blocked;
                    }
                    Err(code) => self.fail_context(context, code, &item),
                    Ok(()) => {}
                }
            }
        }
        self.streams.complete(key, seq);
        self.shared.changed.notify_all();
        Step::Ran
    }

    /// Runs device work under the lock.
    fn execute(&mut self, key: StreamKey, item: &Item, kernel: &Kernel) -> Result<(), CUresult> {
        let state = &mut *self.state;
        let of_stream = state.streams.by_key.get(&key).map_or(0, |stream| stream.device);
        let device = item.task.device.unwrap_or(of_stream);
        let mut memory = DeviceMemory {
            space: &mut state.space,
            findings: &mut state.findings,
            device,
            stream: key,
            tick: item.seq,
            clock: &item.clock,
            what: &item.task.what,
            generation: item.task.generation,
        };
        let _inside = InsideWork::enter(self.shared.slot);
        let mut kernel = kernel.lock().unwrap_or_else(PoisonError::into_inner);
        catch_unwind(AssertUnwindSafe(|| (*kernel)(&mut memory)))
            .unwrap_or(Err(CUresult::CUDA_ERROR_ASSERT))
    }

    /// No use of the bytes may be beside their allocation or their free, nor before the one or after the other.
    fn count_as_written(
        &mut self,
        stream: StreamKey,
        item: &Item,
        (physical, range): (PhysicalId, Range<u64>),
        goes: bool,
    ) {
        let state = &mut *self.state;
        let Some(detector) = &mut state.space.detector else { return };
        let (kind, what) = (AccessKind::Write, &*item.task.what);
        let access = Access { physical, range, kind, stream, clock: &item.clock, what };
        let races = if goes { detector.give_back(access) } else { detector.access(access) };
        state.findings.races(races);
    }

    /// A kernel failed: its context is of no use from now on.
    fn fail_context(&mut self, context: ContextKey, code: CUresult, item: &Item) {
        if code != CUresult::CUDA_ERROR_ILLEGAL_ADDRESS {
            self.findings.misuse(format!("`{}` failed with error {}", item.task.what, code.0));
        }
        if let Some(context) = self.contexts.by_key.get_mut(&context) {
            context.sticky.get_or_insert(code);
        }
    }

    /// Runs a host function on a thread of its own, where driver calls are not permitted.
    fn start_host_function(
        &mut self,
        stream: StreamKey,
        seq: u64,
        function: Arc<dyn Fn() + Send + Sync>,
    ) -> Step {
        let Some(shared) = self.shared.me.upgrade() else { return Step::Blocked };
        let body = move || {
            {
                let _inside = InsideWork::enter(shared.slot);
                // A host function that unwinds would end a real program.
                if catch_unwind(AssertUnwindSafe(|| function())).is_err() {
                    shared.state.lock().findings.misuse("a host function panicked".to_owned());
                }
            }
            let mut call = shared.call("cuLaunchHostFunc");
            call.streams.complete(stream, seq);
            shared.changed.notify_all();
            call.settle();
        };
        if std::thread::Builder::new().name("cuda-sim host function".into()).spawn(body).is_err() {
            self.findings.misuse("no thread could be made for a host function".to_owned());
            self.streams.complete(stream, seq);
            return Step::Ran;
        }
        let point = Point { stream, seq };
        let deadline = Instant::now() + HOST_FUNCTION_GRACE;
        while !self.streams.is_done(point) {
            if self.shared.changed.wait_until(&mut self.state, deadline).timed_out() {
                return Step::Blocked;
            }
        }
        Step::Ran
    }

    /// One step of the work that a point needs; false if none can be taken now.
    fn pull(&mut self, target: Point) -> bool {
        let mut seen = FxHashSet::default();
        let mut wanted = vec![target.stream];
        while let Some(key) = wanted.pop() {
            if !seen.insert(key) {
                continue;
            }
            if self.step(key) == Step::Ran {
                return true;
            }
            let head = self.streams.by_key.get(&key).and_then(|stream| stream.queue.front());
            for point in head.into_iter().flat_map(|item| &item.after) {
                if !self.streams.is_done(*point) {
                    wanted.push(point.stream);
                }
            }
        }
        false
    }

    /// Runs what a point needs until it is done. If it needs something from outside (another
    /// thread that releases a spin or writes a value), waits for that, but not for ever.
    ///
    /// # Errors
    /// `CUDA_ERROR_LAUNCH_TIMEOUT` if nothing came; that is reported as misuse.
    pub(crate) fn wait(&mut self, target: Point) -> Result<(), CUresult> {
        let mut stuck_since = None;
        while !self.streams.is_done(target) {
            if self.pull(target) {
                stuck_since = None;
                continue;
            }
            let now = Instant::now();
            match stuck_since {
                None => stuck_since = Some(now),
                // What blocks the target may wait for work that it has no recorded edge to.
                Some(since) if self.run_ready() == 0 && now - since >= self.deadlock_after => {
                    self.misuse("deadlock: the work that is waited for cannot run");
                    return Err(CUresult::CUDA_ERROR_LAUNCH_TIMEOUT);
                }
                Some(_) => {
                    self.shared.changed.wait_for(&mut self.state, LOOK_AGAIN);
                }
            }
        }
        Ok(())
    }

    /// Waits for a point and takes note that the host has seen it complete.
    pub(crate) fn wait_and_observe(&mut self, recorded: &Recorded) -> Result<(), CUresult> {
        self.wait(recorded.point)?;
        self.observe(&recorded.clock);
        Ok(())
    }

    /// Whether points are all done, asked by a poller; under [`Schedule::Late`] asking often enough
    /// makes them so. The host learns of them together or not at all.
    pub(crate) fn poll(&mut self, ends: &[Recorded]) -> bool {
        self.settle();
        let all_done = |call: &Self| ends.iter().all(|end| call.streams.is_done(end.point));
        if !all_done(self)
            && let Schedule::Late { patience } = self.schedule
        {
            self.patience_used += 1;
            if self.patience_used > patience {
                self.patience_used = 0;
                for end in ends {
                    while !self.streams.is_done(end.point) && self.pull(end.point) {}
                }
            }
        }
        let done = all_done(self);
        if done {
            ends.iter().for_each(|end| self.observe(&end.clock));
        }
        done
    }

    /// The host has seen everything before a clock complete.
    pub(crate) fn observe(&mut self, clock: &Clock) {
        if !self.host.covers(clock) {
            self.host.join(clock);
        }
    }

    /// Waits for everything enqueued so far in a context.
    pub(crate) fn wait_context(&mut self, context: ContextKey) -> Result<(), CUresult> {
        let of_context = |stream: &&crate::stream::Stream| stream.context == context;
        let ends: Vec<_> =
            self.streams.by_key.values().filter(of_context).map(|stream| stream.end()).collect();
        self.wait_all(ends)?;
        if let Some(departed) = self.streams.departed_from_context(context) {
            self.observe(&departed);
        }
        Ok(())
    }

    /// Waits for everything enqueued so far on a device.
    pub(crate) fn wait_device(&mut self, device: usize) -> Result<(), CUresult> {
        let on_device = |stream: &&crate::stream::Stream| stream.device == device;
        let ends: Vec<_> =
            self.streams.by_key.values().filter(on_device).map(|stream| stream.end()).collect();
        self.wait_all(ends)?;
        for departed in self.streams.departed_from_device(device) {
            self.observe(&departed);
        }
        Ok(())
    }

    fn wait_all(&mut self, mut ends: Vec<Recorded>) -> Result<(), CUresult> {
        ends.sort_by_key(|end| end.point.stream);
        ends.iter().try_for_each(|end| self.wait_and_observe(end))
    }
}
