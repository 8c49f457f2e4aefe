//! What is on its way between ranks: frames, writes, and news about connections.

use kvferry_match::Plan;
use kvferry_wire::{PutError, Route, RouteReason, Status, TransferStats};

use super::super::{LinkId, PutId};
use crate::message::{About, Hello, Message, RequestKey, Serial};

#[derive(Clone, Debug)]
pub(super) struct Frame {
    pub(super) from: u64,
    pub(super) to: u64,
    pub(super) message: Message,
}

/// Who writes a destination's memory.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Way {
    /// The source's process.
    Direct,
    /// The destination's process, from its inbox.
    Inbox,
    /// A network, which goes on when the source has ended, and which nobody can stop.
    Runs,
}

/// A write of a plan.
#[derive(Debug)]
pub(super) struct Write {
    pub(super) from: u64,
    pub(super) to: u64,
    pub(super) put: PutId,
    pub(super) key: RequestKey,
    pub(super) bytes: u64,
    /// Slots that have not left the source.
    pub(super) waiting: Vec<u32>,
    /// Slots that have left it and not landed.
    pub(super) flying: Vec<u32>,
    pub(super) serial: Serial,
    pub(super) way: Way,
    /// Of the inbox: the source knows that it takes it.
    pub(super) told: bool,
    /// Of the inbox: it was let in, or refused.
    pub(super) let_in: Option<bool>,
    pub(super) cancelled: bool,
    /// The source has been told how it ended. What flies on is late.
    pub(super) over: bool,
    pub(super) then: Option<Message>,
}

impl Write {
    /// How it has ended, if it has and its source has not been told.
    pub(super) fn end(&self, failed: bool) -> Option<Result<TransferStats, PutError>> {
        if self.over {
            return None;
        }
        if failed {
            let (source, settled) = (Status::ERR_CONNECTION_RESET, self.way == Way::Direct);
            return Some(Err(PutError::Endpoint { source, settled }));
        }
        if self.let_in == Some(false) {
            return Some(Err(PutError::Refused { refusal: kvferry_wire::Refusal::Revoked }));
        }
        let landed = self.flying.is_empty() && (self.waiting.is_empty() || self.cancelled);
        landed.then(|| if self.waiting.is_empty() { Ok(self.stats()) } else { Err(PutError::Cancelled) })
    }

    fn stats(&self) -> TransferStats {
        let (route, reason) = (Route::Direct, RouteReason::TargetMapped);
        TransferStats { bytes: self.bytes, runs: 1, elapsed: std::time::Duration::ZERO, route, reason }
    }
}

/// Something that a rank will be told, or has to do, at some time.
#[derive(Debug)]
pub(super) enum News {
    /// Its connection to a life of a peer has failed.
    Lost(u64),
    /// A life of a peer is over for certain.
    Died(u64),
    Dial(u64),
    /// To make the checksum of what it sends.
    Sum(PutId, Plan),
    /// To compare what has arrived from a life of a peer with its checksums.
    Verify(u64, About),
    /// To let nothing more in of what a life of a peer writes for a want.
    Revoke(u64, Serial),
    Introduce {
        link: LinkId,
        old: u64,
        epoch: u64,
        hello: Box<Hello>,
    },
}
