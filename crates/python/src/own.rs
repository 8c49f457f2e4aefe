//! What belongs to one process.

use std::mem::ManuallyDrop;
use std::process;
use std::thread;

use crate::failure::Failure;

/// A value of the engine's with threads, locks or registrations behind it, of which a process that is forked off has none: it
/// can neither use it there nor release it.
///
/// Releasing may wait (an engine says goodbye to its peers), and the interpreter runs destructors wherever it likes: they
/// leave that to a thread.
#[derive(Debug)]
pub(crate) struct Own<T: Send + 'static> {
    process: u32,
    value: ManuallyDrop<Option<T>>,
}

impl<T: Send + 'static> Own<T> {
    pub(crate) fn new(value: T) -> Self {
        Self { process: process::id(), value: ManuallyDrop::new(Some(value)) }
    }

    /// The value.
    ///
    /// # Errors
    ///
    /// [`Failure::forked`] in another process.
    pub(crate) fn get(&self) -> Result<&T, Failure> {
        match &*self.value {
            Some(value) if self.process == process::id() => Ok(value),
            _ => Err(Failure::forked()),
        }
    }
}

impl<T: Send + 'static> Drop for Own<T> {
    fn drop(&mut self) {
        if self.process != process::id() {
            return;
        }
        let value = self.value.take();
        // Without a thread it is released by the closure that comes back: here.
        let _ = thread::Builder::new().name("kvferry-release".to_owned()).spawn(move || drop(value));
    }
}
