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
/// `"limiting(1GiB)"`. Both handles are then to be released, in any order. No more than a thousand stand on each
/// other (`VPMM_INVALID_ARGUMENT`). A file's name with commas or brackets in it stands in quotes.
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
                let stack = Stack::over_given(text)?;
                below.built().check_room(stack.height())?;
                stack
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

#[cfg(test)]
mod tests {
    use std::ffi::CStr;
    use std::ptr;

    use super::*;
    use crate::resource::{
        vpmm_resource_add_bin, vpmm_resource_allocate, vpmm_resource_deallocate,
        vpmm_resource_describe, vpmm_resource_failure_callback,
    };

    /// Gives up.
    unsafe extern "C" fn nothing(_: *mut c_void, _: usize) -> u32 {
        0
    }

    /// A program that puts one more on its resource at every step. Each call goes through all of them, as does their
    /// end.
    #[test]
    fn no_more_stand_on_each_other_than_a_threads_stack_has_room_for() {
        type Wrap = unsafe fn(
            *const vpmm_driver,
            *const vpmm_resource,
            *mut *mut vpmm_resource,
        ) -> vpmm_status;
        unsafe fn open(
            driver: *const vpmm_driver,
            text: &CStr,
            below: *const vpmm_resource,
            out: *mut *mut vpmm_resource,
        ) -> vpmm_status {
            // SAFETY: the caller vouches for it.
            unsafe { vpmm_resource_open(driver, 0, text.as_ptr(), below, out) }
        }
        let wraps: [(&str, Wrap); 4] = [
            // SAFETY: the caller of each vouches for it.
            ("statistics", |driver, below, out| unsafe { open(driver, c"statistics", below, out) }),
            // SAFETY: as above.
            ("coalescing", |driver, below, out| unsafe { open(driver, c"coalescing", below, out) }),
            ("failure callback", |_, below, out| {
                let context = ptr::null_mut();
                // SAFETY: as above; the function may be called with anything.
                unsafe { vpmm_resource_failure_callback(below, Some(nothing), context, None, out) }
            }),
            ("bins", |driver, below, out| {
                // SAFETY: as above; what cannot have the bin is given back.
                unsafe {
                    let made = open(driver, c"binning(cuda-malloc)", ptr::null(), out);
                    assert_eq!(made, vpmm_status::VPMM_OK);
                    let added = vpmm_resource_add_bin(*out, 1 << 20, below);
                    if added != vpmm_status::VPMM_OK {
                        vpmm_resource_release(*out);
                    }
                    added
                }
            }),
        ];
        let loaded = Loaded::load(Some("sim")).ok().unwrap();
        for (name, wrap) in wraps {
            let driver = vpmm_driver(Arc::clone(&loaded));
            let high = move || {
                let (driver, stream) = (&raw const driver, ptr::null_mut());
                let mut top = ptr::null_mut();
                // SAFETY: a live driver, a text that ends with a zero byte, room for a pointer.
                let made = unsafe { open(driver, c"cuda-malloc", ptr::null(), &raw mut top) };
                assert_eq!(made, vpmm_status::VPMM_OK);
                let refused = (0..20_000).find_map(|height| {
                    let mut next = ptr::null_mut();
                    // SAFETY: live handles, of which `next` keeps what it stands on.
                    let made = unsafe { wrap(driver, top, &raw mut next) };
                    if made != vpmm_status::VPMM_OK {
                        return Some((height, made));
                    }
                    // SAFETY: given back once.
                    unsafe { vpmm_resource_release(top) };
                    top = next;
                    None
                });
                let (height, status) = refused.expect(name);
                assert!(height > 100, "{name}: {height}");
                assert_eq!(status, vpmm_status::VPMM_INVALID_ARGUMENT, "{name}");
                let (mut pointer, mut needed) = (ptr::null_mut(), 0);
                // SAFETY: live handles, room for a pointer and a number; nobody uses the memory.
                let answers = unsafe {
                    [
                        vpmm_resource_allocate(top, 1 << 20, 0, stream, &raw mut pointer),
                        vpmm_resource_deallocate(top, pointer, 1 << 20, 0, stream),
                        vpmm_resource_describe(top, ptr::null_mut(), 0, &raw mut needed),
                    ]
                };
                assert_eq!(answers, [vpmm_status::VPMM_OK; 3], "{name}");
                // SAFETY: given back once.
                unsafe { vpmm_resource_release(top) };
            };
            std::thread::spawn(high).join().unwrap();
        }
    }
}
