//! A peer and the connection to it: up, failed and tried again, left, dead, or replaced by its next life.

use std::collections::{BTreeMap, BTreeSet};
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvferry_match::{Side, Template};
use kvferry_wire::Status;

use super::recent::Recent;
use super::timers::Subject;
use super::{Action, Core, LinkId, Peer, RESEND_MAX, Resend, Ticket};
use crate::error::{ConnectError, PeerName};
use crate::message::{CallId, Refusal, RequestKey, Serial, Want};

#[derive(Debug)]
pub(super) struct PeerState {
    pub(super) link: LinkId,
    pub(super) name: PeerName,
    pub(super) peer: Peer,
    pub(super) line: Line,
    /// How long a connection that fails next is left alone before it is tried again.
    pub(super) dial_wait: Duration,
    /// This side's call, which the peer has to welcome.
    pub(super) own_call: CallId,
    /// The peer's call that this side's call is the answer to.
    pub(super) answers: Option<CallId>,
    /// The peer's call that its side of the link was made with, once it has said so.
    pub(super) call: Option<CallId>,
    /// Of a source: what is known of it as such.
    pub(super) source: SourceState,
    /// Of a destination: what is known of it as such.
    pub(super) destination: DestinationState,
}

/// How it stands with the connection.
#[derive(Clone, Copy, Debug)]
pub(super) enum Line {
    /// This side's greeting is not welcomed yet.
    Greeting {
        resend: Resend,
    },
    Up,
    /// It has failed, and is tried again at some time. `None` while that is under way.
    Down {
        due: Option<Instant>,
    },
    /// The peer has left in good order. It greets when it comes back.
    Left,
    /// The peer's process has ended.
    Dead,
    /// The peer is no part of its link any more. It is kept while it may touch something here.
    Gone,
}

#[derive(Debug, Default)]
pub(super) struct SourceState {
    /// Sends that the peer has posted and nobody here has received yet, and when it said so last.
    pub(super) announced: BTreeMap<RequestKey, Instant>,
    /// Receives of which the peer has a part that is not over, logically or physically.
    pub(super) receives: BTreeSet<RequestKey>,
    /// What was answered to reports: `None` for well.
    pub(super) verdicts: Recent<Serial, Option<Refusal>>,
}

#[derive(Debug, Default)]
pub(super) struct DestinationState {
    /// Receives that the peer has posted and nobody here has sent yet.
    pub(super) wants: BTreeMap<RequestKey, Arc<Want>>,
    pub(super) wanted_blocks: usize,
    /// Sends of which the peer has a part that is not over.
    pub(super) sends: BTreeSet<Ticket>,
    /// Wants that are over.
    pub(super) finished: Recent<Serial, ()>,
    /// Wants below this one that are not known are over.
    pub(super) floor: u64,
    /// Requests that the peer has given up.
    pub(super) over: Recent<RequestKey, ()>,
    /// Templates of some layers.
    pub(super) layers: BTreeMap<(u32, u32), Template>,
}

impl DestinationState {
    pub(super) fn finish(&mut self, serial: Serial) {
        if let Some(Serial(forgotten)) = self.finished.insert(serial, ()) {
            self.floor = self.floor.max(forgotten + 1);
        }
    }

    /// Whether a want that is not known is an old one.
    pub(super) fn is_finished(&self, serial: Serial) -> bool {
        serial.0 < self.floor || self.finished.get(&serial).is_some()
    }

    pub(super) fn take_want(&mut self, key: &RequestKey) -> Option<Arc<Want>> {
        let want = self.wants.remove(key)?;
        self.wanted_blocks -= blocks(&want);
        Some(want)
    }
}

/// Blocks that a want names.
pub(super) fn blocks(want: &Want) -> usize {
    want.block_maps.iter().map(|map| map.slots().len()).sum()
}

impl PeerState {
    pub(super) fn new(link: LinkId, name: PeerName, peer: Peer, own_call: CallId, resend: Resend) -> Self {
        let line = Line::Greeting { resend };
        let (source, destination) = Default::default();
        Self {
            link,
            name,
            peer,
            line,
            dial_wait: resend.wait,
            own_call,
            answers: None,
            call: None,
            source,
            destination,
        }
    }

    /// Both sides have greeted each other and can be spoken to.
    pub(super) fn is_up(&self) -> bool {
        matches!(self.line, Line::Up) && self.call.is_some()
    }

    /// Whether a life that began at `born` can be the next of this one.
    pub(super) fn is_followed_by(&self, born: u64, resend: Duration) -> bool {
        match self.line {
            Line::Dead => true,
            // It was tried again, in vain.
            Line::Down { .. } if self.dial_wait > 2 * resend => true,
            _ => born > self.peer.born,
        }
    }

    /// A word to it may arrive.
    pub(super) fn can_hear(&self) -> bool {
        matches!(self.line, Line::Greeting { .. } | Line::Up | Line::Gone)
    }
}

impl Core {
    /// The connection to a peer has failed or was cut. Writes in flight end by themselves.
    pub(crate) fn lost(&mut self, now: Instant, epoch: u64, status: Status) -> Vec<Action> {
        let Some(peer) = self.peers.get_mut(&epoch) else { return Vec::new() };
        if let Line::Gone | Line::Dead | Line::Down { due: Some(_) } = peer.line {
            return Vec::new();
        }
        let (link, name, due) = (peer.link, peer.name, now + peer.dial_wait);
        peer.dial_wait = (2 * peer.dial_wait).min(RESEND_MAX);
        peer.line = Line::Down { due: Some(due) };
        peer.answers = None;
        self.timers.set(Subject::Peer(epoch), Some(due));
        if let Some(actions) = self.lost_while_connecting(now, link, name, status) {
            return actions;
        }
        self.end_session(now, epoch, status)
    }

    /// The process of a peer has ended, and nothing of it arrives any more.
    pub(crate) fn died(&mut self, now: Instant, epoch: u64) -> Vec<Action> {
        let Some(peer) = self.peers.get_mut(&epoch) else { return Vec::new() };
        let (link, name) = (peer.link, peer.name);
        if !matches!(peer.line, Line::Gone) {
            peer.line = Line::Dead;
            self.timers.set(Subject::Peer(epoch), None);
        }
        let status = Status::ERR_CONNECTION_RESET;
        let given_up = self.lost_while_connecting(now, link, name, status);
        let mut actions = given_up.unwrap_or_else(|| self.end_session(now, epoch, status));
        actions.extend(self.source_silenced(epoch));
        actions
    }

    /// A new connection to a peer has been made.
    pub(crate) fn dialed(&mut self, now: Instant, epoch: u64) -> Vec<Action> {
        let resend = Resend::new(now, &self.limits);
        let Some(peer) = self.peers.get_mut(&epoch) else { return Vec::new() };
        let Line::Down { due: None } = peer.line else { return Vec::new() };
        peer.line = Line::Greeting { resend };
        peer.own_call = CallId(self.next_call);
        self.next_call += 1;
        let mut actions = self.greet(epoch);
        // A greeting that came while there was no way to answer it.
        let peer = &self.peers[&epoch];
        actions.extend(peer.call.map(|call| self.answer(epoch, call)));
        self.timers.set(Subject::Peer(epoch), Some(resend.due));
        actions
    }

    pub(super) fn peer_due(&mut self, now: Instant, epoch: u64) -> Vec<Action> {
        let Some(peer) = self.peers.get_mut(&epoch) else { return Vec::new() };
        match &mut peer.line {
            Line::Greeting { resend } => {
                let said = resend.is_due(now);
                self.timers.set(Subject::Peer(epoch), Some(resend.due));
                self.resent += u64::from(said);
                if said { self.greet(epoch) } else { Vec::new() }
            }
            Line::Down { due } => match due.take() {
                Some(_) => vec![Action::Dial { epoch }],
                None => Vec::new(),
            },
            Line::Up | Line::Left | Line::Dead | Line::Gone => Vec::new(),
        }
    }

    /// Ends the requests of a peer that forgets them, or has forgotten them.
    pub(super) fn end_session(&mut self, now: Instant, epoch: u64, status: Status) -> Vec<Action> {
        let Some(peer) = self.peers.get_mut(&epoch) else { return Vec::new() };
        match peer.name.side {
            Side::Source => {
                peer.source.announced.clear();
                self.lose_source(now, epoch, status)
            }
            Side::Destination => {
                let wants = std::mem::take(&mut peer.destination.wants);
                peer.destination.wanted_blocks = 0;
                for want in wants.into_values() {
                    peer.destination.finish(want.about.serial);
                }
                self.lose_destination(now, epoch, status)
            }
        }
    }

    /// Takes a peer out of its link: by its next life, or with the link. It is forgotten once it touches nothing here.
    pub(super) fn retire(&mut self, now: Instant, epoch: u64) -> Vec<Action> {
        let Some(peer) = self.peers.get_mut(&epoch) else { return Vec::new() };
        peer.line = Line::Gone;
        self.timers.set(Subject::Peer(epoch), None);
        let mut actions = self.end_session(now, epoch, Status::ERR_CONNECTION_RESET);
        actions.extend(self.forget_if_over(epoch));
        actions
    }

    pub(super) fn forget_if_over(&mut self, epoch: u64) -> Option<Action> {
        let peer = self.peers.get(&epoch)?;
        let over =
            matches!(peer.line, Line::Gone) && peer.source.receives.is_empty() && peer.destination.sends.is_empty();
        over.then(|| {
            self.peers.remove(&epoch);
            Action::Forget { epoch }
        })
    }

    /// The next life of a peer has been connected to.
    pub(crate) fn replace(
        &mut self,
        now: Instant,
        link: LinkId,
        old: u64,
        epoch: u64,
        peer: Peer,
        hello: crate::message::Hello,
    ) -> Vec<Action> {
        self.introducing.remove(&epoch);
        let Some(state) = self.links.get_mut(&link) else { return vec![Action::Forget { epoch }] };
        let Some(place) = state.peers.iter_mut().find(|member| **member == old) else {
            return vec![Action::Forget { epoch }];
        };
        *place = epoch;
        let name = PeerName { side: super::other(state.side), rank: peer.rank };
        let mut actions = self.retire(now, old);
        let resend = Resend::new(now, &self.limits);
        let own_call = CallId(self.next_call);
        self.next_call += 1;
        self.take_up(epoch, PeerState::new(link, name, peer, own_call, resend));
        self.timers.set(Subject::Peer(epoch), Some(resend.due));
        actions.extend(self.hello(now, epoch, hello));
        actions.extend(self.greet(epoch));
        actions
    }

    /// Makes a life of a peer a member of a link. It may have left something behind in an earlier one.
    pub(super) fn take_up(&mut self, epoch: u64, mut state: PeerState) {
        if let Some(earlier) = self.peers.remove(&epoch) {
            (state.source, state.destination) = (earlier.source, earlier.destination);
        }
        self.peers.insert(epoch, state);
    }

    /// What claimed to be a peer's next life is not believed.
    pub(crate) fn not_replaced(&mut self, epoch: u64) {
        self.introducing.remove(&epoch);
    }

    /// `None` if the link's handshake is over.
    pub(super) fn lost_while_connecting(
        &mut self,
        now: Instant,
        link: LinkId,
        peer: PeerName,
        source: Status,
    ) -> Option<Vec<Action>> {
        self.links.get(&link)?.deadline()?;
        Some(self.not_connected(now, link, ConnectError::Lost { peer, source }))
    }
}
