//! What peers have told this agent, until its owner takes it.

use std::collections::VecDeque;
use std::sync::atomic::{AtomicUsize, Ordering};
use std::time::Instant;

use parking_lot::{Condvar, Mutex};

/// Most notifications that wait to be taken, and most bytes of them. What comes on top is dropped and counted: a peer that
/// notifies somebody who never looks must not take his memory.
const WAITING_MAX: usize = 1 << 20;
const WAITING_BYTES_MAX: usize = 1 << 28;

/// A message of a remote agent. If it came with a transfer, the data of that is there.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Notification {
    /// Name of the agent that sent it.
    pub from: String,
    /// What it said.
    pub message: Vec<u8>,
}

#[derive(Debug, Default)]
pub(crate) struct Notifications {
    /// Notifications that wait, for those who look again and again.
    waiting: AtomicUsize,
    queue: Mutex<Queue>,
    came: Condvar,
}

#[derive(Debug, Default)]
struct Queue {
    all: VecDeque<Notification>,
    bytes: usize,
    dropped: u64,
    /// Whether nothing comes any more.
    ended: bool,
}

impl Notifications {
    pub(crate) fn add(&self, notification: Notification) {
        let mut queue = self.queue.lock();
        let bytes = queue.bytes + notification.message.len();
        if queue.all.len() >= WAITING_MAX || bytes > WAITING_BYTES_MAX {
            queue.dropped += 1;
            tracing::error!(from = notification.from, dropped = queue.dropped, "a notification nobody has room for");
            return;
        }
        queue.bytes = bytes;
        queue.all.push_back(notification);
        self.waiting.store(queue.all.len(), Ordering::Release); // pairs with the load in `is_empty`
        self.came.notify_all();
    }

    pub(crate) fn is_empty(&self) -> bool {
        self.waiting.load(Ordering::Acquire) == 0
    }

    pub(crate) fn take(&self) -> Vec<Notification> {
        if self.is_empty() {
            return Vec::new();
        }
        self.empty(&mut self.queue.lock())
    }

    pub(crate) fn wait(&self, deadline: Instant) -> Vec<Notification> {
        let mut queue = self.queue.lock();
        while queue.all.is_empty() && !queue.ended && !self.came.wait_until(&mut queue, deadline).timed_out() {}
        self.empty(&mut queue)
    }

    /// Nothing comes any more: nobody waits for it.
    pub(crate) fn end(&self) {
        self.queue.lock().ended = true;
        self.came.notify_all();
    }

    pub(crate) fn dropped(&self) -> u64 {
        self.queue.lock().dropped
    }

    fn empty(&self, queue: &mut Queue) -> Vec<Notification> {
        self.waiting.store(0, Ordering::Relaxed); // the lock is held, as wherever it is written
        queue.bytes = 0;
        queue.all.drain(..).collect()
    }
}
