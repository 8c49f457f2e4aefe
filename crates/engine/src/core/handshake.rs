//! How a link comes up: each rank greets each of its peers with the digest of what it matched, and is connected when all of
//! them have greeted it with the same.

use std::collections::BTreeMap;
use std::time::Instant;

use kvferry_match::Side;
use kvferry_wire::Status;

use super::{Action, Core, LinkId, Peer, PeerState, other};
use crate::error::{ConnectError, PeerName};
use crate::message::{Hello, Message};

/// Greetings kept of peers that this side has not been told to connect to yet.
const EARLY_HELLOS_MAX: usize = 4096;

/// A link with its peers' epochs.
#[derive(Debug)]
pub(super) struct LinkState {
    pub(super) side: Side,
    pub(super) peers: Vec<u64>,
    deadline: Option<Instant>,
}

impl LinkState {
    /// When the handshake is given up; `None` once it is complete.
    pub(super) fn deadline(&self) -> Option<Instant> {
        self.deadline
    }
}

impl Core {
    /// Takes up a link of which this engine is rank `rank` of `side`, to the given peers by epoch. None of them may be known.
    pub(crate) fn connect(
        &mut self,
        now: Instant,
        link: LinkId,
        side: Side,
        rank: u32,
        peers: BTreeMap<u64, Peer>,
    ) -> Vec<Action> {
        let mut actions = Vec::new();
        let deadline = Some(now + self.patience);
        self.links.insert(link, LinkState { side, peers: peers.keys().copied().collect(), deadline });
        let mut early = Vec::new();
        for (epoch, peer) in peers {
            let hello = Hello { rank, template: peer.template.digest() };
            actions.push(Action::Say { epoch, message: Message::Hello(hello) });
            early.extend(self.early_hellos.remove(&epoch).map(|hello| (epoch, hello)));
            let name = PeerName { side: other(side), rank: peer.rank };
            let state = PeerState { link, name, peer, greeted: false, lost: None, wants: BTreeMap::new() };
            self.peers.insert(epoch, state);
        }
        for (epoch, hello) in early {
            actions.extend(self.hello(epoch, hello));
        }
        actions.extend(self.connected(link));
        actions
    }

    /// Whether a peer of this epoch is known already, and as whom.
    pub(crate) fn known(&self, epoch: u64) -> Option<PeerName> {
        self.peers.get(&epoch).map(|peer| peer.name)
    }

    /// Removes a link, of which no request may be under way, and returns the peers it had.
    pub(crate) fn forget(&mut self, link: LinkId) -> Option<Vec<u64>> {
        let peers = self.links.remove(&link)?.peers;
        for epoch in &peers {
            self.peers.remove(epoch);
        }
        Some(peers)
    }

    pub(super) fn hello(&mut self, epoch: u64, hello: Hello) -> Vec<Action> {
        let Some(peer) = self.peers.get_mut(&epoch) else {
            if self.early_hellos.len() < EARLY_HELLOS_MAX {
                self.early_hellos.insert(epoch, hello);
            }
            return Vec::new();
        };
        let link = peer.link;
        if hello.rank != peer.peer.rank || hello.template != peer.peer.template.digest() {
            let peer = peer.name;
            return self.not_connected(link, ConnectError::PlansDiffer { peer });
        }
        peer.greeted = true;
        self.connected(link).into_iter().collect()
    }

    /// Completes the handshake if every peer has greeted.
    fn connected(&mut self, link: LinkId) -> Option<Action> {
        let state = self.links.get_mut(&link)?;
        let complete = state.peers.iter().all(|epoch| self.peers.get(epoch).is_some_and(|peer| peer.greeted));
        (complete && state.deadline.take().is_some()).then_some(Action::Connected { link })
    }

    /// Forgets a link whose handshake failed. A link that is up stays, whatever its peers say now.
    fn not_connected(&mut self, link: LinkId, error: ConnectError) -> Vec<Action> {
        if self.links.get(&link).is_none_or(|link| link.deadline.is_none()) {
            return Vec::new();
        }
        let peers = self.forget(link).unwrap_or_default();
        let forget = peers.into_iter().map(|epoch| Action::Forget { epoch });
        forget.chain([Action::NotConnected { link, error }]).collect()
    }

    /// `None` if the link's handshake is over.
    pub(super) fn lost_while_connecting(
        &mut self,
        link: LinkId,
        peer: PeerName,
        source: Status,
    ) -> Option<Vec<Action>> {
        self.links.get(&link)?.deadline?;
        Some(self.not_connected(link, ConnectError::Lost { peer, source }))
    }

    pub(super) fn tick_links(&mut self, now: Instant) -> Vec<Action> {
        let late = |(_, link): &(&LinkId, &LinkState)| link.deadline.is_some_and(|deadline| deadline <= now);
        let mut actions = Vec::new();
        for link in self.links.iter().filter(late).map(|(link, _)| *link).collect::<Vec<_>>() {
            let peers = self.links[&link].peers.iter().filter_map(|epoch| self.peers.get(epoch));
            if let Some(peer) = peers.filter(|peer| !peer.greeted).map(|peer| peer.name).next() {
                actions.extend(self.not_connected(link, ConnectError::NoAnswer { peer, waited: self.patience }));
            }
        }
        actions
    }
}
