//! The history of one extent's bytes, as runs of bytes with the same history.

use std::collections::BTreeMap;
use std::ops::Range;

use super::{AccessKind, Clock, Work};

/// Runs of bytes by their start. They do not overlap, and none is empty; neighbours with the
/// same history are one run. Bytes under no run were never used.
#[derive(Clone, Debug, Default)]
pub(super) struct Cells {
    by_start: BTreeMap<u64, Cell>,
}

/// A run of bytes that were all used alike.
#[derive(Clone, Debug)]
struct Cell {
    end: u64,
    history: History,
}

/// What a later use has to come after.
#[derive(Clone, Debug, Default, PartialEq)]
struct History {
    write: Option<Work>,
    /// The reads since that write of which none is known to come after another: what comes
    /// after these comes after all. At most one per stream.
    reads: Vec<Work>,
    /// That write gave the bytes back: they are nobody's until they are taken.
    gone: bool,
}

impl History {
    /// The works that a use of this kind conflicts with.
    fn conflicting(&self, kind: AccessKind) -> impl Iterator<Item = &Work> {
        let reads = match kind {
            AccessKind::Read => &[][..],
            AccessKind::Write => &self.reads,
        };
        self.write.iter().chain(reads)
    }

    fn add_read(&mut self, read: &Work, clock: &Clock) {
        self.reads.retain(|earlier| clock.get(earlier.stream) < earlier.tick);
        self.reads.push(read.clone());
    }
}

impl Cells {
    pub(super) fn len(&self) -> usize {
        self.by_start.len()
    }

    /// Calls `report` for every work that used bytes of `range`, conflicts with a use of this
    /// kind and is not before `clock`, with the bytes: ascending.
    pub(super) fn conflicts(
        &self,
        range: &Range<u64>,
        kind: AccessKind,
        clock: &Clock,
        mut report: impl FnMut(Range<u64>, &Work),
    ) {
        if range.is_empty() {
            return;
        }
        // The run that holds `range.start` may begin before it.
        let from = self
            .by_start
            .range(..=range.start)
            .next_back()
            .filter(|(_, cell)| cell.end > range.start)
            .map_or(range.start, |(&start, _)| start);
        for (&start, cell) in self.by_start.range(from..range.end) {
            let bytes = start.max(range.start)..cell.end.min(range.end);
            for work in cell.history.conflicting(kind) {
                if clock.get(work.stream) < work.tick {
                    report(bytes.clone(), work);
                }
            }
        }
    }

    /// What gave back bytes of `range` that nobody has taken since.
    pub(super) fn given_back(&self, range: &Range<u64>) -> Option<&Work> {
        let cells = self.by_start.range(..range.end).rev().map(|(_, cell)| cell);
        let mut cells = cells.take_while(|cell| cell.end > range.start);
        cells.find(|cell| cell.history.gone).and_then(|cell| cell.history.write.as_ref())
    }

    /// Remembers a use of `range` by `work`, which ran with `clock`. A write after which the bytes
    /// are nobody's has them `gone`.
    pub(super) fn record(&mut self, range: Range<u64>, work: Work, gone: bool, clock: &Clock) {
        self.split_at(range.start);
        self.split_at(range.end);
        match work.kind {
            AccessKind::Write => self.write(&range, work, gone),
            AccessKind::Read => self.read(&range, &work, clock),
        }
        self.join_within(&range);
    }

    /// Forgets the uses of `range`.
    pub(super) fn forget(&mut self, range: &Range<u64>) {
        self.split_at(range.start);
        self.split_at(range.end);
        while let Some((&start, _)) = self.by_start.range(range.clone()).next() {
            self.by_start.remove(&start);
        }
    }

    /// Makes `at` a border between runs, if it lies inside one.
    fn split_at(&mut self, at: u64) {
        let Some((_, cell)) = self.by_start.range_mut(..at).next_back() else { return };
        if cell.end > at {
            let upper = Cell { end: cell.end, history: cell.history.clone() };
            cell.end = at;
            self.by_start.insert(at, upper);
        }
    }

    fn write(&mut self, range: &Range<u64>, work: Work, gone: bool) {
        while let Some((&start, _)) = self.by_start.range(range.clone()).next() {
            self.by_start.remove(&start);
        }
        let history = History { write: Some(work), reads: Vec::new(), gone };
        self.by_start.insert(range.start, Cell { end: range.end, history });
    }

    fn read(&mut self, range: &Range<u64>, work: &Work, clock: &Clock) {
        let mut gaps = Vec::new();
        let mut at = range.start;
        for (&start, cell) in self.by_start.range_mut(range.clone()) {
            if at < start {
                gaps.push(at..start);
            }
            at = cell.end;
            cell.history.add_read(work, clock);
        }
        if at < range.end {
            gaps.push(at..range.end);
        }
        for gap in gaps {
            let history = History { write: None, reads: vec![work.clone()], gone: false };
            self.by_start.insert(gap.start, Cell { end: gap.end, history });
        }
    }

    /// Makes neighbours with the same history one run, in `range` and across its two borders.
    fn join_within(&mut self, range: &Range<u64>) {
        let from = self.by_start.range(..range.start).next_back().map_or(range.start, |(&s, _)| s);
        let mut at = from;
        while at < range.end {
            let Some((&start, cell)) = self.by_start.range(at..).next() else { return };
            let end = cell.end;
            match self.by_start.get(&end) {
                Some(next) if next.history == cell.history => {
                    let next_end = next.end;
                    self.by_start.remove(&end);
                    if let Some(cell) = self.by_start.get_mut(&start) {
                        cell.end = next_end;
                    }
                    at = start;
                }
                _ => at = end,
            }
        }
    }

    /// The runs in ascending order, checked for order, emptiness and needless borders.
    #[cfg(test)]
    pub(super) fn validate(&self) {
        let mut previous: Option<(u64, &History)> = None;
        for (&start, cell) in &self.by_start {
            assert!(start < cell.end, "a run is empty");
            if let Some((end, history)) = previous {
                assert!(end <= start, "runs overlap at {start:#x}");
                assert!(
                    end < start || *history != cell.history,
                    "two runs with one history at {start:#x}"
                );
            }
            previous = Some((cell.end, &cell.history));
        }
    }
}
