//! Who tells a stream's end: one owner for each stream, whoever borrows it.

use std::collections::HashMap;
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, Weak};

use crate::device::{Device, StreamHandle};
use crate::driver::Failure;
use crate::error::{Error, Result};

/// Who knows when a stream ends.
pub(super) struct Owner {
    device: Device,
    /// With the stream's number, as soon as that is known.
    handle: StreamHandle,
    /// It is destroyed here; else by whoever lent it.
    destroys: bool,
    /// Where it is entered, under its number.
    entered: Option<(Arc<Owners>, u64)>,
}

impl Owner {
    pub(super) fn handle(&self) -> StreamHandle {
        self.handle
    }

    pub(super) fn destroys(&self) -> bool {
        self.destroys
    }
}

impl Drop for Owner {
    fn drop(&mut self) {
        let driver = self.device.driver();
        driver.tell_end_of(self.handle);
        if let Some((owners, number)) = self.entered.take()
            && !driver.is_forked()
        {
            owners.remove(number);
        }
        if !self.destroys {
            return;
        }
        // A context that went first took the stream along, and not every driver notices.
        let Ok(_context) = self.device.enter() else { return };
        // SAFETY: taken in `own`, destroyed once here; it is alive, as the context is still the one that it
        // was made in.
        let _: Result<(), Failure> = unsafe { driver.cuStreamDestroy_v2(self.handle.raw()) };
    }
}

/// The owners of a driver's streams, by the streams' numbers: what is borrowed again shares the owner, so that
/// the end is told once, after the last of them.
#[derive(Default)]
pub(super) struct Owners {
    by_number: Mutex<HashMap<u64, Weak<Owner>>>,
    /// One was removed.
    removed: Condvar,
}

impl Owners {
    fn by_number(&self) -> MutexGuard<'_, HashMap<u64, Weak<Owner>>> {
        self.by_number.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn remove(&self, number: u64) {
        self.by_number().remove(&number);
        self.removed.notify_all();
    }
}

/// The driver's number of a stream of a device whose context is current.
///
/// # Safety
/// The stream is alive.
pub(super) unsafe fn number_of(device: &Device, handle: StreamHandle) -> Result<u64> {
    let mut number = 0;
    // SAFETY: the stream is alive, by the caller; the pointer is to a live u64.
    unsafe { device.driver().cuStreamGetId(handle.raw(), &mut number) }?;
    Ok(number)
}

/// The owner of a new stream, from here on destroyed whatever comes next.
///
/// # Safety
/// The stream is alive, of the device whose context is current, and nobody else destroys it.
pub(super) unsafe fn own(device: &Device, handle: StreamHandle) -> Result<Arc<Owner>> {
    let mut owner = Owner { device: device.clone(), handle, destroys: true, entered: None };
    // SAFETY: as the caller vouches.
    let number = unsafe { number_of(device, handle) }?;
    let driver = device.driver();
    let owners = driver.companion::<Owners>();
    owner.handle = handle.with_number(number, driver.realm());
    owner.entered = Some((Arc::clone(owners), number));
    driver.note_life_of(owner.handle, device.context_id());
    let owner = Arc::new(owner);
    owners.by_number().insert(number, Arc::downgrade(&owner));
    Ok(owner)
}

/// The owner of a stream that somebody else destroys, or the library itself: a new one only if there is none.
/// Waits while the end of the last one is told; [`Error::StreamEnded`] where that waits for this thread.
///
/// # Safety
/// The stream is alive, of the device whose context is current, and does not capture.
pub(super) unsafe fn borrow(device: &Device, handle: StreamHandle) -> Result<Arc<Owner>> {
    // SAFETY: as the caller vouches.
    let number = unsafe { number_of(device, handle) }?;
    let driver = device.driver();
    let owners = driver.companion::<Owners>();
    let handle = handle.with_number(number, driver.realm());
    let mut by_number = owners.by_number();
    let mut is_asked = false;
    while let Some(known) = by_number.get(&number) {
        if let Some(owner) = known.upgrade() {
            return Ok(owner);
        }
        // Its last value is being dropped, by another thread: none of what is told there borrows a stream. But it
        // may wait for a function of the caller's that does, in this thread.
        if !is_asked {
            drop(by_number);
            if driver.awaits_this_thread(handle) {
                return Err(Error::StreamEnded);
            }
            (by_number, is_asked) = (owners.by_number(), true);
            continue;
        }
        by_number = owners.removed.wait(by_number).unwrap_or_else(PoisonError::into_inner);
    }
    let owner = Arc::new(Owner {
        device: device.clone(),
        handle,
        destroys: false,
        entered: Some((Arc::clone(owners), number)),
    });
    driver.note_life_of(owner.handle, device.context_id());
    by_number.insert(number, Arc::downgrade(&owner));
    Ok(owner)
}
