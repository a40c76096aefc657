//! The two files that say what the others hold.

use std::collections::BTreeMap;
use std::path::Path;
use std::time::{SystemTime, UNIX_EPOCH};

use base64::Engine;
use base64::engine::general_purpose::STANDARD;
use serde::{Deserialize, Serialize};

use super::StorageError;
use super::files;
use crate::client::{AllocationInfo, MetadataValue};
use crate::layout::Layout;

pub(super) const MANIFEST: &str = "manifest.json";
pub(super) const METADATA: &str = "gms_metadata.json";
pub(super) const SHARDS: &str = "shards";

/// The largest chunk that memory is locked for on the word of a file.
const MAX_CHUNK_BYTES: u64 = 1 << 30;

/// `manifest.json`.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Manifest {
    /// Seconds since 1970.
    pub(super) timestamp: f64,
    pub(super) layout_hash: String,
    pub(super) device: u32,
    pub(super) allocations: Vec<Saved>,
    #[serde(default, skip_serializing_if = "Option::is_none")]
    pub(super) checksums: Option<Checksums>,
}

/// One allocation. The Python service takes these fields and no others.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Saved {
    pub(super) allocation_id: String,
    pub(super) size: u64,
    pub(super) aligned_size: u64,
    pub(super) tag: String,
    /// The file, from the manifest's folder.
    pub(super) tensor_file: String,
    pub(super) tensor_offset: u64,
}

/// CRC-32 of every chunk.
#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub(super) struct Checksums {
    pub(super) chunk_bytes: u64,
    /// For each allocation, for each of its chunks.
    pub(super) crc32: Vec<Vec<u32>>,
}

/// An entry of `gms_metadata.json`.
#[derive(Clone, Debug, Serialize, Deserialize)]
struct SavedEntry {
    allocation_id: String,
    offset_bytes: u64,
    /// In base64.
    value: String,
}

/// Where allocations lie: whole ones to a file, in their order, until a file is full.
pub(super) fn plan(allocations: &[AllocationInfo], shard_bytes: u64) -> Vec<Saved> {
    let (mut shard, mut offset) = (0, 0);
    let place = |allocation: &AllocationInfo| {
        if offset > 0 && offset + allocation.aligned_size > shard_bytes {
            (shard, offset) = (shard + 1, 0);
        }
        let tensor_offset = offset;
        offset += allocation.aligned_size;
        Saved {
            allocation_id: allocation.allocation_id.clone(),
            size: allocation.size,
            aligned_size: allocation.aligned_size,
            tag: allocation.tag.clone(),
            tensor_file: format!("{SHARDS}/shard_{shard:04}.bin"),
            tensor_offset,
        }
    };
    allocations.iter().map(place).collect()
}

impl Manifest {
    pub(super) fn new(
        layout_hash: String,
        device: u32,
        allocations: Vec<Saved>,
        checksums: Checksums,
    ) -> Self {
        // A clock before 1970 is no reason not to save.
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let timestamp = since.as_secs_f64();
        Self { timestamp, layout_hash, device, allocations, checksums: Some(checksums) }
    }

    pub(super) fn bytes(&self) -> u64 {
        self.allocations.iter().map(|saved| saved.aligned_size).sum()
    }

    /// Bytes that each file must have at least.
    pub(super) fn file_lengths(&self) -> BTreeMap<&str, u64> {
        let mut lengths = BTreeMap::new();
        for saved in &self.allocations {
            let length = lengths.entry(saved.tensor_file.as_str()).or_insert(0);
            *length = saved.tensor_offset.saturating_add(saved.aligned_size).max(*length);
        }
        lengths
    }

    /// Reads both files and checks that they are of one piece.
    pub(super) fn read(
        folder: &Path,
    ) -> Result<(Self, Vec<(String, MetadataValue)>), StorageError> {
        let path = folder.join(MANIFEST);
        let damaged = |reason: String| StorageError::Damaged { path: path.clone(), reason };
        let manifest: Self = parse(&path)?;
        let table = folder.join(METADATA);
        // The Python service takes a missing table for an empty one.
        let entries: BTreeMap<String, SavedEntry> =
            if table.exists() { parse(&table)? } else { BTreeMap::new() };
        let mut metadata = Vec::with_capacity(entries.len());
        for (key, entry) in entries {
            let value = STANDARD.decode(&entry.value).map_err(|error| StorageError::Damaged {
                path: table.clone(),
                reason: format!("the value of {key:?}: {error}"),
            })?;
            let (allocation_id, offset_bytes) = (entry.allocation_id, entry.offset_bytes);
            metadata.push((key, MetadataValue { allocation_id, offset_bytes, value }));
        }
        for (index, saved) in manifest.allocations.iter().enumerate() {
            let inside = Path::new(&saved.tensor_file)
                .components()
                .all(|part| matches!(part, std::path::Component::Normal(_)));
            if !inside {
                return Err(damaged(format!("allocation {index} is in {:?}", saved.tensor_file)));
            }
            if saved.size == 0 || saved.size > saved.aligned_size {
                return Err(damaged(format!("allocation {index} has no size that can be")));
            }
        }
        manifest.check_hash(&metadata).map_err(damaged)?;
        if let Some(checksums) = &manifest.checksums {
            checksums.check(&manifest.allocations).map_err(damaged)?;
        }
        Ok((manifest, metadata))
    }

    /// Whether allocations and metadata are those that the hash is of.
    fn check_hash(&self, metadata: &[(String, MetadataValue)]) -> Result<(), String> {
        let mut layout = Layout::default();
        for saved in &self.allocations {
            let (id, tag) = (saved.allocation_id.as_str(), saved.tag.as_str());
            if layout.get(id).is_ok() {
                return Err(format!("{id:?} is there twice"));
            }
            layout.insert(id.into(), saved.size, saved.aligned_size, tag.into());
        }
        for (key, entry) in metadata {
            let offset = i64::try_from(entry.offset_bytes).unwrap_or(i64::MAX);
            let put = layout.put(key, &entry.allocation_id, offset, &entry.value);
            put.map_err(|error| format!("metadata {key:?}: {error}"))?;
        }
        let hash = layout.hash();
        if hash == self.layout_hash {
            Ok(())
        } else {
            Err(format!("it says that its hash is {}, and it is {hash}", self.layout_hash))
        }
    }

    /// Writes both files, the manifest last.
    pub(super) fn write(
        &self,
        folder: &Path,
        metadata: &[(String, MetadataValue)],
    ) -> Result<(), StorageError> {
        let entry = |value: &MetadataValue| SavedEntry {
            allocation_id: value.allocation_id.clone(),
            offset_bytes: value.offset_bytes,
            value: STANDARD.encode(&value.value),
        };
        let table: BTreeMap<&str, SavedEntry> =
            metadata.iter().map(|(key, value)| (key.as_str(), entry(value))).collect();
        files::write_whole(&folder.join(METADATA), &json(&table, folder)?)?;
        files::write_whole(&folder.join(MANIFEST), &json(self, folder)?)
    }
}

impl Checksums {
    fn check(&self, allocations: &[Saved]) -> Result<(), String> {
        if self.chunk_bytes == 0 || self.crc32.len() != allocations.len() {
            return Err("there is not a checksum for everything".to_owned());
        }
        if self.chunk_bytes > MAX_CHUNK_BYTES {
            return Err(format!("checksums of {} bytes", self.chunk_bytes));
        }
        let mut each = self.crc32.iter().zip(allocations);
        match each.position(|(crcs, saved)| {
            crcs.len() as u64 != saved.aligned_size.div_ceil(self.chunk_bytes)
        }) {
            Some(index) => Err(format!("allocation {index} has another number of checksums")),
            None => Ok(()),
        }
    }
}

fn parse<T: for<'de> Deserialize<'de>>(path: &Path) -> Result<T, StorageError> {
    let bytes = files::read_whole(path)?;
    serde_json::from_slice(&bytes)
        .map_err(|error| StorageError::Damaged { path: path.to_owned(), reason: error.to_string() })
}

fn json(value: &impl Serialize, folder: &Path) -> Result<Vec<u8>, StorageError> {
    serde_json::to_vec_pretty(value).map_err(|error| StorageError::File {
        what: "write",
        path: folder.to_owned(),
        source: error.into(),
    })
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn files_are_filled_with_whole_allocations() {
        let allocation = |aligned_size| AllocationInfo {
            allocation_id: String::new(),
            size: aligned_size,
            aligned_size,
            tag: String::new(),
            layout_slot: 0,
        };
        let planned = plan(&[6, 4, 1, 20, 3, 7].map(allocation), 10);
        let places = planned.iter().map(|saved| (saved.tensor_file.as_str(), saved.tensor_offset));
        let expected = [
            ("shards/shard_0000.bin", 0),
            ("shards/shard_0000.bin", 6),
            ("shards/shard_0001.bin", 0),
            ("shards/shard_0002.bin", 0),
            ("shards/shard_0003.bin", 0),
            ("shards/shard_0003.bin", 3),
        ];
        assert_eq!(places.collect::<Vec<_>>(), expected);
    }
}
