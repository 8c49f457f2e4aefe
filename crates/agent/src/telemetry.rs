//! What is known of one transfer's time.

use std::time::{Duration, SystemTime};

use kvferry_wire::{Route, RouteReason};

/// How the last post of a transfer went.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Telemetry {
    /// When it was posted, by the clock of the host.
    pub started: SystemTime,
    /// How long the call that posted it took.
    pub posting: Duration,
    /// From the post until it was known to have ended.
    pub total: Duration,
    /// Bytes moved.
    pub bytes: u64,
    /// Entries paired.
    pub entries: u64,
    /// The way that the bytes took, and why; `None` if the peer was asked to push them, or they went in a
    /// message.
    pub route: Option<(Route, RouteReason)>,
}
