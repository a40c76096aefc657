//! Memory that is made before it is asked for.
//!
//! A writer that makes its allocations one by one waits for the driver twice for each: to make the
//! memory, and to export it; some 40 µs together on an H200. It then maps what it got, copies to it,
//! and comes back for the next. So while its socket is silent the session makes one more of the size
//! that was asked for twice in a row, with its descriptor, and hands that out next.
//!
//! 1. There is one at most, of [`Settings::ahead_bytes`](super::Settings::ahead_bytes) at most, and of
//!    a writer only: it is gone before the session's lock is.
//! 2. It is in no layout and in no figure of allocations. It is made in this session and nobody has
//!    seen it, so it is as fresh as any.
//! 3. Whoever needs its room has it: before a request waits for memory it is given back, and after
//!    [`Settings::ahead_time`](super::Settings::ahead_time) without a request of any kind.
//!
//! It is made once the socket was silent for [`PAUSE`]. The driver has one lock for all processes, so calls
//! beside a client's that maps make that one wait for as long as it is spared later; whoever comes back at
//! once is let be, and whoever fills what it got has mapped by then.

use super::allocate::driver;
use super::metrics::Gauge;
use super::session::{End, Session};
use crate::memory::Extent;
use crate::socket;
use std::sync::Arc;
use std::time::Duration;

/// Longer than a client takes to map, which was 49 to 75 µs on an H200.
const PAUSE: Duration = Duration::from_micros(100);

/// What a session has made ahead, and what it goes by.
#[derive(Debug, Default)]
pub(super) struct Ahead {
    /// Bytes of the allocation before; 0 where there is none.
    last_bytes: u64,
    /// Bytes to make more of as soon as there is time.
    wanted: Option<u64>,
    spare: Option<Arc<Extent>>,
}

impl Ahead {
    /// Takes down what was asked for, and hands out what was made for it if it was.
    pub(super) fn take(&mut self, bytes: u64, held: &Gauge) -> Option<Arc<Extent>> {
        self.wanted = (self.last_bytes == bytes).then_some(bytes);
        self.last_bytes = bytes;
        let fits = self.spare.as_ref().is_some_and(|spare| spare.bytes() == bytes);
        let taken = if fits { self.spare.take() } else { None };
        if taken.is_some() {
            held.set(0);
        }
        taken
    }

    /// Many were asked for together, so that nothing is known of what comes next, or nothing does.
    pub(super) fn forget(&mut self) {
        (self.last_bytes, self.wanted) = (0, None);
    }

    /// Gives it back; whether there was one.
    pub(super) fn give_up(&mut self, held: &Gauge) -> bool {
        let had = self.spare.take().is_some();
        if had {
            held.set(0);
        }
        had
    }

    /// Whether there is one.
    pub(super) fn is_held(&self) -> bool {
        self.spare.is_some()
    }
}

impl Session {
    /// Makes the next allocation's memory if there is reason to, and nothing else to do.
    ///
    /// # Errors
    /// [`End::Server`] where the driver fails in anything but a lack of memory.
    pub(super) fn make_ahead(&mut self) -> Result<(), End> {
        // Another size was asked for: it is not what comes next.
        if self.ahead.spare.as_ref().is_some_and(|spare| spare.bytes() != self.ahead.last_bytes) {
            self.give_up_ahead();
        }
        let Some(bytes) = self.ahead.wanted else { return Ok(()) };
        if self.has_bytes() || bytes > self.service.settings.ahead_bytes {
            return Ok(());
        }
        if !socket::is_silent(self.socket(), PAUSE, self.service.spin())? {
            return Ok(());
        }
        self.ahead.wanted = None;
        let Some(extent) = self.service.memory.try_create(bytes).map_err(driver)? else {
            return Ok(());
        };
        // Where there is none, the request for it says so.
        let _ = extent.descriptor();
        self.service.counters.ahead_bytes.set(bytes);
        self.ahead.spare = Some(extent);
        Ok(())
    }

    /// Gives it back; whether there was one.
    pub(super) fn give_up_ahead(&mut self) -> bool {
        self.ahead.give_up(&self.service.counters.ahead_bytes)
    }
}
