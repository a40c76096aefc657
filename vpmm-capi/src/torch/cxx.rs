//! The little of C++ that PyTorch's plug-in interface has in it: exceptions that it knows, and functions
//! as values. Both are met by the Itanium C++ ABI and libstdc++'s layouts, which have not changed since
//! GCC 5, so that the library is built without a C++ compiler and without PyTorch's headers.
//! `tests/c/torch.cpp` holds this to what a compiler makes of it.

use std::ffi::{c_char, c_void};
use std::mem::{MaybeUninit, forget};
use std::ptr;

use libloading::os::unix::{Library, RTLD_LAZY};

use crate::guard::Failure;
use crate::process::Filter;
use crate::status::vpmm_status;

/// `RTLD_NOLOAD`: only a library that is loaded already.
const NO_LOAD: std::ffi::c_int = 4;

/// Bytes for a `c10::Error`, which has some 200.
const ERROR_BYTES: usize = 1024;

/// `std::string` of the C++11 ABI.
type CxxString = MaybeUninit<[u64; 4]>;

/// `c10::SourceLocation`.
#[repr(C)]
#[derive(Clone, Copy)]
struct SourceLocation {
    function: *const c_char,
    file: *const c_char,
    line: u32,
}

type AllocateException = unsafe extern "C-unwind" fn(usize) -> *mut c_void;
type Throw = unsafe extern "C-unwind" fn(
    *mut c_void,
    *const c_void,
    Option<unsafe extern "C-unwind" fn(*mut c_void)>,
) -> !;
type NewString =
    unsafe extern "C-unwind" fn(*mut CxxString, *const c_char, usize, *const c_void) -> *mut c_void;
type DropString = unsafe extern "C-unwind" fn(*mut CxxString);
type NewError = unsafe extern "C-unwind" fn(*mut c_void, SourceLocation, *mut CxxString);
type ThrowRuntimeError = unsafe extern "C-unwind" fn(*const c_char) -> !;

/// What is needed to throw a `c10::Error`.
#[derive(Clone, Copy)]
struct Thrower {
    allocate: AllocateException,
    throw: Throw,
    new_string: NewString,
    drop_string: DropString,
    new_error: NewError,
    /// `typeid(c10::Error)`, `typeid(c10::OutOfMemoryError)`.
    types: [*const c_void; 2],
}

fn loaded(name: &str) -> Option<Library> {
    // SAFETY: it is loaded already, so nothing of it runs now.
    unsafe { Library::open(Some(name), RTLD_LAZY | NO_LOAD) }.ok()
}

/// A symbol of one of some libraries, which then stay loaded.
pub(super) fn symbol<T: Copy>(names: &[&str], symbol: &[u8]) -> Option<T> {
    names.iter().find_map(|name| {
        let library = loaded(name)?;
        // SAFETY: each caller asks for a type that fits the symbol, and has the size of a pointer.
        let found = unsafe { library.get::<T>(symbol) }.ok().map(|symbol| *symbol)?;
        forget(library);
        Some(found)
    })
}

const STANDARD: &str = "libstdc++.so.6";

impl Thrower {
    fn find() -> Option<Self> {
        let standard = [STANDARD];
        let c10 = ["libc10.so"];
        let typed = ["libc10_cuda.so", "libc10.so", "libtorch_python.so", "libtorch_cpu.so"];
        Some(Self {
            allocate: symbol(&standard, b"__cxa_allocate_exception\0")?,
            throw: symbol(&standard, b"__cxa_throw\0")?,
            new_string: symbol(
                &standard,
                b"_ZNSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEC1EPKcmRKS3_\0",
            )?,
            drop_string: symbol(
                &standard,
                b"_ZNSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEED1Ev\0",
            )?,
            new_error: symbol(
                &c10,
                b"_ZN3c105ErrorC1ENS_14SourceLocationENSt7__cxx1112basic_stringIcSt11char_traitsIcESaIcEEE\0",
            )?,
            types: [
                symbol(&typed, b"_ZTIN3c105ErrorE\0")?,
                symbol(&typed, b"_ZTIN3c1016OutOfMemoryErrorE\0")?,
            ],
        })
    }

    /// # Safety
    /// The symbols are what their names say.
    unsafe fn throw(self, failure: Failure) -> ! {
        let text = failure.text();
        let kind = usize::from(failure.status() == vpmm_status::VPMM_OUT_OF_MEMORY);
        let mut string = CxxString::uninit();
        let location =
            SourceLocation { function: c"vpmm".as_ptr(), file: c"vpmm".as_ptr(), line: 0 };
        // SAFETY: all five as C++ would: an exception is allocated, a string made from bytes that
        // live until then (its allocator has no state, so any address will do), the error from it,
        // and the string ended. Nothing of Rust's is left to drop when the exception goes out.
        unsafe {
            let error = (self.allocate)(ERROR_BYTES);
            let allocator = ptr::from_ref(&self).cast();
            (self.new_string)(&raw mut string, text.as_ptr().cast(), text.len(), allocator);
            drop(failure);
            (self.new_error)(error, location, &raw mut string);
            (self.drop_string)(&raw mut string);
            (self.throw)(error, self.types[kind], Some(end_error))
        }
    }
}

/// Ends an error by its own virtual destructor, the first of its virtual functions.
///
/// # Safety
/// `error` is a live `c10::Error`.
unsafe extern "C-unwind" fn end_error(error: *mut c_void) {
    type Destructor = unsafe extern "C-unwind" fn(*mut c_void);
    // SAFETY: an object with virtual functions begins with the address of their table, in which the
    // destructor that frees nothing comes first.
    unsafe {
        let table = *error.cast::<*const Destructor>();
        (*table)(error);
    }
}

/// Throws a failure as PyTorch knows it: `c10::OutOfMemoryError` or `c10::Error`. Where PyTorch is not
/// there, or another than is known here, `std::runtime_error`; where there is no C++ at all it returns.
pub(crate) fn throw(failure: Failure) {
    if let Some(thrower) = Thrower::find() {
        // SAFETY: the symbols are looked up by their mangled names, which say their types.
        unsafe { thrower.throw(failure) }
    }
    let throw: Option<ThrowRuntimeError> = symbol(&[STANDARD], b"_ZSt21__throw_runtime_errorPKc\0");
    if let Some(throw) = throw {
        // The exception copies the thread's copy, so that nothing is left to drop when it goes out.
        crate::guard::remember(failure.text());
        drop(failure);
        // SAFETY: a text with a zero byte at its end, which stays until this thread's next failure.
        unsafe { throw(crate::guard::vpmm_last_error()) }
    }
}

/// `std::pair<unsigned long long, unsigned long long>`, by value.
#[repr(C)]
#[derive(Clone, Copy)]
pub struct MempoolId {
    /// The first of the two.
    pub first: u64,
    /// The second.
    pub second: u64,
}

type Manager =
    unsafe extern "C-unwind" fn(*mut [u64; 2], *const [u64; 2], std::ffi::c_uint) -> bool;
type Invoker = unsafe extern "C-unwind" fn(*const [u64; 2], *mut *mut c_void) -> bool;

const CLONE: std::ffi::c_uint = 2;
const DESTROY: std::ffi::c_uint = 3;

/// `std::function<bool(cudaStream_t)>` as libstdc++ has it. By value it is passed by its address.
#[repr(C)]
pub struct StdFunction {
    functor: [u64; 2],
    manager: Option<Manager>,
    invoker: Option<Invoker>,
}

/// A copy of such a function.
pub(super) struct CxxFilter(StdFunction);

// SAFETY: PyTorch calls its filters from whichever thread allocates.
unsafe impl Send for CxxFilter {}

impl CxxFilter {
    /// Copies a function; `None` if it is empty.
    ///
    /// # Safety
    /// `function` is to a live `std::function<bool(cudaStream_t)>` of libstdc++'s.
    pub(super) unsafe fn copy(function: *const StdFunction) -> Option<Self> {
        // SAFETY: the caller vouches for it.
        let function = unsafe { &*function };
        let (manager, invoker) = (function.manager?, function.invoker?);
        let mut functor = [0; 2];
        // SAFETY: the function's own manager, asked to make a copy in room for one.
        unsafe { manager(&raw mut functor, &raw const function.functor, CLONE) };
        Some(Self(StdFunction { functor, manager: Some(manager), invoker: Some(invoker) }))
    }
}

impl Filter for CxxFilter {
    fn takes(&self, mut stream: *mut c_void) -> bool {
        // SAFETY: the function's own invoker, with its functor and the address of an argument.
        let call =
            |invoker: Invoker| unsafe { invoker(&raw const self.0.functor, &raw mut stream) };
        self.0.invoker.is_some_and(call)
    }
}

impl Drop for CxxFilter {
    fn drop(&mut self) {
        if let Some(manager) = self.0.manager {
            let functor = &raw mut self.0.functor;
            // SAFETY: the function's own manager, once for the copy; it does not read the source.
            unsafe { manager(functor, functor, DESTROY) };
        }
    }
}
