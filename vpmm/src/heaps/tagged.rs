//! A heap with a name, which can sleep.

use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

use super::contents::{Buffers, Contents, FileCopy, HostCopy, Saved};
use super::lock;
use super::pinned::{Copies, Pinned};
use crate::capture::{BesideCaptures, stream_is_capturing, wait_at_end};
use crate::default::{Core, Run};
use crate::device::StreamHandle;
use crate::error::{Error, Result};

/// Free memory between two allocations that is copied along, rather than to have two copies.
const GAP_BYTES: u64 = 256 << 10;

/// What [`Pool::suspend`](crate::Pool::suspend) came to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct Suspended {
    /// Bytes of physical memory that the device has again.
    pub bytes: u64,
    /// Bytes of handles that the driver would not take back. They are used again when the heap is
    /// resumed; until then they are offered again from time to time.
    pub kept_bytes: u64,
    /// Bytes of contents that were copied.
    pub saved_bytes: u64,
    /// How long it took to copy them, and to wait for the work before.
    pub copying: Duration,
    /// How long the system took to lock the pages of host memory, some of it while copies ran.
    pub pinning: Duration,
    /// How long all of it took.
    pub duration: Duration,
}

/// What [`Pool::resume`](crate::Pool::resume) came to.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct Resumed {
    /// Bytes of physical memory that are at their addresses again.
    pub bytes: u64,
    /// Bytes of contents that were copied back.
    pub loaded_bytes: u64,
    /// How long that took, with the wait for the stream's work before.
    pub copying: Duration,
    /// How long all of it took.
    pub duration: Duration,
}

/// What a heap has in the meantime.
enum Sleep {
    /// Page-locked memory, kept for the next time.
    Awake(Vec<Pinned>),
    Asleep(Saved),
}

pub(crate) struct TaggedHeap {
    tag: Box<str>,
    core: Arc<Core>,
    sleep: Mutex<Sleep>,
    /// Page-locked memory that a copy may still use which could not be waited for.
    limbo: Mutex<Vec<Pinned>>,
}

impl TaggedHeap {
    pub(super) fn new(tag: &str, core: Arc<Core>) -> Self {
        let sleep = Mutex::new(Sleep::Awake(Vec::new()));
        Self { tag: tag.into(), core, sleep, limbo: Mutex::default() }
    }

    pub(crate) fn tag(&self) -> &str {
        &self.tag
    }

    pub(crate) fn core(&self) -> &Arc<Core> {
        &self.core
    }

    /// Offers the driver again what it would not take; returns the bytes that it took.
    pub(super) fn release_kept(&self) -> u64 {
        if !self.core.is_asleep() || !self.core.has_kept() {
            return 0;
        }
        // Somebody who puts it to sleep or wakes it sees to that.
        let Ok(_sleep) = self.sleep.try_lock() else { return 0 };
        let _still = self.core.hold_still();
        if self.core.is_asleep() { self.core.release_unmapped().bytes } else { 0 }
    }

    pub(crate) fn suspend(&self, stream: StreamHandle, contents: &Contents) -> Result<Suspended> {
        let start = Instant::now();
        let mut sleep = lock(&self.sleep);
        let Sleep::Awake(chunks) = &mut *sleep else { return Err(Error::Asleep) };
        let device = self.core.device();
        let _context = device.enter()?;
        device.check_stream(stream)?;
        if stream_is_capturing(device.driver(), stream)? {
            return Err(Error::StreamCapturing);
        }
        let still = self.core.settle()?;
        let copies = Copies::on(device, stream);
        let used = self.core.used(&still, GAP_BYTES);
        let saved = save(device, &copies, &used, contents, chunks);
        lock(&self.limbo).extend(copies.into_limbo());
        let (saved, copying, pinning) = match saved {
            Ok(saved) => saved,
            Err(error) => {
                self.core.stay_awake(still);
                return Err(error);
            }
        };
        let saved_bytes = saved.bytes();
        match self.core.fall_asleep(still) {
            Ok(released) => {
                *sleep = Sleep::Asleep(saved);
                Ok(Suspended {
                    bytes: released.bytes,
                    kept_bytes: released.kept_bytes,
                    saved_bytes,
                    copying,
                    pinning,
                    duration: start.elapsed(),
                })
            }
            Err(error) if self.core.is_asleep() => {
                *sleep = Sleep::Asleep(saved);
                Err(error)
            }
            Err(error) => {
                *chunks = kept(saved);
                Err(error)
            }
        }
    }

    pub(crate) fn resume(&self, stream: StreamHandle, with_contents: bool) -> Result<Resumed> {
        let start = Instant::now();
        let mut sleep = lock(&self.sleep);
        let Sleep::Asleep(saved) = &*sleep else { return Err(Error::NotAsleep) };
        let device = self.core.device();
        let _context = device.enter()?;
        device.check_stream(stream)?;
        if stream_is_capturing(device.driver(), stream)? {
            return Err(Error::StreamCapturing);
        }
        let nothing = Saved::Nothing;
        let wanted = if with_contents { saved } else { &nothing };
        wanted.check()?;
        let still = self.core.hold_still();
        let runs = self.core.map_asleep(&still)?;
        let (copying, copies) = (Instant::now(), Copies::on(device, stream));
        let loaded = wanted.load(device, &copies, &runs);
        if loaded.is_err() {
            if copies.are_lost() {
                self.core.strand_asleep();
            } else {
                self.core.unmap_asleep();
            }
        }
        lock(&self.limbo).extend(copies.into_limbo());
        loaded?;
        let copying = copying.elapsed();
        self.core.wake(still);
        let loaded_bytes = wanted.bytes();
        let saved = std::mem::replace(&mut *sleep, Sleep::Awake(Vec::new()));
        if let Sleep::Asleep(saved) = saved {
            *sleep = Sleep::Awake(kept(saved));
        }
        let bytes = runs.iter().map(|run| run.bytes).sum();
        Ok(Resumed { bytes, loaded_bytes, copying, duration: start.elapsed() })
    }
}

impl Drop for TaggedHeap {
    fn drop(&mut self) {
        self.core.retire();
        let limbo = std::mem::take(&mut *lock(&self.limbo));
        if limbo.is_empty() {
            return;
        }
        let device = self.core.device();
        let waited = device.enter().and_then(|_context| {
            let _beside = BesideCaptures::enter(device.driver())?;
            Ok(wait_at_end(device)?)
        });
        if waited.is_err() {
            limbo.into_iter().for_each(std::mem::forget);
        }
    }
}

/// The page-locked memory that is to be kept for the next time.
fn kept(saved: Saved) -> Vec<Pinned> {
    match saved {
        Saved::Host(copy) if copy.buffers == Buffers::Retain => copy.into_chunks(),
        _ => Vec::new(),
    }
}

/// Copies contents away and waits for that, and for the work before it.
fn save(
    device: &crate::Device,
    copies: &Copies<'_>,
    used: &[Run],
    contents: &Contents,
    chunks: &mut Vec<Pinned>,
) -> Result<(Saved, Duration, Duration)> {
    let start = Instant::now();
    let (saved, pinning) = match contents {
        Contents::Discard => {
            copies.wait()?;
            (Saved::Nothing, Duration::ZERO)
        }
        Contents::Keep(buffers) => {
            let (copy, pinning) = HostCopy::save(device, copies, used, *buffers, chunks)?;
            (Saved::Host(copy), pinning)
        }
        Contents::Save(path) => {
            // The copies are waited for, and the work before them with them.
            let copy = FileCopy::save(device, copies, used, path)?;
            copies.wait()?;
            (Saved::File(copy), Duration::ZERO)
        }
    };
    Ok((saved, start.elapsed(), pinning))
}
