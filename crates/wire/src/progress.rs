//! The progress thread: takes commands, posts runs, moves UCX along, sleeps when nothing is in flight.

use std::cell::Cell;
use std::collections::{BTreeMap, VecDeque};
use std::os::fd::{AsFd, OwnedFd};
use std::rc::Rc;
use std::sync::Arc;
use std::thread;
use std::time::{Duration, Instant};

use crossbeam::channel::{Receiver, Sender};
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use ucx_sys::Status;

use crate::context::Context;
use crate::endpoint::{EndpointId, KeyId};
use crate::error::{CommandError, OpenError};
use crate::event::{Event, TransferId};
use crate::frame::{self, FrameError};
use crate::inflight::InFlight;
use crate::raw::{Batch, Closing, Inbound, RawEndpoint, RawWorker};
use crate::transfer::{Part, Size};

/// Commands taken between two looks at UCX.
const COMMANDS_PER_TURN: usize = 64;

/// Progress calls between two looks at the commands.
const PROGRESS_PER_TURN: usize = 64;

/// Events that may wait for the owner before no more messages are taken from UCX.
const EVENTS_MAX: usize = 1 << 14;

/// How long an idle thread sleeps at most. Nothing depends on its waking; it bounds what a lost wake-up could cost.
const SLEEP_MAX: Timespec = Timespec { tv_sec: 1, tv_nsec: 0 };

/// How long a stopping worker flushes and closes, each.
const STOP_DEADLINE: Duration = Duration::from_secs(1);

/// What a caller asks of the thread.
pub(crate) enum Command {
    Connect { endpoint: EndpointId, address: Vec<u8>, peer_epoch: u64, reply: Sender<Result<(), CommandError>> },
    Import { endpoint: EndpointId, key: KeyId, packed: Vec<u8>, reply: Sender<Result<(), CommandError>> },
    Send { endpoint: EndpointId, kind: u16, payload: Vec<u8> },
    Put(Posted),
    Close { endpoint: EndpointId },
    Stop,
}

/// A checked transfer.
pub(crate) struct Posted {
    pub(crate) endpoint: EndpointId,
    pub(crate) transfer: TransferId,
    pub(crate) parts: Vec<Part>,
    pub(crate) size: Size,
}

/// What ties the thread to its handle.
pub(crate) struct Links {
    pub(crate) commands: Receiver<Command>,
    pub(crate) events: Sender<Event>,
    pub(crate) wake: Arc<OwnedFd>,
}

/// Wakes the thread, if it sleeps. A full counter means that it is being woken already.
pub(crate) fn wake(fd: &OwnedFd) {
    let _ = rustix::io::write(fd, &1u64.to_ne_bytes());
}

/// The body of the thread. Says through `started` how the start went.
pub(crate) fn run(context: Context, epoch: u64, links: Links, started: &Sender<Result<Vec<u8>, OpenError>>) {
    match Progress::start(context, epoch, links) {
        Ok((mut progress, address)) => {
            if started.send(Ok(address)).is_ok() {
                progress.serve();
            }
            if !progress.stop() {
                // UCX 1.13 has crashed in `ucp_worker_destroy` with operations pending on a dead peer (shared memory).
                // Whatever is still open then is left to the end of the process.
                tracing::warn!("some operations did not end; the worker is not destroyed");
                let _abandoned = std::mem::ManuallyDrop::new(progress);
            }
        }
        // The handle waits for this; it cannot be gone.
        Err(error) => drop(started.send(Err(error))),
    }
}

/// A connection and the life of the peer it leads to.
struct Endpoint {
    raw: RawEndpoint,
    peer_epoch: u64,
}

struct Progress {
    context: Context,
    epoch: u64,
    links: Links,
    endpoints: BTreeMap<EndpointId, Endpoint>,
    closing: Vec<(EndpointId, Closing)>,
    transfers: Vec<InFlight>,
    inbound: VecDeque<Inbound>,
    /// Frames that UCX has accepted and not sent.
    unsent: Rc<Cell<u64>>,
    running: bool,
    worker: Rc<RawWorker>, // last: everything above is UCX's
}

impl Progress {
    fn start(context: Context, epoch: u64, links: Links) -> Result<(Self, Vec<u8>), OpenError> {
        let worker = RawWorker::create(context.clone())?;
        let address = worker.address()?;
        worker.event_fd()?; // refused here rather than at the first sleep
        let progress = Self {
            context,
            epoch,
            links,
            endpoints: BTreeMap::new(),
            closing: Vec::new(),
            transfers: Vec::new(),
            inbound: VecDeque::new(),
            unsent: Rc::new(Cell::new(0)),
            running: true,
            worker,
        };
        Ok((progress, address))
    }

    fn serve(&mut self) {
        while self.running {
            let busy = self.turn();
            if !self.is_idle() {
                if !busy {
                    thread::yield_now(); // the other end may share this core
                }
            } else if !busy && self.links.events.len() < EVENTS_MAX && self.worker.arm() {
                self.sleep();
            }
        }
    }

    /// Nothing is in flight, so nothing is lost by sleeping until UCX or a caller has something.
    fn is_idle(&self) -> bool {
        self.transfers.is_empty() && self.closing.is_empty() && self.inbound.is_empty() && self.unsent.get() == 0
    }

    /// Does a bounded amount of everything. Returns whether anything moved.
    fn turn(&mut self) -> bool {
        let mut busy = false;
        for _ in 0..COMMANDS_PER_TURN {
            let Ok(command) = self.links.commands.try_recv() else { break };
            self.carry_out(command);
            busy = true;
        }
        for _ in 0..PROGRESS_PER_TURN {
            if !self.worker.progress() {
                break;
            }
            busy = true;
        }
        self.close_failed();
        busy |= self.step_transfers();
        busy |= self.take_messages();
        self.reap_closed();
        busy
    }

    fn carry_out(&mut self, command: Command) {
        match command {
            Command::Connect { endpoint, address, peer_epoch, reply } => {
                let connected = self.worker.connect(&address).map(|raw| {
                    self.endpoints.insert(endpoint, Endpoint { raw, peer_epoch });
                });
                let _ = reply.send(connected.map_err(|source| CommandError::Connect { source })); // the caller may have given up
            }
            Command::Import { endpoint, key, packed, reply } => {
                let imported = match self.endpoints.get_mut(&endpoint) {
                    Some(endpoint) => endpoint.raw.import(key, &packed).map_err(|source| CommandError::Key { source }),
                    None => Err(CommandError::NoEndpoint),
                };
                let _ = reply.send(imported); // as above
            }
            Command::Send { endpoint, kind, payload } => {
                if let Some(endpoint) = self.endpoints.get(&endpoint) {
                    let frame = frame::encode(self.epoch, endpoint.peer_epoch, kind, &payload);
                    endpoint.raw.send(frame, &self.unsent);
                }
            }
            Command::Put(Posted { endpoint, transfer, parts, size }) => {
                let batch = Batch::new(&self.context, parts);
                self.transfers.push(InFlight::new(endpoint, transfer, batch, size));
            }
            Command::Close { endpoint } => {
                if let Some(endpoint_to_close) = self.endpoints.remove(&endpoint) {
                    self.closing.push((endpoint, endpoint_to_close.raw.close(true)));
                }
            }
            Command::Stop => self.running = false,
        }
    }

    /// Endpoints that UCX has reported as failed are closed by force, which ends what is posted on them.
    fn close_failed(&mut self) {
        let failed: Vec<EndpointId> =
            self.endpoints.iter().filter(|(_, e)| e.raw.failure() != Status::OK).map(|(id, _)| *id).collect();
        for id in failed {
            if let Some(endpoint) = self.endpoints.remove(&id) {
                let status = endpoint.raw.failure();
                self.closing.push((id, endpoint.raw.close(true)));
                self.tell(Event::EndpointFailed { endpoint: id, status });
            }
        }
    }

    fn step_transfers(&mut self) -> bool {
        let mut busy = false;
        let mut index = 0;
        while index < self.transfers.len() {
            let transfer = &mut self.transfers[index];
            let endpoint = match self.endpoints.get(&transfer.endpoint) {
                Some(endpoint) => Ok(&endpoint.raw),
                None => Err(closed_because(&self.closing, transfer.endpoint)),
            };
            let before = transfer.posted_bytes();
            let ended = transfer.step(endpoint);
            busy |= transfer.posted_bytes() > before || ended.is_some();
            if let Some(bytes) = transfer.progress_to_tell() {
                let event = Event::Progress { transfer: transfer.transfer, bytes };
                let _ = self.links.events.send(event); // as in `tell`
            }
            match ended {
                Some(result) => {
                    let transfer = self.transfers.swap_remove(index).transfer;
                    self.tell(Event::TransferDone { transfer, result });
                }
                None => index += 1,
            }
        }
        busy
    }

    /// Takes messages off UCX's queue and hands the complete ones over in the order in which they came.
    fn take_messages(&mut self) -> bool {
        let mut busy = false;
        while self.links.events.len() < EVENTS_MAX && self.inbound.len() < EVENTS_MAX {
            let Some(message) = self.worker.receive() else { break };
            self.inbound.push_back(message);
            busy = true;
        }
        while self.inbound.front().is_some_and(Inbound::is_complete) {
            let Some(message) = self.inbound.pop_front() else { break };
            let parsed = message.take().map_err(|bytes| FrameError::Size { bytes });
            self.tell(match parsed.and_then(|message| frame::parse(self.epoch, message)) {
                Ok(frame) => Event::Frame(frame),
                Err(error) => Event::BadFrame(error),
            });
            busy = true;
        }
        busy
    }

    fn reap_closed(&mut self) {
        let transfers = &self.transfers;
        let closed = |(id, closing): &mut (EndpointId, Closing)| {
            closing.is_closed() && !transfers.iter().any(|transfer| transfer.endpoint == *id)
        };
        for (_, closing) in self.closing.extract_if(.., closed) {
            closing.finish();
        }
    }

    /// The owner may have dropped the events before the worker: then nobody is left to be told.
    fn tell(&self, event: Event) {
        let _ = self.links.events.send(event);
    }

    fn sleep(&self) {
        let Ok(ucx) = self.worker.event_fd() else { return };
        let wake = self.links.wake.as_fd();
        let mut fds = [PollFd::from_borrowed_fd(ucx, PollFlags::IN), PollFd::from_borrowed_fd(wake, PollFlags::IN)];
        let _ = poll(&mut fds, Some(&SLEEP_MAX)); // interrupted is as good as woken
        let mut counter = [0; 8];
        let _ = rustix::io::read(&*self.links.wake, &mut counter); // empty is fine
    }

    /// Sends what is queued, then closes everything, each within a deadline. Returns whether nothing is left open.
    fn stop(&mut self) -> bool {
        let sent = Instant::now() + STOP_DEADLINE;
        while self.unsent.get() > 0 && Instant::now() < sent {
            self.turn();
        }
        let flushes: Vec<_> = self.endpoints.values().map(|endpoint| endpoint.raw.flush()).collect();
        while flushes.iter().any(|flush| flush.result().is_none()) && Instant::now() < sent {
            self.turn();
        }
        for (id, endpoint) in std::mem::take(&mut self.endpoints) {
            let busy = endpoint.raw.failure() != Status::OK || self.transfers.iter().any(|t| t.endpoint == id);
            self.closing.push((id, endpoint.raw.close(busy)));
        }
        let closed = Instant::now() + STOP_DEADLINE;
        while !(self.closing.is_empty() && self.transfers.is_empty()) && Instant::now() < closed {
            if !self.turn() {
                thread::yield_now();
            }
        }
        self.is_idle()
    }
}

/// Why an endpoint is no longer there: the peer's failure, else that this side closed it.
fn closed_because(closing: &[(EndpointId, Closing)], endpoint: EndpointId) -> Status {
    let failure = closing.iter().find(|(id, _)| *id == endpoint).map(|(_, closing)| closing.failure());
    failure.filter(|status| *status != Status::OK).unwrap_or(Status::ERR_CANCELED)
}
