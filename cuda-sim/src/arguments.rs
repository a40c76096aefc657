//! Pointer arguments of driver calls, wrapped where they enter so that the rest is safe code.

use std::ffi::{CStr, c_char, c_void};

use cuda_sys::types::CUresult;

const INVALID: CUresult = CUresult::CUDA_ERROR_INVALID_VALUE;

/// How an argument of a C call becomes one of a handler.
pub(crate) trait FromC<Raw> {
    /// # Safety
    /// If `raw` is a pointer, it is null or valid, for as long as the call lasts, for what the
    /// driver documents that argument to be.
    unsafe fn from_c(raw: Raw) -> Self;
}

impl<T> FromC<T> for T {
    unsafe fn from_c(raw: T) -> Self {
        raw
    }
}

/// Where a call puts an answer.
#[derive(Debug)]
pub(crate) struct Out<T>(*mut T);

impl<T> FromC<*mut T> for Out<T> {
    unsafe fn from_c(raw: *mut T) -> Self {
        Self(raw)
    }
}

impl<T> Out<T> {
    pub(crate) fn is_null(&self) -> bool {
        self.0.is_null()
    }

    /// `CUDA_ERROR_INVALID_VALUE` for a null pointer, before anything happens.
    pub(crate) fn required(&self) -> Result<(), CUresult> {
        if self.is_null() { Err(INVALID) } else { Ok(()) }
    }

    /// Stores the answer.
    pub(crate) fn set(&self, value: T) -> Result<(), CUresult> {
        self.required()?;
        // SAFETY: not null, so `from_c`'s caller vouches that it may be written; unaligned
        // because C callers are not held to Rust's rules.
        unsafe { self.0.write_unaligned(value) };
        Ok(())
    }

    /// Stores the answer if the caller wants it.
    pub(crate) fn set_optional(&self, value: T) {
        if !self.is_null() {
            // SAFETY: as in `set`.
            unsafe { self.0.write_unaligned(value) };
        }
    }

    /// Reads what is there, for arguments that go both ways.
    pub(crate) fn get(&self) -> Result<T, CUresult>
    where
        T: Copy,
    {
        self.required()?;
        // SAFETY: not null, so `from_c`'s caller vouches that it may be read.
        Ok(unsafe { self.0.read_unaligned() })
    }

    /// Stores element `index` of an array that the driver documents to be longer than that.
    pub(crate) fn set_at(&self, index: usize, value: T) -> Result<(), CUresult> {
        self.required()?;
        // SAFETY: the caller of the driver vouches for the array's length.
        unsafe { self.0.add(index).write_unaligned(value) };
        Ok(())
    }
}

/// A pointer to what a call reads.
#[derive(Debug)]
pub(crate) struct In<T>(*const T);

impl<T> FromC<*const T> for In<T> {
    unsafe fn from_c(raw: *const T) -> Self {
        Self(raw)
    }
}

impl<T> FromC<*mut T> for In<T> {
    unsafe fn from_c(raw: *mut T) -> Self {
        Self(raw)
    }
}

impl<T: Copy> In<T> {
    pub(crate) fn get(&self) -> Result<T, CUresult> {
        self.at(0)
    }

    /// Element `index` of an array that the driver documents to be longer than that.
    pub(crate) fn at(&self, index: usize) -> Result<T, CUresult> {
        if self.0.is_null() {
            return Err(INVALID);
        }
        // SAFETY: not null, so `from_c`'s caller vouches for as many elements as the call's
        // other arguments say.
        Ok(unsafe { self.0.add(index).read_unaligned() })
    }
}

/// A C string that a call reads.
#[derive(Debug)]
pub(crate) struct Text(*const c_char);

impl FromC<*const c_char> for Text {
    unsafe fn from_c(raw: *const c_char) -> Self {
        Self(raw)
    }
}

impl FromC<*const c_void> for Text {
    unsafe fn from_c(raw: *const c_void) -> Self {
        Self(raw.cast())
    }
}

impl Text {
    pub(crate) fn get(&self) -> Result<&CStr, CUresult> {
        if self.0.is_null() {
            return Err(INVALID);
        }
        // SAFETY: not null, so `from_c`'s caller vouches for a NUL-terminated string that lives
        // as long as the call, and so as long as `self`.
        Ok(unsafe { CStr::from_ptr(self.0) })
    }
}

/// An untyped pointer, whose meaning depends on other arguments.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Untyped(pub(crate) u64);

impl<T> FromC<*mut T> for Untyped {
    unsafe fn from_c(raw: *mut T) -> Self {
        Self(raw as u64)
    }
}

impl<T> FromC<*const T> for Untyped {
    unsafe fn from_c(raw: *const T) -> Self {
        Self(raw as u64)
    }
}

impl Untyped {
    /// Stores a value where another argument says that one of this type goes.
    pub(crate) fn set<T>(self, value: T) -> Result<(), CUresult> {
        Out(self.0 as *mut T).set(value)
    }

    /// Reads a value where another argument says that one of this type is.
    pub(crate) fn get<T: Copy>(self) -> Result<T, CUresult> {
        In(self.0 as *const T).get()
    }

    /// Copies raw bytes from there.
    pub(crate) fn bytes(self, length: usize) -> Result<Vec<u8>, CUresult> {
        if self.0 == 0 && length > 0 {
            return Err(INVALID);
        }
        let mut bytes = vec![0; length];
        // SAFETY: the driver's caller vouches for that many readable bytes; the target is a
        // fresh buffer of the same length.
        unsafe { std::ptr::copy(self.0 as *const u8, bytes.as_mut_ptr(), length) };
        Ok(bytes)
    }
}
