//! What sources say: how far they are, that they are done, that they have stopped. A report is believed if it is what this side
//! expects.

use std::time::{Duration, Instant};

use kvferry_match::Side;

use super::Incoming;
use crate::core::exposure::Exposure;
use crate::core::{Action, Core, Handle, ToVerify, say};
use crate::error::{PartError, TransferError};
use crate::message::{About, Done, Late, Message, Moved, Refusal, Refused, Stopped};
use crate::report::{Received, Times};

impl Core {
    /// The part of a receive that a source speaks of.
    fn incoming(&mut self, epoch: u64, about: About) -> Option<&mut Incoming> {
        let part = self.receives.get_mut(&about.key)?.parts.get_mut(&epoch)?;
        (part.serial == about.serial).then_some(part)
    }

    pub(in crate::core) fn got(&mut self, now: Instant, epoch: u64, about: About) -> Vec<Action> {
        let Some(part) = self.incoming(epoch, about) else { return Vec::new() };
        if part.end.is_none() && !part.heard {
            // The source is there: from now on it owes bytes.
            (part.heard, part.news, part.asks) = (true, now, None);
            self.arm_incoming(about.key, epoch);
        }
        Vec::new()
    }

    pub(in crate::core) fn moved(
        &mut self,
        now: Instant,
        epoch: u64,
        Moved { about, bytes, inbox }: Moved,
    ) -> Vec<Action> {
        let Some(part) = self.incoming(epoch, about) else { return Vec::new() };
        part.inbox_only |= inbox;
        let bytes = bytes.min(part.expected);
        if part.end.is_some() {
            return self.revoke(about.key, epoch).into_iter().collect();
        }
        if inbox {
            part.begun.get_or_insert(now);
        }
        if bytes <= part.moved {
            return Vec::new(); // no progress, so no reason for more patience
        }
        (part.heard, part.news, part.moved, part.asks) = (true, now, bytes, None);
        part.begun.get_or_insert(now);
        self.arm_incoming(about.key, epoch);
        let moved = self.receives[&about.key].parts.values().map(|part| part.moved).sum();
        vec![Action::Progress { handle: Handle::Receive(about.key), moved }]
    }

    pub(in crate::core) fn done(&mut self, now: Instant, epoch: u64, done: Done) -> Vec<Action> {
        let (about, verify) = (done.about, self.limits.verify);
        let Some(peer) = self.peer_on(epoch, Side::Source) else { return Vec::new() };
        let verdict = peer.source.verdicts.get(&about.serial).copied();
        let Some(part) = self.incoming(epoch, about).filter(|part| part.exposure == Exposure::Exposed) else {
            return match verdict {
                Some(None) => vec![say(epoch, Message::DoneAck(about))],
                Some(Some(reason)) => vec![say(epoch, Message::Refused(Refused { about, reason }))],
                None => vec![say(epoch, Message::Refused(Refused { about, reason: Refusal::Unknown }))],
            };
        };
        if part.report.is_some() {
            return Vec::new(); // being verified: the slots are read until that is done
        }
        if part.end.is_some() {
            // Too late to be of use, but nothing is written any more.
            return self.conclude(now, epoch, about, Err((Refusal::Cancelled, None)));
        }
        part.news = now;
        let (peer, reported, expected) = (part.name, done.bytes, part.expected);
        if (done.bytes, done.plan) != (expected, part.plan) {
            let error = TransferError::PlansDiffer { peer, reported, expected };
            return self.conclude(now, epoch, about, Err((Refusal::PlansDiffer, Some(error))));
        }
        if verify && expected > 0 {
            part.report = Some((now, done.clone()));
            part.asks = None;
            self.arm_incoming(about.key, epoch);
            let receive = &self.receives[&about.key];
            let check = Box::new(ToVerify {
                serial: about.serial,
                tokens: receive.tokens.clone(),
                bytes: expected,
                block_maps: receive.block_maps.clone(),
                checks: done.checks,
            });
            return vec![Action::Verify { epoch, key: about.key, check }];
        }
        self.conclude(now, epoch, about, Ok((now, done)))
    }

    /// What has arrived was compared with the sums in the report.
    pub(crate) fn verified(&mut self, now: Instant, epoch: u64, about: About, same: bool) -> Vec<Action> {
        let Some(part) = self.incoming(epoch, about).filter(|part| part.exposure == Exposure::Exposed) else {
            return Vec::new();
        };
        let Some(report) = part.report.take() else { return Vec::new() };
        let peer = part.name;
        let verdict = match (&part.end, same) {
            (Some(_), _) => Err((Refusal::Cancelled, None)),
            (None, true) => Ok(report),
            (None, false) => Err((Refusal::Corrupted, Some(TransferError::Corrupted { peer }))),
        };
        self.conclude(now, epoch, about, verdict)
    }

    /// A source has written all that it will: answers its report, and ends the part if that is still open.
    fn conclude(
        &mut self,
        now: Instant,
        epoch: u64,
        about: About,
        verdict: Result<(Instant, Done), (Refusal, Option<TransferError>)>,
    ) -> Vec<Action> {
        let Some(peer) = self.peers.get_mut(&epoch) else { return Vec::new() };
        let (rank, rows) = (peer.peer.rank, peer.peer.rows);
        peer.source.verdicts.insert(about.serial, verdict.as_ref().err().map(|(reason, _)| *reason));
        let answer = match &verdict {
            Ok(_) => Message::DoneAck(about),
            Err((reason, _)) => Message::Refused(Refused { about, reason: *reason }),
        };
        let mut actions = vec![say(epoch, answer)];
        let Some(part) = self.incoming(epoch, about) else { return actions };
        let phase = part.phase();
        actions.extend(part.be_quiet(epoch));
        match verdict {
            Ok((reported, Done { carried, note, .. })) => {
                part.moved = part.expected;
                let (bytes, elapsed) = (part.expected, now - part.started);
                // What is over before there is a word of it began as long ago as it took.
                let writing = carried.iter().fold(Duration::ZERO, |sum, of| sum.saturating_add(of.elapsed));
                let until_report = reported - part.started;
                let queued = part.begun.map_or(until_report.saturating_sub(writing), |begun| begun - part.started);
                let times = Times { queued, settling: now - reported, ..Times::default() };
                part.end = Some(Ok(Received { rank, rows, bytes, carried, elapsed, times, note }));
                self.arm_incoming(about.key, epoch);
                actions.extend(self.finish_receive(now, about.key));
            }
            Err((_, error)) => {
                let errors = error.map(|error| PartError { epoch, phase, error });
                actions.extend(self.fail_receive(now, about.key, errors.into_iter().collect()));
            }
        }
        actions
    }

    pub(in crate::core) fn stopped(&mut self, now: Instant, epoch: u64, stopped: Stopped) -> Vec<Action> {
        let Stopped { about, reason, late } = stopped;
        if self.peer_on(epoch, Side::Source).is_none() {
            return Vec::new();
        }
        let mut actions = vec![say(epoch, Message::StopAck(about))];
        let part = self.incoming(epoch, about).filter(|part| part.exposure == Exposure::Exposed);
        // It had reported before: what is being verified is concluded by that.
        let Some(part) = part.filter(|part| part.report.is_none()) else { return actions };
        let (peer, phase) = (part.name, part.phase());
        if late == Late::Nothing {
            actions.extend(part.be_quiet(epoch));
        } else {
            (part.exposure, part.asks) = (Exposure::Unsettled, None);
            part.inbox_only |= late == Late::Inbox;
        }
        let open = part.end.is_none();
        let error = PartError { epoch, phase, error: TransferError::Refused { peer, source: reason } };
        let error = open.then_some(error);
        actions.extend(self.fail_receive(now, about.key, error.into_iter().collect()));
        actions.extend(self.revoke(about.key, epoch));
        actions
    }
}
