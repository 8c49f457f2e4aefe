//! What destinations want of this source: kept until a send serves it, refused where none will, given up when they say so.

use std::sync::Arc;
use std::time::Instant;

use kvferry_match::Side;

use super::outgoing::State;
use super::peers::blocks;
use super::{Action, Core, Ticket, say};
use crate::error::{PartError, Phase, TransferError};
use crate::message::{About, Late, Message, Refusal, Serial, Stopped, Want};

/// Receives that one peer may post ahead of the sends that serve them, and the blocks that they may name together.
const WANTS_MAX: usize = 1 << 16;
const WANTED_BLOCKS_MAX: usize = 1 << 22;

impl Core {
    pub(super) fn want(&mut self, now: Instant, epoch: u64, want: Want) -> Vec<Action> {
        let about = want.about;
        let Some(peer) = self.peer_on(epoch, Side::Destination) else { return Vec::new() };
        // Before it has welcomed this side's call an old want cannot be told from a new one.
        if !peer.is_up() {
            return Vec::new();
        }
        let ticket = Ticket { link: peer.link, key: about.key };
        if let Some(part) = self.sends.get(&ticket).and_then(|send| send.parts.get(&epoch))
            && part.about() == Some(about)
        {
            let again = part.question(about.key, &self.sends[&ticket].note).unwrap_or(Message::Got(about));
            return vec![say(epoch, again)];
        }
        let late = self.late(epoch, about.serial);
        let nack = |reason| vec![say(epoch, Message::Stopped(Stopped { about, reason, late }))];
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
    pub(super) fn nack(&mut self, epoch: u64, about: About) -> Vec<Action> {
        if let Some(peer) = self.peers.get_mut(&epoch) {
            if peer.destination.wants.get(&about.key).is_some_and(|want| want.about == about) {
                peer.destination.take_want(&about.key);
            }
            peer.destination.finish(about.serial);
        }
        let late = self.late(epoch, about.serial);
        vec![say(epoch, Message::Stopped(Stopped { about, reason: Refusal::Cancelled, late }))]
    }

    /// What was written for a want and may be on its way still. It outlives the send, the link and the memory of both.
    pub(super) fn late(&self, epoch: u64, serial: Serial) -> Late {
        match self.unsettled.get(&(epoch, serial)) {
            Some(late) => *late,
            None if self.doubtful.get(&epoch).is_some() => Late::Anything,
            None => Late::Nothing,
        }
    }

    /// What was written for a want may be on its way for as long as this process lives.
    pub(super) fn unsettle(&mut self, epoch: u64, serial: Serial, late: Late) {
        if let Some(known) = self.unsettled.get_mut(&(epoch, serial)) {
            *known = late.max(*known);
        } else if let Some((forgotten, _)) = self.unsettled.insert((epoch, serial), late) {
            self.doubtful.insert(forgotten, ());
        }
    }

    /// Whether nothing that was written to a peer is on its way still.
    pub(super) fn all_settled(&self, epoch: u64) -> bool {
        self.doubtful.get(&epoch).is_none() && !self.unsettled.keys().any(|(of, _)| *of == epoch)
    }
}
