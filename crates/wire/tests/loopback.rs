//! Two workers of one process over real UCX: what is promised of regions, frames and transfers holds on every transport.
#![allow(
    clippy::unwrap_used,
    clippy::cast_possible_truncation,
    reason = "a test fails by panicking; its patterns wrap"
)]

use std::sync::Arc;
use std::time::Duration;

use crossbeam::channel::Receiver;
use kvferry_wire::{
    CommandError, Context, ContextOptions, Dim, EndpointId, Event, Frame, FrameError, OpenError, Part, Piece, PutError,
    Region, RegionCard, RemoteRegion, Route, RouteReason, SlotPair, TransferError, TransferId, TransferStats, Worker,
};

/// Transports that every test runs over; `None` is UCX's own choice.
const TRANSPORTS: [Option<&str>; 3] = [None, Some("tcp"), Some("posix,sysv,cma,tcp")];

/// Each route over each of the transports that allow it, and the route of this library's own choice.
fn ways() -> Vec<ContextOptions> {
    let mut ways = Vec::new();
    for transports in TRANSPORTS {
        for route in [None, Some(Route::Direct), Some(Route::Landing), Some(Route::Staged), Some(Route::Runs)] {
            let needs_shared_memory = matches!(route, Some(Route::Direct | Route::Landing));
            if !(needs_shared_memory && transports == Some("tcp")) {
                ways.push(ContextOptions { transports: transports.map(str::to_owned), route, ..options(None) });
            }
        }
    }
    ways
}

/// A small inbox in chunks of an odd size, so that small transfers meet every limit.
fn options(transports: Option<&str>) -> ContextOptions {
    let transports = transports.map(str::to_owned);
    ContextOptions { transports, inbox_bytes: 40_000, chunk_bytes: 1001, ..ContextOptions::default() }
}

const DEADLINE: Duration = Duration::from_secs(20);

/// One end: its UCX, its worker and the endpoint to the other end.
struct End {
    context: Context,
    worker: Worker,
    events: Receiver<Event>,
    to_peer: EndpointId,
}

fn pair(options: &ContextOptions) -> [End; 2] {
    let start = |epoch| {
        let context = Context::open(options).unwrap();
        let (worker, events) = Worker::start(&context, epoch).unwrap();
        (context, worker, events)
    };
    let (a, b) = (start(0xa), start(0xb));
    let a_to_b = a.1.connect(b.1.address(), b.1.epoch()).unwrap();
    let b_to_a = b.1.connect(a.1.address(), a.1.epoch()).unwrap();
    [(a, a_to_b), (b, b_to_a)].map(|((context, worker, events), to_peer)| End { context, worker, events, to_peer })
}

impl End {
    /// The next event that is no progress.
    fn event(&self) -> Event {
        loop {
            match self.events.recv_timeout(DEADLINE).expect("an event within the deadline") {
                Event::Progress { .. } => {}
                event => return event,
            }
        }
    }

    fn done(&self) -> (TransferId, Result<TransferStats, PutError>) {
        match self.event() {
            Event::TransferDone { transfer, result } => (transfer, result),
            event => panic!("{event:?} in place of the end of a transfer"),
        }
    }

    fn frame(&self) -> Frame {
        match self.event() {
            Event::Frame(frame) => frame,
            event => panic!("{event:?} in place of a frame"),
        }
    }
}

fn bytes(region: &Region) -> Vec<u8> {
    let mut bytes = vec![0; region.bytes().try_into().unwrap()];
    region.read(0, &mut bytes).unwrap();
    bytes
}

/// 7 pairs of slots, a piece of two loops and a plain one.
fn part(local: &Region, remote: RemoteRegion) -> Part {
    let dims = [
        Dim { count: 3, local_stride: 400, remote_stride: 300 },
        Dim { count: 4, local_stride: 60, remote_stride: 50 },
    ];
    let plain = Piece { local_offset: 1300, remote_offset: 1001, run_bytes: 77, dims: [Dim::ONE; 2] };
    Part {
        local: local.clone(),
        local_base: 64,
        local_slot_stride: 1500,
        remote,
        remote_base: 10,
        remote_slot_stride: 1100,
        pieces: Arc::new([Piece { local_offset: 5, remote_offset: 0, run_bytes: 33, dims }, plain]),
        pairs: (0..7).map(|i| SlotPair { local: i * 3 % 7, remote: 6 - i }).collect(),
    }
}

/// What `part` makes of the remote side, by loops that share nothing with the crate.
fn expected(local: &[u8], remote: &mut [u8]) {
    for i in 0..7 {
        let (from, to) = (64 + 1500 * (i * 3 % 7), 10 + 1100 * (6 - i));
        for outer in 0..3 {
            for inner in 0..4 {
                for byte in 0..33 {
                    remote[to + outer * 300 + inner * 50 + byte] = local[from + 5 + outer * 400 + inner * 60 + byte];
                }
            }
        }
        remote[to + 1001..to + 1078].copy_from_slice(&local[from + 1300..from + 1377]);
    }
}

#[test]
fn strided_pieces_land_where_they_belong_and_nowhere_else() {
    for way in ways() {
        let [a, b] = pair(&way);
        let source = a.context.allocate(64 + 7 * 1500).unwrap();
        let filled: Vec<u8> = (0..source.bytes()).map(|i| (i * 7 + i / 251) as u8).collect();
        source.write(0, &filled).unwrap();
        let target = b.context.allocate(10 + 7 * 1100).unwrap();
        let mut wanted = vec![0xee; target.bytes().try_into().unwrap()];
        target.write(0, &wanted).unwrap();
        let remote = a.worker.import(a.to_peer, &target.card()).unwrap();
        a.worker.put(a.to_peer, TransferId(9), vec![part(&source, remote)]).unwrap();
        let (id, result) = a.done();
        let stats = result.unwrap();
        assert_eq!((id, stats.bytes, stats.runs), (TransferId(9), 7 * (12 * 33 + 77), 7 * 13), "{way:?}");
        if let Some(route) = way.route {
            assert_eq!((stats.route, stats.reason), (route, RouteReason::Forced), "{way:?}");
        }
        expected(&filled, &mut wanted);
        assert!(bytes(&target) == wanted, "{way:?}");
    }
}

#[test]
fn a_large_run_and_many_small_ones_arrive_whole() {
    const BYTES: u64 = 24 << 20;
    for way in ways() {
        let way = ContextOptions { inbox_bytes: 4 << 20, chunk_bytes: 100_000, copy_threads: 3, ..way };
        let [a, b] = pair(&way);
        let source = a.context.allocate(BYTES).unwrap();
        let filled: Vec<u8> = (0..BYTES).map(|i| (i ^ (i >> 8) ^ (i >> 16)) as u8).collect();
        source.write(0, &filled).unwrap();
        for run_bytes in [BYTES, 4096] {
            let target = b.context.allocate(BYTES).unwrap();
            let remote = a.worker.import(a.to_peer, &target.card()).unwrap();
            let part = Part {
                local: source.clone(),
                local_base: 0,
                local_slot_stride: run_bytes,
                remote,
                remote_base: 0,
                remote_slot_stride: run_bytes,
                pieces: Arc::new([Piece { local_offset: 0, remote_offset: 0, run_bytes, dims: [Dim::ONE; 2] }]),
                pairs: (0..u32::try_from(BYTES / run_bytes).unwrap())
                    .map(|i| SlotPair { local: i, remote: i })
                    .collect(),
            };
            a.worker.put(a.to_peer, TransferId(1), vec![part]).unwrap();
            assert_eq!(a.done().1.unwrap().bytes, BYTES, "{way:?}");
            assert!(bytes(&target) == filled, "{way:?}, runs of {run_bytes} B");
        }
    }
}

#[test]
fn frames_arrive_in_order_with_their_epoch_up_to_the_limit() {
    for transports in TRANSPORTS {
        let [a, b] = pair(&options(transports));
        let sizes = [0, 1, 100, 9000, kvferry_wire::FRAME_PAYLOAD_BYTES_MAX, 3];
        for (kind, size) in sizes.into_iter().enumerate() {
            a.worker.send(a.to_peer, kind.try_into().unwrap(), vec![kind as u8; size]).unwrap();
        }
        for (kind, size) in sizes.into_iter().enumerate() {
            let frame = b.frame();
            assert_eq!((frame.source_epoch, usize::from(frame.kind)), (0xa, kind), "{transports:?}");
            assert!(frame.payload == vec![kind as u8; size], "{transports:?}");
        }
        let over = vec![0; kvferry_wire::FRAME_PAYLOAD_BYTES_MAX + 1];
        assert!(matches!(a.worker.send(a.to_peer, 0, over), Err(CommandError::PayloadTooLong { .. })));
    }
}

#[test]
fn a_frame_for_an_earlier_life_is_dropped_and_named() {
    let [a, b] = pair(&options(None));
    let stale = a.worker.connect(b.worker.address(), 0xdead).unwrap();
    a.worker.send(stale, 1, vec![1, 2, 3]).unwrap();
    match b.event() {
        Event::BadFrame(FrameError::StaleEpoch { theirs: 0xdead, ours: 0xb }) => {}
        event => panic!("{event:?} in place of a stale frame"),
    }
}

#[test]
fn nothing_is_posted_of_a_transfer_that_leaves_a_region() {
    let [a, b] = pair(&options(None));
    let source = a.context.allocate(64 + 7 * 1500).unwrap();
    source.write(0, &[7; 1000]).unwrap();
    let target = b.context.allocate(10 + 7 * 1100).unwrap();
    let remote = a.worker.import(a.to_peer, &target.card()).unwrap();
    let good = part(&source, remote);
    let mut outside = good.clone();
    outside.pairs = outside
        .pairs
        .iter()
        .enumerate()
        .map(|(i, pair)| if i == 4 { SlotPair { remote: 7, ..*pair } } else { *pair })
        .collect();
    match a.worker.put(a.to_peer, TransferId(1), vec![good.clone(), outside]) {
        Err(TransferError::OutsideRemote { part: 1, pair: 4, slot: 7, region_bytes: 7710 }) => {}
        result => panic!("{result:?}"),
    }
    let mut outside = good.clone();
    outside.pairs = outside
        .pairs
        .iter()
        .enumerate()
        .map(|(i, pair)| if i == 2 { SlotPair { local: 7, ..*pair } } else { *pair })
        .collect();
    match a.worker.put(a.to_peer, TransferId(1), vec![outside]) {
        Err(TransferError::OutsideLocal { part: 0, pair: 2, slot: 7, .. }) => {}
        result => panic!("{result:?}"),
    }
    let second = a.worker.connect(b.worker.address(), b.worker.epoch()).unwrap();
    let other = a.worker.put(second, TransferId(1), vec![good]);
    assert!(matches!(other, Err(TransferError::OtherEndpoint { part: 0 })));
    a.worker.put(a.to_peer, TransferId(2), Vec::new()).unwrap();
    assert_eq!(a.done().0, TransferId(2), "the empty transfer is the only one that ends");
    assert!(bytes(&target).iter().all(|byte| *byte == 0));
}

#[test]
fn a_claimed_region_that_cannot_be_is_refused() {
    let [a, b] = pair(&options(None));
    let card = b.context.allocate(4096).unwrap().card();
    for (base, bytes) in [(card.base, 0), (u64::MAX, 2), (2, u64::MAX)] {
        let mut claim: RegionCard = card.clone();
        (claim.base, claim.bytes) = (base, bytes);
        assert!(matches!(a.worker.import(a.to_peer, &claim), Err(CommandError::Range { .. })), "{base} {bytes}");
    }
}

#[test]
fn a_closed_endpoint_ends_its_transfers_and_takes_no_more() {
    const BYTES: u64 = 256 << 20;
    let [a, b] = pair(&options(Some("tcp")));
    let (source, target) = (a.context.allocate(BYTES).unwrap(), b.context.allocate(BYTES).unwrap());
    let remote = a.worker.import(a.to_peer, &target.card()).unwrap();
    let whole = Part {
        local: source,
        local_base: 0,
        local_slot_stride: 4096,
        remote,
        remote_base: 0,
        remote_slot_stride: 4096,
        pieces: Arc::new([Piece { local_offset: 0, remote_offset: 0, run_bytes: 4096, dims: [Dim::ONE; 2] }]),
        pairs: (0..u32::try_from(BYTES / 4096).unwrap()).map(|i| SlotPair { local: i, remote: i }).collect(),
    };
    a.worker.put(a.to_peer, TransferId(1), vec![whole.clone()]).unwrap();
    a.worker.close(a.to_peer).unwrap();
    a.worker.put(a.to_peer, TransferId(2), vec![whole]).unwrap();
    let mut ends = [a.done(), a.done()];
    ends.sort_by_key(|end| end.0);
    for (id, end) in [1, 2].into_iter().zip(ends) {
        assert_eq!(end.0, TransferId(id));
        assert!(matches!(end.1, Err(PutError::Endpoint { .. })), "{:?}", end.1);
    }
    assert!(matches!(a.worker.import(a.to_peer, &target.card()), Err(CommandError::NoEndpoint)));
}

#[test]
fn a_worker_that_stops_has_sent_its_frames() {
    for transports in TRANSPORTS {
        let [a, b] = pair(&options(transports));
        for kind in 0..100 {
            a.worker.send(a.to_peer, kind, vec![0; 1000]).unwrap();
        }
        drop(a);
        for kind in 0..100 {
            assert_eq!(b.frame().kind, kind, "{transports:?}");
        }
    }
}

#[test]
fn an_unknown_transport_is_named() {
    let list = "no-such-transport".to_owned();
    match Context::open(&options(Some(&list))) {
        Err(OpenError::Transports { list: named, .. }) => assert_eq!(named, list),
        result => panic!("{result:?}"),
    }
}
