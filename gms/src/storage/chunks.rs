//! The bytes in chunks, several at a time.

use std::sync::atomic::{AtomicBool, AtomicU64, AtomicUsize, Ordering};

use super::manifest::Saved;
use super::{StorageError, StorageOptions};
use crate::cuda::{Context, HostBuffer, Stream};

/// A part of an allocation.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Chunk {
    /// Which allocation, and which chunk of it.
    pub(super) allocation: usize,
    pub(super) index: usize,
    /// Where in the allocation.
    pub(super) offset: u64,
    pub(super) bytes: u64,
}

/// Allocations cut into chunks, in their order.
pub(super) fn cut(allocations: &[Saved], chunk_bytes: u64) -> Vec<Chunk> {
    let mut chunks = Vec::new();
    for (allocation, saved) in allocations.iter().enumerate() {
        let mut offset = 0;
        for index in 0.. {
            if offset >= saved.aligned_size {
                break;
            }
            let bytes = chunk_bytes.min(saved.aligned_size - offset);
            chunks.push(Chunk { allocation, index, offset, bytes });
            offset += bytes;
        }
    }
    chunks
}

/// What a worker has: page-locked memory of a chunk's size and a stream to copy on.
pub(super) struct Worker<'a> {
    pub(super) buffer: HostBuffer<'a>,
    pub(super) stream: Stream<'a>,
}

/// Does something for every chunk, on several threads, and tells how many bytes are done. The first
/// error ends it.
pub(super) fn for_each<R: Send>(
    context: &Context,
    options: &StorageOptions,
    chunks: &[Chunk],
    progress: &(dyn Fn(u64) + Sync),
    work: impl Fn(&mut Worker<'_>, Chunk) -> Result<R, StorageError> + Sync,
) -> Result<Vec<(Chunk, R)>, StorageError> {
    let (next, done, failed) = (AtomicUsize::new(0), AtomicU64::new(0), AtomicBool::new(false));
    let run = || -> Result<Vec<(Chunk, R)>, StorageError> {
        let mut results = Vec::new();
        let mut each = || -> Result<(), StorageError> {
            let buffer = HostBuffer::new(context, options.chunk_bytes as usize)?;
            let mut worker = Worker { buffer, stream: Stream::new(context)? };
            while let Some(chunk) = chunks.get(next.fetch_add(1, Ordering::Relaxed)) {
                if failed.load(Ordering::Relaxed) {
                    break;
                }
                results.push((*chunk, work(&mut worker, *chunk)?));
                progress(done.fetch_add(chunk.bytes, Ordering::Relaxed) + chunk.bytes);
            }
            Ok(())
        };
        each().inspect_err(|_| failed.store(true, Ordering::Relaxed))?;
        Ok(results)
    };
    let workers = options.workers.clamp(1, chunks.len().max(1));
    let ended = std::thread::scope(|scope| {
        // Where the system has no thread for one more, those that there are do the work.
        let spawn = |_| std::thread::Builder::new().spawn_scoped(scope, run).ok();
        let others: Vec<_> = (1..workers).map_while(spawn).collect();
        let mut ended = vec![run()];
        for thread in others {
            // A panic goes on in the thread that waits for it.
            ended.push(thread.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic)));
        }
        ended
    });
    let mut results = Vec::with_capacity(chunks.len());
    for part in ended {
        results.extend(part?);
    }
    Ok(results)
}

impl StorageOptions {
    pub(super) fn checked(&self, granularity: u64) -> Result<(), StorageError> {
        if self.chunk_bytes == 0 || !self.chunk_bytes.is_multiple_of(granularity) {
            return Err(StorageError::Options("chunks must be of whole granules"));
        }
        if self.shard_bytes == 0 || self.workers == 0 {
            return Err(StorageError::Options("files and workers cannot be of size 0"));
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn chunks_cover_everything_once() {
        let saved = |aligned_size| Saved {
            allocation_id: String::new(),
            size: 1,
            aligned_size,
            tag: String::new(),
            tensor_file: String::new(),
            tensor_offset: 0,
        };
        let chunks = cut(&[4, 10, 3].map(saved), 4);
        let shown: Vec<_> =
            chunks.iter().map(|c| (c.allocation, c.index, c.offset, c.bytes)).collect();
        assert_eq!(shown, [(0, 0, 0, 4), (1, 0, 0, 4), (1, 1, 4, 4), (1, 2, 8, 2), (2, 0, 0, 3)]);
    }
}
