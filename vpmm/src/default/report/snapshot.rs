//! Every block, from the tags.

use crate::default::class::UNIT_BYTES;
use crate::default::front::admit::LEGACY;
use crate::default::space::Part;
use crate::default::space::tags::Tag;
use crate::default::{Core, lock};
use crate::snapshot::{Block, BlockState, Segment, Segments};

impl Core {
    /// Every segment and block. While the space is locked no block changes its bounds; those of fronts
    /// may change hands.
    pub(crate) fn snapshot(&self) -> Vec<Segment> {
        let registry = lock(&self.registry);
        let number = |index: u32| match registry.stream(index) {
            // It has ended.
            0 => None,
            LEGACY => Some(0),
            stream => Some(stream),
        };
        let space = self.space.lock();
        let granule_units = space.memory.granule_units();
        let labels = space.books.iter().enumerate();
        let labels: std::collections::HashMap<u32, u32> =
            labels.map(|(index, book)| (book.label, index as u32)).collect();
        let labelled = |label| labels.get(&label).copied().and_then(number);
        let owners: std::collections::HashMap<u32, _> =
            space.every_free_block().map(|block| (block.id(), block)).collect();
        let deferred: std::collections::HashMap<u32, u32> =
            space.deferred.iter().map(|block| (block.start, block.own.stream)).collect();
        let mut segments = Segments::default();
        for part in Part::ALL {
            let granules = space.memory.range(part);
            // Where the next block begins, which may be beyond the granule.
            let mut at = granules.start * granule_units;
            for granule in granules {
                if space.memory.extent_at(granule).is_none() {
                    continue;
                }
                let units = space.memory.units_at(granule);
                if units.is_empty() {
                    continue;
                }
                let address = self.base + u64::from(units.start) * UNIT_BYTES;
                let bytes = u64::from(units.end - units.start) * UNIT_BYTES;
                segments.extend_to(address, bytes, part == Part::Small);
                at = at.max(units.start);
                let end = units.end;
                while at < end {
                    let tag = self.tags.get(at);
                    let (units, state, stream) = match tag {
                        Tag::Live(units) | Tag::Noted(units) => {
                            (units, BlockState::Live, self.tags.label_at(at).and_then(labelled))
                        }
                        Tag::Cached(units) => match deferred.get(&at) {
                            Some(stream) => (units, BlockState::Deferred, number(*stream)),
                            None => (units, BlockState::Cached, None),
                        },
                        Tag::Free(id) => match owners.get(&id) {
                            Some(block) => match block.owner().of_stream() {
                                None => (block.units(), BlockState::Idle, None),
                                Some((index, _)) => {
                                    (block.units(), BlockState::Pending, number(index))
                                }
                            },
                            None => break,
                        },
                        // In transit; behind it may be what is not.
                        Tag::None => match self.tags.first_in(at..end) {
                            Some(next) => {
                                at = next;
                                continue;
                            }
                            None => break,
                        },
                    };
                    segments.put(Block {
                        address: self.pointer(at).address(),
                        bytes: u64::from(units) * UNIT_BYTES,
                        state,
                        stream,
                    });
                    at += units.max(1);
                }
                at = at.max((granule + 1) * granule_units);
            }
        }
        let mut segments = segments.into_vec();
        let is_asleep = self.is_asleep();
        segments.iter_mut().for_each(|segment| segment.is_asleep = is_asleep);
        segments
    }
}
