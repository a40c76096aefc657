//! From files to the device.

use std::collections::{BTreeMap, HashMap};
use std::os::unix::fs::FileExt;
use std::path::Path;

use super::chunks::{Chunk, Worker, cut, for_each};
use super::files::{Shard, failed};
use super::manifest::Manifest;
use super::{StorageError, StorageOptions, Stored};
use crate::client::{ClientError, MemoryManager};
use crate::lock::Granted;

/// Loads a saved layout through a writer's manager that has made nothing yet, and publishes it; the
/// session has ended then, as after a commit. `progress` is told how many bytes are done, from several
/// threads.
///
/// Files are checked before anything is allocated, as far as that does without reading them whole, and
/// every chunk as it is read.
///
/// # Errors
/// [`StorageError::Damaged`], [`StorageError::Granularity`], [`StorageError::File`],
/// [`StorageError::Client`], [`StorageError::Cuda`]. The session has ended and nothing is published
/// then.
pub fn load(
    manager: &mut MemoryManager,
    folder: &Path,
    options: &StorageOptions,
    progress: &(dyn Fn(u64) + Sync),
) -> Result<Stored, StorageError> {
    let loaded = load_and_publish(manager, folder, options, progress);
    if loaded.is_err() {
        // A writer that leaves without a commit takes its layout along.
        manager.abort();
        manager.forget_all();
    }
    loaded
}

/// Looks at a saved layout as far as that does without reading its bytes: that the manifest and the
/// table of metadata are there and of one piece, and that no file ends early.
///
/// # Errors
/// [`StorageError::Damaged`], [`StorageError::File`].
pub fn check(folder: &Path) -> Result<(), StorageError> {
    let (manifest, _) = Manifest::read(folder)?;
    open_all(&manifest, folder, false).map(drop)
}

fn load_and_publish(
    manager: &mut MemoryManager,
    folder: &Path,
    options: &StorageOptions,
    progress: &(dyn Fn(u64) + Sync),
) -> Result<Stored, StorageError> {
    options.checked(manager.granularity())?;
    match manager.granted_lock() {
        Some(Granted::Rw) => {}
        Some(has) => return Err(ClientError::WrongLock { needed: "RW", has }.into()),
        None => return Err(ClientError::NotConnected.into()),
    }
    let (manifest, mut metadata) = Manifest::read(folder)?;
    let files = open_all(&manifest, folder, options.direct)?;
    // Chunks are those that the checksums are of; where there are none, any will do.
    let chunk_bytes = manifest.checksums.as_ref().map_or(options.chunk_bytes, |c| c.chunk_bytes);
    if !chunk_bytes.is_multiple_of(manager.granularity()) {
        let reason = format!("checksums of {chunk_bytes} bytes");
        return Err(StorageError::Damaged { path: folder.to_owned(), reason });
    }
    let options = StorageOptions { chunk_bytes, ..*options };

    let wanted: Vec<(u64, &str)> =
        manifest.allocations.iter().map(|saved| (saved.size, saved.tag.as_str())).collect();
    let placed = manager.create_layout(&wanted)?;
    for (index, ((made, _), saved)) in placed.iter().zip(&manifest.allocations).enumerate() {
        if made.aligned_size != saved.aligned_size {
            let (saved, here) = (saved.aligned_size, made.aligned_size);
            return Err(StorageError::Granularity { index, saved, here });
        }
    }
    let work = |worker: &mut Worker<'_>, chunk: Chunk| {
        let saved = &manifest.allocations[chunk.allocation];
        let path = || folder.join(&saved.tensor_file);
        let Some(shard) = files.get(saved.tensor_file.as_str()) else {
            return Err(failed("find", &path())(std::io::ErrorKind::NotFound.into()));
        };
        let contents = &mut worker.buffer.bytes_mut()[..chunk.bytes as usize];
        let at = saved.tensor_offset + chunk.offset;
        let file = shard.of(contents, at);
        file.read_exact_at(contents, at).map_err(|source| failed("read", &path())(source))?;
        if let Some(checksums) = &manifest.checksums {
            let expected = checksums.crc32[chunk.allocation][chunk.index];
            let found = crc32fast::hash(contents);
            if found != expected {
                let reason = format!(
                    "the {} bytes at {at} have the checksum {found:08x}, not {expected:08x}",
                    chunk.bytes
                );
                return Err(StorageError::Damaged { path: path(), reason });
            }
        }
        let to = placed[chunk.allocation].1 + chunk.offset;
        Ok(worker.stream.write(to, &worker.buffer, chunk.bytes as usize)?)
    };
    let chunks = cut(&manifest.allocations, chunk_bytes);
    for_each(manager.context(), &options, &chunks, progress, work)?;

    // Allocations have new names.
    let names: HashMap<&str, &str> = manifest
        .allocations
        .iter()
        .zip(&placed)
        .map(|(saved, (made, _))| (saved.allocation_id.as_str(), made.allocation_id.as_str()))
        .collect();
    for (_, entry) in &mut metadata {
        if let Some(name) = names.get(entry.allocation_id.as_str()) {
            entry.allocation_id = (*name).to_owned();
        }
    }
    manager.session()?.metadata_put_many(&metadata)?;
    manager.commit()?;
    Ok(Stored {
        allocations: manifest.allocations.len(),
        bytes: manifest.bytes(),
        metadata: metadata.len(),
        layout_hash: manifest.layout_hash,
        checked: manifest.checksums.is_some(),
    })
}

/// Opens every file, and checks that none ends early.
fn open_all<'a>(
    manifest: &'a Manifest,
    folder: &Path,
    direct: bool,
) -> Result<BTreeMap<&'a str, Shard>, StorageError> {
    let mut files = BTreeMap::new();
    for (name, bytes) in manifest.file_lengths() {
        let path = folder.join(name);
        let shard = Shard::open(&path, false, direct)?;
        let there = shard.plain.metadata().map_err(failed("look at", &path))?.len();
        if there < bytes {
            let reason = format!("it has {there} bytes, and {bytes} were written");
            return Err(StorageError::Damaged { path, reason });
        }
        files.insert(name, shard);
    }
    Ok(files)
}
