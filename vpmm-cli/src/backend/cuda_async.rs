//! The driver's stream-ordered allocator, from a pool of its own.
//!
//! The pool keeps all freed memory (its release threshold is at the maximum) and
//! may be capped. Where it is out of memory, it gets what a program would try
//! before it gives up: the device is waited for, the pool trimmed, and the
//! request made once more.

use vpmm::StreamHandle;

use super::Backend;
use crate::bytes::ByteCount;
use crate::device::{Machine, MemoryPool};

pub(crate) struct CudaAsync<'a> {
    pool: MemoryPool<'a>,
    limit_bytes: Option<u64>,
}

impl<'a> CudaAsync<'a> {
    pub(crate) fn new(machine: &'a Machine, limit_bytes: Option<u64>) -> vpmm::Result<Self> {
        Ok(Self { pool: machine.allocator_calls().memory_pool(limit_bytes)?, limit_bytes })
    }
}

impl Backend for CudaAsync<'_> {
    fn allocate(&self, bytes: u64, stream: StreamHandle) -> vpmm::Result<u64> {
        match self.pool.allocate(bytes, stream) {
            Err(error) if error.is_out_of_memory() => {
                self.pool.calls().synchronize()?;
                self.pool.trim()?;
                self.pool.allocate(bytes, stream)
            }
            other => other,
        }
    }

    unsafe fn free(&self, address: u64, _bytes: u64, stream: StreamHandle) -> vpmm::Result<()> {
        // SAFETY: the caller vouches for the address.
        unsafe { self.pool.free(address, stream) }
    }

    fn peak_mapped_bytes(&self) -> vpmm::Result<u64> {
        self.pool.peak_reserved_bytes()
    }

    fn driver_calls(&self) -> u64 {
        self.pool.calls().count()
    }

    fn map(&self) -> String {
        let limit = match self.limit_bytes {
            Some(bytes) => format!(" of at most {}", ByteCount(bytes)),
            None => String::new(),
        };
        match self.pool.reserved_and_used_bytes() {
            Ok((reserved, used)) => format!(
                "the driver's pool holds {}{limit}, {} of it in use; it does not tell where",
                ByteCount(reserved),
                ByteCount(used)
            ),
            Err(error) => format!("the driver's pool does not tell what it holds: {error}"),
        }
    }
}
