//! An endpoint that this side closes, and a region that the other side gives up.

use std::time::{Duration, Instant};

use kvferry_test_process::{in_time, within};
use kvferry_wire::{PutError, Route, Status, TransferId};

use crate::child::Target;
use crate::end::{DEADLINE, End, MANY, PIECE, WAYS, Way};

const BYTES: u64 = 16 << 20;

/// Ends at once. What had been posted, or granted and filled, may arrive until the peer has heard of it; nothing does later.
#[test]
fn a_closed_endpoint_ends_its_transfers_and_then_nothing_arrives_any_more() {
    for way in WAYS {
        in_time(|| {
            let mut cut = 0;
            within(Duration::from_secs(2), || {
                let took;
                (cut, took) = closed_during_transfers(way);
                took
            });
            cut > 0
        });
    }
}

/// How many transfers ended with their endpoint, and when the last was over.
fn closed_during_transfers(way: Way) -> (u64, Duration) {
    let mut target = Target::start(way.0, 1, BYTES);
    let end = End::start(way, BYTES, DEADLINE);
    let (endpoint, remote) = end.connect(&target);
    for transfer in 1..=MANY {
        end.put(endpoint, TransferId(transfer), end.part(remote, BYTES / PIECE));
    }
    end.wait_for_progress();
    let start = Instant::now();
    end.worker.close(endpoint).unwrap();
    let mut cut = 0;
    for transfer in 1..=MANY {
        match end.done(TransferId(transfer)) {
            Ok(_) => {}
            Err(PutError::Endpoint { source: Status::ERR_CANCELED, .. }) => cut += 1,
            Err(error) => panic!("{way:?}: {error:?}"),
        }
    }
    let took = start.elapsed();
    std::thread::sleep(Duration::from_millis(100));
    // A second connection overwrites everything with something else: whatever came late would show.
    let later = vec![0xcc; BYTES as usize];
    end.pool.write(0, &later).unwrap();
    let (endpoint, remote) = end.connect(&target);
    end.put(endpoint, TransferId(99), end.part(remote, BYTES / PIECE));
    end.done(TransferId(99)).unwrap();
    std::thread::sleep(Duration::from_millis(200));
    assert!(target.holds(&later), "{way:?}: late bytes");
    (cut, took)
}

#[test]
fn a_region_that_its_owner_has_given_up_is_refused_by_name() {
    for way in WAYS {
        let mut target = Target::start(way.0, 1, PIECE);
        let end = End::start(way, PIECE, DEADLINE);
        let (endpoint, remote) = end.connect(&target);
        target.unregister();
        end.put(endpoint, TransferId(1), end.part(remote, 1));
        let result = end.done(TransferId(1));
        let expected = PutError::Withdrawn { base: target.card.base, bytes: target.card.bytes };
        if way == (Some("tcp"), Route::Runs) {
            // Nothing looks at a plain put over a socket: UCX writes where it says, or breaks the connection.
            println!("{way:?}: {result:?}");
        } else {
            assert_eq!(result, Err(expected), "{way:?}");
        }
    }
}
