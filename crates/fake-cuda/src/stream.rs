//! Streams: threads that do what they are given, in its order. Events: points in it.

use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::mpsc::{Sender, channel, sync_channel};
use std::sync::{Arc, Mutex, PoisonError};
use std::thread::{self, JoinHandle};
use std::time::Duration;

type Task = Box<dyn FnOnce() + Send>;

/// A stream. Dropped, it does first what it has been given.
pub(crate) struct Stream {
    tasks: Option<Mutex<Sender<Task>>>,
    given: AtomicU64,
    done: Arc<AtomicU64>,
    thread: Option<JoinHandle<()>>,
}

/// How often an event was recorded, and how often that has been reached.
#[derive(Default)]
pub(crate) struct Event {
    recorded: AtomicU64,
    reached: AtomicU64,
}

impl Stream {
    pub(crate) fn new() -> Self {
        let (tasks, taken) = channel::<Task>();
        let done = Arc::new(AtomicU64::new(0));
        let counted = done.clone();
        let thread = thread::spawn(move || {
            for task in taken {
                task();
                counted.fetch_add(1, Ordering::Release); // pairs with the load in `is_idle`
            }
        });
        Self { tasks: Some(Mutex::new(tasks)), given: AtomicU64::new(0), done, thread: Some(thread) }
    }

    pub(crate) fn give(&self, task: impl FnOnce() + Send + 'static) {
        self.given.fetch_add(1, Ordering::Relaxed);
        if let Some(tasks) = &self.tasks {
            // The thread takes tasks for as long as the stream lives.
            let _ = tasks.lock().unwrap_or_else(PoisonError::into_inner).send(Box::new(task));
        }
    }

    pub(crate) fn is_idle(&self) -> bool {
        self.done.load(Ordering::Acquire) >= self.given.load(Ordering::Relaxed)
    }

    pub(crate) fn wait(&self) {
        let (tell, told) = sync_channel(1);
        self.give(move || {
            let _ = tell.send(()); // waited for below
        });
        let _ = told.recv();
    }
}

impl Drop for Stream {
    fn drop(&mut self) {
        self.tasks.take();
        self.thread.take().into_iter().for_each(|thread| drop(thread.join()));
    }
}

impl Event {
    pub(crate) fn record(self: &Arc<Self>, stream: &Stream) {
        let number = self.recorded.fetch_add(1, Ordering::Relaxed) + 1;
        let event = self.clone();
        stream.give(move || event.reached.store(number, Ordering::Release)); // pairs with the load in `has_happened`
    }

    fn has_reached(&self, number: u64) -> bool {
        self.reached.load(Ordering::Acquire) >= number
    }

    pub(crate) fn has_happened(&self) -> bool {
        self.has_reached(self.recorded.load(Ordering::Relaxed))
    }

    /// What follows on `stream` waits for the last time that the event was recorded.
    pub(crate) fn hold(self: &Arc<Self>, stream: &Stream) {
        let (event, number) = (self.clone(), self.recorded.load(Ordering::Relaxed));
        stream.give(move || {
            while !event.has_reached(number) {
                thread::sleep(Duration::from_micros(20));
            }
        });
    }
}
