//! The time of day at the cost of reading a counter.
//!
//! To ask the system takes some 30 ns, a fifth of a row. Where the processor's counter runs at one rate
//! whatever the processor does, a thread that has just asked goes on from there by the counter, for a
//! millisecond at a time. The rate is what the last such time showed, and is gone by only if the one
//! before it showed the same: so what is told is right to the microsecond but for a step of the system's
//! clock, which shows a millisecond late.

/// How long the counter is gone by, and the least time that shows a rate: nanoseconds.
const SPAN: u64 = 1_000_000;

/// Two rates are the same that differ by one part in so many, which is a microsecond in a span. More than
/// a clock that is being corrected differs: one in 2,000.
const SAME: u64 = 1_000;

/// No counter is as slow as this: 64 ns a tick, in 2^32nds.
const SLOWEST: u64 = 64 << 32;

/// A thread's.
pub(super) struct Clock {
    /// The counter when the system was asked.
    ticks: u64,
    /// What it answered.
    second: i64,
    nanosecond: u64,
    /// Nanoseconds a tick, in 2^32nds; 0 before any is known.
    rate: u64,
    /// For so many ticks the counter is gone by.
    good_for: u64,
}

impl Clock {
    pub(super) const NEW: Self = Self { ticks: 0, second: 0, nanosecond: 0, rate: 0, good_for: 0 };

    /// Seconds since 1970, and microseconds.
    #[inline]
    pub(super) fn now(&mut self) -> (i64, u32) {
        let passed = counter().wrapping_sub(self.ticks);
        if passed < self.good_for {
            // Neither is as long as a second: no overflow.
            let nanosecond = self.nanosecond + ((passed * self.rate) >> 32);
            if nanosecond < 1_000_000_000 {
                return (self.second, (nanosecond / 1000) as u32);
            }
        }
        self.ask()
    }

    #[inline(never)]
    fn ask(&mut self) -> (i64, u32) {
        let before = counter();
        let (second, nanosecond) = system_time();
        let took = counter().wrapping_sub(before);
        self.learn(Answer { ticks: before, took, second, nanosecond }, counter_is_steady());
        (second, (nanosecond / 1000) as u32)
    }

    fn learn(&mut self, answer: Answer, is_steady: bool) {
        let passed = answer.ticks.wrapping_sub(self.ticks);
        let seconds = i128::from(answer.second) - i128::from(self.second);
        let nanoseconds =
            seconds * 1_000_000_000 + i128::from(answer.nanosecond) - i128::from(self.nanosecond);
        let shows_rate = !(0..i128::from(SPAN)).contains(&nanoseconds);
        if !shows_rate && self.good_for == 0 {
            // The rate is not known yet: it will be since where this began.
            return;
        }
        (self.ticks, self.second, self.nanosecond) =
            (answer.ticks, answer.second, answer.nanosecond);
        if shows_rate {
            // None where the clock went back, or far ahead.
            let ticks = u128::from(passed.max(1));
            let rate = u128::try_from(nanoseconds).map_or(0, |of| (of << 32) / ticks);
            let rate = u64::try_from(rate).ok().filter(|rate| *rate <= SLOWEST).unwrap_or(0);
            let is_same = rate != 0 && rate.abs_diff(self.rate) <= self.rate / SAME;
            self.good_for = if is_same && is_steady { (SPAN << 32) / rate } else { 0 };
            self.rate = rate;
        }
        // Somebody else had the processor for a microsecond or more: nobody knows when the answer was
        // right.
        let microsecond = (1_000_u64 << 32).checked_div(self.rate).unwrap_or(u64::MAX);
        if answer.took > microsecond {
            (self.rate, self.good_for) = (0, 0);
        }
    }
}

/// What the system says, asked at a count, in so many ticks.
struct Answer {
    ticks: u64,
    took: u64,
    second: i64,
    nanosecond: u64,
}

fn system_time() -> (i64, u64) {
    let mut time = libc::timespec { tv_sec: 0, tv_nsec: 0 };
    // SAFETY: the pointer is to a live value of the right type. Of this clock it does not fail.
    let _ = unsafe { libc::clock_gettime(libc::CLOCK_REALTIME, &mut time) };
    (time.tv_sec, time.tv_nsec as u64)
}

/// The processor's counter; always the same where none is known.
#[inline(always)]
fn counter() -> u64 {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    {
        // SAFETY: every x86-64 processor has the instruction, and Linux lets programs use it.
        unsafe { std::arch::x86_64::_rdtsc() }
    }
    #[cfg(not(all(target_arch = "x86_64", not(miri))))]
    0
}

/// Whether the counter runs at one rate, on and on: the processor says so.
fn counter_is_steady() -> bool {
    #[cfg(all(target_arch = "x86_64", not(miri)))]
    {
        use std::arch::x86_64::__cpuid;
        use std::sync::OnceLock;
        /// The leaf that tells how many there are; the one about the counter, and its bit there.
        const HIGHEST: u32 = 0x8000_0000;
        const POWER: u32 = 0x8000_0007;
        const INVARIANT: u32 = 1 << 8;
        // In a virtual machine the question costs microseconds.
        static STEADY: OnceLock<bool> = OnceLock::new();
        *STEADY.get_or_init(|| {
            // Before Rust 1.92 it is not safe.
            #[allow(unused_unsafe)]
            // SAFETY: every x86-64 processor has the instruction.
            let ask = |leaf| unsafe { __cpuid(leaf) };
            ask(HIGHEST).eax >= POWER && ask(POWER).edx & INVARIANT != 0
        })
    }
    #[cfg(not(all(target_arch = "x86_64", not(miri))))]
    false
}

#[cfg(test)]
mod tests {
    use std::time::{Duration, Instant, SystemTime, UNIX_EPOCH};

    use super::*;

    const START: u64 = 10_000_000_000_000;

    /// What a clock learns from an answer, by a counter of 3 ticks a nanosecond, so many nanoseconds
    /// after the start. `step`: how far the system's clock was set ahead.
    fn tell(clock: &mut Clock, after: u64, took: u64, step: i64) {
        let (ticks, time) = (1_000 + 3 * after, (START + after).saturating_add_signed(step));
        let (second, nanosecond) = ((time / 1_000_000_000) as i64, time % 1_000_000_000);
        clock.learn(Answer { ticks, took, second, nanosecond }, true);
    }

    /// Which of a list of answers a clock went by the counter after.
    fn goes(answers: &[(u64, u64, i64)]) -> Vec<bool> {
        let mut clock = Clock::NEW;
        let told = answers.iter().map(|(after, took, step)| {
            tell(&mut clock, *after, *took, *step);
            clock.good_for != 0
        });
        told.collect()
    }

    #[test]
    fn the_counter_is_gone_by_while_one_span_shows_what_the_last_did() {
        let regular: Vec<_> = (0..5).map(|span| (span * SPAN, 90, 0)).collect();
        assert_eq!(goes(&regular), [false, false, true, true, true]);
        // Answers in between change nothing, however many; nor does a long pause.
        let often = [(0, 90, 0), (SPAN / 2, 90, 0), (SPAN, 90, 0), (2 * SPAN, 90, 0)];
        assert_eq!(goes(&often), [false, false, false, true]);
        let rarely = [(0, 90, 0), (SPAN, 90, 0), (2 * SPAN, 90, 0), (900 * SPAN, 90, 0)];
        assert_eq!(goes(&rarely), [false, false, true, true]);
        // A new second within a span.
        let second = [(0, 90, 0), (SPAN, 90, 0), (2 * SPAN, 90, 0), (2 * SPAN + 1000, 90, 0)];
        assert_eq!(goes(&second), [false, false, true, true]);
    }

    #[test]
    fn a_clock_that_is_set_is_asked_until_the_rate_is_known_again() {
        for step in [5_000, 100_000_000, 3_600_000_000_000, -100_000_000, -3_600_000_000_000] {
            let answers: Vec<_> =
                (0..8).map(|span| (span * SPAN, 90, if span < 4 { 0 } else { step })).collect();
            let goes = goes(&answers);
            assert_eq!(goes[..5], [false, false, true, true, false], "{step}");
            assert!(goes[7], "{step}: {goes:?}");
        }
    }

    #[test]
    fn an_answer_that_took_long_is_not_gone_by() {
        let answers: Vec<_> =
            (0..8).map(|span| (span * SPAN, if span == 4 { 3_300 } else { 90 }, 0)).collect();
        let expected = [false, false, true, true, false, false, true, true];
        assert_eq!(goes(&answers), expected);
    }

    #[test]
    fn it_says_what_the_system_says() {
        let system = || SystemTime::now().duration_since(UNIX_EPOCH).expect("after 1970");
        let mut clock = Clock::NEW;
        let (mut by_counter, start) = (0_u32, Instant::now());
        // A rate takes some milliseconds of this thread's time to be known, which is long on a machine that is
        // busy with something else.
        let (least, most) = (Duration::from_millis(30), Duration::from_secs(20));
        let is_known = |by_counter| by_counter > 0 || !counter_is_steady();
        while start.elapsed() < least || !is_known(by_counter) {
            assert!(start.elapsed() < most, "never by the counter");
            let before = system();
            let goes = clock.good_for != 0;
            let (second, microsecond) = clock.now();
            let after = system();
            let told = second as i128 * 1_000_000 + i128::from(microsecond);
            let [before, after] = [before, after].map(|time| time.as_micros() as i128);
            assert!((before - 20..=after + 20).contains(&told), "{told}: {before} to {after}");
            by_counter += u32::from(goes);
        }
        println!("by the counter: {by_counter}");
    }
}
