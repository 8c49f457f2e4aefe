//! Transfers that are cancelled at any time: once that is said, nothing of them is written.
#![allow(
    clippy::unwrap_used,
    clippy::cast_possible_truncation,
    reason = "a test fails by panicking; its patterns wrap"
)]

use std::time::{Duration, Instant};

use crossbeam::channel::Receiver;
use kvferry_wire::{
    Context, ContextOptions, Dim, EndpointId, Event, Part, Piece, PutError, Region, RemoteRegion, Route, SlotPair,
    TransferId, TransferStats, Worker,
};

const DEADLINE: Duration = Duration::from_secs(60);

const WAYS: [(Option<&str>, Route); 6] = [
    (None, Route::Direct),
    (None, Route::Landing),
    (None, Route::Staged),
    (None, Route::Runs),
    (Some("tcp"), Route::Staged),
    (Some("tcp"), Route::Runs),
];

const BYTES: u64 = 16 << 20;
const PIECE: u64 = 4096;
const CANARY: u8 = 0xcc;
const ROUNDS: u64 = 12;

/// Two workers, of which one writes the other's memory.
struct Pair {
    source: Worker,
    events: Receiver<Event>,
    endpoint: EndpointId,
    from: Region,
    to: Region,
    remote: RemoteRegion,
    /// Dropped last: it serves its inbox.
    _target: (Worker, Receiver<Event>),
}

impl Pair {
    fn new((transports, route): (Option<&str>, Route)) -> Self {
        let transports = transports.map(str::to_owned);
        // An inbox of few chunks: credits that a cancel loses are missed soon.
        let (inbox_bytes, copy_threads) = (1 << 20, 2);
        let options =
            ContextOptions { transports, route: Some(route), inbox_bytes, copy_threads, ..Default::default() };
        let [ours, theirs] = [0; 2].map(|_| Context::open(&options).unwrap());
        let (source, events) = Worker::start(&ours, 1).unwrap();
        let target = Worker::start(&theirs, 2).unwrap();
        let endpoint = source.connect(target.0.address(), 2).unwrap();
        let (from, to) = (ours.allocate(BYTES).unwrap(), theirs.allocate(BYTES).unwrap());
        from.write(0, &pattern()).unwrap();
        let remote = source.import(endpoint, &to.card()).unwrap();
        Self { source, events, endpoint, from, to, remote, _target: target }
    }

    fn put(&self, transfer: u64) {
        let part = Part {
            local: self.from.clone(),
            local_base: 0,
            local_slot_stride: PIECE,
            remote: self.remote,
            remote_base: 0,
            remote_slot_stride: PIECE,
            pieces: [Piece { local_offset: 0, remote_offset: 0, run_bytes: PIECE, dims: [Dim::ONE; 2] }].into(),
            pairs: (0..(BYTES / PIECE) as u32).map(|slot| SlotPair { local: slot, remote: slot }).collect(),
        };
        self.source.put(self.endpoint, TransferId(transfer), vec![part]).unwrap();
    }

    fn done(&self) -> (TransferId, Result<TransferStats, PutError>) {
        loop {
            match self.events.recv_timeout(DEADLINE).expect("an end within the deadline") {
                Event::TransferDone { transfer, result } => return (transfer, result),
                Event::EndpointFailed { status, .. } => panic!("the endpoint failed: {status}"),
                _ => {}
            }
        }
    }

    fn bytes(&self) -> Vec<u8> {
        let mut bytes = vec![0; BYTES as usize];
        self.to.read(0, &mut bytes).unwrap();
        bytes
    }
}

fn pattern() -> Vec<u8> {
    (0..BYTES).map(|byte| (byte * 7 + byte / 4096 * 13) as u8 & 0x7f).collect()
}

/// How long one of the transfers takes.
fn whole(pair: &Pair) -> Duration {
    let start = Instant::now();
    pair.put(0);
    pair.done().1.unwrap();
    start.elapsed()
}

#[test]
fn once_a_cancel_is_said_to_be_over_not_a_byte_changes() {
    let (canary, filled) = (vec![CANARY; BYTES as usize], pattern());
    for way in WAYS {
        let pair = Pair::new(way);
        whole(&pair); // takes the pages
        let takes = whole(&pair);
        let mut cancelled = 0;
        for round in 0..ROUNDS {
            pair.put(round);
            // From at once to the end, in no order, and early rather than late: half of them before a quarter has moved.
            let step = (round * 5 % ROUNDS) as u32;
            std::thread::sleep(takes * step * step / ((ROUNDS - 1) * (ROUNDS - 1)) as u32);
            pair.source.cancel(TransferId(round)).unwrap();
            let (transfer, result) = pair.done();
            assert_eq!(transfer, TransferId(round));
            pair.to.write(0, &canary).unwrap();
            match result {
                Ok(_) => {}
                Err(PutError::Cancelled) => cancelled += 1,
                Err(error) => panic!("{way:?}: {error:?}"),
            }
            std::thread::sleep(Duration::from_millis(5));
            assert!(pair.bytes() == canary, "{way:?}, round {round}: late bytes after {result:?}");
        }
        println!("{way:?}: {cancelled} of {ROUNDS} cancelled, a whole one takes {takes:?}");
        assert!(cancelled > 0, "{way:?}: no cancel came in time");
        // What they held is free again.
        pair.put(ROUNDS);
        pair.done().1.unwrap();
        assert!(pair.bytes() == filled, "{way:?}");
    }
}

#[test]
fn a_cancel_ends_the_transfer_that_it_names_and_no_other() {
    for way in WAYS {
        let pair = Pair::new(way);
        pair.source.cancel(TransferId(1)).unwrap(); // not known
        (1..=8).for_each(|transfer| pair.put(transfer));
        (5..=8).for_each(|transfer| pair.source.cancel(TransferId(transfer)).unwrap());
        pair.source.cancel(TransferId(5)).unwrap(); // again
        let mut ended: Vec<_> = (0..8).map(|_| pair.done()).collect();
        ended.sort_by_key(|(transfer, _)| *transfer);
        for (expected, (transfer, result)) in (1..=8).zip(ended) {
            assert_eq!(transfer, TransferId(expected), "{way:?}");
            match result {
                Ok(_) => {}
                Err(PutError::Cancelled) if expected >= 5 => {}
                Err(error) => panic!("{way:?}, {transfer:?}: {error:?}"),
            }
        }
        pair.source.cancel(TransferId(1)).unwrap(); // over
        pair.put(1);
        assert!(pair.done().1.is_ok(), "{way:?}: a cancel from before the transfer is not for it");
        assert!(pair.events.try_recv().is_err(), "{way:?}");
    }
}
