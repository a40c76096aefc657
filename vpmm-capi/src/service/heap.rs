//! The service's memory for programs whose allocator the process's pools are: PyTorch's own pools, which
//! would cut it up, do not go with a plugged-in allocator.
//!
//! ```text
//! request of a thread ─▶ heap, which cuts up segments ─▶ mapping of the manager that the thread uses
//! free, by the address ─▶ heap, which keeps segments until it has ended
//! ```
//!
//! 1. A heap cuts up by PyTorch's scheme, so that what a program makes is a layout as with PyTorch's own
//!    pools: small tensors share a granule, and what is freed serves again on its stream.
//! 2. An address is a heap's if it is in one of its segments. A heap is known until its last segment is
//!    gone, whoever has released it, and again when a thread that has it open still makes one.
//! 3. Once it was released, segments go as they become free, but for those whose manager does not write
//!    ([`tensors`](super::tensors)): these are that one's to keep.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError};

use vpmm_core::caching::{BlockState, CachingAllocator, CachingConfig};
use vpmm_core::resource::{Callback, Facts};
use vpmm_core::{DevicePtr, StreamHandle};

use super::tensors;
use crate::guard::{Failure, given, guard, make, release};
use crate::process;
use crate::status::vpmm_status;

/// What PyTorch's own addresses are multiples of.
const ALIGN: usize = 512;

/// Memory of the service for tensors, cut up as they need it.
pub(crate) struct Heap {
    number: u64,
    device: u32,
    allocator: CachingAllocator,
    /// Its handle is gone. Threads that have it open may still ask it for memory.
    ended: AtomicBool,
    /// Why the service had no memory the last time.
    refused: Arc<Mutex<String>>,
}

/// A segment of a heap: its bytes, and whose it is.
type Segment = (u64, u64);

/// What all threads know.
struct Heaps {
    by_number: BTreeMap<u64, Arc<Heap>>,
    /// By the address.
    segments: BTreeMap<u64, Segment>,
    made: u64,
}

impl Heaps {
    /// Takes a segment down. Where others are noted they are of managers that have ended before their
    /// tensors, and whose addresses are this one's now.
    fn add(&mut self, address: u64, segment: Segment) {
        let (bytes, _) = segment;
        let before = self.segments.range(..address).next_back();
        let before = before.filter(|(start, (bytes, _))| address - **start < *bytes);
        let others = self.segments.range(address..address.saturating_add(bytes));
        let gone: Vec<u64> = before.into_iter().chain(others).map(|(start, _)| *start).collect();
        gone.into_iter().for_each(|start| self.take(start));
        self.segments.insert(address, segment);
        SEGMENTS.store(self.segments.len(), Ordering::Release);
    }

    fn take(&mut self, address: u64) {
        self.segments.remove(&address);
        SEGMENTS.store(self.segments.len(), Ordering::Release);
    }
}

static HEAPS: Mutex<Heaps> =
    Mutex::new(Heaps { by_number: BTreeMap::new(), segments: BTreeMap::new(), made: 0 });

/// As many as there are segments: where there are none no free has to look for its.
static SEGMENTS: AtomicUsize = AtomicUsize::new(0);

/// Held for moments, and never while a heap is asked for anything.
fn heaps() -> MutexGuard<'static, Heaps> {
    HEAPS.lock().unwrap_or_else(PoisonError::into_inner)
}

fn lock(text: &Mutex<String>) -> MutexGuard<'_, String> {
    text.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The heap that an address is of.
pub(crate) fn of(address: u64) -> Option<Arc<Heap>> {
    if SEGMENTS.load(Ordering::Acquire) == 0 {
        return None;
    }
    let heaps = heaps();
    let (start, (bytes, number)) = heaps.segments.range(..=address).next_back()?;
    let is_inside = address - start < *bytes;
    heaps.by_number.get(number).filter(|_| is_inside).cloned()
}

impl Heap {
    fn new(device: u32) -> Result<Arc<Self>, Failure> {
        let number = {
            let mut heaps = heaps();
            heaps.made += 1;
            heaps.made
        };
        let refused: Arc<Mutex<String>> = Arc::default();
        let why = Arc::clone(&refused);
        let segments = Callback::new(
            // Its end waits for the device.
            Facts::of_device_memory().aligned(ALIGN, ALIGN),
            move |bytes, _, _| match tensors::allocate(bytes, device) {
                Ok(address) => {
                    heaps().add(address, (bytes as u64, number));
                    Ok(DevicePtr::from_address(address))
                }
                Err(failure) if failure.status() == vpmm_status::VPMM_OUT_OF_MEMORY => {
                    failure.text().clone_into(&mut lock(&why));
                    Ok(DevicePtr::NULL)
                }
                Err(failure) => Err(failure.into()),
            },
            |ptr, _, _, _| {
                // Before it goes: its address may be somebody else's at once.
                heaps().take(ptr.address());
                tensors::give_back(ptr.address());
                Ok(())
            },
        );
        let pool = process::pool(device)?;
        let segments = segments.with_device(pool.device());
        let allocator = CachingAllocator::over(segments, pool.device(), &CachingConfig::default())?;
        let heap =
            Arc::new(Self { number, device, allocator, ended: AtomicBool::new(false), refused });
        heaps().by_number.insert(number, Arc::clone(&heap));
        Ok(heap)
    }

    pub(crate) fn device(&self) -> u32 {
        self.device
    }

    pub(crate) fn malloc(
        self: &Arc<Self>,
        bytes: usize,
        stream: StreamHandle,
    ) -> Result<DevicePtr, Failure> {
        let made = self.allocator.malloc(bytes, stream).map_err(|error| {
            if !error.is_out_of_memory() {
                return error.into();
            }
            let why = std::mem::take(&mut *lock(&self.refused));
            let text = format!("The GPU memory service has not so much: {why}");
            // Still out of memory to adaptors, where the process's pool is a resource.
            Failure::from(error).saying(text)
        })?;
        // A thread has it open still, and it may have been forgotten. What ends it after this look finds the segment.
        if self.ended.load(Ordering::Acquire) {
            heaps().by_number.entry(self.number).or_insert_with(|| Arc::clone(self));
        }
        Ok(made)
    }

    /// Frees an allocation. Where the heap has ended, its segment goes if it is free now, unless a graph
    /// is being captured, which could not stand the wait.
    pub(crate) fn free(&self, ptr: DevicePtr) -> Result<(), Failure> {
        self.allocator.free(ptr)?;
        if self.ended.load(Ordering::Acquire) && !process::is_capturing() {
            // The free is done. What cannot go now goes with a later one, or with its manager.
            let _ = self.settle();
        }
        Ok(())
    }

    pub(crate) fn record_stream(
        &self,
        ptr: DevicePtr,
        stream: StreamHandle,
    ) -> Result<(), Failure> {
        Ok(self.allocator.record_stream(ptr, stream)?)
    }

    /// The allocation that an address is in: where it begins, and its bytes.
    pub(crate) fn allocation(&self, address: u64) -> Option<(u64, u64)> {
        let segments = self.allocator.snapshot();
        let blocks = segments.iter().flat_map(|segment| &segment.blocks);
        let is_it = |address: u64, start: u64, bytes: u64| {
            address.checked_sub(start).is_some_and(|offset| offset < bytes)
        };
        let mut blocks = blocks.filter(|block| block.state == BlockState::ActiveAllocated);
        let found = blocks.find(|block| is_it(address, block.address, block.size))?;
        Some((found.address, found.size))
    }

    /// Gives free segments back, and is forgotten with the last.
    fn settle(&self) -> Result<(), Failure> {
        self.allocator.empty_cache()?;
        let mut heaps = heaps();
        let has_more = heaps.segments.values().any(|(_, number)| *number == self.number);
        let gone = if has_more { None } else { heaps.by_number.remove(&self.number) };
        drop(heaps);
        drop(gone);
        Ok(())
    }

    fn end(&self) -> Result<(), Failure> {
        self.ended.store(true, Ordering::Release);
        self.settle()
    }
}

/// A heap of the service's memory.
pub struct vpmm_gms_heap(Arc<Heap>);

impl Drop for vpmm_gms_heap {
    fn drop(&mut self) {
        // What cannot go now goes with a later free, or with its manager.
        let _ = self.0.end();
    }
}

/// Makes a heap for tensors on a device in the service's memory, for programs whose allocator the
/// process's pools are. It has nothing at first; its segments are allocations of the manager that the
/// thread uses as they are needed (`vpmm_gms_torch_begin`), of one manager for one heap.
///
/// # Safety
/// `out` is null or has room for a pointer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vpmm_gms_heap_open(
    device: u32,
    out: *mut *mut vpmm_gms_heap,
) -> vpmm_status {
    let work = || Ok(Box::into_raw(Box::new(vpmm_gms_heap(Heap::new(device)?))));
    // SAFETY: the caller vouches for it.
    unsafe { make(out, work) }
}

/// From now on what this thread asks the process's pool on the heap's device for comes from the heap, until
/// `vpmm_process_pop_tag`. Frees find it by the address, whoever frees.
///
/// # Safety
/// `heap` is null or a handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vpmm_gms_heap_push(heap: *const vpmm_gms_heap) -> vpmm_status {
    guard(|| {
        // SAFETY: the caller vouches for it.
        let heap = unsafe { given(heap, "heap") }?;
        heap.push();
        Ok(())
    })
}

impl vpmm_gms_heap {
    /// Answers what [`process::close`] takes.
    pub(crate) fn push(&self) -> u64 {
        process::push_heap(Arc::clone(&self.0))
    }
}

/// Gives a handle back: free memory of the heap goes back to the server, and what is allocated still
/// follows as it is freed. Waits for the device.
///
/// # Safety
/// `heap` is null, or a handle that is not used again.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vpmm_gms_heap_release(heap: *mut vpmm_gms_heap) {
    // SAFETY: made by `Box::into_raw` in `vpmm_gms_heap_open`, given back once.
    unsafe { release(heap) };
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn what_the_service_refuses_has_its_status_behind_the_allocator() {
        process::use_simulator();
        let heap = Heap::new(0).ok().unwrap();
        // This thread uses no manager.
        let direct = tensors::allocate(2 << 20, 0).err().unwrap();
        let refused = heap.malloc(2 << 20, StreamHandle::LEGACY).err().unwrap();
        assert_eq!(refused.status(), direct.status(), "{}", refused.text());
        assert_ne!(refused.status(), vpmm_status::VPMM_OTHER);
    }

    /// A caller that is told of an error frees again.
    #[test]
    fn a_free_is_done_though_the_segment_stays() {
        process::use_simulator();
        // A device of its own: another test counts what is allocated on the first.
        let pool = process::pool(2).ok().unwrap();
        let (below, refused) = (pool.clone(), Arc::<Mutex<String>>::default());
        let refusing = Callback::new(
            Facts::of_device_memory().aligned(ALIGN, ALIGN),
            move |bytes, _, stream| below.malloc(bytes, stream),
            |_, _, _, _| Err(vpmm_core::Error::UnknownTag),
        );
        let refusing = refusing.with_device(pool.device());
        let allocator =
            CachingAllocator::over(refusing, pool.device(), &CachingConfig::default()).unwrap();
        let ended = AtomicBool::new(true);
        let heap = Arc::new(Heap { number: u64::MAX, device: 2, allocator, ended, refused });
        let ptr = heap.malloc(2 << 20, StreamHandle::LEGACY).ok().unwrap();
        assert!(heap.allocator.empty_cache().is_ok(), "nothing is free");
        let freed = heap.free(ptr).map_err(|failure| failure.text().to_owned());
        assert_eq!(freed, Ok(()));
        assert!(heap.allocator.empty_cache().is_err());
        assert!(heap.free(ptr).is_err(), "it was freed");
        heaps().by_number.remove(&u64::MAX);
        // Segments that its end could not give back are the pool's.
        std::mem::forget(heap);
    }
}
