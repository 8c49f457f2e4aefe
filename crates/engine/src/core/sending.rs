//! The source's side of a request: write to each destination what has been pushed, once it has said where to, report, wait
//! for its word.
//!
//! The first destination that fails ends the request. Its slots are quiet when no write of it is in flight.

mod parts;

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvferry_match::{BlockMap, Side};
use kvferry_wire::Status;

pub use parts::PartSpec;
#[cfg(test)]
pub(crate) use parts::{NOTE_BYTES_MAX, PARTS_MAX};

use super::outgoing::{Outgoing, State};
use super::timers::Subject;
use super::{Action, Core, Handle, RESEND_MAX, Resend, Ticket, say};
use crate::error::{PartError, Phase, PostError, PushError, RequestError, TransferError};
use crate::message::{About, Message, Refusal, Refused, RequestKey};
use crate::report::Sent;

/// A send with the part of each destination, by epoch.
#[derive(Debug)]
pub(super) struct Sending {
    pub(super) tokens: Range<u64>,
    pub(super) block_maps: Arc<[BlockMap]>,
    pub(super) pushed: Vec<Pushed>,
    /// The chunk whose layers are being pushed, and the layer that comes next.
    open_chunk: Option<(Range<u64>, u32)>,
    /// The last part has been pushed.
    pub(super) complete: bool,
    pub(super) note: Vec<u8>,
    pub(super) posted: Instant,
    pub(super) parts: BTreeMap<u64, Outgoing>,
    /// The outcome is known.
    pub(super) ended: bool,
    reason: Refusal,
    /// The slots have been given back.
    is_quiet: bool,
}

#[derive(Debug)]
pub(super) struct Pushed {
    pub(super) tokens: Range<u64>,
    pub(super) layers: Option<Range<u32>>,
    pub(super) block_maps: Arc<[BlockMap]>,
    pub(super) ready: bool,
}

impl Sending {
    /// It has not ended, or reads its slots.
    pub(super) fn is_busy(&self) -> bool {
        !self.ended || self.is_writing()
    }

    /// It reads its slots.
    pub(super) fn is_writing(&self) -> bool {
        self.parts.values().any(|part| !part.puts.is_empty())
    }
}

impl Core {
    /// Posts a send, of which nothing has been pushed yet.
    pub(crate) fn send(
        &mut self,
        now: Instant,
        ticket: Ticket,
        block_maps: Vec<BlockMap>,
        tokens: Range<u64>,
    ) -> Result<Vec<Action>, PostError> {
        let epochs = self.peers_for(ticket.link, Side::Source)?;
        if tokens.start > tokens.end {
            return Err(PostError::Tokens { tokens });
        }
        if self.sends.contains_key(&ticket) {
            return Err(PostError::UnderWay(ticket.key));
        }
        if self.sent.get(&ticket).is_some() {
            return Err(PostError::Over(ticket.key));
        }
        if self.sends.len() >= self.limits.requests_max {
            return Err(PostError::TooMany { requests_max: self.limits.requests_max });
        }
        let (mut parts, mut actions) = (BTreeMap::new(), Vec::new());
        let mut refused = Vec::new();
        for epoch in epochs {
            let Some(peer) = self.peers.get_mut(&epoch) else { continue };
            let mut part = Outgoing::new(now, peer.name, peer.peer.rank, peer.peer.rows, 0);
            if peer.destination.over.get(&ticket.key).is_some() {
                let error = TransferError::Refused { peer: peer.name, source: Refusal::Cancelled };
                refused.push(PartError { epoch, phase: Phase::Waiting, error });
                part.state = State::Over { well: false };
            } else if !peer.destination.wants.contains_key(&ticket.key) {
                // Before it is taken to be given up: see `ANNOUNCED_FOR`.
                part.asks = Some(Resend::after(now, self.limits.resend.min(RESEND_MAX)));
                actions.push(say(epoch, Message::Announce(ticket.key)));
            }
            peer.destination.sends.insert(ticket);
            parts.insert(epoch, part);
        }
        let send = Sending {
            tokens,
            block_maps: block_maps.into(),
            pushed: Vec::new(),
            open_chunk: None,
            complete: false,
            note: Vec::new(),
            posted: now,
            parts,
            ended: false,
            reason: Refusal::Unknown,
            is_quiet: false,
        };
        self.sends.insert(ticket, send);
        if refused.is_empty() {
            for epoch in self.destinations(ticket) {
                actions.extend(self.advance(now, ticket, epoch));
            }
            actions.extend(self.finish_send(now, ticket)); // of a rank that nobody needs
        } else {
            actions.extend(self.fail_send(now, ticket, refused, Refusal::Failed));
        }
        Ok(actions)
    }

    /// How long the call that posted a send took.
    pub(crate) fn posted_in(&mut self, ticket: Ticket, posting: Duration) {
        for part in self.sends.get_mut(&ticket).into_iter().flat_map(|send| send.parts.values_mut()) {
            part.sent.times.posting = posting;
        }
    }

    /// Adds a part to a send. Returns its index.
    pub(crate) fn push(
        &mut self,
        now: Instant,
        ticket: Ticket,
        spec: PartSpec,
        ready: bool,
    ) -> Result<(usize, Vec<Action>), PushError> {
        let own_layers = self.introduction.own_layers.clone();
        let send = self.sends.get_mut(&ticket).filter(|send| !send.ended).ok_or(PushError::Ended)?;
        send.push(spec, &own_layers, ready)?;
        let index = send.pushed.len() - 1;
        let mut actions = Vec::new();
        for epoch in self.destinations(ticket) {
            actions.extend(self.advance(now, ticket, epoch));
        }
        actions.extend(self.finish_send(now, ticket));
        Ok((index, actions))
    }

    /// The bytes of a part are there to be read.
    pub(crate) fn part_ready(&mut self, now: Instant, ticket: Ticket, index: usize) -> Vec<Action> {
        let Some(send) = self.sends.get_mut(&ticket) else { return Vec::new() };
        let Some(pushed) = send.pushed.get_mut(index) else { return Vec::new() };
        pushed.ready = true;
        let mut actions = Vec::new();
        for epoch in self.destinations(ticket) {
            actions.extend(self.advance(now, ticket, epoch));
        }
        actions
    }

    pub(super) fn destinations(&self, ticket: Ticket) -> Vec<u64> {
        self.sends.get(&ticket).map(|send| send.parts.keys().copied().collect()).unwrap_or_default()
    }

    /// The destination has compared the report with its own count.
    pub(super) fn done_acked(&mut self, now: Instant, epoch: u64, about: About) -> Vec<Action> {
        let Some((ticket, part)) = self.outgoing(epoch, about) else { return Vec::new() };
        if part.state != State::Reporting {
            return Vec::new();
        }
        part.state = State::Over { well: true };
        part.asks = None;
        if let Some(settling) = part.settling {
            part.sent.times.settling = now - settling;
        }
        self.finish_want(epoch, about);
        self.arm_outgoing(ticket, epoch);
        self.finish_send(now, ticket)
    }

    /// The destination does not believe or need the report.
    pub(super) fn refused(&mut self, now: Instant, epoch: u64, Refused { about, reason }: Refused) -> Vec<Action> {
        let Some((ticket, part)) = self.outgoing(epoch, about) else { return Vec::new() };
        if part.state != State::Reporting {
            return Vec::new();
        }
        part.state = State::Over { well: false };
        part.asks = None;
        let error = TransferError::Refused { peer: part.name, source: reason };
        self.finish_want(epoch, about);
        self.arm_outgoing(ticket, epoch);
        let error = PartError { epoch, phase: Phase::Settling, error };
        self.fail_send(now, ticket, vec![error], Refusal::Failed)
    }

    pub(super) fn stop_acked(&mut self, _now: Instant, epoch: u64, about: About) -> Vec<Action> {
        let Some((ticket, part)) = self.outgoing(epoch, about) else { return Vec::new() };
        let State::Stopping { .. } = part.state else { return Vec::new() };
        if !part.puts.is_empty() {
            return Vec::new(); // nobody has said so yet
        }
        part.state = State::Over { well: false };
        part.asks = None;
        self.finish_want(epoch, about);
        self.arm_outgoing(ticket, epoch);
        self.settle_send(ticket)
    }

    /// The destination needs nothing of this send.
    pub(super) fn released(&mut self, now: Instant, epoch: u64, key: RequestKey) -> Vec<Action> {
        let Some(peer) = self.peer_on(epoch, Side::Destination) else { return Vec::new() };
        let (ticket, name) = (Ticket { link: peer.link, key }, peer.name);
        let Some(part) = self.part(ticket, epoch) else { return Vec::new() };
        if part.want.is_some() || part.state != State::Open {
            return Vec::new();
        }
        let error = TransferError::Refused { peer: name, source: Refusal::NotChosen };
        let error = PartError { epoch, phase: Phase::Waiting, error };
        self.stop_part(now, ticket, epoch, Refusal::NotChosen, Some(error))
    }

    /// Ends the parts of a destination that forgets them. Writes in flight end by themselves.
    pub(super) fn lose_destination(&mut self, now: Instant, epoch: u64, source: Status) -> Vec<Action> {
        let Some(peer) = self.peers.get(&epoch) else { return Vec::new() };
        let mut actions = Vec::new();
        for ticket in peer.destination.sends.clone() {
            let Some(part) = self.part(ticket, epoch) else { continue };
            let (phase, peer, moved, expected) = (part.phase(), part.name, part.moved(), part.expected());
            let failed = matches!(part.state, State::Open | State::Reporting);
            if part.is_over() {
                continue;
            }
            part.state = State::Stopping { reason: Refusal::Failed, tell: false };
            let error = PartError { epoch, phase, error: TransferError::Lost { peer, moved, expected, source } };
            actions.extend(self.stop_part(now, ticket, epoch, Refusal::Failed, failed.then_some(error)));
        }
        actions
    }

    /// Gives a send up.
    pub(crate) fn cancel_send(&mut self, now: Instant, ticket: Ticket) -> Vec<Action> {
        match self.sends.get(&ticket) {
            Some(send) if !send.ended => {
                let error = PartError::own(Phase::Moving, TransferError::Cancelled);
                self.fail_send(now, ticket, vec![error], Refusal::Cancelled)
            }
            _ => Vec::new(),
        }
    }

    pub(super) fn outgoing_due(&mut self, now: Instant, ticket: Ticket, epoch: u64) -> Vec<Action> {
        let patience = self.limits.patience;
        let up = self.peers.get(&epoch).is_some_and(|peer| peer.can_hear());
        let Some(send) = self.sends.get_mut(&ticket) else { return Vec::new() };
        let Some(part) = send.parts.get_mut(&epoch) else { return Vec::new() };
        let mut actions = Vec::new();
        if part.is_awaited() && part.news + patience <= now {
            let (peer, waited, moved, expected) = (part.name, now - part.news, part.moved(), part.expected());
            let error = TransferError::Stalled { peer, waited, moved, expected };
            let error = PartError { epoch, phase: part.phase(), error };
            return self.stop_part(now, ticket, epoch, Refusal::Failed, Some(error));
        }
        if part.asks.as_mut().is_some_and(|asks| asks.is_due(now)) && up {
            actions.extend(part.question(ticket.key, &send.note).map(|again| say(epoch, again)));
            self.resent += 1;
        }
        self.arm_outgoing(ticket, epoch);
        actions
    }

    pub(super) fn part(&mut self, ticket: Ticket, epoch: u64) -> Option<&mut Outgoing> {
        self.sends.get_mut(&ticket)?.parts.get_mut(&epoch)
    }

    /// The part of a send that a destination speaks of.
    pub(super) fn outgoing(&mut self, epoch: u64, about: About) -> Option<(Ticket, &mut Outgoing)> {
        let link = self.peer_on(epoch, Side::Destination)?.link;
        let ticket = Ticket { link, key: about.key };
        let part = self.part(ticket, epoch)?;
        (part.about() == Some(about)).then_some((ticket, part))
    }

    pub(super) fn finish_want(&mut self, epoch: u64, about: About) {
        if let Some(peer) = self.peers.get_mut(&epoch) {
            peer.destination.finish(about.serial);
        }
    }

    pub(super) fn arm_outgoing(&mut self, ticket: Ticket, epoch: u64) {
        let part = self.sends.get(&ticket).and_then(|send| send.parts.get(&epoch));
        let due = part.and_then(|part| part.due(self.limits.patience));
        self.timers.set(Subject::Outgoing(ticket, epoch), due);
    }

    /// Writes no more to a destination, and tells it so when nothing is on its way.
    pub(super) fn stop_part(
        &mut self,
        now: Instant,
        ticket: Ticket,
        epoch: u64,
        reason: Refusal,
        error: Option<PartError>,
    ) -> Vec<Action> {
        let Some(part) = self.part(ticket, epoch) else { return Vec::new() };
        if let State::Open | State::Reporting = part.state {
            let tell = part.want.is_some();
            part.state = State::Stopping { reason, tell };
        }
        part.asks = None;
        let posted = part.puts.iter().filter(|(_, put)| put.posted);
        let mut actions: Vec<Action> = posted.map(|(put, _)| Action::CancelPut { put: *put }).collect();
        self.arm_outgoing(ticket, epoch);
        actions.extend(self.puts_ended(now, ticket, epoch));
        actions.extend(self.fail_send(now, ticket, error.into_iter().collect(), Refusal::Failed));
        actions
    }

    /// Ends a send well if all its destinations have said so.
    pub(super) fn finish_send(&mut self, now: Instant, ticket: Ticket) -> Vec<Action> {
        let Some(send) = self.sends.get_mut(&ticket).filter(|send| !send.ended) else { return Vec::new() };
        let well = send.parts.values().all(|part| part.state == State::Over { well: true });
        if !well || !send.complete {
            return Vec::new();
        }
        send.ended = true;
        let total = now - send.posted;
        let mut sent: Vec<Sent> = send.parts.values().map(|part| part.sent.clone()).collect();
        sent.iter_mut().for_each(|sent| sent.times.total = total);
        sent.sort_by_key(|sent| sent.rank);
        let mut actions = vec![Action::Sent { ticket, outcome: Ok(sent) }];
        actions.extend(self.settle_send(ticket));
        actions
    }

    /// Ends a send badly, unless it has ended, and stops what is written to its other destinations.
    pub(super) fn fail_send(
        &mut self,
        now: Instant,
        ticket: Ticket,
        mut errors: Vec<PartError>,
        reason: Refusal,
    ) -> Vec<Action> {
        let Some(send) = self.sends.get_mut(&ticket) else { return Vec::new() };
        let mut actions = Vec::new();
        if !send.ended && !errors.is_empty() {
            (send.ended, send.reason) = (true, reason);
            errors.sort_by_key(|part| part.error.peer());
            let key = ticket.key;
            actions.push(Action::Sent { ticket, outcome: Err(RequestError { key, errors }) });
            for epoch in self.destinations(ticket) {
                if self.part(ticket, epoch).is_some_and(|part| part.state == State::Open) {
                    actions.extend(self.stop_part(now, ticket, epoch, reason, None));
                }
            }
        }
        actions.extend(self.settle_send(ticket));
        actions
    }

    /// Gives the slots of a send back once it has ended and nothing reads them, and forgets it once it is over everywhere.
    pub(super) fn settle_send(&mut self, ticket: Ticket) -> Vec<Action> {
        let Some(send) = self.sends.get_mut(&ticket).filter(|send| send.ended) else { return Vec::new() };
        let mut actions = Vec::new();
        if !send.is_quiet && send.parts.values().all(|part| part.puts.is_empty()) {
            send.is_quiet = true;
            actions.push(Action::Quiet { handle: Handle::Send(ticket) });
        }
        if !send.parts.values().all(Outgoing::is_over) {
            return actions;
        }
        let epochs = self.destinations(ticket);
        if let Some(send) = self.sends.remove(&ticket) {
            self.sent.insert(ticket, send.reason);
            for about in send.parts.iter().filter_map(|(epoch, part)| Some((*epoch, part.about()?))) {
                self.finish_want(about.0, about.1);
            }
        }
        for epoch in epochs {
            self.timers.set(Subject::Outgoing(ticket, epoch), None);
            if let Some(peer) = self.peers.get_mut(&epoch) {
                peer.destination.sends.remove(&ticket);
            }
            actions.extend(self.forget_if_over(epoch));
        }
        actions
    }
}
