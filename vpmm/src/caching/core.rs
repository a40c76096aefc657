//! What every handle of an allocator shares, and the way of a request through it.

use std::sync::atomic::{AtomicU64, AtomicUsize, Ordering};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};

use smallvec::{SmallVec, smallvec};

use super::block::Block;
use super::books::{Books, Freed, Noted, Rules, Use};
use super::config::{CachingConfig, check_fraction};
use super::size::round_plain;
use super::waits::{Life, Waits};
use crate::capture::{stream_is_capturing, synchronize_beside_captures};
use crate::device::{Device, StreamHandle};
use crate::driver::{Awaited, Realm, StreamWatcher};
use crate::error::{Error, Result};
use crate::lock::{Alone, SpinLock};
use crate::ordering::Mark;
use crate::resource::{Identity, MemoryResource, check_device};
use crate::units::DevicePtr;

/// What upstream is asked to align segments to, where it can.
const ALIGN: usize = 512;

/// The legacy default stream's number here; the driver's own numbers do not come so far.
pub(super) const LEGACY: u64 = u64::MAX;

/// While events are awaited, each of so many requests asks about them; of so many at last while none has
/// passed. One that lacks memory does so anyway.
pub(super) const ASK_EACH: usize = 8;
pub(super) const ASK_SELDOM: usize = 64;

/// No limit.
const UNLIMITED: u64 = u64::MAX;

/// A place that is not given to another stream while this lives.
struct Admitted<'a> {
    core: &'a Core,
    place: u32,
}

impl<'a> Admitted<'a> {
    /// That of a stream that has one.
    fn known(core: &'a Core, books: &mut Books, stream: u64) -> Option<Self> {
        let place = books.place_of(stream)?;
        Some(Self::pinned(core, books, place))
    }

    fn pinned(core: &'a Core, books: &mut Books, place: u32) -> Self {
        books.places[place as usize].pins += 1;
        Self { core, place }
    }

    /// Its end, for whoever has the books.
    fn leave(self, books: &mut Books) {
        books.places[self.place as usize].pins -= 1;
        std::mem::forget(self);
    }
}

impl Drop for Admitted<'_> {
    fn drop(&mut self) {
        self.core.books.lock().places[self.place as usize].pins -= 1;
    }
}

/// The allocator. Lock order: `reclaiming`, `waits`, `books`; no driver call is made under `books`.
pub(super) struct Core {
    pub(super) device: Device,
    pub(super) upstream: Box<dyn MemoryResource>,
    pub(super) config: CachingConfig,
    pub(super) identity: Identity,
    /// What every address is a multiple of.
    pub(super) align: usize,
    /// The device's memory.
    total_bytes: u64,
    /// The most that may be held, or [`UNLIMITED`].
    limit_bytes: AtomicU64,
    /// Whether sizes are rounded by divisions.
    divides: bool,
    realm: Realm,
    pub(super) books: SpinLock<Books>,
    pub(super) waits: Mutex<Waits>,
    /// A stream that memory was given back on may end again.
    pub(super) stream_returns: Condvar,
    /// How many waits there are that have an event, or want one: looked at without the lock.
    pub(super) outstanding: AtomicUsize,
    /// Requests that came while there were any.
    pub(super) requests: AtomicUsize,
    /// The number of the first of them that is to ask again.
    pub(super) ask_at: AtomicUsize,
    /// One thread at a time gives everything back; what a request gives back to make room is part of it.
    pub(super) reclaiming: Alone,
}

pub(super) fn lock<T>(mutex: &Mutex<T>) -> MutexGuard<'_, T> {
    mutex.lock().unwrap_or_else(PoisonError::into_inner)
}

impl Core {
    pub(super) fn new(
        device: &Device,
        upstream: Box<dyn MemoryResource>,
        config: &CachingConfig,
    ) -> Result<Arc<Self>> {
        config.check()?;
        let driver = device.driver();
        driver.check_process()?;
        check_device(&*upstream, device)?;
        let ages = config.garbage_collection_threshold.is_some();
        let rules = Rules {
            max_split_bytes: config.max_split_size_bytes.unwrap_or(u64::MAX),
            max_non_split_rounding_bytes: config.max_non_split_rounding_bytes,
            ages,
        };
        let core = Arc::new(Self {
            device: device.clone(),
            align: upstream.facts().max_align.min(ALIGN),
            upstream,
            config: config.clone(),
            identity: Identity::unique(),
            total_bytes: device.total_memory()?,
            limit_bytes: AtomicU64::new(UNLIMITED),
            divides: config.roundup_power2_divisions.any(),
            realm: driver.realm(),
            books: SpinLock::new(Books::new(rules)),
            waits: Mutex::new(Waits::default()),
            stream_returns: Condvar::new(),
            outstanding: AtomicUsize::new(0),
            requests: AtomicUsize::new(0),
            ask_at: AtomicUsize::new(0),
            reclaiming: Alone::among(driver.companion()),
        });
        if let Some(fraction) = config.memory_fraction {
            core.set_memory_fraction(fraction)?;
        }
        let watcher: Weak<Self> = Arc::downgrade(&core);
        driver.watch_streams(watcher);
        Ok(core)
    }

    pub(super) fn set_memory_fraction(&self, fraction: f64) -> Result<()> {
        check_fraction(fraction)?;
        let bytes = (fraction * self.total_bytes as f64) as u64;
        self.limit_bytes.store(bytes, Ordering::Relaxed);
        Ok(())
    }

    pub(super) fn limit_bytes(&self) -> Option<u64> {
        let limit = self.limit_bytes.load(Ordering::Relaxed);
        (limit != UNLIMITED).then_some(limit)
    }

    /// What garbage collection keeps below, where it is on.
    pub(super) fn collect_above_bytes(&self) -> Option<u64> {
        let may_hold = self.limit_bytes().unwrap_or(self.total_bytes);
        Some((self.config.garbage_collection_threshold? * may_hold as f64) as u64)
    }

    #[inline]
    fn round(&self, bytes: u64) -> Result<u64> {
        let rounded = if self.divides {
            self.config.roundup_power2_divisions.round(bytes)
        } else {
            round_plain(bytes)
        };
        rounded.ok_or(Error::SizeOverflow { bytes, unit_bytes: super::MIN_BLOCK_SIZE as u64 })
    }

    /// The number of a stream that is known by its handle alone.
    #[inline]
    fn number_of(&self, handle: StreamHandle) -> Option<u64> {
        let known = handle.known_to(self.realm);
        known.or_else(|| (handle == StreamHandle::LEGACY).then_some(LEGACY))
    }

    #[inline]
    pub(super) fn malloc(&self, requested: usize, handle: StreamHandle) -> Result<DevicePtr> {
        self.device.driver().check_process()?;
        if requested == 0 {
            return Err(Error::ZeroSize);
        }
        let requested = requested as u64;
        let bytes = self.round(requested)?;
        if self.outstanding.load(Ordering::Relaxed) != 0 {
            let request = self.requests.fetch_add(1, Ordering::Relaxed);
            // A number comes again after all numbers: the nearer half is what is to come.
            let late = request.wrapping_sub(self.ask_at.load(Ordering::Relaxed));
            if late <= usize::MAX / 2 {
                self.advance_waits(request)?;
            }
        }
        let stream = match self.number_of(handle) {
            Some(stream) => stream,
            None => self.ask_stream(handle)?,
        };
        let (mut known, mut has_open) = (None, true);
        {
            let mut books = self.books.lock();
            if let Some(place) = books.place_of(stream) {
                if let Some((address, tag)) = books.allocate(place, bytes, requested) {
                    books.tallies.hits += 1;
                    return Ok(DevicePtr::tagged(address, tag));
                }
                has_open = books.has_open();
                known = Some(Admitted::pinned(self, &mut books, place));
            }
        }
        let admitted = match known {
            Some(known) => known,
            None => self.admit(stream, handle)?,
        };
        self.malloc_anew(admitted, has_open, handle, (bytes, requested))
    }

    /// A request that nothing cached serves. `has_open`: whether anything freed may wait without an event.
    #[cold]
    #[inline(never)]
    fn malloc_anew(
        &self,
        admitted: Admitted<'_>,
        has_open: bool,
        handle: StreamHandle,
        sizes: (u64, u64),
    ) -> Result<DevicePtr> {
        self.tell_apart(&admitted, handle);
        // Some may be with what waits; or with a stream that has ended, whose place a new one has: then all is looked
        // at, too.
        if self.settle_uses(has_open)? {
            let mut books = self.books.lock();
            if let Some((address, tag)) = books.allocate(admitted.place, sizes.0, sizes.1) {
                books.tallies.hits += 1;
                admitted.leave(&mut books);
                return Ok(DevicePtr::tagged(address, tag));
            }
        }
        let (address, tag) = self.grow(admitted.place, handle, sizes)?;
        Ok(DevicePtr::tagged(address, tag))
    }

    /// The number of a stream that only the driver knows.
    #[cold]
    #[inline(never)]
    fn ask_stream(&self, handle: StreamHandle) -> Result<u64> {
        let _context = self.device.enter()?;
        // First of all: on a capturing stream even the question for its number ends the capture.
        if stream_is_capturing(self.device.driver(), handle)? {
            return Err(Error::StreamCapturing);
        }
        self.ask_number(handle)
    }

    /// The driver's number of a stream that is not capturing. A context must be current.
    pub(super) fn ask_number(&self, handle: StreamHandle) -> Result<u64> {
        let mut stream = 0;
        // SAFETY: whoever made the handle vouches that its stream is alive; the pointer is live.
        unsafe { self.device.driver().cuStreamGetId(handle.raw(), &mut stream) }?;
        Ok(stream)
    }

    /// A stream that was met by its bare handle may turn out to be one whose end is told.
    fn tell_apart(&self, admitted: &Admitted<'_>, handle: StreamHandle) {
        if self.has_all_to_tell(&self.books.lock(), admitted.place, handle) {
            return;
        }
        lock(&self.waits).turns_out(self, admitted.place, handle);
    }

    /// Whether a stream's place is known by as much as its handle says: the legacy stream's is from the first call on.
    fn has_all_to_tell(&self, books: &Books, place: u32, handle: StreamHandle) -> bool {
        books.places[place as usize].open.is_lazy
            || handle == StreamHandle::LEGACY
            || self.number_of(handle).is_none()
    }

    /// The place of a stream, which it is given where it has none, and keeps while this lives.
    fn admit(&self, stream: u64, handle: StreamHandle) -> Result<Admitted<'_>> {
        let known = Admitted::known(self, &mut self.books.lock(), stream);
        if let Some(admitted) = known {
            self.tell_apart(&admitted, handle);
            return Ok(admitted);
        }
        let _context = self.device.enter()?;
        if handle != StreamHandle::LEGACY {
            self.device.check_stream(handle)?;
        }
        let lasting = self.number_of(handle).is_some();
        let life = if lasting { Life::Lasting(handle) } else { Life::Foreign };
        let mut waits = lock(&self.waits);
        waits.settle_ends(self)?;
        let mut books = self.books.lock();
        if let Some(admitted) = Admitted::known(self, &mut books, stream) {
            return Ok(admitted);
        }
        let vacant = waits.vacant(&books);
        // A record on the legacy stream is not to be made in somebody else's request: it would be in the
        // way of another thread's capture.
        let is_lazy = lasting && handle != StreamHandle::LEGACY;
        let place = books.enrol(stream, vacant, is_lazy);
        books.places[place as usize].pins += 1;
        waits.begin(place, life);
        Ok(Admitted { core: self, place })
    }

    pub(super) fn record_stream(&self, ptr: DevicePtr, handle: StreamHandle) -> Result<()> {
        self.note_stream(ptr, handle).map(drop)
    }

    fn note_stream(&self, ptr: DevicePtr, handle: StreamHandle) -> Result<Option<Noted>> {
        let noted = self.note_further(ptr, handle)?;
        if let Some(noted) = noted.as_ref().filter(|noted| noted.is_one_of_many) {
            self.forget_users_gone(noted);
        }
        Ok(noted)
    }

    /// An allocation may outlive a great many streams that use it, as weights outlive requests. Streams that ended
    /// have been asked about when others came.
    #[cold]
    fn forget_users_gone(&self, noted: &Noted) {
        // Who has the lock may be waiting for the GPU; the next note comes here again.
        if let Ok(waits) = self.waits.try_lock() {
            self.books.lock().forget_users_gone(noted, |place| waits.is_over(place));
        }
    }

    fn note_further(&self, ptr: DevicePtr, handle: StreamHandle) -> Result<Option<Noted>> {
        self.device.driver().check_process()?;
        let known = self.number_of(handle);
        {
            let mut books = self.books.lock();
            books.find(ptr)?;
            if let Some(place) = known.and_then(|stream| books.place_of(stream))
                && self.has_all_to_tell(&books, place, handle)
            {
                return books.note_use(ptr, Use { place, on: handle });
            }
        }
        let stream = match known {
            Some(stream) => stream,
            None => self.ask_stream(handle)?,
        };
        let admitted = self.admit(stream, handle)?;
        self.books.lock().note_use(ptr, Use { place: admitted.place, on: handle })
    }

    #[inline]
    pub(super) fn free(&self, ptr: DevicePtr) -> Result<()> {
        self.device.driver().check_process()?;
        let freed = self.books.lock().free(ptr)?;
        self.end_free(ptr, freed)
    }

    #[inline(always)]
    fn end_free(&self, ptr: DevicePtr, freed: Freed) -> Result<()> {
        match freed {
            Freed::Done { due: None } => {}
            Freed::Done { due: Some(place) } => self.close_due(place),
            Freed::Noted(tag) => return self.free_used(DevicePtr::tagged(ptr.address(), tag)),
        }
        Ok(())
    }

    /// Frees after everything that was enqueued on a stream, which need not be the allocation's.
    #[inline]
    pub(super) fn free_on(
        &self,
        ptr: DevicePtr,
        handle: StreamHandle,
        is_right: impl FnOnce(&Block) -> Result<()>,
    ) -> Result<()> {
        self.device.driver().check_process()?;
        let known = self.number_of(handle);
        let freed = {
            let mut books = self.books.lock();
            let block = books.find(ptr)?;
            is_right(block)?;
            let (own, plain) = (block.place.get(), !block.noted.get());
            match known.and_then(|stream| books.place_of(stream)) {
                Some(place) if plain && place == own => Some(books.free(ptr)?),
                Some(place) if plain => books.free_after(ptr, place)?,
                _ => None,
            }
        };
        if let Some(freed) = freed {
            return self.end_free(ptr, freed);
        }
        // A stream that was given to this call only is not to be recorded on by a later one.
        let noted = self.note_stream(ptr, handle)?;
        self.free(ptr).inspect_err(|_| {
            if let Some(noted) = noted {
                self.books.lock().forget_use(noted);
            }
        })
    }
}

impl Core {
    /// The first part of the end, where the last handle is dropped: what is free goes back, in the order
    /// of streams that may end at any time, and are told to until this is done. Afterwards the core is
    /// out of the driver's list, and ends in no other thread that happens to tell it something.
    pub(super) fn retire(&self) {
        if self.device.driver().is_forked() {
            return;
        }
        // A failure means that the context went first, and took the memory along.
        let _ = self.wait_for_uses();
        let idle = self.books.lock().take_idle();
        let _ = self.give_back(idle, None);
        self.device.driver().unwatch_streams(self);
    }
}

impl Drop for Core {
    /// A segment with allocations stays theirs.
    fn drop(&mut self) {
        if self.device.driver().is_forked() {
            return;
        }
        // Of streams that may be gone: all work is waited for instead of theirs.
        let (waits_are_left, mut idle) = {
            let books = self.books.get_mut();
            (*self.outstanding.get_mut() != 0 || books.has_open(), books.take_idle())
        };
        let waits = waits_are_left || !idle.is_empty();
        if waits && synchronize_beside_captures(&self.device).is_ok() {
            lock(&self.waits).passed(self, None, u64::MAX);
            idle.extend(self.books.lock().take_idle());
            for segment in idle {
                let (bytes, stream) = (segment.bytes as usize, StreamHandle::LEGACY);
                let _ = self.upstream.deallocate(segment.ptr, bytes, self.align, stream);
            }
        }
        if let Ok(_context) = self.device.enter() {
            let waits = self.waits.get_mut().unwrap_or_else(PoisonError::into_inner);
            waits.destroy_events(self.device.driver());
        }
    }
}

impl StreamWatcher for Core {
    fn stream_leaves(&self, stream: StreamHandle) {
        let Some(number) = stream.known_to(self.realm) else { return };
        let mut waits = lock(&self.waits);
        let place = self.books.lock().place_of(number);
        if let Some(place) = place {
            waits.stream_leaves(place);
            while waits.has_lent(place) {
                waits = self.stream_returns.wait(waits).unwrap_or_else(PoisonError::into_inner);
            }
        }
    }

    fn has_passed_on(&self, stream: StreamHandle) -> bool {
        let Some(number) = stream.known_to(self.realm) else { return false };
        let waits = lock(&self.waits);
        let place = self.books.lock().place_of(number);
        place.is_some_and(|place| waits.has_lent_here(place))
    }

    fn stream_ends(&self, stream: StreamHandle) {
        let Some(number) = stream.known_to(self.realm) else { return };
        let mut waits = lock(&self.waits);
        let place = self.books.lock().place_of(number);
        if let Some(place) = place {
            waits.stream_ends(self, place, stream);
            self.books.lock().forget_stream(place);
        }
    }

    fn marks(&self, of: Awaited) -> SmallVec<[Mark; 2]> {
        let waits = lock(&self.waits);
        let stream = match of {
            _ if !of.is_of(&self.device) => return SmallVec::new(),
            Awaited::Device(_) => EVERY_PLACE,
            Awaited::Stream(handle, _) => {
                let number = handle.known_to(self.realm);
                let place = number.and_then(|number| self.books.lock().place_of(number));
                let Some(place) = place else { return SmallVec::new() };
                place
            }
        };
        // Who is told is who made it, so it needs no number of an allocator.
        let point = self.books.lock().waits_so_far();
        drop(waits);
        smallvec![Mark { pool: 0, stream, point, epoch: 0 }]
    }

    fn passed(&self, mark: &Mark) {
        let place = (mark.stream != EVERY_PLACE).then_some(mark.stream);
        lock(&self.waits).passed(self, place, mark.point);
    }
}

/// In a mark: all streams'.
const EVERY_PLACE: u32 = u32::MAX;
