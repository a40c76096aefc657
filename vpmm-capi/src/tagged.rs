//! Heaps that can sleep: their memory goes to the device and comes back at the same addresses.

use std::ffi::{CStr, c_char, c_void};
use std::path::PathBuf;
use std::sync::Arc;

use vpmm_core::{Buffers, Contents, Tagged};

use crate::driver::Loaded;
use crate::guard::{Failure, given, guard, make, put, put_if, release, text, with};
use crate::pool::{to_pointer, vpmm_pool};
use crate::stats::{self, vpmm_stats};
use crate::status::vpmm_status;

/// A heap beside a pool's main one, whose memory sleeps and wakes as one.
pub struct vpmm_tagged {
    // First, so that its driver is there when it ends.
    heap: Tagged,
    loaded: Arc<Loaded>,
}

/// What becomes of what a heap's memory holds while the heap sleeps.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum vpmm_contents {
    /// It is lost.
    VPMM_CONTENTS_DISCARD = 0,
    /// It is copied to page-locked memory of the host, which is given back when the heap wakes.
    VPMM_CONTENTS_KEEP = 1,
    /// The same, but that the host's memory is kept for the next time: to lock pages takes longer than
    /// to copy.
    VPMM_CONTENTS_KEEP_BUFFERS = 2,
    /// It is written to a file.
    VPMM_CONTENTS_SAVE = 3,
}

/// Opens the heap of a tag, which is made at the first time; the same tag is the same heap. It counts
/// towards the pool's limit, and lasts as long as the pool.
///
/// # Safety
/// `pool` is null or a handle; `tag` is null or ends with a zero byte; `out` is null or has room for a
/// pointer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vpmm_tagged_open(
    pool: *const vpmm_pool,
    tag: *const c_char,
    out: *mut *mut vpmm_tagged,
) -> vpmm_status {
    let work = || {
        // SAFETY: the caller vouches for both.
        let (pool, tag) = unsafe { (given(pool, "pool")?, text(tag, "tag")?) };
        let heap = pool.pool().tagged(tag)?;
        let tagged = vpmm_tagged { heap, loaded: Arc::clone(pool.loaded()) };
        let handle = Box::into_raw(Box::new(tagged));
        Ok(handle)
    };
    // SAFETY: the caller vouches for it.
    unsafe { make(out, work) }
}

/// Gives a handle back. The heap stays, with what is allocated in it.
///
/// # Safety
/// `tagged` is null, or a handle that is not used again.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vpmm_tagged_release(tagged: *mut vpmm_tagged) {
    // SAFETY: made by `Box::into_raw` in `vpmm_tagged_open`, given back once.
    unsafe { release(tagged) };
}

/// As `vpmm_malloc`, from the heap. Freed by `vpmm_free` of its pool. While the heap sleeps it answers
/// `VPMM_BAD_STATE`.
///
/// # Safety
/// `tagged` is null or a handle; the stream is alive; `out` is null or has room for a pointer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vpmm_tagged_malloc(
    tagged: *const vpmm_tagged,
    bytes: usize,
    stream: *mut c_void,
    out: *mut *mut c_void,
) -> vpmm_status {
    let work = || {
        // SAFETY: the caller vouches for it.
        let tagged = unsafe { given(tagged, "tagged") }?;
        let pointer = if bytes == 0 {
            std::ptr::null_mut()
        } else {
            // SAFETY: the caller vouches for it.
            let stream = unsafe { tagged.loaded.stream(stream) };
            to_pointer(tagged.heap.malloc(bytes, stream)?)
        };
        Ok(pointer)
    };
    // SAFETY: the caller vouches for it.
    unsafe { make(out, work) }
}

/// Whether the heap sleeps: 1 or 0.
///
/// # Safety
/// `tagged` is null or a handle; `out` is null or has room for a number.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vpmm_tagged_is_asleep(
    tagged: *const vpmm_tagged,
    out: *mut u32,
) -> vpmm_status {
    guard(|| {
        // SAFETY: the caller vouches for it.
        let asleep = unsafe { given(tagged, "tagged") }?.heap.is_asleep();
        // SAFETY: the caller vouches for it.
        unsafe { put(out, "out", u32::from(asleep)) }
    })
}

/// As `vpmm_pool_trim_to`, of the heap alone. Nothing while it sleeps.
///
/// # Safety
/// `tagged` is null or a handle; `returned` is null or has room for a number.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vpmm_tagged_trim_to(
    tagged: *const vpmm_tagged,
    keep_bytes: u64,
    returned: *mut u64,
) -> vpmm_status {
    let work = |tagged: &vpmm_tagged| {
        let bytes = tagged.heap.trim_to(keep_bytes)?;
        // SAFETY: the caller vouches for it.
        unsafe { put_if(returned, bytes) };
        Ok(())
    };
    // SAFETY: the caller vouches for it.
    unsafe { with(tagged, "tagged", work) }
}

/// What the heap holds.
///
/// # Safety
/// `tagged` is null or a handle; `out` is null or begins with its own size.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vpmm_tagged_stats(
    tagged: *const vpmm_tagged,
    out: *mut vpmm_stats,
) -> vpmm_status {
    guard(|| {
        // SAFETY: the caller vouches for it.
        let stats = unsafe { given(tagged, "tagged") }?.heap.stats();
        // SAFETY: the caller vouches for it.
        unsafe { stats::fill(out, &stats) }
    })
}

/// Gives all physical memory of a heap to the device. Its allocations keep their addresses, which
/// nothing may use until `vpmm_resume`. All work that uses them must come before on `stream`, for which
/// the host waits. `contents` is a `vpmm_contents`; `path` names the file of `VPMM_CONTENTS_SAVE`, which
/// is made or cut to nothing, and must stay as it is until the heap was resumed, and is not read else.
/// `bytes`, which may be null, gets how much the device has again.
///
/// If it fails the heap is awake as it was; the text says so if not.
///
/// # Safety
/// `pool` is null or a handle; `tag` and `path` are null or end with a zero byte; the stream is alive;
/// `bytes` is null or has room for a number.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vpmm_suspend(
    pool: *const vpmm_pool,
    tag: *const c_char,
    stream: *mut c_void,
    contents: u32,
    path: *const c_char,
    bytes: *mut u64,
) -> vpmm_status {
    guard(|| {
        // SAFETY: the caller vouches for both.
        let (pool, tag) = unsafe { (given(pool, "pool")?, text(tag, "tag")?) };
        let contents = match contents {
            0 => Contents::Discard,
            1 => Contents::Keep(Buffers::Release),
            2 => Contents::Keep(Buffers::Retain),
            // SAFETY: the caller vouches for it.
            3 => Contents::Save(unsafe { path_of(path) }?),
            other => {
                let text = format!("contents cannot be {other}");
                return Err(Failure::new(vpmm_status::VPMM_INVALID_ARGUMENT, text));
            }
        };
        // SAFETY: the caller vouches for it.
        let stream = unsafe { pool.stream(stream) };
        let asleep = pool.pool().suspend(tag, stream, &contents)?;
        // SAFETY: the caller vouches for it.
        unsafe { put_if(bytes, asleep.bytes) };
        Ok(())
    })
}

/// Brings a heap's memory back at the same addresses. Work that is enqueued on `stream` from here on
/// finds there what `vpmm_suspend` kept. With `without_contents` that is given up instead, where it
/// is lost. `bytes`, which may be null, gets how much memory it is.
///
/// If it fails the heap is asleep as it was.
///
/// # Safety
/// `pool` is null or a handle; `tag` is null or ends with a zero byte; the stream is alive; `bytes` is
/// null or has room for a number.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vpmm_resume(
    pool: *const vpmm_pool,
    tag: *const c_char,
    stream: *mut c_void,
    without_contents: u32,
    bytes: *mut u64,
) -> vpmm_status {
    guard(|| {
        // SAFETY: the caller vouches for both.
        let (pool, tag) = unsafe { (given(pool, "pool")?, text(tag, "tag")?) };
        // SAFETY: the caller vouches for it.
        let stream = unsafe { pool.stream(stream) };
        let awake = if without_contents == 0 {
            pool.pool().resume(tag, stream)?
        } else {
            pool.pool().resume_empty(tag, stream)?
        };
        // SAFETY: the caller vouches for it.
        unsafe { put_if(bytes, awake.bytes) };
        Ok(())
    })
}

/// A path as the system has it: any bytes.
///
/// # Safety
/// `path` is null or ends with a zero byte.
unsafe fn path_of(path: *const c_char) -> Result<PathBuf, Failure> {
    use std::os::unix::ffi::OsStrExt;
    if path.is_null() {
        return Err(Failure::null("path"));
    }
    // SAFETY: the caller vouches for it.
    let bytes = unsafe { CStr::from_ptr(path) }.to_bytes();
    Ok(PathBuf::from(std::ffi::OsStr::from_bytes(bytes)))
}
