//! The tests' device code, twice: as PTX for a GPU, and as Rust for the simulator.
//!
//! | kernel | parameters (each 64 bits) | what it does |
//! |---|---|---|
//! | `vpmm_fill` | address, words, stride, seed | writes `mix(seed, i)` to word `i * stride` for `i < words` |
//! | `vpmm_check` | address, words, stride, seed, errors | adds the number of words that differ from that to the word at `errors` |
//! | `vpmm_spin` | flag | runs until the 32-bit word at `flag` is not 0 |
//! | `vpmm_spin_clocks` | clocks | runs for that many clocks of its multiprocessor |
//!
//! Words are of 8 bytes and aligned, strides are in words. Any grid of one dimension is right
//! for `vpmm_fill` and `vpmm_check`; the spins want one thread. A program loads [`PTX`] with
//! cuModuleLoadData and launches by name, and runs alike on a GPU and on the simulator.
//!
//! Words that lie apart stand for all that is between the first and the last: the simulator counts
//! the whole of it as written or read. So its race detector sees another's use of any byte of an
//! allocation, of which a few words were touched.

#![forbid(unsafe_code)]

use cuda_sys::types::CUresult;

use crate::race::AccessKind;
use crate::{DeviceMemory, KernelParams};

/// The kernels as PTX text, NUL-terminated as cuModuleLoadData wants it. The driver compiles
/// it for any device of compute capability 6.0 or later.
pub const PTX: &str = concat!(include_str!("kernels.ptx"), "\0");

type Done = Result<(), CUresult>;

/// One of the kernels as the simulator runs it.
#[derive(Clone, Copy, Debug)]
pub struct Kernel {
    /// The name that cuModuleGetFunction finds it by.
    pub name: &'static str,
    /// The size of each parameter in bytes.
    pub param_sizes: &'static [usize],
    /// Does all of the launch's work at once. Where the kernel on a GPU would still be
    /// spinning it answers `CUDA_ERROR_NOT_READY`, and is to be run again later.
    pub run: fn(&KernelParams, &mut DeviceMemory<'_>) -> Done,
}

/// Every kernel of [`PTX`].
pub const KERNELS: [Kernel; 4] = [
    Kernel { name: "vpmm_fill", param_sizes: &[8; 4], run: fill },
    Kernel { name: "vpmm_check", param_sizes: &[8; 5], run: check },
    Kernel { name: "vpmm_spin", param_sizes: &[8; 1], run: spin },
    Kernel { name: "vpmm_spin_clocks", param_sizes: &[8; 1], run: spin_clocks },
];

/// What `vpmm_fill` writes to its `index`-th word: one step of splitmix64 from `seed + index`.
pub const fn mix(seed: u64, index: u64) -> u64 {
    let mut z = seed.wrapping_add(index).wrapping_add(0x9E37_79B9_7F4A_7C15);
    z = (z ^ (z >> 30)).wrapping_mul(0xBF58_476D_1CE4_E5B9);
    z = (z ^ (z >> 27)).wrapping_mul(0x94D0_49BB_1331_11EB);
    z ^ (z >> 31)
}

/// Words that are read or written in one go.
const BATCH: usize = 8192;

/// The words that a launch of `vpmm_fill` or `vpmm_check` is about.
struct Words {
    address: u64,
    count: u64,
    stride_bytes: u64,
    seed: u64,
}

impl Words {
    fn from(params: &KernelParams) -> Result<Self, CUresult> {
        let words = Self {
            address: params.u64(0)?,
            count: params.u64(1)?,
            stride_bytes: params.u64(2)?.wrapping_mul(8),
            seed: params.u64(3)?,
        };
        if words.address.is_multiple_of(8) {
            Ok(words)
        } else {
            Err(CUresult::CUDA_ERROR_MISALIGNED_ADDRESS)
        }
    }

    fn address_of(&self, index: u64) -> u64 {
        self.address.wrapping_add(index.wrapping_mul(self.stride_bytes))
    }

    /// Whether the words lie apart. Then everything between the first and the last counts as used here,
    /// and the words themselves are no uses of their own.
    fn lie_apart(&self, memory: &mut DeviceMemory<'_>, kind: AccessKind) -> Result<bool, CUresult> {
        match self.count.checked_sub(1) {
            Some(last @ 1..) if self.stride_bytes > 8 => {
                let end = self.address_of(last).wrapping_add(8);
                memory.count_as_used(self.address, end.wrapping_sub(self.address), kind)?;
                Ok(true)
            }
            _ => Ok(false),
        }
    }

    /// Indices in runs that lie side by side in memory, as `(first, length)`.
    fn runs(&self) -> impl Iterator<Item = (u64, usize)> + use<> {
        let (count, longest) = (self.count, if self.stride_bytes == 8 { BATCH as u64 } else { 1 });
        (0..count.div_ceil(longest)).map(move |run| {
            let first = run * longest;
            (first, longest.min(count - first) as usize)
        })
    }
}

fn fill(params: &KernelParams, memory: &mut DeviceMemory<'_>) -> Done {
    let words = Words::from(params)?;
    if words.lie_apart(memory, AccessKind::Write)? {
        let mut indices = 0..words.count;
        return indices
            .try_for_each(|at| memory.store(words.address_of(at), mix(words.seed, at), 8));
    }
    let mut bytes = Vec::new();
    for (first, length) in words.runs() {
        bytes.clear();
        for index in first..first + length as u64 {
            bytes.extend_from_slice(&mix(words.seed, index).to_le_bytes());
        }
        memory.write(words.address_of(first), &bytes)?;
    }
    Ok(())
}

/// How many words are not what `vpmm_fill` writes.
fn mismatches(words: &Words, memory: &mut DeviceMemory<'_>) -> Result<u64, CUresult> {
    let mut wrong = 0;
    if words.lie_apart(memory, AccessKind::Read)? {
        for at in 0..words.count {
            let found = memory.load(words.address_of(at), 8)?;
            wrong += u64::from(found != mix(words.seed, at));
        }
        return Ok(wrong);
    }
    let mut bytes = vec![0; BATCH * 8];
    for (first, length) in words.runs() {
        let bytes = &mut bytes[..length * 8];
        memory.read(words.address_of(first), bytes)?;
        let (found, _) = bytes.as_chunks::<8>();
        for (index, found) in (first..).zip(found) {
            wrong += u64::from(u64::from_le_bytes(*found) != mix(words.seed, index));
        }
    }
    Ok(wrong)
}

fn check(params: &KernelParams, memory: &mut DeviceMemory<'_>) -> Done {
    let words = Words::from(params)?;
    let errors = params.u64(4)?;
    let wrong = mismatches(&words, memory)?;
    if wrong > 0 {
        // An atomic addition: launches on any streams may add to one word, so these uses of it
        // must not count as a race.
        let so_far = memory.load(errors, 8)?;
        memory.store(errors, so_far.wrapping_add(wrong), 8)?;
    }
    Ok(())
}

fn spin(params: &KernelParams, memory: &mut DeviceMemory<'_>) -> Done {
    match memory.load(params.u64(0)?, 4)? as u32 {
        0 => Err(CUresult::CUDA_ERROR_NOT_READY),
        _ => Ok(()),
    }
}

/// The simulator has no clocks: how late work ends is its schedule's choice.
fn spin_clocks(params: &KernelParams, _: &mut DeviceMemory<'_>) -> Done {
    params.u64(0).map(drop)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn mix_is_splitmix64() {
        // The published generator's first outputs from state 0; its state moves by the
        // constant that `mix` adds.
        assert_eq!(mix(0, 0), 0xE220_A839_7B1D_CDAF);
        assert_eq!(mix(0x9E37_79B9_7F4A_7C15, 0), 0x6E78_9E6A_A1B9_65F4);
        assert_eq!(mix(5, 7), mix(12, 0));
        assert_eq!(mix(u64::MAX, 1), mix(0, 0));
    }

    #[test]
    fn ptx_has_every_kernel_with_its_parameters() {
        let text = PTX.strip_suffix('\0').expect("NUL-terminated");
        assert!(!text.contains('\0') && text.is_ascii());
        let entries: Vec<&str> = text.split(".visible .entry ").skip(1).collect();
        assert_eq!(entries.len(), KERNELS.len());
        for (kernel, entry) in KERNELS.iter().zip(entries) {
            let (head, _) = entry.split_once(')').expect("a parameter list");
            let (name, params) = head.split_once('(').expect("a parameter list");
            assert_eq!(name, kernel.name);
            assert_eq!(params.matches(".param .u64").count(), kernel.param_sizes.len());
            assert!(kernel.param_sizes.iter().all(|size| *size == 8));
        }
    }

    #[test]
    fn runs_cover_every_index_once() {
        for (count, stride_bytes) in [(0, 8), (1, 8), (8192, 8), (20_000, 8), (5, 512)] {
            let words = Words { address: 0, count, stride_bytes, seed: 0 };
            let indices: Vec<u64> =
                words.runs().flat_map(|(first, n)| first..first + n as u64).collect();
            assert_eq!(indices, (0..count).collect::<Vec<_>>());
        }
    }
}
