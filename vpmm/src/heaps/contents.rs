//! What a sleeping heap's memory held, while the device has the memory.

use std::fs::{File, Metadata, OpenOptions};
use std::io;
use std::os::unix::fs::{FileExt, MetadataExt};
use std::path::{Path, PathBuf};
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::pinned::{Copies, Done, Pinned};
use crate::default::Run;
use crate::driver::Failure;
use crate::error::{Error, Result, of_path};

/// What becomes of the contents of memory that is [suspended](crate::Pool::suspend).
#[derive(Clone, PartialEq, Eq, Debug)]
#[non_exhaustive]
pub enum Contents {
    /// They are lost. What the memory holds after it was resumed is anything.
    Discard,
    /// They are copied to page-locked memory of the host, at the speed of the device's link.
    Keep(Buffers),
    /// They are written to a file, which is made, or cut to nothing first. It must stay as it is until
    /// the memory was resumed; it is the caller's to remove.
    Save(PathBuf),
}

/// What becomes of page-locked host memory once the contents are back on the device.
#[derive(Clone, Copy, PartialEq, Eq, Debug, Default)]
#[non_exhaustive]
pub enum Buffers {
    /// It is given back to the system, for which the driver waits for the device.
    #[default]
    Release,
    /// It is kept for the next time: locking the pages takes longer than the copies.
    Retain,
}

/// Bytes of one piece of page-locked memory; less where the system has not as much in one.
const CHUNK_BYTES: u64 = 1 << 30;
const LEAST_CHUNK_BYTES: u64 = 16 << 20;

/// Bytes of each of the two buffers between a file and the device.
const RING_BYTES: u64 = 64 << 20;

/// Contents, and where.
pub(super) enum Saved {
    Nothing,
    Host(HostCopy),
    File(FileCopy),
}

impl Saved {
    pub(super) fn bytes(&self) -> u64 {
        match self {
            Self::Nothing => 0,
            Self::Host(copy) => copy.pieces.iter().map(|piece| piece.bytes).sum(),
            Self::File(copy) => copy.pieces.iter().map(|piece| piece.bytes).sum(),
        }
    }

    /// Finds out, before anything is mapped, whether the contents are still there.
    pub(super) fn check(&self) -> Result<()> {
        match self {
            Self::Nothing | Self::Host(_) => Ok(()),
            Self::File(copy) => copy.open().map(|_| ()),
        }
    }

    /// Copies what was in these runs back, and waits for the copies.
    pub(super) fn load(
        &self,
        device: &crate::Device,
        copies: &Copies<'_>,
        runs: &[Run],
    ) -> Result<()> {
        match self {
            Self::Nothing => Ok(()),
            Self::Host(copy) => copy.load(copies, runs),
            Self::File(copy) => copy.load(device, copies, runs),
        }
    }
}

fn is_in(runs: &[Run], address: u64) -> bool {
    let at = runs.partition_point(|run| run.start <= address);
    at.checked_sub(1).is_some_and(|at| runs[at].holds(address))
}

/// Device memory, and where in the host's chunks it is.
struct HostPiece {
    address: u64,
    bytes: u64,
    chunk: usize,
    offset: u64,
}

/// Contents in page-locked memory.
pub(super) struct HostCopy {
    pieces: Vec<HostPiece>,
    chunks: Vec<Pinned>,
    pub(super) buffers: Buffers,
}

impl HostCopy {
    /// Copies `used` to the host, into `chunks` and as many more as it takes. Waits for the copies.
    /// Answers also how long the locking of pages took.
    pub(super) fn save(
        device: &crate::Device,
        copies: &Copies<'_>,
        used: &[Run],
        buffers: Buffers,
        chunks: &mut Vec<Pinned>,
    ) -> Result<(Self, Duration)> {
        let (mut pinning, kept) = (Duration::ZERO, chunks.len());
        let saved = Self::enqueue(device, copies, used, chunks, &mut pinning);
        // Whatever was enqueued writes to the chunks until here.
        if let Err(failure) = copies.wait() {
            if copies.are_lost() {
                copies.strand(chunks.drain(..));
            }
            chunks.truncate(kept);
            return Err(saved.err().unwrap_or_else(|| failure.into()));
        }
        match saved {
            Ok(pieces) => {
                let chunks = std::mem::take(chunks);
                Ok((Self { pieces, chunks, buffers }, pinning))
            }
            Err(error) => {
                chunks.truncate(kept);
                Err(error)
            }
        }
    }

    fn enqueue(
        device: &crate::Device,
        copies: &Copies<'_>,
        used: &[Run],
        chunks: &mut Vec<Pinned>,
        pinning: &mut Duration,
    ) -> Result<Vec<HostPiece>> {
        let mut left: u64 = used.iter().map(|run| run.bytes).sum();
        let mut pieces = Vec::with_capacity(used.len());
        let (mut chunk, mut offset) = (0, 0);
        for run in used {
            let mut done = 0;
            while done < run.bytes {
                if chunk == chunks.len() {
                    let start = Instant::now();
                    chunks.push(make_chunk(device, left)?);
                    *pinning += start.elapsed();
                }
                let bytes = (run.bytes - done).min(chunks[chunk].bytes() - offset);
                let address = run.start + done;
                // SAFETY: the chunks stay until `save` has waited, and no two pieces overlap; the
                // runs are mapped until the heap falls asleep, after that.
                unsafe { copies.save(&chunks[chunk], offset, address, bytes) }
                    .map_err(|failure| failure.about(bytes))?;
                pieces.push(HostPiece { address, bytes, chunk, offset });
                done += bytes;
                offset += bytes;
                left -= bytes;
                if offset == chunks[chunk].bytes() {
                    (chunk, offset) = (chunk + 1, 0);
                }
            }
        }
        Ok(pieces)
    }

    fn load(&self, copies: &Copies<'_>, runs: &[Run]) -> Result<()> {
        let loaded =
            self.pieces.iter().filter(|piece| is_in(runs, piece.address)).try_for_each(|piece| {
                let chunk = &self.chunks[piece.chunk];
                // SAFETY: the chunks are this value's and are not written to; the runs were mapped
                // by the caller, who undoes that only after the wait.
                unsafe { copies.load(chunk, piece.offset, piece.address, piece.bytes) }
                    .map_err(|failure| failure.about(piece.bytes))
            });
        let waited = copies.wait();
        loaded.and(waited.map_err(Error::from))
    }

    pub(super) fn into_chunks(self) -> Vec<Pinned> {
        self.chunks
    }
}

/// A chunk for what is left, or the most that the system has in one piece.
fn make_chunk(device: &crate::Device, left: u64) -> Result<Pinned> {
    let mut bytes = left.min(CHUNK_BYTES);
    loop {
        match Pinned::new(device, bytes) {
            Ok(chunk) => return Ok(chunk),
            Err(failure) if failure.is_out_of_memory() && bytes > LEAST_CHUNK_BYTES => {
                bytes = (bytes / 2).max(LEAST_CHUNK_BYTES);
            }
            Err(failure) => return Err(failure.about(bytes)),
        }
    }
}

/// Device memory, where in the file it is, and a number that tells whether it is still that.
struct FilePiece {
    address: u64,
    bytes: u64,
    offset: u64,
    sum: u64,
}

/// Contents in a file.
pub(super) struct FileCopy {
    path: PathBuf,
    stamp: Stamp,
    pieces: Vec<FilePiece>,
}

/// What tells a file that was written to from one that was not, before anything is mapped. Not the time
/// of its last change, which also comes with another name or other rights: bytes that are not those
/// written are found by their sums, whatever times say.
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
struct Stamp {
    file: (u64, u64),
    modified: (i64, i64),
}

impl Stamp {
    fn of(data: &Metadata) -> Self {
        Self { file: (data.dev(), data.ino()), modified: (data.mtime(), data.mtime_nsec()) }
    }
}

fn of_file(error: io::Error) -> Error {
    Error::ContentsFile(Arc::new(error))
}

/// An error of a file's says which one.
fn named(error: Error, path: &Path) -> Error {
    match error {
        Error::ContentsFile(error) => of_file(of_path(path, &error)),
        error => error,
    }
}

impl FileCopy {
    /// Writes `used` to a file, through two buffers: one is written while the other is filled.
    pub(super) fn save(
        device: &crate::Device,
        copies: &Copies<'_>,
        used: &[Run],
        path: &Path,
    ) -> Result<Self> {
        Self::save_at(device, copies, used, path).map_err(|error| named(error, path))
    }

    fn save_at(
        device: &crate::Device,
        copies: &Copies<'_>,
        used: &[Run],
        path: &Path,
    ) -> Result<Self> {
        let file = OpenOptions::new().write(true).create(true).truncate(true).open(path);
        let file = file.map_err(of_file)?;
        let mut pieces = cut(used);
        let mut ring = Ring::new(device, &pieces)?;
        let written = ring.save(copies, &mut pieces, &file);
        ring.finish(copies, written)?;
        // An error that the system has held back so far comes now.
        file.sync_data().map_err(of_file)?;
        let stamp = Stamp::of(&file.metadata().map_err(of_file)?);
        Ok(Self { path: path.to_owned(), stamp, pieces })
    }

    /// Opens the file if it is what was written.
    fn open(&self) -> Result<File> {
        let failed = |error| of_file(of_path(&self.path, &error));
        let file = File::open(&self.path).map_err(failed)?;
        let data = file.metadata().map_err(failed)?;
        let bytes = self.pieces.last().map_or(0, |piece| piece.offset + piece.bytes);
        if data.len() != bytes {
            return Err(Error::ContentsChanged { reason: "it is not as long" });
        }
        if Stamp::of(&data) != self.stamp {
            return Err(Error::ContentsChanged { reason: "it was written to, or is another" });
        }
        Ok(file)
    }

    fn load(&self, device: &crate::Device, copies: &Copies<'_>, runs: &[Run]) -> Result<()> {
        let file = self.open()?;
        let mut ring = Ring::new(device, &self.pieces)?;
        let wanted = self.pieces.iter().filter(|piece| is_in(runs, piece.address));
        let loaded = ring.load(copies, wanted, &file).map_err(|error| named(error, &self.path));
        ring.finish(copies, loaded)
    }
}

/// Pieces no longer than a buffer, one behind the other in the file.
fn cut(used: &[Run]) -> Vec<FilePiece> {
    let mut offset = 0;
    let mut pieces = Vec::new();
    for run in used {
        let mut done = 0;
        while done < run.bytes {
            let bytes = (run.bytes - done).min(RING_BYTES);
            pieces.push(FilePiece { address: run.start + done, bytes, offset, sum: 0 });
            (done, offset) = (done + bytes, offset + bytes);
        }
    }
    pieces
}

/// Two buffers, each with the copy that still uses it.
struct Ring {
    buffers: Vec<Pinned>,
}

impl Ring {
    fn new(device: &crate::Device, pieces: &[FilePiece]) -> Result<Self> {
        let bytes = pieces.iter().map(|piece| piece.bytes).max().unwrap_or(0);
        let mut buffers = Vec::new();
        for _ in 0..pieces.len().min(2) {
            buffers.push(Pinned::new(device, bytes).map_err(|failure| failure.about(bytes))?);
        }
        Ok(Self { buffers })
    }

    /// Waits for copies that use the buffers still, whatever came of the rest.
    fn finish(self, copies: &Copies<'_>, result: Result<()>) -> Result<()> {
        if result.is_err() && copies.wait().is_err() {
            copies.strand(self.buffers);
        }
        result
    }

    fn save(&mut self, copies: &Copies<'_>, pieces: &mut [FilePiece], file: &File) -> Result<()> {
        let mut before = None;
        for at in 0..=pieces.len() {
            let copying = match pieces.get(at) {
                None => None,
                Some(piece) => {
                    let about = |failure: Failure| failure.about(piece.bytes);
                    // SAFETY: the buffer's former copy was waited for and written out two rounds
                    // ago; the ring waits before it goes. The runs are mapped.
                    unsafe { copies.save(&self.buffers[at % 2], 0, piece.address, piece.bytes) }
                        .map_err(about)?;
                    Some(copies.mark().map_err(about)?)
                }
            };
            if let Some(done) = std::mem::replace(&mut before, copying) {
                let piece = &mut pieces[at - 1];
                Done::wait(done).map_err(|of| of.about(piece.bytes))?;
                // SAFETY: its copy was waited for just now, and the next uses the other buffer.
                let filled = unsafe { self.buffers[(at - 1) % 2].slice() };
                let filled = &filled[..piece.bytes as usize];
                piece.sum = sum(filled);
                file.write_all_at(filled, piece.offset).map_err(of_file)?;
            }
        }
        Ok(())
    }

    fn load<'a>(
        &mut self,
        copies: &Copies<'_>,
        pieces: impl Iterator<Item = &'a FilePiece>,
        file: &File,
    ) -> Result<()> {
        let mut under_way = [None, None];
        for (at, piece) in pieces.enumerate() {
            let about = |failure: Failure| failure.about(piece.bytes);
            let copy = &mut under_way[at % 2];
            if let Some(done) = copy.take() {
                Done::wait(done).map_err(about)?;
            }
            let buffer = &mut self.buffers[at % 2];
            // SAFETY: the buffer's last copy was waited for.
            let filled = unsafe { &mut buffer.slice_mut()[..piece.bytes as usize] };
            file.read_exact_at(filled, piece.offset).map_err(|error| match error.kind() {
                io::ErrorKind::UnexpectedEof => {
                    Error::ContentsChanged { reason: "it is not as long" }
                }
                _ => of_file(error),
            })?;
            if sum(filled) != piece.sum {
                return Err(Error::ContentsChanged { reason: "its bytes are not those written" });
            }
            // SAFETY: the buffer is not touched before the copy was waited for, here or in
            // `finish`; the runs are mapped until after that.
            unsafe { copies.load(buffer, 0, piece.address, piece.bytes) }.map_err(about)?;
            *copy = Some(copies.mark().map_err(about)?);
        }
        for done in under_way.into_iter().flatten() {
            Done::wait(done)?;
        }
        Ok(())
    }
}

/// A number for some bytes that other bytes hardly have, at memory speed: four independent lanes of
/// multiply and rotate. Against accidents, not against malice.
fn sum(bytes: &[u8]) -> u64 {
    const ODD: u64 = 0x9E37_79B9_7F4A_7C15;
    let mut lanes = [1_u64, 2, 3, 4];
    let mut mix = |lane: usize, word: u64| {
        lanes[lane] = (lanes[lane] ^ word).wrapping_mul(ODD).rotate_left(29);
    };
    let (blocks, rest) = bytes.as_chunks::<32>();
    for block in blocks {
        for (lane, word) in block.as_chunks::<8>().0.iter().enumerate() {
            mix(lane, u64::from_le_bytes(*word));
        }
    }
    for (at, byte) in rest.iter().enumerate() {
        mix(at % 4, u64::from(*byte));
    }
    let whole = lanes
        .iter()
        .fold(bytes.len() as u64, |sum, lane| (sum ^ lane).wrapping_mul(ODD).rotate_left(31));
    whole ^ (whole >> 32)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn every_byte_and_its_place_count() {
        let bytes: Vec<u8> = (0..1000_u32).map(|at| (at * 7) as u8).collect();
        let whole = sum(&bytes);
        for at in 0..bytes.len() {
            let mut changed = bytes.clone();
            changed[at] ^= 0x10;
            assert_ne!(sum(&changed), whole, "byte {at}");
        }
        let mut swapped = bytes.clone();
        swapped.swap(8, 40);
        assert_ne!(sum(&swapped), whole);
        assert_ne!(sum(&bytes[..999]), whole);
        assert_ne!(sum(&[]), sum(&[0]));
    }

    #[test]
    fn pieces_cover_what_is_used() {
        let used =
            [Run { start: 1 << 40, bytes: RING_BYTES + 512 }, Run { start: 2 << 40, bytes: 4096 }];
        let pieces = cut(&used);
        let at: Vec<_> = pieces.iter().map(|of| (of.address, of.bytes, of.offset)).collect();
        assert_eq!(
            at,
            [
                (1 << 40, RING_BYTES, 0),
                ((1 << 40) + RING_BYTES, 512, RING_BYTES),
                (2 << 40, 4096, RING_BYTES + 512)
            ]
        );
        assert!(is_in(&used, (1 << 40) + RING_BYTES) && !is_in(&used, (2 << 40) + 4096));
        assert!(!is_in(&used, 0) && !is_in(&[], 1));
    }
}
