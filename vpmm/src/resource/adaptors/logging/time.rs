//! The local time, and the thread's number, as a row begins with them.

use std::cell::Cell;
use std::io::Write as _;

thread_local! {
    /// The second that this thread's last row was of.
    static SECOND: Cell<Second> = const { Cell::new(Second::NONE) };
}

/// A second of one thread: all that its rows have in common.
#[derive(Clone, Copy)]
pub(super) struct Second {
    /// Seconds since 1970.
    number: i64,
    /// `THREAD,HH:MM:SS.`, and how long that is.
    beginning: [u8; 32],
    length: usize,
    /// `YYYY-MM-DD`.
    date: [u8; 10],
}

impl Second {
    const NONE: Self = Self { number: i64::MIN, beginning: [0; 32], length: 0, date: [0; 10] };

    fn new(number: i64, thread: u64, local: &Local) -> Self {
        let mut second = Self { number, ..Self::NONE };
        let Local { year, month, day, hour, minute, second: at } = local;
        let mut rest = &mut second.beginning[..];
        // At most 20 digits and these ten bytes: there is room, in the date's ten as well.
        let _ = write!(rest, "{thread},{hour:02}:{minute:02}:{at:02}.");
        let left = rest.len();
        second.length = second.beginning.len() - left;
        let year = year.clamp(&0, &9999);
        let _ = write!(&mut second.date[..], "{year:04}-{month:02}-{day:02}");
        second
    }

    /// `THREAD,HH:MM:SS.`: so many bytes of the text.
    #[inline]
    pub(super) fn beginning(&self) -> ([u8; 32], usize) {
        (self.beginning, self.length)
    }

    /// `YYYY-MM-DD`.
    pub(super) fn date(&self) -> &[u8; 10] {
        &self.date
    }
}

/// A second of local time.
struct Local {
    year: i32,
    month: u8,
    day: u8,
    hour: u8,
    minute: u8,
    second: u8,
}

impl Local {
    const ZERO: Self = Self { year: 1970, month: 1, day: 1, hour: 0, minute: 0, second: 0 };

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
            second: parts.tm_sec as u8,
        }
    }
}

/// A point in time.
pub(super) struct Now {
    pub(super) second: Second,
    pub(super) microseconds: u32,
}

impl Now {
    #[inline]
    pub(super) fn read() -> Self {
        let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
        // SAFETY: the pointer is to a live value of the right type. Of this clock it does not fail.
        let _ = unsafe { libc::clock_gettime(libc::CLOCK_REALTIME, &mut time) };
        let seconds = time.tv_sec;
        let known = SECOND.try_with(Cell::get).ok().filter(|second| second.number == seconds);
        let second = known.unwrap_or_else(|| Self::next_second(seconds));
        Self { second, microseconds: (time.tv_nsec / 1000) as u32 }
    }

    #[cold]
    #[inline(never)]
    fn next_second(seconds: i64) -> Second {
        let second = Second::new(seconds, thread_number(), &Local::of(seconds));
        // A thread that is ending asks each time.
        let _ = SECOND.try_with(|known| known.set(second));
        second
    }

    #[cfg(test)]
    pub(super) fn for_tests(
        thread: u64,
        [hour, minute, second]: [u8; 3],
        microseconds: u32,
    ) -> Self {
        let local = Local { hour, minute, second, ..Local::ZERO };
        Self { second: Second::new(0, thread, &local), microseconds }
    }
}

/// The system's number of the calling thread.
fn thread_number() -> u64 {
    // SAFETY: takes no arguments, and always succeeds.
    unsafe { libc::gettid() as u64 }
}

#[cfg(test)]
mod tests {
    use std::time::{SystemTime, UNIX_EPOCH};

    use super::*;

    fn beginning(now: &Now) -> String {
        let (text, length) = now.second.beginning();
        String::from_utf8_lossy(&text[..length]).into_owned()
    }

    #[test]
    fn the_time_is_the_systems_local_one() {
        let before = SystemTime::now().duration_since(UNIX_EPOCH).expect("after 1970").as_secs();
        let shown = beginning(&Now::read());
        let after = SystemTime::now().duration_since(UNIX_EPOCH).expect("after 1970").as_secs();
        let of = |seconds: u64| {
            let local = Local::of(seconds as i64);
            let time = format!("{:02}:{:02}:{:02}", local.hour, local.minute, seconds % 60);
            format!("{},{time}.", thread_number())
        };
        assert!((before..=after).any(|seconds| shown == of(seconds)), "{shown}");
        let now = Now::for_tests(u64::MAX, [23, 59, 7], 42);
        assert_eq!(beginning(&now), format!("{},23:59:07.", u64::MAX));
        assert_eq!(now.second.date(), b"1970-01-01");
    }

    #[test]
    fn a_new_second_is_shown() {
        let first = Now::read();
        while Now::read().second.number == first.second.number {
            std::thread::sleep(std::time::Duration::from_millis(20));
        }
        assert_ne!(beginning(&Now::read()), beginning(&first));
    }

    #[test]
    fn each_thread_has_its_number() {
        let own = || beginning(&Now::read()).split(',').next().map(str::to_owned);
        assert_eq!(own(), Some(thread_number().to_string()));
        assert_ne!(std::thread::spawn(own).join().expect("a number"), own());
    }
}
