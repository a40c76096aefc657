//! From the device to files.

use std::collections::BTreeMap;
use std::os::unix::fs::FileExt;
use std::path::Path;

use super::chunks::{cut, for_each};
use super::files::{Draft, Shard, failed, sync_folder};
use super::manifest::{Checksums, Manifest, SHARDS, plan};
use super::{StorageError, StorageOptions, Stored};
use crate::client::MemoryManager;
use crate::lock::Granted;

/// Saves the layout that a reader's manager sees into a folder that is not there yet. The memory is
/// mapped by this if it is not; `progress` is told how many bytes are done, from several threads.
///
/// # Errors
/// [`StorageError::NothingPublished`] where the manager is no reader, [`StorageError::Exists`],
/// [`StorageError::Busy`], [`StorageError::File`], [`StorageError::Client`], [`StorageError::Cuda`].
pub fn save(
    manager: &mut MemoryManager,
    folder: &Path,
    options: &StorageOptions,
    progress: &(dyn Fn(u64) + Sync),
) -> Result<Stored, StorageError> {
    options.checked(manager.granularity())?;
    if manager.granted_lock() != Some(Granted::Ro) {
        return Err(StorageError::NothingPublished);
    }
    let layout_hash = manager.layout_hash()?;
    let metadata = manager.session()?.metadata_get_many("")?;
    let placed = manager.import_all(None)?;
    let (allocations, addresses): (Vec<_>, Vec<u64>) = placed.into_iter().unzip();
    let saved = plan(&allocations, options.shard_bytes);

    let draft = Draft::begin(folder)?;
    let shards = draft.path().join(SHARDS);
    std::fs::create_dir(&shards).map_err(failed("make", &shards))?;
    let mut files: BTreeMap<&str, Shard> = BTreeMap::new();
    for saved in &saved {
        if !files.contains_key(saved.tensor_file.as_str()) {
            let path = draft.path().join(&saved.tensor_file);
            files.insert(&saved.tensor_file, Shard::open(&path, true, options.direct)?);
        }
    }
    let chunks = cut(&saved, options.chunk_bytes);
    let work = |worker: &mut super::chunks::Worker<'_>, chunk: super::chunks::Chunk| {
        let (about, bytes) = (&saved[chunk.allocation], chunk.bytes as usize);
        let from = addresses[chunk.allocation] + chunk.offset;
        worker.stream.read(from, &mut worker.buffer, bytes)?;
        let contents = &worker.buffer.bytes()[..bytes];
        let crc = crc32fast::hash(contents);
        let path = draft.path().join(&about.tensor_file);
        let Some(shard) = files.get(about.tensor_file.as_str()) else {
            return Err(failed("find", &path)(std::io::ErrorKind::NotFound.into()));
        };
        let at = about.tensor_offset + chunk.offset;
        shard.of(contents, at).write_all_at(contents, at).map_err(failed("write", &path))?;
        Ok(crc)
    };
    let crcs = for_each(manager.context(), options, &chunks, progress, work)?;
    for (name, shard) in &files {
        shard.plain.sync_all().map_err(failed("write", &draft.path().join(name)))?;
    }
    sync_folder(&shards)?;
    let chunks_of = |bytes: u64| bytes.div_ceil(options.chunk_bytes) as usize;
    let mut crc32: Vec<Vec<u32>> =
        saved.iter().map(|saved| vec![0; chunks_of(saved.aligned_size)]).collect();
    for (chunk, crc) in crcs {
        crc32[chunk.allocation][chunk.index] = crc;
    }
    drop(files);
    let checksums = Checksums { chunk_bytes: options.chunk_bytes, crc32 };
    let manifest = Manifest::new(layout_hash, manager.ordinal(), saved, checksums);
    manifest.write(draft.path(), &metadata)?;
    draft.finish()?;
    Ok(Stored {
        allocations: manifest.allocations.len(),
        bytes: manifest.bytes(),
        metadata: metadata.len(),
        layout_hash: manifest.layout_hash,
        checked: true,
    })
}
