//! Processes that are forked off one in which workers run.
//!
//! UCX has a thread of its own for them, which may hold any lock of UCX's when the process is forked. In the child nobody gives it
//! back: the next worker there would wait for it for ever (`ucs_async_set_event_handler`; seen once, with 1.13.1, on a
//! busy machine). So there is none.

use std::process;
use std::sync::atomic::{AtomicU64, Ordering};

use crate::error::OpenError;

/// A process, and how many workers run in it: 32 bits each, changed at once. In a child it is as it was when it was forked off.
static RUNNING: AtomicU64 = AtomicU64::new(0);

/// A worker that runs. Held until its thread has ended.
#[derive(Debug)]
pub(crate) struct Running(());

impl Running {
    /// # Errors
    ///
    /// [`OpenError::Forked`].
    pub(crate) fn new() -> Result<Self, OpenError> {
        // Nothing is read on the strength of it but itself: no order is asked for.
        let counted = RUNNING.fetch_update(Ordering::Relaxed, Ordering::Relaxed, |seen| one_more(seen, process::id()));
        counted.map(|_| Self(())).map_err(|_| OpenError::Forked)
    }
}

impl Drop for Running {
    fn drop(&mut self) {
        let fewer = |seen| (split(seen).0 == process::id()).then(|| seen - 1);
        let _ = RUNNING.fetch_update(Ordering::Relaxed, Ordering::Relaxed, fewer); // another's: it stays as it was
    }
}

/// One worker more in `process`; `None` if some ran in another when this one was forked off it.
fn one_more(seen: u64, process: u32) -> Option<u64> {
    match split(seen) {
        (owner, _) if owner == process => Some(seen + 1),
        (_, 0) => Some((u64::from(process) << 32) + 1),
        _ => None,
    }
}

fn split(seen: u64) -> (u32, u32) {
    let [owner, count] = [seen >> 32, seen & u64::from(u32::MAX)].map(|half| u32::try_from(half).unwrap_or_default());
    (owner, count)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_child_has_workers_if_its_parent_had_none_then() {
        let first = one_more(0, 7).unwrap();
        let second = one_more(first, 7).unwrap();
        assert_eq!((split(first), split(second)), ((7, 1), (7, 2)));
        assert_eq!(one_more(second, 8), None);
        assert_eq!(one_more(first, 8), None);
        assert_eq!(one_more(first - 1, 8).map(split), Some((8, 1)));
    }
}
