//! The handle that commands a worker and moves it along.

use std::cell::RefCell;
use std::io;
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::thread;
use std::time::{Duration, Instant};

use crossbeam::channel::{Receiver, RecvTimeoutError, SendTimeoutError, Sender, bounded, unbounded};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use ucx_sys::Status;

use crate::address::WorkerCard;
use crate::connection::{Neighbour, Target};
use crate::context::Context;
use crate::cuda::card::DeviceCard;
use crate::cuda::event::CudaEvent;
use crate::cuda::expand::UNIT_BYTES;
use crate::cuda::imported::{Imported, NotImported};
use crate::cuda::landing::PeerSlab;
use crate::cuda::target::DeviceTarget;
use crate::endpoint::{EndpointId, KeyId, Lane, RemoteRegion};
use crate::error::{CommandError, OpenError, TransferError};
use crate::event::{Event, STATS_BYTES_MAX, TransferId};
use crate::forked;
use crate::frame::FRAME_PAYLOAD_BYTES_MAX;
use crate::helm::{Helm, Restless};
use crate::listener::Listener;
use crate::permits::{Permit, Permits, Permitted};
use crate::pieces::SlotPair;
use crate::progress::{Command, Notice, Posted};
use crate::region::{MemoryKind, Region, RegionCard};
use crate::share::{Mapped, ShareCard};
use crate::transfer::{Direction, Part, Prepared, Work};

/// How long a command may take: it is a queue away from a thread that never blocks.
const COMMAND_DEADLINE: Duration = Duration::from_secs(10);

/// Bytes of a transfer that is carried out where it is posted, at most, if the progress thread sleeps.
const CARRIED_OUT_BYTES_MAX: u64 = 64 << 10;

/// How long a caller sleeps in the place of a progress thread at most, as the thread itself would.
const SLEEP_MAX: Duration = Duration::from_secs(1);

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
/// | the target [revokes](Self::revoke) what it belongs to, landing and staged | `Refused`, when the target has said so | nothing |
/// | cancel, and the peer is silent | as a stopped peer's | as a stopped peer's |
/// | [`close`](Self::close) | `Endpoint` with `ERR_CANCELED`, when what was posted has completed or half a second has passed | direct: nothing (`settled`). The others: what was posted or filled, until the peer has read its end of the connection: half a second, if it runs |
/// | what the peer answers through breaks | `Endpoint` with `ERR_CONNECTION_RESET`, once the peer has said so; `EndpointFailed` | as after `close` |
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
    /// Whether commands are carried out at once: else when the owner says so.
    prompt: bool,
    helm: Arc<Helm>,
    permits: Arc<Permits>,
    stopped: Receiver<()>,
}

impl Worker {
    /// Starts the thread. `epoch` names this life of the worker to its peers and must never be used again: take it from a
    /// random source. Events wait in memory until they are read; nothing else waits for that.
    ///
    /// # Errors
    ///
    /// [`OpenError`]; no thread is left behind.
    pub fn start(context: &Context, epoch: u64) -> Result<(Self, Receiver<Event>), OpenError> {
        let (event_queue, events) = unbounded();
        Ok((Self::spawn(context, epoch, Listener::Queue(event_queue), bounded(COMMANDS_MAX), true)?, events))
    }

    /// As [`start`](Self::start), but `handler` is called with each event where it happens, on the progress thread or on one
    /// that [makes progress](Self::progress) in its place: nobody has to be woken to hear of it. It must not block, and may call
    /// everything here that does not wait for an answer. Commands are not bounded then, or a handler could wait for the thread
    /// that it is on: its owner bounds them. Nor are they carried out before the owner, holding nothing that the handler waits
    /// for, calls [`carry_out`](Self::carry_out); those that a handler gives are, when it has returned.
    ///
    /// # Errors
    ///
    /// As [`start`](Self::start).
    pub fn start_with(
        context: &Context,
        epoch: u64,
        handler: impl FnMut(Event) + Send + 'static,
    ) -> Result<Self, OpenError> {
        Self::spawn(context, epoch, Listener::Handler(RefCell::new(Box::new(handler))), unbounded(), false)
    }

    fn spawn(
        context: &Context,
        epoch: u64,
        listener: Listener,
        (commands, command_queue): (Sender<Command>, Receiver<Command>),
        prompt: bool,
    ) -> Result<Self, OpenError> {
        forked::claim()?; // the context may be the parent's
        let helm = Arc::new(Helm::new(context, commands.clone())?);
        let (started, start) = bounded(1);
        let (stop, stopped) = bounded(0);
        let permits = Arc::new(Permits::default());
        let (its_context, its_helm, its_permits) = (context.clone(), helm.clone(), permits.clone());
        thread::Builder::new().name("kvferry-wire".to_owned()).spawn(move || {
            its_helm.run(its_context, epoch, (listener, command_queue, its_permits), &started);
            drop(stop); // the handle sees the channel disconnect
        })?;
        let address = start.recv().map_err(|_| io::Error::other("the progress thread ended at once"))??;
        Ok(Self { context: context.clone(), address, epoch, commands, prompt, helm, permits, stopped })
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
        let region = if matches!(target, Target::Host(Some(_), _)) { region.mapped() } else { region };
        self.ask(|reply| Command::Import { endpoint, key, card: card.clone(), target, reply })?;
        Ok(region)
    }

    /// What of a peer is on this host.
    fn look_for(&self, card: &WorkerCard) -> Neighbour {
        let Some((region, share)) = card.inbox.as_ref().and_then(|inbox| Some((&inbox.region, inbox.region.share?)))
        else {
            return Neighbour::default();
        };
        let process = share.owner();
        let inbox = Mapped::open(&share, region.bytes).map(Arc::new);
        // Whether it lives is worth knowing, also where the transports forbid to use its memory.
        let process = process.filter(|_| inbox.is_some());
        let slab = card.slab.as_ref().and_then(|card| {
            let device = card.region.device.as_deref().filter(|_| card.chunk_bytes > 0)?;
            let mapped = self.import_device(device, card.region.bytes).ok()?;
            // A kernel that wrote words to any other place would be the end of this side's context.
            mapped.base().is_multiple_of(UNIT_BYTES).then(|| PeerSlab { card: card.clone(), mapped })
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
        self.tell(Command::Send { endpoint, kind, payload })
    }

    /// Checks `parts` against their regions and posts them. Nothing is posted unless all of it is in bounds. Ends with one
    /// [`Event::TransferDone`] that names `transfer`; an empty list ends well.
    ///
    /// # Errors
    ///
    /// [`TransferError`]; then nothing was posted and no event follows.
    pub fn put(&self, endpoint: EndpointId, transfer: TransferId, parts: Vec<Part>) -> Result<(), TransferError> {
        self.post(Direction::Put, endpoint, transfer, parts, Extras::default())
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
        self.post(Direction::Put, endpoint, transfer, parts, Extras { ready: Some(ready), ..Extras::default() })
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
        self.post(Direction::Get, endpoint, transfer, parts, Extras::default())
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
        let notice = Some(Notice { kind, payload, with_stats: false });
        self.post(Direction::Put, endpoint, transfer, parts, Extras { notice, ..Extras::default() })
    }

    /// As [`put`](Self::put), of a transfer that says what it belongs to, which its target must have
    /// [let in](Self::permit) if it takes the inbox. [`Event::TakesInbox`] says that it does. With `report`, kind and payload, it
    /// ends as by [`put_then_send`](Self::put_then_send), with the transfer's statistics behind the payload: what
    /// [`TransferStats::from_bytes`](crate::TransferStats::from_bytes) reads.
    ///
    /// # Errors
    ///
    /// [`TransferError`]; then nothing was posted and no event follows.
    pub fn put_permitted(
        &self,
        endpoint: EndpointId,
        transfer: TransferId,
        parts: Vec<Part>,
        permitted: Permitted,
        report: Option<(u16, Vec<u8>)>,
    ) -> Result<(), TransferError> {
        let notice = report.map(|(kind, payload)| Notice { kind, payload, with_stats: true });
        let extras = Extras { notice, permitted: Some(permitted), ..Extras::default() };
        self.post(Direction::Put, endpoint, transfer, parts, extras)
    }

    /// Lets transfers of the worker of epoch `peer_epoch` in through the inbox that say that they belong to `permit`. Those
    /// that say nothing are always let in.
    pub fn permit(&self, peer_epoch: u64, permit: Permit) {
        self.permits.open(peer_epoch, permit);
    }

    /// Closes a permit of which nothing is under way.
    pub fn expire(&self, peer_epoch: u64, permit: Permit) {
        self.permits.close(peer_epoch, permit);
    }

    /// Closes a permit, of which anything may be under way: nothing that belongs to it is let in through the inbox, or
    /// scattered from there, after the [`Event::Revoked`] that answers this. The peer is not waited for: it may be frozen. It
    /// finds [`Refusal::Revoked`](crate::Refusal::Revoked). What does not take the inbox is not stopped by this.
    ///
    /// # Errors
    ///
    /// [`CommandError`] if the worker has stopped.
    pub fn revoke(&self, peer_epoch: u64, permit: Permit) -> Result<(), CommandError> {
        self.permits.close(peer_epoch, permit);
        self.tell(Command::Revoke { epoch: peer_epoch, permit })
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
        let notice = frame.map(|(kind, payload)| Notice { kind, payload, with_stats: false });
        self.post_prepared(transfer, prepared, sets, notice, None)
    }

    /// As [`put_permitted`](Self::put_permitted), of parts that were prepared: see [`put_prepared`](Self::put_prepared).
    ///
    /// # Errors
    ///
    /// [`TransferError`]; then nothing was posted and no event follows.
    pub fn put_prepared_permitted(
        &self,
        transfer: TransferId,
        prepared: &Prepared,
        sets: Vec<Arc<[SlotPair]>>,
        permitted: Permitted,
        report: Option<(u16, Vec<u8>)>,
    ) -> Result<(), TransferError> {
        let notice = report.map(|(kind, payload)| Notice { kind, payload, with_stats: true });
        self.post_prepared(transfer, prepared, sets, notice, Some(permitted))
    }

    fn post_prepared(
        &self,
        transfer: TransferId,
        prepared: &Prepared,
        sets: Vec<Arc<[SlotPair]>>,
        notice: Option<Notice>,
        permitted: Option<Permitted>,
    ) -> Result<(), TransferError> {
        if let Some(notice) = &notice {
            notice.check()?;
        }
        let mut work = prepared.work(Direction::Put, sets)?;
        work.permitted = permitted;
        Ok(self.hand_over(Posted { endpoint: prepared.endpoint, transfer, work, notice })?)
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
        Extras { notice, ready, permitted }: Extras,
    ) -> Result<(), TransferError> {
        if let Some(notice) = &notice {
            notice.check()?;
        }
        self.check_owners(endpoint, &parts)?;
        let mut work = Work::check(direction, parts)?;
        (work.ready, work.permitted) = (ready, permitted);
        if work.uses_gpu {
            self.lock_host_memory(&work.locals);
        }
        Ok(self.hand_over(Posted { endpoint, transfer, work, notice })?)
    }

    fn hand_over(&self, posted: Posted) -> Result<(), CommandError> {
        let large = posted.work.size.bytes > CARRIED_OUT_BYTES_MAX;
        self.command(Command::Put(posted))?;
        if large {
            self.helm.take_over();
        } else if self.prompt {
            self.helm.nudge();
        }
        Ok(())
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
        self.tell(Command::Cancel { transfer })
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
        self.tell(Command::Close { endpoint })
    }

    /// Sends a command that is answered, and waits for the answer.
    fn ask<T>(&self, command: impl FnOnce(Sender<Result<T, CommandError>>) -> Command) -> Result<T, CommandError> {
        let (reply, answer) = bounded(1);
        self.command(command(reply))?;
        self.helm.nudge();
        answer.recv_timeout(COMMAND_DEADLINE).unwrap_or_else(|error| match error {
            RecvTimeoutError::Timeout => Err(CommandError::Stuck(COMMAND_DEADLINE)),
            RecvTimeoutError::Disconnected => Err(CommandError::Stopped),
        })
    }

    /// Sends a small command.
    fn tell(&self, command: Command) -> Result<(), CommandError> {
        self.command(command)?;
        if self.prompt {
            self.helm.nudge();
        }
        Ok(())
    }

    fn command(&self, command: Command) -> Result<(), CommandError> {
        self.commands.send_timeout(command, COMMAND_DEADLINE).map_err(|error| match error {
            SendTimeoutError::Timeout(_) => CommandError::Stuck(COMMAND_DEADLINE),
            SendTimeoutError::Disconnected(_) => CommandError::Stopped,
        })
    }

    /// Has what was commanded carried out: on this thread if the progress thread sleeps or [rests](Self::progress), which takes
    /// microseconds, as putting more than 64 KiB is left to the progress thread. For the owner of a handler, see
    /// [`start_with`](Self::start_with); without one every command does this by itself.
    pub fn carry_out(&self) {
        self.helm.nudge();
    }

    /// Moves the worker along, on this thread, for a moment: for a caller that looks for events again and again. While it does,
    /// with nothing else between, the progress thread rests, so that the two do not get in each other's way; it is back a tenth
    /// of a millisecond after this was last called, and at once when there is more to put than 64 KiB. Where progress threads
    /// are kept on processors of their own, this does nothing.
    ///
    /// Returns whether anything moved.
    pub fn progress(&self) -> bool {
        self.helm.turn().is_some_and(|turned| turned.busy)
    }

    /// Wakes a caller that [sleeps](drive) in the progress thread's place, for it to look again at what it waits for.
    pub fn interrupt(&self) {
        self.helm.interrupt();
    }

    /// As [`drive`], for this worker alone.
    pub fn drive<T>(&self, deadline: Instant, done: impl FnMut() -> Option<T>) -> Option<T> {
        drive(std::slice::from_ref(self), deadline, done)
    }

    /// Stops the thread and waits until it has. What it held of its owner, the handler of events for one, is dropped with
    /// it. Everything after that is [`CommandError::Stopped`].
    pub fn stop(&self) {
        if self.command(Command::Stop).is_ok() {
            self.helm.take_over();
            // Ends with the thread; past the deadline the thread is stuck inside UCX and is left to the process's end.
            if self.stopped.recv_timeout(COMMAND_DEADLINE) == Err(RecvTimeoutError::Timeout) {
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

impl Notice {
    /// Whether it fits a frame, with what goes behind it.
    fn check(&self) -> Result<(), CommandError> {
        let behind = if self.with_stats { STATS_BYTES_MAX } else { 0 };
        let bytes = self.payload.len();
        if bytes > FRAME_PAYLOAD_BYTES_MAX - behind { Err(CommandError::PayloadTooLong { bytes }) } else { Ok(()) }
    }
}

/// What a transfer may have besides its parts.
#[derive(Default)]
struct Extras {
    notice: Option<Notice>,
    ready: Option<CudaEvent>,
    permitted: Option<Permitted>,
}

/// Moves workers along in the place of their progress threads until `done` returns something. For a caller that would otherwise
/// sleep until then: a message that it waits for wakes it at once, and not the progress thread first. It sleeps when nothing is in
/// flight and nothing has moved for as long as the progress threads [linger](crate::ContextOptions::linger). Whoever brings
/// about what `done` looks at without one of the workers calls [`Worker::interrupt`] then.
///
/// `None` at `deadline`, or if the progress threads' place is taken or not to be had: then it is time to wait in another way,
/// until whatever `done` looks at is said by whoever moves the workers along.
pub fn drive<T>(workers: &[Worker], deadline: Instant, mut done: impl FnMut() -> Option<T>) -> Option<T> {
    let linger = workers.first().map(|worker| worker.context.options().linger)?;
    let (mut moved, mut slept, mut more) = (Instant::now(), false, vec![false; workers.len()]);
    let found = loop {
        if let Some(found) = done() {
            break Some(found);
        }
        let (mut busy, mut alone) = (false, true);
        for (worker, more) in workers.iter().zip(&mut more) {
            let turned = worker.helm.turn();
            busy |= turned.is_some_and(|turned| turned.busy);
            alone &= turned.is_some();
            *more = turned.is_some_and(|turned| turned.more);
        }
        let now = Instant::now();
        if now >= deadline {
            break None;
        } else if busy {
            moved = now;
        } else if now.saturating_duration_since(moved) < linger || (alone && more.contains(&true)) {
            thread::yield_now(); // the other end may share this core
        } else if !alone {
            break None;
        } else {
            let found = sleep(workers, deadline, &mut done);
            (moved, slept) = (Instant::now(), true);
            match found {
                Ok(None) | Err(Restless::Busy) => {}
                Ok(found) => break found,
                Err(Restless::Taken) => break None,
            }
        }
    };
    for (worker, more) in workers.iter().zip(more) {
        let left = found.is_none() || (more && worker.helm.finish());
        worker.helm.leave(left, slept);
    }
    found
}

/// Sleeps in the place of the workers' threads, and looks whether what is waited for has happened before it did.
fn sleep<T>(
    workers: &[Worker],
    deadline: Instant,
    done: &mut impl FnMut() -> Option<T>,
) -> Result<Option<T>, Restless> {
    let mut wakers = Vec::new();
    let (mut asleep, mut restless) = (0, None);
    for worker in workers {
        match worker.helm.lie_down() {
            Ok(its) => wakers.extend(its),
            Err(why) => {
                restless = Some(why);
                break;
            }
        }
        asleep += 1;
    }
    let found = match restless {
        None => Ok(done()),
        Some(why) => Err(why),
    };
    if let Ok(None) = found {
        let fds = wakers.iter().map(|waker| PollFd::new(waker, PollFlags::IN));
        let left = deadline.saturating_duration_since(Instant::now()).min(SLEEP_MAX);
        let _ = poll(&mut fds.collect::<Vec<_>>(), Timespec::try_from(left).ok().as_ref()); // interrupted is as good as woken
    }
    workers.iter().take(asleep).for_each(|worker| worker.helm.get_up());
    found
}

/// A number that names one endpoint or key of this process, so that one worker's is unknown to the others.
fn next_id() -> u64 {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    NEXT.fetch_add(1, Ordering::Relaxed) // only uniqueness is asked of it
}
