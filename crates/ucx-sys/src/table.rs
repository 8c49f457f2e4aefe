//! The typed function table. The generated bindings hold the declarations and this macro what becomes of them.

/// Makes, of the C declarations it is given, `Functions` (one pointer each, the optional ones in an `Option`), the way
/// to look all of them up, and a method of [`crate::Ucx`] each.
macro_rules! functions {
    (
        required: $( fn $name:ident($($argument:ident: $type:ty),* $(,)?) $(-> $result:ty)?; )*
        optional: $( fn $optional:ident($($($rest:tt)+)?) $(-> $optional_result:ty)?; )*
    ) => {
        pub(crate) struct Functions {
            $( pub(crate) $name: unsafe extern "C" fn($($argument: $type),*) $(-> $result)?, )*
            $( pub(crate) $optional: Option<unsafe extern "C" fn($($($rest)+)?) $(-> $optional_result)?>, )*
        }

        impl Functions {
            /// Looks every function up. The error is the name of the first required one that is missing.
            pub(crate) fn of(library: &libloading::os::unix::Library) -> Result<Self, &'static str> {
                Ok(Self {
                    $( $name: {
                        // SAFETY: a library that exports the name of a UCX function follows the header that this
                        // signature was generated from; UCX has never changed one within its major version.
                        let symbol = unsafe { library.get(stringify!($name)) };
                        *symbol.map_err(|_| stringify!($name))?
                    }, )*
                    $( $optional: {
                        // SAFETY: as above.
                        let symbol = unsafe { library.get(stringify!($optional)) };
                        symbol.ok().map(|symbol| *symbol)
                    }, )*
                })
            }
        }

        /// Functions that every UCX since 1.13 exports.
        #[allow(clippy::too_many_arguments, reason = "the signatures are UCX's")]
        impl crate::Ucx {
            $(
                #[doc = concat!("`", stringify!($name), "` of UCX.")]
                ///
                /// # Safety
                ///
                #[doc = concat!("The contract that UCX's header states for `", stringify!($name), "`.")]
                #[inline]
                pub unsafe fn $name(&self, $($argument: $type),*) $(-> $result)? {
                    let function = self.functions().$name;
                    // SAFETY: the pointer was looked up in a library that is never unloaded; the caller keeps the
                    // contract of the function.
                    unsafe { function($($argument),*) }
                }
            )*
        }

        /// Functions that only some versions export: `None` when this library does not.
        impl crate::Ucx {
            $(
                #[doc = concat!("`", stringify!($optional), "` of UCX, if this library exports it. Calling it is")]
                /// subject to the contract that UCX's header states for it.
                #[inline]
                pub fn $optional(&self) -> Option<unsafe extern "C" fn($($($rest)+)?) $(-> $optional_result)?> {
                    self.functions().$optional
                }
            )*

            /// The optional functions by name, and whether this library has them. For people and logs.
            pub fn optional_functions(&self) -> impl Iterator<Item = (&'static str, bool)> + use<> {
                [ $( (stringify!($optional), self.functions().$optional.is_some()), )* ].into_iter()
            }
        }
    };
}

pub(crate) use functions;
