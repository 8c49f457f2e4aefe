//! SIGSTOP and SIGCONT of either side: the progress deadline holds, and slots that a frozen peer may write stay away until it
//! has gone on and said that it will not.

use std::thread;
use std::time::{Duration, Instant};

use kvferry::{NotQuiet, QuarantineReason, TransferError};

use crate::child::{with_destination, with_source};
use crate::rank::{WAYS, all_slots, key};

const PATIENCE: Duration = Duration::from_millis(1500);

/// Time to answer, once there is a reason to.
const LONG: Duration = Duration::from_secs(20);

/// A deadline is kept within a tenth; the rest is for a busy machine.
const LATE: Duration = Duration::from_millis(150 + 850);

const POINTS: [Option<Duration>; 3] = [None, Some(Duration::from_millis(2)), Some(Duration::from_millis(15))];

#[test]
fn a_frozen_source_may_write_until_it_has_gone_on_and_stopped() {
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
            source.stop();
            let stopped = Instant::now();
            let outcome = receive.wait(LONG).unwrap();
            let ended = stopped.elapsed();
            let Err(error) = outcome else {
                assert!(destination.holds(&slots, 7), "{way:?} {point:?}: said to be whole");
                continue; // it was over before
            };
            let stalled = error.errors.iter().all(|part| matches!(part.error, TransferError::Stalled { .. }));
            assert!(stalled, "{way:?} {point:?}: {error}");
            // The last sign of life came before the signal, or right after it from what was on its way.
            assert!(ended < PATIENCE + LATE, "{way:?} {point:?}: ended after {ended:?}");
            assert_eq!(receive.poll_quiet(), Err(NotQuiet::Waiting), "{way:?} {point:?}: it may go on and write");
            let quarantine = destination.engine.quarantine();
            assert_eq!(quarantine.len(), 1, "{way:?} {point:?}: {quarantine:?}");
            assert_eq!((quarantine[0].key, quarantine[0].slots), (key(1, 0), slots.len()));
            assert_eq!(quarantine[0].why, QuarantineReason::NoAnswer, "{}", quarantine[0]);
            source.go_on();
            let went_on = Instant::now();
            let _quiet = receive
                .wait_quiet(LONG)
                .unwrap_or_else(|error| panic!("{way:?} {point:?}: {error}: {:?}", destination.engine.quarantine()));
            let quiet = went_on.elapsed();
            destination.guard(&slots);
            destination.watch(&slots, Duration::from_millis(500));
            println!("{way:?} {point:?}: ended after {ended:?}, quiet {quiet:?} after it went on");
        }
    }
}

#[test]
fn a_frozen_destination_is_given_up_at_the_deadline() {
    for way in WAYS {
        let (source, mut destination, link) = with_destination(way, PATIENCE);
        let slots = all_slots();
        source.fill(&slots, 7);
        // Nothing is asked for: the send waits.
        destination.stop();
        let posted = Instant::now();
        let send = source.send(link, key(1, 0), &slots).unwrap();
        let error = send.wait(LONG).unwrap().unwrap_err();
        let ended = posted.elapsed();
        let stalled = error.errors.iter().all(|part| matches!(part.error, TransferError::Stalled { .. }));
        assert!(stalled, "{way:?}: {error}");
        assert!(ended >= PATIENCE && ended < PATIENCE + LATE, "{way:?}: ended after {ended:?}");
        assert!(send.wait_quiet(LONG).is_ok(), "{way:?}: nothing is read any more");
        // It goes on, and what comes next goes well.
        destination.go_on();
        let deadline = Instant::now() + LONG;
        for attempt in 1.. {
            assert!(Instant::now() < deadline, "{way:?}: nothing moves any more");
            if destination.receive(key(2, attempt), &slots).is_err() {
                continue;
            }
            let Ok(send) = source.send(link, key(2, attempt), &slots) else { continue };
            if send.wait(LONG).unwrap().is_ok() {
                assert_eq!(destination.outcome(key(2, attempt)), Ok(()));
                break;
            }
        }
    }
}
