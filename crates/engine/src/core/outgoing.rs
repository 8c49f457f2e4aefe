//! One destination's part of a send: from its want, through the writes that serve it, to the destination's word.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use super::{PutId, Resend};
use crate::error::{PeerName, Phase};
use crate::message::{About, Done, Late, Message, PartCheck, Refusal, RequestKey, Stopped, Want};
use crate::report::Sent;

/// One destination's part of a send.
#[derive(Debug)]
pub(super) struct Outgoing {
    pub(super) name: PeerName,
    pub(super) want: Option<Arc<Want>>,
    pub(super) news: Instant,
    /// Of each part that was pushed, whether its write has begun.
    pub(super) started: Vec<bool>,
    /// Writes that have not ended.
    pub(super) puts: BTreeMap<PutId, Put>,
    pub(super) moved: u64,
    pub(super) sent: Sent,
    pub(super) checks: Vec<PartCheck>,
    pub(super) state: State,
    /// What a write had posted before it failed, and may be on its way still.
    pub(super) late: Late,
    /// The destination has been told that everything comes through its inbox.
    pub(super) inbox_only: bool,
    /// An announcement, a report or the word that it has stopped, which has not been answered.
    pub(super) asks: Option<Resend>,
    /// The wire says the report when the last write has ended.
    pub(super) told: bool,
    /// When the last write ended.
    pub(super) settling: Option<Instant>,
}

/// A write that has not ended.
#[derive(Debug)]
pub(super) struct Put {
    pub(super) moved: u64,
    /// It is with the wire; before that, its bytes are summed.
    pub(super) posted: bool,
    /// The wire has said that it takes the destination's inbox.
    pub(super) in_inbox: bool,
    pub(super) part: usize,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum State {
    /// The destination has not said where to, or not all is written.
    Open,
    /// All is written; the destination has not said that it is what it expected.
    Reporting,
    /// It ends badly. Once no write is in flight, the destination is told, unless it cannot be or needs not be.
    Stopping { reason: Refusal, tell: bool },
    /// For good.
    Over { well: bool },
}

impl Outgoing {
    pub(super) fn new(now: Instant, name: PeerName, rank: u32, rows: u64, pushed: usize) -> Self {
        let sent = Sent {
            rank,
            rows,
            pieces: 0,
            runs: 0,
            bytes: 0,
            carried: Vec::new(),
            elapsed: Duration::ZERO,
            times: Default::default(),
        };
        Self {
            name,
            want: None,
            news: now,
            started: vec![false; pushed],
            puts: BTreeMap::new(),
            moved: 0,
            sent,
            checks: Vec::new(),
            state: State::Open,
            late: Late::Nothing,
            inbox_only: false,
            asks: None,
            told: false,
            settling: None,
        }
    }

    pub(super) fn phase(&self) -> Phase {
        match (&self.state, &self.want) {
            (State::Reporting, _) => Phase::Settling,
            (_, Some(_)) => Phase::Moving,
            (_, None) => Phase::Waiting,
        }
    }

    pub(super) fn is_over(&self) -> bool {
        matches!(self.state, State::Over { .. })
    }

    pub(super) fn expected(&self) -> u64 {
        self.want.as_ref().map_or(0, |want| want.bytes)
    }

    /// Bytes known to have moved.
    pub(super) fn moved(&self) -> u64 {
        self.moved + self.puts.values().map(|put| put.moved).sum::<u64>()
    }

    /// Its destination, or a write to it, owes a sign. While bytes are summed it is this side that takes its time.
    pub(super) fn is_awaited(&self) -> bool {
        matches!(self.state, State::Open | State::Reporting) && self.puts.values().all(|put| put.posted)
    }

    /// When it is to be looked at again.
    pub(super) fn due(&self, patience: Duration) -> Option<Instant> {
        let late = self.is_awaited().then(|| self.news + patience);
        let asks = self.asks.map(|asks| asks.due);
        late.into_iter().chain(asks).min()
    }

    pub(super) fn about(&self) -> Option<About> {
        self.want.as_ref().map(|want| want.about)
    }

    /// The report, which is true once every write has ended well.
    pub(super) fn report(&self, note: &[u8]) -> Option<Message> {
        let want = self.want.as_ref()?;
        Some(Message::Done(Done {
            about: want.about,
            bytes: want.bytes,
            plan: want.plan,
            carried: self.sent.carried.clone(),
            note: note.to_vec(),
            checks: self.checks.clone(),
        }))
    }

    /// What the destination has not answered.
    pub(super) fn question(&self, key: RequestKey, note: &[u8]) -> Option<Message> {
        match self.state {
            State::Open if self.want.is_none() => Some(Message::Announce(key)),
            State::Reporting => self.report(note),
            State::Stopping { reason, tell: true } if self.puts.is_empty() => {
                Some(Message::Stopped(Stopped { about: self.about()?, reason, late: self.late }))
            }
            _ => None,
        }
    }
}
