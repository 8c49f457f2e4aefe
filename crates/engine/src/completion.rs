//! What the engine and the holder of a handle share of a request: how it ended, and whether its slots are quiet.

use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::task::{Poll, Waker};
use std::time::Instant;

use parking_lot::{Condvar, Mutex};

use crate::error::RequestError;
use crate::quiet::NotQuiet;
use crate::transfer::Outcome;

#[derive(Debug)]
pub(crate) struct Completion<R> {
    state: Mutex<State<R>>,
    changed: Condvar,
    moved: AtomicU64,
}

#[derive(Debug)]
struct State<R> {
    outcome: Option<Outcome<R>>,
    slots: Slots,
    wakers: Vec<Waker>,
}

#[derive(Clone, Copy, Debug)]
enum Slots {
    InUse,
    Quiet,
    Given,
    Never,
}

impl<R> Completion<R> {
    pub(crate) fn new() -> Arc<Self> {
        let state = State { outcome: None, slots: Slots::InUse, wakers: Vec::new() };
        Arc::new(Self { state: Mutex::new(state), changed: Condvar::new(), moved: AtomicU64::new(0) })
    }

    /// Ends the request. The first outcome stays.
    pub(crate) fn end(&self, outcome: Result<Vec<R>, RequestError>) {
        let outcome = outcome.map(Arc::from).map_err(Arc::new);
        self.change(|state| {
            state.outcome.get_or_insert(outcome);
        });
    }

    /// The slots are quiet.
    pub(crate) fn be_quiet(&self) {
        self.change(|state| state.slots = Slots::Quiet);
    }

    /// Nobody will ever say that the slots are quiet.
    pub(crate) fn abandon(&self) {
        self.change(|state| {
            if let Slots::InUse = state.slots {
                state.slots = Slots::Never;
            }
        });
    }

    fn change(&self, change: impl FnOnce(&mut State<R>)) {
        let mut state = self.state.lock();
        change(&mut state);
        let wakers = std::mem::take(&mut state.wakers);
        drop(state);
        self.changed.notify_all();
        wakers.into_iter().for_each(Waker::wake);
    }

    pub(crate) fn set_moved(&self, bytes: u64) {
        self.moved.store(bytes, Ordering::Relaxed); // a figure for people; nothing is read because of it
    }

    pub(crate) fn moved_bytes(&self) -> u64 {
        self.moved.load(Ordering::Relaxed) // see `set_moved`
    }

    pub(crate) fn outcome(&self) -> Option<Outcome<R>> {
        self.state.lock().outcome.clone()
    }

    pub(crate) fn wait_outcome(&self, deadline: Instant) -> Option<Outcome<R>> {
        let mut state = self.state.lock();
        self.changed.wait_while_until(&mut state, |state| state.outcome.is_none(), deadline);
        state.outcome.clone()
    }

    pub(crate) fn poll_outcome(&self, waker: &Waker) -> Poll<Outcome<R>> {
        let mut state = self.state.lock();
        match &state.outcome {
            Some(outcome) => Poll::Ready(outcome.clone()),
            None => {
                state.keep(waker);
                Poll::Pending
            }
        }
    }

    /// Takes the proof that the slots are quiet, if there is one.
    pub(crate) fn take_quiet(&self) -> Result<(), NotQuiet> {
        self.state.lock().take_quiet()
    }

    pub(crate) fn wait_quiet(&self, deadline: Instant) -> Result<(), NotQuiet> {
        let mut state = self.state.lock();
        self.changed.wait_while_until(&mut state, |state| matches!(state.slots, Slots::InUse), deadline);
        state.take_quiet()
    }

    pub(crate) fn poll_quiet(&self, waker: &Waker) -> Poll<Result<(), NotQuiet>> {
        let mut state = self.state.lock();
        match state.take_quiet() {
            Err(NotQuiet::Waiting) => {
                state.keep(waker);
                Poll::Pending
            }
            taken => Poll::Ready(taken),
        }
    }
}

impl<R> State<R> {
    fn take_quiet(&mut self) -> Result<(), NotQuiet> {
        match self.slots {
            Slots::InUse => Err(NotQuiet::Waiting),
            Slots::Quiet => {
                self.slots = Slots::Given;
                Ok(())
            }
            Slots::Given => Err(NotQuiet::Given),
            Slots::Never => Err(NotQuiet::Never),
        }
    }

    fn keep(&mut self, waker: &Waker) {
        if !self.wakers.iter().any(|kept| kept.will_wake(waker)) {
            self.wakers.push(waker.clone());
        }
    }
}
