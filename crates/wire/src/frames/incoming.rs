//! The rings that peers write for this worker.

use std::cell::Cell;
use std::collections::BTreeMap;
use std::sync::atomic::{Ordering, fence};
use std::time::{Duration, Instant};

use crate::frame::{Place, StreamNumber};
use crate::frames::ring::{Damaged, Reading};
use crate::process::Process;
use crate::share::ring::RingMemory;
use crate::share::{Mapped, ShareCard};

/// Rings that are read. What peers offer beyond that comes by UCX.
const RINGS_MAX: usize = 4096;

/// Most bytes of a ring.
pub(crate) const RING_BYTES_MAX: u32 = 1 << 20;

/// Frames taken from one ring before the next has its turn.
const FRAMES_PER_TURN: usize = 16;

/// Between two times that is looked for writers that are no more.
const LOOK_INTERVAL: Duration = Duration::from_secs(1);

/// Frames of a peer by its epoch and its own numbering.
pub(crate) type Stream = (u64, StreamNumber);

pub(crate) struct Rings {
    all: BTreeMap<Stream, Incoming>,
    /// How long a frame whose writer has closed the connection waits for one that was sent before it.
    patience: Duration,
    /// The writers are to ring, as far as is known here.
    asleep: Cell<bool>,
    looked: Instant,
}

struct Incoming {
    /// `None` once it has made no sense: what else comes of the stream is dropped, since something is missing.
    ring: Option<Reading<RingMemory<Mapped>>>,
    /// The number of the next frame.
    next: u64,
    process: Process,
    /// Since when the writer is known to have let go of it.
    closed: Option<Instant>,
}

/// What is to become of a frame that came by UCX, once those before it have been delivered.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Turn {
    Deliver,
    /// It has come before, or belongs to what has failed.
    Drop,
    /// Some before it are missing.
    Failed,
}

/// A frame from a ring; or the ring has made no sense, and will not be read any more.
pub(crate) type Taken = (Stream, Result<Vec<u8>, Damaged>);

impl Incoming {
    /// The next frame, if it is in the ring.
    fn take(&mut self) -> Option<Result<Vec<u8>, Damaged>> {
        match self.ring.as_mut()?.front() {
            Ok(Some(number)) if number == self.next => {
                self.next += 1;
                self.ring.as_mut()?.take().map(Ok)
            }
            Ok(Some(number)) if number < self.next => Some(self.fail()),
            Ok(_) => None,
            Err(Damaged) => Some(self.fail()),
        }
    }

    fn fail<T>(&mut self) -> Result<T, Damaged> {
        self.ring = None;
        Err(Damaged)
    }

    /// Whether [`take`](Self::take) would do something, looked at anew.
    fn is_ready(&mut self) -> bool {
        let next = self.next;
        self.ring.as_mut().is_some_and(|ring| match ring.front() {
            Ok(front) => front.is_some_and(|number| number <= next),
            Err(Damaged) => true,
        })
    }
}

impl Rings {
    pub(crate) fn new(patience: Duration) -> Self {
        Self { all: BTreeMap::new(), patience, asleep: Cell::new(false), looked: Instant::now() }
    }

    /// A peer offers a ring. It is used if it can be mapped, and told of otherwise by silence.
    pub(crate) fn open(&mut self, stream: Stream, share: &ShareCard, bytes: u32) {
        if self.all.len() >= RINGS_MAX || self.all.contains_key(&stream) || bytes > RING_BYTES_MAX {
            return;
        }
        let Some(process) = share.owner() else { return }; // the process before the file, as everywhere
        let Some(memory) = Mapped::open(share, u64::from(bytes)).and_then(RingMemory::new) else { return };
        let ring = Some(Reading::attach(memory, self.asleep.get()));
        self.all.insert(stream, Incoming { ring, next: 1, process, closed: None });
    }

    /// Frames from the rings, a few of each, at most about so many.
    pub(crate) fn take(&mut self, most: usize) -> Vec<Taken> {
        let mut taken = Vec::new();
        for (stream, incoming) in &mut self.all {
            let left = most.saturating_sub(taken.len()).min(FRAMES_PER_TURN);
            taken.extend((0..left).map_while(|_| incoming.take()).map(|frame| (*stream, frame)));
        }
        taken
    }

    /// A frame has come by UCX. Its place is said; what has to be delivered before it is appended to `before`.
    pub(crate) fn turn_of(&mut self, epoch: u64, place: Place, before: &mut Vec<Vec<u8>>) -> Turn {
        let Some(incoming) = self.all.get_mut(&(epoch, place.stream)).filter(|_| place != Place::NONE) else {
            return Turn::Deliver;
        };
        if incoming.ring.is_none() {
            return Turn::Drop;
        }
        // Whatever was put into the ring before the message was sent can be seen now that it has come.
        while incoming.next < place.number {
            match incoming.take() {
                Some(Ok(frame)) => before.push(frame),
                Some(Err(Damaged)) => return Turn::Failed,
                None => {
                    incoming.ring = None;
                    return Turn::Failed;
                }
            }
        }
        if incoming.next > place.number {
            return Turn::Drop;
        }
        incoming.next += 1;
        Turn::Deliver
    }

    /// Has the writers ring from now on. `false` if there is something to read.
    pub(crate) fn arm(&mut self) -> bool {
        self.asleep.set(true);
        self.all.values().filter_map(|incoming| incoming.ring.as_ref()).for_each(Reading::lie_down);
        fence(Ordering::SeqCst); // pairs with that of `Writer::push`
        !self.all.values_mut().any(Incoming::is_ready)
    }

    /// Nobody sleeps any more.
    pub(crate) fn disarm(&self) {
        if self.asleep.replace(false) {
            self.all.values().filter_map(|incoming| incoming.ring.as_ref()).for_each(Reading::get_up);
        }
    }

    /// Whether everything of a dead peer has been taken that ever can be. To be asked once it is known to be dead.
    pub(crate) fn is_drained(&mut self, epoch: u64) -> bool {
        !self.all.iter_mut().any(|((of, _), incoming)| *of == epoch && incoming.is_ready())
    }

    /// Lets go of what a dead peer has left.
    pub(crate) fn close_of(&mut self, epoch: u64) {
        self.all.retain(|(of, _), _| *of != epoch);
    }

    /// Lets go of rings that nobody writes any more, and that have been read.
    pub(crate) fn look(&mut self, now: Instant) {
        if now.saturating_duration_since(self.looked) < LOOK_INTERVAL {
            return;
        }
        self.looked = now;
        let patience = self.patience;
        self.all.retain(|_, incoming| {
            let closed = incoming.ring.as_ref().is_some_and(|ring| !ring.memory().is_offered());
            if closed || incoming.process.has_ended() {
                incoming.closed.get_or_insert(now);
            }
            let Some(since) = incoming.closed else { return true };
            // A frame may wait for one that is still on its way through UCX, or was lost with the connection.
            let waits = incoming.ring.as_mut().is_some_and(|ring| !matches!(ring.front(), Ok(None)));
            waits && (incoming.is_ready() || now.saturating_duration_since(since) < patience)
        });
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests;
