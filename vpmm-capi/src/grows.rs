//! Structures that can grow: they begin with their size as the program was built with it, so that a
//! program and a library of different versions meet in the fields that both know.

use crate::guard::Failure;
use crate::status::vpmm_status;

/// No structure ever has more bytes.
const MOST_BYTES: usize = 4096;

/// A structure of C whose first field is its size.
///
/// # Safety
/// It is `repr(C)`, all of numbers without padding between them, and begins with a `usize`.
pub(crate) unsafe trait Grows: Copy {
    /// What it is called in texts, and by the function that sets it.
    const NAME: &'static str;
    /// All fields at their first values.
    const INITIAL: Self;
}

/// Sets a program's structure of so many bytes to first values. What this library does not know of is
/// set to 0.
///
/// # Safety
/// `out` is null or has room for `size` bytes.
pub(crate) unsafe fn init<T: Grows>(out: *mut T, size: usize) {
    if out.is_null() || !(size_of::<usize>()..=MOST_BYTES).contains(&size) {
        return;
    }
    let initial = T::INITIAL;
    let known = size.min(size_of::<T>());
    // SAFETY: there is room for `size` bytes, of which `known` are copied; the first field is a `usize`.
    unsafe {
        out.cast::<u8>().write_bytes(0, size);
        out.cast::<u8>().copy_from_nonoverlapping((&raw const initial).cast(), known);
        out.cast::<usize>().write(size);
    }
}

/// What a program gave: the fields that it knows of, and the others at their first values; all of them
/// for null.
///
/// # Safety
/// `given` is null, or to as many bytes as its first field says.
pub(crate) unsafe fn read<T: Grows>(given: *const T) -> Result<T, Failure> {
    let mut value = T::INITIAL;
    if given.is_null() {
        return Ok(value);
    }
    // SAFETY: the caller vouches for it.
    let known = unsafe { known_bytes(given) }?;
    // SAFETY: both have so many bytes, of plain numbers, and do not overlap.
    unsafe { (&raw mut value).cast::<u8>().copy_from_nonoverlapping(given.cast(), known) };
    Ok(value)
}

/// Fills what a program has room for, but not its size.
///
/// # Safety
/// `out` is null, or to as many bytes as its first field says.
pub(crate) unsafe fn fill<T: Grows>(out: *mut T, value: T) -> Result<(), Failure> {
    if out.is_null() {
        return Err(Failure::null("out"));
    }
    // SAFETY: the caller vouches for it.
    let known = unsafe { known_bytes(out) }?;
    let from = size_of::<usize>();
    // SAFETY: both have `known` bytes, of plain numbers, and do not overlap.
    unsafe {
        let fields = (&raw const value).cast::<u8>().add(from);
        out.cast::<u8>().add(from).copy_from_nonoverlapping(fields, known - from);
    }
    Ok(())
}

/// Whether a structure can be filled; null stands for none, and is fine.
///
/// # Safety
/// `out` is null, or to as many bytes as its first field says.
pub(crate) unsafe fn check<T: Grows>(out: *const T) -> Result<(), Failure> {
    if !out.is_null() {
        // SAFETY: the caller vouches for it.
        unsafe { known_bytes(out) }?;
    }
    Ok(())
}

/// The bytes of a program's structure that this library knows of.
///
/// # Safety
/// `given` begins with a `usize`.
unsafe fn known_bytes<T: Grows>(given: *const T) -> Result<usize, Failure> {
    // SAFETY: the caller vouches for it.
    let size = unsafe { given.cast::<usize>().read() };
    if !(size_of::<usize>()..=MOST_BYTES).contains(&size) {
        let name = T::NAME;
        let text = format!("a {name} of {size} bytes: {name}_init was not called");
        return Err(Failure::new(vpmm_status::VPMM_INVALID_ARGUMENT, text));
    }
    Ok(size.min(size_of::<T>()))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[repr(C)]
    #[derive(Clone, Copy, PartialEq, Debug)]
    struct Older {
        size: usize,
        first: u64,
    }

    #[repr(C)]
    #[derive(Clone, Copy, PartialEq, Debug)]
    struct Newer {
        size: usize,
        first: u64,
        second: u64,
    }

    // SAFETY: as the trait asks.
    unsafe impl Grows for Older {
        const NAME: &'static str = "older";
        const INITIAL: Self = Self { size: 16, first: 5 };
    }

    // SAFETY: as the trait asks.
    unsafe impl Grows for Newer {
        const NAME: &'static str = "newer";
        const INITIAL: Self = Self { size: 24, first: 5, second: 6 };
    }

    #[test]
    fn an_older_program_is_not_written_beyond_its_structure() {
        let mut room = [0x77_usize; 3];
        // SAFETY: there is room for 16 bytes.
        unsafe { init(room.as_mut_ptr().cast::<Newer>(), 16) };
        assert_eq!(room, [16, 5, 0x77]);
        let full = Newer { size: 0, first: 8, second: 9 };
        // SAFETY: it says that it has 16 bytes, and has more.
        unsafe { fill(room.as_mut_ptr().cast::<Newer>(), full) }.ok().unwrap();
        assert_eq!(room, [16, 8, 0x77]);
        // SAFETY: the same.
        let read = unsafe { read(room.as_ptr().cast::<Newer>()) }.ok().unwrap();
        assert_eq!(read, Newer { size: 16, first: 8, second: 6 });
    }

    #[test]
    fn a_newer_program_gets_zeros_where_this_library_knows_nothing() {
        let mut room = Newer { size: 1, first: 1, second: 1 };
        // SAFETY: there is room for 24 bytes.
        unsafe { init((&raw mut room).cast::<Older>(), 24) };
        assert_eq!(room, Newer { size: 24, first: 5, second: 0 });
    }

    #[test]
    fn what_was_not_set_is_refused() {
        let room = Older { size: 0, first: 1 };
        // SAFETY: a live structure, whose size is refused before anything else is looked at.
        let refused = unsafe { read(&raw const room) }.err().unwrap();
        assert!(refused.text().contains("older_init"));
    }
}
