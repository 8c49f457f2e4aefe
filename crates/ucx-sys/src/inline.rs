//! Macros and inline functions of the headers, which no library exports.

use std::ffi::{c_uint, c_void};
use std::ptr::NonNull;

use crate::{
    Status, UCP_DATATYPE_CONTIG, UCP_DATATYPE_IOV, UCP_DATATYPE_SHIFT, Ucx, Version, ucp_config_t, ucp_context_h,
    ucp_datatype_t, ucp_params_t, ucs_status_ptr_t,
};

/// The oldest UCX that [`crate::load`] accepts, and the API version that [`Ucx::ucp_init`] asks for.
///
/// 1.13 is the first whose `ucp_request_param_t` takes a memory handle.
pub const API_FLOOR: Version = Version::new(1, 13, 0);

impl Ucx {
    /// `ucp_init` of `ucp.h`, which is inline there and passes the version of the header. Here it is [`API_FLOOR`]: a
    /// library answers a newer request than its own with a warning only, and [`crate::load`] has checked the version.
    ///
    /// # Safety
    ///
    /// The contract that `ucp.h` states for `ucp_init`.
    pub unsafe fn ucp_init(
        &self,
        params: *const ucp_params_t,
        config: *const ucp_config_t,
        context_p: *mut ucp_context_h,
    ) -> Status {
        let (major, minor): (c_uint, c_uint) = (API_FLOOR.major, API_FLOOR.minor);
        // SAFETY: the caller keeps the contract of `ucp_init`, which adds nothing to that of `ucp_init_version`.
        unsafe { self.ucp_init_version(major, minor, params, config, context_p) }
    }
}

/// `ucp_dt_make_contig`: elements of `element_bytes`, side by side.
pub const fn ucp_dt_make_contig(element_bytes: u64) -> ucp_datatype_t {
    (element_bytes << UCP_DATATYPE_SHIFT) | UCP_DATATYPE_CONTIG
}

/// `ucp_dt_make_iov`: a list of `ucp_dt_iov_t`.
pub const fn ucp_dt_make_iov() -> ucp_datatype_t {
    UCP_DATATYPE_IOV
}

/// `UCS_PTR_IS_ERR`: the pointer carries an error instead of a request.
pub fn ucs_ptr_is_err(pointer: ucs_status_ptr_t) -> bool {
    pointer.addr() >= lowest_error_address()
}

/// `UCS_PTR_IS_PTR`: the pointer is a request, neither null (completed) nor an error.
pub fn ucs_ptr_is_ptr(pointer: ucs_status_ptr_t) -> bool {
    !pointer.is_null() && !ucs_ptr_is_err(pointer)
}

/// `UCS_PTR_STATUS`: [`Status::INPROGRESS`] for a request, else the status that the pointer carries.
pub fn ucs_ptr_status(pointer: ucs_status_ptr_t) -> Status {
    if ucs_ptr_is_ptr(pointer) {
        return Status::INPROGRESS;
    }
    // 0 or -100 to -1, so the lowest byte says it all.
    Status(pointer.addr().to_le_bytes()[0].cast_signed())
}

/// What a `*_nbx` function returned, in Rust's terms: `None` when the operation completed at once (no callback will be
/// called), else the request, which the caller frees with `ucp_request_free`.
///
/// # Errors
///
/// The status when the operation was not started.
pub fn ucs_ptr_request(pointer: ucs_status_ptr_t) -> Result<Option<NonNull<c_void>>, Status> {
    if ucs_ptr_is_err(pointer) { Err(ucs_ptr_status(pointer)) } else { Ok(NonNull::new(pointer)) }
}

fn lowest_error_address() -> usize {
    isize::from(Status::ERR_LAST.0).cast_unsigned()
}

#[cfg(test)]
mod tests {
    use std::ptr;

    use super::*;

    fn pointer(address: isize) -> ucs_status_ptr_t {
        ptr::without_provenance_mut(address.cast_unsigned())
    }

    #[test]
    fn null_is_completion() {
        assert_eq!(ucs_ptr_request(pointer(0)), Ok(None));
        assert_eq!(ucs_ptr_status(pointer(0)), Status::OK);
        assert!(!ucs_ptr_is_ptr(pointer(0)) && !ucs_ptr_is_err(pointer(0)));
    }

    #[test]
    fn small_negative_addresses_are_errors() {
        for code in -100..=-1_i8 {
            assert_eq!(ucs_ptr_request(pointer(isize::from(code))), Err(Status(code)));
            assert_eq!(ucs_ptr_status(pointer(isize::from(code))), Status(code));
        }
    }

    #[test]
    fn every_other_address_is_a_request() {
        for address in [1, 4096, -101, isize::MAX, isize::MIN] {
            assert_eq!(ucs_ptr_request(pointer(address)), Ok(NonNull::new(pointer(address))));
            assert_eq!(ucs_ptr_status(pointer(address)), Status::INPROGRESS);
        }
    }

    #[test]
    fn contiguous_datatypes_hold_the_size_above_the_class() {
        assert_eq!(ucp_dt_make_contig(1), 8);
        assert_eq!(ucp_dt_make_contig(4096), 4096 << 3);
        assert_eq!(ucp_dt_make_iov(), 2);
    }
}
