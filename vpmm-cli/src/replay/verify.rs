//! `--verify`: every allocation is written with a pattern of its own as device
//! work, and read again as device work before it is freed.
//!
//! Whatever two allocations share, or lose, or are given before earlier work on
//! it has finished, shows as words that differ. The pattern follows from the
//! allocation and the pass, so that what an earlier pass left behind is no match.
//!
//! The write is enqueued on the stream of the allocation and the check on that of
//! the free; where these differ, an event orders them, as the program that was
//! recorded must have done. Bytes past the last whole word of 8 are left alone.

use std::sync::Mutex;
use std::sync::PoisonError;

use vpmm::StreamHandle;

use super::engine::{Checker, Piece};
use crate::device::{Machine, Patterns, Words};
use crate::trace::Trace;

const WORD_BYTES: u64 = 8;

/// The device work of `--verify` over one trace.
pub struct Verifier<'a> {
    machine: &'a Machine,
    patterns: Patterns<'a>,
    stride_words: u64,
    /// Which pass this is: part of every pattern.
    pass: u64,
    /// Modelled time that this work has added on a simulated machine.
    modelled_us: Mutex<f64>,
}

/// An allocation whose pattern was not what had been written.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Mismatch {
    /// The allocation.
    pub slot: u32,
    /// How many of the words that were looked at differ.
    pub words: u64,
}

impl<'a> Verifier<'a> {
    /// Loads the kernels, and makes a counter per allocation of the trace.
    /// One word in each `stride_bytes` is written, and the last one.
    ///
    /// # Errors
    /// What the driver answers.
    pub fn new(machine: &'a Machine, trace: &Trace, stride_bytes: u64) -> vpmm::Result<Self> {
        let patterns = Patterns::new(machine.calls(), trace.allocations.len())?;
        let stride_words = (stride_bytes / WORD_BYTES).max(1);
        Ok(Self { machine, patterns, stride_words, pass: 0, modelled_us: Mutex::new(0.0) })
    }

    /// Waits for the device; which allocations were not found as they were left
    /// since this was called last.
    ///
    /// # Errors
    /// What the driver answers, or what the device work has failed with.
    pub fn finish_pass(&mut self) -> vpmm::Result<Vec<Mismatch>> {
        let counts = self.patterns.counts()?;
        self.patterns.clear()?;
        self.pass += 1;
        let found = (0..).zip(counts).filter(|(_, words)| *words > 0);
        Ok(found.map(|(slot, words)| Mismatch { slot, words }).collect())
    }

    /// The modelled time of the device work so far, in microseconds: 0 on a GPU.
    /// Where several threads work at once, other calls may be counted in.
    pub fn modelled_us(&self) -> f64 {
        *self.modelled_us.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// Runs device work and notes its modelled time.
    fn noting(&self, work: impl FnOnce() -> vpmm::Result<()>) -> vpmm::Result<()> {
        let Some(simulator) = self.machine.simulator() else {
            return work();
        };
        let before = simulator.modelled_us();
        let done = work();
        let spent = simulator.modelled_us() - before;
        *self.modelled_us.lock().unwrap_or_else(PoisonError::into_inner) += spent;
        done
    }

    fn words(&self, piece: &Piece) -> impl Iterator<Item = Words> + use<> {
        // Far apart for every slot and pass: patterns are sequences from a seed on.
        let seed = (self.pass << 32 | u64::from(piece.slot)) << 20;
        words(piece.address, piece.bytes / WORD_BYTES, self.stride_words, seed)
    }
}

/// Every `stride`-th of `total` words from `address` on, and the last word.
fn words(address: u64, total: u64, stride: u64, seed: u64) -> impl Iterator<Item = Words> + use<> {
    let last = total.saturating_sub(1);
    let sampled = Words { address, count: total.div_ceil(stride), stride, seed };
    let tail = Words { address: address + last * WORD_BYTES, count: 1, stride: 1, seed: !seed };
    let has_tail = total > 0 && !last.is_multiple_of(stride);
    (total > 0).then_some(sampled).into_iter().chain(has_tail.then_some(tail))
}

impl Checker for Verifier<'_> {
    fn write(&self, piece: &Piece) -> vpmm::Result<()> {
        self.noting(|| {
            for words in self.words(piece) {
                // SAFETY: the words lie within the allocation, which is the replay's own and may be
                // used on the stream that it was allocated on.
                unsafe { self.patterns.fill(words, piece.stream) }?;
            }
            Ok(())
        })
    }

    fn check(&self, piece: &Piece, free_stream: StreamHandle) -> vpmm::Result<()> {
        self.noting(|| {
            if piece.stream != free_stream {
                self.patterns.order(piece.stream, free_stream)?;
            }
            for words in self.words(piece) {
                // SAFETY: as in `write`; it is freed on this stream only after this call.
                unsafe { self.patterns.check(words, piece.slot as usize, free_stream) }?;
            }
            Ok(())
        })
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn offsets(total: u64, stride: u64) -> Vec<u64> {
        let mut offsets: Vec<u64> = words(0, total, stride, 5)
            .flat_map(|w| (0..w.count).map(move |i| w.address / WORD_BYTES + i * w.stride))
            .collect();
        offsets.sort_unstable();
        offsets
    }

    #[test]
    fn first_last_and_every_stride_are_covered_once() {
        assert_eq!(offsets(0, 4), []);
        assert_eq!(offsets(1, 4), [0]);
        assert_eq!(offsets(5, 4), [0, 4]);
        assert_eq!(offsets(7, 4), [0, 4, 6]);
        assert_eq!(offsets(3, 1), [0, 1, 2]);
    }
}
