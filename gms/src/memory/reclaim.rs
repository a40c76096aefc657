//! A thread that gives memory back to the driver.

use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::mpsc::{self, Sender};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::JoinHandle;

use super::Extent;
use crate::wake::Waker;

/// How far giving back has come.
#[derive(Debug, Default)]
pub struct Progress {
    pending_bytes: AtomicU64,
    released: AtomicU64,
    waiting: Mutex<Option<Arc<Waker>>>,
}

impl Progress {
    /// Bytes that are still to be given back.
    pub fn pending_bytes(&self) -> u64 {
        self.pending_bytes.load(Ordering::Acquire)
    }

    /// Allocations that were given back so far.
    pub fn released(&self) -> u64 {
        self.released.load(Ordering::Relaxed)
    }

    /// Has somebody told of each allocation that is given back, until another is named: there is one
    /// writer at most, so one waits for memory at most.
    pub(crate) fn tell(&self, waker: Option<Arc<Waker>>) {
        *self.waiting.lock().unwrap_or_else(PoisonError::into_inner) = waker;
    }

    fn gone(&self, bytes: u64) {
        self.pending_bytes.fetch_sub(bytes, Ordering::AcqRel);
        self.released.fetch_add(1, Ordering::Relaxed);
        if let Some(waker) = &*self.waiting.lock().unwrap_or_else(PoisonError::into_inner) {
            waker.wake();
        }
    }
}

/// The thread and what it is given.
#[derive(Debug)]
pub(super) struct Reclaimer {
    progress: Arc<Progress>,
    /// `None` where there is no thread: memory is given back at once then.
    queue: Option<Sender<Vec<Arc<Extent>>>>,
    thread: Option<JoinHandle<()>>,
    /// Whether whoever ends has waited for it as long as they would.
    is_left: AtomicBool,
}

impl Reclaimer {
    pub(super) fn start() -> Self {
        let progress = Arc::new(Progress::default());
        let (queue, given) = mpsc::channel::<Vec<Arc<Extent>>>();
        let theirs = Arc::clone(&progress);
        let work = move || {
            for extents in given {
                release(&theirs, extents);
            }
        };
        match std::thread::Builder::new().name("gms-reclaim".to_owned()).spawn(work) {
            Ok(thread) => {
                let (queue, thread) = (Some(queue), Some(thread));
                Self { progress, queue, thread, is_left: AtomicBool::new(false) }
            }
            Err(error) => {
                tracing::warn!(%error, "no thread to give memory back: it is done in the way");
                let (queue, thread) = (None, None);
                Self { progress, queue, thread, is_left: AtomicBool::new(false) }
            }
        }
    }

    /// The thread is not waited for at the end.
    pub(super) fn leave(&self) {
        self.is_left.store(true, Ordering::Relaxed);
    }

    pub(super) fn take(&self, extents: Vec<Arc<Extent>>) {
        if extents.is_empty() {
            return;
        }
        let bytes = extents.iter().map(|extent| extent.bytes()).sum();
        self.progress.pending_bytes.fetch_add(bytes, Ordering::AcqRel);
        let left = match &self.queue {
            Some(queue) => queue.send(extents).err().map(|unsent| unsent.0),
            None => Some(extents),
        };
        if let Some(extents) = left {
            release(&self.progress, extents);
        }
    }

    pub(super) fn progress(&self) -> &Progress {
        &self.progress
    }
}

fn release(progress: &Progress, extents: Vec<Arc<Extent>>) {
    for extent in extents {
        let bytes = extent.bytes();
        // A session that is sending the descriptor right now keeps it a moment longer.
        drop(extent);
        progress.gone(bytes);
    }
}

impl Drop for Reclaimer {
    fn drop(&mut self) {
        self.queue = None;
        if let Some(thread) = self.thread.take().filter(|_| !*self.is_left.get_mut()) {
            let _ = thread.join();
        }
    }
}
