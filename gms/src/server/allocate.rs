//! Making memory for a writer, and waiting for it where there is too little.

use std::os::fd::AsFd;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::ServerError;
use super::history::Event;
use super::session::{End, Session};
use crate::layout::{Allocation, checked_size};
use crate::memory::{Extent, Progress};
use crate::socket::{self, Waited};
use crate::wake::Waker;

/// Asking for memory takes a processor, however soon somebody wants to know.
const SHORTEST_RETRY: Duration = Duration::from_millis(1);

/// How a request for memory ended.
pub(super) enum Allocated {
    /// With an allocation.
    Done(Allocation, Arc<Extent>),
    /// With words.
    Refused(String),
}

/// Ends the telling when a wait does.
struct Told<'a>(&'a Progress);

impl Drop for Told<'_> {
    fn drop(&mut self) {
        self.0.tell(None);
    }
}

impl Session {
    /// Makes memory and puts it into the layout's next slot.
    ///
    /// Where the device has too little, this waits: for what this server is giving back, and, asking
    /// again and again, for what other processes do; and no longer than the client lives.
    ///
    /// # Errors
    /// [`End::Gone`], [`End::Server`] where the driver fails.
    pub(super) fn allocate(&mut self, size: i64, tag: &str) -> Result<Allocated, End> {
        let size = match checked_size(size) {
            Ok(size) => size,
            Err(error) => return Ok(Allocated::Refused(error.to_string())),
        };
        let memory = &self.service.memory;
        let total = memory.total_bytes();
        let Some(aligned_size) = memory.aligned(size).filter(|bytes| *bytes <= total) else {
            return Ok(Allocated::Refused(format!(
                "More than the device has: requested_size={size}, tag={tag}, device_bytes={total}"
            )));
        };
        let limit = self.service.settings.max_metadata_bytes;
        // Nobody else adds to it meanwhile: there is one writer.
        if let Err(error) = self.service.core().layout.check_tags(tag.len() as u64, limit) {
            return Ok(Allocated::Refused(error.to_string()));
        }
        let made = match self.ahead.take(aligned_size, &self.service.counters.ahead_bytes) {
            Some(extent) => {
                self.service.counters.ahead.add(1);
                Some(extent)
            }
            None => self.create(aligned_size)?,
        };
        let extent = match made {
            Some(extent) => extent,
            None => match self.wait_for_memory(aligned_size)? {
                Ok(extent) => extent,
                Err(waited) => {
                    return Ok(Allocated::Refused(format!(
                        "Timed out waiting for GPU memory: requested_size={size}, \
                         aligned_size={aligned_size}, tag={tag}, waited_sec={:.3}",
                        waited.as_secs_f64()
                    )));
                }
            },
        };
        let id: Arc<str> = uuid::Uuid::new_v4().hyphenated().to_string().into();
        let mut core = self.service.core();
        core.extents.insert(Arc::clone(&id), Arc::clone(&extent));
        let layout = Arc::make_mut(&mut core.layout);
        let allocation = layout.insert(id, size, aligned_size, tag.into()).clone();
        drop(core);
        self.service.counters.allocations.add(1);
        Ok(Allocated::Done(allocation, extent))
    }

    /// Makes memory, with the room of what was made ahead if it takes that.
    fn create(&mut self, bytes: u64) -> Result<Option<Arc<Extent>>, End> {
        let made = self.service.memory.try_create(bytes).map_err(driver)?;
        if made.is_some() || !self.give_up_ahead() {
            return Ok(made);
        }
        self.service.memory.try_create(bytes).map_err(driver)
    }

    /// Asks again until there is memory, or the time is up: how long that took, then.
    fn wait_for_memory(&self, bytes: u64) -> Result<Result<Arc<Extent>, Duration>, End> {
        let (service, started) = (&self.service, Instant::now());
        service.counters.memory_waits.add(1);
        {
            let mut core = service.core();
            let allocations = core.layout.len();
            core.history.add(Event::OutOfMemory(allocations));
        }
        // Without a descriptor for it, the clock has to do.
        let waker = Waker::new().ok().map(Arc::new);
        let progress = service.memory.progress();
        progress.tell(waker.clone());
        let _told = Told(progress);
        let interval = service.settings.retry_interval.max(SHORTEST_RETRY);
        let timeout = service.settings.retry_timeout;
        loop {
            if let Some(waker) = &waker {
                waker.clear();
            }
            if let Some(extent) = service.memory.try_create(bytes).map_err(driver)? {
                return Ok(Ok(extent));
            }
            let waited = started.elapsed();
            if timeout.is_some_and(|timeout| waited >= timeout) {
                return Ok(Err(waited));
            }
            let left = timeout.map_or(interval, |timeout| interval.min(timeout - waited));
            tracing::warn!(
                session = self.id,
                bytes,
                pending = progress.pending_bytes(),
                "out of memory: asking again"
            );
            // The writer may be dead: nobody waits for its memory then.
            let woken_by = waker.as_deref().map(AsFd::as_fd);
            if socket::wait(self.socket(), woken_by, Some(left))? == Waited::HungUp {
                return Err(End::Gone);
            }
        }
    }
}

pub(super) fn driver(error: crate::CudaError) -> End {
    End::Server(ServerError::Driver(error))
}
