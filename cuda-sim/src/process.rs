//! Which process this is, without a system call: a driver call of a child is turned away, and every call
//! asks.

use std::ptr::NonNull;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicU32, Ordering};

use rustix::mm::{Advice, MapFlags, ProtFlags, madvise, mmap_anonymous, munmap};

/// The number of this process as it was found out; 0 in a child that has not asked yet, however it was forked.
/// `None` where the system does not wipe memory for a child.
static KNOWN: OnceLock<Option<&'static AtomicU32>> = OnceLock::new();

/// The number of this process.
pub(crate) fn number() -> u32 {
    let Some(known) = KNOWN.get_or_init(wiped) else { return std::process::id() };
    match known.load(Ordering::Relaxed) {
        0 => {
            let number = std::process::id();
            known.store(number, Ordering::Relaxed);
            number
        }
        number => number,
    }
}

/// A word of a page that is zeroes again in a child. It is never given back.
fn wiped() -> Option<&'static AtomicU32> {
    const BYTES: usize = 4096;
    if cfg!(miri) {
        return None;
    }
    let access = ProtFlags::READ | ProtFlags::WRITE;
    // SAFETY: a new mapping at an address of the kernel's choice touches no other memory.
    let start =
        unsafe { mmap_anonymous(std::ptr::null_mut(), BYTES, access, MapFlags::PRIVATE) }.ok()?;
    let word = NonNull::new(start.cast::<AtomicU32>())?;
    // SAFETY: the whole mapping; in this process nothing of it changes. Linux before 4.14 refuses.
    if unsafe { madvise(start, BYTES, Advice::LinuxWipeOnFork) }.is_err() {
        // SAFETY: made above with this length, and nobody has been told of it.
        let _ = unsafe { munmap(start, BYTES) };
        return None;
    }
    // SAFETY: page-aligned, zeroed (a valid state, also when a child gets it), and mapped for the rest of
    // the process; nobody else has its address.
    Some(unsafe { word.as_ref() })
}
