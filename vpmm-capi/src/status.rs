//! What a function answers.

use std::ffi::{CStr, c_char};

use vpmm_core::Error;

use crate::guard::status_before;

/// What a function answers. Further kinds may be added.
#[repr(C)]
#[derive(Clone, Copy, PartialEq, Eq, Debug)]
pub enum vpmm_status {
    /// It was done.
    VPMM_OK = 0,
    /// An argument is null, or no function can be asked for that.
    VPMM_INVALID_ARGUMENT = 1,
    /// There is no memory for it.
    VPMM_OUT_OF_MEMORY = 2,
    /// No CUDA driver, or too old a one.
    VPMM_NO_DRIVER = 3,
    /// The driver answered with an error.
    VPMM_DRIVER_ERROR = 4,
    /// The context is destroyed, or the device has failed for good.
    VPMM_CONTEXT_LOST = 5,
    /// The device, the driver or the pool cannot do that.
    VPMM_UNSUPPORTED = 6,
    /// The pointer is no allocation of the pool's, or is inside one.
    VPMM_BAD_POINTER = 7,
    /// The allocation was freed already.
    VPMM_DOUBLE_FREE = 8,
    /// The stream is of another device or context, or captures a graph.
    VPMM_BAD_STREAM = 9,
    /// Others have handles of the pool.
    VPMM_IN_USE = 10,
    /// The process was forked: a driver does not work in the child.
    VPMM_FORKED = 11,
    /// The pool's books are wrong: a defect of the library, or memory that was overwritten.
    VPMM_CORRUPT = 12,
    /// A defect of the library, caught.
    VPMM_PANIC = 13,
    /// Anything else: the text says what.
    VPMM_OTHER = 14,
    /// What it is asked of is not in the state for it: asleep, awake, exported, begun, released.
    VPMM_BAD_STATE = 15,
    /// Nothing has that name.
    VPMM_NOT_FOUND = 16,
    /// A file, a socket, or what came through it.
    VPMM_IO_ERROR = 17,
    /// The lock was not to be had in the time for it.
    VPMM_TIMED_OUT = 18,
    /// No server could be reached, or the connection to it has failed.
    VPMM_DISCONNECTED = 19,
    /// The server would not do it: the text is its own.
    VPMM_REFUSED = 20,
    /// The layout is not the one whose addresses were kept.
    VPMM_STALE = 21,
    /// The system would not start the thread that a pool is to have of its own: without one it can be made.
    VPMM_NO_THREAD = 22,
    /// A signal ended a wait: see `vpmm_gms_set_interruptible` and `vpmm_gms_set_check`.
    VPMM_INTERRUPTED = 23,
}

use vpmm_status::*;

impl vpmm_status {
    pub(crate) fn of(error: &Error) -> Self {
        match error {
            error if error.is_out_of_memory() => VPMM_OUT_OF_MEMORY,
            Error::RequestTooLong { .. } | Error::AddressSpaceExhausted { .. } => {
                VPMM_OUT_OF_MEMORY
            }
            Error::NoDriver(_) | Error::MissingSymbol { .. } => VPMM_NO_DRIVER,
            Error::Driver { .. } | Error::NoDevice { .. } => VPMM_DRIVER_ERROR,
            Error::ContextLost { .. } => VPMM_CONTEXT_LOST,
            Error::VmmUnsupported { .. }
            | Error::LocationUnsupported { .. }
            | Error::SharingUnsupported { .. }
            | Error::PeerUnsupported { .. }
            | Error::AlignmentUnsupported { .. }
            | Error::Unsupported { .. } => VPMM_UNSUPPORTED,
            Error::ForeignPointer { .. }
            | Error::InteriorPointer { .. }
            | Error::StalePointer { .. }
            | Error::WrongSize { .. } => VPMM_BAD_POINTER,
            Error::DoubleFree { .. } => VPMM_DOUBLE_FREE,
            Error::WrongDevice { .. }
            | Error::WrongContext { .. }
            | Error::StreamCapturing
            | Error::StreamEnded => VPMM_BAD_STREAM,
            Error::ZeroSize
            | Error::SizeOverflow { .. }
            | Error::BadAlignment { .. }
            | Error::OwnerAccess { .. }
            | Error::ForeignMark
            | Error::OutOfRange { .. }
            | Error::LengthMismatch { .. }
            | Error::Config { .. } => VPMM_INVALID_ARGUMENT,
            Error::PoolShared { .. } => VPMM_IN_USE,
            Error::Asleep
            | Error::NotAsleep
            | Error::HalfAsleep { .. }
            | Error::Exported { .. }
            | Error::NotShareable { .. }
            | Error::GraphPool { .. } => VPMM_BAD_STATE,
            Error::UnknownTag => VPMM_NOT_FOUND,
            Error::LogFile(_)
            | Error::Socket(_)
            | Error::BadMessage { .. }
            | Error::PeerRefused
            | Error::ImportRefused { .. }
            | Error::ContentsFile(_)
            | Error::ContentsChanged { .. } => VPMM_IO_ERROR,
            Error::Forked => VPMM_FORKED,
            Error::Resource(error) => status_before(&**error).unwrap_or(VPMM_OTHER),
            Error::NoThread(_) => VPMM_NO_THREAD,
            // What is named after this was written.
            _ => VPMM_OTHER,
        }
    }

    fn name(self) -> &'static CStr {
        match self {
            VPMM_OK => c"VPMM_OK",
            VPMM_INVALID_ARGUMENT => c"VPMM_INVALID_ARGUMENT",
            VPMM_OUT_OF_MEMORY => c"VPMM_OUT_OF_MEMORY",
            VPMM_NO_DRIVER => c"VPMM_NO_DRIVER",
            VPMM_DRIVER_ERROR => c"VPMM_DRIVER_ERROR",
            VPMM_CONTEXT_LOST => c"VPMM_CONTEXT_LOST",
            VPMM_UNSUPPORTED => c"VPMM_UNSUPPORTED",
            VPMM_BAD_POINTER => c"VPMM_BAD_POINTER",
            VPMM_DOUBLE_FREE => c"VPMM_DOUBLE_FREE",
            VPMM_BAD_STREAM => c"VPMM_BAD_STREAM",
            VPMM_IN_USE => c"VPMM_IN_USE",
            VPMM_FORKED => c"VPMM_FORKED",
            VPMM_CORRUPT => c"VPMM_CORRUPT",
            VPMM_PANIC => c"VPMM_PANIC",
            VPMM_OTHER => c"VPMM_OTHER",
            VPMM_BAD_STATE => c"VPMM_BAD_STATE",
            VPMM_NOT_FOUND => c"VPMM_NOT_FOUND",
            VPMM_IO_ERROR => c"VPMM_IO_ERROR",
            VPMM_TIMED_OUT => c"VPMM_TIMED_OUT",
            VPMM_DISCONNECTED => c"VPMM_DISCONNECTED",
            VPMM_REFUSED => c"VPMM_REFUSED",
            VPMM_STALE => c"VPMM_STALE",
            VPMM_NO_THREAD => c"VPMM_NO_THREAD",
            VPMM_INTERRUPTED => c"VPMM_INTERRUPTED",
        }
    }
}

const ALL: [vpmm_status; 24] = [
    VPMM_OK,
    VPMM_INVALID_ARGUMENT,
    VPMM_OUT_OF_MEMORY,
    VPMM_NO_DRIVER,
    VPMM_DRIVER_ERROR,
    VPMM_CONTEXT_LOST,
    VPMM_UNSUPPORTED,
    VPMM_BAD_POINTER,
    VPMM_DOUBLE_FREE,
    VPMM_BAD_STREAM,
    VPMM_IN_USE,
    VPMM_FORKED,
    VPMM_CORRUPT,
    VPMM_PANIC,
    VPMM_OTHER,
    VPMM_BAD_STATE,
    VPMM_NOT_FOUND,
    VPMM_IO_ERROR,
    VPMM_TIMED_OUT,
    VPMM_DISCONNECTED,
    VPMM_REFUSED,
    VPMM_STALE,
    VPMM_NO_THREAD,
    VPMM_INTERRUPTED,
];

/// The name of a status as it is written here, for ever; `"?"` for a number that is none.
#[unsafe(no_mangle)]
pub extern "C" fn vpmm_status_name(status: i32) -> *const c_char {
    let known = ALL.into_iter().find(|known| *known as i32 == status);
    known.map_or(c"?", vpmm_status::name).as_ptr()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// What the caller can mend is told apart from what has no name here.
    #[test]
    fn wrong_arguments_are_told_as_such() {
        for wrong in [
            Error::ZeroSize,
            Error::OwnerAccess { device: 0 },
            Error::ForeignMark,
            Error::OutOfRange { first: 1, end: 9, len: 4 },
            Error::LengthMismatch { given: 1, len: 2 },
        ] {
            assert_eq!(vpmm_status::of(&wrong), VPMM_INVALID_ARGUMENT, "{wrong}");
        }
        let refused = std::io::Error::from(std::io::ErrorKind::WouldBlock);
        let status = vpmm_status::of(&Error::NoThread(std::sync::Arc::new(refused)));
        assert_eq!((status, status.name()), (VPMM_NO_THREAD, c"VPMM_NO_THREAD"));
    }

    #[test]
    fn every_status_is_found_by_its_number() {
        for (number, status) in ALL.into_iter().enumerate() {
            assert_eq!(number as i32, status as i32, "{status:?}");
        }
    }
}
