//! The protocol of requests, as a state machine: what was said and what happened goes in with the time, what to do comes
//! out. It sends nothing, reads no clock and starts no thread, so a test can play any order of events to it.
//!
//! A request has two states that are never mixed. Logically it ends once, as soon as its fate is known. Physically it is
//! over when nobody can touch its slots any more: then, and not before, it is *quiet*. What may still be written and by whom
//! is kept a source at a time; a source is done with a want when it has reported, or has said that it stopped, or is dead.

mod exposure;
mod handshake;
mod outgoing;
mod peers;
mod receiving;
mod recent;
mod sending;
#[cfg(test)]
mod simulation;
#[cfg(test)]
mod tests;
mod timers;
mod wanting;
mod writing;

use std::collections::{BTreeMap, BTreeSet};
use std::time::{Duration, Instant};

use kvferry_match::{Assignment, Plan, Side, Template};

use crate::error::{ConnectError, PartError, PeerName, Phase, PostError, RequestError, TransferError};
use crate::message::{Hello, Late, Message, PartCheck, Refusal, RequestKey, Serial};
use crate::report::{Received, Sent};
use handshake::LinkState;
use peers::PeerState;
use receiving::Receiving;
use sending::Sending;
use timers::{Subject, Timers};

pub(crate) use exposure::Quarantined;
pub(crate) use recent::Recent;
pub use sending::PartSpec;
#[cfg(test)]
pub(crate) use sending::{NOTE_BYTES_MAX, PARTS_MAX};

/// One pair of instances that this engine is a rank of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct LinkId(pub(crate) u32);

/// One write of a part of a plan.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct PutId(pub(crate) u64);

/// A send: a request on a link.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) struct Ticket {
    pub(crate) link: LinkId,
    pub(crate) key: RequestKey,
}

/// What the caller has a handle of.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub(crate) enum Handle {
    Send(Ticket),
    Receive(RequestKey),
}

impl Handle {
    pub(crate) fn key(self) -> RequestKey {
        match self {
            Self::Send(ticket) => ticket.key,
            Self::Receive(key) => key,
        }
    }
}

/// What does not change while the state machine lives.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Limits {
    /// How long a peer may be silent before what waits for it fails.
    pub(crate) patience: Duration,
    /// How long an answer is waited for before the question is put again; twice as long each time.
    pub(crate) resend: Duration,
    /// Receives, and sends, that may be under way or not yet quiet.
    pub(crate) requests_max: usize,
    /// Sums are made of what is sent, and checked where it arrives.
    pub(crate) verify: bool,
}

/// The longest wait between two sayings of the same thing, and between two tries to reach a peer.
const RESEND_MAX: Duration = Duration::from_secs(5);

/// A rank of the other instance that this rank exchanges bytes with. Peers are named by their epoch.
#[derive(Clone, Debug)]
pub(crate) struct Peer {
    /// Name of its instance.
    pub(crate) instance: String,
    pub(crate) rank: u32,
    /// When this life of it began, in microseconds by its clock.
    pub(crate) born: u64,
    pub(crate) rows: u64,
    pub(crate) template: Template,
    /// What the template was made of, and the source rank in it: for templates of some layers.
    pub(crate) assignment: Option<(Assignment, u32)>,
}

/// Who an engine is, for peers that know an earlier life of it.
#[derive(Clone, Debug, Default)]
pub(crate) struct Introduction {
    /// Name of its instance.
    pub(crate) instance: String,
    /// When this life of it began, in microseconds by its clock.
    pub(crate) born: u64,
    pub(crate) card: Vec<u8>,
    /// From the first of the model's layers that this rank has to behind the last.
    pub(crate) own_layers: std::ops::Range<u32>,
}

/// What the caller of the state machine must do, in order.
#[derive(Debug)]
pub(crate) enum Action {
    /// Send a message to a peer.
    Say { epoch: u64, message: Message },
    /// Write a plan to a peer, and say something the moment that it has ended well. Ends with one call of
    /// [`Core::put_done`] or [`Core::put_refused`].
    Put {
        ticket: Ticket,
        epoch: u64,
        put: PutId,
        plan: Plan,
        then: Option<Message>,
        /// The want that it serves.
        serial: Serial,
        /// Through the peer's inbox, or not at all: the peer has been told so.
        inbox_only: bool,
    },
    /// Make the checksum of a plan's bytes, and call [`Core::summed`].
    Sum { put: PutId, plan: Plan },
    /// Compare what has arrived from a peer with its sums, and call [`Core::verified`].
    Verify { epoch: u64, key: RequestKey, check: Box<ToVerify> },
    /// End a write early. It ends as every write does.
    CancelPut { put: PutId },
    /// Let writes of a peer's for a want in through the inbox. Comes before the want is said.
    Permit { epoch: u64, serial: Serial },
    /// Nothing of a want is written any more: let nothing in.
    Expire { epoch: u64, serial: Serial },
    /// Let nothing of a want in through the inbox from now on, whatever its peer does, and call [`Core::revoked`] when nothing of
    /// it is written from there any more.
    Revoke { epoch: u64, serial: Serial },
    /// Make a new connection to a peer whose old one has failed, and call [`Core::dialed`] or [`Core::lost`].
    Dial { epoch: u64 },
    /// Somebody claims to be a peer's next life. If the card holds, connect to it and call [`Core::replace`]; call
    /// [`Core::not_replaced`] otherwise.
    Introduce { link: LinkId, old: u64, epoch: u64, hello: Box<Hello> },
    /// Cut the connection to a peer that is known no more.
    Forget { epoch: u64 },
    /// A link is up.
    Connected { link: LinkId },
    /// A link did not come up. Its peers are forgotten.
    NotConnected { link: LinkId, error: ConnectError },
    /// More of a request has moved, over all peers.
    Progress { handle: Handle, moved: u64 },
    /// A send has ended.
    Sent { ticket: Ticket, outcome: Result<Vec<Sent>, RequestError> },
    /// A receive has ended.
    Received { key: RequestKey, outcome: Result<Vec<Received>, RequestError> },
    /// The request has ended, and nobody touches its slots any more.
    Quiet { handle: Handle },
}

/// What a checksum is compared with.
#[derive(Debug)]
pub(crate) struct ToVerify {
    pub(crate) serial: Serial,
    pub(crate) tokens: std::ops::Range<u64>,
    pub(crate) bytes: u64,
    pub(crate) block_maps: std::sync::Arc<[kvferry_match::BlockMap]>,
    pub(crate) checks: Vec<PartCheck>,
}

/// The state machine.
#[derive(Debug)]
pub(crate) struct Core {
    limits: Limits,
    introduction: Introduction,
    links: BTreeMap<LinkId, LinkState>,
    /// By epoch.
    peers: BTreeMap<u64, PeerState>,
    receives: BTreeMap<RequestKey, Receiving>,
    sends: BTreeMap<Ticket, Sending>,
    /// Requests that are over, and how: as many as may be under way.
    received: Recent<RequestKey, ()>,
    sent: Recent<Ticket, Refusal>,
    /// Wants that have been revoked, and whose end the wire has yet to say.
    revoking: BTreeMap<(u64, Serial), RequestKey>,
    /// Writes in flight.
    puts: BTreeMap<PutId, (Ticket, u64)>,
    /// Greetings of peers that this side has not been told to connect to yet, by epoch, and when they were heard.
    early_hellos: BTreeMap<u64, (Instant, Hello)>,
    /// Epochs that are being introduced.
    introducing: BTreeSet<u64>,
    /// Wants of lives of peers for which something may be on its way still, and lives of which not all of those are known.
    unsettled: Recent<(u64, Serial), Late>,
    doubtful: Recent<u64, ()>,
    timers: Timers,
    /// Messages that were said again because they had not been answered.
    resent: u64,
    next_put: u64,
    next_serial: u64,
    next_call: u64,
}

impl Core {
    pub(crate) fn new(limits: Limits) -> Self {
        Self {
            limits,
            introduction: Introduction::default(),
            links: BTreeMap::new(),
            peers: BTreeMap::new(),
            receives: BTreeMap::new(),
            sends: BTreeMap::new(),
            received: Recent::of(limits.requests_max),
            sent: Recent::of(limits.requests_max),
            revoking: BTreeMap::new(),
            puts: BTreeMap::new(),
            early_hellos: BTreeMap::new(),
            introducing: BTreeSet::new(),
            unsettled: Recent::default(),
            doubtful: Recent::default(),
            timers: Timers::default(),
            resent: 0,
            next_put: 0,
            next_serial: 0,
            next_call: 0,
        }
    }

    /// Says who this engine is.
    pub(crate) fn introduce(&mut self, introduction: Introduction) {
        self.introduction = introduction;
    }

    /// A message has arrived.
    pub(crate) fn heard(&mut self, now: Instant, epoch: u64, message: Message) -> Vec<Action> {
        match message {
            Message::Hello(hello) => self.hello(now, epoch, hello),
            Message::Welcome(welcome) => self.welcome(now, epoch, welcome),
            Message::Bye(bye) => self.bye(now, epoch, bye),
            Message::Want(want) => self.want(now, epoch, want),
            Message::Got(about) => self.got(now, epoch, about),
            Message::Moved(moved) => self.moved(now, epoch, moved),
            Message::Done(done) => self.done(now, epoch, done),
            Message::DoneAck(about) => self.done_acked(now, epoch, about),
            Message::Refused(refused) => self.refused(now, epoch, refused),
            Message::Cancel(about) => self.want_cancelled(now, epoch, about),
            Message::Stopped(stopped) => self.stopped(now, epoch, stopped),
            Message::StopAck(about) => self.stop_acked(now, epoch, about),
            Message::Announce(key) => self.announced(now, epoch, key),
            Message::Release(key) => self.released(now, epoch, key),
        }
    }

    /// When [`Core::tick`] is due.
    pub(crate) fn next_deadline(&self) -> Option<Instant> {
        self.timers.next()
    }

    /// Does what is due: says again what has not been answered, ends what has waited too long.
    pub(crate) fn tick(&mut self, now: Instant) -> Vec<Action> {
        let mut actions = Vec::new();
        while let Some(subject) = self.timers.pop(now) {
            actions.extend(match subject {
                Subject::Link(link) => self.link_due(now, link),
                Subject::Peer(epoch) => self.peer_due(now, epoch),
                Subject::Choice(key) => self.choice_due(now, key),
                Subject::Incoming(key, epoch) => self.incoming_due(now, key, epoch),
                Subject::Outgoing(ticket, epoch) => self.outgoing_due(now, ticket, epoch),
            });
        }
        actions
    }

    /// Messages that were said again because they had not been answered.
    pub(crate) fn resent(&self) -> u64 {
        self.resent
    }

    /// Ends everything: the engine goes away. It says goodbye where it has nothing in flight. Writes that have begun may go on
    /// for a while, so it goes on to answer for them as long as it hears, and says when they have ended.
    pub(crate) fn stop(&mut self, now: Instant) -> Vec<Action> {
        let mut actions = Vec::new();
        let links = std::mem::take(&mut self.links);
        for (link, state) in &links {
            let writing = self.sends.iter().any(|(ticket, send)| ticket.link == *link && send.is_writing());
            let peers = state.peers.iter().filter_map(|epoch| Some((*epoch, self.peers.get(epoch)?)));
            let goodbye = peers.map(|(epoch, peer)| self.goodbye(epoch, peer.own_call, !writing));
            actions.extend(goodbye);
        }
        let links = links.into_iter().filter(|(_, link)| link.deadline().is_some());
        actions.extend(links.map(|(link, _)| Action::NotConnected { link, error: ConnectError::Stopped }));
        let stopped = || vec![PartError::own(Phase::Waiting, TransferError::Stopped)];
        let receives = std::mem::take(&mut self.receives).into_iter().filter(|(_, receive)| !receive.ended);
        let failed = |key| Err(RequestError { key, errors: stopped() });
        actions.extend(receives.map(|(key, _)| Action::Received { key, outcome: failed(key) }));
        for ticket in self.sends.keys().copied().collect::<Vec<_>>() {
            actions.extend(self.fail_send(now, ticket, stopped(), Refusal::Failed));
        }
        self.timers = Timers::default();
        actions
    }

    /// The peers of a link, if this engine is on the right side of it, it is open and all of them can be spoken to.
    fn peers_for(&self, link: LinkId, side: Side) -> Result<Vec<u64>, PostError> {
        let link = self.links.get(&link).filter(|link| link.deadline().is_none()).ok_or(PostError::NoLink)?;
        if link.side != side {
            return Err(PostError::OtherSide);
        }
        let lost = link.peers.iter().filter_map(|epoch| self.peers.get(epoch)).find(|peer| !peer.is_up());
        match lost {
            Some(peer) => Err(PostError::Lost(peer.name)),
            None => Ok(link.peers.clone()),
        }
    }

    /// The peers of a link.
    pub(crate) fn members(&self, link: LinkId) -> Vec<(u64, PeerName)> {
        let members = self.links.get(&link).map(|state| &state.peers[..]).unwrap_or_default();
        members.iter().filter_map(|epoch| Some((*epoch, self.peers.get(epoch)?.name))).collect()
    }

    /// Which side of the link to a peer this engine is.
    pub(crate) fn side_to(&self, epoch: u64) -> Option<Side> {
        self.peers.get(&epoch).map(|peer| other(peer.name.side))
    }

    /// The link to a peer, and what the two were matched to.
    pub(crate) fn matched(&self, epoch: u64) -> Option<(LinkId, Peer)> {
        self.peers.get(&epoch).map(|state| (state.link, state.peer.clone()))
    }

    /// Whether a write of this side has begun that has not ended, or is about to.
    pub(crate) fn is_writing(&self) -> bool {
        !self.puts.is_empty()
    }

    /// The peer, if it is on the given side.
    fn peer_on(&mut self, epoch: u64, side: Side) -> Option<&mut PeerState> {
        self.peers.get_mut(&epoch).filter(|peer| peer.name.side == side)
    }
}

/// The side that is not `side`.
pub(crate) fn other(side: Side) -> Side {
    match side {
        Side::Source => Side::Destination,
        Side::Destination => Side::Source,
    }
}

fn say(epoch: u64, message: Message) -> Action {
    Action::Say { epoch, message }
}

/// A question that is put again until it is answered, less and less often.
#[derive(Clone, Copy, Debug)]
struct Resend {
    due: Instant,
    wait: Duration,
}

impl Resend {
    /// Of something that has just been said.
    fn new(now: Instant, limits: &Limits) -> Self {
        Self::after(now, limits.resend)
    }

    fn after(now: Instant, wait: Duration) -> Self {
        Self { due: now + wait, wait }
    }

    /// Whether it is time to say it again; then the next time is later.
    fn is_due(&mut self, now: Instant) -> bool {
        let due = self.due <= now;
        if due {
            self.wait = (2 * self.wait).min(RESEND_MAX);
            self.due = now + self.wait;
        }
        due
    }
}
