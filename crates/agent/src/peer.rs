//! A life of a remote agent, as far as it is known here.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;

use kvferry_wire::{EndpointId, RegionCard, RegionId, RemoteRegion};

use crate::metadata::Metadata;

#[derive(Debug)]
pub(crate) struct Peer {
    pub(crate) name: Arc<str>,
    /// Where its worker is.
    pub(crate) address: Option<Vec<u8>>,
    /// When it has greeted, as the state counts.
    pub(crate) greeted: u64,
    /// The last of its connections on which it has greeted, as it counts them.
    pub(crate) caller: u64,
    /// Whether its metadata was added here: then transfers may name it.
    pub(crate) added: bool,
    /// Whether the connection is to be closed when nothing depends on it any more.
    pub(crate) leaving: bool,
    /// Memory that its metadata tells of.
    pub(crate) cards: BTreeMap<RegionId, RegionCard>,
    /// Memory that its reads are pushed to.
    pub(crate) asked_for: BTreeMap<RegionId, RegionCard>,
    pub(crate) connection: Option<Connection>,
}

/// What ends with the connection.
#[derive(Debug)]
pub(crate) struct Connection {
    pub(crate) endpoint: EndpointId,
    /// As this agent counts its connections.
    pub(crate) number: u64,
    pub(crate) imported: BTreeMap<RegionId, RemoteRegion>,
    /// This side's memory that the peer was told of.
    pub(crate) told: BTreeSet<RegionId>,
    /// The peer's memory that cannot be pulled from here.
    pub(crate) not_pulled: BTreeSet<RegionId>,
    /// Whether the peer has answered.
    pub(crate) welcomed: bool,
}

impl Peer {
    pub(crate) fn new(name: Arc<str>, address: Option<Vec<u8>>) -> Self {
        let (cards, asked_for) = (BTreeMap::new(), BTreeMap::new());
        Self { name, address, greeted: 0, caller: 0, added: false, leaving: false, cards, asked_for, connection: None }
    }

    /// Takes in what its metadata says.
    pub(crate) fn add(&mut self, metadata: Metadata) {
        (self.added, self.leaving) = (true, false);
        if metadata.address.is_some() {
            self.address = metadata.address;
        }
        if metadata.whole {
            self.cards.clear();
        }
        for card in metadata.regions {
            // The same memory registered anew.
            self.cards.retain(|_, old| (old.base, old.bytes) != (card.base, card.bytes));
            self.cards.insert(card.id(), card);
        }
        if metadata.whole
            && let Some(connection) = &mut self.connection
        {
            // What it has deregistered since is named no more.
            connection.not_pulled.retain(|id| self.cards.contains_key(id));
            connection.imported.retain(|id, _| self.cards.contains_key(id) || self.asked_for.contains_key(id));
        }
    }

    pub(crate) fn endpoint(&self) -> Option<EndpointId> {
        self.connection.as_ref().map(|connection| connection.endpoint)
    }
}

impl Connection {
    pub(crate) fn new(endpoint: EndpointId, number: u64) -> Self {
        let (imported, told, not_pulled) = (BTreeMap::new(), BTreeSet::new(), BTreeSet::new());
        Self { endpoint, number, imported, told, not_pulled, welcomed: false }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use std::time::Duration;

    use crate::{Agent, AgentOptions};

    /// Memory that comes and goes leaves nothing behind on a connection that stays.
    #[test]
    fn what_was_deregistered_is_forgotten_by_both_sides() {
        let [a, b] = ["a", "b"].map(|name| Agent::new(name, AgentOptions::default()).unwrap());
        let memory = || b.register(b.context().allocate(64).unwrap()).unwrap();
        let (kept, gone) = (memory(), memory());
        a.add_remote(&b.metadata()).unwrap();
        b.add_remote(&a.metadata()).unwrap();
        let _ = a.prepare_remote("b", kvferry_wire::MemoryKind::Host, &[]).unwrap();
        b.send_notification("a", b"connects").unwrap();
        let known = |of: &Agent, epoch| {
            let state = of.shared.state.lock();
            let connection = state.peers[&epoch].connection.as_ref().unwrap();
            (connection.imported.len(), connection.not_pulled.len(), connection.told.len())
        };
        let at = |of: &Agent, epoch, add: &dyn Fn(&mut super::Connection)| {
            add(of.shared.state.lock().peers.get_mut(&epoch).unwrap().connection.as_mut().unwrap());
        };
        at(&a, b.epoch(), &|connection| connection.not_pulled.extend([kept, gone]));
        at(&b, a.epoch(), &|connection| connection.told.extend([kept, gone]));
        assert_eq!((known(&a, b.epoch()), known(&b, a.epoch())), ((2, 2, 0), (0, 0, 2)));
        b.deregister(gone, Duration::ZERO).unwrap();
        a.add_remote(&b.metadata()).unwrap();
        assert_eq!((known(&a, b.epoch()), known(&b, a.epoch())), ((1, 1, 0), (0, 0, 1)));
    }
}
