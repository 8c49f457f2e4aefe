//! SIGKILL of either side, at rest and at several points of a request.

use std::thread;
use std::time::{Duration, Instant};

use kvferry::{NotQuiet, PeerName, PostError, RequestError, TransferError};
use kvferry_match::Side;

use crate::child::{with_destination, with_source};
use crate::rank::{WAYS, Way, all_slots, key};

/// Much longer than anything here may take.
const PATIENCE: Duration = Duration::from_secs(20);

/// How soon a death must end the requests of the dead.
const NOTICE: Duration = Duration::from_secs(1);

/// When to kill, after the request was begun; `None`: before the other side has posted it.
const POINTS: [Option<Duration>; 5] = [
    None,
    Some(Duration::ZERO),
    Some(Duration::from_millis(3)),
    Some(Duration::from_millis(10)),
    Some(Duration::from_millis(25)),
];

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
            let receive = destination.receive(link, key(1, 0), &slots).unwrap();
            if let Some(after) = point {
                source.send(key(1, 0), &slots, 7).unwrap();
                thread::sleep(after);
            }
            source.kill();
            let killed = Instant::now();
            let outcome = receive.wait(PATIENCE).unwrap();
            let noticed = killed.elapsed();
            match outcome {
                Ok(_) => assert!(destination.holds(&slots, 7), "{way:?} {point:?}: said to be whole"),
                Err(error) => assert!(is_lost(&error, Side::Source), "{way:?} {point:?}: {error}"),
            }
            assert!(noticed < NOTICE, "{way:?} {point:?}: noticed after {noticed:?}");
            // The process has ended and all of it is taken in: a proof.
            let _quiet = receive
                .wait_quiet(PATIENCE)
                .unwrap_or_else(|error| panic!("{way:?} {point:?}: {error}: {:?}", destination.engine.quarantine()));
            let quiet = killed.elapsed();
            destination.guard(&slots);
            destination.watch(&slots, Duration::from_millis(300));
            assert!(destination.engine.quarantine().is_empty());
            let next = destination.receive(link, key(2, 0), &slots);
            assert!(matches!(next, Err(PostError::Lost(_))), "{way:?} {point:?}: {next:?}");
            println!("{way:?} {point:?}: noticed after {noticed:?}, quiet after {quiet:?}");
        }
    }
}

#[test]
fn a_send_ends_with_its_destination_and_its_slots_come_back() {
    for way in [Way::Direct, Way::Landing, Way::Tcp] {
        for point in POINTS {
            let (source, mut destination, link) = with_destination(way, PATIENCE);
            let slots = all_slots();
            source.fill(&slots, 7);
            if point.is_some() {
                destination.receive(key(1, 0), &slots).unwrap();
            }
            let send = source.send(link, key(1, 0), &slots).unwrap();
            thread::sleep(point.unwrap_or_default());
            destination.kill();
            let killed = Instant::now();
            let outcome = send.wait(PATIENCE).unwrap();
            let noticed = killed.elapsed();
            if let Err(error) = outcome {
                assert!(is_lost(&error, Side::Destination), "{way:?} {point:?}: {error}");
            }
            assert!(noticed < NOTICE, "{way:?} {point:?}: noticed after {noticed:?}");
            let quiet = send.wait_quiet(PATIENCE);
            assert!(quiet.is_ok(), "{way:?} {point:?}: {quiet:?}");
            assert_eq!(send.poll_quiet(), Err(NotQuiet::Given));
            println!("{way:?} {point:?}: noticed after {noticed:?}, quiet after {:?}", killed.elapsed());
        }
    }
}
