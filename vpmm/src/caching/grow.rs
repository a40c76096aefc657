//! Memory from upstream, and back to it.

use super::books::Leaving;
use super::core::{Core, lock};
use super::size::segment_bytes;
use crate::device::StreamHandle;
use crate::error::{Error, Result};
use crate::resource::{Facts, or_undo};

impl Core {
    /// Serves a request that nothing cached serves. In PyTorch's order: collect garbage, get a
    /// segment; or give back what is too long to be split, and get one; or wait for the further
    /// streams of freed blocks, give back everything that is free, and get one.
    pub(super) fn grow(
        &self,
        place: u32,
        handle: StreamHandle,
        sizes: (u64, u64),
    ) -> Result<(u64, u32)> {
        let (bytes, _) = sizes;
        let segment = segment_bytes(bytes, self.config.large_segment_bytes)
            .ok_or(Error::SizeOverflow { bytes, unit_bytes: super::ROUND_LARGE as u64 })?;
        let segment = self.most_bytes().map_or(segment, |most| segment.min(most)).max(bytes);
        self.books.lock().tallies.misses += 1;
        self.collect_garbage()?;
        if let Some(found) = self.get_segment(place, handle, segment, sizes)? {
            return Ok(found);
        }
        let suffices = self.give_back_oversize(place, handle, bytes)?;
        if suffices && let Some(found) = self.get_segment(place, handle, segment, sizes)? {
            return Ok(found);
        }
        self.flush_and_retry(place, handle, segment, sizes)
    }

    /// The longest block, where what is below gives no more in one piece.
    fn most_bytes(&self) -> Option<u64> {
        Self::most_bytes_over(&self.upstream.facts())
    }

    /// The same over an upstream like this. Who knows it does not ask once more: where allocators stand on each other
    /// each would ask twice as often as the one above.
    pub(super) fn most_bytes_over(upstream: &Facts) -> Option<u64> {
        let most = upstream.max_bytes?;
        Some((most - most % super::MIN_BLOCK_SIZE) as u64)
    }

    /// Gets a segment for a request; `None` where there is no memory for it, or no right to it.
    fn get_segment(
        &self,
        place: u32,
        handle: StreamHandle,
        bytes: u64,
        sizes: (u64, u64),
    ) -> Result<Option<(u64, u32)>> {
        if !self.books.lock().reserve(bytes, self.limit_bytes()) {
            return Ok(None);
        }
        let ask = || self.upstream.allocate(bytes as usize, self.align, handle);
        match or_undo(ask, || self.books.lock().unreserve(bytes)) {
            Ok(ptr) => Ok(Some(self.books.lock().add_segment(place, (ptr, bytes), sizes))),
            Err(error) if error.is_out_of_memory() => Ok(None),
            Err(error) => Err(error),
        }
    }

    /// The last step. What is free once the waits are over is looked at again before it is given
    /// back: PyTorch does not, and so gives up where a block has become whole that way.
    fn flush_and_retry(
        &self,
        place: u32,
        handle: StreamHandle,
        segment: u64,
        sizes: (u64, u64),
    ) -> Result<(u64, u32)> {
        // Who comes while another thread flushes finds what that has given back. A function below upstream that
        // comes back in this thread, or in one that the other waits for, does not.
        let Some(_alone) = self.reclaiming.enter() else {
            return Err(self.out_of_memory(sizes.0));
        };
        self.flush_uses()?;
        let found = {
            let mut books = self.books.lock();
            books.tallies.num_alloc_retries += 1;
            books.allocate(place, sizes.0, sizes.1)
        };
        if let Some(found) = found {
            return Ok(found);
        }
        let idle = self.books.lock().take_idle();
        self.give_back(idle, Some((place, handle)))?;
        if let Some(found) = self.get_segment(place, handle, segment, sizes)? {
            return Ok(found);
        }
        Err(self.out_of_memory(sizes.0))
    }

    fn out_of_memory(&self, requested_bytes: u64) -> Error {
        let limit_bytes = self.limit_bytes();
        let mut books = self.books.lock();
        books.tallies.num_ooms += 1;
        let (_, free_bytes, largest_free_bytes) = books.cached();
        Error::OutOfMemory {
            requested_bytes,
            free_bytes,
            largest_free_bytes,
            mapped_bytes: books.held_bytes(),
            live_bytes: books.tallies.allocated_bytes.current(),
            limit_bytes,
            map: None,
        }
    }

    fn flush_uses(&self) -> Result<()> {
        self.books.lock().tallies.num_sync_all_streams += 1;
        self.wait_for_uses()
    }

    /// Gives back every segment of which nothing is in use.
    pub(super) fn empty_cache(&self) -> Result<()> {
        self.device.driver().check_process()?;
        // In a call from below the same is under way above.
        let Some(_alone) = self.reclaiming.enter() else { return Ok(()) };
        self.flush_uses()?;
        let idle = self.books.lock().take_idle();
        self.give_back(idle, None)
    }

    /// Gives back what the stream has free that is too long to be split; whether that makes room for the request.
    fn give_back_oversize(&self, place: u32, handle: StreamHandle, bytes: u64) -> Result<bool> {
        if self.config.max_split_size_bytes.is_none() {
            return Ok(false);
        }
        // Who finds no memory meanwhile waits for this, as for a flush. Where another thread is at that already this
        // one does not wait: what that is for may depend on it.
        let _alone = self.reclaiming.try_enter();
        let (oversize, suffices) = self.books.lock().take_oversize(place, bytes);
        self.give_back(oversize, Some((place, handle)))?;
        Ok(suffices)
    }

    /// Where more is held than the threshold, gives back segments that nobody used for long.
    fn collect_garbage(&self) -> Result<()> {
        let Some(most) = self.collect_above_bytes() else { return Ok(()) };
        if self.books.lock().held_bytes() <= most {
            return Ok(());
        }
        // As above; but where another thread gives back now there may be less in a moment: a later request looks again.
        let Some(_alone) = self.reclaiming.try_enter() else { return Ok(()) };
        let aged = {
            let mut books = self.books.lock();
            let held = books.held_bytes();
            if held > most { books.take_aged(held - most) } else { Vec::new() }
        };
        self.give_back(aged, None)
    }

    /// Gives segments back upstream; those that it does not take stay. `alive`: a place whose stream
    /// the caller vouches for.
    pub(super) fn give_back(
        &self,
        mut segments: Vec<Leaving>,
        alive: Option<(u32, StreamHandle)>,
    ) -> Result<()> {
        if segments.is_empty() {
            return Ok(());
        }
        // What cannot be asked about is found out segment by segment.
        let _context = self.device.enter();
        segments.reverse();
        let mut staying = Staying { core: self, segments };
        while let Some(segment) = staying.segments.last().copied() {
            let gone = self.give_one_back(segment, alive)?;
            staying.segments.pop();
            let mut books = self.books.lock();
            if gone { books.segment_left(segment) } else { books.segment_stays(segment) }
        }
        Ok(())
    }

    /// `false` where it cannot go now.
    fn give_one_back(&self, segment: Leaving, alive: Option<(u32, StreamHandle)>) -> Result<bool> {
        // Whose free waits for the device needs no stream.
        let lent = if self.upstream.facts().stream_ordered {
            let Some(lent) = Lent::of(self, segment.place, alive) else { return Ok(false) };
            Some(lent)
        } else {
            None
        };
        let stream = lent.as_ref().map_or(StreamHandle::LEGACY, |lent| lent.handle);
        let bytes = segment.bytes as usize;
        match self.upstream.deallocate(segment.ptr, bytes, self.align, stream) {
            Ok(()) => Ok(true),
            // That of what is over is the legacy one, which nobody may use while a blocking stream captures; or a
            // capture began just now. Or the stream ends as soon as this is over.
            Err(Error::StreamCapturing | Error::StreamEnded) => Ok(false),
            Err(error) => Err(error),
        }
    }
}

/// A place's stream, whose owner ends it when this is over.
struct Lent<'a> {
    core: &'a Core,
    place: u32,
    handle: StreamHandle,
}

impl<'a> Lent<'a> {
    fn of(core: &'a Core, place: u32, alive: Option<(u32, StreamHandle)>) -> Option<Self> {
        let handle = lock(&core.waits).lend_stream(core.device.driver(), place, alive)?;
        Some(Self { core, place, handle })
    }
}

impl Drop for Lent<'_> {
    fn drop(&mut self) {
        lock(&self.core.waits).give_back_stream(self.place);
        self.core.stream_returns.notify_all();
    }
}

/// Segments on their way back, the next one last: those that have not gone when this does stay. That is so where
/// upstream panics, too.
struct Staying<'a> {
    core: &'a Core,
    segments: Vec<Leaving>,
}

impl Drop for Staying<'_> {
    fn drop(&mut self) {
        let mut books = self.core.books.lock();
        self.segments.drain(..).for_each(|segment| books.segment_stays(segment));
    }
}
