//! Reads: pulled by this side where it can, and else pushed by the peer on request.

use std::sync::Arc;
use std::sync::atomic::Ordering;
use std::time::{Duration, Instant};

use kvferry_wire::{Part, PutError, Region, RegionId, TransferId, TransferStats};

use crate::error::Failure;
use crate::message::{self, Message, NOTIFY, Refused};
use crate::shared::{Shared, State, failure};
use crate::transfer::{Inner, Operation};

/// How often reads that are to be settled, of this side's and of peers, are looked at again.
const SETTLE_LOOK: Duration = Duration::from_millis(1);

/// A read that a peer was asked to push.
#[derive(Debug)]
pub(crate) struct Read {
    pub(crate) transfer: Arc<Inner>,
    /// The last sign of life of the peer, as far as the read goes.
    pub(crate) moved: Instant,
    /// Whether its owner was told of an end already, and only quiet is waited for.
    pub(crate) ended: bool,
    /// Memory of this side that the peer writes: it stays registered until it does so no more.
    pub(crate) held: Vec<Region>,
}

impl Shared {
    /// Asks the peer to push `parts`, after it was told where to.
    pub(crate) fn ask(&self, state: &mut State, transfer: &Arc<Inner>, id: TransferId, parts: &[Part]) {
        let connection = state.peers.get_mut(&transfer.epoch).and_then(|peer| peer.connection.as_mut());
        // A connection that is gone ends the read at once: see `connection_lost`, which finds it among the reads.
        if let Some(connection) = connection {
            for part in parts {
                if connection.told.insert(part.local.id()) {
                    self.say(connection.endpoint, &Message::Region(part.local.card()));
                }
            }
            for message in message::read(id.0, parts) {
                self.say(connection.endpoint, &message);
            }
        }
        let mut held: Vec<Region> = parts.iter().map(|part| part.local.clone()).collect();
        held.dedup_by_key(|region| region.id());
        self.await_answer(state, transfer, id, held);
    }

    /// The peer has been asked for something, or is about to be. `held`: what it writes to.
    pub(crate) fn await_answer(&self, state: &mut State, transfer: &Arc<Inner>, id: TransferId, held: Vec<Region>) {
        state.reads.insert(id.0, Read { transfer: transfer.clone(), moved: Instant::now(), ended: false, held });
        self.look();
    }

    /// A pull has ended. One that had no way is asked for.
    pub(crate) fn pulled(&self, transfer: &Arc<Inner>, id: TransferId, result: Result<TransferStats, PutError>) {
        match result {
            Err(PutError::RouteUnavailable { .. }) => {
                let parts = transfer.parts().unwrap_or_default();
                let mut state = self.state.lock();
                let is_stopping = self.stopping.load(Ordering::Relaxed);
                let peer = state.peers.get_mut(&transfer.epoch);
                let connection = peer.and_then(|peer| peer.connection.as_mut());
                let connection = connection.filter(|connection| connection.endpoint == transfer.endpoint);
                match connection {
                    Some(connection) if !parts.is_empty() && !transfer.is_given_up() && !is_stopping => {
                        connection
                            .not_pulled
                            .extend(parts.iter().map(|part| part.remote.id()).collect::<Vec<RegionId>>());
                        self.ask(&mut state, transfer, id, &parts);
                    }
                    Some(_) => {
                        drop(state);
                        transfer.end(id, Err(Failure::Cancelled), false);
                    }
                    None => {
                        drop(state);
                        transfer.end(id, Err(Failure::Disconnected { name: transfer.name.to_string() }), false);
                    }
                }
            }
            Err(error) => transfer.end(id, Err(failure(transfer, error)), false),
            Ok(stats) => self.read_ended(transfer, id, Some(stats)),
        }
    }

    /// The bytes are here: the peer is told, if it is to be, and then the owner.
    fn read_ended(&self, transfer: &Arc<Inner>, id: TransferId, stats: Option<TransferStats>) {
        // With a small write it has gone along.
        if let Some(message) = transfer.notification().filter(|_| transfer.operation == Operation::Read) {
            // A peer that is gone has no use for it.
            let _ = self.worker().send(transfer.endpoint, NOTIFY, message);
        }
        transfer.end(id, Ok(stats), false);
    }

    pub(crate) fn cancel_read(&self, state: &mut State, transfer: &Arc<Inner>, id: TransferId) {
        let Some(read) = state.reads.get_mut(&id.0) else { return };
        read.moved = Instant::now(); // to answer, the peer has all of the patience
        if transfer.operation == Operation::Read {
            self.say(transfer.endpoint, &Message::CancelRead { serial: id.0 });
        }
    }

    pub(crate) fn read_moves(&self, epoch: u64, serial: u64) {
        let mut state = self.state.lock();
        let read = state.reads.get_mut(&serial).filter(|read| read.transfer.epoch == epoch);
        read.into_iter().for_each(|read| read.moved = Instant::now());
    }

    /// Takes a read of the peer out, if it is one.
    fn take_read(&self, epoch: u64, serial: u64) -> Option<Read> {
        let mut state = self.state.lock();
        let of_peer = state.reads.get(&serial).is_some_and(|read| read.transfer.epoch == epoch);
        if of_peer { state.reads.remove(&serial) } else { None }
    }

    pub(crate) fn done(&self, epoch: u64, serial: u64) {
        let Some(Read { transfer, ended, held, .. }) = self.take_read(epoch, serial) else { return };
        drop(held); // who hears of the end may deregister it at once
        match ended {
            true => transfer.settle(),
            false => self.read_ended(&transfer, TransferId(serial), None),
        }
        self.leave(epoch);
    }

    pub(crate) fn read_failed(&self, epoch: u64, serial: u64, why: Refused, settled: bool) {
        let mut state = self.state.lock();
        let read = state.reads.get_mut(&serial).filter(|read| read.transfer.epoch == epoch);
        let Some(read) = read else { return };
        let (transfer, was_ended) = (read.transfer.clone(), std::mem::replace(&mut read.ended, true));
        let over = if settled { state.reads.remove(&serial) } else { None };
        drop(state);
        drop(over);
        if !was_ended {
            transfer.end(TransferId(serial), Err(Failure::refused(&transfer.name, why)), !settled);
        } else if settled {
            transfer.settle();
        }
        self.leave(epoch);
    }

    /// The reads of a peer whose connection is gone, to be ended by the caller once the lock is free. They are kept until the
    /// peer is known to be dead: until then it may write.
    pub(crate) fn lose_reads(&self, state: &mut State, epoch: u64) -> Vec<(Arc<Inner>, TransferId)> {
        let mut lost = Vec::new();
        state.reads.retain(|serial, read| {
            let of_peer = read.transfer.epoch == epoch;
            if of_peer && !std::mem::replace(&mut read.ended, true) {
                lost.push((read.transfer.clone(), TransferId(*serial)));
            }
            !of_peer || read.transfer.operation == Operation::Read
        });
        lost
    }

    /// Ends the reads of peers that have been silent for too long.
    pub(crate) fn end_silent(&self, patience: Duration) {
        let mut unanswered = Vec::new();
        for (serial, read) in &mut self.state.lock().reads {
            if read.ended || read.moved.elapsed() < patience {
                continue;
            }
            read.ended = true;
            let (transfer, is_read) = (&read.transfer, read.transfer.operation == Operation::Read);
            let name = transfer.name.to_string();
            // With the lock held: an answer that comes meanwhile finds it exposed, and settles it.
            transfer.end(TransferId(*serial), Err(Failure::Silent { name, waited: patience }), is_read);
            unanswered.push((*serial, is_read.then_some(transfer.endpoint)));
        }
        for (serial, endpoint) in unanswered {
            if let Some(endpoint) = endpoint {
                self.say(endpoint, &Message::CancelRead { serial });
            }
            self.worker().interrupt(); // whoever waits for it in the progress thread's place
        }
    }

    /// Gives up what peers were asked to write here, and what is pushed for them: waits for them to say that they write no more, and
    /// for the pushes to have ended, of which the peers are told then. Nothing new is served once the agent is being stopped.
    pub(crate) fn settle_all(&self, timeout: Duration) {
        let deadline = Instant::now() + timeout;
        let held = || -> Vec<Arc<Inner>> {
            let state = self.state.lock();
            state.reads.values().filter(|read| !read.held.is_empty()).map(|read| read.transfer.clone()).collect()
        };
        held().iter().for_each(|transfer| transfer.give_up(Failure::Cancelled));
        self.end_serving();
        while (!held().is_empty() || self.is_serving()) && Instant::now() < deadline {
            std::thread::sleep(SETTLE_LOOK);
        }
    }

    /// Closes the connection to a peer that was removed, once nothing depends on it any more.
    pub(crate) fn leave(&self, epoch: u64) {
        let mut state = self.state.lock();
        let leaving = state.peers.get(&epoch).is_some_and(|peer| peer.leaving);
        if leaving && !state.reads.values().any(|read| read.transfer.epoch == epoch) {
            self.forget_peer(&mut state, epoch);
        }
    }
}
