//! The route through memory of the peer that is mapped here.
//!
//! The copies are ordered before whatever this thread sends next ([`copy::publish`]), and a peer that has received such a
//! message reads behind it: between the two lies UCX's own hand-over, a system call or a flag in shared memory that the
//! receiver reads with acquire order. So the bytes are visible to whoever acts on a message sent after the transfer has
//! ended, and nothing needs to be flushed.

use std::sync::Arc;

use crate::copy::{self, Stores};
use crate::cursor::Cursor;
use crate::error::PutError;
use crate::share::Mapped;
use crate::transfer::Work;

/// Copied between two looks at everything else, a tenth of a millisecond's worth.
const SLICE_BYTES: u64 = 512 << 10;

pub(crate) struct Direct {
    /// The mapping of each part's target.
    targets: Vec<Arc<Mapped>>,
    cursor: Cursor,
    copied_bytes: u64,
}

impl Direct {
    pub(crate) fn new(targets: Vec<Arc<Mapped>>) -> Self {
        Self { targets, cursor: Cursor::default(), copied_bytes: 0 }
    }

    pub(crate) fn moved_bytes(&self) -> u64 {
        self.copied_bytes
    }

    /// Copies a slice. `Some` at the end.
    pub(crate) fn step(&mut self, work: &Work) -> Option<Result<(), PutError>> {
        if let Some(error) = self.withdrawn(work) {
            return Some(Err(error));
        }
        let mut budget = SLICE_BYTES;
        let mut next = self.cursor.next(&work.shapes, budget);
        while let Some(run) = next {
            budget -= run.bytes;
            // Known one ahead, so that its first lines are on their way while this run is copied.
            let after = if budget > 0 { self.cursor.next(&work.shapes, budget) } else { None };
            if let Some(after) = after {
                work.locals[after.part].window().prefetch(after.local_offset, after.bytes);
                self.targets[after.part].window().prefetch_target(after.remote_offset);
            }
            let (source, target) = (work.locals[run.part].window(), self.targets[run.part].window());
            let copied = target.copy_from(run.remote_offset, source, run.local_offset, run.bytes, Stores::Streaming);
            debug_assert!(copied.is_some(), "the shapes were checked against both regions");
            self.copied_bytes += run.bytes;
            next = after;
        }
        if self.copied_bytes < work.size.bytes {
            return None;
        }
        copy::publish();
        Some(self.withdrawn(work).map_or(Ok(()), Err))
    }

    /// The first target whose owner has undone its registration.
    fn withdrawn(&self, work: &Work) -> Option<PutError> {
        let part = self.targets.iter().position(|target| !target.is_offered())?;
        let remote = &work.remotes[part];
        Some(PutError::Withdrawn { base: remote.base(), bytes: remote.bytes() })
    }
}
