//! A point in a caller's stream.
//!
//! # Safety
//!
//! The event is live while its owner is, as the caller promised.
#![allow(unsafe_code, reason = "takes a handle of the caller's")]

use std::any::Any;
use std::ffi::c_void;
use std::sync::Arc;

use crate::cuda::driver::RawEvent;

/// An event that has been recorded in a stream of the caller's: a transfer that is given one reads nothing before the GPU has
/// reached it. Nobody waits on the host.
#[derive(Clone, Debug)]
pub struct CudaEvent {
    raw: RawEvent,
    _owner: Arc<dyn Any + Send + Sync>,
}

impl CudaEvent {
    /// Names an event (`CUevent`, which `cudaEvent_t` is too). `owner` is held until the GPU has been told to wait for it.
    ///
    /// # Safety
    ///
    /// `event` is an event of this process, recorded before the transfer is posted, that lives while `owner` does.
    pub unsafe fn new(event: *mut c_void, owner: Arc<dyn Any + Send + Sync>) -> Self {
        Self { raw: RawEvent(event), _owner: owner }
    }

    pub(crate) fn raw(&self) -> RawEvent {
        self.raw
    }
}
