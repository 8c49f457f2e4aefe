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
    /// The way they took.
    pub route: Route,
    /// Why they took that way.
    pub reason: RouteReason,
    /// From the start of the write until the bytes were there.
    pub elapsed: Duration,
}

/// What one source rank has written to this rank.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Received {
    /// The source rank.
    pub rank: u32,
    /// (layer, role) rows, whole or in part.
    pub rows: u64,
    /// Bytes by this rank's own count.
    pub bytes: u64,
    /// From the post of the receive to the source's report.
    pub elapsed: Duration,
}
