//! Pools by their addresses, for frees that need no handle.
//!
//! A handle counts itself in and out on lines of the processors' caches that all threads write, and so would one
//! lock for readers. Here each thread has a place, which hardly any other has, and each place has all pools.
//! Whoever takes a pool out has been to every place: no free that found the pool here is under way from then on.
//!
//! Only a free's hit comes here, and what lies right behind it: neither takes another lock of this module's or
//! ends a pool.

#![forbid(unsafe_code)]

use std::collections::BTreeMap;
use std::sync::{Arc, PoisonError, RwLock};

use crate::default::{Core, Freed};
use crate::device::StreamHandle;
use crate::error::Result;
use crate::lock::Token;
use crate::sharing::Span;
use crate::units::DevicePtr;

/// Threads that never meet, if they began one after the other.
const PLACES: usize = 32;

/// The pools of the default profile that there are handles of.
#[derive(Default)]
pub(super) struct ByAddress([Place; PLACES]);

/// By the start of a pool's addresses. No two places are on lines that are fetched together.
#[derive(Default)]
#[repr(align(128))]
struct Place(RwLock<BTreeMap<u64, Found>>);

struct Found {
    bytes: u64,
    core: Arc<Core>,
}

impl ByAddress {
    /// Enters a pool with its addresses.
    pub(super) fn add(&self, window: Span, core: &Arc<Core>) {
        for Place(pools) in &self.0 {
            let found = Found { bytes: window.bytes, core: Arc::clone(core) };
            pools.write().unwrap_or_else(PoisonError::into_inner).insert(window.start, found);
        }
    }

    /// Takes a pool out, and waits for the frees that have found it. Its owner is somebody else.
    pub(super) fn remove(&self, start: u64) {
        for Place(pools) in &self.0 {
            pools.write().unwrap_or_else(PoisonError::into_inner).remove(&start);
        }
    }

    /// Frees an allocation of a pool that is here, if the calling thread's front takes it; else nothing is done.
    pub(super) fn free_at_hand(&self, ptr: DevicePtr, stream: StreamHandle) -> Option<Result<()>> {
        // A thread that is ending has no front either.
        let Place(pools) = &self.0[Token::current()?.place(PLACES)];
        let pools = pools.read().unwrap_or_else(PoisonError::into_inner);
        let (start, Found { bytes, core }) = pools.range(..=ptr.address()).next_back()?;
        if ptr.address() - start >= *bytes {
            return None;
        }
        match core.free_at_hand(ptr, stream) {
            Freed::Done => Some(Ok(())),
            Freed::Full(routed, start) => Some(core.free_behind(routed, start)),
            Freed::Missed(_) | Freed::Unknown => None,
        }
    }
}
