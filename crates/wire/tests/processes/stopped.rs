//! SIGSTOP and SIGCONT.

use std::time::{Duration, Instant};

use kvferry_test_process::{in_time, within};
use kvferry_wire::{Event, Part, PutError, Route, Status, TransferId};

use crate::child::Target;
use crate::end::{DEADLINE, End, MANY, PIECE, WAYS, Way, pattern};

const BYTES: u64 = 8 << 20;

/// What needs no part of the peer's goes on without it; the rest waits, and is whole when the peer has gone on.
#[test]
fn a_stopped_peer_is_waited_for_where_it_is_needed() {
    for way in WAYS {
        let mut target = Target::start(way.0, 1, BYTES);
        let end = End::start(way, BYTES, DEADLINE);
        let (endpoint, remote) = end.connect(&target);
        target.process.stop();
        end.put(endpoint, TransferId(1), end.part(remote, BYTES / PIECE));
        let patience = if way.1 == Route::Direct { DEADLINE } else { Duration::from_millis(500) };
        let until = Instant::now() + patience;
        let over = loop {
            match end.events.recv_deadline(until) {
                Ok(Event::Progress { .. }) => {}
                event => break matches!(event, Ok(Event::TransferDone { result: Ok(_), .. })),
            }
        };
        match way.1 {
            Route::Direct => assert!(over, "a copy into mapped memory needs nobody"),
            Route::Landing | Route::Staged => assert!(!over, "{way:?} is over without its target"),
            _ => {} // the kernel copies (cma), or the sockets take some and wait
        }
        target.process.go_on();
        if !over {
            end.done(TransferId(1)).unwrap();
        }
        assert!(target.holds(&pattern(BYTES)), "{way:?}");
    }
}

/// What needs no round trip does not make one.
#[test]
fn nothing_to_move_is_a_success_even_with_a_stopped_peer() {
    for way in WAYS {
        let target = Target::start(way.0, 1, PIECE);
        let end = End::start(way, PIECE, DEADLINE);
        let (endpoint, remote) = end.connect(&target);
        target.process.stop();
        let no_pairs = end.part(remote, 0);
        let no_pieces = Part { pieces: [].into(), ..end.part(remote, 1) };
        for parts in [Vec::new(), vec![no_pairs.clone()], vec![no_pieces, no_pairs]] {
            end.worker.put(endpoint, TransferId(1), parts).unwrap();
            let stats = end.done(TransferId(1)).unwrap();
            assert_eq!((stats.bytes, stats.runs), (0, 0), "{way:?}");
        }
    }
}

/// Nothing waits for ever: past the deadline the endpoint is cut, and with it everything that was posted to it.
#[test]
fn a_peer_that_stays_stopped_is_given_up() {
    for way in [WAYS[1], WAYS[4], WAYS[5]] {
        // Long enough for a busy machine to move what it can move.
        let deadline = Duration::from_secs(2);
        within(4 * deadline, || {
            let mut target = Target::start(way.0, 1, BYTES);
            let end = End::start(way, BYTES, deadline);
            let (endpoint, remote) = end.connect(&target);
            target.process.stop();
            let start = Instant::now();
            end.put(endpoint, TransferId(1), end.part(remote, BYTES / PIECE));
            let result = end.done(TransferId(1));
            let took = start.elapsed();
            assert_eq!(result, Err(PutError::Endpoint { source: Status::ERR_TIMED_OUT, settled: false }), "{way:?}");

            // What had left may still arrive when the peer goes on: the target is exposed until it says otherwise. Nothing else is
            // touched, and a new connection works.
            target.process.go_on();
            let (endpoint, remote) = end.connect(&target);
            end.put(endpoint, TransferId(2), end.part(remote, BYTES / PIECE));
            end.done(TransferId(2)).unwrap();
            assert!(target.holds(&pattern(BYTES)), "{way:?}");
            took
        });
    }
}

/// What silent peers keep of this side's memory nobody else is short of.
#[test]
fn silent_peers_hold_up_nobody_else() {
    let way = WAYS[4];
    let end = End::start(way, BYTES, DEADLINE);
    let mut targets: Vec<Target> = (1..=8).map(|epoch| Target::start(way.0, epoch, BYTES)).collect();
    let mut other = targets.pop().unwrap();
    let (endpoint, remote) = end.connect(&other);
    let start = Instant::now();
    for (target, first) in targets.iter().zip((MANY..).step_by(MANY as usize)) {
        let (endpoint, remote) = end.connect(target);
        (first..first + MANY)
            .for_each(|transfer| end.put(endpoint, TransferId(transfer), end.part(remote, BYTES / PIECE)));
        end.wait_for_progress();
        target.process.stop();
    }
    std::thread::sleep(Duration::from_millis(300)); // the sockets take what they take
    end.put(endpoint, TransferId(1), end.part(remote, BYTES / PIECE));
    end.done(TransferId(1)).unwrap();
    // Long before the first of them is given up.
    assert!(start.elapsed() < DEADLINE / 2, "{:?}", start.elapsed());
    assert!(other.holds(&pattern(BYTES)));
}

/// Transfers of a connection have their turns, and the peer moves all the time.
#[test]
fn a_transfer_that_waits_for_those_before_it_has_not_stalled() {
    const LARGE: u64 = 64 << 20;
    let (way, deadline) = (WAYS[4], Duration::from_millis(300));
    in_time(|| {
        let target = Target::start(way.0, 1, LARGE);
        let end = End::start(way, LARGE, deadline);
        let (endpoint, remote) = end.connect(&target);
        let start = Instant::now();
        (1..=40).for_each(|transfer| end.put(endpoint, TransferId(transfer), end.part(remote, LARGE / PIECE)));
        let well = (1..=40).all(|transfer| end.done(TransferId(transfer)).is_ok());
        assert!(!well || start.elapsed() > 2 * deadline, "too fast to show anything: {:?}", start.elapsed());
        well
    });
}

/// A cancel needs the peer where the peer writes the bytes itself; what the peer has no part in ends without it.
#[test]
fn a_cancel_waits_for_a_stopped_peer_only_where_that_writes_and_not_for_ever() {
    let deadline = Duration::from_secs(2);
    for way in [WAYS[0], WAYS[1], WAYS[4]] {
        in_time(|| {
            let mut cancelled = false;
            within(4 * deadline, || {
                let took;
                (cancelled, took) = cancelled_while_stopped(way, deadline);
                took
            });
            cancelled
        });
    }
}

/// Whether there was something left to cancel, and how long that took.
fn cancelled_while_stopped(way: Way, deadline: Duration) -> (bool, Duration) {
    let mut target = Target::start(way.0, 1, BYTES);
    let end = End::start(way, BYTES, deadline);
    let (endpoint, remote) = end.connect(&target);
    target.process.stop();
    // Many of them: a few may be over before they are given up where the peer is not needed.
    (1..=50).for_each(|transfer| end.put(endpoint, TransferId(transfer), end.part(remote, BYTES / PIECE)));
    if way.1 != Route::Direct {
        std::thread::sleep(deadline / 20); // what has not begun is given up without a word
    }
    (1..=50).for_each(|transfer| end.worker.cancel(TransferId(transfer)).unwrap());
    let start = Instant::now();
    let ends: Vec<_> = (1..=50).map(|transfer| end.done(TransferId(transfer))).collect();
    let took = start.elapsed();
    let cut_off = Err(PutError::Endpoint { source: Status::ERR_TIMED_OUT, settled: false });
    let expected = if way.1 == Route::Direct { Err(PutError::Cancelled) } else { cut_off };
    assert!(ends.iter().all(|end| *end == expected || *end == Err(PutError::Cancelled) || end.is_ok()), "{ends:?}");
    target.process.go_on();
    if way.1 == Route::Direct {
        // The connection is as good as before.
        end.put(endpoint, TransferId(51), end.part(remote, BYTES / PIECE));
        end.done(TransferId(51)).unwrap();
        assert!(target.holds(&pattern(BYTES)), "{way:?}");
    }
    (ends.contains(&expected), took)
}
