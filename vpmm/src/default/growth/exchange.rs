//! Short extents given up for a long one.
//!
//! A program at leisure makes short extents, so that hardly anything keeps them from moving. One whose
//! requests never settle then moves them by dozens, again and again, and each costs what a long one does.
//! It has long ones made instead, for requests that many short ones would move for, and gives as much back in
//! short ones: what a request is served from is long from then on.

#![forbid(unsafe_code)]

use std::ops::Range;
use std::time::Duration;

use crate::default::Core;
use crate::default::memory::trim::Run;
use crate::default::space::Space;
use crate::default::space::tags::Tags;

/// Mappings that are unmapped at once so that what has moved can go back, and how long at most; what is left is
/// unmapped for the next exchange. With eight times as many a pool holds no less.
const REAPED: (u64, Duration) = (64, Duration::from_micros(1200));

impl Core {
    /// Gives the shortest extents that nobody uses back, so many granules; none of those in a request's window,
    /// which would only lack them then. Whether it did; where there are not so many nothing goes.
    ///
    /// The driver's calls count as moves: that many more that the program has had made for its requests.
    pub(super) fn exchange(&self, granules: u64, window: Range<u32>) -> bool {
        // A stream that the driver refuses something about only keeps what it freed.
        let _ = self.poll(None, true);
        let (most, within) = REAPED;
        self.reap(most, within);
        let runs = self.space.lock().take_shortest(&self.tags, granules, window);
        let mut gone = 0;
        for run in &runs {
            // What stays is there for the next request.
            if self.give_back(run).is_ok() {
                gone += run.extents.len() as u64;
            }
        }
        self.space.lock().pace.note(gone);
        gone > 0
    }
}

impl Space {
    /// Takes the shortest extents that are wholly free and of the past, so many granules; none if there are
    /// not so many outside that window.
    fn take_shortest(&mut self, tags: &Tags, granules: u64, window: Range<u32>) -> Vec<Run> {
        let granule_units = self.memory.granule_units();
        let stretches = self.stretches();
        let mut found = self.movable(&stretches);
        found.retain(|(extent, ..)| {
            extent.end() * granule_units <= window.start
                || window.end <= extent.start * granule_units
        });
        found.sort_unstable_by_key(|(extent, ..)| (extent.granules, extent.start));
        let mut there = 0;
        let enough = found.iter().position(|(extent, ..)| {
            there += u64::from(extent.granules);
            there >= granules
        });
        let Some(last) = enough else { return Vec::new() };
        found.truncate(last + 1);
        self.take_runs(tags, found, &stretches)
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::default::memory::Memory;
    use crate::default::space::Part;
    use crate::default::space::owner::Owner;
    use crate::physical::Extent;

    const GRANULES: u32 = 64;
    /// The granule of 2 MiB in units of 512 bytes.
    const UNITS: u32 = 4096;

    /// The lengths of the extents that go for so many granules, of such as lie in a row and are free, where a window
    /// begins at one granule of them and ends before another.
    fn taken(lengths: &[u32], granules: u64, window: Range<u32>) -> Vec<u32> {
        let mut memory = Memory::new(0, GRANULES, 2 << 20, 7);
        let first = memory.range(Part::Large).start;
        let mut at = first;
        for (number, granules) in lengths.iter().enumerate() {
            memory.reserve(at, *granules);
            memory.settle(at);
            memory.enter(Extent(number as u64 + 1), at, *granules);
            at += granules;
        }
        let mut space = Space::new(memory, false, true, 0);
        let Some(tags) = Tags::new(GRANULES * UNITS, first * UNITS) else {
            panic!("no memory for the tags")
        };
        space.give(&tags, first * UNITS, (at - first) * UNITS, Owner::NOBODY);
        let window = (first + window.start) * UNITS..(first + window.end) * UNITS;
        let runs = space.take_shortest(&tags, granules, window);
        let numbers = runs.iter().flat_map(|run| &run.extents);
        let mut taken: Vec<u32> =
            numbers.map(|number| space.memory.extent(*number).granules).collect();
        taken.sort_unstable();
        taken
    }

    #[test]
    fn the_shortest_go_and_no_more_of_them_than_it_takes() {
        let lengths = [1, 4, 2, 1, 3, 1];
        assert_eq!(taken(&lengths, 2, 0..0), [1, 1]);
        assert_eq!(taken(&lengths, 3, 0..0), [1, 1, 1]);
        assert_eq!(taken(&lengths, 4, 0..0), [1, 1, 1, 2]);
        assert_eq!(taken(&lengths, 12, 0..0), [1, 1, 1, 2, 3, 4]);
        assert_eq!(taken(&lengths, 13, 0..0), []);
    }

    #[test]
    fn nothing_of_the_window_goes() {
        // From the midst of the second to the end of the fourth.
        let lengths = [1, 4, 2, 1, 3, 1];
        assert_eq!(taken(&lengths, 2, 3..8), [1, 1]);
        assert_eq!(taken(&lengths, 5, 3..8), [1, 1, 3]);
        assert_eq!(taken(&lengths, 6, 3..8), []);
    }
}
