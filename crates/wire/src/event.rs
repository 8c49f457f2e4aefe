//! What a worker tells its owner.

use std::time::Duration;

use ucx_sys::Status;

use crate::endpoint::EndpointId;
use crate::error::PutError;
use crate::frame::{Frame, FrameError};

/// The caller's name for a transfer, given when it is posted and told back when it has ended.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash)]
pub struct TransferId(pub u64);

/// What a completed transfer moved.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct TransferStats {
    /// Bytes written.
    pub bytes: u64,
    /// Contiguous copies posted.
    pub runs: u64,
    /// From the first post to the end of the flush.
    pub elapsed: Duration,
}

/// Something that happened on the progress thread.
#[derive(Clone, Debug)]
#[non_exhaustive]
pub enum Event {
    /// A peer sent a frame.
    Frame(Frame),
    /// A message arrived that is no frame for this worker. It was dropped; who sent it is not known.
    BadFrame(FrameError),
    /// The peer is gone or unreachable. The endpoint closes itself; its transfers end with an error each.
    EndpointFailed {
        /// The endpoint, dead from now on.
        endpoint: EndpointId,
        /// UCX's reason.
        status: Status,
    },
    /// More of a transfer has been handed to UCX. Sent at intervals, never for the last byte.
    Progress {
        /// The transfer.
        transfer: TransferId,
        /// Bytes posted so far; up to a send window of them may still be on their way.
        bytes: u64,
    },
    /// A transfer has ended, once each.
    TransferDone {
        /// The transfer.
        transfer: TransferId,
        /// `Ok`: every put completed, the flush behind them completed, and the endpoint has not failed, so the bytes are
        /// visible to the peer.
        result: Result<TransferStats, PutError>,
    },
}
