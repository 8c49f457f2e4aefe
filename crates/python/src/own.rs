//! What belongs to one process.

use std::mem::ManuallyDrop;
use std::process;
use std::thread;

use crate::failure::Failure;

/// The process that made something.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Process(u32);

/// A value of the engine's with threads, locks or registrations behind it, of which a process that is forked off has none: it
/// can neither use the value nor release it.
///
/// Releasing may wait (an engine says goodbye to its peers), and the interpreter runs destructors wherever it likes: this one
/// leaves it to a thread.
#[derive(Debug)]
pub(crate) struct Own<T: Send + 'static> {
    process: Process,
    value: ManuallyDrop<Option<T>>,
    /// Whether releasing it waits for nothing: then it is done where the interpreter is.
    light: bool,
}

impl Process {
    pub(crate) fn this() -> Self {
        Self(process::id())
    }

    /// Whether this is it.
    ///
    /// # Errors
    ///
    /// [`Failure::forked`].
    pub(crate) fn check(self) -> Result<(), Failure> {
        if self == Self::this() { Ok(()) } else { Err(Failure::forked()) }
    }
}

impl<T: Send + 'static> Own<T> {
    pub(crate) fn new(value: T) -> Self {
        Self { process: Process::this(), value: ManuallyDrop::new(Some(value)), light: false }
    }

    /// A value that waits for nothing when it is released.
    pub(crate) fn light(value: T) -> Self {
        Self { process: Process::this(), value: ManuallyDrop::new(Some(value)), light: true }
    }

    /// The value.
    ///
    /// # Errors
    ///
    /// [`Failure::forked`] in another process.
    pub(crate) fn get(&self) -> Result<&T, Failure> {
        self.process.check()?;
        self.value.as_ref().ok_or_else(Failure::closed)
    }
}

impl<T: Send + 'static> Drop for Own<T> {
    fn drop(&mut self) {
        if self.process == Process::this() {
            let value = self.value.take();
            if self.light {
                return;
            }
            // Without a thread the closure that comes back releases it, here.
            let _ = thread::Builder::new().name("kvferry-release".to_owned()).spawn(move || drop(value));
        }
    }
}
