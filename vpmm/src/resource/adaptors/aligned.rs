//! Greater alignments than what is below can give.

#![forbid(unsafe_code)]

use std::collections::HashMap;
use std::sync::{Mutex, MutexGuard, PoisonError};

use super::undo::or_undo;
use crate::device::StreamHandle;
use crate::error::{Error, Result};
use crate::resource::request::{MIN_ALIGN, check_align, is_of_nothing};
use crate::resource::{Description, Facts, MemoryResource};
use crate::units::{Bytes, DevicePtr, round_up};

/// No alignment is refused; what no resource has the memory for is out of memory.
const MOST: usize = 1 << (usize::BITS - 2);

/// Aligns every allocation of at least a threshold to a power of two, and others as they ask for it,
/// where what is below cannot: by asking for more, and handing out an aligned part of it.
///
/// What is below can give is passed on. For the rest a table remembers where each allocation really
/// begins: a look-up under a lock. RMM: `aligned_resource_adaptor`.
///
/// ```
/// use vpmm::resource::{Aligned, HostMalloc, MemoryResource};
/// use vpmm::StreamHandle;
///
/// let pages = Aligned::new(HostMalloc::new(), 4096)?.from_bytes(1 << 16);
/// let ptr = pages.allocate(1 << 16, 256, StreamHandle::LEGACY)?;
/// assert!(ptr.address() % 4096 == 0);
/// pages.deallocate(ptr, 1 << 16, 256, StreamHandle::LEGACY)?;
/// # Ok::<(), vpmm::Error>(())
/// ```
#[derive(Debug)]
pub struct Aligned<R> {
    upstream: R,
    alignment: usize,
    threshold_bytes: usize,
    moved: Mutex<Moved>,
}

/// By the address handed out, where that is not the one from below or has another size; and by the one from below,
/// which is none of the callers'.
#[derive(Debug, Default)]
struct Moved(HashMap<u64, Known>);

#[derive(Clone, Copy, Debug)]
enum Known {
    /// What was handed out.
    Part(Part),
    /// Where what is below has it begin, before the part. A pointer that was freed already may be the same.
    Start,
}

/// An allocation as it is known below.
#[derive(Clone, Copy, Debug)]
struct Part {
    whole: DevicePtr,
    whole_bytes: usize,
    /// What was asked for.
    bytes: usize,
}

impl Moved {
    /// The part that begins at an address, if it is one.
    ///
    /// # Errors
    /// [`Error::DoubleFree`] where what is below knows the address, but has given it to nobody here.
    fn find(&self, address: u64) -> Result<Option<Part>> {
        match self.0.get(&address) {
            None => Ok(None),
            Some(Known::Part(part)) => Ok(Some(*part)),
            Some(Known::Start) => Err(Error::DoubleFree { address }),
        }
    }

    fn enter(&mut self, address: u64, part: Part) {
        self.0.insert(part.whole.address(), Known::Start);
        // The part may begin where the whole does.
        self.0.insert(address, Known::Part(part));
    }

    fn leave(&mut self, address: u64, part: Part) {
        self.0.remove(&address);
        self.0.remove(&part.whole.address());
    }
}

impl<R: MemoryResource> Aligned<R> {
    /// Aligns everything to `alignment`.
    ///
    /// # Errors
    /// [`Error::BadAlignment`] unless it is a power of two.
    pub fn new(upstream: R, alignment: usize) -> Result<Self> {
        check_align(alignment, MOST)?;
        let alignment = alignment.max(MIN_ALIGN);
        Ok(Self { upstream, alignment, threshold_bytes: 0, moved: Mutex::default() })
    }

    /// The same, but requests of less than `threshold_bytes` are aligned as they ask for it.
    #[must_use]
    pub fn from_bytes(mut self, threshold_bytes: usize) -> Self {
        self.threshold_bytes = threshold_bytes;
        self
    }

    /// What is below.
    pub fn upstream(&self) -> &R {
        &self.upstream
    }

    fn moved(&self) -> MutexGuard<'_, Moved> {
        self.moved.lock().unwrap_or_else(PoisonError::into_inner)
    }

    /// What a request is aligned to.
    fn alignment_of(&self, bytes: usize, align: usize) -> usize {
        if bytes >= self.threshold_bytes { align.max(self.alignment) } else { align }
    }

    /// The longest request where what is below has one: what is aligned beyond what that can has to fit with more.
    fn most_bytes(&self, below: Facts) -> Option<usize> {
        let most = below.max_bytes?;
        if self.alignment <= below.max_align {
            return Some(most);
        }
        let aligned = most.saturating_sub(self.alignment - below.min_align.min(self.alignment));
        Some(aligned.max(most.min(self.threshold_bytes.saturating_sub(1))))
    }
}

impl<R: MemoryResource> MemoryResource for Aligned<R> {
    /// # Errors
    /// Those of what is below, but for
    /// [`AlignmentUnsupported`](Error::AlignmentUnsupported).
    fn allocate(&self, bytes: usize, align: usize, stream: StreamHandle) -> Result<DevicePtr> {
        check_align(align, MOST)?;
        let facts = self.upstream.facts();
        let align = self.alignment_of(bytes, align);
        if align <= facts.max_align || bytes == 0 {
            return self.upstream.allocate(bytes, align.min(facts.max_align), stream);
        }
        let (asked, unit_bytes) = (bytes as u64, align as u64);
        let overflow = Error::SizeOverflow { bytes: asked, unit_bytes };
        let spare = align - facts.min_align.min(align);
        let whole_bytes = bytes.checked_add(spare).ok_or(overflow.clone())?;
        let whole = self.upstream.allocate(whole_bytes, facts.min_align, stream)?;
        let Some(address) = round_up(whole.address(), unit_bytes) else {
            self.upstream.deallocate(whole, whole_bytes, facts.min_align, stream)?;
            return Err(overflow);
        };
        self.moved().enter(address, Part { whole, whole_bytes, bytes });
        // The pointer from below may carry a proof of its own; this one is looked up.
        Ok(DevicePtr::from_address(address))
    }

    /// # Errors
    /// [`Error::WrongSize`] and [`Error::DoubleFree`] where the table knows better; those of what is below.
    fn deallocate(
        &self,
        ptr: DevicePtr,
        bytes: usize,
        align: usize,
        stream: StreamHandle,
    ) -> Result<()> {
        if is_of_nothing(ptr, bytes)? {
            return Ok(());
        }
        let facts = self.upstream.facts();
        let address = ptr.address();
        // Out of the table first: once it is freed below, the address may come again.
        let known = {
            let mut moved = self.moved();
            let known = moved.find(address)?;
            if let Some(known) = known {
                if known.bytes != bytes {
                    let (given_bytes, bytes) = (bytes as u64, known.bytes as u64);
                    return Err(Error::WrongSize { address, given_bytes, bytes });
                }
                moved.leave(address, known);
            }
            known
        };
        let Some(known) = known else {
            let align = self.alignment_of(bytes, align);
            if align > facts.max_align && align.is_power_of_two() {
                return Err(Error::ForeignPointer { address });
            }
            return self.upstream.deallocate(ptr, bytes, align, stream);
        };
        let Part { whole, whole_bytes, .. } = known;
        let free = || self.upstream.deallocate(whole, whole_bytes, facts.min_align, stream);
        // Unless what is below has given it to somebody else meanwhile, for whom it is in the table.
        or_undo(free, || {
            let mut moved = self.moved();
            if ![address, whole.address()].iter().any(|at| moved.0.contains_key(at)) {
                moved.enter(address, known);
            }
        })
    }

    fn facts(&self) -> Facts {
        let facts = self.upstream.facts();
        let all = if self.threshold_bytes == 0 { self.alignment } else { MIN_ALIGN };
        facts.aligned(facts.min_align.max(all), MOST).with_max_bytes(self.most_bytes(facts))
    }

    fn describe(&self) -> Description {
        let mut description =
            Description::new("aligned").with("alignment", Bytes(self.alignment as u64));
        if self.threshold_bytes > 0 {
            description = description.with("from", Bytes(self.threshold_bytes as u64));
        }
        description.over(self.upstream.describe())
    }

    fn record_stream(&self, ptr: DevicePtr, stream: StreamHandle) -> Result<()> {
        let known = self.moved().find(ptr.address())?;
        self.upstream.record_stream(known.map_or(ptr, |known| known.whole), stream)
    }

    passes_on!(device, held_bytes);
}
