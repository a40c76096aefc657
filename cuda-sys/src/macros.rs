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

        // `slots` reads the struct as an array of pointers.
        const _: () = assert!(
            size_of::<$Api>() == $Api::SYMBOLS.len() * size_of::<*const core::ffi::c_void>()
                && align_of::<$Api>() == align_of::<*const core::ffi::c_void>()
        );

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

            /// The address in the slot of this name; null where the slot is empty or the
            /// table declares no such symbol.
            ///
            /// The answer fits [`Self::load_with`], so a table can be built on another with
            /// some functions replaced. O(n) in the number of slots: not for a hot path.
            pub fn symbol(&self, name: &core::ffi::CStr) -> *const core::ffi::c_void {
                let at = Self::SYMBOLS.iter().position(|symbol| *symbol == name);
                at.map_or(core::ptr::null(), |at| self.slots()[at])
            }

            /// The names of the symbols that the library did not have, in declaration order.
            pub fn missing(&self) -> impl Iterator<Item = &'static core::ffi::CStr> + '_ {
                let slots = Self::SYMBOLS.iter().zip(self.slots());
                slots.filter(|(_, address)| address.is_null()).map(|(name, _)| *name)
            }

            /// The slots in the order of [`Self::SYMBOLS`], null where empty.
            fn slots(&self) -> &[*const core::ffi::c_void] {
                // SAFETY: (1) the struct is `repr(C)` and, as asserted at compile time, exactly
                // as large and aligned as an array of one pointer per symbol, so there is no
                // padding; (2) each field is an `Option` of a function pointer, whose layout is
                // a nullable pointer's, so every slot is an initialised raw pointer; (3) the
                // slice borrows `self`, and nothing writes through it.
                unsafe {
                    core::slice::from_raw_parts(
                        core::ptr::from_ref(self).cast::<*const core::ffi::c_void>(),
                        Self::SYMBOLS.len(),
                    )
                }
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

#[cfg(test)]
#[allow(unreachable_pub)] // The macro makes a public struct; the toy one reaches nobody.
mod tests {
    use core::ffi::{CStr, c_int, c_void};
    use core::ptr::null;

    use crate::{DriverApi, MissingSymbol, RuntimeApi, require};

    dynamic_api! {
        /// Three functions, enough to see order and gaps.
        pub struct Toy;
        pub fn first(x: c_int) -> c_int;
        pub fn second() -> c_int;
        pub fn third(x: c_int, y: c_int,) -> c_int;
    }

    extern "C" fn double(x: c_int) -> c_int {
        x * 2
    }

    extern "C" fn sum(x: c_int, y: c_int) -> c_int {
        x + y
    }

    fn without_second(name: &CStr) -> *const c_void {
        match name.to_bytes() {
            b"first" => double as *const c_void,
            b"third" => sum as *const c_void,
            _ => null(),
        }
    }

    fn toy() -> Toy {
        // SAFETY: `double` and `sum` have the declared signatures and live as long as the program.
        unsafe { Toy::load_with(without_second) }
    }

    #[test]
    fn asks_once_for_each_symbol_in_declaration_order() {
        let mut asked = Vec::new();
        // SAFETY: every answer is null.
        let toy = unsafe {
            Toy::load_with(|name| {
                asked.push(name);
                null()
            })
        };
        assert_eq!(asked, [c"first", c"second", c"third"]);
        assert_eq!(asked, Toy::SYMBOLS);
        assert!(toy.missing().eq(Toy::SYMBOLS.iter().copied()));
    }

    #[test]
    fn each_answer_lands_in_the_slot_of_its_name() {
        let toy = toy();
        let (first, third) = (toy.first.expect("answered"), toy.third.expect("answered"));
        // SAFETY: `first` is `double`, which has no precondition.
        assert_eq!(unsafe { first(21) }, 42);
        // SAFETY: `third` is `sum`, which has no precondition for these arguments.
        assert_eq!(unsafe { third(40, 2) }, 42);
        assert!(toy.second.is_none());
    }

    #[test]
    fn absence_is_known_by_name() {
        let toy = toy();
        assert!(toy.missing().eq([c"second"]));
        assert!(require!(toy, first).is_ok());
        let error = require!(toy, second).expect_err("second is missing");
        assert_eq!(error, MissingSymbol { name: "second" });
        assert_eq!(error.to_string(), "the library has no symbol second");
    }

    #[test]
    fn a_table_can_be_built_on_another() {
        let toy = toy();
        // The slot's own address: a function's may differ from one mention to the next.
        assert_eq!(toy.symbol(c"first"), toy.first.expect("answered") as *const c_void);
        assert!(toy.symbol(c"second").is_null());
        assert!(toy.symbol(c"no_such_function").is_null());
        // SAFETY: the answers are `toy`'s own, slot for slot.
        let copy = unsafe { Toy::load_with(|name| toy.symbol(name)) };
        assert!(copy.missing().eq([c"second"]));
        assert_eq!(copy.symbol(c"third"), toy.symbol(c"third"));
    }

    #[test]
    fn debug_counts_instead_of_listing() {
        assert_eq!(format!("{:?}", toy()), "Toy { symbols: 3, missing: 1 }");
        assert_eq!(format!("{:?}", Toy::default()), "Toy { symbols: 3, missing: 3 }");
    }

    #[test]
    fn symbol_names_are_unique() {
        for symbols in [DriverApi::SYMBOLS, RuntimeApi::SYMBOLS] {
            let mut sorted = symbols.to_vec();
            sorted.sort_unstable();
            sorted.dedup();
            assert_eq!(sorted.len(), symbols.len());
        }
    }
}
