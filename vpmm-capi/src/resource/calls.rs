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
        let built = resource.here()?;
        // SAFETY: the caller vouches for it.
        let stream = unsafe { resource.stream(stream) };
        let ptr = built.resource().allocate(bytes, align.max(1), stream)?;
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
        let built = resource.here()?;
        // SAFETY: the caller vouches for it.
        let stream = unsafe { resource.stream(stream) };
        let taken = Taken { resource, ptr: resource.take_mark(of_pointer(pointer)) };
        built.resource().deallocate(taken.ptr, bytes, align.max(1), stream)?;
        std::mem::forget(taken);
        Ok(())
    };
    // SAFETY: the caller vouches for it.
    unsafe { with(resource, "resource", work) }
}

/// Notes that an allocation is used on a further stream, as `vpmm_record_stream`. `VPMM_UNSUPPORTED`
/// where the resource takes no such notes. Null is nothing.
///
/// # Safety
/// `resource` is null or a handle; the stream is alive, and lasts as said there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vpmm_resource_record_stream(
    resource: *const vpmm_resource,
    pointer: *mut c_void,
    stream: *mut c_void,
) -> vpmm_status {
    let work = |resource: &vpmm_resource| {
        if pointer.is_null() {
            return Ok(());
        }
        let built = resource.here()?;
        // SAFETY: the caller vouches for it.
        let stream = unsafe { resource.stream(stream) };
        Ok(built.resource().record_stream(of_pointer(pointer), stream)?)
    };
    // SAFETY: the caller vouches for it.
    unsafe { with(resource, "resource", work) }
}

/// Host memory is freed by the very pointer that was given out, of which C has the address only.
impl vpmm_resource {
    /// Whether all of its memory is the host's, or some may be.
    fn is_marked(&self) -> bool {
        self.is_the_hosts() || self.has_mixed_bins()
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

/// A pointer on its way back: where it does not get there, by an error or a panic, its mark is kept.
struct Taken<'a> {
    resource: &'a vpmm_resource,
    ptr: DevicePtr,
}

impl Drop for Taken<'_> {
    fn drop(&mut self) {
        self.resource.keep_mark(self.ptr);
    }
}

#[cfg(test)]
mod tests {
    use std::ffi::CStr;
    use std::ptr;
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering};

    use stacks::Built;
    use vpmm_core::MemoryResource;
    use vpmm_core::resource::{Callback, Facts, HostMalloc};

    use super::super::{vpmm_resource_add_bin, vpmm_resource_open, vpmm_resource_release};
    use super::*;
    use crate::driver::{Loaded, vpmm_driver};
    use crate::guard::vpmm_last_error;

    /// Below an adaptor that counts, and one that holds a lock meanwhile.
    #[test]
    fn a_resource_that_panics_is_answered_and_serves_the_next_call() {
        let loaded = Loaded::load(Some("sim")).ok().unwrap();
        let device = loaded.device(0).ok().unwrap();
        let panics = Arc::new(AtomicBool::new(true));
        let (of_one, of_other) = (Arc::clone(&panics), Arc::clone(&panics));
        let callback = Callback::new(
            Facts::of_device_memory(),
            move |_, _, _| {
                assert!(!of_one.load(Ordering::Relaxed), "out of order");
                Ok(DevicePtr::from_address(4096))
            },
            move |_, _, _, _| {
                assert!(!of_other.load(Ordering::Relaxed), "out of order");
                Ok(())
            },
        );
        let built = Built::new(Arc::new(callback.with_device(&device)), None);
        let below = vpmm_resource::handle(Arc::new(built), Arc::clone(&loaded), 0);
        let driver = vpmm_driver(loaded);
        let mut resource = ptr::null_mut();
        let text = c"statistics(thread-safe)".as_ptr();
        // SAFETY: live handles, a text that ends with a zero byte, room for a pointer.
        let opened = unsafe { vpmm_resource_open(&driver, 0, text, below, &raw mut resource) };
        assert_eq!(opened, vpmm_status::VPMM_OK);

        let mut pointer = ptr::null_mut();
        // SAFETY: a live handle, the default stream, room for a pointer.
        let allocate = |out: &mut *mut c_void| unsafe {
            vpmm_resource_allocate(resource, 1 << 20, 0, ptr::null_mut(), out)
        };
        // SAFETY: as above; nothing uses the memory, which is none.
        let deallocate = |pointer| unsafe {
            vpmm_resource_deallocate(resource, pointer, 1 << 20, 0, ptr::null_mut())
        };
        let has_panicked = |answer| {
            assert_eq!(answer, vpmm_status::VPMM_PANIC);
            // SAFETY: this thread's text, until its next failure.
            assert_eq!(unsafe { CStr::from_ptr(vpmm_last_error()) }, c"out of order");
        };
        has_panicked(allocate(&mut pointer));
        assert!(pointer.is_null());
        panics.store(false, Ordering::Relaxed);
        assert_eq!(allocate(&mut pointer), vpmm_status::VPMM_OK);
        assert_eq!(pointer.addr(), 4096);
        panics.store(true, Ordering::Relaxed);
        has_panicked(deallocate(pointer));
        panics.store(false, Ordering::Relaxed);
        assert_eq!(deallocate(pointer), vpmm_status::VPMM_OK);
        // SAFETY: both given back once.
        unsafe { (vpmm_resource_release(resource), vpmm_resource_release(below)) };
    }

    /// The pointer that host memory is freed by is known still.
    #[test]
    fn host_memory_that_a_panic_kept_can_be_freed() {
        let loaded = Loaded::load(Some("sim")).ok().unwrap();
        let (host, panics) = (Arc::new(HostMalloc::new()), Arc::new(AtomicBool::new(true)));
        let (below, is_broken) = (Arc::clone(&host), Arc::clone(&panics));
        let callback = Callback::new(
            host.facts(),
            move |bytes, align, stream| host.allocate(bytes, align, stream),
            move |ptr, bytes, align, stream| {
                assert!(!is_broken.load(Ordering::Relaxed), "out of order");
                below.deallocate(ptr, bytes, align, stream)
            },
        );
        let resource =
            vpmm_resource::handle(Arc::new(Built::new(Arc::new(callback), None)), loaded, 0);
        let (mut pointer, stream) = (ptr::null_mut(), ptr::null_mut());
        // SAFETY: a live handle, given back once; nothing uses the memory.
        let answers = unsafe {
            let made = vpmm_resource_allocate(resource, 1000, 0, stream, &raw mut pointer);
            let refused = vpmm_resource_deallocate(resource, pointer, 1000, 0, stream);
            panics.store(false, Ordering::Relaxed);
            let freed = vpmm_resource_deallocate(resource, pointer, 1000, 0, stream);
            vpmm_resource_release(resource);
            [made, refused, freed]
        };
        let [ok, panic] = [vpmm_status::VPMM_OK, vpmm_status::VPMM_PANIC];
        assert_eq!(answers, [ok, panic, ok]);
    }

    /// A resource with a bin of the host's memory, over a device's, and the other way round.
    #[test]
    fn memory_of_the_hosts_goes_back_through_bins_beside_a_devices() {
        let driver = vpmm_driver(Loaded::load(Some("sim")).ok().unwrap());
        let open = |text: &CStr| {
            let mut resource = ptr::null_mut();
            // SAFETY: a live handle, a text that ends with a zero byte, room for a pointer.
            let opened = unsafe {
                vpmm_resource_open(&driver, 0, text.as_ptr(), ptr::null(), &raw mut resource)
            };
            assert_eq!(opened, vpmm_status::VPMM_OK);
            resource
        };
        for (text, of_bin) in [
            (c"binning(cuda-malloc)", c"pinned"),
            (c"binning(pinned)", c"cuda-malloc"),
            (c"binning(managed)", c"host"),
            (c"binning(host)", c"managed"),
        ] {
            let (resource, bin) = (open(text), open(of_bin));
            // SAFETY: live handles, given back once; nothing uses the memory.
            unsafe {
                assert_eq!(vpmm_resource_add_bin(resource, 4096, bin), vpmm_status::VPMM_OK);
                for bytes in [4096, 8192] {
                    let (mut pointer, stream) = (ptr::null_mut(), ptr::null_mut());
                    let made = vpmm_resource_allocate(resource, bytes, 0, stream, &raw mut pointer);
                    assert_eq!(made, vpmm_status::VPMM_OK);
                    let freed = vpmm_resource_deallocate(resource, pointer, bytes, 0, stream);
                    assert_eq!(freed, vpmm_status::VPMM_OK, "{bytes} of {text:?} and {of_bin:?}");
                }
                vpmm_resource_release(resource);
                vpmm_resource_release(bin);
            }
        }
    }
}
