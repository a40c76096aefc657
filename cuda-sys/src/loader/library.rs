//! One dlopened library. The only room that calls libloading.

use std::ffi::{CStr, OsStr, c_void};
use std::mem::ManuallyDrop;
use std::ptr::null;

use libloading::os::unix::{Library as Handle, RTLD_LOCAL, RTLD_NOW};

use super::LoadError;

/// An open library. It is never closed: CUDA's libraries start threads, register
/// exit handlers and hand out pointers, none of which survive `dlclose`.
pub(super) struct Library(ManuallyDrop<Handle>);

impl Library {
    /// Opens a library by the dynamic linker's rules: a name without a slash is
    /// searched for, and matches a library of that soname which is already loaded.
    ///
    /// # Safety
    /// The library's initialisers run: they must be sound to run in this process.
    pub(super) unsafe fn open(name: &OsStr) -> Result<Self, LoadError> {
        if name.is_empty() {
            // It would be the program itself, with what that has loaded, under no name.
            let (origin, source) = ("\"\"".to_owned(), "the path is empty".into());
            return Err(LoadError::Open { origin, source });
        }
        // SAFETY: the caller vouches for the initialisers; no finaliser runs, for
        // the handle is never closed.
        match unsafe { Handle::open(Some(name), RTLD_NOW | RTLD_LOCAL) } {
            Ok(handle) => Ok(Self(ManuallyDrop::new(handle))),
            Err(error) => Err(LoadError::Open {
                origin: name.to_string_lossy().into_owned(),
                source: match error {
                    // The linker's own words, without "dlopen failed" before them.
                    libloading::Error::DlOpen { source } => Box::new(source),
                    other => Box::new(other),
                },
            }),
        }
    }

    /// The address of a symbol, null where the library has none of this name.
    /// It stays valid for the rest of the process.
    pub(super) fn symbol(&self, name: &CStr) -> *const c_void {
        // SAFETY: the symbol's address is taken and not used as any type here; Linux's
        // `dlerror` keeps its state per thread.
        match unsafe { self.0.get::<*const c_void>(name) } {
            Ok(symbol) => symbol.as_raw_ptr().cast_const(),
            Err(_) => null(),
        }
    }
}
