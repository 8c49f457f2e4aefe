//! Puts, flushes, endpoints and peers.

use kvferry_fake_ucx::{Act, Fault};
use kvferry_wire::{Event, PutError, Route, Status, TransferId, Version};

use super::{Stage, once};
use crate::VERSION;
use crate::suite::end::DEADLINE;

const BROKEN: Status = Status::ERR_IO_ERROR;

/// Routes that put.
pub(super) fn putting() -> Vec<Route> {
    // Before 1.16 staged chunks are messages.
    if VERSION < Version::new(1, 16, 0) { vec![Route::Runs] } else { vec![Route::Runs, Route::Staged] }
}

pub(crate) fn a_put_that_fails_fails_its_transfer_and_not_the_next() {
    for route in putting() {
        // The first two complete in their call or later; the last of the runs is number 39, of the chunks 19.
        for nth in [0, 1, 2, 7, 19] {
            let _session = once(0, Act::Put, nth, Fault::Fail(BROKEN));
            let stage = Stage::new(route, DEADLINE);
            stage.put(1);
            assert_eq!(stage.end(), (Err(PutError::Put { source: BROKEN }), false), "{route}, put {nth}");
            (0..3).for_each(|_| stage.check_next(&format!("{route}, after put {nth}")));
        }
    }
}

pub(crate) fn a_get_that_fails_fails_its_transfer_and_not_the_next() {
    for nth in [0, 1, 2, 39] {
        let _session = once(0, Act::Get, nth, Fault::Fail(BROKEN));
        let stage = Stage::new(Route::Runs, DEADLINE);
        stage.pull(1);
        assert_eq!(stage.end(), (Err(PutError::Get { source: BROKEN }), false), "get {nth}");
        stage.pull(2);
        assert_eq!(stage.end(), (Ok(()), false), "after get {nth}");
        stage.check_next("after a get");
    }
}

pub(crate) fn a_flush_that_fails_fails_its_transfer_and_not_the_next() {
    for route in putting() {
        let _session = once(0, Act::Flush, 0, Fault::Fail(BROKEN));
        let stage = Stage::new(route, DEADLINE);
        stage.put(1);
        let error = PutError::Flush { source: BROKEN };
        assert_eq!(stage.end(), (Err(error), false), "{route}");
        assert!(error.may_still_arrive());
        (0..3).for_each(|_| stage.check_next(&format!("{route}, after the flush")));
    }
}

/// What an endpoint's end may look like to a transfer of it.
fn is_cut(result: &Result<(), PutError>) -> bool {
    matches!(result, Err(PutError::Endpoint { .. } | PutError::Put { .. } | PutError::Flush { .. }))
}

/// Every operation of the source at which it can happen, until nothing happens any more.
fn cut_at_every_operation(fault: Fault) {
    for route in [Route::Direct, Route::Landing, Route::Staged, Route::Runs] {
        for act in [Act::Put, Act::Send, Act::Flush] {
            let mut cuts = 0;
            for nth in [0, 1, 2, 3, 5, 8, 12] {
                let _session = once(0, act, nth, fault);
                let stage = Stage::new(route, DEADLINE);
                let [other_a, other_b] = crate::suite::end::pair(&super::way(route, DEADLINE));
                stage.put(1);
                stage.put(2);
                let ends = [stage.end(), stage.end()];
                let cut = ends.iter().filter(|(result, _)| is_cut(result)).count();
                assert!(
                    ends.iter().all(|(result, _)| result.is_ok() || is_cut(result)),
                    "{route} {act:?} {nth}: {ends:?}"
                );
                if cut > 0 {
                    cuts += 1;
                    if !ends.iter().any(|(_, failed)| *failed) {
                        let event = stage.a.event();
                        assert!(matches!(event, Event::EndpointFailed { .. }), "{route} {act:?} {nth}: {event:?}");
                    }
                    // The endpoint is gone; nothing of the worker's is else.
                    stage.put(3);
                    assert!(is_cut(&stage.end().0), "{route} {act:?} {nth}");
                }
                let (from, to) = (other_a.context.allocate(5000).unwrap(), other_b.context.allocate(5000).unwrap());
                let remote = other_a.worker.import(other_a.to_peer, &to.card()).unwrap();
                other_a.put(4, crate::suite::end::side_by_side((&from, 0), (remote, 0), 500, 10));
                let (transfer, result) = other_a.done();
                assert!(transfer == TransferId(4) && result.is_ok(), "{route} {act:?} {nth}: {result:?}");
            }
            let used = match route {
                Route::Direct => false,
                Route::Landing => act == Act::Send,
                Route::Staged => act == Act::Send || putting().contains(&Route::Staged),
                _ => act != Act::Send,
            };
            assert_eq!(cuts > 0, used, "{route} {act:?}");
        }
    }
}

pub(crate) fn an_endpoint_that_fails_ends_its_transfers_and_no_others() {
    cut_at_every_operation(Fault::Break(BROKEN));
}

pub(crate) fn a_peer_that_dies_ends_its_transfers_and_no_others() {
    cut_at_every_operation(Fault::KillPeer);
}
