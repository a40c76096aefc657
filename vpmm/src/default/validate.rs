//! The invariants, checked from scratch.

use std::collections::{BTreeMap, HashSet};

use super::class::{LARGE_STEP, SMALL_UNITS, UNIT_BYTES};
use super::front::shard::Shard;
use super::memory::Backed;
use super::space::book::{Book, Recording, Stage};
use super::space::free_set::Block;
use super::space::owner::Owner;
use super::space::tags::{Tag, Tags};
use super::space::{Part, Space};
use super::streams::noted::FENCES;
use super::{Core, lock};
use crate::fence::Fence;
use crate::region::{State, joinable};
use crate::validate::Violation;

type Checked = std::result::Result<(), Violation>;

fn broken<T>(invariant: &'static str, detail: String) -> std::result::Result<T, Violation> {
    Err(Violation { invariant, detail })
}

const I1: &str = "I1 Partition";
const I2: &str = "I2 Residence";
const I3: &str = "I3 Order";
const I7: &str = "I7 Bounded metadata";

impl Core {
    /// Checks I1, I2, I3 and I7 over the whole pool. Looks at the tag of every unit that has
    /// memory; no other thread may be using the pool. (The helper waits meanwhile.)
    pub(crate) fn validate(&self) -> Checked {
        let _growing = lock(&self.growing);
        let mut cached = BTreeMap::new();
        let _revoking = lock(&self.revoking);
        let shards = self.shards();
        let (mut twice, mut misplaced, mut miscounted) = (None, None, None);
        // SAFETY: `revoking` is held, and this thread is inside no front.
        unsafe {
            Shard::reach(shards.iter().copied(), self.asymmetry, |shard, front| {
                front.each(|start, units| {
                    if cached.insert(start, (units, shard.index)).is_some() {
                        twice = Some(start);
                    }
                    // Hits take it for granted.
                    if self.tags.is_small(start) != (units <= SMALL_UNITS) {
                        misplaced = Some((start, units));
                    }
                });
                if !front.agrees() {
                    miscounted = Some(shard.index);
                }
            });
        }
        if let Some(start) = twice {
            return broken(I1, format!("unit {start} is in two fronts"));
        }
        if let Some((start, units)) = misplaced {
            return broken(I1, format!("a front has {units} units at {start}, in the other part"));
        }
        if let Some(stream) = miscounted {
            return broken(I1, format!("a front of stream {stream} is not what is counted of it"));
        }
        let space = self.space.lock();
        space.check_sets()?;
        space.check_map()?;
        space.check_extents()?;
        space.check_units(&self.tags, &cached)?;
        space.check_books()?;
        space.check_metadata()
    }
}

impl Space {
    /// Every free block of every set.
    pub(super) fn every_free_block(&self) -> impl Iterator<Item = &Block> {
        let of_books = self.books.iter().flat_map(|book| book.sets.iter().flatten());
        of_books.chain(&self.common).flat_map(|set| set.of_at_least(1))
    }

    /// Every set is whole, and has what its owner and its part say.
    fn check_sets(&self) -> Checked {
        let of_books = (0..self.books.len() as u32).flat_map(|index| {
            let sets = &self.books[index as usize].sets;
            (0..2).map(move |parity| (Owner::stream(index, parity), &sets[parity]))
        });
        for (owner, sets) in of_books.chain([(Owner::NOBODY, &self.common)]) {
            for part in Part::ALL {
                let set = &sets[part as usize];
                if !set.agrees() {
                    return broken(I1, format!("the set of {owner:?}, {part:?}, disagrees"));
                }
                let of_set =
                    |block: &Block| block.owner() == owner && self.part_of(block.start()) == part;
                if let Some(block) = set.of_at_least(1).find(|block| !of_set(block)) {
                    let (start, other) = (block.start(), block.owner());
                    let detail = format!("unit {start} of {other:?} is in the set of {owner:?}");
                    return broken(I1, detail);
                }
            }
        }
        Ok(())
    }

    /// Addresses are covered without gap or overlap, and neighbours that could be one are.
    fn check_map(&self) -> Checked {
        let mut at = 0;
        let mut before: Option<&crate::region::Region> = None;
        for region in self.memory.map.iter() {
            let part =
                if at == u64::from(self.memory.range(Part::Small).end) { at + 1 } else { at };
            if region.start() != part || region.bytes() == 0 {
                return broken(I1, format!("granule {at} is followed by {}", region.start()));
            }
            if before.is_some_and(|before| joinable(before, region)) {
                return broken(I1, format!("neighbours at granule {part} could be one"));
            }
            at = region.end();
            before = Some(region);
        }
        if at != u64::from(self.memory.range(Part::Large).end) {
            return broken(I1, format!("addresses are covered up to granule {at} only"));
        }
        Ok(())
    }

    /// Every extent is at one place, whole, and nothing else has memory.
    fn check_extents(&self) -> Checked {
        let mut seen = HashSet::new();
        let mut granules = 0;
        for (number, extent) in self.memory.extents() {
            if extent.backed != Backed::Gone && !seen.insert(extent.handle) {
                return broken(I2, format!("{:?} has two current mappings", extent.handle));
            }
            let twin = if extent.is_split() { extent.granules } else { 0 };
            let twin = extent.twin..extent.twin + twin;
            for at in (extent.start..extent.end()).chain(twin) {
                if self.memory.extent_at(at).map(|(found, _)| found) != Some(number) {
                    return broken(I2, format!("granule {at} is not of extent {number}"));
                }
            }
            let is_cut = extent.cut < extent.granules * self.memory.granule_units()
                && extent.cut.is_multiple_of(LARGE_STEP);
            if extent.is_split()
                && !(is_cut && self.memory.splits.iter().any(|split| split.number == number))
            {
                return broken(I2, format!("extent {number} is split at unit {}", extent.cut));
            }
            granules += u64::from(extent.granules);
        }
        if let Some(number) = self.memory.miscounted() {
            return broken(
                I2,
                format!("extent {number} counts other zombies than there are of it"),
            );
        }
        let splits = self.memory.extents().filter(|(_, extent)| extent.is_split()).count() as u64;
        if splits != self.memory.splits.len() as u64 {
            return broken(I2, format!("{splits} extents are split, others are noted"));
        }
        if granules != self.memory.mapped() {
            let counted = self.memory.mapped();
            return broken(I2, format!("{granules} granules of extents, {counted} counted"));
        }
        let mut resident = 0;
        for region in self.memory.map.iter() {
            let (first, end) = (region.start() as u32, region.end() as u32);
            let with =
                (first..end).filter(|at| self.memory.extent_at(*at).is_some()).count() as u64;
            resident += with;
            let left = self.memory.first_left(first..end);
            let right = match region.state() {
                State::Live => with == region.bytes() && left.is_none(),
                State::Hole => with == 0 && left.is_none(),
                State::Zombie => with == 0 && left == Some(first),
                State::Transit => true,
                State::Idle | State::Pending => false,
            };
            if !right {
                let state = region.state();
                return broken(
                    I2,
                    format!("{with} granules of a {state:?} at {first} have memory"),
                );
            }
        }
        if resident != granules + self.memory.split_granules() {
            return broken(I2, format!("{resident} granules mapped, {granules} of extents"));
        }
        Ok(())
    }

    /// Every unit with memory is in one allocation, one front or one free block, as the tags, the
    /// fronts and the sets say; no unit without memory has a tag.
    fn check_units(&self, tags: &Tags, cached: &BTreeMap<u32, (u32, u32)>) -> Checked {
        let granule_units = self.memory.granule_units();
        let mut free = BTreeMap::new();
        for block in self.every_free_block() {
            if free.insert(block.start(), block).is_some() {
                return broken(I1, format!("unit {} is in two sets", block.start()));
            }
        }
        let deferred: BTreeMap<u32, u32> =
            self.deferred.iter().map(|block| (block.start, block.units)).collect();
        let (mut out_units, mut out_blocks, mut cached_seen, mut free_seen) = (0, 0, 0, 0);
        let (mut deferred_units, mut noted_seen) = (0, 0);
        for region in self.memory.map.iter() {
            let first = region.start() as u32 * granule_units;
            let end = region.end() as u32 * granule_units;
            if region.state() != State::Live {
                let tagged = tags.first_in(first..end);
                if let Some(unit) = tagged.filter(|_| region.state() != State::Transit) {
                    let tag = tags.get(unit);
                    return broken(I1, format!("unit {unit} has no memory, but a tag: {tag:?}"));
                }
            }
        }
        // Blocks may reach from one mapped region into the next.
        let mut at = 0;
        let mut last_owner = None;
        let total = self.memory.range(Part::Large).end * granule_units;
        while at < total {
            let granule = self.memory.granule_of(at);
            let here = self.memory.units_at(granule);
            let skips = match here.contains(&at) {
                _ if self.memory.extent_at(granule).is_none() => {
                    Some(at..(granule + 1) * granule_units)
                }
                true => None,
                // What another address has of a split granule is nothing here.
                false if at < here.start => Some(at..here.start),
                false => Some(at..(granule + 1) * granule_units),
            };
            if let Some(skipped) = skips {
                if let Some(unit) = tags.first_in(skipped.clone()) {
                    return broken(
                        I1,
                        format!("unit {unit} is elsewhere, but has {:?}", tags.get(unit)),
                    );
                }
                at = skipped.end;
                last_owner = None;
                continue;
            }
            let units = match tags.get(at) {
                Tag::Live(units) | Tag::Noted(units) => {
                    let noted = matches!(tags.get(at), Tag::Noted(_));
                    if noted != self.uses.contains_key(&at) {
                        return broken(I1, format!("unit {at} is noted on one side only"));
                    }
                    noted_seen += usize::from(noted);
                    let [first, last] =
                        [at, at + units - 1].map(|unit| self.memory.stretch_of(unit));
                    let mut across = first + 1..=last;
                    if let Some(stretch) = across.find(|of| self.memory.covered_by(*of) != at) {
                        return broken(I1, format!("stretch {stretch} is not noted as of {at}"));
                    }
                    out_units += u64::from(units);
                    out_blocks += 1;
                    last_owner = None;
                    units
                }
                Tag::Cached(units) if deferred.get(&at) == Some(&units) => {
                    deferred_units += u64::from(units);
                    last_owner = None;
                    units
                }
                Tag::Cached(units) => {
                    if cached.get(&at).map(|held| held.0) != Some(units) {
                        return broken(I1, format!("unit {at} is in no front"));
                    }
                    cached_seen += 1;
                    out_units += u64::from(units);
                    out_blocks += 1;
                    last_owner = None;
                    units
                }
                Tag::Free(id) => {
                    let Some(block) = free.get(&at).filter(|block| block.id() == id) else {
                        return broken(I1, format!("unit {at} is in no set"));
                    };
                    if tags.get(block.end() - 1) != Tag::Free(id) {
                        return broken(I1, format!("the free block at unit {at} has no last tag"));
                    }
                    if last_owner == Some(block.owner()) {
                        return broken(I1, format!("free blocks at unit {at} could be one"));
                    }
                    last_owner = Some(block.owner());
                    free_seen += 1;
                    block.units()
                }
                Tag::None => {
                    return broken(I1, format!("unit {at} is in nothing"));
                }
            };
            let end = at + units;
            // The last tag of a free block was looked at above.
            let last = end - u32::from(matches!(tags.get(at), Tag::Free(_)));
            if let Some(inside) = tags.first_in(at + 1..last) {
                let tag = tags.get(inside);
                return broken(I1, format!("unit {inside} is inside {at}, but has {tag:?}"));
            }
            let mut granules = at / granule_units..end.div_ceil(granule_units);
            if let Some(granule) = granules.find(|at| self.memory.extent_at(*at).is_none()) {
                let detail = format!("the block at unit {at} has no memory at granule {granule}");
                return broken(I2, detail);
            }
            at += units;
        }
        if (cached_seen, free_seen) != (cached.len(), free.len()) {
            let kept = (cached.len(), free.len());
            return broken(I1, format!("{cached_seen}, {free_seen} blocks met of {kept:?}"));
        }
        if (out_units, out_blocks) != (self.out_units, self.out_blocks) {
            let counted = (self.out_units, self.out_blocks);
            return broken(I1, format!("{out_units}, {out_blocks} out, {counted:?} counted"));
        }
        if noted_seen != self.uses.len() || deferred_units != self.deferred_units {
            let noted = self.uses.len();
            let detail = format!(
                "{noted_seen} of {noted} noted and {deferred_units} of {} units deferred",
                self.deferred_units
            );
            return broken(I1, detail);
        }
        if self.transit_units != 0 {
            return broken(I1, format!("{} units in transit", self.transit_units));
        }
        let mapped = self.memory.mapped() * self.memory.granule_bytes() / UNIT_BYTES;
        if out_units + deferred_units + self.free_units_of_sets() != mapped {
            let free = self.free_units_of_sets();
            let detail = format!(
                "{out_units} out, {deferred_units} deferred and {free} free of {mapped} units"
            );
            return broken(I1, detail);
        }
        Ok(())
    }

    /// What waits for a stream has something to wait for.
    fn check_books(&self) -> Checked {
        let mut events = HashSet::new();
        let mut all_parked = 0;
        for (index, book) in self.books.iter().enumerate() {
            let closed = book.units_of(book.open_parity() ^ 1);
            if book.stage == Stage::Clear && closed > 0 {
                return broken(I3, format!("stream {index} has closed memory without an event"));
            }
            if book.passed >= book.epoch && !matches!(book.recording, Recording::Ended) {
                return broken(I3, format!("stream {index}'s open epoch has passed"));
            }
            let pins = self.pins_of(index as u32);
            if book.pins != pins {
                return broken(I3, format!("stream {index} has {} pins, not {pins}", book.pins));
            }
            let waits = self.deferred.iter().flat_map(|block| &block.waits);
            let waits = waits.filter(|wait| wait.stream == index as u32).count();
            if book.waits as usize != waits {
                return broken(
                    I3,
                    format!("{waits} frees wait for stream {index}, not {}", book.waits),
                );
            }
            let parked = book.parked.iter().filter(|parked| parked.wait.stream == index as u32);
            all_parked += parked.count();
            let late = |block: &&Block| !block.is_before(book.marks);
            if let Some(block) =
                book.sets.iter().flatten().flat_map(|s| s.of_at_least(1)).find(late)
            {
                return broken(I3, format!("unit {} was freed after now", block.start()));
            }
            let eager = book.recording == Recording::Eager;
            if eager && book.open_units() > 0 && book.last_record.is_none() {
                return broken(I3, format!("stream {index} has memory that no event covers"));
            }
            if !eager && book.last_record.is_some() {
                return broken(I7, format!("stream {index} keeps an event that covers nothing"));
            }
            let recorded = match book.stage {
                Stage::Recorded(event) => Some(event),
                _ => None,
            };
            let fences = book.fences.iter().map(|fence| fence.event);
            for event in recorded.into_iter().chain(book.last_record).chain(fences) {
                if !events.insert(format!("{event:?}")) {
                    return broken(I3, format!("stream {index} shares an event"));
                }
            }
        }
        if all_parked != self.deferred.len() {
            let deferred = self.deferred.len();
            return broken(I3, format!("{all_parked} of {deferred} deferred frees are parked"));
        }
        for event in &self.events {
            if !events.insert(format!("{event:?}")) {
                return broken(I3, "a spare event is in use".to_owned());
            }
        }
        for region in self.memory.map.iter().filter(|region| region.state() == State::Zombie) {
            let fence = region.fence();
            if fence == Fence::PASSED {
                continue;
            }
            let book: Option<&Book> = self.books.get(fence.timeline.0 as usize);
            if book.is_none_or(|book| fence.sequence <= book.passed || fence.sequence > book.epoch)
            {
                return broken(I3, format!("a zombie waits for {fence:?}"));
            }
        }
        Ok(())
    }

    /// Noted uses and deferred frees that name a stream.
    fn pins_of(&self, stream: u32) -> u32 {
        let uses = self.uses.values().flatten().filter(|of| of.stream == stream).count();
        let waits = self.deferred.iter().flat_map(|block| block.waits.iter().chain([&block.own]));
        let waits = waits.filter(|wait| wait.stream == stream).count();
        (uses + waits) as u32
    }

    fn check_metadata(&self) -> Checked {
        let free = self.every_free_block().count();
        if self.blocks.in_use() != free {
            return broken(I7, format!("{} nodes for {free} free blocks", self.blocks.in_use()));
        }
        let regions = self.memory.map.iter().count();
        if self.memory.map.nodes() != regions {
            let nodes = self.memory.map.nodes();
            return broken(I7, format!("{nodes} nodes for {regions} regions"));
        }
        let most = (2 + FENCES) * self.books.len() + 64;
        if self.events.len() > most {
            return broken(I7, format!("{} spare events", self.events.len()));
        }
        Ok(())
    }
}
