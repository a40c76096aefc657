//! What can go wrong while a library is loaded.

use std::error::Error;
use std::fmt;

use crate::version::{Version, VersionError};

/// Why a library was not loaded.
#[derive(Debug)]
#[non_exhaustive]
pub enum LoadError {
    /// No candidate could be used. `Display` lists every one of them with its reason.
    NotFound {
        /// What was looked for: `CUDA driver` or `CUDA runtime`.
        library: &'static str,
        /// Every name and path that was tried, in order. Empty for no library.
        tried: Vec<Attempt>,
    },
    /// The dynamic linker refused the library; [`source`](Error::source) holds its words.
    Open {
        /// The name or path that was given to the dynamic linker.
        origin: String,
        /// The dynamic linker's error.
        source: Box<dyn Error + Send + Sync>,
    },
    /// The library opened but exports not one symbol of the API: it is another library.
    NoSymbols {
        /// The name or path that was opened.
        origin: String,
        /// What was expected: `CUDA driver` or `CUDA runtime`.
        library: &'static str,
    },
    /// The runtime is of another major version than the bindings, so its structs
    /// have another layout.
    WrongMajor {
        /// The name or path that was opened.
        origin: String,
        /// The version that the library reports.
        found: Version,
    },
    /// The library opened but did not tell its version.
    Version {
        /// The name or path that was opened.
        origin: String,
        /// Why not.
        source: VersionError,
    },
}

/// One candidate of a search, and why it was not used.
#[derive(Debug)]
#[non_exhaustive]
pub struct Attempt {
    /// The name or path that was tried.
    pub what: String,
    /// Why it was not used. Never [`LoadError::NotFound`].
    pub why: LoadError,
}

impl fmt::Display for LoadError {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            Self::NotFound { library, tried } => {
                write!(f, "no usable {library} library; tried:")?;
                tried.iter().try_for_each(|attempt| write!(f, "\n  {attempt}"))
            }
            Self::Open { origin, .. } => write!(f, "cannot open {origin}"),
            Self::NoSymbols { origin, library } => {
                write!(f, "{origin} is not a {library} library: it has none of its symbols")
            }
            Self::WrongMajor { origin, found } => write!(
                f,
                "{origin} is CUDA runtime {found}; these bindings are of {}, and struct layouts \
                 change with the major version",
                Version::BINDINGS
            ),
            Self::Version { origin, .. } => write!(f, "{origin} does not tell its version"),
        }
    }
}

impl Error for LoadError {
    /// The cause, where one error caused this one. A search that found nothing has
    /// a list of causes instead: its `tried`.
    fn source(&self) -> Option<&(dyn Error + 'static)> {
        match self {
            Self::Open { source, .. } => Some(source.as_ref()),
            Self::Version { source, .. } => Some(source),
            Self::NotFound { .. } | Self::NoSymbols { .. } | Self::WrongMajor { .. } => None,
        }
    }
}

/// The reason with its causes on one line. Reasons name the candidate themselves.
impl fmt::Display for Attempt {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "{}", self.why)?;
        let mut cause = self.why.source();
        while let Some(error) = cause {
            write!(f, ": {error}")?;
            cause = error.source();
        }
        Ok(())
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::MissingSymbol;

    fn open(origin: &str, source: &str) -> LoadError {
        LoadError::Open { origin: origin.to_owned(), source: source.into() }
    }

    #[test]
    fn a_failed_search_says_everything_that_was_tried_and_why() {
        let wrong =
            LoadError::WrongMajor { origin: "/b.so".to_owned(), found: Version::new(12, 4) };
        let version = LoadError::Version {
            origin: "/c.so".to_owned(),
            source: MissingSymbol { name: "cudaRuntimeGetVersion" }.into(),
        };
        let tried = [("a.so", open("a.so", "no such file")), ("/b.so", wrong), ("/c.so", version)]
            .map(|(what, why)| Attempt { what: what.to_owned(), why });
        let error = LoadError::NotFound { library: "CUDA runtime", tried: tried.into() };
        assert_eq!(
            error.to_string(),
            "no usable CUDA runtime library; tried:\
             \n  cannot open a.so: no such file\
             \n  /b.so is CUDA runtime 12.4; these bindings are of 13.0, and struct layouts change \
             with the major version\
             \n  /c.so does not tell its version: the library has no symbol cudaRuntimeGetVersion"
        );
    }

    #[test]
    fn the_linkers_words_stay_reachable_as_the_source() {
        let error = open("x.so", "file too short");
        assert_eq!(error.to_string(), "cannot open x.so");
        assert_eq!(error.source().expect("kept").to_string(), "file too short");
    }

    #[test]
    fn errors_travel_between_threads() {
        fn check<T: Error + Send + Sync + 'static>() {}
        check::<LoadError>();
        check::<VersionError>();
        check::<MissingSymbol>();
    }
}
