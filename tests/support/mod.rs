//! What several integration tests need to talk to a driver's table directly.

#![allow(dead_code, reason = "each test uses a part")]

use std::ptr::null_mut;

use cuda_sys::Driver;
use cuda_sys::types::*;

/// What a call that went well answers.
pub(crate) const DONE: CUresult = CUresult::CUDA_SUCCESS;

/// The smallest piece of physical memory, in bytes.
pub(crate) const GRANULE: u64 = 2 << 20;

/// Makes a driver call and answers its code.
macro_rules! call {
    ($driver:expr, $name:ident($($argument:expr),* $(,)?)) => {{
        let function = $driver.$name.expect(stringify!($name));
        // SAFETY: pointers are to live locals; the simulator checks handles and addresses.
        unsafe { function($($argument),*) }
    }};
}

/// Makes a driver call that must succeed.
macro_rules! ok {
    ($driver:expr, $name:ident($($argument:expr),* $(,)?)) => {
        assert_eq!(
            $crate::support::call!($driver, $name($($argument),*)),
            $crate::support::DONE,
            stringify!($name)
        )
    };
}

pub(crate) use {call, ok};

/// Initialises the driver and makes the first device's primary context current.
pub(crate) fn enter(driver: &Driver) {
    ok!(driver, cuInit(0));
    let mut context = null_mut();
    ok!(driver, cuDevicePrimaryCtxRetain(&mut context, 0));
    ok!(driver, cuCtxSetCurrent(context));
}

fn device() -> CUmemLocation {
    CUmemLocation { type_: CUmemLocationType::CU_MEM_LOCATION_TYPE_DEVICE, id: 0 }
}

/// A handle of physical memory on the first device.
pub(crate) fn create(driver: &Driver, bytes: u64) -> u64 {
    let prop = CUmemAllocationProp {
        type_: CUmemAllocationType::CU_MEM_ALLOCATION_TYPE_PINNED,
        location: device(),
        ..Default::default()
    };
    let mut handle = 0;
    ok!(driver, cuMemCreate(&mut handle, bytes as usize, &prop, 0));
    handle
}

/// A fresh range of addresses.
pub(crate) fn reserve(driver: &Driver, bytes: u64) -> u64 {
    let mut at = 0;
    ok!(driver, cuMemAddressReserve(&mut at, bytes as usize, 0, 0, 0));
    at
}

/// Opens mapped memory for the first device to read and write.
pub(crate) fn set_access(driver: &Driver, at: u64, bytes: u64) {
    let flags = CUmemAccess_flags::CU_MEM_ACCESS_FLAGS_PROT_READWRITE;
    let desc = CUmemAccessDesc { location: device(), flags };
    ok!(driver, cuMemSetAccess(at, bytes as usize, &desc, 1));
}

/// Maps a handle at a fresh address, open to the first device.
pub(crate) fn map_anew(driver: &Driver, handle: u64, bytes: u64) -> u64 {
    let at = reserve(driver, bytes);
    ok!(driver, cuMemMap(at, bytes as usize, 0, handle, 0));
    set_access(driver, at, bytes);
    at
}
