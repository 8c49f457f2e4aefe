//! Streams of a GPU.
//!
//! # Safety
//!
//! A stream is destroyed once, when nothing that was made on it is left.
#![allow(unsafe_code, reason = "calls the driver")]

use std::sync::Arc;

use crate::cuda::driver::{CudaError, RawStream};
use crate::cuda::gpu::Gpu;

/// A stream, destroyed with what was made on it.
pub(crate) struct Stream {
    pub(crate) gpu: Arc<Gpu>,
    pub(crate) raw: RawStream,
}

impl Stream {
    /// One whose work goes before that of others of the GPU, or behind it.
    pub(crate) fn new(gpu: &Arc<Gpu>, urgent: bool) -> Result<Self, CudaError> {
        let entered = gpu.enter()?;
        let (mut least, mut greatest) = (0, 0);
        // SAFETY: both receive numbers; a context is current.
        unsafe { gpu.driver.context_stream_priorities(&raw mut least, &raw mut greatest) }?;
        let raw = gpu.stream(&entered, if urgent { greatest } else { least })?;
        drop(entered);
        Ok(Self { gpu: gpu.clone(), raw })
    }

    /// Waits for all that is on it.
    pub(crate) fn drain(&self) -> Result<(), CudaError> {
        let _entered = self.gpu.enter()?;
        // SAFETY: the stream is live.
        unsafe { self.gpu.driver.stream_synchronize(self.raw) }
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        if let Ok(_entered) = self.gpu.enter() {
            // SAFETY: created in `new`, destroyed only here.
            let _ = unsafe { self.gpu.driver.stream_destroy(self.raw) };
        }
    }
}
