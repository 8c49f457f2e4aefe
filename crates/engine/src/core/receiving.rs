//! The destination's side of a request: ask each source, then believe a source only if it reports the bytes and the plan
//! that this side expects of it.

use std::collections::BTreeMap;
use std::ops::Range;
use std::time::Instant;

use kvferry_layout::Digest;
use kvferry_match::{BlockMap, Side};
use kvferry_wire::{FRAME_PAYLOAD_BYTES_MAX, Status};

use super::{Action, Core, PeerState, Ticket, outcome, refusal};
use crate::error::{PeerName, PostError, TransferError};
use crate::message::{Done, Message, Moved, Refusal, RequestKey, Want};
use crate::report::Received;

/// Blocks of one receive, all groups together: what surely fits a frame, at 6 bytes a block and 1,024 for the rest.
pub(crate) const WANT_BLOCKS_MAX: usize = (FRAME_PAYLOAD_BYTES_MAX - 1024) / 6;

/// One source's part of a receive.
#[derive(Debug)]
pub(super) struct Receiving {
    expected: u64,
    plan: Digest,
    moved: u64,
    started: Instant,
    news: Instant,
    end: Option<Result<Received, TransferError>>,
}

impl Receiving {
    /// The last sign of life, while the part waits for one.
    pub(super) fn waits_since(&self) -> Option<Instant> {
        self.end.is_none().then_some(self.news)
    }
}

impl Core {
    /// Posts a receive: tells each source where to write.
    pub(crate) fn receive(
        &mut self,
        now: Instant,
        ticket: Ticket,
        block_maps: &[BlockMap],
        tokens: &Range<u64>,
    ) -> Result<Vec<Action>, PostError> {
        let epochs = self.peers_for(ticket, Side::Destination)?;
        if self.receives.contains_key(&ticket) {
            return Err(PostError::UnderWay(ticket.key));
        }
        let blocks = block_maps.iter().map(|map| map.slots().len()).sum();
        if blocks > WANT_BLOCKS_MAX {
            return Err(PostError::TooManyBlocks { blocks, blocks_max: WANT_BLOCKS_MAX });
        }
        let (mut parts, mut actions) = (BTreeMap::new(), Vec::new());
        for epoch in epochs {
            let PeerState { name, peer, .. } = &self.peers[&epoch];
            let expectation = peer.template.expectation(block_maps, tokens.clone());
            let expectation = expectation.map_err(|source| PostError::BlockMaps { peer: *name, source })?;
            let (expected, plan) = (expectation.bytes, expectation.digest);
            parts.insert(epoch, Receiving { expected, plan, moved: 0, started: now, news: now, end: None });
            let (tokens, block_maps) = (tokens.clone(), block_maps.to_vec());
            let want = Want { key: ticket.key, tokens, bytes: expected, plan, block_maps };
            actions.push(Action::Say { epoch, message: Message::Want(want) });
        }
        self.receives.insert(ticket, parts);
        actions.extend(self.end_receive(ticket));
        Ok(actions)
    }

    pub(super) fn moved(&mut self, now: Instant, epoch: u64, Moved { key, bytes }: Moved) -> Vec<Action> {
        let Some(ticket) = self.ticket(epoch, Side::Source, key) else { return Vec::new() };
        let Some(parts) = self.receives.get_mut(&ticket) else { return Vec::new() };
        let Some(part) = parts.get_mut(&epoch) else { return Vec::new() };
        let bytes = bytes.min(part.expected);
        if bytes <= part.moved {
            return Vec::new(); // no progress, so no reason for more patience
        }
        (part.news, part.moved) = (now, bytes);
        let moved = parts.values().map(|part| part.moved).sum();
        vec![Action::Progress { ticket, moved }]
    }

    pub(super) fn done(&mut self, now: Instant, epoch: u64, Done { key, bytes, plan }: Done) -> Vec<Action> {
        let Some(ticket) = self.ticket(epoch, Side::Source, key) else { return Vec::new() };
        let PeerState { name, peer, .. } = &self.peers[&epoch];
        let part = self.receives.get_mut(&ticket).and_then(|parts| parts.get_mut(&epoch));
        let Some(part) = part.filter(|part| part.end.is_none()) else {
            return vec![refusal(epoch, key, Refusal::Unknown)];
        };
        let expected = part.expected;
        let mut actions = Vec::new();
        if (bytes, plan) == (expected, part.plan) {
            part.moved = expected;
            part.end = Some(Ok(Received { rank: peer.rank, rows: peer.rows, bytes, elapsed: now - part.started }));
            actions.push(Action::Say { epoch, message: Message::DoneAck(key) });
        } else {
            part.end = Some(Err(TransferError::PlansDiffer { peer: *name, reported: bytes, expected }));
            actions.push(refusal(epoch, key, Refusal::PlansDiffer));
        }
        actions.extend(self.end_receive(ticket));
        actions
    }

    pub(super) fn refused_by_source(&mut self, epoch: u64, key: RequestKey, reason: Refusal) -> Vec<Action> {
        let Some(ticket) = self.ticket(epoch, Side::Source, key) else { return Vec::new() };
        let peer = self.peers[&epoch].name;
        if let Some(part) = self.receives.get_mut(&ticket).and_then(|parts| parts.get_mut(&epoch)) {
            part.end.get_or_insert(Err(TransferError::Refused { peer, source: reason }));
        }
        self.end_receive(ticket).into_iter().collect()
    }

    pub(super) fn lose_source(&mut self, epoch: u64, peer: PeerName, source: Status) -> Vec<Action> {
        let mut actions = Vec::new();
        for ticket in self.receives.keys().copied().collect::<Vec<_>>() {
            if let Some(part) = self.receives.get_mut(&ticket).and_then(|parts| parts.get_mut(&epoch)) {
                let (moved, expected) = (part.moved, part.expected);
                part.end.get_or_insert(Err(TransferError::Lost { peer, moved, expected, source }));
                actions.extend(self.end_receive(ticket));
            }
        }
        actions
    }

    pub(super) fn tick_receives(&mut self, now: Instant) -> Vec<Action> {
        let patience = self.patience;
        let late = |part: &Receiving| part.waits_since().is_some_and(|since| since + patience <= now);
        let mut actions = Vec::new();
        for ticket in self.receives.keys().copied().collect::<Vec<_>>() {
            let Some(parts) = self.receives.get_mut(&ticket) else { continue };
            for (epoch, part) in parts.iter_mut().filter(|(_, part)| late(part)) {
                let (peer, waited) = (self.peers[epoch].name, now - part.news);
                let (moved, expected) = (part.moved, part.expected);
                part.end = Some(Err(TransferError::Stalled { peer, waited, moved, expected }));
                actions.push(refusal(*epoch, ticket.key, Refusal::Failed));
            }
            actions.extend(self.end_receive(ticket));
        }
        actions
    }

    /// Ends a receive whose sources have all ended.
    fn end_receive(&mut self, ticket: Ticket) -> Option<Action> {
        if self.receives.get(&ticket)?.values().any(|part| part.end.is_none()) {
            return None;
        }
        let parts = self.receives.remove(&ticket)?;
        let ends = parts.into_values().filter_map(|part| part.end);
        Some(Action::Received { ticket, outcome: outcome(ends, |received| received.rank) })
    }
}
