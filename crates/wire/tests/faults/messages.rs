//! The messages of the inbox: the source's are Hello, Describe and the chunks, the target's grants and the end.

use kvferry_fake_ucx::{Act, Fault, Rule, Script};
use kvferry_test_process::in_time;
use kvferry_wire::{Context, EndpointId, Event, FrameError, PutError, Route, Status, TransferId, Worker};

use super::{STALL, Stage, once, play};
use crate::suite::end::{DEADLINE, End, Way, filled, pair, pattern, side_by_side};

/// Messages of either side that a transfer of [`super::BYTES`] has at most, and some more.
const MESSAGES: u64 = 26;

fn each_message(check: impl Fn(Route, usize, u64)) {
    for route in [Route::Landing, Route::Staged] {
        for worker in [0, 1] {
            (0..MESSAGES).for_each(|nth| check(route, worker, nth));
        }
    }
}

const TIMED_OUT: Result<(), PutError> = Err(PutError::Endpoint { source: Status::ERR_TIMED_OUT, settled: false });

pub(crate) fn a_lost_message_costs_at_most_the_stall_deadline() {
    for route in [Route::Landing, Route::Staged] {
        // Hello, Describe, a chunk, the last chunk; a grant.
        for (worker, nth) in [(0, 0), (0, 1), (0, 2), (0, 11), (0, 21), (1, 0)] {
            let _session = once(worker, Act::Send, nth, Fault::Lose);
            let stage = Stage::new(route, STALL);
            stage.put(1);
            assert_eq!(stage.end(), (TIMED_OUT, true), "{route}, message {nth} of {worker}");
        }
    }
}

pub(crate) fn a_message_that_comes_twice_or_late_changes_nothing() {
    each_message(|route, worker, nth| {
        for fault in [Fault::Double, Fault::Delay(100)] {
            let _session = once(worker, Act::Send, nth, fault);
            let stage = Stage::new(route, DEADLINE);
            stage.put(1);
            assert_eq!(stage.end(), (Ok(()), false), "{route}, {fault:?} of message {nth} of {worker}");
            assert!(stage.is_whole(), "{route}, {fault:?} of message {nth} of {worker}");
            stage.check_next("after it");
        }
    });
}

pub(crate) fn a_message_that_is_overtaken_or_damaged_ends_its_transfer_or_changes_nothing() {
    each_message(|route, worker, nth| {
        let _session = once(worker, Act::Send, nth, Fault::Overtaken);
        let stage = Stage::new(route, STALL);
        stage.put(1);
        match stage.end() {
            (Ok(()), false) => assert!(stage.is_whole(), "{route}, message {nth} of {worker} is overtaken"),
            (TIMED_OUT, true) => {}
            end => panic!("{route}, message {nth} of {worker} is overtaken: {end:?}"),
        }
    });
    // Behind the header and the name of the connection; what is damaged on its way is not told from what was meant.
    for place in [0, 3, 5, 20, 29, 40, 45, 46, 47, 49, 56] {
        for (route, worker, nth) in
            [(Route::Landing, 0, 0), (Route::Landing, 0, 1), (Route::Staged, 0, 3), (Route::Staged, 1, 0)]
        {
            let _session = once(worker, Act::Send, nth, Fault::Damage(place));
            let stage = Stage::new(route, STALL);
            stage.put(1);
            let (result, _) = stage.end();
            println!("{route}, byte {place} of message {nth} of {worker}: {result:?}");
            drop(stage);
        }
    }
}

/// UCX loses nothing, but what a peer says of its frames is a claim: this is one that has left one out.
pub(crate) fn a_lost_frame_is_missed_and_fails_the_connection() {
    // The offer of a ring is the first message, and the frames that are too long for one are the next two; the others go through it.
    let _session = once(0, Act::Send, 2, Fault::Lose);
    let [a, b] = pair(&Way::all(None, true)[0]);
    let say = |from: &End, kind: u16, bytes: usize| from.worker.send(from.to_peer, kind, vec![0; bytes]).unwrap();
    say(&a, 1, 100_000);
    assert_eq!(b.frame().kind, 1);
    say(&a, 2, 0);
    assert_eq!(b.frame().kind, 2);
    say(&a, 3, 100_000);
    say(&a, 4, 0);
    say(&a, 5, 100_000);
    let missing = |event: &Event| matches!(event, Event::BadFrame(FrameError::Ring { epoch }) if *epoch == a.epoch);
    let event = b.event();
    assert!(missing(&event), "{event:?}");
    match b.event() {
        Event::EndpointFailed { endpoint, status: Status::ERR_IO_ERROR } => assert_eq!(endpoint, b.to_peer),
        event => panic!("{event:?}"),
    }
    // Nothing more of it is heard, and its sender finds out when it says more.
    say(&a, 6, 0);
    say(&a, 7, 100_000);
    match a.event() {
        Event::EndpointFailed { endpoint, status: Status::ERR_CONNECTION_RESET } => assert_eq!(endpoint, a.to_peer),
        event => panic!("{event:?}"),
    }
    // A new connection is another stream.
    let again = a.worker.connect(b.worker.address(), b.epoch).unwrap();
    a.worker.send(again, 8, Vec::new()).unwrap();
    assert_eq!(b.frame().kind, 8);
}

/// Its sender was killed in the middle of it, or stopped. UCX hands over what there is, and waits for the rest without an end.
pub(crate) fn a_message_that_comes_in_part_holds_up_its_own_connection_only() {
    let _session = once(0, Act::Send, 1, Fault::Tear);
    let way = super::way(Route::Direct, DEADLINE);
    let [a, b] = pair(&way);
    let say = |from: &Worker, endpoint: EndpointId, kind: u16| from.send(endpoint, kind, vec![0; 100]).unwrap();
    say(&a.worker, a.to_peer, 1);
    assert_eq!(b.frame().kind, 1);
    say(&a.worker, a.to_peer, 2);
    say(&a.worker, a.to_peer, 3);
    let context = Context::open(&way.options).unwrap();
    let (c, _events) = Worker::start(&context, 0xc).unwrap();
    let again = a.worker.connect(b.worker.address(), b.epoch).unwrap();
    let from_c = c.connect(b.worker.address(), b.epoch).unwrap();
    for (from, endpoint, kind) in [(&c, from_c, 4), (&*a.worker, again, 5), (&c, from_c, 6)] {
        say(from, endpoint, kind);
        assert_eq!(b.frame().kind, kind);
    }
}

/// Behind its goodbye the inbox gives its chunks to others: a put that is still under way then would hit them.
pub(crate) fn a_connection_is_left_when_its_puts_have_landed() {
    if !super::operations::putting().contains(&Route::Staged) {
        return; // its chunks are messages
    }
    in_time(|| {
        let session = once(0, Act::Put, 0, Fault::Delay(30_000));
        let [a, b] = pair(&super::way(Route::Staged, DEADLINE).roomy());
        let (source, target) = (filled(&a.context, &pattern(90_000)), b.context.allocate(90_000).unwrap());
        let remote = a.worker.import(a.to_peer, &target.card()).unwrap();
        a.put(1, side_by_side((&source, 0), (remote, 0), 500, 180));
        std::thread::sleep(STALL / 20); // its only chunk is on its way
        a.worker.close(a.to_peer).unwrap();
        let (_, result) = a.done();
        drop(a);
        match result {
            Err(PutError::Endpoint { source: Status::ERR_CANCELED, .. }) => assert_eq!(session.cut_puts(), 0),
            result => assert!(result.is_ok(), "{result:?}"),
        }
        result.is_err() // else it had landed before the connection was closed: a busy machine
    });
}

/// The transfer waits for a grant that is lost, so that the cancel is the source's third message and its answer the target's
/// second.
pub(crate) fn a_cancel_that_is_not_answered_ends_at_the_stall_deadline() {
    let lost = |worker, nth| Rule { worker, act: Act::Send, nth, fault: Fault::Lose };
    let cases = [
        (None, DEADLINE, Err(PutError::Cancelled)),
        (Some((0, 2)), STALL, TIMED_OUT),
        (Some((1, 1)), STALL, TIMED_OUT),
    ];
    for route in [Route::Landing, Route::Staged] {
        for (second, deadline, expected) in cases {
            let rules: Vec<Rule> =
                [Some((1, 0)), second].into_iter().flatten().map(|(worker, nth)| lost(worker, nth)).collect();
            in_time(|| {
                let _session = play(Script { rules: rules.clone(), ..Script::default() });
                let stage = Stage::new(route, deadline);
                stage.put(1);
                std::thread::sleep(STALL / 4); // so that it is under way, or else it ends without a word to its target
                stage.a.worker.cancel(TransferId(1)).unwrap();
                let (result, failed) = stage.end();
                assert_eq!(failed, result == TIMED_OUT, "{route}, {second:?}: {result:?}");
                if !failed {
                    stage.check_next("after the cancel");
                }
                assert!(result == expected || result == Err(PutError::Cancelled), "{route}, {second:?}: {result:?}");
                result == expected
            });
        }
    }
}

/// Well before the stall deadline, and a new connection is as good as the first.
pub(crate) fn a_source_whose_answers_are_cut_off_is_told() {
    const BROKEN: Status = Status::ERR_IO_ERROR;
    for route in [Route::Landing, Route::Staged] {
        let mut cut = 0;
        // Grants, and the end.
        for nth in 0..6 {
            let _session = once(1, Act::Send, nth, Fault::Break(BROKEN));
            let mut stage = Stage::new(route, DEADLINE);
            stage.put(1);
            match stage.end() {
                (Ok(()), false) => assert!(stage.is_whole(), "{route}, message {nth}"),
                (Err(PutError::Endpoint { source: Status::ERR_CONNECTION_RESET, settled: false }), true) => {
                    cut += 1;
                    stage.connect_again();
                }
                end => panic!("{route}, message {nth}: {end:?}"),
            }
            stage.check_next(&format!("{route}, message {nth}"));
        }
        assert!(cut > 1, "{route}: {cut}");
    }
}
