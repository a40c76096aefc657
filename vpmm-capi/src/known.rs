//! Streams whose end is told, by their raw handles.
//!
//! Every allocation and every free asks for one. Under a lock alone, be it one for readers, all threads would write to
//! the same line of the processors' caches at each call. So each thread keeps what it has found, and one number that
//! hardly ever changes says whether that is still so.

use std::cell::Cell;
use std::collections::HashMap;
use std::ffi::c_void;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use vpmm_core::{Driver, Stream, StreamHandle};

/// Streams that a thread remembers at a time. Others take each other's places.
const PLACES: usize = 1 << PLACE_BITS;
const PLACE_BITS: u32 = 5;

/// The streams of one driver.
pub(crate) struct Known {
    driver: Driver,
    state: State,
    streams: RwLock<HashMap<usize, Stream>>,
}

/// What the streams are like now: a number that no other drivers' streams have, nor these at another time. Apart from
/// the lock, which whoever takes it writes.
#[repr(align(128))]
struct State(AtomicU64);

impl Default for State {
    fn default() -> Self {
        Self(AtomicU64::new(next_state()))
    }
}

/// Not 0, which is no state.
fn next_state() -> u64 {
    static STATES: AtomicU64 = AtomicU64::new(1);
    STATES.fetch_add(1, Ordering::Relaxed)
}

/// What a raw handle was, while the streams were so.
#[derive(Clone, Copy)]
struct Found {
    state: u64,
    raw: usize,
    handle: StreamHandle,
}

thread_local! {
    /// Without a destructor: threads call to their end.
    static FOUND: [Cell<Found>; PLACES] = const {
        [const { Cell::new(Found { state: 0, raw: 0, handle: StreamHandle::LEGACY }) }; PLACES]
    };
}

impl Known {
    pub(crate) fn of(driver: Driver) -> Self {
        Self { driver, state: State::default(), streams: RwLock::default() }
    }

    /// A raw handle as pools take it: with the stream's number where its end will be told.
    ///
    /// # Safety
    /// The stream is alive while the handle is used.
    #[inline]
    pub(crate) unsafe fn handle(&self, raw: *mut c_void) -> StreamHandle {
        // Before the look at the streams: what is found may be newer than the state it is noted under, and is then
        // looked for once more.
        let state = self.state.0.load(Ordering::Acquire);
        FOUND.with(|found| {
            let place = &found[place_of(raw.addr())];
            let last = place.get();
            if last.state == state && last.raw == raw.addr() {
                return last.handle;
            }
            // SAFETY: the caller vouches for it.
            let handle = unsafe { self.look(raw) };
            place.set(Found { state, raw: raw.addr(), handle });
            handle
        })
    }

    /// # Safety
    /// As for [`handle`](Self::handle).
    #[cold]
    #[inline(never)]
    unsafe fn look(&self, raw: *mut c_void) -> StreamHandle {
        // In a child of the process nobody may be there to let go of the lock. Whoever gets the handle turns it away.
        if !self.driver.is_forked()
            && let Some(stream) = self.read().get(&raw.addr())
        {
            return stream.handle();
        }
        // SAFETY: the caller vouches for it.
        unsafe { StreamHandle::from_raw(raw.cast()) }
    }

    /// The stream of a raw handle, if its end is told.
    pub(crate) fn get(&self, raw: *mut c_void) -> Option<Stream> {
        self.read().get(&raw.addr()).cloned()
    }

    /// From here on a stream's end is told.
    pub(crate) fn keep(&self, stream: Stream) -> *mut c_void {
        let raw: *mut c_void = stream.handle().raw().cast();
        let former = self.change(|streams| streams.insert(raw.addr(), stream));
        drop(former);
        raw
    }

    /// Changes the streams; what `work` hands out of them is dropped behind the lock, since it may tell pools.
    pub(crate) fn change<T>(&self, work: impl FnOnce(&mut HashMap<usize, Stream>) -> T) -> T {
        let mut streams = self.write();
        let done = work(&mut streams);
        // Before the lock is free: whoever sees the state, and then looks, finds them as they are.
        self.state.0.store(next_state(), Ordering::Release);
        done
    }

    fn read(&self) -> RwLockReadGuard<'_, HashMap<usize, Stream>> {
        self.streams.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, HashMap<usize, Stream>> {
        self.streams.write().unwrap_or_else(PoisonError::into_inner)
    }
}

/// Fibonacci hashing: handles are addresses, or small numbers.
#[inline]
fn place_of(raw: usize) -> usize {
    ((raw as u64).wrapping_mul(0x9E37_79B9_7F4A_7C15) >> (u64::BITS - PLACE_BITS)) as usize % PLACES
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;
    use std::thread;

    use vpmm_core::{Device, Pool, PoolConfig};

    use super::*;
    use crate::driver::Loaded;

    struct Set {
        loaded: Arc<Loaded>,
        device: Device,
    }

    fn set() -> Set {
        let loaded = Loaded::load(Some("sim")).ok().unwrap();
        let device = loaded.device(0).ok().unwrap();
        Set { loaded, device }
    }

    impl Set {
        /// Whether the end of a raw handle's stream is told: then a pool makes no driver call once it is warm.
        fn is_told(&self, raw: *mut c_void) -> bool {
            let driver = self.device.driver();
            let pool = Pool::new(&self.device, &PoolConfig::default()).unwrap();
            let pair = || {
                // SAFETY: the stream is alive.
                let handle = unsafe { self.loaded.streams.handle(raw) };
                let block = pool.malloc(1 << 20, handle).unwrap();
                pool.free(block, handle).unwrap();
            };
            (0..4).for_each(|_| pair());
            let before = driver.calls();
            pair();
            driver.calls().since(&before).total() == 0
        }

        fn forget(&self, raw: *mut c_void) {
            let gone = self.loaded.streams.change(|streams| streams.remove(&raw.addr()));
            assert!(gone.is_some());
        }
    }

    #[test]
    fn what_a_thread_has_found_is_true_until_the_streams_change() {
        let set = set();
        let known = &set.loaded.streams;
        // Owned elsewhere, so that the same raw handle may be known, and not.
        let stream = set.device.stream().unwrap();
        let raw: *mut c_void = stream.handle().raw().cast();
        assert!(!set.is_told(raw));
        for _ in 0..3 {
            // SAFETY: `stream` outlives what is lent of it.
            known.keep(unsafe { Stream::borrowed(&set.device, stream.handle()) }.unwrap());
            assert!(set.is_told(raw) && set.is_told(raw));
            // Another thread's findings are its own.
            let (set, raw) = (&set, raw.addr());
            thread::scope(|scope| {
                scope.spawn(move || {
                    let raw = std::ptr::without_provenance_mut(raw);
                    assert!(set.is_told(raw));
                    set.forget(raw);
                    assert!(!set.is_told(raw));
                });
            });
            assert!(!set.is_told(std::ptr::without_provenance_mut(raw)));
        }
    }

    /// Two drivers may give out the same number for a stream.
    #[test]
    fn what_one_drivers_streams_are_says_nothing_of_anothers() {
        let (one, other) = (set(), set());
        let stream = one.device.stream().unwrap();
        let raw: *mut c_void = stream.handle().raw().cast();
        one.loaded.streams.keep(stream);
        for _ in 0..2 {
            // SAFETY: the handle is not used.
            let _ = unsafe { other.loaded.streams.handle(raw) };
            assert!(one.is_told(raw));
        }
    }

    #[test]
    fn more_streams_than_a_thread_remembers_are_served_all_the_same() {
        let set = set();
        let streams: Vec<*mut c_void> = (0..3 * PLACES)
            .map(|_| set.loaded.streams.keep(set.device.stream().unwrap()))
            .collect();
        assert!(streams.iter().chain(&streams).all(|raw| set.is_told(*raw)));
    }
}
