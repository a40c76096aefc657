//! Columns by name, and what one row says.
//!
//! The header may name the columns in any order and any case, and may name
//! others, which are not read: the fuller logs have more. A file without a
//! header is taken to be in RMM's own order.

use std::time::Duration;

use super::error::{Column, Problem};
use super::fields::Fields;

/// What a row records.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Recorded {
    Allocate,
    Free,
    AllocateFailure,
}

/// The stream that a row names. Rows with equal keys ran on one stream.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub(super) enum StreamKey {
    /// The legacy default stream: `0`, `(nil)`, or its handle `0x1`.
    Legacy,
    /// The per-thread default stream, handle `0x2`, of this thread.
    PerThread(u64),
    /// A stream by number, as recorders that know no handles write it.
    Number(u64),
    /// A stream by handle.
    Handle(u64),
}

/// One row, read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Row {
    pub(super) recorded: Recorded,
    pub(super) pointer: u64,
    pub(super) bytes: u64,
    pub(super) thread: u64,
    pub(super) stream: StreamKey,
    /// The time of day, where the row has one that can be read.
    pub(super) time: Option<Duration>,
}

/// No time of day is later.
pub(super) const DAY: Duration = Duration::from_secs(24 * 3600);

const THREAD: &str = "Thread";
const TIME: &str = "Time";
const ACTION: &str = "Action";
const POINTER: &str = "Pointer";
const SIZE: &str = "Size";
const STREAM: &str = "Stream";

/// What is called so where no one column is at fault.
pub(super) const WHOLE_ROW: &str = "the whole row";

/// RMM's order: Thread, Time, Action, Pointer, Size, Stream.
const RMM_ORDER: Columns = Columns {
    action: Column { number: 3, name: ACTION },
    pointer: Column { number: 4, name: POINTER },
    size: Column { number: 5, name: SIZE },
    thread: Some(Column { number: 1, name: THREAD }),
    time: Some(Column { number: 2, name: TIME }),
    stream: Some(Column { number: 6, name: STREAM }),
};

type Fault = (Column, Problem);

/// Why a first row tells nothing of columns.
#[derive(Clone, Debug, PartialEq, Eq)]
pub(super) enum NoColumns {
    /// It is a header, without these.
    Unnamed { missing: Vec<&'static str>, named: Box<str> },
    /// It is none, nor a row in RMM's order.
    NoHeader(Fault),
}

/// Where each column is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Columns {
    action: Column,
    pointer: Column,
    size: Column,
    thread: Option<Column>,
    time: Option<Column>,
    stream: Option<Column>,
}

impl Columns {
    /// Takes the first row as a header, or, where it is a row in RMM's order,
    /// as that. The flag says whether it was a header.
    pub(super) fn of_first_row(fields: &Fields) -> Result<(Self, bool), NoColumns> {
        let find = |name: &'static str| {
            (0..fields.count())
                .find(|&i| fields.get(i).is_some_and(|f| f.eq_ignore_ascii_case(name.as_bytes())))
                .map(|i| Column { number: i + 1, name })
        };
        // A misspelt header is told from a first row by any one name it got right.
        let names = [THREAD, TIME, ACTION, POINTER, SIZE, STREAM];
        if names.into_iter().any(|name| find(name).is_some()) {
            let needed @ [action, pointer, size] =
                [ACTION, POINTER, SIZE].map(|name| (name, find(name)));
            let (Some(action), Some(pointer), Some(size)) = (action.1, pointer.1, size.1) else {
                let missing = needed.into_iter().filter(|(_, found)| found.is_none());
                let missing = missing.map(|(name, _)| name).collect();
                return Err(NoColumns::Unnamed { missing, named: names_of(fields) });
            };
            let (thread, time, stream) = (find(THREAD), find(TIME), find(STREAM));
            return Ok((Self { action, pointer, size, thread, time, stream }, true));
        }
        match RMM_ORDER.row(fields) {
            Err((column, Problem::Action(text))) => {
                Err(NoColumns::NoHeader((column, Problem::NoHeader(text))))
            }
            Err((column, Problem::Missing)) if column == RMM_ORDER.action => {
                let whole = Column { number: 1, name: WHOLE_ROW };
                Err(NoColumns::NoHeader((whole, Problem::NoTrace(names_of(fields)))))
            }
            // Any other fault is the row's own: RMM's order, with a mistake in it.
            _ => Ok((RMM_ORDER, false)),
        }
    }

    /// The column of the pointer, for faults that are found later.
    pub(super) fn pointer(&self) -> Column {
        self.pointer
    }

    /// Reads one row.
    pub(super) fn row(&self, fields: &Fields) -> Result<Row, Fault> {
        let field =
            |column: Column| fields.get(column.number - 1).ok_or((column, Problem::Missing));
        let recorded = match field(self.action)? {
            b"allocate" => Recorded::Allocate,
            b"free" => Recorded::Free,
            b"allocate failure" => Recorded::AllocateFailure,
            other => return Err((self.action, Problem::Action(quote(other)))),
        };
        let pointer = {
            let text = field(self.pointer)?;
            pointer(text).ok_or_else(|| (self.pointer, Problem::Pointer(quote(text))))?
        };
        let bytes = match (recorded, field(self.size)?) {
            // Some recorders do not know the size at a free; no replay needs it.
            (Recorded::Free, b"") => 0,
            (_, text) => number_in(self.size, text)?,
        };
        let thread = match self.thread {
            Some(column) => number_in(column, field(column)?)?,
            None => 0,
        };
        let stream = match self.stream {
            Some(column) => {
                let text = field(column)?;
                stream(text, thread).ok_or_else(|| (column, Problem::Number(quote(text))))?
            }
            None => StreamKey::Legacy,
        };
        let time = self.time.and_then(|column| time(fields.get(column.number - 1)?));
        Ok(Row { recorded, pointer, bytes, thread, stream, time })
    }
}

fn number_in(column: Column, text: &[u8]) -> Result<u64, Fault> {
    number(text).ok_or_else(|| (column, Problem::Number(quote(text))))
}

/// Decimal, or hexadecimal after `0x`. No sign, no blanks, at most 64 bits.
fn number(text: &[u8]) -> Option<u64> {
    match hexadecimal(text) {
        Some(digits) => from_digits(digits, 16),
        None => from_digits(text, 10),
    }
}

fn pointer(text: &[u8]) -> Option<u64> {
    match text {
        b"(nil)" | b"0" => Some(0),
        _ => from_digits(hexadecimal(text)?, 16),
    }
}

fn stream(text: &[u8], thread: u64) -> Option<StreamKey> {
    if text == b"(nil)" {
        return Some(StreamKey::Legacy);
    }
    let value = number(text)?;
    Some(match (value, hexadecimal(text).is_some()) {
        (0, _) | (1, true) => StreamKey::Legacy,
        (2, true) => StreamKey::PerThread(thread),
        (_, true) => StreamKey::Handle(value),
        (_, false) => StreamKey::Number(value),
    })
}

/// Hours, minutes and seconds with or without a fraction, as RMM writes the time of day.
fn time(text: &[u8]) -> Option<Duration> {
    let mut parts = str::from_utf8(text).ok()?.splitn(3, ':');
    let (hours, minutes) = (parts.next()?, parts.next()?);
    let whole =
        [(hours, 3600), (minutes, 60)].into_iter().try_fold(0_u64, |sum, (part, each)| {
            from_digits(part.as_bytes(), 10)?.checked_mul(each)?.checked_add(sum)
        })?;
    let seconds: f64 = parts.next()?.parse().ok()?;
    let time =
        Duration::from_secs(whole).checked_add(Duration::try_from_secs_f64(seconds).ok()?)?;
    (time <= DAY).then_some(time)
}

fn hexadecimal(text: &[u8]) -> Option<&[u8]> {
    text.strip_prefix(b"0x").or_else(|| text.strip_prefix(b"0X"))
}

fn from_digits(digits: &[u8], radix: u32) -> Option<u64> {
    // `from_str_radix` takes a leading plus, which is no digit.
    if digits.first().is_none_or(|d| !d.is_ascii_hexdigit()) {
        return None;
    }
    u64::from_str_radix(str::from_utf8(digits).ok()?, radix).ok()
}

/// The fields of a header, for a message: the first of many.
fn names_of(fields: &Fields) -> Box<str> {
    const SHOWN: usize = 16;
    let named: Vec<_> = (0..fields.count()).filter_map(|i| Some(quote(fields.get(i)?))).collect();
    let (shown, others) = named.split_at(named.len().min(SHOWN));
    let end = if others.is_empty() { "" } else { ", …" };
    format!("{}{end}", shown.join(", ")).into()
}

/// The start of a field, for a message: a wrong field may be long or no text.
fn quote(text: &[u8]) -> Box<str> {
    const SHOWN: usize = 40;
    let mut shown = String::from_utf8_lossy(&text[..text.len().min(SHOWN)]).into_owned();
    if text.len() > SHOWN {
        shown.push('…');
    }
    shown.into()
}
