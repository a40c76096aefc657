//! Requests of frameworks, by device and raw stream: as short as they can be where the stream is known
//! and nothing but the pool is to be asked.

use std::ffi::c_void;
use std::ptr;

use vpmm_core::{DevicePtr, Error, Pool, StreamHandle};

use super::captures::{self, Questions};
use super::mode::{self, Mode};
use super::trace::{self, Action};
use super::{streams, tags};
use crate::guard::Failure;
use crate::service::heap as service;
use crate::status::vpmm_status;

/// A device address, as CUDA's own functions give it.
#[inline(always)]
fn pointer(ptr: DevicePtr) -> *mut c_void {
    ptr::without_provenance_mut(ptr.address() as usize)
}

#[inline(always)]
fn address(pointer: *mut c_void) -> DevicePtr {
    DevicePtr::from_address(pointer.addr() as u64)
}

/// What is known of how long a stream lasts.
#[derive(Clone, Copy)]
pub(crate) enum Life {
    /// Until it is forgotten: it is kept, and served without a driver call.
    Lasts,
    /// It may end at any time: each call asks the driver about it, each free records an event; unless it
    /// is kept already.
    Unknown,
}

/// Whether the filters of graphs' pools have been asked about a request.
#[derive(Clone, Copy)]
pub(crate) enum Asked {
    /// They are to be, where there are any: if one throws the process ends.
    Not,
    /// They have been, by [`questions`]: this is what they said.
    Before(Option<captures::Id>),
}

/// What is to be asked about a stream of a device, before [`allocate`].
///
/// # Safety
/// As in [`allocate`].
pub(crate) unsafe fn questions(
    device: u32,
    stream: *mut c_void,
    life: Life,
) -> Result<Questions, Failure> {
    super::check_process()?;
    // SAFETY: the caller vouches for it.
    let (_, stream) = unsafe { resolve(device, stream, life) }?;
    Ok(captures::questions(device, stream))
}

/// Allocates from the process's pool on a device. 0 bytes give null.
///
/// # Safety
/// The stream is alive, and lasts as `life` says.
#[inline(always)]
pub(crate) unsafe fn allocate(
    device: u32,
    bytes: usize,
    stream: *mut c_void,
    life: Life,
    asked: Asked,
) -> Result<*mut c_void, Failure> {
    if let Some(entry) = streams::find(device, stream)
        && mode::is_plain()
    {
        // PyTorch asks for nothing, too, which the pool would make an error of.
        if bytes == 0 {
            return Ok(ptr::null_mut());
        }
        return entry.pool.malloc(bytes, entry.stream).map(pointer).map_err(refused);
    }
    // SAFETY: the caller vouches for it.
    unsafe { allocate_slowly(device, bytes, stream, life, asked) }
}

#[cold]
fn refused(error: Error) -> Failure {
    error.into()
}

/// The pool of a device, and a stream as it takes it.
///
/// # Safety
/// As in [`allocate`].
unsafe fn resolve(
    device: u32,
    stream: *mut c_void,
    life: Life,
) -> Result<(&'static Pool, StreamHandle), Failure> {
    if let Some(entry) = streams::find(device, stream) {
        return Ok((entry.pool, entry.stream));
    }
    let pool = super::pool(device)?;
    let handle = match life {
        // SAFETY: the caller vouches for it.
        Life::Lasts => unsafe { streams::adopt(pool.device(), pool, stream) }?,
        // SAFETY: the caller vouches for it.
        Life::Unknown => unsafe { StreamHandle::from_raw(stream.cast()) },
    };
    Ok((pool, handle))
}

/// Asks the filters, if there are any.
fn ask(device: u32, stream: StreamHandle) -> Option<captures::Id> {
    if mode::is(Mode::Capturing) { captures::questions(device, stream).ask() } else { None }
}

/// A stream's first request, or one beside a capture, a trace or tags.
///
/// # Safety
/// As in [`allocate`].
#[cold]
#[inline(never)]
unsafe fn allocate_slowly(
    device: u32,
    bytes: usize,
    stream: *mut c_void,
    life: Life,
    asked: Asked,
) -> Result<*mut c_void, Failure> {
    super::check_process()?;
    // SAFETY: the caller vouches for it.
    let (pool, stream) = unsafe { resolve(device, stream, life) }?;
    let graphs = match asked {
        Asked::Before(said) => said,
        Asked::Not => ask(device, stream),
    };
    let is_graphs = captures::open_to(stream, graphs)?;
    if bytes == 0 {
        return Ok(ptr::null_mut());
    }
    // What a graph uses is nobody else's, whatever its tag.
    let tagged = || if is_graphs { None } else { tags::heap_of(pool, device) };
    let request = || match tagged().transpose()? {
        Some(heap) => heap.malloc(bytes, stream),
        None => Ok(pool.malloc(bytes, stream)?),
    };
    if !mode::is(Mode::Tracing) {
        return request().map(pointer);
    }
    let (at, raw) = (trace::place(), stream.raw().addr() as u64);
    let made = request();
    match &made {
        Ok(ptr) => {
            trace::note(Action::Alloc, device, ptr.address(), bytes as u64, raw, at);
        }
        Err(failure) if failure.status() == vpmm_status::VPMM_OUT_OF_MEMORY => {
            let stats = pool.stats();
            let free = stats.free_bytes() + stats.cached_bytes;
            trace::note(Action::OutOfMemory, device, free, bytes as u64, raw, at);
        }
        Err(_) => {}
    }
    made.map(pointer)
}

/// Frees memory of the process's pool on a device, or of a heap of the memory service's. Null is nothing.
///
/// # Safety
/// As in [`allocate`]; nobody uses the memory in work that is enqueued later, or that is not ordered
/// before.
#[inline(always)]
pub(crate) unsafe fn free(
    device: u32,
    pointer: *mut c_void,
    stream: *mut c_void,
    life: Life,
) -> Result<(), Failure> {
    if let Some(entry) = streams::find(device, stream)
        && mode::is_plain()
        && (pointer.is_null() || entry.pool.free(address(pointer), entry.stream).is_ok())
    {
        return Ok(());
    }
    // SAFETY: the caller vouches for it.
    unsafe { free_slowly(device, pointer, stream, life) }
}

/// # Safety
/// As in [`free`].
#[cold]
#[inline(never)]
unsafe fn free_slowly(
    device: u32,
    pointer: *mut c_void,
    stream: *mut c_void,
    life: Life,
) -> Result<(), Failure> {
    if pointer.is_null() {
        return Ok(());
    }
    super::check_process()?;
    // SAFETY: the caller vouches for it.
    let (pool, stream) = unsafe { resolve(device, stream, life) }?;
    captures::open_to(stream, ask(device, stream))?;
    let at = address(pointer);
    let heap = service::of(at.address());
    // Memory of the service's is its own stream's again, behind what is enqueued there.
    let free = || match &heap {
        Some(heap) => heap.free(at),
        None => Ok(pool.free(at, stream)?),
    };
    if !mode::is(Mode::Tracing) {
        return free();
    }
    let bytes = match &heap {
        Some(heap) => heap.allocation(at.address()).map(|(_, bytes)| bytes),
        None => pool.allocation(at.address()).map(|allocation| allocation.bytes),
    };
    let bytes = bytes.unwrap_or(0);
    let place = trace::place();
    // Before it is freed: from there on another thread may get, and note, the same address.
    let raw = stream.raw().addr() as u64;
    let noted = trace::note(Action::FreeCompleted, device, at.address(), bytes, raw, place);
    free().inspect_err(|_| trace::take_back(noted))
}

/// Notes that an allocation of any of the process's pools is used on a further stream.
///
/// # Safety
/// As in [`allocate`].
pub(crate) unsafe fn record_stream(
    pointer: *mut c_void,
    stream: *mut c_void,
    life: Life,
) -> Result<(), Failure> {
    if pointer.is_null() {
        return Ok(());
    }
    super::check_process()?;
    let at = address(pointer);
    if let Some(heap) = service::of(at.address()) {
        // SAFETY: the caller vouches for it.
        let (_, stream) = unsafe { resolve(heap.device(), stream, life) }?;
        return heap.record_stream(at, stream);
    }
    let pools = super::pools();
    let found = pools.iter().find(|pool| pool.allocation(at.address()).is_some());
    // None has it: any of them says so.
    let Some(pool) = found.or(pools.first()) else {
        return Err(Error::ForeignPointer { address: at.address() }.into());
    };
    // SAFETY: the caller vouches for it.
    let (_, stream) = unsafe { resolve(pool.device().ordinal(), stream, life) }?;
    Ok(pool.record_stream(at, stream)?)
}
