//! The route of one UCX put, or get, a run.

use std::collections::VecDeque;

use crate::context::Context;
use crate::cursor::Cursor;
use crate::delivery::Delivery;
use crate::error::PutError;
use crate::raw::{Put, RawEndpoint};
use crate::transfer::Work;

/// Puts that UCX holds at a time for one transfer.
const WINDOW: u64 = 256;

/// Longest put. A longer run is cut, so that its progress can be seen: a put says nothing before its end.
const PUT_BYTES_MAX: u64 = 4 << 20;

pub(crate) struct Runs {
    delivery: Delivery,
    cursor: Cursor,
    /// Lengths of the puts that count as not completed, oldest first. Puts of one endpoint complete in order or nearly so,
    /// hence which of them have is known well enough from how many.
    pending: VecDeque<u64>,
    completed_bytes: u64,
    posted: bool,
    /// Given up before everything was posted.
    cut_short: bool,
}

impl Runs {
    pub(crate) fn new(context: &Context, work: &Work) -> Self {
        let delivery = Delivery::new(context, work.direction, work.locals.clone());
        let (cursor, pending) = (Cursor::default(), VecDeque::new());
        Self { delivery, cursor, pending, completed_bytes: 0, posted: false, cut_short: false }
    }

    pub(crate) fn outstanding(&self) -> u64 {
        self.delivery.outstanding()
    }

    /// Bytes of the puts that have completed.
    pub(crate) fn moved_bytes(&self) -> u64 {
        self.completed_bytes
    }

    /// Posts no more. The end comes when what was posted has arrived.
    pub(crate) fn stop(&mut self) {
        self.cut_short |= !self.posted;
        self.posted = true;
    }

    pub(crate) fn step(&mut self, work: &Work, endpoint: &RawEndpoint) -> Option<Result<(), PutError>> {
        while self.pending.len() as u64 > self.outstanding() {
            self.completed_bytes += self.pending.pop_front().unwrap_or_default();
        }
        if !self.posted && !self.delivery.has_failed() {
            self.post(work, endpoint);
            if !self.posted {
                return None;
            }
        }
        let end = self.delivery.poll(endpoint)?;
        Some(end.and(if self.cut_short { Err(PutError::Cancelled) } else { Ok(()) }))
    }

    /// Fills the window.
    fn post(&mut self, work: &Work, endpoint: &RawEndpoint) {
        // One window a call, even if UCX completes each put at once: other transfers have their turn too.
        for _ in 0..WINDOW {
            if self.outstanding() >= WINDOW || self.delivery.has_failed() {
                return;
            }
            let Some(run) = self.cursor.next(&work.shapes, PUT_BYTES_MAX) else {
                self.posted = true;
                return;
            };
            let remote = &work.remotes[run.part];
            let to = remote.base() + run.remote_offset;
            let put = Put { held: run.part, offset: run.local_offset, key: remote.key, to, bytes: run.bytes };
            self.delivery.put(endpoint, &put);
            self.pending.push_back(run.bytes);
        }
    }
}
