//! Host memory that the GPU reads and writes: locked, and known to the driver by an address of its own.
//!
//! # Safety
//!
//! The memory stays mapped until it is given back to the driver, which the owner sees to.
#![allow(unsafe_code, reason = "calls the driver")]

use std::ffi::c_void;
use std::ptr::NonNull;
use std::sync::Arc;

use crate::cuda::driver::{CudaCode, CudaError, DeviceAddress, constant};
use crate::cuda::gpu::Gpu;
use crate::share::Mapped;

/// A range of host memory that the driver knows.
#[derive(Debug)]
pub(crate) struct Pinned {
    gpu: Arc<Gpu>,
    host: NonNull<c_void>,
    address: DeviceAddress,
    /// Not if the caller had done so before.
    registered: bool,
}

// SAFETY: addresses, which the driver takes from any thread.
unsafe impl Send for Pinned {}
// SAFETY: as above.
unsafe impl Sync for Pinned {}

impl Pinned {
    /// Takes as long as locking the memory takes: a GiB that was never touched, some hundred milliseconds.
    ///
    /// # Safety
    ///
    /// The range is mapped until the value drops.
    pub(crate) unsafe fn new(gpu: &Arc<Gpu>, host: NonNull<c_void>, bytes: usize) -> Result<Self, CudaError> {
        let _entered = gpu.enter()?;
        // SAFETY: the caller's promise.
        let registered = unsafe { gpu.driver.host_register(host.as_ptr(), bytes, constant::HOST_PORTABLE_MAPPED) };
        let registered = match registered {
            Ok(()) => true,
            Err(CudaError { code: CudaCode::ALREADY_REGISTERED, .. }) => false,
            Err(error) => return Err(error),
        };
        let mut pinned = Self { gpu: gpu.clone(), host, address: 0, registered };
        // SAFETY: the driver knows the range; `address` receives its address on the device.
        unsafe { gpu.driver.host_address(&raw mut pinned.address, host.as_ptr(), 0) }?;
        Ok(pinned)
    }

    pub(crate) fn address(&self) -> DeviceAddress {
        self.address
    }
}

impl Drop for Pinned {
    fn drop(&mut self) {
        if self.registered
            && let Ok(_entered) = self.gpu.enter()
        {
            // SAFETY: registered in `new`. Whoever copies through the range holds it until its kernels have ended.
            let _ = unsafe { self.gpu.driver.host_unregister(self.host.as_ptr()) };
        }
    }
}

/// Host memory of a peer that is mapped here, for the GPU.
#[derive(Debug)]
pub(crate) struct PinnedMapping {
    pinned: Pinned, // before what it pins
    mapped: Arc<Mapped>,
}

impl PinnedMapping {
    pub(crate) fn new(gpu: &Arc<Gpu>, mapped: Arc<Mapped>) -> Result<Self, CudaError> {
        let (base, bytes) = mapped.range();
        // SAFETY: the mapping lives as long as the value.
        let pinned = unsafe { Pinned::new(gpu, base.cast(), bytes) }?;
        Ok(Self { pinned, mapped })
    }

    pub(crate) fn address(&self) -> DeviceAddress {
        self.pinned.address()
    }

    pub(crate) fn is_offered(&self) -> bool {
        self.mapped.is_offered()
    }
}
