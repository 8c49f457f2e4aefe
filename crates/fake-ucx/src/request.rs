//! Requests, and what is called when they complete.

use std::ffi::c_void;
use std::ptr;

use ucx_sys::{Status, ucp_request_param_t, ucp_tag_recv_info_t, ucp_tag_recv_nbx_callback_t};

/// What a caller wants to be called, with its data.
#[derive(Clone, Copy, Debug)]
pub(crate) enum Callback {
    Send(unsafe extern "C" fn(*mut c_void, Status, *mut c_void), usize),
    Receive(ucp_tag_recv_nbx_callback_t, usize),
}

#[derive(Debug)]
pub(crate) struct Request {
    pub(crate) status: Option<Status>,
    pub(crate) callback: Option<Callback>,
    /// The caller has given it back before it completed.
    pub(crate) freed: bool,
}

/// What progress has to call once nothing is locked.
pub(crate) enum Call {
    Completed { request: u64, status: Status, callback: Callback, length: usize },
    Failed { callback: ucx_sys::ucp_err_handler_cb_t, argument: usize, endpoint: u64, status: Status },
}

impl Callback {
    /// # Safety
    ///
    /// `param` is live, and its union holds what `receive` says.
    pub(crate) unsafe fn of(param: *const ucp_request_param_t, receive: bool) -> Option<Self> {
        // SAFETY: the caller's promise.
        let param = unsafe { &*param };
        if param.op_attr_mask & ucx_sys::UCP_OP_ATTR_FIELD_CALLBACK == 0 {
            return None;
        }
        let with = param.op_attr_mask & ucx_sys::UCP_OP_ATTR_FIELD_USER_DATA != 0;
        let data = if with { param.user_data.expose_provenance() } else { 0 };
        if receive {
            // SAFETY: the caller's promise.
            let callback = unsafe { param.cb.recv };
            return Some(Self::Receive(callback, data));
        }
        // SAFETY: the caller's promise.
        unsafe { param.cb.send }.map(|callback| Self::Send(callback, data))
    }
}

impl Call {
    /// Calls back into the program.
    ///
    /// # Safety
    ///
    /// On the thread of the worker, with nothing locked.
    pub(crate) unsafe fn make(self) {
        match self {
            Self::Completed { request, status, callback: Callback::Send(callback, data), .. } => {
                // SAFETY: the program gave both for this call.
                unsafe { callback(handle(request), status, ptr::with_exposed_provenance_mut(data)) }
            }
            Self::Completed { request, status, callback: Callback::Receive(Some(callback), data), length } => {
                let info = ucp_tag_recv_info_t { sender_tag: 0, length };
                // SAFETY: as above; `info` lives across the call.
                unsafe { callback(handle(request), status, &raw const info, ptr::with_exposed_provenance_mut(data)) }
            }
            Self::Failed { callback: Some(callback), argument, endpoint, status } => {
                // SAFETY: as above.
                unsafe { callback(ptr::with_exposed_provenance_mut(argument), handle(endpoint), status) }
            }
            _ => {}
        }
    }
}

/// A number as the pointer that stands for it: aligned, never null, and no error.
pub(crate) fn handle<T>(number: u64) -> *mut T {
    ptr::without_provenance_mut(usize::try_from(number).expect("numbers are small") * 16)
}

/// The number behind such a pointer.
pub(crate) fn number<T>(handle: *const T) -> u64 {
    handle.addr() as u64 / 16
}

/// A status as a pointer that is no request.
pub(crate) fn immediate(status: Status) -> *mut c_void {
    ptr::without_provenance_mut(isize::from(status.0).cast_unsigned())
}
