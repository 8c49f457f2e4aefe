//! Registered memory, and what holds on to it.

use std::collections::BTreeMap;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Weak};

use kvferry_wire::{Region, RegionId};
use parking_lot::Mutex;

use crate::{list, transfer};

/// Lists and transfers that hold regions. They are told when one is deregistered.
#[derive(Debug, Default)]
pub(crate) struct Register {
    next: AtomicU64,
    holders: Mutex<Holders>,
    /// Memory that was deregistered while something used it.
    busy: Mutex<BTreeMap<RegionId, Region>>,
}

#[derive(Debug, Default)]
struct Holders {
    lists: BTreeMap<u64, Weak<list::Inner>>,
    transfers: BTreeMap<u64, Weak<transfer::Inner>>,
}

impl Register {
    pub(crate) fn next(&self) -> u64 {
        self.next.fetch_add(1, Ordering::Relaxed) // only uniqueness is asked of it
    }

    pub(crate) fn add_list(&self, number: u64, list: &Arc<list::Inner>) {
        self.holders.lock().lists.insert(number, Arc::downgrade(list));
    }

    pub(crate) fn remove_list(&self, number: u64) {
        self.holders.lock().lists.remove(&number);
    }

    pub(crate) fn add_transfer(&self, transfer: &Arc<transfer::Inner>) {
        self.holders.lock().transfers.insert(transfer.number, Arc::downgrade(transfer));
    }

    pub(crate) fn remove_transfer(&self, number: u64) {
        self.holders.lock().transfers.remove(&number);
    }

    pub(crate) fn add_busy(&self, region: Region) {
        self.busy.lock().insert(region.id(), region);
    }

    pub(crate) fn take_busy(&self, region: RegionId) -> Option<Region> {
        self.busy.lock().remove(&region)
    }

    pub(crate) fn is_busy(&self) -> bool {
        !self.busy.lock().is_empty()
    }

    /// Gives back what is not used any more.
    pub(crate) fn give_back(&self) {
        let mut busy = self.busy.lock(); // held, so that nobody looks for one in vain meanwhile
        let all = std::mem::take(&mut *busy);
        busy.extend(all.into_iter().filter_map(|(id, region)| Some((id, region.unregister().err()?))));
    }

    /// Has everything let go of the region that is not on its way.
    pub(crate) fn forget(&self, region: RegionId) {
        let (lists, transfers): (Vec<_>, Vec<_>) = {
            let holders = self.holders.lock();
            let lists = holders.lists.values().filter_map(Weak::upgrade).collect();
            (lists, holders.transfers.values().filter_map(Weak::upgrade).collect())
        };
        for list in lists {
            list.forget_memory(region);
        }
        for transfer in transfers {
            if transfer.parts().is_some_and(|parts| parts.iter().any(|part| part.local.id() == region)) {
                transfer.forget_memory();
            }
        }
    }
}
