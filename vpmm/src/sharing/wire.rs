//! What goes over the socket, as bytes: no driver, no socket.
//!
//! A message is a header, the windows, and the extents in batches; all numbers are little-endian.
//! With a batch come its file descriptors, one for each extent; fabric handles stand in the entries.
//! The receiver answers each batch (an empty one, too) with one byte.
//!
//! ```text
//! header  magic 8 | version 2 | kind 1 | handles 1 | windows 4 | extents 4 | zero 4 | granule 8 |
//!         pool 16 | block's address 8 | block's bytes 8
//! window  address 8 | bytes 8
//! extent  address 8 | bytes 8 | fabric handle 64, where handles say so
//! ```

#![forbid(unsafe_code)]

use crate::error::{Error, Result};
use crate::location::Sharing;

const MAGIC: [u8; 8] = *b"vpmmshr\0";
const VERSION: u16 = 1;
pub(super) const HEADER_BYTES: usize = 64;
pub(super) const WINDOW_BYTES: usize = 16;
pub(super) const FABRIC_BYTES: usize = 64;

/// Extents in a batch; the kernel passes at most 253 descriptors at a time.
pub(super) const BATCH: usize = 128;
/// A paged pool has as many reservations as it is made to by a short `va_size_bytes`: one for each extent.
const MOST_WINDOWS: u32 = MOST_EXTENTS;
const MOST_EXTENTS: u32 = 1 << 20;
const MOST_BYTES: u64 = 1 << 47;

/// The receiver's answer to a batch.
pub(super) const TAKEN: u8 = 1;
pub(super) const REFUSED: u8 = 2;

/// Contiguous addresses of the exporter's.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub(crate) struct Span {
    pub(crate) start: u64,
    pub(crate) bytes: u64,
}

impl Span {
    pub(super) fn end(self) -> u64 {
        self.start.saturating_add(self.bytes)
    }

    pub(super) fn holds(self, other: Self) -> bool {
        other.start >= self.start && other.end() <= self.end()
    }
}

/// What a message begins with.
#[derive(Clone, PartialEq, Eq, Debug)]
pub(super) struct Header {
    pub(super) handles: Sharing,
    pub(super) windows: u32,
    pub(super) extents: u32,
    pub(super) granule: u64,
    /// Which pool it is of.
    pub(super) pool: [u8; 16],
    /// The one allocation that is shared; a whole pool where there is none.
    pub(super) block: Option<Span>,
}

fn bad<T>(reason: &'static str) -> Result<T> {
    Err(Error::BadMessage { reason })
}

fn array<const N: usize>(bytes: &[u8], at: usize) -> [u8; N] {
    std::array::from_fn(|index| bytes.get(at + index).copied().unwrap_or(0))
}

fn word(bytes: &[u8], at: usize) -> u64 {
    u64::from_le_bytes(array(bytes, at))
}

impl Header {
    pub(super) fn write(&self) -> [u8; HEADER_BYTES] {
        let mut bytes = Vec::with_capacity(HEADER_BYTES);
        bytes.extend(MAGIC);
        bytes.extend(VERSION.to_le_bytes());
        bytes.push(if self.block.is_some() { 1 } else { 2 });
        bytes.push(if self.handles == Sharing::Fabric { 2 } else { 1 });
        bytes.extend(self.windows.to_le_bytes());
        bytes.extend(self.extents.to_le_bytes());
        bytes.extend([0; 4]);
        bytes.extend(self.granule.to_le_bytes());
        bytes.extend(self.pool);
        let block = self.block.unwrap_or(Span { start: 0, bytes: 0 });
        bytes.extend(block.start.to_le_bytes());
        bytes.extend(block.bytes.to_le_bytes());
        array(&bytes, 0)
    }

    /// Every field is checked, and both counts are bounded: what follows has a known length.
    pub(super) fn read(bytes: &[u8; HEADER_BYTES]) -> Result<Self> {
        if array(bytes, 0) != MAGIC {
            return bad("it is no message of this kind");
        }
        if u16::from_le_bytes(array(bytes, 8)) != VERSION {
            return bad("its version is another");
        }
        let handles = match bytes[11] {
            1 => Sharing::FileDescriptor,
            2 => Sharing::Fabric,
            _ => return bad("its kind of handles is unknown"),
        };
        let (windows, extents) =
            (u32::from_le_bytes(array(bytes, 12)), u32::from_le_bytes(array(bytes, 16)));
        if windows == 0 || windows > MOST_WINDOWS || extents > MOST_EXTENTS {
            return bad("it has too many parts, or too few");
        }
        if array(bytes, 20) != [0; 4] {
            return bad("a field that must be 0 is not");
        }
        let granule = word(bytes, 24);
        if !granule.is_power_of_two() || !(1 << 12..=1 << 40).contains(&granule) {
            return bad("its granule is none");
        }
        let block = Span { start: word(bytes, 48), bytes: word(bytes, 56) };
        let block = match bytes[10] {
            1 if block.bytes == 0 || block.start.checked_add(block.bytes).is_none() => {
                return bad("its block is none");
            }
            1 if windows != 1 || extents == 0 => return bad("its block has no memory"),
            1 => Some(block),
            2 if block != (Span { start: 0, bytes: 0 }) => {
                return bad("a pool is shared, and a block named");
            }
            2 => None,
            _ => return bad("its kind is unknown"),
        };
        Ok(Self { handles, windows, extents, granule, pool: array(bytes, 32), block })
    }

    /// Bytes of an extent's entry.
    pub(super) fn entry_bytes(&self) -> usize {
        match self.handles {
            Sharing::Fabric => WINDOW_BYTES + FABRIC_BYTES,
            Sharing::None | Sharing::FileDescriptor => WINDOW_BYTES,
        }
    }

    fn check_span(&self, span: Span) -> Result<Span> {
        let whole =
            span.start.is_multiple_of(self.granule) && span.bytes.is_multiple_of(self.granule);
        if !whole || span.bytes == 0 {
            return bad("a range is not whole granules");
        }
        match span.start.checked_add(span.bytes) {
            Some(_) => Ok(span),
            None => bad("a range goes beyond all addresses"),
        }
    }

    /// The windows: in ascending order, apart from each other.
    pub(super) fn read_windows(&self, bytes: &[u8]) -> Result<Vec<Span>> {
        let mut windows: Vec<Span> = Vec::new();
        for entry in bytes.chunks_exact(WINDOW_BYTES) {
            let span = self.check_span(read_span(entry))?;
            if windows.last().is_some_and(|last| last.end() > span.start) {
                return bad("its windows are out of order");
            }
            windows.push(span);
        }
        let total = windows.iter().fold(0_u64, |sum, window| sum.saturating_add(window.bytes));
        if windows.len() != self.windows as usize || total > MOST_BYTES {
            return bad("its windows are not as announced");
        }
        if self.block.is_some_and(|block| !windows.iter().any(|window| window.holds(block))) {
            return bad("its block is outside its window");
        }
        Ok(windows)
    }

    /// A batch of extents: in ascending order behind `last`, each in a window. A block's fill its
    /// window from the start.
    pub(super) fn read_batch(
        &self,
        bytes: &[u8],
        windows: &[Span],
        last: &mut u64,
    ) -> Result<Vec<(Span, usize)>> {
        let mut batch = Vec::new();
        for entry in bytes.chunks_exact(self.entry_bytes()) {
            let span = self.check_span(read_span(entry))?;
            let before = windows.partition_point(|window| window.start <= span.start);
            let Some(window) = before.checked_sub(1).filter(|at| windows[*at].holds(span)) else {
                return bad("an extent is in no window");
            };
            let gap = span.start != (*last).max(windows[window].start);
            if span.start < *last || (self.block.is_some() && gap) {
                return bad("its extents are out of order");
            }
            *last = span.end();
            batch.push((span, window));
        }
        Ok(batch)
    }
}

fn read_span(bytes: &[u8]) -> Span {
    Span { start: word(bytes, 0), bytes: word(bytes, 8) }
}

pub(super) fn write_span(span: Span, to: &mut Vec<u8>) {
    to.extend(span.start.to_le_bytes());
    to.extend(span.bytes.to_le_bytes());
}

#[cfg(test)]
mod tests {
    use proptest::prelude::*;

    use super::*;

    const GRANULE: u64 = 2 << 20;

    fn header(block: Option<Span>) -> Header {
        Header {
            handles: Sharing::FileDescriptor,
            windows: 1,
            extents: 2,
            granule: GRANULE,
            pool: *b"0123456789abcdef",
            block,
        }
    }

    #[test]
    fn what_is_written_is_read() {
        for block in [None, Some(Span { start: GRANULE + 512, bytes: 1024 })] {
            let header = header(block);
            assert_eq!(Header::read(&header.write()).unwrap(), header);
        }
    }

    /// Each field by itself turned into nonsense is found.
    #[test]
    fn every_field_is_checked() {
        let good = header(Some(Span { start: GRANULE, bytes: 512 })).write();
        let changes: [(usize, u8); 10] = [
            (0, 0),
            (8, 9),
            (10, 3),
            (10, 2),
            (11, 0),
            (12, 2),
            (15, 1),
            (19, 1),
            (20, 1),
            (24, 1),
        ];
        for (at, value) in changes {
            let mut bytes = good;
            bytes[at] = value;
            assert!(matches!(Header::read(&bytes), Err(Error::BadMessage { .. })), "byte {at}");
        }
        let mut endless = good;
        endless[48..64].fill(0xff);
        assert!(Header::read(&endless).is_err());
    }

    /// Each number at its bound is taken, and one beyond is not.
    #[test]
    fn numbers_are_bounded() {
        let is_taken = |change: fn(&mut Header), block| {
            let mut header = header(block);
            change(&mut header);
            let read = Header::read(&header.write());
            assert!(matches!(read, Ok(_) | Err(Error::BadMessage { .. })), "{read:?}");
            read.is_ok_and(|read| read == header)
        };
        assert!(is_taken(|of| of.windows = MOST_WINDOWS, None));
        assert!(is_taken(|of| of.extents = MOST_EXTENTS, None));
        assert!(is_taken(|of| of.extents = 0, None), "a pool may have none");
        assert!(is_taken(|of| of.granule = 1 << 12, None));
        assert!(is_taken(|of| of.granule = 1 << 40, None));
        assert!(!is_taken(|of| of.windows = 0, None));
        assert!(!is_taken(|of| of.windows = MOST_WINDOWS + 1, None));
        assert!(!is_taken(|of| of.extents = MOST_EXTENTS + 1, None));
        assert!(!is_taken(|of| of.granule = 1 << 11, None));
        assert!(!is_taken(|of| of.granule = 1 << 41, None));
        assert!(!is_taken(|of| of.granule = 3 << 12, None));
        let block = |start, bytes| Some(Span { start, bytes });
        let as_it_is: fn(&mut Header) = |_| ();
        assert!(is_taken(as_it_is, block(GRANULE, 1)));
        assert!(is_taken(as_it_is, block(u64::MAX - 1, 1)));
        assert!(!is_taken(as_it_is, block(GRANULE, 0)));
        assert!(!is_taken(as_it_is, block(u64::MAX, 1)));
        assert!(!is_taken(|of| of.windows = 2, block(GRANULE, 1)));
        assert!(!is_taken(|of| of.extents = 0, block(GRANULE, 1)));
    }

    #[test]
    fn windows_are_in_order_and_as_announced() {
        let span =
            |start: u64, granules: u64| Span { start: start * GRANULE, bytes: granules * GRANULE };
        let read = |windows: u32, block: Option<Span>, spans: &[Span]| {
            let mut bytes = Vec::new();
            spans.iter().for_each(|span| write_span(*span, &mut bytes));
            Header { windows, ..header(block) }.read_windows(&bytes)
        };
        let (one, next, far) = (span(1, 2), span(3, 1), span(7, 4));
        assert_eq!(
            read(3, None, &[one, next, far]).unwrap(),
            [one, next, far],
            "side by side, too"
        );
        assert!(read(2, None, &[one, next, far]).is_err());
        assert!(read(4, None, &[one, next, far]).is_err());
        assert!(read(2, None, &[next, one]).is_err());
        assert!(read(2, None, &[one, one]).is_err());
        assert!(read(2, None, &[one, span(2, 2)]).is_err());
        assert!(read(1, None, &[span(1, 0)]).is_err());
        let most = MOST_BYTES / GRANULE;
        assert!(read(1, None, &[span(1, most)]).is_ok());
        assert!(read(1, None, &[span(1, most + 1)]).is_err());
        assert!(read(2, None, &[span(1, most), span(most + 1, 1)]).is_err(), "more together");
        let last = u64::MAX / GRANULE;
        assert!(read(1, None, &[span(last - 1, 1)]).is_ok());
        assert!(read(1, None, &[span(last, 1)]).is_err(), "beyond all addresses");
        let bytes = |start: u64, bytes| Some(Span { start, bytes });
        assert!(read(1, bytes(GRANULE, 2 * GRANULE), &[one]).is_ok());
        assert!(read(1, bytes(GRANULE - 1, 2), &[one]).is_err());
        assert!(read(1, bytes(3 * GRANULE - 1, 2), &[one]).is_err());
    }

    #[test]
    fn extents_are_in_order_and_in_their_window() {
        let span =
            |start: u64, granules: u64| Span { start: start * GRANULE, bytes: granules * GRANULE };
        let windows = [span(3, 7), span(10, 6), span(16, 1)];
        let read = |block: Option<Span>, spans: &[Span]| {
            let mut bytes = Vec::new();
            spans.iter().for_each(|span| write_span(*span, &mut bytes));
            header(block).read_batch(&bytes, &windows, &mut 0).map(|batch| batch.len())
        };
        assert_eq!(read(None, &[span(11, 1), span(13, 3)]).unwrap(), 2);
        for wrong in [
            [span(13, 1), span(11, 1)],
            [span(11, 2), span(12, 1)],
            [span(2, 1), span(11, 1)],
            [span(9, 2), span(11, 1)],
            [span(11, 1), span(15, 2)],
            [span(11, 1), span(17, 1)],
            [span(11, 1), Span { start: 12 * GRANULE + 1, bytes: GRANULE }],
            [span(11, 1), span(13, 0)],
        ] {
            assert!(read(None, &wrong).is_err(), "{wrong:?}");
        }
        let block = Some(Span { start: 10 * GRANULE, bytes: 512 });
        assert!(read(block, &[span(10, 2), span(12, 4)]).is_ok());
        assert!(read(block, &[span(10, 1), span(12, 4)]).is_err(), "a gap in a block");
    }

    proptest! {
        /// Whatever arrives: an error, or a header that says the same when it is written again.
        #[test]
        fn any_bytes_are_survived(
            mut bytes in proptest::array::uniform32(any::<u8>()),
            rest in proptest::array::uniform32(any::<u8>()),
            tail in proptest::collection::vec(any::<u8>(), 0..400),
            likely in any::<bool>(),
        ) {
            if likely {
                bytes[..24].copy_from_slice(&header(None).write()[..24]);
                bytes[24..32].copy_from_slice(&GRANULE.to_le_bytes());
            }
            let mut whole = [0; HEADER_BYTES];
            whole[..32].copy_from_slice(&bytes);
            whole[32..].copy_from_slice(&rest);
            if likely {
                whole[48..].fill(0);
            }
            if let Ok(header) = Header::read(&whole) {
                prop_assert_eq!(header.write(), whole);
                if let Ok(windows) = header.read_windows(&tail) {
                    prop_assert_eq!(windows.len(), header.windows as usize);
                }
                let window = Span { start: 0, bytes: 1 << 40 };
                if let Ok(batch) = header.read_batch(&tail, &[window], &mut 0) {
                    prop_assert!(batch.iter().all(|(span, _)| window.holds(*span)));
                }
            }
        }
    }
}
