//! What a completed request moved, by peer.

use std::time::Duration;

use kvferry_wire::{Route, RouteReason};

/// What this rank has written to one destination rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Sent {
    /// The destination rank.
    pub rank: u32,
    /// (layer, role) rows, whole or in part.
    pub rows: u64,
    /// Strided pieces, counted once a pair of slots.
    pub pieces: u64,
    /// Contiguous copies.
    pub runs: u64,
    /// Bytes, equal to the destination's own count.
    pub bytes: u64,
    /// The way they took; of a send in parts, the last one.
    pub route: Route,
    /// Why they took that way.
    pub reason: RouteReason,
    /// On the wire: from the start of a write until its bytes were there, over all writes.
    pub elapsed: Duration,
    /// Where the time went.
    pub times: Times,
}

/// Where the time of a send went.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Times {
    /// In the call that posted it.
    pub posting: Duration,
    /// From then until the destination had said where to.
    pub queued: Duration,
    /// From the end of the last write until the destination had agreed.
    pub settling: Duration,
    /// From the post to the end.
    pub total: Duration,
}

/// What one source rank has written to this rank.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Received {
    /// The source rank.
    pub rank: u32,
    /// (layer, role) rows, whole or in part.
    pub rows: u64,
    /// Bytes by this rank's own count.
    pub bytes: u64,
    /// From the post of the receive to the source's report.
    pub elapsed: Duration,
    /// What the sender's user added: see [`PartSpec::note`](crate::PartSpec::note).
    pub note: Vec<u8>,
}
