//! How a link comes up, and how it goes.
//!
//! Each rank says `Hello` to each of its peers, with the number of its call and the digest of what it matched. A rank that
//! has a link to the speaker, made or being made, answers `Welcome` with that number. A link is up when each peer has
//! welcomed this very call: a greeting alone proves only that the peer once asked. A link that is given up says `Bye`, and
//! a `Hello` of another call than the one a link was made with says the same, so a peer that starts anew is noticed.

use std::collections::BTreeMap;
use std::time::Instant;

use kvferry_match::Side;
use kvferry_wire::Status;

use super::{Action, Core, LinkId, Peer, PeerState, other};
use crate::error::{ConnectError, PeerName};
use crate::message::{CallId, Hello, Message};

/// Greetings kept of peers that this side has not been told to connect to yet. Beyond that the oldest goes.
pub(super) const EARLY_HELLOS_MAX: usize = 4096;

/// A link with its peers' epochs.
#[derive(Debug)]
pub(super) struct LinkState {
    pub(super) side: Side,
    pub(super) peers: Vec<u64>,
    deadline: Option<Instant>,
}

impl LinkState {
    /// When the handshake is given up; `None` once the link is up.
    pub(super) fn deadline(&self) -> Option<Instant> {
        self.deadline
    }
}

impl LinkId {
    /// A link is one call of `connect`.
    fn call(self) -> CallId {
        CallId(u64::from(self.0))
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
            let hello = Hello { call: link.call(), rank, template: peer.template.digest() };
            actions.push(Action::Say { epoch, message: Message::Hello(hello) });
            early.extend(self.early_hellos.remove(&epoch).map(|(_, hello)| (epoch, hello)));
            let name = PeerName { side: other(side), rank: peer.rank };
            self.peers.insert(epoch, PeerState::new(link, name, peer));
        }
        for (epoch, hello) in early {
            actions.extend(self.hello(now, epoch, hello));
        }
        actions.extend(self.connected(link));
        actions
    }

    /// Whether a peer of this epoch is known already, and as whom.
    pub(crate) fn known(&self, epoch: u64) -> Option<PeerName> {
        self.peers.get(&epoch).map(|peer| peer.name)
    }

    /// Removes a link, of which no request may be under way. `None` if there is no such link.
    pub(crate) fn disconnect(&mut self, link: LinkId) -> Option<Vec<Action>> {
        let peers = self.links.remove(&link)?.peers;
        let mut actions = Vec::with_capacity(2 * peers.len());
        for epoch in peers {
            self.peers.remove(&epoch);
            actions.push(Action::Say { epoch, message: Message::Bye(link.call()) });
            actions.push(Action::Forget { epoch });
        }
        Some(actions)
    }

    pub(super) fn hello(&mut self, now: Instant, epoch: u64, hello: Hello) -> Vec<Action> {
        let Some(peer) = self.peers.get_mut(&epoch) else {
            self.keep_early(now, epoch, hello);
            return Vec::new();
        };
        if peer.call.is_some_and(|call| call != hello.call) {
            // The peer starts anew: the link it had is over, and the new one waits for this side to do the same.
            self.keep_early(now, epoch, hello);
            return self.lost(epoch, Status::ERR_CONNECTION_RESET);
        }
        if hello.rank != peer.peer.rank || hello.template != peer.peer.template.digest() {
            let (link, peer) = (peer.link, peer.name);
            return self.not_connected(link, ConnectError::PlansDiffer { peer });
        }
        peer.call = Some(hello.call);
        vec![Action::Say { epoch, message: Message::Welcome(hello.call) }]
    }

    pub(super) fn welcome(&mut self, epoch: u64, call: CallId) -> Vec<Action> {
        let Some(peer) = self.peers.get_mut(&epoch) else { return Vec::new() };
        let link = peer.link;
        if call != link.call() {
            return Vec::new(); // to an earlier call
        }
        peer.welcomed = true;
        self.connected(link).into_iter().collect()
    }

    pub(super) fn bye(&mut self, epoch: u64, call: CallId) -> Vec<Action> {
        if self.early_hellos.get(&epoch).is_some_and(|(_, hello)| hello.call == call) {
            self.early_hellos.remove(&epoch);
        }
        match self.peers.get(&epoch) {
            Some(peer) if peer.call == Some(call) => self.lost(epoch, Status::ERR_CONNECTION_RESET),
            _ => Vec::new(),
        }
    }

    /// Keeps the latest greeting of a peer for as long as that may still be waiting.
    fn keep_early(&mut self, now: Instant, epoch: u64, hello: Hello) {
        let patience = self.patience;
        self.early_hellos.retain(|_, (heard, _)| *heard + patience > now);
        self.early_hellos.insert(epoch, (now, hello));
        if self.early_hellos.len() > EARLY_HELLOS_MAX {
            let oldest = self.early_hellos.iter().min_by_key(|(_, (heard, _))| *heard).map(|(epoch, _)| *epoch);
            oldest.map(|epoch| self.early_hellos.remove(&epoch));
        }
    }

    /// Completes the handshake if every peer has welcomed this side.
    fn connected(&mut self, link: LinkId) -> Option<Action> {
        let state = self.links.get_mut(&link)?;
        let complete = state.peers.iter().all(|epoch| self.peers.get(epoch).is_some_and(|peer| peer.welcomed));
        (complete && state.deadline.take().is_some()).then_some(Action::Connected { link })
    }

    /// Forgets a link whose handshake failed. A link that is up stays, whatever its peers say now.
    fn not_connected(&mut self, link: LinkId, error: ConnectError) -> Vec<Action> {
        if self.links.get(&link).is_none_or(|link| link.deadline.is_none()) {
            return Vec::new();
        }
        let mut actions = self.disconnect(link).unwrap_or_default();
        actions.push(Action::NotConnected { link, error });
        actions
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
            if let Some(peer) = peers.filter(|peer| !peer.welcomed).map(|peer| peer.name).next() {
                actions.extend(self.not_connected(link, ConnectError::NoAnswer { peer, waited: self.patience }));
            }
        }
        actions
    }
}
