//! The engine: one worker, one control thread, and the state machine between them.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::Arc;
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use crossbeam::channel::{self, Receiver, Sender};
use kvferry_layout::{Extent, MemoryKind, PageTable};
use kvferry_match::BlockMap;
use kvferry_wire::{
    Context, ContextOptions, CudaOptions, EndpointId, Event, Region, Route, TransferId, Version, Worker,
};
use parking_lot::Mutex;

use crate::card::Card;
use crate::core::{Action, Core, LinkId, PutId, Ticket, other};
use crate::error::{ConnectError, PeerName, PostError, PublishError, StartError};
use crate::message::{Message, RequestKey};
use crate::peer::WirePeer;
use crate::report::{Received, Sent};
use crate::survey::{Survey, survey};
use crate::transfer::{Completion, Receive, Send, Transfer};

/// How an engine is set up.
#[derive(Clone, Debug)]
pub struct EngineOptions {
    /// Rank in its instance.
    pub rank: u32,
    /// Transports that UCX may use, as in `UCX_TLS`; `None` leaves the choice to UCX and its environment.
    pub transports: Option<String>,
    /// The only route that bytes may take; `None` leaves the choice to what is known of both ends.
    pub route: Option<Route>,
    /// How long a peer may make no progress before what waits for it fails. No limit on the length of a transfer. Between
    /// a millisecond and a year.
    pub patience: Duration,
}

/// One pair of connected instances, of which the engine that made it is a rank. Another engine knows no such link.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Link {
    engine: u64,
    id: LinkId,
}

/// Bounds of [`EngineOptions::patience`]: below, nothing could ever answer; above, points in time might not exist.
const PATIENCE_MIN: Duration = Duration::from_millis(1);
const PATIENCE_MAX: Duration = Duration::from_secs(365 * 24 * 3600);

/// Moves one rank's page cache. See the crate's documentation for the order of calls.
///
/// Dropping it ends every request with [`TransferError::Stopped`](crate::TransferError::Stopped) and flushes what it has
/// said to its peers.
#[derive(Debug)]
pub struct Engine {
    shared: Arc<Shared>,
    stop: Sender<()>,
    control: Option<JoinHandle<()>>,
}

/// What the callers' threads and the control thread share.
#[derive(Debug)]
struct Shared {
    rank: u32,
    patience: Duration,
    context: Context,
    worker: Worker,
    state: Mutex<State>,
}

#[derive(Debug)]
struct State {
    core: Core,
    published: Option<Published>,
    /// By epoch.
    peers: BTreeMap<u64, WirePeer>,
    epochs: BTreeMap<EndpointId, u64>,
    connecting: BTreeMap<LinkId, Sender<Result<(), ConnectError>>>,
    receives: BTreeMap<Ticket, Arc<Completion<Received>>>,
    sends: BTreeMap<Ticket, Arc<Completion<Sent>>>,
    next_link: u32,
    stopped: bool,
}

/// This rank's table and the memory behind it.
#[derive(Debug)]
struct Published {
    table: PageTable,
    regions: Vec<Region>,
}

impl Engine {
    /// Opens UCX and starts the threads.
    ///
    /// # Errors
    ///
    /// [`StartError`]; nothing is left behind.
    pub fn start(options: EngineOptions) -> Result<Self, StartError> {
        Self::start_with(options, None)
    }

    /// As [`start`](Self::start), for pools in the memory of a GPU. The driver is opened at run time.
    ///
    /// # Errors
    ///
    /// [`StartError`]; nothing is left behind.
    pub fn start_on_gpu(options: EngineOptions, gpu: CudaOptions) -> Result<Self, StartError> {
        Self::start_with(options, Some(gpu))
    }

    fn start_with(options: EngineOptions, cuda: Option<CudaOptions>) -> Result<Self, StartError> {
        let EngineOptions { rank, transports, route, patience } = options;
        if !(PATIENCE_MIN..=PATIENCE_MAX).contains(&patience) {
            return Err(StartError::Patience(patience));
        }
        let context = Context::open(&ContextOptions {
            transports,
            route,
            stall_deadline: patience,
            cuda,
            ..ContextOptions::default()
        })?;
        let (worker, events) = Worker::start(&context, getrandom::u64()?)?;
        let state = State {
            core: Core::new(patience),
            published: None,
            peers: BTreeMap::new(),
            epochs: BTreeMap::new(),
            connecting: BTreeMap::new(),
            receives: BTreeMap::new(),
            sends: BTreeMap::new(),
            next_link: 0,
            stopped: false,
        };
        let shared = Arc::new(Shared { rank, patience, context, worker, state: Mutex::new(state) });
        let (stop, stopped) = channel::bounded(1);
        let for_control = shared.clone();
        let control = thread::Builder::new()
            .name("kvferry-engine".to_owned())
            .spawn(move || control(&for_control, &events, &stopped))?;
        Ok(Self { shared, stop, control: Some(control) })
    }

    /// Version of the UCX in use.
    #[must_use]
    pub fn ucx_version(&self) -> Version {
        self.shared.context.ucx_version()
    }

    /// The UCX instance, to allocate or register memory with.
    #[must_use]
    pub fn context(&self) -> &Context {
        &self.shared.context
    }

    /// Allocates zeroed memory for each pool of `table`, of the host or of the engine's GPU as the pool says, and writes its
    /// address into the table.
    ///
    /// # Errors
    ///
    /// [`PublishError::Table`] or [`PublishError::Memory`].
    pub fn allocate(&self, table: &mut PageTable) -> Result<Vec<Region>, PublishError> {
        table.check()?;
        let mut regions = Vec::with_capacity(table.pools.len());
        for (index, pool) in table.pools.iter_mut().enumerate() {
            // `check` has made sure that the extent is a number; an absurd one is the allocation's error.
            let bytes = pool.extent_bytes().unwrap_or(u64::MAX);
            let region = match pool.memory {
                MemoryKind::Host => self.shared.context.allocate(bytes),
                MemoryKind::Cuda { .. } => self.shared.context.allocate_device(bytes),
            };
            let region = region.map_err(|source| PublishError::Memory { pool: index, source })?;
            pool.base = region.base();
            regions.push(region);
        }
        Ok(regions)
    }

    /// Offers this rank's pools to its peers: pool `i` of `table` lies in `regions[i]`.
    ///
    /// # Errors
    ///
    /// [`PublishError`]: the table does not hold, a pool leaves its region, a region belongs to another engine, or a table has
    /// been published before.
    pub fn publish(&self, table: PageTable, regions: Vec<Region>) -> Result<(), PublishError> {
        if table.pools.len() != regions.len() {
            return Err(PublishError::Regions { pools: table.pools.len(), regions: regions.len() });
        }
        let extents: Vec<Extent> = regions.iter().map(|r| Extent { base: r.base(), bytes: r.bytes() }).collect();
        table.check_regions(&extents)?;
        if let Some(pool) = regions.iter().position(|region| !self.shared.context.owns(region)) {
            return Err(PublishError::OtherContext { pool });
        }
        let mut state = self.shared.state.lock();
        if state.published.is_some() {
            return Err(PublishError::Twice);
        }
        state.published = Some(Published { table, regions });
        Ok(())
    }

    /// This rank's card: opaque bytes that the ranks of both instances need to [`connect`](Self::connect). `None` before
    /// [`publish`](Self::publish).
    #[must_use]
    pub fn card(&self) -> Option<Vec<u8>> {
        let state = self.shared.state.lock();
        let published = state.published.as_ref()?;
        let card = Card {
            rank: self.shared.rank,
            epoch: self.shared.worker.epoch(),
            ucx: self.shared.context.ucx_version(),
            address: self.shared.worker.address().to_owned(),
            table: published.table.clone(),
            regions: published.regions.iter().map(Region::card).collect(),
        };
        Some(card.encode())
    }

    /// Connects two instances: `sources` and `destinations` are the cards of all their ranks, in the order of ranks, this
    /// engine's own among them. Every rank of both makes this call with the same cards. Of an instance with attention data
    /// parallelism they are the cards of one part, whose ranks hold the same requests between them; other parts have links of
    /// their own.
    ///
    /// Parses and checks the cards, matches the tables, proves that every byte this rank is concerned with has one source,
    /// and exchanges greetings, with the digest of what was matched, with each peer. Waits for those up to the engine's
    /// patience: the calls of all ranks must overlap.
    ///
    /// # Errors
    ///
    /// [`ConnectError`] names the peer; nothing is left behind. Calls that all overlap can still fail for half a second after
    /// earlier ones were given up, while those connections go down: call again.
    pub fn connect(&self, sources: &[Vec<u8>], destinations: &[Vec<u8>]) -> Result<Link, ConnectError> {
        let shared = &self.shared;
        let Survey { side, peers } = survey(sources, destinations, shared.worker.epoch(), self.ucx_version())?;
        let (answer, connected) = channel::bounded(1);
        let link = {
            let mut state = shared.state.lock();
            if state.stopped {
                return Err(ConnectError::Stopped);
            }
            if state.published.is_none() {
                return Err(ConnectError::Unpublished);
            }
            if let Some(peer) = peers.keys().find_map(|epoch| state.core.known(*epoch)) {
                return Err(ConnectError::Already { peer });
            }
            let link = LinkId(state.next_link);
            state.next_link += 1;
            state.connecting.insert(link, answer);
            let mut members = BTreeMap::new();
            for (epoch, (card, peer)) in peers {
                let name = PeerName { side: other(side), rank: peer.rank };
                match WirePeer::connect(&shared.worker, side, epoch, card, &peer) {
                    Ok(wire) => {
                        state.epochs.insert(wire.endpoint, epoch);
                        state.peers.insert(epoch, wire);
                        members.insert(epoch, peer);
                    }
                    Err(source) => {
                        for epoch in members.into_keys() {
                            state.hang_up(&shared.worker, epoch);
                        }
                        state.connecting.remove(&link);
                        return Err(ConnectError::Endpoint { peer: name, source });
                    }
                }
            }
            let actions = state.core.connect(Instant::now(), link, side, shared.rank, members);
            shared.perform(&mut state, actions);
            link
        };
        // The control thread answers at the deadline at the latest, and when it ends, however it does.
        connected.recv().unwrap_or(Err(ConnectError::Stopped))?;
        Ok(Link { engine: shared.worker.epoch(), id: link })
    }

    /// Forgets a link and tells its peers, to whom this rank is lost then. A peer that was lost comes back through a new
    /// link: every rank that had one with it disconnects, and all connect anew with its new card.
    ///
    /// # Errors
    ///
    /// [`PostError::UnderWay`] while a request of the link has not ended; [`PostError::NoLink`].
    pub fn disconnect(&self, link: Link) -> Result<(), PostError> {
        let link = self.shared.id_of(link)?;
        let mut state = self.shared.state.lock();
        let under_way = state.receives.keys().chain(state.sends.keys()).find(|ticket| ticket.link == link);
        if let Some(ticket) = under_way {
            return Err(PostError::UnderWay(ticket.key));
        }
        let actions = state.core.disconnect(link).ok_or(PostError::NoLink)?;
        self.shared.perform(&mut state, actions);
        Ok(())
    }

    /// Asks the sources of `link` for the `tokens` of a request, into the slots of `block_maps` (one a layer group of this
    /// rank's table). The slots are exposed from now until the request has ended well.
    ///
    /// # Errors
    ///
    /// [`PostError`]: nothing was sent, no slot is exposed.
    pub fn receive(
        &self,
        link: Link,
        key: RequestKey,
        block_maps: &[BlockMap],
        tokens: Range<u64>,
    ) -> Result<Receive, PostError> {
        let mut state = self.shared.state.lock();
        if state.stopped {
            return Err(PostError::Stopped);
        }
        let ticket = Ticket { link: self.shared.id_of(link)?, key };
        let actions = state.core.receive(Instant::now(), ticket, block_maps, &tokens)?;
        let completion = Completion::new();
        state.receives.insert(ticket, completion.clone());
        self.shared.perform(&mut state, actions);
        Ok(Transfer::new(completion))
    }

    /// Writes the `tokens` of a request from the slots of `block_maps` (one a layer group of this rank's table) to each
    /// destination of `link` that this rank serves, as soon as it has said where to. The slots must hold the bytes now and
    /// must not change until the request has ended.
    ///
    /// # Errors
    ///
    /// [`PostError`]: nothing was written.
    pub fn send(
        &self,
        link: Link,
        key: RequestKey,
        block_maps: Vec<BlockMap>,
        tokens: Range<u64>,
    ) -> Result<Send, PostError> {
        let mut state = self.shared.state.lock();
        if state.stopped {
            return Err(PostError::Stopped);
        }
        let ticket = Ticket { link: self.shared.id_of(link)?, key };
        let actions = state.core.send(Instant::now(), ticket, block_maps, tokens)?;
        let completion = Completion::new();
        state.sends.insert(ticket, completion.clone());
        self.shared.perform(&mut state, actions);
        Ok(Transfer::new(completion))
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        let _ = self.stop.try_send(()); // full: told already
        if self.control.take().is_some_and(|control| control.join().is_err()) {
            tracing::error!("the control thread panicked");
        }
    }
}

/// Ends everything when the control thread ends, also if that is because of a bug: nobody waits for ever then.
struct EndAll<'a>(&'a Shared);

impl Drop for EndAll<'_> {
    fn drop(&mut self) {
        let mut state = self.0.state.lock();
        state.stopped = true;
        let actions = state.core.stop();
        self.0.perform(&mut state, actions);
        state.connecting.clear();
    }
}

/// The body of the control thread: until told to stop, or until the worker is gone.
fn control(shared: &Shared, events: &Receiver<Event>, stop: &Receiver<()>) {
    let _end_all = EndAll(shared);
    loop {
        let next = shared.state.lock().core.next_deadline();
        let deadline = next.unwrap_or_else(|| Instant::now() + shared.patience);
        let event = channel::select! {
            recv(events) -> event => match event {
                Ok(event) => Some(event),
                Err(_) => break,
            },
            recv(stop) -> _ => break,
            default(deadline.saturating_duration_since(Instant::now())) => None,
        };
        let mut state = shared.state.lock();
        let now = Instant::now();
        let mut actions = event.map(|event| state.take(now, event)).unwrap_or_default();
        actions.extend(state.core.tick(now));
        shared.perform(&mut state, actions);
    }
}

impl State {
    /// Tells the state machine what the worker says.
    fn take(&mut self, now: Instant, event: Event) -> Vec<Action> {
        match event {
            Event::Frame(frame) => match Message::decode(frame.kind, &frame.payload) {
                Ok(message) => self.core.heard(now, frame.source_epoch, message),
                Err(error) => {
                    tracing::warn!(epoch = frame.source_epoch, %error, "dropped a message");
                    Vec::new()
                }
            },
            Event::BadFrame(error) => {
                tracing::warn!(%error, "dropped a frame");
                Vec::new()
            }
            Event::EndpointFailed { endpoint, status } => match self.epochs.get(&endpoint) {
                Some(epoch) => self.core.lost(*epoch, status),
                None => Vec::new(),
            },
            Event::Progress { transfer, bytes } => self.core.put_progress(now, PutId(transfer.0), bytes),
            Event::TransferDone { transfer, result } => self.core.put_done(now, PutId(transfer.0), result),
            _ => Vec::new(),
        }
    }

    /// Closes the connection to a peer and forgets its memory.
    fn hang_up(&mut self, worker: &Worker, epoch: u64) {
        if let Some(peer) = self.peers.remove(&epoch) {
            self.epochs.remove(&peer.endpoint);
            let _ = worker.close(peer.endpoint); // stopped: closed with everything else
        }
    }
}

impl Shared {
    /// The link's number here, if it is this engine's.
    fn id_of(&self, link: Link) -> Result<LinkId, PostError> {
        if link.engine == self.worker.epoch() { Ok(link.id) } else { Err(PostError::NoLink) }
    }

    /// Carries out what the state machine asks for, and what it asks for because of that.
    fn perform(&self, state: &mut State, mut actions: Vec<Action>) {
        while !actions.is_empty() {
            for action in std::mem::take(&mut actions) {
                match action {
                    Action::Say { epoch, message } => {
                        let Some(peer) = state.peers.get(&epoch) else { continue };
                        let (kind, payload) = message.encode();
                        if let Err(error) = self.worker.send(peer.endpoint, kind, payload) {
                            tracing::error!(epoch, %error, "a message was not sent");
                        }
                    }
                    Action::Put { epoch, put, plan } => {
                        let Some(peer) = state.peers.get(&epoch) else { continue };
                        let Some(own) = &state.published else { continue };
                        let parts = peer.parts(&own.table, &own.regions, &plan);
                        if let Err(error) = self.worker.put(peer.endpoint, TransferId(put.0), parts) {
                            actions.extend(state.core.put_refused(Instant::now(), put, error));
                        }
                    }
                    Action::Cut { epoch } => {
                        if let Some(peer) = state.peers.get(&epoch) {
                            let _ = self.worker.close(peer.endpoint); // stopped: closed with everything else
                        }
                    }
                    Action::Forget { epoch } => state.hang_up(&self.worker, epoch),
                    Action::Connected { link } => {
                        if let Some(asker) = state.connecting.remove(&link) {
                            let _ = asker.try_send(Ok(())); // one answer a question: there is room
                        }
                    }
                    Action::NotConnected { link, error } => {
                        if let Some(asker) = state.connecting.remove(&link) {
                            let _ = asker.try_send(Err(error)); // as above
                        }
                    }
                    Action::Progress { ticket, moved } => {
                        if let Some(receive) = state.receives.get(&ticket) {
                            receive.set_moved(moved);
                        }
                        if let Some(send) = state.sends.get(&ticket) {
                            send.set_moved(moved);
                        }
                    }
                    Action::Sent { ticket, outcome } => {
                        if let Some(send) = state.sends.remove(&ticket) {
                            send.end(outcome);
                        }
                    }
                    Action::Received { ticket, outcome } => {
                        if let Some(receive) = state.receives.remove(&ticket) {
                            receive.end(outcome);
                        }
                    }
                }
            }
        }
    }
}
