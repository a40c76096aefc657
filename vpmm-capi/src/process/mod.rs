//! The process's own driver and pools: one pool a device, which everything that plugs into the process
//! shares. They are made when they are first asked for, and last until the process ends.

mod captures;
mod copies;
#[cfg(test)]
mod crowd;
mod mode;
mod serve;
mod snapshot;
mod streams;
mod tags;
mod trace;

pub(crate) use captures::{Filter, begin, end, release};
pub use copies::{
    vpmm_process_copy, vpmm_process_download, vpmm_process_fill, vpmm_process_synchronize,
    vpmm_process_upload, vpmm_process_wait_for,
};
pub(crate) use serve::{Asked, Life, allocate, free, questions, record_stream};
pub use snapshot::vpmm_process_snapshot;
pub(crate) use tags::{close, push_heap, push_tag};
pub use tags::{vpmm_process_pop_tag, vpmm_process_push_tag, vpmm_process_push_tag_on};
pub use trace::{vpmm_process_record_history, vpmm_where};

use std::collections::BTreeMap;
use std::ffi::c_void;
use std::sync::{Arc, Mutex, MutexGuard, OnceLock, PoisonError, TryLockError};

use vpmm_core::{Access, Pool, StreamHandle};

use crate::driver::{Loaded, vpmm_driver};
use crate::grows;
use crate::guard::{Failure, guard, make, put_if};
use crate::options::vpmm_pool_options;
use crate::pool::vpmm_pool;
use crate::status::vpmm_status;

/// In `vpmm_process_configure`: for every device that has no options of its own.
pub const VPMM_EVERY_DEVICE: u32 = 0xffff_ffff;

/// The patience of a pool whose options leave it to the pool. A training whose host is just ahead of the
/// GPU finds a step's memory ready 0.3 to 1.4 ms after its last free, one whose step is long 14 ms after.
const PATIENCE_NANOSECONDS: u64 = 20_000_000;

struct Process {
    loaded: Option<Arc<Loaded>>,
    /// By the device's number; never dropped, as others may be using them when the process ends.
    pools: BTreeMap<u32, &'static Pool>,
    options: BTreeMap<u32, vpmm_pool_options>,
    /// Limits that are parts of a device's memory, for pools that are not made yet: beside the options,
    /// which may be given before and after.
    limits: BTreeMap<u32, u64>,
}

impl Process {
    const fn new() -> Self {
        Self {
            loaded: None,
            pools: BTreeMap::new(),
            options: BTreeMap::new(),
            limits: BTreeMap::new(),
        }
    }
}

static PROCESS: Mutex<Process> = Mutex::new(Process::new());

/// The driver once more, to be looked at without the lock.
static LOADED: OnceLock<Arc<Loaded>> = OnceLock::new();

/// Turns a child of the process away, before it takes one of the locks of these modules: a thread of its parent may
/// have held it.
pub(crate) fn check_process() -> Result<(), Failure> {
    LOADED.get().map_or(Ok(()), |loaded| loaded.check_process())
}

fn process() -> MutexGuard<'static, Process> {
    PROCESS.lock().unwrap_or_else(PoisonError::into_inner)
}

/// Whether a thread just now makes what the process has: loads the driver, or makes a device's context or a pool.
pub(crate) fn is_being_made() -> bool {
    let is_here = matches!(PROCESS.try_lock(), Err(TryLockError::WouldBlock));
    let is_in_driver = LOADED.get().is_some_and(|loaded| loaded.is_being_made());
    check_process().is_ok() && (is_here || is_in_driver)
}

impl Process {
    fn loaded(&mut self) -> Result<Arc<Loaded>, Failure> {
        match &self.loaded {
            Some(loaded) => Ok(Arc::clone(loaded)),
            None => {
                let loaded = self.loaded.insert(Loaded::load(None)?);
                Ok(Arc::clone(LOADED.get_or_init(|| Arc::clone(loaded))))
            }
        }
    }

    fn options_for(&self, device: u32) -> Option<vpmm_pool_options> {
        let given = self.options.get(&device).or_else(|| self.options.get(&VPMM_EVERY_DEVICE));
        given.map(|options| vpmm_pool_options { device, ..*options })
    }

    fn pool(&mut self, device: u32) -> Result<&'static Pool, Failure> {
        if let Some(pool) = self.pools.get(&device) {
            return Ok(pool);
        }
        let loaded = self.loaded()?;
        let mut options = match self.options_for(device) {
            Some(options) => options,
            None => vpmm_pool_options::initial(device),
        };
        // The least of both; 0 stands for no limit.
        if let Some(&part) = self.limits.get(&device) {
            let own = Some(options.limit_bytes).filter(|bytes| *bytes != 0);
            options.limit_bytes = own.map_or(part, |own| own.min(part));
        }
        if options.patience_nanoseconds == u64::MAX && !options.is_paged()? {
            options.patience_nanoseconds = PATIENCE_NANOSECONDS;
        }
        let pool = loaded.new_pool(&options)?;
        self.open_to_each_other(&pool);
        // For Rust code in this process, too.
        pool.make_current();
        let pool: &'static Pool = Box::leak(Box::new(pool));
        self.pools.insert(device, pool);
        Ok(pool)
    }

    /// Has a new pool's device and those that have pools already reach each other's memory, where they can at all.
    /// Programs expect that of what they allocate: PyTorch copies from one device to another as one copies within a
    /// device, and its kernels and CuPy's read there once they have asked for peer access, which opens what cudaMalloc
    /// gives but no memory that is mapped. A process on one device pays nothing for it.
    ///
    /// What the driver refuses stays closed and is no reason to have no pool: `vpmm_pool_access` tells.
    fn open_to_each_other(&self, pool: &Pool) {
        for other in self.pools.values() {
            let _ = pool.set_access(other.device(), Access::ReadWrite);
            let _ = other.set_access(pool.device(), Access::ReadWrite);
        }
    }

    fn limit_to_part(&mut self, device: u32, part: f64) -> Result<(), Failure> {
        if !(0.0..=1.0).contains(&part) {
            let text = format!("a limit of {part} times the memory; it is from 0 to 1");
            return Err(Failure::new(vpmm_status::VPMM_INVALID_ARGUMENT, text));
        }
        let memory = self.loaded()?.device(device)?.total_memory()?;
        // All of it is no limit: a pool with one places memory otherwise.
        let limit = (part < 1.0).then_some((memory as f64 * part) as u64);
        if let Some(pool) = self.pools.get(&device) {
            return Ok(pool.limit_to(limit)?);
        }
        match limit {
            Some(bytes) => self.limits.insert(device, bytes.max(1)),
            None => self.limits.remove(&device),
        };
        Ok(())
    }
}

/// For tests: the simulated driver with five devices, whatever the environment says, and few addresses.
#[cfg(test)]
pub(crate) fn use_simulator() {
    let mut process = process();
    if process.loaded.is_some() {
        return;
    }
    let loaded = Loaded::load(Some("sim:4")).expect("the simulator");
    process.loaded = Some(Arc::clone(LOADED.get_or_init(|| loaded)));
    let initial = vpmm_pool_options::initial(VPMM_EVERY_DEVICE);
    let options = vpmm_pool_options { limit_bytes: 1 << 30, va_size_bytes: 4 << 30, ..initial };
    process.options.insert(VPMM_EVERY_DEVICE, options);
}

/// For tests: held by each that captures, or that depends on nobody else's doing so.
#[cfg(test)]
pub(crate) fn alone() -> MutexGuard<'static, ()> {
    static ALONE: Mutex<()> = Mutex::new(());
    ALONE.lock().unwrap_or_else(PoisonError::into_inner)
}

/// The pool of a device.
pub(crate) fn pool(device: u32) -> Result<&'static Pool, Failure> {
    check_process()?;
    process().pool(device)
}

/// The pools that there are; in a child of the process none.
pub(crate) fn pools() -> Vec<&'static Pool> {
    if check_process().is_err() {
        return Vec::new();
    }
    process().pools.values().copied().collect()
}

/// Whether a driver is the process's own.
pub(crate) fn is_own(loaded: &Arc<Loaded>) -> bool {
    LOADED.get().is_some_and(|own| Arc::ptr_eq(own, loaded))
}

/// A stream that was kept, as pools take it.
pub(crate) fn known_stream(device: u32, raw: *mut c_void) -> Option<StreamHandle> {
    streams::find(device, raw).map(|entry| entry.stream)
}

/// Whether a graph's pool is open to some stream.
pub(crate) fn is_capturing() -> bool {
    mode::is(mode::Mode::Capturing)
}

/// Sets a limit as a part of a device's memory, whether its pool is made or not. The last counts.
pub(crate) fn limit_to_part(device: u32, part: f64) -> Result<(), Failure> {
    check_process()?;
    process().limit_to_part(device, part)
}

/// Sets what the process's pools will be made with: that of `options->device`, or of every device that
/// has no options of its own (`VPMM_EVERY_DEVICE`). `VPMM_IN_USE` if a pool that it is for was made
/// already.
///
/// # Safety
/// `options` is null or begins with its own size.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vpmm_process_configure(options: *const vpmm_pool_options) -> vpmm_status {
    guard(|| {
        check_process()?;
        if options.is_null() {
            return Err(Failure::null("options"));
        }
        // SAFETY: the caller vouches for it.
        let options = unsafe { grows::read(options) }?;
        // What cannot be is refused here, and not at the first request.
        if options.is_paged()? {
            options.paged_profile().map(drop)?;
        } else {
            options.default_profile().map(drop)?;
        }
        let mut process = process();
        let made = match options.device {
            VPMM_EVERY_DEVICE => process.pools.keys().next().copied(),
            device => process.pools.contains_key(&device).then_some(device),
        };
        if let Some(device) = made {
            let text = format!("the process's pool on device {device} was made already");
            return Err(Failure::new(vpmm_status::VPMM_IN_USE, text));
        }
        process.options.insert(options.device, options);
        Ok(())
    })
}

/// A handle of the process's own driver, loaded at the first call of this or of a function that needs
/// a pool of the process.
///
/// # Safety
/// `out` is null or has room for a pointer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vpmm_process_driver(out: *mut *mut vpmm_driver) -> vpmm_status {
    let work = || {
        check_process()?;
        let handle = Box::new(vpmm_driver(process().loaded()?));
        Ok(Box::into_raw(handle))
    };
    // SAFETY: the caller vouches for it.
    unsafe { make(out, work) }
}

/// A handle of the process's own pool on a device, made at the first call of this or of a request that
/// is served from it. The pool lasts until the process ends, whoever releases handles.
///
/// # Safety
/// `out` is null or has room for a pointer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vpmm_process_pool(device: u32, out: *mut *mut vpmm_pool) -> vpmm_status {
    let work = || {
        check_process()?;
        let mut process = process();
        let pool = process.pool(device)?.clone();
        let handle = vpmm_pool::handle(pool, process.loaded()?);
        Ok(handle)
    };
    // SAFETY: the caller vouches for it.
    unsafe { make(out, work) }
}

/// Whether the process's pool on a device was made: 1 or 0. Nothing is made by this: a pool has a context of
/// the device, which takes memory of its own. A child of the process has none.
#[unsafe(no_mangle)]
pub extern "C" fn vpmm_process_has_pool(device: u32) -> u32 {
    u32::from(check_process().is_ok() && process().pools.contains_key(&device))
}

/// As `vpmm_malloc`, from the process's pool on a device. Nothing is assumed about how long the stream
/// lasts, unless `vpmm_process_keep_stream` was called for it.
///
/// # Safety
/// The stream is alive; `out` is null or has room for a pointer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vpmm_process_malloc(
    device: u32,
    bytes: usize,
    stream: *mut c_void,
    out: *mut *mut c_void,
) -> vpmm_status {
    let work = || {
        // SAFETY: the caller vouches for it.
        let pointer = unsafe { allocate(device, bytes, stream, Life::Unknown, Asked::Not) }?;
        Ok(pointer)
    };
    // SAFETY: the caller vouches for it.
    unsafe { make(out, work) }
}

/// As `vpmm_free`, for memory of the process's pool on a device.
///
/// # Safety
/// As `vpmm_free`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vpmm_process_free(
    device: u32,
    pointer: *mut c_void,
    stream: *mut c_void,
) -> vpmm_status {
    // SAFETY: the caller vouches for it.
    guard(|| unsafe { free(device, pointer, stream, Life::Unknown) })
}

/// Says that a stream lasts until `vpmm_process_forget_stream`: the process's pools serve it without a
/// driver call from then on. PyTorch's requests do so by themselves, as its streams last as long as the
/// process.
///
/// # Safety
/// The stream is alive, and lasts as said.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vpmm_process_keep_stream(device: u32, stream: *mut c_void) -> vpmm_status {
    guard(|| {
        let pool = pool(device)?;
        // SAFETY: the caller vouches for it.
        unsafe { streams::adopt(pool.device(), pool, stream) }?;
        Ok(())
    })
}

/// Says that a stream which was kept is about to end. The process's pools then know no stream by that
/// handle; `known`, which may be null, says whether they did. One that they did not know stays alive until
/// what it was noted to use (`vpmm_process_record_stream`) has been freed.
///
/// # Safety
/// The stream is alive, and no other thread is in a call with it; `known` is null or has room for a
/// number.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vpmm_process_forget_stream(
    device: u32,
    stream: *mut c_void,
    known: *mut u32,
) -> vpmm_status {
    guard(|| {
        check_process()?;
        let was_known = streams::forget(device, stream);
        // SAFETY: the caller vouches for it.
        unsafe { put_if(known, u32::from(was_known)) };
        Ok(())
    })
}

/// As `vpmm_record_stream`, for memory of any of the process's pools. A stream that is kept
/// (`vpmm_process_keep_stream`) counts as lent.
///
/// # Safety
/// The stream is alive, and lasts as said there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vpmm_process_record_stream(
    pointer: *mut c_void,
    stream: *mut c_void,
) -> vpmm_status {
    // SAFETY: the caller vouches for it.
    guard(|| unsafe { record_stream(pointer, stream, Life::Unknown) })
}

#[cfg(test)]
mod tests {
    use std::sync::mpsc;

    use cuda_sys::types::CUresult;

    use super::*;

    #[test]
    fn it_is_being_made_while_a_thread_is_at_it() {
        let ((has_begun, begun), (end, may_end)) = (mpsc::channel(), mpsc::channel::<()>());
        let maker = std::thread::spawn(move || {
            let _process = process();
            has_begun.send(()).unwrap();
            assert!(may_end.recv().is_err());
        });
        begun.recv().unwrap();
        assert!(is_being_made());
        drop(end);
        maker.join().unwrap();
        // Other tests' pools are made in a moment.
        while is_being_made() {
            std::thread::yield_now();
        }
    }

    /// As PyTorch copies, and CuPy's kernels read: by a stream of one device, from another's memory.
    #[test]
    fn pools_of_devices_that_reach_each_other_are_open_to_each_other() {
        let mut process = Process::new();
        process.loaded = Some(Loaded::load(Some("sim:2")).ok().unwrap());
        let loaded = process.loaded().ok().unwrap();
        let initial = vpmm_pool_options::initial(VPMM_EVERY_DEVICE);
        let few = vpmm_pool_options { va_size_bytes: 4 << 30, ..initial };
        process.options.insert(VPMM_EVERY_DEVICE, few);
        let profile = crate::options::vpmm_profile::VPMM_PROFILE_PAGED as u32;
        process.options.insert(1, vpmm_pool_options { profile, ..few });
        let mut made: Vec<(&Pool, u64)> = Vec::new();
        for device in 0..3 {
            let pool = process.pool(device).ok().unwrap();
            let stream = pool.device().stream().unwrap();
            // Memory from before and after the others came, large and small.
            for bytes in [8 << 20, 1000] {
                made.push((pool, pool.malloc(bytes, &stream).unwrap().address()));
            }
            for (of, _) in &made {
                for (to, _) in &made {
                    assert_eq!(of.access(to.device()), Access::ReadWrite);
                }
            }
            let enter = loaded.raw().cuCtxSetCurrent.unwrap();
            // SAFETY: the context is retained by the device, which lives on.
            let entered = unsafe { enter(pool.device().context()) };
            assert_eq!(entered, CUresult::CUDA_SUCCESS);
            for &(_, from) in &made {
                let (to, raw) = (made.last().unwrap().1, loaded.raw());
                let copy = raw.cuMemcpyDtoDAsync_v2.unwrap();
                // SAFETY: both are allocated, and have as many bytes.
                let answer = unsafe { copy(to, from, 1000, stream.handle().raw()) };
                assert_eq!(answer, CUresult::CUDA_SUCCESS, "on {device}");
            }
            stream.synchronize().unwrap();
        }
    }

    /// The last part counts, and options that are given later are not lost for it.
    #[test]
    fn parts_are_set_in_any_order_before_there_is_a_pool() {
        let mut process = Process::new();
        process.loaded = Some(Loaded::load(Some("sim:2")).ok().unwrap());
        let memory = process.loaded().ok().unwrap().device(0).ok().unwrap().total_memory().unwrap();
        for (device, parts) in [(0, &[0.25, 0.5][..]), (1, &[0.25, 1.0]), (2, &[0.5])] {
            for part in parts {
                process.limit_to_part(device, *part).ok().unwrap();
            }
        }
        let initial = vpmm_pool_options::initial(2);
        process.options.insert(2, vpmm_pool_options { limit_bytes: memory / 8, ..initial });
        let every = vpmm_pool_options { limit_bytes: memory / 4 * 3, ..initial };
        process.options.insert(VPMM_EVERY_DEVICE, every);
        for (device, eighths) in [(0, 4), (1, 6), (2, 1)] {
            let pool = process.pool(device).ok().unwrap();
            let stream = pool.device().stream().unwrap();
            let limit = memory / 8 * eighths;
            assert!(pool.malloc(limit as usize + (4 << 20), &stream).is_err(), "{device}: more");
            let most = pool.malloc(limit as usize - (64 << 20), &stream).unwrap();
            pool.free(most, &stream).unwrap();
        }
    }
}
