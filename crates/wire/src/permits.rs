//! What a worker lets in through its inbox, for those of its peers' transfers that say what they belong to.

use std::collections::HashSet;

use parking_lot::Mutex;
use serde::{Deserialize, Serialize};

/// Names what a transfer is part of, by the target's numbering: the target can let it in, and cut it off without its peer.
/// Never used twice by one target.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
pub struct Permit(pub u64);

/// A transfer that says what it belongs to.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Permitted {
    /// What the target has let in by [`Worker::permit`](crate::Worker::permit).
    pub permit: Permit,
    /// Take the inbox or none: the target has been told that nothing of the permit is written in another way.
    pub inbox_only: bool,
}

/// The permits that are open, by the epoch of the peer that has each. Callers open and close them on their threads; the progress
/// thread looks when a transfer is described.
#[derive(Debug, Default)]
pub(crate) struct Permits {
    open: Mutex<HashSet<(u64, Permit)>>,
}

impl Permits {
    pub(crate) fn open(&self, epoch: u64, permit: Permit) {
        self.open.lock().insert((epoch, permit));
    }

    pub(crate) fn close(&self, epoch: u64, permit: Permit) {
        self.open.lock().remove(&(epoch, permit));
    }

    /// Whether a transfer may come in. One that belongs to nothing may.
    pub(crate) fn allow(&self, epoch: u64, permit: Option<Permit>) -> bool {
        permit.is_none_or(|permit| self.open.lock().contains(&(epoch, permit)))
    }
}
