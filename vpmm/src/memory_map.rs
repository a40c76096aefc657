//! The map that comes with an out-of-memory error.

#![forbid(unsafe_code)]

use std::fmt::{self, Write};

use crate::layout::Layout;
use crate::stats::Stats;
use crate::units::Bytes;

/// Free pieces that a map names.
const MOST_PIECES: usize = 8;

/// Characters of the drawing that are shown.
const MOST_DRAWN: usize = 1_000;

/// What a pool held, and where, when a request was given up: see [`Error::map`](crate::Error::map).
///
/// Shown by `{}` in several lines, for a log; the drawing of the addresses is cut short there, and
/// whole in [`layout`](Self::layout).
#[derive(Clone, PartialEq, Eq)]
#[non_exhaustive]
pub struct MemoryMap {
    /// What was asked for, rounded up as the pool rounds.
    pub requested_bytes: u64,
    /// The pool's limit, where it has one.
    pub limit_bytes: Option<u64>,
    /// What the pool held.
    pub stats: Stats,
    /// What stood where, in the heap that was asked.
    pub layout: Layout,
    /// The largest free pieces of that heap, the largest first, eight at most. Neighbours with different holders
    /// are pieces of their own. What further streams still use after its free has no holder, and is
    /// not among them.
    pub largest_free: Vec<FreePiece>,
}

/// Contiguous free memory of one holder.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub struct FreePiece {
    /// Its first address.
    pub start: u64,
    /// Its bytes.
    pub bytes: u64,
    /// Who may have it.
    pub holder: Holder,
}

/// Who may have free memory without a wait.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Holder {
    /// Everybody: no stream can still be using it.
    Everybody,
    /// The stream that freed it, by the driver's number (`cuStreamGetId`): it may still be using it.
    Stream(u64),
    /// The legacy default stream, which freed it and may still be using it.
    LegacyStream,
}

/// The largest of many pieces.
#[derive(Default)]
pub(crate) struct Largest(Vec<FreePiece>);

impl Largest {
    pub(crate) fn offer(&mut self, start: u64, bytes: u64, holder: impl FnOnce() -> Holder) {
        if self.0.len() == MOST_PIECES && self.0.last().is_some_and(|least| least.bytes >= bytes) {
            return;
        }
        self.0.truncate(MOST_PIECES - 1);
        let at = self.0.partition_point(|piece| piece.bytes >= bytes);
        self.0.insert(at, FreePiece { start, bytes, holder: holder() });
    }

    pub(crate) fn into_pieces(self) -> Vec<FreePiece> {
        self.0
    }
}

impl fmt::Display for Holder {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Everybody => f.write_str("for every stream"),
            Self::Stream(number) => {
                write!(f, "for stream {number}, which freed it and may still use it")
            }
            Self::LegacyStream => {
                f.write_str("for the legacy default stream, which freed it and may still use it")
            }
        }
    }
}

impl fmt::Display for MemoryMap {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let stats = &self.stats;
        write!(f, "asked for     {}", Bytes(self.requested_bytes))?;
        write!(f, "\nmemory held   {}", Bytes(stats.mapped_bytes))?;
        if stats.small_mapped_bytes > 0 {
            write!(f, " and {} for small requests", Bytes(stats.small_mapped_bytes))?;
        }
        if let Some(limit) = self.limit_bytes {
            write!(f, ", at most {}", Bytes(limit))?;
        }
        let mut line = |name: &str, bytes: u64, of: &str| {
            if bytes > 0 { write!(f, "\n  {name:<12}{}{of}", Bytes(bytes)) } else { Ok(()) }
        };
        line("in use", stats.live_bytes, &format!(" in {} allocations", stats.live_count))?;
        let small = format!(" in {} small allocations", stats.small_live_count);
        line("in use", stats.small_live_bytes, &small)?;
        line("in fronts", stats.cached_bytes, ", each for one thread on one stream")?;
        line("idle", stats.idle_bytes, ", free for every stream")?;
        let own = stats.pending_bytes.saturating_sub(stats.deferred_bytes);
        line("pending", own, ", free for the stream that freed it")?;
        line("deferred", stats.deferred_bytes, ", freed, and still used on further streams")?;
        line("in transit", stats.transit_bytes, ", in other threads' hands")?;
        write!(f, "\naddresses     {}", Bytes(stats.reserved_bytes))?;
        let mut line = |name: &str, bytes: u64, of: &str| {
            if bytes > 0 { write!(f, "\n  {name:<12}{}{of}", Bytes(bytes)) } else { Ok(()) }
        };
        line("holes", stats.hole_bytes, "")?;
        line("zombies", stats.zombie_bytes, ", to be unmapped when the GPU has finished there")?;
        line("asleep", stats.asleep_bytes, ", in use or not, whose memory is the device's")?;
        if !self.largest_free.is_empty() {
            write!(f, "\nlargest free")?;
        }
        for FreePiece { start, bytes, holder } in &self.largest_free {
            write!(f, "\n  {:<12}at {start:#x} {holder}", Bytes(*bytes).to_string())?;
        }
        if self.layout.pieces.is_empty() {
            return Ok(());
        }
        let piece = Bytes(stats.page_size_bytes);
        write!(
            f,
            "\nlayout        in pieces of {piece}: [n] in use, [-n] free, [~n] zombies, [*n] holes"
        )?;
        write!(f, "\n  ")?;
        let mut start = Start { to: f, left: MOST_DRAWN };
        // Cut short is the only way in which it fails, but for those of the formatter itself.
        match write!(start, "{}", self.layout) {
            Err(_) if start.left == 0 => {
                write!(f, " … of {} pieces in all", self.layout.pieces.len())
            }
            drawn => drawn,
        }
    }
}

/// The numbers only: a layout can have thousands of pieces.
impl fmt::Debug for MemoryMap {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct("MemoryMap")
            .field("requested_bytes", &self.requested_bytes)
            .field("limit_bytes", &self.limit_bytes)
            .field("stats", &self.stats)
            .field("largest_free", &self.largest_free)
            .finish_non_exhaustive()
    }
}

/// Takes whole writes as long as there is room for them.
struct Start<'a, 'b> {
    to: &'a mut fmt::Formatter<'b>,
    left: usize,
}

impl Write for Start<'_, '_> {
    fn write_str(&mut self, text: &str) -> fmt::Result {
        match self.left.checked_sub(text.len()) {
            Some(left) => {
                self.left = left;
                self.to.write_str(text)
            }
            None => {
                self.left = 0;
                Err(fmt::Error)
            }
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::layout::Piece;
    use crate::region::State;

    fn map(pieces: u64) -> MemoryMap {
        let piece = |at| Piece {
            state: if at % 2 == 0 { State::Live } else { State::Idle },
            pages: 1 + at % 7,
            latest: false,
            reservation: 0,
        };
        let mut largest = Largest::default();
        for bytes in 1..=20 {
            largest.offer(bytes << 20, bytes % 10 * 512, || Holder::Stream(bytes));
        }
        MemoryMap {
            requested_bytes: 3 << 20,
            limit_bytes: Some(24 << 20),
            stats: Stats {
                mapped_bytes: 22 << 20,
                live_bytes: 20 << 20,
                live_count: 7,
                idle_bytes: 2 << 20,
                asleep_bytes: 6 << 20,
                reserved_bytes: 1 << 30,
                page_size_bytes: 2 << 20,
                ..Stats::default()
            },
            layout: Layout { pieces: (0..pieces).map(piece).collect() },
            largest_free: largest.into_pieces(),
        }
    }

    #[test]
    fn the_largest_pieces_come_first_and_the_first_met_of_equals() {
        let pieces = map(1).largest_free;
        let shown: Vec<(u64, u64)> =
            pieces.iter().map(|piece| (piece.start >> 20, piece.bytes / 512)).collect();
        let expected = [(9, 9), (19, 9), (8, 8), (18, 8), (7, 7), (17, 7), (6, 6), (16, 6)];
        assert_eq!(shown, expected);
    }

    #[test]
    fn every_number_has_a_line() {
        let text = map(3).to_string();
        for part in [
            "asked for     3 MiB",
            "memory held   22 MiB, at most 24 MiB",
            "in use      20 MiB in 7 allocations",
            "idle        2 MiB",
            "addresses     1 GiB",
            "asleep      6 MiB, in use or not,",
            "4.50 KiB    at 0x900000 for stream 9,",
            "[*n] holes\n  [1][-2][3]",
        ] {
            assert!(text.contains(part), "{part} is missing in:\n{text}");
        }
        assert!(!text.contains("pending") && !text.contains('…'), "{text}");
    }

    #[test]
    fn a_long_drawing_is_cut_short() {
        let text = map(100_000).to_string();
        assert!(text.len() < 3_000, "{}", text.len());
        assert!(text.ends_with("… of 100000 pieces in all"), "{text}");
        assert!(format!("{:?}", map(100_000)).len() < 3_000);
    }
}
