//! The conformance suite over real UCX, and what needs more than two ends.
#![allow(
    clippy::unwrap_used,
    clippy::cast_possible_truncation,
    reason = "a test fails by panicking; its patterns wrap"
)]

mod large;
mod suite;

use crossbeam::channel::Receiver;
use kvferry_wire::{Context, ContextOptions, Event, OpenError, Region, TransferId, Worker};
use suite::end::{Way, bytes, filled, side_by_side};

/// UCX's own choice, a socket, shared memory without and with the kernel's copies, and a worker that is its own peer. The last
/// has UCX's `self` on offer, which UCX leaves aside: it cannot say that a peer failed.
fn ways() -> Vec<Way> {
    let mut ways = Way::all(None, true);
    ways.extend(Way::all(Some("tcp"), false));
    ways.extend(Way::all(Some("posix,sysv"), true));
    ways.extend(Way::all(Some("posix,sysv,cma,tcp"), true));
    ways.extend(Way::all(Some("self,posix,tcp"), true).into_iter().map(|way| Way { alone: true, ..way }));
    ways
}

fn run(behaviour: fn(&Way)) {
    ways().iter().for_each(behaviour);
}

suite::conformance!(run);

#[test]
fn an_unknown_transport_is_named() {
    let list = "no-such-transport".to_owned();
    match Context::open(&ContextOptions { transports: Some(list.clone()), ..Default::default() }) {
        Err(OpenError::Transports { list: named, .. }) => assert_eq!(named, list),
        result => panic!("{result:?}"),
    }
}

#[test]
fn thirty_two_workers_of_one_host_reach_each_other() {
    const WORKERS: usize = 32;
    let ends: Vec<(Context, Worker, Receiver<Event>, Region)> = (0..WORKERS as u64)
        .map(|epoch| {
            let context = Context::open(&ContextOptions::default()).unwrap();
            let (worker, events) = Worker::start(&context, epoch).unwrap();
            let region = context.allocate(WORKERS as u64 * 4096).unwrap();
            (context, worker, events, region)
        })
        .collect();
    // Everybody writes page `i` of everybody, `i` being its own number.
    for (number, (context, worker, events, _)) in ends.iter().enumerate() {
        let from = filled(context, &[number as u8 + 1; 4096]);
        for (_, peer, _, to) in &ends {
            let endpoint = worker.connect(peer.address(), peer.epoch()).unwrap();
            let remote = worker.import(endpoint, &to.card()).unwrap();
            let part = side_by_side((&from, 0), (remote, number as u64 * 4096), 4096, 1);
            worker.put(endpoint, TransferId(0), vec![part]).unwrap();
            loop {
                match events.recv_timeout(suite::end::DEADLINE).unwrap() {
                    Event::TransferDone { result, .. } => {
                        result.unwrap();
                        break;
                    }
                    event => println!("{event:?}"),
                }
            }
        }
    }
    let expected: Vec<u8> = (0..WORKERS * 4096).map(|byte| (byte / 4096) as u8 + 1).collect();
    assert!(ends.iter().all(|(_, _, _, region)| bytes(region) == expected));
}
