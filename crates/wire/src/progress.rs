//! What a worker does: takes commands, moves transfers and UCX along, serves the inbox, a turn at a time.

use std::cell::Cell;
use std::collections::{BTreeMap, BTreeSet};
use std::os::fd::OwnedFd;
use std::rc::Rc;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use crossbeam::channel::{Receiver, Sender as Channel, never};
use rustix::thread::CpuSet;
use ucx_sys::Status;

use crate::address::WorkerCard;
use crate::connection::{Closed, Connection, Leaving, Neighbour, Target};
use crate::context::Context;
use crate::cuda::driver::CudaOpenError;
use crate::cuda::route::Carriers;
use crate::direct::Copiers;
use crate::endpoint::{EndpointId, KeyId, Lane};
use crate::endpoints::Endpoints;
use crate::error::{CommandError, OpenError};
use crate::event::{Event, TransferId};
use crate::frame::{self, Audience, Frame, FrameError};
use crate::frames::arriving::Arriving;
use crate::frames::incoming::{Rings, Turn};
use crate::frames::outgoing::{Outgoing, Sender};
use crate::frames::ring::Damaged;
use crate::inbox::message::{Body, Message, StreamId};
use crate::inbox::outbox::Outbox;
use crate::inbox::target::Peer;
use crate::inflight::{InFlight, Means};
use crate::listener::Listener;
use crate::permits::{Permit, Permits};
use crate::process::Process;
use crate::raw::{Closing, RawEndpoint, RawWorker};
use crate::region::RegionCard;
use crate::service::Service;
use crate::stage::stage;
use crate::transfer::Work;

/// Commands taken between two looks at UCX.
const COMMANDS_PER_TURN: usize = 64;

/// Progress calls between two looks at the commands.
const PROGRESS_PER_TURN: usize = 64;

/// Turns in which UCX is not looked at, one after the other.
const PASSED_OVER_MAX: u32 = 8;

/// Messages, of UCX and of rings each, taken between two looks at the commands.
const MESSAGES_PER_TURN: usize = 1 << 10;

/// Between two times that a busy thread asks the kernel whether its peers live. A sleeping one is woken.
const LOOK_INTERVAL: Duration = Duration::from_millis(1);

/// Looks for transfers that do not move, within the time that they may take for it.
const STALL_LOOKS: u32 = 100;

/// How long a stopping worker flushes and closes, each.
const STOP_DEADLINE: Duration = Duration::from_secs(1);

/// What a caller asks of the thread.
pub(crate) enum Command {
    Connect {
        endpoint: EndpointId,
        card: Box<WorkerCard>,
        neighbour: Neighbour,
        peer_epoch: u64,
        reply: Channel<Result<(), CommandError>>,
    },
    Import {
        endpoint: EndpointId,
        key: KeyId,
        card: RegionCard,
        target: Target,
        reply: Channel<Result<(), CommandError>>,
    },
    Send {
        endpoint: EndpointId,
        kind: u16,
        payload: Vec<u8>,
    },
    Put(Posted),
    Cancel {
        transfer: TransferId,
    },
    Revoke {
        epoch: u64,
        permit: Permit,
    },
    Lanes {
        endpoint: EndpointId,
        reply: Channel<Result<Option<Vec<Lane>>, CommandError>>,
    },
    Close {
        endpoint: EndpointId,
    },
    Stop,
}

/// A checked transfer.
pub(crate) struct Posted {
    pub(crate) endpoint: EndpointId,
    pub(crate) transfer: TransferId,
    pub(crate) work: Work,
    pub(crate) notice: Option<Notice>,
}

/// A frame that is sent when a transfer has ended well.
pub(crate) struct Notice {
    pub(crate) kind: u16,
    pub(crate) payload: Vec<u8>,
    /// The transfer's statistics go at the end of the payload.
    pub(crate) with_stats: bool,
}

pub(crate) struct Progress {
    context: Context,
    epoch: u64,
    /// This worker's address, as it is given to inboxes that are to answer.
    address: Vec<u8>,
    commands: Receiver<Command>,
    listener: Listener,
    /// What UCX wakes with.
    event_fd: Arc<OwnedFd>,
    endpoints: Rc<Endpoints>,
    connections: BTreeMap<EndpointId, Connection>,
    /// Connections that were ever made.
    connected: u64,
    leaving: Vec<Leaving>,
    closing: Vec<(Closed, Closing)>,
    /// Processes of peers whose connections have failed, until they have ended.
    watched: Vec<Watched>,
    transfers: Vec<(InFlight, Option<Notice>)>,
    next_stream: u64,
    outbox: Outbox,
    copiers: Copiers,
    gpu: Option<Carriers>,
    service: Service,
    arriving: Arriving,
    rings: Rings,
    /// Frames that UCX has accepted and not sent, or that wait for room in a ring.
    unsent: Rc<Cell<u64>>,
    running: bool,
    /// A peer has rung for who sleeps.
    rung: bool,
    /// Turns in which UCX was not looked at, one after the other.
    passed_over: u32,
    /// When the kernel was last asked for the peers on this host.
    looked: Instant,
    looked_for_stalled: Instant,
    worker: Rc<RawWorker>, // last: everything above is UCX's
}

// SAFETY: the counts that are not atomic, and UCX's handles, are all reached from here or from what UCX has been given, whose
// callbacks run inside of its calls, all of which are made from here; nothing that this gives away (events, replies) has any of
// them. So whoever has this is alone with them, on whatever thread: UCX was told so (`UCS_THREAD_MODE_SERIALIZED`), and the
// driver of a GPU is entered anew for each call.
#[allow(unsafe_code, reason = "moves from thread to thread as a whole")]
unsafe impl Send for Progress {}

impl Progress {
    /// To be called on the worker's own thread, which is kept on a processor here if the options say so.
    pub(crate) fn start(
        context: Context,
        epoch: u64,
        commands: Receiver<Command>,
        listener: Listener,
        permits: Arc<Permits>,
    ) -> Result<(Self, Vec<u8>), OpenError> {
        // Before this thread is pinned, which they would be with it.
        let copiers = Copiers::start(context.options().copy_threads.saturating_sub(1))?;
        if let Some(cpu) = context.next_cpu() {
            pin(cpu)?;
        }
        let worker = RawWorker::create(context.clone())?;
        let event_fd = Arc::new(worker.event_fd()?.try_clone_to_owned()?);
        let gpu = context.gpu().map(Carriers::start).transpose().map_err(CudaOpenError::from)?;
        let endpoints = Rc::new(Endpoints::new(worker.clone()));
        let service = Service::new(&context, &endpoints, gpu.as_ref().map(Carriers::incoming), permits)?;
        let (inbox, slab) = (service.inbox_card(), service.slab_card());
        let address = WorkerCard::new(context.ucx_version(), worker.address()?, inbox, slab).to_bytes();
        let rings = Rings::new(context.options().stall_deadline);
        let progress = Self {
            context,
            epoch,
            address: address.clone(),
            commands,
            listener,
            event_fd,
            endpoints,
            connections: BTreeMap::new(),
            connected: 0,
            leaving: Vec::new(),
            closing: Vec::new(),
            watched: Vec::new(),
            transfers: Vec::new(),
            next_stream: 0,
            outbox: Outbox::default(),
            copiers,
            gpu,
            service,
            arriving: Arriving::default(),
            rings,
            unsent: Rc::new(Cell::new(0)),
            running: true,
            rung: false,
            passed_over: 0,
            looked: Instant::now(),
            looked_for_stalled: Instant::now(),
            worker,
        };
        Ok((progress, address))
    }

    /// Whether it has not been told to stop.
    pub(crate) fn is_running(&self) -> bool {
        self.running
    }

    /// Makes UCX wake who sleeps on [`wakers`](Self::wakers). `false` if there is something to do first.
    pub(crate) fn arm(&mut self) -> bool {
        self.rings.arm() && self.worker.arm()
    }

    /// Nobody sleeps, or is going to without another [`arm`](Self::arm).
    pub(crate) fn disarm(&self) {
        self.rings.disarm();
    }

    /// What becomes readable when there is something to do: UCX's descriptor, and the peers' processes.
    pub(crate) fn wakers(&self) -> Vec<Arc<OwnedFd>> {
        let processes = self.connections.values().filter_map(Connection::process);
        let processes = processes.chain(self.watched.iter().map(|watched| &watched.process)).map(Process::descriptor);
        [&self.event_fd].into_iter().chain(processes).cloned().collect()
    }

    /// Whether a peer has rung since the last call. It does so once for each [`arm`](Self::arm): who sleeps has to hear of it from who
    /// has taken the message.
    pub(crate) fn take_rung(&mut self) -> bool {
        std::mem::take(&mut self.rung)
    }

    /// Connections that were ever made: with each there may be a process to look after.
    pub(crate) fn connected(&self) -> u64 {
        self.connected
    }

    /// Lets go of the owner, and leaves everything else to the end of the process.
    pub(crate) fn abandon(mut self) {
        // Nothing more happens: what these hold can go, and whoever commands hears of it.
        (self.listener, self.commands) = (Listener::Gone, never());
        let _abandoned = std::mem::ManuallyDrop::new(self);
    }

    /// Nothing is in flight, so nothing is lost by sleeping until UCX or a caller has something: the rest of a message, say.
    pub(crate) fn is_idle(&self) -> bool {
        let gone = self.leaving.is_empty() && self.closing.is_empty();
        gone && !self.service.is_scattering()
            && self.transfers.is_empty()
            && self.unsent.get() == 0
            && !self.worker.has_sent()
    }

    /// Has UCX wake who lay down earlier for what others have sent meanwhile, too. `false` if there is something to do first.
    pub(crate) fn arm_for_sent(&self) -> bool {
        self.worker.arm_for_sent()
    }

    /// Does a bounded amount of everything. Returns whether anything moved.
    pub(crate) fn turn(&mut self) -> bool {
        let mut busy = false;
        for _ in 0..COMMANDS_PER_TURN {
            let Ok(command) = self.commands.try_recv() else { break };
            self.carry_out(command);
            busy = true;
        }
        busy |= self.take_from_rings();
        // Where nothing waits for UCX, what has come or gone by a ring does not either: a look at its sockets is a system call.
        if busy && self.is_idle() && self.passed_over < PASSED_OVER_MAX {
            self.passed_over += 1;
        } else {
            self.passed_over = 0;
            for _ in 0..PROGRESS_PER_TURN {
                if !self.worker.progress() {
                    break;
                }
                busy = true;
            }
        }
        self.close_failed();
        busy |= self.take_messages();
        busy |= self.step_transfers();
        let sender = Sender { epoch: self.epoch, address: &self.address, unsent: &self.unsent };
        busy |= self.service.step(&sender);
        if self.unsent.get() > 0 {
            for connection in self.connections.values_mut() {
                busy |= connection.pass_waiting(&sender);
            }
            for leaving in &mut self.leaving {
                busy |= leaving.pass_waiting(&sender);
            }
            busy |= self.service.pass_waiting(&sender);
        }
        self.cut_left();
        self.reap_closed();
        if !busy && !self.watched.is_empty() {
            busy = self.report_deaths();
        }
        busy
    }

    fn carry_out(&mut self, command: Command) {
        let sender = Sender { epoch: self.epoch, address: &self.address, unsent: &self.unsent };
        match command {
            Command::Connect { endpoint, card, neighbour, peer_epoch, reply } => {
                match Connection::open(&self.endpoints, &self.context, endpoint, *card, neighbour, peer_epoch) {
                    // A caller that has given up would not know of it.
                    Ok(connection) if reply.send(Ok(())).is_err() => {
                        self.leaving.push(connection.leave(Status::ERR_CANCELED))
                    }
                    Ok(connection) => {
                        self.connected += 1;
                        self.connections.insert(endpoint, connection);
                    }
                    Err(error) => drop(reply.send(Err(error))),
                }
            }
            Command::Import { endpoint, key, card, target, reply } => {
                let imported = match self.connections.get_mut(&endpoint) {
                    Some(connection) => connection.import(key, &card, target),
                    None => Err(CommandError::NoEndpoint),
                };
                let _ = reply.send(imported); // the caller may have given up
            }
            Command::Send { endpoint, kind, payload } => {
                if let Some(connection) = self.connections.get_mut(&endpoint) {
                    connection.send(&sender, kind, &payload);
                    stage!("frame sent");
                }
            }
            Command::Put(Posted { endpoint, transfer, work, notice }) => {
                stage!("taken");
                let stream = StreamId(self.next_stream);
                self.next_stream += 1;
                let connection = self.connections.get_mut(&endpoint);
                let means = Means { context: &self.context, copiers: &self.copiers, gpu: self.gpu.as_ref() };
                let permitted = work.permitted.is_some();
                let in_flight = InFlight::new(endpoint, transfer, work, &means, connection, stream);
                let takes_inbox = permitted && in_flight.stream().is_some();
                self.transfers.push((in_flight, notice));
                if takes_inbox {
                    self.tell(Event::TakesInbox { transfer });
                }
                stage!("started");
            }
            Command::Cancel { transfer } => {
                let named = self.transfers.iter_mut().map(|(in_flight, _)| in_flight);
                named.filter(|in_flight| in_flight.transfer == transfer).for_each(InFlight::cancel);
            }
            Command::Revoke { epoch, permit } => {
                self.service.revoke(epoch, permit);
                self.tell(Event::Revoked { epoch, permit });
            }
            Command::Lanes { endpoint, reply } => {
                let connection = self.connections.get(&endpoint).ok_or(CommandError::NoEndpoint);
                let _ = reply.send(connection.map(|connection| connection.raw.lanes())); // as above
            }
            Command::Close { endpoint } => {
                self.watched.retain(|watched| watched.endpoint != endpoint);
                if let Some(connection) = self.connections.remove(&endpoint) {
                    self.leaving.push(connection.leave(Status::ERR_CANCELED));
                }
            }
            Command::Stop => self.running = false,
        }
    }

    /// Endpoints that UCX, or the kernel, has reported as failed are closed by force, which ends what is posted on them.
    fn close_failed(&mut self) {
        let look = self.looked.elapsed() >= LOOK_INTERVAL;
        if look {
            self.looked = Instant::now();
            self.service.recover();
            self.close_spare(self.endpoints.take_failed());
            self.rings.look(self.looked);
        }
        let failed = self.connections.iter().map(|(id, connection)| (*id, connection.failure(look)));
        for (id, status) in failed.filter(|(_, status)| *status != Status::OK).collect::<Vec<_>>() {
            if let Some(connection) = self.connections.remove(&id) {
                self.fail(connection, status);
            }
        }
        for (peer, raw) in self.service.take_failed() {
            self.tell_unanswered(peer, raw.address());
            self.closing.push((Closed::Answer(peer), raw.close(true)));
        }
    }

    /// A source that is not answered any more would not know. It is told on a connection that this side has made to it, if there
    /// is one that has not failed as well, or through an endpoint for that alone, if it is known to live.
    fn tell_unanswered(&mut self, peer: Peer, address: &[u8]) {
        let sender = Sender { epoch: self.epoch, address: &self.address, unsent: &self.unsent };
        let message = Message { connection: peer.connection, body: Body::Unanswered };
        let mut to_peer = self.connections.values_mut().filter(|connection| connection.peer_epoch == peer.epoch);
        if let Some(own) = to_peer.find(|connection| connection.failure(true) == Status::OK) {
            own.pass_on(&sender, &message);
        } else if self.service.is_doubtful(peer)
            && let Ok(endpoint) = self.endpoints.connect_anew(address)
        {
            Outgoing::new(0).say(&endpoint, &sender, peer.epoch, &message);
            self.keep(endpoint);
        }
    }

    fn fail(&mut self, connection: Connection, status: Status) {
        let (endpoint, epoch) = (connection.id, connection.peer_epoch);
        self.watch(endpoint, epoch, connection.process, connection.raw.address());
        self.closing.push((Closed::Caller(endpoint, status), connection.raw.close(true)));
        self.tell(Event::EndpointFailed { endpoint, status });
    }

    /// The connection to a peer has failed.
    fn watch(&mut self, endpoint: EndpointId, epoch: u64, process: Option<Process>, address: &[u8]) {
        self.endpoints.doubt(address);
        let watched = |process| Watched { endpoint, epoch, process, address: address.into(), dead: false };
        self.watched.extend(process.map(watched));
    }

    /// Says which peers are dead for certain. Called when a look at UCX has found nothing more to take in: the kernel has
    /// closed a dead process's sockets before it says that it is dead, so whatever one that was dead before that look had sent to
    /// here has been taken in. What it had filled of the inbox and nobody has scattered yet is dropped first. Returns whether there
    /// are any that were alive then.
    fn report_deaths(&mut self) -> bool {
        for Watched { epoch, .. } in self.watched.iter().filter(|watched| watched.dead) {
            let answers = self.service.take_of(*epoch).into_iter();
            self.closing.extend(answers.map(|(peer, raw)| (Closed::Answer(peer), raw.close(true))));
        }
        let (closing, service, rings) = (&self.closing, &self.service, &mut self.rings);
        let over = |watched: &mut Watched| {
            let answers =
                |(whose, _): &(Closed, Closing)| matches!(whose, Closed::Answer(peer) if peer.epoch == watched.epoch);
            watched.dead
                && rings.is_drained(watched.epoch)
                && !closing.iter().any(answers)
                && !service.knows(watched.epoch)
        };
        let dead: Vec<Watched> = self.watched.extract_if(.., over).collect();
        for Watched { endpoint, epoch, address, .. } in dead {
            self.close_spare(self.endpoints.take_of(&address));
            self.rings.close_of(epoch);
            self.arriving.give_up(epoch);
            self.tell(Event::PeerDied { endpoint });
        }
        let alive = self.watched.iter_mut().filter(|watched| !watched.dead);
        let mut died = false;
        for watched in alive.filter(|watched| watched.process.has_ended()) {
            (watched.dead, died) = (true, true);
        }
        died
    }

    fn step_transfers(&mut self) -> bool {
        if self.transfers.is_empty() {
            return false;
        }
        let mut busy = false;
        let mut index = 0;
        while index < self.transfers.len() {
            let (transfer, _) = &mut self.transfers[index];
            let connection = match self.connections.get_mut(&transfer.endpoint) {
                Some(connection) => Ok(connection),
                None => Err(closed_because(&self.leaving, &self.closing, transfer.endpoint)),
            };
            let before = transfer.moved_bytes();
            let sender = Sender { epoch: self.epoch, address: &self.address, unsent: &self.unsent };
            let ended = transfer.step(connection, &self.context, &sender, &mut self.outbox);
            busy |= transfer.moved_bytes() > before || ended.is_some();
            if let Some(bytes) = transfer.progress_to_tell() {
                self.listener.tell(Event::Progress { transfer: transfer.transfer, bytes });
            }
            match ended {
                Some(result) => {
                    stage!("ended");
                    let (ended, notice) = self.transfers.swap_remove(index);
                    if let (Some(Notice { kind, payload, with_stats }), Ok(stats)) = (notice, &result)
                        && let Some(connection) = self.connections.get_mut(&ended.endpoint)
                    {
                        let payload = if with_stats { stats.append_to(payload) } else { payload };
                        connection.send(&sender, kind, &payload);
                        stage!("notice sent");
                    }
                    self.tell(Event::TransferDone { transfer: ended.transfer, result });
                }
                None => index += 1,
            }
        }
        self.cut_stalled();
        busy
    }

    /// A peer that does not move has to be cut off: what was posted to it ends in no other way.
    fn cut_stalled(&mut self) {
        let (now, deadline) = (Instant::now(), self.context.options().stall_deadline);
        if now.saturating_duration_since(self.looked_for_stalled) < deadline / STALL_LOOKS {
            return;
        }
        self.looked_for_stalled = now;
        let mut posted: Vec<&mut InFlight> = self.transfers.iter_mut().map(|(transfer, _)| transfer).collect();
        posted.sort_unstable_by_key(|transfer| transfer.order);
        let (mut moved, mut stalled) = (BTreeMap::new(), BTreeSet::new());
        for transfer in posted {
            let last = transfer.last_moved(now, moved.get(&transfer.endpoint).copied());
            moved.insert(transfer.endpoint, last);
            if now.saturating_duration_since(last) >= deadline {
                stalled.insert(transfer.endpoint);
            }
        }
        for endpoint in stalled {
            if let Some(connection) = self.connections.remove(&endpoint) {
                self.fail(connection, Status::ERR_TIMED_OUT);
            }
        }
    }

    /// Takes messages off UCX's queue and hands over those that are whole, each behind those of its stream that were sent before it,
    /// by UCX or through a ring.
    fn take_messages(&mut self) -> bool {
        let mut busy = false;
        for _ in 0..MESSAGES_PER_TURN {
            let Some(message) = self.worker.receive() else { break };
            self.arriving.push(message);
            busy = true;
        }
        while let Some(message) = self.arriving.take_whole() {
            let parsed = message.take().map_err(|bytes| FrameError::Size { bytes });
            match parsed.and_then(|message| frame::parse(self.epoch, message)) {
                Ok((audience, place, frame)) => {
                    let (epoch, mut before) = (frame.source_epoch, Vec::new());
                    let turn = self.rings.turn_of(epoch, place, &mut before);
                    before.into_iter().for_each(|message| self.read(epoch, message));
                    match turn {
                        Turn::Deliver => self.hand_over(audience, frame),
                        Turn::Drop => {}
                        Turn::Failed => self.fail_damaged(epoch),
                    }
                }
                Err(error) => self.tell(Event::BadFrame(error)),
            }
            busy = true;
        }
        busy
    }

    /// Takes frames whose turn it is out of the rings.
    fn take_from_rings(&mut self) -> bool {
        let taken = self.rings.take(MESSAGES_PER_TURN);
        let busy = !taken.is_empty();
        for ((epoch, _), taken) in taken {
            match taken {
                Ok(message) => self.read(epoch, message),
                Err(Damaged) => self.fail_damaged(epoch),
            }
        }
        busy
    }

    /// A frame from the ring of a peer.
    fn read(&mut self, epoch: u64, message: Vec<u8>) {
        match frame::parse(self.epoch, message) {
            Ok((audience, _, frame)) if frame.source_epoch == epoch => self.hand_over(audience, frame),
            Ok(_) => self.tell(Event::BadFrame(FrameError::Ring { epoch })),
            Err(error) => self.tell(Event::BadFrame(error)),
        }
    }

    fn hand_over(&mut self, audience: Audience, frame: Frame) {
        match audience {
            Audience::Caller => {
                stage!("frame heard");
                self.tell(Event::Frame(frame));
            }
            Audience::Worker => self.hear(&frame),
        }
    }

    /// What a peer sends is damaged, or some of it is missing: nothing that leads to it is to be trusted.
    fn fail_damaged(&mut self, epoch: u64) {
        self.tell(Event::BadFrame(FrameError::Ring { epoch }));
        let of_peer = self.connections.iter().filter(|(_, connection)| connection.peer_epoch == epoch);
        for endpoint in of_peer.map(|(endpoint, _)| *endpoint).collect::<Vec<_>>() {
            if let Some(connection) = self.connections.remove(&endpoint) {
                self.fail(connection, Status::ERR_IO_ERROR);
            }
        }
    }

    /// A message from another worker: to the transfer that it is about, or to this worker's inbox.
    fn hear(&mut self, frame: &Frame) {
        let Some(message) = Message::parse(&frame.payload) else {
            return self.tell(Event::BadFrame(FrameError::Unreadable { bytes: frame.payload.len() }));
        };
        let endpoint = EndpointId(message.connection.0);
        let peer = Peer { epoch: frame.source_epoch, connection: message.connection };
        // Only the peer of the connection may speak of its transfers.
        let from_peer = self.connections.get(&endpoint).is_some_and(|c| c.peer_epoch == peer.epoch);
        let stream = match &message.body {
            Body::Grant { stream, .. }
            | Body::Landed { stream }
            | Body::Refused { stream, .. }
            | Body::Dropped { stream }
            | Body::Revoked { stream } => Some(*stream),
            _ => None,
        };
        let transfer = stream.filter(|_| from_peer).and_then(|stream| {
            let mut transfers = self.transfers.iter_mut().map(|(transfer, _)| transfer);
            transfers.find(|transfer| transfer.endpoint == endpoint && transfer.stream() == Some(stream))
        });
        match (message.body, transfer) {
            (Body::Ahead { chunks }, _) if from_peer => {
                if let Some(connection) = self.connections.get_mut(&endpoint) {
                    connection.add_ahead(chunks);
                }
            }
            // The peer lives, and hears: this side leaves in good order, which gives the peer back what it has granted.
            (Body::Unanswered, _) if from_peer => {
                if let Some(mut connection) = self.connections.remove(&endpoint) {
                    let (epoch, status) = (connection.peer_epoch, Status::ERR_CONNECTION_RESET);
                    let process = connection.process.take();
                    self.watch(endpoint, epoch, process, connection.raw.address());
                    self.leaving.push(connection.leave(status));
                    self.tell(Event::EndpointFailed { endpoint, status });
                }
            }
            (Body::Bell, _) => self.rung = true,
            (Body::Ring { stream, share, bytes }, _) => {
                if self.context.options().allows_rings() {
                    self.rings.open((peer.epoch, stream), &share, bytes);
                }
            }
            (Body::Grant { before, chunks, .. }, Some(transfer)) => transfer.granted(before, &chunks),
            (Body::Landed { .. }, Some(transfer)) => transfer.landed(),
            (Body::Dropped { .. }, Some(transfer)) => transfer.dropped(),
            (Body::Revoked { .. }, Some(transfer)) => transfer.revoked(),
            (Body::Refused { refusal, .. }, Some(transfer)) => transfer.refused(refusal),
            (body, _) => {
                let answer = self.service.hear(peer, body);
                answer.into_iter().for_each(|raw| self.keep(raw));
            }
        }
    }

    /// Parts with the connections that have been left in good order, or have taken too long.
    fn cut_left(&mut self) {
        let sender = Sender { epoch: self.epoch, address: &self.address, unsent: &self.unsent };
        let transfers = &self.transfers;
        let is_over = |leaving: &mut Leaving| {
            let id = leaving.id();
            let writing = transfers.iter().any(|(transfer, _)| transfer.endpoint == id);
            leaving.is_over(&sender, writing)
        };
        let over: Vec<Leaving> = self.leaving.extract_if(.., is_over).collect();
        for leaving in over {
            match leaving.part() {
                Ok(endpoint) => self.keep(endpoint),
                Err(closing) => self.closing.push(closing),
            }
        }
    }

    fn keep(&mut self, endpoint: RawEndpoint) {
        self.close_spare(self.endpoints.keep(endpoint));
    }

    fn close_spare(&mut self, spare: impl IntoIterator<Item = RawEndpoint>) {
        self.closing.extend(spare.into_iter().map(|endpoint| (Closed::Spare, endpoint.close(true))));
    }

    fn reap_closed(&mut self) {
        let transfers = &self.transfers;
        let closed = |(whose, closing): &mut (Closed, Closing)| {
            let used = |id: &EndpointId| transfers.iter().any(|(transfer, _)| transfer.endpoint == *id);
            closing.is_closed() && !matches!(whose, Closed::Caller(id, _) if used(id))
        };
        for (whose, closing) in self.closing.extract_if(.., closed) {
            closing.finish();
            if let Closed::Answer(peer) = whose {
                self.service.forget(peer);
            }
        }
    }

    fn tell(&self, event: Event) {
        self.listener.tell(event);
    }

    /// Sends what is queued, then closes everything, each within a deadline. Returns whether nothing is left open.
    pub(crate) fn stop(&mut self) -> bool {
        let sent = Instant::now() + STOP_DEADLINE;
        while self.unsent.get() > 0 && Instant::now() < sent {
            self.turn();
        }
        // Closing an endpoint by force under a put leaves lanes that UCX goes on discarding after it has said that the close is
        // complete; 1.22 has aborted in `ucp_worker_destroy` over one of cma.
        let cut_short = !self.transfers.is_empty();
        let connections = std::mem::take(&mut self.connections).into_values();
        self.leaving.extend(connections.map(|connection| connection.leave(Status::ERR_CANCELED)));
        // What a peer still connects to is closed, and the worker destroyed, when the connection stands. Whoever leaves here has sent
        // something by then, which counts as well.
        self.turn_until(|own| own.leaving.is_empty() && own.worker.is_settled());
        let answers = self.service.take_all().into_iter();
        self.closing.extend(answers.map(|(peer, raw)| (Closed::Answer(peer), raw.close(true))));
        self.close_spare(self.endpoints.take_all());
        let was_settled = self.worker.is_settled();
        self.turn_until(|own| {
            let closed = own.leaving.is_empty() && own.closing.is_empty() && own.transfers.is_empty();
            closed && (!was_settled || own.worker.is_settled())
        });
        self.is_idle() && self.arriving.is_over() && self.worker.is_settled() && !cut_short
    }

    /// Makes turns until something is so, or the deadline of a worker that stops has passed.
    fn turn_until(&mut self, is_so: impl Fn(&Self) -> bool) {
        let deadline = Instant::now() + STOP_DEADLINE;
        while !is_so(self) && Instant::now() < deadline {
            let again = Instant::now() + LOOK_INTERVAL;
            while Instant::now() < again {
                self.turn();
                thread::yield_now();
            }
        }
    }
}

/// The process of a peer whose connection has failed.
struct Watched {
    endpoint: EndpointId,
    epoch: u64,
    process: Process,
    /// The worker's, as UCX has it.
    address: Box<[u8]>,
    /// The kernel has said so.
    dead: bool,
}

/// Keeps this thread on one processor.
fn pin(cpu: usize) -> Result<(), OpenError> {
    let mut set = CpuSet::new();
    if cpu >= CpuSet::MAX_CPU {
        return Err(OpenError::Processor { cpu });
    }
    set.set(cpu);
    rustix::thread::sched_setaffinity(None, &set).map_err(|_| OpenError::Processor { cpu })
}

/// Why an endpoint is no longer there: the peer's failure, else that this side closed it.
fn closed_because(leaving: &[Leaving], closing: &[(Closed, Closing)], endpoint: EndpointId) -> Status {
    if let Some(leaving) = leaving.iter().find(|leaving| leaving.id() == endpoint) {
        return leaving.status();
    }
    let of_endpoint = |(whose, _): &(Closed, Closing)| match whose {
        Closed::Caller(id, status) if *id == endpoint => Some(*status),
        _ => None,
    };
    closing.iter().find_map(of_endpoint).unwrap_or(Status::ERR_CANCELED)
}
