//! What may be written late, by which way, and who can end it.

use super::*;

/// The serials that are to be cut off here.
fn revoked(actions: &[Action]) -> Vec<Serial> {
    let serial = |action: &Action| match action {
        Action::Revoke { epoch: SOURCE, serial } => Some(*serial),
        _ => None,
    };
    actions.iter().filter_map(serial).collect()
}

#[test]
fn what_comes_through_the_inbox_only_is_given_up_without_the_source() {
    let now = Instant::now();
    let serial = about(7, 0).serial;
    let (mut source, mut destination, put) = moving(now);
    // The wire says so of the only write, and the source promises it for all.
    let promise = said(&source.put_takes_inbox(put));
    assert_eq!(promise, [Message::Moved(Moved { about: about(7, 0), bytes: 0, inbox: true })]);
    assert!(source.put_takes_inbox(put).is_empty(), "once is enough");
    assert!(revoked(&destination.heard(now, SOURCE, promise[0].clone())).is_empty());
    let actions = destination.cancel_receive(now, key(7));
    assert_eq!(revoked(&actions), [serial]);
    assert_eq!(said(&actions), [Message::Cancel(about(7, 0))], "it is told to stop, and not waited for");
    assert!(!is_quiet(&actions), "the wire may be writing");
    assert!(is_quiet(&destination.revoked(SOURCE, serial)));
    assert_eq!(destination.next_deadline(), None);
    assert!(destination.revoked(SOURCE, serial).is_empty());
    // What it says later is answered, and changes nothing.
    let done =
        Done { about: about(7, 0), bytes: BYTES, plan: want(7, 0).plan, carried: vec![], note: vec![], checks: vec![] };
    let refused = Message::Refused(Refused { about: about(7, 0), reason: Refusal::Cancelled });
    assert_eq!(said(&destination.heard(now, SOURCE, Message::Done(done))), [refused]);
    // A promise that comes after the end is as good.
    let (_, mut destination, _) = moving(now);
    assert!(revoked(&destination.cancel_receive(now, key(7))).is_empty(), "it may be written by the source itself");
    assert_eq!(revoked(&destination.heard(now, SOURCE, promise[0].clone())), [serial]);
    // So is one of a source that was lost with something on its way.
    let (_, mut destination, _) = moving(now);
    destination.lost(now, SOURCE, Status::ERR_CONNECTION_RESET);
    let (about, reason) = (about(7, 0), Refusal::Cancelled);
    let stopped = |late| Message::Stopped(Stopped { about, reason, late });
    assert!(revoked(&destination.heard(now, SOURCE, stopped(Late::Anything))).is_empty());
    assert!(destination.quarantine()[0].unsettled);
    let (_, mut destination, _) = moving(now);
    destination.cancel_receive(now, key(7));
    assert_eq!(revoked(&destination.heard(now, SOURCE, stopped(Late::Inbox))), [serial]);
    assert!(is_quiet(&destination.revoked(SOURCE, serial)));
}

#[test]
fn nothing_is_promised_while_a_part_may_take_another_way_and_what_is_promised_binds_the_rest() {
    let now = Instant::now();
    let begun = || {
        let mut source = connected(now, Side::Source);
        source.heard(now, DESTINATION, Message::Want(want(7, 0)));
        source.send(now, ticket(7), maps(), 0..32).unwrap();
        source
    };
    // The write of a part, and whether it must take the inbox.
    let push = |source: &mut Core, tokens| {
        let part = PartSpec { tokens, ..PartSpec::default() };
        let (_, actions) = source.push(now, ticket(7), part, true).unwrap();
        let put = actions.iter().find_map(|action| match action {
            Action::Put { put, inbox_only, .. } => Some((*put, *inbox_only)),
            _ => None,
        });
        put.unwrap()
    };
    let mut source = begun();
    let (first, second) = (push(&mut source, 0..16), push(&mut source, 16..32));
    assert!(source.put_takes_inbox(second.0).is_empty(), "the first may be written by the source itself");
    assert!(!source.put_takes_inbox(first.0).is_empty());
    let mut source = begun();
    let first = push(&mut source, 0..16);
    assert!(!source.put_takes_inbox(first.0).is_empty());
    let second = push(&mut source, 16..32);
    assert_eq!((first.1, second.1), (false, true));
    let mut source = begun();
    let first = push(&mut source, 0..16);
    let late = PutError::Endpoint { source: Status::ERR_CONNECTION_RESET, settled: false };
    source.put_done(now, first.0, Err(late));
    assert!(source.put_takes_inbox(first.0).is_empty(), "it has ended");
}

#[test]
fn what_a_source_has_left_on_its_way_is_told_by_the_way_it_took() {
    let now = Instant::now();
    let endings = [
        (false, true, Late::Nothing), // copied by the source itself, and over
        (true, false, Late::Inbox),
        (false, false, Late::Anything),
    ];
    for (takes_inbox, settled, expected) in endings {
        let (mut source, _, put) = moving(now);
        if takes_inbox {
            source.put_takes_inbox(put);
        }
        source.lost(now, DESTINATION, Status::ERR_CONNECTION_RESET);
        source.put_done(now, put, Err(PutError::Endpoint { source: Status::ERR_CANCELED, settled }));
        let actions = source.heard(now, DESTINATION, Message::Cancel(about(7, 0)));
        let (about, reason) = (about(7, 0), Refusal::Cancelled);
        assert_eq!(said(&actions), [Message::Stopped(Stopped { about, reason, late: expected })]);
    }
}

#[test]
fn a_source_that_stops_answers_for_its_writes_until_they_have_ended() {
    let now = Instant::now();
    let broken = PutError::Endpoint { source: Status::ERR_CANCELED, settled: false };
    for (ending, expected) in [(PutError::Cancelled, Late::Nothing), (broken, Late::Anything)] {
        let (mut source, mut destination, put) = moving(now);
        let stops = source.stop(now);
        assert!(matches!(failure(&stops), TransferError::Stopped) && !is_quiet(&stops), "{stops:?}");
        assert!(stops.iter().any(|action| matches!(action, Action::CancelPut { put: p } if *p == put)), "{stops:?}");
        let bye = said(&stops);
        assert_eq!(bye, [Message::Bye(Bye { call: OWN_CALL, settled: false })]);
        // Another source's goodbye may have come first, so that this one is still asked.
        let cancel = said(&destination.cancel_receive(now, key(7)));
        assert!(said(&source.heard(now, DESTINATION, cancel[0].clone())).is_empty(), "it is writing");
        let actions = source.put_done(now, put, Err(ending));
        let (about, reason) = (about(7, 0), Refusal::Failed);
        let stopped = said(&actions);
        assert_eq!(stopped, [Message::Stopped(Stopped { about, reason, late: expected })]);
        assert!(is_quiet(&actions), "its own slots");
        destination.heard(now, SOURCE, Message::Bye(Bye { call: CALL, settled: false }));
        assert_eq!(is_quiet(&destination.heard(now, SOURCE, stopped[0].clone())), expected == Late::Nothing);
    }
}

#[test]
fn a_write_that_sees_its_connection_fail_loses_the_peer() {
    let now = Instant::now();
    for settled in [true, false] {
        let (mut source, _, put) = moving(now);
        let status = Status::ERR_CONNECTION_RESET;
        let actions = source.put_done(now, put, Err(PutError::Endpoint { source: status, settled }));
        assert!(matches!(failure(&actions), TransferError::Lost { source, .. } if *source == status), "{actions:?}");
    }
}

#[test]
fn what_a_failed_connection_left_on_its_way_is_never_said_to_be_settled() {
    let now = Instant::now();
    let (mut source, _, put) = moving(now);
    let actions = source.lost(now, DESTINATION, Status::ERR_CONNECTION_RESET);
    assert!(matches!(failure(&actions), TransferError::Lost { .. }) && !is_quiet(&actions));
    let broken = PutError::Endpoint { source: Status::ERR_CANCELED, settled: false };
    assert!(is_quiet(&source.put_done(now, put, Err(broken))), "nothing reads the slots any more");
    // Whenever the destination asks, over whatever connection.
    let unsettled = |actions: &[Action]| {
        let about = about(7, 0);
        said(actions).contains(&Message::Stopped(Stopped { about, reason: Refusal::Cancelled, late: Late::Anything }))
    };
    assert!(unsettled(&source.heard(now, DESTINATION, Message::Cancel(about(7, 0)))));
    let actions = source.disconnect(now, LINK).unwrap();
    assert_eq!(said(&actions), [Message::Bye(Bye { call: OWN_CALL, settled: false })]);
    source.connect(now, LINK, Side::Source, 0, BTreeMap::from([(DESTINATION, peer())]));
    assert!(unsettled(&source.heard(now, DESTINATION, Message::Cancel(about(7, 0)))));
}
