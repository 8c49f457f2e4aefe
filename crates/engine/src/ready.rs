//! When the bytes of a part are there to be read.

use std::fmt;
use std::sync::Arc;

use parking_lot::Mutex;

/// Says when a part that is pushed may be read: at once, or when somebody says so.
///
/// ```
/// use kvferry::Ready;
///
/// let (signal, ready) = Ready::later();
/// # drop(ready);
/// // Pushed with `ready`, the part leaves when whoever computes it calls:
/// signal.set();
/// ```
#[derive(Debug)]
pub struct Ready {
    /// `None`: at once.
    pub(crate) when: Option<Arc<Flag>>,
}

/// The other end of a [`Ready`]. Dropped without having been set, the part never leaves.
#[derive(Debug)]
pub struct Signal {
    flag: Arc<Flag>,
}

#[derive(Default)]
pub(crate) struct Flag {
    state: Mutex<State>,
}

#[derive(Default)]
enum State {
    #[default]
    Unset,
    /// Unset, with what is to be done when it is set.
    Awaited(Box<dyn FnOnce() + Send>),
    Set,
}

impl fmt::Debug for Flag {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(if self.is_set() { "Flag(set)" } else { "Flag(unset)" })
    }
}

impl Ready {
    /// The bytes are there.
    #[must_use]
    pub fn now() -> Self {
        Self { when: None }
    }

    /// They will be there when the signal is set.
    #[must_use]
    pub fn later() -> (Signal, Self) {
        let flag = Arc::<Flag>::default();
        (Signal { flag: flag.clone() }, Self { when: Some(flag) })
    }

    pub(crate) fn is_set(&self) -> bool {
        self.when.as_ref().is_none_or(|flag| flag.is_set())
    }
}

impl Signal {
    /// The bytes are there: writes to memory before this call are what is read. From any thread.
    pub fn set(self) {
        let before = std::mem::replace(&mut *self.flag.state.lock(), State::Set);
        if let State::Awaited(then) = before {
            then();
        }
    }
}

impl Flag {
    fn is_set(&self) -> bool {
        matches!(*self.state.lock(), State::Set)
    }

    /// Calls `then` when the flag is set: at once, if it is.
    pub(crate) fn when_set(&self, then: impl FnOnce() + Send + 'static) {
        let mut state = self.state.lock();
        match *state {
            State::Set => {
                drop(state);
                then();
            }
            _ => *state = State::Awaited(Box::new(then)),
        }
    }
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};

    use super::*;

    #[test]
    fn what_waits_is_called_once_whichever_comes_first() {
        for set_first in [true, false] {
            let (signal, ready) = Ready::later();
            let flag = ready.when.clone().unwrap();
            let called = Arc::<AtomicU32>::default();
            let call = called.clone();
            let wait = move || {
                flag.when_set(move || {
                    call.fetch_add(1, Ordering::SeqCst);
                });
            };
            assert!(!ready.is_set());
            if set_first {
                signal.set();
                wait();
            } else {
                wait();
                assert_eq!(called.load(Ordering::SeqCst), 0);
                signal.set();
            }
            assert!(ready.is_set());
            assert_eq!(called.load(Ordering::SeqCst), 1);
        }
    }
}
