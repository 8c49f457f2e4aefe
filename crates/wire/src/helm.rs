//! Who moves a worker along: its own thread, or in its place one that waits for it anyway.
//!
//! Whoever has the lock makes turns. Where a caller that waits, the worker's thread and those of the peer share two cores, each
//! message costs changes from one to the other, which are most of the time that a small transfer takes; and a caller that sleeps
//! until the thread wakes it is woken twice. So the thread rests while a caller comes back again and again, or sleeps in its
//! place, and is back when that one stays away for [`LEASE`], says that it leaves, or was never there.

use std::os::fd::{AsFd, OwnedFd};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use crossbeam::channel::{Receiver, Sender as Channel};
use parking_lot::{Mutex, MutexGuard};
use rustix::event::{EventfdFlags, PollFd, PollFlags, Timespec, eventfd, poll};

use crate::context::Context;
use crate::error::OpenError;
use crate::listener::Listener;
use crate::permits::Permits;
use crate::progress::{Command, Progress};
use crate::sleepers::{Did, Sleepers, ToWake};

/// How long an idle thread sleeps at most. Nothing depends on its waking; it bounds what a lost wake-up could cost.
const SLEEP_MAX: Timespec = Timespec { tv_sec: 1, tv_nsec: 0 };

/// How long after its last turn a caller that comes back again and again is taken to come back once more. It delays what arrives
/// just after it has left, about as much as waking the thread would, and is when the thread looks whether the caller still
/// comes: a look costs it some microseconds.
const LEASE: Duration = Duration::from_micros(100);

/// Within this a caller is back that does nothing else. One that looks in now and then makes a turn, and no more of it.
const BACK_AGAIN: Duration = Duration::from_micros(20);

/// Turns that carry out a command in the thread's place, at most: the rest is left to the thread.
const TURNS_MAX: usize = 8;

/// What a worker's handle and its thread share.
pub(crate) struct Helm {
    /// `None` before the thread has begun and after it has ended.
    state: Mutex<Option<Progress>>,
    commands: Channel<Command>,
    sleepers: Sleepers,
    /// What the thread is woken with, and a caller that sleeps in its place.
    wake: OwnedFd,
    caller_wake: Arc<OwnedFd>,
    /// When a caller last made a turn, in nanoseconds since `born`.
    turned: AtomicU64,
    born: Instant,
    /// Whether callers may take the thread's place: not if it has a processor of its own.
    open: bool,
}

/// What a caller's turn has done.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Turned {
    /// Something moved.
    pub(crate) busy: bool,
    /// Something is in flight, or has been commanded.
    pub(crate) more: bool,
}

/// Why a caller cannot sleep in the thread's place.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Restless {
    /// There is something to do.
    Busy,
    /// Somebody else has the place.
    Taken,
}

/// The lock, for a turn. If that panics, nobody makes another. One that is made while a caller's panic unwinds, by what it drops, is
/// as good as any.
struct Turning<'a> {
    state: MutexGuard<'a, Option<Progress>>,
    in_panic: bool,
}

impl<'a> Turning<'a> {
    fn new(state: MutexGuard<'a, Option<Progress>>) -> Self {
        Self { state, in_panic: thread::panicking() }
    }
}

impl Drop for Turning<'_> {
    fn drop(&mut self) {
        if thread::panicking()
            && !self.in_panic
            && let Some(progress) = self.state.take()
        {
            progress.abandon();
        }
    }
}

impl Helm {
    pub(crate) fn new(context: &Context, commands: Channel<Command>) -> std::io::Result<Self> {
        Ok(Self {
            state: Mutex::new(None),
            commands,
            sleepers: Sleepers::new(),
            wake: eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?,
            caller_wake: Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK)?),
            turned: AtomicU64::new(0),
            born: Instant::now(),
            open: context.options().cpus.is_empty(),
        })
    }

    /// The body of the thread. Says through `started` how the start went.
    pub(crate) fn run(
        &self,
        context: Context,
        epoch: u64,
        (listener, commands, permits): (Listener, Receiver<Command>, Arc<Permits>),
        started: &Channel<Result<Vec<u8>, OpenError>>,
    ) {
        let linger = context.options().linger;
        match Progress::start(context, epoch, commands, listener, permits) {
            Ok((progress, address)) => {
                *self.state.lock() = Some(progress);
                // The handle waits for this, here and below; it cannot be gone.
                let _ = started.send(Ok(address));
                self.serve(linger);
                let left = self.state.lock().take(); // from here on nobody else makes a turn
                if let Some(mut progress) = left
                    && !progress.stop()
                {
                    // UCX 1.13 has crashed in `ucp_worker_destroy` with operations pending on a dead peer (shared memory), 1.22
                    // with lanes that were cut off in the middle of a put. Whatever there is then is left to the end of the
                    // process.
                    tracing::warn!("some operations were cut short; the worker is not destroyed");
                    progress.abandon();
                }
            }
            Err(error) => drop(started.send(Err(error))),
        }
    }

    /// Until the worker is to stop, or somebody's turn has panicked.
    fn serve(&self, linger: Duration) {
        let mut active = Instant::now();
        loop {
            if self.rest() {
                active = Instant::now();
                continue;
            }
            let mut turning = Turning::new(self.state.lock());
            let Some(progress) = turning.state.as_mut().filter(|progress| progress.is_running()) else { return };
            if !self.sleepers.caller_is_asleep() {
                progress.disarm();
            }
            let busy = progress.turn();
            progress.take_rung(); // this thread is awake, and a caller who sleeps is woken for whatever moved
            if busy {
                active = Instant::now();
                drop(turning);
                self.interrupt();
            } else if !progress.is_idle() || active.elapsed() < linger {
                drop(turning);
                thread::yield_now(); // the other end may share this core
            } else if progress.arm() {
                self.sleep(turning);
            }
        }
    }

    /// Sleeps until UCX, a command or the end of a peer wakes it.
    fn sleep(&self, turning: Turning<'_>) {
        let Some(wakers) = turning.state.as_ref().map(Progress::wakers) else { return };
        if self.sleepers.thread_sleeps(|| drop(turning), || self.is_commanded()) {
            let fds = wakers.iter().map(AsFd::as_fd).chain([self.wake.as_fd()]);
            let mut fds: Vec<PollFd<'_>> = fds.map(|fd| PollFd::from_borrowed_fd(fd, PollFlags::IN)).collect();
            let _ = poll(&mut fds, Some(&SLEEP_MAX)); // interrupted is as good as woken
        }
        self.wake_up();
    }

    /// Leaves the turns to a caller, if one is at it, for as long as it is expected to be. Returns whether there was one.
    fn rest(&self) -> bool {
        if self.lease().is_none() {
            return false;
        }
        self.rouse(self.sleepers.thread_rests(|| self.is_commanded()));
        if let Some(lease) = self.lease() {
            let mut fds = [PollFd::new(&self.wake, PollFlags::IN)];
            let until = Timespec::try_from(lease).ok().filter(|lease| lease.tv_sec < SLEEP_MAX.tv_sec);
            let _ = poll(&mut fds, Some(&until.unwrap_or(SLEEP_MAX))); // as in `sleep`
        }
        self.wake_up();
        true
    }

    fn wake_up(&self) {
        self.sleepers.thread_wakes();
        let mut counter = [0; 8];
        let _ = rustix::io::read(&self.wake, &mut counter); // empty is fine
    }

    /// Nanoseconds since this was made.
    fn now(&self) -> u64 {
        u64::try_from(self.born.elapsed().as_nanos()).unwrap_or(u64::MAX)
    }

    fn lease(&self) -> Option<Duration> {
        self.sleepers.lease(self.now()).map(Duration::from_nanos)
    }

    fn is_commanded(&self) -> bool {
        !self.commands.is_empty()
    }

    /// A turn on the thread of a caller. One that is back at once has the thread rest.
    pub(crate) fn turn(&self) -> Option<Turned> {
        let called = self.now();
        let turned = self.turns(1)?;
        let now = self.now();
        let before = self.turned.swap(now, Ordering::Relaxed); // a guess at what the caller will do, as the lease is
        if u128::from(called.saturating_sub(before)) < BACK_AGAIN.as_nanos() {
            self.sleepers.lend(back_by(now));
        }
        Some(turned)
    }

    /// A caller is about to sleep in the thread's place, on what is returned. To be followed by [`get_up`](Self::get_up); what
    /// the caller waits for has to be looked at in between.
    pub(crate) fn lie_down(&self) -> Result<Vec<Arc<OwnedFd>>, Restless> {
        let mut turning = Turning::new(self.state.try_lock().ok_or(Restless::Busy)?);
        let progress = turning.state.as_mut().filter(|_| self.open).ok_or(Restless::Taken)?;
        if self.sleepers.caller_is_asleep() {
            return Err(Restless::Taken);
        }
        if !progress.is_running() || !progress.is_idle() || !progress.arm() {
            return Err(Restless::Busy);
        }
        let mut wakers = progress.wakers();
        wakers.push(self.caller_wake.clone());
        self.rouse(self.sleepers.caller_sleeps(|| drop(turning), || self.is_commanded()));
        Ok(wakers)
    }

    /// The caller that lay down is awake again.
    pub(crate) fn get_up(&self) {
        self.sleepers.caller_wakes(back_by(self.now()));
        let mut counter = [0; 8];
        let _ = rustix::io::read(&self.caller_wake, &mut counter); // empty is fine
    }

    /// Something has happened elsewhere that a caller who sleeps here may wait for.
    pub(crate) fn interrupt(&self) {
        self.rouse(self.sleepers.interrupt());
    }

    /// Something has been commanded that is the thread's own to do.
    pub(crate) fn take_over(&self) {
        self.rouse(self.sleepers.take_over());
    }

    /// A caller that has made turns, and may have slept between them, makes no more. What is `left` to do is the thread's now.
    pub(crate) fn leave(&self, left: bool, slept: bool) {
        self.rouse(self.sleepers.leave(left, slept));
    }

    /// What a caller has left behind, if there is still something after a few turns.
    pub(crate) fn finish(&self) -> bool {
        self.turns(TURNS_MAX).is_none_or(|turned| turned.more)
    }

    /// Something small has been commanded: carries it out here, unless the thread is about to. Waking it takes longer.
    pub(crate) fn nudge(&self) {
        if self.sleepers.commanded() && self.turns(TURNS_MAX).is_none() && !self.open {
            self.rouse(ToWake { thread: true, caller: false });
        }
    }

    /// Makes turns while something moves. `None` if somebody else does, who looks for commands afterwards, or the worker has
    /// stopped.
    fn turns(&self, most: usize) -> Option<Turned> {
        let mut turning = Turning::new(self.open.then(|| self.state.try_lock()).flatten()?);
        let progress = turning.state.as_mut()?;
        if self.sleepers.nobody_sleeps() {
            progress.disarm();
        }
        let connected = progress.connected();
        let mut busy = false;
        for _ in 0..most {
            if !progress.turn() {
                break;
            }
            busy = true;
            if progress.is_idle() && !self.is_commanded() {
                break; // another turn would look in vain
            }
        }
        // Who sleeps is to look after processes that it did not know of when it lay down, and after messages that UCX has yet to move.
        let in_flight = !progress.is_idle()
            || !progress.is_running()
            || progress.connected() != connected
            || !(self.sleepers.nobody_sleeps() || progress.arm_for_sent());
        // The message that was to wake the thread may have been taken here, and there is no other before it has been up.
        let did = Did { busy, in_flight, rung: progress.take_rung() };
        let (more, to_wake) = self.sleepers.turned(did, || drop(turning), || self.is_commanded());
        self.rouse(to_wake);
        Some(Turned { busy, more })
    }

    /// The system call is dear to a transfer of microseconds: only for who does not look by itself. A full counter means that it is
    /// being woken already.
    fn rouse(&self, ToWake { thread, caller }: ToWake) {
        if caller {
            let _ = rustix::io::write(&self.caller_wake, &1u64.to_ne_bytes());
        }
        if thread {
            let _ = rustix::io::write(&self.wake, &1u64.to_ne_bytes());
        }
    }
}

/// When a caller that has made a turn now is taken to be back at the latest.
fn back_by(now: u64) -> u64 {
    now.saturating_add(u64::try_from(LEASE.as_nanos()).expect("a small constant"))
}

impl std::fmt::Debug for Helm {
    fn fmt(&self, f: &mut std::fmt::Formatter<'_>) -> std::fmt::Result {
        f.debug_struct("Helm").field("open", &self.open).finish_non_exhaustive()
    }
}
