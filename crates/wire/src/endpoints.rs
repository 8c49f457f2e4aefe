//! UCX's endpoints of a worker, made or used again.
//!
//! UCX pairs the endpoints of two workers by their numbers: the n-th that one has made with the n-th that the other has, whichever
//! connections they serve. One whose pair has been closed goes on until UCX asks after it, and then fails. So an endpoint in good
//! order is not closed with its connection: it is kept for the next one to the same worker, for as long as that lives.

use std::cell::{Cell, RefCell};
use std::cmp::Reverse;
use std::collections::{BTreeMap, VecDeque};
use std::rc::Rc;

use ucx_sys::Status;

use crate::raw::{RawEndpoint, RawWorker};

/// Endpoints that are kept. Of more, the oldest to the worker that has the most is closed.
const SPARE_MAX: usize = 64;

pub(crate) struct Endpoints {
    /// Those that serve no connection, the oldest first.
    spare: RefCell<VecDeque<Spare>>,
    /// How many there may be.
    spare_max: Cell<usize>,
    worker: Rc<RawWorker>, // last: the endpoints are its
}

struct Spare {
    endpoint: RawEndpoint,
    /// Another to the same worker has failed since. The pair of this one may be gone as well: it is kept for that of others, and
    /// serves no connection any more.
    doubtful: bool,
}

impl Endpoints {
    pub(crate) fn new(worker: Rc<RawWorker>) -> Self {
        Self { spare: RefCell::default(), spare_max: Cell::new(SPARE_MAX), worker }
    }

    /// An endpoint to the worker at `address`. Of one that was used before, nothing is left but messages that UCX is still sending.
    pub(crate) fn connect(&self, address: &[u8]) -> Result<RawEndpoint, Status> {
        let mut spare = self.spare.borrow_mut();
        let fits = |Spare { endpoint, doubtful }: &Spare| {
            !doubtful && endpoint.address() == address && endpoint.failure() == Status::OK
        };
        match spare.iter().position(fits).and_then(|index| spare.remove(index)) {
            Some(spare) => Ok(spare.endpoint),
            None => self.connect_anew(address),
        }
    }

    /// One that nothing has used before.
    pub(crate) fn connect_anew(&self, address: &[u8]) -> Result<RawEndpoint, Status> {
        self.worker.connect(address)
    }

    /// Keeps an endpoint on which no put is outstanding; messages may be. Returns one to be closed, if that is one too many.
    pub(crate) fn keep(&self, mut endpoint: RawEndpoint) -> Option<RawEndpoint> {
        endpoint.destroy_keys();
        let mut spare = self.spare.borrow_mut();
        spare.push_back(Spare { endpoint, doubtful: false });
        if spare.len() <= self.spare_max.get() {
            return None;
        }
        // Not the oldest of all: a peer that connects very often would cost others theirs.
        let mut counts: BTreeMap<&[u8], usize> = BTreeMap::new();
        spare.iter().for_each(|spare| *counts.entry(spare.endpoint.address()).or_default() += 1);
        let of_address = |spare: &Spare| counts[spare.endpoint.address()];
        let (index, _) = spare.iter().enumerate().max_by_key(|(index, spare)| (of_address(spare), Reverse(*index)))?;
        spare.remove(index).map(|spare| spare.endpoint)
    }

    /// An endpoint to the worker at `address` has failed.
    pub(crate) fn doubt(&self, address: &[u8]) {
        let mut spare = self.spare.borrow_mut();
        spare.iter_mut().filter(|spare| spare.endpoint.address() == address).for_each(|spare| spare.doubtful = true);
    }

    /// Those that have failed, to be closed.
    pub(crate) fn take_failed(&self) -> Vec<RawEndpoint> {
        self.take(|endpoint| endpoint.failure() != Status::OK)
    }

    /// Those to a worker whose process has ended, to be closed: UCX may take a while to see it.
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
        let (taken, kept) = spare.drain(..).partition::<VecDeque<_>, _>(|spare| which(&spare.endpoint));
        *spare = kept;
        taken.into_iter().map(|spare| spare.endpoint).collect()
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use super::*;
    use crate::context::Context;
    use crate::options::ContextOptions;

    #[test]
    fn a_peer_that_connects_very_often_costs_no_other_its_endpoint() {
        let context = Context::open(&ContextOptions::default()).unwrap();
        let worker = || RawWorker::create(context.clone()).unwrap();
        let (own, quiet, busy) = (Rc::new(Endpoints::new(worker())), worker(), worker());
        let [to_quiet, to_busy] = [&quiet, &busy].map(|peer| peer.address().unwrap());
        let first = own.connect(&to_quiet).unwrap();
        assert!(own.keep(first).is_none());
        let many: Vec<_> = (0..=SPARE_MAX).map(|_| own.connect(&to_busy).unwrap()).collect();
        let mut closed: Vec<_> = many.into_iter().filter_map(|endpoint| own.keep(endpoint)).collect();
        assert_eq!(closed.iter().map(RawEndpoint::address).collect::<Vec<_>>(), [&to_busy; 2]);
        own.doubt(&to_busy);
        let spares = own.spare.borrow().len();
        closed.push(own.connect(&to_busy).unwrap());
        assert_eq!(own.spare.borrow().len(), spares, "none of them is used again");
        closed.push(own.connect(&to_quiet).unwrap());
        assert_eq!(own.spare.borrow().len(), spares - 1);
        closed.extend(own.take_all());
        for closing in closed.into_iter().map(|endpoint| endpoint.close(true)) {
            while !closing.is_closed() {
                own.worker.progress();
            }
            closing.finish();
        }
    }
}
