//! Who hears what happens.

use std::cell::RefCell;
use std::fmt;

use crossbeam::channel::Sender;

use crate::event::Event;

pub(crate) enum Listener {
    /// A queue that the owner empties when it likes.
    Queue(Sender<Event>),
    /// Called where it happens, which saves waking another thread.
    Handler(RefCell<Box<dyn FnMut(Event) + Send>>),
    /// Nobody.
    Gone,
}

impl Listener {
    pub(crate) fn tell(&self, event: Event) {
        match self {
            // The owner may have dropped the events before the worker: then nobody is left to be told.
            Self::Queue(events) => drop(events.send(event)),
            // Never entered twice: it is called by who makes a turn, and has no way to make another from there.
            Self::Handler(handler) => handler.borrow_mut()(event),
            Self::Gone => {}
        }
    }
}

impl fmt::Debug for Listener {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(match self {
            Self::Queue(_) => "Queue",
            Self::Handler(_) => "Handler",
            Self::Gone => "Gone",
        })
    }
}
