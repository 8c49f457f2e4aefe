//! What the callers' threads, the progress thread and the control thread share, and what happens where the wire says it.

use std::collections::{BTreeMap, HashMap};
use std::sync::atomic::{AtomicBool, AtomicU32, AtomicU64, Ordering};
use std::sync::{Arc, OnceLock};
use std::time::{Duration, Instant};

use crossbeam::channel::Sender;
use kvferry_wire::{
    CommandError, Context, EndpointId, Event, Frame, Part, PutError, Region, RegionId, TransferError, TransferId,
    TransferStats, Worker,
};
use parking_lot::{Condvar, Mutex};

use crate::control::Chore;
use crate::eager::{self, PutOff};
use crate::error::{Failure, PostError};
use crate::memory::Register;
use crate::message::{MESSAGE, Message, NOTIFY, WRITE};
use crate::notification::{Notification, Notifications};
use crate::options::AgentOptions;
use crate::peer::{Connection, Peer};
use crate::read::Read;
use crate::serve::Serving;
use crate::transfer::{Inner, Operation};

/// Looks in which nothing moves, after which a caller that goes on looking lets others have its core in between.
const LOOKS: u32 = 100;

/// Within this a caller is back that does nothing else but look.
const BACK_AGAIN: Duration = Duration::from_micros(50);

/// Most agents that may have greeted this one and were not added.
const CALLERS_MAX: usize = 1 << 14;

/// Memory that peers of agents that are no more may still write: it stays registered for as long as the process lives.
static UNSETTLED: Mutex<Vec<Region>> = Mutex::new(Vec::new());

#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) name: Arc<str>,
    pub(crate) epoch: u64,
    pub(crate) options: AgentOptions,
    pub(crate) context: Context,
    /// Set before anybody else has this.
    worker: OnceLock<Worker>,
    pub(crate) chores: Sender<Chore>,
    pub(crate) notifications: Notifications,
    pub(crate) register: Register,
    /// Whether the agent is being stopped: whoever waits for a peer gives up.
    pub(crate) stopping: AtomicBool,
    next_transfer: AtomicU64,
    /// Looks of callers in which nothing moved, since something did.
    idle_looks: AtomicU32,
    /// Whether the control thread looks at the time again and again. Set and looked at by whoever has changed the state before.
    pub(crate) keeps_time: AtomicBool,
    /// When the agent was made.
    born: Instant,
    /// When a caller last looked, in nanoseconds since then, and whether it had before at once.
    looked: AtomicU64,
    looking: AtomicBool,
    pub(crate) put_off: PutOff,
    /// Held while a connection is made or memory is imported, which wait for the progress thread: never taken on it.
    pub(crate) dialling: Mutex<()>,
    pub(crate) state: Mutex<State>,
    /// A peer has answered, or is gone.
    pub(crate) answered: Condvar,
}

#[derive(Debug, Default)]
pub(crate) struct State {
    pub(crate) regions: BTreeMap<RegionId, Region>,
    /// Epochs of the remote agents that were added.
    pub(crate) names: HashMap<Arc<str>, u64>,
    /// By epoch.
    pub(crate) peers: HashMap<u64, Peer>,
    /// Epochs by connection, those of lost ones included until their peers are known to be dead.
    pub(crate) endpoints: BTreeMap<EndpointId, u64>,
    pub(crate) flights: HashMap<TransferId, Flight>,
    /// Reads that peers were asked to push, and small writes that they have not answered.
    pub(crate) reads: HashMap<u64, Read>,
    /// Connections that were ever made.
    pub(crate) connections: u64,
    /// Greetings that were heard.
    pub(crate) greetings: u64,
    /// Reads that are pushed for peers, by epoch and the peer's number.
    pub(crate) serving: BTreeMap<(u64, u64), Serving>,
}

impl State {
    /// The connection to a peer, if it is still this one.
    pub(crate) fn connection(&self, epoch: u64, endpoint: EndpointId) -> Option<&Connection> {
        let connection = self.peers.get(&epoch)?.connection.as_ref()?;
        (connection.endpoint == endpoint).then_some(connection)
    }
}

/// Whose a transfer of the wire is.
#[derive(Clone, Debug)]
pub(crate) enum Flight {
    Own(Arc<Inner>),
    /// A peer's, by epoch and its number there.
    Served(u64, u64),
}

impl Shared {
    pub(crate) fn new(
        name: Arc<str>,
        epoch: u64,
        options: AgentOptions,
        context: Context,
        chores: Sender<Chore>,
    ) -> Arc<Self> {
        Arc::new(Self {
            name,
            epoch,
            options,
            context,
            worker: OnceLock::new(),
            chores,
            notifications: Notifications::default(),
            register: Register::default(),
            stopping: AtomicBool::new(false),
            next_transfer: AtomicU64::new(0),
            idle_looks: AtomicU32::new(0),
            born: Instant::now(),
            looked: AtomicU64::new(0),
            looking: AtomicBool::new(false),
            put_off: PutOff::default(),
            keeps_time: AtomicBool::new(false),
            dialling: Mutex::new(()),
            state: Mutex::default(),
            answered: Condvar::new(),
        })
    }

    pub(crate) fn set_worker(&self, worker: Worker) {
        assert!(self.worker.set(worker).is_ok(), "an agent has one worker");
    }

    pub(crate) fn worker(&self) -> &Worker {
        self.worker.get().expect("set before anybody else has this")
    }

    pub(crate) fn next_transfer(&self) -> TransferId {
        TransferId(self.next_transfer.fetch_add(1, Ordering::Relaxed)) // only uniqueness is asked of it
    }

    /// A message to a peer. One that is not there any more is told by the endpoint's failure.
    pub(crate) fn say(&self, endpoint: EndpointId, message: &Message) {
        let _ = self.worker().send(endpoint, MESSAGE, message.encode());
    }

    /// Has what was commanded of the worker carried out. Not on the progress thread, nor with a lock that it takes.
    pub(crate) fn carry_out(&self) {
        self.worker().carry_out();
    }

    /// Moves the worker along for somebody who looks again and again.
    pub(crate) fn progress(&self) {
        let now = self.now();
        let since = now.saturating_sub(self.looked.swap(now, Ordering::Relaxed));
        self.looking.store(u128::from(since) < BACK_AGAIN.as_nanos(), Ordering::Relaxed);
        self.answer_put_off();
        if self.worker().progress() {
            self.idle_looks.store(0, Ordering::Relaxed);
        } else if self.idle_looks.fetch_add(1, Ordering::Relaxed) >= LOOKS {
            std::thread::yield_now(); // the other end, or the worker's thread, may share this core
        }
    }

    fn now(&self) -> u64 {
        u64::try_from(self.born.elapsed().as_nanos()).unwrap_or(u64::MAX)
    }

    /// Whether a caller looks again and again, so that what is put off for it is soon done.
    pub(crate) fn is_looked_at(&self) -> bool {
        self.looking.load(Ordering::Relaxed)
            && u128::from(self.now().saturating_sub(self.looked.load(Ordering::Relaxed))) < BACK_AGAIN.as_nanos()
            && self.keeps_time.load(Ordering::Relaxed)
    }

    /// Sends the answers that were put off. The lock is taken by whoever looks, and free then.
    pub(crate) fn answer_put_off(&self) {
        let all = std::mem::take(&mut *self.put_off.lock());
        for (endpoint, serial) in all {
            self.say(endpoint, &Message::Done { serial });
        }
    }

    /// Has the control thread look at the time, if it does not anyway: waking it costs more than a small transfer.
    pub(crate) fn look(&self) {
        if !self.keeps_time.load(Ordering::SeqCst) {
            let _ = self.chores.send(Chore::Look);
        }
    }

    /// Posts `parts` of a transfer.
    pub(crate) fn post(
        &self,
        transfer: &Arc<Inner>,
        id: TransferId,
        parts: Vec<Part>,
        notification: Option<Vec<u8>>,
    ) -> Result<(), PostError> {
        let mut state = self.state.lock();
        // Set before `settle_all` takes the lock: what it does not find comes here.
        if self.stopping.load(Ordering::Relaxed) {
            return Err(TransferError::from(CommandError::Stopped).into());
        }
        let current = state.names.get(&transfer.name) == Some(&transfer.epoch);
        let peer = state.peers.get(&transfer.epoch).filter(|_| current);
        let connection = peer.and_then(|peer| peer.connection.as_ref());
        let Some(connection) = connection.filter(|connection| connection.endpoint == transfer.endpoint) else {
            return Err(PostError::Stale { name: transfer.name.to_string() });
        };
        let endpoint = connection.endpoint;
        if transfer.operation == Operation::Read
            && parts.iter().any(|part| !part.remote.is_mapped() || connection.not_pulled.contains(&part.remote.id()))
        {
            self.ask(&mut state, transfer, id, &parts);
            drop(state);
            self.carry_out();
            return Ok(());
        }
        if transfer.operation == Operation::Write && self.options.context.route.is_none() {
            let message =
                eager::message(id.0, &parts, transfer.bytes, notification.as_deref(), || self.put_off.take(endpoint));
            if let Some(message) = message {
                self.await_answer(&mut state, transfer, id, Vec::new());
                let sent = self.worker().send(endpoint, WRITE, message);
                if let Err(error) = sent {
                    state.reads.remove(&id.0);
                    return Err(TransferError::from(error).into());
                }
                drop(state);
                self.carry_out();
                return Ok(());
            }
        }
        state.flights.insert(id, Flight::Own(transfer.clone()));
        drop(state);
        let posted = match (transfer.operation, notification) {
            (Operation::Write, None) => self.worker().put(endpoint, id, parts),
            (Operation::Write, Some(message)) => self.worker().put_then_send(endpoint, id, parts, NOTIFY, message),
            (Operation::Read, _) => self.worker().get(endpoint, id, parts),
        };
        if posted.is_err() {
            let flight = self.state.lock().flights.remove(&id);
            drop(flight);
        } else if self.options.transfer_deadline.is_some() {
            self.look();
        }
        self.carry_out();
        Ok(posted?)
    }

    /// Has the post `id` of a transfer end.
    pub(crate) fn cancel(&self, transfer: &Arc<Inner>, id: TransferId) {
        let mut state = self.state.lock();
        if state.flights.contains_key(&id) {
            drop(state);
            let _ = self.worker().cancel(id); // a worker that has stopped has ended it
        } else {
            self.cancel_read(&mut state, transfer, id);
            drop(state);
        }
        self.carry_out();
    }

    /// What happens on the progress thread.
    pub(crate) fn hear(&self, event: Event) {
        match event {
            Event::Frame(frame) => self.hear_frame(frame),
            Event::BadFrame(error) => tracing::warn!(%error, "a message is dropped"),
            Event::TransferDone { transfer, result } => self.transfer_done(transfer, result),
            Event::Progress { transfer, bytes } => self.serving_moves(transfer, bytes),
            Event::EndpointFailed { endpoint, status } => {
                tracing::info!(?endpoint, %status, "a connection has failed");
                self.connection_lost(endpoint);
            }
            Event::PeerDied { endpoint } => self.peer_died(endpoint),
            _ => {}
        }
    }

    fn transfer_done(&self, id: TransferId, result: Result<TransferStats, PutError>) {
        let flight = self.state.lock().flights.remove(&id);
        match flight {
            Some(Flight::Own(transfer)) if transfer.operation == Operation::Read => {
                self.pulled(&transfer, id, result);
            }
            Some(Flight::Own(transfer)) => {
                transfer.end(id, result.map(Some).map_err(|error| failure(&transfer, error)), false);
            }
            Some(Flight::Served(epoch, serial)) => self.served(epoch, serial, result.map(drop)),
            None => {}
        }
    }

    fn hear_frame(&self, frame: Frame) {
        let epoch = frame.source_epoch;
        match frame.kind {
            NOTIFY => {
                let from = self.state.lock().peers.get(&epoch).map(|peer| peer.name.to_string());
                match from {
                    Some(from) => self.notifications.add(Notification { from, message: frame.payload }),
                    None => tracing::warn!(epoch, "a notification by an agent that has not greeted is dropped"),
                }
            }
            MESSAGE => match Message::parse(&frame.payload) {
                Some(message) => self.hear_message(epoch, message),
                None => tracing::warn!(epoch, bytes = frame.payload.len(), "a message cannot be read"),
            },
            WRITE => self.written(epoch, &frame.payload),
            kind => tracing::warn!(epoch, kind, "a message of an unknown kind is dropped"),
        }
    }

    fn hear_message(&self, epoch: u64, message: Message) {
        match message {
            Message::Hello { name, address, answer, connection } => {
                self.greeted(epoch, &name, address, answer, connection);
            }
            Message::Welcome => {
                let mut state = self.state.lock();
                let connection = state.peers.get_mut(&epoch).and_then(|peer| peer.connection.as_mut());
                connection.into_iter().for_each(|connection| connection.welcomed = true);
                self.answered.notify_all();
            }
            Message::Bye { connection } => {
                let mut state = self.state.lock();
                // One that was removed here is forgotten when nothing waits for it any more.
                let goes = |peer: &Peer| !peer.added && !peer.leaving && peer.caller <= connection;
                if state.peers.get(&epoch).is_some_and(goes) {
                    self.forget_peer(&mut state, epoch);
                }
            }
            Message::Region(card) => self.asked_for(epoch, card),
            Message::Read { serial, last, parts } => self.wanted(epoch, serial, last, parts),
            Message::CancelRead { serial } => self.not_wanted(epoch, serial),
            Message::ReadMoves { serial, .. } => self.read_moves(epoch, serial),
            Message::Done { serial } => self.done(epoch, serial),
            Message::Failed { serial, why, settled } => self.read_failed(epoch, serial, why, settled),
        }
    }

    /// An agent that connects says who it is. An earlier life of it that was not added here has nothing more to say.
    fn greeted(&self, epoch: u64, name: &str, address: Vec<u8>, answer: bool, connection: u64) {
        if name.is_empty() || name.len() > crate::metadata::NAME_BYTES_MAX {
            return tracing::warn!(epoch, bytes = name.len(), "an agent greets with no name");
        }
        let mut state = self.state.lock();
        let earlier = |(other, peer): (&u64, &Peer)| {
            (*other != epoch && !peer.added && !peer.leaving && *peer.name == *name).then_some(*other)
        };
        for other in state.peers.iter().filter_map(earlier).collect::<Vec<_>>() {
            self.forget_peer(&mut state, other);
        }
        let is_full = |state: &State| state.peers.len() >= CALLERS_MAX + state.names.len();
        if is_full(&state) && !state.peers.contains_key(&epoch) {
            self.forget_oldest_caller(&mut state);
        }
        let full = is_full(&state);
        state.greetings += 1;
        let greeted = state.greetings;
        match state.peers.get_mut(&epoch) {
            Some(peer) if *peer.name == *name => {
                (peer.address, peer.greeted, peer.caller) = (Some(address), greeted, peer.caller.max(connection));
            }
            Some(_) => return tracing::warn!(epoch, name, "an agent greets with another name"),
            None if full => {
                return tracing::error!(epoch, name, "too many agents have greeted this one");
            }
            None => {
                let peer = Peer { greeted, caller: connection, ..Peer::new(name.into(), Some(address)) };
                state.peers.insert(epoch, peer);
            }
        }
        drop(state);
        if answer {
            let _ = self.chores.send(Chore::Welcome { epoch });
        }
    }

    /// Makes room for another caller: of those that nothing is under way with, and that would not be missed if they had died, since
    /// this side has no connection to them, the one that was last heard of longest ago goes.
    fn forget_oldest_caller(&self, state: &mut State) {
        let is_idle = |(epoch, peer): &(&u64, &Peer)| {
            let mut of_peer = state.serving.range((**epoch, 0)..=(**epoch, u64::MAX));
            let mut serves = || of_peer.any(|(_, serving)| !matches!(serving, Serving::Wanted { .. }));
            !peer.added && !peer.leaving && peer.connection.is_none() && !serves()
        };
        let oldest = state.peers.iter().filter(is_idle).min_by_key(|(_, peer)| peer.greeted);
        if let Some(epoch) = oldest.map(|(epoch, _)| *epoch) {
            self.forget_peer(state, epoch);
        }
    }

    /// Closes the connection to a peer, if there is one, and knows it no more.
    pub(crate) fn forget_peer(&self, state: &mut State, epoch: u64) {
        let connection = state.peers.remove(&epoch).and_then(|peer| peer.connection);
        connection.as_ref().map(|connection| state.endpoints.remove(&connection.endpoint));
        let death_is_told = state.endpoints.values().any(|of| *of == epoch);
        state.serving.retain(|(of, _), serving| {
            *of != epoch
                || match serving {
                    Serving::Wanted { .. } => false, // nobody describes the rest of it, or could be answered
                    Serving::Moving(_) => true,
                    Serving::Unsettled => death_is_told, // which ends it
                }
        });
        let Some(connection) = connection else { return };
        self.say_bye(&connection);
        let _ = self.worker().close(connection.endpoint); // a worker that has stopped has none
        self.answered.notify_all();
    }

    /// Takes leave of all peers, so that those that were not asked to keep this agent forget it.
    pub(crate) fn say_goodbye(&self) {
        let state = self.state.lock();
        state
            .peers
            .values()
            .filter_map(|peer| peer.connection.as_ref())
            .for_each(|connection| self.say_bye(connection));
    }

    fn say_bye(&self, connection: &Connection) {
        self.say(connection.endpoint, &Message::Bye { connection: connection.number });
    }

    /// The worker has stopped: nothing ends by itself any more.
    pub(crate) fn end_all(&self) {
        let (flights, reads, state) = {
            let mut state = self.state.lock();
            let flights = std::mem::take(&mut state.flights);
            (flights, std::mem::take(&mut state.reads), std::mem::take(&mut *state))
        };
        for (id, flight) in flights {
            if let Flight::Own(transfer) = flight {
                transfer.end(id, Err(Failure::Disconnected { name: transfer.name.to_string() }), false);
            }
        }
        for (serial, read) in reads {
            let transfer = read.transfer;
            let exposed = transfer.operation == Operation::Read;
            UNSETTLED.lock().extend(read.held);
            transfer.end(TransferId(serial), Err(Failure::Disconnected { name: transfer.name.to_string() }), exposed);
        }
        self.answered.notify_all();
        self.notifications.end();
        drop(state); // with the lock free
        self.register.give_back();
    }

    fn connection_lost(&self, endpoint: EndpointId) {
        let mut state = self.state.lock();
        let Some(epoch) = state.endpoints.get(&endpoint).copied() else { return };
        if let Some(peer) = state.peers.get_mut(&epoch) {
            peer.connection.take_if(|connection| connection.endpoint == endpoint);
            if peer.leaving {
                state.peers.remove(&epoch);
            }
        }
        // One that has failed is kept to hear of the end of its process: the first, since one that was made to a process on its way
        // out may not know it.
        let live = state.peers.get(&epoch).and_then(Peer::endpoint);
        if state.endpoints.iter().any(|(id, of)| *of == epoch && *id != endpoint && Some(*id) != live) {
            state.endpoints.remove(&endpoint);
            let _ = self.worker().close(endpoint); // a worker that has stopped has none
        }
        let lost = self.lose_reads(&mut state, epoch);
        self.answered.notify_all();
        drop(state);
        for (transfer, id) in lost {
            let exposed = transfer.operation == Operation::Read;
            transfer.end(id, Err(Failure::Disconnected { name: transfer.name.to_string() }), exposed);
        }
    }

    pub(crate) fn peer_died(&self, endpoint: EndpointId) {
        let mut state = self.state.lock();
        let Some(epoch) = state.endpoints.remove(&endpoint) else { return };
        let settled = state.reads.extract_if(|_, read| read.transfer.epoch == epoch);
        let settled: Vec<Read> = settled.map(|(_, read)| read).collect();
        state.serving.retain(|(peer, _), _| *peer != epoch);
        if state.peers.get(&epoch).is_some_and(|peer| !peer.added) {
            state.peers.remove(&epoch);
        }
        drop(state);
        for Read { transfer, held, .. } in settled {
            drop(held); // who hears of it may deregister it at once
            transfer.settle();
        }
    }
}

/// What an error of the wire means for a transfer.
pub(crate) fn failure(transfer: &Inner, error: PutError) -> Failure {
    match error {
        PutError::Endpoint { .. } => Failure::Disconnected { name: transfer.name.to_string() },
        PutError::Cancelled => Failure::Cancelled,
        error => Failure::Wire(error),
    }
}

#[cfg(test)]
#[allow(clippy::unwrap_used, reason = "a test fails by panicking")]
mod tests {
    use super::*;
    use crate::reading::reading;
    use crate::{Agent, AgentOptions};

    /// Each connection has a stream of its own, of which none waits for another.
    #[test]
    fn a_bye_behind_the_hello_of_the_next_connection_ends_nothing() {
        let agent = Agent::new("a", AgentOptions::default()).unwrap();
        let hello = |connection| {
            let (name, address) = ("caller".to_owned(), agent.shared.worker().address().to_owned());
            agent.shared.hear_message(1, Message::Hello { name, address, answer: false, connection });
        };
        let bye = |connection| agent.shared.hear_message(1, Message::Bye { connection });
        let is_known = || agent.shared.state.lock().peers.contains_key(&1);
        hello(1);
        hello(2);
        bye(1);
        assert!(is_known());
        hello(1);
        bye(1);
        assert!(is_known());
        bye(2);
        assert!(!is_known());
    }

    #[test]
    fn what_a_caller_has_half_described_goes_with_it() {
        let agent = Agent::new("a", AgentOptions::default()).unwrap();
        let hear = |message| agent.shared.hear_message(1, message);
        let address = agent.shared.worker().address().to_owned();
        hear(Message::Hello { name: "caller".to_owned(), address, answer: false, connection: 1 });
        hear(Message::Read { serial: 7, last: false, parts: Vec::new() });
        assert_eq!(agent.shared.state.lock().serving.len(), 1);
        hear(Message::Bye { connection: 1 });
        assert!(agent.shared.state.lock().serving.is_empty());
    }

    #[test]
    fn nothing_is_posted_once_an_agent_is_being_stopped() {
        let a = Agent::new("a", AgentOptions::default()).unwrap();
        let memory = a.context().allocate(64).unwrap();
        let run = [kvferry_wire::Run { address: memory.base(), bytes: 64 }];
        a.register(memory).unwrap();
        let kind = kvferry_wire::MemoryKind::Host;
        for operation in [Operation::Read, Operation::Write] {
            a.shared.stopping.store(false, Ordering::Relaxed);
            let transfer = a.make_once(operation, (kind, &run), ("a", kind, &run), None).unwrap();
            a.shared.stopping.store(true, Ordering::Relaxed);
            let error = transfer.post(None).unwrap_err();
            assert!(matches!(error, PostError::Transfer(TransferError::Command(CommandError::Stopped))));
        }
        let state = a.shared.state.lock();
        assert!(state.reads.is_empty() && state.flights.is_empty());
    }

    /// Bytes of the read may still come: the end of the peer's process has to be heard of.
    #[test]
    fn a_peer_that_was_removed_is_known_while_a_read_waits_though_it_says_bye() {
        let ([a, b], read) = reading();
        let shared = &a.shared;
        shared.await_answer(&mut shared.state.lock(), &read.inner, TransferId(7), Vec::new());
        a.remove_remote("b").unwrap();
        shared.hear_message(b.epoch(), Message::Bye { connection: u64::MAX });
        let is_known = || {
            let state = shared.state.lock();
            (state.peers.contains_key(&b.epoch()), state.endpoints.values().any(|epoch| *epoch == b.epoch()))
        };
        assert_eq!(is_known(), (true, true));
        shared.done(b.epoch(), 7);
        assert_eq!(is_known(), (false, false));
    }

    #[test]
    fn callers_that_are_gone_make_room_for_others() {
        let agent = Agent::new("a", AgentOptions::default()).unwrap();
        let shared = &agent.shared;
        let callers = CALLERS_MAX as u64;
        for epoch in 0..callers {
            let peer = Peer { greeted: epoch + 1, ..Peer::new(format!("caller {epoch}").into(), Some(Vec::new())) };
            shared.state.lock().peers.insert(epoch, peer);
        }
        shared.state.lock().greetings = callers;
        shared.greeted(0, "caller 0", Vec::new(), false, 1); // heard of again
        shared.greeted(callers, "another", Vec::new(), false, 1);
        let state = shared.state.lock();
        let known = [0, 1, 2, callers].map(|epoch| state.peers.contains_key(&epoch));
        assert_eq!((known, state.peers.len()), ([true, false, true, true], CALLERS_MAX));
    }
}
