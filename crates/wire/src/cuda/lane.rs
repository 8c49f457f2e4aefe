//! A stream that kernels are launched on, one behind the other, and how far it has come.
//!
//! Kernels of a stream end in its order, and each writes its number to host memory when it does. That is where the end is
//! looked for: an event would be recorded, and asked for, by a call of the driver each, and comes microseconds later.
//!
//! # Safety
//!
//! What kernels count with, and the number that they write last, lie in memory that is freed when the stream has been waited for.
#![allow(unsafe_code, reason = "calls the driver")]

use std::rc::Rc;
use std::sync::Arc;

use crate::cuda::done::Done;
use crate::cuda::driver::{CudaCode, CudaError, DeviceAddress, RawEvent};
use crate::cuda::gpu::Gpu;
use crate::cuda::kernel::{self, Job};
use crate::cuda::stream::Stream;

/// Bytes of [`Lane::progress`], and where in it is the number of a job to stop.
const PROGRESS_BYTES: usize = 12;
const STOP_OFFSET: u64 = 8;

/// Looks at a number that has not come after which the driver is asked whether the GPU has failed.
const LOOKS_PER_QUERY: u32 = 1024;

pub(crate) struct Lane {
    /// What the kernels of the stream count with, and what they are stopped by.
    progress: DeviceAddress,
    done: Done,
    /// Of the last kernel that was launched.
    number: u64,
    /// What of the number of a job to stop the device has: no other job is given a number that looks the same.
    stopped: u32,
    looks: u32,
    pub(crate) stream: Rc<Stream>, // last: everything above is freed on it
}

impl Lane {
    pub(crate) fn new(gpu: &Arc<Gpu>) -> Result<Self, CudaError> {
        let (done, stream) = (Done::new(gpu)?, Rc::new(Stream::new(gpu, gpu.options.urgent)?));
        let mut lane = Self { progress: 0, done, number: 0, stopped: 0, looks: 0, stream };
        let _entered = gpu.enter()?;
        let raw = lane.stream.raw;
        // SAFETY: `progress` receives memory that the lane frees, on the same stream.
        unsafe { gpu.driver.alloc_async(&raw mut lane.progress, PROGRESS_BYTES, raw) }?;
        // SAFETY: allocated above, in the order of the stream.
        unsafe { gpu.driver.fill(lane.progress, 0, PROGRESS_BYTES, raw) }?;
        Ok(lane)
    }

    /// Launches the kernel on at most so many blocks, and returns its number.
    ///
    /// # Safety
    ///
    /// As [`kernel::launch`]; what the job says of numbers and progress is set here.
    pub(crate) unsafe fn launch(&mut self, mut job: Job, blocks_max: u32) -> Result<u64, CudaError> {
        let mut number = self.number + 1;
        if compared(number) == self.stopped {
            number += 1;
        }
        (job.progress, job.done, job.number) = (self.progress, self.done.device, number);
        let Stream { gpu, raw } = &*self.stream;
        let entered = gpu.enter()?;
        // SAFETY: `progress` and `done` live until the stream has been waited for; the rest is the caller's promise.
        unsafe { kernel::launch(gpu, &entered, *raw, job, blocks_max) }?;
        self.number = number;
        Ok(number)
    }

    /// Whether the kernel of this number has ended, and how.
    pub(crate) fn poll(&mut self, number: u64) -> Option<Result<(), CudaError>> {
        if self.done.number() >= number {
            return Some(Ok(()));
        }
        self.looks = self.looks.wrapping_add(1);
        if !self.looks.is_multiple_of(LOOKS_PER_QUERY) {
            return None;
        }
        // A kernel that has failed says nothing.
        let Stream { gpu, raw } = &*self.stream;
        let _entered = match gpu.enter() {
            Ok(entered) => entered,
            Err(error) => return Some(Err(error)),
        };
        // SAFETY: the stream is live.
        match unsafe { gpu.driver.stream_query(*raw) } {
            Err(CudaError { code: CudaCode::NOT_READY, .. }) => None,
            Ok(()) if self.done.number() >= number => Some(Ok(())),
            Ok(()) => Some(Err(CudaError { call: "kvferry_move", code: CudaCode::UNKNOWN })),
            failed => Some(failed),
        }
    }

    /// Has a kernel end soon, without the rest of its copies. One of few units runs to its end. What says so goes `aside`, not
    /// to wait behind the kernel.
    pub(crate) fn stop(&mut self, number: u64, aside: &Stream) -> Result<(), CudaError> {
        let Stream { gpu, raw } = aside;
        let _entered = gpu.enter()?;
        self.stopped = compared(number);
        // SAFETY: the third number of `progress`, which kernels only read. One that ended before is not looked for any more.
        unsafe { gpu.driver.fill_words(self.progress + STOP_OFFSET, self.stopped, 1, *raw) }
    }

    /// What follows waits for `event`, which has been recorded.
    ///
    /// # Safety
    ///
    /// `event` is a live event of any context of this process.
    pub(crate) unsafe fn wait_for(&mut self, event: RawEvent) -> Result<(), CudaError> {
        let Stream { gpu, raw } = &*self.stream;
        let _entered = gpu.enter()?;
        // SAFETY: the caller's promise.
        unsafe { gpu.driver.stream_wait(*raw, event, 0) }
    }
}

/// What the kernel compares of a number.
#[allow(clippy::cast_possible_truncation, reason = "that is what it does")]
fn compared(number: u64) -> u32 {
    number as u32
}

impl Drop for Lane {
    fn drop(&mut self) {
        // Nothing is left on it unless something has gone wrong.
        let _ = self.stream.drain();
        let Stream { gpu, raw } = &*self.stream;
        if let Ok(_entered) = gpu.enter() {
            // SAFETY: allocated on this stream in `new`.
            let _ = unsafe { gpu.driver.free_async(self.progress, *raw) };
        }
    }
}
