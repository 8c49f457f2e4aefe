//! The source's side of a request: write to each destination when it has said where to, report, wait for its word.

use std::collections::BTreeMap;
use std::ops::Range;
use std::time::{Duration, Instant};

use kvferry_layout::Digest;
use kvferry_match::{BlockMap, Side};
use kvferry_wire::{PutError, Route, RouteReason, Status, TransferStats};

use super::{Action, Core, PutId, Ticket, outcome, refusal};
use crate::error::{PeerName, PostError, TransferError};
use crate::message::{Done, Message, Moved, Refusal, Refused, RequestKey, Want};
use crate::report::Sent;

/// Receives that one peer may post ahead of the sends that serve them, and the blocks that they may name together.
const WANTS_MAX: usize = 4096;
const WANTED_BLOCKS_MAX: usize = 1 << 22;

/// A send with the part of each destination, by epoch.
#[derive(Debug)]
pub(super) struct Sending {
    tokens: Range<u64>,
    block_maps: Vec<BlockMap>,
    parts: BTreeMap<u64, Part>,
}

/// One destination's part of a send.
#[derive(Debug)]
struct Part {
    news: Instant,
    state: PartState,
}

#[derive(Debug)]
enum PartState {
    /// The destination has not said where to.
    Waiting,
    /// A write is in flight. `stalled`: the connection was cut because nothing moved, after this long.
    Moving { sent: Sent, plan: Digest, moved: u64, stalled: Option<Duration> },
    /// The bytes are there; the destination has not said that they are what it expected.
    Acking { sent: Sent },
    /// For good.
    Ended(Result<Sent, TransferError>),
}

impl Sending {
    /// The last sign of life of each part that waits for one.
    pub(super) fn waits_since(&self) -> impl Iterator<Item = Instant> + '_ {
        self.parts.values().filter(|part| part.waits()).map(|part| part.news)
    }

    fn moved(&self) -> u64 {
        self.parts.values().map(Part::moved).sum()
    }
}

impl Part {
    fn waits(&self) -> bool {
        !matches!(self.state, PartState::Ended(_) | PartState::Moving { stalled: Some(_), .. })
    }

    fn moved(&self) -> u64 {
        match &self.state {
            PartState::Moving { moved, .. } => *moved,
            PartState::Acking { sent } | PartState::Ended(Ok(sent)) => sent.bytes,
            PartState::Waiting | PartState::Ended(Err(_)) => 0,
        }
    }

    fn expected(&self) -> u64 {
        match &self.state {
            PartState::Moving { sent, .. } | PartState::Acking { sent } | PartState::Ended(Ok(sent)) => sent.bytes,
            PartState::Waiting | PartState::Ended(Err(_)) => 0,
        }
    }
}

impl Core {
    /// Posts a send: writes to each destination that has said where to, and to the others when they do.
    pub(crate) fn send(
        &mut self,
        now: Instant,
        ticket: Ticket,
        block_maps: Vec<BlockMap>,
        tokens: Range<u64>,
    ) -> Result<Vec<Action>, PostError> {
        let epochs = self.peers_for(ticket, Side::Source)?;
        if self.sends.contains_key(&ticket) {
            return Err(PostError::UnderWay(ticket.key));
        }
        let parts = epochs.iter().map(|epoch| (*epoch, Part { news: now, state: PartState::Waiting })).collect();
        self.sends.insert(ticket, Sending { tokens, block_maps, parts });
        let mut actions = Vec::new();
        for epoch in epochs {
            actions.extend(self.start_put(now, ticket, epoch));
        }
        actions.extend(self.end_send(ticket));
        Ok(actions)
    }

    /// More of a write has been posted.
    pub(crate) fn put_progress(&mut self, now: Instant, put: PutId, bytes: u64) -> Vec<Action> {
        let Some((ticket, epoch)) = self.puts.get(&put).copied() else { return Vec::new() };
        let Some(part) = self.part(ticket, epoch) else { return Vec::new() };
        part.news = now;
        if let PartState::Moving { moved, .. } = &mut part.state {
            *moved = bytes;
        }
        let moved = self.sends.get(&ticket).map_or(0, Sending::moved);
        let message = Message::Moved(Moved { key: ticket.key, bytes });
        vec![Action::Say { epoch, message }, Action::Progress { ticket, moved }]
    }

    /// A write has ended.
    pub(crate) fn put_done(
        &mut self,
        now: Instant,
        put: PutId,
        result: Result<TransferStats, PutError>,
    ) -> Vec<Action> {
        self.put_ended(now, put, |peer, moved, sent| match result {
            Ok(TransferStats { route, reason, elapsed, .. }) => Ok(Sent { route, reason, elapsed, ..sent }),
            Err(source) => Err(TransferError::Put { peer, moved, expected: sent.bytes, source }),
        })
    }

    /// A write was refused before anything of it was posted.
    pub(crate) fn put_refused(&mut self, now: Instant, put: PutId, source: kvferry_wire::TransferError) -> Vec<Action> {
        self.put_ended(now, put, |peer, _, _| Err(TransferError::Outside { peer, source }))
    }

    pub(super) fn want(&mut self, now: Instant, epoch: u64, want: Want) -> Vec<Action> {
        let key = want.key;
        let Some(ticket) = self.ticket(epoch, Side::Destination, key) else { return Vec::new() };
        let Some(peer) = self.peers.get_mut(&epoch) else { return Vec::new() };
        if peer.lost.is_some() {
            return Vec::new();
        }
        let blocks = |want: &Want| want.block_maps.iter().map(|map| map.slots().len()).sum::<usize>();
        let wanted: usize = peer.wants.values().map(blocks).sum();
        if peer.wants.len() >= WANTS_MAX || wanted + blocks(&want) > WANTED_BLOCKS_MAX {
            return vec![refusal(epoch, key, Refusal::TooMany)];
        }
        peer.wants.insert(key, want);
        let mut actions = self.start_put(now, ticket, epoch);
        actions.extend(self.end_send(ticket));
        actions
    }

    pub(super) fn acked(&mut self, epoch: u64, key: RequestKey) -> Vec<Action> {
        let Some(ticket) = self.ticket(epoch, Side::Destination, key) else { return Vec::new() };
        let Some(part) = self.part(ticket, epoch) else { return Vec::new() };
        let PartState::Acking { sent } = part.state else { return Vec::new() };
        part.state = PartState::Ended(Ok(sent));
        self.end_send(ticket).into_iter().collect()
    }

    pub(super) fn refused_by_destination(&mut self, epoch: u64, key: RequestKey, reason: Refusal) -> Vec<Action> {
        let Some(ticket) = self.ticket(epoch, Side::Destination, key) else { return Vec::new() };
        let Some(peer) = self.peers.get_mut(&epoch) else { return Vec::new() };
        let name = peer.name;
        peer.wants.remove(&key);
        let Some(part) = self.part(ticket, epoch) else { return Vec::new() };
        // A write in flight goes on to its end; the destination's answer to its `Done` ends the part then.
        if let PartState::Waiting | PartState::Acking { .. } = part.state {
            part.state = PartState::Ended(Err(TransferError::Refused { peer: name, source: reason }));
        }
        self.end_send(ticket).into_iter().collect()
    }

    /// Ends the parts that wait for a lost destination. Those with a write in flight end with it.
    pub(super) fn lose_destination(&mut self, epoch: u64, peer: PeerName, source: Status) -> Vec<Action> {
        let mut actions = Vec::new();
        for ticket in self.sends.keys().copied().collect::<Vec<_>>() {
            let Some(part) = self.part(ticket, epoch) else { continue };
            if let PartState::Waiting | PartState::Acking { .. } = part.state {
                let (moved, expected) = (part.moved(), part.expected());
                part.state = PartState::Ended(Err(TransferError::Lost { peer, moved, expected, source }));
                actions.extend(self.end_send(ticket));
            }
        }
        actions
    }

    pub(super) fn tick_sends(&mut self, now: Instant) -> Vec<Action> {
        let patience = self.patience;
        let late = |part: &Part| part.waits() && part.news + patience <= now;
        let (mut actions, mut cut) = (Vec::new(), Vec::new());
        for ticket in self.sends.keys().copied().collect::<Vec<_>>() {
            let Some(sending) = self.sends.get_mut(&ticket) else { continue };
            for (epoch, part) in sending.parts.iter_mut().filter(|(_, part)| late(part)) {
                let (peer, waited) = (self.peers[epoch].name, now - part.news);
                if let PartState::Moving { stalled, .. } = &mut part.state {
                    // What is in flight reads the source's slots: cut the connection and wait for the write to end.
                    *stalled = Some(waited);
                    cut.push(*epoch);
                } else {
                    let (moved, expected) = (part.moved(), part.expected());
                    part.state = PartState::Ended(Err(TransferError::Stalled { peer, waited, moved, expected }));
                }
            }
            actions.extend(self.end_send(ticket));
        }
        for epoch in cut {
            actions.push(Action::Cut { epoch });
            actions.extend(self.lost(epoch, Status::ERR_ENDPOINT_TIMEOUT));
        }
        actions
    }

    fn part(&mut self, ticket: Ticket, epoch: u64) -> Option<&mut Part> {
        self.sends.get_mut(&ticket)?.parts.get_mut(&epoch)
    }

    /// Binds and writes, if a send is posted and its destination has said where to.
    fn start_put(&mut self, now: Instant, ticket: Ticket, epoch: u64) -> Vec<Action> {
        let Some(sending) = self.sends.get_mut(&ticket) else { return Vec::new() };
        let Some(part) = sending.parts.get_mut(&epoch) else { return Vec::new() };
        let Some(peer) = self.peers.get_mut(&epoch) else { return Vec::new() };
        let PartState::Waiting = part.state else { return Vec::new() };
        let Some(want) = peer.wants.remove(&ticket.key) else { return Vec::new() };
        part.news = now;
        let name = peer.name;
        let mut end = |error: TransferError, reason| {
            part.state = PartState::Ended(Err(error));
            vec![refusal(epoch, ticket.key, reason)]
        };
        if want.tokens != sending.tokens {
            let (theirs, ours) = (want.tokens, sending.tokens.clone());
            return end(TransferError::TokensDiffer { peer: name, theirs, ours }, Refusal::TokensDiffer);
        }
        let plan = match peer.peer.template.bind(&sending.block_maps, &want.block_maps, want.tokens) {
            Ok(plan) => plan,
            Err(source) => return end(TransferError::BlockMaps { peer: name, source }, Refusal::BlockMaps),
        };
        if (plan.bytes(), plan.digest()) != (want.bytes, want.plan) {
            let (reported, expected) = (want.bytes, plan.bytes());
            return end(TransferError::PlansDiffer { peer: name, reported, expected }, Refusal::PlansDiffer);
        }
        let sent = Sent {
            rank: peer.peer.rank,
            rows: peer.peer.rows,
            pieces: plan.pieces(),
            runs: plan.runs(),
            bytes: plan.bytes(),
            // What the wire made of it is known when it has ended well.
            route: Route::Runs,
            reason: RouteReason::Empty,
            elapsed: Duration::ZERO,
        };
        let put = PutId(self.next_put);
        self.next_put += 1;
        self.puts.insert(put, (ticket, epoch));
        part.state = PartState::Moving { sent, plan: plan.digest(), moved: 0, stalled: None };
        vec![Action::Put { epoch, put, plan }]
    }

    fn put_ended(
        &mut self,
        now: Instant,
        put: PutId,
        end: impl FnOnce(PeerName, u64, Sent) -> Result<Sent, TransferError>,
    ) -> Vec<Action> {
        let Some((ticket, epoch)) = self.puts.remove(&put) else { return Vec::new() };
        let Some((peer, lost)) = self.peers.get(&epoch).map(|peer| (peer.name, peer.lost)) else { return Vec::new() };
        let Some(part) = self.part(ticket, epoch) else { return Vec::new() };
        let PartState::Moving { sent, plan, moved, stalled } = part.state else { return Vec::new() };
        let expected = sent.bytes;
        part.news = now;
        // Whatever became of the write, a peer that is lost will not say that it has the bytes.
        let result = match (stalled, lost) {
            (Some(waited), _) => Err(TransferError::Stalled { peer, waited, moved, expected }),
            (None, Some(source)) => Err(TransferError::Lost { peer, moved, expected, source }),
            (None, None) => end(peer, moved, sent),
        };
        let message = match result {
            Ok(sent) => {
                part.state = PartState::Acking { sent };
                Message::Done(Done { key: ticket.key, bytes: sent.bytes, plan })
            }
            Err(error) => {
                part.state = PartState::Ended(Err(error));
                Message::Refused(Refused { key: ticket.key, reason: Refusal::Failed })
            }
        };
        let mut actions = vec![Action::Say { epoch, message }];
        actions.extend(self.end_send(ticket));
        actions
    }

    /// Ends a send whose destinations have all ended.
    fn end_send(&mut self, ticket: Ticket) -> Option<Action> {
        let ended = |part: &Part| matches!(part.state, PartState::Ended(_));
        if !self.sends.get(&ticket)?.parts.values().all(ended) {
            return None;
        }
        let parts = self.sends.remove(&ticket)?.parts.into_values();
        let ends = parts.filter_map(|part| match part.state {
            PartState::Ended(end) => Some(end),
            _ => None,
        });
        Some(Action::Sent { ticket, outcome: outcome(ends, |sent| sent.rank) })
    }
}
