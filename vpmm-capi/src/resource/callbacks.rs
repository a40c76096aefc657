//! Functions of the program as resources, and as what makes room.

use std::ffi::c_void;
use std::sync::Arc;

use stacks::Built;
use vpmm_core::resource::{Callback, Facts, FailureCallback};

use super::open::vpmm_resource;
use crate::context::{Context, vpmm_finish};
use crate::driver::vpmm_driver;
use crate::guard::{Failure, given, make};
use crate::pool::{of_pointer, to_pointer};
use crate::status::vpmm_status;

/// Allocates bytes for use on a stream, at a multiple of `align`; null where there is no memory.
pub type vpmm_resource_allocate_function = Option<
    unsafe extern "C" fn(
        context: *mut c_void,
        bytes: usize,
        align: usize,
        stream: *mut c_void,
    ) -> *mut c_void,
>;

/// Frees what the other function has allocated, with the bytes and the alignment of then.
pub type vpmm_resource_deallocate_function = Option<
    unsafe extern "C" fn(
        context: *mut c_void,
        pointer: *mut c_void,
        bytes: usize,
        align: usize,
        stream: *mut c_void,
    ),
>;

/// Asked when there is no memory for so many bytes: 1 to try once more, 0 to give up.
pub type vpmm_resource_failure_function =
    Option<unsafe extern "C" fn(context: *mut c_void, bytes: usize) -> u32>;

/// A resource of two functions, for memory of a device. They are not called for 0 bytes. `finish`, which
/// may be null, is called when the resource has ended; it is not where this call fails.
///
/// # Safety
/// `driver` is null or a handle; the functions may be called with `context` from every thread that uses the
/// resource, until it has ended, and let no exception out; what `allocate` returns is the caller's until it
/// is deallocated; `out` is null or has room for a pointer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vpmm_resource_callback(
    driver: *const vpmm_driver,
    device: u32,
    allocate: vpmm_resource_allocate_function,
    deallocate: vpmm_resource_deallocate_function,
    context: *mut c_void,
    finish: vpmm_finish,
    out: *mut *mut vpmm_resource,
) -> vpmm_status {
    let work = || {
        // SAFETY: the caller vouches for it.
        let loaded = Arc::clone(&unsafe { given(driver, "driver") }?.0);
        let allocate = allocate.ok_or_else(|| Failure::null("allocate"))?;
        let deallocate = deallocate.ok_or_else(|| Failure::null("deallocate"))?;
        let opened = loaded.device(device)?;
        // SAFETY: the caller vouches for it.
        let context = Arc::new(unsafe { Context::new(context, finish) });
        let same = Arc::clone(&context);
        let callback = Callback::new(
            Facts::of_device_memory().with_stream_order(true),
            move |bytes, align, stream| {
                // SAFETY: whoever gave it vouches for it.
                let made = unsafe { allocate(context.get(), bytes, align, stream.raw().cast()) };
                Ok(of_pointer(made))
            },
            move |ptr, bytes, align, stream| {
                // SAFETY: as above.
                unsafe {
                    deallocate(same.get(), to_pointer(ptr), bytes, align, stream.raw().cast());
                }
                Ok(())
            },
        );
        let resource = Arc::new(callback.with_device(&opened));
        Ok(vpmm_resource::handle(Arc::new(Built::new(resource, None)), loaded, device))
    };
    // SAFETY: the caller vouches for it.
    unsafe { make(out, work) }
}

/// A resource on another one that asks a function when that has no memory, again and again until it
/// answers 0. `finish` as in `vpmm_resource_callback`.
///
/// # Safety
/// `upstream` is null or a handle; the function may be called with `context` from every thread that
/// allocates, until the resource has ended, and lets no exception out; `out` is null or has room for a
/// pointer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vpmm_resource_failure_callback(
    upstream: *const vpmm_resource,
    function: vpmm_resource_failure_function,
    context: *mut c_void,
    finish: vpmm_finish,
    out: *mut *mut vpmm_resource,
) -> vpmm_status {
    let work = || {
        // SAFETY: the caller vouches for it.
        let below = unsafe { given(upstream, "upstream") }?;
        let function = function.ok_or_else(|| Failure::null("function"))?;
        below.built().check_room(1)?;
        // SAFETY: the caller vouches for it.
        let context = unsafe { Context::new(context, finish) };
        let asked = move |bytes: usize, _: &vpmm_core::Error| {
            // SAFETY: whoever gave it vouches for it.
            unsafe { function(context.get(), bytes) != 0 }
        };
        let resource = FailureCallback::new(Arc::clone(below.built().resource()), asked);
        Ok(below.under(Built::new(Arc::new(resource), Some(Arc::clone(below.built())))))
    };
    // SAFETY: the caller vouches for it.
    unsafe { make(out, work) }
}
