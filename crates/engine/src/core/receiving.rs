//! The destination's side of a request: ask each source, then believe a source only if it reports the bytes and the plan
//! that this side expects of it.
//!
//! The first source that fails ends the request, and the others are asked to stop.

mod reports;

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;
use std::time::{Duration, Instant};

use kvferry_layout::Digest;
use kvferry_match::{BlockMap, Side};
use kvferry_wire::{FRAME_PAYLOAD_BYTES_MAX, Status};

use super::exposure::Exposure;
use super::timers::Subject;
use super::{Action, Core, LinkId, RESEND_MAX, Resend, say};
use crate::error::{PartError, PeerName, Phase, PostError, RequestError, TransferError};
use crate::message::{About, Done, Message, RequestKey, Serial, Want};
use crate::report::Received;

/// Blocks of one receive, all groups together: what surely fits a frame, at 6 bytes a block and 1,024 for the rest.
pub(crate) const WANT_BLOCKS_MAX: usize = (FRAME_PAYLOAD_BYTES_MAX - 1024) / 6;

/// Sends that one source may have announced and nobody here has received.
const ANNOUNCED_MAX: usize = 1 << 16;

/// How long an announcement counts. A source says it again until it is answered, so that what it says no more it has given up.
const ANNOUNCED_FOR: Duration = RESEND_MAX.saturating_mul(2);

/// A receive with the part of each source, by epoch.
#[derive(Debug)]
pub(super) struct Receiving {
    /// Links whose sources may serve it. One, once it has been chosen.
    links: Vec<LinkId>,
    pub(super) block_maps: Arc<[BlockMap]>,
    tokens: Range<u64>,
    posted: Instant,
    /// How long the call that posted it took.
    posting: Duration,
    /// Empty until a link has been chosen.
    pub(super) parts: BTreeMap<u64, Incoming>,
    /// The outcome is known.
    pub(super) ended: bool,
    pub(super) ended_at: Option<Instant>,
}

/// One source's part of a receive.
#[derive(Debug)]
pub(super) struct Incoming {
    pub(super) name: PeerName,
    pub(super) serial: Serial,
    pub(super) expected: u64,
    plan: Digest,
    moved: u64,
    heard: bool,
    started: Instant,
    news: Instant,
    /// When the source began to write, once there is a sign of it.
    begun: Option<Instant>,
    /// The source has promised to write through the inbox only: what it may write can be cut off here.
    pub(super) inbox_only: bool,
    /// A report that is being verified.
    pub(super) report: Option<(Instant, Done)>,
    pub(super) end: Option<Result<Received, ()>>,
    pub(super) exposure: Exposure,
    /// A `Want`, or after the end a `Cancel`, that has not been answered.
    pub(super) asks: Option<Resend>,
}

impl Receiving {
    pub(super) fn uses(&self, link: LinkId) -> bool {
        self.links.contains(&link)
    }

    fn want(&self, key: RequestKey, part: &Incoming) -> Message {
        Message::Want(Want {
            about: About { key, serial: part.serial },
            tokens: self.tokens.clone(),
            bytes: part.expected,
            plan: part.plan,
            block_maps: self.block_maps.to_vec(),
        })
    }
}

impl Incoming {
    fn phase(&self) -> Phase {
        if self.report.is_some() {
            Phase::Settling
        } else if self.heard {
            Phase::Moving
        } else {
            Phase::Waiting
        }
    }

    /// Its source owes a sign. While what that has reported is verified, it is this side that takes its time.
    fn is_awaited(&self) -> bool {
        self.end.is_none() && self.report.is_none()
    }

    /// Nothing writes for it any more.
    pub(super) fn be_quiet(&mut self, epoch: u64) -> Option<Action> {
        self.asks = None;
        let exposed = std::mem::replace(&mut self.exposure, Exposure::Quiet) != Exposure::Quiet;
        exposed.then_some(Action::Expire { epoch, serial: self.serial })
    }

    /// When it is to be looked at again.
    fn due(&self, patience: Duration) -> Option<Instant> {
        let late = self.is_awaited().then(|| self.news + patience);
        let asks = self.asks.map(|asks| asks.due);
        late.into_iter().chain(asks).min()
    }
}

impl Core {
    /// Posts a receive: tells each source where to write. With several links, those of the link whose sources announce that
    /// they send the request.
    pub(crate) fn receive(
        &mut self,
        now: Instant,
        key: RequestKey,
        links: &[LinkId],
        block_maps: &[BlockMap],
        tokens: &Range<u64>,
    ) -> Result<Vec<Action>, PostError> {
        if self.receives.contains_key(&key) {
            return Err(PostError::UnderWay(key));
        }
        if self.received.get(&key).is_some() {
            return Err(PostError::Over(key));
        }
        if tokens.start > tokens.end {
            return Err(PostError::Tokens { tokens: tokens.clone() });
        }
        if self.receives.len() >= self.limits.requests_max {
            return Err(PostError::TooMany { requests_max: self.limits.requests_max });
        }
        let blocks = block_maps.iter().map(|map| map.slots().len()).sum();
        if blocks > WANT_BLOCKS_MAX {
            return Err(PostError::TooManyBlocks { blocks, blocks_max: WANT_BLOCKS_MAX });
        }
        // Every link that may serve it must be able to: what is wrong shows now, and not when a source comes.
        let mut epochs = Vec::new();
        for link in links {
            let peers = self.peers_for(*link, Side::Destination)?;
            for epoch in &peers {
                let peer = &self.peers[epoch];
                let expected = peer.peer.template.expected_bytes(block_maps, tokens.clone());
                expected.map_err(|source| PostError::BlockMaps { peer: peer.name, source })?;
            }
            epochs.push((*link, peers));
        }
        let announced = |peers: &[u64]| {
            let said = peers.iter().filter_map(|epoch| self.peers[epoch].source.announced.get(&key));
            said.max().copied().filter(|said| *said + ANNOUNCED_FOR > now)
        };
        let chosen = match &epochs[..] {
            [] => return Err(PostError::NoLink),
            [(link, _)] => Some(*link),
            // The request may have been moved from one to another, of which the first has nothing to say any more.
            several => {
                let announced = several.iter().filter_map(|(link, peers)| Some((announced(peers)?, *link)));
                announced.max().map(|(_, link)| link)
            }
        };
        let receive = Receiving {
            links: links.to_vec(),
            block_maps: block_maps.into(),
            tokens: tokens.clone(),
            posted: now,
            posting: Duration::ZERO,
            parts: BTreeMap::new(),
            ended: false,
            ended_at: None,
        };
        self.receives.insert(key, receive);
        match chosen {
            Some(link) => Ok(self.choose(now, key, link)),
            None => {
                self.timers.set(Subject::Choice(key), Some(now + self.limits.patience));
                Ok(Vec::new())
            }
        }
    }

    /// How long the call that posted a receive took.
    pub(crate) fn receive_posted_in(&mut self, key: RequestKey, posting: Duration) {
        if let Some(receive) = self.receives.get_mut(&key) {
            receive.posting = posting;
        }
    }

    /// Asks the sources of one link, and lets those of the others go.
    fn choose(&mut self, now: Instant, key: RequestKey, link: LinkId) -> Vec<Action> {
        let Some(receive) = self.receives.get_mut(&key) else { return Vec::new() };
        self.timers.set(Subject::Choice(key), None);
        let others = std::mem::replace(&mut receive.links, vec![link]);
        let mut actions = Vec::new();
        for other in others.into_iter().filter(|other| *other != link) {
            for epoch in self.links.get(&other).map(|state| state.peers.clone()).unwrap_or_default() {
                let peer = self.peers.get_mut(&epoch);
                if peer.is_some_and(|peer| peer.source.announced.remove(&key).is_some()) {
                    actions.push(say(epoch, Message::Release(key)));
                }
            }
        }
        let epochs = match self.peers_for(link, Side::Destination) {
            Ok(epochs) => epochs,
            Err(PostError::Lost(peer)) => {
                let (moved, expected) = (0, 0);
                let error = TransferError::Lost { peer, moved, expected, source: Status::ERR_CONNECTION_RESET };
                actions.extend(self.fail_receive(now, key, vec![PartError::own(Phase::Waiting, error)]));
                return actions;
            }
            Err(_) => return actions,
        };
        let (mut asked, mut failed) = (Vec::new(), Vec::new());
        for epoch in epochs {
            let (Some(receive), Some(peer)) = (self.receives.get_mut(&key), self.peers.get_mut(&epoch)) else {
                continue;
            };
            peer.source.announced.remove(&key);
            let expectation = peer.peer.template.expectation(&receive.block_maps, receive.tokens.clone());
            let expectation = match expectation {
                Ok(expectation) => expectation,
                Err(source) => {
                    let error = TransferError::BlockMaps { peer: peer.name, source };
                    failed.push(PartError { epoch, phase: Phase::Waiting, error });
                    continue;
                }
            };
            let serial = Serial(self.next_serial);
            self.next_serial += 1;
            let part = Incoming {
                name: peer.name,
                serial,
                expected: expectation.bytes,
                plan: expectation.digest,
                moved: 0,
                heard: false,
                started: receive.posted,
                news: now,
                begun: None,
                inbox_only: false,
                report: None,
                end: None,
                // Before the want leaves.
                exposure: Exposure::Exposed,
                asks: Some(Resend::new(now, &self.limits)),
            };
            asked.push(Action::Permit { epoch, serial });
            asked.push(say(epoch, receive.want(key, &part)));
            peer.source.receives.insert(key);
            receive.parts.insert(epoch, part);
            self.arm_incoming(key, epoch);
        }
        if failed.is_empty() {
            actions.extend(asked);
            actions.extend(self.finish_receive(now, key));
        } else {
            // The wants were never handed out.
            let parts = self.receives.get_mut(&key).into_iter().flat_map(|receive| &mut receive.parts);
            actions.extend(parts.filter_map(|(epoch, part)| part.be_quiet(*epoch)));
            actions.extend(self.fail_receive(now, key, failed));
        }
        actions
    }

    pub(super) fn announced(&mut self, now: Instant, epoch: u64, key: RequestKey) -> Vec<Action> {
        let over = self.received.get(&key).is_some();
        let Some(peer) = self.peer_on(epoch, Side::Source) else { return Vec::new() };
        let link = peer.link;
        match self.receives.get(&key) {
            Some(receive) if receive.parts.is_empty() && !receive.ended && receive.links.contains(&link) => {
                self.choose(now, key, link)
            }
            // Its want is on its way, or about to be said again.
            Some(receive) if receive.parts.contains_key(&epoch) && !receive.ended => Vec::new(),
            Some(_) => vec![say(epoch, Message::Release(key))],
            None if over => vec![say(epoch, Message::Release(key))],
            None => {
                if let Some(peer) = self.peer_on(epoch, Side::Source) {
                    let announced = &mut peer.source.announced;
                    if announced.len() >= ANNOUNCED_MAX {
                        announced.retain(|_, said| *said + ANNOUNCED_FOR > now);
                    }
                    if announced.len() < ANNOUNCED_MAX || announced.contains_key(&key) {
                        announced.insert(key, now);
                    }
                }
                Vec::new()
            }
        }
    }

    pub(super) fn lose_source(&mut self, now: Instant, epoch: u64, source: Status) -> Vec<Action> {
        let Some(peer) = self.peers.get(&epoch) else { return Vec::new() };
        let mut actions = Vec::new();
        for key in peer.source.receives.clone() {
            let Some(part) = self.receives.get_mut(&key).and_then(|receive| receive.parts.get_mut(&epoch)) else {
                continue;
            };
            if part.end.is_none() {
                let (phase, peer, moved, expected) = (part.phase(), part.name, part.moved, part.expected);
                let error = TransferError::Lost { peer, moved, expected, source };
                actions.extend(self.fail_receive(now, key, vec![PartError { epoch, phase, error }]));
            }
        }
        actions
    }

    /// Gives a receive up.
    pub(crate) fn cancel_receive(&mut self, now: Instant, key: RequestKey) -> Vec<Action> {
        match self.receives.get(&key) {
            Some(receive) if !receive.ended => {
                self.fail_receive(now, key, vec![PartError::own(Phase::Waiting, TransferError::Cancelled)])
            }
            _ => Vec::new(),
        }
    }

    pub(super) fn choice_due(&mut self, now: Instant, key: RequestKey) -> Vec<Action> {
        let waited = self.limits.patience;
        let error = PartError::own(Phase::Waiting, TransferError::NobodySends { waited });
        self.fail_receive(now, key, vec![error])
    }

    pub(super) fn incoming_due(&mut self, now: Instant, key: RequestKey, epoch: u64) -> Vec<Action> {
        let patience = self.limits.patience;
        let Some(receive) = self.receives.get_mut(&key) else { return Vec::new() };
        let up = self.peers.get(&epoch).is_some_and(|peer| peer.can_hear());
        let Some(part) = receive.parts.get_mut(&epoch) else { return Vec::new() };
        let mut actions = Vec::new();
        if part.is_awaited() && part.news + patience <= now {
            let (phase, peer, waited) = (part.phase(), part.name, now - part.news);
            let error = TransferError::Stalled { peer, waited, moved: part.moved, expected: part.expected };
            return self.fail_receive(now, key, vec![PartError { epoch, phase, error }]);
        }
        if part.asks.as_mut().is_some_and(|asks| asks.is_due(now)) && up {
            let part = &receive.parts[&epoch];
            let about = About { key, serial: part.serial };
            let again = if part.end.is_none() { receive.want(key, part) } else { Message::Cancel(about) };
            actions.push(say(epoch, again));
            self.resent += 1;
        }
        self.arm_incoming(key, epoch);
        actions
    }

    pub(super) fn arm_incoming(&mut self, key: RequestKey, epoch: u64) {
        let part = self.receives.get(&key).and_then(|receive| receive.parts.get(&epoch));
        let due = part.and_then(|part| part.due(self.limits.patience));
        self.timers.set(Subject::Incoming(key, epoch), due);
    }

    /// Ends a receive well if all its sources have.
    fn finish_receive(&mut self, now: Instant, key: RequestKey) -> Vec<Action> {
        let Some(receive) = self.receives.get_mut(&key).filter(|receive| !receive.ended) else { return Vec::new() };
        let ends = receive.parts.values().map(|part| match &part.end {
            Some(Ok(received)) => Some(received.clone()),
            _ => None,
        });
        let Some(mut received) = ends.collect::<Option<Vec<Received>>>() else { return Vec::new() };
        (receive.ended, receive.ended_at) = (true, Some(now));
        for Received { times, .. } in &mut received {
            (times.posting, times.total) = (receive.posting, now - receive.posted);
        }
        received.sort_by_key(|received| received.rank);
        let mut actions = vec![Action::Received { key, outcome: Ok(received) }];
        actions.extend(self.settle(key));
        actions
    }

    /// Ends a receive badly, unless it has ended, and asks the sources that may still write to stop.
    fn fail_receive(&mut self, now: Instant, key: RequestKey, mut errors: Vec<PartError>) -> Vec<Action> {
        let Some(receive) = self.receives.get_mut(&key) else { return Vec::new() };
        let mut actions = Vec::new();
        if !receive.ended {
            (receive.ended, receive.ended_at) = (true, Some(now));
            errors.sort_by_key(|part| part.error.peer());
            let limits = self.limits;
            for (epoch, part) in &mut receive.parts {
                if part.end.is_none() {
                    part.end = Some(Err(()));
                }
                if part.exposure == Exposure::Exposed {
                    part.asks = Some(Resend::new(now, &limits));
                    let about = About { key, serial: part.serial };
                    let heard = self.peers.get(epoch).is_some_and(|peer| peer.can_hear());
                    actions.extend(heard.then(|| say(*epoch, Message::Cancel(about))));
                }
            }
            for epoch in receive.parts.keys().copied().collect::<Vec<_>>() {
                self.arm_incoming(key, epoch);
                actions.extend(self.revoke(key, epoch));
            }
            self.timers.set(Subject::Choice(key), None);
            actions.push(Action::Received { key, outcome: Err(RequestError { key, errors }) });
        }
        actions.extend(self.settle(key));
        actions
    }
}
