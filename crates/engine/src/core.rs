//! The protocol of requests, as a state machine: what was said and what happened goes in with the time, what to do comes
//! out. It sends nothing, reads no clock and starts no thread, so a test can play any order of events to it.
//!
//! A request ends on a side when each of its peers has ended there. A source therefore has no write of an ended request in
//! flight: its slots are its own again.

mod handshake;
mod receiving;
mod sending;
#[cfg(test)]
mod tests;

use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use kvferry_match::{Plan, Side, Template};
use kvferry_wire::Status;

use crate::error::{ConnectError, PeerName, PostError, RequestError, TransferError};
use crate::message::{CallId, Hello, Message, Refusal, Refused, RequestKey, Want};
use crate::report::{Received, Sent};
use handshake::LinkState;
use receiving::Receiving;
use sending::Sending;

/// One pair of instances that this engine is a rank of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct LinkId(pub(crate) u32);

/// One write of a plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct PutId(pub(crate) u64);

/// A request on a link. An engine is one side of a link, so this names a send or a receive.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Ticket {
    pub(crate) link: LinkId,
    pub(crate) key: RequestKey,
}

/// A rank of the other instance that this rank exchanges bytes with. Peers are named by their epoch.
#[derive(Clone, Debug)]
pub(crate) struct Peer {
    pub(crate) rank: u32,
    pub(crate) rows: u64,
    pub(crate) template: Template,
}

/// What the caller of the state machine must do, in order.
#[derive(Debug)]
pub(crate) enum Action {
    /// Send a message to a peer.
    Say { epoch: u64, message: Message },
    /// Write a plan to a peer. Ends with one call of [`Core::put_done`] or [`Core::put_refused`].
    Put { epoch: u64, put: PutId, plan: Plan },
    /// Cut the connection to a peer, so that its writes end. The peer stays known, as lost.
    Cut { epoch: u64 },
    /// Cut the connection to a peer that is known no more.
    Forget { epoch: u64 },
    /// A link is up.
    Connected { link: LinkId },
    /// A link did not come up. Its peers are forgotten.
    NotConnected { link: LinkId, error: ConnectError },
    /// More of a request has moved, over all peers.
    Progress { ticket: Ticket, moved: u64 },
    /// A send has ended.
    Sent { ticket: Ticket, outcome: Result<Vec<Sent>, RequestError> },
    /// A receive has ended.
    Received { ticket: Ticket, outcome: Result<Vec<Received>, RequestError> },
}

/// The state machine.
#[derive(Debug)]
pub(crate) struct Core {
    /// How long a peer may be silent before what waits for it fails.
    patience: Duration,
    links: BTreeMap<LinkId, LinkState>,
    /// By epoch.
    peers: BTreeMap<u64, PeerState>,
    /// With the part of each source, by epoch.
    receives: BTreeMap<Ticket, BTreeMap<u64, Receiving>>,
    sends: BTreeMap<Ticket, Sending>,
    /// Writes in flight.
    puts: BTreeMap<PutId, (Ticket, u64)>,
    /// Greetings of peers that this side has not been told to connect to yet, by epoch, and when they were heard.
    early_hellos: BTreeMap<u64, (Instant, Hello)>,
    next_put: u64,
}

#[derive(Debug)]
struct PeerState {
    link: LinkId,
    name: PeerName,
    peer: Peer,
    /// The peer's call that its side of the link was made with, once it has said so.
    call: Option<CallId>,
    /// The peer has a link for this side's call.
    welcomed: bool,
    lost: Option<Status>,
    /// Receives that the peer has posted and this side has not sent yet.
    wants: BTreeMap<RequestKey, Want>,
}

impl PeerState {
    fn new(link: LinkId, name: PeerName, peer: Peer) -> Self {
        Self { link, name, peer, call: None, welcomed: false, lost: None, wants: BTreeMap::new() }
    }
}

impl Core {
    pub(crate) fn new(patience: Duration) -> Self {
        Self {
            patience,
            links: BTreeMap::new(),
            peers: BTreeMap::new(),
            receives: BTreeMap::new(),
            sends: BTreeMap::new(),
            puts: BTreeMap::new(),
            early_hellos: BTreeMap::new(),
            next_put: 0,
        }
    }

    /// A message has arrived.
    pub(crate) fn heard(&mut self, now: Instant, epoch: u64, message: Message) -> Vec<Action> {
        match message {
            Message::Hello(hello) => self.hello(now, epoch, hello),
            Message::Welcome(call) => self.welcome(epoch, call),
            Message::Bye(call) => self.bye(epoch, call),
            Message::Want(want) => self.want(now, epoch, want),
            Message::Moved(moved) => self.moved(now, epoch, moved),
            Message::Done(done) => self.done(now, epoch, done),
            Message::DoneAck(key) => self.acked(epoch, key),
            Message::Refused(Refused { key, reason }) => match self.peers.get(&epoch).map(|peer| peer.name.side) {
                Some(Side::Source) => self.refused_by_source(epoch, key, reason),
                Some(Side::Destination) => self.refused_by_destination(epoch, key, reason),
                None => Vec::new(),
            },
        }
    }

    /// The connection to a peer has failed or was cut. Writes in flight end by themselves.
    pub(crate) fn lost(&mut self, epoch: u64, status: Status) -> Vec<Action> {
        let Some(peer) = self.peers.get_mut(&epoch) else { return Vec::new() };
        let (link, name) = (peer.link, peer.name);
        peer.lost.get_or_insert(status);
        peer.wants.clear();
        if let Some(actions) = self.lost_while_connecting(link, name, status) {
            return actions;
        }
        let mut actions = self.lose_source(epoch, name, status);
        actions.extend(self.lose_destination(epoch, name, status));
        actions
    }

    /// When [`Core::tick`] is due.
    pub(crate) fn next_deadline(&self) -> Option<Instant> {
        let links = self.links.values().filter_map(LinkState::deadline);
        let receives = self.receives.values().flat_map(|parts| parts.values()).filter_map(Receiving::waits_since);
        let sends = self.sends.values().flat_map(Sending::waits_since);
        links.chain(receives.chain(sends).map(|since| since + self.patience)).min()
    }

    /// Ends what has waited too long.
    pub(crate) fn tick(&mut self, now: Instant) -> Vec<Action> {
        let mut actions = self.tick_links(now);
        actions.extend(self.tick_receives(now));
        actions.extend(self.tick_sends(now));
        actions
    }

    /// Ends everything: the engine goes away.
    pub(crate) fn stop(&mut self) -> Vec<Action> {
        let links = std::mem::take(&mut self.links).into_iter().filter(|(_, link)| link.deadline().is_some());
        let links = links.map(|(link, _)| Action::NotConnected { link, error: ConnectError::Stopped });
        let receives = std::mem::take(&mut self.receives).into_keys();
        let receives = receives
            .map(|ticket| Action::Received { ticket, outcome: Err(RequestError::from(TransferError::Stopped)) });
        let sends = std::mem::take(&mut self.sends).into_keys();
        let sends =
            sends.map(|ticket| Action::Sent { ticket, outcome: Err(RequestError::from(TransferError::Stopped)) });
        links.chain(receives).chain(sends).collect()
    }

    /// The peers of a request, if this engine is on the right side of an open link and none of them is lost.
    fn peers_for(&self, ticket: Ticket, side: Side) -> Result<Vec<u64>, PostError> {
        let link = self.links.get(&ticket.link).filter(|link| link.deadline().is_none()).ok_or(PostError::NoLink)?;
        if link.side != side {
            return Err(PostError::OtherSide);
        }
        let lost = link.peers.iter().filter_map(|epoch| self.peers.get(epoch)).find(|peer| peer.lost.is_some());
        match lost {
            Some(peer) => Err(PostError::Lost(peer.name)),
            None => Ok(link.peers.clone()),
        }
    }

    /// The request that a peer's message is about, if the peer is on the given side.
    fn ticket(&self, epoch: u64, side: Side, key: RequestKey) -> Option<Ticket> {
        let peer = self.peers.get(&epoch)?;
        (peer.name.side == side).then_some(Ticket { link: peer.link, key })
    }
}

/// The side that is not `side`.
pub(crate) fn other(side: Side) -> Side {
    match side {
        Side::Source => Side::Destination,
        Side::Destination => Side::Source,
    }
}

/// How a request ended, from how its parts did: what moved, or every error, in the order of ranks.
fn outcome<R>(
    parts: impl Iterator<Item = Result<R, TransferError>>,
    rank: impl Fn(&R) -> u32,
) -> Result<Vec<R>, RequestError> {
    let (mut moved, mut errors) = (Vec::new(), Vec::new());
    for part in parts {
        match part {
            Ok(part) => moved.push(part),
            Err(error) => errors.push(error),
        }
    }
    moved.sort_by_key(rank);
    errors.sort_by_key(TransferError::peer);
    if errors.is_empty() { Ok(moved) } else { Err(RequestError { errors }) }
}

fn refusal(epoch: u64, key: RequestKey, reason: Refusal) -> Action {
    Action::Say { epoch, message: Message::Refused(Refused { key, reason }) }
}
