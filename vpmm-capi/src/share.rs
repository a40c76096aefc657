//! Memory for other processes, and of them: by a connected Unix stream socket.

use std::ffi::{c_int, c_void};
use std::os::fd::BorrowedFd;
use std::sync::{Arc, Mutex, PoisonError};

use vpmm_core::{Access, Export, Imported, Pool};

use crate::driver::{Loaded, vpmm_driver};
use crate::guard::{Failure, given, make, put, put_if, release, with};
use crate::kept::Kept;
use crate::pool::{of_pointer, to_pointer, vpmm_pool};
use crate::status::vpmm_status;

/// What a device may do with memory.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum vpmm_access {
    /// Nothing.
    VPMM_ACCESS_NONE = 0,
    /// Read.
    VPMM_ACCESS_READ = 1,
    /// Read and write.
    VPMM_ACCESS_READ_WRITE = 3,
}

fn access_of(access: u32) -> Result<Access, Failure> {
    match access {
        0 => Ok(Access::None),
        1 => Ok(Access::Read),
        3 => Ok(Access::ReadWrite),
        other => {
            let text = format!("access cannot be {other}");
            Err(Failure::new(vpmm_status::VPMM_INVALID_ARGUMENT, text))
        }
    }
}

/// Gives a device access to all memory of a pool, or takes it away; `access` is a `vpmm_access`. What uses the memory on
/// the device must have finished before its access is taken.
///
/// Pools of the process on devices that can reach each other are open to each other from the start.
///
/// # Safety
/// `pool` is null or a handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vpmm_pool_set_access(
    pool: *const vpmm_pool,
    device: u32,
    access: u32,
) -> vpmm_status {
    let work = |pool: &vpmm_pool| {
        let device = pool.loaded().device(device)?;
        Ok(pool.pool().set_access(&device, access_of(access)?)?)
    };
    // SAFETY: the caller vouches for it.
    unsafe { with(pool, "pool", work) }
}

/// What a device may do with the memory of a pool: a `vpmm_access`.
///
/// # Safety
/// `pool` is null or a handle; `out` is null or has room for a number.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vpmm_pool_access(
    pool: *const vpmm_pool,
    device: u32,
    out: *mut u32,
) -> vpmm_status {
    let work = |pool: &vpmm_pool| {
        let device = pool.loaded().device(device)?;
        let access = match pool.pool().access(&device) {
            Access::None => vpmm_access::VPMM_ACCESS_NONE,
            Access::Read => vpmm_access::VPMM_ACCESS_READ,
            Access::ReadWrite => vpmm_access::VPMM_ACCESS_READ_WRITE,
        };
        // SAFETY: the caller vouches for it.
        unsafe { put(out, "out", access as u32) }
    };
    // SAFETY: the caller vouches for it.
    unsafe { with(pool, "pool", work) }
}

/// Sends one allocation to a process that is in `vpmm_import_receive` at the other end of a connected
/// Unix stream socket, and waits until it has mapped it. The pool was made with `sharing`. The memory
/// stays where it is from then on, and may be freed when the other process has finished with it.
///
/// # Safety
/// `pool` is null or a handle; `socket` is an open descriptor.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vpmm_export_send(
    pool: *const vpmm_pool,
    pointer: *mut c_void,
    socket: c_int,
) -> vpmm_status {
    let work = |pool: &vpmm_pool| {
        // SAFETY: the caller vouches for it.
        let socket = unsafe { borrow(socket) }?;
        Ok(pool.pool().export(of_pointer(pointer))?.send(socket)?)
    };
    // SAFETY: the caller vouches for it.
    unsafe { with(pool, "pool", work) }
}

/// A whole pool on its way to another process.
pub struct vpmm_export {
    // Before the pool that it borrows.
    export: Mutex<Export<'static>>,
    _pool: Kept<Pool>,
    loaded: Arc<Loaded>,
}

/// Prepares to send a whole pool, again and again as it grows: one of these for each receiver.
///
/// # Safety
/// `pool` is null or a handle; `out` is null or has room for a pointer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vpmm_export_create(
    pool: *const vpmm_pool,
    out: *mut *mut vpmm_export,
) -> vpmm_status {
    let work = || {
        // SAFETY: the caller vouches for it.
        let from = unsafe { given(pool, "pool") }?;
        let pool = Kept::new(from.pool().clone());
        // SAFETY: what borrows it is dropped before it: here, or as the handle's first field.
        let borrowed: &'static Pool = unsafe { pool.borrow() };
        let export = Mutex::new(borrowed.export_all()?);
        let export = vpmm_export { export, _pool: pool, loaded: Arc::clone(from.loaded()) };
        Ok(Box::into_raw(Box::new(export)))
    };
    // SAFETY: the caller vouches for it.
    unsafe { make(out, work) }
}

/// Sends what the pool has; from the second time on what it has made since, for
/// `vpmm_import_receive_more`.
///
/// # Safety
/// `export` is null or a handle; `socket` is an open descriptor.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vpmm_export_send_all(
    export: *const vpmm_export,
    socket: c_int,
) -> vpmm_status {
    let work = |export: &vpmm_export| {
        // Before the lock, which a thread of the parent has while it sends.
        export.loaded.check_process()?;
        // SAFETY: the caller vouches for it.
        let socket = unsafe { borrow(socket) }?;
        Ok(export.export.lock().unwrap_or_else(PoisonError::into_inner).send(socket)?)
    };
    // SAFETY: the caller vouches for it.
    unsafe { with(export, "export", work) }
}

/// Gives a handle back. What was sent stays shared.
///
/// # Safety
/// `export` is null, or a handle that is not used again.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vpmm_export_release(export: *mut vpmm_export) {
    // SAFETY: made by `Box::into_raw` in `vpmm_export_create`, given back once.
    unsafe { release(export) };
}

/// Memory of another process's pool, mapped in this one.
pub struct vpmm_import {
    // First, so that its driver is there when it ends.
    imported: Imported,
    _loaded: Arc<Loaded>,
}

/// Takes the memory that the process at the other end of a connected Unix stream socket sends, and maps
/// it for a device; `access` is `VPMM_ACCESS_READ` or `VPMM_ACCESS_READ_WRITE`. Blocks until it has come;
/// timeouts are set on the socket.
///
/// # Safety
/// `driver` is null or a handle; `socket` is an open descriptor; `out` is null or has room for a pointer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vpmm_import_receive(
    driver: *const vpmm_driver,
    device: u32,
    socket: c_int,
    access: u32,
    out: *mut *mut vpmm_import,
) -> vpmm_status {
    let work = || {
        // SAFETY: the caller vouches for it.
        let loaded = &unsafe { given(driver, "driver") }?.0;
        // SAFETY: the caller vouches for it.
        let socket = unsafe { borrow(socket) }?;
        let imported = Imported::receive(&loaded.device(device)?, socket, access_of(access)?)?;
        let import = vpmm_import { imported, _loaded: Arc::clone(loaded) };
        Ok(Box::into_raw(Box::new(import)))
    };
    // SAFETY: the caller vouches for it.
    unsafe { make(out, work) }
}

/// Takes what a whole pool has made since it was sent last. Blocks until it has come; other threads may
/// ask meanwhile what is there.
///
/// # Safety
/// `import` is null or a handle; `socket` is an open descriptor.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vpmm_import_receive_more(
    import: *const vpmm_import,
    socket: c_int,
) -> vpmm_status {
    let work = |import: &vpmm_import| {
        // SAFETY: the caller vouches for it.
        let socket = unsafe { borrow(socket) }?;
        Ok(import.imported.receive_more(socket)?)
    };
    // SAFETY: the caller vouches for it.
    unsafe { with(import, "import", work) }
}

/// The start of an allocation that was sent, null of a whole pool; and its bytes, or of a whole pool all
/// that is mapped. Either may be null.
///
/// # Safety
/// `import` is null or a handle; `pointer` is null or has room for a pointer, `bytes` for a number.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vpmm_import_memory(
    import: *const vpmm_import,
    pointer: *mut *mut c_void,
    bytes: *mut u64,
) -> vpmm_status {
    let work = |import: &vpmm_import| {
        let imported = &import.imported;
        let start = imported.ptr().map_or(std::ptr::null_mut(), to_pointer);
        // SAFETY: the caller vouches for it.
        unsafe { put_if(pointer, start) };
        // SAFETY: the caller vouches for it.
        unsafe { put_if(bytes, imported.bytes()) };
        Ok(())
    };
    // SAFETY: the caller vouches for it.
    unsafe { with(import, "import", work) }
}

/// Where an address of the other process is in this one; `VPMM_BAD_POINTER` where it has no memory here.
///
/// # Safety
/// `import` is null or a handle; `out` is null or has room for a pointer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vpmm_import_translate(
    import: *const vpmm_import,
    there: u64,
    out: *mut *mut c_void,
) -> vpmm_status {
    let work = |import: &vpmm_import| {
        let Some(here) = import.imported.translate(there) else {
            let text = format!("{there:#x} has no memory here");
            return Err(Failure::new(vpmm_status::VPMM_BAD_POINTER, text));
        };
        // SAFETY: the caller vouches for it.
        unsafe { put(out, "out", to_pointer(here)) }
    };
    // SAFETY: the caller vouches for it.
    unsafe { with(import, "import", work) }
}

/// Waits for the work of the device's primary context, unmaps the memory and gives the handle back.
///
/// # Safety
/// `import` is null, or a handle that is not used again, nor is the memory.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vpmm_import_release(import: *mut vpmm_import) {
    // SAFETY: made by `Box::into_raw` in `vpmm_import_receive`, given back once.
    unsafe { release(import) };
}

/// Refuses what is no descriptor.
///
/// # Safety
/// Any other is open as long as the result is used.
unsafe fn borrow<'a>(socket: c_int) -> Result<BorrowedFd<'a>, Failure> {
    if socket < 0 {
        let text = format!("{socket} is no descriptor");
        return Err(Failure::new(vpmm_status::VPMM_INVALID_ARGUMENT, text));
    }
    // SAFETY: not -1; the caller vouches for the rest.
    Ok(unsafe { BorrowedFd::borrow_raw(socket) })
}
