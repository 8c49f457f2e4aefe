//! One transfer from its first put to the end of its flush. The rule that a transfer is over only when every put has
//! completed, the flush behind them has, and the endpoint has not failed, is kept here and nowhere else: a flush alone
//! succeeds although the puts before it failed (measured on UCX 1.22).

use std::rc::Rc;
use std::time::{Duration, Instant};

use ucx_sys::Status;

use crate::endpoint::EndpointId;
use crate::error::PutError;
use crate::event::{TransferId, TransferStats};
use crate::raw::{Batch, Operation, RawEndpoint};
use crate::transfer::{Cursor, Size};

/// Puts that UCX holds at a time for one transfer.
const WINDOW: u64 = 256;

/// Between two tellings of a transfer's progress.
const TELL_INTERVAL: Duration = Duration::from_millis(50);

pub(crate) struct InFlight {
    pub(crate) endpoint: EndpointId,
    pub(crate) transfer: TransferId,
    batch: Rc<Batch>,
    cursor: Cursor,
    size: Size,
    posted_bytes: u64,
    flush: Option<Operation>,
    started: Instant,
    told: (Instant, u64),
}

impl InFlight {
    pub(crate) fn new(endpoint: EndpointId, transfer: TransferId, batch: Rc<Batch>, size: Size) -> Self {
        let started = Instant::now();
        Self {
            endpoint,
            transfer,
            batch,
            cursor: Cursor::default(),
            size,
            posted_bytes: 0,
            flush: None,
            started,
            told: (started, 0),
        }
    }

    pub(crate) fn posted_bytes(&self) -> u64 {
        self.posted_bytes
    }

    /// Bytes posted, if it is time to tell and there are more than the last time.
    pub(crate) fn progress_to_tell(&mut self) -> Option<u64> {
        let due = self.told.0.elapsed() >= TELL_INTERVAL && self.posted_bytes > self.told.1;
        due.then(|| {
            self.told = (Instant::now(), self.posted_bytes);
            self.posted_bytes
        })
    }

    /// Posts, flushes or waits. Returns how the transfer ended, once it has and nothing of it is posted any more.
    ///
    /// `endpoint` is why it is gone, if it is.
    pub(crate) fn step(&mut self, endpoint: Result<&RawEndpoint, Status>) -> Option<Result<TransferStats, PutError>> {
        let endpoint = match endpoint {
            Ok(endpoint) => endpoint,
            // The forced close ends the flush too; its request names no memory, so it is not waited for.
            Err(source) => return (self.batch.outstanding() == 0).then_some(Err(PutError::Endpoint { source })),
        };
        if let Some(flush) = &self.flush {
            return flush.result().map(|status| self.flushed(endpoint, status));
        }
        if self.batch.first_error() == Status::OK && !self.post(endpoint) {
            return None;
        }
        if self.batch.outstanding() > 0 {
            return None;
        }
        if self.batch.first_error() != Status::OK {
            return Some(Err(PutError::Put { source: self.batch.first_error() }));
        }
        let flush = endpoint.flush();
        let ended = flush.result().map(|status| self.flushed(endpoint, status));
        self.flush = Some(flush);
        ended
    }

    /// Fills the window. Returns whether everything has been posted.
    fn post(&mut self, endpoint: &RawEndpoint) -> bool {
        // One window a call, even if UCX completes each put at once: other transfers have their turn too.
        for _ in 0..WINDOW {
            if self.batch.outstanding() >= WINDOW || self.batch.first_error() != Status::OK {
                return false;
            }
            let Some((part, run)) = self.cursor.next(&self.batch.parts) else { return true };
            endpoint.put(&self.batch, part, run);
            self.posted_bytes += run.bytes;
        }
        false
    }

    fn flushed(&self, endpoint: &RawEndpoint, status: Status) -> Result<TransferStats, PutError> {
        match (endpoint.failure(), status) {
            (Status::OK, Status::OK) => {
                Ok(TransferStats { bytes: self.size.bytes, runs: self.size.runs, elapsed: self.started.elapsed() })
            }
            (Status::OK, source) => Err(PutError::Flush { source }),
            (source, _) => Err(PutError::Endpoint { source }),
        }
    }
}
