//! Memory of the process's pool that an object of Python's owns. Python runs handlers of signals between any two
//! steps of its own, in destructors too, where what they raise is lost, and the memory with it. So what makes the
//! memory the object's, and what frees it, is one step each.

use std::cell::Cell;
use std::ffi::c_void;
use std::io::{self, Write};
use std::ptr;
use std::sync::atomic::{AtomicU32, AtomicU64, Ordering};

use super::IS_ENDING;
use crate::guard::{Failure, guard};
use crate::process::{self, Asked, Life};
use crate::status::vpmm_status;

/// The legacy default stream, which comes after the default streams of all threads, and these.
const LEGACY: usize = 1;
const PER_THREAD: usize = 2;

/// Set to 0, but for its device and its stream, before it is made.
#[repr(C)]
#[derive(Debug)]
pub struct vpmm_python_memory {
    /// The device.
    pub device: u32,
    /// 1 while it is allocated.
    pub is_there: u32,
    /// On which it is allocated, and freed.
    pub stream: *mut c_void,
    /// Null where there are no bytes.
    pub pointer: *mut c_void,
    /// Which thread has made it, whose per-thread default stream its stream is.
    pub thread: u64,
}

/// A number that no two threads have.
fn this_thread() -> u64 {
    static THREADS: AtomicU64 = AtomicU64::new(1);
    thread_local! {
        static THREAD: Cell<u64> = const { Cell::new(0) };
    }
    THREAD.with(|thread| {
        if thread.get() == 0 {
            thread.set(THREADS.fetch_add(1, Ordering::Relaxed));
        }
        thread.get()
    })
}

/// Frees what is there, once, whichever of several threads comes first.
///
/// # Safety
/// As `vpmm_python_free_memory`.
unsafe fn free(memory: *mut vpmm_python_memory) -> Result<(), Failure> {
    if memory.is_null() {
        return Err(Failure::null("memory"));
    }
    // SAFETY: the caller vouches for it; from here on until it ends this alone changes.
    let is_there = unsafe { AtomicU32::from_ptr(&raw mut (*memory).is_there) };
    if is_there.swap(0, Ordering::AcqRel) == 0 {
        return Ok(());
    }
    // SAFETY: as above, and nobody writes to these.
    let (device, pointer, stream, thread) =
        unsafe { ((*memory).device, (*memory).pointer, (*memory).stream, (*memory).thread) };
    // Another thread's default stream cannot be named here.
    let is_others = stream.addr() == PER_THREAD && thread != this_thread();
    let stream = if is_others { ptr::without_provenance_mut(LEGACY) } else { stream };
    // SAFETY: the caller vouches for it.
    let freed = unsafe { process::free(device, pointer, stream, Life::Unknown) };
    match freed.as_ref().map_err(Failure::status) {
        // The memory is the parent's.
        Err(vpmm_status::VPMM_FORKED) => return Ok(()),
        // It may be somebody else's by now.
        Ok(()) | Err(vpmm_status::VPMM_BAD_POINTER | vpmm_status::VPMM_DOUBLE_FREE) => {}
        Err(_) => is_there.store(1, Ordering::Release),
    }
    freed
}

/// Allocates of the process's pool.
///
/// # Safety
/// `memory` is to such, which nobody else uses meanwhile; its stream is alive.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vpmm_python_make_memory(
    memory: *mut vpmm_python_memory,
    bytes: usize,
) -> vpmm_status {
    guard(|| {
        // SAFETY: the caller vouches for it.
        let memory = unsafe { memory.as_mut() }.ok_or_else(|| Failure::null("memory"))?;
        let (device, stream) = (memory.device, memory.stream);
        // SAFETY: the caller vouches for it.
        memory.pointer =
            unsafe { process::allocate(device, bytes, stream, Life::Unknown, Asked::Not) }?;
        memory.thread = this_thread();
        memory.is_there = u32::from(!memory.pointer.is_null());
        Ok(())
    })
}

/// Frees it, where it is there. Where that is refused, as on a stream that captures, it stays there, but for one
/// that was freed otherwise. In a child of the process it is the parent's: nothing is done.
///
/// # Safety
/// As `vpmm_free`, of its memory; `memory` is to such, which `vpmm_python_make_memory` is over with. Several
/// threads may call it.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vpmm_python_free_memory(memory: *mut vpmm_python_memory) -> vpmm_status {
    // SAFETY: the caller vouches for it.
    guard(|| unsafe { free(memory) })
}

/// Frees it as its owner goes; what fails is told on the standard error stream. Nothing once the interpreter ends:
/// the driver takes everything back, and streams may be gone.
///
/// # Safety
/// As `vpmm_python_free_memory`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vpmm_python_end_memory(memory: *mut vpmm_python_memory) {
    if memory.is_null() || IS_ENDING.load(Ordering::SeqCst) {
        return;
    }
    let _ = guard(|| {
        // SAFETY: the caller vouches for it.
        unsafe { free(memory) }.inspect_err(|failure| {
            // SAFETY: not null; the caller vouches for the rest.
            let (pointer, device) = unsafe { ((*memory).pointer, (*memory).device) };
            let text = failure.text();
            // Nobody may be there to read it, which `eprintln` would panic at.
            let _ = writeln!(
                io::stderr(),
                "vpmm: {pointer:p} on device {device} could not be freed: {text}"
            );
        })
    });
}
