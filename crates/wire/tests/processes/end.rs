//! This process's side.

use std::cell::RefCell;
use std::collections::BTreeMap;
use std::time::{Duration, Instant};

use crossbeam::channel::Receiver;
use kvferry_wire::{
    Context, ContextOptions, Dim, EndpointId, Event, Part, Piece, PutError, Region, RemoteRegion, Route, SlotPair,
    TransferId, TransferStats, Worker,
};

use crate::child::Target;

/// Transfers of 16 MiB that take together much longer than the interval between two tellings of their progress.
pub(crate) const MANY: u64 = 200;

pub(crate) const DEADLINE: Duration = Duration::from_secs(20);

/// How soon the death of a peer must be known.
pub(crate) const NOTICE: Duration = Duration::from_secs(1);

pub(crate) const PIECE: u64 = 4096;

/// Transports and a route over them.
pub(crate) type Way = (Option<&'static str>, Route);

pub(crate) const WAYS: [Way; 8] = [
    (None, Route::Direct),
    (None, Route::Landing),
    (None, Route::Staged),
    (None, Route::Runs),
    (Some("tcp"), Route::Staged),
    (Some("tcp"), Route::Runs),
    (Some("posix,sysv"), Route::Staged),
    (Some("posix,sysv"), Route::Runs),
];

pub(crate) struct End {
    pub(crate) context: Context,
    pub(crate) worker: Worker,
    pub(crate) events: Receiver<Event>,
    pub(crate) pool: Region,
    /// Ends of transfers that came while another's was waited for.
    ended: RefCell<BTreeMap<TransferId, Result<TransferStats, PutError>>>,
}

impl End {
    /// A worker with a pool of `bytes`, whose bytes follow from their place.
    pub(crate) fn start(way: Way, bytes: u64, stall_deadline: Duration) -> Self {
        let (transports, route) = way;
        let transports = transports.map(str::to_owned);
        let options = ContextOptions { transports, route: Some(route), stall_deadline, ..Default::default() };
        let context = Context::open(&options).unwrap();
        let (worker, events) = Worker::start(&context, 0xa).unwrap();
        let pool = context.allocate(bytes).unwrap();
        pool.write(0, &pattern(bytes)).unwrap();
        Self { context, worker, events, pool, ended: RefCell::default() }
    }

    /// Connects, and waits until the connection stands: a peer is only missed once it was there.
    pub(crate) fn connect(&self, target: &Target) -> (EndpointId, RemoteRegion) {
        let endpoint = self.worker.connect(&target.address, target.epoch).unwrap();
        let remote = self.worker.import(endpoint, &target.card).unwrap();
        self.worker.put_then_send(endpoint, TransferId(0), vec![self.part(remote, 1)], 1, Vec::new()).unwrap();
        self.done(TransferId(0)).unwrap();
        (endpoint, remote)
    }

    /// The first `count` pieces to the same places of the target, in reverse order.
    pub(crate) fn part(&self, remote: RemoteRegion, count: u64) -> Part {
        pieces(&self.pool, remote, count)
    }

    pub(crate) fn put(&self, endpoint: EndpointId, transfer: TransferId, part: Part) {
        self.worker.put(endpoint, transfer, vec![part]).unwrap();
    }

    /// The end of a transfer, past everything else.
    pub(crate) fn done(&self, wanted: TransferId) -> Result<TransferStats, PutError> {
        let deadline = Instant::now() + DEADLINE;
        loop {
            if let Some(result) = self.ended.borrow_mut().remove(&wanted) {
                return result;
            }
            let event = self.events.recv_deadline(deadline).expect("the end of a transfer within the deadline");
            self.keep(event);
        }
    }

    fn keep(&self, event: Event) {
        if let Event::TransferDone { transfer, result } = event {
            self.ended.borrow_mut().insert(transfer, result);
        }
    }

    /// Waits until some of [`MANY`] transfers has moved: none of them is over before the first telling then.
    pub(crate) fn wait_for_progress(&self) {
        let deadline = Instant::now() + DEADLINE;
        loop {
            match self.events.recv_deadline(deadline).unwrap() {
                Event::Progress { .. } => return,
                event => self.keep(event),
            }
        }
    }

    /// Waits for the failure of an endpoint, and says how long it took.
    pub(crate) fn failure(&self, endpoint: EndpointId) -> Duration {
        let start = Instant::now();
        loop {
            match self.events.recv_deadline(start + DEADLINE).expect("a failure within the deadline") {
                Event::EndpointFailed { endpoint: failed, .. } if failed == endpoint => return start.elapsed(),
                _ => {}
            }
        }
    }
}

/// The first `count` pieces of both sides, in reverse order.
pub(crate) fn pieces(local: &Region, remote: RemoteRegion, count: u64) -> Part {
    Part {
        local: local.clone(),
        local_base: 0,
        local_slot_stride: PIECE,
        remote,
        remote_base: 0,
        remote_slot_stride: PIECE,
        pieces: [Piece { local_offset: 0, remote_offset: 0, run_bytes: PIECE, dims: [Dim::ONE; 2] }].into(),
        pairs: (0..count as u32).rev().map(|slot| SlotPair { local: slot, remote: slot }).collect(),
    }
}

pub(crate) fn pattern(bytes: u64) -> Vec<u8> {
    (0..bytes).map(|byte| (byte * 7 + byte / 4096 * 13 + 1) as u8).collect()
}
