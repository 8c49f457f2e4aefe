//! The slots of one transfer, on their way to the device.
//!
//! # Safety
//!
//! A sheet is written by its owner alone, when nothing on the device reads it: after every kernel of the transfer before has ended.
#![allow(unsafe_code, reason = "calls the driver")]

use std::ffi::c_void;
use std::ptr;
use std::rc::Rc;

use crate::cuda::driver::{CudaError, DeviceAddress, constant};
use crate::cuda::expand::{Mode, Pair};
use crate::cuda::pairs::Pairs;
use crate::cuda::stream::Stream;

/// Least bytes of a sheet, so that few sizes are ever made.
const SHEET_BYTES_MIN: usize = 64 << 10;

/// The slots of one transfer: written on the host, copied to the device.
pub(crate) struct Sheet {
    host: *mut c_void,
    pub(crate) device: DeviceAddress,
    pub(crate) bytes: usize,
    stream: Rc<Stream>,
}

impl Sheet {
    /// One of at least `bytes`.
    pub(crate) fn new(stream: &Rc<Stream>, bytes: usize) -> Result<Self, CudaError> {
        let bytes = bytes.max(SHEET_BYTES_MIN).next_power_of_two();
        let gpu = &stream.gpu;
        let _entered = gpu.enter()?;
        let mut sheet = Self { host: ptr::null_mut(), device: 0, bytes, stream: stream.clone() };
        // SAFETY: `sheet.host` receives memory that the sheet frees.
        unsafe { gpu.driver.host_alloc(&raw mut sheet.host, bytes, constant::HOST_PORTABLE_MAPPED) }?;
        // SAFETY: `sheet.device` receives memory that the sheet frees, on the same stream.
        unsafe { gpu.driver.alloc_async(&raw mut sheet.device, bytes, stream.raw) }?;
        Ok(sheet)
    }

    /// Fills its first `bytes`, at most its length, with sets and pairs, and has them copied in the order of the stream.
    pub(crate) fn fill(
        &mut self,
        bytes: usize,
        sets: &[u8],
        pairs: &[impl Pairs],
        mode: Mode,
    ) -> Result<(), CudaError> {
        debug_assert!(bytes <= self.bytes);
        // SAFETY: the memory is `self.bytes` long, zeroed when it was allocated, and nothing on the device reads it now.
        let place = unsafe { std::slice::from_raw_parts_mut(self.host.cast::<u8>(), bytes) };
        write_slots(place, sets, pairs, mode);
        let Stream { gpu, raw } = &*self.stream;
        let _entered = gpu.enter()?;
        // SAFETY: both are `self.bytes` long, at least `bytes`; the sheet is not written again before the kernels behind the copy
        // have ended.
        unsafe { gpu.driver.copy_to_device(self.device, self.host, bytes, *raw) }
    }
}

/// Writes the sets and, behind them, the pairs, which fill what is left.
pub(crate) fn write_slots(place: &mut [u8], sets: &[u8], pairs: &[impl Pairs], mode: Mode) {
    let (head, mut rest) = place.split_at_mut(sets.len());
    head.copy_from_slice(sets);
    for pairs in pairs {
        let (here, behind) = rest.split_at_mut(pairs.count() * size_of::<Pair>());
        pairs.write(here, mode);
        rest = behind;
    }
}

impl Drop for Sheet {
    fn drop(&mut self) {
        let Stream { gpu, raw } = &*self.stream;
        let Ok(_entered) = gpu.enter() else { return };
        if self.device != 0 {
            // SAFETY: allocated on this stream, and no kernel that reads it is left.
            let _ = unsafe { gpu.driver.free_async(self.device, *raw) };
        }
        if !self.host.is_null() {
            // SAFETY: allocated in `new`; what read it has ended, or the stream was waited for.
            let _ = unsafe { gpu.driver.host_free(self.host) };
        }
    }
}
