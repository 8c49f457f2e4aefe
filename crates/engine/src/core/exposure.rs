//! What may still be written, and by whom: the physical half of a receive.
//!
//! A part is marked as exposed before the message that names its slots is handed out, so there is no moment at which a
//! source knows slots that are not marked. From then on only these take the mark away: the source's report that all is
//! written; its word that it has stopped and that nothing of it is on its way; its goodbye; the certain end of its process; or,
//! where it has promised to write through the inbox only, that this process lets nothing of it out of there any more. Time does
//! not.

use std::time::Instant;

use super::{Action, Core, Handle, RequestKey, Resend, say};
use crate::error::PeerName;
use crate::message::{About, Message, Refusal, Serial};

/// Whether a source may write to the slots that it was told of.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Exposure {
    Exposed,
    /// As before, and the source has nothing more to say about it: what it had written when its connection failed may be
    /// on its way still.
    Unsettled,
    Quiet,
}

/// Slots of a request that has ended, to which a peer may still write. They come back by the peer's word or death.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) struct Quarantined {
    pub(crate) key: RequestKey,
    pub(crate) peer: PeerName,
    pub(crate) epoch: u64,
    /// Blocks of all groups.
    pub(crate) blocks: usize,
    pub(crate) bytes: u64,
    /// When the request ended.
    pub(crate) since: Instant,
    /// The peer cannot be spoken to at the moment.
    pub(crate) lost: bool,
    /// The peer has stopped, with something on its way.
    pub(crate) unsettled: bool,
}

impl Core {
    /// What may still be written of requests that have ended.
    pub(crate) fn quarantine(&self) -> Vec<Quarantined> {
        let ended = self.receives.iter().filter_map(|(key, receive)| Some((key, receive, receive.ended_at?)));
        let parts = ended.flat_map(|(key, receive, since)| {
            let exposed = receive.parts.iter().filter(|(_, part)| part.exposure != Exposure::Quiet);
            exposed.map(move |(epoch, part)| Quarantined {
                key: *key,
                peer: part.name,
                epoch: *epoch,
                blocks: receive.block_maps.iter().map(|map| map.slots().iter().flatten().count()).sum(),
                bytes: part.expected,
                since,
                lost: !self.peers.get(epoch).is_some_and(|peer| peer.is_up()),
                unsettled: part.exposure == Exposure::Unsettled,
            })
        });
        parts.collect()
    }

    /// Nothing of this source is written any more: it has left in good order, or is dead.
    pub(super) fn source_silenced(&mut self, epoch: u64) -> Vec<Action> {
        let Some(peer) = self.peers.get(&epoch) else { return Vec::new() };
        let mut actions = Vec::new();
        for key in peer.source.receives.clone() {
            let part = self.receives.get_mut(&key).and_then(|receive| receive.parts.get_mut(&epoch));
            // What is being compared with its sums is read until that is done.
            let part = part.filter(|part| part.report.is_none());
            actions.extend(part.and_then(|part| part.be_quiet(epoch)));
            actions.extend(self.settle(key));
        }
        actions.extend(self.forget_if_over(epoch));
        actions
    }

    /// Cuts off what a source may still write of a receive that has ended, if it has promised to write through the inbox only.
    /// Whether it can be spoken to, or lives, does not matter.
    pub(super) fn revoke(&mut self, key: RequestKey, epoch: u64) -> Option<Action> {
        let part = self.receives.get(&key)?.parts.get(&epoch)?;
        let (serial, exposed) = (part.serial, part.exposure != Exposure::Quiet);
        let can = part.inbox_only && part.end.is_some() && exposed && part.report.is_none();
        let anew = can && self.revoking.insert((epoch, serial), key).is_none();
        anew.then_some(Action::Revoke { epoch, serial })
    }

    /// Nothing of a want that was revoked is written any more.
    pub(crate) fn revoked(&mut self, epoch: u64, serial: Serial) -> Vec<Action> {
        let Some(key) = self.revoking.remove(&(epoch, serial)) else { return Vec::new() };
        let part = self.receives.get_mut(&key).and_then(|receive| receive.parts.get_mut(&epoch));
        let Some(part) = part.filter(|part| part.serial == serial && part.report.is_none()) else { return Vec::new() };
        let mut actions: Vec<Action> = part.be_quiet(epoch).into_iter().collect();
        if let Some(peer) = self.peers.get_mut(&epoch) {
            peer.source.verdicts.insert(serial, Some(Refusal::Cancelled));
        }
        actions.extend(self.settle(key));
        actions
    }

    /// Asks a source that can hear again for the end of what it may still write.
    pub(super) fn cancel_again(&mut self, now: Instant, epoch: u64) -> Vec<Action> {
        let Some(peer) = self.peers.get(&epoch) else { return Vec::new() };
        let mut actions = Vec::new();
        for key in peer.source.receives.clone() {
            let Some(part) = self.receives.get_mut(&key).and_then(|receive| receive.parts.get_mut(&epoch)) else {
                continue;
            };
            if part.exposure == Exposure::Exposed && part.end.is_some() {
                part.asks = Some(Resend::new(now, &self.limits));
                actions.push(say(epoch, Message::Cancel(About { key, serial: part.serial })));
                self.arm_incoming(key, epoch);
            }
        }
        actions
    }

    /// Gives the slots of a receive back, once it has ended and no source can touch them.
    pub(super) fn settle(&mut self, key: RequestKey) -> Vec<Action> {
        let Some(receive) = self.receives.get(&key) else { return Vec::new() };
        if !receive.ended || receive.parts.values().any(|part| part.exposure != Exposure::Quiet) {
            return Vec::new();
        }
        let mut actions = vec![Action::Quiet { handle: Handle::Receive(key) }];
        let epochs: Vec<u64> = receive.parts.keys().copied().collect();
        self.receives.remove(&key);
        self.received.insert(key, ());
        for epoch in epochs {
            self.timers.set(super::Subject::Incoming(key, epoch), None);
            if let Some(peer) = self.peers.get_mut(&epoch) {
                peer.source.receives.remove(&key);
            }
            actions.extend(self.forget_if_over(epoch));
        }
        actions
    }
}
