//! How long extents are, when memory moves before more is made, how far ahead growth maps.
//!
//! A driver call costs what it costs for each handle, whatever its length; but only a handle that
//! is wholly free can be moved, so that a long one under a short block that stays is lost to
//! everybody else. Length is thus the trade between driver time and memory held. Granules
//! throughout.

#![forbid(unsafe_code)]

/// New extents are at most this fraction of the pool, or of the request where that is longer:
/// their number grows with the pool's logarithm, and what one short block can hold in its place
/// stays the same small share.
const OF_POOL: u64 = 128;
const OF_REQUEST: u64 = 32;

/// Where a limit is set: at most this fraction of it, so that nearly everything can be brought
/// together when the limit is reached.
const OF_LIMIT: u64 = 1024;

/// The distance of fresh windows: a fraction of what the pool may hold.
const APART: u64 = 8;

/// From this length on, what a request gets ends with an extent of one granule.
const WITH_FRINGE: u32 = 4;

/// Memory moves before more is made when whole free extents come to this fraction of what is
/// live: moving one costs hardly more than making one.
const MOVED_FIRST: u64 = 400;

/// As long as there are at most this many moves for each extent made.
const MOVES_EACH: u64 = 8;

/// From this many growths in a row on, with nothing freed between, a program is filling its
/// memory and will ask again. Requests of up to 8 MiB (in granules of 2 MiB) then get an extent for
/// those to come too, each time longer, up to a fraction of the pool and up to 64 MiB. Not where a
/// limit is set: what is ahead of one request may be missing for another.
const STREAK: u32 = 4;
const AHEAD_NEEDED: u32 = 4;
const AHEAD_OF_POOL: u64 = 2;
const AHEAD_MOST: u64 = 32;

/// The numbers behind growth.
#[derive(Clone, Debug)]
pub(super) struct Policy {
    /// The most that the pool may hold: its limit, or what the device has.
    pub(super) capacity: u64,
    /// Whether that is a limit that somebody set.
    limited: bool,
}

impl Policy {
    pub(super) fn new(capacity: u64, limited: bool) -> Self {
        Self { capacity, limited }
    }

    /// The length of the next new extent, at most.
    pub(super) fn extent(&self, mapped: u64, request: u64) -> u32 {
        const LONGEST: u64 = 1 << 18;
        // An empty pool has nothing that a long extent could hold in its place.
        if mapped == 0 {
            return request.clamp(1, LONGEST) as u32;
        }
        let of_limit = if self.limited { self.capacity / OF_LIMIT } else { LONGEST };
        (mapped / OF_POOL).max(request / OF_REQUEST).min(of_limit).max(1) as u32
    }

    /// Granules at the end of new memory that are an extent of their own: the next block will
    /// begin there, and what lies before is whole again as soon as the request's block is free.
    pub(super) fn fringe(&self, granules: u32) -> u32 {
        u32::from(granules > WITH_FRINGE)
    }

    /// Fresh windows stand as far apart as this at least, while there are addresses for that: each
    /// can grow in place then.
    pub(super) fn apart(&self) -> u64 {
        self.capacity / APART
    }

    /// From how many granules of free extents on they move before more are made.
    pub(super) fn moves_first(&self, live: u64) -> u64 {
        (live / MOVED_FIRST).max(1)
    }

    /// Whether extents may move where more could be made, after so many made and moved.
    pub(super) fn may_move(&self, created: u64, moved: u64) -> bool {
        moved < created * MOVES_EACH
    }

    /// Granules to map beyond the need of a request that needs `needed`.
    pub(super) fn ahead(&self, streak: u32, needed: u32, mapped: u64) -> u32 {
        if self.limited || streak < STREAK || needed > AHEAD_NEEDED {
            return 0;
        }
        let most = (mapped / AHEAD_OF_POOL).min(AHEAD_MOST);
        (u64::from(needed) << (streak - STREAK + 1).min(16)).min(most) as u32
    }
}
