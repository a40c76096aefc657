//! The macro that turns C declarations into a table of function pointers.

/// Makes a struct with one `Option<unsafe extern "C" fn …>` field per declared
/// function, the list of their symbol names, and a constructor that asks a
/// closure for each. The closure is the seam: a shared library, a simulator and
/// a test double all plug in there.
macro_rules! dynamic_api {
    (
        $(#[$doc:meta])*
        pub struct $Api:ident;
        $( $(#[$fn_meta:meta])* pub fn $name:ident ( $( $arg:ident : $ty:ty ),* $(,)? ) -> $ret:ty; )*
    ) => {
        $(#[$doc])*
        #[allow(non_snake_case, missing_docs)]
        #[derive(Clone, Copy)]
        #[repr(C)]
        pub struct $Api {
            $( pub $name: Option<unsafe extern "C" fn($( $arg: $ty ),*) -> $ret>, )*
        }

        impl $Api {
            /// The name of every symbol that the table has a slot for, in declaration order.
            pub const SYMBOLS: &'static [&'static core::ffi::CStr] = &[
                $( match core::ffi::CStr::from_bytes_with_nul(concat!(stringify!($name), "\0").as_bytes()) {
                    Ok(name) => name,
                    Err(_) => panic!("a symbol name holds a NUL"),
                }, )*
            ];

            /// A table with every slot empty.
            pub const EMPTY: Self = Self { $( $name: None, )* };

            /// Fills the table by asking `lookup` for each symbol once, in the order of
            /// [`Self::SYMBOLS`]; a null answer leaves the slot `None`.
            ///
            /// # Safety
            /// Every non-null pointer that `lookup` returns for a name must be a function
            /// with the C signature that the table declares for that name, and must stay
            /// callable for as long as the table or any copy of it is used.
            pub unsafe fn load_with(
                mut lookup: impl FnMut(&'static core::ffi::CStr) -> *const core::ffi::c_void,
            ) -> Self {
                let mut next = Self::SYMBOLS.iter();
                let mut slot = move || match next.next() {
                    Some(name) => lookup(name),
                    None => core::ptr::null(),
                };
                Self {
                    $( $name: {
                        let symbol = slot();
                        // SAFETY: the caller vouches that a non-null answer is a function of this
                        // signature; null becomes `None`, which is `Option<fn>`'s null niche.
                        unsafe {
                            core::mem::transmute::<
                                *const core::ffi::c_void,
                                Option<unsafe extern "C" fn($( $arg: $ty ),*) -> $ret>,
                            >(symbol)
                        }
                    }, )*
                }
            }

            /// The names of the symbols that the library did not have, in declaration order.
            pub fn missing(&self) -> impl Iterator<Item = &'static core::ffi::CStr> + '_ {
                let present = [ $( self.$name.is_some(), )* ];
                Self::SYMBOLS.iter().zip(present).filter(|(_, here)| !here).map(|(name, _)| *name)
            }
        }

        impl Default for $Api {
            fn default() -> Self {
                Self::EMPTY
            }
        }

        impl core::fmt::Debug for $Api {
            fn fmt(&self, f: &mut core::fmt::Formatter<'_>) -> core::fmt::Result {
                let missing = self.missing().count();
                f.debug_struct(stringify!($Api))
                    .field("symbols", &Self::SYMBOLS.len())
                    .field("missing", &missing)
                    .finish()
            }
        }
    };
}
