//! The rules of every step.

use std::collections::{BTreeMap, BTreeSet};

use super::super::Handle;
use super::fixture::SLOTS;
use crate::message::RequestKey;

/// What has been promised and done so far.
#[derive(Debug, Default)]
pub(super) struct Books {
    /// Who may have each slot written, by the life of the destination. A slot that is in nobody's name has been given back.
    leases: BTreeMap<u64, Vec<Option<RequestKey>>>,
    /// How often each slot was written for a request: by lives of destination and source.
    written: BTreeMap<(u64, RequestKey), BTreeMap<(u64, u32), u32>>,
    /// The lives of sources that a receive has asked.
    asked: BTreeMap<(u64, RequestKey), BTreeSet<u64>>,
    handles: BTreeMap<(u64, Handle), Promise>,
    /// The slots of each receive that there was, by the life of its destination.
    wanted: BTreeMap<(u64, RequestKey), Vec<u32>>,
}

#[derive(Debug, Default)]
struct Promise {
    slots: Vec<u32>,
    outcome: Option<bool>,
    quiet: bool,
}

impl Books {
    pub(super) fn born(&mut self, epoch: u64) {
        self.leases.insert(epoch, vec![None; usize::try_from(SLOTS).unwrap()]);
    }

    /// A life is over, and its promises with it.
    pub(super) fn died(&mut self, epoch: u64) {
        self.leases.remove(&epoch);
        self.handles.retain(|(whose, _), promise| *whose != epoch || promise.outcome == Some(true));
    }

    /// Slots that nobody has.
    pub(super) fn free(&self, epoch: u64) -> Vec<u32> {
        let leases = self.leases[&epoch].iter();
        (0..).zip(leases).filter(|(_, lease)| lease.is_none()).map(|(slot, _)| slot).collect()
    }

    pub(super) fn posted(&mut self, epoch: u64, handle: Handle, slots: Vec<u32>) {
        if let Handle::Receive(key) = handle {
            self.wanted.insert((epoch, key), slots.clone());
            for slot in &slots {
                self.leases.get_mut(&epoch).unwrap()[usize::try_from(*slot).unwrap()] = Some(key);
            }
        }
        let promise = Promise { slots, ..Promise::default() };
        assert!(self.handles.insert((epoch, handle), promise).is_none(), "{handle:?} was taken up twice");
    }

    /// Nothing was posted: the slots were never exposed.
    pub(super) fn not_posted(&mut self, epoch: u64, handle: Handle) {
        let promise = self.handles.remove(&(epoch, handle)).unwrap();
        self.give_back(epoch, &promise.slots);
    }

    pub(super) fn asks(&mut self, destination: u64, key: RequestKey, source: u64) {
        assert!(self.handles.contains_key(&(destination, Handle::Receive(key))), "a want of nothing");
        self.asked.entry((destination, key)).or_default().insert(source);
    }

    /// A slot of a destination is written for a request.
    pub(super) fn write(&mut self, source: u64, destination: u64, key: RequestKey, slot: u32) {
        let Some(leases) = self.leases.get(&destination) else { return }; // memory of a process that is gone
        let lease = leases[usize::try_from(slot).unwrap()];
        assert_eq!(
            lease,
            Some(key),
            "slot {slot} of {destination} is written by {source} for {key:?} after it was quiet"
        );
        *self.written.entry((destination, key)).or_default().entry((source, slot)).or_default() += 1;
    }

    /// Slots are read: by a source for a send, or by a destination that compares what has arrived.
    pub(super) fn read(&self, whose: u64, handle: Handle) {
        let promise = self.handles.get(&(whose, handle));
        assert!(promise.is_none_or(|promise| !promise.quiet), "{handle:?} of {whose} is read after it was quiet");
    }

    pub(super) fn ended(&mut self, epoch: u64, handle: Handle, well: bool) {
        let promise = self.handles.get_mut(&(epoch, handle)).expect("a request that was posted");
        assert_eq!(promise.outcome, None, "{handle:?} of {epoch} ends twice");
        assert!(!promise.quiet, "{handle:?} of {epoch} was quiet before it ended");
        promise.outcome = Some(well);
        match handle {
            Handle::Receive(key) if well => {
                let written = self.written.get(&(epoch, key)).cloned().unwrap_or_default();
                let asked = &self.asked[&(epoch, key)];
                let expected = asked.iter().flat_map(|source| promise.slots.iter().map(|slot| (*source, *slot)));
                let expected: BTreeMap<_, _> = expected.map(|cell| (cell, 1)).collect();
                assert_eq!(written, expected, "{key:?} of {epoch} is reported whole");
            }
            Handle::Send(ticket) if well => {
                // Whether the receive goes well is up to its other sources, too.
                let wanted = self.wanted.iter().filter(|((_, key), _)| *key == ticket.key);
                let whole = wanted.filter(|(receive, slots)| {
                    let written = self.written.get(receive);
                    slots.iter().all(|slot| written.is_some_and(|written| written.get(&(epoch, *slot)) == Some(&1)))
                });
                assert!(whole.count() > 0, "{ticket:?} of {epoch} ended well and is nowhere whole");
            }
            _ => {}
        }
    }

    pub(super) fn quiet(&mut self, epoch: u64, handle: Handle) {
        let promise = self.handles.get_mut(&(epoch, handle)).expect("a request that was posted");
        assert!(promise.outcome.is_some(), "{handle:?} of {epoch} is quiet before it has ended");
        assert!(!promise.quiet, "{handle:?} of {epoch} is quiet twice");
        promise.quiet = true;
        let slots = promise.slots.clone();
        if let Handle::Receive(_) = handle {
            self.give_back(epoch, &slots);
        }
    }

    fn give_back(&mut self, epoch: u64, slots: &[u32]) {
        let Some(leases) = self.leases.get_mut(&epoch) else { return };
        for slot in slots {
            leases[usize::try_from(*slot).unwrap()] = None;
        }
    }

    /// Requests of a life that have not ended, and those that have ended and are not quiet.
    pub(super) fn open(&self, epoch: u64) -> (Vec<Handle>, Vec<Handle>) {
        let of = |open: fn(&Promise) -> bool| {
            let handles = self.handles.iter().filter(|((whose, _), promise)| *whose == epoch && open(promise));
            handles.map(|((_, handle), _)| *handle).collect()
        };
        (of(|promise| promise.outcome.is_none()), of(|promise| promise.outcome.is_some() && !promise.quiet))
    }
}
