//! SIGKILL of either side, at rest and at every point of a request.

use std::time::{Duration, Instant};

use kvferry::{NotQuiet, PeerName, PostError, RequestError, TransferError};
use kvferry_match::Side;
use kvferry_test_process::within;

use crate::child::{with_destination, with_source};
use crate::points::{POINTS, Point};
use crate::rank::{WAYS, Way, all_slots, key};

/// Much longer than anything here may take.
const PATIENCE: Duration = Duration::from_secs(20);

/// How soon a death must end the requests of the dead.
const NOTICE: Duration = Duration::from_secs(1);

fn is_lost(error: &RequestError, side: Side) -> bool {
    let by = |error: &TransferError| match error {
        TransferError::Lost { peer, .. } => *peer == PeerName { side, rank: 0 },
        _ => false,
    };
    error.errors.iter().all(|part| by(&part.error))
}

#[test]
fn a_receive_ends_with_its_source_and_its_slots_come_back() {
    for way in WAYS {
        for point in POINTS {
            within(NOTICE, || receive_of_a_killed_source(way, point));
        }
    }
}

/// How long the receive went on after its source.
fn receive_of_a_killed_source(way: Way, point: Point) -> Duration {
    let (mut source, destination, link) = with_source(way, PATIENCE);
    let slots = all_slots();
    destination.guard(&slots);
    let post = || destination.receive(link, key(1, 0), &slots);
    let posted = (point != Point::Idle).then(|| post().unwrap());
    if point.is_in_the_middle() {
        source.send(key(1, 0), &slots, 7).unwrap();
    }
    posted.iter().for_each(|receive| point.await_receive(&destination, receive));
    let killed = Instant::now();
    source.process.kill();
    let mut noticed = Duration::ZERO;
    // Either the death has been noticed, or the request finds out.
    if let Some(receive) = posted.or_else(|| post().ok()) {
        let outcome = receive.wait(PATIENCE).unwrap();
        noticed = killed.elapsed();
        assert!(outcome.is_ok() || !point.is_after(), "{way:?} {point:?}: {outcome:?}");
        match outcome {
            Ok(_) => assert!(destination.holds(&slots, 7), "{way:?} {point:?}: said to be whole"),
            Err(error) => assert!(is_lost(&error, Side::Source), "{way:?} {point:?}: {error}"),
        }
        // The process has ended and all of it is taken in: a proof.
        match receive.wait_quiet(PATIENCE) {
            Err(NotQuiet::Given) if point == Point::Quiet => {}
            quiet => {
                drop(quiet.unwrap_or_else(|error| {
                    panic!("{way:?} {point:?}: {error}: {:?}", destination.engine.quarantine())
                }))
            }
        }
        println!("{way:?} {point:?}: noticed after {noticed:?}, quiet after {:?}", killed.elapsed());
        destination.guard(&slots);
        destination.watch(&slots, Duration::from_millis(300));
    }
    // What had ended well before has noticed nothing; what comes next does, and then the one after it is refused.
    for attempt in 0.. {
        match destination.receive(link, key(2, attempt), &slots) {
            Err(PostError::Lost(_)) => break,
            Ok(receive) if attempt == 0 => {
                let error = receive.wait(PATIENCE).unwrap().unwrap_err();
                assert!(is_lost(&error, Side::Source), "{way:?} {point:?}: {error}");
                let _quiet = receive.wait_quiet(PATIENCE).unwrap();
                noticed = killed.elapsed();
            }
            next => panic!("{way:?} {point:?}: {next:?}"),
        }
    }
    assert!(destination.engine.quarantine().is_empty());
    noticed
}

#[test]
fn a_send_ends_with_its_destination_and_its_slots_come_back() {
    for way in WAYS {
        for point in POINTS {
            within(NOTICE, || send_to_a_killed_destination(way, point));
        }
    }
}

/// How long the send went on after its destination.
fn send_to_a_killed_destination(way: Way, point: Point) -> Duration {
    let (source, mut destination, link) = with_destination(way, PATIENCE);
    let slots = all_slots();
    source.fill(&slots, 7);
    if point.is_in_the_middle() {
        destination.receive(key(1, 0), &slots).unwrap();
    }
    let post = || source.send(link, key(1, 0), &slots);
    let posted = (point != Point::Idle).then(|| post().unwrap());
    posted.iter().for_each(|send| point.await_send(send));
    let killed = Instant::now();
    destination.process.kill();
    let Some(send) = posted.or_else(|| post().ok()) else { return Duration::ZERO };
    let outcome = send.wait(PATIENCE).unwrap();
    let noticed = killed.elapsed();
    assert!(outcome.is_ok() || !point.is_after(), "{way:?} {point:?}: {outcome:?}");
    if let Err(error) = outcome {
        assert!(is_lost(&error, Side::Destination), "{way:?} {point:?}: {error}");
    }
    let quiet = send.wait_quiet(PATIENCE);
    assert!(quiet.is_ok() || point == Point::Quiet, "{way:?} {point:?}: {quiet:?}");
    assert_eq!(send.poll_quiet(), Err(NotQuiet::Given));
    println!("{way:?} {point:?}: noticed after {noticed:?}, quiet after {:?}", killed.elapsed());
    noticed
}
