//! A map from numbers to nodes: of addresses, and of streams.

#![forbid(unsafe_code)]

/// What no node is called.
const VACANT: u32 = u32::MAX;

#[derive(Clone, Copy)]
struct Entry {
    key: u64,
    node: u32,
}

const EMPTY: Entry = Entry { key: 0, node: VACANT };

/// Open addressing with linear probing, at most half full. Removal shifts what follows back, so
/// that nothing is left of an entry: its size follows the most entries that it ever had at a time.
pub(super) struct Table {
    entries: Box<[Entry]>,
    used: usize,
    /// 64 less the bits of an index.
    shift: u32,
}

impl Table {
    pub(super) fn new() -> Self {
        Self::of(64)
    }

    /// `capacity`: a power of two, at least 2.
    fn of(capacity: usize) -> Self {
        let entries = vec![EMPTY; capacity].into_boxed_slice();
        Self { entries, used: 0, shift: 64 - capacity.trailing_zeros() }
    }

    pub(super) fn len(&self) -> usize {
        self.used
    }

    /// Host memory that it takes.
    pub(super) fn bytes(&self) -> usize {
        size_of_val(&*self.entries)
    }

    #[inline(always)]
    fn home(&self, key: u64) -> usize {
        // Fibonacci hashing: the top bits depend on all of the key's.
        (key.wrapping_mul(0x9E37_79B9_7F4A_7C15) >> self.shift) as usize
    }

    #[inline(always)]
    fn after(&self, at: usize) -> usize {
        (at + 1) & (self.entries.len() - 1)
    }

    /// Where a key is, or the vacant entry where it would be.
    #[inline(always)]
    fn find(&self, key: u64) -> usize {
        let mut at = self.home(key);
        loop {
            let entry = self.entries[at];
            if entry.node == VACANT || entry.key == key {
                return at;
            }
            at = self.after(at);
        }
    }

    #[inline]
    pub(super) fn get(&self, key: u64) -> Option<u32> {
        let node = self.entries[self.find(key)].node;
        (node != VACANT).then_some(node)
    }

    /// Puts a node in, in the place of any that the key had.
    #[inline]
    pub(super) fn insert(&mut self, key: u64, node: u32) {
        if self.used * 2 >= self.entries.len() {
            self.double();
        }
        let at = self.find(key);
        self.used += usize::from(self.entries[at].node == VACANT);
        self.entries[at] = Entry { key, node };
    }

    #[cold]
    #[inline(never)]
    fn double(&mut self) {
        let mut larger = Self::of(self.entries.len() * 2);
        for (key, node) in self.iter() {
            larger.insert(key, node);
        }
        *self = larger;
    }

    #[inline]
    pub(super) fn remove(&mut self, key: u64) -> Option<u32> {
        let mut gap = self.find(key);
        let node = self.entries[gap].node;
        if node == VACANT {
            return None;
        }
        self.used -= 1;
        let mut at = self.after(gap);
        while self.entries[at].node != VACANT {
            let home = self.home(self.entries[at].key);
            // An entry may move back to the gap unless its home lies after that.
            let mask = self.entries.len() - 1;
            if at.wrapping_sub(home) & mask >= at.wrapping_sub(gap) & mask {
                self.entries[gap] = self.entries[at];
                gap = at;
            }
            at = self.after(at);
        }
        self.entries[gap] = EMPTY;
        Some(node)
    }

    pub(super) fn iter(&self) -> impl Iterator<Item = (u64, u32)> {
        let used = self.entries.iter().filter(|entry| entry.node != VACANT);
        used.map(|entry| (entry.key, entry.node))
    }
}

#[cfg(test)]
mod tests {
    use std::collections::HashMap;

    use super::*;

    #[test]
    fn it_agrees_with_the_standard_librarys() {
        let (mut table, mut model) = (Table::new(), HashMap::new());
        let mut seed = 3_u64;
        let mut random = |bound: u64| {
            seed = seed.wrapping_mul(6_364_136_223_846_793_005).wrapping_add(1);
            (seed >> 33) % bound
        };
        let mut largest = 0;
        for step in 0..if cfg!(miri) { 2_000 } else { 200_000 } {
            // Near ones collide, and 0 and the highest are keys like others.
            let key = match random(100) {
                0 => 0,
                1 => u64::MAX,
                _ => 0x7F00_0000_0000 + 512 * random(300),
            };
            if random(2) == 0 {
                table.insert(key, step);
                model.insert(key, step);
            } else {
                assert_eq!(table.remove(key), model.remove(&key));
            }
            assert_eq!((table.get(key), table.len()), (model.get(&key).copied(), model.len()));
            largest = largest.max(table.bytes());
        }
        assert_eq!(table.iter().collect::<HashMap<_, _>>(), model);
        assert!(largest <= 1024 * size_of::<Entry>(), "at most half full of 302: {largest}");
    }
}
