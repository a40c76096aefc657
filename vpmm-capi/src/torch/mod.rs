//! What PyTorch's `CUDAPluggableAllocator` calls: its signatures, on the process's pools.
//!
//! A request that fails throws what PyTorch would: out of memory is `c10::OutOfMemoryError`, which
//! Python sees as `torch.OutOfMemoryError`, with a map of the pool in its text; all else `c10::Error`.
//! A null pointer would be taken for an allocation. What a filter of a graph's pool throws, the request that
//! asks it throws, as PyTorch's own allocator does. Frees come from destructors, so they throw nothing;
//! those that fail are counted, and the first of them are told on the standard error stream.

mod answers;
mod cxx;

use std::collections::BTreeMap;
use std::ffi::{c_int, c_void};
use std::io::{self, Write};
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::ptr;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Mutex, MutexGuard, PoisonError};

pub(crate) use cxx::throw;
use cxx::{CxxFilter, MempoolId, StdFunction};

use crate::guard::Failure;
use crate::process::{self, Asked, Life};
use crate::status::vpmm_status;

/// Frees that failed and are told of.
const MOST_TOLD: u64 = 8;

static FAILED_FREES: AtomicU64 = AtomicU64::new(0);

/// Requests of each device that there was no memory for.
static FAILED_REQUESTS: Mutex<BTreeMap<u32, u64>> = Mutex::new(BTreeMap::new());

fn failed_requests() -> MutexGuard<'static, BTreeMap<u32, u64>> {
    FAILED_REQUESTS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Runs what a function does; a panic is a failure.
#[inline(always)]
pub(crate) fn guarded<T>(work: impl FnOnce() -> Result<T, Failure>) -> Result<T, Failure> {
    catch_unwind(AssertUnwindSafe(work)).unwrap_or_else(|panic| Err(Failure::of_panic(panic)))
}

fn device_number(device: c_int) -> Result<u32, Failure> {
    u32::try_from(device).map_err(|_| {
        Failure::new(vpmm_status::VPMM_INVALID_ARGUMENT, format!("there is no device {device}"))
    })
}

/// Throws a failure of an allocation in the words that programs look for.
#[cold]
#[inline(never)]
fn throw_refusal(bytes: isize, device: c_int, failure: Failure) -> *mut c_void {
    let failure = match failure.status() {
        vpmm_status::VPMM_OUT_OF_MEMORY => {
            *failed_requests().entry(device as u32).or_default() += 1;
            failure.under(format!(
                "CUDA out of memory. Tried to allocate {bytes} bytes on device {device} from vpmm's pool."
            ))
        }
        _ => {
            failure.under(format!("vpmm: {bytes} bytes on device {device} could not be allocated"))
        }
    };
    throw(failure);
    ptr::null_mut()
}

/// Throws a failure of anything else.
#[cold]
#[inline(never)]
fn throw_other(what: &str, failure: Failure) {
    throw(failure.under(format!("vpmm: {what} failed")));
}

#[cold]
#[inline(never)]
pub(crate) fn tell_failed_free(pointer: *mut c_void, device: c_int, failure: &Failure) {
    // When the process ends the driver may go before the last tensors do; in a child of the process
    // memory is the parent's.
    if matches!(failure.status(), vpmm_status::VPMM_CONTEXT_LOST | vpmm_status::VPMM_FORKED) {
        return;
    }
    if FAILED_FREES.fetch_add(1, Ordering::Relaxed) < MOST_TOLD {
        let text = failure.text();
        // Nobody may be there to read it, which `eprintln` would panic at.
        let _ = writeln!(
            io::stderr(),
            "vpmm: {pointer:p} on device {device} could not be freed: {text}"
        );
    }
}

/// PyTorch's `alloc`. Throws; what a filter throws, too.
///
/// # Safety
/// The stream is of the device, alive, and lasts (`vpmm_process_forget_stream`); the caller is C++, or
/// built to be unwound through.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn vpmm_torch_alloc(
    size: isize,
    device: c_int,
    stream: *mut c_void,
) -> *mut c_void {
    if process::is_capturing() {
        // SAFETY: the caller vouches for it.
        return unsafe { alloc_beside_captures(size, device, stream) };
    }
    // A capture that begins here begins behind this request.
    let asked = Asked::Before(None);
    // What is negative is no device, and no size either. SAFETY: the caller vouches for it.
    match guarded(|| unsafe {
        process::allocate(device as u32, size as usize, stream, Life::Lasts, asked)
    }) {
        Ok(pointer) => pointer,
        Err(failure) => throw_refusal(size, device, failure),
    }
}

/// # Safety
/// As in `vpmm_torch_alloc`.
#[cold]
#[inline(never)]
unsafe fn alloc_beside_captures(size: isize, device: c_int, stream: *mut c_void) -> *mut c_void {
    let number = device as u32;
    // SAFETY: the caller vouches for it.
    let made = guarded(|| unsafe { process::questions(number, stream, Life::Lasts) })
        // Not guarded: C++ exceptions can pass, but not be caught.
        .map(|questions| Asked::Before(questions.ask()))
        .and_then(|asked| {
            // SAFETY: the caller vouches for it.
            guarded(|| unsafe {
                process::allocate(number, size as usize, stream, Life::Lasts, asked)
            })
        });
    match made {
        Ok(pointer) => pointer,
        Err(failure) => throw_refusal(size, device, failure),
    }
}

/// PyTorch's `free`. Throws nothing.
///
/// # Safety
/// As in `vpmm_free`; the stream lasts as in `vpmm_torch_alloc`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vpmm_torch_free(
    pointer: *mut c_void,
    size: isize,
    device: c_int,
    stream: *mut c_void,
) {
    // The pool knows it.
    let _ = size;
    // SAFETY: the caller vouches for it.
    let done = guarded(|| unsafe { process::free(device as u32, pointer, stream, Life::Lasts) });
    if let Err(failure) = done {
        tell_failed_free(pointer, device, &failure);
    }
}

/// How many frees have failed.
#[unsafe(no_mangle)]
pub extern "C" fn vpmm_torch_failed_frees() -> u64 {
    FAILED_FREES.load(Ordering::Relaxed)
}

/// How many of PyTorch's requests on a device there was no memory for; in a child of the process 0.
#[unsafe(no_mangle)]
pub extern "C" fn vpmm_torch_failed_requests(device: u32) -> u64 {
    if process::check_process().is_err() {
        return 0;
    }
    failed_requests().get(&device).copied().unwrap_or(0)
}

/// Has the pool answer PyTorch's `cacheInfo`, which PyTorch has no function to set for: once vpmm is its
/// allocator, and before that is used. Whether it does: 1 or 0. cuDNN's search for the quickest algorithms
/// (`torch.backends.cudnn.benchmark`) needs the answer, and throws without. No driver call.
///
/// # Safety
/// No other thread uses PyTorch's allocator meanwhile.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vpmm_torch_answer_cache_info() -> u32 {
    // SAFETY: the caller vouches for it.
    guarded(|| Ok(unsafe { answers::answer_cache_info() }.is_some())).map_or(0, u32::from)
}

/// PyTorch's `init`: pools are made when they are first used.
#[unsafe(no_mangle)]
pub extern "C" fn vpmm_torch_init(device_count: c_int) {
    let _ = device_count;
}

/// PyTorch's `reset`, which is `torch.cuda.empty_cache()`: waits for the devices, and gives them all
/// free memory back. While a graph is captured it waits for nothing, and gives what it can. Throws.
///
/// # Safety
/// The caller is C++, or built to be unwound through.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn vpmm_torch_reset() {
    let work = || {
        process::check_process()?;
        for pool in process::pools() {
            if !process::is_capturing() {
                pool.device().synchronize()?;
            }
            pool.trim_to(0)?;
        }
        Ok(())
    };
    if let Err(failure) = guarded(work) {
        throw_other("empty_cache", failure);
    }
}

/// PyTorch's `memory_fraction`: the part of a device's memory that its pool may hold. The last counts; but
/// the pool is made at the first request, and none later raises it above what it was made with. Throws.
///
/// # Safety
/// As in `vpmm_torch_reset`.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn vpmm_torch_memory_fraction(fraction: f64, device: c_int) {
    let work = || process::limit_to_part(device_number(device)?, fraction);
    if let Err(failure) = guarded(work) {
        throw_other("set_per_process_memory_fraction", failure);
    }
}

/// PyTorch's `base_alloc`: the start and the bytes of the allocation that an address is in. Throws.
///
/// # Safety
/// `size` is null or has room for a number; else as in `vpmm_torch_reset`.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn vpmm_torch_base_alloc(
    pointer: *mut c_void,
    size: *mut usize,
) -> *mut c_void {
    let work = || {
        process::check_process()?;
        let address = pointer.addr() as u64;
        let of_pools = || {
            let found = process::pools().into_iter().find_map(|pool| pool.allocation(address))?;
            Some((found.start.address(), found.bytes))
        };
        let of_service = || crate::service::heap::of(address)?.allocation(address);
        of_pools().or_else(of_service).ok_or_else(|| {
            let text = format!("{pointer:p} is in no allocation of the process's pools");
            Failure::new(vpmm_status::VPMM_BAD_POINTER, text)
        })
    };
    match guarded(work) {
        Ok((start, bytes)) => {
            if !size.is_null() {
                // SAFETY: the caller vouches for it.
                unsafe { size.write(bytes as usize) };
            }
            ptr::without_provenance_mut(start as usize)
        }
        Err(failure) => {
            throw_other("getBaseAllocation", failure);
            ptr::null_mut()
        }
    }
}

/// PyTorch's `record_stream`. Throws.
///
/// # Safety
/// As in `vpmm_torch_alloc`; a stream that `vpmm_process_forget_stream` does not know lasts as said there.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn vpmm_torch_record_stream(
    pointer: *mut c_void,
    stream: *mut c_void,
) {
    // SAFETY: the caller vouches for it.
    let done = guarded(|| unsafe { process::record_stream(pointer, stream, Life::Lasts) });
    if let Err(failure) = done {
        throw_other("record_stream", failure);
    }
}

/// PyTorch's `begin_allocate_to_pool`: from now on requests of the streams that the filter takes come
/// from a graph's pool. `filter` is a `std::function<bool(cudaStream_t)>` by value. Throws.
///
/// The filter is asked once for a stream that it takes, else at each request and free, in the thread of
/// that, by one thread at a time. It may throw where `vpmm_torch_alloc` asks, which then throws that. Anywhere
/// else (at frees, in requests by the functions of C) an exception of its ends the process.
///
/// # Safety
/// `filter` is to such a function; else as in `vpmm_torch_reset`.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn vpmm_torch_begin_allocate_to_pool(
    device: c_int,
    id: MempoolId,
    filter: *const StdFunction,
) {
    // Not guarded: what a copy throws passes. SAFETY: the caller vouches for it.
    let filter = unsafe { CxxFilter::copy(filter) };
    let work = || {
        let pool = process::pool(device_number(device)?)?;
        let filter = filter.ok_or_else(|| Failure::null("filter"))?;
        process::begin(pool, (id.first, id.second), filter)
    };
    if let Err(failure) = guarded(work) {
        throw_other("beginAllocateToPool", failure);
    }
}

/// PyTorch's `end_allocate_to_pool`. Throws.
///
/// # Safety
/// As in `vpmm_torch_reset`.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn vpmm_torch_end_allocate_to_pool(device: c_int, id: MempoolId) {
    if let Err(failure) = guarded(|| process::end(device_number(device)?, (id.first, id.second))) {
        throw_other("endAllocateToPool", failure);
    }
}

/// PyTorch's `release_pool`: the graphs of a pool are launched no more. Throws.
///
/// # Safety
/// As in `vpmm_torch_reset`.
#[unsafe(no_mangle)]
pub unsafe extern "C-unwind" fn vpmm_torch_release_pool(device: c_int, id: MempoolId) {
    if let Err(failure) =
        guarded(|| process::release(device_number(device)?, (id.first, id.second)))
    {
        throw_other("releasePool", failure);
    }
}
