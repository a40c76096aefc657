//! `--verify`: every allocation is written with a pattern of its own as device
//! work, and read again as device work before it is freed.
//!
//! Whatever two allocations share, or lose, or are given before earlier work on
//! it has finished, shows as words that differ. The pattern follows from the
//! allocation and the pass, so that what an earlier pass left behind is no match. On a GPU every word is looked at; on the simulator a sample,
//! because its memory is the host's.
//!
//! The write is enqueued on the stream of the allocation and the check on that of
//! the free; where these differ, an event orders them, as the program that was
//! recorded must have done. Bytes past the last whole word of 8 are left alone.

use std::sync::Mutex;
use std::sync::PoisonError;

use cuda_sim::kernels::mix;
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
    /// Of each, the first and the last word are looked at, and those at multiples
    /// of `stride_bytes`; every word if that is less than two words.
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
        // Patterns are sequences from a seed on: of seeds at even distances, two allocations that
        // overlap by as much would have the same words there.
        let seed = mix(self.pass << 32 | u64::from(piece.slot), 0);
        words(piece.address, piece.bytes / WORD_BYTES, self.stride_words, seed)
    }
}

/// The words of an allocation of `total` words at `address` that are looked at:
/// the first, the last, and those at addresses that are multiples of the stride.
///
/// The addresses count, not the place in the allocation: where two allocations
/// share memory, both look at the same words of it. Seeds differ between the
/// parts, so that no part's pattern is right for another.
fn words(address: u64, total: u64, stride: u64, seed: u64) -> impl Iterator<Item = Words> + use<> {
    let one = |index: u64, seed: u64| Words {
        address: address + index * WORD_BYTES,
        count: 1,
        stride: 1,
        seed,
    };
    let parts = if total == 0 {
        [None; 3]
    } else if stride == 1 {
        [Some(Words { address, count: total, stride, seed }), None, None]
    } else {
        // Indices of the first and the last word; the grid is what lies between.
        let last = total - 1;
        let start = (address / WORD_BYTES + 1).next_multiple_of(stride) - address / WORD_BYTES;
        let grid = (start < last).then(|| Words {
            count: (last - start).div_ceil(stride),
            stride,
            ..one(start, seed)
        });
        [Some(one(0, !seed)), grid, (last > 0).then(|| one(last, !seed ^ 1 << 40))]
    };
    parts.into_iter().flatten()
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

    /// Indices of the words that are looked at, in the order of their addresses.
    fn indices(address: u64, total: u64, stride: u64) -> Vec<u64> {
        let mut indices: Vec<u64> = words(address, total, stride, 5)
            .flat_map(|w| {
                let first = (w.address - address) / WORD_BYTES;
                (0..w.count).map(move |i| first + i * w.stride)
            })
            .collect();
        indices.sort_unstable();
        indices
    }

    #[test]
    fn first_last_and_the_grid_are_covered_once() {
        assert!(indices(0, 0, 4).is_empty());
        assert_eq!(indices(0, 1, 4), [0]);
        assert_eq!(indices(0, 2, 4), [0, 1]);
        assert_eq!(indices(0, 5, 4), [0, 4]);
        assert_eq!(indices(0, 9, 4), [0, 4, 8]);
        assert_eq!(indices(0, 11, 4), [0, 4, 8, 10]);
        assert_eq!(indices(0, 3, 1), [0, 1, 2]);
    }

    #[test]
    fn the_grid_is_of_addresses() {
        // It starts at word 2 of the device: its words 2 and 6 are the device's 4 and 8.
        assert_eq!(indices(2 * WORD_BYTES, 9, 4), [0, 2, 6, 8]);
    }
}
