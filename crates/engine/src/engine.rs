//! The engine: its workers, one control thread, and the state machine that all of them drive.

use std::collections::BTreeMap;
use std::ops::Range;
use std::sync::{Arc, OnceLock};
use std::thread::{self, JoinHandle};
use std::time::Instant;

use crossbeam::channel::{self, Sender};
use kvferry_layout::{Extent, MemoryKind, PageTable};
use kvferry_match::{BlockMap, Side};
use kvferry_wire::{Context, ContextOptions, CudaOptions, Region, TransferId, Version};

use crate::card::Card;
use crate::completion::Completion;
use crate::control;
use crate::core::{Core, Handle, Introduction, Limits, LinkId, PartSpec, Ticket, other};
use crate::error::{ConnectError, PeerName, PostError, PublishError, StartError};
use crate::instance::InstanceCard;
use crate::message::RequestKey;
use crate::options::EngineOptions;
use crate::peer::{PROBE_BYTES, WirePeer};
use crate::quarantine::Quarantine;
use crate::shared::{Chore, LinkCards, Published, Shared};
use crate::survey::{Survey, survey};
use crate::transfer::{Receive, Send, Transfer};
use crate::workers::Workers;

/// One pair of connected instances, of which the engine that made it is a rank. Another engine knows no such link.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Hash)]
pub struct Link {
    engine: u64,
    id: LinkId,
}

/// Moves one rank's page cache. See the crate's documentation for the order of calls.
///
/// Dropping it ends every request with [`TransferError::Stopped`](crate::TransferError::Stopped) and flushes what it has
/// said to its peers.
#[derive(Debug)]
pub struct Engine {
    shared: Arc<Shared>,
    control: Option<JoinHandle<()>>,
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
        options.check()?;
        tracing::info!(?options, "an engine starts");
        let context = Context::open(&ContextOptions {
            transports: options.transports.clone(),
            route: options.route,
            inbox_bytes: options.inbox_bytes,
            chunk_bytes: options.chunk_bytes,
            copy_threads: options.copy_threads,
            cpus: options.cpus.clone(),
            // The engine gives a write up first: then the peer is asked to agree, and cut off only if it does not.
            stall_deadline: options.patience + options.patience / 4,
            cuda,
            ..ContextOptions::default()
        })?;
        let limits = Limits {
            patience: options.patience,
            resend: options.resend,
            requests_max: options.requests_max,
            verify: options.verify,
        };
        let (chores, chore_queue) = channel::unbounded();
        let probe = context.allocate(PROBE_BYTES)?;
        let shared = Shared::new(options, getrandom::u64()?, context, probe, Core::new(limits), chores.clone());
        // The progress threads hold the engine from their first event on, until they end.
        let place = Arc::new(OnceLock::<Arc<Shared>>::new());
        let handler = || {
            let (place, gone) = (place.clone(), Gone(chores.clone()));
            move |event| {
                let _ = &gone;
                if let Some(shared) = place.get() {
                    shared.hear(event);
                }
            }
        };
        shared.set_workers(Workers::start(&shared.context, &shared.options, shared.epoch, handler)?);
        let _ = place.set(shared.clone()); // once
        let for_control = shared.clone();
        let control = thread::Builder::new()
            .name("kvferry-engine".to_owned())
            .spawn(move || control::run(&for_control, &chore_queue))
            .inspect_err(|_| shared.workers().stop())?;
        Ok(Self { shared, control: Some(control) })
    }

    /// The options that the engine was started with.
    #[must_use]
    pub fn options(&self) -> &EngineOptions {
        &self.shared.options
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

    /// This life of the engine, as errors of peers name it.
    #[must_use]
    pub fn epoch(&self) -> u64 {
        self.shared.epoch
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
        let mut state = self.shared.lock();
        if state.published.is_some() {
            return Err(PublishError::Twice);
        }
        let layers = || table.rows().map(|(_, row)| row.layer.0);
        let own_layers = layers().min().unwrap_or(0)..layers().max().map_or(0, |last| last.saturating_add(1));
        let published = Published { table, regions };
        let card = self.card_of(&published);
        state.core.introduce(Introduction {
            instance: self.shared.options.instance.clone(),
            born: self.shared.born,
            card,
            own_layers,
        });
        state.published = Some(Arc::new(published));
        Ok(())
    }

    /// This rank's card: opaque bytes, which become an [`InstanceCard`] with those of the instance's other ranks. `None` before
    /// [`publish`](Self::publish).
    #[must_use]
    pub fn card(&self) -> Option<Vec<u8>> {
        let published = self.shared.lock().published.clone()?;
        Some(self.card_of(&published))
    }

    fn card_of(&self, published: &Published) -> Vec<u8> {
        let card = Card {
            instance: self.shared.options.instance.clone(),
            rank: self.shared.options.rank,
            verify: self.shared.options.verify,
            epoch: self.shared.epoch,
            born: self.shared.born,
            ucx: self.shared.context.ucx_version(),
            addresses: self.shared.workers().addresses(),
            table: published.table.clone(),
            regions: published.regions.iter().map(Region::card).collect(),
            probe: self.shared.probe.card(),
        };
        card.encode()
    }

    /// Connects two instances, of one of which this engine is a rank. Every rank of both makes this call with the same cards. Of
    /// an instance with attention data parallelism they are the cards of one part, whose ranks hold the same requests between
    /// them; other parts have links of their own.
    ///
    /// Matches the tables, proves that every byte this rank is concerned with has one source,
    /// and exchanges greetings, with the digest of what was matched, with each peer. Waits for those up to the engine's
    /// patience: the calls of all ranks must overlap. A source then writes a few bytes to each of its destinations, to
    /// memory that is set aside for that, and returns when they have arrived.
    ///
    /// A rank that restarts makes this call with its new card and those that the others have; the others do nothing: they
    /// hear of its next life from itself, and the link goes on. So does a link whose connections have failed for another
    /// reason, once they can be made again.
    ///
    /// # Errors
    ///
    /// [`ConnectError`] names the peer; nothing is left behind. Calls that all overlap can still fail for half a second after
    /// earlier ones were given up, while those connections go down: call again.
    pub fn connect(&self, sources: &InstanceCard, destinations: &InstanceCard) -> Result<Link, ConnectError> {
        let shared = &self.shared;
        let cards = LinkCards { sources: sources.cards().to_vec(), destinations: destinations.cards().to_vec() };
        let epoch = shared.epoch;
        let Survey { side, peers } = survey(&cards.sources, &cards.destinations, epoch, self.ucx_version())?;
        {
            let state = shared.lock();
            if state.stopped {
                return Err(ConnectError::Stopped);
            }
            if state.published.is_none() {
                return Err(ConnectError::Unpublished);
            }
            if let Some(peer) = peers.keys().find_map(|epoch| state.core.known(*epoch)) {
                return Err(ConnectError::Already { peer });
            }
        }
        // Not under the lock, which the progress thread needs before it can answer.
        let mut opened = BTreeMap::new();
        for (epoch, (card, peer)) in peers {
            let name = PeerName { side: other(side), rank: peer.rank };
            match WirePeer::connect(shared.workers(), side, Arc::new(card)) {
                Ok(wire) => drop(opened.insert(epoch, (wire, peer))),
                Err(source) => {
                    self.close(opened.into_values().map(|(wire, _)| wire));
                    return Err(ConnectError::Endpoint { peer: name, source });
                }
            }
        }
        let (answer, connected) = channel::bounded(1);
        let mut state = shared.lock();
        if let Some(peer) = opened.keys().find_map(|epoch| state.core.known(*epoch)) {
            drop(state);
            self.close(opened.into_values().map(|(wire, _)| wire));
            return Err(ConnectError::Already { peer });
        }
        let link = LinkId(state.next_link);
        state.next_link += 1;
        state.connecting.insert(link, answer);
        state.links.insert(link, cards);
        let mut members = BTreeMap::new();
        for (epoch, (wire, peer)) in opened {
            state.connected(shared.workers(), epoch, wire);
            members.insert(epoch, peer);
        }
        let actions = state.core.connect(Instant::now(), link, side, shared.options.rank, members);
        shared.act(state, actions);
        // The control thread answers at the deadline at the latest, and when it ends, however it does.
        connected.recv().unwrap_or(Err(ConnectError::Stopped))?;
        if let Err(error) = self.test_routes(link) {
            let mut state = shared.lock();
            let actions = state.core.disconnect(Instant::now(), link).unwrap_or_default();
            state.links.remove(&link);
            shared.act(state, actions);
            return Err(error);
        }
        Ok(Link { engine: epoch, id: link })
    }

    /// Writes a few bytes to each destination of a link, by the way that the options force if they do: the first request
    /// finds connections that have carried bytes.
    fn test_routes(&self, link: LinkId) -> Result<(), ConnectError> {
        let (shared, deadline) = (&self.shared, Instant::now() + self.shared.options.patience);
        let mut asked = Vec::new();
        let mut state = shared.lock();
        for (epoch, name) in state.core.members(link) {
            let Some(peer) = state.peers.get(&epoch) else { continue };
            let (Some(part), endpoint) = (peer.probe(&shared.probe), peer.endpoint) else { continue };
            let worker = shared.workers().get(peer.worker);
            // Writes of requests are numbered from 0 on.
            let transfer = TransferId(u64::MAX - epoch % (1 << 62));
            let (answer, done) = channel::bounded(1);
            state.probes.insert(transfer, answer);
            worker.put(endpoint, transfer, vec![part]).map_err(|source| {
                state.probes.remove(&transfer);
                ConnectError::Unwritable { peer: name, source }
            })?;
            asked.push((name, transfer, done));
        }
        drop(state);
        shared.workers().carry_out();
        for (peer, transfer, done) in asked {
            match done.recv_deadline(deadline) {
                Ok(Ok(stats)) => tracing::debug!(%peer, route = %stats.route, elapsed = ?stats.elapsed, "bytes arrive"),
                Ok(Err(source)) => return Err(ConnectError::SelfTest { peer, source }),
                Err(_) => {
                    shared.lock().probes.remove(&transfer);
                    shared.workers().cancel(transfer);
                    return Err(ConnectError::NoAnswer { peer, waited: shared.options.patience });
                }
            }
        }
        Ok(())
    }

    fn close(&self, peers: impl Iterator<Item = WirePeer>) {
        for peer in peers {
            let _ = self.shared.workers().get(peer.worker).close(peer.endpoint); // stopped: closed with everything else
        }
        self.shared.workers().carry_out();
    }

    /// Forgets a link and tells its peers, to whom this rank is lost then.
    ///
    /// # Errors
    ///
    /// [`PostError::UnderWay`] while a request of the link has not ended, or is a send whose slots are not quiet;
    /// [`PostError::NoLink`].
    pub fn disconnect(&self, link: Link) -> Result<(), PostError> {
        let link = self.id_of(link)?;
        let mut state = self.shared.lock();
        if let Some(key) = state.core.under_way(link) {
            return Err(PostError::UnderWay(key));
        }
        let actions = state.core.disconnect(Instant::now(), link).ok_or(PostError::NoLink)?;
        state.links.remove(&link);
        self.shared.act(state, actions);
        Ok(())
    }

    /// Asks the sources of `link` for the `tokens` of a request, into the slots of `block_maps` (one a layer group of this
    /// rank's table). The slots are exposed from now until the handle gives them back as [`Quiet`](crate::Quiet).
    ///
    /// Tokens that this side has already are left out at the start of the range.
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
        self.receive_from_any(&[link], key, block_maps, tokens)
    }

    /// As [`receive`](Self::receive), before it is known which of several instances, or data-parallel parts of one, will send
    /// the request. The first whose sources post a send of it is asked; until then no slot is exposed. The sends of the
    /// others end with [`Refusal::NotChosen`](crate::Refusal::NotChosen).
    ///
    /// # Errors
    ///
    /// [`PostError`]: nothing was sent, no slot is exposed.
    pub fn receive_from_any(
        &self,
        links: &[Link],
        key: RequestKey,
        block_maps: &[BlockMap],
        tokens: Range<u64>,
    ) -> Result<Receive, PostError> {
        let posted = Instant::now();
        let links = links.iter().map(|link| self.id_of(*link)).collect::<Result<Vec<_>, _>>()?;
        let mut state = self.shared.lock();
        if state.stopped {
            return Err(PostError::Stopped);
        }
        let actions = state.core.receive(Instant::now(), key, &links, block_maps, &tokens)?;
        let completion = Completion::new();
        state.receives.insert(key, completion.clone());
        let slots = block_maps.iter().flat_map(BlockMap::slots).flatten().count();
        self.shared.telemetry.receive_begun(key, &tokens, slots, posted);
        state.core.receive_posted_in(key, posted.elapsed());
        self.shared.act(state, actions);
        self.shared.telemetry.posted(Side::Destination, posted.elapsed());
        Ok(Transfer::new(completion, Arc::downgrade(&self.shared), Handle::Receive(key)))
    }

    /// Writes the `tokens` of a request from the slots of `block_maps` (one a layer group of this rank's table) to each
    /// destination of `link` that this rank serves, as soon as it has said where to. A destination may ask for less, if it
    /// has the first tokens already. The slots must hold the bytes now and must not change until they are
    /// [`Quiet`](crate::Quiet), which of a send that ended well they are.
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
        let whole = PartSpec { tokens: tokens.clone(), ..PartSpec::default() };
        self.post_send(link, key, block_maps, tokens, Some(whole))
    }

    /// As [`send`](Self::send), of bytes that are yet to come: they leave as they are pushed, by [`Send::push`].
    ///
    /// # Errors
    ///
    /// [`PostError`]: nothing was written.
    pub fn send_in_parts(
        &self,
        link: Link,
        key: RequestKey,
        block_maps: Vec<BlockMap>,
        tokens: Range<u64>,
    ) -> Result<Send, PostError> {
        self.post_send(link, key, block_maps, tokens, None)
    }

    fn post_send(
        &self,
        link: Link,
        key: RequestKey,
        block_maps: Vec<BlockMap>,
        tokens: Range<u64>,
        whole: Option<PartSpec>,
    ) -> Result<Send, PostError> {
        let now = Instant::now();
        let ticket = Ticket { link: self.id_of(link)?, key };
        let mut state = self.shared.lock();
        if state.stopped {
            return Err(PostError::Stopped);
        }
        let mut actions = state.core.send(now, ticket, block_maps, tokens.clone())?;
        self.shared.telemetry.send_begun(ticket, &tokens, now);
        if let Some(whole) = whole
            && let Ok((_, pushed)) = state.core.push(now, ticket, whole, true)
        {
            actions.extend(pushed);
        }
        let posting = now.elapsed();
        state.core.posted_in(ticket, posting);
        let completion = Completion::new();
        state.sends.insert(ticket, completion.clone());
        self.shared.act(state, actions);
        self.shared.telemetry.posted(Side::Source, now.elapsed());
        Ok(Transfer::new(completion, Arc::downgrade(&self.shared), Handle::Send(ticket)))
    }

    /// Slots of receives that have ended and to which a peer may still write, one entry a request and peer. They come back
    /// through their handles, when the peer has said that it has stopped, or has died; never because time has passed.
    #[must_use]
    pub fn quarantine(&self) -> Vec<Quarantine> {
        let now = Instant::now();
        let state = self.shared.lock();
        let own = state.published.clone();
        let pools = own.map_or(0, |own| own.table.pools.len());
        let quarantined = state.core.quarantine().into_iter();
        quarantined.map(|quarantined| Quarantine::new(now, pools, quarantined)).collect()
    }

    /// Messages that were sent again because they had not been answered in time. On a healthy network with patient ranks few.
    #[must_use]
    pub fn resent_messages(&self) -> u64 {
        self.shared.lock().core.resent()
    }

    fn id_of(&self, link: Link) -> Result<LinkId, PostError> {
        if link.engine == self.shared.epoch { Ok(link.id) } else { Err(PostError::NoLink) }
    }
}

impl Drop for Engine {
    fn drop(&mut self) {
        let _ = self.shared.chores.send(Chore::Stop); // gone: ended already
        if self.control.take().is_some_and(|control| control.join().is_err()) {
            tracing::error!("the control thread panicked");
        }
        self.shared.workers().stop();
    }
}

/// Held by a progress thread: tells the control thread when that ends, however it does.
struct Gone(Sender<Chore>);

impl Drop for Gone {
    fn drop(&mut self) {
        let _ = self.0.send(Chore::Gone); // nobody there: ended already
    }
}

const _: () = {
    const fn shared_by_threads<T: std::marker::Send + Sync>() {}
    shared_by_threads::<Engine>();
    shared_by_threads::<Receive>();
    shared_by_threads::<Send>();
};
