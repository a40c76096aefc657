//! What the simulator has found, and what still exists.

use crate::race::Race;

/// More findings than these are not kept: a program that has so many has one mistake many times.
const MOST: usize = 10_000;

/// Findings as they come in.
#[derive(Debug, Default)]
pub(crate) struct Findings {
    races: Vec<Race>,
    misuse: Vec<String>,
}

impl Findings {
    /// Notes what would crash or corrupt on a real driver.
    pub(crate) fn misuse(&mut self, what: String) {
        if self.misuse.len() < MOST {
            self.misuse.push(what);
        }
    }

    /// Notes unordered uses of the same bytes.
    pub(crate) fn races(&mut self, races: Vec<Race>) {
        let room = MOST - self.races.len();
        self.races.extend(races.into_iter().take(room));
    }

    /// What was noted so far, with what still exists.
    pub(crate) fn report(&self, leaks: Leaks) -> Report {
        Report { races: self.races.clone(), misuse: self.misuse.clone(), leaks }
    }
}

/// What the caller made and did not give back.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
#[non_exhaustive]
pub struct Leaks {
    /// References to physical memory handles (cuMemCreate, retained, imported) not released.
    pub handles: usize,
    /// Mappings not unmapped.
    pub mappings: usize,
    /// Address reservations not freed.
    pub reservations: usize,
    /// Streams not destroyed; the special streams do not count.
    pub streams: usize,
    /// Events not destroyed.
    pub events: usize,
    /// Allocations of cuMemAlloc, cuMemAllocAsync and their kind not freed.
    pub allocations: usize,
    /// Page-locked host allocations not freed.
    pub host_allocations: usize,
    /// Memory pools of cuMemPoolCreate not destroyed.
    pub pools: usize,
    /// References to contexts, created or primary, not given back.
    pub contexts: usize,
    /// Modules not unloaded.
    pub modules: usize,
    /// Graphs and executable graphs not destroyed.
    pub graphs: usize,
}

impl Leaks {
    /// Whether nothing is left.
    pub fn is_empty(&self) -> bool {
        *self == Self::default()
    }
}

/// Everything that a simulator has found up to a point.
#[derive(Clone, Debug, Default)]
#[non_exhaustive]
pub struct Report {
    /// Unordered uses of the same physical bytes, in the order found; the first 10,000.
    pub races: Vec<Race>,
    /// What would crash or corrupt on a real driver: each names the call and its arguments, or
    /// the work and its stream. In the order found; the first 10,000.
    pub misuse: Vec<String>,
    /// What still exists.
    pub leaks: Leaks,
}
