//! What a row has in common with the thread's last one: the second, local time, and the thread's
//! number, as a row begins with them, and the stream, as one ends.

use std::cell::RefCell;
use std::io::Write as _;
use std::num::NonZeroU64;

use super::clock::Clock;
use super::digits;

thread_local! {
    /// What this thread's last row had.
    static LAST: RefCell<Last> = const { RefCell::new(Last::NONE) };
}

/// What a thread's last row had, as text.
pub(super) struct Last {
    clock: Clock,
    pub(super) second: Second,
    stream: Stream,
}

impl Last {
    const NONE: Self = Self { clock: Clock::NEW, second: Second::NONE, stream: Stream::LEGACY };

    /// Reads the clock, and hands on what there is of the thread, of this second and of a stream, with
    /// the microseconds.
    #[inline]
    pub(super) fn with<T>(stream: usize, mut work: impl FnMut(&Self, u32) -> T) -> T {
        let mut run = |last: &mut Self| {
            let (second, microseconds) = last.clock.now();
            if last.second.number != second {
                last.second = Second::of(second);
            }
            if last.stream.handle != stream {
                last.stream = Stream::of(stream);
            }
            work(last, microseconds)
        };
        let done = LAST.try_with(|last| last.try_borrow_mut().ok().map(|mut last| run(&mut last)));
        match done {
            Ok(Some(done)) => done,
            // A thread that is ending has nothing kept; nor has a writer that logs by itself.
            _ => {
                let mut last = Self::NONE;
                run(&mut last)
            }
        }
    }

    /// The end of a row: so many bytes of the text.
    #[inline]
    pub(super) fn ending(&self) -> (&[u8; 24], usize) {
        (&self.stream.ending, self.stream.length)
    }
}

/// A stream's handle.
struct Stream {
    handle: usize,
    /// `,HANDLE`, and how long that is.
    ending: [u8; 24],
    length: usize,
}

impl Stream {
    const LEGACY: Self = {
        let mut ending = [0; 24];
        [ending[0], ending[1]] = *b",0";
        Self { handle: 0, ending, length: 2 }
    };

    /// Cheap, since a program that frees on another stream changes streams at every row.
    #[inline]
    fn of(handle: usize) -> Self {
        let mut stream = Self { handle, ..Self::LEGACY };
        if let Some(number) = NonZeroU64::new(handle as u64) {
            let unused = number.leading_zeros() / 4;
            let text = u128::from_le_bytes(digits::hexadecimal(number.get() << (4 * unused)));
            // Zeroes behind it, as elsewhere.
            let text = text & (u128::MAX >> (8 * unused));
            let [comma, zero, x, digits @ ..] = &mut stream.ending;
            [*comma, *zero, *x] = *b",0x";
            if let Some(place) = digits.first_chunk_mut() {
                *place = text.to_le_bytes();
            }
            stream.length = 19 - unused as usize;
        }
        stream
    }
}

/// A second of one thread.
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

    #[cold]
    #[inline(never)]
    fn of(number: i64) -> Self {
        Self::new(number, thread_number(), &Local::of(number))
    }

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
    pub(super) fn beginning(&self) -> (&[u8; 32], usize) {
        (&self.beginning, self.length)
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

/// The system's number of the calling thread.
fn thread_number() -> u64 {
    // SAFETY: takes no arguments, and always succeeds.
    unsafe { libc::gettid() as u64 }
}

#[cfg(test)]
impl Last {
    pub(super) fn for_tests(thread: u64, [hour, minute, second]: [u8; 3], stream: usize) -> Self {
        let local = Local { hour, minute, second, ..Local::ZERO };
        let second = Second::new(0, thread, &local);
        Self { second, stream: Stream::of(stream), ..Self::NONE }
    }
}

#[cfg(test)]
mod tests {
    use std::time::{SystemTime, UNIX_EPOCH};

    use super::*;

    fn text(second: &Second) -> String {
        let (text, length) = second.beginning();
        String::from_utf8_lossy(&text[..length]).into_owned()
    }

    fn now() -> (i64, String) {
        Last::with(0, |last, _| (last.second.number, text(&last.second)))
    }

    #[test]
    fn the_time_is_the_systems_local_one() {
        let before = SystemTime::now().duration_since(UNIX_EPOCH).expect("after 1970").as_secs();
        let (_, shown) = now();
        let after = SystemTime::now().duration_since(UNIX_EPOCH).expect("after 1970").as_secs();
        let of = |seconds: u64| {
            let local = Local::of(seconds as i64);
            let time = format!("{:02}:{:02}:{:02}", local.hour, local.minute, seconds % 60);
            format!("{},{time}.", thread_number())
        };
        assert!((before..=after).any(|seconds| shown == of(seconds)), "{shown}");
        let last = Last::for_tests(u64::MAX, [23, 59, 7], 0);
        assert_eq!(text(&last.second), format!("{},23:59:07.", u64::MAX));
        assert_eq!(last.second.date(), b"1970-01-01");
    }

    #[test]
    fn a_new_second_is_shown() {
        let (first, shown) = now();
        while now().0 == first {
            std::thread::sleep(std::time::Duration::from_millis(20));
        }
        assert_ne!(now().1, shown);
    }

    #[test]
    fn each_thread_has_its_number() {
        let own = || now().1.split(',').next().map(str::to_owned);
        assert_eq!(own(), Some(thread_number().to_string()));
        assert_ne!(std::thread::spawn(own).join().expect("a number"), own());
    }

    #[test]
    fn rows_of_several_streams_end_with_theirs() {
        for handle in [0, 2, 2, usize::MAX, 0, 0xa0, 0x55d0_c0ff_ee00, 16, usize::MAX] {
            let ending = Last::with(handle, |last, _| {
                let (text, length) = last.ending();
                String::from_utf8_lossy(&text[..length]).into_owned()
            });
            let shown = if handle == 0 { ",0".to_owned() } else { format!(",{handle:#x}") };
            assert_eq!(ending, shown);
        }
    }
}
