//! How an event loop hears that something has ended: through a file descriptor, so that the engine's threads never wait for
//! the interpreter.

use std::os::fd::{AsRawFd, OwnedFd};
use std::sync::Arc;
use std::task::{Wake, Waker};

use parking_lot::Mutex;
use pyo3::prelude::*;
use rustix::event::{EventfdFlags, eventfd};

/// A file descriptor that can be read when something has rung, and the tokens of what has.
#[pyclass(frozen)]
pub(crate) struct Bell {
    inner: Arc<Inner>,
}

struct Inner {
    descriptor: OwnedFd,
    rung: Mutex<Vec<u64>>,
}

/// Rings once for a token.
struct Rope {
    bell: Arc<Inner>,
    token: u64,
}

#[pymethods]
impl Bell {
    #[new]
    fn new() -> PyResult<Self> {
        let descriptor = eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map_err(std::io::Error::from)?;
        Ok(Self { inner: Arc::new(Inner { descriptor, rung: Mutex::default() }) })
    }

    /// The descriptor. It is closed with the bell.
    fn fileno(&self) -> i32 {
        self.inner.descriptor.as_raw_fd()
    }

    /// Takes the tokens of what has rung since the last call, and makes the descriptor unreadable.
    fn take(&self) -> Vec<u64> {
        // Before the tokens are taken: what rings in between is read twice rather than never.
        let _ = rustix::io::read(&self.inner.descriptor, &mut [0; 8]); // empty: woken for what was taken before
        std::mem::take(&mut self.inner.rung.lock())
    }
}

impl Bell {
    /// What rings with `token` when it is woken.
    pub(crate) fn waker(&self, token: u64) -> Waker {
        Arc::new(Rope { bell: self.inner.clone(), token }).into()
    }
}

impl Wake for Rope {
    fn wake(self: Arc<Self>) {
        self.wake_by_ref();
    }

    fn wake_by_ref(self: &Arc<Self>) {
        self.bell.rung.lock().push(self.token);
        let _ = rustix::io::write(&self.bell.descriptor, &1u64.to_ne_bytes()); // full: readable already
    }
}
