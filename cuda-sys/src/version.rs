//! Versions as both APIs report them: one number, `1000 × major + 10 × minor`.

use core::error::Error;
use core::ffi::c_int;
use core::fmt;

use crate::MissingSymbol;
use crate::types::{CUDA_VERSION, CUresult, cudaError_t};

/// A CUDA version, such as 13.0. Versions order as expected: 12.9 < 13.0.
///
/// ```
/// use cuda_sys::version::Version;
///
/// let version = Version::from_code(12040);
/// assert_eq!((version.major(), version.minor()), (12, 4));
/// assert_eq!(version.to_string(), "12.4");
/// assert!(version < Version::BINDINGS);
/// ```
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct Version {
    major: u32,
    minor: u32,
}

impl Version {
    /// The version of the headers that these bindings were generated from.
    pub const BINDINGS: Self = Self::from_code(CUDA_VERSION as c_int);

    /// A version from its two numbers.
    pub const fn new(major: u32, minor: u32) -> Self {
        Self { major, minor }
    }

    /// Decodes what `cuDriverGetVersion` and `cudaRuntimeGetVersion` write: 13000 is 13.0.
    ///
    /// Zero, which the runtime writes for the driver's version where no driver is
    /// installed, is 0.0; so is a negative number, which neither call writes.
    pub const fn from_code(code: c_int) -> Self {
        let code = if code < 0 { 0 } else { code.cast_unsigned() };
        Self { major: code / 1000, minor: code % 1000 / 10 }
    }

    /// The major version: structs of the runtime API are the same within one.
    pub const fn major(self) -> u32 {
        self.major
    }

    /// The minor version: it adds symbols.
    pub const fn minor(self) -> u32 {
        self.minor
    }
}

impl fmt::Display for Version {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}.{}", self.major, self.minor)
    }
}

/// Why a library did not tell its version.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum VersionError {
    /// The library has no such call.
    Missing(MissingSymbol),
    /// `cuDriverGetVersion` answered with this code.
    Driver(CUresult),
    /// `cudaRuntimeGetVersion` answered with this code.
    Runtime(cudaError_t),
}

impl fmt::Display for VersionError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::Missing(missing) => missing.fmt(f),
            Self::Driver(code) => write!(f, "cuDriverGetVersion: {code}"),
            Self::Runtime(code) => write!(f, "cudaRuntimeGetVersion: {code}"),
        }
    }
}

impl Error for VersionError {}

impl From<MissingSymbol> for VersionError {
    fn from(missing: MissingSymbol) -> Self {
        Self::Missing(missing)
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn decodes_what_the_apis_write() {
        for (code, major, minor) in
            [(13000, 13, 0), (12040, 12, 4), (12080, 12, 8), (11080, 11, 8), (0, 0, 0)]
        {
            assert_eq!(Version::from_code(code), Version::new(major, minor));
        }
        // Never written, so only that it does not panic or wrap matters.
        assert_eq!(Version::from_code(-1), Version::new(0, 0));
        assert_eq!(Version::from_code(c_int::MAX).major(), 2_147_483);
    }

    #[test]
    fn minor_versions_of_two_digits_order_after_those_of_one() {
        assert!(Version::from_code(12100) > Version::from_code(12090));
        assert!(Version::from_code(12100) < Version::from_code(13000));
        assert_eq!(Version::from_code(12100).to_string(), "12.10");
    }

    #[test]
    fn the_bindings_are_of_13_0() {
        assert_eq!(Version::BINDINGS.to_string(), "13.0");
    }
}
