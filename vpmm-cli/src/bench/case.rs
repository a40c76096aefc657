//! The cases by name.

use std::fmt;
use std::str::FromStr;

/// A case. Names are part of what `--json` prints: they do not change.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Case {
    /// Allocate and free one size on one stream.
    Pair {
        /// The name.
        name: &'static str,
        /// The size.
        bytes: u64,
    },
    /// Random sizes and random frees, from nothing to nothing.
    Random {
        /// The name.
        name: &'static str,
        /// The smallest size.
        least_bytes: u64,
        /// The largest size.
        most_bytes: u64,
        /// The most allocations at one time.
        live: u32,
    },
    /// Random replacement among many small live allocations.
    Live {
        /// The name.
        name: &'static str,
        /// How many.
        live: u32,
        /// On how many streams, in turn.
        streams: u32,
    },
    /// The smaller random sizes while addresses wait to be unmapped.
    Zombies {
        /// The name.
        name: &'static str,
        /// Blocks that have moved, each away from its own addresses.
        count: u32,
    },
    /// Pairs of 1 MiB on several threads.
    Threads {
        /// The name.
        name: &'static str,
        /// How many.
        threads: u32,
        /// Whether all use one stream; else each has its own.
        shared_stream: bool,
    },
    /// Allocated on one stream and freed on another.
    CrossStream,
    /// Growth of a fresh pool.
    Grow {
        /// The name.
        name: &'static str,
        /// How many requests.
        requests: u32,
        /// The size of each.
        bytes: u64,
    },
    /// One request for what is free in pieces.
    Gather,
}

const KIB: u64 = 1 << 10;
const MIB: u64 = 1 << 20;
const GIB: u64 = 1 << 30;

impl Case {
    /// What is done among zombies, too.
    pub(super) const RANDOM_4MIB: Self =
        Self::Random { name: "random_4MiB", least_bytes: 1, most_bytes: 4 * MIB, live: 2_500 };

    /// Every case, in the order in which they run.
    pub const ALL: [Self; 23] = [
        Self::pair("pair_512", 512),
        Self::pair("pair_64KiB", 64 * KIB),
        Self::pair("pair_1MiB", MIB),
        Self::pair("pair_4MiB", 4 * MIB),
        Self::pair("pair_64MiB", 64 * MIB),
        Self::RANDOM_4MIB,
        Self::Random {
            name: "random_64MiB",
            least_bytes: 2 * MIB,
            most_bytes: 64 * MIB,
            live: 100,
        },
        Self::live("live_100", 100),
        Self::live("live_10k", 10_000),
        Self::live("live_100k", 100_000),
        Self::live("live_1M", 1_000_000),
        Self::Live { name: "streams_1000", live: 10_000, streams: 1_000 },
        Self::Zombies { name: "zombies_10k", count: 10_000 },
        Self::threads("threads_1", 1),
        Self::threads("threads_2", 2),
        Self::threads("threads_4", 4),
        Self::threads("threads_8", 8),
        Self::threads("threads_16", 16),
        Self::Threads { name: "shared_stream_8", threads: 8, shared_stream: true },
        Self::CrossStream,
        Self::Grow { name: "grow_1GiB", requests: 1, bytes: GIB },
        Self::Grow { name: "grow_512x2MiB", requests: 512, bytes: 2 * MIB },
        Self::Gather,
    ];

    const fn pair(name: &'static str, bytes: u64) -> Self {
        Self::Pair { name, bytes }
    }

    const fn live(name: &'static str, live: u32) -> Self {
        Self::Live { name, live, streams: 1 }
    }

    const fn threads(name: &'static str, threads: u32) -> Self {
        Self::Threads { name, threads, shared_stream: false }
    }

    /// The name on the command line and in reports.
    pub const fn name(self) -> &'static str {
        match self {
            Self::Pair { name, .. }
            | Self::Random { name, .. }
            | Self::Live { name, .. }
            | Self::Zombies { name, .. }
            | Self::Threads { name, .. }
            | Self::Grow { name, .. } => name,
            Self::CrossStream => "cross_stream",
            Self::Gather => "gather_1GiB",
        }
    }

    /// How many threads call the allocator.
    pub const fn thread_count(self) -> u32 {
        match self {
            Self::Threads { threads, .. } => threads,
            _ => 1,
        }
    }
}

impl fmt::Display for Case {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.pad(self.name())
    }
}

/// A text that names no case.
#[derive(Clone, Debug, PartialEq, Eq, thiserror::Error)]
#[non_exhaustive]
pub enum CaseError {
    /// There is no such case.
    #[error("there is no case {name:?}; known: {}", Case::ALL.map(Case::name).join(", "))]
    Unknown {
        /// What was asked for.
        name: Box<str>,
    },
    /// One case twice: two rows that nothing tells apart.
    #[error("{0} is named twice")]
    Twice(Case),
}

impl FromStr for Case {
    type Err = CaseError;

    fn from_str(text: &str) -> Result<Self, CaseError> {
        let text = text.trim();
        Self::ALL
            .into_iter()
            .find(|case| case.name() == text)
            .ok_or_else(|| CaseError::Unknown { name: text.into() })
    }
}

/// Cases to run, separated by commas.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct CaseList(pub Vec<Case>);

impl FromStr for CaseList {
    type Err = CaseError;

    fn from_str(text: &str) -> Result<Self, CaseError> {
        let mut list = Vec::new();
        for name in text.split(',') {
            let case = name.parse()?;
            if list.contains(&case) {
                return Err(CaseError::Twice(case));
            }
            list.push(case);
        }
        Ok(Self(list))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_name_is_read_back() {
        for case in Case::ALL {
            assert_eq!(case.name().parse(), Ok(case));
        }
    }

    #[test]
    fn lists_keep_their_order_and_refuse_what_they_do_not_know() {
        let list: CaseList = "gather_1GiB, pair_512".parse().unwrap();
        assert_eq!(list.0, [Case::Gather, Case::ALL[0]]);
        for (text, part) in [("pair", "\"pair\""), ("", "\"\""), ("pair_512,pair_512", "twice")] {
            let error = text.parse::<CaseList>().unwrap_err().to_string();
            assert!(error.contains(part), "{error}");
        }
    }
}
