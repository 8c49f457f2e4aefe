//! A connection as its worker holds it.

use std::collections::BTreeMap;
use std::sync::Arc;
use std::time::{Duration, Instant};

use ucx_sys::Status;

use crate::address::{InboxCard, WorkerCard};
use crate::context::Context;
use crate::cuda::driver::CudaError;
use crate::cuda::gpu::Gpu;
use crate::cuda::imported::NotImported;
use crate::cuda::landing::PeerSlab;
use crate::cuda::pinned::PinnedMapping;
use crate::cuda::target::{DeviceTarget, Targets};
use crate::endpoint::{EndpointId, KeyId, RemoteRegion};
use crate::endpoints::Endpoints;
use crate::error::{CommandError, PutError};
use crate::frames::outgoing::{Outgoing, Sender};
use crate::inbox::message::{Body, ConnectionId, Message};
use crate::inbox::target::{DESCRIPTION_BYTES_MAX, Peer};
use crate::process::Process;
use crate::raw::{Closing, Operation, RawEndpoint};
use crate::region::{OwnerId, RegionCard};
use crate::route::{CMA_WITH_ERROR_HANDLING, Facts, PUTS_NOT_EMULATED};
use crate::share::Mapped;
use crate::transfer::{Direction, Work};

/// The key of the peer's inbox, apart from those that callers import.
pub(crate) const INBOX_KEY: KeyId = KeyId(u64::MAX);

/// How long a connection that is closed waits for what it has posted before it is cut.
const FAREWELL_DEADLINE: Duration = Duration::from_millis(500);

/// Chunks of a slab that a peer may grant ahead.
const AHEAD_MAX: usize = 64;

/// A connection and the life of the peer it leads to.
pub(crate) struct Connection {
    pub(crate) raw: RawEndpoint,
    pub(crate) id: EndpointId,
    pub(crate) peer_epoch: u64,
    /// The peer's process: its regions are the only ones that can be imported.
    owner: OwnerId,
    /// Target regions that are mapped here.
    targets: BTreeMap<KeyId, Arc<Mapped>>,
    /// Target regions as this side's GPU reaches them, or not.
    device_targets: BTreeMap<KeyId, Result<DeviceTarget, NotImported>>,
    inbox: Option<PeerInbox>,
    /// The peer's slab of GPU memory, if it is mapped here.
    slab: Option<PeerSlab>,
    /// Chunks of it that the next transfer may begin with.
    ahead: Vec<u32>,
    /// The peer's process, if it is on this host.
    pub(crate) process: Option<Process>,
    outgoing: Outgoing,
    greeted: bool,
}

/// A region of a peer's, as far as it can be reached without UCX.
pub(crate) enum Target {
    Host(Option<Arc<Mapped>>, Option<Result<DeviceTarget, NotImported>>),
    Device(Result<DeviceTarget, NotImported>),
}

/// The peer's worker as far as it is on this host.
#[derive(Debug, Default)]
pub(crate) struct Neighbour {
    pub(crate) inbox: Option<Arc<Mapped>>,
    pub(crate) slab: Option<PeerSlab>,
    pub(crate) process: Option<Process>,
}

/// What is known of the peer's inbox.
struct PeerInbox {
    card: InboxCard,
    mapped: Option<Arc<Mapped>>,
    /// For this side's GPU to write, once it has to.
    pinned: Option<Arc<PinnedMapping>>,
    key_imported: bool,
}

impl Connection {
    pub(crate) fn open(
        endpoints: &Endpoints,
        context: &Context,
        id: EndpointId,
        card: WorkerCard,
        neighbour: Neighbour,
        peer_epoch: u64,
    ) -> Result<Self, CommandError> {
        let raw = endpoints.connect(&card.ucx_address).map_err(|source| CommandError::Connect { source })?;
        let sound = |card: &InboxCard| {
            card.chunk_bytes > 0 && card.region.bytes > 0 && card.region.base.checked_add(card.region.bytes).is_some()
        };
        let Neighbour { inbox: mapped, slab, process } = neighbour;
        let inbox = card.inbox.filter(sound).map(|card| PeerInbox { card, mapped, pinned: None, key_imported: false });
        let (owner, targets, device_targets) = (card.owner, BTreeMap::new(), BTreeMap::new());
        let ahead = Vec::new();
        let outgoing = Outgoing::new(context.options().ring_bytes_for(process.is_some()));
        Ok(Self {
            raw,
            id,
            peer_epoch,
            owner,
            targets,
            device_targets,
            inbox,
            slab,
            ahead,
            process,
            outgoing,
            greeted: false,
        })
    }

    /// [`Status::OK`] until UCX, the peer's end of the ring or, if `look`, the kernel says that the peer is gone.
    pub(crate) fn failure(&self, look: bool) -> Status {
        match self.raw.failure() {
            Status::OK if self.outgoing.is_broken() => Status::ERR_CONNECTION_RESET,
            Status::OK if look && self.process.as_ref().is_some_and(Process::has_ended) => Status::ERR_CONNECTION_RESET,
            status => status,
        }
    }

    pub(crate) fn process(&self) -> Option<&Process> {
        self.process.as_ref()
    }

    pub(crate) fn import(&mut self, key: KeyId, card: &RegionCard, target: Target) -> Result<(), CommandError> {
        if card.owner != self.owner {
            return Err(CommandError::Foreign { base: card.base, bytes: card.bytes });
        }
        match target {
            Target::Host(target, pinned) => {
                self.raw.import(key, &card.key).map_err(|source| CommandError::Key { source })?;
                self.targets.extend(target.map(|target| (key, target)));
                self.device_targets.extend(pinned.map(|pinned| (key, pinned)));
            }
            Target::Device(target) => drop(self.device_targets.insert(key, target)),
        }
        Ok(())
    }

    /// The mapping of each part's target, if all of them are mapped.
    pub(crate) fn targets(&self, work: &Work) -> Option<Vec<Arc<Mapped>>> {
        work.remotes.iter().map(|remote| self.targets.get(&remote.key).cloned()).collect()
    }

    /// The same for targets on a GPU; why not, if one of them is not.
    pub(crate) fn device_targets(&self, work: &Work) -> Result<Targets, NotImported> {
        let target = |key: &KeyId| match self.device_targets.get(key) {
            Some(target) => target.clone(),
            None => Err(NotImported::NotOffered),
        };
        Targets::new(work.remotes.iter().map(|remote| remote.key), target)
    }

    /// The first target that is known to be no longer registered.
    pub(crate) fn withdrawn(&self, work: &Work) -> Option<PutError> {
        let given_up = |key: &KeyId| {
            let device = self.device_targets.get(key).and_then(|target| target.as_ref().ok());
            self.targets.get(key).is_some_and(|target| !target.is_offered())
                || device.is_some_and(|target| !target.is_offered())
        };
        let mut last = None;
        let mut differs = |remote: &&RemoteRegion| last.replace(remote.key) != Some(remote.key);
        let remote = work.remotes.iter().filter(&mut differs).find(|remote| given_up(&remote.key))?;
        Some(PutError::Withdrawn { base: remote.base(), bytes: remote.bytes() })
    }

    pub(crate) fn inbox(&self) -> Option<&InboxCard> {
        self.inbox.as_ref().map(|inbox| &inbox.card)
    }

    pub(crate) fn slab(&self) -> Option<&PeerSlab> {
        self.slab.as_ref()
    }

    /// The peer grants chunks of its slab ahead. More than any grants are not taken.
    pub(crate) fn add_ahead(&mut self, chunks: Vec<u32>) {
        if self.ahead.len() + chunks.len() <= AHEAD_MAX {
            self.ahead.extend(chunks);
        }
    }

    /// What a transfer begins with that has use for so many chunks.
    pub(crate) fn take_ahead(&mut self, most: u64) -> Vec<u32> {
        let count = usize::try_from(most).unwrap_or(usize::MAX).min(self.ahead.len());
        self.ahead.drain(..count).collect()
    }

    pub(crate) fn inbox_mapped(&self) -> Option<Arc<Mapped>> {
        self.inbox.as_ref().and_then(|inbox| inbox.mapped.clone())
    }

    /// The peer's inbox, if it is mapped here, for this side's GPU to write.
    pub(crate) fn pin_inbox(&mut self, gpu: &Arc<Gpu>) -> Option<Result<Arc<PinnedMapping>, CudaError>> {
        let inbox = self.inbox.as_mut()?;
        let mapped = inbox.mapped.clone()?;
        if let Some(pinned) = &inbox.pinned {
            return Some(Ok(pinned.clone()));
        }
        let pinned = PinnedMapping::new(gpu, mapped).map(Arc::new);
        inbox.pinned = pinned.as_ref().ok().cloned();
        Some(pinned)
    }

    /// Makes the peer's inbox a target of puts.
    pub(crate) fn import_inbox(&mut self) -> Result<KeyId, Status> {
        let inbox = self.inbox.as_mut().ok_or(Status::ERR_UNSUPPORTED)?;
        if !inbox.key_imported {
            self.raw.import(INBOX_KEY, &inbox.card.region.key)?;
            inbox.key_imported = true;
        }
        Ok(INBOX_KEY)
    }

    /// What the choice of a route depends on.
    pub(crate) fn facts(&self, context: &Context, work: &Work) -> Facts {
        // At most 5 bytes a slot and 60 a piece.
        let description: usize =
            work.shapes.iter().map(|shape| shape.pairs.len() * 5 + shape.pieces.len() * 60 + 40).sum();
        let inbox_mapped = self.inbox_mapped().is_some();
        let inbox = self.inbox.is_some() && description <= DESCRIPTION_BYTES_MAX;
        let cma = context.ucx_version() >= CMA_WITH_ERROR_HANDLING && context.options().allows_cma();
        Facts {
            forced: context.options().route,
            pulled: work.direction == Direction::Get,
            inbox_only: work.inbox_only(),
            bytes: work.size.bytes,
            runs: work.size.runs,
            target_mapped: self.targets(work).is_some(),
            inbox,
            inbox_mapped: inbox && inbox_mapped,
            kernel_copies: cma && inbox_mapped,
            puts_emulated: context.ucx_version() < PUTS_NOT_EMULATED,
        }
    }

    /// Sends a caller's frame.
    pub(crate) fn send(&mut self, sender: &Sender<'_>, kind: u16, payload: &[u8]) {
        self.outgoing.send(&self.raw, sender, self.peer_epoch, kind, payload);
    }

    /// Passes on frames that wait for room in the ring. Returns whether any went.
    pub(crate) fn pass_waiting(&mut self, sender: &Sender<'_>) -> bool {
        self.outgoing.pass_waiting(&self.raw, sender, self.peer_epoch)
    }

    /// Says something to the peer's inbox, after a greeting if it is the first time.
    pub(crate) fn say(&mut self, sender: &Sender<'_>, body: Body) {
        if !self.greeted {
            self.greeted = true;
            self.speak(sender, Body::Hello { address: sender.address.to_owned() });
        }
        self.speak(sender, body);
    }

    /// Says something to the peer's worker that is about another connection.
    pub(crate) fn pass_on(&mut self, sender: &Sender<'_>, message: &Message) {
        self.outgoing.say(&self.raw, sender, self.peer_epoch, message);
    }

    fn speak(&mut self, sender: &Sender<'_>, body: Body) {
        self.pass_on(sender, &Message { connection: ConnectionId(self.id.0), body });
    }

    /// Starts to close the connection in an orderly way. `status` is why.
    pub(crate) fn leave(self, status: Status) -> Leaving {
        Leaving {
            connection: self,
            status,
            settled: None,
            said: false,
            in_order: false,
            deadline: Instant::now() + FAREWELL_DEADLINE,
        }
    }
}

/// A connection that takes nothing new. When what it had posted is out, the peer's inbox is told that its chunks are free:
/// not before, or a late put would hit whoever is granted them next.
pub(crate) struct Leaving {
    connection: Connection,
    status: Status,
    settled: Option<Operation>,
    said: bool,
    /// All that was posted is out, and the peer has been told.
    in_order: bool,
    deadline: Instant,
}

impl Leaving {
    pub(crate) fn id(&self) -> EndpointId {
        self.connection.id
    }

    pub(crate) fn status(&self) -> Status {
        self.status
    }

    /// See [`Connection::pass_waiting`].
    pub(crate) fn pass_waiting(&mut self, sender: &Sender<'_>) -> bool {
        self.connection.pass_waiting(sender)
    }

    /// Whether it is time to part with the connection. A peer that does not answer is not waited for beyond a deadline. While something
    /// that was posted on it is `writing` nothing is said yet, nor is there a flush that would cover all of it.
    pub(crate) fn is_over(&mut self, sender: &Sender<'_>, writing: bool) -> bool {
        let connection = &mut self.connection;
        if connection.failure(false) != Status::OK || Instant::now() >= self.deadline {
            return true;
        }
        if writing || connection.outgoing.waits() {
            return false;
        }
        match self.settled.get_or_insert_with(|| connection.raw.flush()).result() {
            None => false,
            Some(Status::OK) if connection.greeted && !self.said => {
                self.said = true;
                connection.say(sender, Body::Bye);
                self.settled = Some(connection.raw.flush());
                false
            }
            Some(status) => {
                self.in_order = status == Status::OK;
                true
            }
        }
    }

    /// Its endpoint, if that is in good order. Else it has been cut.
    pub(crate) fn part(self) -> Result<RawEndpoint, (Closed, Closing)> {
        let raw = self.connection.raw;
        if self.in_order { Ok(raw) } else { Err((Closed::Caller(self.connection.id, self.status), raw.close(true))) }
    }
}

/// Whose endpoint is being closed.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(crate) enum Closed {
    /// The caller's, and why.
    Caller(EndpointId, Status),
    /// One through which an inbox answered.
    Answer(Peer),
    /// Nobody's.
    Spare,
}
