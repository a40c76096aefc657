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
//! 3. Once it was released, segments go as they become free, and those that do so beside a graph's capture with a
//!    later free, or before a layout is sealed or published; but for those whose manager does not write
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
    /// Takes a segment down, in the place of whatever was noted there.
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

/// Has heaps that have ended give back what is free of them, so that it is no part of a layout that is about to be
/// published. Nothing beside a capture.
pub(super) fn settle_ended() {
    if SEGMENTS.load(Ordering::Acquire) == 0 || process::is_capturing() {
        return;
    }
    let has_ended = |heap: &&Arc<Heap>| heap.ended.load(Ordering::Acquire);
    let ended: Vec<Arc<Heap>> = heaps().by_number.values().filter(has_ended).cloned().collect();
    for heap in ended {
        // What cannot go now goes with a later free, or with its manager.
        let _ = heap.settle();
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
        let _alone = tensors::alone();
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

    /// A server and a client of it, on the process's simulator.
    fn served(device: u32) -> (super::super::vpmm_gms, impl FnOnce()) {
        let (mut driver, mut gms) = (std::ptr::null_mut(), std::ptr::null_mut());
        // SAFETY: room for a pointer.
        let made = unsafe { process::vpmm_process_driver(&raw mut driver) };
        assert_eq!(made, vpmm_status::VPMM_OK);
        // SAFETY: a handle, given back once.
        let driver = unsafe { Box::from_raw(driver) };
        let socket = format!("vpmm-heaps-{}-{device}.sock", std::process::id());
        let socket = std::env::temp_dir().join(socket);
        let memory = gms::memory::Memory::open(driver.0.raw(), device).unwrap();
        let mut settings = gms::server::Settings::new(&socket);
        settings.ahead_bytes = 0;
        let server = gms::server::Server::bind(memory, settings).unwrap();
        let stopper = server.stopper();
        let server = std::thread::spawn(move || server.run());
        let path = std::ffi::CString::new(socket.into_os_string().into_encoded_bytes()).unwrap();
        // SAFETY: a handle, a text that ends with a zero byte, room for a pointer.
        let opened = unsafe {
            super::super::vpmm_gms_open(&raw const *driver, device, path.as_ptr(), &raw mut gms)
        };
        assert_eq!(opened, vpmm_status::VPMM_OK);
        let end = move || {
            stopper.stop();
            server.join().unwrap().unwrap();
        };
        // SAFETY: made by `Box::into_raw`, given back once.
        (*unsafe { Box::from_raw(gms) }, end)
    }

    /// Beside a capture, which could not stand the wait.
    #[test]
    fn what_was_freed_in_a_capture_is_not_published() {
        /// Takes nobody.
        struct Nobodys;

        impl process::Filter for Nobodys {
            fn takes(&self, _: *mut std::ffi::c_void) -> bool {
                false
            }
        }

        const DEVICE: u32 = 4;
        process::use_simulator();
        let _alone = process::alone();
        let (gms, end) = served(DEVICE);
        // SAFETY: a handle.
        let connected =
            unsafe { super::super::vpmm_gms_connect(&gms, 0, 30_000, std::ptr::null_mut()) };
        assert_eq!(connected, vpmm_status::VPMM_OK);
        let source = gms.begin_torch("weights", false).ok().unwrap();
        let heap = vpmm_gms_heap(Heap::new(DEVICE).ok().unwrap());
        let [kept, freed] = [20 << 20, 30 << 20]
            .map(|bytes| heap.0.malloc(bytes, StreamHandle::LEGACY).ok().unwrap());
        let of_heap = Arc::clone(&heap.0);
        drop(heap);
        process::begin(process::pool(DEVICE).ok().unwrap(), (11, 0), Nobodys).ok().unwrap();
        of_heap.free(freed).ok().unwrap();
        process::end(DEVICE, (11, 0)).ok().unwrap();
        process::release(DEVICE, (11, 0)).ok().unwrap();
        let count = || {
            let mut held = gms.held().ok().unwrap();
            held.manager().ok().unwrap().mappings().len()
        };
        assert_eq!(count(), 2);
        // SAFETY: a handle.
        assert_eq!(unsafe { super::super::vpmm_gms_commit(&gms) }, vpmm_status::VPMM_OK);
        assert_eq!(count(), 1);
        of_heap.free(kept).ok().unwrap();
        tensors::end(source);
        drop(gms);
        end();
    }

    /// Threads that open heaps, use them and each other's, and release them with memory of theirs allocated, as others
    /// free that and the client does something else.
    #[test]
    fn threads_with_heaps_that_come_and_go_leave_nothing() {
        use std::sync::RwLock;
        use std::sync::atomic::AtomicU64;

        use gms::lock::Requested;
        use std::time::Duration;

        use crate::process::{
            vpmm_process_free, vpmm_process_malloc, vpmm_process_pop_tag,
            vpmm_process_record_stream,
        };

        const DEVICE: u32 = 4;
        process::use_simulator();
        let _alone = process::alone();
        let (gms, end) = served(DEVICE);
        let legacy = std::ptr::null_mut;
        let turns = std::env::var("VPMM_HEAPS_TURNS").ok().and_then(|set| set.parse().ok());
        let turns = turns.unwrap_or(400_u64);
        // SAFETY: a handle.
        let connected =
            unsafe { super::super::vpmm_gms_connect(&gms, 0, 30_000, std::ptr::null_mut()) };
        assert_eq!(connected, vpmm_status::VPMM_OK);
        let open: [RwLock<Option<vpmm_gms_heap>>; 3] = Default::default();
        let blocks = Mutex::new(BTreeMap::<u64, u64>::new());
        let made = AtomicU64::new(0);
        std::thread::scope(|scope| {
            for thread in 0..3_u64 {
                let (gms, open, blocks, made) = (&gms, &open, &blocks, &made);
                scope.spawn(move || {
                    let mut state = thread * 7919 + 1;
                    let mut below = move |bound: u64| {
                        state = state
                            .wrapping_mul(6364136223846793005)
                            .wrapping_add(1442695040888963407);
                        (state >> 33) % bound
                    };
                    let source = gms.begin_torch("weights", false).ok().unwrap();
                    for _ in 0..turns {
                        let slot = &open[below(3) as usize];
                        match below(10) {
                            0 => drop(slot.write().unwrap().take()),
                            1 => {
                                let new = vpmm_gms_heap(Heap::new(DEVICE).ok().unwrap());
                                drop(slot.write().unwrap().replace(new));
                            }
                            2..6 => {
                                let bytes = [1, 300_000, 3 << 20, 25 << 20][below(4) as usize];
                                let number = slot.read().unwrap().as_ref().map(vpmm_gms_heap::push);
                                if number.is_none() {
                                    continue;
                                }
                                // Its handle may go from here on.
                                let mut pointer = std::ptr::null_mut();
                                // SAFETY: the default stream, room for a pointer.
                                let answer = unsafe {
                                    vpmm_process_malloc(DEVICE, bytes, legacy(), &raw mut pointer)
                                };
                                assert_eq!(answer, vpmm_status::VPMM_OK);
                                assert_eq!(vpmm_process_pop_tag(), vpmm_status::VPMM_OK);
                                let address = pointer.addr() as u64;
                                let mut blocks = blocks.lock().unwrap();
                                let overlaps = blocks
                                    .range(..address + bytes as u64)
                                    .next_back()
                                    .is_some_and(|(at, of)| at + of > address);
                                assert!(!overlaps, "somebody has it");
                                blocks.insert(address, bytes as u64);
                                made.fetch_add(1, Ordering::Relaxed);
                            }
                            6 => {
                                let mut held = gms.held().ok().unwrap();
                                std::thread::sleep(Duration::from_micros(below(300)));
                                if below(20) == 0 {
                                    // The layout goes; what is mapped of it stays until it is freed.
                                    let options = gms::client::ConnectOptions::new(Requested::Rw);
                                    let manager = held.manager().ok().unwrap();
                                    manager.abort();
                                    manager.connect(options).unwrap();
                                }
                            }
                            _ => {
                                let mut blocks = blocks.lock().unwrap();
                                let from = below(1 << 47) | 1 << 47;
                                let next = blocks.range(from..).next().or(blocks.iter().next());
                                let Some((&address, _)) = next else { continue };
                                blocks.remove(&address);
                                drop(blocks);
                                let pointer = std::ptr::without_provenance_mut(address as usize);
                                if below(4) == 0 {
                                    // SAFETY: the default stream.
                                    let noted =
                                        unsafe { vpmm_process_record_stream(pointer, legacy()) };
                                    assert_eq!(noted, vpmm_status::VPMM_OK);
                                }
                                // SAFETY: nobody uses it.
                                let freed = unsafe { vpmm_process_free(DEVICE, pointer, legacy()) };
                                assert_eq!(freed, vpmm_status::VPMM_OK);
                            }
                        }
                    }
                    tensors::end(source);
                });
            }
        });
        let made = made.into_inner();
        println!("{made} blocks");
        assert!(made > 0);
        drop(open);
        for (address, _) in blocks.into_inner().unwrap() {
            let pointer = std::ptr::without_provenance_mut(address as usize);
            // SAFETY: nobody uses it.
            let freed = unsafe { vpmm_process_free(DEVICE, pointer, legacy()) };
            assert_eq!(freed, vpmm_status::VPMM_OK);
        }
        let its = |all: &Heaps| all.by_number.values().filter(|it| it.device == DEVICE).count();
        assert_eq!(its(&heaps()), 0);
        {
            let mut held = gms.held().ok().unwrap();
            let manager = held.manager().ok().unwrap();
            tensors::settle(&gms.manager, manager);
            assert_eq!(manager.mappings(), []);
            assert_eq!(manager.session().unwrap().allocation_count().unwrap(), 0);
        }
        drop(gms);
        end();
    }
}
