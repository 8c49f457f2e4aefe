//! What the callers' threads, the progress thread and the control thread share: the state machine behind one lock, and how
//! what it asks for is done.
//!
//! The progress thread feeds it what the wire says, where that happens: no other thread has to be woken for a request to go
//! on. What takes long, or must not be done on the progress thread, is left to the control thread as a [`Chore`].

use std::collections::BTreeMap;
use std::sync::{Arc, OnceLock};
use std::time::{Instant, UNIX_EPOCH};

use crossbeam::channel::Sender;
use kvferry_layout::PageTable;
use kvferry_wire::{
    Context, EndpointId, Event, Permit, Permitted, PutError, Region, Status, TransferId, TransferStats,
};
use parking_lot::{Mutex, MutexGuard};

use crate::card::Card;
use crate::completion::Completion;
use crate::core::{Action, Core, Handle, LinkId, PartSpec, PutId, Recent, Ticket};
use crate::error::{ConnectError, PushError};
use crate::message::{Hello, Message, RequestKey, Serial};
use crate::options::EngineOptions;
use crate::peer::WirePeer;
use crate::report::{Received, Sent};
use crate::sums::Check;
use crate::telemetry::Telemetry;
use crate::workers::Workers;

#[derive(Debug)]
pub(crate) struct Shared {
    pub(crate) options: EngineOptions,
    pub(crate) context: Context,
    /// This life of the engine.
    pub(crate) epoch: u64,
    /// When the engine started, in microseconds by the clock of the host.
    pub(crate) born: u64,
    /// What peers write to when they connect.
    pub(crate) probe: Region,
    /// Set before anybody else has this.
    workers: OnceLock<Workers>,
    pub(crate) chores: Sender<Chore>,
    pub(crate) telemetry: Telemetry,
    state: Mutex<State>,
}

#[derive(Debug)]
pub(crate) struct State {
    pub(crate) core: Core,
    pub(crate) published: Option<Arc<Published>>,
    /// By epoch.
    pub(crate) peers: BTreeMap<u64, WirePeer>,
    pub(crate) epochs: BTreeMap<EndpointId, u64>,
    /// Endpoints of which the wire has said that they failed, or that their peer has died, when nobody here knew them: yet, or any
    /// more.
    failed: Recent<EndpointId, Status>,
    dead: Recent<EndpointId, ()>,
    /// The cards that each link was made of.
    pub(crate) links: BTreeMap<LinkId, LinkCards>,
    pub(crate) connecting: BTreeMap<LinkId, Sender<Result<(), ConnectError>>>,
    pub(crate) receives: BTreeMap<RequestKey, Arc<Completion<Received>>>,
    pub(crate) sends: BTreeMap<Ticket, Arc<Completion<Sent>>>,
    pub(crate) next_link: u32,
    /// Writes that test a connection.
    pub(crate) probes: BTreeMap<TransferId, Sender<Result<TransferStats, PutError>>>,
    /// What is being cut off, and how many workers have yet to say that they have.
    revoking: BTreeMap<(u64, Serial), usize>,
    /// When the control thread looks next, unless it is told to look sooner.
    pub(crate) armed: Option<Instant>,
    pub(crate) stopped: bool,
}

/// This rank's table and the memory behind it.
#[derive(Debug)]
pub(crate) struct Published {
    pub(crate) table: PageTable,
    pub(crate) regions: Vec<Region>,
}

/// The ranks of both instances, in the order of ranks.
#[derive(Clone, Debug)]
pub(crate) struct LinkCards {
    pub(crate) sources: Vec<Card>,
    pub(crate) destinations: Vec<Card>,
}

/// What the control thread is to do.
#[derive(Debug)]
pub(crate) enum Chore {
    /// Look at the time: something is due sooner than it knew.
    Look,
    Dial {
        epoch: u64,
    },
    Introduce {
        link: LinkId,
        old: u64,
        epoch: u64,
        hello: Box<Hello>,
    },
    /// To be passed on to the thread that does it.
    Check(Check),
    /// A progress thread is gone, or the one that makes checksums.
    Gone,
    Stop,
}

/// What is done once the lock is free: whoever waits for a request may call in again.
type After = Box<dyn FnOnce()>;

impl Shared {
    pub(crate) fn new(
        options: EngineOptions,
        epoch: u64,
        context: Context,
        probe: Region,
        core: Core,
        chores: Sender<Chore>,
    ) -> Arc<Self> {
        let state = State {
            core,
            published: None,
            peers: BTreeMap::new(),
            epochs: BTreeMap::new(),
            failed: Recent::default(),
            dead: Recent::default(),
            links: BTreeMap::new(),
            connecting: BTreeMap::new(),
            receives: BTreeMap::new(),
            sends: BTreeMap::new(),
            next_link: 0,
            probes: BTreeMap::new(),
            revoking: BTreeMap::new(),
            armed: None,
            stopped: false,
        };
        let born = UNIX_EPOCH.elapsed().map_or(0, |since| u64::try_from(since.as_micros()).unwrap_or(u64::MAX));
        let telemetry = Telemetry::new();
        let (workers, state) = (OnceLock::new(), Mutex::new(state));
        Arc::new(Self { options, context, epoch, born, probe, workers, chores, telemetry, state })
    }

    pub(crate) fn set_workers(&self, workers: Workers) {
        let _ = self.workers.set(workers); // called once
    }

    pub(crate) fn workers(&self) -> &Workers {
        self.workers.get().expect("set when the engine started")
    }

    pub(crate) fn lock(&self) -> MutexGuard<'_, State> {
        self.state.lock()
    }

    /// The wire says something. Called on the progress thread.
    pub(crate) fn hear(&self, event: Event) {
        let now = Instant::now();
        let mut state = self.lock();
        let actions = state.take(now, event, &self.telemetry);
        self.act(state, actions);
    }

    pub(crate) fn cancel(&self, handle: Handle) {
        let now = Instant::now();
        let mut state = self.lock();
        let actions = match handle {
            Handle::Send(ticket) => state.core.cancel_send(now, ticket),
            Handle::Receive(key) => state.core.cancel_receive(now, key),
        };
        self.act(state, actions);
    }

    pub(crate) fn push(&self, ticket: Ticket, part: PartSpec, ready: bool) -> Result<usize, PushError> {
        let now = Instant::now();
        let mut state = self.lock();
        let (index, actions) = state.core.push(now, ticket, part, ready)?;
        self.act(state, actions);
        Ok(index)
    }

    pub(crate) fn part_ready(&self, ticket: Ticket, index: usize) {
        let now = Instant::now();
        let mut state = self.lock();
        let actions = state.core.part_ready(now, ticket, index);
        self.act(state, actions);
    }

    /// Carries out what the state machine asks for, and what it asks for because of that.
    pub(crate) fn act(&self, mut state: MutexGuard<'_, State>, mut actions: Vec<Action>) {
        let mut after = Vec::new();
        while !actions.is_empty() {
            for action in std::mem::take(&mut actions) {
                self.perform(&mut state, action, &mut actions, &mut after);
            }
        }
        let next = state.core.next_deadline();
        if let Some(next) = next.filter(|next| state.armed.is_none_or(|armed| *next < armed)) {
            state.armed = Some(next);
            self.leave(Chore::Look);
        }
        drop(state);
        self.workers().carry_out();
        if !after.is_empty() {
            after.into_iter().for_each(|then| then());
            self.workers().interrupt();
        }
    }

    fn perform(&self, state: &mut State, action: Action, actions: &mut Vec<Action>, after: &mut Vec<After>) {
        match action {
            Action::Say { epoch, message } => {
                let Some(peer) = state.peers.get(&epoch) else { return };
                let (kind, payload) = message.encode();
                if let Err(error) = self.workers().get(peer.worker).send(peer.endpoint, kind, payload) {
                    tracing::error!(epoch, %error, "a message was not sent");
                }
            }
            Action::Put { ticket, epoch, put, plan, then, serial, inbox_only } => {
                let (Some(peer), Some(own)) = (state.peers.get_mut(&epoch), &state.published) else { return };
                let permitted = Permitted { permit: Permit(serial.0), inbox_only };
                let report = then.map(|message| message.encode());
                self.telemetry.write_begun(ticket, put, peer.card.rank, plan.bytes());
                let worker = self.workers().get(peer.worker);
                let posted = peer.prepare(worker, &own.table, &own.regions, &plan).and_then(|(prepared, sets)| {
                    worker.put_prepared_permitted(TransferId(put.0), prepared, sets, permitted, report)
                });
                if let Err(error) = posted {
                    self.telemetry.write_ended(put, None, "refused");
                    actions.extend(state.core.put_refused(Instant::now(), put, error));
                }
            }
            Action::CancelPut { put } => {
                self.workers().cancel(TransferId(put.0));
            }
            Action::Permit { epoch, serial } => self.workers().permit(epoch, Permit(serial.0)),
            Action::Expire { epoch, serial } => self.workers().expire(epoch, Permit(serial.0)),
            Action::Revoke { epoch, serial } => {
                let asked = self.workers().revoke(epoch, Permit(serial.0));
                state.revoking.insert((epoch, serial), asked);
            }
            Action::Dial { epoch } => self.leave(Chore::Dial { epoch }),
            Action::Introduce { link, old, epoch, hello } => self.leave(Chore::Introduce { link, old, epoch, hello }),
            Action::Sum { put, plan } => self.leave(Chore::Check(Check::Sum { put, plan })),
            Action::Verify { epoch, key, check } => self.leave(Chore::Check(Check::Verify { epoch, key, check })),
            Action::Forget { epoch } => state.hang_up(self.workers(), epoch),
            Action::Connected { link } => {
                if let Some(asker) = state.connecting.remove(&link) {
                    let _ = asker.try_send(Ok(())); // one answer a question: there is room
                }
            }
            Action::NotConnected { link, error } => {
                state.links.remove(&link);
                if let Some(asker) = state.connecting.remove(&link) {
                    let _ = asker.try_send(Err(error)); // as above
                }
            }
            Action::Progress { handle, moved } => match handle {
                Handle::Receive(key) => state.receives.get(&key).into_iter().for_each(|of| of.set_moved(moved)),
                Handle::Send(ticket) => state.sends.get(&ticket).into_iter().for_each(|of| of.set_moved(moved)),
            },
            Action::Sent { ticket, outcome } => {
                self.telemetry.sent(Instant::now(), ticket, &outcome);
                if let Some(send) = state.sends.get(&ticket).cloned() {
                    after.push(Box::new(move || send.end(outcome)));
                }
            }
            Action::Received { key, outcome } => {
                self.telemetry.received(Instant::now(), key, &outcome);
                if let Some(receive) = state.receives.get(&key).cloned() {
                    after.push(Box::new(move || receive.end(outcome)));
                }
            }
            Action::Quiet { handle: Handle::Send(ticket) } => {
                if let Some(send) = state.sends.remove(&ticket) {
                    after.push(Box::new(move || send.be_quiet()));
                }
            }
            Action::Quiet { handle: Handle::Receive(key) } => {
                self.telemetry.forget(key);
                if let Some(receive) = state.receives.remove(&key) {
                    after.push(Box::new(move || receive.be_quiet()));
                }
            }
        }
    }

    /// Leaves something to the control thread. It is gone only when everything has ended.
    fn leave(&self, chore: Chore) {
        let _ = self.chores.send(chore);
    }

    /// Ends everything: nobody waits for ever.
    pub(crate) fn end_all(&self) {
        let mut state = self.lock();
        state.stopped = true;
        let actions = state.core.stop(Instant::now());
        let connecting = std::mem::take(&mut state.connecting);
        state.probes.clear();
        self.act(state, actions);
        drop(connecting);
        let mut state = self.lock();
        let (receives, sends) = (std::mem::take(&mut state.receives), std::mem::take(&mut state.sends));
        drop(state);
        for (key, receive) in receives {
            self.telemetry.forget(key);
            receive.abandon();
        }
        sends.into_values().for_each(|send| send.abandon());
    }
}

impl State {
    /// Tells the state machine what the worker says.
    fn take(&mut self, now: Instant, event: Event, telemetry: &Telemetry) -> Vec<Action> {
        match event {
            Event::Frame(frame) => match Message::decode(frame.kind, &frame.payload) {
                Ok(message) => self.core.heard(now, frame.source_epoch, message),
                Err(error) => {
                    telemetry.dropped_frame();
                    tracing::warn!(epoch = frame.source_epoch, %error, "dropped a message");
                    Vec::new()
                }
            },
            Event::BadFrame(error) => {
                telemetry.dropped_frame();
                tracing::warn!(%error, "dropped a frame");
                Vec::new()
            }
            Event::EndpointFailed { endpoint, status } => self.endpoint_failed(now, endpoint, status),
            Event::PeerDied { endpoint } => match self.epochs.get(&endpoint) {
                Some(epoch) => self.core.died(now, *epoch),
                None => {
                    self.dead.insert(endpoint, ());
                    Vec::new()
                }
            },
            Event::Progress { transfer, bytes } => self.core.put_progress(now, PutId(transfer.0), bytes),
            Event::TakesInbox { transfer } => self.core.put_takes_inbox(PutId(transfer.0)),
            Event::Revoked { epoch, permit } => self.revoked(epoch, Serial(permit.0)),
            Event::TransferDone { transfer, result } => match self.probes.remove(&transfer) {
                Some(asker) => {
                    let _ = asker.send(result); // whoever asked has given up
                    Vec::new()
                }
                None => {
                    let outcome = if result.is_ok() { "succeeded" } else { "failed" };
                    telemetry.write_ended(PutId(transfer.0), result.as_ref().ok(), outcome);
                    self.core.put_done(now, PutId(transfer.0), result)
                }
            },
            _ => Vec::new(),
        }
    }

    /// A worker has cut something off.
    fn revoked(&mut self, epoch: u64, serial: Serial) -> Vec<Action> {
        let Some(asked) = self.revoking.get_mut(&(epoch, serial)) else { return Vec::new() };
        *asked -= 1;
        if *asked > 0 {
            return Vec::new();
        }
        self.revoking.remove(&(epoch, serial));
        self.core.revoked(epoch, serial)
    }

    fn endpoint_failed(&mut self, now: Instant, endpoint: EndpointId, status: Status) -> Vec<Action> {
        let Some(epoch) = self.epochs.get(&endpoint).copied() else {
            self.failed.insert(endpoint, status);
            return Vec::new();
        };
        match self.peers.get_mut(&epoch).filter(|peer| peer.endpoint == endpoint) {
            Some(peer) => {
                peer.failed = true;
                self.core.lost(now, epoch, status)
            }
            None => Vec::new(), // another has taken its place
        }
    }

    /// Puts a connection in place of the peer's earlier one, if there is one. The state machine is told next, and then comes
    /// [`State::catch_up`].
    pub(crate) fn connected(&mut self, workers: &Workers, epoch: u64, mut peer: WirePeer) {
        self.epochs.insert(peer.endpoint, epoch);
        if let Some(earlier) = self.peers.remove(&epoch) {
            peer.succeed(workers, earlier);
        }
        self.peers.insert(epoch, peer);
    }

    /// Tells the state machine what the wire had said of the connection to a peer before it was put in place.
    pub(crate) fn catch_up(&mut self, now: Instant, epoch: u64) -> Vec<Action> {
        let Some(endpoint) = self.peers.get(&epoch).map(|peer| peer.endpoint) else { return Vec::new() };
        let failed = self.failed.get(&endpoint).copied();
        let mut actions = failed.map_or_else(Vec::new, |status| self.endpoint_failed(now, endpoint, status));
        if self.dead.get(&endpoint).is_some() {
            actions.extend(self.core.died(now, epoch));
        }
        actions
    }

    /// Closes the connection to a peer and forgets its memory.
    pub(crate) fn hang_up(&mut self, workers: &Workers, epoch: u64) {
        let Some(peer) = self.peers.remove(&epoch) else { return };
        for endpoint in peer.earlier.into_iter().chain([peer.endpoint]) {
            self.epochs.remove(&endpoint);
            let _ = workers.get(peer.worker).close(endpoint); // stopped: closed with everything else
        }
    }
}
