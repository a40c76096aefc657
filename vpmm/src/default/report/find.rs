//! What an address is part of.

use crate::allocation::Allocation;
use crate::default::Core;
use crate::default::class::UNIT_BYTES;
use crate::default::space::Space;
use crate::default::space::book::Recording;
use crate::default::space::tags::{Tag, Tags};
use crate::error::Error;

impl Core {
    /// The unit that an address is in, where it is within the pool's addresses.
    fn unit_with(&self, address: u64) -> Option<u32> {
        let unit = u32::try_from(address.checked_sub(self.base)? / UNIT_BYTES).ok()?;
        (unit < self.tags.units()).then_some(unit)
    }

    pub(in crate::default) fn find(&self, address: u64) -> Option<Allocation> {
        let unit = self.unit_with(address)?;
        let space = self.space.lock();
        let (start, units) = space.live_around(&self.tags, unit)?;
        let index = self.tags.label_at(start).and_then(|label| space.stream_labelled(label));
        let stream = match index.map(|index| space.books[index as usize].recording) {
            Some(Recording::Lazy(handle)) => Some(handle),
            _ => None,
        };
        let bytes = u64::from(units) * UNIT_BYTES;
        Some(Allocation { start: self.pointer(start), bytes, stream })
    }

    /// What a pointer is that no allocation starts at.
    #[cold]
    pub(in crate::default) fn not_live(&self, address: u64) -> Error {
        let foreign = Error::ForeignPointer { address };
        let Some(unit) = self.unit_with(address) else { return foreign };
        let space = self.space.lock();
        if !space.memory.units_at(space.memory.granule_of(unit)).contains(&unit) {
            return foreign;
        }
        if let Some((start, _)) = space.live_around(&self.tags, unit) {
            let start = self.pointer(start).address();
            return if start == address {
                foreign
            } else {
                Error::InteriorPointer { address, start }
            };
        }
        // Back to what the unit is part of; nothing reaches across addresses without memory.
        let mut at = unit;
        loop {
            let granule = space.memory.granule_of(at);
            if space.memory.extent_at(granule).is_none() {
                return foreign;
            }
            let first = granule * space.memory.granule_units();
            if let Some(found) = self.tags.last_up_to(at, first) {
                return match self.tags.get(found) {
                    Tag::Cached(units) if unit < found + units => Error::DoubleFree { address },
                    Tag::Free(_) => Error::DoubleFree { address },
                    _ => foreign,
                };
            }
            match first.checked_sub(1) {
                Some(below) => at = below,
                None => return foreign,
            }
        }
    }
}

impl Space {
    /// The place of the stream with this label, while it has one.
    pub(super) fn stream_labelled(&self, label: u32) -> Option<u32> {
        self.books.iter().position(|book| book.label == label).map(|index| index as u32)
    }

    /// The allocation that a unit is in: its first unit and its units. It begins in the unit's own
    /// stretch, or was noted when it was handed out as the one across that stretch's beginning.
    fn live_around(&self, tags: &Tags, unit: u32) -> Option<(u32, u32)> {
        self.memory.extent_at(self.memory.granule_of(unit))?;
        let live = |start: u32| {
            let units = tags.get(start).live_units()?;
            (start <= unit && unit < start + units).then_some((start, units))
        };
        let stretch = self.memory.stretch_of(unit);
        let first = self.memory.start_of_stretch(stretch);
        if let Some(at) = tags.last_up_to(unit, first) {
            return live(at);
        }
        live(self.memory.covered_by(stretch))
    }
}
