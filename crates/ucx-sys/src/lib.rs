#![doc = include_str!("../README.md")]

#[allow(
    missing_docs,
    non_camel_case_types,
    clippy::identity_op,
    clippy::multiple_unsafe_ops_per_block,
    clippy::undocumented_unsafe_blocks,
    clippy::unnecessary_operation,
    reason = "generated from C: ucp.h holds the names and the documentation; the unsafe blocks zero plain C structures"
)]
#[rustfmt::skip]
mod bindings;
mod environment;
mod inline;
mod load;
mod mapped;
mod open;
mod search;
mod status;
mod table;
mod version;

pub use bindings::*;
pub use inline::{
    API_FLOOR, ucp_dt_make_contig, ucp_dt_make_iov, ucs_ptr_is_err, ucs_ptr_is_ptr, ucs_ptr_request, ucs_ptr_status,
};
pub use load::{LoadError, Ucx, load};
pub use open::{Attempt, OpenError};
pub use search::{DIRECTORY_VARIABLE, Origin, Place};
pub use version::Version;
