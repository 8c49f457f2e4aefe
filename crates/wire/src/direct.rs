//! The route through memory of the peer that is mapped here.
//!
//! The copies are ordered before whatever the worker sends next: each thread that copies publishes its slice
//! ([`copy::publish`]) before it counts it as done, and who makes the worker's turn reads the count before it sends. A peer that has
//! received such a message reads behind it: between the two lies UCX's own hand-over, a system call or a flag in shared
//! memory that the receiver reads with acquire order. So the bytes are visible to whoever acts on a message sent after the
//! transfer has ended, and nothing needs to be flushed.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;

use crossbeam::channel::{Sender, unbounded};

use crate::copy::{self, Stores, Window};
use crate::cursor::{Cursor, Run};
use crate::error::{OpenError, PutError};
use crate::share::Mapped;
use crate::transfer::{Direction, Work};

/// Copied between two looks at everything else, a tenth of a millisecond's worth.
const SLICE_BYTES: u64 = 512 << 10;

/// A transfer into mapped memory, or out of it. Dropping it keeps the threads that help from taking more of it.
pub(crate) struct Direct {
    job: Arc<Job>,
}

/// What the threads share. Each takes the next slice of the stream until there is none.
struct Job {
    work: Arc<Work>,
    /// The mapping of each part's remote memory.
    targets: Vec<Arc<Mapped>>,
    /// Bytes of the slices that somebody has taken; past the end when there is nothing to take.
    taken: AtomicU64,
    /// Bytes of the slices that are copied and published.
    copied: AtomicU64,
    /// Slices that are being copied.
    active: AtomicU64,
}

impl Job {
    /// Copies one slice. `false` if there is none left.
    fn copy_slice(&self) -> bool {
        // Counted before it is taken, so that whoever sees no slice active after it closed the job knows that none will be.
        self.active.fetch_add(1, Ordering::SeqCst);
        let start = self.taken.fetch_add(SLICE_BYTES, Ordering::SeqCst);
        let bytes = SLICE_BYTES.min(self.work.size.bytes.saturating_sub(start));
        if bytes > 0 {
            self.copy(start, bytes);
            copy::publish();
            self.copied.fetch_add(bytes, Ordering::Release); // pairs with the load in `copied_bytes`
        }
        self.active.fetch_sub(1, Ordering::SeqCst);
        bytes > 0
    }

    fn copy(&self, start: u64, bytes: u64) {
        let shapes = &self.work.shapes;
        let mut cursor = Cursor::at(shapes, start);
        let mut left = bytes;
        let mut next = cursor.next(shapes, left);
        while let Some(run) = next {
            left -= run.bytes;
            // Known one ahead, so that its first lines are on their way while this run is copied.
            let after = if left > 0 { cursor.next(shapes, left) } else { None };
            if let Some(after) = after {
                let [source, target] = self.ends(after);
                source.0.prefetch(source.1, after.bytes);
                target.0.prefetch_target(target.1);
            }
            let [source, target] = self.ends(run);
            let copied = target.0.copy_from(target.1, source.0, source.1, run.bytes, Stores::Streaming);
            debug_assert!(copied.is_some(), "the shapes were checked against both regions");
            next = after;
        }
    }

    /// Where a run comes from, and where it goes.
    fn ends(&self, run: Run) -> [(Window<'_>, u64); 2] {
        let local = (self.work.locals[run.part].window(), run.local_offset);
        let remote = (self.targets[run.part].window(), run.remote_offset);
        match self.work.direction {
            Direction::Put => [local, remote],
            Direction::Get => [remote, local],
        }
    }

    /// Leaves nothing to take.
    fn close(&self) {
        self.taken.store(u64::MAX / 2, Ordering::SeqCst);
    }
}

impl Direct {
    pub(crate) fn new(work: Arc<Work>, targets: Vec<Arc<Mapped>>, copiers: &Copiers) -> Self {
        let (taken, copied, active) = (AtomicU64::new(0), AtomicU64::new(0), AtomicU64::new(0));
        let job = Arc::new(Job { work, targets, taken, copied, active });
        if job.work.size.bytes > SLICE_BYTES {
            copiers.help(&job);
        }
        Self { job }
    }

    /// Bytes that are copied and published.
    pub(crate) fn moved_bytes(&self) -> u64 {
        self.job.copied.load(Ordering::Acquire)
    }

    /// Slices that are still being copied, of a transfer that is not to go on.
    pub(crate) fn abandon(&self) -> u64 {
        self.job.close();
        self.job.active.load(Ordering::SeqCst)
    }

    /// Copies no more. `Some` when nobody copies any more: well, if nothing was left to copy.
    pub(crate) fn stop(&self) -> Option<Result<(), PutError>> {
        if self.abandon() > 0 {
            return None;
        }
        if self.moved_bytes() < self.job.work.size.bytes {
            return Some(Err(PutError::Cancelled));
        }
        Some(self.withdrawn().map_or(Ok(()), Err))
    }

    /// Copies a slice. `Some` at the end, when nobody copies any more.
    pub(crate) fn step(&mut self) -> Option<Result<(), PutError>> {
        if let Some(error) = self.withdrawn() {
            return (self.abandon() == 0).then_some(Err(error));
        }
        self.job.copy_slice();
        if self.moved_bytes() < self.job.work.size.bytes {
            return None;
        }
        Some(self.withdrawn().map_or(Ok(()), Err))
    }

    /// The first target whose owner has undone its registration.
    fn withdrawn(&self) -> Option<PutError> {
        let part = self.job.targets.iter().position(|target| !target.is_offered())?;
        let remote = &self.job.work.remotes[part];
        Some(PutError::Withdrawn { base: remote.base(), bytes: remote.bytes() })
    }
}

impl Drop for Direct {
    fn drop(&mut self) {
        self.job.close();
    }
}

/// Threads that help the progress thread to copy. They end when this is dropped.
pub(crate) struct Copiers {
    jobs: Sender<Arc<Job>>,
    threads: usize,
}

impl Copiers {
    /// Starts `threads` threads; none is fine.
    pub(crate) fn start(threads: usize) -> Result<Self, OpenError> {
        let (jobs, queue) = unbounded::<Arc<Job>>();
        for _ in 0..threads {
            let queue = queue.clone();
            thread::Builder::new().name("kvferry-copy".to_owned()).spawn(move || {
                for job in queue {
                    while job.copy_slice() {}
                }
            })?;
        }
        Ok(Self { jobs, threads })
    }

    fn help(&self, job: &Arc<Job>) {
        for _ in 0..self.threads {
            let _ = self.jobs.send(job.clone()); // the threads live as long as this
        }
    }
}
