//! What a thread's requests are for: a tag, so that memory of programs that know nothing of tags can sleep,
//! or a heap of the memory service's, which knows as little of them.

use std::cell::RefCell;
use std::ffi::c_char;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex, PoisonError};

use vpmm_core::{DevicePtr, Pool, StreamHandle, Tagged};

use super::VPMM_EVERY_DEVICE;
use super::mode::{self, Mode};
use crate::guard::{Failure, guard, text};
use crate::service::heap as service;
use crate::status::vpmm_status;

/// Where a thread's requests go, on one device or all.
struct Open {
    /// Tells it from all others.
    number: u64,
    device: u32,
    goal: Goal,
}

enum Goal {
    Tag {
        tag: String,
        /// Its heaps, as far as they were asked for, by the device.
        heaps: Vec<(u32, Tagged)>,
    },
    Service(Arc<service::Heap>),
}

impl Open {
    fn is_for(&self, device: u32) -> bool {
        self.device == VPMM_EVERY_DEVICE || self.device == device
    }
}

/// What serves a request instead of the pool's main heap.
pub(super) enum Heap {
    Tagged(Tagged),
    Service(Arc<service::Heap>),
}

impl Heap {
    pub(super) fn malloc(&self, bytes: usize, stream: StreamHandle) -> Result<DevicePtr, Failure> {
        match self {
            Self::Tagged(heap) => Ok(heap.malloc(bytes, stream)?),
            Self::Service(heap) => heap.malloc(bytes, stream),
        }
    }
}

thread_local! {
    /// The last that is for a device is the one that counts.
    static TAGS: RefCell<Vec<Open>> = const { RefCell::new(Vec::new()) };
}

/// Tags that are open, of all threads; the mode says whether there are any, and is set under this lock
/// alone: a thread that opens one finds the mode set from then on, whoever closes another meanwhile. A
/// thread that ends with some open leaves them counted, which only has every request look here.
static OPEN: Mutex<usize> = Mutex::new(0);

/// Not in a child of the process, whose requests are refused, and in which a thread of its parent may have the lock.
fn change_open(work: impl FnOnce(&mut usize)) {
    if super::check_process().is_err() {
        return;
    }
    let mut open = OPEN.lock().unwrap_or_else(PoisonError::into_inner);
    work(&mut open);
    mode::set(Mode::Tagging, *open > 0);
}

/// Runs something with the tag that counts, if there is one. Nothing in it asks for memory: what that
/// calls may be the program's, and open tags itself.
fn with_current<T>(device: u32, work: impl FnOnce(&mut Open) -> T) -> Option<T> {
    let found = TAGS.try_with(|tags| {
        tags.borrow_mut().iter_mut().rev().find(|open| open.is_for(device)).map(work)
    });
    found.ok().flatten()
}

/// The heap of this thread's requests on a device, whose pool is given.
pub(super) fn heap_of(pool: &Pool, device: u32) -> Option<Result<Heap, Failure>> {
    if !mode::is(Mode::Tagging) {
        return None;
    }
    let found = with_current(device, |open| match &open.goal {
        Goal::Service(heap) => Ok(Heap::Service(Arc::clone(heap))),
        Goal::Tag { tag, heaps } => match heaps.iter().find(|(of, _)| *of == device) {
            Some((_, heap)) => Ok(Heap::Tagged(heap.clone())),
            None => Err(tag.clone()),
        },
    })?;
    let tag = match found {
        Ok(heap) => return Some(Ok(heap)),
        Err(tag) => tag,
    };
    let heap = pool.tagged(&tag).inspect(|heap| {
        with_current(device, |open| {
            if let Goal::Tag { heaps, .. } = &mut open.goal {
                heaps.push((device, heap.clone()));
            }
        });
    });
    Some(heap.map(Heap::Tagged).map_err(Failure::from))
}

/// Answers what [`close`] takes.
fn push(device: u32, goal: Goal) -> u64 {
    static NUMBERS: AtomicU64 = AtomicU64::new(1);
    let number = NUMBERS.fetch_add(1, Ordering::Relaxed);
    TAGS.with(|tags| tags.borrow_mut().push(Open { number, device, goal }));
    change_open(|open| *open += 1);
    number
}

/// As `vpmm_process_push_tag_on`, until [`close`] with what this answers.
pub(crate) fn push_tag(tag: &str, device: u32) -> u64 {
    push(device, Goal::Tag { tag: tag.to_owned(), heaps: Vec::new() })
}

/// Closes what this thread has opened, wherever it is among the others; nothing where another thread has.
pub(crate) fn close(number: u64) {
    let closed = TAGS.try_with(|tags| {
        let mut tags = tags.borrow_mut();
        let at = tags.iter().rposition(|open| open.number == number)?;
        Some(tags.remove(at))
    });
    // Dropped when the list is not borrowed any more, as in `vpmm_process_pop_tag`.
    if closed.ok().flatten().is_some() {
        change_open(|open| *open -= 1);
    }
}

/// From now on what this thread asks a device's pool for comes from a heap of the memory service's, until
/// `vpmm_process_pop_tag`.
pub(crate) fn push_heap(heap: Arc<service::Heap>) -> u64 {
    push(heap.device(), Goal::Service(heap))
}

/// From now on what this thread asks the process's pools for comes from their heap with a tag
/// (`vpmm_tagged_malloc`), until `vpmm_process_pop_tag`. May be called again for another tag meanwhile.
///
/// # Safety
/// `tag` is null or ends with a zero byte.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vpmm_process_push_tag(tag: *const c_char) -> vpmm_status {
    // SAFETY: the caller vouches for it.
    unsafe { vpmm_process_push_tag_on(tag, VPMM_EVERY_DEVICE) }
}

/// The same for requests on one device.
///
/// # Safety
/// As `vpmm_process_push_tag`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vpmm_process_push_tag_on(tag: *const c_char, device: u32) -> vpmm_status {
    guard(|| {
        // SAFETY: the caller vouches for it.
        push_tag(unsafe { text(tag, "tag") }?, device);
        Ok(())
    })
}

/// Ends what this thread's last `vpmm_process_push_tag`, `vpmm_process_push_tag_on` or
/// `vpmm_gms_heap_push` has begun.
#[unsafe(no_mangle)]
pub extern "C" fn vpmm_process_pop_tag() -> vpmm_status {
    guard(|| {
        // Dropped when the list is not borrowed any more: with the last of a heap, memory goes.
        let popped = TAGS.with(|tags| tags.borrow_mut().pop());
        if popped.is_none() {
            let text = "this thread has no tag";
            return Err(Failure::new(vpmm_status::VPMM_INVALID_ARGUMENT, text));
        }
        change_open(|open| *open -= 1);
        Ok(())
    })
}

#[cfg(test)]
mod tests {
    use std::sync::Barrier;
    use std::thread;

    use super::*;

    /// One that closes the last tag, at the moment at which another opens one.
    #[test]
    fn a_thread_with_a_tag_finds_it_whoever_closes_theirs() {
        let (threads, turns) = (2, 3_000_000);
        let barrier = Barrier::new(threads);
        let missed = || {
            barrier.wait();
            let missed = (0..turns).filter(|_| {
                // SAFETY: it ends with a zero byte.
                let pushed = unsafe { vpmm_process_push_tag(c"weights".as_ptr()) };
                let is_seen = (0..20).all(|_| mode::is(Mode::Tagging));
                let popped = vpmm_process_pop_tag();
                assert_eq!((pushed, popped), (vpmm_status::VPMM_OK, vpmm_status::VPMM_OK));
                !is_seen
            });
            missed.count()
        };
        let missed: usize = thread::scope(|scope| {
            let threads: Vec<_> = (0..threads).map(|_| scope.spawn(missed)).collect();
            threads.into_iter().map(|thread| thread.join().unwrap()).sum()
        });
        assert_eq!(missed, 0);
    }
}
