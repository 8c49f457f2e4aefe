//! A progress thread and the handle that commands it.

use std::cell::RefCell;
use std::io;
use std::os::fd::OwnedFd;
use std::sync::Arc;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::thread;
use std::time::Duration;

use crossbeam::channel::{Receiver, SendTimeoutError, Sender, bounded, unbounded};
use rustix::event::{EventfdFlags, eventfd};
use ucx_sys::Status;

use crate::address::WorkerCard;
use crate::connection::{Neighbour, Target};
use crate::context::Context;
use crate::cuda::card::DeviceCard;
use crate::cuda::event::CudaEvent;
use crate::cuda::imported::{Imported, NotImported};
use crate::cuda::landing::PeerSlab;
use crate::cuda::target::DeviceTarget;
use crate::endpoint::{EndpointId, KeyId, Lane, RemoteRegion};
use crate::error::{CommandError, OpenError, TransferError};
use crate::event::{Event, TransferId};
use crate::frame::FRAME_PAYLOAD_BYTES_MAX;
use crate::listener::Listener;
use crate::pieces::SlotPair;
use crate::process::Process;
use crate::progress::{self, Command, Notice, Posted};
use crate::region::{MemoryKind, Region, RegionCard};
use crate::share::{Mapped, ShareCard};
use crate::transfer::{Direction, Part, Prepared, Work};

/// How long a command may take: it is a queue away from a thread that never blocks.
const COMMAND_DEADLINE: Duration = Duration::from_secs(10);

/// Commands that may wait for the progress thread.
const COMMANDS_MAX: usize = 1024;

/// A UCX worker on a thread of its own. Callers from any thread send it commands; it answers with [`Event`]s.
///
/// Dropping it tells it to stop: frames already given to it are flushed for up to a second, what has not completed by then is
/// cut off.
///
/// # What has arrived, and what still may
///
/// Every transfer ends in one [`Event::TransferDone`]. `Ok` means that the bytes are visible to the peer, not merely that
/// this side is done with its own; before it they may be, in any part and order. After an error any part of them may be.
/// Whether more can follow is said by [`PutError::may_still_arrive`](crate::PutError::may_still_arrive), and until when here:
///
/// | what happened | how its transfers end | what is written later |
/// | --- | --- | --- |
/// | [`cancel`](Self::cancel), direct | `Cancelled`, when the slices that are being copied are done | nothing |
/// | cancel, runs | `Cancelled`, when the puts that were posted have completed and been flushed | nothing |
/// | cancel, landing and staged | `Cancelled`, when the target has dropped what it had not scattered, and said so | nothing |
/// | cancel, and the peer is silent | as a stopped peer's | as a stopped peer's |
/// | [`close`](Self::close) | `Endpoint` with `ERR_CANCELED`, at once | what was posted or filled, until the peer has read its end of the connection: half a second, if it runs |
/// | the peer is killed before or during | `Endpoint` or `Put`; [`Event::EndpointFailed`] once | nothing: its memory went with it, and copies into what is mapped here are over |
/// | the peer is killed after | `Ok`, which no later event takes back | nothing |
/// | the peer is stopped | direct: as ever. The others wait, and are whole if it goes on before [`stall_deadline`](crate::ContextOptions::stall_deadline); else `Endpoint` with `ERR_TIMED_OUT` | what had left this side, whenever the peer goes on |
/// | the target is unregistered | `Withdrawn`, if its memory is mapped here or the bytes take its inbox. No transport without hardware checks a key: a put by sockets writes what is still mapped, and to what is not it breaks the connection, or, before UCX 1.16, the target | with `Withdrawn` nothing, else what was posted |
/// | this process is killed | | at the target: what had left this side, until it has seen the connection break |
///
/// A peer that comes back has another address, epoch and cards. Connecting to it needs nothing to be restarted here: what
/// belongs to its earlier life stays dead ([`CommandError::NoEndpoint`], [`CommandError::Foreign`]), and a frame meant for
/// another epoch is dropped ([`Event::BadFrame`]).
#[derive(Debug)]
pub struct Worker {
    context: Context,
    address: Vec<u8>,
    epoch: u64,
    commands: Sender<Command>,
    wake: Arc<OwnedFd>,
    asleep: Arc<AtomicBool>,
    stopped: Receiver<()>,
}

impl Worker {
    /// Starts the thread. `epoch` names this life of the worker to its peers and must never be used again: take it from a
    /// random source.
    ///
    /// # Errors
    ///
    /// [`OpenError`]; no thread is left behind.
    pub fn start(context: &Context, epoch: u64) -> Result<(Self, Receiver<Event>), OpenError> {
        let (event_queue, events) = unbounded();
        Ok((Self::spawn(context, epoch, Listener::Queue(event_queue), bounded(COMMANDS_MAX))?, events))
    }

    /// As [`start`](Self::start), but `handler` is called with each event on the progress thread: nobody has to be woken to
    /// hear of it. It must not block, and may call everything here that does not wait for an answer. Commands are not
    /// bounded then, or a handler could wait for the thread that it is on: its owner bounds them.
    ///
    /// # Errors
    ///
    /// As [`start`](Self::start).
    pub fn start_with(
        context: &Context,
        epoch: u64,
        handler: impl FnMut(Event) + Send + 'static,
    ) -> Result<Self, OpenError> {
        Self::spawn(context, epoch, Listener::Handler(RefCell::new(Box::new(handler))), unbounded())
    }

    fn spawn(
        context: &Context,
        epoch: u64,
        listener: Listener,
        (commands, command_queue): (Sender<Command>, Receiver<Command>),
    ) -> Result<Self, OpenError> {
        let wake = Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map_err(io::Error::from)?);
        let (started, start) = bounded(1);
        let (stop, stopped) = bounded(0);
        let asleep = Arc::new(AtomicBool::new(false));
        let links = progress::Links { commands: command_queue, listener, wake: wake.clone(), asleep: asleep.clone() };
        let (context, its_context) = (context.clone(), context.clone());
        thread::Builder::new().name("kvferry-wire".to_owned()).spawn(move || {
            progress::run(its_context, epoch, links, &started);
            drop(stop); // the handle sees the channel disconnect
        })?;
        let address = start.recv().map_err(|_| io::Error::other("the progress thread ended at once"))??;
        Ok(Self { context, address, epoch, commands, wake, asleep, stopped })
    }

    /// What a peer needs to connect.
    #[must_use]
    pub fn address(&self) -> &[u8] {
        &self.address
    }

    /// This life of the worker.
    #[must_use]
    pub fn epoch(&self) -> u64 {
        self.epoch
    }

    /// Makes an endpoint to the worker of epoch `peer_epoch` at `address`. Returns before anything has been sent: that the
    /// peer is there shows in its first frame, that it is not in [`Event::EndpointFailed`].
    ///
    /// # Errors
    ///
    /// [`CommandError`]; no endpoint is left behind.
    pub fn connect(&self, address: &[u8], peer_epoch: u64) -> Result<EndpointId, CommandError> {
        let endpoint = EndpointId(next_id());
        let card = Box::new(WorkerCard::parse(address, self.context.ucx_version())?);
        let neighbour = self.look_for(&card);
        self.ask(|reply| Command::Connect { endpoint, card, neighbour, peer_epoch, reply })?;
        Ok(endpoint)
    }

    /// Makes a peer's region a target of transfers on `endpoint`. The key is released with the endpoint. With a GPU on this
    /// side, host memory of a peer on the same host is locked, for the GPU to write.
    ///
    /// # Errors
    ///
    /// [`CommandError`]: a claimed range that cannot be, no such endpoint, or a key that UCX cannot unpack.
    pub fn import(&self, endpoint: EndpointId, card: &RegionCard) -> Result<RemoteRegion, CommandError> {
        let key = KeyId(next_id());
        if card.key.is_empty() && card.kind() == MemoryKind::Host {
            return Err(CommandError::Key { source: Status::ERR_INVALID_PARAM });
        }
        let range = CommandError::Range { base: card.base, bytes: card.bytes };
        let region = RemoteRegion::new(endpoint, key, card).ok_or(range)?;
        let target = match &card.device {
            None => {
                let mapped = self.map(card.share.as_ref(), card.bytes);
                if let Some(mapped) = mapped.as_ref().filter(|_| self.context.options().populate) {
                    mapped.populate_aside();
                }
                let pinned = self.context.gpu().zip(mapped.clone());
                let pinned = pinned.map(|(gpu, mapped)| DeviceTarget::pin(gpu, mapped));
                Target::Host(mapped, pinned)
            }
            Some(device) => Target::Device(self.import_device(device, card.bytes).map(DeviceTarget::Gpu)),
        };
        self.ask(|reply| Command::Import { endpoint, key, card: card.clone(), target, reply })?;
        Ok(region)
    }

    /// What of a peer is on this host. The process is opened before its file is: if it has the file then, it is the one that
    /// was meant, and not another that got its number.
    fn look_for(&self, card: &WorkerCard) -> Neighbour {
        let Some((region, share)) = card.inbox.as_ref().and_then(|inbox| Some((&inbox.region, inbox.region.share?)))
        else {
            return Neighbour::default();
        };
        let process = Process::open(share.process());
        let inbox = Mapped::open(&share, region.bytes).map(Arc::new);
        // Whether it lives is worth knowing, also where the transports forbid to use its memory.
        let process = process.filter(|_| inbox.is_some());
        let slab = card.slab.as_ref().and_then(|card| {
            let device = card.region.device.as_deref().filter(|_| card.chunk_bytes > 0)?;
            let mapped = self.import_device(device, card.region.bytes).ok()?;
            Some(PeerSlab { card: card.clone(), mapped })
        });
        Neighbour { inbox: inbox.filter(|_| self.context.options().allows_shared_memory()), slab, process }
    }

    /// Maps memory of a peer, if it runs on this host and the transports do not forbid it.
    fn map(&self, share: Option<&ShareCard>, bytes: u64) -> Option<Arc<Mapped>> {
        let share = share.filter(|_| self.context.options().allows_shared_memory())?;
        Mapped::open(share, bytes).map(Arc::new)
    }

    /// Maps GPU memory of a peer, if this side has a GPU too.
    fn import_device(&self, device: &DeviceCard, bytes: u64) -> Result<Arc<Imported>, NotImported> {
        let gpu = self.context.gpu().ok_or(NotImported::NoGpu)?;
        let export = device.export.as_ref().filter(|_| self.context.options().allows_shared_memory());
        Imported::open(gpu, device.gpu, export.ok_or(NotImported::NotOffered)?, bytes)
    }

    /// Sends one frame. Frames of one endpoint arrive in order, but are not ordered against transfers: say that a transfer
    /// has arrived only after its [`Event::TransferDone`]. A frame for an endpoint that is gone is dropped.
    ///
    /// # Errors
    ///
    /// [`CommandError`]: payload over [`FRAME_PAYLOAD_BYTES_MAX`], or the worker has stopped.
    pub fn send(&self, endpoint: EndpointId, kind: u16, payload: Vec<u8>) -> Result<(), CommandError> {
        if payload.len() > FRAME_PAYLOAD_BYTES_MAX {
            return Err(CommandError::PayloadTooLong { bytes: payload.len() });
        }
        self.command(Command::Send { endpoint, kind, payload })
    }

    /// Checks `parts` against their regions and posts them. Nothing is posted unless all of it is in bounds. Ends with one
    /// [`Event::TransferDone`] that names `transfer`; an empty list ends well.
    ///
    /// # Errors
    ///
    /// [`TransferError`]; then nothing was posted and no event follows.
    pub fn put(&self, endpoint: EndpointId, transfer: TransferId, parts: Vec<Part>) -> Result<(), TransferError> {
        self.post(Direction::Put, endpoint, transfer, parts, None, None)
    }

    /// As [`put`](Self::put), and reads nothing before this side's GPU has reached `ready`: the caller need not wait for what
    /// writes the slots. For transfers from GPU memory; one between host memories does not look at it.
    ///
    /// # Errors
    ///
    /// [`TransferError`]; then nothing was posted and no event follows.
    pub fn put_when(
        &self,
        endpoint: EndpointId,
        transfer: TransferId,
        parts: Vec<Part>,
        ready: CudaEvent,
    ) -> Result<(), TransferError> {
        self.post(Direction::Put, endpoint, transfer, parts, None, Some(ready))
    }

    /// As [`put`](Self::put), the other way: copies each part's remote memory to its local memory. Reads what is there when
    /// it reads: have the peer say first that it is. The peer takes no part in it: its memory is mapped here
    /// ([`Route::Direct`](crate::Route::Direct)), or the kernel reads it ([`Route::Runs`](crate::Route::Runs) over cma, from
    /// UCX 1.16 on). Elsewhere the transfer ends with
    /// [`PutError::RouteUnavailable`](crate::PutError::RouteUnavailable), unless the options force `Runs`: over a network
    /// whose adapters read by themselves that is as good, over sockets and UCX's shared memory the peer answers each read,
    /// and UCX has been seen to abort it when the reader was killed meanwhile. GPU memory is pulled where it is
    /// mapped here.
    ///
    /// # Errors
    ///
    /// [`TransferError`]; then nothing was posted and no event follows.
    pub fn get(&self, endpoint: EndpointId, transfer: TransferId, parts: Vec<Part>) -> Result<(), TransferError> {
        self.post(Direction::Get, endpoint, transfer, parts, None, None)
    }

    /// As [`put`](Self::put), and sends a frame to the peer the moment that the transfer has ended well: sooner than its
    /// owner, who has yet to hear of it, could. No frame is sent of one that ended badly.
    ///
    /// # Errors
    ///
    /// [`TransferError`]; then nothing was posted and no event follows.
    pub fn put_then_send(
        &self,
        endpoint: EndpointId,
        transfer: TransferId,
        parts: Vec<Part>,
        kind: u16,
        payload: Vec<u8>,
    ) -> Result<(), TransferError> {
        if payload.len() > FRAME_PAYLOAD_BYTES_MAX {
            return Err(CommandError::PayloadTooLong { bytes: payload.len() }.into());
        }
        self.post(Direction::Put, endpoint, transfer, parts, Some(Notice { kind, payload }), None)
    }

    /// Checks what of `parts` does not depend on their slots, for [`put_prepared`](Self::put_prepared): parts that are given
    /// clones of one list of pairs take one set, whose pairs are not looked at. With many parts and few slots most of the time
    /// that a transfer takes is saved.
    ///
    /// # Errors
    ///
    /// [`TransferError`].
    pub fn prepare(&self, endpoint: EndpointId, parts: Vec<Part>) -> Result<Prepared, TransferError> {
        self.check_owners(endpoint, &parts)?;
        let prepared = Prepared::new(endpoint, parts)?;
        if prepared.uses_gpu() {
            self.lock_host_memory(prepared.locals());
        }
        Ok(prepared)
    }

    /// As [`put`](Self::put), or [`put_then_send`](Self::put_then_send) if there is a frame to be sent, of parts that were
    /// prepared: `sets` are the pairs of slots of each set, in the order in which the parts first named them.
    ///
    /// # Errors
    ///
    /// [`TransferError`]; then nothing was posted and no event follows.
    pub fn put_prepared(
        &self,
        transfer: TransferId,
        prepared: &Prepared,
        sets: Vec<Arc<[SlotPair]>>,
        frame: Option<(u16, Vec<u8>)>,
    ) -> Result<(), TransferError> {
        let notice = frame.map(|(kind, payload)| Notice { kind, payload });
        if let Some(notice) = notice.as_ref().filter(|notice| notice.payload.len() > FRAME_PAYLOAD_BYTES_MAX) {
            return Err(CommandError::PayloadTooLong { bytes: notice.payload.len() }.into());
        }
        let work = prepared.work(Direction::Put, sets)?;
        Ok(self.command(Command::Put(Posted { endpoint: prepared.endpoint, transfer, work, notice }))?)
    }

    fn check_owners(&self, endpoint: EndpointId, parts: &[Part]) -> Result<(), TransferError> {
        if let Some(part) = parts.iter().position(|part| part.remote.endpoint != endpoint) {
            return Err(TransferError::OtherEndpoint { part });
        }
        match parts.iter().position(|part| !self.context.owns(&part.local)) {
            Some(part) => Err(TransferError::OtherContext { part }),
            None => Ok(()),
        }
    }

    /// Host memory that a GPU is to read is locked here rather than on the progress thread. Refused, it shows there.
    fn lock_host_memory(&self, regions: &[Region]) {
        if let Some(gpu) = self.context.gpu() {
            for region in regions {
                let _ = region.device_address(gpu);
            }
        }
    }

    fn post(
        &self,
        direction: Direction,
        endpoint: EndpointId,
        transfer: TransferId,
        parts: Vec<Part>,
        notice: Option<Notice>,
        ready: Option<CudaEvent>,
    ) -> Result<(), TransferError> {
        self.check_owners(endpoint, &parts)?;
        let mut work = Work::check(direction, parts)?;
        work.ready = ready;
        if work.uses_gpu {
            self.lock_host_memory(&work.locals);
        }
        Ok(self.command(Command::Put(Posted { endpoint, transfer, work, notice }))?)
    }

    /// Gives up whatever is under way by the name of `transfer`. It ends with
    /// [`PutError::Cancelled`](crate::PutError::Cancelled) in place of its bytes, or with its own end if that comes first,
    /// once nothing of it can be written any more: see [`Worker`] for what that takes. A transfer that is not known, or has
    /// ended, is left alone.
    ///
    /// # Errors
    ///
    /// [`CommandError`] if the worker has stopped.
    pub fn cancel(&self, transfer: TransferId) -> Result<(), CommandError> {
        self.command(Command::Cancel { transfer })
    }

    /// The transports that UCX chose for the endpoint, once it stands; `None` before UCX 1.14, which does not say.
    ///
    /// # Errors
    ///
    /// [`CommandError`]: no such endpoint.
    pub fn lanes(&self, endpoint: EndpointId) -> Result<Option<Vec<Lane>>, CommandError> {
        self.ask(|reply| Command::Lanes { endpoint, reply })
    }

    /// Cuts the connection. Transfers in flight end with [`PutError::Endpoint`](crate::PutError::Endpoint); what they had
    /// posted may or may not have arrived. No [`Event::EndpointFailed`] follows.
    ///
    /// # Errors
    ///
    /// [`CommandError`] if the worker has stopped.
    pub fn close(&self, endpoint: EndpointId) -> Result<(), CommandError> {
        self.command(Command::Close { endpoint })
    }

    /// Sends a command that is answered, and waits for the answer.
    fn ask<T>(&self, command: impl FnOnce(Sender<Result<T, CommandError>>) -> Command) -> Result<T, CommandError> {
        let (reply, answer) = bounded(1);
        self.command(command(reply))?;
        answer.recv_timeout(COMMAND_DEADLINE).unwrap_or(Err(CommandError::Stuck(COMMAND_DEADLINE)))
    }

    fn command(&self, command: Command) -> Result<(), CommandError> {
        self.commands.send_timeout(command, COMMAND_DEADLINE).map_err(|error| match error {
            SendTimeoutError::Timeout(_) => CommandError::Stuck(COMMAND_DEADLINE),
            SendTimeoutError::Disconnected(_) => CommandError::Stopped,
        })?;
        progress::wake(&self.wake, &self.asleep);
        Ok(())
    }

    /// Stops the thread and waits until it has. What it held of its owner, the handler of events for one, is dropped with
    /// it. Everything after that is [`CommandError::Stopped`].
    pub fn stop(&self) {
        if self.command(Command::Stop).is_ok() {
            // Ends with the thread; past the deadline the thread is stuck inside UCX and is left to the process's end.
            if self.stopped.recv_timeout(COMMAND_DEADLINE) == Err(crossbeam::channel::RecvTimeoutError::Timeout) {
                tracing::error!("the progress thread did not stop");
            }
        }
    }
}

impl Drop for Worker {
    fn drop(&mut self) {
        self.stop();
    }
}

/// A number that names one endpoint or key of this process, so that one worker's is unknown to the others.
fn next_id() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    NEXT.fetch_add(1, Ordering::Relaxed) // only uniqueness is asked of it
}
