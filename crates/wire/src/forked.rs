//! Processes that are forked off one in which UCX was opened.
//!
//! UCX has a thread of its own, and looks at every call of the process that maps or unmaps memory, whichever thread makes it. Any
//! thread may be inside one of its locks when the process is forked. In the child nobody gives that back, and whoever opens UCX
//! there waits for it for ever: seen with 1.13.1 while a worker ran (`ucs_async_set_event_handler`), and when all had been closed and
//! another thread was allocating (`ucm_event_enter_exclusive`). So UCX is not opened there.

use std::process;
use std::sync::atomic::{AtomicU32, Ordering};

use crate::error::OpenError;

/// The process that has opened UCX, 0 before any has. In a child it is what it was in its parent.
static OPENED_IN: AtomicU32 = AtomicU32::new(0);

/// To be asked before UCX is opened, or anything is begun with it.
///
/// # Errors
///
/// [`OpenError::Forked`].
pub(crate) fn claim() -> Result<(), OpenError> {
    claim_in(&OPENED_IN, process::id())
}

fn claim_in(opened_in: &AtomicU32, own: u32) -> Result<(), OpenError> {
    // Nothing is read on the strength of it but itself: no order is asked for.
    match opened_in.compare_exchange(0, own, Ordering::Relaxed, Ordering::Relaxed) {
        Err(owner) if owner != own => Err(OpenError::Forked),
        _ => Ok(()),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn only_the_process_that_was_first_opens_ucx() {
        let opened_in = AtomicU32::new(0);
        assert!(claim_in(&opened_in, 7).is_ok());
        assert!(claim_in(&opened_in, 7).is_ok());
        assert!(matches!(claim_in(&opened_in, 8), Err(OpenError::Forked)));
    }
}
