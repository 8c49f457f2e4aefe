//! What a completed request moved, by peer.

use std::time::Duration;

use kvferry_wire::TransferStats;

/// What this rank has written to one destination rank.
#[derive(Clone, Debug, PartialEq, Eq)]
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
    /// The ways that they took, and why: one entry a route and reason, of which a send in parts may have several.
    pub carried: Vec<TransferStats>,
    /// On the wire: from the start of a write until its bytes were there, over all writes.
    pub elapsed: Duration,
    /// Where the time went.
    pub times: Times,
}

/// Where the time of a request went.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct Times {
    /// In the call that posted it.
    pub posting: Duration,
    /// From then on. Of a send: until the destination had said where to. Of a receive: until the source began to write, as far
    /// as this side can tell.
    pub queued: Duration,
    /// From the end of the last write, of which a receive hears by the source's report, until this rank and its peer had agreed.
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
    /// The ways that they took, and why, as the source says: one entry a route and reason.
    pub carried: Vec<TransferStats>,
    /// From the post of the receive to the source's report.
    pub elapsed: Duration,
    /// Where the time went.
    pub times: Times,
    /// What the sender's user added: see [`PartSpec::note`](crate::PartSpec::note).
    pub note: Vec<u8>,
}

/// Adds what one write has moved.
pub(crate) fn carry(carried: &mut Vec<TransferStats>, stats: TransferStats) {
    match carried.iter_mut().find(|of| (of.route, of.reason) == (stats.route, stats.reason)) {
        Some(of) => {
            of.bytes = of.bytes.saturating_add(stats.bytes);
            of.runs = of.runs.saturating_add(stats.runs);
            of.elapsed = of.elapsed.saturating_add(stats.elapsed);
        }
        None => carried.push(stats),
    }
}
