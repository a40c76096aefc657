//! Opening the libraries at run time.
//!
//! ```text
//! Driver::load()        libcuda.so.1, libcuda.so ─┐
//! Driver::load_from(p)  one path                 ─┼─ dlopen ─ dlsym each name ─┐
//! Runtime::load()       names, toolkits, wheels  ─┘                            ├─ function table
//! from_symbols(f)       a closure ─ f(name) for each name ─────────────────────┘
//! ```
//!
//! 1. A library is never closed, so a function of a loaded table is callable for
//!    the rest of the process.
//! 2. A symbol that is not there leaves an empty slot; it never fails the load.
//! 3. No candidate that worked is an error that lists every candidate with its reason.
//! 4. The runtime is taken only in the bindings' major version, for its structs
//!    change from one major to the next; the driver's interface is versioned by symbol.

use std::any::Any;
use std::ffi::{CStr, OsStr, OsString, c_void};
use std::fmt;
use std::ops::Deref;
use std::path::Path;
use std::sync::Arc;

use crate::types::{CUresult, cudaError_t};
use crate::version::{Version, VersionError};
use crate::{DriverApi, RuntimeApi, require};

mod error;
mod library;
mod search;

pub use error::{Attempt, LoadError};
use library::Library;

/// What a failed load says it looked for.
const DRIVER: &str = "CUDA driver";
const RUNTIME: &str = "CUDA runtime";

/// A function table with what keeps it callable. Cheap to clone; all clones share one table.
struct Loaded<Api> {
    api: Api,
    origin: Box<str>,
    _keep_alive: Arc<dyn Any + Send + Sync>,
}

/// The driver API's function table, with what keeps it callable.
///
/// Dereferences to [`DriverApi`]. Cloning is one reference count.
#[derive(Clone)]
pub struct Driver(Arc<Loaded<DriverApi>>);

/// The runtime API's function table, with what keeps it callable.
///
/// Dereferences to [`RuntimeApi`]. Cloning is one reference count.
#[derive(Clone)]
pub struct Runtime(Arc<Loaded<RuntimeApi>>);

impl Driver {
    /// Opens the driver that the dynamic linker finds: `libcuda.so.1`, else `libcuda.so`.
    ///
    /// Does not initialise it: `cuInit` is the caller's. Takes one `dlsym` per
    /// symbol, about a tenth of a millisecond in all; load once and clone.
    ///
    /// Safe because the names are the driver's own: that the library under these
    /// names is NVIDIA's is trusted as the system's other libraries are.
    ///
    /// # Errors
    /// [`LoadError::NotFound`] lists both names with the dynamic linker's reason for each.
    pub fn load() -> Result<Self, LoadError> {
        let names = ["libcuda.so.1", "libcuda.so"].map(OsString::from);
        // SAFETY: the library of these names is the CUDA driver, whose initialisers are made
        // to run in any process and whose functions have the declared signatures.
        first_of(DRIVER, names, |name| unsafe { Self::open(name) })
    }

    /// Opens the driver library at a path, or by a name that the dynamic linker searches for.
    ///
    /// # Errors
    /// [`LoadError::Open`] where the dynamic linker refuses the file;
    /// [`LoadError::NoSymbols`] where the library is not a driver.
    ///
    /// # Safety
    /// The file's initialisers must be sound to run in this process, and every symbol it
    /// exports under a name in [`DriverApi::SYMBOLS`] must be a function of the declared
    /// signature. A CUDA driver of any version is such a file.
    pub unsafe fn load_from(path: impl AsRef<Path>) -> Result<Self, LoadError> {
        // SAFETY: the caller's promise is the one asked for.
        unsafe { Self::open(path.as_ref().as_os_str()) }
    }

    /// Fills the table from a closure that answers symbol names: how a simulator plugs in.
    ///
    /// `origin` names the source in messages; `keep_alive` is held until the last clone is dropped.
    ///
    /// # Safety
    /// As [`DriverApi::load_with`], where `keep_alive` may be what keeps the functions callable.
    pub unsafe fn from_symbols(
        origin: &str,
        lookup: impl FnMut(&'static CStr) -> *const c_void,
        keep_alive: Arc<dyn Any + Send + Sync>,
    ) -> Self {
        // SAFETY: the caller vouches for every pointer that `lookup` returns.
        let api = unsafe { DriverApi::load_with(lookup) };
        Self(Arc::new(Loaded { api, origin: origin.into(), _keep_alive: keep_alive }))
    }

    /// Where the functions come from: a library's path or name, or what the closure was called.
    pub fn origin(&self) -> &str {
        &self.0.origin
    }

    /// The newest CUDA version that this driver supports. Needs no `cuInit`.
    ///
    /// # Errors
    /// [`VersionError`] where `cuDriverGetVersion` is missing or fails.
    pub fn version(&self) -> Result<Version, VersionError> {
        let get = require!(self, cuDriverGetVersion)?;
        let mut code = 0;
        // SAFETY: `code` is a valid place for the one int that the call writes, and the
        // call may be made at any time, initialised or not.
        match unsafe { get(&mut code) } {
            CUresult::CUDA_SUCCESS => Ok(Version::from_code(code)),
            error => Err(VersionError::Driver(error)),
        }
    }

    /// # Safety
    /// As [`Self::load_from`].
    unsafe fn open(name: &OsStr) -> Result<Self, LoadError> {
        // SAFETY: the caller vouches for the initialisers.
        let library = unsafe { Library::open(name)? };
        let origin = name.to_string_lossy();
        // SAFETY: the caller vouches for the signatures; the library is never closed.
        let driver =
            unsafe { Self::from_symbols(&origin, |name| library.symbol(name), Arc::new(())) };
        if driver.missing().count() == DriverApi::SYMBOLS.len() {
            return Err(LoadError::NoSymbols { origin: origin.into_owned(), library: DRIVER });
        }
        Ok(driver)
    }
}

impl Runtime {
    /// Opens the CUDA 13 runtime wherever it is installed.
    ///
    /// Tried in this order, until one of version 13 is found:
    /// 1. `libcudart.so.13`, as the dynamic linker finds it or as it is already loaded;
    /// 2. that name in `CUDA_HOME`, `CUDA_PATH`, `CUDA_ROOT`, `CONDA_PREFIX`, `/usr/local/cuda`
    ///    and `/opt/cuda`;
    /// 3. the wheel nvidia-cuda-runtime in the `site-packages` of the active virtual or
    ///    conda environment, of `PYTHONPATH`, of each `python3` on `PATH`, of the user and
    ///    of the system (Python is not run);
    /// 4. the names of other majors in the same places. `cudaRuntimeGetVersion` tells
    ///    which version they are, and they are refused unless it is 13 after all.
    ///
    /// A refused library stays mapped, unused, as no library is ever closed. Safe for the
    /// reason given at [`Driver::load`].
    ///
    /// # Errors
    /// [`LoadError::NotFound`] lists every candidate with the reason against it, among them
    /// [`LoadError::WrongMajor`] with the version found.
    pub fn load() -> Result<Self, LoadError> {
        // SAFETY: a library of these names is the CUDA runtime, whose initialisers are made
        // to run in any process, and its functions are used only in the bindings' own major
        // version, where they have the declared signatures.
        first_of(RUNTIME, search::runtime_candidates(), |name| unsafe { Self::open_native(name) })
    }

    /// Opens the runtime library at a path, or by a name that the dynamic linker searches for.
    ///
    /// # Errors
    /// [`LoadError::Open`] where the dynamic linker refuses the file;
    /// [`LoadError::NoSymbols`] where the library is not a runtime;
    /// [`LoadError::WrongMajor`] where it is not of the bindings' major version;
    /// [`LoadError::Version`] where it does not say.
    ///
    /// # Safety
    /// The file's initialisers must be sound to run in this process. If it exports
    /// `cudaRuntimeGetVersion` and reports version 13, then every symbol it exports under a
    /// name in [`RuntimeApi::SYMBOLS`] must be a function of the declared signature.
    /// A CUDA runtime of any version is such a file.
    pub unsafe fn load_from(path: impl AsRef<Path>) -> Result<Self, LoadError> {
        // SAFETY: the caller's promise is the one asked for.
        unsafe { Self::open_native(path.as_ref().as_os_str()) }
    }

    /// Opens the runtime library at a path, whatever version it is of.
    ///
    /// For callers that stay with functions whose arguments did not change between
    /// majors; ask [`Self::version`] first.
    ///
    /// # Errors
    /// As [`Self::load_from`], without those about the version.
    ///
    /// # Safety
    /// The file's initialisers must be sound to run in this process. Calling a function of
    /// the table is sound only where the library's version gives it, and every struct that
    /// it is passed, the layout declared here: `cudaDeviceProp` for one is larger in 12.4
    /// than in 13.0, and `cudaPointerAttributes` smaller.
    pub unsafe fn load_any_major_from(path: impl AsRef<Path>) -> Result<Self, LoadError> {
        // SAFETY: the caller's promise is the one asked for.
        unsafe { Self::open(path.as_ref().as_os_str()) }
    }

    /// Fills the table from a closure that answers symbol names. The version is not checked.
    ///
    /// `origin` names the source in messages; `keep_alive` is held until the last clone is dropped.
    ///
    /// # Safety
    /// As [`RuntimeApi::load_with`], where `keep_alive` may be what keeps the functions callable.
    pub unsafe fn from_symbols(
        origin: &str,
        lookup: impl FnMut(&'static CStr) -> *const c_void,
        keep_alive: Arc<dyn Any + Send + Sync>,
    ) -> Self {
        // SAFETY: the caller vouches for every pointer that `lookup` returns.
        let api = unsafe { RuntimeApi::load_with(lookup) };
        Self(Arc::new(Loaded { api, origin: origin.into(), _keep_alive: keep_alive }))
    }

    /// Where the functions come from: a library's path or name, or what the closure was called.
    pub fn origin(&self) -> &str {
        &self.0.origin
    }

    /// The runtime's version. Needs no device and no driver.
    ///
    /// # Errors
    /// [`VersionError`] where `cudaRuntimeGetVersion` is missing or fails.
    pub fn version(&self) -> Result<Version, VersionError> {
        let get = require!(self, cudaRuntimeGetVersion)?;
        let mut code = 0;
        // SAFETY: `code` is a valid place for the one int that the call writes; the call has
        // had this signature in every version.
        match unsafe { get(&mut code) } {
            cudaError_t::cudaSuccess => Ok(Version::from_code(code)),
            error => Err(VersionError::Runtime(error)),
        }
    }

    /// Opens a library and keeps it only in the bindings' major version.
    ///
    /// # Safety
    /// As [`Self::load_from`].
    unsafe fn open_native(name: &OsStr) -> Result<Self, LoadError> {
        // SAFETY: the caller vouches for the initialisers, and nothing but the version is
        // asked before it is known to be the bindings' own.
        let runtime = unsafe { Self::open(name)? };
        let origin = || runtime.origin().to_owned();
        match runtime.version() {
            Ok(found) if found.major() == Version::BINDINGS.major() => Ok(runtime),
            Ok(found) => Err(LoadError::WrongMajor { origin: origin(), found }),
            Err(source) => Err(LoadError::Version { origin: origin(), source }),
        }
    }

    /// # Safety
    /// As [`Self::load_any_major_from`].
    unsafe fn open(name: &OsStr) -> Result<Self, LoadError> {
        // SAFETY: the caller vouches for the initialisers.
        let library = unsafe { Library::open(name)? };
        let origin = name.to_string_lossy();
        // SAFETY: the caller vouches for the signatures; the library is never closed.
        let runtime =
            unsafe { Self::from_symbols(&origin, |name| library.symbol(name), Arc::new(())) };
        if runtime.missing().count() == RuntimeApi::SYMBOLS.len() {
            return Err(LoadError::NoSymbols { origin: origin.into_owned(), library: RUNTIME });
        }
        Ok(runtime)
    }
}

/// The first candidate that opens, else every one with its reason.
fn first_of<T>(
    library: &'static str,
    candidates: impl IntoIterator<Item = OsString>,
    mut open: impl FnMut(&OsStr) -> Result<T, LoadError>,
) -> Result<T, LoadError> {
    let mut tried = Vec::new();
    for candidate in candidates {
        match open(&candidate) {
            Ok(opened) => return Ok(opened),
            Err(why) => {
                tried.push(Attempt { what: candidate.to_string_lossy().into_owned(), why });
            }
        }
    }
    Err(LoadError::NotFound { library, tried })
}

impl Deref for Driver {
    type Target = DriverApi;

    fn deref(&self) -> &DriverApi {
        &self.0.api
    }
}

impl Deref for Runtime {
    type Target = RuntimeApi;

    fn deref(&self) -> &RuntimeApi {
        &self.0.api
    }
}

impl<Api: fmt::Debug> Loaded<Api> {
    fn debug(&self, name: &str, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.debug_struct(name).field("origin", &self.origin).field("api", &self.api).finish()
    }
}

impl fmt::Debug for Driver {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.debug("Driver", f)
    }
}

impl fmt::Debug for Runtime {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        self.0.debug("Runtime", f)
    }
}

#[cfg(test)]
mod tests;
