//! Opaque handle values, used again after they are given back, as the driver's are.

use rustc_hash::FxHashMap;

/// Handle values and what they stand for. The value given back last is handed out first, so
/// that code which keeps a stale handle meets a new object behind it.
#[derive(Debug)]
pub(crate) struct Handles<T> {
    next: usize,
    first: usize,
    free: Vec<usize>,
    live: FxHashMap<usize, T>,
}

const STEP: usize = 0x40;

impl<T> Handles<T> {
    /// `kind` keeps the values of different tables apart.
    pub(crate) fn new(kind: usize) -> Self {
        let first = (0x5_0000 + kind) << 28;
        Self { next: first, first, free: Vec::new(), live: FxHashMap::default() }
    }

    pub(crate) fn insert(&mut self, object: T) -> usize {
        let value = self.free.pop().unwrap_or_else(|| {
            self.next += STEP;
            self.next
        });
        self.live.insert(value, object);
        value
    }

    pub(crate) fn get(&self, value: usize) -> Option<&T> {
        self.live.get(&value)
    }

    pub(crate) fn get_mut(&mut self, value: usize) -> Option<&mut T> {
        self.live.get_mut(&value)
    }

    pub(crate) fn remove(&mut self, value: usize) -> Option<T> {
        let object = self.live.remove(&value)?;
        self.free.push(value);
        Some(object)
    }

    /// Whether the value stood for something once and does not now.
    pub(crate) fn is_stale(&self, value: usize) -> bool {
        value > self.first && value <= self.next && !self.live.contains_key(&value)
    }

    pub(crate) fn len(&self) -> usize {
        self.live.len()
    }

    pub(crate) fn iter(&self) -> impl Iterator<Item = (usize, &T)> {
        self.live.iter().map(|(&value, object)| (value, object))
    }
}
