//! The control thread: connects where the progress thread may not wait, and keeps the time while something has a deadline.

use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use crossbeam::channel::{Receiver, RecvTimeoutError};

use crate::error::Failure;
use crate::message::{Message, Refused};
use crate::shared::{Flight, Shared};

/// Between two looks at the time, while there is something to look for.
const TICK: Duration = Duration::from_millis(5);

/// How long the thread keeps the time after nothing has a deadline any more: it need not be woken for what comes next.
const LINGER: Duration = Duration::from_secs(1);

/// What the control thread is to do.
#[derive(Debug)]
pub(crate) enum Chore {
    /// Look at the time: something has a deadline.
    Look,
    /// Answer an agent that has greeted.
    Welcome {
        epoch: u64,
    },
    /// Connect to an agent that reads, and push what it reads.
    Push {
        epoch: u64,
        serial: u64,
    },
    /// Tell it that it is not pushed, or how its small write went.
    Answer {
        epoch: u64,
        serial: u64,
        why: Option<Refused>,
        settled: bool,
    },
    Stop,
}

pub(crate) fn run(shared: &Shared, chores: &Receiver<Chore>) {
    let mut needed = Instant::now();
    loop {
        if shared.has_deadlines() {
            needed = Instant::now();
        } else if needed.elapsed() > LINGER {
            // What is posted from here on wakes this thread; what was posted before is seen by the second look.
            shared.keeps_time.store(false, Ordering::SeqCst);
        }
        let chore = if needed.elapsed() <= LINGER || shared.has_deadlines() {
            shared.keeps_time.store(true, Ordering::SeqCst);
            chores.recv_timeout(TICK)
        } else {
            chores.recv().map_err(|_| RecvTimeoutError::Disconnected)
        };
        match chore {
            Ok(Chore::Stop) | Err(RecvTimeoutError::Disconnected) => return,
            Ok(Chore::Look) | Err(RecvTimeoutError::Timeout) => shared.keep_time(),
            Ok(Chore::Welcome { epoch }) => {
                if let Ok(endpoint) = shared.link(epoch) {
                    shared.say(endpoint, &Message::Welcome);
                }
            }
            Ok(Chore::Push { epoch, serial }) => {
                // What cannot be imported is found missing.
                if let Ok(endpoint) = shared.link(epoch) {
                    let asked_for = |state: &crate::shared::State| {
                        state.peers.get(&epoch).map(|peer| peer.asked_for.values().cloned().collect())
                    };
                    let cards: Vec<_> = asked_for(&shared.state.lock()).unwrap_or_default();
                    if let Err(error) = shared.import(epoch, endpoint, &cards) {
                        tracing::warn!(epoch, %error, "memory that an agent reads into cannot be imported");
                    }
                }
                shared.push(&mut shared.state.lock(), epoch, serial);
            }
            Ok(Chore::Answer { epoch, serial, why, settled }) => {
                if let Ok(endpoint) = shared.link(epoch) {
                    let failed = |why| Message::Failed { serial, why, settled };
                    shared.say(endpoint, &why.map_or(Message::Done { serial }, failed));
                }
            }
        }
        shared.carry_out();
    }
}

impl Shared {
    fn has_deadlines(&self) -> bool {
        let state = self.state.lock();
        let reads = state.reads.values().any(|read| !read.ended);
        reads || self.register.is_busy() || (self.options.transfer_deadline.is_some() && !state.flights.is_empty())
    }

    fn keep_time(&self) {
        self.answer_put_off(); // whoever was to do it does not look any more
        self.end_silent(self.options.patience);
        self.register.give_back();
        let Some(allowed) = self.options.transfer_deadline else { return };
        let state = self.state.lock();
        let flights = state.flights.values().filter_map(|flight| match flight {
            Flight::Own(transfer) => Some(transfer.clone()),
            Flight::Served(..) => None,
        });
        let reads = state.reads.values().map(|read| read.transfer.clone());
        let all: Vec<_> = flights.chain(reads).collect();
        drop(state);
        for transfer in all {
            if transfer.posted().is_some_and(|(_, since)| since.elapsed() >= allowed) {
                transfer.give_up(Failure::Deadline { allowed });
            }
        }
    }
}
