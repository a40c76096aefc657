//! Opening the libraries at run time.

use std::any::Any;
use std::ffi::{CStr, c_void};
use std::ops::Deref;
use std::sync::Arc;

use crate::DriverApi;

/// The driver API's function table with what keeps it callable.
#[derive(Clone)]
pub struct Driver {
    api: DriverApi,
    origin: Arc<str>,
    _keep_alive: Arc<dyn Any + Send + Sync>,
}

impl Driver {
    /// Fills the table from a closure that answers symbol names: how a simulator plugs in.
    ///
    /// `origin` names the source in messages; `keep_alive` is held until the last clone is dropped.
    ///
    /// # Safety
    /// As [`DriverApi::load_with`], where `keep_alive` may be what keeps the functions callable.
    pub unsafe fn from_symbols(
        origin: &str,
        lookup: impl FnMut(&'static CStr) -> *const c_void,
        keep_alive: Arc<dyn Any + Send + Sync>,
    ) -> Self {
        // SAFETY: the caller vouches for every pointer that `lookup` returns.
        let api = unsafe { DriverApi::load_with(lookup) };
        Self { api, origin: origin.into(), _keep_alive: keep_alive }
    }

    /// Where the functions come from: a library's path or name, or what the closure was called.
    pub fn origin(&self) -> &str {
        &self.origin
    }
}

impl Deref for Driver {
    type Target = DriverApi;

    fn deref(&self) -> &DriverApi {
        &self.api
    }
}
