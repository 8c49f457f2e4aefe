//! Two state machines that talk through a script: what each event does; and messages that nobody sent, in any order.

use std::collections::BTreeMap;
use std::sync::LazyLock;
use std::time::{Duration, Instant};

use kvferry_layout::{
    Digest, Dtype, GroupKind, GroupSpec, Layer, LayerMask, RankSpec, Role, RowSpec, Slot, block_major,
};
use kvferry_match::{BlockMap, Side, assign};
use kvferry_wire::{PutError, Route, RouteReason, Status, TransferStats};
use proptest::prelude::*;

use super::handshake::EARLY_HELLOS_MAX;
use super::{Action, Core, Handle, Introduction, Limits, LinkId, PartSpec, Peer, PutId, Ticket};
use crate::error::{ConnectError, PeerName, PostError, RequestError, TransferError};
use crate::message::{
    About, Bye, CallId, Done, Hello, Late, Message, Moved, Refusal, Refused, RequestKey, Serial, Stopped, Want, Welcome,
};

const PATIENCE: Duration = Duration::from_secs(10);
const RESEND: Duration = Duration::from_millis(500);
const LINK: LinkId = LinkId(0);
const SOURCE: u64 = 100;
const DESTINATION: u64 = 200;
const BYTES: u64 = 2 * 1024;

/// The call that the other side connects with, and this side's.
const CALL: CallId = CallId(77);
const OWN_CALL: CallId = CallId(0);

/// A rank of the other instance, with a template of one key row of 1 KiB a slot.
fn peer() -> Peer {
    static PEER: LazyLock<Peer> = LazyLock::new(make_peer);
    PEER.clone()
}

fn make_peer() -> Peer {
    let key = RowSpec::single(Role::Key, Dtype::U8, LayerMask::all(1), 1, 64).unwrap();
    let kind = GroupKind::paged(16);
    let groups = vec![GroupSpec { kind, slot_count: 4, pools: vec![vec![key]] }];
    let spec = RankSpec { hidden_layers: 1, layers: vec![Layer(0)], tp_rank: 0, tp_size: 1, groups };
    let table = block_major(&spec).unwrap();
    let assignment = &assign([(0, &table)], [(0, &table)]).unwrap()[0];
    let (rows, template) = (assignment.rows(0), assignment.template(0).unwrap());
    Peer { instance: String::new(), rank: 0, born: 0, rows, template, assignment: None }
}

fn new_core() -> Core {
    let mut core = Core::new(Limits { patience: PATIENCE, resend: RESEND, requests_max: 1 << 13, verify: false });
    core.introduce(Introduction { own_layers: 0..1, ..Introduction::default() });
    core
}

fn key(request: u64) -> RequestKey {
    RequestKey { request, attempt: 0 }
}

fn about(request: u64, serial: u64) -> About {
    About { key: key(request), serial: Serial(serial) }
}

fn ticket(request: u64) -> Ticket {
    Ticket { link: LINK, key: key(request) }
}

fn maps() -> Vec<BlockMap> {
    vec![BlockMap::new(0, vec![Some(Slot(1)), Some(Slot(2))])]
}

fn want(request: u64, serial: u64) -> Want {
    let expectation = peer().template.expectation(&maps(), 0..32).unwrap();
    let (bytes, plan) = (expectation.bytes, expectation.digest);
    Want { about: about(request, serial), tokens: 0..32, bytes, plan, block_maps: maps() }
}

fn hello(source: bool, call: CallId, answers: Option<CallId>) -> Hello {
    let template = peer().template.digest();
    let (instance, card) = (String::new(), vec![1]);
    Hello { call, answers, source, instance, rank: 0, born: 9, template, card }
}

/// The answer to a call, from a rank that has wanted nothing so far.
fn welcome(call: CallId) -> Message {
    Message::Welcome(Welcome { call, floor: 0 })
}

fn other(side: Side) -> u64 {
    if side == Side::Source { DESTINATION } else { SOURCE }
}

fn connecting(now: Instant, side: Side) -> Core {
    let mut core = new_core();
    core.connect(now, LINK, side, 0, BTreeMap::from([(other(side), peer())]));
    core
}

/// A connected side of a pair.
fn connected(now: Instant, side: Side) -> Core {
    let mut core = connecting(now, side);
    let greeting = hello(side != Side::Source, CALL, None);
    assert_eq!(said(&core.heard(now, other(side), Message::Hello(greeting))), [welcome(CALL)]);
    let actions = core.heard(now, other(side), welcome(OWN_CALL));
    assert!(matches!(actions[..], [Action::Connected { link: LINK }]), "{actions:?}");
    core
}

/// A send of the whole request.
fn send(core: &mut Core, now: Instant, request: u64) -> Result<Vec<Action>, PostError> {
    let mut actions = core.send(now, ticket(request), maps(), 0..32)?;
    let whole = PartSpec { tokens: 0..32, ..PartSpec::default() };
    actions.extend(core.push(now, ticket(request), whole, true).map_or_else(|_| Vec::new(), |(_, pushed)| pushed));
    Ok(actions)
}

fn receive(core: &mut Core, now: Instant, request: u64) -> Result<Vec<Action>, PostError> {
    core.receive(now, key(request), &[LINK], &maps(), &(0..32))
}

fn said(actions: &[Action]) -> Vec<Message> {
    let said = actions.iter().filter_map(|action| match action {
        Action::Say { message, .. } => Some(message.clone()),
        _ => None,
    });
    said.collect()
}

fn put(actions: &[Action]) -> PutId {
    let put = actions.iter().find_map(|action| match action {
        Action::Put { epoch: DESTINATION, put, plan, .. } if plan.bytes() == BYTES => Some(*put),
        _ => None,
    });
    put.unwrap_or_else(|| panic!("{actions:?}"))
}

/// The error of a request that has ended with one.
fn failure(actions: &[Action]) -> &TransferError {
    let outcome = actions.iter().find_map(|action| match action {
        Action::Sent { outcome: Err(error), .. } | Action::Received { outcome: Err(error), .. } => Some(error),
        _ => None,
    });
    match outcome {
        Some(RequestError { errors, .. }) if errors.len() == 1 => &errors[0].error,
        _ => panic!("{actions:?}"),
    }
}

fn is_quiet(actions: &[Action]) -> bool {
    actions.iter().any(|action| matches!(action, Action::Quiet { .. }))
}

fn stats() -> TransferStats {
    let (route, reason) = (Route::Direct, RouteReason::TargetMapped);
    TransferStats { bytes: BYTES, runs: 2, elapsed: Duration::from_millis(3), route, reason }
}

/// A source with a write in flight, as asked for by a real destination.
fn moving(now: Instant) -> (Core, Core, PutId) {
    let (mut source, mut destination) = (connected(now, Side::Source), connected(now, Side::Destination));
    let wants = said(&receive(&mut destination, now, 7).unwrap());
    let got = said(&source.heard(now, DESTINATION, wants[0].clone()));
    assert_eq!(got, [Message::Got(about(7, 0))], "no send is posted yet");
    assert!(destination.heard(now, SOURCE, got[0].clone()).is_empty());
    let put = put(&send(&mut source, now, 7).unwrap());
    (source, destination, put)
}

#[test]
fn a_request_goes_through_want_put_done_and_acknowledgement() {
    let now = Instant::now();
    let (mut source, mut destination, put) = moving(now);
    let moved = said(&source.put_progress(now, put, 1024));
    let actions = destination.heard(now, SOURCE, moved[0].clone());
    assert!(matches!(actions[..], [Action::Progress { moved: 1024, .. }]), "{actions:?}");
    // The wire was told to say the report the moment that the write ends.
    assert!(said(&source.put_done(now, put, Ok(stats()))).is_empty());
    let plan = want(7, 0).plan;
    let done =
        Done { about: about(7, 0), bytes: BYTES, plan, carried: vec![stats()], note: vec![3], checks: Vec::new() };
    let actions = destination.heard(now + Duration::from_secs(1), SOURCE, Message::Done(done.clone()));
    let Some(Action::Received { outcome: Ok(received), .. }) = actions.get(2) else { panic!("{actions:?}") };
    assert_eq!((received[0].bytes, received[0].elapsed), (BYTES, Duration::from_secs(1)));
    assert_eq!((&received[0].carried, received[0].times.total), (&vec![stats()], Duration::from_secs(1)));
    assert!(is_quiet(&actions));
    let again = said(&destination.heard(now, SOURCE, Message::Done(done)));
    assert_eq!(again, [Message::DoneAck(about(7, 0))], "a report that is heard twice is answered twice");
    let actions = source.heard(now, DESTINATION, again[0].clone());
    let Some(Action::Sent { outcome: Ok(sent), .. }) = actions.first() else { panic!("{actions:?}") };
    assert_eq!((sent[0].bytes, sent[0].runs, sent[0].elapsed), (BYTES, 2, Duration::from_millis(3)));
    assert_eq!(sent[0].carried, [stats()], "both ends tell the same");
    assert!(is_quiet(&actions));
    assert_eq!((source.next_deadline(), destination.next_deadline()), (None, None), "nothing is left to wait for");
    assert!(matches!(receive(&mut destination, now, 7), Err(PostError::Over(_))), "an attempt ends once");
    assert!(matches!(send(&mut source, now, 7), Err(PostError::Over(_))));
}

#[test]
fn what_is_not_answered_is_said_again_less_and_less_often() {
    let now = Instant::now();
    let mut destination = connected(now, Side::Destination);
    receive(&mut destination, now, 7).unwrap();
    let mut times = Vec::new();
    for tick in 1..90 {
        let then = now + tick * Duration::from_millis(100);
        times.extend(said(&destination.tick(then)).iter().map(|message| {
            assert!(matches!(message, Message::Want(_)), "{message:?}");
            tick
        }));
    }
    assert_eq!(times, [5, 15, 35, 75]);
    destination.heard(now, SOURCE, Message::Got(about(7, 0)));
    assert_eq!(destination.next_deadline(), Some(now + PATIENCE), "only progress is waited for now");
}

#[test]
fn a_link_is_up_when_each_side_has_answered_the_others_call() {
    let now = Instant::now();
    // A greeting ahead of the call is answered with it; it does not stand for the answer to this side's own.
    let mut early = new_core();
    assert!(early.heard(now, DESTINATION, Message::Hello(hello(false, CALL, None))).is_empty());
    let actions = early.connect(now, LINK, Side::Source, 0, BTreeMap::from([(DESTINATION, peer())]));
    assert!(
        matches!(said(&actions)[..], [Message::Hello(_), Message::Welcome(Welcome { call: CALL, .. })]),
        "{actions:?}"
    );
    assert!(matches!(send(&mut early, now, 1), Err(PostError::NoLink)), "a link that is not up takes no request");
    // An answer to another call is not one.
    assert!(early.heard(now, DESTINATION, welcome(CallId(5))).is_empty());
    let actions = early.heard(now, DESTINATION, welcome(OWN_CALL));
    assert!(matches!(actions[..], [Action::Connected { link: LINK }]), "{actions:?}");
}

#[test]
fn a_peer_that_matched_otherwise_is_refused() {
    let now = Instant::now();
    let of_peer = hello(false, CALL, None);
    for hello in [Hello { rank: 1, ..of_peer.clone() }, Hello { template: Digest(1), ..of_peer }] {
        let mut core = connecting(now, Side::Source);
        let actions = core.heard(now, DESTINATION, Message::Hello(hello));
        let Some(Action::NotConnected { error, .. }) = actions.last() else { panic!("{actions:?}") };
        assert!(matches!(error, ConnectError::PlansDiffer { .. }), "{error:?}");
        assert_eq!(said(&actions), [Message::Bye(Bye { call: OWN_CALL, settled: true })]);
        assert!(core.known(DESTINATION).is_none() && core.next_deadline().is_none());
    }
}

#[test]
fn early_greetings_are_bounded_and_do_not_outlive_the_patience_of_who_sent_them() {
    let now = Instant::now();
    let mut core = new_core();
    let hello = || Message::Hello(hello(true, CALL, None));
    for epoch in 0..2 * EARLY_HELLOS_MAX as u64 {
        core.heard(now + Duration::from_nanos(epoch), 1000 + epoch, hello());
    }
    assert_eq!(core.early_hellos.len(), EARLY_HELLOS_MAX);
    assert!(core.early_hellos.contains_key(&(999 + 2 * EARLY_HELLOS_MAX as u64)), "the latest is kept");
    core.heard(now + 2 * PATIENCE, 5, hello());
    assert_eq!(core.early_hellos.len(), 1);
    core.heard(now + 2 * PATIENCE, 5, Message::Bye(Bye { call: CALL, settled: true }));
    assert_eq!(core.early_hellos.len(), 0);
}

#[test]
fn a_peer_that_is_silent_or_dies_while_connecting_is_named() {
    let now = Instant::now();
    let mut silent = connecting(now, Side::Source);
    for tick in 1..100 {
        let said = said(&silent.tick(now + tick * PATIENCE / 100));
        assert!(said.iter().all(|message| matches!(message, Message::Hello(_))), "{said:?}");
    }
    let actions = silent.tick(now + PATIENCE);
    let Some(Action::NotConnected { error, .. }) = actions.last() else { panic!("{actions:?}") };
    assert!(matches!(error, ConnectError::NoAnswer { waited: PATIENCE, .. }), "{error}");
    let mut dies = connecting(now, Side::Source);
    let actions = dies.lost(now, DESTINATION, Status::ERR_CONNECTION_RESET);
    let Some(Action::NotConnected { error, .. }) = actions.last() else { panic!("{actions:?}") };
    let named = PeerName { side: Side::Destination, rank: 0 };
    assert!(matches!(error, ConnectError::Lost { peer, .. } if *peer == named), "{error}");
}

#[test]
fn a_source_that_reports_other_bytes_or_another_plan_is_not_believed() {
    let now = Instant::now();
    let Want { bytes, plan, .. } = want(7, 0);
    for (bytes, plan) in [(bytes - 1, plan), (bytes, Digest(0))] {
        let (_, mut destination, _) = moving(now);
        let done = Done { about: about(7, 0), bytes, plan, carried: Vec::new(), note: Vec::new(), checks: Vec::new() };
        let actions = destination.heard(now, SOURCE, Message::Done(done));
        assert!(matches!(failure(&actions), TransferError::PlansDiffer { expected: BYTES, .. }));
        assert!(is_quiet(&actions), "the source writes no more, whatever it has written");
        let reason = Refusal::PlansDiffer;
        assert_eq!(said(&actions), [Message::Refused(Refused { about: about(7, 0), reason })]);
    }
}

#[test]
fn a_want_with_another_plan_is_refused_before_a_byte_moves() {
    let now = Instant::now();
    let mut source = connected(now, Side::Source);
    source.heard(now, DESTINATION, Message::Want(Want { plan: Digest(9), ..want(7, 0) }));
    let actions = send(&mut source, now, 7).unwrap();
    assert!(!actions.iter().any(|action| matches!(action, Action::Put { .. })), "{actions:?}");
    let (about, reason) = (about(7, 0), Refusal::PlansDiffer);
    assert_eq!(said(&actions), [Message::Stopped(Stopped { about, reason, late: Late::Nothing })]);
    assert!(matches!(failure(&actions), TransferError::PlansDiffer { .. }));
}

#[test]
fn only_new_bytes_buy_patience() {
    let now = Instant::now();
    let mut destination = connected(now, Side::Destination);
    receive(&mut destination, now, 7).unwrap();
    let moved = |bytes| Message::Moved(Moved { about: about(7, 0), bytes, inbox: false });
    let second = Duration::from_secs(1);
    assert_eq!(destination.heard(now + second, SOURCE, moved(10)).len(), 1);
    assert_eq!(destination.heard(now + 5 * second, SOURCE, moved(10)).len(), 0);
    assert_eq!(destination.next_deadline(), Some(now + second + PATIENCE));
    // A claim beyond the request is cut to it, and buys nothing twice.
    assert_eq!(destination.heard(now + 6 * second, SOURCE, moved(u64::MAX)).len(), 1);
    assert_eq!(destination.heard(now + 7 * second, SOURCE, moved(u64::MAX)).len(), 0);
    let actions = destination.tick(now + 6 * second + PATIENCE);
    assert!(matches!(failure(&actions), TransferError::Stalled { moved: BYTES, .. }));
    assert!(!is_quiet(&actions), "the source may still write");
    assert_eq!(said(&actions), [Message::Cancel(about(7, 0))]);
}

#[test]
fn a_write_that_stalls_ends_its_send_at_once_and_frees_the_slots_when_it_ends() {
    let now = Instant::now();
    let (mut source, mut destination, put) = moving(now);
    let actions = source.tick(now + PATIENCE);
    assert!(matches!(failure(&actions), TransferError::Stalled { expected: BYTES, .. }));
    assert!(actions.iter().any(|action| matches!(action, Action::CancelPut { put: p } if *p == put)), "{actions:?}");
    assert!(!is_quiet(&actions) && said(&actions).is_empty(), "its bytes are still being read");
    assert_eq!(source.under_way(LINK), Some(key(7)));
    let actions = source.put_done(now + PATIENCE, put, Err(PutError::Cancelled));
    assert!(is_quiet(&actions));
    let (about, reason) = (about(7, 0), Refusal::Failed);
    let stopped = Message::Stopped(Stopped { about, reason, late: Late::Nothing });
    assert_eq!(said(&actions), std::slice::from_ref(&stopped));
    // The destination gets its slots back by this word, and the source is told that it was heard.
    let actions = destination.heard(now, SOURCE, stopped);
    assert!(is_quiet(&actions) && matches!(failure(&actions), TransferError::Refused { .. }), "{actions:?}");
    assert_eq!(said(&actions), [Message::StopAck(about)]);
    source.heard(now, DESTINATION, Message::StopAck(about));
    assert_eq!((source.next_deadline(), source.under_way(LINK)), (None, None));
}

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

#[test]
fn the_first_source_that_fails_ends_the_receive_and_the_others_are_asked_to_stop() {
    let now = Instant::now();
    let mut destination = new_core();
    // Epochs descend as ranks ascend.
    let peers = [(90, 0), (80, 1), (70, 2)].map(|(epoch, rank)| (epoch, Peer { rank, ..peer() }));
    destination.connect(now, LINK, Side::Destination, 0, BTreeMap::from(peers));
    for (epoch, rank, call) in [(70, 2, 0), (80, 1, 1), (90, 0, 2)] {
        destination.heard(now, epoch, Message::Hello(Hello { rank, ..hello(true, CALL, None) }));
        destination.heard(now, epoch, welcome(CallId(call)));
    }
    receive(&mut destination, now, 7).unwrap();
    let actions = destination.lost(now, 80, Status::ERR_CONNECTION_RESET);
    let lost = PeerName { side: Side::Source, rank: 1 };
    assert!(matches!(failure(&actions), TransferError::Lost { peer, .. } if *peer == lost), "{actions:?}");
    let cancels = said(&actions).iter().filter(|message| matches!(message, Message::Cancel(_))).count();
    assert_eq!(cancels, 2, "the lost one cannot be asked");
    let exposed = |core: &Core| core.quarantine().iter().map(|entry| entry.peer.rank).collect::<Vec<_>>();
    assert_eq!(exposed(&destination), [2, 1, 0]);
    let stopped = |serial| {
        let (about, reason) = (about(7, serial), Refusal::Cancelled);
        Message::Stopped(Stopped { about, reason, late: Late::Nothing })
    };
    assert!(!is_quiet(&destination.heard(now, 70, stopped(0))));
    assert!(!is_quiet(&destination.heard(now, 90, stopped(2))));
    assert_eq!(exposed(&destination), [1]);
    // Of the lost one only its death is a proof.
    assert!(!is_quiet(&destination.tick(now + 100 * PATIENCE)));
    assert!(is_quiet(&destination.died(now, 80)));
    assert!(exposed(&destination).is_empty());
}

#[test]
fn a_receive_that_is_given_up_before_anybody_was_asked_is_quiet_at_once() {
    let now = Instant::now();
    let mut destination = connected(now, Side::Destination);
    let peers = BTreeMap::from([(101, peer())]);
    destination.connect(now, LinkId(1), Side::Destination, 0, peers);
    destination.heard(now, 101, Message::Hello(hello(true, CALL, None)));
    destination.heard(now, 101, welcome(CallId(1)));
    let links = [LINK, LinkId(1)];
    let actions = destination.receive(now, key(7), &links, &maps(), &(0..32)).unwrap();
    assert!(actions.is_empty(), "nobody has announced to send it: {actions:?}");
    let actions = destination.cancel_receive(now, key(7));
    assert!(is_quiet(&actions) && said(&actions).is_empty(), "{actions:?}");
    // A source that comes later is let go.
    assert_eq!(said(&destination.heard(now, SOURCE, Message::Announce(key(7)))), [Message::Release(key(7))]);
    // Nobody comes for another.
    destination.receive(now, key(8), &links, &maps(), &(0..32)).unwrap();
    let actions = destination.tick(now + PATIENCE);
    assert!(matches!(failure(&actions), TransferError::NobodySends { .. }) && is_quiet(&actions), "{actions:?}");
}

#[test]
fn sums_that_differ_fail_the_request() {
    let now = Instant::now();
    for same in [true, false] {
        let mut destination = connected(now, Side::Destination);
        destination.limits.verify = true;
        receive(&mut destination, now, 7).unwrap();
        let Want { about, bytes, plan, .. } = want(7, 0);
        let done =
            Message::Done(Done { about, bytes, plan, carried: Vec::new(), note: Vec::new(), checks: Vec::new() });
        let actions = destination.heard(now, SOURCE, done.clone());
        assert!(matches!(actions[..], [Action::Verify { epoch: SOURCE, .. }]), "{actions:?}");
        assert!(destination.heard(now, SOURCE, done).is_empty(), "it is being looked at");
        let actions = destination.verified(now, SOURCE, about, same);
        assert!(is_quiet(&actions));
        if same {
            assert_eq!(said(&actions), [Message::DoneAck(about)]);
        } else {
            assert!(matches!(failure(&actions), TransferError::Corrupted { .. }));
        }
    }
}

#[test]
fn a_peer_cannot_post_without_end() {
    let now = Instant::now();
    let mut source = connected(now, Side::Source);
    let small = |serial| Message::Want(Want { bytes: 1, block_maps: Vec::new(), ..want(serial, serial) });
    for serial in 0..1 << 16 {
        assert_eq!(said(&source.heard(now, DESTINATION, small(serial))), [Message::Got(about(serial, serial))]);
    }
    let about = about(1 << 16, 1 << 16);
    let refused = Message::Stopped(Stopped { about, reason: Refusal::TooMany, late: Late::Nothing });
    assert_eq!(said(&source.heard(now, DESTINATION, small(1 << 16))), [refused]);
    let mut destination = connected(now, Side::Destination);
    for request in 0..1 << 13 {
        receive(&mut destination, now, request).unwrap();
    }
    assert!(matches!(receive(&mut destination, now, 1 << 13), Err(PostError::TooMany { requests_max: 8192 })));
}

/// Something that happens to one of the two sides.
#[derive(Clone, Debug)]
enum Step {
    Receive(u64),
    Send(u64),
    Cancel(bool, u64),
    /// Delivers a message that waits on the way to the source or the destination.
    Deliver(bool, usize),
    /// Ends a write.
    Finish(usize, bool),
    Wait(u64),
    /// A message that nobody sent.
    Forge(bool, Message),
}

fn forged() -> impl Strategy<Value = Message> {
    let about = (0..4u64, 0..6u64).prop_map(|(request, serial)| about(request, serial));
    let key = (0..4u64).prop_map(key);
    let call = prop_oneof![Just(CALL), Just(OWN_CALL), any::<u64>().prop_map(CallId)];
    prop_oneof![
        (any::<bool>(), call.clone(), any::<u32>())
            .prop_map(|(source, call, rank)| { Message::Hello(Hello { rank: rank % 2, ..hello(source, call, None) }) }),
        (call.clone(), any::<bool>()).prop_map(|(call, settled)| Message::Bye(Bye { call, settled })),
        (call, any::<u64>()).prop_map(|(call, floor)| Message::Welcome(Welcome { call, floor })),
        (about.clone(), any::<u64>(), any::<bool>()).prop_map(|(about, bytes, inbox)| Message::Moved(Moved {
            about,
            bytes,
            inbox
        })),
        (about.clone(), any::<u64>()).prop_map(|(about, bytes)| {
            Message::Done(Done {
                about,
                bytes,
                plan: Digest(0),
                carried: Vec::new(),
                note: vec![1],
                checks: Vec::new(),
            })
        }),
        about.clone().prop_map(Message::DoneAck),
        about.clone().prop_map(Message::Got),
        about.clone().prop_map(Message::Cancel),
        about.clone().prop_map(Message::StopAck),
        about.clone().prop_map(|about| Message::Refused(Refused { about, reason: Refusal::Failed })),
        (about.clone(), prop_oneof![Just(Late::Nothing), Just(Late::Inbox), Just(Late::Anything)])
            .prop_map(|(about, late)| { Message::Stopped(Stopped { about, reason: Refusal::Failed, late }) }),
        key.clone().prop_map(Message::Announce),
        key.prop_map(Message::Release),
        (about, any::<u64>(), any::<u64>()).prop_map(|(about, end, bytes)| {
            Message::Want(Want { about, tokens: 0..end, bytes, plan: Digest(0), block_maps: maps() })
        }),
    ]
}

fn step() -> impl Strategy<Value = Step> {
    let place = 0..16usize;
    prop_oneof![
        3 => (0..4u64).prop_map(Step::Receive),
        3 => (0..4u64).prop_map(Step::Send),
        1 => (any::<bool>(), 0..4u64).prop_map(|(side, request)| Step::Cancel(side, request)),
        8 => (any::<bool>(), place.clone()).prop_map(|(to, place)| Step::Deliver(to, place)),
        4 => (place, any::<bool>()).prop_map(|(place, well)| Step::Finish(place, well)),
        2 => (0..6u64).prop_map(Step::Wait),
        3 => (any::<bool>(), forged()).prop_map(|(to, message)| Step::Forge(to, message)),
    ]
}

/// The two sides, what is on its way between them, and how often each request has ended.
struct World {
    now: Instant,
    sides: [Core; 2],
    on_the_way: [Vec<Message>; 2],
    puts: Vec<(PutId, Option<Message>)>,
    posted: BTreeMap<Handle, u32>,
    ended: BTreeMap<Handle, u32>,
    quiet: BTreeMap<Handle, u32>,
}

impl World {
    fn act(&mut self, side: usize, actions: Vec<Action>) {
        for action in actions {
            match action {
                Action::Say { message, .. } => self.on_the_way[1 - side].push(message),
                Action::Put { put, then, .. } => self.puts.push((put, then)),
                Action::Sent { ticket, .. } => *self.ended.entry(Handle::Send(ticket)).or_default() += 1,
                Action::Received { key, .. } => *self.ended.entry(Handle::Receive(key)).or_default() += 1,
                Action::Quiet { handle } => *self.quiet.entry(handle).or_default() += 1,
                _ => {}
            }
        }
    }

    fn step(&mut self, step: Step) {
        let now = self.now;
        match step {
            Step::Receive(request) => {
                if let Ok(actions) = receive(&mut self.sides[1], now, request) {
                    *self.posted.entry(Handle::Receive(key(request))).or_default() += 1;
                    self.act(1, actions);
                }
            }
            Step::Send(request) => {
                if let Ok(actions) = send(&mut self.sides[0], now, request) {
                    *self.posted.entry(Handle::Send(ticket(request))).or_default() += 1;
                    self.act(0, actions);
                }
            }
            Step::Cancel(true, request) => {
                let actions = self.sides[1].cancel_receive(now, key(request));
                self.act(1, actions);
            }
            Step::Cancel(false, request) => {
                let actions = self.sides[0].cancel_send(now, ticket(request));
                self.act(0, actions);
            }
            Step::Deliver(to, place) => {
                let side = usize::from(to);
                if !self.on_the_way[side].is_empty() {
                    let place = place % self.on_the_way[side].len();
                    let message = self.on_the_way[side].remove(place);
                    self.hear(side, message);
                }
            }
            Step::Finish(place, well) => {
                if !self.puts.is_empty() {
                    let (put, then) = self.puts.remove(place % self.puts.len());
                    self.on_the_way[1].extend(then.filter(|_| well));
                    let result = if well { Ok(stats()) } else { Err(PutError::Cancelled) };
                    let actions = self.sides[0].put_done(now, put, result);
                    self.act(0, actions);
                }
            }
            Step::Wait(seconds) => {
                self.now += Duration::from_secs(seconds);
                for side in 0..2 {
                    let actions = self.sides[side].tick(self.now);
                    self.act(side, actions);
                }
            }
            Step::Forge(to, message) => self.hear(usize::from(to), message),
        }
    }

    fn hear(&mut self, side: usize, message: Message) {
        let from = [DESTINATION, SOURCE][side];
        let actions = self.sides[side].heard(self.now, from, message);
        self.act(side, actions);
    }
}

proptest! {
    /// Whatever is said in whatever order, by whomever: nothing panics, each posted request ends exactly once, at the latest
    /// when its patience has run out, and its slots come back at most once, and not before.
    #[test]
    fn every_request_ends_once(steps in prop::collection::vec(step(), 0..80)) {
        let now = Instant::now();
        let sides = [connected(now, Side::Source), connected(now, Side::Destination)];
        let (posted, ended, quiet) = Default::default();
        let mut world = World { now, sides, on_the_way: [Vec::new(), Vec::new()], puts: Vec::new(), posted, ended, quiet };
        for step in steps {
            world.step(step);
            prop_assert!(world.quiet.keys().all(|handle| world.ended.contains_key(handle)));
        }
        world.step(Step::Wait(2 * PATIENCE.as_secs()));
        while !world.puts.is_empty() {
            world.step(Step::Finish(0, false));
        }
        world.step(Step::Wait(2 * PATIENCE.as_secs()));
        prop_assert_eq!(&world.posted, &world.ended);
        prop_assert!(world.quiet.values().all(|times| *times == 1));
    }
}
