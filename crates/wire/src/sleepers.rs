//! Who of those that move a worker along sleeps, and who has to be woken.
//!
//! No data is behind this: what a worker has is reached under the lock of its helm, and nowhere else. It is about one thing, that
//! no command is left with everybody asleep. Two who may meet each write something, pass a `SeqCst` fence, and read what the other
//! writes, so that one of them at least sees the other:
//!
//! | who | writes | and then reads |
//! | --- | --- | --- |
//! | the thread or a caller that lies down | that it sleeps, and the lock, which it gives back | the commands |
//! | who has commanded something | the commands | who sleeps, and the lock, if it tries to make turns itself |
//! | who has made turns | the lock, which it gives back | the commands, and then who sleeps |
//!
//! Who sleeps is written with the lock held, so that whoever has it next knows. `tests/sleepers.rs` runs this file through loom.

use crate::sync::{AtomicBool, AtomicU8, AtomicU64, Ordering, fence};

/// What the thread does, as far as it has to be woken.
const AWAKE: u8 = 0;
const RESTING: u8 = 1;
const ASLEEP: u8 = 2;

/// The lease of a caller that sleeps: until it says otherwise.
const ASLEEP_LEASE: u64 = u64::MAX;

/// Times are in nanoseconds since any moment. All accesses are relaxed: what orders them is a fence that the method names.
#[derive(Debug)]
pub(crate) struct Sleepers {
    /// Awake it looks for commands before it does anything else; resting, when the lease is over; asleep, when it is woken.
    thread: AtomicU8,
    /// A caller sleeps in the thread's place.
    caller: AtomicBool,
    leased_until: AtomicU64,
}

/// What turns have done.
#[derive(Clone, Copy, Debug, Default)]
pub(crate) struct Did {
    /// Something moved.
    pub(crate) busy: bool,
    /// There is something that only further turns move on, or that who sleeps does not know of.
    pub(crate) in_flight: bool,
    /// The message was taken that was to wake the thread, and comes once for each time that it lies down.
    pub(crate) rung: bool,
}

/// Who is to be woken.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(crate) struct ToWake {
    pub(crate) thread: bool,
    pub(crate) caller: bool,
}

impl Sleepers {
    pub(crate) fn new() -> Self {
        Self { thread: AtomicU8::new(AWAKE), caller: AtomicBool::new(false), leased_until: AtomicU64::new(0) }
    }

    /// The thread is about to sleep, with the lock held, which `unlock` gives back. Whether it may.
    pub(crate) fn thread_sleeps(&self, unlock: impl FnOnce(), is_commanded: impl FnOnce() -> bool) -> bool {
        self.thread.store(ASLEEP, Ordering::Relaxed);
        unlock();
        fence(Ordering::SeqCst); // pairs with those of `commanded`, `take_over` and `turned`
        !is_commanded()
    }

    /// The thread is about to leave the turns to a caller for as long as the [`lease`](Self::lease) is, at which it has to look
    /// again.
    pub(crate) fn thread_rests(&self, is_commanded: impl FnOnce() -> bool) -> ToWake {
        self.thread.store(RESTING, Ordering::Relaxed);
        fence(Ordering::SeqCst); // pairs with those of `take_over`, `leave` and `commanded`
        // Whoever gave a command has found this thread awake.
        if is_commanded() { self.interrupt() } else { ToWake::default() }
    }

    /// The thread looks for itself again. To be followed by a look at everything.
    pub(crate) fn thread_wakes(&self) {
        self.thread.store(AWAKE, Ordering::Relaxed);
    }

    /// How long the turns are a caller's; `None` if they are not.
    pub(crate) fn lease(&self, now: u64) -> Option<u64> {
        let until = self.leased_until.load(Ordering::Relaxed); // late is no harm; `take_over` has its own fence
        until.checked_sub(now).filter(|left| *left > 0)
    }

    /// A caller is taken to come back by then.
    pub(crate) fn lend(&self, until: u64) {
        if !self.caller_is_asleep() {
            self.leased_until.store(until, Ordering::Relaxed); // else it has more
        }
    }

    pub(crate) fn caller_is_asleep(&self) -> bool {
        self.caller.load(Ordering::Relaxed)
    }

    /// With the lock held, as whoever lies down has it. A thread that has just woken is taken to sleep.
    pub(crate) fn nobody_sleeps(&self) -> bool {
        self.thread.load(Ordering::Relaxed) != ASLEEP && !self.caller_is_asleep()
    }

    /// A caller is about to sleep in the thread's place, with the lock held, which `unlock` gives back.
    pub(crate) fn caller_sleeps(&self, unlock: impl FnOnce(), is_commanded: impl FnOnce() -> bool) -> ToWake {
        self.leased_until.store(ASLEEP_LEASE, Ordering::Relaxed);
        self.caller.store(true, Ordering::Relaxed);
        unlock();
        fence(Ordering::SeqCst); // pairs with those of `commanded`, `take_over`, `turned` and `interrupt`
        ToWake { caller: is_commanded(), thread: false }
    }

    /// That caller is awake, and expected to come back by then.
    pub(crate) fn caller_wakes(&self, until: u64) {
        self.caller.store(false, Ordering::Relaxed);
        self.lend(until);
    }

    /// Something has happened that a caller who sleeps may wait for.
    pub(crate) fn interrupt(&self) -> ToWake {
        fence(Ordering::SeqCst); // pairs with that of `caller_sleeps`
        ToWake { caller: self.caller_is_asleep(), thread: false }
    }

    /// Something has been commanded. Whether nobody may look for it, and whoever asks has to.
    pub(crate) fn commanded(&self) -> bool {
        fence(Ordering::SeqCst); // pairs with those of `thread_sleeps`, `thread_rests`, `caller_sleeps` and `turned`
        self.thread.load(Ordering::Relaxed) != AWAKE
    }

    /// Something has been commanded that is the thread's own to do.
    pub(crate) fn take_over(&self) -> ToWake {
        self.leased_until.store(0, Ordering::Relaxed);
        let thread = self.commanded();
        ToWake { thread, caller: self.caller_is_asleep() }
    }

    /// Turns have been made, with the lock held, which `unlock` gives back. Whether there is more to do.
    pub(crate) fn turned(
        &self,
        Did { busy, in_flight, rung }: Did,
        unlock: impl FnOnce(),
        is_commanded: impl FnOnce() -> bool,
    ) -> (bool, ToWake) {
        unlock();
        fence(Ordering::SeqCst); // pairs with that of `commanded`, which has found the lock taken, and those of who lies down
        let more = in_flight || is_commanded();
        let caller = (busy || more) && self.caller_is_asleep();
        let thread = (rung || more && !caller) && self.thread.load(Ordering::Relaxed) == ASLEEP;
        (more, ToWake { caller, thread })
    }

    /// A caller that has made turns, and may have slept between them, makes no more. What is `left` to do is the thread's now.
    pub(crate) fn leave(&self, left: bool, slept: bool) -> ToWake {
        if self.caller_is_asleep() {
            return ToWake::default(); // another is there
        }
        if left {
            self.leased_until.store(0, Ordering::Relaxed);
        }
        fence(Ordering::SeqCst); // pairs with that of `thread_rests`
        // Asleep it has been woken for what there is.
        let thread = (left || slept) && self.thread.load(Ordering::Relaxed) == RESTING;
        ToWake { thread, caller: false }
    }
}
