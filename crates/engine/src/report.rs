//! What a completed request moved, by peer.

use std::time::Duration;

/// How bytes went.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
#[non_exhaustive]
pub enum Route {
    /// One remote write a contiguous run.
    Runs,
}

impl std::fmt::Display for Route {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.write_str(match self {
            Self::Runs => "runs",
        })
    }
}

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
    /// How they went.
    pub route: Route,
    /// From the first write to the flush behind the last.
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
