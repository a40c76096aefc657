//! Functions of Python's behind callbacks of C's, for the Python package, which finds these by name.
//!
//! What frees memory may have an exception under way: a tensor's destructor while the interpreter clears
//! a stack for it. A function of Python's that is called there loses the exception, and the interpreter
//! ends by a signal. So it is laid aside meanwhile. And once the interpreter ends nobody may ask for its
//! lock: before 3.14 a thread that does is ended, with frames of this library's below it.
//!
//! Whoever calls may hold a lock of a resource's, which the end of one of its buffers would wait for. So the
//! garbage collector rests meanwhile. What begins and ends that is here, as an exception of a signal's handler
//! comes between any two steps of Python's.
//!
//! Python's own functions are found in the process, so that the library needs none to be built or loaded.

mod blocks;
mod memory;

pub use blocks::{
    vpmm_python_begin_torch, vpmm_python_close, vpmm_python_end_torch, vpmm_python_push_heap,
    vpmm_python_push_tag,
};
pub use memory::{
    vpmm_python_end_memory, vpmm_python_free_memory, vpmm_python_make_memory, vpmm_python_memory,
};

use std::cell::Cell;
use std::ffi::{c_char, c_int, c_ulong, c_void};
use std::ptr;
use std::sync::OnceLock;
use std::sync::atomic::{AtomicBool, AtomicUsize, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use libloading::os::unix::Library;

use crate::context::vpmm_finish;
use crate::process::is_being_made;
use crate::resource::{
    vpmm_resource_allocate_function, vpmm_resource_deallocate_function,
    vpmm_resource_failure_function,
};
use crate::service::vpmm_gms_allocation;

/// How long the end of the interpreter waits for calls of other threads.
const LONGEST: Duration = Duration::from_secs(1);
/// A driver that nothing has used for a while takes seconds for its first context.
const LONGEST_MAKING: Duration = Duration::from_secs(5);

/// What capsules of DLPack's are named until somebody takes what is in them: since version 1.0, and before.
const VERSIONED: *const c_char = c"dltensor_versioned".as_ptr();
const LENT: *const c_char = c"dltensor".as_ptr();

type Fetch = unsafe extern "C" fn(*mut *mut c_void, *mut *mut c_void, *mut *mut c_void);
type Restore = unsafe extern "C" fn(*mut c_void, *mut c_void, *mut c_void);

/// Functions of CPython's stable ABI.
struct Python {
    is_initialized: unsafe extern "C" fn() -> c_int,
    take_lock: unsafe extern "C" fn() -> c_int,
    give_lock_back: unsafe extern "C" fn(c_int),
    has_lock: unsafe extern "C" fn() -> c_int,
    lay_lock_aside: unsafe extern "C" fn() -> *mut c_void,
    have_lock_back: unsafe extern "C" fn(*mut c_void),
    fetch_error: Fetch,
    restore_error: Restore,
    raise_later: unsafe extern "C" fn(c_ulong, *mut c_void) -> c_int,
    this_thread: unsafe extern "C" fn() -> c_ulong,
    disable_collector: unsafe extern "C" fn() -> c_int,
    enable_collector: unsafe extern "C" fn() -> c_int,
    is_capsule: unsafe extern "C" fn(*mut c_void, *const c_char) -> c_int,
    in_capsule: unsafe extern "C" fn(*mut c_void, *const c_char) -> *mut c_void,
}

impl Python {
    fn find() -> Option<Self> {
        let process = Library::this();
        macro_rules! symbol {
            ($name:literal) => {
                // SAFETY: the type of its field is the function's, which is the same in every version.
                *unsafe { process.get(concat!($name, "\0").as_bytes()) }.ok()?
            };
        }
        Some(Self {
            is_initialized: symbol!("Py_IsInitialized"),
            take_lock: symbol!("PyGILState_Ensure"),
            give_lock_back: symbol!("PyGILState_Release"),
            has_lock: symbol!("PyGILState_Check"),
            lay_lock_aside: symbol!("PyEval_SaveThread"),
            have_lock_back: symbol!("PyEval_RestoreThread"),
            fetch_error: symbol!("PyErr_Fetch"),
            restore_error: symbol!("PyErr_Restore"),
            raise_later: symbol!("PyThreadState_SetAsyncExc"),
            this_thread: symbol!("PyThread_get_thread_ident"),
            disable_collector: symbol!("PyGC_Disable"),
            enable_collector: symbol!("PyGC_Enable"),
            is_capsule: symbol!("PyCapsule_IsValid"),
            in_capsule: symbol!("PyCapsule_GetPointer"),
        })
    }

    fn here() -> Option<&'static Self> {
        static HERE: OnceLock<Option<Python>> = OnceLock::new();
        HERE.get_or_init(Self::find).as_ref()
    }
}

/// What the garbage collector rests for, and whether it was on before. Both change with the interpreter's lock held.
static RESTS: AtomicUsize = AtomicUsize::new(0);
static WAS_ON: AtomicBool = AtomicBool::new(false);

impl Python {
    /// Has the garbage collector rest until [`go_on`](Self::go_on).
    ///
    /// # Safety
    /// The thread has the interpreter's lock.
    unsafe fn rest(&self) {
        RESTS.fetch_add(1, Ordering::Relaxed);
        // SAFETY: the caller vouches for it. It answers whether the collector was on.
        if unsafe { (self.disable_collector)() } != 0 {
            WAS_ON.store(true, Ordering::Relaxed);
        }
    }

    /// Ends one of them.
    ///
    /// # Safety
    /// As for [`rest`](Self::rest).
    unsafe fn go_on(&self) {
        // None is left to take from in a child that was made in the middle of this.
        let less = |rests: usize| rests.checked_sub(1);
        let before = RESTS.fetch_update(Ordering::Relaxed, Ordering::Relaxed, less);
        if before == Ok(1) && WAS_ON.swap(false, Ordering::Relaxed) {
            // SAFETY: the caller vouches for it.
            unsafe { (self.enable_collector)() };
        }
    }
}

static IS_ENDING: AtomicBool = AtomicBool::new(false);
static CALLS: AtomicUsize = AtomicUsize::new(0);

thread_local! {
    /// Whether this thread ends the interpreter. It gets the lock for as long as that is there, and has
    /// functions of `atexit` to run, which were registered before.
    static ENDS_IT: Cell<bool> = const { Cell::new(false) };
}

/// Does something with the interpreter's lock; not where the interpreter ends.
fn with_lock<T>(work: impl FnOnce(&Python) -> T) -> Option<T> {
    let python = Python::here()?;
    // In this order, so that who ends it waits for this, or this sees that it ends.
    CALLS.fetch_add(1, Ordering::SeqCst);
    // SAFETY: it may be asked at any time.
    let is_there = || unsafe { (python.is_initialized)() != 0 };
    let may = || !IS_ENDING.load(Ordering::SeqCst) || ENDS_IT.get();
    let made = (may() && is_there()).then(|| {
        // SAFETY: the interpreter is there.
        let state = unsafe { (python.take_lock)() };
        let made = work(python);
        // SAFETY: the lock that was just taken.
        unsafe { (python.give_lock_back)(state) };
        made
    });
    // None is left to take from in a child that was made in the middle of this.
    let _ = CALLS.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |calls| calls.checked_sub(1));
    made
}

/// Calls a function of Python's; not where the interpreter ends.
fn call<T>(function: impl FnOnce() -> T) -> Option<T> {
    with_lock(|python| {
        let (mut kind, mut value, mut trace) = (ptr::null_mut(), ptr::null_mut(), ptr::null_mut());
        // SAFETY: the lock is held. What was laid aside is given back, once.
        unsafe {
            (python.fetch_error)(&raw mut kind, &raw mut value, &raw mut trace);
            python.rest();
            let made = function();
            python.go_on();
            (python.restore_error)(kind, value, trace);
            made
        }
    })
}

/// Waits for something without the interpreter's lock, if this thread has it: who has what is waited for may want
/// that lock meanwhile.
pub(crate) fn without_lock<T>(wait: impl FnOnce() -> T) -> T {
    let Some(python) = Python::here() else { return wait() };
    // SAFETY: it may be asked at any time; where the interpreter is not there nobody has its lock.
    if unsafe { (python.is_initialized)() == 0 || (python.has_lock)() == 0 } {
        return wait();
    }
    // As in `with_lock`: who ends the interpreter waits for this.
    CALLS.fetch_add(1, Ordering::SeqCst);
    // SAFETY: this thread has the lock.
    let state = unsafe { (python.lay_lock_aside)() };
    let waited = wait();
    // SAFETY: what was laid aside, once.
    unsafe { (python.have_lock_back)(state) };
    let _ = CALLS.fetch_update(Ordering::SeqCst, Ordering::SeqCst, |calls| calls.checked_sub(1));
    waited
}

/// In what a place is answered as: it is the address of a class of exceptions.
const RAISED: u64 = 1 << 63;

/// A `vpmm_where` that asks a function of Python's, which is its context; 0 once the interpreter ends. What the
/// function answers with the highest bit is the address of a class of exceptions, such as a signal's handler
/// raises there: nobody is there to be told, so that the thread has one when it is back in the program.
///
/// # Safety
/// `function` is a `uint64_t (*)(void)` that lets no exception out; a class that it answers lasts.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vpmm_python_where(function: *mut c_void) -> u64 {
    // SAFETY: the caller vouches for it.
    let function: unsafe extern "C" fn() -> u64 = unsafe { std::mem::transmute(function) };
    let ask = || {
        // SAFETY: the caller vouches for it.
        let place = unsafe { function() };
        let (Some(python), true) = (Python::here(), place & RAISED != 0) else { return place };
        let class = ptr::with_exposed_provenance_mut((place & !RAISED) as usize);
        // SAFETY: a class; the thread has the interpreter's lock, and runs no more of Python's here.
        unsafe { (python.raise_later)((python.this_thread)(), class) };
        0
    };
    call(ask).unwrap_or(0)
}

/// Has the garbage collector rest until `vpmm_python_go_on` with the same: for who calls the library where that
/// may call Python's functions. All that Python makes on the way there may set the collector off, too. Nothing
/// once the interpreter ends.
///
/// # Safety
/// `token` is to a number, 0 at first, that nobody else changes.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vpmm_python_rest(token: *mut u32) {
    // SAFETY: the caller vouches for it.
    unsafe { change(token, 1, Python::rest) };
}

/// Ends what `vpmm_python_rest` has begun with a number; nothing where it did not come to that.
///
/// # Safety
/// As `vpmm_python_rest`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vpmm_python_go_on(token: *mut u32) {
    // SAFETY: the caller vouches for it.
    unsafe { change(token, 0, Python::go_on) };
}

/// # Safety
/// As `vpmm_python_rest`; `work` asks for no more than the interpreter's lock.
unsafe fn change(token: *mut u32, to: u32, work: unsafe fn(&Python)) {
    // SAFETY: the caller vouches for it.
    if unsafe { token.replace(to) } != to {
        // SAFETY: the caller vouches for it; the lock is held.
        with_lock(|python| unsafe { work(python) });
    }
}

/// A `vpmm_gms_check` that asks a function of Python's, which is its context: handlers of signals run there, in the
/// thread that they run in. The wait goes on once the interpreter ends.
///
/// # Safety
/// `function` is a `uint32_t (*)(void)` that lets no exception out.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vpmm_python_check(function: *mut c_void) -> u32 {
    // SAFETY: the caller vouches for it.
    let function: unsafe extern "C" fn() -> u32 = unsafe { std::mem::transmute(function) };
    // SAFETY: as above.
    call(|| unsafe { function() }).unwrap_or(0)
}

/// A `vpmm_write` that hands its text to a function of Python's, which is its context.
///
/// # Safety
/// `function` is a `void (*)(char const *, size_t)` that lets no exception out.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vpmm_python_write(
    function: *mut c_void,
    bytes: *const c_char,
    length: usize,
) {
    // SAFETY: the caller vouches for it.
    let function: unsafe extern "C" fn(*const c_char, usize) =
        unsafe { std::mem::transmute(function) };
    // SAFETY: as above.
    call(|| unsafe { function(bytes, length) });
}

/// A `vpmm_gms_visit_allocation` that hands each on to a function of Python's, which is its context.
///
/// # Safety
/// `function` is a `void (*)(vpmm_gms_allocation const *)` that lets no exception out.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vpmm_python_visit_allocation(
    function: *mut c_void,
    allocation: *const vpmm_gms_allocation,
) {
    // SAFETY: the caller vouches for it.
    let function: unsafe extern "C" fn(*const vpmm_gms_allocation) =
        unsafe { std::mem::transmute(function) };
    // SAFETY: as above.
    call(|| unsafe { function(allocation) });
}

/// A `vpmm_gms_visit_key` that hands each on to a function of Python's, which is its context.
///
/// # Safety
/// `function` is a `void (*)(char const *)` that lets no exception out.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vpmm_python_visit_key(function: *mut c_void, key: *const c_char) {
    // SAFETY: the caller vouches for it.
    let function: unsafe extern "C" fn(*const c_char) = unsafe { std::mem::transmute(function) };
    // SAFETY: as above.
    call(|| unsafe { function(key) });
}

/// A `vpmm_gms_visit_value` that hands an entry on to a function of Python's, which is its context.
///
/// # Safety
/// `function` is a `void (*)(char const *, uint64_t, void const *, size_t)` that lets no exception out.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vpmm_python_visit_value(
    function: *mut c_void,
    allocation_id: *const c_char,
    offset_bytes: u64,
    value: *const c_void,
    value_bytes: usize,
) {
    // SAFETY: the caller vouches for it.
    let function: unsafe extern "C" fn(*const c_char, u64, *const c_void, usize) =
        unsafe { std::mem::transmute(function) };
    // SAFETY: as above.
    call(|| unsafe { function(allocation_id, offset_bytes, value, value_bytes) });
}

/// Functions of Python's behind a resource, and what they are called with: the context of the functions
/// below.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct vpmm_python_functions {
    /// Behind `vpmm_python_allocate`.
    pub allocate: vpmm_resource_allocate_function,
    /// Behind `vpmm_python_deallocate`.
    pub deallocate: vpmm_resource_deallocate_function,
    /// Behind `vpmm_python_make_room`.
    pub make_room: vpmm_resource_failure_function,
    /// Behind `vpmm_python_finish`; it may end this.
    pub finish: vpmm_finish,
    /// What they are called with.
    pub context: *mut c_void,
}

/// Calls one of them. They are in memory of Python's, which goes as the interpreter ends: nobody looks there
/// before it is known to be there.
///
/// # Safety
/// As `vpmm_python_allocate`, and `one` is how one of them may be called.
unsafe fn call_one<T>(
    functions: *mut c_void,
    one: impl FnOnce(vpmm_python_functions) -> Option<T>,
) -> Option<T> {
    // SAFETY: the caller vouches for it.
    call(|| one(unsafe { functions.cast::<vpmm_python_functions>().read() })).flatten()
}

/// For `vpmm_resource_callback`. There is no memory once the interpreter ends.
///
/// # Safety
/// `functions` is to such, as long as the interpreter is there, which may be called as there.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vpmm_python_allocate(
    functions: *mut c_void,
    bytes: usize,
    align: usize,
    stream: *mut c_void,
) -> *mut c_void {
    // SAFETY: the caller vouches for it.
    let made = unsafe {
        call_one(functions, |it| {
            it.allocate.map(|function| function(it.context, bytes, align, stream))
        })
    };
    made.unwrap_or(ptr::null_mut())
}

/// For `vpmm_resource_callback`. Nothing is given back once the interpreter ends.
///
/// # Safety
/// As `vpmm_python_allocate`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vpmm_python_deallocate(
    functions: *mut c_void,
    pointer: *mut c_void,
    bytes: usize,
    align: usize,
    stream: *mut c_void,
) {
    // SAFETY: the caller vouches for it.
    unsafe {
        call_one(functions, |it| {
            it.deallocate.map(|function| function(it.context, pointer, bytes, align, stream))
        })
    };
}

/// For `vpmm_resource_failure_callback`. There is no room to be made once the interpreter ends.
///
/// # Safety
/// As `vpmm_python_allocate`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vpmm_python_make_room(functions: *mut c_void, bytes: usize) -> u32 {
    // SAFETY: the caller vouches for it.
    let made = unsafe {
        call_one(functions, |it| it.make_room.map(|function| function(it.context, bytes)))
    };
    made.unwrap_or(0)
}

/// For either.
///
/// # Safety
/// As `vpmm_python_allocate`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vpmm_python_finish(functions: *mut c_void) {
    // SAFETY: the caller vouches for it.
    unsafe { call_one(functions, |it| it.finish.map(|function| function(it.context))) };
}

/// DLPack's `DLManagedTensor`.
#[repr(C)]
struct Managed {
    tensor: [u64; 6],
    /// The function of Python's that gives back what was lent.
    context: unsafe extern "C" fn(*mut c_void),
    deleter: Option<unsafe extern "C" fn(*mut c_void)>,
}

/// DLPack's `DLManagedTensorVersioned`, but for what comes behind.
#[repr(C)]
struct Versioned {
    version: [u32; 2],
    context: unsafe extern "C" fn(*mut c_void),
    deleter: Option<unsafe extern "C" fn(*mut c_void)>,
}

/// The deleter of a `DLManagedTensor` whose `manager_ctx` is the function of Python's that gives it back,
/// a `void (*)(DLManagedTensor *)`. It is not given back once the interpreter ends.
///
/// # Safety
/// `managed` is one, and lent.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vpmm_python_delete(managed: *mut c_void) {
    // SAFETY: the caller vouches for it.
    let function = unsafe { (*managed.cast::<Managed>()).context };
    // SAFETY: as above.
    call(|| unsafe { function(managed) });
}

/// The same for a `DLManagedTensorVersioned`.
///
/// # Safety
/// As `vpmm_python_delete`.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vpmm_python_delete_versioned(managed: *mut c_void) {
    // SAFETY: the caller vouches for it.
    let function = unsafe { (*managed.cast::<Versioned>()).context };
    // SAFETY: as above.
    call(|| unsafe { function(managed) });
}

/// The destructor of a capsule with either: one that nobody took is given back.
///
/// # Safety
/// `capsule` is a `PyCapsule` that ends; the thread has the interpreter's lock.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vpmm_python_end_capsule(capsule: *mut c_void) {
    let Some(python) = Python::here() else { return };
    for name in [LENT, VERSIONED] {
        // SAFETY: the caller vouches for it. Neither touches an exception that is under way.
        unsafe {
            if (python.is_capsule)(capsule, name) == 0 {
                continue;
            }
            let managed = (python.in_capsule)(capsule, name);
            let deleter = match name == VERSIONED {
                true => (*managed.cast::<Versioned>()).deleter,
                false => (*managed.cast::<Managed>()).deleter,
            };
            // It may end what is in the capsule, which is not looked at again.
            if let Some(delete) = deleter {
                delete(managed);
            }
            return;
        }
    }
}

/// The interpreter is about to end: no function of its is called from here on but by this thread. Waits for
/// the calls that are under way, a second at most, and for a thread that makes the process's pool, five at most; the
/// caller has not got the interpreter's lock.
#[unsafe(no_mangle)]
pub extern "C" fn vpmm_python_end() {
    ENDS_IT.set(true);
    IS_ENDING.store(true, Ordering::SeqCst);
    let begin = Instant::now();
    while CALLS.load(Ordering::SeqCst) > 0 && begin.elapsed() < LONGEST {
        thread::sleep(Duration::from_micros(100));
    }
    // The driver's own end of the process, which comes next, finds a context half made, and reads what is not there.
    while is_being_made() && begin.elapsed() < LONGEST_MAKING {
        thread::sleep(Duration::from_micros(100));
    }
}

/// The process is the child of a fork: the threads whose calls were under way are not there, and the garbage
/// collector does not rest for them.
///
/// # Safety
/// The interpreter is there, and the caller has not got its lock.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vpmm_python_forked() {
    CALLS.store(0, Ordering::SeqCst);
    RESTS.store(0, Ordering::Relaxed);
    if WAS_ON.swap(false, Ordering::Relaxed)
        && let Some(python) = Python::here()
    {
        // SAFETY: the caller vouches for it.
        unsafe {
            let state = (python.take_lock)();
            (python.enable_collector)();
            (python.give_lock_back)(state);
        }
    }
}
