//! Prepared lists.

use std::sync::Arc;

use kvferry_wire::{EndpointId, Region, RegionId, RemoteRegion, Side};
use parking_lot::Mutex;

use crate::shared::Shared;

/// Entries of one side of transfers, looked up once. Cheap to clone.
#[derive(Clone, Debug)]
pub struct List {
    pub(crate) inner: Arc<Inner>,
}

#[derive(Debug)]
pub(crate) struct Inner {
    pub(crate) shared: Arc<Shared>,
    number: u64,
    pub(crate) entries: usize,
    pub(crate) side: Which,
}

#[derive(Debug)]
pub(crate) enum Which {
    /// `None` once memory of it was deregistered.
    Local(Mutex<Option<Arc<Side<Region>>>>),
    Remote {
        name: Arc<str>,
        epoch: u64,
        endpoint: EndpointId,
        side: Side<RemoteRegion>,
    },
}

impl List {
    pub(crate) fn local(shared: &Arc<Shared>, side: Side<Region>) -> Self {
        Self::new(shared, side.len(), Which::Local(Mutex::new(Some(Arc::new(side)))))
    }

    pub(crate) fn remote(
        shared: &Arc<Shared>,
        (name, epoch, endpoint): (Arc<str>, u64, EndpointId),
        side: Side<RemoteRegion>,
    ) -> Self {
        Self::new(shared, side.len(), Which::Remote { name, epoch, endpoint, side })
    }

    fn new(shared: &Arc<Shared>, entries: usize, side: Which) -> Self {
        let number = shared.register.next();
        let inner = Arc::new(Inner { shared: shared.clone(), number, entries, side });
        if matches!(inner.side, Which::Local(_)) {
            shared.register.add_list(number, &inner);
        }
        Self { inner }
    }

    /// Entries.
    #[must_use]
    pub fn len(&self) -> usize {
        self.inner.entries
    }

    /// Whether there is none.
    #[must_use]
    pub fn is_empty(&self) -> bool {
        self.len() == 0
    }

    /// Name of the remote agent whose memory it is of; `None` for a list of this side.
    #[must_use]
    pub fn agent(&self) -> Option<&str> {
        match &self.inner.side {
            Which::Local(_) => None,
            Which::Remote { name, .. } => Some(name),
        }
    }
}

impl Inner {
    /// Takes part in nothing new, if it is of the region.
    pub(crate) fn forget_memory(&self, region: RegionId) {
        let Which::Local(side) = &self.side else { return };
        let mut side = side.lock();
        let taken = side.take_if(|side| side.regions().iter().any(|of| of.id() == region));
        drop(taken);
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        self.shared.register.remove_list(self.number);
    }
}
