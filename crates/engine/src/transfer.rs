//! The caller's hold on a request.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

use parking_lot::{Condvar, Mutex};

use crate::error::RequestError;
use crate::report::{Received, Sent};

/// How a request ended: what moved to or from each peer, in the order of ranks, or why it failed.
pub type Outcome<R> = Result<Arc<[R]>, Arc<RequestError>>;

/// A request under way. Dropping it stops nothing.
#[derive(Debug)]
pub struct Transfer<R> {
    completion: Arc<Completion<R>>,
}

/// A request in which this rank is a destination.
pub type Receive = Transfer<Received>;

/// A request in which this rank is a source. When it has ended, nothing reads its slots any more.
pub type Send = Transfer<Sent>;

/// What the engine and the caller share of a request.
#[derive(Debug)]
pub(crate) struct Completion<R> {
    outcome: Mutex<Option<Outcome<R>>>,
    ended: Condvar,
    moved: AtomicU64,
}

impl<R> Completion<R> {
    pub(crate) fn new() -> Arc<Self> {
        Arc::new(Self { outcome: Mutex::new(None), ended: Condvar::new(), moved: AtomicU64::new(0) })
    }

    /// Ends the request. The first outcome stays.
    pub(crate) fn end(&self, outcome: Result<Vec<R>, RequestError>) {
        let outcome = outcome.map(Arc::from).map_err(Arc::new);
        self.outcome.lock().get_or_insert(outcome);
        self.ended.notify_all();
    }

    pub(crate) fn set_moved(&self, bytes: u64) {
        self.moved.store(bytes, Ordering::Relaxed); // a figure for people; nothing is read because of it
    }
}

impl<R> Transfer<R> {
    pub(crate) fn new(completion: Arc<Completion<R>>) -> Self {
        Self { completion }
    }

    /// How the request ended, or `None` while it has not.
    #[must_use]
    pub fn poll(&self) -> Option<Outcome<R>> {
        self.completion.outcome.lock().clone()
    }

    /// Waits until the request has ended, for `timeout` at most. `None`: it has not.
    #[must_use]
    pub fn wait(&self, timeout: Duration) -> Option<Outcome<R>> {
        let mut outcome = self.completion.outcome.lock();
        self.completion.ended.wait_while_for(&mut outcome, |outcome| outcome.is_none(), timeout);
        outcome.clone()
    }

    /// Bytes known to have moved so far, over all peers.
    #[must_use]
    pub fn moved_bytes(&self) -> u64 {
        self.completion.moved.load(Ordering::Relaxed) // see `set_moved`
    }
}
