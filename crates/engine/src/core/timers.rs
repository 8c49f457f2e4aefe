//! What is due when. Each subject has one time at most; to look at the next costs nothing, however many there are.

use std::collections::{BTreeMap, BTreeSet};
use std::time::Instant;

use super::{LinkId, Ticket};
use crate::message::RequestKey;

/// What is looked at again at some time.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord)]
pub(super) enum Subject {
    /// The handshake of a link.
    Link(LinkId),
    /// The connection to a peer.
    Peer(u64),
    /// A receive that no group of sources has been chosen for.
    Choice(RequestKey),
    /// One source's part of a receive.
    Incoming(RequestKey, u64),
    /// One destination's part of a send.
    Outgoing(Ticket, u64),
}

#[derive(Debug, Default)]
pub(super) struct Timers {
    by_time: BTreeSet<(Instant, Subject)>,
    of: BTreeMap<Subject, Instant>,
}

impl Timers {
    /// Sets when the subject is due; `None` for never.
    pub(super) fn set(&mut self, subject: Subject, due: Option<Instant>) {
        if self.of.get(&subject).copied() == due {
            return;
        }
        let before = match due {
            Some(due) => {
                self.by_time.insert((due, subject));
                self.of.insert(subject, due)
            }
            None => self.of.remove(&subject),
        };
        if let Some(before) = before {
            self.by_time.remove(&(before, subject));
        }
    }

    pub(super) fn next(&self) -> Option<Instant> {
        self.by_time.first().map(|(due, _)| *due)
    }

    /// Takes a subject that is due.
    pub(super) fn pop(&mut self, now: Instant) -> Option<Subject> {
        let (due, subject) = *self.by_time.first()?;
        (due <= now).then(|| {
            self.set(subject, None);
            subject
        })
    }
}

#[cfg(test)]
mod tests {
    use std::time::Duration;

    use super::*;

    #[test]
    fn the_earliest_comes_first_and_the_last_word_counts() {
        let start = Instant::now();
        let at = |seconds| start + Duration::from_secs(seconds);
        let mut timers = Timers::default();
        let subjects = [1, 2, 3].map(Subject::Peer);
        for (subject, seconds) in subjects.into_iter().zip([3, 1, 2]) {
            timers.set(subject, Some(at(seconds)));
        }
        timers.set(subjects[1], Some(at(9)));
        timers.set(subjects[2], None);
        assert_eq!((timers.next(), timers.pop(at(2))), (Some(at(3)), None));
        assert_eq!(timers.pop(at(9)), Some(subjects[0]));
        assert_eq!(timers.pop(at(9)), Some(subjects[1]));
        assert_eq!((timers.next(), timers.pop(at(99))), (None, None));
    }
}
