//! A question that PyTorch has for its allocator and no function to set for: how long the longest block is
//! that it could have (`cacheInfo`). cuDNN's search for the quickest algorithms,
//! `torch.backends.cudnn.benchmark`, asks it for room to try them in, and `CUDAPluggableAllocator` throws.
//!
//! So the one object of that class which PyTorch uses gets a table of virtual functions of its own: a copy of
//! its class's, with the answer where that function was. Everything else about it stays: the copy has the
//! class's description before it, so that casts know the object as before. It is done only where all of this is
//! found by name and as expected. Another PyTorch is left as it is, and throws.

use std::ffi::{c_char, c_int, c_void};
use std::ptr;
use std::sync::atomic::{AtomicPtr, Ordering};

use super::cxx::symbol;
use super::{device_number, guarded, throw_other};
use crate::guard::Failure;
use crate::process;

/// An object with virtual functions begins with the address of the first of them in its class's table.
type Table = *mut *const c_void;
type Object = AtomicPtr<*const c_void>;

/// The object's own functions.
static OWN: Object = AtomicPtr::new(ptr::null_mut());

/// A table has two words before the functions: where in an object its part begins, and the class's description.
const BEFORE_FUNCTIONS: usize = 2;

const OF_TORCH: [&str; 2] = ["libtorch_cuda.so", "libtorch_python.so"];
const OF_C10: [&str; 1] = ["libc10_cuda.so"];

/// `c10::cuda::CUDACachingAllocator::allocator`, a `std::atomic` of a pointer.
const ALLOCATOR: &[u8] = b"_ZN3c104cuda20CUDACachingAllocator9allocatorE\0";

/// The table of `torch::cuda::CUDAPluggableAllocator::CUDAPluggableAllocator`.
const TABLE: &[u8] = b"_ZTVN5torch4cuda22CUDAPluggableAllocator22CUDAPluggableAllocatorE\0";

/// Its `cacheInfo(signed char, unsigned long*)`.
const CACHE_INFO: &[u8] =
    b"_ZN5torch4cuda22CUDAPluggableAllocator22CUDAPluggableAllocator9cacheInfoEaPm\0";

/// Has it asked from the pool; `None` where not everything is as expected.
///
/// # Safety
/// No other thread uses PyTorch's allocator meanwhile.
pub(super) unsafe fn answer_cache_info() -> Option<()> {
    let used: *const AtomicPtr<Object> = symbol(&OF_C10, ALLOCATOR)?;
    let table: Table = symbol(&OF_TORCH, TABLE)?;
    let refusal: *const c_void = symbol(&OF_TORCH, CACHE_INFO)?;
    let words = size_of_symbol(table.cast())? / size_of::<*const c_void>();
    // SAFETY: the symbol is that atomic, of a library that stays; what it points to is an object of PyTorch's
    // with virtual functions, which stays, too.
    let object = unsafe { (*used).load(Ordering::Acquire).as_ref() }?;
    // SAFETY: as many words as the library says are the table's, which nobody changes any more.
    let functions = unsafe { std::slice::from_raw_parts(table.cast_const(), words) };
    let mut slots = (BEFORE_FUNCTIONS..words).filter(|slot| functions[*slot] == refusal);
    let (slot, others) = (slots.next()?, slots.next());
    let of_object = object.load(Ordering::Relaxed);
    if of_object == OWN.load(Ordering::Acquire) {
        return Some(());
    }
    // Else it is of another class, be it derived from this one.
    if of_object != table.wrapping_add(BEFORE_FUNCTIONS) || others.is_some() {
        return None;
    }
    let mut own = functions.to_vec();
    own[slot] = cache_info as CacheInfo as *const c_void;
    // The object has it for good.
    let own = Vec::leak(own).as_mut_ptr().wrapping_add(BEFORE_FUNCTIONS);
    OWN.store(own, Ordering::Release);
    object.store(own, Ordering::Release);
    Some(())
}

type CacheInfo = unsafe extern "C-unwind" fn(*mut c_void, i8, *mut usize);

/// PyTorch's `cacheInfo`: raises a number to the longest block that a request could have now. A number of 0
/// stands for the device's own free memory. Throws.
///
/// # Safety
/// `largest` is null or to a number.
unsafe extern "C-unwind" fn cache_info(_: *mut c_void, device: i8, largest: *mut usize) {
    let work = || {
        let pool = process::pool(device_number(c_int::from(device))?)?;
        if largest.is_null() {
            return Err(Failure::null("largestBlock"));
        }
        // SAFETY: the caller vouches for it.
        let asked = unsafe { *largest };
        let now = pool.stats();
        // What is free lies side by side once a request wants it to, and what is made for it beside that.
        let held = now.idle_bytes + now.cached_bytes;
        let made = if asked == 0 { pool.device().free_memory()? } else { 0 };
        Ok(asked.max((held + made) as usize))
    };
    match guarded(work) {
        // SAFETY: the same.
        Ok(longest) => unsafe { largest.write(longest) },
        Err(failure) => throw_other("cacheInfo", failure),
    }
}

/// The bytes of a symbol at an address, as its library says.
fn size_of_symbol(address: *const c_void) -> Option<usize> {
    /// `Dl_info`.
    #[repr(C)]
    struct Found {
        library: *const c_char,
        base: *mut c_void,
        name: *const c_char,
        address: *mut c_void,
    }
    /// `Elf64_Sym`.
    #[repr(C)]
    struct Symbol {
        name: u32,
        info: u8,
        other: u8,
        section: u16,
        value: u64,
        size: u64,
    }
    type Ask = unsafe extern "C" fn(*const c_void, *mut Found, *mut *const Symbol, c_int) -> c_int;
    const WITH_SYMBOL: c_int = 1;

    // Not every C library has it.
    let ask: Ask = symbol(&["libc.so.6", "libdl.so.2"], b"dladdr1\0")?;
    let null: *mut c_void = ptr::null_mut();
    let mut found = Found { library: null.cast(), base: null, name: null.cast(), address: null };
    let mut entry = ptr::null();
    // SAFETY: the function that the name says, with room for both answers.
    let is_found = unsafe { ask(address, &raw mut found, &raw mut entry, WITH_SYMBOL) } != 0;
    // SAFETY: an entry of the library's own table of symbols, if one was found.
    let entry: &Symbol = unsafe { entry.as_ref() }.filter(|_| is_found)?;
    (found.address.cast_const() == address).then_some(usize::try_from(entry.size).ok()?)
}
