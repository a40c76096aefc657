//! What was noted of a call below that does not succeed.

#![forbid(unsafe_code)]

use crate::error::Result;

/// Undoes something when it is dropped.
struct Undo<F: FnOnce()>(Option<F>);

impl<F: FnOnce()> Drop for Undo<F> {
    fn drop(&mut self) {
        if let Some(undo) = self.0.take() {
            undo();
        }
    }
}

/// Makes a call, and undoes what was noted for it before if it fails. A panic in it is a failure too: none of
/// our resources panics, but callers' functions and resources may.
pub(crate) fn or_undo<T>(call: impl FnOnce() -> Result<T>, undo: impl FnOnce()) -> Result<T> {
    let mut undo = Undo(Some(undo));
    let value = call()?;
    undo.0 = None;
    Ok(value)
}
