//! Physical memory and the addresses it is at, in granules.
//!
//! The address space is one reservation. Small blocks have its first part, large ones the rest;
//! one granule between them is never mapped, so that no block spans both.

pub(super) mod full;
pub(super) mod sleep;
pub(super) mod split;
pub(super) mod starts;
pub(super) mod trim;

use std::ops::Range;

use crate::default::class::UNIT_BYTES;
use crate::default::space::Part;
use crate::fence::{Fence, TimelineId};
use crate::physical::Extent;
use crate::region::{NodeId, Region, RegionMap, State};
use crate::sharing::{SharedExtent, Span};
use starts::Starts;

/// Granules of which one note tells what reaches across their beginning. Most blocks are shorter, and cost
/// no note; who asks what an address is inside of looks through the tags of one stretch at most.
const STRETCH: u32 = 64;

/// What is behind an extent's addresses. Anything but mapped only while the heap sleeps.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(super) enum Backed {
    /// Its handle.
    Mapped,
    /// Nothing; but the handle is still there.
    Unmapped,
    /// Its handle, or not: the driver would not undo a mapping. To be unmapped before anything else.
    Stuck,
    /// Nothing: the handle was given back.
    Gone,
}

/// Whole mappings of addresses that extents have left, on their way to be a hole.
#[derive(Clone, Copy)]
pub(super) struct Left {
    id: NodeId,
    pub(super) start: u32,
    pub(super) granules: u32,
    pub(super) mappings: u64,
}

/// One physical handle, where it is now.
#[derive(Clone, Copy, Debug)]
pub(super) struct Resident {
    pub(super) handle: Extent,
    /// Its first granule; of a split one where it is mapped for its low part.
    pub(super) start: u32,
    /// Its granules; 0 for an entry of the table that is vacant.
    pub(super) granules: u32,
    /// Other processes may have it: it stays where it is.
    pub(super) exported: bool,
    /// Addresses where it was before, and is still mapped: as long as there are any its memory would not go back.
    pub(super) zombies: u32,
    pub(super) backed: Backed,
    /// Of a split one: the granule from which on it is mapped for its high part, with which of its units that
    /// begins, and what is behind those addresses. See [`split`].
    pub(super) twin: u32,
    pub(super) cut: u32,
    twin_backed: Backed,
}

impl Resident {
    pub(super) fn vacant(handle: Extent) -> Self {
        let backed = Backed::Mapped;
        let (exported, zombies, twin_backed) = (false, 0, backed);
        Self {
            handle,
            start: 0,
            granules: 0,
            exported,
            zombies,
            backed,
            twin: 0,
            cut: 0,
            twin_backed,
        }
    }

    pub(super) fn end(&self) -> u32 {
        self.start + self.granules
    }

    /// What is behind all its addresses, the worst where they differ.
    fn backed_at_all(&self) -> Backed {
        match (self.backed, self.twin_backed) {
            (one, other) if !self.is_split() || one == other => one,
            (Backed::Stuck, _) | (_, Backed::Stuck) => Backed::Stuck,
            (Backed::Mapped, _) | (_, Backed::Mapped) => Backed::Mapped,
            (one, _) => one,
        }
    }
}

pub(super) struct Memory {
    /// The first address.
    base: u64,
    granule_bytes: u64,
    /// A granule is two to the power of this many units.
    granule_shift: u32,
    /// Granules of addresses.
    granules: u32,
    /// The first granule of the large part, and its first unit.
    split: u32,
    split_unit: u32,
    /// Holes, zombies and mapped addresses; its numbers are granules. A mapped region is one or
    /// several whole extents.
    pub(super) map: RegionMap,
    /// For each granule of addresses one more than the number of its extent, 0 for none.
    at: Vec<u32>,
    /// Where the mappings of zombies begin.
    left: Starts,
    /// For each granule where such a mapping begins one more than the number of the extent that it is of, else 0.
    left_by: Vec<u32>,
    /// For each stretch of [`STRETCH`] granules the first unit of the block that was handed out last across
    /// its beginning: to be believed where that block is still there.
    covered_by: Vec<u32>,
    extents: Vec<Resident>,
    pub(super) splits: Vec<split::Split>,
    vacant: Vec<u32>,
    mapped: u64,
    /// Of those the granules of the small part.
    mapped_small: u64,
    peak_mapped: u64,
    /// Granules of exported extents.
    exported: u64,
    /// Extents that are gone while the heap sleeps, and their granules.
    gone_handles: usize,
    gone: u64,
    /// Those that came again when it woke, ever, and their granules.
    renewed: (u64, u64),
}

impl Memory {
    pub(super) fn new(base: u64, granules: u32, granule_bytes: u64, small: u32) -> Self {
        let mut map = RegionMap::new();
        map.add(0, u64::from(small), 0, State::Hole);
        // The reservation's number keeps the parts from becoming one hole.
        map.add(u64::from(small) + 1, u64::from(granules - small - 1), 1, State::Hole);
        Self {
            base,
            granule_bytes,
            granule_shift: (granule_bytes / UNIT_BYTES).ilog2(),
            granules,
            split: small + 1,
            split_unit: (small + 1) * (granule_bytes / UNIT_BYTES) as u32,
            map,
            at: vec![0; granules as usize],
            left: Starts::new(granules),
            left_by: vec![0; granules as usize],
            covered_by: vec![0; granules.div_ceil(STRETCH) as usize],
            extents: Vec::new(),
            splits: Vec::new(),
            vacant: Vec::new(),
            mapped: 0,
            mapped_small: 0,
            peak_mapped: 0,
            exported: 0,
            gone_handles: 0,
            gone: 0,
            renewed: (0, 0),
        }
    }

    pub(super) fn granule_bytes(&self) -> u64 {
        self.granule_bytes
    }

    /// Units in a granule.
    #[inline]
    pub(super) fn granule_units(&self) -> u32 {
        1 << self.granule_shift
    }

    /// The granule that a unit is in.
    #[inline]
    pub(super) fn granule_of(&self, unit: u32) -> u32 {
        unit >> self.granule_shift
    }

    #[inline]
    pub(super) fn split_unit(&self) -> u32 {
        self.split_unit
    }

    /// The stretch of granules that a unit is in.
    #[inline]
    pub(super) fn stretch_of(&self, unit: u32) -> u32 {
        unit >> self.granule_shift >> STRETCH.ilog2()
    }

    /// The first unit of a stretch.
    pub(super) fn start_of_stretch(&self, stretch: u32) -> u32 {
        (stretch * STRETCH) << self.granule_shift
    }

    /// Notes a block at every stretch that begins inside it.
    #[inline]
    pub(super) fn cover(&mut self, start: u32, units: u32) {
        let (first, last) = (self.stretch_of(start), self.stretch_of(start + units - 1));
        if last - first > 1 {
            return self.cover_stretches(first + 1, last, start);
        }
        // Without a branch: whether one begins inside goes either way. Across the first nothing lies, and what is
        // noted there is not believed.
        let at = if first < last { last } else { 0 };
        if let Some(noted) = self.covered_by.get_mut(at as usize) {
            *noted = start;
        }
    }

    #[cold]
    #[inline(never)]
    fn cover_stretches(&mut self, first: u32, last: u32, start: u32) {
        self.covered_by[first as usize..=last as usize].fill(start);
    }

    /// The first unit of the block that was handed out last across the beginning of a stretch.
    pub(super) fn covered_by(&self, stretch: u32) -> u32 {
        self.covered_by[stretch as usize]
    }

    /// The granules of addresses of a part.
    pub(super) fn range(&self, part: Part) -> Range<u32> {
        match part {
            Part::Small => 0..self.split - 1,
            Part::Large => self.split..self.granules,
        }
    }

    /// Whether a part's addresses end before a unit.
    pub(super) fn ends_part(&self, unit: u32) -> bool {
        Part::ALL
            .iter()
            .any(|part| u64::from(unit) == u64::from(self.range(*part).end) << self.granule_shift)
    }

    pub(super) fn address_of(&self, granule: u32) -> u64 {
        self.base + u64::from(granule) * self.granule_bytes
    }

    /// Granules of extents, those that are gone while the heap sleeps included.
    pub(super) fn mapped(&self) -> u64 {
        self.mapped
    }

    /// The same of the small part.
    pub(super) fn mapped_small(&self) -> u64 {
        self.mapped_small
    }

    pub(super) fn peak_mapped(&self) -> u64 {
        self.peak_mapped
    }

    /// Physical handles.
    pub(super) fn handles(&self) -> usize {
        self.extents.len() - self.vacant.len() - self.gone_handles
    }

    /// Handles that were made because the heap woke, and their granules.
    pub(super) fn renewed(&self) -> (u64, u64) {
        self.renewed
    }

    /// The number of the extent at a granule.
    #[inline]
    pub(super) fn number_at(&self, granule: u32) -> Option<u32> {
        self.at.get(granule as usize)?.checked_sub(1)
    }

    /// The extent at a granule: one that is split as it is there.
    #[inline]
    pub(super) fn extent_at(&self, granule: u32) -> Option<(u32, Resident)> {
        let number = self.number_at(granule)?;
        let mut extent = self.extents[number as usize];
        if extent.is_split() && !(extent.start..extent.end()).contains(&granule) {
            (extent.start, extent.backed) = (extent.twin, extent.twin_backed);
        }
        Some((number, extent))
    }

    pub(super) fn extent_mut(&mut self, number: u32) -> &mut Resident {
        &mut self.extents[number as usize]
    }

    pub(super) fn extent(&self, number: u32) -> &Resident {
        &self.extents[number as usize]
    }

    /// Granules without memory while the heap sleeps.
    pub(super) fn gone(&self) -> u64 {
        self.gone
    }

    /// The numbers of all extents with this behind them.
    pub(super) fn numbers_of(&self, backed: Backed) -> Vec<u32> {
        let of = self.extents().filter(|(_, extent)| extent.backed_at_all() == backed);
        of.map(|(number, _)| number).collect()
    }

    /// The extents of a run, its first granule and its length, in ascending order.
    pub(super) fn extents_in(&self, (start, granules): (u32, u32)) -> Vec<Resident> {
        let mut found = Vec::new();
        let mut at = start;
        while at < start + granules {
            let Some((_, extent)) = self.extent_at(at) else { break };
            found.push(extent);
            at = extent.end();
        }
        found
    }

    /// Notes what is behind every extent of a run.
    pub(super) fn set_backed(&mut self, (start, granules): (u32, u32), backed: Backed) {
        let mut at = start;
        while at < start + granules {
            let Some((number, end)) = self.extent_at(at).map(|(number, of)| (number, of.end()))
            else {
                break;
            };
            let extent = &mut self.extents[number as usize];
            match extent.is_split() && !(extent.start..extent.end()).contains(&at) {
                false => extent.backed = backed,
                true => extent.twin_backed = backed,
            }
            at = end;
        }
    }

    /// An extent's handle was given back.
    pub(super) fn set_gone(&mut self, number: u32) {
        let extent = &mut self.extents[number as usize];
        (extent.backed, extent.twin_backed) = (Backed::Gone, Backed::Gone);
        self.gone += u64::from(extent.granules);
        self.gone_handles += 1;
    }

    /// An extent that was gone has memory again, not mapped yet.
    pub(super) fn renew(&mut self, number: u32, handle: Extent) {
        let extent = &mut self.extents[number as usize];
        extent.handle = handle;
        (extent.backed, extent.twin_backed) = (Backed::Unmapped, Backed::Unmapped);
        let granules = u64::from(extent.granules);
        self.gone -= granules;
        self.gone_handles -= 1;
        self.renewed = (self.renewed.0 + 1, self.renewed.1 + granules);
        self.peak_mapped = self.peak_mapped.max(self.mapped - self.gone);
    }

    /// Every extent with its number.
    pub(super) fn extents(&self) -> impl Iterator<Item = (u32, &Resident)> {
        let all = self.extents.iter().enumerate();
        all.filter(|(_, extent)| extent.granules > 0)
            .map(|(number, extent)| (number as u32, extent))
    }

    /// Granules of extents that other processes may have.
    pub(super) fn exported(&self) -> u64 {
        self.exported
    }

    /// The extents from one granule to before another, in ascending order; they stay where they are
    /// from now on.
    pub(super) fn pin(&mut self, first: u32, end: u32) -> Vec<SharedExtent> {
        let mut found = Vec::new();
        let mut at = first;
        while at < end {
            let Some((number, extent)) = self.extent_at(at) else {
                at += 1;
                continue;
            };
            self.exported += if extent.exported { 0 } else { u64::from(extent.granules) };
            self.extents[number as usize].exported = true;
            let bytes = u64::from(extent.granules) * self.granule_bytes;
            let span = Span { start: self.address_of(extent.start), bytes };
            found.push(SharedExtent { handle: extent.handle, span });
            at = extent.end();
        }
        found
    }

    /// The addresses of everything that is mapped and not a zombie, in runs without a hole: where
    /// each begins and its bytes.
    pub(super) fn runs(&self) -> Vec<(u64, u64)> {
        let mut runs: Vec<(u64, u64)> = Vec::new();
        for region in self.map.iter().filter(|region| region.state() == State::Live) {
            let start = self.address_of(region.start() as u32);
            let bytes = region.bytes() * self.granule_bytes;
            match runs.last_mut() {
                Some((first, length)) if *first + *length == start => *length += bytes,
                _ => runs.push((start, bytes)),
            }
        }
        runs
    }

    /// The hole that a granule is in.
    pub(super) fn hole_at(&self, granule: u32) -> Option<&Region> {
        self.map.containing(u64::from(granule)).filter(|region| region.state() == State::Hole)
    }

    /// Takes part of a hole for an operation under way.
    pub(super) fn reserve(&mut self, start: u32, granules: u32) -> Option<NodeId> {
        let (hole, hole_start, end) = {
            let hole = self.hole_at(start)?;
            (hole.id(), hole.start(), hole.end())
        };
        let (start, granules) = (u64::from(start), u64::from(granules));
        if start + granules > end {
            return None;
        }
        let above = self.map.take_tail(hole, end - start, State::Transit, Fence::PASSED);
        let taken = self.map.take_head(above, granules, State::Transit, Fence::PASSED);
        if taken != above {
            self.map.set(above, State::Hole, Fence::PASSED);
        }
        debug_assert!(hole_start <= start);
        Some(taken)
    }

    /// Gives reserved addresses back: nothing is mapped there, unless the mapping is `stuck`.
    pub(super) fn unreserve(&mut self, start: u32, stuck: bool) {
        if let Some(id) = self.transit_at(start) {
            let state = if stuck { State::Zombie } else { State::Hole };
            self.map.set(id, state, Fence::PASSED);
            self.map.coalesce(id);
        }
    }

    /// Here begins what may be a mapping, that of an extent which was to move or of one that is no more: nobody knows
    /// how far a request came whose mappings would not go.
    pub(super) fn note_stuck(&mut self, start: u32, number: Option<u32>) {
        self.left.note(start);
        if let Some(number) = number {
            self.note_left(number, start);
        }
    }

    fn transit_at(&self, granule: u32) -> Option<NodeId> {
        let region = self.map.containing(u64::from(granule))?;
        (region.state() == State::Transit).then(|| region.id())
    }

    /// Reserved addresses have memory now; `enter` says which.
    pub(super) fn settle(&mut self, start: u32) {
        if let Some(id) = self.transit_at(start) {
            self.map.set(id, State::Live, Fence::PASSED);
        }
    }

    /// A new handle was mapped.
    pub(super) fn enter(&mut self, handle: Extent, start: u32, granules: u32) {
        let number = self.vacant.pop().unwrap_or_else(|| {
            self.extents.push(Resident::vacant(handle));
            self.extents.len() as u32 - 1
        });
        let extent = &mut self.extents[number as usize];
        *extent = Resident { start, granules, ..Resident::vacant(handle) };
        self.write(start, granules, number + 1);
        self.mapped += u64::from(granules);
        self.peak_mapped = self.peak_mapped.max(self.mapped);
    }

    /// A handle was mapped elsewhere. Returns where it was, which is to be retired.
    pub(super) fn rehome(&mut self, number: u32, start: u32) -> u32 {
        let old = self.extents[number as usize];
        self.write(old.start, old.granules, 0);
        self.write(start, old.granules, number + 1);
        self.extents[number as usize].start = start;
        self.note_left(number, old.start);
        old.start
    }

    /// An extent has left the addresses that begin here, and is still mapped to them.
    fn note_left(&mut self, number: u32, start: u32) {
        self.left_by[start as usize] = number + 1;
        self.extents[number as usize].zombies += 1;
    }

    /// Mappings that begin in a range are no more.
    fn forget_left(&mut self, range: Range<u32>) {
        let mut at = range.start;
        while let Some(start) = self.left.next(at, range.end) {
            let by = std::mem::take(&mut self.left_by[start as usize]);
            // Of a new extent's mapping that could not be undone the extent is no more.
            if let Some(number) = by.checked_sub(1) {
                self.extents[number as usize].zombies -= 1;
            }
            at = start + 1;
        }
        self.left.forget(range);
    }

    /// An extent that counts other addresses that it has left than are noted.
    pub(super) fn miscounted(&self) -> Option<u32> {
        let mut zombies = vec![0; self.extents.len()];
        for number in self.left_by.iter().filter_map(|by| by.checked_sub(1)) {
            zombies[number as usize] += 1;
        }
        let mut extents = self.extents();
        extents
            .find(|(number, of)| of.zombies != zombies[*number as usize])
            .map(|(number, _)| number)
    }

    /// Addresses of neighbours whose handles were mapped elsewhere are a zombie until `fence`: where each
    /// mapping begins, and where the last one ends.
    pub(super) fn retire(&mut self, starts: impl IntoIterator<Item = u32>, end: u32, fence: Fence) {
        let mut first = end;
        for start in starts {
            self.left.note(start);
            first = first.min(start);
        }
        let (mut at, end) = (u64::from(first), u64::from(end));
        while at < end {
            let region = self.map.containing(at);
            let Some((id, first, last)) = region.map(|of| (of.id(), of.start(), of.end())) else {
                return;
            };
            if first < at {
                self.map.take_head(id, at - first, State::Live, Fence::PASSED);
            }
            let upto = end.min(last);
            let zombie = self.map.take_head(id, upto - at, State::Zombie, fence);
            self.map.coalesce(zombie);
            at = upto;
        }
    }

    /// Takes the addresses of a whole extent for an operation under way.
    pub(super) fn reserve_mapped(&mut self, start: u32, granules: u32) {
        let region = self.map.containing(u64::from(start));
        let Some((id, first)) = region.map(|region| (region.id(), region.start())) else { return };
        if first < u64::from(start) {
            self.map.take_head(id, u64::from(start) - first, State::Live, Fence::PASSED);
        }
        self.map.take_head(id, u64::from(granules), State::Transit, Fence::PASSED);
    }

    /// An extent whose addresses are reserved was unmapped: they are a hole. Its handle and bytes
    /// are the caller's.
    pub(super) fn leave(&mut self, number: u32) -> (Extent, u64) {
        let Resident { handle, start, granules, .. } = self.extents[number as usize];
        self.write(start, granules, 0);
        self.extents[number as usize] = Resident::vacant(handle);
        self.vacant.push(number);
        self.mapped -= u64::from(granules);
        self.unreserve(start, false);
        (handle, u64::from(granules) * self.granule_bytes)
    }

    pub(super) fn reset_peak(&mut self) {
        self.peak_mapped = self.mapped - self.gone;
    }

    /// Enters what is mapped at further addresses of an extent, or 0.
    pub(super) fn write_twin(&mut self, start: u32, granules: u32, value: u32) {
        self.at[start as usize..(start + granules) as usize].fill(value);
    }

    /// Enters what is mapped at some granules: an extent's number and one, or 0. All of them had
    /// none before, or one.
    fn write(&mut self, start: u32, granules: u32, value: u32) {
        if start < self.split {
            let granules = u64::from(granules);
            let small = &mut self.mapped_small;
            *small = if value > 0 { *small + granules } else { *small - granules };
        }
        self.at[start as usize..(start + granules) as usize].fill(value);
    }

    /// A stream's epochs have passed up to this one: its zombies of those may be unmapped.
    pub(super) fn pass(&mut self, stream: u32, epoch: u64) {
        let timeline = TimelineId(stream);
        while let Some(id) = self
            .map
            .oldest_zombie(timeline)
            .filter(|zombie| zombie.fence().sequence <= epoch)
            .map(Region::id)
        {
            self.map.set(id, State::Zombie, Fence::PASSED);
            self.map.coalesce(id);
        }
    }

    /// Where the first mapping in a range begins that is still to be unmapped.
    pub(super) fn first_left(&self, range: Range<u32>) -> Option<u32> {
        self.left.next(range.start, range.end)
    }

    /// Takes a zombie that may be unmapped, or its first so many mappings.
    pub(super) fn take_ready_zombie(&mut self, most: u64) -> Option<Left> {
        let zombie = self.map.ready_zombies().next()?;
        let (whole, start) = (zombie.id(), zombie.start() as u32);
        let (end, mappings) = self.left.first(most, start..zombie.end() as u32);
        let bytes = u64::from(end - start);
        let id = self.map.take_head(whole, bytes, State::Transit, Fence::PASSED);
        Some(Left { id, start, granules: end - start, mappings })
    }

    /// What became of a zombie that was taken.
    pub(super) fn end_zombie(&mut self, zombie: Left, unmapped: bool) {
        let Left { id, start, granules, .. } = zombie;
        if unmapped {
            self.forget_left(start..start + granules);
        }
        let state = if unmapped { State::Hole } else { State::Zombie };
        self.map.set(id, state, Fence::PASSED);
        self.map.coalesce(id);
    }
}
