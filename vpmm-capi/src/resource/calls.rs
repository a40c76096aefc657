//! Memory of resources.

use std::ffi::c_void;

use vpmm_core::DevicePtr;

use super::open::vpmm_resource;
use crate::guard::{given, make, with};
use crate::pool::{of_pointer, to_pointer};
use crate::status::vpmm_status;

/// Allocates for use on a stream. `align` is a power of two, and 0 for the resource's own, which is at
/// least 256. 0 bytes give a null pointer, which can be deallocated.
///
/// # Safety
/// `resource` is null or a handle; the stream is alive, and of the resource's device; `out` is null or
/// has room for a pointer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vpmm_resource_allocate(
    resource: *const vpmm_resource,
    bytes: usize,
    align: usize,
    stream: *mut c_void,
    out: *mut *mut c_void,
) -> vpmm_status {
    let work = || {
        // SAFETY: the caller vouches for it.
        let resource = unsafe { given(resource, "resource") }?;
        // SAFETY: the caller vouches for it.
        let stream = unsafe { resource.stream(stream) };
        let ptr = resource.built().resource().allocate(bytes, align.max(1), stream)?;
        resource.keep_mark(ptr);
        Ok(to_pointer(ptr))
    };
    // SAFETY: the caller vouches for it.
    unsafe { make(out, work) }
}

/// Frees an allocation of so many bytes with that alignment, both as they were asked for, once everything
/// enqueued on the stream so far has finished. Null with 0 bytes is nothing.
///
/// # Safety
/// As `vpmm_resource_allocate`; nobody uses the memory in work that is enqueued later, or that is not
/// ordered before. Not every resource finds a wrong pointer: `vpmm_resource_facts`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vpmm_resource_deallocate(
    resource: *const vpmm_resource,
    pointer: *mut c_void,
    bytes: usize,
    align: usize,
    stream: *mut c_void,
) -> vpmm_status {
    let work = |resource: &vpmm_resource| {
        // SAFETY: the caller vouches for it.
        let stream = unsafe { resource.stream(stream) };
        let ptr = resource.take_mark(of_pointer(pointer));
        let freed = resource.built().resource().deallocate(ptr, bytes, align.max(1), stream);
        if freed.is_err() {
            resource.keep_mark(ptr);
        }
        Ok(freed?)
    };
    // SAFETY: the caller vouches for it.
    unsafe { with(resource, "resource", work) }
}

/// Notes that an allocation is used on a further stream, as `vpmm_record_stream`. `VPMM_UNSUPPORTED`
/// where the resource takes no such notes.
///
/// # Safety
/// `resource` is null or a handle; the stream is alive.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vpmm_resource_record_stream(
    resource: *const vpmm_resource,
    pointer: *mut c_void,
    stream: *mut c_void,
) -> vpmm_status {
    let work = |resource: &vpmm_resource| {
        // SAFETY: the caller vouches for it.
        let stream = unsafe { resource.stream(stream) };
        Ok(resource.built().resource().record_stream(of_pointer(pointer), stream)?)
    };
    // SAFETY: the caller vouches for it.
    unsafe { with(resource, "resource", work) }
}

/// Host memory is freed by the very pointer that was given out, of which C has the address only.
impl vpmm_resource {
    fn is_marked(&self) -> bool {
        let facts = self.built().resource().facts();
        facts.host_accessible && !facts.managed
    }

    fn keep_mark(&self, ptr: DevicePtr) {
        if ptr != DevicePtr::from_address(ptr.address()) && self.is_marked() {
            self.marks().insert(ptr.address(), ptr);
        }
    }

    fn take_mark(&self, ptr: DevicePtr) -> DevicePtr {
        if !self.is_marked() {
            return ptr;
        }
        self.marks().remove(&ptr.address()).unwrap_or(ptr)
    }
}
