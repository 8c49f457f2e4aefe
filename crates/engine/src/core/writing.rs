//! The writes of a send: what has been pushed and is ready goes to each destination that has said where to.

use std::collections::BTreeMap;
use std::collections::btree_map::Entry;
use std::ops::Range;
use std::time::Instant;

use kvferry_match::{BindError, Chunk, Plan, Template, TemplateError};
use kvferry_wire::{PutError, TransferStats};

use super::outgoing::{Outgoing, Put, State};
use super::sending::Pushed;
use super::{Action, Core, Handle, Peer, PutId, Resend, Ticket, say};
use crate::error::{PartError, Phase, TransferError};
use crate::message::{About, Late, Message, Moved, PartCheck, Refusal, Want};
use crate::report::carry;

impl Core {
    /// Writes to a destination what has been pushed and is ready, if it has said where to.
    pub(super) fn advance(&mut self, now: Instant, ticket: Ticket, epoch: u64) -> Vec<Action> {
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
            part.puts.insert(put, Put { moved: 0, posted, in_inbox: false, part: index });
            if posted {
                let last = send.complete && part.started.iter().all(|started| *started) && part.puts.len() == 1;
                // That the parts are the whole is known before the last of them leaves.
                let then = (last && part.sent.bytes == want.bytes).then(|| part.report(&send.note)).flatten();
                part.told = then.is_some();
                let (serial, inbox_only) = (want.about.serial, part.inbox_only);
                actions.push(Action::Put { ticket, epoch, put, plan, then, serial, inbox_only });
            } else {
                actions.push(Action::Sum { put, plan });
            }
        }
        self.arm_outgoing(ticket, epoch);
        actions.extend(self.puts_ended(now, ticket, epoch));
        actions
    }

    /// The checksum of a write has been made: it leaves.
    pub(crate) fn summed(&mut self, now: Instant, put: PutId, plan: Plan, sum: u64) -> Vec<Action> {
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
        part.checks.push(PartCheck { tokens, layers: pushed.layers.clone(), sum });
        let last = send.complete && part.started.iter().all(|started| *started) && part.puts.len() == 1;
        let then = (last && part.sent.bytes == part.expected()).then(|| part.report(&send.note)).flatten();
        part.told = then.is_some();
        let (about, inbox_only) = (part.about(), part.inbox_only);
        self.arm_outgoing(ticket, epoch);
        let put = about.map(|About { serial, .. }| Action::Put { ticket, epoch, put, plan, then, serial, inbox_only });
        put.into_iter().collect()
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
        let (about, bytes, inbox) = (part.about(), part.moved(), part.inbox_only);
        let moved = send.parts.values().map(Outgoing::moved).sum();
        self.arm_outgoing(ticket, epoch);
        let mut actions = vec![Action::Progress { handle: Handle::Send(ticket), moved }];
        actions.extend(about.map(|about| say(epoch, Message::Moved(Moved { about, bytes, inbox }))));
        actions
    }

    /// A write takes the destination's inbox. If all do that are under way, and none may be late that did not, the destination is
    /// promised that all that follow will: it can give the want up by itself then.
    pub(crate) fn put_takes_inbox(&mut self, put: PutId) -> Vec<Action> {
        let Some((ticket, epoch)) = self.puts.get(&put).copied() else { return Vec::new() };
        let Some(part) = self.part(ticket, epoch) else { return Vec::new() };
        if let Some(put) = part.puts.get_mut(&put) {
            put.in_inbox = true;
        }
        let all = part.puts.values().all(|put| put.in_inbox || !put.posted);
        if part.inbox_only || part.late == Late::Anything || !all {
            return Vec::new();
        }
        part.inbox_only = true;
        let (about, bytes, inbox) = (part.about(), part.moved(), true);
        about.map(|about| say(epoch, Message::Moved(Moved { about, bytes, inbox }))).into_iter().collect()
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
        let Some(Put { in_inbox, .. }) = part.puts.remove(&put) else { return Vec::new() };
        part.news = now;
        match result {
            Ok(stats) => {
                part.moved += stats.bytes;
                part.sent.elapsed += stats.elapsed;
                carry(&mut part.sent.carried, stats);
                part.settling = Some(now);
            }
            Err(source) => {
                let late = match (source.may_still_arrive(), in_inbox) {
                    (false, _) => Late::Nothing,
                    (true, true) => Late::Inbox,
                    (true, false) => Late::Anything,
                };
                part.late = part.late.max(late);
                let (about, late, open) = (part.about(), part.late, part.state == State::Open);
                let (peer, moved, expected) = (part.name, part.moved(), part.expected());
                if let Some(about) = about.filter(|_| late > Late::Nothing) {
                    self.unsettle(epoch, about.serial, late);
                }
                if open {
                    let error = match source {
                        // However one hears of it first.
                        PutError::Endpoint { source, .. } => TransferError::Lost { peer, moved, expected, source },
                        source => TransferError::Put { peer, moved, expected, source },
                    };
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
    pub(super) fn puts_ended(&mut self, now: Instant, ticket: Ticket, epoch: u64) -> Vec<Action> {
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
}

/// Whether the two sides speak of the same bytes. Found out from the destination's slots alone, before one of them moves.
fn agree(
    tokens: &Range<u64>,
    want: &Want,
    template: &Template,
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
    Maps(BindError),
    Layers(TemplateError),
}

/// What a part that was pushed writes to a destination. `None`: nothing, its tokens are there already.
fn bind(
    pushed: &Pushed,
    want: &Want,
    peer: &mut Peer,
    layered: &mut BTreeMap<(u32, u32), Template>,
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
            Entry::Occupied(known) => known.into_mut(),
            Entry::Vacant(place) => {
                let Some((assignment, rank)) = &peer.assignment else { return Ok(None) };
                let template = assignment.template_of_layers(*rank, layers.clone()).map_err(Unbound::Layers)?;
                place.insert(template)
            }
        },
    };
    template.bind(&pushed.block_maps, &want.block_maps, chunk).map(Some).map_err(Unbound::Maps)
}
