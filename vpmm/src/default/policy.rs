//! How long extents are, when memory moves before more is made, how far ahead growth maps.

#![forbid(unsafe_code)]

/// The numbers behind growth. Granules throughout.
#[derive(Clone, Debug)]
pub(super) struct Policy {
    /// The most that the pool may hold, or that the device has.
    pub(super) capacity: u64,
    /// Extents are at most this fraction of the room that is left.
    pub(super) room_fraction: u64,
    /// Memory moves before more is made when whole free extents come to this fraction of what is
    /// live.
    pub(super) move_fraction: u64,
    /// Fresh windows stand apart, so that each has addresses behind it.
    pub(super) lanes: bool,
    /// Growth ahead is at most this fraction of what is mapped.
    pub(super) ahead_fraction: u64,
}

/// 64 MiB in granules of 2 MiB: growth ahead goes no further.
const AHEAD_GRANULES: u64 = 32;

impl Policy {
    pub(super) fn new(capacity: u64) -> Self {
        let number = |name: &str, default: u64| {
            std::env::var(name).ok().and_then(|v| v.parse().ok()).unwrap_or(default)
        };
        Self {
            capacity,
            room_fraction: number("VT_ROOM", 16),
            move_fraction: number("VT_MOVE", 20),
            lanes: number("VT_LANES", 1) == 1,
            ahead_fraction: number("VT_AHEAD", 4),
        }
    }

    /// The granules of the next new extent, at most.
    pub(super) fn extent(&self, mapped: u64) -> u32 {
        let room = self.capacity.saturating_sub(mapped);
        (room / self.room_fraction).clamp(1, 1 << 18) as u32
    }

    /// From how many granules of free extents on they move before more are made.
    pub(super) fn moves_first(&self, live: u64) -> u64 {
        (live / self.move_fraction).max(1)
    }

    /// Granules to map beyond the need of a request.
    pub(super) fn ahead(&self, streak: u32, needed: u32, mapped: u64) -> u32 {
        if streak < 2 {
            return 0;
        }
        let most = (mapped / self.ahead_fraction).min(AHEAD_GRANULES);
        (u64::from(needed) << (streak - 1).min(16)).min(most) as u32
    }
}
