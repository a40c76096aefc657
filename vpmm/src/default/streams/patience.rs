//! Before a pool grows: a short look at whether what other streams freed becomes ready.
//!
//! A host that is just ahead of the GPU frees everything of a step, and then asks for memory on
//! another stream: within a millisecond what was freed is ready, and a pool that grew instead holds
//! more from then on.

use std::time::{Duration, Instant};

use crate::default::Core;
use crate::default::ladder::Request;
use crate::default::space::book::Recording;
use crate::default::space::{Part, Space};
use crate::error::Result;

/// Of the time since the pool was made at most this fraction goes into waiting. And after so long only
/// this one: what is waited for again and again is better grown for.
const OF_TIME: u32 = 64;
const AT_FIRST: Duration = Duration::from_millis(64);
const OF_TIME_LATER: u32 = 1024;

/// Pauses between two looks: a look costs about as long.
const PAUSES: u32 = 32;

/// What has been waited.
#[derive(Default)]
pub(in crate::default) struct Waited(Duration);

impl Waited {
    /// How long a request may wait, so long after the pool was made.
    fn may(&self, patience: Duration, now: Duration) -> Duration {
        let all = (now / OF_TIME).min(AT_FIRST + now / OF_TIME_LATER);
        patience.min(all.saturating_sub(self.0))
    }
}

impl Core {
    /// Looks again and again whether other streams' freed memory serves a request, where they have
    /// enough of it, and as long as the pool's patience goes. Never without a limit of time, so
    /// that it does not matter what the other streams wait for.
    pub(in crate::default) fn wait_for_others(
        &self,
        request: Request,
        look: impl Fn() -> Option<u32>,
    ) -> Result<Option<u32>> {
        let patience = self.config.patience;
        if patience.is_zero() || !self.config.reuse.opportunistic {
            return Ok(None);
        }
        let may = {
            let space = self.space.lock();
            let may = space.waited.may(patience, self.made.elapsed());
            if space.others_may_serve(request) { may } else { Duration::ZERO }
        };
        if may.is_zero() {
            return Ok(None);
        }
        let begin = Instant::now();
        let found = loop {
            if let Some(start) = self.take_ready(request)? {
                break Some(start);
            }
            // Where nothing became nobody's a deferred free may have become the stream's own.
            let asked = self.poll(Some(request.stream), false);
            if let Some(start) = look() {
                break Some(start);
            }
            asked?;
            if begin.elapsed() >= may || !self.space.lock().others_may_serve(request) {
                break None;
            }
            (0..PAUSES).for_each(|_| std::hint::spin_loop());
        };
        let mut space = self.space.lock();
        let took = begin.elapsed();
        space.waited.0 += took;
        space.counters.host_waits += 1;
        // No time of the program's own.
        space.pace.note_growth(took);
        Ok(found)
    }
}

impl Space {
    /// Whether what waits for other streams, in the part of a request's size, comes to the request.
    fn others_may_serve(&self, request: Request) -> bool {
        let part = Part::of_size(request.units);
        // What a capture holds, and what no event can be behind, does not become ready by waiting.
        let others = self.books.iter().enumerate().filter(|(at, book)| {
            let never = matches!(book.recording, Recording::Held | Recording::Lost);
            *at as u32 != request.stream && !never
        });
        let freed: u64 =
            others.flat_map(|(_, book)| &book.sets).map(|sets| sets[part as usize].units()).sum();
        let deferred = self.deferred.iter().filter(|block| self.part_of(block.start) == part);
        let deferred: u64 = deferred.map(|block| u64::from(block.units)).sum();
        freed + deferred >= u64::from(request.units)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const MILLI: Duration = Duration::from_millis(1);

    #[test]
    fn waiting_takes_a_small_part_of_the_time_and_no_more_than_the_patience() {
        let mut waited = Waited::default();
        let later = AT_FIRST * OF_TIME_LATER;
        assert_eq!(waited.may(2 * MILLI, Duration::ZERO), Duration::ZERO);
        assert_eq!(waited.may(2 * MILLI, OF_TIME * MILLI), MILLI);
        assert_eq!(waited.may(2 * MILLI, 50 * OF_TIME * MILLI), 2 * MILLI);
        waited.0 = 49 * MILLI;
        assert_eq!(waited.may(2 * MILLI, 50 * OF_TIME * MILLI), MILLI);
        waited.0 = 51 * MILLI;
        assert_eq!(waited.may(2 * MILLI, 50 * OF_TIME * MILLI), Duration::ZERO);
        waited.0 = 2 * AT_FIRST - MILLI;
        assert_eq!(waited.may(2 * MILLI, later), MILLI);
        waited.0 += MILLI;
        assert_eq!(waited.may(2 * MILLI, later), Duration::ZERO);
    }
}
