//! Addresses that stand on one block of memory until a layout's allocations come to them.

use std::ffi::c_char;

use super::{held, vpmm_gms};
use crate::guard::{guard, make, put, text};
use crate::status::vpmm_status;

/// Sets the bytes of the block behind scratch mappings, 512 MiB if this is not called: a power of two, and
/// a multiple of the granularity. Before there are scratch mappings.
///
/// # Safety
/// `gms` is null or a handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vpmm_gms_set_scratch_block(
    gms: *const vpmm_gms,
    bytes: u64,
) -> vpmm_status {
    guard(|| {
        // SAFETY: the caller vouches for it.
        Ok(unsafe { held(gms) }?.manager()?.set_scratch_block(bytes)?)
    })
}

/// Reserves addresses for so many bytes with the block behind all of them, for reading and writing, for
/// allocations of a tag to come. Needs no lock. What is written there is lost.
///
/// # Safety
/// `gms` is null or a handle; `tag` is null or ends with a zero byte; `out` is null or has room for an
/// address.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vpmm_gms_create_scratch_mapping(
    gms: *const vpmm_gms,
    bytes: u64,
    tag: *const c_char,
    out: *mut u64,
) -> vpmm_status {
    let work = || {
        // SAFETY: the caller vouches for both.
        let (mut held, tag) = unsafe { (held(gms)?, text(tag, "tag")?) };
        Ok(held.manager()?.create_scratch_mapping(bytes, tag)?)
    };
    // SAFETY: the caller vouches for it.
    unsafe { make(out, work) }
}

/// Gives a scratch mapping up, with its address. Waits for the device first. `found`, which may be null,
/// gets 0 if there is none at the address, else 1.
///
/// # Safety
/// `gms` is null or a handle; `found` is null or has room for a number; the memory is not used again.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vpmm_gms_destroy_scratch_mapping(
    gms: *const vpmm_gms,
    address: u64,
    found: *mut u32,
) -> vpmm_status {
    guard(|| {
        // SAFETY: the caller vouches for it.
        let gone = unsafe { held(gms) }?.manager()?.destroy_scratch_mapping(address)?;
        if found.is_null() {
            return Ok(());
        }
        // SAFETY: the caller vouches for it.
        unsafe { put(found, "found", u32::from(gone)) }
    })
}

/// How many scratch mappings there are, the bytes that were asked for, and those of the memory behind
/// them. Each may be null.
///
/// # Safety
/// `gms` is null or a handle; the others are null or have room for a number each.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vpmm_gms_scratch_summary(
    gms: *const vpmm_gms,
    count: *mut u64,
    virtual_bytes: *mut u64,
    physical_bytes: *mut u64,
) -> vpmm_status {
    guard(|| {
        // SAFETY: the caller vouches for it.
        let summary = unsafe { held(gms) }?.manager()?.scratch_summary();
        let numbers = [
            (count, summary.count as u64),
            (virtual_bytes, summary.virtual_bytes),
            (physical_bytes, summary.physical_bytes),
        ];
        for (out, number) in numbers.into_iter().filter(|(out, _)| !out.is_null()) {
            // SAFETY: the caller vouches for it.
            unsafe { put(out, "out", number) }?;
        }
        Ok(())
    })
}

/// Makes scratch mappings, whose block was given up by `vpmm_gms_unmap_all`, mappings whose memory is
/// away: `vpmm_gms_reallocate_all` makes allocations for them and `vpmm_gms_remap_all` maps these.
///
/// # Safety
/// `gms` is null or a handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vpmm_gms_prepare_scratch(gms: *const vpmm_gms) -> vpmm_status {
    guard(|| {
        // SAFETY: the caller vouches for it.
        Ok(unsafe { held(gms) }?.manager()?.prepare_scratch_for_reallocation()?)
    })
}
