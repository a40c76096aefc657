//! The resource that everybody finds by the device.

#![forbid(unsafe_code)]

use std::collections::HashMap;
use std::fmt;
use std::sync::{Arc, PoisonError, RwLock, RwLockReadGuard, RwLockWriteGuard};

use super::memory_resource::MemoryResource;
use crate::device::Device;
use crate::error::Result;
use crate::pool::Pool;

type Shared = Arc<dyn MemoryResource>;

/// The resources that were made current, by the device's number: one book for each driver.
#[derive(Default)]
struct Book(RwLock<HashMap<u32, Shared>>);

impl Book {
    fn of(device: &Device) -> &Arc<Self> {
        device.driver().companion::<Self>()
    }

    fn read(&self) -> RwLockReadGuard<'_, HashMap<u32, Shared>> {
        self.0.read().unwrap_or_else(PoisonError::into_inner)
    }

    fn write(&self) -> RwLockWriteGuard<'_, HashMap<u32, Shared>> {
        self.0.write().unwrap_or_else(PoisonError::into_inner)
    }
}

/// The device's current resource: the one that was [made current](set_current) last, else the device's
/// [current pool](Pool::current). The same for all threads, however often the device was opened; each
/// [`Driver`](crate::Driver) has its own. RMM: `get_current_device_resource`.
///
/// ```
/// # fn main() -> Result<(), Box<dyn std::error::Error>> {
/// # let sim = cuda_sim::Simulator::builder().build()?;
/// # let driver = vpmm::Driver::new(sim.driver())?;
/// # let device = driver.device(0)?;
/// # let stream = device.stream()?;
/// use std::sync::Arc;
/// use vpmm::MemoryResource;
/// use vpmm::resource::{DeviceMalloc, Limiting, current, current_for_scope, reset_current};
///
/// let limiting = Arc::new(Limiting::new(DeviceMalloc::new(&device), 1 << 20));
/// {
///     let _scope = current_for_scope(&device, limiting.clone())?;
///     let ptr = current(&device)?.allocate(1000, 256, stream.handle())?;
///     assert_eq!(limiting.allocated_bytes(), 1024);
///     current(&device)?.deallocate(ptr, 1000, 256, stream.handle())?;
/// }
/// assert_eq!(current(&device)?.describe().name(), "vpmm");
/// # vpmm::Pool::forget_current(&device);
/// # Ok(())
/// # }
/// ```
///
/// # Errors
/// Those of [`Pool::new`], when the default pool is made; [`Error::Forked`](crate::Error::Forked).
pub fn current(device: &Device) -> Result<Shared> {
    device.driver().check_process()?;
    let known = Book::of(device).read().get(&device.ordinal()).cloned();
    match known {
        Some(resource) => Ok(resource),
        None => Ok(Arc::new(Pool::current(device)?)),
    }
}

/// Makes a resource its device's current one, for all threads; returns the one that was made current
/// before, if there was one. Those who got that one go on with it.
///
/// The driver's value keeps the resource, and so itself, until [`reset_current`] or the process ends.
/// RMM: `set_current_device_resource`.
///
/// # Errors
/// [`Error::Forked`](crate::Error::Forked).
pub fn set_current(device: &Device, resource: Shared) -> Result<Option<Shared>> {
    device.driver().check_process()?;
    let book = Book::of(device);
    let former = book.write().insert(device.ordinal(), resource);
    Ok(former)
}

/// Lets go of the resource that was made current: the device's current pool takes its place. Returns it.
/// RMM: `reset_current_device_resource`.
///
/// # Errors
/// [`Error::Forked`](crate::Error::Forked).
pub fn reset_current(device: &Device) -> Result<Option<Shared>> {
    device.driver().check_process()?;
    let book = Book::of(device);
    let former = book.write().remove(&device.ordinal());
    Ok(former)
}

/// [Makes a resource current](set_current) until the guard is dropped, which makes the former one
/// current again; unless somebody has made another one current meanwhile.
///
/// # Errors
/// [`Error::Forked`](crate::Error::Forked).
pub fn current_for_scope(device: &Device, resource: Shared) -> Result<CurrentResource> {
    let former = set_current(device, Arc::clone(&resource))?;
    Ok(CurrentResource { device: device.clone(), resource, former })
}

/// Keeps a resource current: see [`current_for_scope`].
#[must_use = "dropping it makes the former resource current again"]
pub struct CurrentResource {
    device: Device,
    resource: Shared,
    former: Option<Shared>,
}

impl Drop for CurrentResource {
    fn drop(&mut self) {
        if self.device.driver().check_process().is_err() {
            return;
        }
        let book = Book::of(&self.device);
        let mut current = book.write();
        let ordinal = self.device.ordinal();
        let is_current = current.get(&ordinal).is_some_and(|now| Arc::ptr_eq(now, &self.resource));
        if !is_current {
            return;
        }
        // What is replaced is not the last handle, which is here: nothing ends under the lock.
        match self.former.take() {
            Some(former) => current.insert(ordinal, former),
            None => current.remove(&ordinal),
        };
    }
}

impl fmt::Debug for CurrentResource {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("CurrentResource").field("device", &self.device).finish_non_exhaustive()
    }
}
