//! When there is time to make memory ahead: at once, or when the client has mapped what it got.
//!
//! After an answer the client calls the driver for some 45 µs, to map. Then it fills the memory, or
//! comes back at once.
//!
//! - There is time after that: the client's calls are let pass. They would wait for the server's.
//! - It comes back at once: the only time is beside its calls. That gains if the driver does two
//!   processes' calls at a time, and loses if they wait for each other. Which of the two is seen from when
//!   the client comes back, and looked at again now and then.

#![forbid(unsafe_code)]

use std::time::{Duration, Instant};

/// How long a client takes to map, at most, as was measured on an H200: 49 to 75 µs.
const CLIENT_MAPS: Duration = Duration::from_micros(80);

/// How long it takes to make and export memory, until that was measured.
const MAKES: Duration = Duration::from_micros(45);

/// One time in so many the other way is tried, in case that it is otherwise by now.
const TRY_AGAIN: u32 = 32;

/// The last times that something took.
#[derive(Debug, Default)]
struct Recent {
    times: [Duration; 8],
    count: usize,
}

impl Recent {
    fn add(&mut self, time: Duration) {
        self.times[self.count % self.times.len()] = time;
        self.count += 1;
    }

    /// The middle one: the driver takes a millisecond now and then.
    fn middle(&self) -> Option<Duration> {
        let known = self.count.min(self.times.len());
        let mut times = self.times;
        times[..known].sort_unstable();
        times[..known].get(known / 2).copied()
    }
}

/// What the server did after an answer.
#[derive(Clone, Copy, Debug)]
enum Did {
    Nothing,
    /// It made memory at once, while the client mapped.
    MadeBeside,
    /// It made memory later.
    MadeAfter,
}

/// How a writer comes and goes.
#[derive(Debug, Default)]
pub(super) struct Pace {
    /// When the last allocation was answered, if nothing was asked for since.
    answered: Option<(Instant, Did)>,
    /// From the last allocation's answer to the next request.
    gap: Option<Duration>,
    /// Such times where the server did nothing.
    left_alone: Recent,
    /// And where it made memory at once.
    beside: Recent,
    /// How long the server's calls take while the client waits for them.
    makes: Recent,
    turns: u32,
}

impl Pace {
    /// An allocation was answered, descriptor and all.
    pub(super) fn answered(&mut self) {
        self.answered = Some((Instant::now(), Did::Nothing));
    }

    /// Memory was made ahead, so long after the answer.
    pub(super) fn made(&mut self, silence: Duration) {
        if let Some((_, did)) = &mut self.answered {
            *did = if silence.is_zero() { Did::MadeBeside } else { Did::MadeAfter };
        }
    }

    /// There is a request.
    pub(super) fn asked(&mut self) {
        let Some((answered, did)) = self.answered.take() else { return };
        self.came_back(answered.elapsed(), did);
    }

    fn came_back(&mut self, gap: Duration, did: Did) {
        self.gap = Some(gap);
        match did {
            // With something to do in between it says nothing.
            _ if gap > (CLIENT_MAPS + self.makes()) * 2 => {}
            Did::Nothing => self.left_alone.add(gap),
            Did::MadeBeside => self.beside.add(gap),
            Did::MadeAfter => {}
        }
    }

    /// Memory was made and exported while the client waited for it.
    pub(super) fn made_alone(&mut self, time: Duration) {
        self.makes.add(time);
    }

    fn makes(&self) -> Duration {
        self.makes.middle().unwrap_or(MAKES)
    }

    /// How long to let the client be before memory is made; `None` if there is no time for it.
    pub(super) fn silence(&mut self) -> Option<Duration> {
        let makes = self.makes();
        let Some(gap) = self.gap.filter(|gap| *gap < CLIENT_MAPS + makes) else {
            return Some(CLIENT_MAPS);
        };
        self.turns += 1;
        let other_way = self.turns.is_multiple_of(TRY_AGAIN);
        let gains = match (self.left_alone.middle(), self.beside.middle()) {
            // What the client loses by it is clearly less than what it is spared.
            (Some(alone), Some(beside)) => beside < alone + makes * 3 / 4,
            (Some(_), None) => true,
            (None, _) => false,
        };
        if gains != other_way {
            return Some(Duration::ZERO);
        }
        // A part of it is better than nothing.
        (gap >= CLIENT_MAPS).then_some(CLIENT_MAPS)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    const fn us(time: u64) -> Duration {
        Duration::from_micros(time)
    }

    const NOW: Option<Duration> = Some(Duration::ZERO);
    const THEN: Option<Duration> = Some(CLIENT_MAPS);

    /// After gaps of so many µs, and calls of 40 but for an outlier.
    fn pace(left_alone: &[u64], beside: &[u64]) -> Pace {
        let mut pace = Pace::default();
        [40, 1_000, 41].into_iter().for_each(|time| pace.made_alone(us(time)));
        left_alone.iter().for_each(|gap| pace.came_back(us(*gap), Did::Nothing));
        beside.iter().for_each(|gap| pace.came_back(us(*gap), Did::MadeBeside));
        pace
    }

    #[test]
    fn a_client_that_fills_what_it_got_maps_undisturbed() {
        assert_eq!(pace(&[], &[]).silence(), THEN, "nothing is known of it");
        assert_eq!(pace(&[250], &[]).silence(), THEN);
        assert_eq!(pace(&[50, 50, 250], &[]).silence(), THEN);
        let mut undecided = pace(&[50, 50], &[110, 110, 110]);
        assert_eq!(undecided.silence(), THEN, "most of it is done before the client is back");
    }

    #[test]
    fn beside_a_client_that_comes_back_at_once_if_both_get_on() {
        assert_eq!(pace(&[50], &[]).silence(), NOW, "it is tried");
        let mut both = pace(&[50, 52, 51], &[55, 1_000, 55, 120, 55]);
        let times: Vec<_> = (0..2 * TRY_AGAIN).map(|_| both.silence()).collect();
        assert_eq!(times.iter().filter(|time| **time == NOW).count(), 62);
        assert_eq!((times[31], times[63]), (None, None), "it may be otherwise by now");
    }

    #[test]
    fn not_where_each_waits_for_the_other() {
        let mut pace = pace(&[50, 52, 51], &[85, 90, 95]);
        pace.came_back(us(50), Did::Nothing);
        let times: Vec<_> = (0..TRY_AGAIN).map(|_| pace.silence()).collect();
        let (last, before) = times.split_last().unwrap();
        assert!(before.iter().all(Option::is_none));
        assert_eq!(*last, NOW, "it may be otherwise by now");
        (0..8).for_each(|_| pace.came_back(us(52), Did::MadeBeside));
        assert_eq!(pace.silence(), NOW);
    }

    #[test]
    fn a_gap_is_from_an_allocation_to_whatever_is_asked_next() {
        let mut pace = Pace::default();
        pace.asked();
        assert_eq!(pace.gap, None);
        pace.answered();
        std::thread::sleep(us(300));
        pace.asked();
        let gap = pace.gap.unwrap();
        assert!(gap >= us(300));
        pace.asked();
        assert_eq!(pace.gap, Some(gap), "a second request tells nothing");
    }
}
