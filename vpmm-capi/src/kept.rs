//! A value that others borrow for as long as this keeps it, wherever this is moved meanwhile.

use std::ptr::NonNull;

/// Keeps a value in its place. A `Box` would not do: to move one claims the value for it alone, which ends
/// every borrow of the value, though it stays where it is.
pub(crate) struct Kept<T>(NonNull<T>);

// SAFETY: it owns its value, as a box does.
unsafe impl<T: Send> Send for Kept<T> {}
// SAFETY: as above.
unsafe impl<T: Sync> Sync for Kept<T> {}

impl<T> Kept<T> {
    pub(crate) fn new(value: T) -> Self {
        Self(NonNull::from(Box::leak(Box::new(value))))
    }

    /// The value, for a time that only the caller knows.
    ///
    /// # Safety
    /// The reference, and whatever borrows by it, is gone before `self` is dropped.
    pub(crate) unsafe fn borrow<'a>(&self) -> &'a T {
        // SAFETY: it lives until `self` is dropped, by the caller after the reference, and nobody has it by a
        // mutable one.
        unsafe { self.0.as_ref() }
    }
}

impl<T> Drop for Kept<T> {
    fn drop(&mut self) {
        // SAFETY: made by a box in `new`, given back once; nobody borrows it any more.
        drop(unsafe { Box::from_raw(self.0.as_ptr()) });
    }
}

#[cfg(test)]
mod tests {
    use std::sync::Arc;

    use super::Kept;

    /// Moves a value as a call does. Miri tells where that ends a borrow.
    #[inline(never)]
    fn moved<T>(value: T) -> Box<T> {
        Box::new(value)
    }

    #[test]
    fn a_borrow_outlives_every_move() {
        let told = Arc::new(());
        let kept = Kept::new((7, Arc::clone(&told)));
        // SAFETY: not used after the drop below.
        let borrowed: &'static (i32, Arc<()>) = unsafe { kept.borrow() };
        let kept = moved(moved(kept));
        assert_eq!((borrowed.0, Arc::strong_count(&borrowed.1)), (7, 2));
        drop(kept);
        assert_eq!(Arc::strong_count(&told), 1, "dropped, once");
    }
}
