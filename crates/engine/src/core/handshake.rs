//! How a link comes up, and how it goes.
//!
//! Each rank says `Hello` to each of its peers, with a number for the call and the digest of what it matched. A rank that
//! has a link to the speaker, made or being made, answers `Welcome` with that number. A peer is up when it has welcomed this
//! very call and has greeted itself: a greeting alone proves only that it once asked. A link that is given up says `Bye`.
//!
//! Numbers of calls grow. A `Hello` of a later call than the one a peer was known by says that it starts anew: what was under
//! way with it is over, and it is greeted anew in turn, unless the `Hello` is itself the answer to the greeting that was said
//! last: whoever answers one has ended what was under way. A `Hello`
//! from an epoch that nobody knows, of a rank that a link has, is a peer's next life.

use std::collections::BTreeMap;
use std::time::Instant;

use kvferry_match::Side;
use kvferry_wire::Status;

use super::peers::{Line, PeerState};
use super::timers::Subject;
use super::{Action, Core, Introduction, LinkId, Peer, Resend, other, say};
use crate::error::{ConnectError, PeerName};
use crate::message::{Bye, CallId, Hello, Message, RequestKey, Welcome};

/// Greetings kept of peers that this side has not been told to connect to yet. Beyond that the oldest goes.
pub(super) const EARLY_HELLOS_MAX: usize = 4096;

/// Next lives of peers that are being connected to at a time.
const INTRODUCING_MAX: usize = 64;

/// A link with its peers' epochs.
#[derive(Debug)]
pub(super) struct LinkState {
    pub(super) side: Side,
    /// This engine's rank.
    rank: u32,
    pub(super) peers: Vec<u64>,
    deadline: Option<Instant>,
}

impl LinkState {
    /// When the handshake is given up; `None` once the link is up.
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
        let deadline = now + self.limits.patience;
        let state = LinkState { side, rank, peers: peers.keys().copied().collect(), deadline: Some(deadline) };
        self.links.insert(link, state);
        self.timers.set(Subject::Link(link), Some(deadline));
        let resend = Resend::new(now, &self.limits);
        let mut early = Vec::new();
        for (epoch, peer) in peers {
            let name = PeerName { side: other(side), rank: peer.rank };
            let own_call = CallId(self.next_call);
            self.next_call += 1;
            self.take_up(epoch, PeerState::new(link, name, peer, own_call, resend));
            self.timers.set(Subject::Peer(epoch), Some(resend.due));
            actions.extend(self.greet(epoch));
            early.extend(self.early_hellos.remove(&epoch).map(|(_, hello)| (epoch, hello)));
        }
        for (epoch, hello) in early {
            actions.extend(self.hello(now, epoch, hello));
        }
        actions.extend(self.connected(link));
        actions
    }

    /// Whether a peer of this epoch has a link already, and as whom.
    pub(crate) fn known(&self, epoch: u64) -> Option<PeerName> {
        self.peers.get(&epoch).filter(|peer| !matches!(peer.line, Line::Gone)).map(|peer| peer.name)
    }

    /// A request of the link that has not ended, or that reads slots here.
    pub(crate) fn under_way(&self, link: LinkId) -> Option<RequestKey> {
        let mut receives = self.receives.iter().filter(|(_, receive)| !receive.ended && receive.uses(link));
        let mut sends = self.sends.iter().filter(|(ticket, send)| ticket.link == link && send.is_busy());
        receives.next().map(|(key, _)| *key).or_else(|| sends.next().map(|(ticket, _)| ticket.key))
    }

    /// Removes a link, of which no request may be under way. `None` if there is no such link.
    pub(crate) fn disconnect(&mut self, now: Instant, link: LinkId) -> Option<Vec<Action>> {
        let peers = self.links.remove(&link)?.peers;
        self.timers.set(Subject::Link(link), None);
        let mut actions = Vec::with_capacity(2 * peers.len());
        for epoch in peers {
            if let Some(peer) = self.peers.get(&epoch) {
                actions.push(self.goodbye(epoch, peer.own_call, true));
            }
            actions.extend(self.retire(now, epoch));
        }
        Some(actions)
    }

    /// Says hello to a peer.
    pub(super) fn greet(&self, epoch: u64) -> Vec<Action> {
        let Some(peer) = self.peers.get(&epoch) else { return Vec::new() };
        let Some(link) = self.links.get(&peer.link) else { return Vec::new() };
        let Introduction { instance, born, card, .. } = self.introduction.clone();
        let hello = Hello {
            call: peer.own_call,
            answers: peer.answers,
            source: link.side == Side::Source,
            instance,
            rank: link.rank,
            born,
            template: peer.peer.template.digest(),
            card,
        };
        vec![say(epoch, Message::Hello(hello))]
    }

    pub(super) fn hello(&mut self, now: Instant, epoch: u64, hello: Hello) -> Vec<Action> {
        let resend = Resend::new(now, &self.limits);
        let Some(peer) = self.peers.get_mut(&epoch).filter(|peer| !matches!(peer.line, Line::Gone)) else {
            return self.stranger(now, epoch, hello);
        };
        if peer.call.is_some_and(|call| hello.call < call) {
            return Vec::new(); // overtaken by a later one
        }
        if hello.rank != peer.peer.rank || hello.template != peer.peer.template.digest() {
            let (link, peer) = (peer.link, peer.name);
            return self.not_connected(now, link, ConnectError::PlansDiffer { peer });
        }
        let (link, own_call) = (peer.link, peer.own_call);
        let anew = peer.call.replace(hello.call).is_some_and(|call| call != hello.call);
        let mut actions = Vec::new();
        match peer.line {
            Line::Up if anew && hello.answers != Some(own_call) => {
                peer.line = Line::Greeting { resend };
                (peer.own_call, peer.answers) = (CallId(self.next_call), Some(hello.call));
                self.next_call += 1;
                self.timers.set(Subject::Peer(epoch), Some(resend.due));
                actions = self.end_session(now, epoch, Status::ERR_CONNECTION_RESET);
                actions.extend(self.greet(epoch));
            }
            // There is no way to answer: it is made now, and answers then.
            Line::Down { due: Some(_) } | Line::Left => {
                peer.line = Line::Down { due: None };
                peer.answers = Some(hello.call);
                self.timers.set(Subject::Peer(epoch), None);
                return vec![Action::Dial { epoch }];
            }
            _ => {}
        }
        actions.push(self.answer(epoch, hello.call));
        actions.extend(self.came_up(now, epoch));
        actions.extend(self.connected(link));
        actions
    }

    /// A greeting from an epoch that nobody here knows: of a peer's next life, or of one to be connected to later.
    fn stranger(&mut self, now: Instant, epoch: u64, hello: Hello) -> Vec<Action> {
        let side = if hello.source { Side::Source } else { Side::Destination };
        let known = |peer: &u64| {
            let peer = self.peers.get(peer);
            peer.is_some_and(|peer| peer.peer.rank == hello.rank && peer.peer.instance == hello.instance)
        };
        let mut links = self.links.iter().filter(|(_, state)| state.side == other(side));
        let place = links.find_map(|(link, state)| Some((*link, *state.peers.iter().find(|peer| known(peer))?)));
        match place {
            // An earlier life, whose greeting comes late, does not take the place of the one that followed it. Clocks may
            // differ from host to host, so one that is dead, or does not answer, is followed by any.
            Some((_, known)) if !self.peers[&known].is_followed_by(hello.born, self.limits.resend) => Vec::new(),
            Some((link, old)) if !hello.card.is_empty() => {
                if self.introducing.len() >= INTRODUCING_MAX || !self.introducing.insert(epoch) {
                    return Vec::new();
                }
                vec![Action::Introduce { link, old, epoch, hello: Box::new(hello) }]
            }
            _ => {
                self.keep_early(now, epoch, hello);
                Vec::new()
            }
        }
    }

    /// Welcomes a peer's call.
    pub(super) fn answer(&self, epoch: u64, call: CallId) -> Action {
        say(epoch, Message::Welcome(Welcome { call, floor: self.next_serial }))
    }

    pub(super) fn welcome(&mut self, now: Instant, epoch: u64, Welcome { call, floor }: Welcome) -> Vec<Action> {
        let Some(peer) = self.peers.get_mut(&epoch) else { return Vec::new() };
        let Line::Greeting { .. } = peer.line else { return Vec::new() };
        if call != peer.own_call {
            return Vec::new(); // to an earlier call
        }
        let link = peer.link;
        // What the peer wanted before it heard this call is over, however late it comes; what it wants from now on is not below.
        peer.destination.floor = peer.destination.floor.max(floor);
        peer.line = Line::Up;
        peer.dial_wait = self.limits.resend;
        self.timers.set(Subject::Peer(epoch), None);
        let mut actions = self.came_up(now, epoch);
        actions.extend(self.connected(link));
        actions
    }

    /// Repeats to a peer that can hear again what it has not answered.
    fn came_up(&mut self, now: Instant, epoch: u64) -> Vec<Action> {
        match self.peers.get(&epoch) {
            Some(peer) if peer.is_up() => self.cancel_again(now, epoch),
            _ => Vec::new(),
        }
    }

    /// Takes leave of a peer. `stopped`: nothing is written to it any more.
    pub(super) fn goodbye(&self, epoch: u64, call: CallId, stopped: bool) -> Action {
        say(epoch, Message::Bye(Bye { call, settled: stopped && self.all_settled(epoch) }))
    }

    pub(super) fn bye(&mut self, now: Instant, epoch: u64, Bye { call, settled }: Bye) -> Vec<Action> {
        if self.early_hellos.get(&epoch).is_some_and(|(_, hello)| hello.call == call) {
            self.early_hellos.remove(&epoch);
        }
        let Some(peer) = self.peers.get_mut(&epoch).filter(|peer| peer.call == Some(call)) else { return Vec::new() };
        let (link, name) = (peer.link, peer.name);
        if !matches!(peer.line, Line::Gone) {
            peer.line = Line::Left;
            self.timers.set(Subject::Peer(epoch), None);
        }
        let status = Status::ERR_CONNECTION_RESET;
        let given_up = self.lost_while_connecting(now, link, name, status);
        let mut actions = given_up.unwrap_or_else(|| self.end_session(now, epoch, status));
        // Whoever leaves has no request under way, and will not begin one of the link that it has forgotten.
        if settled {
            actions.extend(self.source_silenced(epoch));
        }
        actions
    }

    /// Keeps the latest greeting of a peer for as long as that may still be waiting.
    fn keep_early(&mut self, now: Instant, epoch: u64, hello: Hello) {
        let patience = self.limits.patience;
        self.early_hellos.retain(|_, (heard, _)| *heard + patience > now);
        self.early_hellos.insert(epoch, (now, hello));
        if self.early_hellos.len() > EARLY_HELLOS_MAX {
            let oldest = self.early_hellos.iter().min_by_key(|(_, (heard, _))| *heard).map(|(epoch, _)| *epoch);
            oldest.map(|epoch| self.early_hellos.remove(&epoch));
        }
    }

    /// Completes the handshake if every peer is up.
    fn connected(&mut self, link: LinkId) -> Option<Action> {
        let state = self.links.get_mut(&link)?;
        let complete = state.peers.iter().all(|epoch| self.peers.get(epoch).is_some_and(PeerState::is_up));
        (complete && state.deadline.take().is_some()).then(|| {
            self.timers.set(Subject::Link(link), None);
            Action::Connected { link }
        })
    }

    /// Forgets a link whose handshake failed. A link that is up stays, whatever its peers say now.
    pub(super) fn not_connected(&mut self, now: Instant, link: LinkId, error: ConnectError) -> Vec<Action> {
        if self.links.get(&link).is_none_or(|link| link.deadline.is_none()) {
            return Vec::new();
        }
        // No request was posted on it, but a peer may have something from an earlier link.
        let mut actions = self.disconnect(now, link).unwrap_or_default();
        actions.push(Action::NotConnected { link, error });
        actions
    }

    pub(super) fn link_due(&mut self, now: Instant, link: LinkId) -> Vec<Action> {
        let Some(state) = self.links.get(&link).filter(|link| link.deadline.is_some()) else { return Vec::new() };
        let peers = state.peers.iter().filter_map(|epoch| self.peers.get(epoch));
        let silent = peers.filter(|peer| !peer.is_up()).map(|peer| peer.name).next();
        let waited = self.limits.patience;
        silent.map_or_else(Vec::new, |peer| self.not_connected(now, link, ConnectError::NoAnswer { peer, waited }))
    }
}
