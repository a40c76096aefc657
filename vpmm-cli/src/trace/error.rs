//! What can be wrong with a trace.

use std::fmt;
use std::io;

/// A trace that cannot be read.
#[derive(Debug, thiserror::Error)]
#[non_exhaustive]
pub enum TraceError {
    /// The file could not be opened.
    #[error("{file}: cannot open: {source}")]
    Open {
        /// The path as given.
        file: String,
        /// What the system answered.
        source: io::Error,
    },
    /// Reading stopped on the way: the file system's answer, or broken gzip.
    #[error("{file}: line {line}: cannot read on: {source}")]
    Read {
        /// The path as given.
        file: String,
        /// The line being read, from 1.
        line: u64,
        /// What went wrong.
        source: io::Error,
    },
    /// There is not one row in it.
    #[error(
        "{file}: no rows: a trace begins with a header such as Thread,Time,Action,Pointer,Size,Stream"
    )]
    Empty {
        /// The path as given.
        file: String,
    },
    /// The header does not name columns that are needed.
    #[error("{file}: line {line}: the header names no {}, but {named}", missing.join(" and no "))]
    NoColumn {
        /// The path as given.
        file: String,
        /// The header's line, from 1.
        line: u64,
        /// The names that were looked for.
        missing: Vec<&'static str>,
        /// The first names that there are.
        named: Box<str>,
    },
    /// A row is malformed.
    #[error("{file}: line {line}, {column}: {problem}")]
    Row {
        /// The path as given.
        file: String,
        /// The line, from 1.
        line: u64,
        /// The column at fault.
        column: Column,
        /// What is wrong there.
        problem: Problem,
    },
}

/// A column of a row: its place and its name.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Column {
    /// Its place, from 1.
    pub number: usize,
    /// Its name in the header.
    pub name: &'static str,
}

impl fmt::Display for Column {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "column {} ({})", self.number, self.name)
    }
}

/// What is wrong in a column.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum Problem {
    /// The first row is neither a header nor a row in RMM's own order.
    #[error(
        "{0:?} is no action, and the first row is no header either, with Action, Pointer and Size"
    )]
    NoHeader(Box<str>),
    /// The first row has too few fields to be either.
    #[error(
        "{0:?} is neither a header, with Action, Pointer and Size, nor a row of RMM's log, with commas between"
    )]
    NoTrace(Box<str>),
    /// The row ends before this column.
    #[error("the row ends before this column")]
    Missing,
    /// Neither `allocate`, nor `free`, nor `allocate failure`.
    #[error("{0:?} is not allocate, free or allocate failure")]
    Action(Box<str>),
    /// Not an unsigned decimal or `0x` number that fits 64 bits.
    #[error("{0:?} is not an unsigned number of at most 64 bits")]
    Number(Box<str>),
    /// Not a `0x` address or `(nil)`.
    #[error("{0:?} is not a pointer: expected 0x and hexadecimal digits, or (nil)")]
    Pointer(Box<str>),
    /// An allocation of some bytes that says it lies at null.
    #[error("an allocation of {0} bytes cannot lie at null")]
    NullAllocation(u64),
    /// More allocations, streams or threads than a replay can number.
    #[error("more than {} allocations", u32::MAX)]
    TooManyAllocations,
    /// A line so long that this is no trace.
    #[error("the line is longer than {0} bytes: this is no trace")]
    LongLine(usize),
    /// A zero byte, of which a log has some at its end only.
    #[error("zero bytes, and others behind them: this is no trace, or a damaged one")]
    Zeroes,
    /// So many zero bytes that their end is not waited for.
    #[error("more than {0} zero bytes: this is no trace")]
    EndlessZeroes(u64),
    /// A carriage return that is not at the line's end.
    #[error("a carriage return within the line: lines end with a line feed, or with both")]
    CarriageReturn,
}
