//! Whether a stream noticed that memory moved.
//!
//! A host that is ahead of the GPU has time to spare. What it moves while the stream is still busy with
//! what it was given before keeps nobody waiting: such moves are no reason to move less.

use super::plan::Job;
use crate::capture::{BesideCaptures, Recorded, record_beside_captures};
use crate::default::Core;
use crate::default::ladder::Request;
use crate::event::Event;

impl Core {
    /// Marks the end of what a request's stream has been given, where a job moves memory and time makes
    /// up for that. None where no event can tell: the stream is capturing, or the driver would not.
    pub(super) fn mark_end(&self, request: Request, job: &Job) -> Option<Event> {
        if job.moves() == 0 {
            return None;
        }
        let handle = self.handle_of(request).ok()?;
        let spare = {
            let mut space = self.space.lock();
            if !space.pace.has_rate() {
                return None;
            }
            space.events.pop()
        };
        match record_beside_captures(self.device.driver(), handle, spare) {
            Ok(Recorded::On(event)) => Some(event),
            Ok(Recorded::Capturing(unused)) => {
                self.space.lock().events.extend(unused);
                None
            }
            Err(_) => {
                self.space.lock().events.extend(spare);
                None
            }
        }
    }

    /// Whether the stream has not come to the mark yet. The mark is used up.
    pub(super) fn is_ahead_of(&self, mark: Option<Event>) -> bool {
        let Some(event) = mark else { return false };
        let driver = self.device.driver();
        let answer = BesideCaptures::enter(driver).and_then(|_beside| event.is_complete(driver));
        self.space.lock().events.push(event);
        // What cannot be told counts as noticed.
        answer.is_ok_and(|complete| !complete)
    }
}
