//! Memory as device work sees it: addresses are resolved when the work executes.

use std::collections::BTreeMap;
use std::ptr::NonNull;
use std::sync::Arc;
use std::sync::atomic::Ordering::{Acquire, Release};
use std::sync::atomic::{AtomicU32, AtomicU64};

use cuda_sys::types::CUresult;
use rustix::mm::{MapFlags, ProtFlags};
use smallvec::SmallVec;

use crate::address::AddressSpace;
use crate::context::ContextKey;
use crate::physical::{Physical, Seat};
use crate::race::{self, Access, AccessKind, Clock, Detector, PhysicalId, StreamKey};
use crate::report::Findings;

type Done = Result<(), CUresult>;

/// Everything that addresses lead to.
#[derive(Debug)]
pub(crate) struct Space {
    pub(crate) physical: Physical,
    pub(crate) addresses: AddressSpace,
    pub(crate) host: HostMemory,
    pub(crate) detector: Option<Detector>,
}

/// Page-locked and managed host memory, which device work may use at its host address.
#[derive(Debug, Default)]
pub(crate) struct HostMemory {
    by_start: BTreeMap<u64, HostAllocation>,
}

#[derive(Debug)]
pub(crate) struct HostAllocation {
    pub(crate) size: u64,
    pub(crate) flags: u32,
    pub(crate) id: PhysicalId,
    kind: HostKind,
    /// Which it was made or registered in.
    pub(crate) context: ContextKey,
}

/// Whose memory on the host it is.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum HostKind {
    /// Of cuMemAllocHost and cuMemHostAlloc.
    Locked,
    /// Of cuMemAllocManaged. It stays on the host here, wherever a device would have it.
    Managed,
    /// The caller's own, registered.
    Registered,
}

impl HostAllocation {
    pub(crate) fn is_managed(&self) -> bool {
        self.kind == HostKind::Managed
    }

    pub(crate) fn is_registered(&self) -> bool {
        self.kind == HostKind::Registered
    }
}

impl HostMemory {
    /// Allocations of cuMemAllocHost, cuMemHostAlloc and cuMemAllocManaged that were not freed.
    pub(crate) fn allocations(&self) -> usize {
        self.by_start.values().filter(|a| a.kind != HostKind::Registered).count()
    }

    /// New zeroed memory; its address.
    pub(crate) fn allocate(
        &mut self,
        size: u64,
        flags: u32,
        id: PhysicalId,
        kind: HostKind,
        context: ContextKey,
    ) -> Result<u64, CUresult> {
        const OOM: CUresult = CUresult::CUDA_ERROR_OUT_OF_MEMORY;
        let length = usize::try_from(size).map_err(|_| OOM)?;
        // SAFETY: a new anonymous mapping at an address of the kernel's choice touches no
        // other memory.
        let start = unsafe {
            rustix::mm::mmap_anonymous(
                std::ptr::null_mut(),
                length,
                ProtFlags::READ | ProtFlags::WRITE,
                MapFlags::PRIVATE | MapFlags::NORESERVE,
            )
        }
        .map_err(|_| OOM)? as u64;
        self.by_start.insert(start, HostAllocation { size, flags, id, kind, context });
        Ok(start)
    }

    /// Notes the caller's own memory as page-locked; false if some of it already is.
    pub(crate) fn register(
        &mut self,
        start: u64,
        size: u64,
        flags: u32,
        id: PhysicalId,
        context: ContextKey,
    ) -> bool {
        let Some(end) = start.checked_add(size) else { return false };
        let before = self.by_start.range(..end).next_back();
        if before.is_some_and(|(&at, other)| at + other.size > start) {
            return false;
        }
        let kind = HostKind::Registered;
        self.by_start.insert(start, HostAllocation { size, flags, id, kind, context });
        true
    }

    /// Whether memory of this kind begins at `start`.
    pub(crate) fn begins(&self, start: u64, kind: HostKind) -> bool {
        self.by_start.get(&start).is_some_and(|allocation| allocation.kind == kind)
    }

    /// Frees or unregisters the memory that begins at `start`, if it is of this kind.
    pub(crate) fn remove(&mut self, start: u64, kind: HostKind) -> Option<PhysicalId> {
        if !self.begins(start, kind) {
            return None;
        }
        let allocation = self.by_start.remove(&start)?;
        if kind != HostKind::Registered {
            // SAFETY: the range is the one mapping that `allocate` made, and it left the table,
            // so nothing else unmaps it; the caller gave up its pointers by freeing it.
            let _ = unsafe { rustix::mm::munmap(start as *mut _, allocation.size as usize) };
        }
        Some(allocation.id)
    }

    /// Frees and unregisters the memory of a context that ends.
    pub(crate) fn end_context(&mut self, context: ContextKey) -> Vec<PhysicalId> {
        let of_context = self.by_start.iter().filter(|(_, a)| a.context == context);
        let gone: Vec<_> = of_context.map(|(&start, a)| (start, a.kind)).collect();
        gone.into_iter().filter_map(|(start, kind)| self.remove(start, kind)).collect()
    }

    /// The allocation that holds an address, with its start.
    pub(crate) fn find(&self, address: u64) -> Option<(u64, &HostAllocation)> {
        let (&start, allocation) = self.by_start.range(..=address).next_back()?;
        (address < start + allocation.size).then_some((start, allocation))
    }

    /// Whether all of a range is page-locked or managed memory.
    pub(crate) fn holds(&self, address: u64, bytes: u64) -> bool {
        self.find(address).is_some_and(|(start, a)| {
            address.checked_add(bytes).is_some_and(|end| end <= start + a.size)
        })
    }
}

impl Drop for HostMemory {
    fn drop(&mut self) {
        let all: Vec<_> = self.by_start.iter().map(|(&start, a)| (start, a.kind)).collect();
        for (start, kind) in all {
            self.remove(start, kind);
        }
    }
}

impl Space {
    /// Whether every byte of a range is mapped and `device` may use it so, or is page-locked.
    pub(crate) fn accessible(&self, device: usize, address: u64, bytes: u64, write: bool) -> bool {
        if self.host.holds(address, bytes) {
            return true;
        }
        let Some(end) = address.checked_add(bytes) else { return false };
        let mut at = address;
        while at < end {
            match self.addresses.mapping(at) {
                Some((start, mapping)) if mapping.access().allows(device, write) => {
                    at = start + mapping.size;
                }
                _ => return false,
            }
        }
        true
    }

    /// Reads bytes from outside of all order; used by tests, not by device work.
    pub(crate) fn peek(&mut self, address: u64, to: &mut [u8]) -> Done {
        let (mut at, mut done) = (address, 0);
        while done < to.len() {
            let (start, mapping) =
                self.addresses.mapping(at).ok_or(CUresult::CUDA_ERROR_INVALID_VALUE)?;
            let length = ((start + mapping.size - at) as usize).min(to.len() - done);
            let source = self
                .physical
                .pointer(mapping.physical, at - start, length as u64)
                .ok_or(CUresult::CUDA_ERROR_INVALID_VALUE)?;
            // SAFETY: `pointer` answers `length` readable bytes of a segment, which cannot
            // overlap the caller's buffer; the simulator's lock keeps writers away.
            unsafe { std::ptr::copy_nonoverlapping(source, to[done..].as_mut_ptr(), length) };
            at += length as u64;
            done += length;
        }
        Ok(())
    }

    /// The memory behind a physical id is gone.
    pub(crate) fn forget(&mut self, id: PhysicalId) {
        if let Some(detector) = &mut self.detector {
            detector.forget(id);
        }
    }
}

/// Memory as one piece of device work sees it while it executes.
///
/// Addresses are those of the device (and of page-locked host memory). A range that is not
/// mapped, that was mapped only after the work was enqueued, or that the work's device has no
/// right to or had none then, gives `CUDA_ERROR_ILLEGAL_ADDRESS`, is
/// reported as misuse, and leaves all bytes unchanged.
#[derive(Debug)]
pub struct DeviceMemory<'a> {
    pub(crate) space: &'a mut Space,
    pub(crate) findings: &'a mut Findings,
    pub(crate) device: usize,
    pub(crate) stream: StreamKey,
    pub(crate) tick: u64,
    pub(crate) clock: &'a Clock,
    pub(crate) what: &'a Arc<str>,
    /// The last change of mappings before the work was enqueued.
    pub(crate) generation: u64,
}

/// Contiguous bytes in the host's address space.
#[derive(Clone, Copy, Debug)]
struct Piece {
    start: NonNull<u8>,
    bytes: usize,
}

type Pieces = SmallVec<[Piece; 4]>;

/// Whether any byte is in both.
fn overlap(one: &Pieces, other: &Pieces) -> bool {
    let bounds = |piece: &Piece| {
        let start = piece.start.as_ptr() as usize;
        (start, start + piece.bytes)
    };
    let mut all: SmallVec<[((usize, usize), usize); 8]> = SmallVec::new();
    all.extend(one.iter().map(|piece| (bounds(piece), 0)));
    all.extend(other.iter().map(|piece| (bounds(piece), 1)));
    all.sort_unstable();
    // How far each goes, of what begins no later.
    let mut ends = [0; 2];
    all.into_iter().any(|((start, end), of)| {
        ends[of] = end.max(ends[of]);
        start < ends[1 - of]
    })
}

fn given_back_text(
    what: &str,
    stream: StreamKey,
    kind: AccessKind,
    address: u64,
    free: &race::Work,
) -> String {
    format!(
        "`{what}` on {stream}: {kind} at {address:#x} of memory that `{}` on {} gave back before",
        free.what, free.stream
    )
}

/// An aligned word, which both the device and the host may reach at any time.
enum Word {
    Four(NonNull<AtomicU32>),
    Eight(NonNull<AtomicU64>),
}

impl Word {
    fn at(start: NonNull<u8>, bytes: u64) -> Option<Self> {
        let is_aligned = (start.as_ptr() as u64).is_multiple_of(bytes);
        match bytes {
            4 if is_aligned => Some(Self::Four(start.cast())),
            8 if is_aligned => Some(Self::Eight(start.cast())),
            _ => None,
        }
    }
}

impl DeviceMemory<'_> {
    /// Reads `to.len()` bytes at `address`.
    ///
    /// # Errors
    /// `CUDA_ERROR_ILLEGAL_ADDRESS`: see [`DeviceMemory`].
    pub fn read(&mut self, address: u64, to: &mut [u8]) -> Done {
        let mut done = 0;
        for piece in self.resolve(address, to.len() as u64, AccessKind::Read)? {
            let part = &mut to[done..done + piece.bytes];
            // SAFETY: a piece is that many readable bytes; `part` is the caller's exclusive
            // buffer, which cannot overlap memory that only the simulator hands out.
            unsafe {
                std::ptr::copy(piece.start.as_ptr(), part.as_mut_ptr(), piece.bytes);
            }
            done += piece.bytes;
        }
        Ok(())
    }

    /// Writes bytes at `address`.
    ///
    /// # Errors
    /// `CUDA_ERROR_ILLEGAL_ADDRESS`: see [`DeviceMemory`].
    pub fn write(&mut self, address: u64, from: &[u8]) -> Done {
        let mut done = 0;
        for piece in self.resolve(address, from.len() as u64, AccessKind::Write)? {
            let part = &from[done..done + piece.bytes];
            // SAFETY: a piece is that many writable bytes, and `part` as many readable ones.
            unsafe { std::ptr::copy(part.as_ptr(), piece.start.as_ptr(), piece.bytes) };
            done += piece.bytes;
        }
        Ok(())
    }

    /// Fills `bytes` bytes at `address` with one byte.
    ///
    /// # Errors
    /// `CUDA_ERROR_ILLEGAL_ADDRESS`: see [`DeviceMemory`].
    pub fn fill_u8(&mut self, address: u64, value: u8, bytes: u64) -> Done {
        self.fill(address, &[value], bytes)
    }

    /// Fills `words` 16-bit words at `address`.
    ///
    /// # Errors
    /// `CUDA_ERROR_ILLEGAL_ADDRESS`: see [`DeviceMemory`], or not aligned to a word.
    pub fn fill_u16(&mut self, address: u64, value: u16, words: u64) -> Done {
        self.fill(address, &value.to_le_bytes(), words)
    }

    /// Fills `words` 32-bit words at `address`.
    ///
    /// # Errors
    /// `CUDA_ERROR_ILLEGAL_ADDRESS`: see [`DeviceMemory`], or not aligned to a word.
    pub fn fill_u32(&mut self, address: u64, value: u32, words: u64) -> Done {
        self.fill(address, &value.to_le_bytes(), words)
    }

    /// Fills `words` 64-bit words at `address`.
    ///
    /// # Errors
    /// `CUDA_ERROR_ILLEGAL_ADDRESS`: see [`DeviceMemory`], or not aligned to a word.
    pub fn fill_u64(&mut self, address: u64, value: u64, words: u64) -> Done {
        self.fill(address, &value.to_le_bytes(), words)
    }

    /// Reads one 32-bit word.
    ///
    /// # Errors
    /// `CUDA_ERROR_ILLEGAL_ADDRESS`: see [`DeviceMemory`].
    pub fn read_u32(&mut self, address: u64) -> Result<u32, CUresult> {
        let mut bytes = [0; 4];
        self.read(address, &mut bytes)?;
        Ok(u32::from_le_bytes(bytes))
    }

    /// Reads one 64-bit word.
    ///
    /// # Errors
    /// `CUDA_ERROR_ILLEGAL_ADDRESS`: see [`DeviceMemory`].
    pub fn read_u64(&mut self, address: u64) -> Result<u64, CUresult> {
        let mut bytes = [0; 8];
        self.read(address, &mut bytes)?;
        Ok(u64::from_le_bytes(bytes))
    }

    /// Writes one 32-bit word.
    ///
    /// # Errors
    /// `CUDA_ERROR_ILLEGAL_ADDRESS`: see [`DeviceMemory`].
    pub fn write_u32(&mut self, address: u64, value: u32) -> Done {
        self.write(address, &value.to_le_bytes())
    }

    /// Writes one 64-bit word.
    ///
    /// # Errors
    /// `CUDA_ERROR_ILLEGAL_ADDRESS`: see [`DeviceMemory`].
    pub fn write_u64(&mut self, address: u64, value: u64) -> Done {
        self.write(address, &value.to_le_bytes())
    }

    /// Copies `bytes` bytes from `from` to `to`, which do not overlap, through whatever addresses:
    /// that they do is reported as misuse.
    ///
    /// # Errors
    /// `CUDA_ERROR_ILLEGAL_ADDRESS`: see [`DeviceMemory`].
    pub fn copy(&mut self, to: u64, from: u64, bytes: u64) -> Done {
        let source = self.resolve(from, bytes, AccessKind::Read)?;
        let target = self.resolve(to, bytes, AccessKind::Write)?;
        if overlap(&source, &target) {
            self.findings.misuse(format!(
                "`{}` on {}: a copy of {bytes} bytes from {from:#x} to {to:#x}, which overlap",
                self.what, self.stream
            ));
        }
        let (mut source, mut target) = (source.into_iter(), target.into_iter());
        let (mut s, mut t) = (source.next(), target.next());
        while let (Some(from), Some(to)) = (s, t) {
            let bytes = from.bytes.min(to.bytes);
            // SAFETY: both pieces hold at least that many bytes, readable and writable;
            // `copy` allows them to overlap.
            unsafe { std::ptr::copy(from.start.as_ptr(), to.start.as_ptr(), bytes) };
            s = from.after(bytes).or_else(|| source.next());
            t = to.after(bytes).or_else(|| target.next());
        }
        Ok(())
    }

    /// Counts a range as read or written, bytes that nobody looks at included: for work that does
    /// with some of them what a GPU's does with all.
    ///
    /// # Errors
    /// `CUDA_ERROR_ILLEGAL_ADDRESS`: see [`DeviceMemory`].
    pub fn count_as_used(&mut self, address: u64, bytes: u64, kind: AccessKind) -> Done {
        self.resolve(address, bytes, kind).map(drop)
    }

    /// Reads a word of 4 or 8 bytes the way stream memory operations and volatile loads do, in acquire
    /// order where it is aligned: the race detector takes no notice.
    pub(crate) fn load(&mut self, address: u64, bytes: u64) -> Result<u64, CUresult> {
        let pieces = self.pieces(address, bytes, AccessKind::Read)?;
        if let [piece] = pieces.as_slice() {
            match Word::at(piece.start, bytes) {
                // SAFETY: the word is mapped and readable, and host threads that write it meanwhile do so
                // atomically, as the driver's contract asks of them.
                Some(Word::Four(word)) => return Ok(unsafe { word.as_ref() }.load(Acquire).into()),
                // SAFETY: as above.
                Some(Word::Eight(word)) => return Ok(unsafe { word.as_ref() }.load(Acquire)),
                None => {}
            }
        }
        let mut word = [0; 8];
        let mut done = 0;
        for piece in pieces {
            let part = &mut word[done..done + piece.bytes];
            // SAFETY: a piece is that many readable bytes, and `part` is a local buffer.
            unsafe { std::ptr::copy(piece.start.as_ptr(), part.as_mut_ptr(), piece.bytes) };
            done += piece.bytes;
        }
        Ok(u64::from_le_bytes(word))
    }

    /// Writes the low 4 or 8 bytes of a word with release order; the race detector takes no
    /// notice.
    pub(crate) fn store(&mut self, address: u64, value: u64, bytes: u64) -> Done {
        let pieces = self.pieces(address, bytes, AccessKind::Write)?;
        let [piece] = pieces.as_slice() else { return Err(CUresult::CUDA_ERROR_ILLEGAL_ADDRESS) };
        match Word::at(piece.start, bytes) {
            // SAFETY: the word is mapped and writable, and host threads that poll it do so atomically, as
            // the driver's contract asks of them.
            Some(Word::Four(word)) => unsafe { word.as_ref() }.store(value as u32, Release),
            // SAFETY: as above.
            Some(Word::Eight(word)) => unsafe { word.as_ref() }.store(value, Release),
            None => return Err(CUresult::CUDA_ERROR_MISALIGNED_ADDRESS),
        }
        Ok(())
    }

    /// Reports a word that is read or written by [`Self::load`] or [`Self::store`] where the memory was given back
    /// before: it takes part in no race, but is somebody's all the same.
    pub(crate) fn detect_gone(&mut self, address: u64, bytes: u64, kind: AccessKind) {
        let Space { addresses, detector: Some(detector), .. } = &*self.space else { return };
        let Some((start, mapping)) = addresses.mapping(address) else { return };
        let range = address - start..address - start + bytes;
        if let Some(free) = detector.given_back(mapping.physical, &range, self.clock) {
            self.findings.misuse(given_back_text(self.what, self.stream, kind, address, free));
        }
    }

    /// Copies from host memory that the device cannot reach by itself.
    ///
    /// # Safety
    /// `from` must be readable for `bytes` bytes.
    pub(crate) unsafe fn write_from_host(&mut self, to: u64, from: u64, bytes: u64) -> Done {
        let mut source = from as *const u8;
        for piece in self.resolve(to, bytes, AccessKind::Write)? {
            // SAFETY: the caller vouches for the source; a piece is that many writable bytes.
            unsafe { std::ptr::copy(source, piece.start.as_ptr(), piece.bytes) };
            source = source.wrapping_add(piece.bytes);
        }
        Ok(())
    }

    /// Copies to host memory that the device cannot reach by itself.
    ///
    /// # Safety
    /// `to` must be writable for `bytes` bytes.
    pub(crate) unsafe fn read_to_host(&mut self, to: u64, from: u64, bytes: u64) -> Done {
        let mut target = to as *mut u8;
        for piece in self.resolve(from, bytes, AccessKind::Read)? {
            // SAFETY: the caller vouches for the target; a piece is that many readable bytes.
            unsafe { std::ptr::copy(piece.start.as_ptr(), target, piece.bytes) };
            target = target.wrapping_add(piece.bytes);
        }
        Ok(())
    }

    fn fill(&mut self, address: u64, pattern: &[u8], count: u64) -> Done {
        let width = pattern.len() as u64;
        let bytes = count.checked_mul(width).filter(|_| address.is_multiple_of(width));
        let bytes = bytes.ok_or(CUresult::CUDA_ERROR_ILLEGAL_ADDRESS)?;
        let uniform = pattern.iter().all(|byte| *byte == pattern[0]);
        for piece in self.resolve(address, bytes, AccessKind::Write)? {
            let start = piece.start.as_ptr();
            if uniform {
                // SAFETY: a piece is that many writable bytes.
                unsafe { std::ptr::write_bytes(start, pattern[0], piece.bytes) };
                continue;
            }
            // Mappings begin and end at granules, so no word spans two pieces. The filled part
            // doubles: the first word by hand, the rest from what is there already.
            let first = pattern.len().min(piece.bytes);
            // SAFETY: the piece holds at least `first` bytes, and so does the pattern.
            unsafe { std::ptr::copy_nonoverlapping(pattern.as_ptr(), start, first) };
            let mut filled = first;
            while filled < piece.bytes {
                let more = filled.min(piece.bytes - filled);
                // SAFETY: source and target are neighbours within the piece: `filled` bytes
                // are there, and `more` is not more than that nor than what is left.
                unsafe { std::ptr::copy_nonoverlapping(start, start.add(filled), more) };
                filled += more;
            }
        }
        Ok(())
    }

    /// Where the bytes are, after all checks, and noted as used by this work.
    fn resolve(&mut self, address: u64, bytes: u64, kind: AccessKind) -> Result<Pieces, CUresult> {
        let pieces = self.pieces(address, bytes, kind)?;
        self.detect(address, bytes, kind);
        Ok(pieces)
    }

    fn pieces(&mut self, address: u64, bytes: u64, kind: AccessKind) -> Result<Pieces, CUresult> {
        let write = kind == AccessKind::Write;
        if !self.space.accessible(self.device, address, bytes, write) {
            self.findings.misuse(format!(
                "`{}` on {}: {kind} of {bytes} bytes at {address:#x}, which device {} cannot reach \
                 when the work runs",
                self.what, self.stream, self.device
            ));
            return Err(CUresult::CUDA_ERROR_ILLEGAL_ADDRESS);
        }
        let mut pieces = Pieces::new();
        if self.space.host.holds(address, bytes) {
            let start = NonNull::new(address as *mut u8);
            let start = start.ok_or(CUresult::CUDA_ERROR_ILLEGAL_ADDRESS)?;
            pieces.push(Piece { start, bytes: bytes as usize });
            return Ok(pieces);
        }
        let end = address + bytes;
        let mut at = address;
        while at < end {
            let illegal = CUresult::CUDA_ERROR_ILLEGAL_ADDRESS;
            let (start, mapping) = self.space.addresses.mapping_mut(at).ok_or(illegal)?;
            if mapping.generation > self.generation {
                self.findings.misuse(format!(
                    "`{}` on {}: uses {at:#x}, where the mapping is newer than the work",
                    self.what, self.stream
                ));
                return Err(illegal);
            }
            if mapping.was_opened_after(self.device, write, self.generation) {
                self.findings.misuse(format!(
                    "`{}` on {}: {kind} at {at:#x}, which device {} was let reach after the work was \
                     enqueued",
                    self.what, self.stream, self.device
                ));
                return Err(illegal);
            }
            mapping.used_by(self.stream, self.tick, self.device);
            let length = (start + mapping.size).min(end) - at;
            let pointer = self.space.physical.pointer(mapping.physical, at - start, length);
            let pointer = pointer.and_then(NonNull::new).ok_or(illegal)?;
            pieces.push(Piece { start: pointer, bytes: length as usize });
            at += length;
        }
        Ok(pieces)
    }

    fn detect(&mut self, address: u64, bytes: u64, kind: AccessKind) {
        let Space { addresses, host, detector: Some(detector), .. } = &mut *self.space else {
            return;
        };
        let mut check = |physical, range| {
            let (stream, clock, what) = (self.stream, self.clock, &**self.what);
            if let Some(free) = detector.given_back(physical, &range, clock) {
                self.findings.misuse(given_back_text(what, stream, kind, address, free));
            }
            let access = Access { physical, range, kind, stream, clock, what };
            self.findings.races(detector.access(access));
        };
        let end = address + bytes;
        if let Some((start, allocation)) = host.find(address) {
            check(allocation.id, address - start..end - start);
            return;
        }
        let mut at = address;
        while let Some((start, mapping)) = addresses.mapping(at).filter(|_| at < end) {
            let stop = (start + mapping.size).min(end);
            check(mapping.physical, at - start..stop - start);
            at = stop;
        }
    }
}

impl Piece {
    /// What is left after the first `bytes`.
    fn after(self, bytes: usize) -> Option<Self> {
        let left = self.bytes.checked_sub(bytes).filter(|left| *left > 0)?;
        // SAFETY: `bytes` is less than the length of the piece, so this stays within it.
        let start = unsafe { self.start.add(bytes) };
        Some(Self { start, bytes: left })
    }
}

impl DeviceMemory<'_> {
    /// As [`Self::copy`], each end by right of the device that it is on, or of the stream's own
    /// where it is on none.
    pub(crate) fn copy_between_devices(&mut self, to: u64, from: u64, bytes: u64) -> Done {
        let here = self.device;
        let owner = |memory: &Self, address| {
            let (_, mapping) = memory.space.addresses.mapping(address)?;
            match memory.space.physical.get(mapping.physical)?.seat {
                Seat::Device(device) => Some(device),
                Seat::Host | Seat::HostNuma(_) => None,
            }
        };
        self.device = owner(self, from).unwrap_or(here);
        let mut staged = vec![0; bytes as usize];
        let read = self.read(from, &mut staged);
        self.device = owner(self, to).unwrap_or(here);
        let done = read.and_then(|()| self.write(to, &staged));
        self.device = here;
        done
    }
}
