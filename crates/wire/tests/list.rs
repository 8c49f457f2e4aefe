//! Explicit lists of runs over real UCX: what is listed moves and nothing else, and a list that is wrong anywhere moves nothing.
#![allow(clippy::unwrap_used, reason = "a test fails by panicking")]

use std::time::Duration;

use crossbeam::channel::Receiver;
use kvferry_wire::{
    Context, ContextOptions, EndpointId, Event, List, ListError, Part, Region, RemoteRegion, Route, Run, Side,
    TransferId, Worker,
};

const BYTES: u64 = 100_000;
const DEADLINE: Duration = Duration::from_secs(30);

/// Local region and place in it, remote region and place in it, length.
type Listed = (usize, u64, usize, u64, u64);

struct Ends {
    source: Worker,
    events: Receiver<Event>,
    endpoint: EndpointId,
    from: Vec<Region>,
    to: Vec<Region>,
    remotes: Vec<RemoteRegion>,
    _target: (Worker, Receiver<Event>),
}

impl Ends {
    /// Two regions on either side, the source's with bytes that tell where they are.
    fn start(route: Option<Route>) -> Self {
        let context = Context::open(&ContextOptions { route, ..ContextOptions::default() }).unwrap();
        let (source, events) = Worker::start(&context, 1).unwrap();
        let target = Worker::start(&context, 2).unwrap();
        let endpoint = source.connect(target.0.address(), 2).unwrap();
        let [from, to] = [0, 1].map(|_| (0..2).map(|_| context.allocate(BYTES).unwrap()).collect::<Vec<_>>());
        for (seed, region) in (0..).zip(&from) {
            region.write(0, &(0..BYTES).map(|at| pattern(seed, at)).collect::<Vec<_>>()).unwrap();
        }
        let remotes = to.iter().map(|region| source.import(endpoint, &region.card()).unwrap()).collect();
        Self { source, events, endpoint, from, to, remotes, _target: target }
    }

    fn list(&self, runs: &[Listed]) -> Result<List, ListError> {
        let local = |&(region, at, _, _, bytes): &Listed| Run { address: self.from[region].base() + at, bytes };
        let remote = |&(_, _, region, at, bytes): &Listed| Run { address: self.to[region].base() + at, bytes };
        let (from, to): (Vec<_>, Vec<_>) = (runs.iter().map(local).collect(), runs.iter().map(remote).collect());
        List::new(self.from.clone(), self.remotes.clone(), &from, &to)
    }

    fn put(&self, parts: Vec<Part>) -> u64 {
        self.source.put(self.endpoint, TransferId(7), parts).unwrap();
        loop {
            if let Event::TransferDone { result, .. } = self.events.recv_timeout(DEADLINE).unwrap() {
                return result.unwrap().bytes;
            }
        }
    }

    fn arrived(&self) -> Vec<Vec<u8>> {
        let read = |region: &Region| {
            let mut bytes = vec![0; usize::try_from(BYTES).unwrap()];
            region.read(0, &mut bytes).unwrap();
            bytes
        };
        self.to.iter().map(read).collect()
    }
}

fn pattern(seed: u64, at: u64) -> u8 {
    (at.wrapping_mul(2_654_435_761) >> 7).to_le_bytes()[0] ^ seed.to_le_bytes()[0] | 1
}

/// Runs of five lengths between all pairs of regions, in an order that jumps about, no byte of the target twice.
fn runs() -> Vec<Listed> {
    let place = |i: u64| (i * 37 % 64) * 1500;
    let run = |i: u64| {
        let (local, remote) = (usize::from(i.is_multiple_of(3)), usize::from(i.is_multiple_of(2)));
        (local, place(i + 5) + i % 7, remote, place(i), [1, 64, 100, 1024, 0][usize::try_from(i % 5).unwrap()])
    };
    (0..64).map(run).collect()
}

#[test]
fn what_is_listed_moves_and_nothing_else() {
    for route in [None, Some(Route::Landing), Some(Route::Staged), Some(Route::Runs)] {
        let ends = Ends::start(route);
        let list = ends.list(&runs()).unwrap();
        let mut expected = vec![vec![0; usize::try_from(BYTES).unwrap()]; 2];
        let mut check = |chosen: &[usize], parts: Vec<Part>| {
            let moved = ends.put(parts);
            for (local, at, remote, to, bytes) in chosen.iter().map(|index| runs()[*index]) {
                for byte in 0..bytes {
                    let seed = u64::try_from(local).unwrap();
                    expected[remote][usize::try_from(to + byte).unwrap()] = pattern(seed, at + byte);
                }
            }
            assert_eq!(moved, chosen.iter().map(|index| runs()[*index].4).sum::<u64>());
            assert!(ends.arrived() == expected, "{route:?}");
        };
        let some: Vec<usize> = (0..runs().len()).rev().step_by(3).collect();
        check(&some, list.select(&some).unwrap());
        check(&(0..runs().len()).collect::<Vec<_>>(), list.parts());
        check(&[], list.select(&[]).unwrap());
    }
}

/// Lists of one length in one region, which are kept apart from others: with neighbours, which are joined, and without.
#[test]
fn entries_that_are_all_alike_are_paired_as_others_are() {
    const RUN: u64 = 1000;
    let ends = Ends::start(None);
    let runs = |region: &Region| -> Vec<Run> {
        (0..BYTES / RUN).map(|run| Run { address: region.base() + run * RUN, bytes: RUN }).collect()
    };
    let local = Side::new(vec![ends.from[0].clone()], &runs(&ends.from[0])).unwrap();
    let remote = Side::new(vec![ends.remotes[1]], &runs(&ends.to[1])).unwrap();
    let mut expected = vec![vec![0; usize::try_from(BYTES).unwrap()]; 2];
    for (from, to) in
        [([3, 4, 5, 9], [7, 8, 9, 2]), ([50, 48, 46, 44], [1, 99, 0, 50]), ([8, 8, 2, 1], [20, 21, 22, 23])]
    {
        let moved = ends.put(List::pair(&local, &from, &remote, &to).unwrap());
        for (from, to) in from.iter().zip(to) {
            for byte in 0..RUN {
                expected[1][to * usize::try_from(RUN).unwrap() + usize::try_from(byte).unwrap()] =
                    pattern(0, *from as u64 * RUN + byte);
            }
        }
        assert!(moved == 4 * RUN && ends.arrived() == expected, "{from:?} {to:?}");
    }
    let wrong = |from: &[usize], to: &[usize]| List::pair(&local, from, &remote, to).unwrap_err();
    assert_eq!(wrong(&[1, 100], &[1, 2]), ListError::Index { place: 1, index: 100, entries: 100 });
    assert_eq!(wrong(&[1, 2], &[usize::MAX, 2]), ListError::RemoteIndex { place: 0, index: usize::MAX, entries: 100 });
    assert_eq!(wrong(&[1, 2], &[1]), ListError::Count { local: 2, remote: 1 });
    let short = Side::new(vec![ends.remotes[1]], &[Run { address: ends.to[1].base(), bytes: 1 }]).unwrap();
    let error = List::pair(&local, &[7], &short, &[0]).unwrap_err();
    assert_eq!(error, ListError::Bytes { index: 0, local: RUN, remote: 1 });
}

#[test]
fn the_first_entry_that_is_wrong_is_named() {
    let ends = Ends::start(None);
    let good = (0, 0, 1, 0, 100);
    let list = |bad| ends.list(&[good, bad, bad]);
    let outside = BYTES - 99;
    let error = list((0, outside, 1, 0, 100)).unwrap_err();
    assert_eq!(error, ListError::Local { index: 1, run: Run { address: ends.from[0].base() + outside, bytes: 100 } });
    let error = list((0, 0, 1, outside, 100)).unwrap_err();
    assert_eq!(error, ListError::Remote { index: 1, run: Run { address: ends.to[1].base() + outside, bytes: 100 } });
    let run = |bytes| Run { address: ends.from[0].base(), bytes };
    let new = |from: &[Run], to: &[Run]| List::new(ends.from.clone(), ends.remotes.clone(), from, to).unwrap_err();
    assert_eq!(new(&[run(1)], &[]), ListError::Count { local: 1, remote: 0 });
    assert_eq!(new(&[run(1)], &[run(2)]), ListError::Bytes { index: 0, local: 1, remote: 2 });
    assert!(matches!(new(&[run(u64::MAX)], &[run(u64::MAX)]), ListError::Local { index: 0, .. }));
    let selected = ends.list(&[good]).unwrap().select(&[0, 0, 1]).unwrap_err();
    assert_eq!(selected, ListError::Index { place: 2, index: 1, entries: 1 });
    assert!(ends.arrived().concat().iter().all(|byte| *byte == 0));
}
