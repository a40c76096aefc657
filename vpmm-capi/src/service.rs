//! The client of the GPU memory service: memory that another process owns, with addresses that stay
//! while the memory behind them goes and comes back.
//!
//! What comes in numbers comes through a function that is called for each, with texts that end with a
//! zero byte and are gone when it returns.

pub(crate) mod heap;
mod place;
mod scratch;
pub(crate) mod tensors;

pub use heap::{vpmm_gms_heap, vpmm_gms_heap_open, vpmm_gms_heap_push, vpmm_gms_heap_release};
pub use place::{vpmm_gms_set_tag, vpmm_gms_socket_path};
pub use scratch::{
    vpmm_gms_create_scratch_mapping, vpmm_gms_destroy_scratch_mapping, vpmm_gms_prepare_scratch,
    vpmm_gms_scratch_summary, vpmm_gms_set_scratch_block,
};
pub use tensors::{
    vpmm_gms_torch_alloc, vpmm_gms_torch_begin, vpmm_gms_torch_end, vpmm_gms_torch_free,
};

use std::cell::RefCell;
use std::ffi::{CStr, OsStr, c_char, c_int, c_void};
use std::os::fd::{FromRawFd, IntoRawFd, OwnedFd};
use std::os::unix::ffi::OsStrExt;
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::{Arc, Mutex, MutexGuard, PoisonError, TryLockError};
use std::time::Duration;

use gms::CudaError;
use gms::client::{AllocationInfo, ClientError, ConnectOptions, Interrupt, MemoryManager};
use gms::lock::{Granted, Requested};

use crate::driver::{Loaded, vpmm_driver};
use crate::grows::{self, Grows};
use crate::guard::{Failure, c_text, given, guard, make, put_if, release, text, with};
use crate::python::without_lock;
use crate::status::vpmm_status;

/// A manager; nothing once it was closed. Tensors of PyTorch's know theirs as well.
type Shared = Arc<Mutex<Option<MemoryManager>>>;

/// A client of a server, with what this process has mapped through it.
pub struct vpmm_gms {
    // First, so that its driver is there when it ends.
    manager: Shared,
    /// How long its server may take for an answer, from the next connection on; none for ever.
    answer_time: Mutex<Option<Duration>>,
    /// Whether a signal ends a wait for the lock, from the next connection on.
    is_interruptible: AtomicBool,
    /// Who is asked whether a wait for an answer ends.
    check: Mutex<Option<Check>>,
    loaded: Arc<Loaded>,
}

/// Is asked while a call waits for the server's answer; other than 0 ends the wait. It lets no exception out.
pub type vpmm_gms_check = Option<unsafe extern "C" fn(context: *mut c_void) -> u32>;

/// Such a function, and what it is called with.
#[derive(Clone, Copy)]
struct Check {
    function: unsafe extern "C" fn(*mut c_void) -> u32,
    context: *mut c_void,
}

// SAFETY: whoever gives them vouches for calls from any thread.
unsafe impl Send for Check {}
// SAFETY: as above.
unsafe impl Sync for Check {}

thread_local! {
    /// The managers that calls of this thread have while somebody is asked, who may be the program.
    static ASKING: RefCell<Vec<usize>> = const { RefCell::new(Vec::new()) };
}

/// What a manager is known by.
fn name_of(manager: &Shared) -> usize {
    Arc::as_ptr(manager).addr()
}

impl Check {
    fn ends(self) -> bool {
        // SAFETY: whoever gave both vouches for it.
        unsafe { (self.function)(self.context) != 0 }
    }

    fn interrupt(self, manager: &Shared) -> Interrupt {
        /// Ends it however that ends.
        struct Asks;

        impl Drop for Asks {
            fn drop(&mut self) {
                ASKING.with_borrow_mut(Vec::pop);
            }
        }

        let name = name_of(manager);
        Interrupt::new(move || {
            ASKING.with_borrow_mut(|asking| asking.push(name));
            let _asks = Asks;
            self.ends()
        })
    }
}

/// Refuses a manager that a call of this very thread has, which waits for the answer of who asks.
fn check_thread(manager: &Shared) -> Result<(), Failure> {
    let name = name_of(manager);
    // Where a thread ends nobody is asked.
    if ASKING.try_with(|asking| asking.borrow().contains(&name)).unwrap_or(false) {
        let text = "a call of this thread's waits for an answer of the client's server";
        return Err(Failure::new(vpmm_status::VPMM_IN_USE, text));
    }
    Ok(())
}

/// The locks that a client may ask for.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum vpmm_gms_lock {
    /// To write a new layout. Whatever was published before is gone.
    VPMM_GMS_RW = 0,
    /// To read the published layout, with others.
    VPMM_GMS_RO = 1,
    /// To read if something is published, else to write.
    VPMM_GMS_RW_OR_RO = 2,
    /// To write to the memory of a sealed layout, else to write a new one.
    VPMM_GMS_RW_DATA_OR_RW = 3,
}

/// The locks that a client has.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum vpmm_gms_grant {
    /// None: it is not connected.
    VPMM_GMS_GRANT_NONE = 0,
    /// It writes a layout.
    VPMM_GMS_GRANT_RW = 1,
    /// It reads.
    VPMM_GMS_GRANT_RO = 2,
    /// It writes to the memory of a layout that stays as it is.
    VPMM_GMS_GRANT_RW_DATA = 3,
}

fn grant_of(granted: Option<Granted>) -> u32 {
    use vpmm_gms_grant::*;
    let grant = match granted {
        None => VPMM_GMS_GRANT_NONE,
        Some(Granted::Rw) => VPMM_GMS_GRANT_RW,
        Some(Granted::Ro) => VPMM_GMS_GRANT_RO,
        Some(Granted::RwData) => VPMM_GMS_GRANT_RW_DATA,
    };
    grant as u32
}

/// What a client is in: `size` is set by `vpmm_gms_state_init`, the rest by `vpmm_gms_state_of`.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct vpmm_gms_state {
    /// The bytes of this structure, as the program was built with it.
    pub size: usize,
    /// A `vpmm_gms_grant`.
    pub grant: u32,
    /// Whether the memory was given up and only the addresses are kept: 1 or 0.
    pub is_unmapped: u32,
    /// Bytes of all mappings, whether the memory is there or not.
    pub total_bytes: u64,
    /// What sizes are rounded up to.
    pub granularity: u64,
}

// SAFETY: two numbers of 4 bytes between those of 8, the size first.
unsafe impl Grows for vpmm_gms_state {
    const NAME: &'static str = "vpmm_gms_state";
    const INITIAL: Self =
        Self { size: size_of::<Self>(), grant: 0, is_unmapped: 0, total_bytes: 0, granularity: 0 };
}

/// An allocation, as the server knows it, and where it is in this process.
#[repr(C)]
#[derive(Clone, Copy, Debug)]
pub struct vpmm_gms_allocation {
    /// The bytes of this structure, as the library was built with it: further fields may follow.
    pub size: usize,
    /// Its name.
    pub id: *const c_char,
    /// What it is for.
    pub tag: *const c_char,
    /// The bytes that were asked for.
    pub bytes: u64,
    /// The bytes that it has.
    pub aligned_bytes: u64,
    /// Its place in the layout.
    pub layout_slot: u64,
    /// Where it is mapped, or an address is kept for it; 0 where that was not asked for.
    pub address: u64,
    /// Whether the memory is there: 1 or 0.
    pub is_mapped: u32,
    /// Reserved: 0.
    pub reserved: u32,
}

/// Is called with each allocation. It lets no exception out.
pub type vpmm_gms_visit_allocation =
    Option<unsafe extern "C" fn(context: *mut c_void, allocation: *const vpmm_gms_allocation)>;

/// Is called with each key. It lets no exception out.
pub type vpmm_gms_visit_key =
    Option<unsafe extern "C" fn(context: *mut c_void, key: *const c_char)>;

/// Is called with an entry of metadata. It lets no exception out.
pub type vpmm_gms_visit_value = Option<
    unsafe extern "C" fn(
        context: *mut c_void,
        allocation_id: *const c_char,
        offset_bytes: u64,
        value: *const c_void,
        value_bytes: usize,
    ),
>;

impl From<ClientError> for Failure {
    fn from(error: ClientError) -> Self {
        use vpmm_status::*;
        let status = match &error {
            ClientError::LockTimeout => VPMM_TIMED_OUT,
            ClientError::Interrupted => VPMM_INTERRUPTED,
            ClientError::Forked => VPMM_FORKED,
            ClientError::Connect { .. }
            | ClientError::Silent { .. }
            | ClientError::Replaced { .. }
            | ClientError::Disconnected
            | ClientError::Socket(_)
            | ClientError::Decode(_)
            | ClientError::Frame(_)
            | ClientError::Unexpected { .. }
            | ClientError::Descriptors { .. } => VPMM_DISCONNECTED,
            ClientError::Refused { .. } => VPMM_REFUSED,
            ClientError::Cuda(error) if error.is_out_of_memory() => VPMM_OUT_OF_MEMORY,
            ClientError::Cuda(CudaError::Missing(_)) => VPMM_NO_DRIVER,
            ClientError::Cuda(_) => VPMM_DRIVER_ERROR,
            ClientError::NotConnected
            | ClientError::AlreadyConnected { .. }
            | ClientError::WrongLock { .. }
            | ClientError::MappingState { .. } => VPMM_BAD_STATE,
            ClientError::StaleLayout { .. } => VPMM_STALE,
            ClientError::UnknownAddress { .. } => VPMM_BAD_POINTER,
            ClientError::Size { .. } | ClientError::ScratchBlock { .. } => VPMM_INVALID_ARGUMENT,
            _ => VPMM_OTHER,
        };
        Self::new(status, error.to_string())
    }
}

/// The manager while one call has it.
struct Held<'a>(MutexGuard<'a, Option<MemoryManager>>);

impl<'a> Held<'a> {
    fn of(manager: &'a Shared) -> Result<Self, Failure> {
        check_thread(manager)?;
        let held = match manager.try_lock() {
            Ok(held) => held,
            Err(TryLockError::Poisoned(poisoned)) => poisoned.into_inner(),
            // Who has it may ask a function of Python's before it lets go.
            Err(TryLockError::WouldBlock) => {
                without_lock(|| manager.lock().unwrap_or_else(PoisonError::into_inner))
            }
        };
        Ok(Self::at_once(held))
    }

    /// One that nobody else has.
    fn at_once(mut held: MutexGuard<'a, Option<MemoryManager>>) -> Self {
        // What the call before has set.
        if let Some(manager) = held.as_mut() {
            manager.set_interrupt(None);
        }
        Self(held)
    }

    /// Runs what may wait for an answer. Where somebody has ended that the answer is still to come: the
    /// connection is closed.
    fn ask<T>(
        &mut self,
        work: impl FnOnce(&mut MemoryManager) -> Result<T, Failure>,
    ) -> Result<T, Failure> {
        let manager = self.manager()?;
        let done = work(manager);
        if !manager.is_interrupted() {
            return done;
        }
        manager.abort();
        // Whatever was asked for after that.
        done.map_err(|_| ClientError::Interrupted.into())
    }

    fn manager(&mut self) -> Result<&mut MemoryManager, Failure> {
        let closed = || Failure::new(vpmm_status::VPMM_BAD_STATE, "the client was closed");
        self.0.as_mut().ok_or_else(closed)
    }
}

impl vpmm_gms {
    /// Not in a child of the process, in which the connection is its parent's, and another call of the parent's
    /// may have the manager for ever.
    fn held(&self) -> Result<Held<'_>, Failure> {
        self.loaded.check_process()?;
        Held::of(&self.manager)
    }

    /// The same for what the program asks for and is there to be told: a wait ends where somebody says so.
    fn held_until_told(&self) -> Result<Held<'_>, Failure> {
        let mut held = self.held()?;
        let check = *self.check.lock().unwrap_or_else(PoisonError::into_inner);
        if let (Some(manager), Some(check)) = (held.0.as_mut(), check) {
            manager.set_interrupt(Some(check.interrupt(&self.manager)));
        }
        Ok(held)
    }

    /// Takes the manager, which is about to end.
    fn take(&self, held: &mut Held<'_>) -> Option<MemoryManager> {
        held.0.take().inspect(|manager| tensors::leave(&self.manager, manager))
    }

    fn answer_time(&self) -> MutexGuard<'_, Option<Duration>> {
        self.answer_time.lock().unwrap_or_else(PoisonError::into_inner)
    }
}

impl Drop for vpmm_gms {
    fn drop(&mut self) {
        match self.held() {
            // Here and not where a tensor that goes may be the last to know of it.
            Ok(mut held) => drop(self.take(&mut held)),
            // The memory and the lock are the parent's.
            Err(_) => std::mem::forget(Arc::clone(&self.manager)),
        }
    }
}

/// Asks a manager for something. It is let go of then: what calls a visitor does so afterwards, so that the
/// visitor may ask as well.
///
/// # Safety
/// `gms` is null or a handle, which is not released meanwhile.
unsafe fn ask<T>(
    gms: *const vpmm_gms,
    work: impl FnOnce(&mut MemoryManager) -> Result<T, Failure>,
) -> Result<T, Failure> {
    // SAFETY: the caller vouches for it.
    let gms = unsafe { given(gms, "gms") }?;
    gms.held_until_told()?.ask(work)
}

/// Runs what a function does with a manager.
///
/// # Safety
/// As `ask`.
unsafe fn with_manager(
    gms: *const vpmm_gms,
    work: impl FnOnce(&mut MemoryManager) -> Result<(), Failure>,
) -> vpmm_status {
    // SAFETY: the caller vouches for it.
    guard(|| unsafe { ask(gms, work) })
}

/// Runs what a function makes with a manager, and writes it.
///
/// # Safety
/// As `ask`; `out` is null or to memory for a value.
unsafe fn make_with_manager<T>(
    gms: *const vpmm_gms,
    out: *mut T,
    work: impl FnOnce(&mut MemoryManager) -> Result<T, Failure>,
) -> vpmm_status {
    // SAFETY: the caller vouches for it.
    let work = || unsafe { ask(gms, work) };
    // SAFETY: the caller vouches for it.
    unsafe { make(out, work) }
}

/// The same for what ends a writer's layout as it is, or begins one: what its tensors gave back while other
/// calls had the manager, or beside a graph's capture, is no part of that.
///
/// # Safety
/// As `ask`.
unsafe fn ask_settled<T>(
    gms: *const vpmm_gms,
    work: impl FnOnce(&mut MemoryManager) -> Result<T, Failure>,
) -> Result<T, Failure> {
    // SAFETY: the caller vouches for it.
    let gms = unsafe { given(gms, "gms") }?;
    gms.loaded.check_process()?;
    // Before the manager is held, which they ask for.
    heap::settle_ended();
    gms.held_until_told()?.ask(|manager| {
        tensors::settle(&gms.manager, manager);
        // Nothing is published with what could not be freed.
        if manager.is_interrupted() { Err(ClientError::Interrupted.into()) } else { work(manager) }
    })
}

/// Runs what gives an address up, which is none of PyTorch's from then on.
///
/// # Safety
/// As `ask`.
unsafe fn give_up(
    gms: *const vpmm_gms,
    address: u64,
    work: impl FnOnce(&mut MemoryManager) -> Result<(), Failure>,
) -> vpmm_status {
    guard(|| {
        // SAFETY: the caller vouches for it.
        let gms = unsafe { given(gms, "gms") }?;
        let mut held = gms.held_until_told()?;
        let kept = held.manager()?.keep_addresses(address);
        held.ask(work)?;
        // Before another call can make something there.
        tensors::forget(&gms.manager, address, kept);
        Ok(())
    })
}

/// A text, or none for null.
///
/// # Safety
/// As `text`.
unsafe fn text_if<'a>(pointer: *const c_char, argument: &str) -> Result<Option<&'a str>, Failure> {
    if pointer.is_null() {
        return Ok(None);
    }
    // SAFETY: the caller vouches for it.
    unsafe { text(pointer, argument) }.map(Some)
}

/// Calls a visitor with an allocation.
///
/// # Safety
/// The function may be called with the context, and lets no exception out.
unsafe fn show(
    visit: unsafe extern "C" fn(*mut c_void, *const vpmm_gms_allocation),
    context: *mut c_void,
    allocation: &AllocationInfo,
    address: Option<(u64, bool)>,
) {
    let (id, tag) = (c_text(&allocation.allocation_id), c_text(&allocation.tag));
    let (address, is_mapped) = address.unwrap_or((0, false));
    let shown = vpmm_gms_allocation {
        size: size_of::<vpmm_gms_allocation>(),
        id: id.as_ptr(),
        tag: tag.as_ptr(),
        bytes: allocation.size,
        aligned_bytes: allocation.aligned_size,
        layout_slot: allocation.layout_slot,
        address,
        is_mapped: u32::from(is_mapped),
        reserved: 0,
    };
    // SAFETY: the caller vouches for it.
    unsafe { visit(context, &raw const shown) };
}

fn visitor<T>(visit: Option<T>) -> Result<T, Failure> {
    visit.ok_or_else(|| Failure::null("visit"))
}

/// Makes a client of the server at a path, for a device. Does not connect.
///
/// # Safety
/// `driver` is null or a handle; `socket_path` is null or ends with a zero byte; `out` is null or has
/// room for a pointer.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vpmm_gms_open(
    driver: *const vpmm_driver,
    device: u32,
    socket_path: *const c_char,
    out: *mut *mut vpmm_gms,
) -> vpmm_status {
    let work = || {
        // SAFETY: the caller vouches for it.
        let loaded = &unsafe { given(driver, "driver") }?.0;
        loaded.check_process()?;
        if socket_path.is_null() {
            return Err(Failure::null("socket_path"));
        }
        // SAFETY: the caller vouches for it.
        let path = OsStr::from_bytes(unsafe { CStr::from_ptr(socket_path) }.to_bytes());
        let manager = MemoryManager::new(loaded.raw(), device, path)?;
        let manager = Arc::new(Mutex::new(Some(manager)));
        let answer_time = Mutex::new(ConnectOptions::default().answer_timeout);
        let is_interruptible = AtomicBool::new(false);
        let loaded = Arc::clone(loaded);
        let check = Mutex::new(None);
        let client = vpmm_gms { manager, answer_time, is_interruptible, check, loaded };
        Ok(Box::into_raw(Box::new(client)))
    };
    // SAFETY: the caller vouches for it.
    unsafe { make(out, work) }
}

/// Waits for the device, and gives everything up: memory, addresses, the lock. The handle can only be
/// released then.
///
/// # Safety
/// `gms` is null or a handle; the memory is not used again.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vpmm_gms_close(gms: *const vpmm_gms) -> vpmm_status {
    let work = |gms: &vpmm_gms| {
        let manager = gms.take(&mut gms.held()?);
        manager.map_or(Ok(()), |manager| Ok(manager.close()?))
    };
    // SAFETY: the caller vouches for it.
    unsafe { with(gms, "gms", work) }
}

/// Gives a handle back, and everything up that was not.
///
/// # Safety
/// `gms` is null, or a handle that is not used again, nor is its memory.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vpmm_gms_release(gms: *mut vpmm_gms) {
    // SAFETY: made by `Box::into_raw` in `vpmm_gms_open`, given back once.
    unsafe { release(gms) };
}

/// Sets the size, `sizeof (vpmm_gms_state)` as the program has it, and everything else to 0.
///
/// # Safety
/// `state` is null or has room for `size` bytes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vpmm_gms_state_init(state: *mut vpmm_gms_state, size: usize) {
    // SAFETY: the caller vouches for it.
    unsafe { grows::init(state, size) };
}

/// What a client is in. Asks nobody.
///
/// # Safety
/// `gms` is null or a handle; `out` is null or begins with its own size.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vpmm_gms_state_of(
    gms: *const vpmm_gms,
    out: *mut vpmm_gms_state,
) -> vpmm_status {
    let work = |gms: &vpmm_gms| {
        let held = gms.held()?;
        let state = held.0.as_ref().map_or(vpmm_gms_state::INITIAL, |manager| vpmm_gms_state {
            grant: grant_of(manager.granted_lock()),
            is_unmapped: u32::from(manager.is_unmapped()),
            total_bytes: manager.total_bytes(),
            granularity: manager.granularity(),
            ..vpmm_gms_state::INITIAL
        });
        // SAFETY: the caller vouches for it.
        unsafe { grows::fill(out, state) }
    };
    // SAFETY: the caller vouches for it.
    unsafe { with(gms, "gms", work) }
}

/// Connects and waits for a lock, a `vpmm_gms_lock`, so many milliseconds, or for ever if negative.
/// `grant`, which may be null, gets the `vpmm_gms_grant`. `VPMM_TIMED_OUT` if the lock was not to be had,
/// `VPMM_DISCONNECTED` if no server was there, or it does not answer: see `vpmm_gms_set_answer_timeout`.
///
/// # Safety
/// `gms` is null or a handle; `grant` is null or has room for a number.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vpmm_gms_connect(
    gms: *const vpmm_gms,
    lock: u32,
    timeout_milliseconds: i64,
    grant: *mut u32,
) -> vpmm_status {
    let work = |gms: &vpmm_gms| {
        let lock = match lock {
            0 => Requested::Rw,
            1 => Requested::Ro,
            2 => Requested::RwOrRo,
            3 => Requested::RwDataOrRw,
            other => {
                let text = format!("lock cannot be {other}");
                return Err(Failure::new(vpmm_status::VPMM_INVALID_ARGUMENT, text));
            }
        };
        let mut options = ConnectOptions::new(lock)
            .answer_timeout(*gms.answer_time())
            .interruptible(gms.is_interruptible.load(Ordering::Relaxed));
        if let Ok(milliseconds) = u64::try_from(timeout_milliseconds) {
            options = options.timeout(Duration::from_millis(milliseconds));
        }
        let granted = gms.held_until_told()?.manager()?.connect(options)?;
        // SAFETY: the caller vouches for it.
        unsafe { put_if(grant, grant_of(Some(granted))) };
        Ok(())
    };
    // SAFETY: the caller vouches for it.
    unsafe { with(gms, "gms", work) }
}

/// Sets how many milliseconds a server that is there may take for an answer, from the next connection on,
/// before it counts as stopped or stuck (`VPMM_DISCONNECTED`); for ever if negative. A minute if nothing
/// is set. Locks, and memory that there is too little of, are waited for longer, as long as the server
/// says within that time that it is alive.
///
/// # Safety
/// `gms` is null or a handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vpmm_gms_set_answer_timeout(
    gms: *const vpmm_gms,
    milliseconds: i64,
) -> vpmm_status {
    let work = |gms: &vpmm_gms| {
        gms.loaded.check_process()?;
        *gms.answer_time() = u64::try_from(milliseconds).ok().map(Duration::from_millis);
        Ok(())
    };
    // SAFETY: the caller vouches for it.
    unsafe { with(gms, "gms", work) }
}

/// Sets whether a signal that has a handler and comes to the thread in `vpmm_gms_connect` ends its wait for
/// a server or a lock, from the next connection on: `VPMM_INTERRUPTED`. Not if nothing is set. For programs
/// whose handlers note the signal for later, as an interpreter's do.
///
/// # Safety
/// `gms` is null or a handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vpmm_gms_set_interruptible(
    gms: *const vpmm_gms,
    interruptible: u32,
) -> vpmm_status {
    let work = |gms: &vpmm_gms| {
        gms.loaded.check_process()?;
        gms.is_interruptible.store(interruptible != 0, Ordering::Relaxed);
        Ok(())
    };
    // SAFETY: the caller vouches for it.
    unsafe { with(gms, "gms", work) }
}

/// Has a function asked, with `context`, while a call waits for the server's answer: where a signal that has a
/// handler came to its thread, and ten times a second. Where it answers other than 0, and the server does not within
/// half a second, the call ends with `VPMM_INTERRUPTED`, and the connection with it, as after `vpmm_gms_abort`: a
/// writer's layout is void. So also while `vpmm_gms_connect` waits for a server and the lock, at once and whatever
/// `vpmm_gms_set_interruptible` says; where it answers 0 the place among those who wait stays. Nobody is asked if
/// null, as at first, nor for tensors of PyTorch's. For programs whose handlers note the signal for later, as an
/// interpreter's do, and run it then. What runs there cannot use the client: `VPMM_IN_USE`.
///
/// # Safety
/// `gms` is null or a handle; the function may be called by any thread that uses the handle, and lets no
/// exception out.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vpmm_gms_set_check(
    gms: *const vpmm_gms,
    check: vpmm_gms_check,
    context: *mut c_void,
) -> vpmm_status {
    let work = |gms: &vpmm_gms| {
        gms.loaded.check_process()?;
        let check = check.map(|function| Check { function, context });
        *gms.check.lock().unwrap_or_else(PoisonError::into_inner) = check;
        Ok(())
    };
    // SAFETY: the caller vouches for it.
    unsafe { with(gms, "gms", work) }
}

/// Gives the lock up. What is mapped stays mapped.
///
/// # Safety
/// `gms` is null or a handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vpmm_gms_abort(gms: *const vpmm_gms) -> vpmm_status {
    let work = |manager: &mut MemoryManager| {
        manager.abort();
        Ok(())
    };
    // SAFETY: the caller vouches for it.
    unsafe { with_manager(gms, work) }
}

/// Publishes the layout: waits for the device, takes the memory away here and keeps the addresses,
/// publishes, and ends the session.
///
/// # Safety
/// `gms` is null or a handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vpmm_gms_commit(gms: *const vpmm_gms) -> vpmm_status {
    // SAFETY: the caller vouches for it.
    guard(|| unsafe { ask_settled(gms, |manager| Ok(manager.commit()?)) })
}

/// Seals the layout: its allocations outlive this process. Session and mappings stay. `visit`, which may
/// be null, is called with the hash.
///
/// # Safety
/// `gms` is null or a handle; the function may be called with `context`, and lets no exception out.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vpmm_gms_commit_layout(
    gms: *const vpmm_gms,
    visit: vpmm_gms_visit_key,
    context: *mut c_void,
) -> vpmm_status {
    guard(|| {
        // SAFETY: the caller vouches for it.
        let hash = unsafe { ask_settled(gms, |manager| Ok(manager.commit_layout()?)) }?;
        if let Some(visit) = visit {
            // SAFETY: the caller vouches for it.
            unsafe { visit(context, c_text(&hash).as_ptr()) };
        }
        Ok(())
    })
}

/// Calls a function with the hash of the published or sealed layout.
///
/// # Safety
/// As `vpmm_gms_commit_layout`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vpmm_gms_layout_hash(
    gms: *const vpmm_gms,
    visit: vpmm_gms_visit_key,
    context: *mut c_void,
) -> vpmm_status {
    guard(|| {
        let visit = visitor(visit)?;
        // SAFETY: the caller vouches for it.
        let hash = unsafe { ask(gms, |manager| Ok(manager.layout_hash()?)) }?;
        // SAFETY: the caller vouches for it.
        unsafe { visit(context, c_text(&hash).as_ptr()) };
        Ok(())
    })
}

/// Makes an allocation at the server, of whole granules, and maps nothing; the function is called with
/// it.
///
/// # Safety
/// `gms` is null or a handle; `tag` is null or ends with a zero byte; the function may be called with
/// `context`, and lets no exception out.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vpmm_gms_allocate_handle(
    gms: *const vpmm_gms,
    bytes: u64,
    tag: *const c_char,
    visit: vpmm_gms_visit_allocation,
    context: *mut c_void,
) -> vpmm_status {
    guard(|| {
        let visit = visitor(visit)?;
        // SAFETY: the caller vouches for it.
        let tag = unsafe { text(tag, "tag") }?;
        // SAFETY: the caller vouches for it.
        let made = unsafe { ask(gms, |manager| Ok(manager.allocate_handle(bytes, tag)?)) }?;
        // SAFETY: the caller vouches for it.
        unsafe { show(visit, context, &made, None) };
        Ok(())
    })
}

/// A descriptor of an allocation's memory, for the caller to close.
///
/// # Safety
/// `gms` is null or a handle; `id` is null or ends with a zero byte; `out` is null or has room for a
/// descriptor.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vpmm_gms_export_handle(
    gms: *const vpmm_gms,
    id: *const c_char,
    out: *mut c_int,
) -> vpmm_status {
    let work = |manager: &mut MemoryManager| {
        // SAFETY: the caller vouches for it.
        let id = unsafe { text(id, "id") }?;
        Ok(manager.export_handle(id)?.into_raw_fd())
    };
    // SAFETY: the caller vouches for it.
    unsafe { make_with_manager(gms, out, work) }
}

/// Calls a function with an allocation.
///
/// # Safety
/// As `vpmm_gms_allocate_handle`, with `id` for `tag`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vpmm_gms_handle_info(
    gms: *const vpmm_gms,
    id: *const c_char,
    visit: vpmm_gms_visit_allocation,
    context: *mut c_void,
) -> vpmm_status {
    guard(|| {
        let visit = visitor(visit)?;
        // SAFETY: the caller vouches for it.
        let id = unsafe { text(id, "id") }?;
        // SAFETY: the caller vouches for it.
        let found = unsafe { ask(gms, |manager| Ok(manager.handle_info(id)?)) }?;
        // SAFETY: the caller vouches for it.
        unsafe { show(visit, context, &found, None) };
        Ok(())
    })
}

/// Calls a function with every allocation of a tag, or all if it is null, in the order of their slots.
///
/// # Safety
/// As `vpmm_gms_allocate_handle`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vpmm_gms_list_handles(
    gms: *const vpmm_gms,
    tag: *const c_char,
    visit: vpmm_gms_visit_allocation,
    context: *mut c_void,
) -> vpmm_status {
    guard(|| {
        let visit = visitor(visit)?;
        // SAFETY: the caller vouches for it.
        let tag = unsafe { text_if(tag, "tag") }?;
        // SAFETY: the caller vouches for it.
        let all = unsafe { ask(gms, |manager| Ok(manager.list_handles(tag)?)) }?;
        for one in &all {
            // SAFETY: the caller vouches for it.
            unsafe { show(visit, context, one, None) };
        }
        Ok(())
    })
}

/// Calls a function with everything that is mapped, or an address is kept for, by address. Asks nobody.
///
/// # Safety
/// As `vpmm_gms_allocate_handle`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vpmm_gms_list_mappings(
    gms: *const vpmm_gms,
    visit: vpmm_gms_visit_allocation,
    context: *mut c_void,
) -> vpmm_status {
    guard(|| {
        let visit = visitor(visit)?;
        // SAFETY: the caller vouches for it.
        let all = unsafe { ask(gms, |manager| Ok(manager.mappings())) }?;
        for one in all {
            let allocation = AllocationInfo {
                allocation_id: one.allocation_id,
                size: one.bytes,
                aligned_size: one.bytes,
                tag: one.tag,
                layout_slot: one.layout_slot,
            };
            // SAFETY: the caller vouches for it.
            unsafe { show(visit, context, &allocation, Some((one.address, one.is_mapped))) };
        }
        Ok(())
    })
}

/// Gives an allocation back; `freed`, which may be null, gets 1 if there was one, else 0.
///
/// # Safety
/// `gms` is null or a handle; `id` is null or ends with a zero byte; `freed` is null or has room for a
/// number.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vpmm_gms_free_handle(
    gms: *const vpmm_gms,
    id: *const c_char,
    freed: *mut u32,
) -> vpmm_status {
    let work = |manager: &mut MemoryManager| {
        // SAFETY: the caller vouches for it.
        let id = unsafe { text(id, "id") }?;
        let was_there = manager.free_handle(id)?;
        // SAFETY: the caller vouches for it.
        unsafe { put_if(freed, u32::from(was_there)) };
        Ok(())
    };
    // SAFETY: the caller vouches for it.
    unsafe { with_manager(gms, work) }
}

/// Reserves addresses for so many bytes, in whole granules.
///
/// # Safety
/// `gms` is null or a handle; `out` is null or has room for a number.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vpmm_gms_reserve(
    gms: *const vpmm_gms,
    bytes: u64,
    out: *mut u64,
) -> vpmm_status {
    // SAFETY: the caller vouches for both.
    unsafe { make_with_manager(gms, out, |manager| Ok(manager.reserve(bytes)?)) }
}

/// Maps an allocation at an address that was reserved for it. The descriptor, of its memory, is closed
/// in any case. What the server knows of it is asked for.
///
/// # Safety
/// `gms` is null or a handle; `file` is an open descriptor, or negative; `id` is null or ends with a
/// zero byte.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vpmm_gms_map(
    gms: *const vpmm_gms,
    file: c_int,
    address: u64,
    id: *const c_char,
) -> vpmm_status {
    // SAFETY: the caller vouches for it, and gives it away.
    let file = (file >= 0).then(|| unsafe { OwnedFd::from_raw_fd(file) }).ok_or(file);
    let work = |manager: &mut MemoryManager| {
        let file = file.map_err(|file| {
            let text = format!("{file} is no descriptor");
            Failure::new(vpmm_status::VPMM_INVALID_ARGUMENT, text)
        })?;
        // SAFETY: the caller vouches for it.
        let allocation = manager.handle_info(unsafe { text(id, "id") }?)?;
        Ok(manager.map(address, file, allocation)?)
    };
    // SAFETY: the caller vouches for it.
    unsafe { with_manager(gms, work) }
}

/// Waits for the device, takes the memory at an address away and keeps the address.
///
/// # Safety
/// `gms` is null or a handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vpmm_gms_unmap(gms: *const vpmm_gms, address: u64) -> vpmm_status {
    // SAFETY: the caller vouches for it.
    unsafe { with_manager(gms, |manager| Ok(manager.unmap(address)?)) }
}

/// Gives an address back at which no memory is.
///
/// # Safety
/// `gms` is null or a handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vpmm_gms_free_address(gms: *const vpmm_gms, address: u64) -> vpmm_status {
    // SAFETY: the caller vouches for it.
    unsafe { give_up(gms, address, |manager| Ok(manager.free_address(address)?)) }
}

/// Puts an entry of metadata.
///
/// # Safety
/// `gms` is null or a handle; `key` and `id` are null or end with a zero byte; `value` is to
/// `value_bytes` bytes, or null and there are none.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vpmm_gms_metadata_put(
    gms: *const vpmm_gms,
    key: *const c_char,
    id: *const c_char,
    offset_bytes: u64,
    value: *const c_void,
    value_bytes: usize,
) -> vpmm_status {
    let work = |manager: &mut MemoryManager| {
        // SAFETY: the caller vouches for both.
        let (key, id) = unsafe { (text(key, "key")?, text(id, "id")?) };
        let value: &[u8] = match (value.is_null(), value_bytes) {
            (_, 0) => &[],
            (true, _) => return Err(Failure::null("value")),
            // SAFETY: the caller vouches for it.
            (false, bytes) => unsafe { std::slice::from_raw_parts(value.cast(), bytes) },
        };
        Ok(manager.metadata_put(key, id, offset_bytes, value)?)
    };
    // SAFETY: the caller vouches for it.
    unsafe { with_manager(gms, work) }
}

/// Calls a function with an entry of metadata, if there is one.
///
/// # Safety
/// `gms` is null or a handle; `key` is null or ends with a zero byte; the function may be called with
/// `context`, and lets no exception out.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vpmm_gms_metadata_get(
    gms: *const vpmm_gms,
    key: *const c_char,
    visit: vpmm_gms_visit_value,
    context: *mut c_void,
) -> vpmm_status {
    guard(|| {
        let visit = visitor(visit)?;
        // SAFETY: the caller vouches for it.
        let key = unsafe { text(key, "key") }?;
        // SAFETY: the caller vouches for it.
        let found = unsafe { ask(gms, |manager| Ok(manager.metadata_get(key)?)) }?;
        if let Some(entry) = found {
            let id = c_text(&entry.allocation_id);
            let (value, bytes) = (entry.value.as_ptr().cast(), entry.value.len());
            // SAFETY: the caller vouches for it.
            unsafe { visit(context, id.as_ptr(), entry.offset_bytes, value, bytes) };
        }
        Ok(())
    })
}

/// Calls a function with every key that begins so, sorted; all for null.
///
/// # Safety
/// As `vpmm_gms_metadata_get`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vpmm_gms_metadata_list(
    gms: *const vpmm_gms,
    prefix: *const c_char,
    visit: vpmm_gms_visit_key,
    context: *mut c_void,
) -> vpmm_status {
    guard(|| {
        let visit = visitor(visit)?;
        // SAFETY: the caller vouches for it.
        let prefix = unsafe { text_if(prefix, "prefix") }?.unwrap_or_default();
        // SAFETY: the caller vouches for it.
        let keys = unsafe { ask(gms, |manager| Ok(manager.metadata_list(prefix)?)) }?;
        for key in keys {
            // SAFETY: the caller vouches for it.
            unsafe { visit(context, c_text(&key).as_ptr()) };
        }
        Ok(())
    })
}

/// Takes an entry of metadata away; `deleted`, which may be null, gets 1 if there was one, else 0.
///
/// # Safety
/// `gms` is null or a handle; `key` is null or ends with a zero byte; `deleted` is null or has room for a
/// number.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vpmm_gms_metadata_delete(
    gms: *const vpmm_gms,
    key: *const c_char,
    deleted: *mut u32,
) -> vpmm_status {
    let work = |manager: &mut MemoryManager| {
        // SAFETY: the caller vouches for it.
        let key = unsafe { text(key, "key") }?;
        let was_there = manager.metadata_delete(key)?;
        // SAFETY: the caller vouches for it.
        unsafe { put_if(deleted, u32::from(was_there)) };
        Ok(())
    };
    // SAFETY: the caller vouches for it.
    unsafe { with_manager(gms, work) }
}

/// Makes an allocation of a tag and maps it, or where `id` is not null maps that one, which keeps its
/// address if it is mapped already: its address.
///
/// # Safety
/// `gms` is null or a handle; `id` and `tag` are null or end with a zero byte; `out` is null or has room
/// for a number.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vpmm_gms_create_mapping(
    gms: *const vpmm_gms,
    id: *const c_char,
    bytes: u64,
    tag: *const c_char,
    out: *mut u64,
) -> vpmm_status {
    let work = |manager: &mut MemoryManager| {
        // SAFETY: the caller vouches for it.
        Ok(match unsafe { text_if(id, "id") }? {
            // SAFETY: the caller vouches for it.
            None => manager.create_mapping(bytes, unsafe { text(tag, "tag") }?)?,
            Some(id) => manager.import_mapping(id)?,
        })
    };
    // SAFETY: the caller vouches for both.
    unsafe { make_with_manager(gms, out, work) }
}

/// Makes `count` allocations of a tag at once, and maps them side by side: the address of each.
///
/// # Safety
/// `gms` is null or a handle; `sizes` and `out` are to `count` numbers; `tag` is null or ends with a zero
/// byte.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vpmm_gms_create_mappings(
    gms: *const vpmm_gms,
    sizes: *const u64,
    count: usize,
    tag: *const c_char,
    out: *mut u64,
) -> vpmm_status {
    if count == 0 {
        return vpmm_status::VPMM_OK;
    }
    let work = |manager: &mut MemoryManager| {
        if sizes.is_null() || out.is_null() {
            return Err(Failure::null(if out.is_null() { "out" } else { "sizes" }));
        }
        // SAFETY: the caller vouches for it.
        let tag = unsafe { text(tag, "tag") }?;
        // SAFETY: the caller vouches for it.
        let sizes = unsafe { std::slice::from_raw_parts(sizes, count) };
        let made = manager.create_mappings(sizes, tag)?;
        // SAFETY: there is room for as many as there are sizes.
        unsafe { out.copy_from_nonoverlapping(made.as_ptr(), made.len().min(count)) };
        Ok(())
    };
    // SAFETY: the caller vouches for it.
    unsafe { with_manager(gms, work) }
}

/// Maps every allocation of a tag, or all if it is null, side by side; the function is called with each
/// in the order of their slots. Those that are mapped keep their addresses.
///
/// # Safety
/// As `vpmm_gms_allocate_handle`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vpmm_gms_import_all(
    gms: *const vpmm_gms,
    tag: *const c_char,
    visit: vpmm_gms_visit_allocation,
    context: *mut c_void,
) -> vpmm_status {
    guard(|| {
        // SAFETY: the caller vouches for it.
        let tag = unsafe { text_if(tag, "tag") }?;
        // SAFETY: the caller vouches for it.
        let all = unsafe { ask(gms, |manager| Ok(manager.import_all(tag)?)) }?;
        if let Some(visit) = visit {
            for (allocation, address) in &all {
                // SAFETY: the caller vouches for it.
                unsafe { show(visit, context, allocation, Some((*address, true))) };
            }
        }
        Ok(())
    })
}

/// Waits for the device, and takes a mapping away with its address, and, as a writer, with its
/// allocation.
///
/// # Safety
/// `gms` is null or a handle; the memory is not used again.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vpmm_gms_destroy_mapping(
    gms: *const vpmm_gms,
    address: u64,
) -> vpmm_status {
    // SAFETY: the caller vouches for it.
    unsafe { give_up(gms, address, |manager| Ok(manager.destroy_mapping(address)?)) }
}

/// Waits for the device, gives all memory up and keeps the addresses.
///
/// # Safety
/// `gms` is null or a handle; the memory is not used before it is back.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vpmm_gms_unmap_all(gms: *const vpmm_gms) -> vpmm_status {
    // SAFETY: the caller vouches for it.
    unsafe { with_manager(gms, |manager| Ok(manager.unmap_all()?)) }
}

/// Brings the memory back at the same addresses. `VPMM_STALE` where the layout is another now.
///
/// # Safety
/// `gms` is null or a handle.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vpmm_gms_remap_all(gms: *const vpmm_gms) -> vpmm_status {
    // SAFETY: the caller vouches for it.
    unsafe { with_manager(gms, |manager| Ok(manager.remap_all()?)) }
}

/// As a writer of a new layout, makes an allocation of a tag for every address that is kept;
/// `vpmm_gms_remap_all` maps them.
///
/// # Safety
/// `gms` is null or a handle; `tag` is null or ends with a zero byte.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vpmm_gms_reallocate_all(
    gms: *const vpmm_gms,
    tag: *const c_char,
) -> vpmm_status {
    let work = |manager: &mut MemoryManager| {
        // SAFETY: the caller vouches for it.
        let tag = unsafe { text(tag, "tag") }?;
        Ok(manager.reallocate_all(tag)?)
    };
    // SAFETY: the caller vouches for it.
    guard(|| unsafe { ask_settled(gms, work) })
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use cuda_sys::types::CUresult;
    use gms::CudaError;
    use gms::client::ClientError;

    use crate::guard::Failure;
    use crate::status::vpmm_status::*;

    #[test]
    fn what_a_caller_does_next_tells_errors_apart() {
        let call = |code| ClientError::Cuda(CudaError::Call { call: "cuMemMap", code });
        for (error, status) in [
            (call(CUresult::CUDA_ERROR_OUT_OF_MEMORY), VPMM_OUT_OF_MEMORY),
            (call(CUresult::CUDA_ERROR_INVALID_VALUE), VPMM_DRIVER_ERROR),
            (ClientError::Cuda(CudaError::Missing("cuMemCreate")), VPMM_NO_DRIVER),
            (ClientError::Silent { time: Duration::ZERO }, VPMM_DISCONNECTED),
            (ClientError::Replaced { time: Duration::ZERO }, VPMM_DISCONNECTED),
            (ClientError::LockTimeout, VPMM_TIMED_OUT),
            (ClientError::Interrupted, VPMM_INTERRUPTED),
            (ClientError::Forked, VPMM_FORKED),
        ] {
            let text = error.to_string();
            assert_eq!(Failure::from(error).status(), status, "{text}");
        }
    }
}
