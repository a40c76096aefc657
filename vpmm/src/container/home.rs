//! The stream that a container is at home on.

use std::sync::{Mutex, PoisonError};

use crate::device::StreamHandle;
use crate::error::Result;
use crate::lock::Token;
use crate::stream::Stream;

/// A container's stream, in whose order everything with it is done.
///
/// The per-thread default stream is another one in every thread. A container on it that comes to
/// another thread is at home on that one's from then on: the host waits for the device once, which is
/// the only order that can be had from there.
pub(super) struct Home {
    stream: Stream,
    /// Of a container on the per-thread default stream: whose it is now.
    thread: Option<Mutex<Option<Token>>>,
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

    /// The stream, for a call by this thread.
    pub(super) fn stream(&self) -> Result<&Stream> {
        if let Some(thread) = &self.thread {
            let mut thread = thread.lock().unwrap_or_else(PoisonError::into_inner);
            let now = Token::current();
            // A thread that is ending has no number, and is nobody that was seen before.
            if now.is_none() || *thread != now {
                self.stream.device().synchronize()?;
                *thread = now;
            }
        }
        Ok(&self.stream)
    }

    /// Goes to another stream, which comes after everything enqueued on this one.
    pub(super) fn move_to(&mut self, stream: &Stream) -> Result<()> {
        stream.wait_for_stream(self.stream()?)?;
        *self = Self::new(stream);
        Ok(())
    }
}
