//! Pools.

use std::ffi::{c_char, c_void};
use std::sync::Arc;

use vpmm_core::{DevicePtr, Pool, StreamHandle, Violation};

use crate::driver::{Loaded, vpmm_driver};
use crate::grows;
use crate::guard::{Failure, given, guard, make, put_if, put_text, release, with};
use crate::options::vpmm_pool_options;
use crate::stats::{self, vpmm_stats};
use crate::status::vpmm_status;

/// A pool.
pub struct vpmm_pool {
    // First, so that its driver is there when it ends.
    pool: Pool,
    loaded: Arc<Loaded>,
}

impl vpmm_pool {
    /// A handle, which `vpmm_pool_release` takes back.
    pub(crate) fn handle(pool: Pool, loaded: Arc<Loaded>) -> *mut Self {
        Box::into_raw(Box::new(Self { pool, loaded }))
    }

    pub(crate) fn pool(&self) -> &Pool {
        &self.pool
    }

    pub(crate) fn loaded(&self) -> &Arc<Loaded> {
        &self.loaded
    }

    /// # Safety
    /// The stream is alive while the handle is used.
    pub(crate) unsafe fn stream(&self, raw: *mut c_void) -> StreamHandle {
        // SAFETY: the caller vouches for it.
        unsafe { self.loaded.stream(raw) }
    }
}

impl Loaded {
    pub(crate) fn new_pool(&self, options: &vpmm_pool_options) -> Result<Pool, Failure> {
        let device = self.device(options.device)?;
        Ok(if options.is_paged()? {
            Pool::paged(&device, &options.paged_profile()?)?
        } else {
            Pool::new(&device, &options.default_profile()?)?
        })
    }
}

/// A device's address, as CUDA's own functions give it.
pub(crate) fn to_pointer(address: DevicePtr) -> *mut c_void {
    std::ptr::without_provenance_mut(address.address() as usize)
}

pub(crate) fn of_pointer(pointer: *mut c_void) -> DevicePtr {
    DevicePtr::from_address(pointer.addr() as u64)
}

/// Makes a pool; `options` may be null, for a pool of the default profile on device 0.
///
/// # Safety
/// `driver` is null or a handle; `options` is null or begins with its own size; `out` is null or has
/// room for a pointer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vpmm_pool_create(
    driver: *const vpmm_driver,
    options: *const vpmm_pool_options,
    out: *mut *mut vpmm_pool,
) -> vpmm_status {
    let work = || {
        // SAFETY: the caller vouches for it.
        let loaded = Arc::clone(&unsafe { given(driver, "driver") }?.0);
        // SAFETY: the caller vouches for it.
        let options = unsafe { grows::read(options) }?;
        let pool = loaded.new_pool(&options)?;
        let handle = vpmm_pool::handle(pool, loaded);
        Ok(handle)
    };
    // SAFETY: the caller vouches for it.
    unsafe { make(out, work) }
}

/// Gives a handle back. The pool ends, which waits for the work before its frees. If something is still
/// allocated it lives on, and ends when that has been freed by `vpmm_free_any`; `vpmm_pool_destroy` ends
/// a pool with all that is allocated.
///
/// # Safety
/// `pool` is null, or a handle that is not used again.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vpmm_pool_release(pool: *mut vpmm_pool) {
    // SAFETY: made by `Box::into_raw` in `vpmm_pool_create`, given back once.
    unsafe { release(pool) };
}

/// Ends a pool with everything that is allocated from it, and gives the handle back, whatever the answer is.
/// Waits for the whole device where something is allocated. `VPMM_IN_USE` where others have handles,
/// which end it then; `VPMM_BAD_STREAM` where the driver refuses that wait since a stream captures: the
/// pool lives on, and ends when all that is allocated has been freed by `vpmm_free_any`.
///
/// # Safety
/// `pool` is null or a handle; neither it nor the pool's memory is used again.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vpmm_pool_destroy(pool: *mut vpmm_pool) -> vpmm_status {
    guard(|| {
        if pool.is_null() {
            return Err(Failure::null("pool"));
        }
        // SAFETY: made by `Box::into_raw` in `vpmm_pool_create`, given back once.
        let vpmm_pool { pool, loaded } = *unsafe { Box::from_raw(pool) };
        let ended = pool.destroy().map_err(|(pool, error)| {
            drop(pool);
            error
        });
        drop(loaded);
        Ok(ended?)
    })
}

/// Allocates for use on a stream, by work that is enqueued there after the call. 0 bytes give a null
/// pointer, which can be freed. The address is a multiple of 512 bytes; in the paged profile of the page
/// for requests of a page or more, of 256 bytes for smaller ones. A request that would find no memory
/// otherwise waits for the device, as long as the pool's options say; then it is
/// `VPMM_OUT_OF_MEMORY`, with a map of the pool in the text.
///
/// # Safety
/// `pool` is null or a handle; the stream is alive; `out` is null or has room for a pointer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vpmm_malloc(
    pool: *const vpmm_pool,
    bytes: usize,
    stream: *mut c_void,
    out: *mut *mut c_void,
) -> vpmm_status {
    let work = || {
        // SAFETY: the caller vouches for it.
        let pool = unsafe { given(pool, "pool") }?;
        let pointer = if bytes == 0 {
            std::ptr::null_mut()
        } else {
            // SAFETY: the caller vouches for it.
            let stream = unsafe { pool.stream(stream) };
            to_pointer(pool.pool.malloc(bytes, stream)?)
        };
        Ok(pointer)
    };
    // SAFETY: the caller vouches for it.
    unsafe { make(out, work) }
}

/// Frees an allocation once everything enqueued on the stream so far has finished. Null is nothing.
///
/// # Safety
/// `pool` is null or a handle; the stream is alive; nobody uses the memory in work that is enqueued
/// later, or that is not ordered before. The work of the allocation's own stream until then is
/// ordered before, too, also where nothing was done with the memory.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vpmm_free(
    pool: *const vpmm_pool,
    pointer: *mut c_void,
    stream: *mut c_void,
) -> vpmm_status {
    let work = |pool: &vpmm_pool| {
        if pointer.is_null() {
            return Ok(());
        }
        // SAFETY: the caller vouches for it.
        let stream = unsafe { pool.stream(stream) };
        Ok(pool.pool.free(of_pointer(pointer), stream)?)
    };
    // SAFETY: the caller vouches for it.
    unsafe { with(pool, "pool", work) }
}

/// Frees an allocation of whichever pool of the driver's it is.
///
/// # Safety
/// As `vpmm_free`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vpmm_free_any(
    driver: *const vpmm_driver,
    pointer: *mut c_void,
    stream: *mut c_void,
) -> vpmm_status {
    guard(|| {
        // SAFETY: the caller vouches for it.
        let loaded = &unsafe { given(driver, "driver") }?.0;
        if pointer.is_null() {
            return Ok(());
        }
        // SAFETY: the caller vouches for it.
        let stream = unsafe { loaded.stream(stream) };
        Ok(loaded.free_any(of_pointer(pointer), stream)?)
    })
}

/// Notes that an allocation is used on a further stream: after its free it is not handed out before
/// what is enqueued there until then has finished. Null is nothing.
///
/// A stream that was made (`vpmm_stream_create`) or lent (`vpmm_stream_lend`) before its first such call for
/// the allocation may end, or be taken back, at any time. On any other an event is recorded when the
/// allocation is freed: such a stream must be alive until that call has returned, whichever stream it frees
/// on, and while it captures the free answers `VPMM_BAD_STREAM` and does nothing. What the default stream
/// of another thread (`cudaStreamPerThread`) uses is kept until that thread frees something there, or the
/// host has waited for the device.
///
/// # Safety
/// `pool` is null or a handle; the stream is alive, and lasts as said.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vpmm_record_stream(
    pool: *const vpmm_pool,
    pointer: *mut c_void,
    stream: *mut c_void,
) -> vpmm_status {
    let work = |pool: &vpmm_pool| {
        if pointer.is_null() {
            return Ok(());
        }
        // SAFETY: the caller vouches for it.
        let stream = unsafe { pool.stream(stream) };
        Ok(pool.pool.record_stream(of_pointer(pointer), stream)?)
    };
    // SAFETY: the caller vouches for it.
    unsafe { with(pool, "pool", work) }
}

/// The allocation of the pool that an address is in: its first byte, and its bytes as the pool rounded
/// them, either of which may be null. `VPMM_BAD_POINTER` where it is in none.
///
/// # Safety
/// `pool` is null or a handle; `start` is null or has room for a pointer, `bytes` for a number.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vpmm_pool_allocation(
    pool: *const vpmm_pool,
    address: *mut c_void,
    start: *mut *mut c_void,
    bytes: *mut u64,
) -> vpmm_status {
    let work = |pool: &vpmm_pool| {
        let Some(found) = pool.pool.allocation(address.addr() as u64) else {
            let text = format!("{address:p} is in no allocation of the pool");
            return Err(Failure::new(vpmm_status::VPMM_BAD_POINTER, text));
        };
        // SAFETY: the caller vouches for it.
        unsafe { put_if(start, to_pointer(found.start)) };
        // SAFETY: the caller vouches for it.
        unsafe { put_if(bytes, found.bytes) };
        Ok(())
    };
    // SAFETY: the caller vouches for it.
    unsafe { with(pool, "pool", work) }
}

/// Gives free memory back to the device until `keep_bytes` are held; `returned` may be null.
///
/// # Safety
/// `pool` is null or a handle; `returned` is null or has room for a number.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vpmm_pool_trim_to(
    pool: *const vpmm_pool,
    keep_bytes: u64,
    returned: *mut u64,
) -> vpmm_status {
    let work = |pool: &vpmm_pool| {
        let bytes = pool.pool.trim_to(keep_bytes)?;
        // SAFETY: the caller vouches for it.
        unsafe { put_if(returned, bytes) };
        Ok(())
    };
    // SAFETY: the caller vouches for it.
    unsafe { with(pool, "pool", work) }
}

/// Changes the most bytes that the pool may hold, at most to what it was made with, which 0 stands for.
/// What it holds beyond that stays until it is free and trimmed.
///
/// # Safety
/// `pool` is null or a handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vpmm_pool_limit_to(
    pool: *const vpmm_pool,
    limit_bytes: u64,
) -> vpmm_status {
    let limit = Some(limit_bytes).filter(|bytes| *bytes != 0);
    // SAFETY: the caller vouches for it.
    unsafe { with(pool, "pool", |pool| Ok(pool.pool.limit_to(limit)?)) }
}

/// Sets the peaks to what is held now.
///
/// # Safety
/// `pool` is null or a handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vpmm_pool_reset_peaks(pool: *const vpmm_pool) -> vpmm_status {
    let work = |pool: &vpmm_pool| {
        pool.pool.reset_peaks();
        Ok(())
    };
    // SAFETY: the caller vouches for it.
    unsafe { with(pool, "pool", work) }
}

/// What the pool holds now.
///
/// # Safety
/// `pool` is null or a handle; `out` is null or begins with its own size.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vpmm_pool_stats(
    pool: *const vpmm_pool,
    out: *mut vpmm_stats,
) -> vpmm_status {
    // SAFETY: the caller vouches for both.
    unsafe { with(pool, "pool", |pool| stats::fill(out, &pool.pool.stats())) }
}

/// Writes what stands where in the pool as text, cut to `length` bytes with the zero byte at its end;
/// `needed`, which may be null, gets the bytes of all of it, the zero byte included.
///
/// # Safety
/// `pool` is null or a handle; `text` has room for `length` bytes, or is null, and `length` 0; `needed`
/// is null or has room for a number.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vpmm_pool_layout(
    pool: *const vpmm_pool,
    text: *mut c_char,
    length: usize,
    needed: *mut usize,
) -> vpmm_status {
    let work = |pool: &vpmm_pool| {
        // SAFETY: the caller vouches for it.
        unsafe { put_text(&pool.pool.layout().to_string(), text, length, needed) }
    };
    // SAFETY: the caller vouches for it.
    unsafe { with(pool, "pool", work) }
}

/// Checks the pool's books from scratch: `VPMM_CORRUPT` if something is wrong. No thread may use the
/// pool meanwhile.
///
/// # Safety
/// `pool` is null or a handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vpmm_pool_validate(pool: *const vpmm_pool) -> vpmm_status {
    let corrupt = |wrong: Violation| Failure::new(vpmm_status::VPMM_CORRUPT, wrong.to_string());
    // SAFETY: the caller vouches for it.
    unsafe { with(pool, "pool", |pool| pool.pool.validate().map_err(corrupt)) }
}
