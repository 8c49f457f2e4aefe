//! UCX's endpoints of a worker, made or used again.
//!
//! UCX pairs the endpoints of two workers by their numbers: the n-th that one has made with the n-th that the other has, whichever
//! connections they serve. One whose pair has been closed goes on until UCX asks after it, and then fails. So an endpoint in good
//! order is not closed with its connection: it is kept for the next one to the same worker, for as long as that lives.

use std::cell::{Cell, RefCell};
use std::collections::VecDeque;
use std::rc::Rc;

use ucx_sys::Status;

use crate::raw::{RawEndpoint, RawWorker};

/// Endpoints that are kept. Behind more of them the oldest is closed.
const SPARE_MAX: usize = 64;

pub(crate) struct Endpoints {
    /// Those that serve no connection, the oldest first.
    spare: RefCell<VecDeque<RawEndpoint>>,
    /// How many there may be.
    spare_max: Cell<usize>,
    worker: Rc<RawWorker>, // last: the endpoints are its
}

impl Endpoints {
    pub(crate) fn new(worker: Rc<RawWorker>) -> Self {
        Self { spare: RefCell::default(), spare_max: Cell::new(SPARE_MAX), worker }
    }

    /// An endpoint to the worker at `address`. Of one that was used before, nothing is left but what UCX is still sending.
    pub(crate) fn connect(&self, address: &[u8]) -> Result<RawEndpoint, Status> {
        let mut spare = self.spare.borrow_mut();
        let fits = |endpoint: &RawEndpoint| endpoint.address() == address && endpoint.failure() == Status::OK;
        match spare.iter().position(fits).and_then(|index| spare.remove(index)) {
            Some(endpoint) => Ok(endpoint),
            None => self.worker.connect(address),
        }
    }

    /// Keeps an endpoint on which no put is outstanding. Returns one to be closed, if that is one too many.
    pub(crate) fn keep(&self, mut endpoint: RawEndpoint) -> Option<RawEndpoint> {
        endpoint.destroy_keys();
        let mut spare = self.spare.borrow_mut();
        spare.push_back(endpoint);
        if spare.len() > self.spare_max.get() { spare.pop_front() } else { None }
    }

    /// Those that have failed, to be closed.
    pub(crate) fn take_failed(&self) -> Vec<RawEndpoint> {
        self.take(|endpoint| endpoint.failure() != Status::OK)
    }

    /// Those to a worker that is gone, to be closed.
    pub(crate) fn take_of(&self, address: &[u8]) -> Vec<RawEndpoint> {
        self.take(|endpoint| endpoint.address() == address)
    }

    /// All of them, to be closed. None is kept from here on.
    pub(crate) fn take_all(&self) -> Vec<RawEndpoint> {
        self.spare_max.set(0);
        self.take(|_| true)
    }

    fn take(&self, which: impl Fn(&RawEndpoint) -> bool) -> Vec<RawEndpoint> {
        let mut spare = self.spare.borrow_mut();
        let (taken, kept) = spare.drain(..).partition(which);
        *spare = kept;
        Vec::from(taken)
    }
}
