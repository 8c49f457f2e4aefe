//! Messages that have begun to come by UCX.
//!
//! UCX hands a message over when its first part is there. The rest follows unless its sender is stopped, or dies: then it comes late
//! or never, and UCX does not say so.

use std::collections::VecDeque;

use crate::frame::Tag;
use crate::raw::Inbound;

/// In the order in which they began.
#[derive(Default)]
pub(crate) struct Arriving {
    messages: VecDeque<Inbound>,
    /// Of some the rest will never come, and UCX does not know.
    torn: bool,
}

impl Arriving {
    pub(crate) fn push(&mut self, message: Inbound) {
        self.messages.push_back(message);
    }

    /// The first that is whole and has none of its own stream before it.
    pub(crate) fn take_whole(&mut self) -> Option<Inbound> {
        let mut awaited: Vec<Tag> = Vec::new(); // few: a stream has one at a time, and most come whole
        let whole = self.messages.iter().position(|message| {
            let waits = awaited.contains(&message.tag);
            if !waits && !message.is_complete() {
                awaited.push(message.tag);
            }
            !waits && message.is_complete()
        });
        self.messages.remove(whole?)
    }

    /// Gives up what a dead peer has sent in part.
    pub(crate) fn give_up(&mut self, epoch: u64) {
        let before = self.messages.len();
        self.messages.retain(|message| !message.tag.is_of(epoch));
        self.torn |= self.messages.len() < before;
    }

    /// Whether UCX waits for nothing more.
    pub(crate) fn is_over(&self) -> bool {
        self.messages.is_empty() && !self.torn
    }
}
