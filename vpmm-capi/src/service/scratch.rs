//! Addresses that stand on one block of memory until a layout's allocations come to them.

use std::ffi::c_char;

use gms::client::MemoryManager;

use super::{make_with_manager, tensors, vpmm_gms, with_manager};
use crate::guard::{given, guard, put_if, text};
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
    // SAFETY: the caller vouches for it.
    unsafe { with_manager(gms, |manager| Ok(manager.set_scratch_block(bytes)?)) }
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
    let work = |manager: &mut MemoryManager| {
        // SAFETY: the caller vouches for it.
        let tag = unsafe { text(tag, "tag") }?;
        Ok(manager.create_scratch_mapping(bytes, tag)?)
    };
    // SAFETY: the caller vouches for both.
    unsafe { make_with_manager(gms, out, work) }
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
        let gms = unsafe { given(gms, "gms") }?;
        let mut held = gms.held()?;
        let manager = held.manager()?;
        let kept = manager.keep_addresses(address);
        let gone = manager.destroy_scratch_mapping(address)?;
        if gone {
            tensors::forget(&gms.manager, address, kept);
        }
        // SAFETY: the caller vouches for it.
        unsafe { put_if(found, u32::from(gone)) };
        Ok(())
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
    let work = |manager: &mut MemoryManager| {
        let summary = manager.scratch_summary();
        // SAFETY: the caller vouches for it.
        unsafe { put_if(count, summary.count as u64) };
        // SAFETY: the caller vouches for it.
        unsafe { put_if(virtual_bytes, summary.virtual_bytes) };
        // SAFETY: the caller vouches for it.
        unsafe { put_if(physical_bytes, summary.physical_bytes) };
        Ok(())
    };
    // SAFETY: the caller vouches for it.
    unsafe { with_manager(gms, work) }
}

/// Makes scratch mappings, whose block was given up by `vpmm_gms_unmap_all`, mappings whose memory is
/// away: `vpmm_gms_reallocate_all` makes allocations for them and `vpmm_gms_remap_all` maps these.
///
/// # Safety
/// `gms` is null or a handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vpmm_gms_prepare_scratch(gms: *const vpmm_gms) -> vpmm_status {
    // SAFETY: the caller vouches for it.
    unsafe { with_manager(gms, |manager| Ok(manager.prepare_scratch_for_reallocation()?)) }
}
