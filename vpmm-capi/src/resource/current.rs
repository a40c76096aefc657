//! A device's current resource.

use std::sync::{Arc, MutexGuard, PoisonError};

use stacks::Built;
use vpmm_core::Pool;
use vpmm_core::resource::{reset_current, set_current};

use super::open::{built_of, vpmm_resource};
use crate::driver::{Loaded, vpmm_driver};
use crate::guard::{given, make, with};
use crate::process;
use crate::status::vpmm_status;

type Currents = std::collections::HashMap<u32, Arc<Built>>;

fn currents(loaded: &Loaded) -> MutexGuard<'_, Currents> {
    loaded.current.lock().unwrap_or_else(PoisonError::into_inner)
}

/// A handle of a device's current resource: what was made current by `vpmm_resource_set_current`, else the
/// device's current pool, which for the driver of `vpmm_process_driver` is the process's.
///
/// # Safety
/// `driver` is null or a handle; `out` is null or has room for a pointer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vpmm_resource_current(
    driver: *const vpmm_driver,
    device: u32,
    out: *mut *mut vpmm_resource,
) -> vpmm_status {
    let work = || {
        // SAFETY: the caller vouches for it.
        let loaded = Arc::clone(&unsafe { given(driver, "driver") }?.0);
        loaded.check_process()?;
        let known = currents(&loaded).get(&device).cloned();
        let built = match known {
            Some(built) => built,
            None if process::is_own(&loaded) => Arc::new(built_of(process::pool(device)?.clone())),
            None => Arc::new(built_of(Pool::current(&loaded.device(device)?)?)),
        };
        Ok(vpmm_resource::handle(built, loaded, device))
    };
    // SAFETY: the caller vouches for it.
    unsafe { make(out, work) }
}

/// Makes a resource a device's current one, for all threads; with null the device's current pool is it
/// again. The driver keeps the resource until another one is made current: before the driver's last handle
/// is released, call this with null.
///
/// # Safety
/// `driver` is null or a handle; `resource` is null or a handle of the same driver's.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vpmm_resource_set_current(
    driver: *const vpmm_driver,
    device: u32,
    resource: *const vpmm_resource,
) -> vpmm_status {
    let work = |driver: &vpmm_driver| {
        let opened = driver.0.device(device)?;
        // SAFETY: the caller vouches for it.
        let built = unsafe { resource.as_ref() }.map(|resource| Arc::clone(resource.built()));
        let mut currents = currents(&driver.0);
        // What was current ends, if it does, without the lock.
        let former = match built {
            Some(built) => {
                let core = set_current(&opened, Arc::clone(built.resource()))?;
                (currents.insert(device, built), core)
            }
            None => {
                let core = reset_current(&opened)?;
                (currents.remove(&device), core)
            }
        };
        drop(currents);
        drop(former);
        Ok(())
    };
    // SAFETY: the caller vouches for it.
    unsafe { with(driver, "driver", work) }
}
