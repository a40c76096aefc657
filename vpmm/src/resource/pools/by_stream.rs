//! A value for each stream, found without a lock.

use std::collections::HashMap;
use std::ptr;
use std::sync::atomic::{AtomicPtr, AtomicU64, Ordering};
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use crate::error::Result;

/// Shortcuts from streams to their entries.
const ROUTES: usize = 256;

/// No stream's number.
const NO_STREAM: u64 = u64::MAX - 1;

/// What one stream has, on cache lines of its own.
#[repr(align(128))]
struct Entry<T> {
    /// Whose it is now. An entry that was given up goes to another stream.
    stream: AtomicU64,
    value: T,
}

struct Register<T> {
    /// Each stays where it is, and none is dropped before the register.
    all: Vec<Arc<Entry<T>>>,
    /// Places in `all`, by the stream's number.
    by_stream: HashMap<u64, u32>,
    /// Entries that were given up.
    vacant: Vec<u32>,
}

/// A value for each stream. Who comes again finds it by one load, as a rule.
pub(super) struct ByStream<T> {
    /// A direct-mapped cache of the register: null, or entries of it.
    routes: Box<[AtomicPtr<Entry<T>>; ROUTES]>,
    register: RwLock<Register<T>>,
}

impl<T> ByStream<T> {
    pub(super) fn new() -> Self {
        let register = Register { all: Vec::new(), by_stream: HashMap::new(), vacant: Vec::new() };
        Self {
            routes: Box::new([const { AtomicPtr::new(ptr::null_mut()) }; ROUTES]),
            register: RwLock::new(register),
        }
    }

    fn read(&self) -> RwLockReadGuard<'_, Register<T>> {
        self.register.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, Register<T>> {
        self.register.write().unwrap_or_else(PoisonError::into_inner)
    }

    /// A value of the register, without its lock.
    fn keep<'a>(&'a self, entry: &Arc<Entry<T>>) -> &'a T {
        // SAFETY: entries stay where they are while the list grows, and none is dropped before the register,
        // which `self` has.
        unsafe { &(*Arc::as_ptr(entry)).value }
    }

    fn route(&self, stream: u64) -> &AtomicPtr<Entry<T>> {
        // Fibonacci hashing: the driver counts streams up.
        &self.routes[(stream.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> 56) as usize % ROUTES]
    }

    /// What a stream has, if anything: as a rule without a lock.
    #[inline]
    pub(super) fn find(&self, stream: u64) -> Option<&T> {
        let entry = self.route(stream).load(Ordering::Acquire);
        // SAFETY: routes hold null or entries of the register, which live as long as `self`: see `keep`.
        match unsafe { entry.as_ref() } {
            Some(entry) if entry.stream.load(Ordering::Relaxed) == stream => Some(&entry.value),
            _ => self.look_up(stream),
        }
    }

    #[cold]
    fn look_up(&self, stream: u64) -> Option<&T> {
        let register = self.read();
        let place = *register.by_stream.get(&stream)?;
        let entry = register.all.get(place as usize)?;
        // Under the lock that entries change streams under.
        self.route(stream).store(Arc::as_ptr(entry).cast_mut(), Ordering::Release);
        Some(self.keep(entry))
    }

    /// What a stream has. Where that is nothing: an entry that was given up, which `again` makes the
    /// stream's, or what `make` makes for its place.
    #[cold]
    pub(super) fn open(
        &self,
        stream: u64,
        again: impl FnOnce(&T),
        make: impl FnOnce(u32) -> Result<T>,
    ) -> Result<&T> {
        let mut register = self.write();
        if let Some(place) = register.by_stream.get(&stream) {
            return Ok(self.keep(&register.all[*place as usize]));
        }
        let place = match register.vacant.pop() {
            Some(place) => {
                let entry = &register.all[place as usize];
                again(&entry.value);
                entry.stream.store(stream, Ordering::Relaxed);
                place
            }
            None => {
                let place = register.all.len() as u32;
                let value = make(place)?;
                register.all.push(Arc::new(Entry { stream: AtomicU64::new(stream), value }));
                place
            }
        };
        register.by_stream.insert(stream, place);
        Ok(self.keep(&register.all[place as usize]))
    }

    /// A stream has nothing any more; the next new one has its entry.
    pub(super) fn give_up(&self, stream: u64) {
        let mut register = self.write();
        if let Some(place) = register.by_stream.remove(&stream) {
            register.all[place as usize].stream.store(NO_STREAM, Ordering::Relaxed);
            register.vacant.push(place);
        }
    }

    /// The value at a place.
    pub(super) fn at(&self, place: u32) -> Option<&T> {
        self.read().all.get(place as usize).map(|entry| self.keep(entry))
    }

    /// Every value, with the number of its stream: one that never was, where it was given up.
    pub(super) fn all(&self) -> Vec<(u64, &T)> {
        let register = self.read();
        let of = |entry: &Arc<Entry<T>>| (entry.stream.load(Ordering::Relaxed), self.keep(entry));
        register.all.iter().map(of).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_stream_finds_its_own_and_an_entry_that_was_given_up_goes_on() {
        let values: ByStream<u32> = ByStream::new();
        let make = |stream| values.open(stream, |_| (), Ok).copied();
        // More streams than routes: some share one.
        let many = 3 * ROUTES as u64;
        for stream in 0..many {
            assert!(values.find(stream).is_none());
            assert_eq!(make(stream).unwrap(), stream as u32);
        }
        for _ in 0..2 {
            (0..many).for_each(|stream| assert_eq!(values.find(stream), Some(&(stream as u32))));
        }
        values.give_up(5);
        assert!(values.find(5).is_none(), "though a route leads there");
        assert_eq!(make(many).unwrap(), 5, "at the place of the one that went");
        assert_eq!((values.find(5), values.find(many)), (None, Some(&5)));
        assert_eq!(values.at(5), Some(&5));
        assert_eq!(values.all().len(), many as usize);
    }
}
