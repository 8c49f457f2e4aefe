//! The number of the last kernel of a stream that has ended, in host memory that the device writes.
//!
//! # Safety
//!
//! The memory is reached by atomics only, and freed when no kernel can write it any more, which the owner sees to.
#![allow(unsafe_code, reason = "reads what the device writes")]

use std::ptr;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::cuda::driver::{CudaError, DeviceAddress, constant};
use crate::cuda::gpu::Gpu;

/// The number. Its owner waits for the stream before it drops this.
pub(crate) struct Done {
    host: *const AtomicU64,
    /// Its address on the device.
    pub(crate) device: DeviceAddress,
    gpu: Arc<Gpu>,
}

impl Done {
    pub(crate) fn new(gpu: &Arc<Gpu>) -> Result<Self, CudaError> {
        let _entered = gpu.enter()?;
        let mut host = ptr::null_mut();
        // SAFETY: `host` receives memory that `Done` frees.
        unsafe { gpu.driver.host_alloc(&raw mut host, size_of::<AtomicU64>(), constant::HOST_PORTABLE_MAPPED) }?;
        let mut done = Self { host: host.cast_const().cast(), device: 0, gpu: gpu.clone() };
        // SAFETY: allocated above, for a number that nobody else knows of yet.
        unsafe { host.cast::<u64>().write(0) };
        // SAFETY: `done.device` receives the address on the device.
        unsafe { gpu.driver.host_address(&raw mut done.device, host, 0) }?;
        Ok(done)
    }

    pub(crate) fn number(&self) -> u64 {
        // SAFETY: allocated in `new`, aligned to a page, freed on drop; the device writes it as a whole.
        let number = unsafe { &*self.host };
        number.load(Ordering::Acquire) // pairs with the fence in front of the kernel's store
    }
}

impl Drop for Done {
    fn drop(&mut self) {
        if let Ok(_entered) = self.gpu.enter() {
            // SAFETY: allocated in `new`. The queue has waited for its stream, so that no kernel writes it any more.
            let _ = unsafe { self.gpu.driver.host_free(self.host.cast_mut().cast()) };
        }
    }
}
