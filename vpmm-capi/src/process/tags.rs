//! Tags that a thread's requests have, so that memory of programs that know nothing of tags can sleep.

use std::cell::RefCell;
use std::ffi::{CStr, c_char};
use std::sync::atomic::{AtomicUsize, Ordering};

use super::mode::{self, Mode};
use crate::guard::{Failure, guard};
use crate::status::vpmm_status;

thread_local! {
    /// The last is the one that counts.
    static TAGS: RefCell<Vec<String>> = const { RefCell::new(Vec::new()) };
}

/// Tags that are open, of all threads. A thread that ends with some open leaves them counted, which only
/// has every request look here.
static OPEN: AtomicUsize = AtomicUsize::new(0);

/// The tag of this thread's requests.
pub(super) fn current() -> Option<String> {
    TAGS.try_with(|tags| tags.borrow().last().cloned()).ok().flatten()
}

/// From now on what this thread asks the process's pools for comes from their heap with a tag
/// (`vpmm_tagged_malloc`), until `vpmm_process_pop_tag`. May be called again for another tag meanwhile.
///
/// # Safety
/// `tag` is null or ends with a zero byte.
#[unsafe(no_mangle)]
pub unsafe extern "C" fn vpmm_process_push_tag(tag: *const c_char) -> vpmm_status {
    guard(|| {
        if tag.is_null() {
            return Err(Failure::null("tag"));
        }
        // SAFETY: the caller vouches for it.
        let tag = unsafe { CStr::from_ptr(tag) }
            .to_str()
            .map_err(|_| Failure::new(vpmm_status::VPMM_INVALID_ARGUMENT, "tag is not UTF-8"))?;
        TAGS.with(|tags| tags.borrow_mut().push(tag.to_owned()));
        OPEN.fetch_add(1, Ordering::SeqCst);
        mode::set(Mode::Tagging, true);
        Ok(())
    })
}

/// Ends what this thread's last `vpmm_process_push_tag` has begun.
#[unsafe(no_mangle)]
pub extern "C" fn vpmm_process_pop_tag() -> vpmm_status {
    guard(|| {
        if TAGS.with(|tags| tags.borrow_mut().pop()).is_none() {
            let text = "this thread has no tag";
            return Err(Failure::new(vpmm_status::VPMM_INVALID_ARGUMENT, text));
        }
        if OPEN.fetch_sub(1, Ordering::SeqCst) == 1 {
            mode::set(Mode::Tagging, false);
            // Another thread may have begun just before.
            if OPEN.load(Ordering::SeqCst) > 0 {
                mode::set(Mode::Tagging, true);
            }
        }
        Ok(())
    })
}
