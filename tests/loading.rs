//! Loading, on real shared libraries: stubs built from `tests/stub` (feature `stub`),
//! the real runtime where a wheel or a toolkit has installed it, the real driver
//! where there is one. What is not there is said, not silently passed.

use std::error::Error;
use std::ffi::{CStr, c_char};
use std::fs;
use std::path::PathBuf;
use std::ptr;

use cuda_sys::types::{CUresult, cudaError_t};
use cuda_sys::version::Version;
use cuda_sys::{Driver, LoadError, Runtime, RuntimeApi};

/// A file in the temporary folder that goes away with the test.
struct TempFile(PathBuf);

impl TempFile {
    fn new(name: &str, content: &[u8]) -> Self {
        let path = std::env::temp_dir().join(format!("vpmm-{}-{name}", std::process::id()));
        fs::write(&path, content).expect("the temporary folder is writable");
        Self(path)
    }
}

impl Drop for TempFile {
    fn drop(&mut self) {
        let _ = fs::remove_file(&self.0);
    }
}

fn source_of(error: &LoadError) -> String {
    error.source().expect("the linker's words are kept").to_string()
}

#[test]
fn a_path_that_does_not_exist_is_an_error_with_the_linkers_reason() {
    let path = "/nonexistent/folder/libcuda.so.1";
    // SAFETY: there is no such file, so no code runs.
    let driver = unsafe { Driver::load_from(path) }.expect_err("no such file");
    // SAFETY: as above.
    let runtime = unsafe { Runtime::load_from(path) }.expect_err("no such file");
    for error in [driver, runtime] {
        assert!(matches!(&error, LoadError::Open { origin, .. } if origin == path), "{error:?}");
        assert!(source_of(&error).contains("No such file or directory"), "{error:?}");
    }
}

#[test]
fn a_file_that_is_no_library_is_an_error_with_the_linkers_reason() {
    let longer_than_an_elf_header = [b'x'; 4096];
    for (name, content, reason) in [
        ("empty.so", &[][..], "file too short"),
        ("text.so", &longer_than_an_elf_header[..], "invalid ELF header"),
    ] {
        let file = TempFile::new(name, content);
        // SAFETY: the file is no library, so no code runs.
        let error = unsafe { Driver::load_from(&file.0) }.expect_err("no library");
        assert!(matches!(error, LoadError::Open { .. }), "{error:?}");
        assert!(source_of(&error).contains(reason), "{error:?}");
    }
}

/// With a driver: it is a driver. Without: everything that was looked for is named.
#[test]
fn the_installed_driver_loads_or_the_error_says_what_was_tried() {
    match Driver::load() {
        Ok(driver) => {
            assert!(["libcuda.so.1", "libcuda.so"].contains(&driver.origin()));
            let version = driver.version().expect("a driver tells its version");
            println!("{} of CUDA {version}", driver.origin());
            for missing in driver.missing() {
                println!("  without {}", missing.to_string_lossy());
            }
            assert!(version >= Version::new(11, 2), "older than the calls this project needs");
            assert!(driver.cuInit.is_some() && driver.cuMemCreate.is_some());
            names_agree_with_the_driver(&driver);
        }
        Err(error) => {
            println!("skipped: calls on a real driver, for there is none: {error}");
            let LoadError::NotFound { library, tried } = &error else { panic!("{error:?}") };
            assert_eq!(*library, "CUDA driver");
            let names: Vec<_> = tried.iter().map(|attempt| attempt.what.as_str()).collect();
            assert_eq!(names, ["libcuda.so.1", "libcuda.so"]);
            for attempt in tried {
                assert!(matches!(attempt.why, LoadError::Open { .. }), "{attempt:?}");
                assert!(error.to_string().contains(&source_of(&attempt.why)), "{error}");
            }
        }
    }
}

/// Our names are those that the loaded driver gives, for every code that it knows.
fn names_agree_with_the_driver(driver: &Driver) {
    let get_name = driver.cuGetErrorName.expect("every driver has it");
    for code in CUresult::all() {
        let mut name: *const c_char = ptr::null();
        // SAFETY: `name` is a valid place for the pointer that the call writes.
        if unsafe { get_name(code, &mut name) } == CUresult::CUDA_SUCCESS {
            // SAFETY: on success the driver wrote a pointer to a static string.
            let name = unsafe { CStr::from_ptr(name) };
            assert_eq!(Some(name.to_str().expect("ASCII")), code.name());
        }
    }
}

/// The runtime, or the reason for going without.
fn installed_runtime() -> Option<Runtime> {
    match Runtime::load() {
        Ok(runtime) => Some(runtime),
        Err(error) => {
            assert!(matches!(error, LoadError::NotFound { .. }), "{error:?}");
            println!("skipped: {error}\n(pip install 'nvidia-cuda-runtime==13.0.*' has one)");
            None
        }
    }
}

#[test]
fn the_installed_runtime_has_every_symbol() {
    let Some(runtime) = installed_runtime() else { return };
    println!("{}", runtime.origin());
    let version = runtime.version().expect("a runtime tells its version");
    assert_eq!(version.major(), Version::BINDINGS.major());
    // A runtime of a later minor version has what an earlier one had.
    let missing: Vec<_> = runtime.missing().collect();
    assert!(missing.is_empty(), "{missing:?} of {} missing", RuntimeApi::SYMBOLS.len());
}

#[test]
fn the_installed_runtime_answers_with_or_without_a_device() {
    let Some(runtime) = installed_runtime() else { return };
    let get_count = runtime.cudaGetDeviceCount.expect("every runtime has it");
    let mut count = -1;
    // SAFETY: `count` is a valid place for the int that the call writes.
    match unsafe { get_count(&mut count) } {
        cudaError_t::cudaSuccess => assert!(count >= 1, "success with {count} devices"),
        code => {
            let no_gpu = [cudaError_t::cudaErrorNoDevice, cudaError_t::cudaErrorInsufficientDriver];
            assert!(no_gpu.contains(&code), "{code}");
            println!("no device: {code}");
        }
    }
}

/// The runtime knows its own names without a device, so they can be compared anywhere.
#[test]
fn the_installed_runtime_gives_errors_the_names_that_we_give() {
    let Some(runtime) = installed_runtime() else { return };
    let get_name = runtime.cudaGetErrorName.expect("every runtime has it");
    for code in cudaError_t::all() {
        // SAFETY: the call takes any code and returns a pointer to a static string.
        let name = unsafe { CStr::from_ptr(get_name(code)) };
        assert_eq!(Some(name.to_str().expect("ASCII")), code.name(), "{}", code.0);
    }
}

/// The stubs' folder. Where tests are carried to another machine, the variable names it.
#[cfg(feature = "stub")]
mod stub {
    use super::*;
    use std::process::Command;

    use cuda_sys::{MissingSymbol, require};

    fn path(relative: &str) -> PathBuf {
        let built = env!("VPMM_STUBS");
        std::env::var_os("VPMM_STUBS").map_or_else(|| built.into(), PathBuf::from).join(relative)
    }

    const WHEEL: &str = "venv/lib/python3.12/site-packages/nvidia/cu13/lib";

    fn driver() -> Driver {
        // SAFETY: tests/stub/driver.c has no initialiser, and its functions have the
        // signatures that the bindings declare.
        unsafe { Driver::load_from(path("driver/libcuda.so.1")) }.expect("the stub loads")
    }

    #[test]
    fn present_and_missing_symbols_are_known_by_name() {
        let driver = driver();
        let exported =
            [c"cuInit", c"cuDriverGetVersion", c"cuDeviceGetCount", c"cuMemAddressReserve"];
        let missing: Vec<_> = driver.missing().collect();
        for symbol in cuda_sys::DriverApi::SYMBOLS {
            assert_eq!(missing.contains(symbol), !exported.contains(symbol), "{symbol:?}");
        }
        assert!(require!(driver, cuMemAddressReserve).is_ok());
        let error = require!(driver, cuMemMap).expect_err("the stub has no cuMemMap");
        assert_eq!(error, MissingSymbol { name: "cuMemMap" });
    }

    #[test]
    fn calls_reach_the_library_with_their_arguments() {
        let driver = driver();
        let init = require!(driver, cuInit).expect("exported");
        // SAFETY: the stub takes any flags.
        let code = unsafe { init(7) };
        assert_eq!(code, CUresult(9007), "the stub answers 9000 and the flags");
        assert_eq!(code.to_string(), "unknown CUresult (9007)");

        let count = require!(driver, cuDeviceGetCount).expect("exported");
        let mut devices = 0;
        // SAFETY: `devices` is a valid place for an int.
        assert_eq!(unsafe { count(&mut devices) }, CUresult::CUDA_SUCCESS);
        assert_eq!(devices, 3);

        let reserve = require!(driver, cuMemAddressReserve).expect("exported");
        let mut address = 0;
        // SAFETY: `address` is a valid place for a device address; the stub only adds up.
        let code = unsafe { reserve(&mut address, 1 << 40, 1000, 100, 10) };
        assert_eq!(code, CUresult::CUDA_SUCCESS);
        assert_eq!(address, (1 << 40) + 2 * 1000 + 3 * 100 + 4 * 10);
    }

    #[test]
    fn the_driver_tells_its_version_and_origin() {
        let driver = driver();
        assert_eq!(driver.version(), Ok(Version::new(12, 8)));
        assert_eq!(driver.origin(), path("driver/libcuda.so.1").display().to_string());
    }

    #[test]
    fn functions_outlive_every_handle_on_the_library() {
        let init = require!(driver(), cuInit).expect("exported");
        // SAFETY: the stub takes any flags, and no library is ever closed.
        assert_eq!(unsafe { init(1) }, CUresult(9001));
    }

    #[test]
    fn a_library_without_cuda_in_it_is_refused() {
        let other = path("other/libother.so");
        // SAFETY: the library has no initialiser and no symbol of either API.
        let error = unsafe { Driver::load_from(&other) }.expect_err("no driver");
        assert!(matches!(error, LoadError::NoSymbols { .. }), "{error:?}");
        // SAFETY: as above.
        let error = unsafe { Runtime::load_from(&other) }.expect_err("no runtime");
        let expected = format!(
            "{} is not a CUDA runtime library: it has none of its symbols",
            other.display()
        );
        assert_eq!(error.to_string(), expected);
    }

    #[test]
    fn a_runtime_of_another_major_is_refused_with_the_version_found() {
        let old = path("runtime12/libcudart.so.12");
        // SAFETY: the stub has no initialiser, and its functions have the declared signatures.
        let error = unsafe { Runtime::load_from(&old) }.expect_err("major 12");
        assert!(
            matches!(&error, LoadError::WrongMajor { found, .. } if *found == Version::new(12, 4)),
            "{error:?}"
        );
        assert!(error.to_string().contains("is CUDA runtime 12.4"), "{error}");

        // SAFETY: as above; only functions that are the same in every major are called.
        let runtime = unsafe { Runtime::load_any_major_from(&old) }.expect("asked for explicitly");
        assert_eq!(runtime.version(), Ok(Version::new(12, 4)));
    }

    #[test]
    fn a_runtime_of_the_bindings_major_is_taken() {
        // SAFETY: the stub has no initialiser, and its functions have the declared signatures.
        let runtime = unsafe { Runtime::load_from(path(WHEEL).join("libcudart.so.13")) }
            .expect("version 13.0");
        assert_eq!(runtime.version(), Ok(Version::new(13, 0)));
        assert_eq!(runtime.missing().count(), RuntimeApi::SYMBOLS.len() - 2);
    }

    #[test]
    fn a_runtime_that_does_not_tell_its_version_is_refused() {
        // SAFETY: the stub has no initialiser, and its functions have the declared signatures.
        let error = unsafe { Runtime::load_from(path("failing/libcudart.so.13")) }
            .expect_err("the version call fails");
        assert!(matches!(error, LoadError::Version { .. }), "{error:?}");
        assert_eq!(source_of(&error), "cudaRuntimeGetVersion: cudaErrorUnknown (999)");

        // SAFETY: as above.
        let error = unsafe { Runtime::load_from(path("mute/libcudart.so.13")) }
            .expect_err("there is no version call");
        assert!(matches!(error, LoadError::Version { .. }), "{error:?}");
        assert_eq!(source_of(&error), "the library has no symbol cudaRuntimeGetVersion");
    }

    /// Runs [`child`] in a process of its own, where the environment is only `vars`:
    /// the dynamic linker reads `LD_LIBRARY_PATH` once, at the start.
    fn in_a_process_with(vars: &[(&str, PathBuf)]) -> String {
        let output = Command::new(std::env::current_exe().expect("known on Linux"))
            .args(["--exact", "stub::child", "--ignored", "--nocapture"])
            .env_clear()
            .env("VPMM_TEST_CHILD", "1")
            .envs(vars.iter().map(|(name, value)| (name, value)))
            .output()
            .expect("the test can run itself");
        let text = String::from_utf8_lossy(&output.stdout).into_owned();
        assert!(output.status.success(), "{text}{}", String::from_utf8_lossy(&output.stderr));
        assert!(text.contains("driver: ") && text.contains("runtime: "), "{text}");
        text
    }

    #[test]
    #[ignore = "started by other tests, in a process with an environment of its own"]
    fn child() {
        if std::env::var_os("VPMM_TEST_CHILD").is_none() {
            println!("skipped: means something only when another test starts it");
            return;
        }
        match Driver::load() {
            Ok(driver) => println!("driver: {} {:?}", driver.origin(), driver.version()),
            Err(error) => println!("driver: {error}"),
        }
        match Runtime::load() {
            Ok(runtime) => println!("runtime: {} {:?}", runtime.origin(), runtime.version()),
            Err(error) => println!("runtime: {error}"),
        }
    }

    #[test]
    fn the_dynamic_linker_finds_the_driver_by_name() {
        let text = in_a_process_with(&[("LD_LIBRARY_PATH", path("driver"))]);
        assert!(
            text.contains("driver: libcuda.so.1 Ok(Version { major: 12, minor: 8 })"),
            "{text}"
        );
    }

    #[test]
    fn the_dynamic_linker_finds_the_runtime_by_name() {
        let text = in_a_process_with(&[("LD_LIBRARY_PATH", path(WHEEL))]);
        let found = "runtime: libcudart.so.13 Ok(Version { major: 13, minor: 0 })";
        assert!(text.contains(found), "{text}");
    }

    /// The other searches end early on a machine whose linker or toolkit has a runtime.
    fn system_has_a_runtime() -> bool {
        let text = in_a_process_with(&[]);
        let found = !text.contains("runtime: no usable CUDA runtime");
        if found {
            println!("skipped: the system's own runtime comes first here: {text}");
        }
        found
    }

    #[test]
    fn a_wheel_in_the_active_environment_is_found() {
        if system_has_a_runtime() {
            return;
        }
        let text = in_a_process_with(&[("VIRTUAL_ENV", path("venv"))]);
        let found = path(WHEEL).join("libcudart.so.13");
        assert!(text.contains(&format!("runtime: {} Ok", found.display())), "{text}");
    }

    #[test]
    fn a_search_passes_over_what_cannot_be_used_and_says_why() {
        if system_has_a_runtime() {
            return;
        }
        let old = std::env::join_paths([path("runtime12"), path("failing")]).expect("no colon");
        let text = in_a_process_with(&[("LD_LIBRARY_PATH", old.clone().into())]);
        for reason in [
            "libcudart.so.13 does not tell its version: cudaRuntimeGetVersion: cudaErrorUnknown (999)",
            "libcudart.so.12 is CUDA runtime 12.4; these bindings are of 13.0",
            "cannot open libcudart.so: ",
        ] {
            assert!(text.contains(reason), "{reason} is not in\n{text}");
        }

        let both = [("LD_LIBRARY_PATH", old.into()), ("VIRTUAL_ENV", path("venv"))];
        let text = in_a_process_with(&both);
        let found = path(WHEEL).join("libcudart.so.13");
        assert!(text.contains(&format!("runtime: {} Ok", found.display())), "{text}");
    }
}

/// Says aloud that the stubs were not built.
#[cfg(not(feature = "stub"))]
#[test]
fn stub_libraries_are_loaded_only_with_feature_stub() {
    println!(
        "skipped: loading stub libraries needs a C compiler: cargo test -p vpmm-harness \
         --features stub --test loading"
    );
}
