//! What a program's functions are called with.

use std::ffi::c_void;

/// Called once, when nothing is called with `context` any more. It lets no exception out.
pub type vpmm_finish = Option<unsafe extern "C" fn(context: *mut c_void)>;

/// What functions are called with, until it is finished.
pub(crate) struct Context {
    pointer: *mut c_void,
    finish: vpmm_finish,
}

// SAFETY: it is only handed on; whoever gave it vouches for every thread that calls the functions.
unsafe impl Send for Context {}
// SAFETY: as above.
unsafe impl Sync for Context {}

impl Context {
    /// # Safety
    /// The functions, and `finish`, can be called with `pointer` from every thread until it is finished.
    pub(crate) unsafe fn new(pointer: *mut c_void, finish: vpmm_finish) -> Self {
        Self { pointer, finish }
    }

    pub(crate) fn get(&self) -> *mut c_void {
        self.pointer
    }
}

impl Drop for Context {
    fn drop(&mut self) {
        if let Some(finish) = self.finish {
            // SAFETY: whoever gave it vouches for it; all that calls the other functions is gone.
            unsafe { finish(self.pointer) };
        }
    }
}
