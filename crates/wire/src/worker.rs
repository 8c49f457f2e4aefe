//! A progress thread and the handle that commands it.

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
use crate::process::Process;
use crate::progress::{self, Command, Notice, Posted};
use crate::region::{MemoryKind, RegionCard};
use crate::share::{Mapped, ShareCard};
use crate::transfer::{Part, Work};

/// How long a command may take: it is a queue away from a thread that never blocks.
const COMMAND_DEADLINE: Duration = Duration::from_secs(10);

/// Commands that may wait for the progress thread.
const COMMANDS_MAX: usize = 1024;

/// A UCX worker on a thread of its own. Callers from any thread send it commands; it answers with [`Event`]s.
///
/// Dropping it tells it to stop: frames already given to it are flushed for up to a second, what has not completed by then is
/// cut off.
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
        let wake = Arc::new(eventfd(0, EventfdFlags::CLOEXEC | EventfdFlags::NONBLOCK).map_err(io::Error::from)?);
        let (commands, command_queue) = bounded(COMMANDS_MAX);
        let (event_queue, events) = unbounded();
        let (started, start) = bounded(1);
        let (stop, stopped) = bounded(0);
        let asleep = Arc::new(AtomicBool::new(false));
        let links = progress::Links {
            commands: command_queue,
            events: event_queue,
            wake: wake.clone(),
            asleep: asleep.clone(),
        };
        let (context, its_context) = (context.clone(), context.clone());
        thread::Builder::new().name("kvferry-wire".to_owned()).spawn(move || {
            progress::run(its_context, epoch, links, &started);
            drop(stop); // the handle sees the channel disconnect
        })?;
        let address = start.recv().map_err(|_| io::Error::other("the progress thread ended at once"))??;
        Ok((Self { context, address, epoch, commands, wake, asleep, stopped }, events))
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
        let inbox = self.map(Some(&share), region.bytes);
        let process = process.filter(|_| inbox.is_some());
        let slab = card.slab.as_ref().and_then(|card| {
            let device = card.region.device.as_ref().filter(|_| card.chunk_bytes > 0)?;
            let mapped = self.import_device(device, card.region.bytes).ok()?;
            Some(PeerSlab { card: card.clone(), mapped })
        });
        Neighbour { inbox, slab, process }
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
        self.post(endpoint, transfer, parts, None, None)
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
        self.post(endpoint, transfer, parts, None, Some(ready))
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
        self.post(endpoint, transfer, parts, Some(Notice { kind, payload }), None)
    }

    fn post(
        &self,
        endpoint: EndpointId,
        transfer: TransferId,
        parts: Vec<Part>,
        notice: Option<Notice>,
        ready: Option<CudaEvent>,
    ) -> Result<(), TransferError> {
        if let Some(part) = parts.iter().position(|part| part.remote.endpoint != endpoint) {
            return Err(TransferError::OtherEndpoint { part });
        }
        if let Some(part) = parts.iter().position(|part| !self.context.owns(&part.local)) {
            return Err(TransferError::OtherContext { part });
        }
        let mut work = Work::check(parts)?;
        work.ready = ready;
        if let Some(gpu) = self.context.gpu().filter(|_| work.uses_gpu()) {
            // Host memory that a GPU is to read is locked here rather than on the progress thread. Refused, it shows there.
            for local in &work.locals {
                let _ = local.device_address(gpu);
            }
        }
        Ok(self.command(Command::Put(Posted { endpoint, transfer, work, notice }))?)
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
}

impl Drop for Worker {
    fn drop(&mut self) {
        if self.command(Command::Stop).is_ok() {
            // Ends with the thread; past the deadline the thread is stuck inside UCX and is left to the process's end.
            if self.stopped.recv_timeout(COMMAND_DEADLINE) == Err(crossbeam::channel::RecvTimeoutError::Timeout) {
                tracing::error!("the progress thread did not stop");
            }
        }
    }
}

/// A number that names one endpoint or key of this process, so that one worker's is unknown to the others.
fn next_id() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    NEXT.fetch_add(1, Ordering::Relaxed) // only uniqueness is asked of it
}
