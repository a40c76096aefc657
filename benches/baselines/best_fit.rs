//! Best fit on the standard library's trees: free memory by size and by address, live memory by
//! address. The smallest sufficient region is split, and a freed one merges with its neighbours.

use std::collections::{BTreeMap, BTreeSet};

use super::{SPACE, UNIT, units};
use crate::rig::{Lane, Subject};

/// Addresses and sizes in units.
pub(crate) struct BestFit {
    free_by_size: BTreeSet<(u64, u64)>,
    free: BTreeMap<u64, u64>,
    live: BTreeMap<u64, u64>,
}

impl BestFit {
    pub(crate) fn new() -> Self {
        let size = SPACE / UNIT;
        Self {
            free_by_size: BTreeSet::from([(size, 0)]),
            free: BTreeMap::from([(0, size)]),
            live: BTreeMap::new(),
        }
    }

    fn add_free(&mut self, address: u64, size: u64) {
        self.free.insert(address, size);
        self.free_by_size.insert((size, address));
    }

    fn take_free(&mut self, address: u64, size: u64) {
        self.free.remove(&address);
        self.free_by_size.remove(&(size, address));
    }
}

impl Subject for BestFit {
    type Block = u64;

    fn malloc(&mut self, bytes: usize, _lane: Lane) -> u64 {
        let wanted = units(bytes);
        let found = self.free_by_size.range((wanted, 0)..).next();
        let (size, address) = *found.expect("the space is large enough");
        self.take_free(address, size);
        if size > wanted {
            self.add_free(address + wanted, size - wanted);
        }
        self.live.insert(address, wanted);
        address
    }

    fn free(&mut self, address: u64, _lane: Lane) {
        let mut start = address;
        let mut size = self.live.remove(&address).expect("a live block");
        if let Some((&below, &its_size)) = self.free.range(..address).next_back()
            && below + its_size == address
        {
            self.take_free(below, its_size);
            (start, size) = (below, size + its_size);
        }
        let end = start + size;
        if let Some(&its_size) = self.free.get(&end) {
            self.take_free(end, its_size);
            size += its_size;
        }
        self.add_free(start, size);
    }
}
