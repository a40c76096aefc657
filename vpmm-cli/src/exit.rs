//! How the command ends.

use std::io;
use std::process::ExitCode;

/// Why the command ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Exit {
    /// Malformed input or wrong usage.
    BadInput = 2,
    /// A check, an allocator, the device or the output failed.
    Failure = 1,
    /// An allocator could not serve a trace.
    OutOfMemory = 3,
    /// All went well.
    Done = 0,
}

impl Exit {
    /// The graver of two.
    pub fn and(self, other: Self) -> Self {
        let gravity = |exit| match exit {
            Self::BadInput => 3,
            Self::Failure => 2,
            Self::OutOfMemory => 1,
            Self::Done => 0,
        };
        if gravity(self) >= gravity(other) { self } else { other }
    }
}

impl From<Exit> for ExitCode {
    fn from(exit: Exit) -> Self {
        Self::from(exit as u8)
    }
}

/// An end before the work was done: what to say, and how to end.
#[derive(Debug, thiserror::Error)]
#[error("{message}")]
pub struct Abort {
    /// How to end.
    pub exit: Exit,
    /// What to say on standard error; nothing if empty.
    pub message: String,
}

impl Abort {
    /// Bad input or usage.
    pub fn bad_input(why: impl ToString) -> Self {
        Self { exit: Exit::BadInput, message: why.to_string() }
    }

    /// A failure.
    pub fn failure(why: impl ToString) -> Self {
        Self { exit: Exit::Failure, message: why.to_string() }
    }
}

/// Output that could not be written. Where the reader has gone there is nobody
/// to tell, and nothing is wrong: `vpmm … | head` ends quietly.
impl From<io::Error> for Abort {
    fn from(error: io::Error) -> Self {
        if error.kind() == io::ErrorKind::BrokenPipe {
            return Self { exit: Exit::Done, message: String::new() };
        }
        Self::failure(format_args!("cannot write the output: {error}"))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn the_graver_end_wins() {
        use Exit::{BadInput, Done, Failure, OutOfMemory};
        for (a, b, both) in [
            (Done, Done, Done),
            (Done, OutOfMemory, OutOfMemory),
            (Failure, OutOfMemory, Failure),
            (Failure, BadInput, BadInput),
        ] {
            assert_eq!((a.and(b), b.and(a)), (both, both));
        }
    }

    #[test]
    fn a_reader_that_has_gone_is_no_failure() {
        assert_eq!(Abort::from(io::Error::from(io::ErrorKind::BrokenPipe)).exit, Exit::Done);
        assert_eq!(Abort::from(io::Error::from(io::ErrorKind::StorageFull)).exit, Exit::Failure);
    }
}
