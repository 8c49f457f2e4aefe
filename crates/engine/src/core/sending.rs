//! The source's side of a request: write to each destination what has been pushed, once it has said where to, report, wait
//! for its word.
//!
//! The first destination that fails ends the request. Its slots are quiet when no write of it is in flight.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvferry_match::{BlockMap, Chunk, Plan, Side, TemplateError};
use kvferry_wire::{PutError, Status, TransferStats};

use super::outgoing::{Outgoing, Put, State};
use super::peers::blocks;
use super::timers::Subject;
use super::{Action, Core, Handle, PutId, Resend, Ticket, say};
use crate::error::{PartError, Phase, PostError, PushError, RequestError, TransferError};
use crate::message::{About, Message, Moved, PartCheck, Refusal, Refused, RequestKey, Serial, Stopped, Want};
use crate::report::Sent;

/// Receives that one peer may post ahead of the sends that serve them, and the blocks that they may name together.
const WANTS_MAX: usize = 1 << 16;
const WANTED_BLOCKS_MAX: usize = 1 << 22;

/// Bytes that a sender's user may add to the last part.
pub(crate) const NOTE_BYTES_MAX: usize = 4096;

/// A part of a send.
#[derive(Clone, Debug, Default, PartialEq, Eq)]
pub struct PartSpec {
    /// Its tokens. Parts follow each other; the one that ends where the request ends is the last.
    pub tokens: Range<u64>,
    /// The model's layers that it has of them. `None`: all. Of the same tokens, ranges follow each other, ascending.
    pub layers: Option<Range<u32>>,
    /// The block maps, if blocks have been added since the send was posted.
    pub block_maps: Option<Vec<BlockMap>>,
    /// A few bytes for the destination, of the last part only: a first token, say.
    pub note: Vec<u8>,
}

/// A send with the part of each destination, by epoch.
#[derive(Debug)]
pub(super) struct Sending {
    tokens: Range<u64>,
    block_maps: Arc<[BlockMap]>,
    pushed: Vec<Pushed>,
    /// The chunk whose layers are being pushed, and the layer that comes next.
    open_chunk: Option<(Range<u64>, u32)>,
    /// The last part has been pushed.
    complete: bool,
    note: Vec<u8>,
    posted: Instant,
    parts: BTreeMap<u64, Outgoing>,
    /// The outcome is known.
    pub(super) ended: bool,
    reason: Refusal,
    /// The slots have been given back.
    is_quiet: bool,
}

#[derive(Debug)]
struct Pushed {
    tokens: Range<u64>,
    layers: Option<Range<u32>>,
    block_maps: Arc<[BlockMap]>,
    ready: bool,
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

    /// Takes a part up, if it follows those before.
    fn push(&mut self, spec: PartSpec, own_layers: &Range<u32>, ready: bool) -> Result<(), PushError> {
        let PartSpec { tokens, layers, block_maps, note } = spec;
        let next_token = match (&self.open_chunk, self.pushed.last()) {
            (Some((chunk, _)), _) => chunk.start,
            (None, Some(last)) => last.tokens.end,
            (None, None) => self.tokens.start,
        };
        let ends = match &self.open_chunk {
            Some((chunk, _)) => tokens == *chunk,
            None => tokens.start == next_token && (tokens.start..=self.tokens.end).contains(&tokens.end),
        };
        if self.complete || !ends {
            return Err(PushError::Tokens { pushed: tokens, next: next_token, end: self.tokens.end });
        }
        let next_layer = self.open_chunk.as_ref().map(|(_, layer)| *layer);
        let whole = match (&layers, next_layer) {
            (None, None) => true,
            (Some(layers), None) if layers.start <= own_layers.start && layers.start < layers.end => {
                layers.end >= own_layers.end
            }
            (Some(layers), Some(next)) if layers.start == next && layers.start < layers.end => {
                layers.end >= own_layers.end
            }
            _ => return Err(PushError::Layers { pushed: layers, next: next_layer, own: own_layers.clone() }),
        };
        let last = whole && tokens.end == self.tokens.end;
        if note.len() > NOTE_BYTES_MAX || !(last || note.is_empty()) {
            return Err(PushError::Note { bytes: note.len(), bytes_max: if last { NOTE_BYTES_MAX } else { 0 } });
        }
        if let Some(block_maps) = block_maps {
            self.block_maps = block_maps.into();
        }
        let next_layer = layers.as_ref().map_or(0, |layers| layers.end);
        self.open_chunk = (!whole).then(|| (tokens.clone(), next_layer));
        (self.complete, self.note) = (last, note);
        self.pushed.push(Pushed { tokens, layers, block_maps: self.block_maps.clone(), ready });
        self.parts.values_mut().for_each(|part| part.started.push(false));
        Ok(())
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
                part.asks = Some(Resend::new(now, &self.limits));
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

    fn destinations(&self, ticket: Ticket) -> Vec<u64> {
        self.sends.get(&ticket).map(|send| send.parts.keys().copied().collect()).unwrap_or_default()
    }

    pub(super) fn want(&mut self, now: Instant, epoch: u64, want: Want) -> Vec<Action> {
        let about = want.about;
        let Some(peer) = self.peer_on(epoch, Side::Destination) else { return Vec::new() };
        // Before its greeting an old want cannot be told from a new one.
        if peer.call.is_none() || !peer.can_hear() {
            return Vec::new();
        }
        let ticket = Ticket { link: peer.link, key: about.key };
        if let Some(part) = self.sends.get(&ticket).and_then(|send| send.parts.get(&epoch))
            && part.about() == Some(about)
        {
            let again = part.question(about.key, &self.sends[&ticket].note).unwrap_or(Message::Got(about));
            return vec![say(epoch, again)];
        }
        let settled = self.is_settled(epoch, about.serial);
        let nack = |reason| vec![say(epoch, Message::Stopped(Stopped { about, reason, settled }))];
        let reason = self.sent.get(&ticket).copied();
        let Some(peer) = self.peer_on(epoch, Side::Destination) else { return Vec::new() };
        let known = peer.destination.wants.get(&about.key).is_some_and(|want| want.about == about);
        if !known && peer.destination.is_finished(about.serial) {
            return nack(reason.unwrap_or(Refusal::Unknown));
        }
        match peer.destination.wants.get(&about.key).map(|earlier| earlier.about.serial) {
            Some(serial) if serial == about.serial => return vec![say(epoch, Message::Got(about))],
            Some(serial) if serial > about.serial => return nack(Refusal::Unknown),
            Some(serial) => {
                peer.destination.take_want(&about.key);
                peer.destination.finish(serial);
            }
            None => {}
        }
        // A send that ended, or that serves another want of the destination's, serves no other.
        let busy = self.sends.get(&ticket).is_some_and(|send| {
            send.ended || send.parts.get(&epoch).is_none_or(|part| part.want.is_some() || part.is_over())
        });
        let Some(peer) = self.peer_on(epoch, Side::Destination) else { return Vec::new() };
        let state = &mut peer.destination;
        let refusal = if state.wants.len() >= WANTS_MAX || state.wanted_blocks + blocks(&want) > WANTED_BLOCKS_MAX {
            Some(Refusal::TooMany)
        } else if busy {
            Some(Refusal::Failed)
        } else {
            reason
        };
        if let Some(refusal) = refusal {
            state.finish(about.serial);
            return nack(refusal);
        }
        state.wanted_blocks += blocks(&want);
        state.wants.insert(about.key, Arc::new(want));
        let mut actions = vec![say(epoch, Message::Got(about))];
        actions.extend(self.advance(now, ticket, epoch));
        actions
    }

    pub(super) fn want_cancelled(&mut self, now: Instant, epoch: u64, about: About) -> Vec<Action> {
        let Some(peer) = self.peer_on(epoch, Side::Destination) else { return Vec::new() };
        let ticket = Ticket { link: peer.link, key: about.key };
        let (name, source) = (peer.name, Refusal::Cancelled);
        peer.destination.over.insert(about.key, ());
        let note = self.sends.get(&ticket).map(|send| send.note.clone()).unwrap_or_default();
        let part = self.sends.get(&ticket).and_then(|send| send.parts.get(&epoch));
        match part {
            Some(part) if part.about() == Some(about) => match part.state {
                State::Open => {
                    let error =
                        PartError { epoch, phase: part.phase(), error: TransferError::Refused { peer: name, source } };
                    return self.stop_part(now, ticket, epoch, Refusal::Cancelled, Some(error));
                }
                State::Reporting | State::Stopping { tell: true, .. } => {
                    return part.question(about.key, &note).map(|again| say(epoch, again)).into_iter().collect();
                }
                // It may be heard again before its writes have ended.
                State::Stopping { tell: false, reason } => {
                    if let Some(part) = self.part(ticket, epoch) {
                        part.state = State::Stopping { reason, tell: true };
                    }
                    return self.puts_ended(now, ticket, epoch);
                }
                State::Over { .. } => {}
            },
            // The want has been lost on its way.
            Some(part) if part.want.is_none() && part.state == State::Open => {
                let error =
                    PartError { epoch, phase: Phase::Waiting, error: TransferError::Refused { peer: name, source } };
                let mut actions = self.nack(epoch, about);
                actions.extend(self.stop_part(now, ticket, epoch, Refusal::Cancelled, Some(error)));
                return actions;
            }
            _ => {}
        }
        self.nack(epoch, about)
    }

    /// Nothing is written for this want, now or later.
    fn nack(&mut self, epoch: u64, about: About) -> Vec<Action> {
        if let Some(peer) = self.peers.get_mut(&epoch) {
            if peer.destination.wants.get(&about.key).is_some_and(|want| want.about == about) {
                peer.destination.take_want(&about.key);
            }
            peer.destination.finish(about.serial);
        }
        let settled = self.is_settled(epoch, about.serial);
        vec![say(epoch, Message::Stopped(Stopped { about, reason: Refusal::Cancelled, settled }))]
    }

    /// Whether nothing that was written for a want is on its way still. It outlives the send, the link and the memory of both.
    fn is_settled(&self, epoch: u64, serial: Serial) -> bool {
        self.unsettled.get(&(epoch, serial)).is_none() && self.doubtful.get(&epoch).is_none()
    }

    /// What was written for a want may be on its way for as long as this process lives.
    fn unsettle(&mut self, epoch: u64, serial: Serial) {
        if let Some((forgotten, _)) = self.unsettled.insert((epoch, serial), ()) {
            self.doubtful.insert(forgotten, ());
        }
    }

    /// Whether nothing that was written to a peer is on its way still.
    pub(super) fn all_settled(&self, epoch: u64) -> bool {
        self.doubtful.get(&epoch).is_none() && !self.unsettled.keys().any(|(of, _)| *of == epoch)
    }

    /// Writes to a destination what has been pushed and is ready, if it has said where to.
    fn advance(&mut self, now: Instant, ticket: Ticket, epoch: u64) -> Vec<Action> {
        let Some(send) = self.sends.get_mut(&ticket) else { return Vec::new() };
        let Some(part) = send.parts.get_mut(&epoch).filter(|part| part.state == State::Open) else { return Vec::new() };
        let Some(peer) = self.peers.get_mut(&epoch) else { return Vec::new() };
        if part.want.is_none() {
            let Some(want) = peer.destination.take_want(&ticket.key) else {
                self.arm_outgoing(ticket, epoch);
                return Vec::new();
            };
            (part.news, part.asks) = (now, None);
            part.sent.times.queued = now - send.posted;
            part.want = Some(want.clone());
            if let Err((error, reason)) = agree(&send.tokens, &want, &peer.peer.template, part) {
                let error = PartError { epoch, phase: Phase::Waiting, error };
                return self.stop_part(now, ticket, epoch, reason, Some(error));
            }
        }
        let Some(want) = part.want.clone() else { return Vec::new() };
        let mut actions = Vec::new();
        for index in 0..send.pushed.len() {
            let pushed = &send.pushed[index];
            if !pushed.ready || part.started[index] {
                continue;
            }
            part.started[index] = true;
            let plan = match bind(pushed, &want, &mut peer.peer, &mut peer.destination.layers) {
                Ok(plan) => plan,
                Err(unbound) => {
                    let error = match unbound {
                        Unbound::Maps(source) => TransferError::BlockMaps { peer: part.name, source },
                        Unbound::Layers(source) => TransferError::Layers { peer: part.name, source },
                    };
                    let error = PartError { epoch, phase: Phase::Moving, error };
                    actions.extend(self.stop_part(now, ticket, epoch, Refusal::BlockMaps, Some(error)));
                    return actions;
                }
            };
            let Some(plan) = plan.filter(|plan| plan.bytes() > 0) else { continue };
            part.sent.pieces += plan.pieces();
            part.sent.runs += plan.runs();
            part.sent.bytes += plan.bytes();
            let put = PutId(self.next_put);
            self.next_put += 1;
            self.puts.insert(put, (ticket, epoch));
            let posted = !self.limits.verify;
            part.puts.insert(put, Put { moved: 0, posted, part: index });
            if posted {
                let last = send.complete && part.started.iter().all(|started| *started) && part.puts.len() == 1;
                // That the parts are the whole is known before the last of them leaves.
                let then = (last && part.sent.bytes == want.bytes).then(|| part.report(&send.note)).flatten();
                part.told = then.is_some();
                actions.push(Action::Put { epoch, put, plan, then });
            } else {
                actions.push(Action::Sum { put, plan });
            }
        }
        self.arm_outgoing(ticket, epoch);
        actions.extend(self.puts_ended(now, ticket, epoch));
        actions
    }

    /// The checksums of a write have been made: it leaves.
    pub(crate) fn summed(&mut self, now: Instant, put: PutId, plan: Plan, sums: Vec<u64>) -> Vec<Action> {
        let Some((ticket, epoch)) = self.puts.get(&put).copied() else { return Vec::new() };
        let Some(send) = self.sends.get_mut(&ticket) else { return Vec::new() };
        let Some(part) = send.parts.get_mut(&epoch) else { return Vec::new() };
        if part.state != State::Open {
            self.puts.remove(&put);
            part.puts.remove(&put);
            return self.puts_ended(now, ticket, epoch);
        }
        let Some(posted) = part.puts.get_mut(&put) else { return Vec::new() };
        posted.posted = true;
        part.news = now;
        let pushed = &send.pushed[posted.part];
        let tokens = plan.chunk().tokens.clone();
        part.checks.push(PartCheck { tokens, layers: pushed.layers.clone(), sums });
        let last = send.complete && part.started.iter().all(|started| *started) && part.puts.len() == 1;
        let then = (last && part.sent.bytes == part.expected()).then(|| part.report(&send.note)).flatten();
        part.told = then.is_some();
        self.arm_outgoing(ticket, epoch);
        vec![Action::Put { epoch, put, plan, then }]
    }

    /// More of a write has been posted.
    pub(crate) fn put_progress(&mut self, now: Instant, put: PutId, bytes: u64) -> Vec<Action> {
        let Some((ticket, epoch)) = self.puts.get(&put).copied() else { return Vec::new() };
        let Some(send) = self.sends.get_mut(&ticket) else { return Vec::new() };
        let Some(part) = send.parts.get_mut(&epoch) else { return Vec::new() };
        part.news = now;
        if let Some(put) = part.puts.get_mut(&put) {
            put.moved = bytes;
        }
        let (about, bytes) = (part.about(), part.moved());
        let moved = send.parts.values().map(Outgoing::moved).sum();
        self.arm_outgoing(ticket, epoch);
        let mut actions = vec![Action::Progress { handle: Handle::Send(ticket), moved }];
        actions.extend(about.map(|about| say(epoch, Message::Moved(Moved { about, bytes }))));
        actions
    }

    /// A write has ended.
    pub(crate) fn put_done(
        &mut self,
        now: Instant,
        put: PutId,
        result: Result<TransferStats, PutError>,
    ) -> Vec<Action> {
        let Some((ticket, epoch)) = self.puts.remove(&put) else { return Vec::new() };
        let Some(part) = self.part(ticket, epoch) else { return Vec::new() };
        if part.puts.remove(&put).is_none() {
            return Vec::new();
        }
        part.news = now;
        match result {
            Ok(TransferStats { bytes, route, reason, elapsed, .. }) => {
                part.moved += bytes;
                (part.sent.route, part.sent.reason) = (route, reason);
                part.sent.elapsed += elapsed;
                part.settling = Some(now);
            }
            Err(source) => {
                part.settled &= !source.may_still_arrive();
                let (about, settled, open) = (part.about(), part.settled, part.state == State::Open);
                let (peer, moved, expected) = (part.name, part.moved(), part.expected());
                if let Some(about) = about.filter(|_| !settled) {
                    self.unsettle(epoch, about.serial);
                }
                if open {
                    let error = TransferError::Put { peer, moved, expected, source };
                    let error = PartError { epoch, phase: Phase::Moving, error };
                    return self.stop_part(now, ticket, epoch, Refusal::Failed, Some(error));
                }
            }
        }
        self.puts_ended(now, ticket, epoch)
    }

    /// A write was refused before anything of it was posted.
    pub(crate) fn put_refused(&mut self, now: Instant, put: PutId, source: kvferry_wire::TransferError) -> Vec<Action> {
        let Some((ticket, epoch)) = self.puts.remove(&put) else { return Vec::new() };
        let Some(part) = self.part(ticket, epoch) else { return Vec::new() };
        part.puts.remove(&put);
        let error = TransferError::Outside { peer: part.name, source };
        self.stop_part(now, ticket, epoch, Refusal::Failed, Some(PartError { epoch, phase: Phase::Moving, error }))
    }

    /// What follows when a destination's writes have ended, if they have.
    fn puts_ended(&mut self, now: Instant, ticket: Ticket, epoch: u64) -> Vec<Action> {
        let asks = Resend::new(now, &self.limits);
        let Some(send) = self.sends.get_mut(&ticket) else { return Vec::new() };
        let Some(part) = send.parts.get_mut(&epoch).filter(|part| part.puts.is_empty()) else { return Vec::new() };
        let mut actions = Vec::new();
        match part.state {
            State::Open => {
                let all = send.complete && part.want.is_some() && part.started.iter().all(|started| *started);
                if !all {
                    return actions;
                }
                let (expected, reported) = (part.expected(), part.moved);
                if reported != expected {
                    // The parts that were pushed are not what the destination has to get.
                    let error = TransferError::PlansDiffer { peer: part.name, reported, expected };
                    let error = PartError { epoch, phase: Phase::Settling, error };
                    return self.stop_part(now, ticket, epoch, Refusal::PlansDiffer, Some(error));
                }
                // The wire has said it, if it was told to with the last write.
                part.state = State::Reporting;
                part.asks = Some(asks);
                if !part.told {
                    actions.extend(part.report(&send.note).map(|report| say(epoch, report)));
                }
            }
            State::Stopping { tell: true, .. } if part.want.is_some() => {
                part.asks = Some(asks);
                actions.extend(part.question(ticket.key, &[]).map(|stopped| say(epoch, stopped)));
            }
            State::Stopping { .. } => part.state = State::Over { well: false },
            State::Reporting | State::Over { .. } => {}
        }
        self.arm_outgoing(ticket, epoch);
        actions.extend(self.settle_send(ticket));
        actions
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
        if matches!(part.state, State::Open | State::Reporting) && part.news + patience <= now {
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

    fn part(&mut self, ticket: Ticket, epoch: u64) -> Option<&mut Outgoing> {
        self.sends.get_mut(&ticket)?.parts.get_mut(&epoch)
    }

    /// The part of a send that a destination speaks of.
    fn outgoing(&mut self, epoch: u64, about: About) -> Option<(Ticket, &mut Outgoing)> {
        let link = self.peer_on(epoch, Side::Destination)?.link;
        let ticket = Ticket { link, key: about.key };
        let part = self.part(ticket, epoch)?;
        (part.about() == Some(about)).then_some((ticket, part))
    }

    fn finish_want(&mut self, epoch: u64, about: About) {
        if let Some(peer) = self.peers.get_mut(&epoch) {
            peer.destination.finish(about.serial);
        }
    }

    fn arm_outgoing(&mut self, ticket: Ticket, epoch: u64) {
        let part = self.sends.get(&ticket).and_then(|send| send.parts.get(&epoch));
        let due = part.and_then(|part| part.due(self.limits.patience));
        self.timers.set(Subject::Outgoing(ticket, epoch), due);
    }

    /// Writes no more to a destination, and tells it so when nothing is on its way.
    fn stop_part(
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
    fn finish_send(&mut self, now: Instant, ticket: Ticket) -> Vec<Action> {
        let Some(send) = self.sends.get_mut(&ticket).filter(|send| !send.ended) else { return Vec::new() };
        let well = send.parts.values().all(|part| part.state == State::Over { well: true });
        if !well || !send.complete {
            return Vec::new();
        }
        send.ended = true;
        let total = now - send.posted;
        let mut sent: Vec<Sent> = send.parts.values().map(|part| part.sent).collect();
        sent.iter_mut().for_each(|sent| sent.times.total = total);
        sent.sort_by_key(|sent| sent.rank);
        let mut actions = vec![Action::Sent { ticket, outcome: Ok(sent) }];
        actions.extend(self.settle_send(ticket));
        actions
    }

    /// Ends a send badly, unless it has ended, and stops what is written to its other destinations.
    fn fail_send(&mut self, now: Instant, ticket: Ticket, mut errors: Vec<PartError>, reason: Refusal) -> Vec<Action> {
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
    fn settle_send(&mut self, ticket: Ticket) -> Vec<Action> {
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

/// Whether the two sides speak of the same bytes. Found out from the destination's slots alone, before one of them moves.
fn agree(
    tokens: &Range<u64>,
    want: &Want,
    template: &kvferry_match::Template,
    part: &Outgoing,
) -> Result<(), (TransferError, Refusal)> {
    let peer = part.name;
    // The destination may hold the first tokens already.
    if want.tokens.end != tokens.end || want.tokens.start < tokens.start {
        let (theirs, ours) = (want.tokens.clone(), tokens.clone());
        return Err((TransferError::TokensDiffer { peer, theirs, ours }, Refusal::TokensDiffer));
    }
    let expectation = template.expectation(&want.block_maps, want.tokens.clone());
    let expectation = expectation.map_err(|source| (TransferError::BlockMaps { peer, source }, Refusal::BlockMaps))?;
    if (expectation.bytes, expectation.digest) != (want.bytes, want.plan) {
        let (reported, expected) = (want.bytes, expectation.bytes);
        return Err((TransferError::PlansDiffer { peer, reported, expected }, Refusal::PlansDiffer));
    }
    Ok(())
}

enum Unbound {
    Maps(kvferry_match::BindError),
    Layers(TemplateError),
}

/// What a part that was pushed writes to a destination. `None`: nothing, its tokens are there already.
fn bind(
    pushed: &Pushed,
    want: &Want,
    peer: &mut super::Peer,
    layered: &mut BTreeMap<(u32, u32), kvferry_match::Template>,
) -> Result<Option<Plan>, Unbound> {
    let start = pushed.tokens.start.max(want.tokens.start);
    let end = want.tokens.end;
    if start > pushed.tokens.end || (start == pushed.tokens.end && start < end) {
        return Ok(None);
    }
    let chunk = Chunk::new(start..pushed.tokens.end, end);
    let template = match &pushed.layers {
        None => &peer.template,
        Some(layers) => match layered.entry((layers.start, layers.end)) {
            std::collections::btree_map::Entry::Occupied(known) => known.into_mut(),
            std::collections::btree_map::Entry::Vacant(place) => {
                let Some((assignment, rank)) = &peer.assignment else { return Ok(None) };
                let template = assignment.template_of_layers(*rank, layers.clone()).map_err(Unbound::Layers)?;
                place.insert(template)
            }
        },
    };
    template.bind(&pushed.block_maps, &want.block_maps, chunk).map(Some).map_err(Unbound::Maps)
}
