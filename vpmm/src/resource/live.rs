//! What a resource has given out, where the driver would free anything that it is asked to.

#![forbid(unsafe_code)]

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use crate::error::{Error, Result};
use crate::units::DevicePtr;

/// The allocations of a resource by their addresses. A pointer carries a tag that a bare address has
/// not, so that only who has it from the resource can free it.
#[derive(Debug)]
pub(super) struct Live<L> {
    inner: Mutex<Inner<L>>,
}

#[derive(Debug)]
struct Inner<L> {
    last_tag: u32,
    by_address: HashMap<u64, Entry<L>>,
}

impl<L> Default for Live<L> {
    fn default() -> Self {
        Self { inner: Mutex::new(Inner { last_tag: 0, by_address: HashMap::new() }) }
    }
}

#[derive(Debug)]
struct Entry<L> {
    tag: u32,
    bytes: usize,
    of: L,
}

impl<L> Live<L> {
    fn inner(&self) -> MutexGuard<'_, Inner<L>> {
        self.inner.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Enters an allocation, with what its end needs.
    pub(super) fn enter(&self, address: u64, bytes: usize, of: L) -> DevicePtr {
        let mut inner = self.inner();
        // 0 is what bare addresses have.
        inner.last_tag = inner.last_tag.checked_add(1).unwrap_or(1);
        let tag = inner.last_tag;
        inner.by_address.insert(address, Entry { tag, bytes, of });
        DevicePtr::tagged(address, tag)
    }

    /// Takes an allocation out, to be freed.
    ///
    /// # Errors
    /// [`Error::ForeignPointer`], for one freed already and for a bare address too;
    /// [`Error::StalePointer`], [`Error::WrongSize`].
    pub(super) fn take(&self, ptr: DevicePtr, bytes: usize) -> Result<L> {
        let address = ptr.address();
        let mut inner = self.inner();
        let known = inner.by_address.get(&address).filter(|_| ptr.tag() != 0);
        let known = known.ok_or(Error::ForeignPointer { address })?;
        if known.tag != ptr.tag() {
            return Err(Error::StalePointer { address });
        }
        if known.bytes != bytes {
            let (given_bytes, bytes) = (bytes as u64, known.bytes as u64);
            return Err(Error::WrongSize { address, given_bytes, bytes });
        }
        let entry = inner.by_address.remove(&address);
        entry.map(|entry| entry.of).ok_or(Error::ForeignPointer { address })
    }

    /// Puts an allocation back that could not be freed: its pointer is good again.
    pub(super) fn put_back(&self, ptr: DevicePtr, bytes: usize, of: L) {
        let entry = Entry { tag: ptr.tag(), bytes, of };
        self.inner().by_address.insert(ptr.address(), entry);
    }

    /// The bytes that are allocated.
    pub(super) fn bytes(&self) -> u64 {
        self.inner().by_address.values().map(|entry| entry.bytes as u64).sum()
    }

    /// Takes everything out.
    pub(super) fn drain(&self) -> Vec<(u64, L)> {
        self.inner().by_address.drain().map(|(at, entry)| (at, entry.of)).collect()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_pointer_that_was_given_frees() {
        let live = Live::default();
        let first = live.enter(0x1000, 100, 'a');
        assert!(matches!(
            live.take(DevicePtr::from_address(0x1000), 100),
            Err(Error::ForeignPointer { address: 0x1000 })
        ));
        assert!(matches!(live.take(first, 99), Err(Error::WrongSize { bytes: 100, .. })));
        assert_eq!(live.bytes(), 100);
        assert_eq!(live.take(first, 100).unwrap(), 'a');
        assert!(matches!(live.take(first, 100), Err(Error::ForeignPointer { .. })));
        let second = live.enter(0x1000, 50, 'b');
        assert!(matches!(live.take(first, 50), Err(Error::StalePointer { .. })));
        live.put_back(second, 50, 'b');
        assert_eq!(live.take(second, 50).unwrap(), 'b');
        assert!(live.drain().is_empty());
    }
}
