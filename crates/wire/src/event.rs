//! What a worker tells its owner.

use std::time::Duration;

use serde::{Deserialize, Serialize};
use ucx_sys::Status;

use crate::endpoint::EndpointId;
use crate::error::PutError;
use crate::frame::{Frame, FrameError};
use crate::permits::Permit;
use crate::route::{Route, RouteReason};

/// The caller's name for a transfer, given when it is posted and told back when it has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TransferId(pub u64);

/// What a completed transfer moved.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub struct TransferStats {
    /// Bytes written.
    pub bytes: u64,
    /// Contiguous copies that the transfer is made of.
    pub runs: u64,
    /// From its start to its end.
    pub elapsed: Duration,
    /// The way it took.
    pub route: Route,
    /// Why it took that way.
    pub reason: RouteReason,
}

/// Bytes of [`TransferStats`] at the end of a frame, at most.
pub(crate) const STATS_BYTES_MAX: usize = 64;

impl TransferStats {
    /// Puts them at the end of a payload.
    pub(crate) fn append_to(&self, payload: Vec<u8>) -> Vec<u8> {
        postcard::to_extend(self, payload).expect("plain data in memory always encodes")
    }

    /// Reads what [`Worker::put_permitted`](crate::Worker::put_permitted) has put at the end of a payload. `None`: it is
    /// something else.
    #[must_use]
    pub fn from_bytes(bytes: &[u8]) -> Option<Self> {
        match postcard::take_from_bytes(bytes) {
            Ok((stats, [])) => Some(stats),
            _ => None,
        }
    }
}

/// Something that happened.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Event {
    /// A peer sent a frame.
    Frame(Frame),
    /// A message arrived that is no frame for this worker. It was dropped; who sent it is not known.
    BadFrame(FrameError),
    /// The peer is gone or unreachable, or cannot answer any more. The endpoint closes itself; its transfers end with an error each. Of a peer on this host
    /// [`Event::PeerDied`] follows, however late: [close](crate::Worker::close) the endpoint if that is of no interest.
    EndpointFailed {
        /// The endpoint, dead from now on.
        endpoint: EndpointId,
        /// UCX's reason.
        status: Status,
    },
    /// The process of a peer on this host has ended, and whatever it had sent has been taken in: nothing of it is written
    /// to this process's memory any more. Follows [`Event::EndpointFailed`] of the endpoint, unless that was closed since or
    /// the peer is on another host, of whose processes nobody can tell.
    PeerDied {
        /// The endpoint that led there.
        endpoint: EndpointId,
    },
    /// More of a transfer is on its way. Sent at intervals, never for the last byte.
    Progress {
        /// The transfer.
        transfer: TransferId,
        /// Bytes copied, gathered or put so far.
        bytes: u64,
    },
    /// A transfer that [says what it belongs to](crate::Permitted) takes the peer's inbox, from its first byte to its last: the
    /// peer's own memory is written by the peer. Comes before its end.
    TakesInbox {
        /// The transfer.
        transfer: TransferId,
    },
    /// Answers [`Worker::revoke`](crate::Worker::revoke): nothing of the permit comes in through the inbox any more.
    Revoked {
        /// The peer that had it.
        epoch: u64,
        /// The permit.
        permit: Permit,
    },
    /// A transfer has ended, once each.
    TransferDone {
        /// The transfer.
        transfer: TransferId,
        /// `Ok`: the bytes are visible to the peer when it acts on a message sent after this, because they were copied into
        /// its memory, or every put and the flush behind them completed and the endpoint has not failed, or the peer has
        /// scattered them and said so.
        result: Result<TransferStats, PutError>,
    },
}
