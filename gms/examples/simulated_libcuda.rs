//! A `libcuda.so.1` on the simulator, for programs that load the driver by themselves and look its
//! functions up with `cuGetProcAddress`, as NVIDIA's Python bindings do.
//!
//! ```sh
//! cargo build -p vpmm-gms --example simulated_libcuda
//! ln -s "$PWD/target/debug/examples/libsimulated_libcuda.so" /some/folder/libcuda.so.1
//! LD_LIBRARY_PATH=/some/folder python3 program.py
//! ```

use std::ffi::{CStr, CString, c_char, c_int, c_uint, c_void};
use std::sync::OnceLock;

use cuda_sys::types::CUresult;

/// The process's simulated driver. It ends with the process.
fn driver() -> Option<&'static cuda_sys::Driver> {
    static DRIVER: OnceLock<Option<cuda_sys::Driver>> = OnceLock::new();
    let build = || cuda_sim::Simulator::builder().detect_races(false).build().ok();
    DRIVER.get_or_init(|| Some(build()?.driver())).as_ref()
}

/// CUDA 3.2, in which addresses came to be of 64 bits: most second versions are of then.
const WIDE_ADDRESSES: c_int = 3020;

/// The function of a name, which programs give without its version: the first version if it is to be
/// of a time before there were others, else the newest.
fn lookup(name: &CStr, version: c_int) -> *const c_void {
    let Some(driver) = driver() else { return std::ptr::null() };
    let mut suffixes = ["_v4", "_v3", "_v2", ""];
    if version < WIDE_ADDRESSES {
        suffixes.reverse();
    }
    for suffix in suffixes {
        let mut versioned = name.to_bytes().to_vec();
        versioned.extend(suffix.as_bytes());
        let Ok(versioned) = CString::new(versioned) else { continue };
        let found = driver.symbol(&versioned);
        if !found.is_null() {
            return found;
        }
    }
    std::ptr::null()
}

/// As the driver's function of this name, except that of several later versions the newest is given.
///
/// # Safety
/// `name` is a text that ends with a zero byte; `function` and `found` may be written to, `found` if it
/// is not null.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn cuGetProcAddress_v2(
    name: *const c_char,
    function: *mut *const c_void,
    version: c_int,
    _flags: u64,
    found: *mut c_uint,
) -> CUresult {
    if name.is_null() || function.is_null() {
        return CUresult::CUDA_ERROR_INVALID_VALUE;
    }
    // SAFETY: not null, and a text by the caller's word.
    let name = unsafe { CStr::from_ptr(name) };
    let address = match name.to_bytes() {
        b"cuGetProcAddress" => cuGetProcAddress_v2 as *const c_void,
        _ => lookup(name, version),
    };
    // SAFETY: not null, and writable by the caller's word.
    unsafe { function.write(address) };
    // The answers of CUdriverProcAddressQueryResult: found, or no such symbol.
    let status = if address.is_null() { 1 } else { 0 };
    if !found.is_null() {
        // SAFETY: not null, and writable by the caller's word.
        unsafe { found.write(status) };
    }
    if address.is_null() { CUresult::CUDA_ERROR_NOT_FOUND } else { CUresult::CUDA_SUCCESS }
}
