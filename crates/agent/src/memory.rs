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
    /// Memory whose deregistration was answered with busy, until another one of it is answered well.
    busy: Mutex<BTreeMap<RegionId, Busy>>,
}

/// Memory that was deregistered while something used it.
#[derive(Debug)]
pub(crate) enum Busy {
    /// Still used, as far as is known.
    Used(Region),
    /// Being looked at by [`Register::give_back`]: first address and length.
    Looked { base: u64, bytes: u64 },
    /// Given back since, which nobody has been told.
    Free,
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
        self.busy.lock().insert(region.id(), Busy::Used(region));
    }

    /// Takes one out; one that is being looked at stays.
    pub(crate) fn take_busy(&self, region: RegionId) -> Option<Busy> {
        let mut busy = self.busy.lock();
        match busy.get(&region)? {
            Busy::Looked { base, bytes } => Some(Busy::Looked { base: *base, bytes: *bytes }),
            Busy::Used(_) | Busy::Free => busy.remove(&region),
        }
    }

    pub(crate) fn is_busy(&self) -> bool {
        self.busy.lock().values().any(|busy| !matches!(busy, Busy::Free))
    }

    /// Gives back what is not used any more. What owners do then is done with no lock held.
    pub(crate) fn give_back(&self) {
        let take = |busy: &mut Busy| {
            let Busy::Used(region) = busy else { return None };
            let looked = Busy::Looked { base: region.base(), bytes: region.bytes() };
            match std::mem::replace(busy, looked) {
                Busy::Used(region) => Some(region),
                Busy::Looked { .. } | Busy::Free => None,
            }
        };
        let used: Vec<Region> = self.busy.lock().values_mut().filter_map(take).collect();
        for region in used {
            let id = region.id();
            let busy = region.unregister().map_or_else(Busy::Used, |()| Busy::Free);
            self.busy.lock().insert(id, busy);
        }
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

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use std::time::Duration;

    use super::*;
    use crate::{Agent, AgentOptions, MemoryError};

    /// The control thread gives the memory back before its owner asks again.
    #[test]
    fn memory_that_was_busy_is_deregistered_well_once() {
        let agent = Agent::new("a", AgentOptions::default()).unwrap();
        let user = agent.context().allocate(64).unwrap();
        let id = agent.register(user.clone()).unwrap();
        assert!(matches!(agent.deregister(id, Duration::ZERO), Err(MemoryError::Busy { .. })));
        drop(user);
        std::thread::sleep(Duration::from_millis(50));
        agent.deregister(id, Duration::ZERO).unwrap();
        assert!(matches!(agent.deregister(id, Duration::ZERO), Err(MemoryError::Unknown { region }) if region == id));
    }

    #[test]
    fn memory_that_is_being_looked_at_is_busy() {
        let agent = Agent::new("a", AgentOptions::default()).unwrap();
        let memory = agent.context().allocate(64).unwrap();
        let (id, base, bytes) = (memory.id(), memory.base(), memory.bytes());
        agent.shared.register.busy.lock().insert(id, Busy::Looked { base, bytes });
        let busy = agent.deregister(id, Duration::from_millis(5)).unwrap_err();
        assert!(matches!(busy, MemoryError::Busy { base: b, bytes: 64, .. } if b == base));
        agent.shared.register.busy.lock().insert(id, Busy::Free);
        agent.deregister(id, Duration::ZERO).unwrap();
    }
}
