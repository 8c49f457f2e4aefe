//! Two workers that reach each other, or one that reaches itself.

use std::sync::Arc;
use std::time::Duration;

use crossbeam::channel::Receiver;
use kvferry_wire::{
    Context, ContextOptions, Dim, EndpointId, Event, Frame, Part, Piece, PutError, Region, RemoteRegion, Route,
    SlotPair, TransferId, TransferStats, Worker,
};

pub(crate) const DEADLINE: Duration = Duration::from_secs(60);

/// How bytes get from one end to the other.
#[derive(Clone, Debug)]
pub(crate) struct Way {
    pub(crate) options: ContextOptions,
    /// Both ends are one worker.
    pub(crate) alone: bool,
}

impl Way {
    /// Each route over `transports`, and the route of the library's own choice. `mapped` says whether memory may be shared.
    pub(crate) fn all(transports: Option<&str>, mapped: bool) -> Vec<Self> {
        let routes = [None, Some(Route::Direct), Some(Route::Landing), Some(Route::Staged), Some(Route::Runs)];
        let possible = |route: &Option<Route>| mapped || !matches!(route, Some(Route::Direct | Route::Landing));
        // A small inbox in chunks of an odd size, so that small transfers meet every limit.
        let way = |route| Self {
            options: ContextOptions {
                transports: transports.map(str::to_owned),
                route,
                inbox_bytes: 40_000,
                chunk_bytes: 1001,
                ..ContextOptions::default()
            },
            alone: false,
        };
        routes.into_iter().filter(possible).map(way).collect()
    }

    /// With an inbox for more than a few bytes, and help for the copies.
    pub(crate) fn roomy(&self) -> Self {
        let options =
            ContextOptions { inbox_bytes: 2 << 20, chunk_bytes: 100_000, copy_threads: 2, ..self.options.clone() };
        Self { options, ..self.clone() }
    }
}

/// One end: its UCX, its worker and the endpoint to the other end.
pub(crate) struct End {
    pub(crate) context: Context,
    pub(crate) worker: Arc<Worker>,
    pub(crate) events: Receiver<Event>,
    pub(crate) epoch: u64,
    pub(crate) to_peer: EndpointId,
}

pub(crate) fn pair(way: &Way) -> [End; 2] {
    let start = |epoch| {
        let context = Context::open(&way.options).unwrap();
        let (worker, events) = Worker::start(&context, epoch).unwrap();
        (context, Arc::new(worker), events)
    };
    let a = start(0xa);
    let b = if way.alone { a.clone() } else { start(0xb) };
    let a_to_b = a.1.connect(b.1.address(), b.1.epoch()).unwrap();
    let b_to_a = b.1.connect(a.1.address(), a.1.epoch()).unwrap();
    [(a, a_to_b), (b, b_to_a)].map(|((context, worker, events), to_peer)| {
        let epoch = worker.epoch();
        End { context, worker, events, epoch, to_peer }
    })
}

impl End {
    /// The next event that is no progress.
    pub(crate) fn event(&self) -> Event {
        loop {
            match self.events.recv_timeout(DEADLINE).expect("an event within the deadline") {
                Event::Progress { .. } => {}
                event => return event,
            }
        }
    }

    pub(crate) fn done(&self) -> (TransferId, Result<TransferStats, PutError>) {
        match self.event() {
            Event::TransferDone { transfer, result } => (transfer, result),
            event => panic!("{event:?} in place of the end of a transfer"),
        }
    }

    /// The end of a transfer, whatever else happens before.
    pub(crate) fn ended(&self) -> (TransferId, Result<TransferStats, PutError>) {
        loop {
            if let Event::TransferDone { transfer, result } = self.event() {
                return (transfer, result);
            }
        }
    }

    pub(crate) fn frame(&self) -> Frame {
        match self.event() {
            Event::Frame(frame) => frame,
            event => panic!("{event:?} in place of a frame"),
        }
    }

    pub(crate) fn put(&self, transfer: u64, part: Part) {
        self.worker.put(self.to_peer, TransferId(transfer), vec![part]).unwrap();
    }
}

/// `pairs` runs of `bytes` bytes, from `local_base` to `remote_base`, side by side.
pub(crate) fn side_by_side(local: (&Region, u64), remote: (RemoteRegion, u64), bytes: u64, pairs: u32) -> Part {
    Part {
        local: local.0.clone(),
        local_base: local.1,
        local_slot_stride: bytes,
        remote: remote.0,
        remote_base: remote.1,
        remote_slot_stride: bytes,
        pieces: [Piece { local_offset: 0, remote_offset: 0, run_bytes: bytes, dims: [Dim::ONE; 2] }].into(),
        pairs: (0..pairs).map(|slot| SlotPair { local: slot, remote: slot }).collect(),
    }
}

pub(crate) fn bytes(region: &Region) -> Vec<u8> {
    let mut bytes = vec![0; region.bytes().try_into().unwrap()];
    region.read(0, &mut bytes).unwrap();
    bytes
}

/// Memory of `context` with these bytes.
pub(crate) fn filled(context: &Context, bytes: &[u8]) -> Region {
    let region = context.allocate(bytes.len() as u64).unwrap();
    region.write(0, bytes).unwrap();
    region
}

/// Bytes that follow from their place and are never 0xcc.
pub(crate) fn pattern(bytes: u64) -> Vec<u8> {
    (0..bytes).map(|byte| (byte * 7 + byte / 4096 * 13 + byte / 65536) as u8 & 0x7f).collect()
}
