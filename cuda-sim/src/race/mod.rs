//! The race detector: finds two uses of the same physical bytes that nothing orders.
//!
//! Streams run side by side; only events, waits and the host put their work in order. The
//! simulator gives each stream a vector clock ([`Clock`]), ticks it for each piece of work and
//! joins clocks where one stream waits for another. The [`Detector`] remembers, for every
//! range of physical bytes, the last write and the reads since, and compares a new use with
//! them:
//!
//! ```text
//!  physical 7   0        2M            8M                 16M
//!               | write A:4 | write B:1   | write B:1         |   last write, stream:tick
//!               |           | reads C:2   |                   |   reads since
//! ```
//!
//! Work that runs with clock `C` comes after the epoch `(s, t)` exactly if `C.get(s) >= t`.
//! A conflict (same bytes, at least one write) with an epoch that is not before is a [`Race`].
//! Bytes are named by physical extent, not by address, so that aliases cannot hide a race.
//!
//! As in the FastTrack algorithm only the last write is kept: the first race on any byte is
//! always found, and nothing is reported that is ordered. State is one cell per run of bytes
//! with the same history, so its size follows the number of distinct live ranges and not the
//! number of bytes or of uses.

mod cells;
mod clock;

use std::fmt;
use std::ops::Range;
use std::sync::Arc;

use rustc_hash::{FxHashMap, FxHashSet};

use cells::Cells;
pub use clock::Clock;

/// A timeline of work that runs in order: a stream, never by its handle, because handles are used
/// again. One that is created when the host has seen all work of an earlier one complete may go on in
/// its timeline, which is in order then, too.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct StreamKey(pub u64);

impl StreamKey {
    /// The host thread, as the second party of a race found by [`Detector::unordered_with_host`].
    pub const HOST: Self = Self(u64::MAX);
}

impl fmt::Display for StreamKey {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        if *self == Self::HOST { f.write_str("the host") } else { write!(f, "stream {}", self.0) }
    }
}

/// What owns the bytes that are watched: one physical extent, never used again for another.
///
/// A detector may as well be keyed by mappings; it then answers whether work that went through
/// one address is over, which is what unmapping that address needs.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct PhysicalId(pub u64);

/// How bytes are used.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum AccessKind {
    /// The bytes are only looked at. Reads need no order among themselves.
    Read,
    /// The bytes change. A write needs an order with every other use.
    Write,
}

impl fmt::Display for AccessKind {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Read => "read",
            Self::Write => "write",
        })
    }
}

/// One use of a range of physical bytes by one piece of work.
#[derive(Clone, Debug)]
pub struct Access<'a> {
    /// The extent that the bytes belong to.
    pub physical: PhysicalId,
    /// The bytes, as offsets in the extent. An empty range uses nothing.
    pub range: Range<u64>,
    /// Whether they are read or written.
    pub kind: AccessKind,
    /// The stream that the work runs on.
    pub stream: StreamKey,
    /// What the work comes after. It must have been ticked for `stream` before the work
    /// (see [`Clock::tick`]): an epoch of tick 0 counts as before everything.
    pub clock: &'a Clock,
    /// What the work is, for messages: a kernel's or a call's name.
    pub what: &'a str,
}

/// One side of a [`Race`].
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Work {
    /// The stream that the work ran on.
    pub stream: StreamKey,
    /// The work's place on its stream.
    pub tick: u64,
    /// Whether it read or wrote the bytes.
    pub kind: AccessKind,
    /// What it was.
    pub what: Arc<str>,
}

impl fmt::Display for Work {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the {} by `{}` on {}", self.kind, self.what, self.stream)?;
        if self.stream == StreamKey::HOST { Ok(()) } else { write!(f, " (tick {})", self.tick) }
    }
}

/// Two uses of the same bytes, at least one of them a write, with no order between them.
#[derive(Clone, Debug, PartialEq, Eq, Hash)]
pub struct Race {
    /// The use that ran first in this run; in another run it may come second.
    pub first: Work,
    /// The use that found it.
    pub second: Work,
    /// The extent that both used.
    pub physical: PhysicalId,
    /// The bytes that both used: offsets in the extent, one contiguous run.
    pub range: Range<u64>,
}

impl fmt::Display for Race {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(
            f,
            "race on bytes {:#x}..{:#x} of physical extent {}: nothing orders {} and {}",
            self.range.start, self.range.end, self.physical.0, self.first, self.second
        )
    }
}

/// Remembers who used which physical bytes, and finds uses that nothing orders.
#[derive(Clone, Debug, Default)]
pub struct Detector {
    extents: FxHashMap<PhysicalId, Cells>,
    names: Names,
}

impl Detector {
    /// A detector that has seen nothing.
    pub fn new() -> Self {
        Self::default()
    }

    /// Records a use and returns every earlier one that it conflicts with and does not come
    /// after, one entry per earlier work and contiguous run of bytes, in ascending order of
    /// bytes. Empty means that all is in order.
    ///
    /// Costs O(log n + k) for k remembered ranges under the access, whatever their length.
    pub fn access(&mut self, access: Access<'_>) -> Vec<Race> {
        self.note(access, false)
    }

    /// As [`Self::access`] with a write, after which the bytes are nobody's until the next write:
    /// the free of an allocation.
    pub fn give_back(&mut self, access: Access<'_>) -> Vec<Race> {
        self.note(Access { kind: AccessKind::Write, ..access }, true)
    }

    /// The free that a use of `range` with this clock comes after, if nobody has the bytes.
    pub fn given_back(
        &self,
        physical: PhysicalId,
        range: &Range<u64>,
        clock: &Clock,
    ) -> Option<&Work> {
        let free = self.extents.get(&physical)?.given_back(range)?;
        (clock.get(free.stream) >= free.tick).then_some(free)
    }

    /// Forgets the uses of some bytes of an extent: whoever has them now is after all of these.
    pub fn forget_range(&mut self, physical: PhysicalId, range: &Range<u64>) {
        if let Some(cells) = self.extents.get_mut(&physical) {
            cells.forget(range);
        }
    }

    fn note(&mut self, access: Access<'_>, gone: bool) -> Vec<Race> {
        if access.range.is_empty() {
            return Vec::new();
        }
        let work = Work {
            stream: access.stream,
            tick: access.clock.get(access.stream),
            kind: access.kind,
            what: self.names.intern(access.what),
        };
        let cells = self.extents.entry(access.physical).or_default();
        let mut races = Races::new(access.physical, work.clone());
        cells.conflicts(&access.range, access.kind, access.clock, |range, first| {
            races.add(range, first);
        });
        cells.record(access.range, work, gone, access.clock);
        races.found
    }

    /// Forgets an extent: its memory is gone, or its uses are all known to be over.
    pub fn forget(&mut self, physical: PhysicalId) {
        self.extents.remove(&physical);
    }

    /// The first use of any byte of `range`, read or write, that a host with this clock has not
    /// seen complete: what must not exist when the host takes the bytes away.
    pub fn unordered_with_host(
        &self,
        physical: PhysicalId,
        range: Range<u64>,
        host: &Clock,
    ) -> Option<Race> {
        let work = Work {
            stream: StreamKey::HOST,
            tick: host.get(StreamKey::HOST),
            kind: AccessKind::Write,
            what: Arc::from("host call"),
        };
        let mut races = Races::new(physical, work);
        self.extents.get(&physical)?.conflicts(&range, AccessKind::Write, host, |range, first| {
            races.add(range, first);
        });
        races.found.into_iter().next()
    }

    /// How many runs of bytes are remembered, over all extents: what the detector's memory
    /// use is in proportion to.
    pub fn cells(&self) -> usize {
        self.extents.values().map(Cells::len).sum()
    }
}

/// Collects races, joining runs of bytes that touch and have the same first work.
struct Races {
    physical: PhysicalId,
    second: Work,
    found: Vec<Race>,
}

impl Races {
    fn new(physical: PhysicalId, second: Work) -> Self {
        Self { physical, second, found: Vec::new() }
    }

    fn add(&mut self, range: Range<u64>, first: &Work) {
        let same = |race: &&mut Race| race.range.end == range.start && race.first == *first;
        // The works of one cell come together, so that the run to extend is rarely the last
        // entry, but it is always among those that reach up to this range.
        if let Some(race) = self.found.iter_mut().rev().take(64).find(same) {
            race.range.end = range.end;
            return;
        }
        self.found.push(Race {
            first: first.clone(),
            second: self.second.clone(),
            physical: self.physical,
            range,
        });
    }
}

/// One shared copy of every name in use.
#[derive(Clone, Debug, Default)]
struct Names {
    known: FxHashSet<Arc<str>>,
    /// When the set reaches this size, names that no cell holds any more are dropped.
    sweep_at: usize,
}

impl Names {
    const FIRST_SWEEP: usize = 1024;

    fn intern(&mut self, name: &str) -> Arc<str> {
        if let Some(known) = self.known.get(name) {
            return known.clone();
        }
        if self.known.len() >= self.sweep_at.max(Self::FIRST_SWEEP) {
            self.known.retain(|name| Arc::strong_count(name) > 1);
            self.sweep_at = self.known.len() * 2;
        }
        let name: Arc<str> = name.into();
        self.known.insert(name.clone());
        name
    }
}

#[cfg(test)]
mod tests;
