//! Absence as data: a symbol that the loaded library does not have.

use core::error::Error;
use core::fmt;

/// The loaded library has no symbol of this name: its driver or runtime is older
/// than the call, or the platform lacks it.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct MissingSymbol {
    /// The symbol's name, as exported.
    pub name: &'static str,
}

impl fmt::Display for MissingSymbol {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        write!(f, "the library has no symbol {}", self.name)
    }
}

impl Error for MissingSymbol {}

/// The function in a table's slot, or a [`MissingSymbol`](crate::MissingSymbol) that names it.
///
/// The table may be a [`DriverApi`](crate::DriverApi), a [`RuntimeApi`](crate::RuntimeApi),
/// or what dereferences to one. The function keeps its type, so a program can
/// check once what it needs and then call plain function pointers:
///
/// ```
/// use cuda_sys::{DriverApi, MissingSymbol, require};
///
/// let empty = DriverApi::EMPTY;
/// assert_eq!(require!(empty, cuMemCreate), Err(MissingSymbol { name: "cuMemCreate" }));
/// ```
#[macro_export]
macro_rules! require {
    ($api:expr, $name:ident) => {
        match $api.$name {
            ::core::option::Option::Some(function) => ::core::result::Result::Ok(function),
            ::core::option::Option::None => {
                ::core::result::Result::Err($crate::MissingSymbol { name: stringify!($name) })
            }
        }
    };
}
