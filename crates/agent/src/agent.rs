//! The agent: one worker, one control thread, and what its owner asks of them.

use std::net::SocketAddr;
use std::sync::atomic::Ordering;
use std::sync::{Arc, OnceLock};
use std::thread::{self, JoinHandle};
use std::time::{Duration, Instant};

use crossbeam::channel;
use kvferry_wire::{
    Context, FRAME_PAYLOAD_BYTES_MAX, MemoryKind, Part, Piece, Region, RegionCard, RegionId, Run, Side, Version, Worker,
};
use parking_lot::Mutex;

use crate::control::{self, Chore};
use crate::error::{ExchangeError, MakeError, MemoryError, RemoteError, StartError};
use crate::exchange::{self, Limit, Listening};
use crate::indices::Indices;
use crate::list::{List, Which};
use crate::memory::Busy;
use crate::message::NOTIFY;
use crate::metadata::NAME_BYTES_MAX;
use crate::notification::Notification;
use crate::options::AgentOptions;
use crate::shared::Shared;
use crate::transfer::{Operation, Transfer};

/// How often a region that is still in use is looked at again.
const BUSY_LOOK: Duration = Duration::from_micros(200);

/// How long an agent that is dropped waits for peers to write its memory no more, and for what it pushes to them to end.
const SETTLE: Duration = Duration::from_secs(1);

/// A named agent. All of its calls are for any thread; none waits longer than it is told to, or, where it only asks the worker's
/// thread for something, than a few milliseconds.
///
/// Dropping it gives up what is under way and takes leave of its peers. Memory that a peer was asked to write and may still write a
/// second later, since it does not answer, stays registered until the process ends.
#[derive(Debug)]
pub struct Agent {
    pub(crate) shared: Arc<Shared>,
    /// What stops with it.
    threads: Mutex<Threads>,
    listens_at: Option<SocketAddr>,
}

#[derive(Debug)]
struct Threads {
    control: Option<JoinHandle<()>>,
    listening: Option<Listening>,
}

impl Agent {
    /// Opens UCX and starts the threads.
    ///
    /// # Errors
    ///
    /// [`StartError`]; nothing is left behind.
    pub fn new(name: &str, options: AgentOptions) -> Result<Self, StartError> {
        if name.is_empty() || name.len() > NAME_BYTES_MAX {
            return Err(StartError::Name { bytes: name.len() });
        }
        let context = Context::open(&options.context)?;
        let epoch = getrandom::u64().map_err(|error| StartError::System(std::io::Error::other(error)))?;
        let listen = options.listen;
        let (chores, chore_queue) = channel::unbounded();
        let shared = Shared::new(name.into(), epoch, options, context, chores);
        // The progress thread holds the agent from its first event on, until it ends.
        let place = Arc::new(OnceLock::<Arc<Shared>>::new());
        let for_events = place.clone();
        let worker = Worker::start_with(&shared.context, epoch, move |event| {
            if let Some(shared) = for_events.get() {
                shared.hear(event);
            }
        })?;
        shared.set_worker(worker);
        let _ = place.set(shared.clone()); // once
        let for_control = shared.clone();
        let control = thread::Builder::new()
            .name("kvferry-agent".to_owned())
            .spawn(move || control::run(&for_control, &chore_queue))
            .inspect_err(|_| shared.worker().stop())
            .map_err(StartError::System)?;
        let threads = Mutex::new(Threads { control: Some(control), listening: None });
        let mut agent = Self { shared, threads, listens_at: None };
        if let Some(address) = listen {
            let listening = Listening::start(address, &agent.shared).map_err(StartError::Listen)?;
            agent.listens_at = Some(listening.address());
            agent.threads.get_mut().listening = Some(listening);
        }
        Ok(agent)
    }

    /// Its name.
    #[must_use]
    pub fn name(&self) -> &str {
        &self.shared.name
    }

    /// This life of it.
    #[must_use]
    pub fn epoch(&self) -> u64 {
        self.shared.epoch
    }

    /// The UCX instance, to allocate or register memory with.
    #[must_use]
    pub fn context(&self) -> &Context {
        &self.shared.context
    }

    /// Version of the UCX in use.
    #[must_use]
    pub fn ucx_version(&self) -> Version {
        self.shared.context.ucx_version()
    }

    /// Where it listens for metadata, if it does: with the port that the system has chosen, if that was left to it.
    #[must_use]
    pub fn listens_at(&self) -> Option<SocketAddr> {
        self.listens_at
    }

    /// Makes memory that was registered or allocated with [`context`](Self::context) part of the agent. Memory of the caller's
    /// is registered by [`Context::register`] and [`Context::register_device`], whose callers promise that it stays where it is.
    /// Overlapping memory is fine.
    ///
    /// # Errors
    ///
    /// [`MemoryError::OtherContext`].
    pub fn register(&self, region: Region) -> Result<RegionId, MemoryError> {
        let (base, bytes, id) = (region.base(), region.bytes(), region.id());
        if !self.shared.context.owns(&region) {
            return Err(MemoryError::OtherContext { base, bytes });
        }
        self.shared.state.lock().regions.insert(id, region);
        Ok(id)
    }

    /// The region registered last that starts at `base` and has `bytes`.
    #[must_use]
    pub fn region(&self, base: u64, bytes: u64, kind: MemoryKind) -> Option<RegionId> {
        let state = self.shared.state.lock();
        let is = |region: &&Region| (region.base(), region.bytes(), region.kind()) == (base, bytes, kind);
        state.regions.values().rev().find(is).map(Region::id)
    }

    /// Undoes a registration. Lists and transfers of the memory take part in nothing new; what is under way is waited for.
    /// When this returns well, nothing reads or writes the memory for this agent any more. When it is busy, it can be called again.
    ///
    /// # Errors
    ///
    /// [`MemoryError::Unknown`], [`MemoryError::Busy`].
    pub fn deregister(&self, region: RegionId, timeout: Duration) -> Result<(), MemoryError> {
        let deadline = Instant::now() + timeout;
        let taken = {
            let mut state = self.shared.state.lock();
            for connection in state.peers.values_mut().filter_map(|peer| peer.connection.as_mut()) {
                connection.told.remove(&region);
            }
            state.regions.remove(&region)
        };
        let mut region = match taken {
            Some(region) => region,
            None => match self.take_busy(region, deadline, timeout)? {
                Some(region) => region,
                None => return Ok(()),
            },
        };
        self.shared.register.forget(region.id());
        let (base, bytes) = (region.base(), region.bytes());
        while let Err(used) = region.unregister() {
            if Instant::now() >= deadline {
                self.shared.register.add_busy(used);
                self.shared.look();
                return Err(MemoryError::Busy { base, bytes, waited: timeout });
            }
            region = used;
            thread::sleep(BUSY_LOOK);
        }
        Ok(())
    }

    /// Memory whose deregistration was answered with busy; `None` if it has been given back since.
    fn take_busy(&self, region: RegionId, deadline: Instant, waited: Duration) -> Result<Option<Region>, MemoryError> {
        loop {
            match self.shared.register.take_busy(region).ok_or(MemoryError::Unknown { region })? {
                Busy::Used(region) => return Ok(Some(region)),
                Busy::Free => return Ok(None),
                Busy::Looked { base, bytes } if Instant::now() >= deadline => {
                    return Err(MemoryError::Busy { base, bytes, waited });
                }
                Busy::Looked { .. } => thread::sleep(BUSY_LOOK),
            }
        }
    }

    /// Whether each of `runs` is in registered memory of the kind.
    #[must_use]
    pub fn is_registered(&self, kind: MemoryKind, runs: &[Run]) -> Vec<bool> {
        let state = self.shared.state.lock();
        let of_kind = state.regions.values().filter(|region| region.kind() == kind);
        let mut spans: Vec<(u64, u64)> =
            of_kind.map(|region| (region.base(), region.base() + region.bytes())).collect();
        drop(state);
        spans.sort_unstable();
        // How far those reach that begin no later.
        let mut reach = 0;
        for (_, end) in &mut spans {
            reach = reach.max(*end);
            *end = reach;
        }
        let is_inside = |run: &Run| {
            let begun = spans[..spans.partition_point(|(base, _)| *base <= run.address)].last();
            begun.zip(run.address.checked_add(run.bytes)).is_some_and(|((_, reach), end)| end <= *reach)
        };
        runs.iter().map(is_inside).collect()
    }

    /// All that a peer needs: where the agent is, and all of its memory. Opaque, versioned, with a digest.
    #[must_use]
    pub fn metadata(&self) -> Vec<u8> {
        self.shared.metadata(None, true)
    }

    /// Metadata of some of the memory, with or without where the agent is. A peer adds it to what it knows.
    ///
    /// # Errors
    ///
    /// [`MemoryError::Unknown`]: one of them is not registered.
    pub fn metadata_of(&self, regions: &[RegionId], address: bool) -> Result<Vec<u8>, MemoryError> {
        let state = self.shared.state.lock();
        let card = |id: &RegionId| state.regions.get(id).map(Region::card).ok_or(MemoryError::Unknown { region: *id });
        let cards: Vec<RegionCard> = regions.iter().map(card).collect::<Result<_, _>>()?;
        drop(state);
        Ok(self.shared.metadata(Some(cards), address))
    }

    /// Takes in a remote agent's metadata, and returns the agent's name. An agent of the name that has been added before and
    /// had another epoch is replaced: what is under way with it fails.
    ///
    /// # Errors
    ///
    /// [`RemoteError::Metadata`]; nothing has changed.
    pub fn add_remote(&self, metadata: &[u8]) -> Result<String, RemoteError> {
        self.shared.add_remote(metadata).map(|name| name.to_string())
    }

    /// Gives up what is under way with a remote agent and closes the connection to it.
    ///
    /// # Errors
    ///
    /// [`RemoteError::Unknown`].
    pub fn remove_remote(&self, name: &str) -> Result<(), RemoteError> {
        self.shared.remove_remote(name)
    }

    /// Whether a remote agent has been added whose metadata tells of memory around all of `runs`.
    #[must_use]
    pub fn knows(&self, name: &str, kind: MemoryKind, runs: &[Run]) -> bool {
        self.shared.knows(name, kind, runs)
    }

    /// Connects to a remote agent and waits for its answer. Not necessary before a transfer, which then takes longer.
    ///
    /// # Errors
    ///
    /// [`RemoteError`].
    pub fn connect(&self, name: &str, timeout: Duration) -> Result<(), RemoteError> {
        self.shared.meet(name, timeout)
    }

    /// Looks up `runs` in this agent's memory of the kind.
    ///
    /// # Errors
    ///
    /// [`MakeError::Local`] names the first that is in none.
    pub fn prepare_local(&self, kind: MemoryKind, runs: &[Run]) -> Result<List, MakeError> {
        let side = Side::new(self.regions(kind), runs);
        let side = side.map_err(|index| MakeError::Local { index, run: runs[index], kind })?;
        Ok(List::local(&self.shared, side))
    }

    /// Looks up `runs` in the memory that the remote agent has told of, and connects to it if that has not been done. The
    /// agent's own name is that of a remote agent too: of itself.
    ///
    /// # Errors
    ///
    /// [`MakeError::Remote`] names the first that is in none, [`MakeError::Peer`] says why the agent cannot be reached.
    pub fn prepare_remote(&self, name: &str, kind: MemoryKind, runs: &[Run]) -> Result<List, MakeError> {
        let shared = &self.shared;
        if *name == *shared.name && shared.state.lock().names.get(name).is_none_or(|epoch| *epoch == shared.epoch) {
            shared.add_remote(&self.metadata())?; // with what was registered since
        }
        let epoch = shared.epoch_of(name)?;
        let endpoint = shared.link(epoch)?;
        let cards = || -> Vec<RegionCard> {
            let state = shared.state.lock();
            let cards = state.peers.get(&epoch).into_iter().flat_map(|peer| peer.cards.values());
            cards.filter(|card| card.kind() == kind).cloned().collect()
        };
        let cards = cards();
        shared.import(epoch, endpoint, &cards)?;
        let regions = {
            let state = shared.state.lock();
            let connection = state.peers.get(&epoch).and_then(|peer| peer.connection.as_ref());
            let connection = connection.filter(|connection| connection.endpoint == endpoint);
            let connection = connection.ok_or_else(|| RemoteError::Disconnected { name: name.to_owned() })?;
            cards.iter().filter_map(|card| connection.imported.get(&card.id()).copied()).collect()
        };
        let side = Side::new(regions, runs);
        let side = side.map_err(|index| MakeError::Remote { index, run: runs[index], kind, name: name.to_owned() })?;
        Ok(List::remote(shared, (name.into(), epoch, endpoint), side))
    }

    /// Pairs entry `from[i]` of the local list with entry `to[i]` of the remote one. `notification` is what the remote agent
    /// hears when it has been written, or read.
    ///
    /// # Errors
    ///
    /// [`MakeError`]; nothing is sent.
    pub fn make(
        &self,
        operation: Operation,
        local: &List,
        from: Indices<'_>,
        remote: &List,
        to: Indices<'_>,
        notification: Option<&[u8]>,
    ) -> Result<Transfer, MakeError> {
        if !Arc::ptr_eq(&local.inner.shared, &self.shared) || !Arc::ptr_eq(&remote.inner.shared, &self.shared) {
            return Err(MakeError::OtherAgent);
        }
        let Which::Local(here) = &local.inner.side else { return Err(MakeError::Side { local: true }) };
        let Which::Remote { name, epoch, endpoint, side: there } = &remote.inner.side else {
            return Err(MakeError::Side { local: false });
        };
        let here = here.lock().clone().ok_or(MakeError::Deregistered)?;
        if !self.is_current(name, *epoch, *endpoint) {
            return Err(MakeError::Stale { name: name.to_string() });
        }
        if let Some(bytes) = notification.map(<[u8]>::len).filter(|bytes| *bytes > FRAME_PAYLOAD_BYTES_MAX) {
            return Err(too_long(bytes).into());
        }
        let (from, to) = (from.of(here.len()), to.of(there.len()));
        let parts = kvferry_wire::List::pair(&here, &from, there, &to)?;
        let bytes = parts.iter().map(bytes_of).fold(0, u64::saturating_add);
        let size = (bytes, from.len() as u64);
        let peer = (name.clone(), *epoch, *endpoint);
        Ok(Transfer::new(self.shared.clone(), operation, peer, parts, size, notification.map(<[u8]>::to_vec)))
    }

    /// A transfer of whole lists that are used once.
    ///
    /// # Errors
    ///
    /// [`MakeError`]; nothing is sent.
    pub fn make_once(
        &self,
        operation: Operation,
        local: (MemoryKind, &[Run]),
        remote: (&str, MemoryKind, &[Run]),
        notification: Option<&[u8]>,
    ) -> Result<Transfer, MakeError> {
        let here = self.prepare_local(local.0, local.1)?;
        let there = self.prepare_remote(remote.0, remote.1, remote.2)?;
        self.make(operation, &here, Indices::All, &there, Indices::All, notification)
    }

    /// What peers have said since the last call, in the order in which it came.
    #[must_use]
    pub fn notifications(&self) -> Vec<Notification> {
        if self.shared.notifications.is_empty() {
            self.shared.progress();
        }
        self.shared.notifications.take()
    }

    /// As [`notifications`](Self::notifications), and waits for the first.
    #[must_use]
    pub fn wait_notifications(&self, timeout: Duration) -> Vec<Notification> {
        let (shared, deadline) = (&self.shared, Instant::now() + timeout);
        let come = || (!shared.notifications.is_empty()).then_some(());
        let _ = shared.worker().drive(deadline, come); // for whoever did not come to that, the next waits in another way
        shared.notifications.wait(deadline)
    }

    /// Notifications that were dropped because more than a million, or 256 MiB, waited to be taken.
    #[must_use]
    pub fn dropped_notifications(&self) -> u64 {
        self.shared.notifications.dropped()
    }

    /// Says something to a remote agent. It is not ordered against transfers.
    ///
    /// # Errors
    ///
    /// [`RemoteError`].
    pub fn send_notification(&self, name: &str, message: &[u8]) -> Result<(), RemoteError> {
        if message.len() > FRAME_PAYLOAD_BYTES_MAX {
            return Err(too_long(message.len()));
        }
        let endpoint = self.shared.link(self.shared.epoch_of(name)?)?;
        let sent = self.shared.worker().send(endpoint, NOTIFY, message.to_vec());
        self.shared.carry_out();
        sent.map_err(|source| RemoteError::Command { name: name.to_owned(), source })
    }

    /// Gives this agent's metadata to the one that listens at `address`: all of it, or what was made by
    /// [`metadata_of`](Self::metadata_of).
    ///
    /// # Errors
    ///
    /// [`ExchangeError`].
    pub fn send_metadata(
        &self,
        address: SocketAddr,
        metadata: Option<Vec<u8>>,
        timeout: Duration,
    ) -> Result<(), ExchangeError> {
        exchange::send(address, &metadata.unwrap_or_else(|| self.metadata()), self.limit(timeout))
    }

    /// Asks the agent that listens at `address` for its metadata and adds it. `name`: the agent that has to be there, if that
    /// matters.
    ///
    /// # Errors
    ///
    /// [`ExchangeError`].
    pub fn fetch_metadata(
        &self,
        address: SocketAddr,
        name: Option<&str>,
        timeout: Duration,
    ) -> Result<String, ExchangeError> {
        let metadata = exchange::fetch(address, self.limit(timeout))?;
        exchange::take(&self.shared, &metadata, name)
    }

    /// Tells the agent that listens at `address` to remove this one.
    ///
    /// # Errors
    ///
    /// [`ExchangeError`].
    pub fn withdraw_metadata(&self, address: SocketAddr, timeout: Duration) -> Result<(), ExchangeError> {
        exchange::withdraw(address, &self.shared.metadata(Some(Vec::new()), false), self.limit(timeout))
    }

    /// Does what dropping it does, while others may have it still: their calls return, and later ones fail.
    pub fn stop(&self) {
        self.shared.stopping.store(true, Ordering::Relaxed);
        let mut threads = self.threads.lock();
        drop(threads.listening.take());
        let Some(control) = threads.control.take() else { return };
        self.shared.settle_all(SETTLE);
        let _ = self.shared.chores.send(Chore::Stop);
        let _ = control.join(); // it has panicked: its message has been printed
        self.shared.say_goodbye();
        self.shared.worker().stop();
        self.shared.end_all();
    }

    fn limit(&self, timeout: Duration) -> Limit<'_> {
        Limit::new(timeout, &self.shared.stopping)
    }

    fn regions(&self, kind: MemoryKind) -> Vec<Region> {
        let state = self.shared.state.lock();
        // The one registered last first, where they overlap.
        state.regions.values().rev().filter(|region| region.kind() == kind).cloned().collect()
    }

    /// Whether what was prepared for a connection still can be used.
    fn is_current(&self, name: &str, epoch: u64, endpoint: kvferry_wire::EndpointId) -> bool {
        let state = self.shared.state.lock();
        state.names.get(name) == Some(&epoch)
            && state.peers.get(&epoch).and_then(crate::peer::Peer::endpoint) == Some(endpoint)
    }
}

/// Bytes of a part; the most there are for one that is refused when it is posted, because they do not fit the number.
fn bytes_of(part: &Part) -> u64 {
    let piece = |piece: &Piece| {
        let [outer, inner] = piece.dims;
        outer.count.saturating_mul(inner.count).saturating_mul(piece.run_bytes)
    };
    part.pieces.iter().map(piece).fold(0, u64::saturating_add).saturating_mul(part.pairs.len() as u64)
}

fn too_long(bytes: usize) -> RemoteError {
    RemoteError::NotificationTooLong { bytes, max: FRAME_PAYLOAD_BYTES_MAX }
}

impl Drop for Agent {
    fn drop(&mut self) {
        self.stop();
    }
}
