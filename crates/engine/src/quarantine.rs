//! Slots that nobody may use yet.

use std::fmt;
use std::time::{Duration, Instant};

use crate::core::Quarantined;
use crate::error::PeerName;
use crate::message::RequestKey;

/// Slots of one receive to which one peer may still write, although the receive has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Quarantine {
    /// The request and attempt.
    pub key: RequestKey,
    /// Who may still write.
    pub peer: PeerName,
    /// The life of it that was told of the slots.
    pub epoch: u64,
    /// Slots of the request, over all groups.
    pub slots: usize,
    /// Pools that they are in at most: all of this rank's.
    pub pools: usize,
    /// Bytes that the peer was to write.
    pub bytes: u64,
    /// Since the request ended.
    pub elapsed: Duration,
    /// What is missing.
    pub why: QuarantineReason,
}

/// What keeps slots from being given back.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum QuarantineReason {
    /// The peer was asked to stop and has not answered: it is busy, frozen, or the answer is on its way.
    NoAnswer,
    /// The peer cannot be spoken to, and nothing proves that it is dead.
    Unreachable,
    /// The peer has stopped, but its connection failed under puts of UCX's that may be on their way still.
    Unsettled,
}

impl Quarantine {
    pub(crate) fn new(now: Instant, pools: usize, quarantined: Quarantined) -> Self {
        let Quarantined { key, peer, epoch, blocks: slots, bytes, since, lost, unsettled } = quarantined;
        let why = match (unsettled, lost) {
            (true, _) => QuarantineReason::Unsettled,
            (false, true) => QuarantineReason::Unreachable,
            (false, false) => QuarantineReason::NoAnswer,
        };
        Self { key, peer, epoch, slots, pools, bytes, elapsed: now.saturating_duration_since(since), why }
    }
}

impl fmt::Display for Quarantine {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let Self { key, peer, epoch, slots, pools, bytes, elapsed, why } = self;
        let why = match why {
            QuarantineReason::NoAnswer => "has not answered",
            QuarantineReason::Unreachable => "cannot be reached",
            QuarantineReason::Unsettled => "left a write on its way",
        };
        write!(
            f,
            "request {} attempt {}: {slots} slots in {pools} pools for {elapsed:.1?}: {peer} (epoch {epoch:016x}), which \
             was to write {bytes} B, {why}",
            key.request, key.attempt
        )
    }
}
