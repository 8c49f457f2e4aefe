//! SIGKILL of either side, at rest and at every point of a request.

use std::time::{Duration, Instant};

use kvferry::{NotQuiet, PeerName, PostError, RequestError, TransferError};
use kvferry_match::Side;

use crate::child::{with_destination, with_source};
use crate::points::{POINTS, Point};
use crate::rank::{WAYS, all_slots, key};

/// Much longer than anything here may take.
const PATIENCE: Duration = Duration::from_secs(20);

/// How soon a death must end the requests of the dead.
const NOTICE: Duration = Duration::from_secs(1);

fn is_lost(error: &RequestError, side: Side) -> bool {
    let by = |error: &TransferError| match error {
        TransferError::Lost { peer, .. } | TransferError::Put { peer, .. } => *peer == PeerName { side, rank: 0 },
        _ => false,
    };
    error.errors.iter().all(|part| by(&part.error))
}

#[test]
fn a_receive_ends_with_its_source_and_its_slots_come_back() {
    for way in WAYS {
        for point in POINTS {
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
            // Either the death has been noticed, or the request finds out.
            if let Some(receive) = posted.or_else(|| post().ok()) {
                let outcome = receive.wait(PATIENCE).unwrap();
                let noticed = killed.elapsed();
                assert!(outcome.is_ok() || !point.is_after(), "{way:?} {point:?}: {outcome:?}");
                match outcome {
                    Ok(_) => assert!(destination.holds(&slots, 7), "{way:?} {point:?}: said to be whole"),
                    Err(error) => assert!(is_lost(&error, Side::Source), "{way:?} {point:?}: {error}"),
                }
                assert!(noticed < NOTICE, "{way:?} {point:?}: noticed after {noticed:?}");
                // The process has ended and all of it is taken in: a proof.
                match receive.wait_quiet(PATIENCE) {
                    Err(NotQuiet::Given) if point == Point::Quiet => {}
                    quiet => drop(quiet.unwrap_or_else(|error| {
                        panic!("{way:?} {point:?}: {error}: {:?}", destination.engine.quarantine())
                    })),
                }
                println!("{way:?} {point:?}: noticed after {noticed:?}, quiet after {:?}", killed.elapsed());
                destination.guard(&slots);
                destination.watch(&slots, Duration::from_millis(300));
            }
            assert!(destination.engine.quarantine().is_empty());
            let next = destination.receive(link, key(2, 0), &slots);
            assert!(matches!(next, Err(PostError::Lost(_))), "{way:?} {point:?}: {next:?}");
        }
    }
}

#[test]
fn a_send_ends_with_its_destination_and_its_slots_come_back() {
    for way in WAYS {
        for point in POINTS {
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
            let Some(send) = posted.or_else(|| post().ok()) else { continue };
            let outcome = send.wait(PATIENCE).unwrap();
            let noticed = killed.elapsed();
            assert!(outcome.is_ok() || !point.is_after(), "{way:?} {point:?}: {outcome:?}");
            if let Err(error) = outcome {
                assert!(is_lost(&error, Side::Destination), "{way:?} {point:?}: {error}");
            }
            assert!(noticed < NOTICE, "{way:?} {point:?}: noticed after {noticed:?}");
            let quiet = send.wait_quiet(PATIENCE);
            assert!(quiet.is_ok() || point == Point::Quiet, "{way:?} {point:?}: {quiet:?}");
            assert_eq!(send.poll_quiet(), Err(NotQuiet::Given));
            println!("{way:?} {point:?}: noticed after {noticed:?}, quiet after {:?}", killed.elapsed());
        }
    }
}
