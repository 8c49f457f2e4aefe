//! Reads of peers, which this side pushes to them. All of it runs on the progress thread, but for the first of a peer: then
//! the connection to it has to be made, which waits for that thread.

use std::sync::atomic::Ordering;

use kvferry_wire::{Part, PutError, RegionCard, TransferId};

use crate::control::Chore;
use crate::message::{MESSAGE, Message, Refused, Wanted};
use crate::shared::{Flight, Shared, State};

/// Reads of one peer that may be under way.
const READS_MAX: usize = 1 << 12;

/// Pairs of slots of one read.
const PAIRS_MAX: usize = 1 << 24;

/// Regions of one peer that its reads may name.
const REGIONS_MAX: usize = 1 << 16;

/// A read of a peer.
#[derive(Debug)]
pub(crate) enum Serving {
    /// Being described, or waiting for the connection.
    Wanted { parts: Vec<Wanted>, pairs: usize },
    /// Being pushed.
    Moving(TransferId),
    /// Ended, and bytes of it may still arrive until its connection is known to be dead. Kept as long as the peer is.
    Unsettled,
}

impl Shared {
    /// A peer tells of memory that it reads into. It is imported when it is first named.
    pub(crate) fn asked_for(&self, epoch: u64, card: RegionCard) {
        let mut state = self.state.lock();
        let Some(peer) = state.peers.get_mut(&epoch) else { return };
        peer.asked_for.retain(|_, old| (old.base, old.bytes) != (card.base, card.bytes)); // registered anew
        if peer.asked_for.len() >= REGIONS_MAX {
            return tracing::error!(epoch, "an agent reads into too many regions: no more of them are taken");
        }
        peer.asked_for.insert(card.id(), card);
    }

    pub(crate) fn wanted(&self, epoch: u64, serial: u64, last: bool, more: Vec<Wanted>) {
        let mut state = self.state.lock();
        let state = &mut *state;
        if !state.peers.contains_key(&epoch) {
            return tracing::warn!(epoch, "a read of an agent that has not greeted is dropped");
        }
        // Set before `end_serving` takes the lock: what it does not find comes here.
        if self.stopping.load(Ordering::Relaxed) {
            return self.refuse(state, epoch, serial, Refused::Cancelled, true);
        }
        let under_way = state.serving.range((epoch, 0)..=(epoch, u64::MAX)).count();
        let fresh = !state.serving.contains_key(&(epoch, serial));
        if fresh && under_way >= READS_MAX {
            return self.refuse(state, epoch, serial, Refused::Busy, true);
        }
        let serving = state.serving.entry((epoch, serial)).or_insert(Serving::Wanted { parts: Vec::new(), pairs: 0 });
        let Serving::Wanted { parts, pairs } = serving else { return }; // said twice
        *pairs += more.iter().map(Wanted::pairs).sum::<usize>();
        if *pairs > PAIRS_MAX {
            state.serving.remove(&(epoch, serial));
            return self.refuse(state, epoch, serial, Refused::Busy, true);
        }
        parts.extend(more);
        if !last {
            return;
        }
        let connection = state.peers.get(&epoch).and_then(|peer| peer.connection.as_ref());
        if connection.is_some_and(|connection| parts.iter().all(|part| connection.imported.contains_key(&part.to))) {
            self.push(state, epoch, serial);
        } else {
            let _ = self.chores.send(Chore::Push { epoch, serial });
        }
    }

    /// Starts to push a read whose memory has been imported.
    pub(crate) fn push(&self, state: &mut State, epoch: u64, serial: u64) {
        let Some(Serving::Wanted { parts: wanted, .. }) = state.serving.get_mut(&(epoch, serial)) else { return };
        let wanted = std::mem::take(wanted);
        let connection = state.peers.get(&epoch).and_then(|peer| peer.connection.as_ref());
        let full = state.peers.get(&epoch).is_some_and(|peer| peer.asked_for.len() >= REGIONS_MAX);
        let missing = if full { Refused::Busy } else { Refused::Bad };
        let part = |wanted: &Wanted| {
            let to = connection.and_then(|connection| connection.imported.get(&wanted.to)).ok_or(missing)?;
            let from = state.regions.get(&wanted.from).ok_or(Refused::NoRegion)?;
            Ok(wanted.part(from.clone(), *to))
        };
        let parts: Result<Vec<Part>, Refused> = wanted.iter().map(part).collect();
        let posted = connection.ok_or(Refused::Bad).and_then(|connection| {
            let (id, done) = (self.next_transfer(), Message::Done { serial }.encode());
            self.worker().put_then_send(connection.endpoint, id, parts?, MESSAGE, done).map_err(|_| Refused::Bad)?;
            Ok(id)
        });
        match posted {
            Ok(id) => {
                // The lock is held since before the post, so that its end finds this.
                state.flights.insert(id, Flight::Served(epoch, serial));
                state.serving.insert((epoch, serial), Serving::Moving(id));
            }
            Err(why) => {
                state.serving.remove(&(epoch, serial));
                self.refuse(state, epoch, serial, why, true);
            }
        }
    }

    /// A peer does not want its read any more. One that is not known has ended well, or is settled.
    pub(crate) fn not_wanted(&self, epoch: u64, serial: u64) {
        let mut state = self.state.lock();
        match state.serving.get(&(epoch, serial)) {
            Some(Serving::Moving(id)) => {
                let _ = self.worker().cancel(*id); // a worker that has stopped has ended it
            }
            Some(Serving::Wanted { .. }) => {
                state.serving.remove(&(epoch, serial));
                self.refuse(&state, epoch, serial, Refused::Cancelled, true);
            }
            Some(Serving::Unsettled) => self.refuse(&state, epoch, serial, Refused::Failed, false),
            None => self.refuse(&state, epoch, serial, Refused::Cancelled, true),
        }
    }

    /// Gives up all reads of peers. Those that are being pushed are answered when that has ended.
    pub(crate) fn end_serving(&self) {
        let mut state = self.state.lock();
        let mut waiting = Vec::new();
        state.serving.retain(|key, serving| {
            match serving {
                Serving::Wanted { .. } => waiting.push(*key),
                Serving::Moving(id) => drop(self.worker().cancel(*id)), // a worker that has stopped has ended it
                Serving::Unsettled => {}
            }
            !matches!(serving, Serving::Wanted { .. })
        });
        for (epoch, serial) in waiting {
            self.refuse(&state, epoch, serial, Refused::Cancelled, true);
        }
        drop(state);
        self.carry_out();
    }

    /// Whether a read of a peer has not ended yet.
    pub(crate) fn is_serving(&self) -> bool {
        self.state.lock().serving.values().any(|serving| !matches!(serving, Serving::Unsettled))
    }

    /// What has moved is a sign of life for the peer that waits.
    pub(crate) fn serving_moves(&self, transfer: TransferId, bytes: u64) {
        let state = self.state.lock();
        let Some(Flight::Served(epoch, serial)) = state.flights.get(&transfer) else { return };
        if let Some(endpoint) = state.peers.get(epoch).and_then(|peer| peer.endpoint()) {
            self.say(endpoint, &Message::ReadMoves { serial: *serial, bytes });
        }
    }

    /// A push has ended. If well, the peer has been told by the wire.
    pub(crate) fn served(&self, epoch: u64, serial: u64, result: Result<(), PutError>) {
        let mut state = self.state.lock();
        state.serving.remove(&(epoch, serial));
        if let Err(error) = result {
            let why = if error == PutError::Cancelled { Refused::Cancelled } else { Refused::Failed };
            tracing::info!(epoch, serial, %error, "a read of a peer was not pushed");
            let settled = !error.may_still_arrive();
            let peer = state.peers.get(&epoch);
            let is_connected = peer.is_some_and(|peer| peer.endpoint().is_some());
            if !settled && peer.is_some() {
                state.serving.insert((epoch, serial), Serving::Unsettled);
            }
            // A connection that was lost is not made again for this: the peer knows, or asks.
            if settled || is_connected {
                self.refuse(&state, epoch, serial, why, settled);
            }
        }
    }

    pub(crate) fn refuse(&self, state: &State, epoch: u64, serial: u64, why: Refused, settled: bool) {
        match state.peers.get(&epoch).and_then(|peer| peer.endpoint()) {
            Some(endpoint) => self.say(endpoint, &Message::Failed { serial, why, settled }),
            None => drop(self.chores.send(Chore::Answer { epoch, serial, why: Some(why), settled })), // not connected
        }
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use std::thread;
    use std::time::{Duration, Instant};

    use kvferry_wire::{ContextOptions, MemoryKind, Run};

    use super::*;
    use crate::peer::Peer;
    use crate::reading::reading;
    use crate::{Agent, AgentOptions, Failure, Operation, State};

    const DEADLINE: Duration = Duration::from_secs(20);

    /// A push has failed and may still arrive, and the reader did not hear of it: it asks, and is told that it is not settled.
    #[test]
    fn a_read_that_may_still_arrive_is_not_said_to_be_settled() {
        let ([reader, pusher], read) = reading();
        reader.connect("b", DEADLINE).unwrap();
        let (inner, serial) = (&read.inner, 7);
        {
            let mut state = reader.shared.state.lock();
            reader.shared.await_answer(&mut state, inner, TransferId(serial), Vec::new());
        }
        // As it is when the connection to the reader has failed, which has heard of nothing.
        let epoch = reader.epoch();
        pusher.shared.state.lock().peers.get_mut(&epoch).unwrap().connection = None;
        let error = PutError::Endpoint { source: kvferry_wire::Status(-80), settled: false };
        pusher.shared.served(epoch, serial, Err(error));
        reader.shared.cancel(inner, TransferId(serial));
        let heard = || reader.shared.state.lock().reads.get(&serial).is_none_or(|read| read.ended);
        let deadline = Instant::now() + DEADLINE;
        while !heard() {
            assert!(Instant::now() < deadline, "no answer");
            thread::sleep(Duration::from_millis(1));
        }
        assert!(reader.shared.state.lock().reads.contains_key(&serial), "said to be settled");
        assert_eq!(read.state(), State::Made);
    }

    /// The reader is told that its memory is quiet, which the end of the connection does not say.
    #[test]
    fn a_read_that_is_pushed_is_answered_by_an_agent_that_stops() {
        const BYTES: u64 = 256 << 20;
        let context = ContextOptions { transports: Some("tcp".to_owned()), ..ContextOptions::default() };
        let options = AgentOptions { context, ..AgentOptions::default() };
        let [reader, pusher] = ["reader", "pusher"].map(|name| Agent::new(name, options.clone()).unwrap());
        let [(here, into), (there, _)] = [&reader, &pusher].map(|agent| {
            let memory = agent.context().allocate(BYTES).unwrap();
            ([Run { address: memory.base(), bytes: BYTES }], agent.register(memory).unwrap())
        });
        reader.add_remote(&pusher.metadata()).unwrap();
        let (here, there) = ((MemoryKind::Host, &here[..]), ("pusher", MemoryKind::Host, &there[..]));
        let read = reader.make_once(Operation::Read, here, there, None).unwrap();
        let endpoint = read.inner.endpoint;
        {
            // As it is after a pull that had no way.
            let mut state = reader.shared.state.lock();
            let connection = state.peers.get_mut(&pusher.epoch()).unwrap().connection.as_mut().unwrap();
            assert_eq!(connection.endpoint, endpoint);
            let parts = read.inner.parts().unwrap();
            connection.not_pulled.extend(parts.iter().map(|part| part.remote.id()));
        }
        let _ = read.post(None).unwrap();
        let is_moving = || {
            let state = pusher.shared.state.lock();
            state.serving.values().any(|serving| matches!(serving, Serving::Moving(_)))
        };
        let deadline = Instant::now() + DEADLINE;
        while !is_moving() {
            assert!(Instant::now() < deadline, "it is not pushed: {:?}", read.failure());
            thread::yield_now();
        }
        drop(pusher);
        // Given up, unless the push was faster.
        assert_ne!(read.wait(Duration::from_secs(2)), State::Active);
        assert!(matches!(read.failure(), None | Some(Failure::Cancelled)), "{:?}", read.failure());
        reader.deregister(into, Duration::from_secs(1)).unwrap();
    }

    #[test]
    fn an_agent_that_stops_begins_no_reads_of_peers() {
        let agent = Agent::new("a", AgentOptions::default()).unwrap();
        let address = agent.shared.worker().address().to_owned();
        let shared = &agent.shared;
        shared.state.lock().peers.insert(1, Peer::new("caller".into(), Some(address)));
        shared.wanted(1, 7, false, Vec::new());
        assert!(shared.is_serving());
        shared.stopping.store(true, Ordering::Relaxed);
        shared.end_serving();
        shared.wanted(1, 7, true, Vec::new());
        assert!(!shared.is_serving());
    }
}
