//! What happens, in order, when the front has no block for a request.
//!
//! ```text
//! best fit over the stream's own and nobody's memory
//! this thread's front emptied, best fit again, then runs of neighbours
//! what other threads have in front of the same stream
//! where the pool is told to be patient: a block of what the stream that has most freed, if that is ready
//! where others hold much: their epochs closed and asked about, their fronts emptied
//! what is freed and waits for this stream alone
//! where the pool is told to be patient, for a large block: one that another stream freed, with a wait on
//!     the GPU; else a short look at whether what they freed becomes ready
//! what two addresses have of one extent together again
//! grow: new memory, or free extents moved where that is due; small blocks that no addresses of their own are
//!     left for among large ones
//! ── the limit is reached, or the device has no more ──
//! free extents moved, whatever it costs
//! small blocks in the large part and the other way round
//! another stream's memory with a wait on the GPU
//! a wait on the host for everything that was freed, where the pool's policy is to, and addresses that
//!     were waited for unmapped: for the streams first, then for graphs that were released, for the device
//!     where they are not enough
//! out of memory, with a map
//! ```

use std::iter;
use std::time::Duration;

use super::class::{LARGE_STEP, UNIT_BYTES};
use super::front::shard::Shard;
use super::growth::pace::{AT_LEISURE, EMPTIED};
use super::space::Part;
use super::space::book::Recording;
use super::space::free_set::FreeSet;
use super::{Core, lock};
use crate::capture::BesideCaptures;
use crate::default::growth::plan::Reach;
use crate::device::StreamHandle;
use crate::error::{Error, Result};
use crate::lock::{OrderedGuard, Token};
use crate::ordering::PendingPolicy;
use crate::out_of_memory::WaitPolicy;

/// Mappings of zombies that are unmapped on behalf of one request, and how long at most. Where addresses run
/// short so many.
const REAPED: (u64, Duration) = (32, Duration::from_micros(500));
const REAPED_IN_CROWD: (u64, Duration) = (128, Duration::from_millis(2));

/// What other streams freed is called in before the pool grows when it comes to this fraction of
/// the pool, and to 2 MiB. Asking costs two or three driver calls for each stream, growing twenty
/// times as much.
const FREED_OF_POOL: u64 = 256;
pub(super) const FREED_UNITS: u64 = (2 << 20) / super::class::UNIT_BYTES;

/// Both double whenever that has happened this many times more for each growth: streams that take
/// from each other in turn get some slack, and ask more rarely.
const ASKED_EACH: u64 = 4;

/// At most they come to this. Only from here on, or at leisure, fronts are emptied too:
/// their threads would soon take from each other what each needs again, and every thread is stopped for it.
const ALL_OF_POOL: u64 = 16;
const ALL_UNITS: u64 = (64 << 20) / super::class::UNIT_BYTES;

/// And to so many units while a pool has been asked about more often than once in so long ever since it
/// was made: asking takes some half a microsecond for each stream, and would be a good part of all that
/// such a program waits for.
const SLACK_UNITS: u64 = (256 << 20) / super::class::UNIT_BYTES;
const OFTEN: Duration = Duration::from_micros(64);

/// While the small part has less than this fraction of the pool it grows before what a front has of
/// small blocks is taken out, and without a limit by new memory rather than by what would move there.
const SMALL_OF_POOL: u64 = 1024;

/// Where the pool may grow by less than this fraction of itself all memory is to come together.
const NEAR: u64 = 4;

/// Whether so many times in so long is often.
fn is_often(times: u64, passed: Duration) -> bool {
    OFTEN.checked_mul(u32::try_from(times).unwrap_or(u32::MAX)).is_none_or(|long| long > passed)
}

/// A request that the front did not serve.
#[derive(Clone, Copy)]
pub(super) struct Request {
    /// The stream's index among the books.
    pub(super) stream: u32,
    /// The stream's handle, where its book does not have it.
    pub(super) handle: Option<StreamHandle>,
    pub(super) units: u32,
}

impl Core {
    /// The handle of a request's stream.
    pub(super) fn handle_of(&self, request: Request) -> Result<StreamHandle> {
        request.handle.map_or_else(|| self.booked_handle(request.stream), Ok)
    }

    /// The handle of a stream that calls are routed for.
    pub(super) fn booked_handle(&self, stream: u32) -> Result<StreamHandle> {
        match self.space.lock().books[stream as usize].recording {
            Recording::Lazy(handle) => Ok(handle),
            // Somebody ended the stream since the call began.
            _ => Err(Error::StreamEnded),
        }
    }

    /// Serves a request from behind the front.
    pub(super) fn climb(&self, request: Request) -> Result<u32> {
        match self.place_awake(request) {
            Some(start) => Ok(start),
            None => self.climb_on(request),
        }
    }

    /// As [`place`](Self::place), for who does not hold `growing`: the heap may have fallen asleep since the request
    /// began. What is placed before it looks at what is in use, under the same lock, is seen by it.
    pub(super) fn place_awake(&self, request: Request) -> Option<u32> {
        self.place_unless(request, || self.is_asleep())
    }

    fn place(&self, request: Request) -> Option<u32> {
        self.place_unless(request, || false)
    }

    fn place_unless(&self, request: Request, refuses: impl FnOnce() -> bool) -> Option<u32> {
        let Request { stream, units, .. } = request;
        let mut space = self.space.lock();
        if refuses() {
            return None;
        }
        let placed = space.place(&self.tags, stream, units, Part::of_size(units));
        space.note_peak();
        placed
    }

    fn place_in_run(&self, request: Request) -> Option<u32> {
        let Request { stream, units, .. } = request;
        self.space.lock().place_in_run(&self.tags, stream, units, Part::of_size(units))
    }

    #[cold]
    pub(super) fn climb_on(&self, request: Request) -> Result<u32> {
        if let Some(start) = self.place_from_own_front(request) {
            return Ok(start);
        }
        // What a question about other streams fails at, here and below, is not the request's, which may be served
        // without them: the last steps ask again, and tell.
        if self.space.lock().has_ties(request.stream)
            && let Ok(Some(start)) = self.place_tied(request)
        {
            return Ok(start);
        }
        let _context = self.device.enter()?;
        // From here on one at a time: what one maps another may use.
        let _growing = lock(&self.growing);
        self.check_awake()?;
        let look = || self.place(request).or_else(|| self.place_in_run(request));
        if let Some(start) = look() {
            return Ok(start);
        }
        if Part::of_size(request.units) == Part::Large
            && self.flush_beside(request.stream)
            && let Some(start) = look()
        {
            return Ok(start);
        }
        let mut room = self.room()?;
        if room * self.granule_bytes < u64::from(request.units) * UNIT_BYTES
            && self.aside.make_room(false)
        {
            room = self.room()?;
        }
        {
            let mut space = self.space.lock();
            space.gathers = room < space.memory.mapped() / NEAR;
        }
        if let Ok(Some(start)) = self.take_ready(request) {
            return Ok(start);
        }
        if let Ok(Some(start)) = self.call_in(request, room) {
            return Ok(start);
        }
        if let Ok(true) = self.take_deferred(request)
            && let Some(start) = look()
        {
            return Ok(start);
        }
        // Not for small blocks: what they save is a granule, once.
        if Part::of_size(request.units) == Part::Large {
            if let Some(start) = self.borrow(request) {
                return Ok(start);
            }
            if let Ok(Some(start)) = self.wait_for_others(request, look) {
                return Ok(start);
            }
        }
        if let Some(start) = self.place_rejoined(request) {
            return Ok(start);
        }
        if self.tidy()
            && let Some(start) = look()
        {
            return Ok(start);
        }
        let waits = self.config.reuse.internal_dependencies;
        let mut failed = None;
        if waits && self.config.pending_policy == PendingPolicy::WaitFirst {
            // What is in a front has no epoch to wait for.
            self.flush_fronts(|_| true);
            match self.take_with_wait(request) {
                Ok(Some(start)) => return Ok(start),
                Ok(None) => {}
                Err(error) => failed = Some(error),
            }
        }
        if let Some(start) = self.grow_within(request, &mut room, Reach::Ahead)? {
            return Ok(start);
        }
        if let Some(start) = self.grow_elsewhere(request, &mut room, Reach::Ahead)? {
            return Ok(start);
        }
        self.make_do(request, room, failed)
    }

    /// Serves a request from what the calling thread has in front of the stream. Without a limit
    /// small sizes and large ones leave each other's blocks there, since they lie apart; and of the
    /// small ones all come out only if a single longer one is not enough, and more memory is not
    /// too little to be worth it.
    fn place_from_own_front(&self, request: Request) -> Option<u32> {
        let Request { stream, units, .. } = request;
        let sizes = self.config.limit_bytes.is_none().then_some(Part::of_size(units));
        let longer = sizes == Some(Part::Small) && self.take_back_longer(stream, units);
        if longer && let Some(start) = self.place_awake(request) {
            return Some(start);
        }
        if sizes == Some(Part::Small) && self.space.lock().has_few_small() {
            return None;
        }
        if self.flush_own(stream, sizes) { self.place_awake(request) } else { None }
    }

    /// Takes a block out of the calling thread's front that is longer than a small request; whether
    /// there was one.
    fn take_back_longer(&self, stream: u32, units: u32) -> bool {
        let Some(token) = Token::current() else { return false };
        let Some(mut front) = self.shard(stream).enter(token) else { return false };
        let mut space = self.space.lock();
        space.note_front(front.cached());
        let Some((start, units)) = front.take_longer(units) else { return false };
        space.take_back(&self.tags, stream, start, units);
        space.note_front(front.cached());
        true
    }

    /// Makes memory that other streams and other threads hold available, where it is enough to be
    /// asked for, and looks again.
    fn call_in(&self, request: Request, room: u64) -> Result<Option<u32>> {
        let look = || self.place(request).or_else(|| self.place_in_run(request));
        // A failure about one stream is none of a request's that another's memory serves.
        let served = |asked: Result<bool>| match look() {
            Some(start) => Ok(Some(start)),
            None => asked.map(|_| None),
        };
        // Nobody would ask for that again on its own stream.
        if !self.config.reuse.opportunistic {
            let ended = self.poll_ended(request.units);
            if !matches!(ended, Ok(false))
                && let Some(start) = served(ended)?
            {
                return Ok(Some(start));
            }
        }
        let (freed, fronts) = self.is_worth_calling_in(request, room);
        if freed || fronts {
            let asked = self.poll(Some(request.stream), false);
            if !matches!(asked, Ok(false))
                && let Some(start) = served(asked)?
            {
                return Ok(Some(start));
            }
        }
        if !fronts || !self.flush_fronts(|_| true) {
            return Ok(None);
        }
        served(self.poll(Some(request.stream), false))
    }

    /// Whether it is worth asking for what other streams freed; and for that and what is in fronts.
    fn is_worth_calling_in(&self, request: Request, room: u64) -> (bool, bool) {
        let in_fronts = self.units_in_fronts();
        let now = self.made.elapsed();
        let mut space = self.space.lock();
        let at_leisure = space.pace.saved(now) >= AT_LEISURE;
        let granule_units = u64::from(space.memory.granule_units());
        let pool = space.memory.mapped() * granule_units;
        let short = room * granule_units < u64::from(request.units);
        let enough_for_it = |held: u64| held >= u64::from(request.units);
        let counters = &space.counters;
        let doublings = counters.called_in / ((counters.growths + 1) * ASKED_EACH);
        let slack = if space.pace.has_rate() && is_often(counters.called_in, now) {
            SLACK_UNITS
        } else {
            ALL_UNITS
        };
        let much = (pool / ALL_OF_POOL).max(slack);
        let some = (pool / FREED_OF_POOL).max(FREED_UNITS) << doublings.min(16);
        let freed = space.want_from_others(request.stream);
        // Where it is less than the request: what is free may move to where that grows.
        let from_streams =
            space.opportunistic && (freed >= some.min(much) || (short && enough_for_it(freed)));
        let enough = if at_leisure { some.min(much) } else { much };
        let all = freed + in_fronts;
        let from_fronts =
            space.may_empty_fronts(request.units) && enough_for_it(all) && (short || all >= enough);
        space.pace.spend(EMPTIED * u64::from(from_fronts));
        space.counters.called_in += u64::from(from_streams || from_fronts);
        (from_streams, from_fronts)
    }

    /// The last steps, at the limit, or where the device is full. `failed`: what none of them tries again.
    fn make_do(&self, request: Request, room: u64, failed: Option<Error>) -> Result<u32> {
        self.space.lock().gathers = true;
        let flushed = self.flush_fronts(|_| true);
        // What fails for one stream is told at the end, if nothing else has served the request.
        let deferred = self.poll_deferred(true);
        let polled = self.poll(Some(request.stream), true);
        let gained = !matches!((&deferred, &polled), (Ok(false), Ok(false)));
        let mut failed = failed.or(deferred.err()).or(polled.err());
        let rejoined = self.space.lock().rejoin(&self.tags, true);
        if (gained || flushed || rejoined)
            && let Some(start) = self.retry(request, room, Reach::Needed)?
        {
            return Ok(start);
        }
        if let Some(start) = self.place_elsewhere(request) {
            return Ok(start);
        }
        if self.config.reuse.internal_dependencies
            && self.config.pending_policy == PendingPolicy::GrowFirst
        {
            match self.take_with_wait(request) {
                Ok(Some(start)) => return Ok(start),
                Ok(None) => {}
                Err(error) => failed = failed.or(Some(error)),
            }
        }
        // What the pool can never have is not waited for.
        let waits = self.config.out_of_memory == WaitPolicy::WaitForPending
            && u64::from(request.units) * UNIT_BYTES <= self.most_bytes();
        self.aside.make_room(false);
        self.retry_orphans();
        // The device may have more by now, whoever gave it back.
        self.full.forget();
        let mut waited = if waits { self.wait_for_streams() } else { Ok(()) };
        // Asked before the try, since others may wait meanwhile.
        let has_lost = waits && self.has_lost();
        // Whether or not this thread waited: others, and the steps before, may have gained something.
        if let Some(start) = self.retry_whole(request)? {
            return Ok(start);
        }
        // Only now: graphs may run far longer than what was freed here before.
        if waits
            && self.aside.make_room(true)
            && let Some(start) = self.retry_whole(request)?
        {
            return Ok(start);
        }
        if has_lost {
            // Only now: that takes all that the device has been given.
            waited = waited.and(self.wait_for_lost());
            if let Some(start) = self.retry_whole(request)? {
                return Ok(start);
            }
        }
        if waits {
            failed = match waited {
                // What only a wait for the context would free stays, for a capture's sake.
                Err(Error::StreamCapturing) => failed,
                waited => waited.err(),
            };
        }
        Err(failed.unwrap_or_else(|| self.out_of_memory(request.units)))
    }

    /// The last of all tries: with extents whole again, addresses that were waited for unmapped, and in either part.
    fn retry_whole(&self, request: Request) -> Result<Option<u32>> {
        let room = self.room()?;
        self.space.lock().rejoin(&self.tags, true);
        // What was waited for may be addresses. There may be thousands, of which a few are enough.
        let mut most = REAPED_IN_CROWD.0;
        loop {
            let waiting = self.zombies();
            self.reap(most, Duration::MAX);
            let retried = self.retry(request, room, Reach::Utmost)?;
            if let Some(start) = retried.or_else(|| self.place_elsewhere(request)) {
                return Ok(Some(start));
            }
            let left = self.zombies();
            if left == 0 || left >= waiting {
                return Ok(None);
            }
            most = most.saturating_mul(2);
        }
    }

    /// Granules of addresses that wait to be unmapped.
    fn zombies(&self) -> u64 {
        self.space.lock().zombie_granules()
    }

    fn retry(&self, request: Request, mut room: u64, reach: Reach) -> Result<Option<u32>> {
        if let Some(start) = self.place(request).or_else(|| self.place_in_run(request)) {
            return Ok(Some(start));
        }
        match self.grow_within(request, &mut room, reach)? {
            Some(start) => Ok(Some(start)),
            None => self.grow_elsewhere(request, &mut room, reach),
        }
    }

    /// Serves a request from extents that are whole again.
    fn place_rejoined(&self, request: Request) -> Option<u32> {
        let rejoined = self.space.lock().rejoin(&self.tags, false);
        if !rejoined {
            return None;
        }
        self.place(request).or_else(|| self.place_in_run(request))
    }

    /// A block in the part that is not the size's own, rather than none.
    fn place_elsewhere(&self, request: Request) -> Option<u32> {
        let Request { stream, units, .. } = request;
        let part = Part::of_size(units).other();
        // Small classes of this many units and more are multiples of it, too.
        let units = units.next_multiple_of(LARGE_STEP);
        let mut space = self.space.lock();
        let found = space.place(&self.tags, stream, units, part);
        let found = found.or_else(|| space.place_in_run(&self.tags, stream, units, part));
        space.note_peak();
        found
    }

    /// A small block among large ones, where more memory may be made and there are no addresses for it in the
    /// small part any more.
    fn grow_elsewhere(
        &self,
        request: Request,
        room: &mut u64,
        reach: Reach,
    ) -> Result<Option<u32>> {
        // Any hole there would have done for a granule.
        if *room == 0 || Part::of_size(request.units) == Part::Large {
            return Ok(None);
        }
        if let Some(start) = self.place_elsewhere(request) {
            return Ok(Some(start));
        }
        let units = request.units.next_multiple_of(LARGE_STEP);
        self.grow_in(Part::Large, Request { units, ..request }, room, reach)
    }

    /// Unmaps some zombies; where addresses run short, closes epochs for that. Whether memory may have become free
    /// meanwhile.
    fn tidy(&self) -> bool {
        if self.zombies() == 0 {
            return false;
        }
        let crowded = self.is_crowded();
        let gained = crowded && !matches!(self.poll(None, true), Ok(false));
        let (most, within) = if crowded { REAPED_IN_CROWD } else { REAPED };
        self.reap(most, within);
        gained
    }

    /// Makes the stream wait, on the GPU, for other streams' freed memory, which is the stream's
    /// own then. Where all that there is would not do it waits for none.
    fn take_with_wait(&self, request: Request) -> Result<Option<u32>> {
        let driver = self.device.driver();
        let room = self.room()?;
        let streams = {
            let space = self.space.lock();
            let room_units = room * u64::from(space.memory.granule_units());
            if space.free_units() + room_units < u64::from(request.units) {
                return Ok(None);
            }
            space.books.len() as u32
        };
        let handle = self.handle_of(request)?;
        let mut failed = Ok(None);
        let others = (0..streams).filter(|other| *other != request.stream);
        for (other, again) in others.flat_map(|other| [(other, false), (other, true)]) {
            // What was freed while the former epoch is pending passes with a later event.
            if again && !self.space.lock().close_again(&self.tags, other) {
                continue;
            }
            let advanced = self.advance(other, false);
            if !matches!(advanced, Ok(false))
                && let Some(start) = self.retry_if_enough(request)?
            {
                return Ok(Some(start));
            }
            if let Err(error) = advanced {
                failed = failed.and(Err(error));
                continue;
            }
            let record = {
                let space = self.space.lock();
                space.record_of(other).filter(|_| space.has_to_hand_over(other))
            };
            let Some(record) = record else { continue };
            if crate::capture::stream_is_capturing(driver, handle)? {
                return Ok(None);
            }
            let in_order = lock(&self.shard(request.stream).eager);
            let waits = BesideCaptures::enter(driver)
                .and_then(|_beside| record.event.hold_back(driver, handle));
            if let Err(failure) = waits {
                failed = failed.and(Err(failure.into()));
                continue;
            }
            let eager = {
                let space = self.space.lock();
                space.books[request.stream as usize].recording == Recording::Eager
            };
            // What the stream is handed counts as freed by it, so that an event is behind it.
            let behind = if eager { Some(self.record_now(handle)?) } else { None };
            let mut space = self.space.lock();
            if space.record_of(other) != Some(record) {
                space.events.extend(behind);
                continue;
            }
            space.counters.device_waits += 1;
            if let Some(event) = behind {
                space.note_record(request.stream, event);
            }
            space.hand_over(&self.tags, other, request.stream);
            drop(space);
            // Frees on the stream need not wait for what comes next, which may be many driver calls.
            drop(in_order);
            if let Some(start) = self.retry_if_enough(request)? {
                return Ok(Some(start));
            }
        }
        failed
    }

    /// As [`retry`](Self::retry) without room, once the stream may have as much as that is.
    fn retry_if_enough(&self, request: Request) -> Result<Option<u32>> {
        let usable = self.space.lock().usable_units(request.stream);
        if usable < u64::from(request.units) {
            Ok(None)
        } else {
            self.retry(request, 0, Reach::Needed)
        }
    }

    /// Empties the calling thread's front of a stream, of one part's sizes or all; whether there was
    /// anything.
    pub(super) fn flush_own(&self, stream: u32, sizes: Option<Part>) -> bool {
        let Some(token) = Token::current() else { return false };
        let shard = self.shard(stream);
        let Some(mut front) = shard.enter(token) else { return false };
        let mut space = self.space.lock();
        space.note_front(front.cached());
        let mut any = false;
        front.spill(sizes, |start, units| {
            any = true;
            space.take_back(&self.tags, stream, start, units);
        });
        space.note_front(front.cached());
        any
    }

    /// Empties what other threads have in front of a stream, where it comes to a granule; whether
    /// there was anything. It is the stream's to use at once, and taking it back costs less than to
    /// make or move memory.
    fn flush_beside(&self, stream: u32) -> bool {
        let granule_units = self.granule_bytes / UNIT_BYTES;
        self.shard(stream).units() >= granule_units && self.flush_stream(stream)
    }

    /// Empties the fronts of some streams, of every thread. A system call, and a wait for those
    /// that are inside, where there is anything.
    pub(super) fn flush_fronts(&self, which: impl Fn(&Shard) -> bool + Clone) -> bool {
        let revoking = lock(&self.revoking);
        let shards = self.shards();
        self.spill_into_space(&revoking, shards.iter().copied().filter(|shard| which(shard)))
    }

    /// The same of one stream, whose price does not go by how many there are.
    pub(super) fn flush_stream(&self, stream: u32) -> bool {
        let revoking = lock(&self.revoking);
        self.spill_into_space(&revoking, iter::once(self.shard(stream)))
    }

    fn spill_into_space<'a>(
        &'a self,
        _revoking: &OrderedGuard<'_, ()>,
        shards: impl Iterator<Item = &'a Shard> + Clone,
    ) -> bool {
        let mut any = false;
        // SAFETY: `revoking` is held, and this thread is inside no front: those are left before
        // the ladder is climbed.
        unsafe {
            let some = shards.filter(|shard| shard.units() > 0);
            Shard::reach(some, self.asymmetry, |shard, front| {
                let mut space = self.space.lock();
                space.note_front(front.cached());
                front.spill(None, |start, units| {
                    any = true;
                    space.take_back(&self.tags, shard.index, start, units);
                });
                space.note_front(front.cached());
            });
        }
        any
    }

    /// Granules that may still be made.
    pub(super) fn room(&self) -> Result<u64> {
        let mapped = self.space.lock().memory.mapped();
        let shared = self.backing.budget().room() / self.granule_bytes;
        let most = self.policy.capacity.min(self.full.most(|| self.made.elapsed()));
        Ok(most.saturating_sub(mapped).min(shared))
    }

    /// Bytes that the pool can have when nothing is in use: the limit as it is, or what the device has.
    pub(super) fn most_bytes(&self) -> u64 {
        let limit = self.backing.budget().limit().unwrap_or(u64::MAX);
        limit.min(self.policy.capacity * self.granule_bytes)
    }

    #[cold]
    pub(super) fn out_of_memory(&self, units: u32) -> Error {
        // With what is in fronts: a request that nothing could serve has left them as they were.
        let stats = self.stats();
        let largest = self.space.lock().largest_free_units();
        let unit = super::class::UNIT_BYTES;
        Error::OutOfMemory {
            requested_bytes: u64::from(units) * unit,
            free_bytes: stats.free_bytes() + stats.cached_bytes,
            largest_free_bytes: u64::from(largest) * unit,
            mapped_bytes: stats.mapped_bytes,
            live_bytes: stats.live_bytes,
            limit_bytes: self.backing.budget().limit(),
            map: None,
        }
    }
}

impl super::space::Space {
    /// Whether more small memory makes no difference to the pool.
    pub(super) fn has_few_small(&self) -> bool {
        self.memory.mapped_small() < self.memory.mapped() / SMALL_OF_POOL
    }

    /// Whether fronts may be emptied for a request while there is room to grow. Not in a pool of
    /// less than two such blocks for each stream: they would take from each other in turn what
    /// each needs again at once.
    fn may_empty_fronts(&self, units: u32) -> bool {
        let pool = self.memory.mapped() * u64::from(self.memory.granule_units());
        pool >= 2 * u64::from(units) * self.books.len() as u64
    }

    /// Notes that a stream lacks memory that others may have; returns the units that they do.
    fn want_from_others(&mut self, stream: u32) -> u64 {
        let others = self.books.iter_mut().enumerate().filter(|(at, _)| *at as u32 != stream);
        others.fold(0, |units, (_, book)| {
            book.wanted = true;
            units + book.units()
        })
    }

    /// What a stream may use at once.
    pub(super) fn usable_units(&self, stream: u32) -> u64 {
        let nobodys: u64 = self.common.iter().map(FreeSet::units).sum();
        nobodys + self.books[stream as usize].units()
    }

    /// What of a stream's its record covers.
    fn covered_parities(&self, stream: u32) -> &'static [usize] {
        let book = &self.books[stream as usize];
        match (book.recording, book.open_parity()) {
            (Recording::Ended, _) => &[0, 1],
            (_, 0) => &[1],
            _ => &[0],
        }
    }

    /// Whether a stream has freed anything that its record covers.
    fn has_to_hand_over(&self, from: u32) -> bool {
        let book = &self.books[from as usize];
        self.covered_parities(from).iter().any(|parity| book.units_of(*parity) > 0)
    }

    /// Makes what one stream freed another's, which waits for it now: as if that one had freed it.
    /// The event stays the first stream's, for whatever of it is elsewhere.
    fn hand_over(&mut self, tags: &super::space::tags::Tags, from: u32, to: u32) {
        let parities = self.covered_parities(from);
        let owner = self.books[to as usize].open_owner(to);
        for parity in parities {
            for part in Part::ALL {
                while let Some(id) = self.books[from as usize].sets[*parity][part as usize]
                    .first()
                    .map(super::space::free_set::Block::id)
                {
                    let (start, units, _) = self.take_whole(tags, id);
                    self.give(tags, start, units, owner);
                }
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn often_is_more_than_once_in_so_long_since_the_pool_was_made() {
        assert!(!is_often(0, Duration::ZERO) && is_often(1, Duration::ZERO));
        assert!(is_often(1001, OFTEN * 1000) && !is_often(1000, OFTEN * 1000));
        assert!(is_often(u64::MAX, Duration::from_secs(3600)));
    }
}
