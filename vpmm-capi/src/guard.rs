//! Around every function: errors become a status and a text, and no panic leaves.

use std::any::Any;
use std::cell::RefCell;
use std::ffi::{CStr, CString, c_char};
use std::fmt;
use std::panic::{AssertUnwindSafe, catch_unwind};
use std::sync::Arc;

use vpmm_core::Error;

use crate::status::vpmm_status;

/// Why a call failed. A pointer, so that results which have it or an address are two registers.
#[derive(Debug)]
pub(crate) struct Failure(Box<Reasons>);

#[derive(Debug)]
struct Reasons {
    status: vpmm_status,
    text: String,
    /// What it was made of, for who hands it on as that.
    error: Option<Error>,
}

impl Failure {
    pub(crate) fn new(status: vpmm_status, text: impl Into<String>) -> Self {
        Self(Box::new(Reasons { status, text: text.into(), error: None }))
    }

    /// Of what a panic carried.
    pub(crate) fn of_panic(panic: Box<dyn Any + Send>) -> Self {
        let text = panic.downcast_ref::<&str>().map(|text| (*text).to_owned());
        let text = text.or_else(|| panic.downcast_ref::<String>().cloned());
        // Its own drop may panic as well.
        std::mem::forget(panic);
        Self::new(vpmm_status::VPMM_PANIC, text.unwrap_or_else(|| "a panic".to_owned()))
    }

    pub(crate) fn status(&self) -> vpmm_status {
        self.0.status
    }

    pub(crate) fn text(&self) -> &str {
        &self.0.text
    }

    /// The same, with a line before its text.
    pub(crate) fn under(mut self, headline: String) -> Self {
        self.0.text = format!("{headline}\n{}", self.0.text);
        self
    }

    /// The same in other words.
    pub(crate) fn saying(mut self, text: String) -> Self {
        self.0.text = text;
        self
    }

    pub(crate) fn null(argument: &str) -> Self {
        Self::new(vpmm_status::VPMM_INVALID_ARGUMENT, format!("{argument} is null"))
    }
}

impl From<Error> for Failure {
    fn from(error: Error) -> Self {
        let map = error.map().map(|map| format!("\n{map}")).unwrap_or_default();
        let mut failure = Self::new(vpmm_status::of(&error), format!("{error}{map}"));
        failure.0.error = Some(error);
        failure
    }
}

impl From<Failure> for Error {
    fn from(failure: Failure) -> Self {
        let Reasons { status, text, error } = *failure.0;
        error.unwrap_or_else(|| Self::Resource(Arc::new(Text { status, text })))
    }
}

/// A failure that is none of the library's own, on its way through resources.
#[derive(Debug)]
struct Text {
    status: vpmm_status,
    text: String,
}

impl fmt::Display for Text {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.text)
    }
}

impl std::error::Error for Text {}

/// The status that a failure had before it was an error of a resource's.
pub(crate) fn status_before(error: &(dyn std::error::Error + 'static)) -> Option<vpmm_status> {
    error.downcast_ref::<Text>().map(|text| text.status)
}

thread_local! {
    static LAST: RefCell<CString> = RefCell::default();
}

/// A text for C. One with a zero byte in it ends there.
pub(crate) fn c_text(text: &str) -> CString {
    CString::new(text.split('\0').next().unwrap_or_default()).unwrap_or_default()
}

/// Keeps a text as this thread's last error.
pub(crate) fn remember(text: &str) {
    let text = c_text(text);
    // A thread that is ending has nobody to read it.
    let _ = LAST.try_with(|last| *last.borrow_mut() = text);
}

/// Runs what a function does.
pub(crate) fn guard(work: impl FnOnce() -> Result<(), Failure>) -> vpmm_status {
    // Whatever a panic left half done is behind the library's own locks, which are not poisoned.
    let failure = match catch_unwind(AssertUnwindSafe(work)) {
        Ok(Ok(())) => return vpmm_status::VPMM_OK,
        Ok(Err(failure)) => failure,
        Err(panic) => Failure::of_panic(panic),
    };
    remember(failure.text());
    failure.status()
}

/// Runs what a function does with a handle.
///
/// # Safety
/// A handle that is not null is to a live value, which is not released meanwhile.
pub(crate) unsafe fn with<T>(
    handle: *const T,
    argument: &str,
    work: impl FnOnce(&T) -> Result<(), Failure>,
) -> vpmm_status {
    // SAFETY: the caller vouches for it.
    guard(|| work(unsafe { given(handle, argument) }?))
}

/// Runs what a function makes, and writes it. Where there is no room for it nothing is made.
///
/// # Safety
/// A pointer that is not null is to memory for a value.
pub(crate) unsafe fn make<T>(
    out: *mut T,
    work: impl FnOnce() -> Result<T, Failure>,
) -> vpmm_status {
    guard(|| {
        if out.is_null() {
            return Err(Failure::null("out"));
        }
        let made = work()?;
        // SAFETY: the caller vouches for it.
        unsafe { out.write(made) };
        Ok(())
    })
}

/// Takes a handle back. Null is none.
///
/// # Safety
/// A handle that is not null was made by `Box::into_raw`, and is not used again.
pub(crate) unsafe fn release<T>(handle: *mut T) {
    if !handle.is_null() {
        // SAFETY: the caller vouches for it.
        let value = unsafe { Box::from_raw(handle) };
        let _ = guard(|| {
            drop(value);
            Ok(())
        });
    }
}

/// The text of this thread's last call that failed; empty before. It stays until the next one that
/// fails on this thread.
#[unsafe(no_mangle)]
pub extern "C" fn vpmm_last_error() -> *const c_char {
    LAST.try_with(|last| last.borrow().as_ptr()).unwrap_or(c"".as_ptr())
}

/// Refuses a null pointer by the argument's name.
///
/// # Safety
/// A pointer that is not null is to a live value, which nobody changes meanwhile.
pub(crate) unsafe fn given<'a, T>(pointer: *const T, argument: &str) -> Result<&'a T, Failure> {
    // SAFETY: the caller vouches for it.
    unsafe { pointer.as_ref() }.ok_or_else(|| Failure::null(argument))
}

/// A text that is not null, and is UTF-8.
///
/// # Safety
/// A pointer that is not null is to a text that ends with a zero byte, which nobody changes meanwhile.
pub(crate) unsafe fn text<'a>(pointer: *const c_char, argument: &str) -> Result<&'a str, Failure> {
    if pointer.is_null() {
        return Err(Failure::null(argument));
    }
    // SAFETY: the caller vouches for it.
    unsafe { CStr::from_ptr(pointer) }.to_str().map_err(|_| {
        let text = format!("{argument} is not UTF-8");
        Failure::new(vpmm_status::VPMM_INVALID_ARGUMENT, text)
    })
}

/// Writes a result.
///
/// # Safety
/// A pointer that is not null is to memory for a value.
pub(crate) unsafe fn put<T>(out: *mut T, argument: &str, value: T) -> Result<(), Failure> {
    if out.is_null() {
        return Err(Failure::null(argument));
    }
    // SAFETY: the caller vouches for it.
    unsafe { out.write(value) };
    Ok(())
}

/// Writes a number where somebody wants it.
///
/// # Safety
/// A pointer that is not null is to memory for a value.
pub(crate) unsafe fn put_if<T>(out: *mut T, value: T) {
    if !out.is_null() {
        // SAFETY: the caller vouches for it.
        unsafe { out.write(value) };
    }
}

/// Writes a text, cut to `length` bytes with the zero byte at its end, and how many bytes all of it has,
/// the zero byte included.
///
/// # Safety
/// `out` has room for `length` bytes, or is null, and `length` 0; `needed` is null or has room for a
/// number.
pub(crate) unsafe fn put_text(
    value: &str,
    out: *mut c_char,
    length: usize,
    needed: *mut usize,
) -> Result<(), Failure> {
    if let Some(most) = length.checked_sub(1) {
        if out.is_null() {
            return Err(Failure::null("text"));
        }
        let bytes = value.len().min(most);
        // SAFETY: there is room for `length` bytes, of which these and the one behind them are written.
        unsafe {
            out.cast::<u8>().copy_from_nonoverlapping(value.as_ptr(), bytes);
            out.add(bytes).write(0);
        }
    }
    // SAFETY: the caller vouches for it.
    unsafe { put_if(needed, value.len() + 1) };
    Ok(())
}

#[cfg(test)]
mod tests {
    use std::panic::panic_any;

    use super::*;

    fn last_error() -> String {
        // SAFETY: this thread's text, until its next failure.
        unsafe { CStr::from_ptr(vpmm_last_error()) }.to_string_lossy().into_owned()
    }

    /// What nothing is known of, and must not be dropped.
    struct Odd;

    impl Drop for Odd {
        fn drop(&mut self) {
            panic!("dropped");
        }
    }

    #[test]
    fn a_panic_is_answered_with_its_text_and_the_next_call_goes_on() {
        let panics: [fn(i32); 3] =
            [|_| panic!("literally"), |number| panic!("number {number}\0cut"), |_| panic_any(Odd)];
        for (work, text) in panics.into_iter().zip(["literally", "number 7", "a panic"]) {
            let answer = guard(|| {
                work(7);
                Ok(())
            });
            assert_eq!((answer, last_error().as_str()), (vpmm_status::VPMM_PANIC, text));
            assert_eq!(guard(|| Ok(())), vpmm_status::VPMM_OK);
            assert_eq!(last_error(), text, "it stays until the next failure");
            let failure = || Err(Failure::null("pool"));
            assert_eq!(guard(failure), vpmm_status::VPMM_INVALID_ARGUMENT);
            assert_eq!(last_error(), "pool is null");
        }
    }

    #[test]
    fn a_failure_keeps_its_status_on_its_way_through_resources() {
        for status in [vpmm_status::VPMM_DISCONNECTED, vpmm_status::VPMM_PANIC] {
            let through = Failure::from(Error::from(Failure::new(status, "the server has gone")));
            assert_eq!(through.status(), status);
            assert!(through.text().contains("the server has gone"));
        }
        // One that is the library's own stays what it is, whatever is said of it.
        let own = Failure::from(Error::ZeroSize).saying("nothing".to_owned());
        assert!(own.text() == "nothing" && matches!(Error::from(own), Error::ZeroSize));
    }

    #[test]
    fn a_panic_writes_nothing_and_takes_a_handle_back() {
        let mut out = 5;
        // SAFETY: room for a number.
        let answer = unsafe { make(&raw mut out, || panic!("made nothing")) };
        assert_eq!((answer, out), (vpmm_status::VPMM_PANIC, 5));
        // SAFETY: made here, given back once.
        unsafe { release(Box::into_raw(Box::new(Odd))) };
        assert_eq!(last_error(), "dropped");
    }
}
