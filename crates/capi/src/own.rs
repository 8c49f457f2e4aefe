//! What belongs to one process.

use std::mem::ManuallyDrop;
use std::process;

use crate::status::{Failure, Status};

/// A value with threads, locks or registrations of the library's behind it, of which a process that is forked off has none: it can
/// neither use the value nor release it.
pub(crate) struct Own<T> {
    process: u32,
    value: ManuallyDrop<T>,
}

impl<T> Own<T> {
    pub(crate) fn new(value: T) -> Self {
        Self { process: process::id(), value: ManuallyDrop::new(value) }
    }

    /// The value, in its own process.
    pub(crate) fn get(&self) -> Result<&T, Failure> {
        let forked = || {
            let message = "the handle was made before fork, and is of no use after it: a forked process has none of the \
                           library's threads";
            Failure::new(Status::KvfForked, "Forked", message)
        };
        if self.is_of_this_process() { Ok(&self.value) } else { Err(forked()) }
    }

    fn is_of_this_process(&self) -> bool {
        self.process == process::id()
    }
}

impl<T> Drop for Own<T> {
    #[allow(unsafe_code, reason = "drops what a forked process must not")]
    fn drop(&mut self) {
        if self.is_of_this_process() {
            // SAFETY: it is dropped here alone, and nobody has it afterwards: its owner is being dropped.
            unsafe { ManuallyDrop::drop(&mut self.value) };
        }
    }
}
