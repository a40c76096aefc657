//! Drivers: CUDA's, or the simulated one.

use std::collections::HashMap;
use std::ffi::{CStr, c_char};
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex, PoisonError, TryLockError};

use cuda_sim::{SimError, Simulator};
use stacks::Built;
use vpmm_core::{Device, DevicePtr, Driver, Error, Pool, StreamHandle};

use crate::guard::{Failure, given, guard, make, put, put_if, release};
use crate::known::Known;
use crate::status::vpmm_status;

/// A driver that was loaded. Whatever was made with it keeps it.
pub struct vpmm_driver(pub(crate) Arc<Loaded>);

pub(crate) struct Loaded {
    driver: Driver,
    devices: Mutex<HashMap<u32, Device>>,
    /// Streams whose end is told, by their raw handles.
    pub(crate) streams: Known,
    /// Resources that were made current, by the device's number.
    pub(crate) current: Mutex<HashMap<u32, Arc<Built>>>,
    /// Pointers of resources that want more back than the address, by that.
    pub(crate) marks: Mutex<HashMap<u64, DevicePtr>>,
    /// Whether there may be some of resources that are not the host's throughout.
    pub(crate) has_mixed_bins: AtomicBool,
    /// Last, so that it is there for all others.
    _simulator: Option<Simulator>,
}

impl Loaded {
    /// Loads a driver by its name; without one, that which VPMM_DEVICE names.
    pub(crate) fn load(name: Option<&str>) -> Result<Arc<Self>, Failure> {
        let name = match name {
            Some(name) => name.to_owned(),
            // Set to nothing it names none.
            None => std::env::var_os("VPMM_DEVICE")
                .filter(|name| !name.is_empty())
                .map_or("cuda".to_owned(), |name| name.to_string_lossy().into_owned()),
        };
        let (driver, simulator) = match name.as_str() {
            "cuda" => (Driver::load()?, None),
            name => {
                let simulator = Simulator::builder().devices(simulated_devices(name)?);
                let simulator = simulator.build().map_err(|error| {
                    let status = match error {
                        SimError::NoSlot { .. } => vpmm_status::VPMM_IN_USE,
                        _ => vpmm_status::VPMM_INVALID_ARGUMENT,
                    };
                    Failure::new(status, error.to_string())
                })?;
                (Driver::new(simulator.driver())?, Some(simulator))
            }
        };
        Ok(Arc::new(Self {
            streams: Known::of(driver.clone()),
            driver,
            devices: Mutex::default(),
            current: Mutex::default(),
            marks: Mutex::default(),
            has_mixed_bins: AtomicBool::new(false),
            _simulator: simulator,
        }))
    }

    /// The driver's functions.
    pub(crate) fn raw(&self) -> &cuda_sys::Driver {
        self.driver.raw()
    }

    pub(crate) fn free_any(&self, ptr: DevicePtr, stream: StreamHandle) -> vpmm_core::Result<()> {
        Pool::free_any(&self.driver, ptr, stream)
    }

    /// Turns a child of the process away, before it takes a lock that a thread of its parent may have held.
    pub(crate) fn check_process(&self) -> Result<(), Failure> {
        if self.driver.is_forked() { Err(Error::Forked.into()) } else { Ok(()) }
    }

    pub(crate) fn device(&self, ordinal: u32) -> Result<Device, Failure> {
        self.check_process()?;
        let mut devices = self.devices.lock().unwrap_or_else(PoisonError::into_inner);
        if let Some(device) = devices.get(&ordinal) {
            return Ok(device.clone());
        }
        let device = self.driver.device(ordinal)?;
        devices.insert(ordinal, device.clone());
        Ok(device)
    }

    /// Whether a thread just now retains a device's context.
    pub(crate) fn is_being_made(&self) -> bool {
        matches!(self.devices.try_lock(), Err(TryLockError::WouldBlock))
    }
}

/// As many as there are up to the last one that is named, of which each is made.
fn simulated_devices(name: &str) -> Result<usize, Failure> {
    let last = match name.strip_prefix("sim:") {
        Some(last) => last.parse().ok().filter(|last| *last < Simulator::MAX_DEVICES),
        None => (name == "sim").then_some(0),
    };
    last.map(|last: usize| last + 1).ok_or_else(|| {
        let last = Simulator::MAX_DEVICES - 1;
        let text = format!("there is no device {name:?}; known: cuda, sim, sim:1 to sim:{last}");
        Failure::new(vpmm_status::VPMM_INVALID_ARGUMENT, text)
    })
}

/// Loads a driver. `device` is `"cuda"`, `"sim"` for the simulated driver, which needs no GPU, `"sim:1"`
/// for one with two devices (up to `"sim:31"`), or null for what the environment variable VPMM_DEVICE
/// says: one of these, or `"cuda"` where it is not set, or set to nothing.
///
/// # Safety
/// `device` is null or ends with a zero byte; `out` is null or has room for a pointer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vpmm_driver_load(
    device: *const c_char,
    out: *mut *mut vpmm_driver,
) -> vpmm_status {
    let work = || {
        let name = if device.is_null() {
            None
        } else {
            // SAFETY: the caller vouches for it.
            Some(unsafe { CStr::from_ptr(device) }.to_string_lossy())
        };
        let loaded = Loaded::load(name.as_deref())?;
        let handle = Box::new(vpmm_driver(loaded));
        Ok(Box::into_raw(handle))
    };
    // SAFETY: the caller vouches for it.
    unsafe { make(out, work) }
}

/// Gives a handle back. The driver ends with its last handle and with all that was made with it. Until then
/// streams that were lent stay so, and are to be taken back before they end (`vpmm_stream_take_back`); those of
/// `vpmm_stream_create` that nobody has destroyed are destroyed then.
///
/// # Safety
/// `driver` is null, or a handle that is not used again.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vpmm_driver_release(driver: *mut vpmm_driver) {
    // SAFETY: made by `Box::into_raw` in `vpmm_driver_load`, given back once.
    unsafe { release(driver) };
}

/// How many devices the driver shows.
///
/// # Safety
/// `driver` is null or a handle; `out` is null or has room for a number.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vpmm_driver_device_count(
    driver: *const vpmm_driver,
    out: *mut u32,
) -> vpmm_status {
    guard(|| {
        // SAFETY: the caller vouches for it.
        let loaded = &unsafe { given(driver, "driver") }?.0;
        loaded.check_process()?;
        let count = loaded.driver.device_count()?;
        // SAFETY: the caller vouches for it.
        unsafe { put(out, "out", count) }
    })
}

/// Bytes of a device's memory that nobody uses, and in `total`, which may be null, all of it, as the
/// driver counts them.
///
/// # Safety
/// `driver` is null or a handle; `total` and `free` are null or have room for a number.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vpmm_driver_memory(
    driver: *const vpmm_driver,
    device: u32,
    total: *mut u64,
    free: *mut u64,
) -> vpmm_status {
    guard(|| {
        // SAFETY: the caller vouches for it.
        let device = unsafe { given(driver, "driver") }?.0.device(device)?;
        let bytes = (device.free_memory()?, device.total_memory()?);
        // SAFETY: the caller vouches for it.
        unsafe { put(free, "free", bytes.0) }?;
        // SAFETY: the caller vouches for it.
        unsafe { put_if(total, bytes.1) };
        Ok(())
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn it_is_being_made_while_a_thread_retains_a_context() {
        let loaded = Loaded::load(Some("sim")).ok().unwrap();
        let devices = loaded.devices.lock().unwrap();
        assert!(loaded.is_being_made());
        drop(devices);
        assert!(!loaded.is_being_made());
    }
}
