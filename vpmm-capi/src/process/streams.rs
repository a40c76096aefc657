//! Streams that the process's pools have met, by device and raw handle.
//!
//! A stream is borrowed when it is first seen, so that pools serve it without a driver call from then
//! on. Frameworks keep their streams for ever; whoever ends one says so before ([`forget`]).
//!
//! The table is open-addressed, of a fixed size, and read without a lock. A slot's entry is written
//! before its key and read after it. It is written again only when its stream was forgotten, which
//! comes after all calls with that stream.

use std::cell::UnsafeCell;
use std::ffi::c_void;
use std::mem::MaybeUninit;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

use vpmm_core::{Device, Error, Pool, Stream, StreamHandle};

/// Streams that are kept; one more is served as a stream that may end at any time.
const SLOTS: usize = 1 << SLOT_BITS;
const SLOT_BITS: u32 = 10;
/// Slots that a stream may be in, from where its key says.
const PROBES: usize = 16;

const EMPTY: usize = 0;
const FORGOTTEN: usize = usize::MAX;

/// A stream, and the pool of its device.
#[derive(Clone, Copy)]
pub(super) struct Entry {
    pub(super) pool: &'static Pool,
    pub(super) stream: StreamHandle,
    device: u32,
}

struct Slot {
    key: AtomicUsize,
    entry: UnsafeCell<MaybeUninit<Entry>>,
}

// SAFETY: the entry is written under the lock of `KEPT`, before its key is published, and never while
// somebody reads it: see the head of the module.
unsafe impl Sync for Slot {}

static TABLE: [Slot; SLOTS] = [const {
    Slot { key: AtomicUsize::new(EMPTY), entry: UnsafeCell::new(MaybeUninit::uninit()) }
}; SLOTS];

/// What was borrowed, with its slot. The lock is held while the table is written.
static KEPT: Mutex<Vec<(usize, Stream)>> = Mutex::new(Vec::new());

fn kept() -> MutexGuard<'static, Vec<(usize, Stream)>> {
    KEPT.lock().unwrap_or_else(PoisonError::into_inner)
}

/// No two streams' are equal. Handles of streams are addresses, but for the default ones, whose
/// meaning depends on the device; their keys are odd, or less than any address. `None` for the
/// per-thread default stream, whose meaning depends on the thread.
#[inline(always)]
fn key_of(device: u32, raw: *mut c_void) -> Option<usize> {
    match raw.addr() {
        0 | 1 => Some((device as usize) << 1 | 1),
        2 => None,
        address => Some(address),
    }
}

#[inline(always)]
fn first_slot(key: usize) -> usize {
    // Fibonacci hashing: the high bits of the product depend on all of the key's.
    (key as u64).wrapping_mul(0x9e37_79b9_7f4a_7c15).wrapping_shr(64 - SLOT_BITS) as usize
}

/// The entry of a stream that was seen before.
#[inline(always)]
pub(super) fn find(device: u32, raw: *mut c_void) -> Option<&'static Entry> {
    let key = key_of(device, raw)?;
    let first = first_slot(key);
    let slot = &TABLE[first];
    let entry = if slot.key.load(Ordering::Acquire) == key {
        // SAFETY: the key was published after the entry, which is not written again while the
        // stream is used.
        unsafe { (*slot.entry.get()).assume_init_ref() }
    } else {
        find_further(key, first)?
    };
    (entry.device == device).then_some(entry)
}

/// The entry of a key that is not in its first slot.
#[inline(never)]
fn find_further(key: usize, first: usize) -> Option<&'static Entry> {
    for probe in 0..PROBES {
        let slot = &TABLE[(first + probe) % SLOTS];
        match slot.key.load(Ordering::Acquire) {
            EMPTY => return None,
            // SAFETY: as in `find`.
            found if found == key => return Some(unsafe { (*slot.entry.get()).assume_init_ref() }),
            _ => {}
        }
    }
    None
}

/// The handle of a stream that is not in the table, which it enters if it can.
///
/// # Errors
/// [`Error::WrongDevice`], [`Error::WrongContext`], [`Error::Driver`], [`Error::ContextLost`].
///
/// # Safety
/// The stream is alive, and until [`forget`].
pub(super) unsafe fn adopt(
    device: &Device,
    pool: &'static Pool,
    raw: *mut c_void,
) -> Result<StreamHandle, Error> {
    // SAFETY: the caller vouches for it.
    let bare = unsafe { StreamHandle::from_raw(raw.cast()) };
    let Some(key) = key_of(device.ordinal(), raw) else { return Ok(bare) };
    let mut kept = kept();
    if let Some(entry) = find(device.ordinal(), raw) {
        return Ok(entry.stream);
    }
    let first = first_slot(key);
    let is_free = |at: &usize| matches!(TABLE[*at].key.load(Ordering::Relaxed), EMPTY | FORGOTTEN);
    let free = (0..PROBES).map(|probe| (first + probe) % SLOTS).find(is_free);
    let Some(at) = free else { return Ok(bare) };
    // SAFETY: the caller vouches for it. Its end is told by `forget`, after all calls with it.
    let stream = match unsafe { Stream::borrowed(device, bare) } {
        // It can be asked about when the capture has ended.
        Err(Error::StreamCapturing) => return Ok(bare),
        borrowed => borrowed?,
    };
    let handle = stream.handle();
    let entry = Entry { pool, stream: handle, device: device.ordinal() };
    // SAFETY: the slot is empty, or its stream was forgotten, so nobody reads its entry; the lock is
    // held.
    unsafe { (*TABLE[at].entry.get()).write(entry) };
    TABLE[at].key.store(key, Ordering::Release);
    kept.push((at, stream));
    Ok(handle)
}

/// A stream that was adopted, or a default one, as a value.
pub(super) fn known(device: &Device, raw: *mut c_void) -> Option<Stream> {
    match raw.addr() {
        0 | 1 => return Some(Stream::legacy(device)),
        2 => return Some(Stream::per_thread(device)),
        _ => {}
    }
    let ordinal = device.ordinal();
    let kept = kept();
    let is_it = |(_, stream): &&(usize, Stream)| {
        stream.handle().raw().addr() == raw.addr() && stream.device().ordinal() == ordinal
    };
    kept.iter().find(is_it).map(|(_, stream)| stream.clone())
}

/// A stream is about to end: pools are told, and its handle may be another stream's from then on.
/// Answers whether it was known.
pub(super) fn forget(device: u32, raw: *mut c_void) -> bool {
    let Some(key) = key_of(device, raw).filter(|key| *key == raw.addr() && *key > 1) else {
        // The default streams do not end.
        return false;
    };
    let mut kept = kept();
    let is_it = |(at, stream): &(usize, Stream)| {
        TABLE[*at].key.load(Ordering::Relaxed) == key && stream.device().ordinal() == device
    };
    let Some(at) = kept.iter().position(is_it) else { return false };
    let (slot, stream) = kept.swap_remove(at);
    TABLE[slot].key.store(FORGOTTEN, Ordering::Release);
    drop(kept);
    drop(stream);
    true
}
