//! Frames of peers that are killed or stopped, and to them. The ways are those whose frames take a ring, and one where they do not.

use std::time::Instant;

use kvferry_wire::{Event, Route};

use crate::child::{LONG, Target, frame};
use crate::end::{DEADLINE, End, PIECE, Way};

const WAYS: [Way; 3] =
    [(None, Route::Direct), (Some("posix,sysv,cma,tcp"), Route::Direct), (Some("tcp"), Route::Staged)];

/// More than a ring and the sockets behind it take.
const FRAMES: u64 = 20_000;

/// The frames of `epoch` among the events, from number `next` up to what `over` says. Each must be the next.
fn hear(end: &End, epoch: u64, mut next: u64, mut over: impl FnMut(&Event, u64) -> bool) -> u64 {
    let until = Instant::now() + DEADLINE;
    loop {
        let event = end.events.recv_deadline(until).expect("the end within the deadline");
        match &event {
            Event::Frame(heard) if heard.source_epoch == epoch => {
                assert!((heard.kind, &heard.payload) == (frame(next).0, &frame(next).1), "frame {next}");
                next += 1;
            }
            Event::BadFrame(error) => panic!("{error}"),
            _ => {}
        }
        if over(&event, next) {
            return next;
        }
    }
}

/// What it had sent is all heard before it is said to be dead for certain, and nothing after.
#[test]
fn a_peer_that_is_killed_is_heard_out_before_it_is_said_to_be_dead() {
    const COUNT: u64 = 60; // together they fit into a ring
    for way in WAYS {
        let mut target = Target::start(way.0, 1, PIECE);
        let end = End::start(way, PIECE, DEADLINE);
        let (endpoint, _) = end.connect(&target);
        // When the first is heard, the offer of a ring has been.
        target.send(&end.worker, 0..1);
        assert_eq!(hear(&end, 1, 0, |_, heard| heard == 1), 1);
        target.send(&end.worker, 1..COUNT);
        target.process.kill();
        let is_dead = |event: &Event, _| matches!(event, Event::PeerDied { endpoint: dead } if *dead == endpoint);
        let heard = hear(&end, 1, 1, is_dead);
        println!("{way:?}: {heard} of {COUNT}");
        assert!(heard <= COUNT);
        assert!(!end.events.try_iter().any(|event| matches!(event, Event::Frame(_))), "{way:?}: after its death");
        // What the sockets had not taken is lost with the process, but not what it had published.
        assert!(heard == COUNT || way.0 == Some("tcp"), "{way:?}: {heard}");
    }
}

/// Killed in the middle: what is heard is a beginning of what was sent, and other peers go on.
#[test]
fn a_peer_that_is_killed_or_stopped_while_it_sends_holds_up_nobody_else() {
    for way in WAYS {
        let end = End::start(way, PIECE, DEADLINE);
        let mut stopped = Target::start(way.0, 1, PIECE);
        let mut killed = Target::start(way.0, 2, PIECE);
        let mut other = Target::start(way.0, 3, PIECE);
        let (endpoint, _) = end.connect(&killed);
        stopped.start_to_send(&end.worker, 0..FRAMES);
        hear(&end, 1, 0, |_, heard| heard == FRAMES / 20);
        stopped.process.stop();
        killed.start_to_send(&end.worker, 0..FRAMES);
        hear(&end, 2, 0, |_, heard| heard == FRAMES / 20);
        killed.process.kill();
        let until = Instant::now() + DEADLINE;
        while !matches!(end.events.recv_deadline(until).unwrap(), Event::PeerDied { endpoint: dead } if dead == endpoint)
        {
        }
        other.start_to_send(&end.worker, 0..1000);
        assert_eq!(hear(&end, 3, 0, |_, heard| heard == 1000), 1000);
        stopped.process.go_on();
        hear_up_to(&end, 1, FRAMES - 1);
    }
}

/// As [`hear`], of frames of which some may have come while others were listened to: up to number `last`.
fn hear_up_to(end: &End, epoch: u64, last: u64) {
    let mut heard_last = None;
    let until = Instant::now() + 3 * DEADLINE;
    while heard_last != Some(last as u16) {
        if let Event::Frame(heard) = end.events.recv_deadline(until).expect("the last frame")
            && heard.source_epoch == epoch
        {
            assert!(heard_last.is_none_or(|last| heard.kind == last + 1), "{} after {heard_last:?}", heard.kind);
            heard_last = Some(heard.kind);
        }
    }
}

/// UCX hands a frame over when its first part has come. The rest of one is late then, and that of another never comes.
#[test]
fn a_peer_that_is_killed_or_stopped_in_the_middle_of_a_frame_holds_up_nobody_else() {
    const COUNT: u64 = 100;
    let way = WAYS[2];
    let end = End::start(way, PIECE, DEADLINE);
    for round in 0..3 {
        let epoch = 3 * round + 1;
        let mut stopped = Target::start(way.0, epoch, PIECE);
        let mut killed = Target::start(way.0, epoch + 1, PIECE);
        let mut other = Target::start(way.0, epoch + 2, PIECE);
        let (endpoint, _) = end.connect(&killed);
        stopped.start_to_send(&end.worker, LONG..LONG + COUNT);
        hear(&end, epoch, LONG, |_, heard| heard == LONG + COUNT / 20);
        stopped.process.stop();
        killed.start_to_send(&end.worker, LONG..LONG + COUNT);
        hear(&end, epoch + 1, LONG, |_, heard| heard == LONG + COUNT / 20);
        killed.process.kill();
        let until = Instant::now() + DEADLINE;
        while !matches!(end.events.recv_deadline(until).unwrap(), Event::PeerDied { endpoint: dead } if dead == endpoint)
        {
        }
        other.start_to_send(&end.worker, 0..1000);
        hear(&end, epoch + 2, 0, |_, heard| heard == 1000);
        stopped.process.go_on();
        hear_up_to(&end, epoch, LONG + COUNT - 1);
    }
}

/// More than its ring takes: what finds no room waits.
#[test]
fn a_peer_that_was_stopped_hears_everything_in_order_when_it_goes_on() {
    for way in WAYS {
        let mut target = Target::start(way.0, 1, PIECE);
        let end = End::start(way, PIECE, DEADLINE);
        let endpoint = end.worker.connect(&target.address, target.epoch).unwrap();
        for round in 0..2 {
            if round == 1 {
                target.process.stop();
            }
            for (kind, payload) in (0..FRAMES / 4).map(frame) {
                end.worker.send(endpoint, kind, payload).unwrap();
            }
            end.worker.lanes(endpoint).unwrap(); // behind the others
            if round == 1 {
                target.process.go_on();
            }
            target.hears(FRAMES / 4);
        }
    }
}
