//! Where a client's server is.

use std::ffi::{CString, c_char, c_void};
use std::os::unix::ffi::OsStrExt;

use super::{ask, visitor, vpmm_gms, vpmm_gms_visit_key, with_manager};
use gms::client::MemoryManager;

use crate::guard::{guard, text};
use crate::status::vpmm_status;

/// Says which tag's server it is. If the path is the device's usual one for it,
/// `gms_UUID_TAG.sock` in the folder of the sockets, it is found anew by the first `vpmm_gms_connect`
/// after each `vpmm_gms_abort`: a process that was moved to another GPU finds that one's server. A path
/// of the caller's own stays.
///
/// # Safety
/// `gms` is null or a handle; `tag` is null or ends with a zero byte.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vpmm_gms_set_tag(gms: *const vpmm_gms, tag: *const c_char) -> vpmm_status {
    let work = |manager: &mut MemoryManager| {
        // SAFETY: the caller vouches for it.
        Ok(manager.set_tag(unsafe { text(tag, "tag") }?)?)
    };
    // SAFETY: the caller vouches for it.
    unsafe { with_manager(gms, work) }
}

/// Calls a function with the path of the server's socket.
///
/// # Safety
/// `gms` is null or a handle; the function may be called with `context`, and lets no exception out.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vpmm_gms_socket_path(
    gms: *const vpmm_gms,
    visit: vpmm_gms_visit_key,
    context: *mut c_void,
) -> vpmm_status {
    guard(|| {
        let visit = visitor(visit)?;
        // SAFETY: the caller vouches for it.
        let path = unsafe { ask(gms, |manager| Ok(manager.socket_path().to_owned())) }?;
        // A path that was made from one without a zero byte has none.
        let path = CString::new(path.as_os_str().as_bytes()).unwrap_or_default();
        // SAFETY: the caller vouches for it.
        unsafe { visit(context, path.as_ptr()) };
        Ok(())
    })
}
