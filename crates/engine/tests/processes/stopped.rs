//! SIGSTOP and SIGCONT of either side: the progress deadline holds, and slots that a frozen peer may write stay away until it
//! has gone on and said that it will not.

use std::time::{Duration, Instant};

use kvferry::{Link, NotQuiet, QuarantineReason, TransferError};
use kvferry_test_process::{in_time, within};

use crate::child::{Other, with_destination, with_source};
use crate::points::{POINTS, Point};
use crate::rank::{Rank, WAYS, Way, all_slots, key};

const PATIENCE: Duration = Duration::from_secs(2);

/// Time to answer, once there is a reason to.
const LONG: Duration = Duration::from_secs(20);

/// A deadline is kept within a tenth.
const LATE: Duration = Duration::from_millis(200);

/// The machine is so busy that a peer made no progress in all of the patience, without having been stopped.
const SLOW: Duration = Duration::MAX;

#[test]
fn a_frozen_source_that_writes_may_do_so_until_it_has_gone_on_and_stopped() {
    receives_of_a_frozen_source(Way::Direct);
}

#[test]
fn a_frozen_source_that_lands_is_not_waited_for() {
    receives_of_a_frozen_source(Way::Landing);
}

#[test]
fn a_frozen_source_over_tcp_is_waited_for_where_it_may_write() {
    receives_of_a_frozen_source(Way::Tcp);
}

fn receives_of_a_frozen_source(way: Way) {
    for point in POINTS {
        within(PATIENCE + LATE, || receive_of_a_frozen_source(way, point));
    }
}

/// How long the receive went on after its source had been stopped.
fn receive_of_a_frozen_source(way: Way, point: Point) -> Duration {
    let (mut source, destination, link) = with_source(way, PATIENCE);
    let slots = all_slots();
    destination.guard(&slots);
    let post = || destination.receive(link, key(1, 0), &slots).unwrap();
    let posted = (point != Point::Idle).then(post);
    if point.is_in_the_middle() {
        source.send(key(1, 0), &slots, 7).unwrap();
    }
    posted.iter().for_each(|receive| point.await_receive(&destination, receive));
    if posted.iter().any(|receive| matches!(receive.poll(), Some(Err(_)))) {
        return SLOW;
    }
    source.process.stop();
    let stopped = Instant::now();
    let receive = posted.unwrap_or_else(post);
    let outcome = receive.wait(LONG).unwrap();
    let ended = stopped.elapsed();
    assert!(outcome.is_ok() || !point.is_after(), "{way:?} {point:?}: {outcome:?}");
    let Err(error) = outcome else {
        assert!(destination.holds(&slots, 7), "{way:?} {point:?}: said to be whole");
        return Duration::ZERO; // it was over before
    };
    // The last sign of life came before the signal, or right after it from what was on its way.
    if ended >= PATIENCE + LATE {
        return ended; // and so late that the wire may have cut it off
    }
    let stalled = error.errors.iter().all(|part| matches!(part.error, TransferError::Stalled { .. }));
    assert!(stalled, "{way:?} {point:?}: {error}");
    // What this side writes itself, from its inbox, it needs nobody's word for.
    if point.is_in_the_middle() && destination.takes_inbox(way) {
        let _quiet = receive
            .wait_quiet(LONG)
            .unwrap_or_else(|error| panic!("{way:?} {point:?}: {error}: {:?}", destination.engine.quarantine()));
        destination.guard(&slots);
        source.process.go_on();
        destination.watch(&slots, Duration::from_millis(500));
        println!("{way:?} {point:?}: ended after {ended:?}, quiet without the source");
        return ended;
    }
    assert_eq!(receive.poll_quiet(), Err(NotQuiet::Waiting), "{way:?} {point:?}: it may go on and write");
    let quarantine = destination.engine.quarantine();
    assert_eq!(quarantine.len(), 1, "{way:?} {point:?}: {quarantine:?}");
    assert_eq!((quarantine[0].key, quarantine[0].slots), (key(1, 0), slots.len()));
    assert_eq!(quarantine[0].why, QuarantineReason::NoAnswer, "{}", quarantine[0]);
    source.process.go_on();
    let went_on = Instant::now();
    let _quiet = receive
        .wait_quiet(LONG)
        .unwrap_or_else(|error| panic!("{way:?} {point:?}: {error}: {:?}", destination.engine.quarantine()));
    let quiet = went_on.elapsed();
    destination.guard(&slots);
    destination.watch(&slots, Duration::from_millis(500));
    println!("{way:?} {point:?}: ended after {ended:?}, quiet {quiet:?} after it went on");
    ended
}

#[test]
fn a_frozen_destination_is_given_up_at_the_deadline() {
    for way in WAYS {
        let (source, mut destination, link) = with_destination(way, PATIENCE);
        source.fill(&all_slots(), 7);
        let mut requests = 0..;
        for point in POINTS {
            within(PATIENCE + LATE, || {
                let request = requests.next().unwrap();
                send_to_a_frozen_destination((&source, link), &mut destination, request, (way, point))
            });
        }
    }
}

/// How long the send went on after its destination had been stopped.
fn send_to_a_frozen_destination(
    (source, link): (&Rank, Link),
    destination: &mut Other,
    request: u64,
    (way, point): (Way, Point),
) -> Duration {
    let slots = all_slots();
    let post = || source.send(link, key(request, 0), &slots).unwrap();
    if point.is_in_the_middle() {
        destination.receive(key(request, 0), &slots).unwrap();
    }
    let posted = (point != Point::Idle).then(post);
    posted.iter().for_each(|send| point.await_send(send));
    if posted.iter().any(|send| matches!(send.poll(), Some(Err(_)))) {
        next_goes_well((source, link), destination, request);
        return SLOW;
    }
    destination.process.stop();
    let stopped = Instant::now();
    let send = posted.unwrap_or_else(post);
    let outcome = send.wait(LONG).unwrap();
    let ended = stopped.elapsed();
    let late = ended >= PATIENCE + LATE; // so that the wire may have cut it off
    assert!(outcome.is_ok() || !point.is_after(), "{way:?} {point:?}: {outcome:?}");
    if let Err(error) = outcome {
        let stalled = error.errors.iter().all(|part| matches!(part.error, TransferError::Stalled { .. }));
        assert!(stalled || late, "{way:?} {point:?}: {error} after {ended:?}");
        assert!(point.is_in_the_middle() || ended + LATE > PATIENCE, "{way:?} {point:?}: ended after {ended:?}");
    }
    destination.process.go_on();
    let quiet = send.wait_quiet(LONG);
    assert!(quiet.is_ok() || point == Point::Quiet, "{way:?} {point:?}: {quiet:?}");
    println!("{way:?} {point:?}: ended after {ended:?}");
    // That the connection was cut under it keeps no slots from a destination that lives, unless UCX has puts in a socket.
    if point.is_in_the_middle() && way != Way::Tcp {
        assert_eq!(destination.quiet(key(request, 0), LONG), Ok(()), "{way:?} {point:?}");
    }
    next_goes_well((source, link), destination, request);
    ended
}

/// Tries the request again until it has gone well.
fn next_goes_well((source, link): (&Rank, Link), destination: &mut Other, request: u64) {
    let (slots, deadline) = (all_slots(), Instant::now() + LONG);
    for attempt in 1.. {
        assert!(Instant::now() < deadline, "nothing moves any more");
        if destination.receive(key(request, attempt), &slots).is_err() {
            continue;
        }
        let Ok(send) = source.send(link, key(request, attempt), &slots) else { continue };
        if send.wait(LONG).unwrap().is_ok() {
            assert_eq!(destination.outcome(key(request, attempt)), Ok(()));
            break;
        }
    }
}

/// The destination scatters what comes through its inbox itself: it gives a request up in the middle without a source that is
/// frozen, and uses the slots again.
#[test]
fn what_comes_through_the_inbox_is_given_up_under_a_frozen_source() {
    for way in [Way::Landing, Way::Staged] {
        let (mut source, destination, link) = with_source(way, LONG);
        let slots = all_slots();
        let mut points = [Point::FirstByte, Point::Middle].into_iter().cycle();
        let mut attempts = 0..;
        let mut give_up = || {
            let (point, key) = (points.next().unwrap(), key(1, attempts.next().unwrap()));
            destination.guard(&slots);
            let receive = destination.receive(link, key, &slots).unwrap();
            source.send(key, &slots, 7).unwrap();
            point.await_receive(&destination, &receive);
            source.process.stop();
            let asked = Instant::now();
            receive.cancel();
            let quiet = receive.wait_quiet(LONG);
            let took = asked.elapsed();
            let _quiet =
                quiet.unwrap_or_else(|error| panic!("{way:?}: {error}: {:?}", destination.engine.quarantine()));
            let whole = receive.poll().unwrap().is_ok();
            println!("{way:?} {point:?}: quiet {took:?} after the cancel, whole {whole}");
            destination.guard(&slots);
            destination.watch(&slots, Duration::from_millis(50));
            source.process.go_on();
            destination.watch(&slots, Duration::from_millis(200));
            let sent = source.outcome(key);
            assert_eq!(sent.is_ok(), whole, "{way:?}: {sent:?}");
            source.quiet(key, LONG).unwrap();
            (took, !whole)
        };
        for _ in 0..4 {
            in_time(|| {
                let mut cut_off = false;
                within(Duration::from_secs(1), || {
                    let took;
                    (took, cut_off) = give_up();
                    took
                });
                cut_off
            });
        }
        assert!(destination.engine.quarantine().is_empty());
        let receive = destination.receive(link, key(2, 0), &slots).unwrap();
        source.send(key(2, 0), &slots, 9).unwrap();
        receive.wait(LONG).unwrap().unwrap();
        assert!(destination.holds(&slots, 9), "{way:?}");
    }
}
