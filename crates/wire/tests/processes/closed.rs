//! An endpoint that this side closes, and a region that the other side gives up.

use std::time::{Duration, Instant};

use kvferry_test_process::{in_time, within};
use kvferry_wire::{PutError, Route, Status, TransferId, Version};

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

/// UCX pairs the endpoints of two workers by their numbers, whichever connections they serve: one that is closed must not take the
/// answers to another with it.
#[test]
fn a_connection_that_is_closed_does_not_end_others_to_its_peer() {
    const MOMENT: Duration = Duration::from_millis(100);
    for way in WAYS {
        let target = Target::start_asking(way.0, 1, BYTES);
        let end = End::start(way, BYTES, DEADLINE);
        let mut transfer = 0;
        let mut put = |endpoint, remote| {
            let start = Instant::now();
            while start.elapsed() < MOMENT {
                transfer += 1;
                end.put(endpoint, TransferId(transfer), end.part(remote, 64));
                end.done(TransferId(transfer)).unwrap_or_else(|error| panic!("{way:?}: {error:?}"));
            }
        };
        // Closed before the peer had anything to answer.
        let silent = end.worker.connect(&target.address, target.epoch).unwrap();
        end.worker.send(silent, 1, Vec::new()).unwrap();
        end.worker.close(silent).unwrap();
        let (first, to_first) = end.connect(&target);
        put(first, to_first);
        // And after it has, behind and before another.
        let (second, to_second) = end.connect(&target);
        end.worker.close(first).unwrap();
        put(second, to_second);
        let (third, _) = end.connect(&target);
        end.worker.close(third).unwrap();
        put(second, to_second);
    }
}

/// A connection that has to be cut may take the answers to another with it: who is not answered any more hears of it, and does not
/// wait for a deadline.
#[test]
fn a_source_whose_answers_were_cut_off_is_told() {
    for way in WAYS.into_iter().filter(|way| matches!(way.1, Route::Landing | Route::Staged)) {
        let target = Target::start_asking(way.0, 1, BYTES);
        let end = End::start(way, BYTES, DEADLINE);
        // The first endpoint that the target makes, to answer the second connection, is paired with that of the first.
        let first = end.worker.connect(&target.address, target.epoch).unwrap();
        let to_first = end.worker.import(first, &target.card).unwrap();
        end.worker.send(first, 1, Vec::new()).unwrap();
        let (second, to_second) = end.connect(&target);
        target.process.stop();
        end.put(first, TransferId(1), end.part(to_first, BYTES / PIECE));
        end.worker.close(first).unwrap();
        let _ = end.done(TransferId(1));
        std::thread::sleep(Duration::from_millis(700)); // cut
        target.process.go_on();
        let start = Instant::now();
        let mut results = Vec::new();
        while start.elapsed() < Duration::from_millis(500) && results.last().is_none_or(Result::is_ok) {
            end.put(second, TransferId(2), end.part(to_second, BYTES / PIECE));
            results.push(end.done(TransferId(2)));
        }
        let took = start.elapsed();
        println!("{way:?}: {:?} after {took:?}", results.last());
        assert!(took < DEADLINE / 2, "{way:?}: {took:?}");
        if end.context.ucx_version() < Version::new(1, 14, 0) && way.0 != Some("posix,sysv") {
            // Later releases, and shared memory, hit others, or none.
            let reset =
                |error: &PutError| matches!(error, PutError::Endpoint { source: Status::ERR_CONNECTION_RESET, .. });
            assert!(results.last().is_some_and(|result| result.as_ref().is_err_and(reset)), "{way:?}: {results:?}");
        }
        let (third, to_third) = end.connect(&target);
        end.put(third, TransferId(3), end.part(to_third, BYTES / PIECE));
        end.done(TransferId(3)).unwrap_or_else(|error| panic!("{way:?}: {error:?}"));
    }
}
