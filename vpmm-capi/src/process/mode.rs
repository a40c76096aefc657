//! What keeps requests from the shortest way: one number, so that it is one load.

use std::sync::atomic::{AtomicU32, Ordering};

/// Why a request has more to do than to ask the pool.
#[derive(Clone, Copy)]
#[repr(u32)]
pub(crate) enum Mode {
    /// A graph's pool is open to some stream.
    Capturing = 1,
    /// What is done is written down.
    Tracing = 2,
    /// Some thread's requests have a tag.
    Tagging = 4,
}

static MODES: AtomicU32 = AtomicU32::new(0);

pub(crate) fn set(mode: Mode, on: bool) {
    if on {
        MODES.fetch_or(mode as u32, Ordering::SeqCst);
    } else {
        MODES.fetch_and(!(mode as u32), Ordering::SeqCst);
    }
}

/// Whether there is nothing but the pool to ask.
#[inline(always)]
pub(super) fn is_plain() -> bool {
    MODES.load(Ordering::Relaxed) == 0
}

pub(super) fn is(mode: Mode) -> bool {
    MODES.load(Ordering::Relaxed) & mode as u32 != 0
}
