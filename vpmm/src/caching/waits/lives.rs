//! What becomes of streams: those that end, and who gets their place.

use std::collections::VecDeque;

use super::{OfPlace, On, Waiter, Waits};
use crate::caching::books::{Books, Place};
use crate::caching::core::Core;
use crate::capture::{BesideCaptures, Recorded, record_beside_captures, stream_is_capturing};
use crate::device::StreamHandle;
use crate::driver::Driver;
use crate::error::Result;
use crate::event::Event;
use crate::lock::this_thread;

/// What is known of the stream at a place.
#[derive(Clone, Copy, Debug)]
pub(in crate::caching) enum Life {
    /// Alive, and its end will be told.
    Lasting(StreamHandle),
    /// Nobody tells of its end: its handle is good for a call that it is given to.
    Foreign,
    /// Ended; behind this event nothing of its work is left.
    Ended(Event),
    /// Ended, and so has all its work.
    Over,
    /// Ended where no event could be recorded, at this point in time.
    Lost(u64),
}

impl Waits {
    /// A place has a new stream.
    pub(in crate::caching) fn begin(&mut self, place: u32, life: Life) {
        match self.places.get_mut(place as usize) {
            Some(of) => (of.life, of.leaves) = (life, false),
            None => {
                let (queue, deferred, leaves) = (VecDeque::new(), 0, false);
                self.places.push(OfPlace { life, queue, deferred, leaves });
            }
        }
    }

    /// The stream at a place comes by a handle that tells of its end: what waits for it from here on needs no event at
    /// once, and memory may go back on it.
    pub(in crate::caching) fn turns_out(&mut self, core: &Core, place: u32, handle: StreamHandle) {
        let of = &mut self.places[place as usize];
        if matches!(of.life, Life::Foreign) {
            of.life = Life::Lasting(handle);
            core.books.lock().places[place as usize].open.is_lazy = true;
        }
    }

    /// A place to give to a new stream, if there is one: of a stream whose work is over, whose memory
    /// the new one inherits; or of one that nobody may ever name again and that has no memory.
    pub(in crate::caching) fn vacant(&self, books: &Books) -> Option<u32> {
        let vacant = |(of, place): (&OfPlace, &Place)| {
            let unnamed = place.pins == 0 && of.queue.is_empty() && of.deferred == 0;
            unnamed
                && match of.life {
                    Life::Over => true,
                    Life::Foreign | Life::Lost(_) => place.blocks == 0,
                    Life::Lasting(_) | Life::Ended(_) => false,
                }
        };
        self.places.iter().zip(&books.places).position(vacant).map(|place| place as u32)
    }

    /// Asks about streams that have ended whether their work has too.
    pub(in crate::caching) fn settle_ends(&mut self, core: &Core) -> Result<()> {
        let driver = core.device.driver();
        let ended = |of: &OfPlace| matches!(of.life, Life::Ended(_));
        if !self.places.iter().any(ended) {
            return Ok(());
        }
        let _beside = BesideCaptures::enter(driver)?;
        self.settle_each_end(core)
    }

    pub(super) fn settle_each_end(&mut self, core: &Core) -> Result<()> {
        let mut places = 0..self.places.len();
        places.try_for_each(|place| self.settle_end(core, place).map(|_| ()))
    }

    /// Whether a stream that has ended has nothing left to do. Where it never recorded its end,
    /// nobody can tell.
    pub(super) fn settle_end(&mut self, core: &Core, place: usize) -> Result<bool> {
        match self.places[place].life {
            Life::Over => Ok(true),
            Life::Ended(event) => {
                let life = match event.is_complete(core.device.driver()) {
                    Ok(true) => Life::Over,
                    Ok(false) => return Ok(false),
                    // A capture that began and ended in between has taken the record along.
                    Err(failure) if failure.is_of_capture() => {
                        Life::Lost(core.books.lock().waits_so_far())
                    }
                    Err(failure) => return Err(failure.into()),
                };
                self.let_go(event);
                self.places[place].life = life;
                Ok(matches!(life, Life::Over))
            }
            Life::Lasting(_) | Life::Foreign | Life::Lost(_) => Ok(false),
        }
    }

    /// Whether a place's stream has ended, and so has all its work, as far as is known.
    pub(in crate::caching) fn is_over(&self, place: u32) -> bool {
        matches!(self.places[place as usize].life, Life::Over)
    }

    /// The stream at a place is about to end, and is lent no more: resources below may be told before this.
    pub(in crate::caching) fn stream_leaves(&mut self, place: u32) {
        self.places[place as usize].leaves = true;
    }

    /// The stream at a place is about to end: a last event covers all that it was given.
    pub(in crate::caching) fn stream_ends(
        &mut self,
        core: &Core,
        place: u32,
        handle: StreamHandle,
    ) {
        let empty = self.lists.pop().unwrap_or_default();
        let (unused, open) = {
            let mut books = core.books.lock();
            // From here on a free comes here first, and finds the last event.
            books.places[place as usize].open.is_lazy = false;
            let open = books.take_open(place, empty);
            let (of, known) = (&self.places[place as usize], &books.places[place as usize]);
            let unnamed = known.blocks == 0 && known.pins == 0 && open.is_empty();
            (unnamed && of.queue.is_empty() && of.deferred == 0, open)
        };
        let life = if unused { Life::Over } else { self.last_life(core, handle) };
        self.places[place as usize].life = life;
        if open.is_empty() {
            self.lists.push(open);
        } else {
            self.enqueue(place, Waiter { event: None, blocks: open });
        }
        // What was to be recorded on it is covered by that.
        if self.deferred.iter().any(|of| of.place == place && of.on == On::Place) {
            self.end_deferral(place, On::Place, None);
        }
        self.publish(core);
    }

    fn last_life(&mut self, core: &Core, handle: StreamHandle) -> Life {
        let lost = Life::Lost(core.books.lock().next_wait());
        let Ok(_context) = core.device.enter() else { return lost };
        let spare = self.spare.pop();
        let unused = match record_beside_captures(core.device.driver(), handle, spare) {
            Ok(Recorded::On(event)) => return Life::Ended(event),
            Ok(Recorded::Capturing(spare)) => spare,
            Err(_) => spare,
        };
        self.spare.extend(unused);
        lost
    }

    /// The stream to give a place's memory back on, which lasts until it is [returned](Self::give_back_stream);
    /// `None` where it is not known to be alive, or captures. What is over needs no stream in particular. `alive`: a
    /// place with a stream that the caller vouches for.
    pub(in crate::caching) fn lend_stream(
        &mut self,
        driver: &Driver,
        place: u32,
        alive: Option<(u32, StreamHandle)>,
    ) -> Option<StreamHandle> {
        let of = &self.places[place as usize];
        let handle = match of.life {
            Life::Lasting(_) if of.leaves => None,
            Life::Lasting(handle) => {
                let capturing = stream_is_capturing(driver, handle).unwrap_or(true);
                (!capturing).then_some(handle)
            }
            Life::Over => Some(StreamHandle::LEGACY),
            Life::Foreign => alive.filter(|of| of.0 == place).map(|(_, handle)| handle),
            Life::Ended(_) | Life::Lost(_) => None,
        }?;
        self.lent.push((place, this_thread()));
        Some(handle)
    }

    /// A stream that was lent to this thread may end.
    pub(in crate::caching) fn give_back_stream(&mut self, place: u32) {
        if let Some(index) = self.lent.iter().position(|of| *of == (place, this_thread())) {
            self.lent.swap_remove(index);
        }
    }

    /// Whether a place's stream is lent to another thread. One that ends a stream within the call that it was lent
    /// for cannot wait for itself.
    pub(in crate::caching) fn has_lent(&self, place: u32) -> bool {
        self.lent.iter().any(|(of, thread)| *of == place && *thread != this_thread())
    }

    /// Whether it is lent to this thread.
    pub(in crate::caching) fn has_lent_here(&self, place: u32) -> bool {
        self.lent.contains(&(place, this_thread()))
    }
}
