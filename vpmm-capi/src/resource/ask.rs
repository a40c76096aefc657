//! What a resource is.

use std::ffi::c_char;

use vpmm_core::resource::{Checks, Facts};

use super::open::vpmm_resource;
use crate::grows::{self, Grows};
use crate::guard::{Failure, given, make, put_text, with};
use crate::status::vpmm_status;

/// What a resource is able to do: `size` is set by `vpmm_facts_init`, the rest by `vpmm_resource_facts`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct vpmm_facts {
    /// The bytes of this structure, as the program was built with it.
    pub size: usize,
    /// Work on the device can use the memory: 1 or 0.
    pub device_accessible: u32,
    /// The host can: 1 or 0.
    pub host_accessible: u32,
    /// The memory moves between host and device as it is used: 1 or 0.
    pub managed: u32,
    /// Both calls are in the order of their stream, and do not wait for the GPU: 1 or 0.
    pub stream_ordered: u32,
    /// Uses on further streams can be noted: 1 or 0.
    pub records_streams: u32,
    /// Which wrong frees are found: 0 none for certain, 1 pointers that are not allocated, 2 wrong sizes
    /// too.
    pub checks: u32,
    /// Every address is a multiple of this.
    pub min_align: u64,
    /// The greatest alignment that can be asked for.
    pub max_align: u64,
    /// The longest request that can ever be served; `UINT64_MAX` where that is not fixed.
    pub max_bytes: u64,
}

// SAFETY: numbers without padding, the size first.
unsafe impl Grows for vpmm_facts {
    const NAME: &'static str = "vpmm_facts";
    const INITIAL: Self = Self {
        size: size_of::<Self>(),
        device_accessible: 0,
        host_accessible: 0,
        managed: 0,
        stream_ordered: 0,
        records_streams: 0,
        checks: 0,
        min_align: 0,
        max_align: 0,
        max_bytes: 0,
    };
}

impl vpmm_facts {
    fn of(facts: &Facts) -> Self {
        Self {
            device_accessible: facts.device_accessible.into(),
            host_accessible: facts.host_accessible.into(),
            managed: facts.managed.into(),
            stream_ordered: facts.stream_ordered.into(),
            records_streams: facts.records_streams.into(),
            checks: match facts.checks {
                Checks::Pointers => 1,
                Checks::PointersAndSizes => 2,
                _ => 0,
            },
            min_align: facts.min_align as u64,
            max_align: facts.max_align as u64,
            max_bytes: facts.max_bytes.map_or(u64::MAX, |bytes| bytes as u64),
            ..Self::INITIAL
        }
    }
}

/// Sets all numbers to 0, and the size: `sizeof (vpmm_facts)`, as the program has it.
///
/// # Safety
/// `facts` is null or has room for `size` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vpmm_facts_init(facts: *mut vpmm_facts, size: usize) {
    // SAFETY: the caller vouches for it.
    unsafe { grows::init(facts, size) };
}

/// What a resource is able to do.
///
/// # Safety
/// `resource` is null or a handle; `out` is null or begins with its own size.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vpmm_resource_facts(
    resource: *const vpmm_resource,
    out: *mut vpmm_facts,
) -> vpmm_status {
    let work = |resource: &vpmm_resource| {
        let facts = vpmm_facts::of(&resource.built().resource().facts());
        // SAFETY: the caller vouches for it.
        unsafe { grows::fill(out, facts) }
    };
    // SAFETY: the caller vouches for it.
    unsafe { with(resource, "resource", work) }
}

/// Writes a resource and what it stands on as a tree, cut as `vpmm_pool_layout` cuts: its name and its
/// settings in the first line.
///
/// # Safety
/// `resource` is null or a handle; `text` and `needed` as in `vpmm_pool_layout`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vpmm_resource_describe(
    resource: *const vpmm_resource,
    text: *mut c_char,
    length: usize,
    needed: *mut usize,
) -> vpmm_status {
    let work = |resource: &vpmm_resource| {
        let tree = resource.built().resource().describe().to_string();
        // SAFETY: the caller vouches for it.
        unsafe { put_text(&tree, text, length, needed) }
    };
    // SAFETY: the caller vouches for it.
    unsafe { with(resource, "resource", work) }
}

/// The bytes that a resource holds of the device or of what is below it, allocated or not;
/// `VPMM_UNSUPPORTED` for one that holds nothing of its own.
///
/// # Safety
/// `resource` is null or a handle; `out` is null or has room for a number.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vpmm_resource_held_bytes(
    resource: *const vpmm_resource,
    out: *mut u64,
) -> vpmm_status {
    let work = || {
        // SAFETY: the caller vouches for it.
        let held = unsafe { given(resource, "resource") }?.here()?.resource().held_bytes();
        let text = "the resource holds nothing of its own";
        held.ok_or_else(|| Failure::new(vpmm_status::VPMM_UNSUPPORTED, text))
    };
    // SAFETY: the caller vouches for it.
    unsafe { make(out, work) }
}

/// Whether each of two resources may deallocate what the other has allocated: 1 or 0.
///
/// # Safety
/// Both are null or handles; `out` is null or has room for a number.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vpmm_resource_is_equal(
    resource: *const vpmm_resource,
    other: *const vpmm_resource,
    out: *mut u32,
) -> vpmm_status {
    let identity = |handle: *const vpmm_resource, name| {
        // SAFETY: the caller vouches for it.
        unsafe { given(handle, name) }.map(|handle| handle.built().resource().identity())
    };
    let work = || Ok(u32::from(identity(resource, "resource")? == identity(other, "other")?));
    // SAFETY: the caller vouches for it.
    unsafe { make(out, work) }
}
