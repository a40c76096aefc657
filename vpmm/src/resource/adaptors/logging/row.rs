//! What a row looks like.

use std::fmt::Write as _;

use smallvec::SmallVec;

use super::LogFormat;
use super::time::{Now, thread_number};
use crate::error::Error;
use crate::units::DevicePtr;

/// Long enough for every row that has no reason of a failure in it.
pub(super) type Text = SmallVec<[u8; 192]>;

/// What was called, and how it went.
#[derive(Clone, Copy)]
pub(super) enum Action {
    Allocate,
    AllocateFailure,
    Free,
}

impl Action {
    fn name(self) -> &'static str {
        match self {
            Self::Allocate => "allocate",
            Self::AllocateFailure => "allocate failure",
            Self::Free => "free",
        }
    }
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
    pub(super) fn rmm(&self) -> Text {
        let mut text = Text::new();
        self.common(&mut text, &Now::read(), thread_number());
        text.push(b'\n');
        text
    }

    pub(super) fn full(&self, device: Option<u32>, live: u64, held: Option<u64>) -> Text {
        let (mut text, now) = (Text::new(), Now::read());
        self.common(&mut text, &now, thread_number());
        let numbers =
            [device.map(u64::from), Some(self.align as u64), Some(live), held, self.nanoseconds];
        for number in numbers {
            text.push(b',');
            if let Some(number) = number {
                decimal(&mut text, number);
            }
        }
        text.push(b',');
        text.extend_from_slice(&now.date());
        text.push(b',');
        if let Some(failure) = self.failure {
            quoted(&mut text, failure);
        }
        text.push(b'\n');
        text
    }

    /// RMM's columns.
    fn common(&self, text: &mut Text, now: &Now, thread: u64) {
        decimal(text, thread);
        text.push(b',');
        text.extend_from_slice(&now.time());
        text.push(b',');
        text.extend_from_slice(self.action.name().as_bytes());
        text.push(b',');
        if self.ptr.is_null() {
            text.extend_from_slice(b"(nil)");
        } else {
            hexadecimal(text, self.ptr.address());
        }
        text.push(b',');
        decimal(text, self.bytes as u64);
        text.push(b',');
        match self.stream as u64 {
            0 => text.push(b'0'),
            handle => hexadecimal(text, handle),
        }
    }
}

fn decimal(text: &mut Text, mut number: u64) {
    let mut digits = [0_u8; 20];
    let mut at = digits.len();
    loop {
        at -= 1;
        digits[at] = b'0' + (number % 10) as u8;
        number /= 10;
        if number == 0 {
            break;
        }
    }
    text.extend_from_slice(&digits[at..]);
}

fn hexadecimal(text: &mut Text, number: u64) {
    text.extend_from_slice(b"0x");
    let digits = (64 - number.leading_zeros()).div_ceil(4).max(1);
    for digit in (0..digits).rev() {
        text.push(b"0123456789abcdef"[(number >> (4 * digit)) as usize & 15]);
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
        let mut text = Text::new();
        row.common(&mut text, &Now::for_tests([1, 45, 56], microseconds), 17733);
        String::from_utf8_lossy(&text).into_owned()
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
            let (mut ten, mut sixteen) = (Text::new(), Text::new());
            decimal(&mut ten, number);
            hexadecimal(&mut sixteen, number);
            let ten = String::from_utf8_lossy(&ten).into_owned();
            (ten, String::from_utf8_lossy(&sixteen).into_owned())
        };
        for number in [0, 1, 9, 10, 15, 16, 255, 256, 1 << 40, u64::MAX - 1, u64::MAX] {
            assert_eq!(written(number), (number.to_string(), format!("{number:#x}")));
        }
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
