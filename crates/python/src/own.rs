//! What belongs to one process.

use std::mem::ManuallyDrop;
use std::process;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use crate::failure::Failure;

/// How long closing something waits for calls of it that other threads are in.
const RELEASE_WAIT: Duration = Duration::from_secs(5);

/// How often it looks.
const RELEASE_LOOK: Duration = Duration::from_millis(1);

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

/// Releases a value here, rather than wherever another thread ends a call of it, which may hold the interpreter. If such a call takes
/// long it is that thread which does.
pub(crate) fn release<T>(mut shared: Arc<T>) {
    let began = Instant::now();
    loop {
        match Arc::try_unwrap(shared) {
            Ok(value) => return drop(value),
            Err(_) if began.elapsed() > RELEASE_WAIT => return,
            Err(still) => shared = still,
        }
        thread::sleep(RELEASE_LOOK);
    }
}
