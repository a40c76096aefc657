//! What the disk and the device give by themselves, for saving and loading to be held against.

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::os::unix::fs::FileExt;
use std::path::Path;
use std::time::{Duration, Instant};

use super::chunks::{Chunk, Worker, cut, for_each};
use super::files::{Shard, failed};
use super::manifest::plan;
use super::{StorageError, StorageOptions};
use crate::client::MemoryManager;

/// How long it takes to move all bytes of a layout, each way by itself: as many workers, chunks and files
/// as saving and loading have, page-locked memory, the same way around the page cache.
#[derive(Clone, Copy, Debug)]
#[non_exhaustive]
pub struct Limits {
    /// How many bytes.
    pub bytes: u64,
    /// From page-locked memory to the device.
    pub copy_to_device: Duration,
    /// And back.
    pub copy_to_host: Duration,
    /// To files, until they are on the disk.
    pub disk_write: Duration,
    /// And back.
    pub disk_read: Duration,
}

/// How many times the bytes are copied.
const ROUNDS: u32 = 4;

/// What a worker does with a chunk.
type Work<'a> = dyn Fn(&mut Worker<'_>, Chunk) -> Result<(), StorageError> + Sync + 'a;

/// Measures with the memory that a writer's manager has mapped, which is filled with bytes that do not
/// compress, and with files in a folder that is not there yet, and is not afterwards.
///
/// # Errors
/// [`StorageError::Exists`], [`StorageError::File`], [`StorageError::Client`], [`StorageError::Cuda`].
pub fn measure(
    manager: &mut MemoryManager,
    folder: &Path,
    options: &StorageOptions,
) -> Result<Limits, StorageError> {
    options.checked(manager.granularity())?;
    if folder.symlink_metadata().is_ok() {
        return Err(StorageError::Exists { path: folder.to_owned() });
    }
    std::fs::create_dir(folder).map_err(failed("make", folder))?;
    let measured = in_folder(manager, folder, options);
    std::fs::remove_dir_all(folder).map_err(failed("remove", folder))?;
    measured
}

fn in_folder(
    manager: &mut MemoryManager,
    folder: &Path,
    options: &StorageOptions,
) -> Result<Limits, StorageError> {
    let placed = plan(&manager.list_handles(None)?, options.shard_bytes);
    let mapped = manager.mappings().into_iter().filter(|mapping| mapping.is_mapped);
    let mapped: HashMap<String, u64> =
        mapped.map(|mapping| (mapping.allocation_id, mapping.address)).collect();
    let addresses = placed.iter().map(|one| mapped.get(&one.allocation_id).copied());
    let Some(addresses) = addresses.collect::<Option<Vec<u64>>>() else {
        return Err(StorageError::Options("all of the layout must be mapped"));
    };
    let bytes = placed.iter().map(|one| one.aligned_size).sum();
    let chunks = cut(&placed, options.chunk_bytes);
    let address = |chunk: Chunk| addresses[chunk.allocation] + chunk.offset;
    let timed = |chunks: &[Chunk], work: &Work<'_>| {
        let started = Instant::now();
        for_each(manager.context(), options, chunks, &|_| {}, work)?;
        Ok::<_, StorageError>(started.elapsed())
    };
    // Several times, as locking the pages takes its time as well.
    let copies = chunks.repeat(ROUNDS as usize);
    let copy_to_device = timed(&copies, &|worker, chunk| {
        Ok(worker.stream.write(address(chunk), &worker.buffer, chunk.bytes as usize)?)
    })? / ROUNDS;
    let copy_to_host = timed(&copies, &|worker, chunk| {
        Ok(worker.stream.read(address(chunk), &mut worker.buffer, chunk.bytes as usize)?)
    })? / ROUNDS;
    timed(&chunks, &|worker, chunk| {
        fill(worker.buffer.bytes_mut());
        Ok(worker.stream.write(address(chunk), &worker.buffer, chunk.bytes as usize)?)
    })?;

    let path = |name: &str| folder.join(name.replace('/', "-"));
    let open_all = |write: bool| -> Result<BTreeMap<&str, Shard>, StorageError> {
        let names: BTreeSet<&str> = placed.iter().map(|one| one.tensor_file.as_str()).collect();
        let opened = |name| Ok((name, Shard::open(&path(name), write, options.direct)?));
        names.into_iter().map(opened).collect()
    };
    let place = |chunk: Chunk| {
        let about = &placed[chunk.allocation];
        (about.tensor_file.as_str(), about.tensor_offset + chunk.offset)
    };
    let files = open_all(true)?;
    let started = Instant::now();
    timed(&chunks, &|worker, chunk| {
        fill(worker.buffer.bytes_mut());
        let contents = &worker.buffer.bytes()[..chunk.bytes as usize];
        let (name, at) = place(chunk);
        let shard = &files[name];
        shard.of(contents, at).write_all_at(contents, at).map_err(failed("write", folder))
    })?;
    for shard in files.values() {
        shard.plain.sync_all().map_err(failed("write", folder))?;
    }
    let disk_write = started.elapsed();
    let files = open_all(false)?;
    let disk_read = timed(&chunks, &|worker, chunk| {
        let contents = &mut worker.buffer.bytes_mut()[..chunk.bytes as usize];
        let (name, at) = place(chunk);
        let shard = &files[name];
        shard.of(contents, at).read_exact_at(contents, at).map_err(failed("read", folder))
    })?;
    Ok(Limits { bytes, copy_to_device, copy_to_host, disk_write, disk_read })
}

/// Fills a worker's fresh memory, which is zero, with bytes that no disk makes less of.
fn fill(memory: &mut [u8]) {
    if memory.iter().take(8).any(|byte| *byte != 0) {
        return;
    }
    // A generator of Marsaglia's: any state but 0 will do.
    let mut state = 0x9E37_79B9_7F4A_7C15_u64;
    for word in memory.chunks_mut(8) {
        state ^= state << 13;
        state ^= state >> 7;
        state ^= state << 17;
        word.copy_from_slice(&state.to_le_bytes()[..word.len()]);
    }
}
