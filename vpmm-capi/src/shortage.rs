//! What a program does when memory runs out.

use std::ffi::{CString, c_char, c_void};

use vpmm_core::{OutOfMemoryCallback, Recovery};

use crate::context::{Context, vpmm_finish};
use crate::guard::{Failure, given, make, release};
use crate::pool::vpmm_pool;
use crate::status::vpmm_status;

/// Asked when a request finds no memory, with what it was registered with and the error's text. It may
/// free allocations of the pool, or of others, and answers 1 if the request is to be tried again, 0 if
/// it can do nothing more.
///
/// It runs in the thread that asked for memory, and lets no exception out. What it allocates itself asks
/// no callback.
pub type vpmm_shortage_function =
    Option<unsafe extern "C" fn(context: *mut c_void, text: *const c_char) -> u32>;

/// A function that was registered.
pub struct vpmm_shortage {
    _callback: OutOfMemoryCallback,
}

/// Registers a function for requests that find no memory. Functions are asked in the order of their
/// registration; one that answers 1 is asked again if the request still fails, 256 times at most.
///
/// `finish`, which may be null, is called once when the registration was given back, or the pool has
/// ended, and the calls under way have ended, too: in the thread in which the last of these happens. It
/// is not where this call fails; nor does a child of the process finish what its parent has registered.
///
/// # Safety
/// `pool` is null or a handle; the function may be called with `context` from every thread that
/// allocates, until it is finished; `out` is null or has room for a pointer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vpmm_pool_on_out_of_memory(
    pool: *const vpmm_pool,
    function: vpmm_shortage_function,
    context: *mut c_void,
    finish: vpmm_finish,
    out: *mut *mut vpmm_shortage,
) -> vpmm_status {
    let work = || {
        // SAFETY: the caller vouches for it.
        let pool = unsafe { given(pool, "pool") }?;
        let Some(function) = function else { return Err(Failure::null("function")) };
        // SAFETY: the caller vouches for it.
        let context = unsafe { Context::new(context, finish) };
        let callback = pool.pool().on_out_of_memory(move |_, error| {
            // The text of an error has no zero byte.
            let text = CString::new(error.to_string()).unwrap_or_default();
            // SAFETY: whoever registered it vouches for it.
            match unsafe { function(context.get(), text.as_ptr()) } {
                0 => Recovery::GiveUp,
                _ => Recovery::Retry,
            }
        });
        let handle = Box::into_raw(Box::new(vpmm_shortage { _callback: callback }));
        Ok(handle)
    };
    // SAFETY: the caller vouches for it.
    unsafe { make(out, work) }
}

/// Removes a function. This waits for nothing: a call of it that another thread is in goes on to its end,
/// and only then it is finished.
///
/// # Safety
/// `shortage` is null, or a handle that is not used again.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vpmm_shortage_release(shortage: *mut vpmm_shortage) {
    // SAFETY: made by `Box::into_raw` in `vpmm_pool_on_out_of_memory`, given back once.
    unsafe { release(shortage) };
}
