//! The caller's hold on a request.

use std::future::Future;
use std::pin::Pin;
use std::sync::{Arc, Weak};
use std::task::{Context, Poll};
use std::time::{Duration, Instant};

use kvferry_match::Side;

use crate::completion::Completion;
use crate::core::{Handle, PartSpec, Ticket};
use crate::error::{PushError, RequestError};
use crate::message::RequestKey;
use crate::quiet::{NotQuiet, Quiet};
use crate::ready::Ready;
use crate::report::{Received, Sent};
use crate::shared::Shared;

/// How a request ended: what moved to or from each peer, in the order of ranks, or why it failed.
pub type Outcome<R> = Result<Arc<[R]>, Arc<RequestError>>;

/// A request under way. It ends once, which can be polled, waited for, or awaited: it is a future of its [`Outcome`] that
/// needs no particular runtime, and can be awaited by reference.
///
/// How it ended and whether its slots can be used again are two things: see [`Quiet`]. Dropping the handle stops nothing and
/// gives nothing back.
#[derive(Debug)]
pub struct Transfer<R> {
    completion: Arc<Completion<R>>,
    engine: Weak<Shared>,
    handle: Handle,
}

/// A request in which this rank is a destination.
pub type Receive = Transfer<Received>;

/// A request in which this rank is a source.
pub type Send = Transfer<Sent>;

impl<R> Transfer<R> {
    pub(crate) fn new(completion: Arc<Completion<R>>, engine: Weak<Shared>, handle: Handle) -> Self {
        Self { completion, engine, handle }
    }

    /// The request and attempt.
    #[must_use]
    pub fn key(&self) -> RequestKey {
        self.handle.key()
    }

    /// How the request ended, or `None` while it has not. Moves the engine along for a moment if it has not: while a thread
    /// calls this again and again, it does what the progress thread would, wakers of other requests included.
    #[must_use]
    pub fn poll(&self) -> Option<Outcome<R>> {
        self.completion.outcome().or_else(|| {
            self.engine.upgrade()?.workers().progress();
            self.completion.outcome()
        })
    }

    /// Waits until the request has ended, for `timeout` at most. `None`: it has not. The waiting thread makes progress in the
    /// place of the engine's, if no other does.
    #[must_use]
    pub fn wait(&self, timeout: Duration) -> Option<Outcome<R>> {
        let deadline = after(timeout);
        self.drive(deadline, || self.completion.outcome()).or_else(|| self.completion.wait_outcome(deadline))
    }

    /// How the request ended, when it has: what awaiting the handle gives, of a handle that others use too.
    pub fn until_ended(&self) -> impl Future<Output = Outcome<R>> + use<R> {
        let completion = self.completion.clone();
        std::future::poll_fn(move |context| completion.poll_outcome(context.waker()))
    }

    /// Bytes known to have moved so far, over all peers.
    #[must_use]
    pub fn moved_bytes(&self) -> u64 {
        self.completion.moved_bytes()
    }

    /// Gives the request up. It ends with [`TransferError::Cancelled`](crate::TransferError::Cancelled), unless it has ended
    /// before. The slots are quiet when every peer has stopped; of what comes through this side's inbox (landing, staged) at once.
    pub fn cancel(&self) {
        if let Some(engine) = self.engine.upgrade() {
            engine.cancel(self.handle);
        }
    }

    /// Gives the slots back, if they are quiet: once.
    ///
    /// # Errors
    ///
    /// [`NotQuiet`].
    pub fn poll_quiet(&self) -> Result<Quiet, NotQuiet> {
        self.completion.take_quiet().map(|()| self.quiet())
    }

    /// Waits until the slots are quiet, for `timeout` at most, and gives them back: once. How long it takes is up to the
    /// peers: one that is frozen may keep them for as long as it is.
    ///
    /// # Errors
    ///
    /// [`NotQuiet`].
    pub fn wait_quiet(&self, timeout: Duration) -> Result<Quiet, NotQuiet> {
        let deadline = after(timeout);
        let taken = || Some(self.completion.take_quiet()).filter(|taken| *taken != Err(NotQuiet::Waiting));
        let taken = self.drive(deadline, taken).unwrap_or_else(|| self.completion.wait_quiet(deadline));
        taken.map(|()| self.quiet())
    }

    /// Gives the slots back when they are quiet: once. It is not [`NotQuiet::Waiting`] that it ends with.
    pub fn until_quiet(&self) -> impl Future<Output = Result<Quiet, NotQuiet>> + use<R> {
        let (completion, quiet) = (self.completion.clone(), self.handle);
        std::future::poll_fn(move |context| {
            completion.poll_quiet(context.waker()).map_ok(|()| Quiet::new(quiet.key(), side(quiet)))
        })
    }

    /// Moves the engine along in the place of its threads, for as long as things move.
    fn drive<T>(&self, deadline: Instant, done: impl FnMut() -> Option<T>) -> Option<T> {
        self.engine.upgrade()?.workers().drive(deadline, done)
    }

    fn quiet(&self) -> Quiet {
        Quiet::new(self.key(), side(self.handle))
    }
}

impl Send {
    /// Adds a part to a send that was posted in parts. It leaves when it is ready and the destination has said where to.
    ///
    /// Parts follow each other: by tokens, and of the same tokens by layers. Their bounds round down to blocks, so what does
    /// not fill a block leaves with the part that does; the last one has the rest, and state.
    ///
    /// # Errors
    ///
    /// [`PushError`]; the send goes on without the part.
    pub fn push(&self, part: PartSpec, ready: Ready) -> Result<(), PushError> {
        let (Some(engine), Handle::Send(ticket)) = (self.engine.upgrade(), self.handle) else {
            return Err(PushError::Ended);
        };
        let index = engine.push(ticket, part, ready.is_set())?;
        if let Some(flag) = ready.when {
            let engine = self.engine.clone();
            flag.when_set(move || be_ready(&engine, ticket, index));
        }
        Ok(())
    }
}

fn be_ready(engine: &Weak<Shared>, ticket: Ticket, index: usize) {
    if let Some(engine) = engine.upgrade() {
        engine.part_ready(ticket, index);
    }
}

fn side(handle: Handle) -> Side {
    match handle {
        Handle::Send(_) => Side::Source,
        Handle::Receive(_) => Side::Destination,
    }
}

/// A point in time that there is, whatever the timeout.
fn after(timeout: Duration) -> Instant {
    let now = Instant::now();
    now.checked_add(timeout).unwrap_or(now + Duration::from_secs(365 * 24 * 3600))
}

impl<R> Future for Transfer<R> {
    type Output = Outcome<R>;

    fn poll(self: Pin<&mut Self>, context: &mut Context<'_>) -> Poll<Self::Output> {
        self.completion.poll_outcome(context.waker())
    }
}
