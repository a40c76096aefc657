//! From rows with addresses to operations on slots.
//!
//! An address names an allocation only from its `allocate` row to its `free`
//! row: afterwards the same address is another allocation. The compiler keeps
//! the map of that moment, and gives every allocation a slot of its own.

use std::collections::HashMap;
use std::hash::Hash;
use std::time::Duration;

use super::error::Problem;
use super::row::{DAY, Recorded, Row, StreamKey};
use super::{Action, Allocation, Operation, Trace};

/// A live address of no bytes: nothing to replay, but no unknown pointer either.
const NO_SLOT: u32 = u32::MAX;

#[derive(Default)]
pub(super) struct Compiler {
    trace: Trace,
    live: HashMap<u64, u32>,
    streams: HashMap<StreamKey, u32>,
    threads: HashMap<u64, u32>,
    clock: Clock,
}

impl Compiler {
    /// Takes the row at `line`.
    pub(super) fn push(&mut self, row: Row, line: u64) -> Result<(), Problem> {
        match row.time {
            Some(time) => self.clock.turn_to(time),
            None => _ = self.trace.untimed_line.get_or_insert(line),
        }
        match row.recorded {
            Recorded::AllocateFailure => self.trace.oddities.recorded_failures += 1,
            Recorded::Allocate => self.allocate(row, line)?,
            Recorded::Free => self.free(row)?,
        }
        Ok(())
    }

    fn allocate(&mut self, row: Row, line: u64) -> Result<(), Problem> {
        if row.pointer == 0 && row.bytes > 0 {
            return Err(Problem::NullAllocation(row.bytes));
        }
        if row.pointer != 0 {
            self.free_unrecorded(row)?;
        }
        if row.bytes == 0 {
            self.trace.oddities.empty_rows += 1;
            if row.pointer != 0 {
                self.live.insert(row.pointer, NO_SLOT);
            }
            return Ok(());
        }
        let slot = u32::try_from(self.trace.allocations.len())
            .ok()
            .filter(|&slot| slot != NO_SLOT)
            .ok_or(Problem::TooManyAllocations)?;
        let stream = self.stream(row.stream)?;
        self.trace.allocations.push(Allocation { bytes: row.bytes, line, stream });
        self.live.insert(row.pointer, slot);
        self.operation(Action::Allocate, slot, stream, row.thread)
    }

    /// The program cannot hold one address twice, so the free of the older
    /// allocation is missing from the trace: it is put in here.
    fn free_unrecorded(&mut self, row: Row) -> Result<(), Problem> {
        if let Some(older) = self.live.remove(&row.pointer) {
            self.trace.oddities.missing_frees += 1;
            if older != NO_SLOT {
                let stream = self.trace.allocations[older as usize].stream;
                self.operation(Action::Free, older, stream, row.thread)?;
            }
        }
        Ok(())
    }

    fn free(&mut self, row: Row) -> Result<(), Problem> {
        if row.pointer == 0 {
            self.trace.oddities.empty_rows += 1;
            return Ok(());
        }
        match self.live.remove(&row.pointer) {
            None => self.trace.oddities.unknown_frees += 1,
            Some(NO_SLOT) => self.trace.oddities.empty_rows += 1,
            Some(slot) => {
                let stream = self.stream(row.stream)?;
                self.operation(Action::Free, slot, stream, row.thread)?;
            }
        }
        Ok(())
    }

    fn operation(
        &mut self,
        action: Action,
        slot: u32,
        stream: u32,
        thread: u64,
    ) -> Result<(), Problem> {
        let thread = index(&mut self.threads, thread)?;
        self.trace.operations.push(Operation { action, slot, stream, thread });
        self.trace.times.push(self.clock.now);
        Ok(())
    }

    fn stream(&mut self, key: StreamKey) -> Result<u32, Problem> {
        index(&mut self.streams, key)
    }

    /// The finished trace, with its peak and what it leaves allocated.
    pub(super) fn finish(self, name: &str) -> Trace {
        let Self { mut trace, live, streams, threads, .. } = self;
        trace.name = name.to_owned();
        if trace.untimed_line.is_some() {
            trace.times = Vec::new();
        }
        trace.leaked = live.into_values().filter(|&slot| slot != NO_SLOT).collect();
        trace.leaked.sort_unstable();
        // Each map holds at most one entry per allocation or free, counted in u32 by `index`.
        trace.streams = streams.len() as u32;
        trace.threads = threads.len() as u32;
        trace.peak_live_bytes = trace.peak_live_bytes_of(|_| true);
        trace
    }
}

/// How far back the time of a row may be that is only late, since rows of several threads may be out of
/// order, or since the clock was set back. Further back it is another day's.
const LATE: Duration = Duration::from_secs(2 * 3600);

/// The time since the first row.
#[derive(Default)]
struct Clock {
    /// Of the latest row.
    time_of_day: Option<Duration>,
    now: Duration,
}

impl Clock {
    fn turn_to(&mut self, time: Duration) {
        let last = *self.time_of_day.get_or_insert(time);
        let since = time + DAY - last;
        let passed = since.checked_sub(DAY).unwrap_or(since);
        if passed <= DAY - LATE {
            self.now += passed;
            self.time_of_day = Some(time);
        }
    }
}

/// The number of `key`, in the order in which keys appear.
fn index<K: Hash + Eq>(known: &mut HashMap<K, u32>, key: K) -> Result<u32, Problem> {
    let next = u32::try_from(known.len()).map_err(|_| Problem::TooManyAllocations)?;
    Ok(*known.entry(key).or_insert(next))
}
