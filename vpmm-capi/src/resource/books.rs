//! What adaptors have counted, noted and written.

use std::ffi::c_char;
use std::sync::Arc;

use stacks::{Any, Face};
use vpmm_core::resource::{Counter, Counters, Statistics};

use super::open::vpmm_resource;
use crate::grows::{self, Grows};
use crate::guard::{Failure, given, make, put_text, with};
use crate::status::vpmm_status;

/// A number that goes up and down: now, at most, and all that was ever added. What was allocated before
/// counters were pushed and freed since makes the first one negative.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct vpmm_counter {
    /// Now.
    pub current: i64,
    /// At most.
    pub peak: i64,
    /// All that was added.
    pub total: u64,
}

/// What a `statistics` adaptor has counted: `size` is set by `vpmm_counters_init`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct vpmm_counters {
    /// The bytes of this structure, as the program was built with it.
    pub size: usize,
    /// Bytes, as they were asked for.
    pub bytes: vpmm_counter,
    /// Allocations.
    pub allocations: vpmm_counter,
}

const NOTHING: vpmm_counter = vpmm_counter { current: 0, peak: 0, total: 0 };

// SAFETY: numbers of 8 bytes each, the size first.
unsafe impl Grows for vpmm_counters {
    const NAME: &'static str = "vpmm_counters";
    const INITIAL: Self = Self { size: size_of::<Self>(), bytes: NOTHING, allocations: NOTHING };
}

impl From<Counter> for vpmm_counter {
    fn from(Counter { current, peak, total, .. }: Counter) -> Self {
        Self { current, peak, total }
    }
}

impl From<Counters> for vpmm_counters {
    fn from(Counters { bytes, allocations, .. }: Counters) -> Self {
        Self { bytes: bytes.into(), allocations: allocations.into(), ..Self::INITIAL }
    }
}

fn is_not(what: &str) -> Failure {
    Failure::new(vpmm_status::VPMM_UNSUPPORTED, format!("the resource is no {what} adaptor"))
}

impl vpmm_resource {
    fn statistics(&self) -> Result<&Arc<Statistics<Any>>, Failure> {
        match self.here()?.face() {
            Face::Statistics(statistics) => Ok(statistics),
            _ => Err(is_not("statistics")),
        }
    }
}

/// Sets all numbers to 0, and the size: `sizeof (vpmm_counters)`, as the program has it.
///
/// # Safety
/// `counters` is null or has room for `size` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vpmm_counters_init(counters: *mut vpmm_counters, size: usize) {
    // SAFETY: the caller vouches for it.
    unsafe { grows::init(counters, size) };
}

/// What a `statistics` adaptor has counted since it was made, or since counters were pushed.
///
/// # Safety
/// `resource` is null or a handle; `out` is null or begins with its own size.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vpmm_resource_counters(
    resource: *const vpmm_resource,
    out: *mut vpmm_counters,
) -> vpmm_status {
    let work = |resource: &vpmm_resource| {
        let counters = resource.statistics()?.counters();
        // SAFETY: the caller vouches for it.
        unsafe { grows::fill(out, counters.into()) }
    };
    // SAFETY: the caller vouches for it.
    unsafe { with(resource, "resource", work) }
}

/// Has a `statistics` adaptor count from 0, until `vpmm_resource_pop_counters`. `former`, which may be
/// null, gets what was counted before.
///
/// # Safety
/// `resource` is null or a handle; `former` is null or begins with its own size.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vpmm_resource_push_counters(
    resource: *const vpmm_resource,
    former: *mut vpmm_counters,
) -> vpmm_status {
    let work = |resource: &vpmm_resource| {
        let statistics = resource.statistics()?;
        // Refused before anything is changed. SAFETY: the caller vouches for it.
        unsafe { grows::check(former) }?;
        let counters = statistics.push();
        if former.is_null() {
            return Ok(());
        }
        // SAFETY: as above.
        unsafe { grows::fill(former, counters.into()) }
    };
    // SAFETY: the caller vouches for it.
    unsafe { with(resource, "resource", work) }
}

/// Ends what the last `vpmm_resource_push_counters` has begun: what was counted since is added to what was
/// counted before, and goes to `part`, which may be null. `VPMM_BAD_STATE` where nothing was pushed.
///
/// # Safety
/// As `vpmm_resource_push_counters`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vpmm_resource_pop_counters(
    resource: *const vpmm_resource,
    part: *mut vpmm_counters,
) -> vpmm_status {
    let work = |resource: &vpmm_resource| {
        let statistics = resource.statistics()?;
        // Refused before anything is changed. SAFETY: the caller vouches for it.
        unsafe { grows::check(part) }?;
        let text = "no counters were pushed";
        let counters = statistics.pop();
        let counters = counters.ok_or_else(|| Failure::new(vpmm_status::VPMM_BAD_STATE, text))?;
        if part.is_null() {
            return Ok(());
        }
        // SAFETY: as above.
        unsafe { grows::fill(part, counters.into()) }
    };
    // SAFETY: the caller vouches for it.
    unsafe { with(resource, "resource", work) }
}

/// The bytes allocated through a `limiting`, `tracking` or `statistics` adaptor now: rounded up to 256
/// each by the first.
///
/// # Safety
/// `resource` is null or a handle; `out` is null or has room for a number.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vpmm_resource_allocated_bytes(
    resource: *const vpmm_resource,
    out: *mut u64,
) -> vpmm_status {
    let work = || {
        // SAFETY: the caller vouches for it.
        match unsafe { given(resource, "resource") }?.here()?.face() {
            Face::Limiting(limiting) => Ok(limiting.allocated_bytes()),
            Face::Tracking(tracking) => Ok(tracking.outstanding_bytes()),
            Face::Statistics(statistics) => {
                Ok(u64::try_from(statistics.counters().bytes.current).unwrap_or(0))
            }
            _ => Err(is_not("limiting, tracking or statistics")),
        }
    };
    // SAFETY: the caller vouches for it.
    unsafe { make(out, work) }
}

/// The limit of a `limiting` adaptor, in bytes.
///
/// # Safety
/// `resource` is null or a handle; `out` is null or has room for a number.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vpmm_resource_limit_bytes(
    resource: *const vpmm_resource,
    out: *mut u64,
) -> vpmm_status {
    let work = || {
        // SAFETY: the caller vouches for it.
        match unsafe { given(resource, "resource") }?.here()?.face() {
            Face::Limiting(limiting) => Ok(limiting.limit_bytes()),
            _ => Err(is_not("limiting")),
        }
    };
    // SAFETY: the caller vouches for it.
    unsafe { make(out, work) }
}

/// Writes what is allocated through a `tracking` adaptor, one line for each allocation, cut as
/// `vpmm_pool_layout` cuts. `count`, which may be null, gets how many there are.
///
/// # Safety
/// `resource` is null or a handle; `text` and `needed` as in `vpmm_pool_layout`; `count` is null or has
/// room for a number.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vpmm_resource_outstanding(
    resource: *const vpmm_resource,
    text: *mut c_char,
    length: usize,
    needed: *mut usize,
    count: *mut u64,
) -> vpmm_status {
    let work = |resource: &vpmm_resource| {
        let Face::Tracking(tracking) = resource.here()?.face() else {
            return Err(is_not("tracking"));
        };
        let outstanding = tracking.outstanding();
        // SAFETY: the caller vouches for it.
        unsafe {
            put_text(&outstanding.to_string(), text, length, needed)?;
            crate::guard::put_if(count, outstanding.len() as u64);
        }
        Ok(())
    };
    // SAFETY: the caller vouches for it.
    unsafe { with(resource, "resource", work) }
}

/// Writes the name of a `logging` adaptor's file, cut as `vpmm_pool_layout` cuts. `lost`, which may be
/// null, gets how many rows found no room on the disk.
///
/// # Safety
/// `resource` is null or a handle; `text` and `needed` as in `vpmm_pool_layout`; `lost` is null or has
/// room for a number.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vpmm_resource_log_file(
    resource: *const vpmm_resource,
    text: *mut c_char,
    length: usize,
    needed: *mut usize,
    lost: *mut u64,
) -> vpmm_status {
    let work = |resource: &vpmm_resource| {
        let Face::Logging(logging, file) = resource.here()?.face() else {
            return Err(is_not("logging"));
        };
        // SAFETY: the caller vouches for it.
        unsafe {
            put_text(&file.to_string_lossy(), text, length, needed)?;
            crate::guard::put_if(lost, logging.lost_rows());
        }
        Ok(())
    };
    // SAFETY: the caller vouches for it.
    unsafe { with(resource, "resource", work) }
}

/// Has everything that a `logging` adaptor has written so far be in its file.
///
/// # Safety
/// `resource` is null or a handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vpmm_resource_flush_log(resource: *const vpmm_resource) -> vpmm_status {
    let work = |resource: &vpmm_resource| match resource.here()?.face() {
        Face::Logging(logging, _) => Ok(logging.flush()?),
        _ => Err(is_not("logging")),
    };
    // SAFETY: the caller vouches for it.
    unsafe { with(resource, "resource", work) }
}

/// Adds a bin to a `binning` resource, for requests of up to so many bytes: one of blocks of that size,
/// unless what is below never gives so long a piece, or, where `bin` is not null, another resource. The
/// greatest bin that there is serves as many bytes as it says; what is longer goes to what is below. A
/// `bin` that is `resource`, or stands on it, is `VPMM_INVALID_ARGUMENT`.
///
/// # Safety
/// `resource` is null or a handle, and `bin` too.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vpmm_resource_add_bin(
    resource: *const vpmm_resource,
    bytes: usize,
    bin: *const vpmm_resource,
) -> vpmm_status {
    let work = |resource: &vpmm_resource| {
        let built = resource.here()?;
        let Face::Binning(binning) = built.face() else {
            return Err(is_not("binning"));
        };
        // SAFETY: the caller vouches for it.
        let Some(bin) = (unsafe { bin.as_ref() }) else { return Ok(binning.add_own_bin(bytes)?) };
        bin.built().check_room(1)?;
        resource.note_bin(bin);
        let add = || Ok(binning.add_bin(bytes, Arc::clone(bin.built().resource()))?);
        built.with_bin(bin.built(), add).unwrap_or_else(|| {
            let text = "the bin is the resource itself, or stands on it";
            Err(Failure::new(vpmm_status::VPMM_INVALID_ARGUMENT, text))
        })
    };
    // SAFETY: the caller vouches for it.
    unsafe { with(resource, "resource", work) }
}
