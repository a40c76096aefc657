//! The local time, and the thread's number, for a few nanoseconds each.

use std::cell::Cell;
use std::time::{SystemTime, UNIX_EPOCH};

thread_local! {
    /// The minute that was asked about last: clocks are set by whole minutes.
    static MINUTE: Cell<Minute> = const { Cell::new(Minute { number: i64::MIN, local: Local::ZERO }) };
    static THREAD: Cell<u64> = const { Cell::new(0) };
}

#[derive(Clone, Copy)]
struct Minute {
    /// Minutes since 1970.
    number: i64,
    local: Local,
}

/// A minute of local time.
#[derive(Clone, Copy)]
struct Local {
    year: i32,
    month: u8,
    day: u8,
    hour: u8,
    minute: u8,
}

impl Local {
    const ZERO: Self = Self { year: 1970, month: 1, day: 1, hour: 0, minute: 0 };

    /// Asks the system: what it says of the time zone, summer time included.
    fn of(seconds: i64) -> Self {
        let seconds = seconds as libc::time_t;
        // SAFETY: all-zero bytes are a value of the struct: integers, and a pointer that may be null.
        let mut parts: libc::tm = unsafe { std::mem::zeroed() };
        // SAFETY: both pointers are to live values of the right types.
        let found = unsafe { libc::localtime_r(&seconds, &mut parts) };
        if found.is_null() {
            return Self::ZERO;
        }
        Self {
            year: parts.tm_year + 1900,
            month: (parts.tm_mon + 1) as u8,
            day: parts.tm_mday as u8,
            hour: parts.tm_hour as u8,
            minute: parts.tm_min as u8,
        }
    }
}

/// A point in time.
pub(super) struct Now {
    local: Local,
    second: u8,
    microseconds: u32,
}

impl Now {
    pub(super) fn read() -> Self {
        let since = SystemTime::now().duration_since(UNIX_EPOCH).unwrap_or_default();
        let seconds = since.as_secs() as i64;
        let number = seconds.div_euclid(60);
        let known = MINUTE.try_with(Cell::get).ok().filter(|minute| minute.number == number);
        let local = known.map_or_else(
            || {
                let local = Local::of(seconds);
                // A thread that is ending asks each time.
                let _ = MINUTE.try_with(|minute| minute.set(Minute { number, local }));
                local
            },
            |minute| minute.local,
        );
        let second = seconds.rem_euclid(60) as u8;
        Self { local, second, microseconds: since.subsec_micros() }
    }

    /// `HH:MM:SS.uuuuuu`.
    pub(super) fn time(&self) -> [u8; 15] {
        let mut text = *b"00:00:00.000000";
        let parts = self.microseconds;
        let (first, middle, last) = (parts / 10_000 % 100, parts / 100 % 100, parts % 100);
        text[0..2].copy_from_slice(&two_digits(self.local.hour));
        text[3..5].copy_from_slice(&two_digits(self.local.minute));
        text[6..8].copy_from_slice(&two_digits(self.second));
        text[9..11].copy_from_slice(&two_digits(first as u8));
        text[11..13].copy_from_slice(&two_digits(middle as u8));
        text[13..15].copy_from_slice(&two_digits(last as u8));
        text
    }

    /// `YYYY-MM-DD`.
    pub(super) fn date(&self) -> [u8; 10] {
        let mut text = *b"0000-00-00";
        let year = self.local.year.clamp(0, 9999);
        text[0..2].copy_from_slice(&two_digits((year / 100) as u8));
        text[2..4].copy_from_slice(&two_digits((year % 100) as u8));
        text[5..7].copy_from_slice(&two_digits(self.local.month));
        text[8..10].copy_from_slice(&two_digits(self.local.day));
        text
    }

    #[cfg(test)]
    pub(super) fn for_tests([hour, minute, second]: [u8; 3], microseconds: u32) -> Self {
        Self { local: Local { hour, minute, ..Local::ZERO }, second, microseconds }
    }
}

/// The digits of every number below 100.
static PAIRS: [[u8; 2]; 100] = {
    let (mut pairs, mut number) = ([[0; 2]; 100], 0);
    while number < 100 {
        pairs[number] = [b'0' + (number / 10) as u8, b'0' + (number % 10) as u8];
        number += 1;
    }
    pairs
};

/// The last two digits of a number.
#[inline]
pub(super) fn two_digits(number: u8) -> [u8; 2] {
    PAIRS[usize::from(number % 100)]
}

/// The system's number of the calling thread.
pub(super) fn thread_number() -> u64 {
    let known = THREAD.try_with(Cell::get).unwrap_or(0);
    if known != 0 {
        return known;
    }
    // SAFETY: takes no arguments, and always succeeds.
    let number = unsafe { libc::gettid() } as u64;
    let _ = THREAD.try_with(|thread| thread.set(number));
    number
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_time_is_the_systems_local_one() {
        let before = SystemTime::now().duration_since(UNIX_EPOCH).expect("after 1970").as_secs();
        let now = Now::read();
        let after = SystemTime::now().duration_since(UNIX_EPOCH).expect("after 1970").as_secs();
        let shown = String::from_utf8_lossy(&now.time()).into_owned();
        let of = |seconds: u64| {
            let local = Local::of(seconds as i64);
            format!("{:02}:{:02}:{:02}", local.hour, local.minute, seconds % 60)
        };
        assert!((before..=after).any(|seconds| shown.starts_with(&of(seconds))), "{shown}");
        assert_eq!(Now::for_tests([23, 59, 7], 42).time(), *b"23:59:07.000042");
        assert_eq!(Now::for_tests([0, 0, 0], 0).date(), *b"1970-01-01");
    }

    #[test]
    fn each_thread_has_its_number() {
        let own = thread_number();
        assert_eq!(own, thread_number());
        let other = std::thread::spawn(thread_number).join().expect("a number");
        assert_ne!(own, other);
    }
}
