//! The stream that a container is at home on.

use std::ops::Deref;
use std::ptr;
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::capture::synchronize_beside_captures;
use crate::device::StreamHandle;
use crate::error::Result;
use crate::lock::Token;
use crate::stream::Stream;

/// A container's stream, in whose order everything with it is done.
///
/// The per-thread default stream is another one in every thread. A container on it that comes to
/// another thread is at home on that one's from then on: the host waits for the device once, which is
/// the only order that can be had from there. Beside a capture it cannot ([`Error::StreamCapturing`]): the wait would
/// end that.
///
/// [`Error::StreamCapturing`]: crate::error::Error::StreamCapturing
pub(super) struct Home {
    stream: Stream,
    /// Of a container on the per-thread default stream: whose it is now.
    thread: Option<Mutex<Option<Token>>>,
}

/// A home's stream for a call by this thread, until everything that the call enqueues is: another thread that
/// shares the container would else wait for the device before, and for nothing after.
pub(super) struct Turn<'a> {
    stream: &'a Stream,
    _thread: Option<MutexGuard<'a, Option<Token>>>,
}

impl Deref for Turn<'_> {
    type Target = Stream;

    fn deref(&self) -> &Stream {
        self.stream
    }
}

impl Home {
    pub(super) fn new(stream: &Stream) -> Self {
        let per_thread = stream.handle() == StreamHandle::PER_THREAD;
        let thread = per_thread.then(|| Mutex::new(Token::current()));
        Self { stream: stream.clone(), thread }
    }

    /// The stream as it was given.
    pub(super) fn given(&self) -> &Stream {
        &self.stream
    }

    /// The stream, for a call by this thread, which takes no other turn meanwhile.
    pub(super) fn turn(&self) -> Result<Turn<'_>> {
        let Some(thread) = &self.thread else {
            return Ok(Turn { stream: &self.stream, _thread: None });
        };
        // Before the lock, which a thread of the parent's may hold that is not here.
        self.stream.device().driver().check_process()?;
        let mut thread = thread.lock().unwrap_or_else(PoisonError::into_inner);
        let now = Token::current();
        // A thread that is ending has no number, and is nobody that was seen before.
        if now.is_none() || *thread != now {
            synchronize_beside_captures(self.stream.device())?;
            *thread = now;
        }
        Ok(Turn { stream: &self.stream, _thread: Some(thread) })
    }

    /// The streams of two, for a call by this thread: the same two in the same order for every thread.
    pub(super) fn turns<'a>(&'a self, other: &'a Self) -> Result<[Turn<'a>; 2]> {
        if ptr::eq(self, other) {
            return Ok([self.turn()?, Turn { stream: &self.stream, _thread: None }]);
        }
        if ptr::from_ref(self) < ptr::from_ref(other) {
            return Ok([self.turn()?, other.turn()?]);
        }
        let second = other.turn()?;
        Ok([self.turn()?, second])
    }

    /// Goes to another stream, which comes after everything enqueued on this one.
    pub(super) fn move_to(&mut self, stream: &Stream) -> Result<()> {
        stream.wait_for_stream(&*self.turn()?)?;
        *self = Self::new(stream);
        Ok(())
    }
}
