//! One transfer: made once, posted as often as its owner likes.

use std::sync::Arc;
use std::sync::atomic::{AtomicU8, Ordering};
use std::time::{Duration, Instant, SystemTime};

use kvferry_wire::{EndpointId, Part, TransferId, TransferStats};
use parking_lot::{Condvar, Mutex};

use crate::error::{Failure, PostError, ReleaseError};
use crate::shared::Shared;
use crate::telemetry::Telemetry;

/// Which way bytes go.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum Operation {
    /// From local to remote memory.
    Write,
    /// From remote to local memory.
    Read,
}

/// Where a transfer stands.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub enum State {
    /// Made, and not posted yet.
    Made,
    /// Posted, or cancelled and not quiet yet.
    Active,
    /// What was posted last is there.
    Done,
    /// What was posted last has failed: see [`Transfer::failure`].
    Failed,
}

const MADE: u8 = 0;
const ACTIVE: u8 = 1;
const DONE: u8 = 2;
const FAILED: u8 = 3;

/// A transfer of this agent. Dropped while active, it is cancelled and ends by itself; its memory stays registered until then.
#[derive(Debug)]
pub struct Transfer {
    pub(crate) inner: Arc<Inner>,
}

#[derive(Debug)]
pub(crate) struct Inner {
    pub(crate) shared: Arc<Shared>,
    /// Its number in the agent's register of transfers.
    pub(crate) number: u64,
    pub(crate) operation: Operation,
    pub(crate) name: Arc<str>,
    pub(crate) epoch: u64,
    pub(crate) endpoint: EndpointId,
    pub(crate) bytes: u64,
    pub(crate) entries: u64,
    /// What [`Transfer::state`] looks at. Written under the lock of `course`.
    status: AtomicU8,
    course: Mutex<Course>,
    changed: Condvar,
}

/// What changes from post to post.
#[derive(Debug)]
pub(crate) struct Course {
    /// `None` once memory of it was deregistered.
    pub(crate) parts: Option<Vec<Part>>,
    /// What the remote agent is to hear at the end.
    pub(crate) notification: Option<Vec<u8>>,
    /// The post under way.
    pub(crate) posted: Option<TransferId>,
    /// Why it is being given up.
    pub(crate) given_up: Option<Failure>,
    pub(crate) failure: Option<Failure>,
    /// Whether bytes may still be moved although it has ended.
    pub(crate) exposed: bool,
    started: Instant,
    telemetry: Option<Telemetry>,
}

impl Transfer {
    pub(crate) fn new(
        shared: Arc<Shared>,
        operation: Operation,
        peer: (Arc<str>, u64, EndpointId),
        parts: Vec<Part>,
        (bytes, entries): (u64, u64),
        notification: Option<Vec<u8>>,
    ) -> Self {
        let (name, epoch, endpoint) = peer;
        let course = Course {
            parts: Some(parts),
            notification,
            posted: None,
            given_up: None,
            failure: None,
            exposed: false,
            started: Instant::now(),
            telemetry: None,
        };
        let number = shared.register.next();
        let inner = Arc::new(Inner {
            shared,
            number,
            operation,
            name,
            epoch,
            endpoint,
            bytes,
            entries,
            status: AtomicU8::new(MADE),
            course: Mutex::new(course),
            changed: Condvar::new(),
        });
        inner.shared.register.add_transfer(&inner);
        Self { inner }
    }

    /// Starts to move the bytes; with `notification`, this and every later post ends with that one. The transfer may have
    /// ended when the call returns.
    ///
    /// # Errors
    ///
    /// [`PostError`]; nothing was sent.
    pub fn post(&self, notification: Option<&[u8]>) -> Result<State, PostError> {
        self.inner.post(notification)?;
        Ok(self.inner.known()) // a look would begin to copy
    }

    /// Where it stands. As cheap as reading a number, unless it is active: then a look may move it along.
    #[must_use]
    pub fn state(&self) -> State {
        self.inner.state()
    }

    /// Whether it is [`State::Active`], as far as is known without a look.
    #[must_use]
    pub fn is_active(&self) -> bool {
        self.inner.status.load(Ordering::Acquire) == ACTIVE
    }

    /// Waits until it is not active.
    #[must_use]
    pub fn wait(&self, timeout: Duration) -> State {
        self.inner.wait(timeout)
    }

    /// Why it has failed, if it has.
    #[must_use]
    pub fn failure(&self) -> Option<Failure> {
        self.inner.course.lock().failure.clone()
    }

    /// Gives it up: it fails with [`Failure::Cancelled`] once nothing of it moves any more, or ends as it would have.
    pub fn cancel(&self) {
        self.inner.give_up(Failure::Cancelled);
    }

    /// Gives it up if it is active, and waits until nothing of it reads or writes memory of this side any more.
    ///
    /// # Errors
    ///
    /// [`ReleaseError::NotQuiet`], with the transfer.
    pub fn release(self, timeout: Duration) -> Result<(), (Self, ReleaseError)> {
        match self.quiet(timeout) {
            Ok(()) => Ok(()),
            Err(error) => Err((self, error)),
        }
    }

    /// As [`release`](Self::release), for owners that cannot part with it: it can be posted again.
    ///
    /// # Errors
    ///
    /// [`ReleaseError::NotQuiet`].
    pub fn quiet(&self, timeout: Duration) -> Result<(), ReleaseError> {
        self.cancel();
        let inner = &self.inner;
        let deadline = Instant::now() + timeout;
        let _ = inner.wait(timeout);
        let mut course = inner.course.lock();
        while (course.posted.is_some() || course.exposed)
            && !inner.changed.wait_until(&mut course, deadline).timed_out()
        {}
        if course.posted.is_some() || course.exposed {
            return Err(ReleaseError::NotQuiet { waited: timeout });
        }
        Ok(())
    }

    /// Which way it goes.
    #[must_use]
    pub fn operation(&self) -> Operation {
        self.inner.operation
    }

    /// Name of the remote agent.
    #[must_use]
    pub fn remote(&self) -> &str {
        &self.inner.name
    }

    /// Bytes that a post moves.
    #[must_use]
    pub fn bytes(&self) -> u64 {
        self.inner.bytes
    }

    /// How the last post went; `None` before its end.
    #[must_use]
    pub fn telemetry(&self) -> Option<Telemetry> {
        let course = self.inner.course.lock();
        course.telemetry.filter(|_| course.posted.is_none())
    }
}

impl Drop for Transfer {
    fn drop(&mut self) {
        self.inner.give_up(Failure::Cancelled);
    }
}

impl Inner {
    fn state(&self) -> State {
        if self.known() == State::Active {
            self.shared.progress();
        }
        self.known()
    }

    fn known(&self) -> State {
        match self.status.load(Ordering::Acquire) {
            MADE => State::Made,
            DONE => State::Done,
            FAILED => State::Failed,
            _ => State::Active,
        }
    }

    fn wait(&self, timeout: Duration) -> State {
        let deadline = Instant::now() + timeout;
        let ended = || (self.status.load(Ordering::Acquire) != ACTIVE).then_some(());
        if self.shared.worker().drive(deadline, ended).is_none() {
            let mut course = self.course.lock();
            while course.posted.is_some() && !self.changed.wait_until(&mut course, deadline).timed_out() {}
        }
        self.state()
    }

    fn post(self: &Arc<Self>, notification: Option<&[u8]>) -> Result<(), PostError> {
        let max = kvferry_wire::FRAME_PAYLOAD_BYTES_MAX;
        if let Some(bytes) = notification.map(<[u8]>::len).filter(|bytes| *bytes > max) {
            return Err(PostError::NotificationTooLong { bytes, max });
        }
        let (started, clock) = (Instant::now(), SystemTime::now());
        let id = {
            let mut course = self.course.lock();
            if course.posted.is_some() || course.exposed {
                return Err(PostError::Active);
            }
            let parts = course.parts.clone().ok_or(PostError::Deregistered)?;
            if let Some(message) = notification {
                course.notification = Some(message.to_vec());
            }
            let id = self.shared.next_transfer();
            course.posted = Some(id);
            (course.given_up, course.failure, course.started) = (None, None, started);
            course.telemetry = Some(Telemetry {
                started: clock,
                posting: Duration::ZERO,
                total: Duration::ZERO,
                bytes: self.bytes,
                entries: self.entries,
                route: None,
            });
            self.status.store(ACTIVE, Ordering::Release);
            let notification = course.notification.clone();
            drop(course);
            if let Err(error) = self.shared.post(self, id, parts, notification) {
                let mut course = self.course.lock();
                course.posted = None;
                self.status.store(FAILED, Ordering::Release);
                return Err(error);
            }
            id
        };
        let mut course = self.course.lock();
        if course.posted == Some(id) && course.given_up.is_some() {
            // Given up by another thread before there was anything to cancel.
            drop(course);
            self.shared.cancel(self, id);
            return Ok(());
        }
        // Unless it has ended and was posted again meanwhile.
        if course.posted.is_none_or(|posted| posted == id)
            && let Some(telemetry) = &mut course.telemetry
        {
            telemetry.posting = started.elapsed();
        }
        Ok(())
    }

    /// Gives up the post that is under way, if there is one.
    pub(crate) fn give_up(self: &Arc<Self>, why: Failure) {
        let mut course = self.course.lock();
        let Some(id) = course.posted.filter(|_| course.given_up.is_none()) else { return };
        course.given_up = Some(why);
        drop(course);
        self.shared.cancel(self, id);
    }

    /// Since when a post is under way, and which.
    pub(crate) fn posted(&self) -> Option<(TransferId, Instant)> {
        let course = self.course.lock();
        course.posted.map(|id| (id, course.started))
    }

    pub(crate) fn is_given_up(&self) -> bool {
        self.course.lock().given_up.is_some()
    }

    /// The parts of the post that is under way.
    pub(crate) fn parts(&self) -> Option<Vec<Part>> {
        self.course.lock().parts.clone()
    }

    /// What is to be said at the end of the post that is under way.
    pub(crate) fn notification(&self) -> Option<Vec<u8>> {
        self.course.lock().notification.clone()
    }

    /// The post `id` has ended. `exposed`: bytes of it may still be written here.
    pub(crate) fn end(&self, id: TransferId, result: Result<Option<TransferStats>, Failure>, exposed: bool) {
        let mut course = self.course.lock();
        if course.posted != Some(id) {
            return;
        }
        course.posted = None;
        course.exposed = exposed;
        let total = course.started.elapsed();
        if let Some(telemetry) = &mut course.telemetry {
            telemetry.total = total;
            telemetry.route = result.as_ref().ok().copied().flatten().map(|stats| (stats.route, stats.reason));
        }
        let status = match result {
            Ok(_) => DONE,
            Err(failure) => {
                let given_up = course.given_up.take();
                course.failure = Some(given_up.filter(|_| is_cancel(&failure)).unwrap_or(failure));
                FAILED
            }
        };
        self.status.store(status, Ordering::Release); // pairs with the load in `state`
        self.changed.notify_all();
    }

    /// Nothing of what was exposed is written any more.
    pub(crate) fn settle(&self) {
        self.course.lock().exposed = false;
        self.changed.notify_all();
    }

    /// Takes part in nothing new.
    pub(crate) fn forget_memory(&self) {
        let parts = self.course.lock().parts.take();
        drop(parts);
    }
}

impl Drop for Inner {
    fn drop(&mut self) {
        self.shared.register.remove_transfer(self.number);
    }
}

fn is_cancel(failure: &Failure) -> bool {
    matches!(failure, Failure::Cancelled | Failure::Wire(kvferry_wire::PutError::Cancelled))
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use std::thread;

    use super::*;
    use crate::reading::reading;

    /// Whoever hears that its read is quiet can deregister the memory at once.
    #[test]
    fn the_memory_of_a_read_is_let_go_before_the_death_of_its_peer_is_told() {
        let ([a, _b], read) = reading();
        let mut memory = a.context().allocate(64).unwrap();
        a.shared.await_answer(&mut a.shared.state.lock(), &read.inner, TransferId(7), vec![memory.clone()]);
        thread::scope(|scope| {
            let told = read.inner.course.lock();
            let died = scope.spawn(|| a.shared.peer_died(read.inner.endpoint));
            let deadline = Instant::now() + Duration::from_secs(2);
            let is_free = loop {
                match memory.unregister() {
                    Ok(()) => break true,
                    Err(_) if Instant::now() >= deadline => break false,
                    Err(used) => memory = used,
                }
            };
            drop(told);
            died.join().unwrap();
            assert!(is_free);
        });
    }
}
