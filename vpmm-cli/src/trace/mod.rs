//! Allocation traces: what a program asked of its allocator, row by row.
//!
//! ```text
//! file or pipe ─ source ─▶ lines ─ fields ─▶ row ─ compile ─▶ Trace
//!               (gz too)        (CSV)     (columns by name)  (slots)
//! ```
//!
//! A [`Trace`] names allocations by slot, not by the address that they had
//! when the trace was recorded: a replay gets addresses of its own.

mod compile;
mod error;
mod fields;
mod row;
mod source;

pub use error::{Problem, TraceError};

use compile::Compiler;
use fields::Fields;
use row::{Columns, NoColumns};
use source::Lines;
use std::io::Read;
use std::time::Duration;

/// One allocation of the trace. Its index in [`Trace::allocations`] is its slot.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Allocation {
    /// Bytes asked for; never 0.
    pub bytes: u64,
    /// The line of the file that made it, from 1.
    pub line: u64,
    /// The stream it was made on: an index below [`Trace::streams`].
    pub stream: u32,
}

/// What an [`Operation`] does.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Action {
    /// Makes the allocation of the operation's slot.
    Allocate,
    /// Frees it.
    Free,
}

/// One step of a replay: one call of the allocator.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Operation {
    /// Allocate or free.
    pub action: Action,
    /// Which allocation: an index into [`Trace::allocations`].
    pub slot: u32,
    /// The stream of the call: an index below [`Trace::streams`].
    pub stream: u32,
    /// The thread of the call: an index below [`Trace::threads`].
    pub thread: u32,
}

/// Rows that a replay leaves out or could not take as they stand, counted.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Oddities {
    /// Frees of a pointer that no earlier row had allocated: left out.
    pub unknown_frees: u64,
    /// Allocations at an address that was still allocated, so that a free is
    /// missing: the older allocation is freed just before.
    pub missing_frees: u64,
    /// Allocations that had failed when the trace was recorded: left out.
    pub recorded_failures: u64,
    /// Allocations of no bytes and frees of null: left out.
    pub empty_rows: u64,
}

/// A trace, compiled for replay.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct Trace {
    /// The path as it was given, `-` for standard input.
    pub name: String,
    /// Every allocation, in the order of the file.
    pub allocations: Vec<Allocation>,
    /// Every call, in the order of the file.
    pub operations: Vec<Operation>,
    /// When each call was made, since the first; never before the one before it. Empty where a row has no
    /// time that can be read.
    pub times: Vec<Duration>,
    /// The first line whose row has no time that can be read.
    pub untimed_line: Option<u64>,
    /// Slots that the trace never frees, in the order of allocation.
    pub leaked: Vec<u32>,
    /// How many different streams the operations name.
    pub streams: u32,
    /// How many different threads the operations name.
    pub threads: u32,
    /// The largest sum of bytes that were allocated at one time.
    pub peak_live_bytes: u64,
    /// What was left out or mended.
    pub oddities: Oddities,
}

impl Trace {
    /// Reads the trace at `path`, or standard input where it is `-`. Gzip is
    /// recognised by its first bytes, not by the name.
    ///
    /// # Errors
    /// [`TraceError`]: the file cannot be read, or a row is malformed.
    pub fn open(path: &str) -> Result<Self, TraceError> {
        Self::open_through(path, |source, _| source)
    }

    /// The same, read through `watch`: it is given what the bytes come from, and how many there are where that is
    /// a file.
    ///
    /// # Errors
    /// As [`Trace::open`].
    pub fn open_through<R: Read>(
        path: &str,
        watch: impl FnOnce(Box<dyn Read>, Option<u64>) -> R,
    ) -> Result<Self, TraceError> {
        let (source, bytes) = source::open(path)
            .map_err(|source| TraceError::Open { file: path.to_owned(), source })?;
        Self::read(path, watch(source, bytes))
    }

    /// Reads a trace from bytes, plain or gzip; `name` is what messages call it.
    ///
    /// # Errors
    /// As [`Trace::open`].
    pub fn read(name: &str, bytes: impl Read) -> Result<Self, TraceError> {
        let mut lines = Lines::new(name, bytes)?;
        let mut fields = Fields::default();
        let mut columns: Option<Columns> = None;
        let mut compiler = Compiler::default();
        while let Some((number, line)) = lines.next_line()? {
            fields.split(line);
            if fields.is_blank() {
                continue;
            }
            let fault = |(column, problem)| TraceError::Row {
                file: name.to_owned(),
                line: number,
                column,
                problem,
            };
            let known = match &columns {
                Some(known) => known,
                None => {
                    let first = Columns::of_first_row(&fields).map_err(|why| match why {
                        NoColumns::NoHeader(why) => fault(why),
                        NoColumns::Unnamed { missing, named } => TraceError::NoColumn {
                            file: name.to_owned(),
                            line: number,
                            missing,
                            named,
                        },
                    });
                    let (found, is_header) = first?;
                    let known = columns.insert(found);
                    if is_header {
                        continue;
                    }
                    known
                }
            };
            let row = known.row(&fields).map_err(fault)?;
            compiler.push(row, number).map_err(|problem| fault((known.pointer(), problem)))?;
        }
        if columns.is_none() {
            return Err(TraceError::Empty { file: name.to_owned() });
        }
        Ok(compiler.finish(name))
    }

    /// The largest sum of live bytes when only the operations that `done`
    /// accepts happened: what an interrupted replay reached. `done` sees every
    /// operation once, in the order of the trace.
    pub fn peak_live_bytes_of(&self, mut done: impl FnMut(&Operation) -> bool) -> u64 {
        let mut live = 0_u128;
        let mut peak = 0_u128;
        for operation in &self.operations {
            if !done(operation) {
                continue;
            }
            let bytes = u128::from(self.allocations[operation.slot as usize].bytes);
            match operation.action {
                Action::Allocate => {
                    live += bytes;
                    peak = peak.max(live);
                }
                Action::Free => live = live.saturating_sub(bytes),
            }
        }
        u64::try_from(peak).unwrap_or(u64::MAX)
    }
}

#[cfg(test)]
mod tests;
