//! What a block of Python's opens. An exception of a signal's handler comes between any two steps of Python's: so what
//! was opened is noted by what opens it, in a number that the block gives back however it is left, with cffi's
//! `with ffi.gc(…)`. Where the block itself never came to that, the number ends with what refers to it.

use std::ffi::c_char;

use crate::guard::{given, guard, make, text};
use crate::process;
use crate::service::{tensors, vpmm_gms, vpmm_gms_heap};
use crate::status::vpmm_status;

/// As `vpmm_process_push_tag_on`, until `vpmm_python_close`.
///
/// # Safety
/// `token` is to a number, 0 at first, that nobody else changes; `tag` is null or ends with a zero byte.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vpmm_python_push_tag(
    token: *mut u64,
    tag: *const c_char,
    device: u32,
) -> vpmm_status {
    // SAFETY: the caller vouches for it.
    let work = || Ok(process::push_tag(unsafe { text(tag, "tag") }?, device));
    // SAFETY: as above.
    unsafe { make(token, work) }
}

/// As `vpmm_gms_heap_push`, until `vpmm_python_close`.
///
/// # Safety
/// As `vpmm_python_push_tag`; `heap` is null or a handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vpmm_python_push_heap(
    token: *mut u64,
    heap: *const vpmm_gms_heap,
) -> vpmm_status {
    // SAFETY: the caller vouches for it.
    let work = || Ok(unsafe { given(heap, "heap") }?.push());
    // SAFETY: as above.
    unsafe { make(token, work) }
}

/// As `vpmm_gms_torch_begin`, until `vpmm_python_end_torch`.
///
/// # Safety
/// As `vpmm_python_push_tag`; `gms` is null or a handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vpmm_python_begin_torch(
    token: *mut u64,
    gms: *const vpmm_gms,
    tag: *const c_char,
    scratch: u32,
) -> vpmm_status {
    let work = || {
        // SAFETY: the caller vouches for both.
        let (gms, tag) = unsafe { (given(gms, "gms")?, text(tag, "tag")?) };
        gms.begin_torch(tag, scratch != 0)
    };
    // SAFETY: as above.
    unsafe { make(token, work) }
}

/// Ends what `vpmm_python_begin_torch` has begun with the number, in the same thread; nothing if it has not.
///
/// # Safety
/// As `vpmm_python_push_tag`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vpmm_python_end_torch(token: *mut u64) {
    // SAFETY: the caller vouches for it.
    unsafe { close_by(token, tensors::end) };
}

/// Closes what one of the others has opened with the number, in the same thread; nothing if none has.
///
/// # Safety
/// As `vpmm_python_push_tag`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vpmm_python_close(token: *mut u64) {
    // SAFETY: the caller vouches for it.
    unsafe { close_by(token, process::close) };
}

/// # Safety
/// As `vpmm_python_push_tag`.
unsafe fn close_by(token: *mut u64, close: fn(u64)) {
    let _ = guard(|| {
        // SAFETY: the caller vouches for it.
        match unsafe { token.replace(0) } {
            0 => {}
            number => close(number),
        }
        Ok(())
    });
}

#[cfg(test)]
mod tests {
    use std::ptr;

    use super::*;
    use crate::process::vpmm_process_pop_tag;

    /// Nobody could close it.
    #[test]
    fn without_room_for_the_number_nothing_is_opened() {
        // SAFETY: a text that ends with a zero byte, and no room.
        let pushed = unsafe { vpmm_python_push_tag(ptr::null_mut(), c"weights".as_ptr(), 0) };
        assert_eq!(pushed, vpmm_status::VPMM_INVALID_ARGUMENT);
        assert_eq!(vpmm_process_pop_tag(), vpmm_status::VPMM_INVALID_ARGUMENT, "none is open");
    }
}
