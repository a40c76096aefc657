//! Copies and fills, on a container's stream.

use std::time::Duration;

use bytemuck::Pod;

use super::home::{Home, Turn};
use crate::capture::synchronize_beside_captures;
use crate::error::{Error, Result};
use crate::stream::Stream;
use crate::units::DevicePtr;

/// The bytes of a pattern that is made on the host; the rest is copied from there.
const PATTERN_BYTES: usize = 4096;

/// Values up to this many bytes are written by fills of 4 bytes each, which need no host memory.
const WORDS_BYTES: usize = 16;

/// How long a copy that cannot be waited for beside a capture is left to itself.
const BETWEEN_WAITS: Duration = Duration::from_millis(1);

/// A container's stream for a copy that the host waits for.
///
/// # Errors
/// [`Error::StreamCapturing`]: the copy would become a part of the graph, with an address of the host's
/// in it, and the wait would end the capture.
fn waiting(home: &Home) -> Result<Turn<'_>> {
    let stream = home.turn()?;
    if stream.is_capturing()? { Err(Error::StreamCapturing) } else { Ok(stream) }
}

/// Waits for what a container's stream was given so far.
pub(super) fn settle(home: &Home) -> Result<()> {
    waiting(home)?.synchronize()
}

/// Waits for a copy that memory of the host's is lent to.
fn wait(stream: &Stream) -> Result<()> {
    stream.synchronize().or_else(|error| {
        // The memory goes back to the host now. Where neither the stream nor the device can be waited for nothing runs
        // there any more: the context is lost. But a capture stands in the way of a wait only for a while.
        loop {
            let of_stream = match stream.is_capturing() {
                Ok(false) => stream.synchronize(),
                _ => Err(Error::StreamCapturing),
            };
            match of_stream.or_else(|_| synchronize_beside_captures(stream.device())) {
                Err(Error::StreamCapturing) => std::thread::sleep(BETWEEN_WAITS),
                waited => return waited.map_err(|_| error),
            }
        }
    })
}

/// Copies to the device, and waits for that.
pub(super) fn upload(home: &Home, to: u64, from: &[u8]) -> Result<()> {
    if from.is_empty() {
        return Ok(());
    }
    let stream = waiting(home)?;
    // SAFETY: the host's bytes are borrowed until the copy has been waited for.
    unsafe { enqueue_upload(&stream, to, from.as_ptr(), from.len()) }?;
    wait(&stream)
}

/// Copies from the device, and waits for that.
pub(super) fn download(home: &Home, to: &mut [u8], from: u64) -> Result<()> {
    if to.is_empty() {
        return Ok(());
    }
    let stream = waiting(home)?;
    // SAFETY: as in `upload`; nobody else has the bytes meanwhile.
    unsafe { enqueue_download(&stream, to.as_mut_ptr(), from, to.len()) }?;
    wait(&stream)
}

/// # Safety
/// The host's bytes stay as they are until the copy is done.
pub(super) unsafe fn enqueue_upload(
    stream: &Stream,
    to: u64,
    from: *const u8,
    bytes: usize,
) -> Result<()> {
    // SAFETY: the caller vouches for the host's bytes; containers for the device's.
    unsafe { stream.upload(DevicePtr::from_address(to), from, bytes) }
}

/// # Safety
/// Nobody uses the host's bytes until the copy is done.
pub(super) unsafe fn enqueue_download(
    stream: &Stream,
    to: *mut u8,
    from: u64,
    bytes: usize,
) -> Result<()> {
    // SAFETY: as in `enqueue_upload`.
    unsafe { stream.download(to, DevicePtr::from_address(from), bytes) }
}

/// Copies within one stream.
pub(super) fn across(stream: &Stream, to: u64, from: u64, bytes: usize) -> Result<()> {
    let (to, from) = (DevicePtr::from_address(to), DevicePtr::from_address(from));
    // SAFETY: the addresses are containers', which keep their memory until the stream is done with it. No
    // memory of the host's own is at either: a container's memory is device memory, or page-locked and
    // not lent out meanwhile.
    unsafe { stream.copy(to, from, bytes) }
}

/// Copies between containers: after what is enqueued on either's stream, before what will be.
pub(super) fn between(
    to_home: &Home,
    to: u64,
    from_home: &Home,
    from: u64,
    bytes: usize,
) -> Result<()> {
    let [writer, reader] = to_home.turns(from_home)?;
    writer.wait_for_stream(&reader)?;
    across(&writer, to, from, bytes)?;
    // What is enqueued on the reader's stream next may be a free: then the host waits instead.
    reader.wait_for_stream(&writer).or_else(|error| writer.synchronize().map_err(|_| error))
}

/// Sets `count` bytes.
pub(super) fn fill_bytes(stream: &Stream, to: u64, value: u8, count: usize) -> Result<()> {
    // SAFETY: the address is a container's, as in `across`.
    unsafe { stream.fill(DevicePtr::from_address(to), value, count) }
}

fn fill_words(stream: &Stream, to: u64, value: u32, count: usize) -> Result<()> {
    let _context = stream.device().enter()?;
    let raw = stream.handle().raw();
    // SAFETY: as in `fill_bytes`.
    unsafe { stream.device().driver().cuMemsetD32Async(to, value, count, raw) }
        .map_err(|failure| failure.about(count as u64 * 4))
}

fn fill_halves(stream: &Stream, to: u64, value: u16, count: usize) -> Result<()> {
    let _context = stream.device().enter()?;
    let raw = stream.handle().raw();
    // SAFETY: as in `fill_bytes`.
    unsafe { stream.device().driver().cuMemsetD16Async(to, value, count, raw) }
        .map_err(|failure| failure.about(count as u64 * 2))
}

/// Sets `count` values of `T`, whose addresses are multiples of 4 where `T` has a multiple of 4 bytes,
/// and of 2 where it has 2. Only for a longer `T` with unequal bytes the host waits.
pub(super) fn fill<T: Pod>(home: &Home, to: u64, value: &T, count: usize) -> Result<()> {
    let bytes = bytemuck::bytes_of(value);
    let Some(&first) = bytes.first().filter(|_| count > 0) else { return Ok(()) };
    if bytes.iter().all(|byte| *byte == first) {
        return fill_bytes(&*home.turn()?, to, first, count * bytes.len());
    }
    match bytes {
        [a, b] => fill_halves(&*home.turn()?, to, u16::from_ne_bytes([*a, *b]), count),
        [a, b, c, d] => fill_words(&*home.turn()?, to, u32::from_ne_bytes([*a, *b, *c, *d]), count),
        _ => fill_by_copies(home, to, bytes, count),
    }
}

/// Writes a pattern from the host, and doubles it until it is everywhere.
fn fill_by_copies(home: &Home, to: u64, pattern: &[u8], count: usize) -> Result<()> {
    let all = pattern.len() * count;
    let first = (PATTERN_BYTES / pattern.len()).clamp(1, count);
    upload(home, to, &pattern.repeat(first))?;
    let stream = home.turn()?;
    let mut done = first * pattern.len();
    while done < all {
        let more = done.min(all - done);
        across(&stream, to + done as u64, to, more)?;
        done += more;
    }
    Ok(())
}

/// Writes one value. The host waits only for one of more than 16 bytes, or of a length that is no
/// multiple of 4.
pub(super) fn write<T: Pod>(home: &Home, to: u64, value: &T) -> Result<()> {
    let bytes = bytemuck::bytes_of(value);
    if bytes.len() > WORDS_BYTES || !bytes.len().is_multiple_of(4) {
        return fill(home, to, value, 1);
    }
    let stream = home.turn()?;
    for (at, word) in bytes.chunks_exact(4).enumerate() {
        let word = u32::from_ne_bytes([word[0], word[1], word[2], word[3]]);
        fill_words(&stream, to + 4 * at as u64, word, 1)?;
    }
    Ok(())
}
