//! Who sleeps and who has to be woken, through loom: whatever the order of things, and whatever a relaxed access may read, no command
//! is left with everybody asleep. Nobody wakes by itself here, so that a wake-up that is lost is a deadlock, which loom finds.

#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

#[path = "../src/sleepers.rs"]
mod sleepers;

mod sync {
    pub(crate) use loom::sync::atomic::{AtomicBool, AtomicU8, AtomicU64, Ordering, fence};
}

use loom::model::Builder;
use loom::sync::atomic::{AtomicU64, Ordering};
use loom::sync::{Arc, Condvar, Mutex};
use loom::thread;
use sleepers::{Did, Sleepers, ToWake};

/// A command that ends the thread; all others are 1, so that their number says it all.
const STOP: u64 = 1 << 32;

/// Past every lease but that of a caller that sleeps.
const NOW: u64 = u64::MAX - 1;
const LEASE: u64 = 1;

/// What a descriptor is in the real one.
#[derive(Default)]
struct Bell {
    rung: Mutex<bool>,
    changed: Condvar,
}

impl Bell {
    fn ring(&self) {
        *self.rung.lock().unwrap() = true;
        self.changed.notify_one();
    }

    fn wait(&self) {
        let mut rung = self.rung.lock().unwrap();
        while !*rung {
            rung = self.changed.wait(rung).unwrap();
        }
    }

    fn clear(&self) {
        *self.rung.lock().unwrap() = false;
    }
}

/// As much of the helm as has to do with sleeping, step by step as there.
struct Helm {
    /// The lock, and whether the worker runs.
    running: Mutex<bool>,
    commands: AtomicU64,
    sleepers: Sleepers,
    wake: Bell,
    caller_wake: Bell,
    done: Mutex<u64>,
    more_done: Condvar,
    /// The thread sleeps on all that there is, messages of peers included, as it does not when it rests.
    listens: Bell,
}

impl Helm {
    fn start() -> (Arc<Self>, thread::JoinHandle<()>) {
        let helm = Arc::new(Self {
            running: Mutex::new(true),
            commands: AtomicU64::new(0),
            sleepers: Sleepers::new(),
            wake: Bell::default(),
            caller_wake: Bell::default(),
            done: Mutex::new(0),
            more_done: Condvar::new(),
            listens: Bell::default(),
        });
        let serving = helm.clone();
        (helm, thread::spawn(move || serving.serve()))
    }

    fn command(&self, command: u64) {
        self.commands.fetch_add(command, Ordering::Relaxed);
    }

    fn is_commanded(&self) -> bool {
        self.commands.load(Ordering::Relaxed) > 0
    }

    fn rouse(&self, ToWake { thread, caller }: ToWake) {
        if caller {
            self.caller_wake.ring();
        }
        if thread {
            self.wake.ring();
        }
    }

    /// With the lock held. Whether there was anything to do.
    fn turn(&self, running: &mut bool) -> bool {
        let taken = self.commands.swap(0, Ordering::Relaxed);
        *running &= taken < STOP;
        *self.done.lock().unwrap() += taken % STOP;
        self.more_done.notify_all();
        taken > 0
    }

    fn serve(&self) {
        loop {
            if self.rest() {
                continue;
            }
            let mut running = self.running.lock().unwrap();
            if !*running {
                return;
            }
            if self.turn(&mut running) {
                drop(running);
                self.rouse(self.sleepers.interrupt());
            } else {
                if self.sleepers.thread_sleeps(|| drop(running), || self.is_commanded()) {
                    self.listens.ring();
                    self.wake.wait();
                    self.listens.clear();
                }
                self.wake_up();
            }
        }
    }

    fn rest(&self) -> bool {
        if self.sleepers.lease(NOW).is_none() {
            return false;
        }
        self.rouse(self.sleepers.thread_rests(|| self.is_commanded()));
        if self.sleepers.lease(NOW).is_some() {
            self.wake.wait();
        }
        self.wake_up();
        true
    }

    fn wake_up(&self) {
        self.sleepers.thread_wakes();
        self.wake.clear();
    }

    /// On the thread of a caller. Whether there is more to do; `None` if somebody else makes turns.
    fn turns(&self) -> Option<bool> {
        let mut running = self.running.try_lock().ok()?;
        if !*running {
            return None;
        }
        let busy = self.turn(&mut running);
        let did = Did { busy, in_flight: !*running, rung: false };
        let (more, to_wake) = self.sleepers.turned(did, || drop(running), || self.is_commanded());
        self.rouse(to_wake);
        Some(more)
    }

    fn nudge(&self) {
        if self.sleepers.commanded() {
            self.turns();
        }
    }

    fn has_done(&self, wanted: u64) -> bool {
        *self.done.lock().unwrap() >= wanted
    }

    fn wait_until_done(&self, wanted: u64) {
        let mut done = self.done.lock().unwrap();
        while *done < wanted {
            done = self.more_done.wait(done).unwrap();
        }
    }

    /// Makes turns in the thread's place until something is so, and sleeps in between.
    fn drive(&self, is_so: impl Fn() -> bool) {
        let (mut slept, mut more) = (false, false);
        while !is_so() {
            more = self.turns().unwrap_or(false);
            if is_so() {
                break;
            }
            let Ok(running) = self.running.try_lock() else {
                thread::yield_now();
                continue;
            };
            assert!(!self.sleepers.caller_is_asleep(), "there is no other caller");
            self.rouse(self.sleepers.caller_sleeps(|| drop(running), || self.is_commanded()));
            if !is_so() {
                self.caller_wake.wait();
            }
            slept = true;
            self.sleepers.caller_wakes(LEASE);
            self.sleepers.lend(LEASE);
            self.caller_wake.clear();
        }
        self.rouse(self.sleepers.leave(more, slept));
    }

    fn stop(&self, thread: thread::JoinHandle<()>) {
        self.command(STOP);
        self.rouse(self.sleepers.take_over());
        thread.join().unwrap();
    }
}

/// Every order with so many changes from one thread to another before it has to wait.
fn check(preemptions: usize, scene: impl Fn() + Send + Sync + 'static) {
    let mut builder = Builder::new();
    builder.preemption_bound = Some(preemptions);
    builder.check(scene);
}

#[test]
fn a_small_command_finds_the_thread_or_is_carried_out() {
    check(3, || {
        let (helm, thread) = Helm::start();
        helm.command(1);
        helm.nudge();
        helm.wait_until_done(1);
        helm.stop(thread);
    });
}

#[test]
fn two_that_command_at_once_leave_nothing_to_each_other() {
    check(2, || {
        let (helm, thread) = Helm::start();
        let other = {
            let helm = helm.clone();
            thread::spawn(move || {
                helm.command(1);
                helm.nudge();
            })
        };
        helm.command(1);
        helm.nudge();
        helm.wait_until_done(2);
        other.join().unwrap();
        helm.stop(thread);
    });
}

#[test]
fn a_large_command_wakes_the_thread() {
    check(3, || {
        let (helm, thread) = Helm::start();
        helm.command(1);
        helm.rouse(helm.sleepers.take_over());
        helm.wait_until_done(1);
        helm.stop(thread);
    });
}

/// The thread rests or sleeps meanwhile.
fn with_a_caller(preemptions: usize, command: fn(&Helm)) {
    check(preemptions, move || {
        let (helm, thread) = Helm::start();
        let caller = {
            let helm = helm.clone();
            thread::spawn(move || helm.drive(|| helm.has_done(1)))
        };
        helm.command(1);
        command(&helm);
        caller.join().unwrap();
        helm.listens.wait(); // for what else would come, once the caller has left
        helm.stop(thread);
    });
}

#[test]
fn a_small_command_finds_a_caller_that_sleeps_in_the_place_of_the_thread() {
    with_a_caller(2, Helm::nudge);
}

#[test]
fn a_large_command_wakes_both() {
    with_a_caller(2, |helm| helm.rouse(helm.sleepers.take_over()));
}

/// What the caller waits for comes about without the worker.
#[test]
fn a_caller_that_sleeps_is_interrupted() {
    check(2, || {
        let (helm, thread) = Helm::start();
        let elsewhere = Arc::new(AtomicU64::new(0));
        let caller = {
            let (helm, elsewhere) = (helm.clone(), elsewhere.clone());
            thread::spawn(move || helm.drive(|| elsewhere.load(Ordering::Relaxed) > 0))
        };
        elsewhere.store(1, Ordering::Relaxed);
        helm.rouse(helm.sleepers.interrupt());
        caller.join().unwrap();
        helm.listens.wait();
        helm.stop(thread);
    });
}

/// The message that was to wake the thread comes once, and has been taken by somebody else.
#[test]
fn who_takes_what_was_to_wake_the_thread_wakes_it() {
    check(2, || {
        let sleepers = Sleepers::new();
        assert!(sleepers.nobody_sleeps());
        assert!(sleepers.thread_sleeps(|| (), || false) && !sleepers.nobody_sleeps());
        let turned = |rung| sleepers.turned(Did { busy: true, in_flight: false, rung }, || (), || false);
        assert_eq!(turned(false), (false, ToWake { thread: false, caller: false }));
        assert_eq!(turned(true), (false, ToWake { thread: true, caller: false }));
        // A caller that sleeps as well is no substitute: it waits for something else, perhaps.
        assert_eq!(sleepers.caller_sleeps(|| (), || false), ToWake::default());
        assert_eq!(turned(true), (false, ToWake { thread: true, caller: true }));
        sleepers.thread_wakes();
        sleepers.caller_wakes(LEASE);
        assert_eq!(turned(true), (false, ToWake::default()));
    });
}
