//! What a rank's process says while it works: one JSON object a line on standard output.

use std::collections::BTreeSet;

use kvferry_wire::TransferStats;
use serde::{Deserialize, Serialize};

use crate::check::Verified;
use crate::meet::Member;

/// Bytes of one line at most.
pub const LINE_BYTES_MAX: u64 = 64 << 10;

/// What a rank does.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Serialize, Deserialize)]
#[serde(rename_all = "snake_case")]
pub enum Phase {
    /// Fills its pools.
    Fill,
    /// Sends or receives.
    Move,
    /// Compares.
    Check,
}

/// One line.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
#[serde(tag = "event", rename_all = "snake_case")]
pub enum Event {
    /// How far a phase is.
    Progress {
        /// The phase.
        phase: Phase,
        /// Bytes done.
        done_bytes: u64,
        /// Bytes of the whole phase, if the rank knows: a sender learns from its destinations what they want.
        total_bytes: Option<u64>,
    },
    /// One rank pair is done.
    Pair(Pair),
    /// A receiver has compared every byte and all are right.
    Verified(Verified),
    /// The last line of a rank that failed.
    Error {
        /// What happened.
        message: String,
        /// The code that it exits with.
        exit_code: u8,
        /// The rank that failed before, if that is why.
        #[serde(default, skip_serializing_if = "Option::is_none")]
        culprit: Option<Member>,
    },
}

/// What went from one source rank to one destination rank.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Pair {
    /// Rank of the sending instance.
    pub source_rank: u32,
    /// Rank of the receiving instance.
    pub destination_rank: u32,
    /// `(layer, role)` rows.
    pub rows: u64,
    /// Strided pieces, over all slot pairs; a receiver does not know.
    pub pieces: Option<u64>,
    /// Contiguous runs, over all slot pairs.
    pub runs: u64,
    /// Bytes, by the count of whoever says so.
    pub bytes: u64,
    /// How they went, in alphabetical order; empty if there were none.
    pub route: String,
    /// A sender: from the first write to the flush behind the last. A receiver: from asking to being told.
    pub elapsed_ms: f64,
}

/// The names of the routes that bytes took.
pub fn routes(carried: &[TransferStats]) -> String {
    let names: BTreeSet<String> = carried.iter().map(|of| of.route.to_string()).collect();
    Vec::from_iter(names).join(", ")
}

impl Pair {
    /// Gigabytes (10^9) a second.
    pub fn gb_per_s(&self) -> f64 {
        // Bytes of any real transfer are exact in an f64.
        self.bytes as f64 / (self.elapsed_ms * 1e6).max(f64::MIN_POSITIVE)
    }
}
