//! Tables from closures, and searches that fail. Real libraries are opened in the
//! harness's `tests/loading.rs`.

use std::error::Error;
use std::ffi::{c_int, c_void};
use std::ptr::null;
use std::sync::Arc;

use super::*;
use crate::MissingSymbol;

unsafe extern "C" fn driver_version(out: *mut c_int) -> CUresult {
    // SAFETY: callers pass a valid place, as the signature's contract says.
    unsafe { out.write(12090) };
    CUresult::CUDA_SUCCESS
}

unsafe extern "C" fn no_runtime_version(_: *mut c_int) -> cudaError_t {
    cudaError_t::cudaErrorUnknown
}

fn driver(keep_alive: Arc<dyn Any + Send + Sync>) -> Driver {
    let lookup = |name: &'static CStr| match name.to_bytes() {
        b"cuDriverGetVersion" => driver_version as *const c_void,
        _ => null(),
    };
    // SAFETY: the one function that is answered has the declared signature and is static.
    unsafe { Driver::from_symbols("test double", lookup, keep_alive) }
}

#[test]
fn a_closure_fills_the_table() {
    let driver = driver(Arc::new(()));
    assert_eq!(driver.origin(), "test double");
    assert_eq!(driver.version(), Ok(Version::new(12, 9)));
    assert_eq!(driver.missing().count(), DriverApi::SYMBOLS.len() - 1);
    assert_eq!(require!(driver, cuInit).err(), Some(MissingSymbol { name: "cuInit" }));
    let expected = format!(
        "Driver {{ origin: \"test double\", api: DriverApi {{ symbols: {}, missing: {} }} }}",
        DriverApi::SYMBOLS.len(),
        DriverApi::SYMBOLS.len() - 1
    );
    assert_eq!(format!("{driver:?}"), expected);
}

#[test]
fn clones_share_what_keeps_the_functions_callable() {
    let held = Arc::new(());
    let first = driver(held.clone());
    let second = first.clone();
    drop(first);
    assert_eq!(Arc::strong_count(&held), 2);
    assert_eq!(second.version(), Ok(Version::new(12, 9)));
    drop(second);
    assert_eq!(Arc::strong_count(&held), 1);
}

#[test]
fn a_library_without_a_version_says_what_it_lacks() {
    // SAFETY: no function is answered.
    let runtime = unsafe { Runtime::from_symbols("empty", |_| null(), Arc::new(())) };
    let missing = MissingSymbol { name: "cudaRuntimeGetVersion" };
    assert_eq!(runtime.version(), Err(VersionError::Missing(missing)));

    let lookup = |name: &'static CStr| match name.to_bytes() {
        b"cudaRuntimeGetVersion" => no_runtime_version as *const c_void,
        _ => null(),
    };
    // SAFETY: the one function that is answered has the declared signature and is static.
    let runtime = unsafe { Runtime::from_symbols("failing", lookup, Arc::new(())) };
    let error = runtime.version().expect_err("the call fails");
    assert_eq!(error.to_string(), "cudaRuntimeGetVersion: cudaErrorUnknown (999)");
}

#[test]
fn a_search_stops_at_the_first_that_opens() {
    let mut asked = Vec::new();
    let found = first_of("thing", ["a", "b", "c"].map(OsString::from), |name| {
        asked.push(name.to_owned());
        match name.to_str() {
            Some("b") => Ok(7),
            _ => Err(LoadError::NoSymbols { origin: "a".to_owned(), library: "thing" }),
        }
    });
    assert_eq!(found.expect("b opens"), 7);
    assert_eq!(asked, ["a", "b"]);
}

#[test]
fn paths_that_do_not_open_give_the_linkers_reason() {
    let path = "/nonexistent/libcuda.so.1";
    // SAFETY: there is no such file, so no code runs.
    let error = unsafe { Driver::load_from(path) }.expect_err("nothing is there");
    assert!(matches!(&error, LoadError::Open { origin, .. } if origin == path), "{error:?}");
    let reason = error.source().expect("the linker's words").to_string();
    assert!(reason.contains("No such file"), "{reason}");
}

#[test]
fn a_path_with_a_nul_is_an_error() {
    // SAFETY: no such path can exist, so no code runs.
    let error = unsafe { Driver::load_from("a\0b") }.expect_err("no such path");
    assert!(matches!(error, LoadError::Open { .. }), "{error:?}");
}

/// To the dynamic linker it is the program itself, with whatever that has loaded.
#[test]
fn a_path_set_to_nothing_is_an_error() {
    // SAFETY: nothing is opened, so no code runs.
    let driver = unsafe { Driver::load_from("") }.expect_err("no path");
    // SAFETY: as above.
    let runtime = unsafe { Runtime::load_any_major_from("") }.expect_err("no path");
    for error in [driver, runtime] {
        assert!(matches!(error, LoadError::Open { .. }), "{error:?}");
        assert_eq!(error.to_string(), "cannot open \"\"");
        assert_eq!(error.source().expect("kept").to_string(), "the path is empty");
    }
}

#[test]
fn tables_may_be_shared_between_threads() {
    fn check<T: Send + Sync>() {}
    check::<Driver>();
    check::<Runtime>();
}
