//! What a row looks like.

use std::fmt::Write as _;

use smallvec::SmallVec;

use super::LogFormat;
use super::digits::{self, EIGHT_DIGITS};
use super::time::Last;
use crate::error::Error;
use crate::units::DevicePtr;

/// Long enough for every row that has no reason of a failure in it.
pub(super) type Text = SmallVec<[u8; 256]>;

/// RMM's columns at their longest, and some more, for texts that are put down longer than they are.
pub(super) const COMMON: usize = 128;

/// A line that is being written, into zeroes. There is room: what has none would be left out. Behind the
/// finished line are zeroes again.
pub(super) struct Line<'a> {
    bytes: &'a mut [u8; COMMON],
    used: usize,
}

impl<'a> Line<'a> {
    #[inline]
    pub(super) fn new(bytes: &'a mut [u8; COMMON]) -> Self {
        Self { bytes, used: 0 }
    }

    /// The first `used` bytes of a text. All of it is put down, and overwritten by what comes next: a
    /// copy of a fixed length is a move or two.
    #[inline]
    fn put<const LENGTH: usize>(&mut self, text: &[u8; LENGTH], used: usize) {
        let rest = self.bytes.get_mut(self.used..);
        if let Some(place) = rest.and_then(|rest| rest.first_chunk_mut()) {
            *place = *text;
            self.used += used;
        }
    }

    #[inline]
    pub(super) fn extend<const LENGTH: usize>(&mut self, text: &[u8; LENGTH]) {
        self.put(text, LENGTH);
    }

    #[inline]
    fn decimal(&mut self, number: u64) {
        let (above, last) = (number / EIGHT_DIGITS, number % EIGHT_DIGITS);
        if above != 0 {
            self.long_decimal(above);
            return self.put(&digits::decimal(last), 8);
        }
        let text = u64::from_le_bytes(digits::decimal(last));
        // The first digit that is not '0', the last at the latest.
        let zeros = ((text ^ digits::ZEROS).trailing_zeros() / 8).min(7);
        self.put(&(text >> (8 * zeros)).to_le_bytes(), 8 - zeros as usize);
    }

    /// A number from which eight digits are taken: rare enough for a call.
    #[inline(never)]
    fn long_decimal(&mut self, number: u64) {
        self.decimal(number);
    }

    #[inline]
    fn hexadecimal(&mut self, number: u64) {
        let digits = (64 - number.leading_zeros()).div_ceil(4).max(1);
        self.put(&digits::hexadecimal(number << (64 - 4 * digits)), digits as usize);
    }

    #[inline]
    pub(super) fn text(&self) -> &[u8] {
        &self.bytes[..self.used]
    }
}

/// What was called, and how it went.
#[derive(Clone, Copy)]
pub(super) enum Action {
    Allocate,
    AllocateFailure,
    Free,
}

#[derive(Clone, Copy)]
pub(super) struct Row<'a> {
    pub(super) action: Action,
    pub(super) ptr: DevicePtr,
    pub(super) bytes: usize,
    pub(super) align: usize,
    /// The stream's handle, as a number.
    pub(super) stream: usize,
    pub(super) nanoseconds: Option<u64>,
    pub(super) failure: Option<&'a Error>,
}

/// The first line.
pub(super) fn header(format: LogFormat) -> &'static [u8] {
    match format {
        LogFormat::Rmm => b"Thread,Time,Action,Pointer,Size,Stream\n",
        LogFormat::Full => {
            b"Thread,Time,Action,Pointer,Size,Stream,\
              Device,Align,Live,Held,Nanoseconds,Date,Failure\n"
        }
    }
}

impl Row<'_> {
    /// RMM's row.
    #[inline]
    pub(super) fn rmm(&self, line: &mut Line<'_>, last: &Last, microseconds: u32) {
        self.common(line, last, microseconds);
        line.extend(b"\n");
    }

    pub(super) fn full(&self, device: Option<u32>, live: u64, held: Option<u64>) -> Text {
        let mut bytes = [0; COMMON];
        let mut line = Line::new(&mut bytes);
        let date = Last::with(self.stream, |last, microseconds| {
            self.common(&mut line, last, microseconds);
            *last.second.date()
        });
        let mut text = Text::from_slice(line.text());
        let mut bytes = [0; COMMON];
        let mut line = Line::new(&mut bytes);
        let numbers =
            [device.map(u64::from), Some(self.align as u64), Some(live), held, self.nanoseconds];
        for number in numbers {
            line.extend(b",");
            if let Some(number) = number {
                line.decimal(number);
            }
        }
        line.extend(b",");
        line.extend(&date);
        line.extend(b",");
        text.extend_from_slice(line.text());
        if let Some(failure) = self.failure {
            quoted(&mut text, failure);
        }
        text.push(b'\n');
        text
    }

    /// RMM's columns.
    #[inline]
    fn common(&self, line: &mut Line<'_>, last: &Last, microseconds: u32) {
        let (beginning, length) = last.second.beginning();
        line.put(beginning, length);
        let [_, _, microseconds @ ..] = digits::decimal(u64::from(microseconds));
        line.put::<6>(&microseconds, 6);
        match self.action {
            Action::Allocate => line.extend(b",allocate,0x"),
            Action::AllocateFailure => line.extend(b",allocate failure,0x"),
            Action::Free => line.extend(b",free,0x"),
        }
        if self.ptr.is_null() {
            line.used -= 2;
            line.extend(b"(nil)");
        } else {
            line.hexadecimal(self.ptr.address());
        }
        line.extend(b",");
        line.decimal(self.bytes as u64);
        let (ending, length) = last.ending();
        line.put(ending, length);
    }
}

/// A reason, in one line and in quotes, so that commas in it are none of the table's.
fn quoted(text: &mut Text, reason: &Error) {
    let mut words = String::new();
    // Writing to a string does not fail.
    let _ = write!(words, "{reason}");
    text.push(b'"');
    for byte in words.bytes() {
        match byte {
            b'"' => text.extend_from_slice(b"\"\""),
            b'\n' | b'\r' => text.push(b' '),
            _ => text.push(byte),
        }
    }
    text.push(b'"');
}

#[cfg(test)]
mod tests {
    use super::*;

    fn row(action: Action, address: u64, bytes: usize, stream: usize) -> Row<'static> {
        let ptr = DevicePtr::from_address(address);
        Row { action, ptr, bytes, align: 256, stream, nanoseconds: None, failure: None }
    }

    fn common(row: Row<'_>, microseconds: u32) -> String {
        let mut bytes = [0; COMMON];
        let mut line = Line::new(&mut bytes);
        row.common(&mut line, &Last::for_tests(17733, [1, 45, 56], row.stream), microseconds);
        let text = String::from_utf8_lossy(line.text()).into_owned();
        assert!(bytes[text.len()..].iter().all(|byte| *byte == 0), "{text} has zeroes behind it");
        text
    }

    #[test]
    fn rows_are_rmms_to_the_byte() {
        use Action::{Allocate, AllocateFailure, Free};
        assert_eq!(
            common(row(Allocate, 0x7f00_0003_e800, 1000, 0), 140_640),
            "17733,01:45:56.140640,allocate,0x7f000003e800,1000,0"
        );
        assert_eq!(
            common(row(Free, 0x7f00_0000_4000, 64, 2), 140_685),
            "17733,01:45:56.140685,free,0x7f0000004000,64,0x2"
        );
        assert_eq!(
            common(row(Allocate, 0, 0, 0), 140_886),
            "17733,01:45:56.140886,allocate,(nil),0,0"
        );
        assert_eq!(
            common(row(AllocateFailure, 0, 5_000_000, 0x55d0_c0ff_ee00), 946),
            "17733,01:45:56.000946,allocate failure,(nil),5000000,0x55d0c0ffee00"
        );
        assert_eq!(header(LogFormat::Rmm), b"Thread,Time,Action,Pointer,Size,Stream\n");
    }

    #[test]
    fn numbers_are_written_whole() {
        let written = |number| {
            let text = |put: fn(&mut Line<'_>, u64)| {
                let mut bytes = [0; COMMON];
                let mut line = Line::new(&mut bytes);
                put(&mut line, number);
                String::from_utf8_lossy(line.text()).into_owned()
            };
            (
                text(|line, number| line.decimal(number)),
                text(|line, number| line.hexadecimal(number)),
            )
        };
        let powers = (0..64).map(|power| 1 << power).chain((0..20).map(|power| 10u64.pow(power)));
        let edges = powers.flat_map(|power: u64| [power - 1, power, power + 1, power / 2 * 3]);
        for number in edges.chain([u64::MAX - 1, u64::MAX]) {
            assert_eq!(written(number), (number.to_string(), format!("{number:x}")));
        }
    }

    #[test]
    fn the_longest_row_has_room() {
        let mut longest = row(Action::AllocateFailure, u64::MAX, usize::MAX, usize::MAX);
        let mut bytes = [0; COMMON];
        let mut line = Line::new(&mut bytes);
        let last = Last::for_tests(u64::MAX, [23, 59, 59], longest.stream);
        longest.rmm(&mut line, &last, 999_999);
        assert_eq!(line.text().split(|byte| *byte == b',').count(), 6);
        // Nothing was left out for want of room.
        assert!(line.text().ends_with(b",18446744073709551615,0xffffffffffffffff\n"));
        (longest.align, longest.nanoseconds) = (usize::MAX, Some(u64::MAX));
        let text = longest.full(Some(u32::MAX), u64::MAX, Some(u64::MAX));
        assert_eq!(text.split(|byte| *byte == b',').count(), 13);
        assert!(text.ends_with(b",\n"));
    }

    #[test]
    fn a_reason_is_one_field_of_one_line() {
        let error =
            Error::Config { name: "a", value: "\"b\"".to_owned(), reason: "c,\nd".to_owned() };
        let mut text = Text::new();
        quoted(&mut text, &error);
        assert_eq!(String::from_utf8_lossy(&text), "\"a=\"\"b\"\": c, d\"");
    }
}
