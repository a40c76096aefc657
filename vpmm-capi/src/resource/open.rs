//! Handles: made, and given back.

use std::collections::HashMap;
use std::ffi::{c_char, c_void};
use std::sync::atomic::Ordering;
use std::sync::{Arc, MutexGuard, PoisonError};

use stacks::{Builder, Built, Face, Stack, StackError};
use vpmm_core::{DevicePtr, Pool, StreamHandle};

use super::process_pool::ProcessPool;

use crate::driver::{Loaded, vpmm_driver};
use crate::guard::{Failure, given, make, release, text};
use crate::pool::vpmm_pool;
use crate::process;
use crate::status::vpmm_status;

/// A resource: something that gives out memory.
pub struct vpmm_resource {
    // First, so that its driver is there when it ends.
    built: Arc<Built>,
    loaded: Arc<Loaded>,
    device: u32,
    is_of_process: bool,
}

impl vpmm_resource {
    /// A handle, which `vpmm_resource_release` takes back.
    pub(super) fn handle(built: Arc<Built>, loaded: Arc<Loaded>, device: u32) -> *mut Self {
        let is_of_process = process::is_own(&loaded);
        Box::into_raw(Box::new(Self { built, loaded, device, is_of_process }))
    }

    pub(super) fn built(&self) -> &Arc<Built> {
        &self.built
    }

    /// For what may wait for a lock. Not in a child of the process: a thread of its parent may have that for ever.
    pub(super) fn here(&self) -> Result<&Built, Failure> {
        self.loaded.check_process()?;
        Ok(&self.built)
    }

    /// The pointers of its driver's resources that are more than their address.
    pub(super) fn marks(&self) -> MutexGuard<'_, HashMap<u64, DevicePtr>> {
        self.loaded.marks.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Whether all of its memory is the host's.
    pub(super) fn is_the_hosts(&self) -> bool {
        let facts = self.built.resource().facts();
        facts.host_accessible && !facts.managed
    }

    /// Whether one of its driver's resources has bins of which some are the host's, and some not.
    pub(super) fn has_mixed_bins(&self) -> bool {
        self.loaded.has_mixed_bins.load(Ordering::Relaxed)
    }

    /// Is to have a bin. Before that is asked for anything.
    pub(super) fn note_bin(&self, bin: &Self) {
        if self.is_the_hosts() != bin.is_the_hosts() {
            self.loaded.has_mixed_bins.store(true, Ordering::Relaxed);
        }
    }

    /// A handle of something that stands on this.
    pub(super) fn under(&self, built: Built) -> *mut Self {
        Self::handle(Arc::new(built), Arc::clone(&self.loaded), self.device)
    }

    /// # Safety
    /// The stream is alive while the handle is used.
    pub(super) unsafe fn stream(&self, raw: *mut c_void) -> StreamHandle {
        if self.is_of_process
            && let Some(known) = process::known_stream(self.device, raw)
        {
            return known;
        }
        // SAFETY: the caller vouches for it.
        unsafe { self.loaded.stream(raw) }
    }
}

impl From<StackError> for Failure {
    fn from(error: StackError) -> Self {
        Self::new(vpmm_status::VPMM_INVALID_ARGUMENT, error.to_string())
    }
}

/// Makes a resource, or a stack of them, as `text` says: `"arena"`,
/// `"statistics(limiting(1GiB,cuda-async))"`. Names are those of the `vpmm` command:
///
/// - what makes memory: `default` and `paged`, pools of this library; `cuda-async`, `cuda-malloc`,
///   `managed`, `pinned`, `host`
/// - what divides it: `coalescing`, `fixed-size`, `binning`, `arena`, `caching`
/// - adaptors: `limiting`, `statistics`, `tracking`, `logging`, `aligned`, `thread-safe`, `prefetch`
///
/// With an `upstream` that is not null, and is the same device's, the text is of what stands on that:
/// `"limiting(1GiB)"`. Both handles are then to be released, in any order. A file's name with commas or
/// brackets in it stands in quotes.
///
/// # Safety
/// `driver` is null or a handle, `upstream` too; `text` is null or ends with a zero byte; `out` is null
/// or has room for a pointer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vpmm_resource_open(
    driver: *const vpmm_driver,
    device: u32,
    text: *const c_char,
    upstream: *const vpmm_resource,
    out: *mut *mut vpmm_resource,
) -> vpmm_status {
    let work = || {
        // SAFETY: the caller vouches for it.
        let loaded = Arc::clone(&unsafe { given(driver, "driver") }?.0);
        // SAFETY: the caller vouches for it.
        let text = unsafe { self::text(text, "text") }?;
        // SAFETY: the caller vouches for it.
        let below = unsafe { upstream.as_ref() };
        let opened = loaded.device(device)?;
        let mut builder = Builder::new(&opened);
        let stack = match below {
            Some(below) => {
                builder = builder.over(Arc::clone(below.built()));
                Stack::over_given(text)?
            }
            None => text.parse()?,
        };
        let built = builder.build(&stack)?;
        Ok(vpmm_resource::handle(built, loaded, device))
    };
    // SAFETY: the caller vouches for it.
    unsafe { make(out, work) }
}

/// A pool; one of the process's with all that it does for what plugs in.
pub(super) fn built_of(pool: Pool) -> Built {
    match ProcessPool::of(&pool) {
        Some(own) => Built::through(Arc::new(own), pool),
        None => Built::of_pool(pool),
    }
}

/// A pool as a resource. The pool lives as long as either handle.
///
/// # Safety
/// `pool` is null or a handle; `out` is null or has room for a pointer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vpmm_resource_of_pool(
    pool: *const vpmm_pool,
    out: *mut *mut vpmm_resource,
) -> vpmm_status {
    let work = || {
        // SAFETY: the caller vouches for it.
        let handle = unsafe { given(pool, "pool") }?;
        let pool = handle.pool().clone();
        let device = pool.device().ordinal();
        let built = Arc::new(built_of(pool));
        Ok(vpmm_resource::handle(built, Arc::clone(handle.loaded()), device))
    };
    // SAFETY: the caller vouches for it.
    unsafe { make(out, work) }
}

/// A handle of the pool that a resource is: `VPMM_UNSUPPORTED` where it is none of this library's.
///
/// # Safety
/// `resource` is null or a handle; `out` is null or has room for a pointer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vpmm_resource_pool(
    resource: *const vpmm_resource,
    out: *mut *mut vpmm_pool,
) -> vpmm_status {
    let work = || {
        // SAFETY: the caller vouches for it.
        let resource = unsafe { given(resource, "resource") }?;
        let Face::Pool(pool) = resource.built.face() else {
            let text = "the resource is no pool of this library's";
            return Err(Failure::new(vpmm_status::VPMM_UNSUPPORTED, text));
        };
        Ok(vpmm_pool::handle(pool.clone(), Arc::clone(&resource.loaded)))
    };
    // SAFETY: the caller vouches for it.
    unsafe { make(out, work) }
}

/// A further handle of what a resource stands on: `VPMM_NOT_FOUND` where it stands on nothing.
///
/// # Safety
/// `resource` is null or a handle; `out` is null or has room for a pointer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vpmm_resource_upstream(
    resource: *const vpmm_resource,
    out: *mut *mut vpmm_resource,
) -> vpmm_status {
    let work = || {
        // SAFETY: the caller vouches for it.
        let resource = unsafe { given(resource, "resource") }?;
        let text = "the resource stands on nothing";
        let nothing = || Failure::new(vpmm_status::VPMM_NOT_FOUND, text);
        let below = resource.built.upstream().ok_or_else(nothing)?;
        let loaded = Arc::clone(&resource.loaded);
        Ok(vpmm_resource::handle(Arc::clone(below), loaded, resource.device))
    };
    // SAFETY: the caller vouches for it.
    unsafe { make(out, work) }
}

/// Gives a handle back. The resource ends with its last handle, with all that stands on it, and when it
/// is nowhere current. What divides memory (`coalescing`, `fixed-size`, `binning`, `arena`) then gives all of it
/// to what is below, whether it was freed or not; `caching` keeps the pieces of which something is allocated, a
/// pool of this library lives on until all is freed, and adaptors free nothing. In a child of the process nothing
/// ends: it is the parent's.
///
/// # Safety
/// `resource` is null, or a handle that is not used again; if it is the last, so is its memory.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vpmm_resource_release(resource: *mut vpmm_resource) {
    // SAFETY: the caller vouches for it.
    if unsafe { resource.as_ref() }.is_some_and(|resource| resource.here().is_err()) {
        return;
    }
    // SAFETY: made by `Box::into_raw`, given back once.
    unsafe { release(resource) };
}
