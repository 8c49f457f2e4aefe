//! SIGKILL before, during and after a transfer, and a peer that comes back.

use std::time::{Duration, Instant};

use kvferry_test_process::{in_time, within};
use kvferry_wire::{
    CommandError, Context, ContextOptions, Event, PutError, Status, TransferError, TransferId, Version,
};

use crate::child::Target;
use crate::end::{DEADLINE, End, MANY, NOTICE, PIECE, WAYS, Way, pattern};

const BYTES: u64 = 16 << 20;

#[test]
fn a_peer_killed_at_rest_is_noticed_at_once() {
    for way in WAYS {
        within(NOTICE, || {
            let mut target = Target::start(way.0, 1, PIECE);
            let end = End::start(way, PIECE, DEADLINE);
            let (endpoint, _) = end.connect(&target);
            let killed = Instant::now();
            target.process.kill();
            end.failure(endpoint);
            let noticed = killed.elapsed();
            println!("{way:?}: noticed after {noticed:?}");
            noticed
        });
    }
}

/// Before: nothing has been said to the peer yet, which over sockets means that UCX does not know of it either.
#[test]
fn a_transfer_to_a_peer_that_was_killed_before_fails() {
    for way in WAYS {
        let mut target = Target::start(way.0, 1, PIECE);
        let end = End::start(way, PIECE, DEADLINE);
        let endpoint = end.worker.connect(&target.address, target.epoch).unwrap();
        let remote = end.worker.import(endpoint, &target.card).unwrap();
        target.process.kill();
        let start = Instant::now();
        end.put(endpoint, TransferId(1), end.part(remote, 1));
        let result = end.done(TransferId(1));
        assert!(matches!(result, Err(PutError::Endpoint { .. } | PutError::Put { .. })), "{way:?}: {result:?}");
        println!("{way:?}: {result:?} after {:?}", start.elapsed());
    }
}

#[test]
fn a_transfer_ends_with_the_peer_that_is_killed_during_it() {
    for way in WAYS {
        in_time(|| {
            let mut failed = 0;
            within(2 * NOTICE, || {
                let took;
                (failed, took) = killed_during_transfers(way);
                took
            });
            failed > 0
        });
    }
}

/// How many transfers failed with their peer, and when the last was over.
fn killed_during_transfers(way: Way) -> (u64, Duration) {
    let mut target = Target::start(way.0, 1, BYTES);
    let end = End::start(way, BYTES, DEADLINE);
    let (endpoint, remote) = end.connect(&target);
    // So much that it is hardly over when the signal comes.
    for transfer in 1..=MANY {
        end.put(endpoint, TransferId(transfer), end.part(remote, BYTES / PIECE));
    }
    end.wait_for_progress();
    target.process.kill();
    let killed = Instant::now();
    let mut failed = 0;
    for transfer in 1..=MANY {
        match end.done(TransferId(transfer)) {
            Ok(_) => {}
            Err(PutError::Endpoint { source, .. } | PutError::Put { source }) => {
                assert_ne!(source, Status::OK);
                failed += 1;
            }
            Err(error) => panic!("{way:?}: {error}"),
        }
    }
    println!("{way:?}: {failed} of {MANY} failed within {:?}", killed.elapsed());
    (failed, killed.elapsed())
}

#[test]
fn a_peer_that_comes_back_is_another_and_nothing_here_restarts() {
    for way in WAYS {
        let end = End::start(way, PIECE, DEADLINE);
        let mut old = Target::start(way.0, 1, PIECE);
        let (old_endpoint, old_remote) = end.connect(&old);
        old.process.kill();
        end.failure(old_endpoint);

        let mut new = Target::start(way.0, 2, PIECE);
        let (endpoint, _) = end.connect(&new);
        let stale = end.worker.import(endpoint, &old.card);
        assert!(
            matches!(stale, Err(CommandError::Foreign { base, .. }) if base == old.card.base),
            "{way:?}: {stale:?}"
        );
        assert!(new.holds(&pattern(PIECE)), "{way:?}");
        // What belonged to the old one is of no use with the new one, or at all.
        let mixed = end.worker.put(endpoint, TransferId(2), vec![end.part(old_remote, 1)]);
        assert!(matches!(mixed, Err(TransferError::OtherEndpoint { part: 0 })));
        end.put(old_endpoint, TransferId(3), end.part(old_remote, 1));
        assert!(matches!(end.done(TransferId(3)), Err(PutError::Endpoint { .. })));
        assert!(matches!(end.worker.import(old_endpoint, &old.card), Err(CommandError::NoEndpoint)));
    }
}

/// What a death proves is said once nothing of the dead can be written here any more, whatever the transports.
#[test]
fn a_death_is_reported_behind_the_failure() {
    for way in WAYS {
        within(NOTICE, || {
            let mut target = Target::start(way.0, 1, PIECE);
            let end = End::start(way, PIECE, DEADLINE);
            let (endpoint, _) = end.connect(&target);
            target.process.kill();
            let killed = Instant::now();
            let mut failed = false;
            loop {
                match end.events.recv_deadline(killed + DEADLINE).unwrap() {
                    Event::EndpointFailed { endpoint: other, .. } => failed |= other == endpoint,
                    Event::PeerDied { endpoint: dead } => {
                        assert_eq!((dead, failed), (endpoint, true), "{way:?}");
                        break;
                    }
                    _ => {}
                }
            }
            println!("{way:?}: certain after {:?}", killed.elapsed());
            killed.elapsed()
        });
    }
}

/// What it reads it reads by itself: the one that it is read from has nothing to answer.
#[test]
fn a_peer_that_is_killed_while_it_pulls_harms_nobody() {
    let version = Context::open(&ContextOptions::default()).unwrap().ucx_version();
    let by_kernel = (version >= Version::new(1, 16, 0)).then_some(true);
    for runs in [Some(false), by_kernel].into_iter().flatten() {
        for round in 0..3 {
            let mut source = Target::start(None, 1, BYTES);
            let mut puller = Target::start_puller(runs, 2, BYTES);
            // UCX 1.13 may abort a process whose peer dies in the milliseconds in which it connects.
            puller.pull(&mut source);
            std::thread::sleep(Duration::from_millis(50 * round));
            puller.process.kill();
            std::thread::sleep(Duration::from_millis(50));
            assert!(source.holds(&vec![0; BYTES as usize]), "runs: {runs}");
        }
    }
}
