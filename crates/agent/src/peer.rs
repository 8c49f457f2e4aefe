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
        Self { name, address, added: false, leaving: false, cards, asked_for, connection: None }
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
    }

    pub(crate) fn endpoint(&self) -> Option<EndpointId> {
        self.connection.as_ref().map(|connection| connection.endpoint)
    }
}

impl Connection {
    pub(crate) fn new(endpoint: EndpointId) -> Self {
        let (imported, told, not_pulled) = (BTreeMap::new(), BTreeSet::new(), BTreeSet::new());
        Self { endpoint, imported, told, not_pulled, welcomed: false }
    }
}
