//! Names for the codes that every call answers with.
//!
//! `cuGetErrorName` needs a loaded driver and `Debug` on a newtype enum prints
//! only the number, so the names come with the crate, generated from the same
//! headers as the types. A code that a newer driver returns has no name here and
//! displays as a number.
//!
//! ```
//! use cuda_sys::types::{CUresult, cudaError_t};
//!
//! assert_eq!(CUresult::CUDA_ERROR_OUT_OF_MEMORY.name(), Some("CUDA_ERROR_OUT_OF_MEMORY"));
//! assert_eq!(CUresult(2).to_string(), "CUDA_ERROR_OUT_OF_MEMORY (2)");
//! assert_eq!(cudaError_t(100).to_string(), "cudaErrorNoDevice (100)");
//! assert_eq!(CUresult(12345).to_string(), "unknown CUresult (12345)");
//! ```

use core::error::Error;
use core::fmt;

use crate::bindings::status::{CUDA_ERRORS, CURESULTS};
use crate::types::{CUresult, cudaError_t};

impl CUresult {
    /// Every code of the driver API that the bindings know, in ascending order.
    pub fn all() -> impl ExactSizeIterator<Item = Self> {
        CURESULTS.iter().map(|(code, _)| Self(*code))
    }

    /// The name that `cuda.h` gives this code, or `None` for a code it does not define.
    ///
    /// Needs no driver; O(log n) in the number of codes.
    pub fn name(self) -> Option<&'static str> {
        find(CURESULTS, self.0)
    }
}

impl cudaError_t {
    /// Every code of the runtime API that the bindings know, in ascending order.
    pub fn all() -> impl ExactSizeIterator<Item = Self> {
        CUDA_ERRORS.iter().map(|(code, _)| Self(*code))
    }

    /// The name that the runtime's headers give this code, or `None` for a code they do not define.
    ///
    /// Needs no library; O(log n) in the number of codes.
    pub fn name(self) -> Option<&'static str> {
        find(CUDA_ERRORS, self.0)
    }
}

/// The name and the number: `CUDA_ERROR_OUT_OF_MEMORY (2)`, or `unknown CUresult (12345)`.
impl fmt::Display for CUresult {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        show(f, "CUresult", self.name(), self.0)
    }
}

/// The name and the number: `cudaErrorNoDevice (100)`, or `unknown cudaError_t (12345)`.
impl fmt::Display for cudaError_t {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        show(f, "cudaError_t", self.name(), self.0)
    }
}

impl Error for CUresult {}
impl Error for cudaError_t {}

fn find(table: &[(u32, &'static str)], code: u32) -> Option<&'static str> {
    table.binary_search_by_key(&code, |(code, _)| *code).ok().map(|found| table[found].1)
}

fn show(f: &mut fmt::Formatter<'_>, of: &str, name: Option<&str>, code: u32) -> fmt::Result {
    match name {
        Some(name) => write!(f, "{name} ({code})"),
        None => write!(f, "unknown {of} ({code})"),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The binary search needs strictly ascending codes.
    #[test]
    fn tables_are_sorted_without_duplicates() {
        for table in [CURESULTS, CUDA_ERRORS] {
            assert!(table.windows(2).all(|pair| pair[0].0 < pair[1].0));
        }
    }

    #[test]
    fn known_codes_have_the_names_of_their_constants() {
        for (code, name) in [
            (CUresult::CUDA_SUCCESS, "CUDA_SUCCESS"),
            (CUresult::CUDA_ERROR_INVALID_VALUE, "CUDA_ERROR_INVALID_VALUE"),
            (CUresult::CUDA_ERROR_NO_DEVICE, "CUDA_ERROR_NO_DEVICE"),
            (CUresult::CUDA_ERROR_NOT_READY, "CUDA_ERROR_NOT_READY"),
            (CUresult::CUDA_ERROR_UNKNOWN, "CUDA_ERROR_UNKNOWN"),
        ] {
            assert_eq!(code.name(), Some(name));
            assert_eq!(code.to_string(), format!("{name} ({})", code.0));
        }
        assert_eq!(cudaError_t::cudaSuccess.name(), Some("cudaSuccess"));
        assert_eq!(cudaError_t::cudaErrorUnknown.name(), Some("cudaErrorUnknown"));
        assert_eq!(cudaError_t::cudaErrorApiFailureBase.name(), Some("cudaErrorApiFailureBase"));
    }

    #[test]
    fn every_known_code_has_a_name() {
        assert!(CUresult::all().all(|code| code.name().is_some()));
        assert!(cudaError_t::all().all(|code| code.name().is_some()));
        assert!(CUresult::all().len() > 90 && cudaError_t::all().len() > 100);
    }

    #[test]
    fn codes_of_a_newer_library_show_as_numbers() {
        assert_eq!(CUresult(u32::MAX).name(), None);
        assert_eq!(CUresult(u32::MAX).to_string(), "unknown CUresult (4294967295)");
        assert_eq!(cudaError_t(9999).to_string(), "unknown cudaError_t (9999)");
    }
}
