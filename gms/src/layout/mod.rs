//! What a writer has laid out: allocations in their slots, and the table of metadata.
//!
//! 1. Slots are given out in order and never again while the layout lives.
//! 2. Every entry of metadata is about an allocation that is there and an offset within it.
//! 3. What a writer can make the process keep beside memory of the device is counted as it comes and goes.
//! 4. The hash depends on order, sizes, tags and metadata, and on nothing that differs between two
//!    writers who do the same.
//!
//! Pure: what memory an allocation has is not known here.

#![forbid(unsafe_code)]

mod hash;

use std::collections::{BTreeMap, BTreeSet, HashMap};
use std::sync::Arc;

/// One allocation.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Allocation {
    /// Its name.
    pub id: Arc<str>,
    /// Bytes that were asked for.
    pub size: u64,
    /// Bytes that it has.
    pub aligned_size: u64,
    /// What it is for.
    pub tag: Arc<str>,
    /// Its place.
    pub slot: u64,
}

/// One entry of the table of metadata.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Entry {
    /// The allocation that it is about.
    pub allocation_id: Arc<str>,
    /// Where in the allocation.
    pub offset_bytes: u64,
    /// What the writer tells the readers of it.
    pub value: Arc<[u8]>,
    /// The allocation's place.
    slot: u64,
}

/// Why a request cannot be done. The texts are part of the protocol.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum LayoutError {
    /// Nothing was asked for.
    #[error("size must be > 0, got {size}")]
    Size {
        /// What was asked for.
        size: i64,
    },
    /// There is no such allocation.
    #[error("Unknown allocation: {id}")]
    UnknownAllocation {
        /// What was named.
        id: String,
    },
    /// An offset before the allocation.
    #[error("offset_bytes must be >= 0, got {offset_bytes}")]
    NegativeOffset {
        /// The offset.
        offset_bytes: i64,
    },
    /// An offset behind the allocation.
    #[error(
        "offset_bytes {offset_bytes} out of range for allocation {id} (aligned_size={aligned_size})"
    )]
    OffsetOutOfRange {
        /// The offset.
        offset_bytes: i64,
        /// The allocation.
        id: Arc<str>,
        /// Its bytes.
        aligned_size: u64,
    },
    /// The metadata would take more than it may.
    #[error(
        "Metadata limit exceeded: metadata_bytes={held}, would be {wanted}, limit_bytes={limit}"
    )]
    MetadataLimit {
        /// What it takes.
        held: u64,
        /// What it would take.
        wanted: u64,
        /// What it may take.
        limit: u64,
    },
}

/// What an entry of metadata counts beside its key and its value: the nodes and the allocator's share of
/// two tables and two texts, roughly. So entries without a value are bounded, too.
const ENTRY_BYTES: u64 = 256;

/// What an entry counts.
fn entry_bytes(key: &str, value: &[u8]) -> u64 {
    ENTRY_BYTES + key.len() as u64 + value.len() as u64
}

/// Checks a size that was asked for.
///
/// # Errors
/// [`LayoutError::Size`].
pub fn checked_size(size: i64) -> Result<u64, LayoutError> {
    u64::try_from(size).ok().filter(|size| *size > 0).ok_or(LayoutError::Size { size })
}

/// Allocations and metadata.
#[derive(Clone, Debug, Default)]
pub struct Layout {
    by_slot: BTreeMap<u64, Allocation>,
    slots: HashMap<Arc<str>, u64>,
    metadata: BTreeMap<Arc<str>, Entry>,
    /// The keys of metadata by the slot that they are about.
    keys: BTreeSet<(u64, Arc<str>)>,
    /// What all entries count, and the allocations' tags.
    metadata_bytes: u64,
    next_slot: u64,
}

impl Layout {
    /// How many allocations there are.
    pub fn len(&self) -> usize {
        self.by_slot.len()
    }

    /// Whether there are none.
    pub fn is_empty(&self) -> bool {
        self.by_slot.is_empty()
    }

    /// Bytes of all allocations.
    pub fn bytes(&self) -> u64 {
        self.by_slot.values().map(|allocation| allocation.aligned_size).sum()
    }

    /// What the metadata takes of the process's memory: of each entry the key, the value and 256 bytes,
    /// of each allocation the tag.
    pub fn metadata_bytes(&self) -> u64 {
        self.metadata_bytes
    }

    /// Checks that the metadata has room for tags of so many bytes in all.
    ///
    /// # Errors
    /// [`LayoutError::MetadataLimit`].
    pub fn check_tags(&self, bytes: u64, limit: u64) -> Result<(), LayoutError> {
        self.check_room(self.metadata_bytes.saturating_add(bytes), limit)
    }

    /// Checks that the metadata has room for entries, of which a later one takes the place of an earlier
    /// one of the same key. O(n log n).
    ///
    /// # Errors
    /// [`LayoutError::MetadataLimit`].
    pub fn check_entries<'a>(
        &self,
        entries: impl IntoIterator<Item = (&'a str, &'a [u8])>,
        limit: u64,
    ) -> Result<(), LayoutError> {
        let entries: BTreeMap<&str, &[u8]> = entries.into_iter().collect();
        let mut wanted = self.metadata_bytes;
        for (key, value) in &entries {
            wanted = wanted.saturating_add(entry_bytes(key, value));
        }
        for key in entries.keys() {
            let before = self.metadata.get(*key);
            wanted -= before.map_or(0, |entry| entry_bytes(key, &entry.value));
        }
        self.check_room(wanted, limit)
    }

    /// What takes no more than before is let through, whatever the limit.
    fn check_room(&self, wanted: u64, limit: u64) -> Result<(), LayoutError> {
        let held = self.metadata_bytes;
        if wanted > limit && wanted > held {
            return Err(LayoutError::MetadataLimit { held, wanted, limit });
        }
        Ok(())
    }

    /// Puts an allocation into the next slot. O(log n).
    pub fn insert(
        &mut self,
        id: Arc<str>,
        size: u64,
        aligned_size: u64,
        tag: Arc<str>,
    ) -> &Allocation {
        let slot = self.next_slot;
        self.next_slot += 1;
        self.metadata_bytes += tag.len() as u64;
        self.slots.insert(Arc::clone(&id), slot);
        self.by_slot.entry(slot).or_insert(Allocation { id, size, aligned_size, tag, slot })
    }

    /// An allocation by its name.
    ///
    /// # Errors
    /// [`LayoutError::UnknownAllocation`].
    pub fn get(&self, id: &str) -> Result<&Allocation, LayoutError> {
        let found = self.slots.get(id).and_then(|slot| self.by_slot.get(slot));
        found.ok_or_else(|| LayoutError::UnknownAllocation { id: id.to_owned() })
    }

    /// The allocations in the order of their slots; of one tag, if one is named.
    pub fn allocations<'a>(
        &'a self,
        tag: Option<&'a str>,
    ) -> impl Iterator<Item = &'a Allocation> + 'a {
        self.by_slot
            .values()
            .filter(move |allocation| tag.is_none_or(|tag| *allocation.tag == *tag))
    }

    /// Takes an allocation out, and the metadata about it; `None` if there is none. O(k log n) for so many
    /// entries about it.
    pub fn remove(&mut self, id: &str) -> Option<Allocation> {
        let slot = self.slots.remove(id)?;
        let first = (slot, Arc::from(""));
        while let Some(about) = self.keys.range(&first..).next().filter(|about| about.0 == slot) {
            let about = about.clone();
            self.keys.remove(&about);
            if let Some(entry) = self.metadata.remove(&about.1) {
                self.metadata_bytes -= entry_bytes(&about.1, &entry.value);
            }
        }
        let gone = self.by_slot.remove(&slot)?;
        self.metadata_bytes -= gone.tag.len() as u64;
        Some(gone)
    }

    /// Puts an entry of metadata, or another in its place. O(log n).
    ///
    /// # Errors
    /// [`LayoutError::UnknownAllocation`], [`LayoutError::NegativeOffset`],
    /// [`LayoutError::OffsetOutOfRange`]; nothing has changed then.
    pub fn put(
        &mut self,
        key: &str,
        id: &str,
        offset_bytes: i64,
        value: &[u8],
    ) -> Result<(), LayoutError> {
        let (allocation, offset) = self.target(id, offset_bytes)?;
        let key: Arc<str> = key.into();
        let (allocation_id, slot) = (Arc::clone(&allocation.id), allocation.slot);
        let entry = Entry { allocation_id, offset_bytes: offset, value: value.into(), slot };
        self.metadata_bytes += entry_bytes(&key, value);
        if let Some(before) = self.metadata.insert(Arc::clone(&key), entry) {
            self.metadata_bytes -= entry_bytes(&key, &before.value);
            self.keys.remove(&(before.slot, Arc::clone(&key)));
        }
        self.keys.insert((slot, key));
        Ok(())
    }

    /// Checks what an entry is about.
    ///
    /// # Errors
    /// As [`put`](Self::put).
    pub fn target(&self, id: &str, offset_bytes: i64) -> Result<(&Allocation, u64), LayoutError> {
        let allocation = self.get(id)?;
        let offset = u64::try_from(offset_bytes)
            .map_err(|_| LayoutError::NegativeOffset { offset_bytes })?;
        if offset >= allocation.aligned_size {
            let (id, aligned_size) = (Arc::clone(&allocation.id), allocation.aligned_size);
            return Err(LayoutError::OffsetOutOfRange { offset_bytes, id, aligned_size });
        }
        Ok((allocation, offset))
    }

    /// An entry of metadata.
    pub fn entry(&self, key: &str) -> Option<&Entry> {
        self.metadata.get(key)
    }

    /// Takes an entry away; false if there is none.
    pub fn delete(&mut self, key: &str) -> bool {
        let Some((key, entry)) = self.metadata.remove_entry(key) else { return false };
        self.metadata_bytes -= entry_bytes(&key, &entry.value);
        self.keys.remove(&(entry.slot, key));
        true
    }

    /// The entries whose names begin so, in the order of their names, behind `after` if that is given.
    pub fn entries<'a>(
        &'a self,
        prefix: &'a str,
        after: Option<&'a str>,
    ) -> impl Iterator<Item = (&'a str, &'a Entry)> + 'a {
        use std::ops::Bound::{Excluded, Included, Unbounded};
        let start = match after {
            Some(after) if after >= prefix => Excluded(after),
            _ => Included(prefix),
        };
        let range = self.metadata.range::<str, _>((start, Unbounded));
        range
            .take_while(move |(key, _)| key.starts_with(prefix))
            .map(|(key, entry)| (&**key, entry))
    }

    /// How many entries of metadata there are.
    pub fn entry_count(&self) -> usize {
        self.metadata.len()
    }

    /// Names whatever does not hold that must; the empty list if all is well. O(n log n).
    pub fn broken(&self) -> Vec<String> {
        let mut broken = Vec::new();
        for (key, entry) in &self.metadata {
            match self.target(&entry.allocation_id, entry.offset_bytes as i64) {
                Ok((allocation, _)) if allocation.slot == entry.slot => {}
                Ok(_) => broken.push(format!("metadata {key:?} is indexed under another slot")),
                Err(error) => broken.push(format!("metadata {key:?}: {error}")),
            }
            if !self.keys.contains(&(entry.slot, Arc::clone(key))) {
                broken.push(format!("metadata {key:?} is not indexed"));
            }
        }
        let entries = self.metadata.iter().map(|(key, entry)| entry_bytes(key, &entry.value));
        let tags = self.by_slot.values().map(|allocation| allocation.tag.len() as u64);
        let counted = entries.sum::<u64>() + tags.sum::<u64>();
        if counted != self.metadata_bytes {
            broken.push(format!("metadata of {counted} bytes counts {}", self.metadata_bytes));
        }
        if self.keys.len() != self.metadata.len() || self.slots.len() != self.by_slot.len() {
            broken.push("an index has entries of nothing".to_owned());
        }
        broken
    }
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const GRANULE: u64 = 2 << 20;

    #[derive(Clone, Debug)]
    enum Step {
        Insert,
        Remove(usize),
        Put(u8, usize, i64),
        Delete(u8),
    }

    fn step() -> impl Strategy<Value = Step> {
        prop_oneof![
            3 => Just(Step::Insert),
            1 => (0..8_usize).prop_map(Step::Remove),
            4 => (0..12_u8, 0..8_usize, -1..GRANULE as i64 + 2).prop_map(|(k, a, o)| Step::Put(k, a, o)),
            1 => (0..12_u8).prop_map(Step::Delete),
        ]
    }

    proptest! {
        #[test]
        fn metadata_is_always_about_something(steps in prop::collection::vec(step(), 0..80)) {
            let mut layout = Layout::default();
            let mut ids: Vec<String> = Vec::new();
            // What the table should hold, by key.
            let mut table: BTreeMap<String, (String, i64)> = BTreeMap::new();
            for step in steps {
                match step {
                    Step::Insert => {
                        let id = format!("id{}", ids.len());
                        layout.insert(id.as_str().into(), 1, GRANULE, "t".into());
                        ids.push(id);
                    }
                    Step::Remove(index) => {
                        let Some(id) = ids.get(index).cloned() else { continue };
                        if layout.remove(&id).is_some() {
                            table.retain(|_, (about, _)| *about != id);
                        }
                    }
                    Step::Put(key, index, offset) => {
                        let key = format!("key{key}");
                        let id = ids.get(index).cloned().unwrap_or_default();
                        let put = layout.put(&key, &id, offset, b"v");
                        let fits = (0..GRANULE as i64).contains(&offset);
                        prop_assert_eq!(put.is_ok(), fits && layout.get(&id).is_ok());
                        if put.is_ok() {
                            table.insert(key, (id, offset));
                        }
                    }
                    Step::Delete(key) => {
                        let key = format!("key{key}");
                        prop_assert_eq!(layout.delete(&key), table.remove(&key).is_some());
                    }
                }
                prop_assert_eq!(layout.broken(), Vec::<String>::new());
                let entries = layout.entries("", None);
                let held: Vec<_> = entries
                    .map(|(key, entry)| (key.to_owned(), (entry.allocation_id.to_string(), entry.offset_bytes as i64)))
                    .collect();
                prop_assert_eq!(held, table.clone().into_iter().collect::<Vec<_>>());
            }
        }
    }

    #[test]
    fn room_counts_what_is_replaced_and_goes() {
        let mut layout = Layout::default();
        layout.insert("a".into(), 1, GRANULE, "four".into());
        layout.put("key", "a", 0, &[0; 100]).unwrap();
        let held = 4 + 256 + 3 + 100;
        assert_eq!(layout.metadata_bytes(), held);

        let fits = |layout: &Layout, entries: &[(&str, &[u8])], limit| {
            layout.check_entries(entries.iter().copied(), limit).is_ok()
        };
        assert!(fits(&layout, &[("key", &[0; 150])], held + 50), "it takes the first one's place");
        assert!(!fits(&layout, &[("key", &[0; 151])], held + 50));
        assert!(
            fits(&layout, &[("new", &[0; 9]), ("new", &[0; 1])], held + 256 + 4),
            "the last counts"
        );
        assert!(!fits(&layout, &[("new", &[0; 1]), ("new", &[0; 9])], held + 256 + 4));
        assert!(fits(&layout, &[("key", &[0; 100])], 0), "what is there may stay");
        assert!(layout.check_tags(5, held + 5).is_ok() && layout.check_tags(6, held + 5).is_err());

        assert!(layout.delete("key"));
        assert_eq!(layout.metadata_bytes(), 4);
        layout.put("key", "a", 0, b"").unwrap();
        layout.remove("a").unwrap();
        assert_eq!(layout.metadata_bytes(), 0);
    }

    /// Which takes as long as the entries about it, whatever there is beside it: a minute for all of these
    /// where it looks at every entry.
    #[test]
    fn allocations_go_in_any_order_at_the_price_of_their_own_entries() {
        const COUNT: usize = 40_000;
        let mut layout = Layout::default();
        let ids: Vec<String> = (0..COUNT).map(|n| n.to_string()).collect();
        for id in &ids {
            layout.insert(id.as_str().into(), 1, GRANULE, "t".into());
            layout.put(id, id, 0, b"").unwrap();
        }
        let started = std::time::Instant::now();
        // From the middle outwards: there are always entries before and behind.
        let (low, high) = ids.split_at(COUNT / 2);
        for (before, behind) in low.iter().rev().zip(high) {
            layout.remove(before).unwrap();
            layout.remove(behind).unwrap();
        }
        assert!(started.elapsed() < std::time::Duration::from_secs(5), "{:?}", started.elapsed());
        assert_eq!((layout.metadata_bytes(), layout.broken()), (0, Vec::new()));
    }

    #[test]
    fn entries_go_on_behind_a_name() {
        let mut layout = Layout::default();
        layout.insert("a".into(), 1, GRANULE, "t".into());
        for key in ["x", "y.1", "y.2", "y.3", "z"] {
            layout.put(key, "a", 0, b"").unwrap();
        }
        let keys = |prefix, after| {
            layout.entries(prefix, after).map(|(key, _)| key).collect::<Vec<_>>().join(" ")
        };
        assert_eq!(keys("y.", None), "y.1 y.2 y.3");
        assert_eq!(keys("y.", Some("y.1")), "y.2 y.3");
        assert_eq!(keys("y.", Some("a")), "y.1 y.2 y.3");
        assert_eq!(keys("", Some("y.3")), "z");
        assert_eq!(keys("q", None), "");
    }
}
