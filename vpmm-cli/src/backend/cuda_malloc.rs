//! `cuMemAlloc` and `cuMemFree`: the driver without any pool.
//!
//! The driver tells nobody what it holds for these calls, and knows no limit.
//! Both are kept here, on the bytes that were asked for, each allocation rounded
//! up to the 512 bytes that are the least it can take: a lower bound.

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use vpmm::StreamHandle;

use super::Backend;
use crate::bytes::ByteCount;
use crate::device::{Calls, Machine};

const UNIT_BYTES: u64 = 512;

pub(crate) struct CudaMalloc<'a> {
    calls: Calls<'a>,
    limit_bytes: Option<u64>,
    held: Mutex<Held>,
}

/// What is allocated.
#[derive(Default)]
struct Held {
    bytes_at: HashMap<u64, u64>,
    /// What the driver is being asked for is in it: a sum that 64 bits need not hold.
    bytes: u128,
    peak_bytes: u128,
}

impl Held {
    fn bytes(&self) -> u64 {
        u64::try_from(self.bytes).unwrap_or(u64::MAX)
    }
}

impl<'a> CudaMalloc<'a> {
    pub(crate) fn new(machine: &'a Machine, limit_bytes: Option<u64>) -> Self {
        Self { calls: machine.allocator_calls(), limit_bytes, held: Mutex::default() }
    }

    fn held(&self) -> MutexGuard<'_, Held> {
        // Plain numbers: a panic elsewhere leaves them whole.
        self.held.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Backend for CudaMalloc<'_> {
    fn allocate(&self, bytes: u64, _stream: StreamHandle) -> vpmm::Result<u64> {
        let taken = bytes.checked_next_multiple_of(UNIT_BYTES).unwrap_or(u64::MAX);
        {
            let mut held = self.held();
            let after = held.bytes + u128::from(taken);
            if let Some(limit) = self.limit_bytes
                && after > u128::from(limit)
            {
                let free_bytes = limit.saturating_sub(held.bytes());
                return Err(vpmm::Error::OutOfMemory {
                    requested_bytes: taken,
                    free_bytes,
                    largest_free_bytes: free_bytes,
                    mapped_bytes: held.bytes(),
                    live_bytes: held.bytes(),
                    limit_bytes: Some(limit),
                    map: None,
                });
            }
            // Taken before the driver is asked, so that threads cannot pass the limit together.
            held.bytes = after;
        }
        match self.calls.allocate(bytes) {
            Ok(address) => {
                let mut held = self.held();
                held.bytes_at.insert(address, taken);
                held.peak_bytes = held.peak_bytes.max(held.bytes);
                Ok(address)
            }
            Err(error) => {
                self.held().bytes -= u128::from(taken);
                Err(error)
            }
        }
    }

    /// The driver waits for all of the device's work, on whichever stream.
    unsafe fn free(&self, address: u64, _bytes: u64, _stream: StreamHandle) -> vpmm::Result<()> {
        // Forgotten first: once freed, another thread may be given the same address.
        let taken = self.held().bytes_at.remove(&address).unwrap_or(0);
        // SAFETY: the caller vouches for the address.
        let freed = unsafe { self.calls.free(address) };
        self.held().bytes -= u128::from(taken);
        freed
    }

    fn peak_mapped_bytes(&self) -> vpmm::Result<u64> {
        Ok(u64::try_from(self.held().peak_bytes).unwrap_or(u64::MAX))
    }

    fn driver_calls(&self) -> u64 {
        self.calls.count()
    }

    fn map(&self) -> String {
        let held = self.held();
        let limit = match self.limit_bytes {
            Some(bytes) => format!(" of at most {}", ByteCount(bytes)),
            None => String::new(),
        };
        format!(
            "{} in {} allocations{limit}; the driver does not tell where",
            ByteCount(held.bytes()),
            held.bytes_at.len()
        )
    }
}
